"""Everything, small, on a CPU: python test_all.py [NAME ...]. Also collectable by pytest.

    python test_all.py --fixture FILE     # the comparison with the released code alone, on another such file

Numbers are compared with an independent way to get them: the released code's own (released_code.npz), brute
force, a recurrence for a convolution. Torture trials are forked from this process, of one thread.
"""

import argparse
import contextlib
import csv
import fcntl
import gc
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
import weakref
import zipfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import common
import delayed_add
import lm_shakespeare
import lm_wikitext
import predecessor
import recurrence
import report
import reverse
import sort
import stability
import trial

HERE = Path(__file__).resolve().parent
FIXTURE = HERE / "released_code.npz"
MODELS, ENCODINGS = list(common.LAYERS), common.ENCODINGS
Skip = unittest.SkipTest
torch.set_num_threads(1)
CUDA = torch.cuda.is_available()
torch.cuda.is_available = lambda: False  # all tests but those of CUDA are for a CPU, wherever they run


# ------------------------------------------------------------------------------------------------------------
# Helpers
# ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace():
    """A new working directory, removed afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def captured(command):
    """-> (exit code, stdout, stderr) of a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command()
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def cli(words, task=reverse.TASK):
    return captured(lambda: trial.main(task, report.show, shlex.split(words)))


def fork(words, limit=None, task=reverse.TASK):
    """The command line in a child process; `limit`: the largest file it may write."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open("child.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        code = trial.main(task, report.show, shlex.split(words))
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # noqa: BLE001 - a child must never return into the test run
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:  # whatever a full log does, the child must not return into the test run
            os._exit(code)


def wait(child):
    """The child's exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def args_of(words, task=reverse.TASK):
    """Completed args of a command line."""
    _, args, _ = trial.parse(task, shlex.split(words))
    trial.complete(task, args)
    return args


def data_of(words):
    return reverse.Reverse(args_of(words), torch.device("cpu"))


def close(got, wanted, tolerance):
    got, wanted = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, wanted))
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= tolerance, f"relative error {error:.3g} above {tolerance:.3g}"


def chi_square_is_clean(counts, expected):
    """Pearson's statistic below a bound that a fair draw passes with a probability of 1 - 3e-5."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    free = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    bound = free * (1 - 2 / (9 * free) + 4 * math.sqrt(2 / (9 * free))) ** 3  # Wilson-Hilferty
    assert statistic < bound, f"chi-square {statistic:.1f} with {free} degrees of freedom"


def assert_uniform(outcomes, cells):
    counts = Counter(outcomes)
    assert len(counts) == cells, f"{len(counts)} of {cells} outcomes"
    chi_square_is_clean(list(counts.values()), [counts.total() / cells] * cells)


def outcome(folder):
    """What must not depend on interruptions: weights, metrics, curve.csv but for its seconds."""
    folder = Path(folder)
    weights = torch.load(folder / "last.pt", weights_only=True)["model"]
    with open(folder / "curve.csv") as file:
        curve = [row[:4] for row in csv.reader(file)]
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return {k: v.numpy().tobytes() for k, v in weights.items()}, metrics, curve


# ------------------------------------------------------------------------------------------------------------
# The released code's numbers
# ------------------------------------------------------------------------------------------------------------

RNN_WEIGHTS = dict(w_ih="weight_ih_l0", w_hh="weight_hh_l0", b_ih="bias_ih_l0", b_hh="bias_hh_l0")
S4D_WEIGHTS = dict(in_proj_w="project.weight", in_proj_b="project.bias", mix_w="mix.weight", mix_b="mix.bias")
S4D_WEIGHTS |= dict(log_dt="log_dt", C="C", log_A_real="log_A_real", A_imag="A_imag", D="D")


def fixture_cases(path=FIXTURE):
    """{case: {name: tensor}}"""
    cases = {}
    with np.load(path) as file:
        for name in file.files:
            case, key = name.split("/")
            cases.setdefault(case, {})[key] = torch.from_numpy(file[name])
    assert cases, f"{path} holds no case"
    return cases


def fixture_model(case, numbers):
    """The suite's model with the weights of a case."""
    kind, encoding = case.split("-")
    (vocab, hidden), embed = numbers["readout_w"].shape, numbers["embedding"].shape[1]
    positions = numbers["tokens"].shape[1]
    model = common.Model(kind, encoding, vocab, embed, hidden, positions)
    names = RNN_WEIGHTS
    if kind == "s4d":
        names = S4D_WEIGHTS
        model.layer = common.S4D(numbers["in_proj_w"].shape[1], hidden, 2 * numbers["A_imag"].shape[1])
    state = {f"layer.{ours}": numbers[theirs] for theirs, ours in names.items()}
    state |= {"embedding.weight": numbers["embedding"]}
    state |= {"readout.weight": numbers["readout_w"], "readout.bias": numbers["readout_b"]}
    if "pe" in numbers:
        state["encoding.table"] = numbers["pe"]
    model.to(numbers["embedding"].dtype).load_state_dict(state)
    return model


def check_fixture(path):
    checked = []
    for case, numbers in fixture_cases(path).items():
        tolerance = 2e-5 if case.startswith("s4d") else 1e-9
        model, tokens = fixture_model(case, numbers), numbers["tokens"]
        length = tokens.shape[1] // 2
        close(model(tokens, slice(0, 2 * length)).transpose(0, 1), numbers["logits"], tolerance)
        episode = common.Episode(tokens, tokens[:, :length].flip(1), slice(length, 2 * length))
        loss, _ = common.loss_and_accuracy(model(tokens, episode.steps), episode)
        loss.backward()
        close(loss, numbers["loss"], tolerance)
        close(
            torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), numbers["grad_norm"], tolerance
        )
        if "grad_embedding" in numbers:
            close(model.embedding.weight.grad, numbers["grad_embedding"], tolerance)
        if "stability" in numbers:
            target = int(numbers.get("stab_prefix", 0)) + 1
            found = stability.stability(model, numbers["stab_a"], numbers["stab_b"], target)
            close(found, numbers["stability"], 1e-4 if case.startswith("s4d") else 1e-9)
        checked.append(case)
    return checked


def test_released_code_gives_the_same_numbers():
    checked = check_fixture(FIXTURE)
    wanted = {f"{m}-{pe}" for m in ("gru", "lstm") for pe in ENCODINGS} | {"s4d-none", "s4d-sin"}
    assert set(checked) == wanted


def test_fixture_check_can_fail():
    with workplace() as folder:
        numbers = dict(np.load(FIXTURE))
        numbers["lstm-sin/w_hh"] = numbers["lstm-sin/w_hh"] * (1 + 1e-6)
        np.savez(folder / "wrong.npz", **numbers)
        try:
            check_fixture(folder / "wrong.npz")
        except AssertionError:
            return
        raise AssertionError("a weight off by a millionth was not noticed")


# ------------------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------------------


def plain_integers(counters, count, vocab):
    """common.uniform_integers(common.key(...)) in Python's own integers."""
    mask = 2**64 - 1

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    k = 0
    for counter in counters:
        k = mix(k + 0x9E3779B97F4A7C15 + counter & mask)
    bits = [mix(k + n * 0x9E3779B97F4A7C15 & mask) for n in range(1, 1 + count)]
    return [(b & 0xFFFFFFFF) * vocab >> 32 for b in bits]


def test_integers_are_splitmix64():
    for counters in [(0,), (5, 1, 300_000), (2**32 - 1, 2, 7)]:
        got = common.uniform_integers(common.key(*counters), (3, 50), 16384)
        assert got.flatten().tolist() == plain_integers(counters, 150, 16384)


def test_batch_depends_on_seed_and_iteration_alone():
    one, two = data_of("--vocab 50 --length 6 --seed 3"), data_of("--vocab 50 --length 6 --seed 3")
    later = one.held_out.training_rows(7, 40)
    for i in range(3):
        one.held_out.training_rows(i, 40)
    assert torch.equal(later, two.held_out.training_rows(torch.tensor(7), 40))
    assert torch.equal(one.held_out.rows, two.held_out.rows)
    other = data_of("--vocab 50 --length 6 --seed 4").held_out
    assert not torch.equal(later, other.training_rows(7, 40)) and not torch.equal(
        one.held_out.rows, other.rows
    )
    assert not torch.equal(later, one.held_out.training_rows(8, 40))


def test_batch_is_the_same_on_cuda():
    if not torch.cuda.is_available():
        raise Skip("no CUDA device")
    for flags in ("", "--min-length 3", "--dual-freq"):
        args = args_of(f"--vocab 50 --length 6 {flags}")
        on = [reverse.Reverse(args, torch.device(d)) for d in ("cpu", "cuda")]
        for part in ("inputs", "targets"):
            cpu, cuda = (getattr(data.training_episode(11), part).cpu() for data in on)
            assert torch.equal(cpu, cuda)


def test_integers_are_uniform():
    for vocab in (2, 7, 1000):
        draws = data_of(f"--vocab {vocab} --length 64 --batch 512 --held-out 1").held_out
        rows = torch.cat([draws.training_rows(i, 512) for i in range(1, 21)])
        chi_square_is_clean(torch.bincount(rows.flatten(), minlength=vocab), [rows.numel() / vocab] * vocab)
    pairs = (rows[:, :-1] % 10 * 10 + rows[:, 1:] % 10).flatten()  # neighbours are independent
    chi_square_is_clean(torch.bincount(pairs, minlength=100), [pairs.numel() / 100] * 100)


def test_held_out_sequences_are_never_trained_on():
    for flags in (
        "--vocab 2 --length 4 --held-out 8",
        "--vocab 3 --length 3 --held-out 13",
        "--vocab 4 --length 4 --min-length 2 --held-out 5",
        "--vocab 4 --length 3 --dual-freq --held-out 12",
    ):
        data = data_of(flags)
        held_out = set(map(tuple, data.held_out.rows.tolist()))
        assert len(held_out) == len(data.held_out.rows), "held-out sequences differ"
        collisions, seen = 0, set()
        for i in range(1, 101):
            raw = data.draw(common.key(0, common.TRAINING, i), (1, 512))[0]
            collisions += sum(tuple(row) in held_out for row in raw.tolist())
            seen |= set(map(tuple, data.held_out.training_rows(i, 512).tolist()))
        assert collisions > 2000, collisions
        assert not seen & held_out and len(seen) > 3, flags


def test_redrawn_rows_are_uniform_over_the_allowed_ones():
    data = data_of("--vocab 2 --length 4 --held-out 8")
    rows = torch.cat([data.held_out.training_rows(i, 512) for i in range(1, 41)])
    counts = Counter(map(tuple, rows.tolist()))
    assert len(counts) == 8
    chi_square_is_clean(list(counts.values()), [len(rows) / 8] * 8)


def test_dual_frequency_follows_the_formulas():
    vocab = 16
    data = data_of(f"--vocab {vocab} --length 64 --dual-freq")
    rows = torch.cat([data.held_out.training_rows(i, 512) for i in range(1, 11)])
    expected = [7 / 8 * 2 / vocab] * 8 + [1 / 8 * 2 / vocab] * 8
    chi_square_is_clean(torch.bincount(rows.flatten(), minlength=vocab), np.array(expected) * rows.numel())


def test_dual_frequency_test_set():
    data = data_of("--vocab 16 --length 6 --dual-freq --held-out 120")
    episode, rows = data.test_episode(), data.held_out.rows
    assert len(set(map(tuple, rows.tolist()))) == 120
    cells = itertools.product(reverse.CONDITIONS, range(6), range(5))
    for row, target, step, (condition, position, _) in zip(rows, episode.targets, episode.steps, cells):
        kinds = ["rare" if x >= 8 else "frequent" for x in row.tolist()]
        wanted, disturbants = condition.split("/")
        assert kinds.pop(position) == wanted and set(kinds) == {disturbants}
        assert target.item() == row[position] and step.item() == 2 * 6 - 1 - position


def test_dual_frequency_mass():
    rows = torch.tensor(list(itertools.product(range(4), repeat=3)))
    assert abs(reverse.dual_frequency_mass(rows, 4) - 1) < 1e-12
    one = torch.tensor([[0, 3, 1]])
    assert abs(reverse.dual_frequency_mass(one, 4) - (7 / 16) ** 2 * (1 / 16)) < 1e-15


def test_episode_by_brute_force():
    for flags in ("", "--min-length 1", "--min-length 3"):
        data = data_of(f"--vocab 9 --length 5 --batch 300 --held-out 2 {flags}")
        episode, lengths = data.training_episode(1), Counter()
        for b in range(300):
            row = [x for x in episode.inputs[b].tolist() if x < 9]
            n = len(row)
            lengths[n] += 1
            assert episode.inputs[b].tolist() == row + [9] * (10 - n)
            steps = list(range(5, 10)) if isinstance(episode.steps, slice) else episode.steps[b].tolist()
            weight = [1] * 5 if episode.weight is None else episode.weight[b].tolist()
            answers = [(s, t) for s, t, w in zip(steps, episode.targets[b].tolist(), weight) if w]
            assert answers == [(n + j, row[n - 1 - j]) for j in range(n)]
        allowed = data.lengths()
        chi_square_is_clean([lengths[n] for n in allowed] + [1], [300 / len(allowed)] * len(allowed) + [1])


def test_worked_example_of_the_docstring():
    lines = re.findall(r"^ +(?:in|out) +((?:[\d_.] )+[\d_.])", reverse.__doc__, re.MULTILINE)
    read, answer = (line.split() for line in lines)
    rows = torch.tensor([[int(x) for x in read if x != "_"]])
    data = data_of("--vocab 9 --length 3 --held-out 2")
    episode = data.episode(rows)
    assert episode.inputs[0].tolist() == [9 if x == "_" else int(x) for x in read]
    assert episode.targets[0].tolist() == [int(x) for x in answer[episode.steps]]
    assert all(x == "." for x in answer[: episode.steps.start])


# ------------------------------------------------------------------------------------------------------------
# Models, encodings, schedule
# ------------------------------------------------------------------------------------------------------------


def test_sinusoid_is_equation_1():
    size = 6
    for t, row in enumerate(common.sinusoid(300, size)):
        for i in range(size // 2):
            angle = t / 10000 ** (2 * i / size)
            assert abs(row[2 * i] - math.sin(angle) / math.sqrt(size / 2)) < 1e-12
            assert abs(row[2 * i + 1] - math.cos(angle) / math.sqrt(size / 2)) < 1e-12
    assert torch.allclose(common.sinusoid(1000, 512).norm(dim=1), torch.ones(1000, dtype=torch.float64))


def test_encodings_beyond_their_table():
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    for pe in ("random", "learned"):
        model = common.Model("gru", pe, 5, 4, 4, positions=6)
        assert model(tokens[:, :6], slice(0, 6)).shape == (6, 1, 5)
        try:
            model(tokens, slice(0, 7))
        except common.Refused as error:
            assert "6" in str(error) and "7" in str(error)
        else:
            raise AssertionError(f"{pe} answered for a position it does not have")
    model = common.Model("gru", "sin", 5, 4, 4, positions=6)
    longer = common.Model("gru", "sin", 5, 4, 4, positions=7)
    longer.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens, slice(0, 7)), longer(tokens, slice(0, 7)))


def test_random_encoding_is_on_the_sphere_fixed_and_saved():
    encoding = common.Encoding("random", 2000, 3)
    assert torch.allclose(encoding.table.norm(dim=1), torch.ones(2000))
    assert encoding.table.mean(0).abs().max() < 0.06  # uniform: no preferred direction
    assert list(encoding.state_dict()) == ["table"] and not list(encoding.parameters())


def test_parameter_counts():
    """dup has as many parameters as sin; learned adds its table; adding needs no wider input."""
    vocab, embed, hidden, positions = 11, 6, 5, 8

    def count(pe, combine="concat", model="lstm"):
        built = common.Model(model, pe, vocab, embed, hidden, positions, combine)
        return sum(p.numel() for p in built.parameters())

    plain = (vocab + 1) * embed + 4 * hidden * (embed + hidden + 2) + vocab * (hidden + 1)
    assert count("none") == plain
    assert count("sin") == count("dup") == count("random") == plain + 4 * hidden * embed
    assert count("learned") == count("sin") + positions * embed
    assert count("sin", "add") == plain and count("learned", "add") == plain + positions * embed
    s4d = embed * hidden + hidden + hidden * (1 + 1 + 32 * 4) + 2 * hidden * (hidden + 1)
    assert count("none", model="s4d") == (vocab + 1) * embed + s4d + vocab * (hidden + 1)


def test_combine_add_is_a_sum():
    tokens = torch.randint(0, 6, (2, 5))
    for pe in ("sin", "random", "learned"):
        model = common.Model("gru", pe, 5, 4, 3, 5, "add")
        wanted = model.embedding(tokens).transpose(0, 1) + model.encoding(5).float()[:, None]
        assert torch.equal(model.represent(tokens), wanted)


def test_s4d_convolution_is_its_recurrence():
    torch.manual_seed(1)
    layer, time = common.S4D(3, 4, order=6).double(), 9
    x = torch.randn(time, 2, 3, dtype=torch.float64)
    A = torch.complex(-layer.log_A_real.exp(), layer.A_imag)
    dt = layer.log_dt.exp()[:, None]
    decay = (A * dt).exp()  # state <- exp(dt A) state + (exp(dt A) - 1)/A u, y = 2 Re C state + D u
    state, outputs = torch.zeros(2, 4, 3, dtype=torch.complex128), []
    for u in layer.project(x):
        state = decay * state + (decay - 1) / A * u[..., None]
        y = 2 * (torch.view_as_complex(layer.C) * state).sum(-1).real + layer.D * u
        outputs.append(torch.nn.functional.glu(layer.mix(torch.nn.functional.gelu(y))))
    outputs = torch.stack(outputs)
    close(layer(x, slice(0, time)), outputs, 1e-10)
    close(layer(x, slice(4, 7)), outputs[4:7], 1e-10)
    steps = torch.tensor([[0, 8], [3, 5]])
    close(layer(x, steps), torch.stack([outputs[steps[b], b] for b in range(2)], 1), 1e-10)


def test_steps_of_every_row():
    tokens, steps = torch.randint(0, 6, (3, 8)), torch.tensor([[1, 7], [0, 2], [5, 5]])
    for kind in MODELS:
        model = common.Model(kind, "sin", 5, 4, 4, 8)
        everything = model(tokens, slice(0, 8))
        wanted = torch.stack([everything[steps[b], b] for b in range(3)], 1)
        close(model(tokens, steps), wanted, 1e-5)


def test_loss_counts_answers_only():
    data = data_of("--vocab 9 --length 5 --batch 20 --held-out 2 --min-length 1")
    episode = data.training_episode(1)
    logits = torch.randn(5, 20, 9, dtype=torch.float64)
    loss, accuracy = common.loss_and_accuracy(logits, episode)
    answers = [
        (logits[m, b], episode.targets[b, m]) for b in range(20) for m in range(5) if episode.weight[b, m]
    ]
    close(loss, sum(-x.log_softmax(0)[t] for x, t in answers) / len(answers), 1e-12)
    close(accuracy, sum((x.argmax() == t).item() for x, t in answers) / len(answers), 1e-12)


def test_cross_entropy_in_chunks_is_the_plain_one():
    torch.manual_seed(0)
    n, h, vocab = 30, 5, 7
    rows = [torch.randn(shape, dtype=torch.float64) for shape in ((n, h), (vocab, h), (vocab,))]
    rows = [x.requires_grad_() for x in rows]
    targets, weight = torch.randint(vocab, (n,)), torch.rand(n, dtype=torch.float64)
    weight[3] = 0
    for share, chunk in itertools.product((None, weight / weight.sum()), (7, 50, 2**25)):
        with mock.patch.object(common, "CHUNK", chunk):
            loss, right = common.cross_entropy(*rows, targets, share)
            check = lambda *x, share=share: common.cross_entropy(*x, targets, share)[0]
            assert torch.autograd.gradcheck(check, rows)
        logits = F.linear(*rows)
        each = torch.full((n,), 1 / n, dtype=torch.float64) if share is None else share
        close(loss, F.cross_entropy(logits, targets, reduction="none") @ each, 1e-12)
        close(right, (logits.argmax(1) == targets).double() @ each, 1e-6)


def test_learning_rate_is_the_formula():
    peak, warmup, n = 1e-3, 1000, 300_000
    cosine = lambda i: peak / 2 * (1 + math.cos(math.pi * (i - warmup) / (n - warmup)))
    wanted = {0: 0, 1: peak / 1000, 1000: peak, 1001: cosine(1001), n // 2: cosine(n // 2), n: 0}
    for i, rate in wanted.items():
        assert abs(common.learning_rate(i, peak, warmup, n) - rate) < 1e-18, i
    assert common.learning_rate(1, peak, 0, 10) < peak and common.learning_rate(10, peak, 10, 10) == peak


def test_first_step_moves_every_parameter():
    for kind, pe in itertools.product(MODELS, ENCODINGS):
        args = args_of(f"--scale smoke --model {kind} --pe {pe} --lr 0.1 --warmup 1")
        state = trial.State(reverse.TASK, args, torch.device("cpu"))
        data = reverse.Reverse(args, torch.device("cpu"))
        before = {k: v.clone() for k, v in state.model.named_parameters()}
        optimised = [id(p) for group in state.optimizer.param_groups for p in group["params"]]
        assert sorted(optimised) == sorted(id(p) for p in state.model.parameters())
        with workplace() as folder:
            next(trial.train(state, data, args, folder))
        still = [k for k, v in state.model.named_parameters() if torch.equal(v, before[k])]
        assert not still, (kind, pe, still)


def test_training_step_is_adam_by_hand():
    """The loop's first three iterations against Adam, clipping and the schedule written out."""
    args = args_of("--scale smoke --model gru --lr 0.01 --clip 0.05 --beta2 0.98 --eps 1e-9")
    state = trial.State(reverse.TASK, args, torch.device("cpu"))
    data = reverse.Reverse(args, torch.device("cpu"))
    plain = trial.State(reverse.TASK, args, torch.device("cpu")).model
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in plain.parameters()]
    with workplace() as folder:
        for i, _ in zip(range(1, 4), trial.train(state, data, args, folder)):
            episode = data.training_episode(i)
            loss, _ = common.loss_and_accuracy(plain(episode.inputs, episode.steps), episode)
            gradients = torch.autograd.grad(loss, list(plain.parameters()))
            norm = math.sqrt(sum((g**2).sum().item() for g in gradients))
            rate = common.learning_rate(i, 0.01, 2, 20)
            for p, g, (m, v) in zip(plain.parameters(), gradients, moments):
                g = g * min(1, 0.05 / (norm + 1e-6))
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.98).add_(0.02 * g**2)
                p.data -= rate * m / (1 - 0.9**i) / ((v / (1 - 0.98**i)).sqrt() + 1e-9)
    for (name, p), q in zip(plain.named_parameters(), state.model.parameters()):
        assert torch.allclose(p, q, atol=2e-5), name


class Watch(TorchDispatchMode):
    """Records the operations that make a host wait for its device, and the sizes of matrix products."""

    def __init__(self):
        super().__init__()
        self.waits, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"):
            self.waits.append(func.name())
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return result


def test_an_iteration_never_waits_and_reads_out_answers_only():
    for kind, flags in itertools.product(MODELS, ("", "--min-length 2", "--dual-freq --held-out 160")):
        args = args_of(
            f"--scale smoke --model {kind} --vocab 900 --length 20 --batch 7 --held-out 64 {flags}"
        )
        state = trial.State(reverse.TASK, args, torch.device("cpu"))
        data = reverse.Reverse(args, torch.device("cpu"))
        with workplace() as folder, Watch() as watch:
            next(trial.train(state, data, args, folder))
        assert not watch.waits, watch.waits
        assert watch.largest == 7 * 20 * 900, "the largest tensor is the logits of B*L answers"


# ------------------------------------------------------------------------------------------------------------
# The fast engine, and what needs CUDA
# ------------------------------------------------------------------------------------------------------------


def loss_and_gradients(model, episode, **engine):
    model.fast, model.compiled = engine.get("fast", False), engine.get("compiled", False)
    model.zero_grad()
    loss, accuracy = model.loss_and_accuracy(episode)
    loss.backward()
    return loss, accuracy, {name: p.grad.clone() for name, p in model.named_parameters()}


def random_episodes(length, vocab, batch):
    """Answers at the last steps after commands, with and without short rows; and without commands."""
    rows = torch.randint(vocab, (batch, length))
    with_commands = torch.cat([rows, torch.full_like(rows, vocab)], 1)
    last = slice(length, 2 * length)
    steps, weight = torch.randint(2 * length, (batch, length)), torch.rand(batch, length) > 0.3
    weight[0, 0] = True
    yield common.Episode(with_commands, rows.flip(1), last, commands=length)
    yield common.Episode(with_commands, rows.flip(1), steps, weight, length)
    yield common.Episode(torch.randint(vocab, (batch, 2 * length)), rows, last)


def compare_engines(dtype, tolerance, sizes, **engine):
    for kind, pe, combine in itertools.product(MODELS, ENCODINGS, ("concat", "add")):
        if combine == "add" and pe in ("none", "dup"):
            continue
        for length, vocab, batch in sizes:
            model = common.Model(kind, pe, vocab, 6, 10, 2 * length, combine).to(dtype)
            for episode in random_episodes(length, vocab, batch):
                loss, accuracy, gradients = loss_and_gradients(model, episode)
                found = loss_and_gradients(model, episode, fast=True, **engine)
                close(found[0], loss, tolerance)
                assert abs(found[1] - accuracy) < 1e-6
                for name, gradient in gradients.items():
                    if gradient.norm() > 1e-6:  # some are rounding alone, as that of a state never used
                        close(found[2][name], gradient, tolerance)
                with torch.no_grad():
                    logits = model(episode.inputs, episode.steps)  # still the fast engine
                    model.fast = False
                    close(logits, model(episode.inputs, episode.steps), tolerance)


def test_engines_agree():
    torch.manual_seed(0)
    sizes = [(4, 7, 5), (1, 2, 1), (6, 40, 3)]
    compare_engines(torch.float64, 1e-10, sizes)
    compare_engines(torch.float32, 1e-5, sizes[:1])


def test_engines_agree_with_compiled_steps():
    if not recurrence.can_compile("cpu"):
        raise Skip("no C++ compiler for torch.compile")
    torch.manual_seed(0)
    compare_engines(torch.float64, 1e-10, [(4, 7, 5)], compiled=True)


def test_without_a_compiler_steps_are_not_compiled():
    recurrence.can_compile.cache_clear()
    with mock.patch.object(torch, "compile", side_effect=RuntimeError("no compiler")):
        assert recurrence.can_compile("cpu") is False
    recurrence.can_compile.cache_clear()


def test_released_code_gives_the_same_numbers_in_the_fast_engine():
    for case, numbers in fixture_cases(FIXTURE).items():
        model, tokens, length = (
            fixture_model(case, numbers),
            numbers["tokens"],
            numbers["tokens"].shape[1] // 2,
        )
        episode = common.Episode(tokens, tokens[:, :length].flip(1), slice(length, None), commands=length)
        loss, _, gradients = loss_and_gradients(model, episode, fast=True)
        tolerance = 2e-5 if case.startswith("s4d") else 1e-9
        close(model(tokens, slice(0, None)).transpose(0, 1), numbers["logits"], tolerance)
        close(loss, numbers["loss"], tolerance)
        close(torch.cat([g.flatten() for g in gradients.values()]).norm(), numbers["grad_norm"], tolerance)
        if "grad_embedding" in numbers:
            close(gradients["embedding.weight"], numbers["grad_embedding"], tolerance)


def sweep_inputs(gates, extra, sizes, read, table_rows=3, H=2):
    """Random arguments of recurrence.lstm or gru, in float64."""
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(table_rows, (sum(sizes[:read]),))
    return (
        draw(table_rows, gates * H),
        draw(len(sizes), gates * H),
        tokens,
        sizes,
        False,
        draw(gates * H, H),
    ) + ((draw(H),) if extra else ())


def test_gradcheck_of_the_sweeps():
    torch.manual_seed(0)
    for sizes, read in (
        ([2, 2, 2], 3),
        ([2, 2, 2], 1),
        ([3, 2, 2, 1], 4),
        ([3, 2, 1], 2),
        ([1], 1),
        ([2, 1], 0),
    ):
        assert torch.autograd.gradcheck(recurrence.lstm, sweep_inputs(4, False, sizes, read))
        assert torch.autograd.gradcheck(recurrence.gru, sweep_inputs(3, True, sizes, read))


def test_packed_rows_are_those_of_a_packed_sequence():
    torch.manual_seed(0)
    lengths = torch.tensor([9, 7, 7, 2, 1])
    inputs = torch.randint(20, (9, 5))
    for kind in ("gru", "lstm"):
        model = common.Model(kind, "sin", 20, 6, 8, 9).double()
        x = torch.nn.utils.rnn.pack_padded_sequence(model.represent(inputs.T), lengths)
        tokens = torch.nn.utils.rnn.pack_padded_sequence(inputs, lengths).data
        plain = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind](12, 8).double()
        plain.load_state_dict(model.layer.state_dict())
        wanted = plain(x)[0].data
        table, clock = model.input_products(model.embedding.weight, 9)
        found = model.layer.sweep(table, clock, tokens, x.batch_sizes.tolist(), False)
        close(found, wanted, 1e-12)
        upstream = torch.randn_like(wanted)
        wanted.backward(upstream)
        found.backward(upstream)
        for (name, p), q in zip(model.layer.named_parameters(), plain.parameters()):
            close(p.grad, q.grad, 1e-10)


def test_half_precision_trains():
    """As --precision bf16 does on CUDA: the same autocast, on a CPU."""
    for kind in MODELS:
        final = {}
        for precision in ("fp32", "bf16"):
            args = args_of(f"--scale smoke --model {kind} --iterations 60 --lr 0.01 --engine fast --batch 32")
            state, data = (
                trial.State(reverse.TASK, args, torch.device("cpu")),
                reverse.Reverse(args, torch.device("cpu")),
            )
            state.how["precision"] = precision
            with workplace() as folder:
                for _ in trial.train(state, data, args, folder):
                    pass
            assert all(p.dtype == torch.float32 for p in state.model.parameters())
            first, final[precision] = state.rows[0][1], state.rows[-1][1]
            assert final[precision] < first - 0.2, (kind, precision, state.rows)
        assert final["bf16"] != final["fp32"] and abs(final["bf16"] - final["fp32"]) < 0.1, (kind, final)


def test_a_model_of_ones_own_needs_no_fast_engine():
    class Mean(torch.nn.Linear):
        def forward(self, x, steps):
            return common.select(super().forward(x).cumsum(0), steps)

    with mock.patch.dict(common.LAYERS, {"gru": Mean}), workplace() as out:
        for engine in ("fast", "torch"):
            assert cli(f"--scale smoke --model gru --engine {engine} --out {out}/{engine}")[0] == 0
        found = [json.loads(path.read_text())["metrics"] for path in sorted(out.rglob("result.json"))]
    assert abs(found[0]["cross_entropy"] - found[1]["cross_entropy"]) < 1e-4


def test_engine_is_chosen_from_the_configuration():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def chosen(flags, device=cpu):
        args = args_of(flags)
        return trial.choose_engine(reverse.TASK, args, device)

    with mock.patch("recurrence.can_compile", lambda device: True):
        assert chosen("--hidden 255")["engine"] == "torch" and chosen("--hidden 256")["engine"] == "fast"
        assert chosen("--batch 31")["engine"] == "torch" and chosen("--batch 32")["engine"] == "fast"
        assert chosen("--hidden 8 --engine fast")["engine"] == "fast"
        assert chosen("--engine torch")["engine"] == "torch" and not chosen("--engine torch")["compiled"]
        assert chosen("")["compiled"] and not chosen("--iterations 999")["compiled"]
        assert chosen("--scale quick")["engine"] == chosen("--scale smoke")["engine"] == "torch"
        assert chosen("")["precision"] == "fp32" and not chosen("")["graph"]
        there = chosen("--hidden 8 --batch 1 --iterations 5", cuda)
        assert there["engine"] == "fast" and there["compiled"] and there["graph"]
        assert there["precision"] == "tf32" and not chosen("--no-graph", cuda)["graph"]
        assert chosen("--precision bf16", cuda)["precision"] == "bf16"
    with mock.patch("recurrence.can_compile", lambda device: False):
        assert not chosen("")["compiled"]


def test_auto_is_fast_for_the_language_model_everywhere():
    assert args_of("", lm_wikitext.TASK).engine == "auto", "left as it was given"
    for words, engine in (("", "fast"), ("--engine torch", "torch")):
        for device in ("cpu", "cuda"):
            args = lm_args(words)
            assert trial.choose_engine(lm_wikitext.TASK, args, torch.device(device))["engine"] == engine
    assert (
        trial.choose_engine(reverse.TASK, args_of("--scale smoke"), torch.device("cpu"))["engine"] == "torch"
    )
    assert "recurrence.py; torch" in cli("--help", lm_wikitext.TASK)[1]


def test_only_bf16_names_the_folder():
    folder = lambda flags: trial.trial_folder(reverse.TASK, args_of(flags))
    plain = folder("")
    for flags in ("--precision tf32", "--precision fp32", "--engine torch", "--no-graph", "--deterministic"):
        assert folder(flags) == plain, flags
    assert folder("--precision bf16").parent.name == plain.parent.name + "-precision=bf16"
    for precision in ("tf32", "bf16"):
        with workplace() as out:
            code, _, err = cli(f"--scale smoke --device cpu --precision {precision} --out {out}/runs")
            assert code == 2 and err.count("\n") == 1 and "CPU" in err and not (out / "runs").exists(), err


def test_an_iteration_on_a_device_never_waits():
    """On the meta device an operation that needs a value raises, and so does one with tensors of a CPU."""
    cases = [
        (reverse.TASK, flags) for flags in ("", "--min-length 4", "--dual-freq --held-out 160", "--pe dup")
    ]
    cases += [(module.TASK, "") for module in SCRIPTS]
    for (task, flags), kind in itertools.product(cases, MODELS):
        args = args_of(f"--scale smoke --engine fast --model {kind} {flags}", task)
        cpu, meta = torch.device("cpu"), torch.device("meta")
        data, state = task.build(args, cpu), trial.State(task, args, cpu)
        for name in ("rows", "hashes", "allowed_row"):
            setattr(data.held_out, name, getattr(data.held_out, name).to(meta))
        state.model.to(meta)
        state.sums = state.sums.to(meta)
        state.optimizer = torch.optim.Adam(state.model.parameters(), foreach=False)
        no_autocast = mock.patch("torch.autocast", lambda *_, **__: contextlib.nullcontext())
        with no_autocast, mock.patch.object(state.optimizer, "step"):  # torch's own, capturable on CUDA
            trial.iteration(state, data, args, torch.zeros((), dtype=torch.int64, device=meta))
        assert state.sums.device == meta


def test_capture_leaves_no_trace():
    """The warm-up that a CUDA graph needs changes neither weights nor moments, whether or not one follows."""
    for done in (0, 2):
        check_capture(done)


def check_capture(done):
    args = args_of("--scale smoke --model gru --engine fast --iterations 6")
    states = [trial.State(reverse.TASK, args, torch.device("cpu")) for _ in range(2)]
    data = reverse.Reverse(args, torch.device("cpu"))
    with workplace() as folder:
        for state, before in zip(states, (0, 1)):
            loops = trial.train(state, data, args, folder)
            for _ in range(done):
                next(loops)
            if before:
                warming = mock.patch.object(trial, "iteration", wraps=trial.iteration)
                capture = mock.patch("torch.cuda.CUDAGraph", side_effect=RuntimeError)
                with warming as warmed, capture, contextlib.suppress(RuntimeError):
                    trial.captured(state, data, args)
                assert warmed.call_count == 3
            for _ in loops:
                pass
    first, second = (state.optimizer.state_dict()["state"] for state in states)
    for p, q in zip(states[0].model.parameters(), states[1].model.parameters()):
        assert torch.equal(p, q)
    for i in first:
        assert all(torch.equal(first[i][name], second[i][name]) for name in first[i])
    assert states[0].rows[-1][:3] == states[1].rows[-1][:3]


def test_seeds_together_are_each_alone():
    flags = "--scale smoke --model gru --vocab 8"
    with workplace() as out:
        for seed in (3, 4, 5):
            assert cli(f"{flags} --seed {seed} --out {out}/alone")[0] == 0
        code, printed, _ = cli(f"{flags} --seed 3-5 --out {out}/range")
        assert code == 0 and "[3/3]" in printed
        stop, trials = trial.Stop(), []
        for seed in (3, 4, 5):
            args = args_of(f"{flags} --seed {seed} --out {out}/together")
            trials.append(({}, [], args))
        codes, printed, _ = captured(lambda: trial.together(reverse.TASK, trials, stop))
        assert codes == [0, 0, 0]
        lines = re.findall(r"seed (\d): iteration (\d+)/", printed)
        assert [x for x in lines if x[1] == "5"] == [("3", "5"), ("4", "5"), ("5", "5")], lines
        assert lines.index(("3", "10")) > lines.index(("5", "5")), "they take turns"
        for path in sorted((out / "alone").rglob("result.json")):
            metrics = json.loads(path.read_text())["metrics"]
            for other in ("range", "together"):
                found = out / other / path.relative_to(out / "alone")
                assert json.loads(found.read_text())["metrics"] == metrics
        code, _, err = cli(f"{flags} --seed 5-3 --out {out}/no")
        assert code == 2 and err.count("\n") == 1


def test_graph_keeps_what_it_counts_with():
    """A graph's replay reads memory that no Python object need hold: the counter must outlive its capture."""
    args = args_of("--scale smoke --model gru --engine fast --iterations 6")
    state, counters = trial.State(reverse.TASK, args, torch.device("cpu")), []
    seen = lambda state, data, args, i: counters.append((weakref.ref(i), i.item()))
    made_up = dict(graph=mock.MagicMock(), CUDAGraph=mock.Mock(), current_stream=mock.Mock())
    with mock.patch.object(trial, "iteration", seen), mock.patch.multiple("torch.cuda", **made_up):
        replay = trial.captured(state, None, args)
    gc.collect()
    assert replay and counters[0][0]() is not None
    assert [i for _, i in counters] == [1, 2, 3, 1], "three to warm up, then from the first iteration on"


def test_checkpoints_move_between_devices():
    """Adam's switches are those of the device that continues: a CPU's checkpoint must not forbid a graph."""
    args, cpu = args_of("--scale smoke"), torch.device("cpu")
    with workplace() as folder:
        state = trial.State(reverse.TASK, args, cpu)
        next(trial.train(state, reverse.Reverse(args, cpu), args, folder))
        state.save(folder)
        for graph in (True, False):
            other = trial.State(reverse.TASK, args, cpu)
            other.optimizer.param_groups[0]["capturable"] = graph
            other.load(folder / "last.pt")
            assert other.optimizer.param_groups[0]["capturable"] is graph
            assert other.optimizer.param_groups[0]["lr"] is other.rate and other.iteration == 1


def test_cuda():
    if not CUDA:
        raise Skip("no CUDA device")
    with mock.patch("torch.cuda.is_available", lambda: True):
        run_on_cuda()


def run_on_cuda():
    results = {}
    flags = "--scale smoke --iterations 300 --batch 64 --lr 0.01 --device cuda"
    for kind, (name, more) in itertools.product(MODELS, CUDA_FLAGS.items()):
        with workplace() as out:
            words = f"{flags} --model {kind} {more} --out {out}".split()  # a process for each:
            subprocess.run(
                [sys.executable, HERE / "reverse.py", *words], check=True
            )  # --deterministic is early
            found = sorted(out.rglob("result.json"))
            results[kind, name] = [json.loads(path.read_text())["metrics"] for path in found]
    for kind in MODELS:
        graph, eager = results[kind, "graph"][0], results[kind, "eager"][0]
        assert abs(graph["cross_entropy"] - eager["cross_entropy"]) < 0.05, (kind, graph, eager)
        assert results[kind, "same bits"] == results[kind, "same bits again"], kind
        assert abs(results[kind, "fp32"][0]["cross_entropy"] - eager["cross_entropy"]) < 0.05, kind
        assert abs(results[kind, "bf16"][0]["cross_entropy"] - eager["cross_entropy"]) < 0.2, kind
        for alone, beside in zip(results[kind, "graph"], results[kind, "together"]):
            assert abs(alone["cross_entropy"] - beside["cross_entropy"]) < 0.05, kind


def test_bench_compares_equals_and_counts_operations():
    torch.manual_seed(0)
    sizes = dict(SIZE=6, LENGTH=4, CONFIGURATIONS={f"{m}-sin": (m, "sin", 9, 5) for m in MODELS})
    same_process = mock.patch.object(bench, "in_a_process", bench.memory)  # another would not be patched
    with mock.patch.multiple(bench, **sizes), same_process, workplace() as folder:
        for kind in MODELS:
            model, plain = common.Model(kind, "sin", 9, 6, 6, 8), bench.Plain(kind, "sin", 9)
            plain.load_state_dict(model.state_dict(), strict=False)
            inputs = torch.randint(10, (5, 8))
            close(plain(inputs), model(inputs, slice(0, None)), 1e-6)
        rows = 4 * 5, 9 + 1 + 8  # answers; integers, the command and steps that the input weights meet
        by_hand = {
            "lstm": 2 * rows[0] * 6 * 24 + rows[1] * 6 * 24 + rows[0] * 6 * 9,
            "gru": 2 * rows[0] * 6 * 18 + rows[1] * 6 * 18 + rows[0] * 6 * 9,
            "s4d": 6 * 4 * rows[0] + rows[0] * 6 * 12 + rows[1] * 6 * 6 + rows[0] * 6 * 9,
        }
        for kind, products in by_hand.items():
            assert bench.necessary_operations(f"{kind}-sin", False) == 6 * products
        words = [
            "--only",
            "gru-sin",
            "s4d-sin",
            "--repeats",
            "2",
            "--device",
            "cpu",
            "--json",
            "numbers.json",
        ]
        code, printed, _ = captured(lambda: bench.main(words))
        assert code == 0 and printed == captured(lambda: bench.main(["--show", "numbers.json"]))[1]
        content = json.loads((folder / "numbers.json").read_text())
        found = content["configurations"]["gru-sin"]["variants"]
        assert {name: len(x["ms"]) for name, x in found.items()} == {
            "plain": 2,
            "not compiled": 2,
            "suite": 2,
        }
        ratio = np.median(found["plain"]["ms"]) / np.median(found["suite"]["ms"])
        assert re.search(rf"suite .* {ratio:.2f} ", printed), printed
        code, _, err = captured(lambda: bench.main(["--show", "nowhere.json"]))
        assert code == 2 and err.count("\n") == 1


CUDA_FLAGS = {
    "graph": "",
    "eager": "--no-graph",
    "fp32": "--precision fp32",
    "bf16": "--precision bf16",
    "same bits": "--deterministic",
    "same bits again": "--deterministic",
    "together": "--seed 0-2",
}


# ------------------------------------------------------------------------------------------------------------
# Metrics
# ------------------------------------------------------------------------------------------------------------


def slow_damerau_levenshtein(a, b):
    """The textbook's table with its dictionary of last rows, one cell at a time."""
    infinite, last = len(a) + len(b), {}
    table = {(-1, -1): infinite}
    for i in range(len(a) + 1):
        table[i, -1], table[i, 0] = infinite, i
    for j in range(len(b) + 1):
        table[-1, j], table[0, j] = infinite, j
    for i in range(1, len(a) + 1):
        column = 0
        for j in range(1, len(b) + 1):
            k, m = last.get(b[j - 1], 0), column
            cost = a[i - 1] != b[j - 1]
            if not cost:
                column = j
            table[i, j] = min(
                table[i - 1, j - 1] + cost,
                table[i, j - 1] + 1,
                table[i - 1, j] + 1,
                table[k - 1, m - 1] + (i - k - 1) + 1 + (j - m - 1),
            )
        last[a[i - 1]] = i
    return table[len(a), len(b)]


def random_pairs(groups, size):
    """Groups of pairs of one shape: small and large alphabets, unrelated and shuffled content."""
    rng = np.random.default_rng(7)
    for n in range(groups):
        (rows, columns), alphabet = rng.integers(1, 65, 2), (2, 4, 20, 1000)[n % 4]
        a, b = rng.integers(0, alphabet, (size, rows)), rng.integers(0, alphabet, (size, columns))
        if n % 3 == 0:  # related: neighbours swapped, a few replaced
            b = a.copy()
            for row in b:
                rng.shuffle(row[: 1 + len(row) // 4])
                row[rng.integers(len(row))] = rng.integers(alphabet)
        yield a, b


def test_damerau_levenshtein_by_hand():
    pairs = [([1, 2], [2, 1], 1), ([1, 2, 3], [3, 1], 2), ([1, 2, 3, 4], [2, 1, 4, 3], 2), ([1], [1], 0)]
    for a, b, wanted in [*pairs, ([3, 1], [1, 2, 3], 2)]:  # CA -> ABC: 2, unrestricted only
        assert common.damerau_levenshtein([a], [b]).tolist() == [wanted], (a, b)


def test_damerau_levenshtein_is_the_textbooks():
    for a, b in random_pairs(24, 4):
        wanted = [slow_damerau_levenshtein(x, y) for x, y in zip(a.tolist(), b.tolist())]
        assert common.damerau_levenshtein(a, b).tolist() == wanted


def test_damerau_levenshtein_is_rapidfuzz():
    if not importlib.util.find_spec("rapidfuzz"):
        raise Skip("rapidfuzz is not installed")
    from rapidfuzz.distance import DamerauLevenshtein

    for a, b in random_pairs(100, 100):
        wanted = [DamerauLevenshtein.distance(x, y) for x, y in zip(a.tolist(), b.tolist())]
        assert common.damerau_levenshtein(a, b).tolist() == wanted


def test_damerau_levenshtein_is_fast():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (1024, 64))
    b = np.where(rng.random(a.shape) < 0.3, rng.integers(0, 256, a.shape), a)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        common.damerau_levenshtein(a, b)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2, times


def test_sequence_metrics_by_hand():
    episode = common.Episode(
        None, torch.tensor([[1, 2, 3], [4, 5, 0]]), None, torch.tensor([[1, 1, 1], [1, 1, 0]])
    )
    predictions = torch.tensor(
        [[2, 1, 3], [4, 5, 9]]
    )  # neighbours swapped; right, and a last one that is padding
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]])
    metrics = common.sequence_metrics(episode, predictions, losses)
    wanted = dict(token_accuracy=3 / 5, sequence_accuracy=1 / 2, cross_entropy=3.0, damerau_levenshtein=1 / 2)
    assert metrics == wanted, metrics


def test_evaluation_does_not_depend_on_the_batch():
    for flags in ("", "--min-length 3", "--dual-freq --held-out 128"):
        found = []
        for batch in (5, 512):
            args = args_of(f"--scale smoke --held-out 40 --batch {batch} {flags}")
            state = trial.State(reverse.TASK, args, torch.device("cpu"))
            found.append(reverse.Reverse(args, torch.device("cpu")).evaluate(state.model))
        small, large = (dict(metrics) for metrics in found)
        assert abs(small.pop("cross_entropy") - large.pop("cross_entropy")) < 1e-6
        assert small == large
        if "min-length" in flags:
            mean = np.mean([small["by_length"][str(n)] * n for n in range(3, 9)]) / np.mean(range(3, 9))
            assert abs(mean - small["token_accuracy"]) < 1e-12
        if "dual" in flags:
            assert {k: len(v) for k, v in small["by_condition"].items()} == dict.fromkeys(
                reverse.CONDITIONS, 8
            )


def test_bootstrap_interval():
    assert common.bootstrap_interval([0.5]) is None
    assert common.bootstrap_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)
    values = np.random.default_rng(3).normal(size=200)
    low, high = common.bootstrap_interval(values)
    spread = 1.96 * values.std() / math.sqrt(200)
    assert abs(low - (values.mean() - spread)) < 0.02 and abs(high - (values.mean() + spread)) < 0.02
    assert common.bootstrap_interval(values) == (low, high), "the same every time"


# ------------------------------------------------------------------------------------------------------------
# The life of a trial
# ------------------------------------------------------------------------------------------------------------

LONG = "--scale smoke --model lstm --iterations 400 --save-every 30 --log-every 20 --held-out 64"


def undisturbed(words=LONG, cache={}):  # noqa: B006 - a cache on purpose
    """The outcome of a trial that nothing interrupts, and the seconds it took."""
    if words not in cache:
        with workplace() as folder:
            start = time.monotonic()
            assert wait(fork(words)) == 0, Path("child.log").read_text()
            cache[words] = outcome(trial_of(folder)), time.monotonic() - start
    return cache[words]


def trial_of(folder):
    (found,) = Path(folder).glob("runs/*/*/seed*")
    return found


def finish(folder):
    """Run LONG to its end and compare."""
    assert wait(fork(LONG)) == 0, Path("child.log").read_text()
    assert outcome(trial_of(folder)) == undisturbed()[0]


def stop_after_a_save(signal_number):
    child = fork(LONG)
    wait_for(lambda: list(Path().glob("runs/*/*/seed*/last.pt")))
    os.kill(child, signal_number)
    return wait(child)


def test_stopped_by_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        with workplace() as folder:
            assert stop_after_a_save(number) == trial.STOPPED
            saved = torch.load(trial_of(folder) / "last.pt", weights_only=True)
            assert 30 <= saved["iteration"] < 400 and not (trial_of(folder) / "result.json").exists()
            finish(folder)
            code, out, _ = cli(LONG)
            assert code == 0 and "is finished" in out and "token accuracy" in out


def test_killed_at_random_moments():
    _, seconds = undisturbed()
    rng = np.random.default_rng(11)
    with workplace() as folder:
        for _ in range(6):
            child = fork(LONG)
            time.sleep(rng.uniform(0.05, 0.5) * seconds)
            os.kill(child, signal.SIGKILL)
            assert wait(child) in (-signal.SIGKILL, 0)
        finish(folder)


def test_torture():
    """Killed at 25 random moments while saving often; two at a time; no room; last.pt torn or removed."""
    words = LONG.replace("--save-every 30", "--save-every 4")
    rng, codes = np.random.default_rng(5), Counter()
    wanted, seconds = undisturbed(words)
    with workplace() as folder:
        while codes[-signal.SIGKILL] < 25:
            limit = 3000 if rng.random() < 0.2 else None
            children = [fork(words, limit) for _ in range(rng.integers(1, 3))]
            time.sleep(rng.uniform(0.05, 0.25) * seconds)
            for child in children:
                os.kill(child, signal.SIGKILL)
                codes[wait(child)] += 1
            for last in folder.glob("runs/*/*/seed*/last.pt"):
                if rng.random() < 0.2:
                    last.unlink()
                elif rng.random() < 0.2:
                    last.write_bytes(last.read_bytes()[: rng.integers(last.stat().st_size)])
            if list(folder.glob("runs/*/*/seed*/result.json")):
                shutil.rmtree(folder / "runs")  # finished before its time: again
        assert set(codes) <= {-signal.SIGKILL, trial.RUNNING_ELSEWHERE, 0} and len(codes) > 1, codes
        racing = [fork(words) for _ in range(2)]
        found = sorted(wait(child) for child in racing)
        assert found in ([0, 0], [0, trial.RUNNING_ELSEWHERE]), Path("child.log").read_text()
        assert outcome(trial_of(folder)) == wanted


def test_full_disk():
    with workplace() as folder:
        assert stop_after_a_save(signal.SIGTERM) == trial.STOPPED
        kept = (trial_of(folder) / "last.pt").read_bytes()
        child = fork(LONG, limit=3000)  # too little for a checkpoint
        wait_for(lambda: "could not save" in Path("child.log").read_text())
        os.kill(child, signal.SIGTERM)
        assert wait(child) == trial.STOPPED
        assert (trial_of(folder) / "last.pt").read_bytes() == kept
        finish(folder)


def test_full_disk_at_the_end():
    """Without room for checkpoints a trial still ends with its result; without any room it says so."""
    words = "--scale smoke --held-out 32"
    with workplace() as folder:
        assert wait(fork(words, limit=3000)) == 0
        assert (trial_of(folder) / "result.json").exists() and not (trial_of(folder) / "last.pt").exists()
    with workplace():
        assert wait(fork(words, limit=100)) == 1
        assert "File too large" in Path("child.log").read_text()
        assert "Traceback" not in Path("child.log").read_text()


def test_torn_checkpoints():
    def truncate(path):
        path.write_bytes(path.read_bytes()[:-1000])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    for damage, files in [
        (truncate, ["last.pt"]),
        (flip, ["last.pt"]),
        (truncate, ["last.pt", "previous.pt"]),
    ]:
        with workplace() as folder:
            assert stop_after_a_save(signal.SIGTERM) == trial.STOPPED
            if not (trial_of(folder) / "previous.pt").exists():
                shutil.copy(trial_of(folder) / "last.pt", trial_of(folder) / "previous.pt")
            for name in files:
                damage(trial_of(folder) / name)
            Path("child.log").unlink()
            finish(folder)
            log = Path("child.log").read_text()
            expected = "starting at iteration 0" if len(files) == 2 else "continuing from previous.pt"
            assert "last.pt cannot be used" in log and expected in log, log


def test_other_flags_are_refused():
    words = "--scale smoke --held-out 32"
    with workplace() as folder:
        assert cli(words)[0] == 0
        config = json.loads((trial_of(folder) / "config.json").read_text())
        config["config"] |= {"lr": 0.5, "beta2": 0.5}
        (trial_of(folder) / "config.json").write_text(json.dumps(config))
        code, _, err = cli(words)
        assert code == 2 and "--lr 0.5" in err and "--beta2 0.5" in err and err.count("\n") == 1
        assert cli(words + " --overwrite")[0] == 0
        assert cli(words)[0] == 0


def test_second_process_leaves():
    with workplace() as folder:
        child = fork(LONG)
        wait_for(lambda: list(Path().glob("runs/*/*/seed*/last.pt")))
        code, _, err = cli(LONG)
        assert code == trial.RUNNING_ELSEWHERE and "another process" in err
        code, _, err = cli(LONG + " --overwrite")
        assert code == trial.RUNNING_ELSEWHERE
        assert wait(child) == 0
        assert outcome(trial_of(folder)) == undisturbed()[0]


def test_not_finite_stops():
    words = "--scale smoke --held-out 32 --lr 1e38 --warmup 10 --save-every 1"
    with workplace() as folder:
        code, _, err = cli(words)
        assert code == trial.NOT_FINITE and re.search(r"between iterations \d+ and \d+", err), err
        assert not (trial_of(folder) / "result.json").exists()
        for path in trial_of(folder).glob("*.pt"):
            weights = torch.load(path, weights_only=True)["model"]
            assert all(v.isfinite().all() for v in weights.values()), "the checkpoint kept is good"
        assert cli(words)[0] == trial.NOT_FINITE


def test_metrics_that_are_not_finite_are_no_result():
    assert common.perplexity(1e4) == math.inf and common.perplexity(2.0) == math.exp(2)
    metrics = {
        "a": 1,
        "b": {"x": [0.5, {"y": math.nan}]},
        "c": [1.0, -math.inf],
        "d": "text",
        "e": {"x": 2.0},
    }
    assert trial.not_finite(metrics) == ["b", "c"]
    with library() as folder:
        code, _, err = cli("--scale smoke --lr 1e3", SHAKESPEARE)
        (failed,) = folder.glob("runs/*/*/*/failed.json")
        assert code == trial.NOT_FINITE and "Traceback" not in err, err
        assert "valid_perplexity not finite after iteration 20" in json.loads(failed.read_text())["error"]
        assert not (failed.parent / "result.json").exists() and (failed.parent / "last.pt").exists()
    split = made_up_split([5, 9], 20)
    built = lm_wikitext.LanguageModel(lm_wikitext.TASK, lm_args("--vocab 20"))
    built.losses = lambda batch: torch.full((len(batch.targets),), 1e3)
    assert lm_wikitext.perplexities(built, split, 2, torch.device("cpu")) == (math.inf, math.inf)


def test_files_of_a_trial():
    with workplace() as folder:
        code, _, _ = cli("--scale smoke --dual-freq --pe random --lr 0.5")
        assert code == 0
        found = trial_of(folder)
        assert found.relative_to(folder).as_posix() == (
            "runs/reverse/lstm-random-K8-L8-batch=8-dual-freq-embed=16-held-out=32-hidden=16-iterations=20-lr=0.5/seed0"
        )
        result = json.loads((found / "result.json").read_text())
        named = (
            "task config metrics iterations seconds iterations_per_second peak_memory_bytes parameters device"
        )
        for key in f"{named} torch python commit dirty argv finished".split():
            assert key in result, key
        assert result["config"]["warmup"] == 2 and result["iterations"] == 20
        assert result["argv"] == shlex.split("--scale smoke --dual-freq --pe random --lr 0.5")
        assert sorted(p.name for p in (found / "snapshots").iterdir()) == [
            f"{i:06}.pt" for i in range(2, 21, 2)
        ]
        last = torch.load(found / "last.pt", weights_only=True)["model"]
        snapshot = torch.load(found / "snapshots" / "000020.pt", weights_only=True)
        assert all(torch.equal(last[k], snapshot[k]) for k in last) and last.keys() == snapshot.keys()
        with open(found / "curve.csv") as file:
            rows = list(csv.DictReader(file))
        assert [int(r["iteration"]) for r in rows] == [5, 10, 15, 20] and list(rows[0]) == [
            "iteration", "loss", "accuracy", "learning_rate", "seconds",
        ]  # fmt: skip
        assert float(rows[-1]["learning_rate"]) == 0


def test_curve_is_the_mean_since_the_last_row():
    with workplace() as folder:
        curves = []
        for every in (1, 5):
            assert cli(f"--scale smoke --held-out 32 --log-every {every} --overwrite")[0] == 0
            with open(trial_of(folder) / "curve.csv") as file:
                curves.append([[float(x) for x in r.values()] for r in csv.DictReader(file)])
        for n, row in enumerate(curves[1]):
            part = np.array(curves[0][5 * n : 5 * n + 5])
            assert row[0] == part[-1, 0] and np.allclose(row[1:3], part[:, 1:3].mean(0), rtol=1e-6)


def test_seeds_differ_and_repeat():
    with workplace() as folder:
        for out, seed in (("a", 0), ("b", 0), ("c", 1)):
            assert cli(f"--scale smoke --held-out 32 --seed {seed} --out {out}")[0] == 0
        found = {out: outcome(next(folder.glob(f"{out}/*/*/seed*"))) for out in "abc"}
        assert found["a"] == found["b"] and found["a"][0] != found["c"][0]


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------

REFUSED = {
    "--vocab 1": "--vocab",
    "--embed 7": "even",
    "--length 4 --min-length 5": "--min-length 5 is above --length 4",
    "--vocab 2 --length 3": "8 sequences",
    "--vocab 2 --length 3 --held-out 5": "half is the limit",
    "--batch 0": "--batch",
    "--batch x": "--batch",
    "--model transformer": "--model",
    "--pe rotary": "--pe",
    "--list fig99": "fig99",
    "--all fig99": "fig99",
    "--report fig99": "fig99",
    "--list fig2 --vocab 31": "no trial",
    "--report fig2 --vocab 31": "no trial",
    "--device tpu": "--device",
    "--lr -1": "--lr",
    "--lr nan": "--lr",
    "--lr inf": "--lr",
    "--warmup 11 --iterations 10": "--warmup 11 is above --iterations 10",
    "--vocab 15 --dual-freq": "odd",
    "--dual-freq --min-length 3": "--min-length",
    "--dual-freq --held-out 100": "multiple",
    "--dual-freq --vocab 2 --length 3 --held-out 12": "only 1 exist",
    "--seed -1": "--seed",
    "--save-every 0": "--save-every",
    "--beta2 1": "--beta2",
    "--beta2 -0.1": "--beta2",
    "--clip -1": "--clip",
    "--held-out 0": "--held-out",
    "--combine add --pe none": "--combine",
    "--combine add --pe dup": "--combine",
    "--out file": "--out",
    "--out file/deeper": "--out",
    "--out 'a\nb'": "line break",
    "--unknown": "--unknown",
    "--iterations": "--iterations",
}


def test_bad_input_is_refused_in_one_line():
    with workplace() as folder:
        Path("file").write_text("not a folder")
        if not torch.cuda.is_available():
            REFUSED["--device cuda"] = "no CUDA device"
        for words, said in REFUSED.items():
            code, out, err = cli("--scale smoke " + words)
            assert code == 2 and err.count("\n") == 1 and said in err and not out, (words, code, out, err)
            assert [p.name for p in folder.iterdir()] == ["file"], words


def test_defaults_are_the_papers():
    args = args_of("")
    wanted = dict(model="lstm", pe="sin", vocab=16384, length=64, seed=0, hidden=512, embed=512, batch=512)
    wanted |= dict(iterations=300_000, warmup=1000, lr=1e-3, beta2=0.999, eps=1e-8, clip=1.0, held_out=1024)
    assert wanted.items() <= vars(args).items()
    assert trial.trial_folder(reverse.TASK, args) == Path("runs/reverse/lstm-sin-K16384-L64/seed0")
    assert args_of("--iterations 500").warmup == 50
    dual = args_of("--dual-freq")
    assert dual.held_out == 4096 and dual.snapshot_every == 5000


def test_folder_names_hold_what_changes_results():
    def name(words):
        return trial.trial_folder(reverse.TASK, args_of(words)).parent.name

    plain = "lstm-sin-K16384-L64"
    for same in (
        "--save-every 7",
        "--log-every 3",
        "--snapshot-every 9",
        "--device cpu",
        "--warmup 1000",
        "--overwrite",
    ):
        assert name(same) == plain
    names = [
        name(x)
        for x in ("--lr 0.1", "--warmup 7", "--min-length 3", "--dual-freq", "--clip 0", "--combine add")
    ]
    assert len(set(names) | {plain}) == 7, names
    assert name("--scale quick").startswith("lstm-sin-K") and "hidden=" in name("--scale quick")
    assert name("--min-length 32") == f"{plain}-min-length=32"


def test_list_and_its_filters():
    def listed(words):
        code, out, _ = cli(words)
        assert code == 0
        return out.splitlines()

    sizes = {"fig2": 180, "fig3": 30, "fig11": 10, "fig12": 15, "fig13": 20, "fig14": 20, "section4.1": 15}
    for figure, trials in sizes.items():
        lines = listed(f"--list {figure}")
        assert len(lines) == len(set(lines)) == trials, (figure, len(lines))
    shared = 5 * (2 + 2 + 2 + 1)  # fig2 holds parts of 12, 13 and 4.1; fig11 part of 14
    assert len(listed("--list")) == sum(sizes.values()) - shared
    assert listed("--list fig2 --model gru --vocab 32 --seed 3 --pe sin") == [
        "python reverse.py --model gru --pe sin --vocab 32 --seed 3"
    ]
    carried = listed(
        "--list fig2 --model gru --vocab 32 --seed 3 --pe sin --out 'a b' --beta2 0.98 --scale paper"
    )
    assert carried[0].endswith("--scale paper") or "--beta2 0.98" in carried[0]
    _, args, given = trial.parse(reverse.TASK, shlex.split(carried[0])[2:])
    assert args.out == "a b" and given["beta2"] == 0.98
    for scale in ("quick", "smoke"):
        for figure in reverse.GRIDS[scale]:
            for line in listed(f"--scale {scale} --list {figure}"):
                args_of(" ".join(line.split()[2:]))  # every command is accepted
    assert len(listed("--scale smoke --list fig2")) >= 8


def test_all_goes_on_and_ends_with_the_worst_code():
    with workplace():
        words = "--scale smoke --all fig12"
        none, dup = (
            trial.trial_folder(reverse.TASK, args_of(f"--scale smoke --pe {pe}")) for pe in ("none", "dup")
        )
        none.parent.mkdir(parents=True)
        none.write_text("a file where a folder is expected")
        dup.mkdir(parents=True)
        with open(dup / "lock", "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # as another process would
            code, out, err = cli(words)
            assert code == 2 and "cannot write" in err and "another process" in err
            assert "fig12 (smoke scale)" in out and "1 of 3 trials finished" in out
            none.unlink()
            code, out, err = cli(words)
            assert code == 0 and out.count("is finished") == 1 and "2 of 3 trials finished" in out
        assert "3 of 3 trials finished" in cli(words)[1]


def test_all_stops_at_once():
    words = "--scale smoke --all fig13 --held-out 32 --iterations 3000 --save-every 50"
    with workplace() as folder:
        child = fork(words)
        wait_for(lambda: list(Path().glob("runs/*/*/seed*/last.pt")))
        os.kill(child, signal.SIGTERM)
        assert wait(child) == trial.STOPPED
        assert len(list(folder.glob("runs/*/*/seed*"))) == 1, "the next trial was not begun"


# ------------------------------------------------------------------------------------------------------------
# Report
# ------------------------------------------------------------------------------------------------------------


def made_up_results(figure, scale, value):
    """result.json files of a figure whose metrics are value(flags)."""
    _, args, given = trial.parse(reverse.TASK, ["--scale", scale])
    for flags, _, chosen in trial.grid(reverse.TASK, args, given, figure):
        folder = trial.trial_folder(reverse.TASK, chosen)
        folder.mkdir(parents=True)
        trial.write_json(folder / "result.json", {"metrics": value(flags)})


def simple(accuracy):
    return dict(
        token_accuracy=accuracy, sequence_accuracy=0, cross_entropy=1, damerau_levenshtein=10 - 10 * accuracy
    )


def test_report_of_fig2():
    def value(flags):
        loss = 0.01 * math.log2(flags["vocab"]) * (1 if flags["pe"] == "none" else 0.1)
        return simple(1 - loss - 0.001 * flags["seed"])

    with workplace() as folder:
        made_up_results("fig2", "paper", value)
        code, out, _ = cli("--report fig2")
        assert code == 0 and "180 of 180 trials finished" in out
        row = next(line for line in out.splitlines() if re.match(r" +lstm +none +16384", line))
        assert "0.8580" in row and re.search(r" 5 +0.8600 0.8590 0.8580 0.8570 0.8560$", row), row
        low, high = map(float, re.search(r"\[(.*?), (.*?)\]", row).groups())
        assert 0.856 <= low < 0.858 < high <= 0.860
        holds = [line for line in out.splitlines() if line.startswith("  holds")]
        assert len(holds) == 11 and "  fails" not in out
        assert "not installed" in out or (folder / "figures" / "reverse-fig2.png").exists()
    with workplace():
        made_up_results("fig2", "paper", lambda flags: simple(0.5 + 0.01 * flags["seed"]))
        _, out, _ = cli("--report fig2")
        assert len([line for line in out.splitlines() if line.startswith("  fails")]) == 11, out


def test_report_of_every_figure():
    def value(flags):
        accuracy = 0.9 if flags["pe"] == "none" else 0.99
        metrics = simple(accuracy + 0.001 * flags["seed"])
        metrics["by_length"] = {str(n): accuracy for n in range(4, 9)}
        return metrics | {"by_condition": {c: [accuracy] * 8 for c in reverse.CONDITIONS}}

    with workplace() as folder:
        for figure in reverse.GRIDS["paper"]:
            for path in folder.glob("runs"):
                shutil.rmtree(path)
            made_up_results(figure, "paper", value)
            code, out, _ = cli(f"--report {figure}")
            assert code == 0, figure
            finished = len(reverse.GRIDS["paper"][figure])
            assert f"\n{figure} (paper scale)" in out and f"{finished} of {finished} trials finished" in out
            if importlib.util.find_spec("matplotlib"):
                for suffix in (".png", ".svg"):
                    assert (folder / "figures" / f"reverse-{figure}{suffix}").stat().st_size > 5000


def test_report_names_broken_files():
    with workplace():
        made_up_results("fig13", "smoke", lambda flags: simple(0.5))
        paths = sorted(Path().glob("runs/*/*/seed0/result.json"))
        paths[0].write_text('{"metrics": {"token_acc')
        paths[1].write_text("[1, 2]")
        paths[2].write_text('{"metrics": {"other": 1}}')
        paths[3].with_name("stray.json").write_text("{}")
        code, out, _ = cli("--scale smoke --report fig13")
        assert code == 0 and all(str(p) in out for p in paths[:3]), out
        assert "1 of 4 trials finished" in out


def test_progress_over_many_trials():
    with workplace() as folder:
        assert cli("--scale smoke --model gru --pe none --vocab 8")[0] == 0
        assert (
            cli("--scale smoke --model lstm --pe none --vocab 8 --lr 1e38 --warmup 1")[0] == trial.NOT_FINITE
        )
        failed = next(folder.glob("runs/*/lstm-none-*lr=1e+38*"))
        failed.rename(failed.with_name(failed.name.replace("-lr=1e+38", "").replace("-warmup=1", "")))
        held = (
            folder / next(folder.glob("runs/*/gru-*")).parent / "gru-sin-K8-L8-batch=8-embed=16-held-out=32-"
        )
        running, stopped = (
            Path(f"{held}hidden=16-iterations=20".replace("gru-sin", x)) for x in ("gru-sin", "s4d-sin")
        )
        (running / "seed0").mkdir(parents=True)
        (stopped / "seed0").mkdir(parents=True)
        (running / "seed0" / "curve.csv").write_text(
            "iteration,loss,accuracy,learning_rate,seconds\n5,1,1,1,2.5\n"
        )
        out = io.StringIO()
        with open(running / "seed0" / "lock", "w") as file, contextlib.redirect_stdout(out):
            fcntl.flock(file, fcntl.LOCK_EX)
            report.main(["--scale", "smoke"])
        row = next(line.split() for line in out.getvalue().splitlines() if " fig2 " in line)
        assert row[2:8] == ["12", "1", "1", "1", "1", "8"], out.getvalue()
        assert row[8] == "0:00:03" or row[8] == "0:00:02", "the time spent is almost all of the running one's"
        assert row[9] != "unknown"
        (stopped / "seed0" / "result.json").write_text('{"metrics": {}, "seconds": null}')
        for path in (stopped / "seed0").iterdir():
            path.unlink()
        (stopped / "seed0").rmdir()
        (stopped / "seed0").write_text("a file where a folder is expected")
        assert captured(lambda: report.main(["--scale", "smoke"]))[0] is None
        code, before, _ = cli("--scale smoke --report fig2")
        assert code == 0 and "1 of 12 trials finished" in before


def test_claims_of_reverse_ordering():
    """Trials as the paper found hold all claims; where all is alike, only "does not help" holds."""

    def as_found(flags):
        vanilla = 1 - 0.02 * math.log2(flags["vocab"])
        accuracy = {"sin": 0.99, "random": 0.97, "learned": 0.96}.get(flags["pe"], vanilla)
        metrics = simple(accuracy + 0.001 * flags["seed"]) | {"by_condition": {}}
        lost = {"gru": slice(0, 64), "lstm": slice(0, 16), "s4d": slice(16, 32)}[flags["model"]]
        for condition in reverse.CONDITIONS:
            values = np.full(64, 0.99)
            if condition.endswith("/rare") and flags["pe"] == "none":
                values[lost] = 0.3
            if condition == "rare/rare" and flags["model"] == "gru":
                values[:32] = 0.3  # with the encoding too
            metrics["by_condition"][condition] = values.tolist()
        return metrics

    def alike(flags):
        by_condition = {c: [0.5] * 64 for c in reverse.CONDITIONS}
        return simple(0.5 + 0.001 * flags["seed"]) | {"by_condition": by_condition}

    def helped_by_size(flags):
        bigger = flags["pe"] == "dup" or flags.get("iterations") == 600_000 or flags.get("batch") == 1024
        return simple(0.9 * bigger + 0.001 * flags["seed"])

    def holds(claim, content):
        grid = reverse.GRIDS["paper"][claim.figure]
        cells = report.Cells([(flags, content(flags)) for flags in grid]).where(**claim.where)
        return claim.check(cells)[0]

    for claim in reverse.CLAIMS:
        if claim.figure not in reverse.GRIDS["paper"]:
            continue  # a claim of another figure, for another grid
        assert holds(claim, as_found) is True, claim.text
        without_effect = "not help" in claim.text
        assert holds(claim, alike) is without_effect, claim.text
        if without_effect:
            assert holds(claim, helped_by_size) is False, claim.text


def test_two_numbers_of_the_same_trials_are_compared_in_pairs():
    values = [0.5, 0.6, 0.7, 0.8, 0.9]
    trials = [({"pe": "none", "seed": n}, {"a": x + 0.05, "b": x}) for n, x in enumerate(values)]
    more = report.higher(lambda m: m["a"], {}, {}, than=lambda m: m["b"])
    assert more(report.Cells(trials))[0] is True
    assert report.difference([x + 0.05 for x in values], values)[0] is False, "not so between trials"


def test_claims_need_trials():
    cells = report.Cells(
        [({"pe": pe, "seed": s}, {"a": x + s}) for pe, x in (("none", 0), ("sin", 9)) for s in range(3)]
    )
    check = report.higher(lambda m: m["a"], {"pe": "sin"}, {"pe": "none"})
    assert check(cells)[0] is True
    assert report.higher(lambda m: m["a"], {"pe": "none"}, {"pe": "sin"})(cells)[0] is False
    fewer = report.Cells([t if t[0]["seed"] else (t[0], None) for t in cells.trials])
    assert check(fewer)[0] is None and "n = 2 and 2" in check(fewer)[1]
    assert report.above(8, lambda m: m["a"], {"pe": "sin"})(cells)[0] is True
    assert report.above(8, lambda m: m["a"], {})(cells)[0] is False
    assert report.above(8, lambda m: m["a"], {})(fewer)[0] is None


# ------------------------------------------------------------------------------------------------------------
# Sorting, delayed addition, predecessor query
# ------------------------------------------------------------------------------------------------------------

SCRIPTS, LANGUAGE_MODELS = (sort, delayed_add, predecessor), (lm_wikitext, lm_shakespeare)


def task_data(script, vocab, length, held_out=4, batch=64, seed=0):
    args = argparse.Namespace(vocab=vocab, length=length, held_out=held_out, batch=batch, seed=seed)
    return script.TASK.build(args, torch.device("cpu"))


def run(script, *words):
    """-> (exit code, stdout, stderr, what exists afterwards) of a command line, in a folder of its own."""
    with workplace() as folder:
        code, out, err = cli(shlex.join(words), script.TASK)
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return code, out, err, files


def model_of(script, *words):
    """The model of a command line, as its trial begins."""
    _, args, _ = trial.parse(script.TASK, ["--scale", "smoke", *words])
    trial.complete(script.TASK, args)
    return trial.State(script.TASK, args, torch.device("cpu")).model


def test_sort_targets_are_the_inputs_in_order_with_ties():
    data = task_data(sort, vocab=6, length=9)
    for i in range(1, 4):
        episode = data.training_episode(i)
        for inputs, targets in zip(episode.inputs.tolist(), episode.targets.tolist()):
            assert targets == sorted(inputs[:9]) and inputs[9:] == [6] * 9
            assert len(set(targets)) < 9  # nine of six integers: there are ties
        assert episode.steps == slice(9, 18) and episode.weight is None


def test_delayed_addition_targets_use_both_phases_and_wrap():
    vocab, length, wrapped = 7, 5, 0
    data = task_data(delayed_add, vocab, length)
    for i in range(1, 4):
        episode = data.training_episode(i)
        for inputs, targets in zip(episode.inputs.tolist(), episode.targets.tolist()):
            for j in range(1, length + 1):  # the paper's numbers from 1
                total = inputs[length + 1 - j - 1] + inputs[length + j - 1]
                assert targets[j - 1] == total - vocab * (total >= vocab)
                wrapped += total >= vocab
        assert episode.inputs.shape == (64, 2 * length) and episode.steps == slice(length, 2 * length)
        assert episode.inputs.max() == vocab - 1  # the command, K, is never fed
    assert wrapped > 100


def test_predecessor_targets_precede_the_query():
    data = task_data(predecessor, vocab=12, length=5)
    for i in range(1, 4):
        episode = data.training_episode(i)
        for (*x, query), (target,) in zip(episode.inputs.tolist(), episode.targets.tolist()):
            assert [a for a, b in itertools.pairwise(x) if b == query] == [target]  # one answer, no other
        assert episode.inputs.shape == (64, 6) and episode.steps == slice(5, 6)


def test_worked_examples_of_the_docstrings():
    for script in SCRIPTS:
        example = re.search(
            r"^ +in   ([\d _]+?)(?:   .*)?\n +out  ([\d .]+?)(?:   .*)?$", script.__doc__, re.MULTILINE
        )
        inputs, outputs = (words.split() for words in example.groups())
        assert len(inputs) == len(outputs)
        length = len(inputs) - 1 if script is predecessor else len(inputs) // 2
        data = task_data(script, vocab=10, length=length)
        episode = data.episode(torch.tensor([[int(x) for x in inputs if x != "_"]]))
        assert episode.inputs[0].tolist() == [10 if x == "_" else int(x) for x in inputs]
        answered = ["."] * len(inputs)
        answered[episode.steps] = [str(x) for x in episode.targets[0].tolist()]
        assert answered == outputs, script.__name__


def test_predecessor_rows_are_all_different_and_uniform_at_paper_size():
    data = task_data(predecessor, vocab=1024, length=16)
    rows = data.draw(common.key(1), (40_000,))
    x, ordered = rows[:, :16], rows[:, :16].sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all() and x.min() == 0 and x.max() == 1023
    for t in (0, 1, 8, 15):
        assert_uniform(x[:, t].tolist(), 1024)
    asked = (x == rows[:, 16:]).nonzero()  # one (row, position) for each row
    assert asked[:, 0].tolist() == list(range(40_000))
    assert_uniform(asked[:, 1].tolist(), 15)
    assert asked[:, 1].min() == 1  # 0-based: the first integer is never queried


def test_predecessor_draws_every_ordered_choice_and_query_alike():
    for vocab, length, exist in ((5, 3, 5 * 4 * 3 * 2), (4, 4, 4 * 3 * 2 * 3), (3, 2, 3 * 2)):
        data = task_data(predecessor, vocab, length, held_out=1)
        assert predecessor.queries(argparse.Namespace(vocab=vocab, length=length)) == exist
        assert_uniform(map(tuple, data.draw(common.key(7), (200, 200)).flatten(0, 1).tolist()), exist)


def test_sort_and_delayed_addition_draw_uniform_integers():
    for script, width in ((sort, 4), (delayed_add, 8)):
        rows = task_data(script, vocab=32, length=4).draw(common.key(3), (10_000,))
        assert rows.shape == (10_000, width)
        for t in range(width):
            assert_uniform(rows[:, t].tolist(), 32)
        assert_uniform(zip(rows[:, 0].tolist(), rows[:, -1].tolist()), 32 * 32)  # ends: independent


def test_drawing_never_waits_for_the_device():
    for script in SCRIPTS:
        data = task_data(script, vocab=16, length=4)
        # a tensor without values: whatever needs one of them on the host raises
        rows = data.draw(torch.empty((), dtype=torch.int64, device="meta"), (8,))
        assert data.episode(rows).targets.device.type == "meta"


def test_held_out_sequences_are_never_drawn_however_few_exist():
    for script, vocab, length, count, exist in (
        (sort, 2, 4, 6, 16),
        (delayed_add, 2, 2, 6, 16),
        (predecessor, 4, 3, 16, 48),
    ):
        data = task_data(script, vocab, length, held_out=count, batch=1000)
        held_out = set(map(tuple, data.held_out.rows.tolist()))
        assert len(held_out) == count
        drawn = data.draw(common.key(data.held_out.seed, common.TRAINING, 1), (20_000,)).tolist()
        assert sum(tuple(row) in held_out for row in drawn) > 4000  # collisions are real
        trained = [tuple(row) for i in range(1, 21) for row in data.held_out.training_rows(i, 1000).tolist()]
        assert not held_out & set(trained)
        assert_uniform(trained, exist - count)


def test_held_out_sequences_depend_on_the_seed_alone_and_are_all_tested():
    for script in SCRIPTS:
        data = task_data(script, 16, 4, held_out=50, batch=8)
        assert torch.equal(data.held_out.rows, task_data(script, 16, 4, held_out=50, batch=64).held_out.rows)
        assert not torch.equal(
            data.held_out.rows, task_data(script, 16, 4, held_out=50, seed=1).held_out.rows
        )
        episode = data.episode(data.held_out.rows)

        def knows_the_answers(inputs, steps, data=data):
            """Right everywhere but in the first row of each part of at most 8 rows."""
            targets = data.episode(inputs[:, : data.held_out.rows.shape[1]]).targets.clone()
            targets[0] = (targets[0] + 1) % 16
            return 100.0 * torch.nn.functional.one_hot(targets.T, 16).float()  # (M, B, K)

        metrics = data.evaluate(knows_the_answers)
        right = 1 - 7 / 50  # 50 rows are seven parts
        name = "accuracy" if script is predecessor else "token_accuracy"
        assert abs(metrics[name] - right) < 1e-9, (script.__name__, metrics)
        assert abs(metrics["cross_entropy"] - 100 * 7 / 50) < 1e-3
        if script is not predecessor:
            assert abs(metrics["sequence_accuracy"] - right) < 1e-9
            assert metrics["damerau_levenshtein"] > 0
        assert len(episode.targets) == 50


def test_hide_encoding_zeroes_the_vectors_of_one_phase_only():
    for pe in ("sin", "random", "learned"):
        whole = model_of(sort, "--pe", pe).encoding(16)
        for phase, hidden, shown in (
            ("input", slice(0, 8), slice(8, 16)),
            ("output", slice(8, 16), slice(0, 8)),
        ):
            model = model_of(sort, "--pe", pe, "--hide-encoding", phase)
            vectors = model.encoding(16)
            assert (vectors[hidden] == 0).all() and torch.equal(vectors[shown], whole[shown])
            assert (whole != 0).any(1).all()
            read = model.represent(torch.zeros(3, 16, dtype=torch.int64))  # (T, B, 2E)
            assert torch.equal(read[..., 16:], vectors[:, None].expand(-1, 3, -1).to(read.dtype))
            if pe == "learned":
                vectors.sum().backward()
                gradient = model.encoding.table.grad
                assert (gradient[hidden] == 0).all() and (gradient[shown] == 1).all()


def test_hide_encoding_names_the_folder_and_goes_into_every_command():
    _, args, _ = trial.parse(sort.TASK, ["--hide-encoding", "input"])
    trial.complete(sort.TASK, args)
    assert (
        str(trial.trial_folder(sort.TASK, args)) == "runs/sort/lstm-sin-K16384-L64-hide-encoding=input/seed0"
    )
    code, out, _, _ = run(sort, "--list", "fig8", "--pe", "sin", "--hide-encoding", "output")
    assert code == 0 and len(out.splitlines()) == 55
    assert all("--hide-encoding output" in line for line in out.splitlines())


def test_defaults_and_grids_are_the_papers():
    for script, vocab, length, iterations, steps in (
        (sort, 16384, 64, 300_000, 128),
        (delayed_add, 1024, 16, 600_000, 32),
        (predecessor, 1024, 16, 300_000, 17),
    ):
        _, args, _ = trial.parse(script.TASK, [])
        trial.complete(script.TASK, args)
        assert (args.vocab, args.length, args.iterations) == (vocab, length, iterations)
        assert (args.model, args.pe, args.seed, args.batch, args.held_out) == ("lstm", "sin", 0, 512, 1024)
        assert script.TASK.positions(args) == steps
    for script, figure, trials in (
        (sort, "fig8", (4 + 7) * 2 * 5),
        (sort, "fig12", 3 * 5),
        (delayed_add, "fig7", 4 * 2 * 5),
        (predecessor, "fig10", 5 * 2 * 5),
    ):
        code, out, _, files = run(script, "--list", figure)
        assert code == 0 and len(set(out.splitlines())) == trials and not files


def test_bad_input_is_refused_in_one_line_and_creates_nothing():
    wrong = (
        (predecessor, "--vocab 8 --length 9", "need as large a vocabulary"),
        (predecessor, "--length 1", "at least 2"),
        (predecessor, "--vocab 4 --length 3 --held-out 49", "the 48 sequences and queries that exist"),
        (predecessor, "--vocab 4 --length 3 --held-out 48", "half is the limit"),
        (delayed_add, "--vocab 2 --length 2 --held-out 17", "the 16 sequences"),
        (delayed_add, "--vocab 2 --length 2 --held-out 9", "half is the limit"),
        (sort, "--vocab 2 --length 4 --held-out 17", "the 16 sequences"),
        (sort, "--vocab 2 --length 4 --held-out 9", "half is the limit"),
        (sort, "--hide-encoding input --pe none", "needs an encoding"),
        (sort, "--hide-encoding output --pe dup", "needs an encoding"),
        (sort, "--hide-encoding both", "invalid choice"),
        (sort, "--list fig7", "choose from fig8, fig12"),
        (delayed_add, "--hide-encoding input", "unrecognized arguments"),
        (predecessor, "--vocab 1", "whole number from 2"),
    )
    for script, words, expected in wrong:
        code, _, err, files = run(script, *words.split())
        assert code == 2 and not files, words
        assert err.count("\n") == 1 and expected in err, err


def test_every_model_with_every_encoding_runs_every_task():
    for script, model, pe in itertools.product(SCRIPTS, common.LAYERS, common.ENCODINGS):
        words = ["--scale", "smoke", "--model", model, "--pe", pe, "--iterations", "2"]
        code, _, err, files = run(script, *words)
        assert code == 0 and any(name.endswith("result.json") for name in files), (words, err)


def test_smoke_scale_end_to_end():
    metrics = {"token_accuracy", "sequence_accuracy", "cross_entropy", "damerau_levenshtein"}
    for script, trials, expected in (
        (sort, 9, metrics),
        (delayed_add, 4, metrics),
        (predecessor, 4, {"accuracy", "cross_entropy"}),
    ):
        code, out, err, files = run(script, "--scale", "smoke", "--all")
        results = [json.loads(text) for name, text in files.items() if name.endswith("result.json")]
        assert code == 0 and len(results) == trials, err
        assert all(set(r["metrics"]) == expected and r["iterations"] == 20 for r in results)
        for figure in script.FIGURES:
            assert f"{figure} (smoke scale)" in out
        assert "the encoding helps" in out and "not enough trials" in out


def test_the_reports_shared_with_reverse_ordering():
    flags = dict(model="lstm", vocab=16)
    trials = [
        (
            flags | dict(pe=pe, seed=seed),
            {"token_accuracy": mean + seed / 100, "damerau_levenshtein": 1 - mean},
        )
        for pe, mean in (("none", 0.3), ("dup", 0.3), ("sin", 0.6))
        for seed in range(3)
    ]
    cells = report.Cells(trials)
    assert [claim.check(cells)[0] for claim in report.DUP_CLAIMS] == [True] * 3
    (claim,) = report.helps_at_each_vocab("fig7", report.accuracy, {"quick": {"fig7": [flags]}})
    assert claim.where == dict(vocab=16) and claim.check(cells)[0] is True
    panels = report.gather(sort.FIGURES["fig8"], cells)
    assert panels["LSTM", "token accuracy"]["sin"] == {16: [0.6, 0.61, 0.62]}
    assert panels["LSTM", "Damerau-Levenshtein distance"]["none"] == {16: [0.7] * 3}
    assert panels == report.gather(reverse.FIGURES["fig2"], cells)


# ------------------------------------------------------------------------------------------------------------
# Gradient stability
# ------------------------------------------------------------------------------------------------------------

# The plain way: the Jacobian of the model's own forward pass, one sequence after the other.


def jacobian(model, row, target):
    """(D, numbers in the state) for one row (T,), in the model's precision."""
    layer, x = model.layer, model.represent(row[None])  # (T, 1, E)
    if isinstance(layer, common.S4D):
        u = layer.project(x)[:, 0]  # (T, H)
        dtA, weights = layer.discretised()
        C = torch.view_as_complex(layer.C)
        state = torch.zeros_like(dtA)
        for step in u[:target]:
            state = dtA.exp() * state + (weights / C) * step[:, None]

        def output(parts):
            state = torch.view_as_complex(parts)
            for step in u[target:]:
                state = dtA.exp() * state + (weights / C) * step[:, None]
            y = 2 * (C * state).sum(1).real + layer.D * u[-1]
            return F.glu(layer.mix(F.gelu(y)), dim=0)

        expected = layer(x, slice(len(x) - 1, len(x)))[0, 0]
        state = torch.view_as_real(state).detach()
    else:
        plain = torch.nn.LSTM if isinstance(layer, torch.nn.LSTM) else torch.nn.GRU
        state = plain.forward(layer, x[:target])[1]
        state = torch.cat(state).flatten() if plain is torch.nn.LSTM else state.flatten()

        def output(z):
            start = tuple(z.view(2, 1, 1, -1)) if plain is torch.nn.LSTM else z.view(1, 1, -1)
            return plain.forward(layer, x[target:], start)[0][-1, 0]

        expected = plain.forward(layer, x)[0][-1, 0]
    assert torch.allclose(output(state), expected, rtol=1e-4, atol=1e-6)  # the right state, the right output
    return torch.func.jacrev(output)(state.detach()).flatten(1).detach()


def stability_of(A, B):
    """SPEC's sum_i w_i cos(J_i^A, J_i^B), with a loop over the rows."""
    norms = [(a.norm() * b.norm()).item() for a, b in zip(A, B)]
    terms = [n / sum(norms) * ((a @ b).item() / n) for n, a, b in zip(norms, A, B) if n > 0]
    return sum(terms)


def plain_stability(model, a, b, target):
    rows = zip(a, b)
    return torch.tensor(
        [stability_of(jacobian(model, x, target), jacobian(model, y, target)) for x, y in rows],
        dtype=torch.double,
    )


def some(kind, pe, length=6, target=1, count=1, combine="concat", seed=0, hidden=12, embed=8):
    torch.manual_seed(seed)
    model = common.Model(kind, pe, 10, embed, hidden, 2 * length, combine).double()
    pairs = stability.draw_pairs(seed, 10, length, target, count).flatten(0, 1)
    return model, *pairs.unbind(1), target


def test_stability_equals_jacrev_of_the_model():
    for seed, kind in enumerate(common.LAYERS):
        for pe, combine in (("none", "concat"), ("sin", "concat"), ("learned", "add"), ("dup", "concat")):
            for length, target in ((3, 1), (6, 4), (4, 4)):
                case = some(kind, pe, length, target, 1, combine, seed, hidden=9 + seed)
                error = (stability.stability(*case) - plain_stability(*case)).abs().max()
                assert error < 1e-10, (kind, pe, combine, length, target, error)


def test_stability_of_same_sequences_symmetry_bounds():
    for kind in common.LAYERS:
        model, a, b, target = some(kind, "sin", target=2, count=8)
        for precise in (True, False):
            model = model if precise else model.float()
            same = stability.stability(model, a, a, target)
            assert torch.allclose(same, torch.ones_like(same), rtol=0, atol=1e-12), same
            found = stability.stability(model, a, b, target)
            assert torch.allclose(found, stability.stability(model, b, a, target), rtol=0, atol=1e-6)
            assert (found.abs() <= 1).all() and (found < 1 - 1e-6).any(), found
    rounded = torch.tensor([[1.0, 1.0 + 1e-6], [-1.0, -1.0 - 1e-6]])
    assert (stability.weighted_cosine(rounded, rounded.abs() > 0, rounded.abs() > 0).abs() <= 1).all()


def silence(model, rows):
    """Set weights so that these outputs do not depend on the state at all."""
    layer, H = model.layer, model.readout.in_features
    with torch.no_grad():
        if isinstance(layer, common.S4D):
            layer.mix.bias[H:][rows] = -1e4
        elif isinstance(layer, torch.nn.LSTM):
            layer.bias_ih_l0[3 * H :][rows] = -1e4  # the output gate
        else:
            layer.bias_ih_l0[H : 2 * H][rows] = -1e4  # no carry, and the candidate saturated
            layer.bias_ih_l0[2 * H :][rows] = 1e4
    return model


def test_stability_zero_rows_count_for_nothing():
    for kind in common.LAYERS:
        model, a, b, target = some(kind, "sin", count=2)
        silence(model, slice(0, 5))
        A = jacobian(model, a[0], target)
        assert (A[:5] == 0).all() and A[5:].abs().sum(1).gt(0).all()
        found = stability.stability(model, a, b, target)
        assert (found - plain_stability(model, a, b, target)).abs().max() < 1e-10
        nothing = stability.stability(silence(model, slice(None)), a, b, target)
        assert (nothing == 0).all(), nothing


def loses(model, length, way):
    """Check single precision; what it would be off by if Jacobians were not rescaled in this way."""
    a, b = stability.draw_pairs(1, 16, length, 1, 1).flatten(0, 1).unbind(1)
    exact = stability.stability(model.double(), a, b, 1)
    model.float()
    found = stability.stability(model, a, b, 1)
    assert found.isfinite().all() and (found - exact).abs().max() < 1e-4, (found, exact)
    before = {name: getattr(stability, name) for name in way}
    try:
        for name, value in way.items():
            setattr(stability, name, value)
        return (stability.stability(model, a, b, 1) - exact).abs().max()
    finally:
        for name, value in before.items():
            setattr(stability, name, value)


def test_stability_of_gradients_that_underflow():
    never, only_at_the_end = {"rescale": lambda *parts: None}, {"RESCALED": 10**9}
    for kind in ("gru", "lstm"):
        torch.manual_seed(1)
        model = common.Model(kind, "none", 16, 32, 64)
        loses(model, 64, never)
        if kind == "lstm":  # at initial weights a GRU's gradients last longer
            assert loses(model, 64, never) > 0.1
            assert loses(model, 128, only_at_the_end) > 0.1
        with torch.no_grad():  # nearly closed gates: too small after seven steps
            model.layer.bias_ih_l0[: -64 if kind == "gru" else 128] -= 7
            if kind == "lstm":
                model.layer.bias_ih_l0[192:] -= 7
        assert loses(model, 4, never) > 0.1 or kind == "gru"


def test_stability_in_single_precision_at_paper_size():
    for kind, vocab in (("gru", 64), ("lstm", 1024)):
        torch.manual_seed(0)
        model = common.Model(kind, "sin", vocab, 512, 512, 128)
        a, b = stability.draw_pairs(0, vocab, 64, 1, 1)[1].unbind(1)  # Frequent target, Rare disturbants
        single = stability.stability(model, a, b, 1)
        assert (single - stability.stability(model.double(), a, b, 1)).abs().max() < 1e-5


def test_stability_chunks_and_memory():
    for kind in common.LAYERS:
        model, a, b, target = some(kind, "sin", count=4)
        whole = stability.stability(model, a, b, target)
        one_by_one = stability.stability(model, a, b, target, memory=1e-9)
        assert torch.allclose(whole, one_by_one, rtol=0, atol=1e-12)
    words = """
import sys

sys.path.insert(0, sys.argv[2])
import torch, common, stability
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
torch.set_num_threads(1)
model = common.Model("lstm", "sin", 16, 128, 256, 16)
a, b = stability.draw_pairs(0, 16, 5, 1, 32).flatten(0, 1).unbind(1)
stability.stability(model, a[:1], b[:1], 1)
before = peak()
stability.stability(model, a, b, 1, float(sys.argv[1]))
print(peak() - before)
"""
    kilobytes = int(subprocess.check_output([sys.executable, "-c", words, "0.125", str(HERE)]))
    assert 0.125 * 2**20 / 2 < kilobytes < 0.125 * 2**20 * 1.1, kilobytes


def test_stability_pairs():
    vocab, length, target = 10, 12, 5
    pairs = stability.draw_pairs(3, vocab, length, target, 50)
    assert pairs.shape == (4, 50, 2, 2 * length + 1 - target) and (pairs[..., length:] == vocab).all()
    a, b = pairs[..., :length].unbind(2)
    assert (a[..., :target] == b[..., :target]).all() and (a[..., target:] != b[..., target:]).any(-1).all()
    rare = pairs[..., :length] >= vocab // 2
    for condition, name in enumerate(reverse.CONDITIONS):
        kinds = [word == "rare" for word in name.split("/")]
        assert (rare[condition, ..., target - 1] == kinds[0]).all()
        assert (rare[condition, ..., : target - 1] == kinds[1]).all()
        assert (rare[condition, ..., target:] == kinds[1]).all()
    assert (a[0] != a[1] % (vocab // 2)).any() and (a[2] != a[3] - vocab // 2).any()
    assert all(len(part.unique()) == vocab // 2 for part in (a[0], b[3]))
    assert (stability.draw_pairs(3, vocab, length, target, 9) == pairs[:, :9]).all()
    assert (stability.draw_pairs(4, vocab, length, target, 50) != pairs).any()
    defaults = [stability.default_target("s4d", n) for n in (64, 8, 1)]
    assert defaults == [23, 3, 1] and stability.default_target("gru", 64) == 1


# The command line, on a smoke trial


def stability_command(*words):
    return captured(lambda: stability.main(list(words)))


def trained(*words):
    return cli(shlex.join(["--scale", "smoke", *words]))[0] == 0


def folder_of(*words):
    return trial.trial_folder(reverse.TASK, args_of(shlex.join(["--scale", "smoke", *words])))


def refused(*words):
    code, _, err = stability_command(*words)
    assert code == 2 and err.count("\n") == 1 and err.startswith("stability.py: error: "), (code, err)
    return err


def test_stability_refusals():
    with workplace():
        smoke = ("--scale", "smoke", "--model", "gru")
        assert "no trial in runs/reverse/gru-sin-K8-L8" in refused(*smoke)
        assert "no trial in elsewhere" in refused("--trial", "elsewhere")
        assert "choose from 1 to 8" in refused(*smoke, "--target", "9")
        assert "at least 1" in refused(*smoke, "--target", "0")
        assert "multiple of 4" in refused(*smoke, "--pairs", "6")
        assert "evaluates anew" in refused(*smoke, "--train", "--overwrite")
        assert "leave out" in refused(*smoke, "--min-length", "4")
        assert "leave out" in refused("--trial", "elsewhere", "--train")
        assert not list(Path().iterdir())

        plain = ("--model", "gru", "--iterations", "2")
        dual = (*plain, "--dual-freq", "--snapshot-every", "0")
        assert trained(*plain) and trained(*dual)
        assert "not a dual-frequency trial" in refused("--trial", str(folder_of(*plain)))
        assert "no snapshots" in refused("--trial", str(folder_of(*dual)))
        assert "no snapshots" in refused(*smoke, "--iterations", "2")
        snapshots = folder_of(*dual) / "snapshots"
        snapshots.mkdir()
        (snapshots / "000002.pt").write_bytes(b"torn")
        assert "000002.pt cannot be used" in refused(*smoke, "--iterations", "2")
        assert "choose from 1 to 8" in refused("--trial", str(folder_of(*dual)), "--target", "9")


def test_stability_from_trial_to_report():
    with workplace():
        smoke = ("--scale", "smoke", "--model", "s4d", "--pairs", "8")
        code, out, err = stability_command(*smoke, "--train")
        assert code == 0, err
        folder = folder_of("--model", "s4d", "--dual-freq")
        saved = json.loads((folder / "stability.json").read_text())
        result = json.loads((folder / "result.json").read_text())
        assert set(result) - set(saved) <= {"metrics", "iterations", "iterations_per_second"}
        assert saved["config"] == result["config"] and (saved["pairs"], saved["target"]) == (8, 3)
        assert list(saved["by_condition"]) == reverse.CONDITIONS

        # The numbers of the last snapshot, from the weights in last.pt and a jacrev of the model
        model = common.Model("s4d", "sin", 8, 16, 16, 16)
        model.load_state_dict(trial.unpack(folder / "last.pt", "cpu")["model"])
        pairs = stability.draw_pairs(0, 8, 8, 3, 2)
        for rows, values in zip(pairs, saved["by_condition"].values()):
            assert list(values) == [str(i) for i in range(2, 21, 2)]
            expected = plain_stability(model.double(), *rows.unbind(1), 3).mean().item()
            assert abs(values["20"] - expected) < 1e-5

        # Only snapshots without numbers are evaluated; all are with --overwrite or another target
        (folder / "snapshots" / "000010.pt").rename(folder / "snapshots" / "000011.pt")
        code, out, _ = stability_command("--trial", str(folder), "--pairs", "8")
        assert code == 0 and "iteration 11 " in out and "iteration 8 " not in out
        again = json.loads((folder / "stability.json").read_text())["by_condition"]["rare/rare"]
        assert again["11"] == saved["by_condition"]["rare/rare"]["10"]
        code, out, _ = stability_command(*smoke)
        assert code == 0 and "iteration 11 " not in out
        code, out, _ = stability_command(*smoke, "--overwrite")
        assert code == 0 and out.count("iteration ") == 10
        code, out, _ = stability_command(*smoke, "--target", "1")
        assert code == 0 and out.count("iteration ") == 10 and "target at t = 1" in out

        assert stability_command(*smoke, "--pe", "none", "--train")[0] == 0
        code, out, err = stability_command("--scale", "smoke", "--report")
        assert code == 0, err
        last = json.loads((folder / "stability.json").read_text())["by_condition"]["rare/rare"]["20"]
        assert f"{last:.4f}" in out and "2 of 6 trials" in out and "s4d trials differ in (pairs" in out
        assert out.count("not enough trials") == 5, out
        assert Path("figures/stability-fig5-smoke.png").stat().st_size > 10_000

        code, out, err = stability_command("--scale", "smoke", "--list", "fig5", "--pairs", "8")
        assert code == 0 and out.count("\n") == 6 and "--pairs 8" in out and "--dual-freq" in out
        code, out, err = stability_command("--scale", "smoke", "--all", "--model", "s4d", "--pairs", "8")
        assert code == 0 and out.count("has them all") == 2, err


def test_stability_claims():
    """A trial set that shows the paper's finding holds all claims; its opposite fails them."""

    def content(early, late):
        values = {"5000": early, "10000": late}
        rare = {c: values for c in reverse.AMONG_RARE}
        frequent = {c: {"5000": 0.99, "10000": 0.99} for c in reverse.CONDITIONS if c not in rare}
        return {"by_condition": rare | frequent, "pairs": 4, "target": 1, "seconds_per_snapshot": 1}

    stable, falls, rises = content(0.95, 0.95), content(0.95, 0.3), content(0.8, 0.95)
    vanilla = {"gru": (falls, stable), "lstm": (falls, stable), "s4d": (rises, falls)}
    for claim in stability.CLAIMS:
        for expected in (True, False):
            trials = []
            for model, contents in vanilla.items():
                for pe in ("none", "sin"):
                    shown = contents[0 if expected else 1] if pe == "none" else stable if expected else falls
                    trials += [(dict(model=model, pe=pe, seed=seed), shown) for seed in range(3)]
            cells = report.Cells(trials).where(**claim.where)
            holds, numbers = claim.check(cells)
            assert holds is expected, (claim.text, expected, numbers)


# ------------------------------------------------------------------------------------------------------------
# Tiny Shakespeare
# ------------------------------------------------------------------------------------------------------------

SHAKESPEARE, WHOLE_TEXT = lm_shakespeare.TASK, HERE / "data" / "tinyshakespeare.txt"
A_TEXT = (HERE / "README.md").read_bytes()[:16_000]


@contextlib.contextmanager
def library(text=A_TEXT):
    """A workplace with a text where lm_shakespeare.py looks for one."""
    with workplace() as folder:
        Path("data").mkdir()
        Path("data/tinyshakespeare.txt").write_bytes(text)
        yield folder


def transformer(pe, vocab=11, width=12, heads=2, layers=2, positions=9, spread=0.3):
    """A model in float64 with weights large enough for everything to matter."""
    torch.manual_seed(3)
    model = lm_shakespeare.Transformer(pe, vocab, width, heads, layers, positions).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def shakespeare_args(words="", task=SHAKESPEARE):
    return args_of(f"--scale smoke {words}", task)


def toeplitz_error(scores):
    """How far scores (..., T, T) are from depending on the distance alone."""
    return (scores[..., 1:, 1:] - scores[..., :-1, :-1]).abs().max().item()


def test_rotary_scores_depend_on_the_distance_alone():
    torch.manual_seed(1)
    rotary, (q, k) = common.Rotary(5, 6), torch.randn(2, 6, dtype=torch.float64)
    queries, keys = rotary(q.expand(40, 6)), rotary(k.expand(40, 6))  # longer than the 5 positions kept
    scores = queries @ keys.T
    assert toeplitz_error(scores) < 1e-10
    theta = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    for m, n in ((0, 0), (7, 3), (3, 7), (39, 0)):  # Eq. 6, summed over the pairs
        product = torch.complex(q[0::2], q[1::2]) * torch.complex(k[0::2], k[1::2]).conj()
        wanted = (product * torch.polar(torch.ones(3, dtype=torch.float64), (m - n) * theta)).real.sum()
        assert abs(scores[m, n] - wanted) < 1e-10
    assert abs(scores[7, 3] - scores[3, 7]) > 1e-3, "it does depend on the distance"


def test_relation_2_holds_for_rotary_and_fails_for_absolute_encodings():
    """The same token everywhere: scores that depend on the distance alone are the same along diagonals."""
    for pe in lm_shakespeare.ENCODINGS:
        model = transformer(pe)
        x = model.position(model.embedding(torch.full((1, 9), 4)))
        q, k, _ = model.blocks[0].attention.queries_keys_values(model.blocks[0].norm1(x))
        error = toeplitz_error(q @ k.transpose(-1, -2))
        assert error < 1e-10 if pe in ("none", "rotary") else error > 0.01, (pe, error)


def test_what_is_added_to_the_tokens():
    torch.manual_seed(1)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    added = {pe: transformer(pe).position(x) for pe in lm_shakespeare.ENCODINGS}
    assert torch.equal(added["none"], x) and torch.equal(added["rotary"], x)
    for t, i in itertools.product(range(7), range(6)):  # Eq. 5
        angle = t / 10000 ** (2 * i / 12)
        close(added["sin"][:, t, 2 * i], x[:, t, 2 * i] + math.sin(angle), 1e-12)
        close(added["sin"][:, t, 2 * i + 1], x[:, t, 2 * i + 1] + math.cos(angle), 1e-12)
    close(added["learned"], x + transformer("learned").position.encoding.table[:7], 1e-12)
    position = transformer("layernorm-learned").position  # Eq. 9
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(
        added["layernorm-learned"],
        normal * position.norm.weight + position.norm.bias + position.encoding.table[:7],
        1e-12,
    )


def test_learned_encoding_has_a_last_position_and_parameters():
    for pe, more in (("none", 0), ("sin", 0), ("rotary", 0), ("learned", 0), ("layernorm-learned", 24)):
        model, plain = transformer(pe, positions=9), transformer("none")
        size = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
        assert size == sum(p.numel() for p in model.position.parameters())
        assert size == (9 * 12 + more if "learned" in pe else 0), pe
        longer = torch.zeros(1, 10, dtype=torch.long)
        if "learned" in pe:
            try:
                model(longer)
                raise AssertionError("no error")
            except common.Refused as error:
                assert "9 positions" in str(error) and "10 steps" in str(error)
        else:
            assert model(longer).shape == (1, 10, 11)


def plain_transformer(model, pe, tokens):
    """Logits (T, K) of one sequence, position by position and head by head."""

    def layer_norm(norm, x):
        return (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() * norm.weight + norm.bias

    def turned(x, t):
        if pe != "rotary":
            return x
        y = x.clone()
        for i in range(len(x) // 2):
            angle = t * 10000.0 ** (-2 * i / len(x))
            rotation = x.new_tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            y[2 * i : 2 * i + 2] = rotation @ x[2 * i : 2 * i + 2]
        return y

    rows = []
    for t, token in enumerate(tokens):
        x = model.embedding.weight[token]
        if pe == "layernorm-learned":
            x = layer_norm(model.position.norm, x)
        if "learned" in pe:
            x = x + model.position.encoding.table[t]
        if pe == "sin":
            angles = [t / 10000 ** (2 * i / len(x)) for i in range(len(x) // 2)]
            x = x + x.new_tensor([wave(angle) for angle in angles for wave in (math.sin, math.cos)])
        rows.append(x)
    for block in model.blocks:
        attention, size = block.attention, len(rows[0])
        parts = [(attention.read.weight @ layer_norm(block.norm1, x)).split(size) for x in rows]
        after = []
        for t, x in enumerate(rows):
            heads = []
            for head in range(attention.heads):
                d = size // attention.heads
                part = slice(head * d, head * d + d)
                q = turned(parts[t][0][part], t)
                scores = torch.stack([q @ turned(parts[s][1][part], s) for s in range(t + 1)]) / math.sqrt(d)
                heads.append(sum(w * parts[s][2][part] for s, w in enumerate(scores.softmax(0))))
            x = x + attention.write.weight @ torch.cat(heads) + attention.write.bias
            first, _, second = block.network
            hidden = (first.weight @ layer_norm(block.norm2, x) + first.bias).clamp(min=0)
            after.append(x + second.weight @ hidden + second.bias)
        rows = after
    return torch.stack([model.readout.weight @ layer_norm(model.norm, x) + model.readout.bias for x in rows])


def test_transformer_is_the_plain_one():
    torch.manual_seed(1)
    tokens = torch.randint(11, (2, 9))
    for pe in lm_shakespeare.ENCODINGS:
        model = transformer(pe)
        logits = model(tokens)
        for row, got in zip(tokens, logits):
            close(got, plain_transformer(model, pe, row), 1e-12)
        loss, right = model.loss_and_accuracy(lm_shakespeare.Windows(tokens[:, :-1], tokens[:, 1:]))
        close(loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), 1e-12)
        assert abs(right - (logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean()) < 1e-12


def test_transformer_is_causal():
    for pe in lm_shakespeare.ENCODINGS:
        model, tokens = transformer(pe), torch.randint(11, (1, 9))  # seeded by transformer
        for t in range(9):
            changed = tokens.clone()
            changed[0, t] = (tokens[0, t] + 1) % 11
            difference = (model(changed) - model(tokens)).abs().amax(-1)[0]
            assert difference[:t].sum() == 0 and difference[t:].min() > 1e-6, (pe, t, difference)


def test_initial_weights_of_the_transformer():
    with library():
        model = trial.State(
            SHAKESPEARE, shakespeare_args("--width 64 --pe learned"), torch.device("cpu")
        ).model
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert abs(p.std() / 0.02 - 1) < 0.15 and abs(p.mean()) < 0.003, name
        else:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0)), name


def test_windows_of_the_text():
    with library():
        args = shakespeare_args("--batch 300 --context 5 --seed 4")
        data = SHAKESPEARE.build(args, torch.device("cpu"))
        text = A_TEXT.decode()
        first = data.training_episode(1)
        assert torch.equal(first.inputs, data.training_episode(torch.tensor(1)).inputs)
        assert not torch.equal(first.inputs, data.training_episode(2).inputs)
        other = SHAKESPEARE.build(shakespeare_args("--batch 300 --context 5"), torch.device("cpu"))
        assert not torch.equal(first.inputs, other.training_episode(1).inputs)
        cut = len(text) * 9 // 10
        assert (len(data.train), len(data.valid)) == (cut, len(text) - cut)
        seen = {text[n : n + 6] for n in range(cut - 5)}
        for inputs, targets in zip(*first):
            window = data.tokenizer.decode([*inputs.tolist(), targets[-1].item()])
            assert window in seen and torch.equal(inputs[1:], targets[:-1])
        data.args.batch, data.train = 6000, data.train[:11]  # 6 places for 5 + 1 tokens, all alike
        rows = [data.tokenizer.decode(row.tolist()) for row in data.training_episode(1).inputs]
        assert set(rows) == {text[n : n + 5] for n in range(6)}
        assert_uniform(rows, 6)


def test_perplexity_is_that_of_consecutive_windows():
    with library():
        args = shakespeare_args("--context 50")
        data = SHAKESPEARE.build(args, torch.device("cpu"))
        model = trial.State(SHAKESPEARE, args, torch.device("cpu")).model
        losses, ids, count = [], data.valid, (len(data.valid) - 1) // 50
        for n in range(count):
            logits = model(ids[None, 50 * n : 50 * n + 50])[0]
            losses += F.cross_entropy(logits, ids[50 * n + 1 : 50 * n + 51], reduction="none").tolist()
        assert len(losses) > len(ids) - 51
        metrics = data.evaluate(model)
        assert abs(metrics["valid_perplexity"] / math.exp(np.mean(losses)) - 1) < 1e-5
        starts = torch.cat([part.inputs for part in data.parts(data.train)])
        assert len(starts) == count and torch.equal(starts[0], data.train[:50])
        assert torch.equal(starts[-1], data.train[-51:-1]), "they reach from end to end"
        data.args.batch = 3
        assert data.evaluate(model) == metrics


def test_an_iteration_of_the_transformer_never_waits():
    with library():
        for pe in lm_shakespeare.ENCODINGS:
            args = shakespeare_args(f"--pe {pe}")
            state = trial.State(SHAKESPEARE, args, torch.device("cpu"))
            data = SHAKESPEARE.build(args, torch.device("cpu"))
            with workplace() as folder, Watch() as watch:
                next(trial.train(state, data, args, folder))
            assert not watch.waits, (pe, watch.waits)


def test_score_by_distance():
    torch.manual_seed(1)
    tokens = torch.randint(11, (5, 9))
    for pe in ("sin", "rotary"):
        model, found = transformer(pe), {}
        x = model.position(model.embedding(tokens))
        for block in model.blocks:
            q, k, _ = block.attention.queries_keys_values(block.norm1(x))
            for b, h, m, n in itertools.product(range(5), range(2), range(9), range(9)):
                if m >= n:
                    found.setdefault(m - n, []).append((q[b, h, m] @ k[b, h, n]).item() / math.sqrt(6))
            x = block(x)
        got = lm_shakespeare.score_by_distance(model, tokens)
        assert np.allclose(got, [np.mean(found[n]) for n in range(9)], atol=1e-5)


def brute_force_pairs(ids, types, wanted):
    """Byte-pair encoding, one place after the other -> (the pairs, the text's integers)."""
    pairs = []
    for new in range(types, wanted):
        counts = Counter(itertools.pairwise(ids))
        if not counts or max(counts.values()) < 2:
            break
        pairs.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        before, ids = ids, []
        while before:
            two = tuple(before[:2]) == pairs[-1]
            ids.append(new if two else before[0])
            before = before[1 + two :]
    return pairs, ids


def test_byte_pairs_by_brute_force():
    rng = np.random.default_rng(2)
    texts = ["aaaaaaaabaaaab", "abababab", "aabaabaaab" * 3, "abc", "a", A_TEXT.decode()[:1500]]
    texts += ["".join(rng.choice(list("ab c"), 300)) for _ in range(20)]
    for text in texts:
        types = sorted(set(text))
        ids = [types.index(c) for c in text]
        for more in (0, 1, 30):
            wanted_pairs, wanted = brute_force_pairs(ids, len(types), len(types) + more)
            pairs, got = (
                lm_shakespeare.learn_pairs(np.array(ids), len(types), len(types) + more),
                np.array(ids),
            )
            for new, pair in enumerate(pairs, len(types)):
                got = lm_shakespeare.join_pair(got, pair, new)
            assert pairs == wanted_pairs and got.tolist() == wanted, (text[:20], more)


def test_tokenizers_give_the_text_back():
    text = A_TEXT.decode()
    for name in ("char", "bpe"):
        tokenizer, train, valid = lm_shakespeare.tokenized(A_TEXT, name)
        assert tokenizer.decode([*train, *valid]) == text
        assert tokenizer.decode(train) == text[: len(text) * 9 // 10]
        assert np.array_equal(tokenizer.encode(text[:500]), train[:500]) == (name == "char")
        assert tokenizer.decode(tokenizer.encode(text[:500])) == text[:500]
    assert len(tokenizer.types) == 159 and len(train) < 0.7 * len(text)
    cut = len(text) * 9 // 10
    altered = text[:cut] + "".join(reversed(text[cut:]))
    assert lm_shakespeare.tokenized(altered.encode(), "bpe")[0].types == tokenizer.types, "of training alone"
    tokenizer, train, valid = lm_shakespeare.tokenized("It's a word_1, a  word!\né".encode(), "word")
    assert tokenizer.types == sorted(["It", "'", "s", "a", "word_1", ",", "word", "!", "é"])
    assert tokenizer.decode([*train, *valid]) == "It ' s a word_1 , a word ! é" and len(valid) == 1


COUNTS = {"char": (65, 1_003_854, 111_540), "word": (13_331, 236_634, 26_293), "bpe": (159, 625_921, 70_229)}


def test_tokens_of_tiny_shakespeare():
    if not WHOLE_TEXT.exists():
        raise Skip("no data/tinyshakespeare.txt: python lm_shakespeare.py --download")
    content = WHOLE_TEXT.read_bytes()
    assert (len(content), lm_shakespeare.sha256(content)) == (lm_shakespeare.SIZE, lm_shakespeare.SHA256)
    for name, wanted in COUNTS.items():
        tokenizer, train, valid = lm_shakespeare.tokenized(content, name)
        assert (len(tokenizer.types), len(train), len(valid)) == wanted
        assert name == "word" or tokenizer.decode([*train, *valid]).encode() == content
    assert sum(COUNTS["word"][1:]) == 262_927


def test_committed_results_of_tiny_shakespeare_have_its_tokens():
    paths = list(HERE.glob("results/lm_shakespeare/*/*/result.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text())
        metrics, config = result["metrics"], result["config"]
        counts = metrics["types"], metrics["train_tokens"], metrics["valid_tokens"]
        assert counts == COUNTS[config["tokenizer"]] and config["text_sha256"] == lm_shakespeare.SHA256


WRONG_SHAKESPEARE = {
    "--context 9 --positions 8 --pe learned": "--positions 8, --context is 9",
    "--positions 8": "--pe rotary has none",
    "--heads 3": "--heads 3 does not divide --width 16",
    "--width 6 --heads 2": "must be even, got 3",
    "--width 7 --heads 7 --pe sin": "even --width",
    "--context 1": "at least 2",
    "--context 100000": "needs a longer text: one part has",
    "--pe random": "--pe",
    "--model lstm": "--model",
    "--vocab 5": "--vocab",
    "--warmup 5": "--warmup",
    "--tokenizer bytes": "--tokenizer",
    "--data nowhere.txt": "no text at --data nowhere.txt",
    "--data data": "no text at --data data",
    "--sample ROMEO": "no trained trial in runs/lm_shakespeare/transformer-rotary-char-T8",
    "--search --all table1": "without --list",
    "--search --sample x": "without --list",
    "--search --overwrite": "without --list",
    "--search --heads 3": "does not divide",
    "--list fig2": "choose from table1, heads, layers, context, table2, decay",
}


def test_bad_input_to_lm_shakespeare():
    with library() as folder:
        for words, said in WRONG_SHAKESPEARE.items():
            code, out, err = cli("--scale smoke " + words, SHAKESPEARE)
            assert code == 2 and err.count("\n") == 1 and said in err and not out, (words, code, out, err)
            assert [p.name for p in folder.iterdir()] == ["data"], words
    for content, said in ((b"\xff\xfe", "UTF-8"), (b"ab", "longer text"), (b"", "longer text")):
        with library(content) as folder:
            code, _, err = cli("--scale smoke", SHAKESPEARE)
            assert code == 2 and err.count("\n") == 1 and said in err and not list(folder.glob("runs")), err
    with library("".join(map(chr, range(200, 400))).encode()):
        assert "200 characters" in cli("--scale smoke --tokenizer bpe", SHAKESPEARE)[2]


def test_defaults_and_grids_are_the_documents():
    args = args_of("", SHAKESPEARE)
    wanted = dict(pe="rotary", tokenizer="char", layers=6, heads=6, context=256, width=384, batch=32)
    wanted |= dict(lr=1e-4, iterations=1000, clip=0, beta2=0.999, eps=1e-8, seed=0)
    assert wanted.items() <= vars(args).items() and SHAKESPEARE.positions(args) == 256
    name = "runs/lm_shakespeare/transformer-rotary-char-T256"
    assert str(trial.trial_folder(SHAKESPEARE, args)) == f"{name}/seed0"
    args = args_of("--heads 2 --layers 16 --download --data x.txt", SHAKESPEARE)
    assert str(trial.trial_folder(SHAKESPEARE, args)) == f"{name}-heads=2-layers=16/seed0"
    for figure, trials in dict(table1=5, heads=7, layers=5, context=3, table2=3, decay=5).items():
        code, out, _ = cli(f"--list {figure} --seed 0", SHAKESPEARE)
        assert code == 0 and len(set(out.splitlines())) == trials, (figure, out)
        for line in out.splitlines():
            args_of(" ".join(line.split()[2:]), SHAKESPEARE)
    assert "--heads 2 --layers 16 --context 512" in cli("--list context", SHAKESPEARE)[1]


def test_lm_shakespeare_end_to_end():
    with library() as folder:
        code, out, err = cli("--scale smoke --all", SHAKESPEARE)
        assert code == 0, err
        for figure, grid in lm_shakespeare.GRIDS["smoke"].items():
            assert f"{figure} (smoke scale)" in out and f"{len(grid)} of {len(grid)} trials finished" in out
        found = folder / "runs/lm_shakespeare"
        learned, rotary = (next(found.glob(f"*-{pe}-char-T8-*/seed0")) for pe in ("learned", "rotary"))
        for path in (learned, rotary):
            with open(path / "curve.csv") as file:
                assert {row["learning_rate"] for row in csv.DictReader(file)} == {"0.0001"}
        learned, rotary = (json.loads((p / "result.json").read_text()) for p in (learned, rotary))
        assert learned["parameters"] - rotary["parameters"] == 8 * 16
        assert learned["metrics"]["encoding_parameters"] == 8 * 16
        assert learned["config"]["text_sha256"] == lm_shakespeare.sha256(A_TEXT)
        if importlib.util.find_spec("matplotlib"):
            for figure in lm_shakespeare.FIGURES:
                assert (folder / f"figures/lm_shakespeare-{figure}-smoke.png").stat().st_size > 5000
        Path("data/tinyshakespeare.txt").write_bytes(A_TEXT + b"!")
        code, _, err = cli("--scale smoke --pe learned", SHAKESPEARE)
        assert code == 2 and "made with other text: text_sha256" in err and err.count("\n") == 1, err
        Path("data/other.txt").write_bytes(A_TEXT)
        code, out, _ = cli("--scale smoke --pe learned --data data/other.txt", SHAKESPEARE)
        assert code == 0 and "is finished" in out


def test_lm_shakespeare_resumes_to_the_same_bits():
    words = "--scale smoke --pe layernorm-learned --tokenizer word --iterations 150 --save-every 20"
    with library() as folder:
        assert wait(fork(words, task=SHAKESPEARE)) == 0, Path("child.log").read_text()
        wanted = outcome(trial_of(folder))
    for number, code in ((signal.SIGINT, trial.STOPPED), (signal.SIGKILL, -signal.SIGKILL)):
        with library() as folder:
            child = fork(words, task=SHAKESPEARE)
            wait_for(lambda: list(Path().glob("runs/*/*/seed*/last.pt")))
            os.kill(child, number)
            assert wait(child) == code and not list(folder.glob("runs/*/*/*/result.json"))
            assert wait(fork(words, task=SHAKESPEARE)) == 0
            assert "continuing from" in Path("child.log").read_text()
            assert outcome(trial_of(folder)) == wanted


def test_search_keeps_the_best_and_goes_on_where_it_was():
    with library() as folder:
        child = fork("--scale smoke --search --iterations 100", task=SHAKESPEARE)
        wait_for(lambda: len(list(Path().glob("runs/*/*/*/result.json"))) == 2)
        os.kill(child, signal.SIGTERM)
        assert wait(child) in (trial.STOPPED, 0)
        code, out, err = cli("--scale smoke --search --iterations 100", SHAKESPEARE)
        assert code == 0 and "is finished" in out, err
        results = [json.loads(p.read_text()) for p in folder.glob("runs/*/*/*/result.json")]
        found = {}
        for result in results:
            sizes = tuple(result["config"][k] for k in ("heads", "layers", "context"))
            found[sizes] = result["metrics"]["valid_perplexity"]
        heads = min((2, 4), key=lambda n: found[n, 2, 8])
        layers = min((1, 2), key=lambda n: found[heads, n, 8])
        context = min((4, 8), key=lambda n: found[heads, layers, n])
        assert len(found) == 4, "two of heads, one more of layers, one more of context"
        assert out.endswith(f"best: --heads {heads} --layers {layers} --context {context}\n"), out
        code, again, _ = cli("--scale smoke --search --iterations 100", SHAKESPEARE)
        assert code == 0 and again.count("is finished") == 6
    with library():
        code, out, _ = cli("--scale smoke --search --lr 1e38", SHAKESPEARE)
        assert code == trial.NOT_FINITE and out.count("starting at") == 6, "tried them all"
    with library():
        code, out, err = cli("--scale smoke --search --pe learned --positions 6 --context 4", SHAKESPEARE)
        assert code == 2 and err.count("\n") == 1 and not out and not Path("runs").exists(), (out, err)


def test_sample_is_drawn_from_the_trained_model():
    with library():
        assert cli("--scale smoke", SHAKESPEARE)[0] == 0
        code, first, err = cli("--scale smoke --sample 'The '", SHAKESPEARE)
        assert code == 0 and first.startswith("The ") and "continuing from last.pt, iteration 20" in err, err
        assert len(first) == 4 + 400 + 1
        assert cli("--scale smoke --sample 'The '", SHAKESPEARE)[1] == first
        code, _, err = cli("--scale smoke --sample ☃", SHAKESPEARE)
        assert code == 2 and "'☃' is not among" in err and err.count("\n") == 1
        assert "a text to begin with" in cli("--scale smoke --sample ''", SHAKESPEARE)[2]
        for path in Path().glob("runs/*/*/*/*.pt"):
            path.write_bytes(b"torn")
        code, _, err = cli("--scale smoke --sample 'The '", SHAKESPEARE)
        assert code == 2 and "can be used" in err.splitlines()[-1], err

    class Model(torch.nn.Module):
        """After token n, n + 1 with a probability of 3/4, else n + 2 (mod 5); needs the last 3 tokens."""

        readout = torch.nn.Linear(1, 5)

        def forward(self, inputs):
            assert inputs.shape[1] <= 3
            return torch.tensor([3.0, 1, 0, 0, 0]).roll(inputs[0, -1].item() + 1).log()[None, None]

    drawn = lm_shakespeare.continuation(Model(), torch.tensor([4, 0]), 3, 4000, 1)
    assert drawn[:2] == [4, 0] and len(drawn) == 4002
    steps = Counter((b - a) % 5 for a, b in itertools.pairwise(drawn))
    assert steps.total() == 4001 and set(steps) == {1, 2}
    chi_square_is_clean([steps[1] - 1, steps[2]], [3000, 1000])  # the first step was given


def test_download_takes_the_known_text_only():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.content)

        def log_message(self, *words):
            pass

    path, words = Path("library/shakespeare.txt"), "--scale smoke --data library/shakespeare.txt --download"
    known = lm_shakespeare.ADDRESS, lm_shakespeare.SHA256
    with workplace() as folder, http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        lm_shakespeare.ADDRESS = f"http://127.0.0.1:{server.server_port}/input.txt"
        try:
            server.content = b"To be"
            code, _, err = cli(words, SHAKESPEARE)
            assert code == 2 and "another text now (5 bytes" in err and err.count("\n") == 1, err
            assert not list(folder.glob("library/*"))
            server.content, lm_shakespeare.SHA256 = A_TEXT, lm_shakespeare.sha256(A_TEXT)
            code, out, err = cli(words, SHAKESPEARE)
            assert code == 0 and path.read_bytes() == A_TEXT and "SHA-256 as expected" in out, err
            server.content = b"To be"
            code, out, _ = cli(words, SHAKESPEARE)
            assert code == 0 and "fetching" not in out and path.read_bytes() == A_TEXT, "left alone"
            lm_shakespeare.SHA256 = "0" * 64
            code, out, _ = cli(words, SHAKESPEARE)
            assert code == 0 and "another text than tiny Shakespeare" in out
            Path("data").mkdir()
            Path(lm_shakespeare.DATA).write_bytes(A_TEXT)
            code, _, err = cli("--scale smoke --download", SHAKESPEARE)
            assert code == 2 and "another text than tiny" in err and err.count("\n") == 1, err
            lm_shakespeare.SHA256 = lm_shakespeare.sha256(A_TEXT)
            server.shutdown()
            server.server_close()
            path.unlink()
            code, _, err = cli(words, SHAKESPEARE)
            assert code == 2 and "no download" in err and str(path) in err and err.count("\n") == 1, err
        finally:
            lm_shakespeare.ADDRESS, lm_shakespeare.SHA256 = known


def shakespeare_metrics(perplexity, near=0.0, far=0.0):
    metrics = dict(train_perplexity=perplexity - 1, valid_perplexity=perplexity, types=65)
    metrics |= dict(train_tokens=650, valid_tokens=100, valid_characters=100)
    return metrics | {"score_by_distance": [9.0] + [near] * 31 + [far] * 32}


def made_up_shakespeare(figure, value):
    """A report at full size of results whose metrics are value(flags)."""
    _, args, given = trial.parse(SHAKESPEARE, [])
    for flags, _, chosen in trial.grid(SHAKESPEARE, args, given, figure):
        folder = trial.trial_folder(SHAKESPEARE, chosen)
        folder.mkdir(parents=True)
        trial.write_json(folder / "result.json", {"metrics": value(flags), "seconds": 100 + flags["seed"]})
        (folder / "curve.csv").write_text(
            "iteration,loss,accuracy,learning_rate,seconds\n10,4,0,1,2\n20,3,0,1,3\n"
        )
    code, out, err = cli(f"--report {figure}", SHAKESPEARE)
    assert code == 0, err
    return out


def test_report_of_the_documents_tables():
    perplexities = {"none": 9, "learned": 6, "sin": 8, "rotary": 5, "layernorm-learned": 7}
    with workplace():
        value = lambda flags: shakespeare_metrics(perplexities[flags["pe"]] + 0.01 * flags["seed"])
        out = made_up_shakespeare("table1", value)
        row = next(line for line in out.splitlines() if line.startswith("  layernorm"))
        numbers = r"3 +6.01 +7.01 +101.00 +\[7.00\d+, 7.0[12]\d+\] +7.0000 7.0100 7.0200 +6.77 7.57 101.35$"
        assert re.search(numbers, row), row
        assert out.count("  holds") == 3 and "  fails" not in out
    with workplace():
        out = made_up_shakespeare("table1", lambda flags: shakespeare_metrics(6 + 0.1 * flags["seed"]))
        assert out.count("  fails") == 3 and "  holds" not in out
    with workplace():
        words = {"char": 4.8, "bpe": 5.0, "word": 300.0}
        out = made_up_shakespeare(
            "table2",
            lambda flags: (
                shakespeare_metrics(words[flags["tokenizer"]])
                | ({"valid_characters": 200} if flags["tokenizer"] == "bpe" else {})
            ),
        )
        assert re.search(r"rotary +bpe .* 0.80 .* 6.84 14.64 303.09 \(16 layers, 2 heads\)\n", out), out
        assert "share one model" in out and out.count("  holds") == 2
        assert "fails: byte pairs are worse than characters, per character" in out
    best = dict(heads=2, layers=16, context=256)
    distance = lambda flag, flags: abs(math.log(flags[flag] / best[flag]))
    for figure in ("heads", "layers", "context"):
        with workplace():
            value = lambda flags, flag=figure: shakespeare_metrics(5 + distance(flag, flags))
            out = made_up_shakespeare(figure, value)
            assert "  holds" in out and "  fails" not in out and "not enough" not in out, out


def test_trials_of_different_texts_are_not_compared():
    def note(text, folders):
        for path in folders:
            result = json.loads((path / "result.json").read_text())
            trial.write_json(path / "result.json", result | {"config": {"text_sha256": text}})

    known, other = "Not the document's text", "0" * 64
    with workplace() as folder:
        assert known not in made_up_shakespeare("table1", lambda flags: shakespeare_metrics(5))
        paths = list(folder.glob("runs/*/*/*"))
        for text in (lm_shakespeare.SHA256, other):
            note(text, paths)
            _, out, _ = cli("--report table1", SHAKESPEARE)
            assert "rotary" in out and "fails" in out and (known in out) == (text == other), out
            assert other not in out or text == other
        note(lm_shakespeare.SHA256, paths[:4])
        _, out, _ = cli("--report table1", SHAKESPEARE)
        (line,) = [line for line in out.splitlines() if line.startswith(" ")]
        assert "trials of 2 different texts, not compared" in line and {*re.findall(r"\d+", line)} == {
            "2",
            "4",
            "11",
        }, line
    with workplace() as folder:
        lm_made_up("paper", lambda flags: 40.0, lambda flags, i: 5.0)
        (one, *_) = folder.glob("runs/*/*/*/result.json")
        result = json.loads(one.read_text())
        trial.write_json(one, result | {"config": {"text_sha256": other, "pieces_sha256": other}})
        _, out, _ = cli("--report table1", lm_wikitext.TASK)
        assert "2 different texts, not compared" in out and "lstm" not in out and "fails" not in out, out
    assert set(report.TEXT) == trial.FINGERPRINTS


def test_claims_about_scores():
    def value(falls):
        return lambda flags: shakespeare_metrics(
            5, 1 + 0.1 * flags["seed"] if (flags["pe"] == "rotary") == falls else -1, -0.5
        )

    for falls, said in ((True, "  holds"), (False, "  fails")):
        with workplace():
            out = made_up_shakespeare("decay", value(falls))
            assert out.count(said) == 4 and out.count("  holds") + out.count("  fails") == 4, out
    metrics = shakespeare_metrics(1) | {"score_by_distance": list(range(64))}
    assert lm_shakespeare.near(metrics) == np.mean(range(1, 9))
    assert lm_shakespeare.far(metrics) == np.mean(range(32, 64))


# ------------------------------------------------------------------------------------------------------------
# Language model
# ------------------------------------------------------------------------------------------------------------

WORDS = "the cat sat on a mat and dogs ran far away from old houses while rain fell , then it stopped ."
WORDS = list(WORDS.split(" "))


def lm_lines(seed, count):
    """Lines as in WikiText: headings, blank ones, paragraphs of 1 to 40 words that repeat some order."""
    draw = np.random.default_rng(seed)
    lines = []
    for n in range(count):
        start, length = draw.integers(len(WORDS)), draw.integers(1, 41)
        text = [WORDS[(start + j + (draw.random() < 0.2)) % len(WORDS)] for j in range(length)]
        lines += [" ", " = Heading = ", " "] * (n % 5 == 0) + [" " + " ".join(text) + " "]
    return lines


def lm_text(folder="data/wikitext-103-raw", **lines):
    """The three files of a small text, of other lines where given."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for n, split in enumerate(lm_wikitext.SPLITS):
        content = "\n".join(lines.get(split) or lm_lines(n, 60 if split == "train" else 20)) + "\n"
        Path(folder, f"wiki.{split}.raw").write_bytes(content.encode())


def lm(words):
    return cli(f"--scale smoke {words}", lm_wikitext.TASK)


def lm_args(words=""):
    return args_of(f"--scale smoke {words}", lm_wikitext.TASK)


def lm_data(words=""):
    """The data of a trial on the text in this working directory."""
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")
    args = lm_args(words)
    code, _, err = captured(lambda: lm_wikitext.prepare(args, trial.Stop()) and None)
    assert code is None, err
    return lm_wikitext.WikiText(args, torch.device("cpu"))


def lm_pieces():
    """The learned pieces, read by SentencePiece itself."""
    from sentencepiece import SentencePieceProcessor

    (path,) = Path().glob("data/*/tokens-*/pieces.model")
    return SentencePieceProcessor(model_file=str(path))


def made_up_split(lengths, vocab, seed=0, most=32):
    """A Split of paragraphs with so many pieces each, a tenth of them unknown."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, vocab, sum(lengths)) * (draw.random(sum(lengths)) > 0.1)
    ends = np.cumsum([0, *lengths])
    counts = np.minimum(np.diff(ends) - 1, most)
    return lm_wikitext.Split(tokens.astype(np.uint16), ends[:-1][counts > 0], counts[counts > 0])


def padded_losses(model, split, rows):
    """(loss of every target, whether it is known), from padded paragraphs, one nn.LSTM or nn.GRU, a mask."""
    counts = torch.from_numpy(split.counts[rows])
    pieces = torch.zeros(len(rows), 1 + max(counts), dtype=torch.int64)
    for b, r in enumerate(rows):
        n = 1 + split.counts[r]
        pieces[b, :n] = torch.from_numpy(split.tokens[split.starts[r] :][:n].astype(np.int64))
    x = model.embedding(pieces[:, :-1])
    if model.encoding.name == "dup":
        x = torch.cat([x, x], 2)
    elif model.encoding.name != "none":
        x = torch.cat([x, model.encoding(x.shape[1]).expand(len(rows), -1, -1)], 2)
    plain = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU}[type(model.layer).__name__]
    layer = plain(model.layer.input_size, model.layer.hidden_size, batch_first=True).double()
    h = torch.func.functional_call(layer, dict(model.layer.named_parameters()), x)[0]
    logits, targets = model.readout(h), pieces[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    real = torch.arange(targets.shape[1]) < counts[:, None]
    return losses[real], (targets != 0)[real], (logits.argmax(2) == targets)[real]


def test_lm_packed_equals_padded():
    draw = np.random.default_rng(1)
    torch.manual_seed(1)
    for engine, model, pe in itertools.product(("torch", "fast"), ("gru", "lstm"), ENCODINGS):
        lengths = [2, 1, 3, 40, *draw.integers(1, 30, 8)]  # one piece: no target; 2: one; 40: cut at 32
        split = made_up_split(lengths, 50)
        built = lm_wikitext.LanguageModel(lm_wikitext.TASK, lm_args(f"--model {model} --pe {pe} --vocab 50"))
        built.double()
        built.fast = engine == "fast"
        rows = draw.permutation(len(split.starts))
        batch = lm_wikitext.pack(split, rows, torch.device("cpu"))
        assert len(batch.inputs) == sum(min(n - 1, 32) for n in lengths), "nothing but real targets"
        losses, known, right = padded_losses(built, split, rows)
        wanted = losses[known].mean()
        gradients = torch.autograd.grad(wanted, list(built.parameters()))
        loss, accuracy = built.loss_and_accuracy(batch)
        close(loss.detach(), wanted, 1e-12)
        assert abs(accuracy - right[known].double().mean()) < 1e-12
        for p, g, wanted in zip(built.parameters(), torch.autograd.grad(loss, built.parameters()), gradients):
            close(g, wanted, 1e-9)
        for size in (1, 5, 100):
            found = lm_wikitext.perplexities(built, split, size, torch.device("cpu"))
            close(found, [losses[known].mean().exp().item(), losses.mean().exp().item()], 1e-9)


def test_lm_packed_layout_of_the_docstring():
    split = lm_wikitext.Split(np.array([5, 6, 7, 8, 9, 0, 4], np.uint16), np.array([0, 4]), np.array([3, 2]))
    batch = lm_wikitext.pack(split, np.array([1, 0]), torch.device("cpu"))
    assert batch.inputs.tolist() == [5, 9, 6, 0, 7] and batch.targets.tolist() == [6, 0, 7, 4, 8]
    assert batch.times.tolist() == [0, 0, 1, 1, 2] and batch.sizes.tolist() == [2, 2, 1]
    close(batch.share(), [0.25, 0, 0.25, 0.25, 0.25], 1e-12)


def test_lm_no_target_is_known():
    split = lm_wikitext.Split(np.array([3, 0, 0], np.uint16), np.array([0]), np.array([2]))
    model = lm_wikitext.LanguageModel(lm_wikitext.TASK, lm_args())
    loss, _ = model.loss_and_accuracy(lm_wikitext.pack(split, np.array([0]), torch.device("cpu")))
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())


def test_lm_logits_are_never_whole_and_nothing_waits():
    split = made_up_split([40] * 8, 3000)
    model = lm_wikitext.LanguageModel(lm_wikitext.TASK, lm_args("--vocab 3000"))
    batch = lm_wikitext.pack(split, np.arange(8), torch.device("cpu"))
    assert len(batch.inputs) == 256
    model.fast = True
    before, common.CHUNK = common.CHUNK, 20 * 3000
    try:
        with Watch() as watch:
            model.loss_and_accuracy(batch)[0].backward()
        with torch.no_grad(), Watch() as watch_losses:
            model.losses(batch)
    finally:
        common.CHUNK = before
    assert watch.largest <= 64 * 3000 and watch_losses.largest <= 64 * 3000, "of 256 x 3000 logits"
    there = batch._replace(
        **{name: getattr(batch, name).to("meta") for name in batch._fields if name != "sizes"}
    )
    model.to("meta").loss_and_accuracy(there)[0].backward()  # on this device a value asked for raises


def lm_rows(count, batch, seed, iterations):
    data = object.__new__(lm_wikitext.WikiText)
    data.splits, data.batch, data.seed = {"train": made_up_split([2] * count, 5)}, batch, seed
    return [data.training_rows(i).tolist() for i in range(1, iterations + 1)]


def test_lm_epochs_are_permutations_without_loss_at_their_borders():
    for count, batch in ((7, 3), (7, 7), (3, 10), (1, 4), (50, 1)):
        drawn = list(itertools.chain(*lm_rows(count, batch, 5, 4 * count)))
        assert len(drawn) == 4 * count * batch
        epochs = [drawn[n : n + count] for n in range(0, len(drawn), count)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert lm_rows(50, 8, 1, 9)[8] == lm_rows(50, 8, 1, 9)[8] != lm_rows(50, 8, 2, 9)[8]
    epochs = list(itertools.chain(*lm_rows(4, 4, 3, 4800)))
    assert_uniform([tuple(epochs[n : n + 4]) for n in range(0, len(epochs), 4)], 24)


def test_lm_keeps_all_but_headings_and_blank_lines():
    kept = [" a cat \u2028 sat \x0b on\r a mat ", "= 3 is a sum , no heading", " == twice ="[1:], " the"]
    train = [*lm_lines(0, 60), *kept, " = Heading = ", "", " ", "\r", " = = Sub = = "]
    with workplace():
        lm_text(train=train)
        for path in Path().glob("data/*/*.raw"):  # as saved on Windows
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        data = lm_data()
        pieces, counts = lm_pieces(), data.about["train"]
        wanted = [pieces.encode(x) for x in train if x.strip() and not x.startswith(" =")]
        assert [kept[n] in train for n in range(4)] == [True] * 4 and len(wanted) == 64 == counts[
            "paragraphs"
        ]
        assert counts["headings"] == 14 and counts["blank lines"] == 27, counts
        tokens = data.splits["train"].tokens
        assert tokens.tolist() == list(itertools.chain(*wanted)) and counts["tokens"] == len(tokens)
        assert counts["unknown tokens"] == sum(w.count(0) for w in wanted) > 0
        with_target = [w for w in wanted if len(w) > 1]
        assert 0 < len(wanted) - len(with_target) == counts["paragraphs without a target"]
        starts, lengths = data.splits["train"].starts, data.splits["train"].counts
        for start, length, w in zip(starts, lengths, with_target, strict=True):
            assert tokens[start : start + length + 1].tolist() == w[:33], "--length 32 targets at most"


def test_lm_lines_above_the_default_limit_are_learned_from():
    """A line of more than 4,192 bytes holds the only words with x."""
    long = " " + "xyx yxy " * 600
    with workplace():
        lm_text(train=[*lm_lines(0, 60), long])
        data = lm_data()
        assert "x" in "".join(lm_pieces().id_to_piece(n) for n in range(40))
        assert data.splits["train"].tokens[-50:].all(), "its pieces are known"
        assert data.about["train"]["paragraphs"] == 61


def test_lm_scores_the_first_1024_targets_of_a_paragraph():
    with workplace():
        long = " " + " ".join(WORDS * 60)
        lm_text(train=[*lm_lines(0, 60), long], test=[long, " the cat"])
        data = lm_data("--length 1024")
        test, all_of_it = data.splits["test"], data.about["test"]["tokens"]
        assert test.counts.max() == 1024 < all_of_it - 100
        batch = data.training_episode(1)
        assert len(batch.sizes) <= 1024
        model = lm_wikitext.LanguageModel(lm_wikitext.TASK, lm_args("--pe learned --length 1024"))
        first = lm_wikitext.perplexities(model, test, 4, torch.device("cpu"))
        changed = np.array(test.tokens)
        changed[1025 : test.starts[1]] = 7
        assert first == lm_wikitext.perplexities(model, test._replace(tokens=changed), 4, torch.device("cpu"))
        changed[1024] = 7
        assert first != lm_wikitext.perplexities(model, test._replace(tokens=changed), 4, torch.device("cpu"))


def test_lm_unigram_by_hand():
    train, test = made_up_split([9, 30, 1, 4], 6), made_up_split([50, 2, 1], 8, seed=2)
    counts = Counter(train.tokens.tolist())
    targets = [int(t) for s, n in zip(test.starts, test.counts) for t in test.tokens[s + 1 : s + n + 1]]
    logs = [math.log((counts[t] + 1) / (len(train.tokens) + 8)) for t in targets if t]
    found = lm_wikitext.unigram_perplexity(dict(train=train, test=test), 8)
    assert len(targets) == 33 > len(logs) and abs(found / math.exp(-sum(logs) / len(logs)) - 1) < 1e-12


def test_lm_trial_learns_stops_and_resumes_to_the_bit():
    words = "--scale smoke --data data --iterations 120 --length 10 --lr 0.03 --save-every 100000"
    with workplace():
        lm_text("data")
        lm_data("--data data --length 10")
        code, _, err = cli(words, lm_wikitext.TASK)
        assert code == 0, err
        (folder,) = Path().glob("runs/lm_wikitext/*/seed0")
        plain = outcome(folder)
        result = json.loads((folder / "result.json").read_text())
        metrics = result["metrics"]
        assert metrics["test_perplexity"] < metrics["unigram_test_perplexity"] / 2, metrics
        (about,) = Path().glob("data/tokens-*/about.json")
        pieces = hashlib.sha256((about.parent / "pieces.model").read_bytes()).hexdigest()
        assert result["config"]["pieces_sha256"] == pieces
        assert json.loads((folder / "config.json").read_text())["config"]["pieces_sha256"] == pieces
        assert metrics["tokens"]["train"] == (about.parent / "train.tokens").stat().st_size / 2
        shutil.rmtree("runs")
        draw = lm_wikitext.WikiText.training_episode

        def signalled(data, i):
            if i in (7, 50):
                os.kill(os.getpid(), signal.SIGTERM)
            return draw(data, i)

        with mock.patch.object(lm_wikitext.WikiText, "training_episode", signalled):
            for at in (7, 50):
                assert wait(fork(words, task=lm_wikitext.TASK)) == trial.STOPPED
                assert f"stopped at iteration {at};" in Path("child.log").read_text()
        assert cli(words, lm_wikitext.TASK)[0] == 0 and outcome(folder) == plain


def test_lm_tokens_are_found_again_and_never_stale():
    with workplace():
        lm_text()
        lm_data()
        (tokens,) = Path().glob("data/*/tokens-*")
        before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tokens.iterdir()}
        assert lm("--iterations 2")[0] == 0
        assert before == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tokens.iterdir()}
        text = Path("data/wikitext-103-raw/wiki.train.raw")
        content = text.read_bytes()
        text.write_bytes(content[:-9] + b"another\n")  # of the same length
        for words in ("--iterations 2", "--iterations 2 --pe none"):
            code, _, err = lm(words)
            refused = words.endswith("2")
            assert code == (2 if refused else 0) and err.count("\n") == refused, (words, err)
            assert not refused or "made with other text: pieces_sha256" in err
        assert lm("--iterations 2 --overwrite")[0] == 0
        assert len(list(Path().glob("data/*/tokens-*"))) == 2
        text.write_bytes(content)
        shutil.rmtree(tokens)
        lm_data()
        assert {p.name: p.read_bytes() for p in tokens.iterdir()} == {n: b for n, (_, b) in before.items()}
        (tokens / "test.tokens").write_bytes(b"\0\0")
        code, _, err = lm("--pe dup")
        assert code == 2 and "is damaged, remove it: test has 1 tokens" in err and err.count("\n") == 1, err


def test_lm_bad_input_is_refused_in_one_line_and_creates_nothing():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")

    def text(**lines):
        shutil.rmtree("data", ignore_errors=True)
        lm_text(**lines)
        return Path("data/wikitext-103-raw")

    wrong = [
        (
            "--data elsewhere",
            lambda: None,
            "has no wiki.train.raw, wiki.valid.raw, wiki.test.raw (--download",
        ),
        ("", lambda: (text() / "wiki.valid.raw").unlink(), "has no wiki.valid.raw (--download"),
        ("", lambda: (text() / "wiki.test.raw").write_bytes(b""), "wiki.test.raw has no paragraph: 0 lines"),
        ("", lambda: text(train=[" = A = ", "", " "]), "wiki.train.raw has no paragraph: 3 lines"),
        ("", lambda: (text() / "wiki.valid.raw").write_bytes(b"a\nb c\xff\n"), "not UTF-8: line 2, byte 4"),
        ("--vocab 5000", text, "wiki.train.raw supports"),
        ("--vocab 5", text, "wiki.train.raw needs"),
        ("--vocab 65537", text, "65536 is the limit"),
        ("--model s4d", text, "use gru or lstm"),
        ("--held-out 5", text, "unrecognized arguments"),
    ]
    for words, spoil, expected in wrong:
        with workplace() as folder:
            spoil()
            before = sorted(folder.rglob("*"))
            code, _, err = lm(words)
            assert code == 2 and err.count("\n") == 1 and expected in err, (words, err)
            assert sorted(folder.rglob("*")) == before, words
    with workplace():
        text()
        lm_data()
        one = next(word for word in WORDS if len(lm_pieces().encode(word)) == 1)
        text(valid=[one, " " + one])
        code, _, err = lm("")
        assert code == 2 and "no paragraph of valid has two pieces" in err, err


def test_lm_without_sentencepiece():
    """One line where there are no tokens; nothing needs it where there are."""
    with workplace() as folder:
        lm_text()
        before, there = sys.modules.get("sentencepiece"), importlib.util.find_spec("sentencepiece")
        try:
            if there:
                lm_data()
                sys.modules["sentencepiece"] = None  # as if not installed
                assert lm("--iterations 2")[0] == 0
                shutil.rmtree("runs")
                (tokens,) = folder.glob("data/*/tokens-*")
                shutil.rmtree(tokens)
            code, _, err = lm("")
        finally:
            sys.modules.pop("sentencepiece", None)
            if before:
                sys.modules["sentencepiece"] = before
        assert code == 2 and err.count("\n") == 1 and "pip install sentencepiece" in err, err
        assert not (folder / "runs").exists()


def test_lm_one_process_tokenises_and_the_others_wait():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")
    with workplace() as folder:
        lm_text()
        (text,) = folder.glob("data/*")
        name = lm_wikitext.token_folders(lm_wikitext.find_text(text), lm_args())[0].name
        (text / f".{name}.tmp").mkdir()  # of a process that was killed
        (text / f".{name}.tmp" / "half").touch()
        command = [sys.executable, HERE / "lm_wikitext.py", "--scale", "smoke", "--iterations", "2"]
        with open("log", "w") as log, open(text / f".{name}.lock", "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            children = [
                subprocess.Popen([*command, "--seed", str(n)], stdout=log, stderr=log) for n in range(3)
            ]
            wait_for(lambda: Path("log").read_text().count("waiting for the process") == 3, 200)
            children[0].send_signal(signal.SIGUSR1)
            assert children[0].wait() == trial.STOPPED
        assert [child.wait(200) for child in children[1:]] == [0, 0], Path("log").read_text()
        assert Path("log").read_text().count("learning 40 pieces") == 1
        assert sorted(p.name for p in text.iterdir() if not p.name.startswith("wiki.")) == [name]


def test_lm_learned_pieces_outlive_a_stop():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")

    def stopped(*_):
        raise lm_wikitext.Stopped

    with workplace() as folder:
        lm_text()
        with mock.patch.object(lm_wikitext, "write_tokens", stopped):
            code, out, _ = lm("--prepare")
        assert code == trial.STOPPED and out.count("learning 40 pieces") == 1
        (kept,) = folder.glob("data/*/.tokens-*.tmp/pieces.model")
        content = kept.read_bytes()
        code, out, err = lm("--prepare")
        assert code == 0 and "learning" not in out, err
        (tokens,) = folder.glob("data/*/tokens-*")
        assert (tokens / "pieces.model").read_bytes() == content and not kept.parent.exists()


def test_lm_read_only_text():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")
    with workplace() as folder:
        lm_text()
        (text,) = folder.glob("data/*")
        name = lm_wikitext.token_folders(lm_wikitext.find_text(text), lm_args())[0].name
        (text / f".{name}.lock").mkdir()  # root writes to read-only folders: let opening the lock fail
        assert lm("--iterations 2")[0] == 0
        assert (folder / "runs" / "lm_wikitext" / name / "about.json").exists()
        assert len(list(text.iterdir())) == 4
        code, out, _ = lm("--iterations 2 --pe none")
        assert code == 0 and "learning" not in out


class Archive(http.server.BaseHTTPRequestHandler):
    """Serves `content`: its first answer breaks off after `breaks` bytes; ranges where `ranges`."""

    content, breaks, ranges, asked, slow = b"", None, True, [], False

    def do_GET(self):
        self.asked.append(self.headers["Range"])
        if "python" in self.headers["User-Agent"].lower():
            return self.send_error(403)
        start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if self.ranges else 0
        if start >= len(self.content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        end, Archive.breaks = self.breaks, None
        with contextlib.suppress(ConnectionError):
            for at in range(start, len(self.content[:end]), 2000):
                self.wfile.write(self.content[at : min(at + 2000, len(self.content[:end]))])
                time.sleep(0.02 * self.slow)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def archive_server(**how):
    for name, value in (dict(content=b"", breaks=None, ranges=True, asked=[], slow=False) | how).items():
        setattr(Archive, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Archive)
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
    thread.start()
    before, port = lm_wikitext.ADDRESSES, server.server_address[1]
    lm_wikitext.ADDRESSES = ["http://127.0.0.1:1/nobody.zip", f"http://localhost:{port}/a.zip"]
    try:
        yield
    finally:
        lm_wikitext.ADDRESSES = before
        server.shutdown()
        thread.join()
        server.server_close()


def lm_archive(**changed):
    """A zip as that of WikiText-103 raw, about 100 kB."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as file:
        for n, split in enumerate(lm_wikitext.SPLITS):
            content = changed.get(split, "\n".join(lm_lines(n, 500)))
            file.writestr(f"wikitext-103-raw/wiki.{split}.raw", content)
    return packed.getvalue()


def lm_download():
    def command():
        try:
            lm_wikitext.download(Path("d"), trial.Stop())
        except common.Refused as error:
            print(error, file=sys.stderr)
            return 2
        return 0

    return captured(command)


def test_lm_download():
    content = lm_archive()
    for ranges in (True, False):
        with workplace(), archive_server(content=content, breaks=50_000, ranges=ranges):
            code, _, err = lm_download()
            assert code == 2 and "of " in err and "the same command continues" in err, err
            (part,) = Path("d").glob("*.part")
            assert part.read_bytes() == content[: part.stat().st_size] and part.stat().st_size > 10_000
            have = part.stat().st_size
            code, out, err = lm_download()
            assert code == 0 and hashlib.sha256(content).hexdigest() in out and f"{len(content)} bytes" in out
            assert Archive.asked == [None, f"bytes={have}-"]
            archive = Path("d", lm_wikitext.ARCHIVE)
            names = {archive.name, f"{archive.name}.sha256", *(f"wiki.{s}.raw" for s in lm_wikitext.SPLITS)}
            assert {p.name for p in Path("d").iterdir()} == names and archive.read_bytes() == content
            assert Path("d/wiki.train.raw").read_text() == "\n".join(lm_lines(0, 500))
            Path("d/wiki.test.raw").unlink()
            assert lm_download()[0] == 0 and Path("d/wiki.test.raw").exists()
            assert len(Archive.asked) == 2, "the archive was there"
            archive.write_bytes(content[:-1] + b"x")
            code, _, err = lm_download()
            assert code == 2 and err.count("\n") == 1 and "is not what was downloaded" in err, err


def test_lm_download_of_something_else():
    whole = lm_archive()
    spoiled = whole.replace(b"the cat", b"The cat", 1)  # a wrong checksum inside
    for content, expected in ((b"<html>", "File is not a zip"), (spoiled, "CRC-32"), (b"", "no download")):
        with workplace(), archive_server(content=content):
            code, _, err = lm_download()
            assert code == 2 and err.count("\n") == 1 and expected in err, err
            assert not list(Path("d").glob("*.zip")) and not list(Path("d").glob("wiki.train.raw*"))
    with workplace(), archive_server(content=whole):
        Path("d").mkdir()
        Path("d", f"{lm_wikitext.ARCHIVE}.localhost.part").write_bytes(whole + b"more than there is")
        assert lm_download()[0] == 0, "a part that cannot be continued is discarded"


def test_download_stopped_by_a_signal_is_continued():
    content = A_TEXT * 20
    for script, task in (("shakespeare", SHAKESPEARE), ("wikitext", lm_wikitext.TASK)):
        whole = content if script == "shakespeare" else lm_archive()
        known = lm_shakespeare.ADDRESS, lm_shakespeare.SHA256
        with workplace() as folder, archive_server(content=whole, slow=True):
            lm_shakespeare.ADDRESS, lm_shakespeare.SHA256 = (
                lm_wikitext.ADDRESSES[1],
                lm_shakespeare.sha256(whole),
            )
            try:
                words = f"--scale smoke --download --data {'t' if script == 'shakespeare' else 'd'}"
                words += " --prepare" if script == "wikitext" else ""
                child = fork(words, task=task)
                wait_for(lambda: any(p.stat().st_size for p in folder.rglob("*.part")))
                os.kill(child, signal.SIGTERM)
                assert wait(child) == trial.STOPPED, Path("child.log").read_text()
                (part,) = folder.rglob("*.part")
                have = part.stat().st_size
                assert 0 < have < len(whole) and whole.startswith(part.read_bytes())
                Archive.slow = False
                if script == "shakespeare":
                    assert wait(fork(words, task=task)) == 0, Path("child.log").read_text()
                    assert Path("t").read_bytes() == whole
                else:
                    assert lm_download()[0] == 0 and Path("d/wiki.test.raw").exists()
                assert Archive.asked == [None, f"bytes={have}-"] and not list(folder.rglob("*.part"))
            finally:
                lm_shakespeare.ADDRESS, lm_shakespeare.SHA256 = known


def lm_made_up(scale, value, loss):
    _, args, given = trial.parse(lm_wikitext.TASK, ["--scale", scale])
    for flags, _, chosen in trial.grid(lm_wikitext.TASK, args, given, "table1"):
        folder = trial.trial_folder(lm_wikitext.TASK, chosen)
        folder.mkdir(parents=True)
        metrics = {
            f"{s}_perplexity{u}": value(flags) for s in ("valid", "test") for u in ("", "_with_unknown")
        }
        trial.write_json(folder / "result.json", {"metrics": metrics | {"unigram_test_perplexity": 900}})
        rows = [f"{i},{loss(flags, i)!r},0.1,0.001,{i}" for i in range(100, 3100, 100)]
        (folder / "curve.csv").write_text("\n".join(["iteration,loss,accuracy,learning_rate,seconds", *rows]))


def test_lm_report():
    def value(flags):
        return 40.0 + flags["seed"] + (0 if flags["pe"] == "none" else 3.5)

    def loss(flags, i):
        return 9 - i / 1000 - (0.5 if flags["pe"] == "sin" and i <= 1000 else 0)

    with workplace() as folder:
        lm_made_up("paper", value, loss)
        code, out, err = cli("--report", lm_wikitext.TASK)
        assert code == 0 and out.count("10 of 10 trials finished") == 2, err
        found, paper = "40.0000 +42.0000 +44.0000", "36.8257 +37.7731 +38.9166"
        assert re.search(f"lstm +none +32768 +{found} +5 +40.0000 .* 44.0000 +{paper}", out), out
        assert re.search("lstm +sin +32768 +43.5000 +45.5000 +47.5000 .* 38.0685 +38.5384 +38.8937", out), out
        assert "holds: the encoding does not lower the test perplexity: 42.0000 (n=5) against 45.5000" in out
        early = [math.exp(np.mean([9 - i / 1000 - cut for i in range(100, 1001, 100)])) for cut in (0, 0.5)]
        assert f"holds: the encoding lowers the training perplexity at first: {early[0]:.4f} (n=5)" in out, (
            out
        )
        assert f"against {early[1]:.4f}" in out
        if importlib.util.find_spec("matplotlib"):
            assert (folder / "figures" / "lm_wikitext-fig15.png").stat().st_size > 5000
        next(folder.glob("runs/*/*none*/seed3/curve.csv")).unlink()
        _, out, _ = cli("--report fig15", lm_wikitext.TASK)
        assert "9 of 10 trials finished" in out
    with workplace():
        lm_made_up("quick", lambda flags: 50.0 - (flags["pe"] == "sin"), lambda flags, i: 5.0)
        _, out, _ = cli("--scale quick --report", lm_wikitext.TASK)
        assert "paper's" not in out and "36.8257" not in out
        assert out.count("fails: ") == 2, out


def test_lm_smoke_scale_end_to_end():
    with workplace() as folder:
        lm_text()
        lm_data()
        code, out, err = lm("--all")
        assert code == 0 and out.count("2 of 2 trials finished") == 2, err
        assert len(list(folder.glob("runs/lm_wikitext/lstm-*-K40-L32-*/seed0/result.json"))) == 2
        for model, pe in itertools.product(("gru", "lstm"), ENCODINGS):
            code, _, err = lm(f"--model {model} --pe {pe} --iterations 2")
            assert code == 0, err
        assert lm("--combine add --iterations 2")[0] == 0
        _, args, _ = trial.parse(lm_wikitext.TASK, [])
        trial.complete(lm_wikitext.TASK, args)
        wanted = dict(
            model="lstm", pe="sin", vocab=32768, length=1024, batch=512, iterations=30_000, hidden=512
        )
        assert wanted.items() <= vars(args).items()
        name = "runs/lm_wikitext/lstm-sin-K32768-L1024/seed0"
        assert str(trial.trial_folder(lm_wikitext.TASK, args)) == name
        assert len(cli("--list table1", lm_wikitext.TASK)[1].splitlines()) == 10


# ------------------------------------------------------------------------------------------------------------
# The README
# ------------------------------------------------------------------------------------------------------------


def test_readme_task_runs():
    """The README's example of a task, as somebody would try it."""
    (code,) = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    with workplace() as folder:
        Path("echo.py").write_text(code)
        spec = importlib.util.spec_from_file_location("echo", "echo.py")
        sys.modules["echo"] = echo = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(echo)
        code, out, err = cli("--scale smoke --all echo", echo.TASK)
        assert code == 0 and "2 of 2 trials finished" in out, err
        assert len(list(folder.glob("runs/echo/lstm-*/seed0/result.json"))) == 2


def readme_commands():
    blocks = re.findall(r"```(?:\w*)\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    lines = [line.split("#")[0].split("&&")[-1].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("python ")]


def readme_reports():
    return re.findall(r"```\n\$ (python .*?)\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)


def test_readme_tables_are_those_of_the_committed_results():
    assert readme_reports()
    tasks = {f"{script.TASK.name}.py": script.TASK for script in (reverse, *SCRIPTS, *LANGUAGE_MODELS)}
    for command, printed in readme_reports():
        _, script, *words = shlex.split(command)
        with workplace():
            os.symlink(HERE / "results", "results")
            if script == "stability.py":
                code, out, err = stability_command(*words)
            elif script == "bench.py":
                code, out, err = captured(lambda words=words: bench.main(words))
            else:
                code, out, err = cli(shlex.join(words), tasks[script])
        lines = [x for x in out.splitlines() if "drawn" not in x]
        assert code == 0 and "\n".join(lines).strip() == printed.strip(), (command, out, err)


def test_readme_summary_repeats_every_verdict():
    """The first table: a row per verdict that the reports below it print, and the median trial's time."""
    verdict, printed = "holds|fails|not enough trials", set()
    for command, block in readme_reports():
        _, script, *words = shlex.split(command)
        if "--report" not in words:
            continue
        task = importlib.import_module(script.removesuffix(".py")).TASK
        _, args, given = trial.parse(task, (["--dual-freq"] if task is stability.TASK else []) + words)
        trials = trial.grid(task, args, given, args.report)
        files = [HERE / trial.trial_folder(task, x) / task.figures[args.report].file for *_, x in trials]
        seconds = np.median([json.loads(f.read_text())["seconds"] for f in files if f.exists()])
        for line in re.findall(rf"^  ((?:{verdict}): .*)$", block, re.MULTILINE):
            printed.add((f"{script} {args.report}", line, f"{seconds:.0f} s"))
    row = rf"^\|[^|]*\| (.*?) \| `(.*?)` \|[^|]*\| (.*?) \| ({verdict}) \| (.*?) \|"
    rows = re.findall(row, (HERE / "README.md").read_text(), re.MULTILINE)
    assert printed and len(rows) == len(printed)
    assert {(command, f"{x}: {claim}: {ours}", time) for claim, command, ours, x, time in rows} == printed


def test_readme_commands_run():
    commands = readme_commands()
    assert len(commands) >= 10
    tasks = {f"{script.TASK.name}.py": script.TASK for script in (reverse, *SCRIPTS, *LANGUAGE_MODELS)}
    skipped = {"test_all.py", "bench.py"}
    if not importlib.util.find_spec("sentencepiece"):
        skipped.add("lm_wikitext.py")
    with library(), mock.patch.object(lm_shakespeare, "SHA256", lm_shakespeare.sha256(A_TEXT)):
        lm_text()
        lm_text("data/wikitext2")
        for command in dict.fromkeys(commands):
            _, script, *words = shlex.split(command)
            if script in skipped:
                continue
            if "--scale" in words:
                words[words.index("--scale") + 1] = "smoke"
            else:
                words += ["--scale", "smoke"]
            if script == "report.py":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    report.main(words)
                code, err = 0 if out.getvalue().startswith("script ") else 1, out.getvalue()
            elif script == "stability.py":
                code, _, err = stability_command(*words)
            else:
                code, _, err = cli(shlex.join(words), tasks[script])
            assert code == 0, (command, code, err)


# ------------------------------------------------------------------------------------------------------------


def main(words):
    """Run the tests whose names hold one of the words -> exit code."""
    if words[:1] == ["--fixture"]:
        for case in check_fixture(words[1]):
            print(f"{case}: logits, loss, gradients and, where given, stability agree")
        return 0
    counts = Counter()
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (words and not any(word in name for word in words)):
            continue
        start = time.monotonic()
        try:
            test()
            said = "passed"
        except Skip as reason:
            said = "skipped"
            name = f"{name} ({reason})"
        except Exception:  # noqa: BLE001 - any exception is a failure
            said = "failed"
            traceback.print_exc()
        counts[said] += 1
        print(f"{said} {time.monotonic() - start:6.2f} s  {name}", flush=True)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
