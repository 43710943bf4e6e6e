"""Everything, small, on a CPU: python test_all.py [NAME ...]. Also collectable by pytest.

    python test_all.py --fixture FILE     # the comparison with the released code alone, on another such file

Numbers are compared with an independent way to get them: the released code's own (released_code.npz), brute
force, a recurrence for a convolution. Trials that are disturbed are forked from this process, of one thread.
"""

import suite.flags
from suite import claims, cli, fast, files, graphs, machine, progress, tables, trial
from suite.claims import NO, NONE, SIN, TOO_FEW, UNDECIDED, YES, Claim, Difference, Outcome, Outcomes

import ast
import contextlib
import copy
import csv
import dataclasses
import fcntl
import functools
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
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import bench
import common
import delayed_add
import lm_shakespeare
import lm_wikitext
import predecessor
import report
import reverse
import sort
import stability
from reverse import Reverse
from stability import Stability

HERE = Path(__file__).resolve().parent
FIXTURE = HERE / "released_code.npz"
ENCODINGS = list(common.ENCODINGS)
MODELS = [name for name, layer in common.LAYERS.items() if layer in fast.FACTORED]
CPU = torch.device("cpu")
Skip = unittest.SkipTest
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that are started here
# PyTorch cannot fork once it has seen a card: what needs one runs in processes of its own, which see it.
CARDS = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
if "--on-card" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


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


def command(words, task=Reverse):
    """-> (exit code, stdout, stderr) of a script's command line, in this process."""
    return captured(lambda: cli.main(task, shlex.split(words)))


def fork(words, limit=None, task=Reverse):
    """The command line in a child process; `limit`: the largest file it may write. Its log: child.log."""
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
        code = cli.main(task, shlex.split(words))
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


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def process(words, env):
    """-> (exit code, stdout, stderr) of Python in a new process."""
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def with_card(*words):
    """Python in a process that sees the cards, if any -> (exit code, what it printed)."""
    code, *said = process(words, {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | CARDS)
    return code, "".join(said)


@functools.cache
def has_card():
    return with_card("-c", "import torch; raise SystemExit(not torch.cuda.is_available())")[0] == 0


def on_card(test):
    """A test that needs a card, and is skipped without one; all others are on a CPU everywhere."""

    @functools.wraps(test)
    def run():
        if not has_card():
            raise Skip("no CUDA device")
        code, said = with_card(__file__, "--on-card", test.__name__)
        assert code == 0, f"exit code {code}: {said}"

    return run


def task_of(words, task=Reverse, build=False):
    """The task of a command line, with its data if wanted."""
    args, _ = suite.flags.parse(task, shlex.split(words))
    found = suite.flags.complete(task, args)
    if build:
        found.build(CPU)
    return found


def trial_of(words, task=Reverse):
    """A trial of that command line in memory, before its first iteration, without a folder."""
    return trial_in_memory(task_of(words, task, build=True))


def trial_in_memory(task):
    found = trial.Trial(task, [])
    found.engine = machine.choose_engine(found.task, CPU)
    found.initialise()
    return found


def folder_in(folder):
    """The folder of the one trial below."""
    (found,) = Path(folder).glob("runs/*/*/seed*")
    return found


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
    weights = torch.load(folder / "last.pt", map_location=CPU, weights_only=True)["model"]
    with open(folder / "curve.csv") as file:
        curve = [row[:4] for row in csv.reader(file)]
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return {k: v.numpy().tobytes() for k, v in weights.items()}, metrics, curve


# ------------------------------------------------------------------------------------------------------------
# Data, by a battery of tasks and flags
# ------------------------------------------------------------------------------------------------------------

TABLES = ("sin", "random", "learned")
CLOCKS = (*TABLES, "constant", "ramp", "counter", "shuffled")
BATTERY = [(Reverse, ""), (Reverse, "--min-length 3"), (Reverse, "--dual-freq")]
BATTERY += [(task, "") for task in (sort.Sort, delayed_add.DelayedAddition, predecessor.Predecessor)]
SCARCE = [  # so few sequences exist that draws of the held-out ones are common
    "--vocab 2 --length 4 --held-out 8",
    "--vocab 4 --length 4 --held-out 5 --min-length 2",
    "--vocab 4 --length 3 --held-out 12 --dual-freq",
    "--vocab 3 --length 3 --held-out 13",
    "--vocab 2 --length 2 --held-out 6",
    "--vocab 4 --length 3 --held-out 16",
]


def everything(task):
    """{row: how likely training draws it, relative to the others}, by enumeration."""
    K, L = task.vocab, task.length
    of_length = lambda n: itertools.product(range(K), repeat=n)
    if isinstance(task, reverse.VariableLength):
        lengths = range(task.args.min_length, L + 1)
        return {(*x, *[K] * (L - n)): K**-n for n in lengths for x in of_length(n)}
    if isinstance(task, reverse.DualFrequency):
        return {x: 7 ** sum(integer < K / 2 for integer in x) for x in of_length(L)}
    if isinstance(task, predecessor.Predecessor):
        return {(*x, query): 1 for x in itertools.permutations(range(K), L) for query in x[1:]}
    return dict.fromkeys(of_length(2 * L if task.name == "delayed_add" else L), 1)


def read_and_answered(episode, b):
    """What row b reads, and {step: what it has to answer there}."""
    targets, steps, weight = episode.targets[b].tolist(), episode.steps, episode.weight
    steps = range(episode.inputs.shape[1])[steps] if isinstance(steps, slice) else steps[b].tolist()
    counted = [True] * len(targets) if weight is None else weight[b].tolist()
    return episode.inputs[b].tolist(), {s: t for s, t, c in zip(steps, targets, counted, strict=True) if c}


def by_hand(task, row):
    """The same from a row's integers alone."""
    x, K, L = [integer for integer in row if integer < task.vocab], task.vocab, task.length
    if task.name == "predecessor":
        return x, {L: x[x.index(x[L]) - 1]}
    sums = [(a + b) % K for a, b in zip(x[L - 1 :: -1], x[L:])]
    answered = dict(reverse=x[::-1], sort=sorted(x), delayed_add=sums)[task.name]
    return x + [K] * (2 * L - len(x)), dict(enumerate(answered, L if sums else len(x)))


def refused(wanted, function, *args):
    unittest.TestCase().assertRaisesRegex(common.Refused, f"^.*{wanted}.*$", function, *args)


def test_a_batch_depends_on_the_seed_and_the_iteration_alone(
    device=CPU, battery=BATTERY, drawn=lambda draw: draw
):
    for script, flags in battery:
        words = f"--vocab 50 --length 6 --batch 40 {flags}"
        one, two, other = (task_of(f"{words} {more}", script) for more in ("", "--model gru", "--seed 4"))
        for task, place in ((one, CPU), (two, device), (other, CPU)):
            task.build(place)
        later, found = one.training_episode(7), drawn(two.training_episode)(torch.tensor(7, device=device))
        pairs = [(one.held_out.rows, two.held_out.rows), *zip(later, found, strict=True)]
        assert all(torch.equal(x, y.cpu()) for x, y in pairs if isinstance(x, torch.Tensor))
        assert not torch.equal(later.inputs, one.training_episode(8).inputs)
        assert not torch.equal(later.inputs, other.training_episode(7).inputs)
        assert not torch.equal(one.held_out.rows, other.held_out.rows)


COMPILED = functools.partial(torch.compile, dynamic=False)


def test_compiled_drawing_draws_the_same():
    if fault := fast.compile_fault("cpu"):
        raise Skip(fault)
    test_a_batch_depends_on_the_seed_and_the_iteration_alone(CPU, BATTERY[:1], COMPILED)


@on_card
def test_cuda_batches():
    for drawn in (lambda draw: draw, COMPILED):
        test_a_batch_depends_on_the_seed_and_the_iteration_alone(torch.device("cuda"), BATTERY, drawn)


def test_held_out_rows_are_never_trained_on_and_all_others_as_they_are_drawn():
    for (script, _), flags in zip(BATTERY, SCARCE, strict=True):
        task = task_of(flags, script, build=True)
        likely, held_out = everything(task), set(map(tuple, task.held_out.rows.tolist()))
        assert len(held_out) == len(task.held_out.rows) and held_out < likely.keys()
        mass = sum(likely[row] for row in held_out) / sum(likely.values())
        assert mass > 0.1 and abs(task.mass(task.held_out.rows) - mass) < 1e-12
        drawn = [task.draw(common.key(5), (40, 512)).flatten(0, 1)]
        task.batch = 512
        trained = [task.training_rows(i) for i in range(1, 41)]
        allowed = {row: weight for row, weight in likely.items() if row not in held_out}
        for rows, weights in ((drawn, likely), (trained, allowed)):
            counts = Counter(map(tuple, torch.cat(rows).tolist()))
            assert counts.keys() <= weights.keys(), (flags, counts.keys() - weights.keys())
            expected = np.array(list(weights.values())) * counts.total() / sum(weights.values())
            chi_square_is_clean([counts[row] for row in weights], expected)


def test_integers_are_splitmix64_and_distinct_rows_the_first_of_a_stream():
    zero, published = torch.tensor(0), [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [x % 2**64 for x in common.random_bits(zero, (3,)).tolist()] == published
    assert common.uniform_integers(zero, (3,), 1000).tolist() == [1000 * (x % 2**32) >> 32 for x in published]
    assert common.key(5, 1, 300_000).item() == 6436624988395588352
    assert (common.TRAINING, common.HELD_OUT, common.ANALYSIS) == (1, 2, 3)  # the streams of what is on disk
    drawn = []  # rows of four of two integers
    draw = lambda k, shape: drawn.extend(x := common.uniform_integers(k, (*shape, 4), 2)) or x
    rows = common.distinct_rows(draw, 16, 0).tolist()  # all that exist
    assert len(drawn) > 16 and rows == [list(x) for x in dict.fromkeys(tuple(x.tolist()) for x in drawn)]
    refused("17 .* only 16", common.distinct_rows, draw, 17, 0)
    for flags in ("--held-out 17", "--held-out 9"):  # more than exist, more than half
        refused(flags.split()[1], task_of, f"--vocab 2 --length 4 {flags}", sort.Sort, True)


def test_episodes_by_brute_force_and_by_their_docstrings():
    for script, flags in BATTERY:
        task = task_of(f"--vocab 10 --length 5 --batch 300 --held-out 20 {flags}", script, build=True)
        rows, episode = task.training_rows(1), task.training_episode(1)
        for b, row in enumerate(rows.tolist()):
            assert read_and_answered(episode, b) == by_hand(task, row), (script, flags, row)
        assert (episode.inputs[:, task.positions() - episode.commands :] == 10).all()
        text = sys.modules[script.__module__].__doc__
        read, answered = re.findall(r"^    (?:in |out)  ((?:[\d_.] )+[\d_.])(?:  .*)?$", text, re.MULTILINE)
        read = [10 if x == "_" else int(x) for x in read.split()]
        task.length = len(read) // 2 if task.positions() == 10 else len(read) - 1
        found = read_and_answered(task.episode(torch.tensor([[x for x in read if x < 10]])), 0)
        assert found == (read, {step: int(x) for step, x in enumerate(answered.split()) if x != "."})
    task = task_of("--vocab 16 --length 6 --dual-freq --held-out 120", build=True)
    episode, rows = task.test_episode(), task.held_out.rows
    cells = itertools.product(reverse.CONDITIONS, range(6), range(5))
    for b, (row, (condition, position, _)) in enumerate(zip(rows.tolist(), cells, strict=True)):
        kinds = ["rare" if integer >= 8 else "frequent" for integer in row]
        wanted, disturbants = condition.split("/")
        assert kinds.pop(position) == wanted and set(kinds) == {disturbants}
        assert read_and_answered(episode, b) == (row + [16] * 6, {2 * 6 - 1 - position: row[position]})


# ------------------------------------------------------------------------------------------------------------
# Models: the released code's numbers, each part by hand, fast.py against the plain ones; metrics; grids
# ------------------------------------------------------------------------------------------------------------

ENGINES = {name: machine.make_engine(name) for name in ("torch", "fast")}
THEIRS = dict(embedding="embedding.weight", readout_w="readout.weight", readout_b="readout.bias")  # -> ours
THEIRS |= dict(w_ih="layer.weight_ih_l0", w_hh="layer.weight_hh_l0", b_ih="layer.bias_ih_l0")
THEIRS |= dict(b_hh="layer.bias_hh_l0", in_proj_w="layer.project.weight", in_proj_b="layer.project.bias")
THEIRS |= dict(mix_w="layer.mix.weight", mix_b="layer.mix.bias", pe="encoding.table")
THEIRS |= {name: f"layer.{name}" for name in ("log_dt", "C", "log_A_real", "A_imag", "D")}


def gradients(model, episode, engine):
    """-> loss, accuracy, {parameter: its gradient}."""
    model.zero_grad()
    loss, accuracy = engine.loss_and_accuracy(model, episode)
    loss.backward()
    return loss, accuracy, {name: p.grad for name, p in model.named_parameters()}


def check_fixture(path):
    """Compare engines and stability with a file of the released code's numbers -> its cases."""
    with np.load(path) as file:
        arrays = [(*name.split("/"), torch.from_numpy(x)) for name, x in file.items()]
    assert arrays, f"{path} holds no case"
    for case in (cases := list(dict.fromkeys(of for of, _, _ in arrays))):
        numbers = {key: x for of, key, x in arrays if of == case}
        (kind, pe), tokens, embedding = case.split("-"), numbers["tokens"], numbers["embedding"]
        (vocab, hidden), length = numbers["readout_w"].shape, tokens.shape[1] // 2
        model = common.Model(kind, pe, vocab, embedding.shape[1], hidden, 2 * length).to(embedding.dtype)
        model.load_state_dict({ours: numbers[name] for name, ours in THEIRS.items() if name in numbers})
        every, answers = slice(0, 2 * length), slice(length, 2 * length)
        episode = common.Episode(tokens, tokens[:, :length].flip(1), answers, commands=length)
        tolerance = 2e-5 if kind == "s4d" else 1e-9  # released in float32
        for engine in ENGINES.values():
            close(engine.logits(model, tokens, every).transpose(0, 1), numbers["logits"], tolerance)
            loss, _, found = gradients(model, episode, engine)
            close(loss, numbers["loss"], tolerance)
            close(torch.cat([g.flatten() for g in found.values()]).norm(), numbers["grad_norm"], tolerance)
            if "grad_embedding" in numbers:
                close(found["embedding.weight"], numbers["grad_embedding"], tolerance)
        if "stability" in numbers:
            target = int(numbers.get("stab_prefix", 0)) + 1
            found = stability.stability(model, numbers["stab_a"], numbers["stab_b"], target)
            close(found, numbers["stability"], tolerance * (5 if kind == "s4d" else 1))
    return cases


def test_released_code_gives_the_same_numbers():
    wanted = {f"{kind}-{pe}" for kind in ("gru", "lstm") for pe in ("none", "dup", *TABLES)}
    wanted |= {"s4d-none", "s4d-sin"}
    assert set(check_fixture(FIXTURE)) == wanted


def test_encodings():
    """The paper's tables; vectors beside the embedding or added; --encode zeroes a phase and no more."""
    table, random = common.sinusoid(300, 6), common.Random(2000, 3)
    for t, i in itertools.product(range(300), range(3)):  # Equations 1 and 2
        angle = t / 10000 ** (2 * i / 6)
        close(table[t, 2 * i : 2 * i + 2] * math.sqrt(3), [math.sin(angle), math.cos(angle)], 1e-12)
    close(random.table.norm(dim=1), torch.ones(2000), 1e-6)
    assert_uniform(((random.table[:, 0] + 1) * 5).int().clamp(max=9).tolist(), 10)  # as on a sphere
    assert list(random.state_dict()) == ["table"] and not list(random.parameters())
    close(common.Sinusoid(6, 4).rows(9), common.sinusoid(9, 4), 1e-12)  # the others have a last position
    refused("6 positions", common.Learned(6, 4).join, torch.zeros(7, 1, 4))
    tokens, zeroed = torch.randn(16, 2, 4), dict(both=slice(0), input=slice(8, 16), output=slice(8))
    for pe, combine, phase in itertools.product(CLOCKS, ("concat", "add"), zeroed):
        flags = f"--length 8 --vocab 9 --hidden 3 --embed 4 --pe {pe} --combine {combine} --encode {phase}"
        encoding = task_of(flags, sort.Sort).model().encoding
        vectors = encoding.rows(16).detach().float()[:, None].clone()
        vectors[zeroed[phase]] = 0
        beside = torch.cat([tokens, vectors.expand(-1, 2, -1)], 2)
        assert torch.equal(encoding.join(tokens), tokens + vectors if combine == "add" else beside)
    assert torch.equal(common.Duplicate(5, 4).join(tokens), torch.cat([tokens, tokens], 2))
    for script, flags in ((script, flags) for script, flags in BATTERY if "min" not in flags):
        task = task_of(f"--length 5 --vocab 16 --embed 4 {flags} --held-out 20 --encode output", script, True)
        answered = torch.zeros(task.positions(), dtype=torch.bool)
        answered[task.training_episode(1).steps] = True
        assert torch.equal(task.model().encoding.vectors(len(answered)).any(1), answered), script


def test_amplitude_and_bands():
    lengths = lambda encoding: encoding.vectors(12).norm(dim=1)
    for pe in CLOCKS:
        found = []
        for flags in ("", "--amplitude 3"):
            torch.manual_seed(0)
            task = task_of(f"--length 6 --vocab 9 --hidden 3 --embed 16 --pe {pe} {flags}")
            found.append(task.model().encoding)
        usual = 4 if pe == "learned" else 1  # the root of 16
        assert torch.equal(found[0].vectors(12), found[0].rows(12)), "the bits of the table"
        close(found[1].vectors(12), found[0].rows(12) * 3 / usual, 1e-6)
        share = torch.arange(1, 13) / 12 if pe == "ramp" else 1
        if pe != "learned":
            close(lengths(found[1]), 3 * share * torch.ones(12), 1e-6)
        names = [task_of(f"--embed 16 --pe {pe} {flags}").folder for flags in ("", f"--amplitude {usual}")]
        assert names[0] == names[1] != task.folder
    close(common.Learned(500, 400, amplitude=3).table.square().sum(1).mean(), 9, 0.05)
    whole, table = task_of("--embed 8 --bands 0.0:1.0"), common.sinusoid(30, 8)
    assert whole.folder == task_of("--embed 8").folder and whole.config["bands"] == "0:1"
    cases = {"0:0.25": [0], "0.25:0.75": [1, 2], "0.2:0.5": [1], "0.74:1": [3], "0.1:1": [1, 2, 3]}
    for (bands, pairs), steps in itertools.product(cases.items(), (7, 30)):
        task = task_of(f"--vocab 9 --hidden 3 --length 6 --embed 8 --bands {bands} --amplitude 2")
        vectors, kept = task.model().encoding.vectors(steps), [2 * i + j for i in pairs for j in (0, 1)]
        wanted = torch.zeros(steps, 8)
        wanted[:, kept] = table[:steps, kept].float() * math.sqrt(4 / len(pairs)) * 2
        close(vectors, wanted, 1e-6)
        close(vectors.norm(dim=1), 2 * torch.ones(steps), 1e-12)


def test_clocks_that_are_no_sinusoids():
    positions, size = 11, 6
    make = lambda pe, seed: (torch.manual_seed(seed), common.ENCODINGS[pe](positions, size))[1]
    for pe in ("ramp", "shuffled", "constant"):  # drawn from the seed, and kept with the weights
        one, same, other = (make(pe, seed) for seed in (0, 0, 1))
        assert torch.equal(one.table, same.table) and not torch.equal(one.table, other.table)
        assert list(one.state_dict()) == ["table"] and not list(one.parameters())
    steps = make("ramp", 0).vectors(positions).diff(dim=0)
    close(steps, steps[:1].expand(10, size), 1e-6)
    close(make("ramp", 0).table[-1].norm(), 1.0, 1e-6)
    constant = make("constant", 0).vectors(2 * positions)
    assert torch.equal(constant, constant[:1].expand_as(constant))
    close(constant.norm(dim=1), torch.ones(2 * positions), 1e-6)
    shuffled, sinusoid = make("shuffled", 0).table.tolist(), common.sinusoid(positions, size).tolist()
    assert shuffled != sinusoid and sorted(shuffled) == sorted(sinusoid)
    for t, row in enumerate(make("counter", 0).table.tolist()):
        digits = [2 * int(digit) - 1 for digit in reversed(f"{t:04b}")]  # 11 steps need four
        assert np.allclose(row, np.array([*digits, *digits[:2]]) / math.sqrt(6))
    refused("5 binary digits", common.Counter, 17, 4)


def test_s4d_convolution_is_its_recurrence():
    layer, x = common.S4D(3, 4, order=6).double(), torch.randn(9, 2, 3, dtype=torch.float64)
    A, dt = torch.complex(-layer.log_A_real.exp(), layer.A_imag), layer.log_dt.exp()[:, None]
    decay = (A * dt).exp()  # state <- exp(dt A) state + (exp(dt A) - 1)/A u, y = 2 Re C state + D u
    state, outputs = torch.zeros(2, 4, 3, dtype=torch.complex128), []
    for u in layer.project(x):
        state = decay * state + (decay - 1) / A * u[..., None]
        y = 2 * (torch.view_as_complex(layer.C) * state).sum(-1).real + layer.D * u
        outputs.append(F.glu(layer.mix(F.gelu(y))))
    outputs, steps = torch.stack(outputs), torch.tensor([[0, 8], [3, 5]])
    close(layer(x, slice(4, 7)), outputs[4:7], 1e-10)
    close(layer(x, steps), torch.stack([outputs[steps[b], b] for b in range(2)], 1), 1e-10)


def test_kernel_of_s4d_in_real_numbers_is_the_complex_one():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for steps in (1, 2, 9, 40):
            layer = common.S4D(3, 4, order=6).to(dtype)
            wanted, found, weigh = (
                layer.kernel(steps),
                fast.kernel(layer, False, steps),
                torch.randn(4, steps),
            )
            derive = lambda x: torch.autograd.grad((x * weigh).sum(), parts)  # noqa: B023 - at once
            parts = [layer.log_dt, layer.C, layer.log_A_real, layer.A_imag]
            close(found, wanted, tolerance)
            for x, y in zip(derive(found), derive(wanted), strict=True):
                close(x, y, 10 * tolerance)


def layer_with_random_weights(kind, *how):
    torch.manual_seed(0)
    layer = common.LAYERS[kind](3, 5, *how).double()
    for p in layer.parameters():
        p.data = torch.randn_like(p) / 2
    return layer, torch.randn(7, 2, 3, dtype=torch.float64)


def check_layer(layer, x, wanted):
    """Outputs (T, B, H), of any steps; none of them before its input."""
    steps = torch.tensor([[0, 6], [3, 5]])
    close(layer(x, slice(2, 6)), wanted[2:6], 1e-12)
    close(layer(x, steps), torch.stack([wanted[steps[b], b] for b in range(2)], 1), 1e-12)
    later, before = torch.cat([x[:4], torch.randn_like(x[4:])]), layer(x, slice(None))
    assert torch.equal(layer(later, slice(None))[:4], before[:4])
    assert (layer(later, slice(None))[4:] != before[4:]).all()


def test_mingru_by_its_equations():
    """As a weighted sum over the past, each input's weight a product of gates."""
    layer, x = layer_with_random_weights("mingru")
    z, candidates = (
        1 / (1 + (-x @ layer.weight[:5].T - layer.bias[:5]).exp()),
        F.linear(x, layer.weight[5:]),
    )
    candidates, wanted = candidates + layer.bias[5:], torch.zeros(7, 2, 5, dtype=torch.float64)
    for t, s in itertools.product(range(7), repeat=2):
        if s <= t:
            wanted[t] += z[s] * candidates[s] * (1 - z[s + 1 : t + 1]).prod(0)
    check_layer(layer, x, wanted)


def mamba_by_its_equations(layer, x):
    """A channel at a time, every state as the sum over the past: decayed by exp(A times the steps since)."""
    silu = lambda v: v / (1 + (-v).exp())
    T, outputs = len(x), []
    for row in x.unbind(1):
        u, gate = (row @ layer.project.weight.T).split(10, 1)  # (T, D), D = 2 H
        if layer.conv is not None:
            before = [F.pad(u, (0, 0, n, 0))[:T] for n in (3, 2, 1, 0)]  # n steps ago
            u = sum(layer.conv.weight[:, 0, k] * before[k] for k in range(4)) + layer.conv.bias
        u = silu(u)
        chosen = u @ layer.choose.weight.T
        delta = (1 + (chosen[:, :1] @ layer.delta.weight.T + layer.delta.bias).exp()).log()  # (T, D)
        b, c, A = chosen[:, 1:17], chosen[:, 17:], -layer.log_A.exp()
        y = torch.zeros_like(u)
        for t, d, s in itertools.product(range(T), range(10), range(T)):
            if s <= t:
                state = (A[d] * delta[s + 1 : t + 1, d].sum()).exp() * delta[s, d] * b[s] * u[s, d]  # (N,)
                y[t, d] += c[t] @ state
        outputs.append((y + layer.D * u) * silu(gate) @ layer.answer.weight.T)
    return torch.stack(outputs, 1)


def test_mamba_by_its_equations():
    for conv in (True, False):
        layer, x = layer_with_random_weights("mamba", conv)
        check_layer(layer, x, mamba_by_its_equations(layer, x).detach())
    layer = common.Mamba(4, 2000)
    logarithms = F.softplus(layer.delta.bias.detach().double()).log10()  # between -3 and -1
    assert_uniform(((logarithms + 3) * 5).int().tolist(), 10)
    assert layer.delta.in_features == 125 and layer.D.eq(1).all()
    close(layer.log_A.exp(), torch.arange(1, 17).expand(4000, 16), 1e-6)
    conv = lambda flags: task_of(f"--model mamba --hidden 3 --embed 4 --vocab 9 {flags}").model().layer.conv
    assert conv("--no-conv") is None and conv("").groups == 6


def test_training_is_adam_by_hand():
    """Five iterations of a command line against Adam, clipping and the schedule written out."""
    for clip in (0.05, 0):  # 0: never
        words = f"--scale smoke --device cpu --model gru --lr 0.01 --clip {clip} --beta2 0.98 --eps 1e-9"
        words += " --iterations 5 --warmup 2 --log-every 1"
        t, rows = trial_of(words), []
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in t.model.parameters()]
        for i, rate in enumerate((0.005, 0.01, 0.0075, 0.0025, 0), 1):  # half a cosine after the warm-up
            loss, accuracy, found = gradients(t.model, t.task.training_episode(i), ENGINES["torch"])
            norm = math.sqrt(sum((g**2).sum().item() for g in found.values()))
            assert norm > 0.1, "clipping does something"
            rows.append([i, loss.item(), accuracy.item(), rate])
            for p, g, (m, v) in zip(t.model.parameters(), found.values(), moments, strict=True):
                g = g * min(1, (clip or math.inf) / (norm + 1e-6))
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.98).add_(0.02 * g**2)
                p.data -= rate * m / (1 - 0.9**i) / ((v / (1 - 0.98**i)).sqrt() + 1e-9)
        with workplace() as folder:
            assert command(words)[0] == 0
            saved = files.load_tensors(folder_in(folder) / "last.pt", CPU)
        assert np.allclose([row[:4] for row in saved["rows"]], rows, rtol=1e-5, atol=1e-9)
        for name, p in t.model.named_parameters():
            assert torch.allclose(p, saved["model"][name], rtol=0, atol=2e-5), name
    assert common.learning_rate(1, 1, 0, 10) < 1 == common.learning_rate(10, 1, 10, 10)


def compare_engines(words, script, dtype=torch.float64, tolerance=1e-10, compiled=False):
    """Of a task's training: loss, accuracy, all gradients; of its evaluation: all metrics."""
    torch.manual_seed(0)
    task = task_of(f"--vocab 8 --batch 7 --hidden 10 --embed 6 --held-out 20 {words}", script, build=True)
    model, engines = task.model().to(dtype), (ENGINES["torch"], machine.make_engine("fast", compiled))
    wanted, found = (gradients(model, task.training_episode(1), engine) for engine in engines)
    close(torch.stack(found[:2]), torch.stack(wanted[:2]), tolerance)
    for name, gradient in wanted[2].items():
        close(found[2][name], gradient, tolerance)
    plain, metrics = (task.evaluate(model, engine) for engine in ENGINES.values())
    close(metrics.pop("cross_entropy"), plain.pop("cross_entropy"), tolerance)
    assert metrics == plain and not trial.names_of_not_finite(metrics)


def test_engines_agree():
    cases = [*itertools.product(MODELS, ENCODINGS, ["concat"]), *itertools.product(MODELS, CLOCKS, ["add"])]
    for (kind, pe, combine), (script, flags) in itertools.product(cases, BATTERY):
        flags += " --encode output --amplitude 2" * (script is not Reverse and pe in CLOCKS)
        words = f"--length 5 --model {kind} --pe {pe} --combine {combine} {flags}"
        compare_engines(words, script)
        compare_engines(words, script, torch.float32, 1e-5)
    for kind in MODELS:
        compare_engines(f"--length 1 --vocab 40 --batch 1 --model {kind}", Reverse)
        with mock.patch.object(fast, "by_operators", lambda *_: False):  # what CUDA computes
            compare_engines(f"--length 5 --model {kind}", Reverse)


def test_engines_agree_with_compiled_steps():
    if fault := fast.compile_fault("cpu"):
        raise Skip(fault)
    for kind in ("gru", "lstm"):  # compiling takes seconds: two steps
        compare_engines(f"--length 1 --model {kind}", delayed_add.DelayedAddition, compiled=True)


def test_packed_rows_are_those_of_a_packed_sequence():
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)
    packed = [([2, 2, 2], 1), ([3, 2, 2, 1], 4), ([3, 2, 1], 2), ([1], 1), ([2, 1], 0)]  # steps with tokens
    sweeps = (fast.LSTM, 4), (fast.GRU, 3), (fast.LSTMByOperators, 4), (fast.GRUByOperators, 3)
    for (sizes, read), (sweep, gates) in itertools.product(packed, sweeps):
        tokens, bias = torch.randint(3, (sum(sizes[:read]),)), [draw(2)] * (gates == 3)
        of_input = draw(3, gates * 2), draw(len(sizes), gates * 2)
        compiled = [False] * (sweep in (fast.LSTM, fast.GRU))
        arguments = (*of_input, tokens, sizes, *compiled, draw(gates * 2, 2), *bias)
        assert torch.autograd.gradcheck(sweep.apply, arguments)
    lengths, inputs = torch.tensor([9, 7, 7, 2, 1]), torch.randint(20, (9, 5))
    pack = lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    for kind, plain in (("gru", torch.nn.GRU), ("lstm", torch.nn.LSTM)):
        model, plain = common.Model(kind, "sin", 20, 6, 8, 9).double(), plain(12, 8).double()
        plain.load_state_dict(model.layer.state_dict())
        x = pack(model.encoding.join(model.embedding(inputs)))
        of_input, sizes = fast.input_products(model, model.embedding.weight, 9), x.batch_sizes.tolist()
        found = fast.SWEEPS[type(model.layer)](model.layer, *of_input, pack(inputs).data, sizes, False)
        close(found, plain(x)[0].data, 1e-12)


def test_losses_by_hand():
    """The plain one, and fast.py's in chunks of rows; with and without short rows; with ties."""
    torch.manual_seed(0)
    features, readout = torch.randn(5, 6, 5).double().requires_grad_(), torch.nn.Linear(5, 7).double()
    readout.weight.data[4], readout.bias.data[[1, 4]] = readout.weight.data[1], 1.0
    derive = lambda x: torch.autograd.grad(x, (features, *readout.parameters()), retain_graph=True)
    targets, logits = torch.randint(7, (6, 5)), readout(features)
    for weight in (None, torch.rand(6, 5) > 0.3):
        episode = common.Episode(None, targets, None, weight)
        cells = (torch.ones(6, 5) if weight is None else weight).nonzero().tolist()
        each = [(logits[m, b], targets[b, m]) for b, m in cells]
        wanted = sum(-x.log_softmax(0)[target] for x, target in each) / len(each)
        right = sum(x.tolist().index(x.max()) == target for x, target in each) / len(each)
        answers = readout, targets.T.flatten(), episode.share()
        for chunk in (None, 7, 50, 2**25):
            with mock.patch.object(fast, "CHUNK", chunk):
                chunked = fast.cross_entropy(features.flatten(0, 1), *answers) if chunk else None
            loss, accuracy = chunked or common.loss_and_accuracy(lambda *_: logits, episode)
            close(torch.stack([loss, accuracy]), [wanted.item(), right], 1e-6)
            for x, y in zip(derive(3 * loss), derive(3 * wanted), strict=True):
                close(x, y, 1e-12)


def test_half_precision():
    """As --precision bf16 does on CUDA: the same autocast, on a CPU; weights and moments stay in float32."""
    for kind in MODELS:
        trials = [trial_of(f"--scale smoke --device cpu --model {kind} --engine fast") for _ in range(2)]
        trials[1].engine = dataclasses.replace(trials[1].engine, precision="bf16")
        for t in trials:
            trial.learn(t, t.task.training_episode(1))
        pairs = [[t.optimizer.state[p]["exp_avg"] for p in t.model.parameters()] for t in trials]
        for x, y in [*zip(*pairs, strict=True), [t.sums[2] for t in trials]]:
            assert x.dtype == y.dtype and 0 < (x - y).norm() < 0.05 * x.norm(), (kind, x, y)


def test_an_iteration_never_waits_for_its_device():
    """On the meta device an operation that needs a value raises, and so does one with tensors of a CPU."""
    meta, cases = torch.device("meta"), [(*case, "fast") for case in itertools.product(BATTERY, MODELS)]
    for (script, flags), kind, engine in [*cases, *((BATTERY[1], kind, "torch") for kind in common.LAYERS)]:
        t = trial_of(f"--scale smoke --device cpu --engine {engine} --model {kind} {flags}", script)
        for name in ("rows", "hashes"):
            setattr(t.task.held_out, name, getattr(t.task.held_out, name).to(meta))
        t.task.spare = t.task.spare.to(meta)
        t.model, t.sums = t.model.to(meta), t.sums.to(meta)
        t.optimizer = torch.optim.Adam(t.model.parameters(), foreach=False)
        trial.learn(t, t.task.training_episode(torch.zeros((), dtype=torch.int64, device=meta)))


def test_capture_leaves_no_trace_and_checkpoints_move_between_devices():
    made_up = dict(graph=mock.MagicMock(), CUDAGraph=mock.Mock(), current_stream=mock.Mock())  # run once
    for done in (0, 2):
        found, wanted = (trial_of("--scale smoke --device cpu --model gru --engine fast") for _ in range(2))
        for t in (found, wanted):
            t.rate.fill_(0.01)
            for t.iteration in range(1, done + 1):
                trial.learn(t, t.task.training_episode(t.iteration))
        trial.learn(wanted, wanted.task.training_episode(done + 1))
        found.iteration, found.engine = done, dataclasses.replace(found.engine, graph=True)
        with mock.patch.multiple("torch.cuda", **made_up):
            found.make_step()
        states = [t.optimizer.state_dict()["state"].values() for t in (found, wanted)]
        pairs = [(x[k], y[k]) for x, y in zip(*states, strict=True) for k in y]
        pairs += zip(found.model.parameters(), wanted.model.parameters(), strict=True)
        assert all(torch.equal(x, y) for x, y in [*pairs, (found.sums, wanted.sums)]), done
    saved = {"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict(), "sums": t.sums}
    for graph in (True, False):  # Adam's switches are those of the device that continues
        found.optimizer.param_groups[0]["capturable"] = graph
        found.load(saved | {"iteration": 1, "seconds": 1.0, "rows": []})
        group = found.optimizer.param_groups[0]
        assert group["capturable"] is graph and group["lr"] is found.rate


def test_a_model_and_an_encoding_of_ones_own():
    class Gate(common.Sinusoid):  # what it joins is no sum over token and step
        def join(self, tokens):
            return torch.cat([tokens, tokens * self.vectors(len(tokens))[:, None].float()], dim=-1)

    class Mean(torch.nn.Linear):  # all that a layer needs: (inputs, hidden), and the answered steps
        def forward(self, x, steps):
            return common.select(super().forward(x).cumsum(0), steps)

    with mock.patch.dict(common.ENCODINGS, gate=Gate), mock.patch.dict(common.LAYERS, mean=Mean), workplace():
        suite.flags.declare.cache_clear()
        for flags, engine in (("--pe sin", "fast"), ("--pe gate", "torch"), ("--model mean", "torch")):
            words = f"--scale smoke --device cpu --hidden 256 --batch 32 {flags}"
            code, _, err = command(words)
            found = json.loads((task_of(words).folder / "result.json").read_text())
            assert (code, found["engine"]) == (0, engine), err
            if engine == "torch":
                refused(flags, machine.choose_engine, task_of(f"{flags} --engine fast"), CPU)
    suite.flags.declare.cache_clear()


def plain_distance(a, b):
    """The table of Lowrance and Wagner, a cell at a time."""
    table = {}
    for i, j in itertools.product(range(len(a) + 1), range(len(b) + 1)):
        before = {(i - 1, j): 1, (i, j - 1): 1, (i - 1, j - 1): i and j and a[i - 1] != b[j - 1]}
        k = [k for k in range(1, i) if j and a[k - 1] == b[j - 1]]
        m = [m for m in range(1, j) if i and b[m - 1] == a[i - 1]]
        if k and m:  # transposed, with what was between them deleted and inserted
            before[k[-1] - 1, m[-1] - 1] = i - k[-1] + j - m[-1] - 1
        table[i, j] = min((table[cell] + cost for cell, cost in before.items() if cell in table), default=0)
    return table[len(a), len(b)]


def test_metrics_by_hand():
    pairs = [([1, 2], [2, 1], 1), ([1, 2, 3, 4], [2, 1, 4, 3], 2), ([1], [1], 0), ([3, 1], [1, 2, 3], 2)]
    for a, b, wanted in pairs:  # the last, CA -> ABC: 2 for the unrestricted distance only
        assert common.damerau_levenshtein([a], [b]).tolist() == [wanted] == [plain_distance(a, b)], (a, b)
    rng = np.random.default_rng(7)
    for n in range(24):  # small and large alphabets, unrelated and shuffled
        (rows, columns), alphabet = rng.integers(1, 41, 2), (2, 4, 20, 1000)[n % 4]
        a, b = rng.integers(0, alphabet, (3, rows)), rng.integers(0, alphabet, (3, columns))
        b = b if n % 3 else np.array([[*rng.permutation(x[: len(x) // 4]), *x[len(x) // 4 :]] for x in a])
        wanted = [plain_distance(x, y) for x, y in zip(a.tolist(), b.tolist())]
        assert common.damerau_levenshtein(a, b).tolist() == wanted
    targets, weight = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    predictions = torch.tensor([[2, 1, 3], [4, 5, 9]])  # neighbours swapped; right but for the padding
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]])
    metrics = common.sequence_metrics(common.Episode(None, targets, None, weight), predictions, losses)
    assert list(metrics.values()) == [3 / 5, 1 / 2, 3.0, 1 / 2], metrics
    values = rng.normal(size=200)
    interval, spread = claims.bootstrap_interval(values), 1.96 * values.std() / math.sqrt(200)
    assert np.allclose(interval, (values.mean() - spread, values.mean() + spread), rtol=0, atol=0.01)
    assert claims.bootstrap_interval(values) == interval and claims.bootstrap_interval([0.5]) is None


def test_evaluation_counts_every_held_out_answer_once():
    """By a model that knows all answers but is wrong in the first row of what it is given at a time."""
    for script, flags in BATTERY:
        task = task_of(f"--scale smoke --held-out 64 --batch 7 {flags}", script, build=True)
        episode = task.test_episode()
        weight = torch.ones_like(episode.targets) if episode.weight is None else episode.weight.long()
        answers = episode.targets + 1 - weight  # wrong where none is asked for
        known = dict(zip(map(tuple, episode.inputs.tolist()), answers, strict=True))

        def knows(inputs, steps, known=known):
            targets = torch.stack([known[row] for row in map(tuple, inputs.tolist())])
            targets[0] += 1
            return 100.0 * F.one_hot(targets.T % 8, 8)  # (M, B, K)

        metrics, right = task.evaluate(knows, ENGINES["torch"]), (torch.arange(len(answers)) % 7 != 0).float()
        share = (weight.sum(1) @ right.long() / weight.sum()).item()
        wanted = dict(token_accuracy=share, accuracy=share, sequence_accuracy=right.mean())
        for name, x in (wanted | dict(cross_entropy=100 * (1 - share))).items():
            close(metrics.get(name, x), x, 1e-6)
        if flags:
            parts = metrics["by_length" if "min" in flags else "by_condition"]
            assert list(parts) == (list("345678") if "min" in flags else reverse.CONDITIONS)
            cells = (6, 64) if "min" in flags else (4, 8, 2)
            close(list(parts.values()), right.view(cells).mean(-1), 1e-6)


POWERS, LARGEST, TWO = [2**n for n in range(5, 15)], dict(lstm=[16384]), ["none", "sin"]
PAPER = [  # script, figure, {model: vocabularies}, encodings, other flags
    (Reverse, "fig2", dict(gru=POWERS[:4], lstm=POWERS[3:], s4d=POWERS[3:]), TWO, {}),
    (Reverse, "fig3", dict(gru=[64], lstm=[1024], s4d=[2048]), TWO, dict(dual_freq=True, held_out=4096)),
    (Reverse, "fig11", LARGEST, TWO, dict(min_length=32)),
    (Reverse, "fig12", LARGEST, ["none", "dup", "sin"], {}),
    (Reverse, "fig13", LARGEST, ["none", *TABLES], {}),
    (Reverse, "fig14", LARGEST, ["none", *TABLES], dict(min_length=32)),
    (sort.Sort, "fig8", dict(gru=POWERS[:4], lstm=POWERS[3:]), TWO, {}),
    (sort.Sort, "fig12", LARGEST, ["none", "dup", "sin"], {}),
    (BATTERY[4][0], "fig7", dict(lstm=[896, 960, 1024, 1088]), TWO, dict(length=16, iterations=600_000)),
    (BATTERY[5][0], "fig10", dict(lstm=[512, 640, 768, 896, 1024]), TWO, dict(length=16)),
]
TRAINING = dict(length=64, iterations=300_000, batch=512, hidden=512, embed=512, lr=1e-3, warmup=1000)
TRAINING |= dict(clip=1.0, beta2=0.999, eps=1e-8, combine="concat", held_out=1024, snapshot_every=0)
TRAINING |= dict(encode="both", bands="0:1", no_conv=False)


def test_defaults_and_grids_are_the_papers():
    def paper(script, figure):
        return [x.task.args for x in suite.flags.grid(script, *suite.flags.parse(script, []), figure)]

    for script, figure, vocabularies, encodings, flags in PAPER:
        trials = paper(script, figure)
        models = [(model, vocab) for model, found in vocabularies.items() for vocab in found]
        wanted = sorted((*m, pe, seed) for m, pe, seed in itertools.product(models, encodings, range(5)))
        assert sorted((a.model, a.vocab, a.pe, a.seed) for a in trials) == wanted, figure
        wanted = TRAINING | flags | (dict(snapshot_every=5000) if "dual_freq" in flags else {})
        for a in trials:
            assert vars(a).items() >= wanted.items(), (figure, wanted.items() - vars(a).items())
    more = [(a.model, a.pe, a.vocab, a.iterations, a.batch, a.seed) for a in paper(Reverse, "section4.1")]
    sizes = itertools.product([(300_000, 512), (600_000, 512), (300_000, 1024)], range(5))
    assert sorted(more) == sorted(("lstm", "none", 16384, *size, seed) for size, seed in sizes)


# ------------------------------------------------------------------------------------------------------------
# The life of a trial: whatever disturbs it, it ends with the same bits
# ------------------------------------------------------------------------------------------------------------

LONG = "--scale smoke --device cpu --dual-freq --iterations 240 --save-every 20 --log-every 20"


@functools.cache
def undisturbed(words=LONG):
    """The outcome of a trial that nothing interrupts, and the seconds it took."""
    with workplace() as folder:
        start = time.monotonic()
        assert wait(fork(words)) == 0, log()
        return outcome(folder_in(folder)), time.monotonic() - start


def log():
    return Path("child.log").read_text()


def finish(words=LONG):
    """Run to the end and compare; of all that was saved, no snapshot is missing."""
    assert wait(fork(words)) == 0, log()
    folder = folder_in(".")
    assert outcome(folder) == undisturbed(words)[0]
    assert sorted(p.stem for p in (folder / "snapshots").iterdir()) == [f"{i:06}" for i in range(24, 241, 24)]
    assert not (folder / "previous.pt").exists()


def stop_after_a_save(number=signal.SIGTERM, limit=None):
    child = fork(LONG, limit)
    wait_for(lambda: list(Path().glob("runs/*/*/seed*/previous.pt")))
    os.kill(child, number)
    assert wait(child) == trial.STOPPED, log()
    assert not (folder_in(".") / "result.json").exists()
    return folder_in(".")


def change(path, key, value):
    content = torch.load(path, weights_only=True)
    content[key] = value
    torch.save(content, path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 999)


LAST, PREVIOUS = "continuing from last.pt", "continuing from previous.pt"
DAMAGES = [  # what is done to files of a stopped trial, and what the next start says
    ({}, LAST),
    ({"last.pt": Path.unlink}, PREVIOUS),
    ({"last.pt": cut}, PREVIOUS),
    ({"last.pt": flip}, PREVIOUS),
    ({"last.pt": lambda path: change(path, "iteration", "many")}, PREVIOUS),
    ({"last.pt": cut, "previous.pt": cut}, "starting at iteration 0"),
    ({"config.json": lambda path: path.write_text("")}, "config.json cannot be used"),
]


def test_a_trial_ends_the_same_after_every_signal():
    for number in trial.Stop.SIGNALS:
        with workplace():
            saved = torch.load(stop_after_a_save(number) / "last.pt", weights_only=True)
            assert 40 <= saved["iteration"] < 240
            finish()
            code, out, _ = command(LONG)
            assert code == 0 and "is finished" in out and "token accuracy" in out


def test_a_trial_ends_the_same_after_every_damage():
    with workplace():
        stopped = stop_after_a_save()
        shutil.copytree("runs", "kept")
        for damages, said in DAMAGES:
            for file, damage in damages.items():
                damage(stopped / file)
            Path("child.log").unlink()
            finish()
            assert said in log(), (damages, log())
            shutil.rmtree("runs")
            shutil.copytree("kept", "runs")


def test_what_is_whole_but_cannot_be_used_is_never_overwritten():
    """A disk that does not answer, or another version's keys, is not a trial that has not begun."""

    def other_keys(path):
        change(path, "model", {"other": torch.zeros(3)})

    def no_file(path):
        path.unlink()
        path.mkdir()

    def beyond(path):
        change(path, "iteration", 1000)

    for damage, code in (
        (other_keys, trial.USAGE_ERROR),
        (beyond, trial.USAGE_ERROR),
        (no_file, trial.FAILED),
    ):
        with workplace():
            stopped = stop_after_a_save()
            for name in ("last.pt", "previous.pt"):
                damage(stopped / name)
            before = {p: p.stat().st_mtime_ns for p in stopped.rglob("*") if p.name != "lock"}
            Path("child.log").unlink()
            assert wait(fork(LONG)) == code
            assert log().count("\n") == 1 and "last.pt" in log(), log()
            assert before == {p: p.stat().st_mtime_ns for p in stopped.rglob("*") if p.name != "lock"}


def test_a_torn_checkpoint_never_replaces_a_good_one():
    with workplace():
        t = trial_of("--scale smoke --device cpu")
        t.folder.mkdir(parents=True)
        for t.iteration in (3, 6):
            t.save()
        cut(t.folder / "last.pt")
        t.resume()
        assert t.iteration == 3
        t.save()
        assert files.load_tensors(t.folder / "previous.pt", CPU)["iteration"] == 3


def test_killed_at_random_moments_and_raced():
    """Killed at 20 random moments while saving often; two at a time; no room; last.pt torn or removed."""
    words = LONG.replace("--save-every 20", "--save-every 4")
    rng, codes = np.random.default_rng(5), Counter()
    wanted, seconds = undisturbed(words)
    with workplace() as folder:
        while codes[-signal.SIGKILL] < 20:
            limit = 3000 if rng.random() < 0.2 else None
            children = [fork(words, limit) for _ in range(rng.integers(1, 3))]
            time.sleep(rng.uniform(0.05, 0.25) * seconds)
            for child in children:
                os.kill(child, signal.SIGKILL)
                codes[code := wait(child)] += 1
                allowed = {-signal.SIGKILL, trial.RUNNING_ELSEWHERE, 0} | ({trial.FAILED} if limit else set())
                assert code in allowed, (code, log()[-2000:])
            for last in folder.glob("runs/*/*/seed*/last.pt"):
                if rng.random() < 0.2:
                    last.unlink()
                elif rng.random() < 0.2:
                    last.write_bytes(last.read_bytes()[: rng.integers(last.stat().st_size)])
            if list(folder.glob("runs/*/*/seed*/result.json")):
                shutil.rmtree(folder / "runs")  # finished before its time: again
        racing = [fork(words) for _ in range(2)]
        found = sorted(wait(child) for child in racing)
        assert found in ([0, 0], [0, trial.RUNNING_ELSEWHERE]), log()
        assert outcome(folder_in(folder)) == wanted


def test_full_disk_ends_the_trial_and_loses_nothing():
    with workplace():
        stopped = stop_after_a_save()
        kept = (stopped / "last.pt").read_bytes()
        Path("child.log").unlink()
        assert wait(fork(LONG, limit=3000)) == trial.FAILED  # too little for a checkpoint
        assert "Traceback" not in log() and log().count("File too large") == 1, log()
        assert (stopped / "last.pt").read_bytes() == kept
        finish()
        Path("child.log").write_text("x" * 3000)
        assert wait(fork(LONG, limit=3000)) == 0, (
            "a finished trial whose log is full is finished all the same"
        )


def test_second_process_leaves():
    with workplace():
        folder = task_of(LONG).folder
        folder.mkdir(parents=True)
        held = files.lock(folder / "lock")  # as another process would
        for more in ("", " --overwrite"):
            code, _, err = command(LONG + more)
            assert code == trial.RUNNING_ELSEWHERE and f"process {os.getpid()} on" in err
        held.close()
        finish()


def test_not_finite_stops():
    for words in ("--lr 1e38 --warmup 10", "--lr 1e308"):
        words = f"--scale smoke --device cpu --save-every 1 {words}"
        with workplace() as folder:
            code, _, err = command(words)
            assert code == trial.NOT_FINITE and re.search(r"between iterations \d+ and \d+", err), err
            assert err.count("\n") == 1 and not (folder_in(folder) / "result.json").exists()
            for path in folder_in(folder).glob("*.pt"):
                weights = torch.load(path, weights_only=True)["model"]
                assert all(v.isfinite().all() for v in weights.values()), "the checkpoint kept is good"
            assert command(words)[0] == trial.NOT_FINITE
    metrics = {
        "a": 1,
        "b": {"x": [0.5, {"y": math.nan}]},
        "c": [1.0, -math.inf],
        "d": "text",
        "e": {"x": 2.0},
    }
    assert trial.names_of_not_finite(metrics) == ["b", "c"]

    class Bad(Reverse):
        def evaluate(self, model, engine):
            return {"token_accuracy": 0.5, "cross_entropy": math.inf}

    with workplace() as folder:
        code, _, err = command("--scale smoke --device cpu", Bad)
        assert code == trial.NOT_FINITE and "cross_entropy not finite after iteration 20" in err
        assert (folder_in(folder) / "last.pt").exists() and not (folder_in(folder) / "result.json").exists()


def test_a_signal_ends_an_evaluation():
    class Slow(Reverse):
        def evaluate(self, model, engine):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    words = "--scale smoke --device cpu"
    with workplace():
        code, _, err = command(words, Slow)
        assert code == trial.STOPPED and "the same command evaluates" in err, err
        code, out, _ = command(words)
        assert code == 0 and "continuing from last.pt, iteration 20" in out, out


def test_a_result_that_cannot_be_read_is_made_again():
    words = "--scale smoke --device cpu"
    with workplace() as folder:
        assert command(words)[0] == 0
        path = folder_in(folder) / "result.json"
        wanted = json.loads(path.read_text())["metrics"]
        for content in ('{"metrics": [1, 2]}', '{"metrics": "good"}', '{"metrics": null}', "[]", "{", ""):
            path.write_text(content)
            code, _, err = command(words)
            assert code == 0 and "result.json cannot be used" in err, (content, err)
            assert json.loads(path.read_text())["metrics"] == wanted


def test_out_of_memory_is_one_line():
    """More than there is of address space, which an estimate cannot know of."""
    with workplace():
        if not (child := os.fork()):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
            with open("log", "w") as file:
                os.dup2(file.fileno(), 2)
                os._exit(
                    cli.main(Reverse, shlex.split("--scale smoke --device cpu --batch 300000 --hidden 64"))
                )
        assert wait(child) == trial.FAILED
        assert Path("log").read_text().count("\n") == 1 and "--batch" in Path("log").read_text()


def test_other_flags_are_refused():
    words = "--scale smoke --device cpu"
    with workplace() as folder:
        assert command(words)[0] == 0
        path = folder_in(folder) / "config.json"
        config = json.loads(path.read_text())
        del config["config"]["bands"]  # as of a version that had no such flag
        path.write_text(json.dumps(config))
        assert command(words)[0] == 0
        config["config"] |= {"lr": 0.5, "beta2": 0.5}
        path.write_text(json.dumps(config))
        code, _, err = command(words)
        assert code == 2 and "--lr 0.5" in err and "--beta2 0.5" in err and err.count("\n") == 1
        assert command(words + " --overwrite")[0] == command(words)[0] == 0


def test_files_of_a_trial():
    words = "--scale smoke --dual-freq --pe random --lr 0.5"
    with workplace() as folder:
        assert command(words)[0] == 0
        found = folder_in(folder)
        name = "lstm-random-K8-L8-batch=8-dual-freq-embed=16-held-out=32-hidden=16-iterations=20-lr=0.5"
        assert found.relative_to(folder).as_posix() == f"runs/reverse/{name}/seed0"
        result = json.loads((found / "result.json").read_text())
        keys = (
            "task config metrics iterations seconds iterations_per_second seconds_to_start peak_memory_bytes"
        )
        assert (
            set(f"{keys} parameters device torch python commit dirty argv threads finished".split())
            <= result.keys()
        )
        assert result["config"]["warmup"] == 2 and result["iterations"] == 20
        assert result["argv"] == shlex.split(words) and result["parameters"] == 3480
        last = torch.load(found / "last.pt", weights_only=True)["model"]
        snapshot = torch.load(found / "snapshots" / "000020.pt", weights_only=True)
        assert all(torch.equal(last[k], snapshot[k]) for k in last) and last.keys() == snapshot.keys()


def test_curve_is_the_mean_since_the_last_row():
    with workplace() as folder:
        curves = []
        for every in (1, 5):
            assert command(f"--scale smoke --device cpu --log-every {every} --overwrite")[0] == 0
            with open(folder_in(folder) / "curve.csv") as file:
                curves.append([[float(x) for x in r.values()] for r in csv.DictReader(file)])
        assert [row[0] for row in curves[1]] == [5, 10, 15, 20] and curves[1][-1][3] == 0
        for n, row in enumerate(curves[1]):
            part = np.array(curves[0][5 * n : 5 * n + 5])
            assert np.allclose(row[1:3], part[:, 1:3].mean(0), rtol=1e-6)


def test_seeds_together_are_each_alone():
    flags = "--scale smoke --device cpu --model gru"
    with workplace() as out:
        for seed in (3, 4, 5):
            assert command(f"{flags} --seed {seed} --out {out}/alone")[0] == 0
        trials = [trial.Trial(task_of(f"{flags} --seed {s} --out {out}/both"), [], False) for s in (3, 4, 5)]
        trials[1].folder = Path("/proc/nowhere")  # one that fails; the others go on
        codes, printed, err = captured(lambda: trial.train(trials, trial.Stop()))
        assert codes == [0, 2, 0] and "cannot write" in err
        order = re.findall(r"seed (\d): iteration (\d+)/", printed)
        assert order[:4] == [("3", "5"), ("5", "5"), ("3", "10"), ("5", "10")], "they take turns"
        found = {seed: outcome(next((out / "alone").glob(f"*/*/seed{seed}"))) for seed in (3, 4, 5)}
        assert "peak_memory_bytes_of_all" in next(out.glob("both/*/*/seed3/result.json")).read_text()
        assert found[3][0] != found[4][0]
        for seed in (3, 5):
            assert outcome(next((out / "both").glob(f"*/*/seed{seed}"))) == found[seed]


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------

REFUSED = {
    "--vocab 1": "--vocab",
    "--vocab 2147483648": "2^31 - 1",
    "--vocab 2147483647": "GiB of memory",
    "--batch 1000000000": "GiB of memory",
    "--embed 1000000000000": "2^31 - 1",
    "--dual-freq --length 100000 --held-out 6400000": "GiB of memory",
    f"--vocab {10**400}": "--vocab",
    "--seed 0-4294967295": "--seed",
    "--length 2147483647 --embed 2147483646": "memory",
    "--embed 7": "even",
    "--length 4 --min-length 5": "--min-length 5 is above --length 4",
    "--vocab 2 --length 3": "8 sequences",
    "--vocab 2 --length 3 --held-out 5": "half is the limit",
    "--pe rotary": "--pe",
    "--list fig99": "fig99",
    "--list fig2 --vocab 31": "no trial",
    "--device cpu --precision bf16": "CPU",
    "--lr nan": "--lr",
    "--warmup 11 --iterations 10": "--warmup 11 is above --iterations 10",
    "--vocab 15 --dual-freq": "odd",
    "--dual-freq --min-length 3": "--min-length",
    "--dual-freq --held-out 100": "multiple",
    "--dual-freq --vocab 2 --length 3 --held-out 12": "4 sequences",
    "--seed 5-3": "--seed",
    "--beta2 1": "--beta2",
    "--combine add --pe none": "--combine",
    "--encode input --pe dup": "--encode",
    "--amplitude 1 --pe none": "--amplitude",
    "--bands 0:0.5 --pe random": "from sin",
    "--bands 0.51:0.55": "none of the 8 frequencies",
    "--bands 0.5:0.5": "LOW < HIGH",
    "--bands 0.5": "LOW:HIGH",
    "--amplitude 0": "--amplitude",
    "--encode input --min-length 3": "--min-length",
    "--no-conv": "--no-conv is for mamba",
    "--pe counter --embed 3": "4 binary digits",
    "--model mamba --engine fast": "does not know --model mamba",
    "--out file": "--out",
    "--out 'a\nb'": "line break",
    "--unknown": "--unknown",
    "--iterations": "--iterations",
}
REFUSED_ELSEWHERE = {
    (Stability, "--model mingru"): "use gru, lstm or s4d",
    (sort.Sort, "--vocab 2 --length 2"): "4 sequences",
    (delayed_add.DelayedAddition, "--vocab 2 --length 2"): "16 sequences",
    (predecessor.Predecessor, "--length 1"): "at least 2",
    (predecessor.Predecessor, "--vocab 3"): "--vocab",
    (predecessor.Predecessor, "--vocab 4 --length 2 --held-out 13"): "12 sequences",
}


def test_bad_input_is_refused_in_one_line_and_creates_nothing():
    cases = {(Reverse, words): said for words, said in REFUSED.items()} | REFUSED_ELSEWHERE
    if not torch.cuda.is_available():
        cases[Reverse, "--device cuda"] = "no CUDA device"
    with workplace() as folder:
        Path("file").write_text("not a folder")
        for (task, words), said in cases.items():
            code, out, err = command("--scale smoke " + words, task)
            assert code == 2 and err.count("\n") == 1 and said in err and not out, (words, code, out, err)
            assert [p.name for p in folder.iterdir()] == ["file"], words


def test_folder_names_hold_what_changes_results():
    name = lambda words: task_of(words).folder.parent.name
    plain = "lstm-sin-K16384-L64"
    assert task_of("").folder == Path(f"runs/reverse/{plain}/seed0")
    plumbing = (
        "--save-every 7|--log-every 3|--snapshot-every 9|--device cpu|--warmup 1000|--overwrite|--jobs 3"
    )
    plumbing += (
        "|--precision tf32|--precision fp32|--engine torch|--no-graph|--deterministic|--out x|--scale paper"
    )
    assert {name(words) for words in plumbing.split("|")} == {plain}
    science = ("--lr 0.1", "--warmup 7", "--min-length 3", "--dual-freq", "--clip 0", "--combine add")
    science += (
        "--amplitude 2",
        "--bands 0:0.5",
        "--encode input",
        "--model mamba",
        "--model mamba --no-conv",
    )
    assert len({name(words) for words in science} | {plain}) == 12
    assert name("--min-length 32") == f"{plain}-min-length=32"
    assert name("--precision bf16") == f"{plain}-precision=bf16"
    assert name("--scale quick").startswith("lstm-sin-K") and "hidden=" in name("--scale quick")


def test_list_and_its_filters():
    def listed(words):
        code, out, _ = command(words)
        assert code == 0
        return out.splitlines()

    sizes = {"fig2": 180, "fig3": 30, "fig11": 10, "fig12": 15, "fig13": 20, "fig14": 20, "section4.1": 15}
    for figure, trials in sizes.items():
        assert len(set(listed(f"--list {figure}"))) == trials, figure
    shared = 5 * (2 + 2 + 2 + 1)  # fig2 holds parts of 12, 13 and 4.1; fig11 part of 14
    assert len(listed("--list")) == sum(sizes.values()) - shared
    one = "--model gru --pe sin --vocab 32 --seed 3"
    assert listed(f"--list fig2 --jobs 3 {one}") == [f"python reverse.py {one}"]
    (carried,) = listed(f"--list fig2 {one} --out 'a b' --beta2 0.98")
    args, given = suite.flags.parse(Reverse, shlex.split(carried)[2:])
    assert args.out == "a b" and given["beta2"] == 0.98
    assert len(listed("--scale quick --list fig2 --iterations 50")) == 24  # a first look, as .ci/run does
    for scale, figure in ((s, f) for s in ("quick", "smoke") for f in reverse.GRIDS[s]):
        for line in listed(f"--scale {scale} --list {figure}"):
            task_of(" ".join(line.split()[2:]))  # every command is accepted


def test_engine_is_chosen_from_the_configuration():
    cuda = torch.device("cuda")
    chosen = lambda flags, device=CPU, task=Reverse: machine.choose_engine(task_of(flags, task), device)
    by_flag = {"--hidden 8 --model lstm --engine fast": "fast", "--engine torch": "torch"}
    for flags, engine in by_flag.items():
        assert chosen(flags).name == engine, flags
    sooner = {  # hidden, batch: where one engine was more than a twentieth sooner, at small K and at large
        "gru": {(64, 32): "fast", (64, 128): "fast", (128, 32): "fast", (256, 128): "fast"},
        "lstm": {
            (64, 32): "torch",
            (64, 128): "torch",
            (128, 32): "torch",
            (128, 128): "fast",
            (256, 16): "torch",
            (256, 64): "fast",
        },
        "s4d": {(64, 128): "fast", (128, 128): "fast", (256, 64): "fast"},
    }
    for kind, cells in sooner.items():
        for (hidden, batch), engine in cells.items():
            for other in ("", "--iterations 9", "--vocab 16 --length 3 --pe none --seed 7"):
                flags = f"--model {kind} --hidden {hidden} --batch {batch} {other}"
                assert chosen(flags).name == engine, flags
                assert not chosen(flags).compiled  # on a CPU nothing is waited for
    with mock.patch.object(fast, "compile_fault", lambda device: None):
        assert not chosen("--engine torch", cuda).compiled
        there = chosen("--hidden 8 --batch 1 --iterations 5", cuda)
        assert there.name == "fast" and there.compiled and there.graph
        assert there.precision == "tf32" and not chosen("--no-graph", cuda).graph
        assert chosen("", task=lm_wikitext.WikiText).name == "fast"
        assert chosen("", cuda, lm_wikitext.WikiText).graph


def test_without_a_compiler_a_trial_says_so_once_and_goes_on():
    words, choose = "--scale smoke --engine fast --device cpu --seed", machine.choose_engine

    def as_on_cuda(task, device):  # on a CPU nothing is compiled
        return dataclasses.replace(choose(task, torch.device("cuda")), precision="fp32", graph=False)

    broken = mock.patch.object(torch, "compile", mock.Mock(side_effect=RuntimeError("no\ncompiler\n\nhere")))
    fast.compile_fault.cache_clear()
    there, no_learning = (
        mock.patch.object(machine, "choose_engine", as_on_cuda),
        mock.patch.object(trial, "learn"),
    )
    with workplace() as folder, broken, there, no_learning:
        said = [command(f"{words} {seed}")[2] for seed in (0, 1)]
        assert said[0].count("\n") == 1 and "fails with no compiler" in said[0] and not said[1], said
        for path in folder.rglob("result.json"):
            result = json.loads(path.read_text())
            assert (result["compiled"], result["compile_fault"]) == (False, "no compiler")
    fast.compile_fault.cache_clear()


def test_a_trial_says_what_it_is_about_to_take():
    t = trial_of("--scale smoke --iterations 1000000")
    t.iteration, t.seconds = 3, 3.0  # a second each
    found = progress.Progress(t.args, True)
    said = [captured(lambda: found.show(t, 0.1))[1] for _ in range(2)]
    assert said == [
        "999,997 iterations are left, about 12 days on this CPU; --scale quick takes minutes\n",
        "",
    ]


def test_cores_are_counted_where_linux_is_not():
    with mock.patch.object(os, "sched_getaffinity", create=True):
        del os.sched_getaffinity
        assert machine.cores() >= 1


def test_small_trials_take_one_thread():
    """Of two trials with two threads each, side by side on two cores, one waits for the other."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for hidden, given, threads in ((255, {}, 1), (256, {}, 2), (16, {"OMP_NUM_THREADS": "2"}, 2)):
        task = task_of(f"--scale smoke --hidden {hidden}")
        with mock.patch.dict(os.environ, environment | given, clear=True):
            torch.set_num_threads(2)
            machine.prepare(machine.choose_engine(task, CPU), CPU, task.is_small())
            found = torch.get_num_threads()
        torch.set_num_threads(1)
        assert found == threads, (hidden, given, found)


def test_all_goes_on_and_ends_with_the_worst_code():
    words = "--scale smoke --device cpu --all fig12"
    with workplace():
        none, dup = (task_of(f"--scale smoke --pe {pe}").folder for pe in ("none", "dup"))
        none.parent.mkdir(parents=True)
        none.write_text("a file where a folder is expected")
        dup.mkdir(parents=True)
        held = files.lock(dup / "lock")  # as another process would
        code, out, _ = command(words)
        assert code == 2 and "exit code 2" in out and "runs elsewhere" in out, out
        assert "1 of 3 trials finished" in out
        none.unlink()
        held.close()
        code, out, _ = command(words + " --jobs 1")
        assert code == 0 and "1 done before" in out and "3 of 3 trials finished" in out
        assert [line[:6] for line in out.splitlines() if "done;" in line] == ["2 of 3", "3 of 3"]


def test_all_stops_all_at_once_and_continues():
    words = "--scale smoke --device cpu --all fig13 --iterations 800 --save-every 50 --jobs 2"
    with workplace() as folder:
        child = fork(words)
        wait_for(lambda: len(list(Path().glob("runs/*/*/seed*/last.pt"))) == 2)
        os.kill(child, signal.SIGTERM)
        assert wait(child) == trial.STOPPED
        begun = list(folder.glob("runs/*/*/seed*"))
        assert len(begun) == 2, "no further trial was begun"
        iterations = [torch.load(path / "last.pt", weights_only=True)["iteration"] for path in begun]
        saved = sum(iteration < 800 for iteration in iterations)
        assert f"{saved} saved, 2 not begun; the same command continues" in log(), log()
        assert wait(fork(words)) == 0 and "4 of 4 trials finished" in log(), log()


def test_no_job_outlives_its_parent():
    """Killed without a word, --all takes along what it has started, which saves."""
    if sys.platform != "linux":
        raise Skip("elsewhere a process does not learn of its parent's death")
    words = "--scale smoke --device cpu --all fig12 --iterations 1000000 --save-every 50 --jobs 2"
    with workplace() as folder:
        child = fork(words)
        wait_for(lambda: len(list(folder.glob("runs/*/*/seed*/last.pt"))) == 2)
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL
        wait_for(lambda: not any(map(files.is_locked, folder.glob("runs/*/*/seed*/lock"))))


def test_signals_outside_of_training_are_one_line():
    """Ctrl-C while PyTorch is imported, twice while a trial trains; a reader of the report that leaves."""
    script = [sys.executable, str(HERE / "reverse.py"), "--scale", "smoke", "--device", "cpu"]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with workplace():
        early = subprocess.Popen(script, **pipe)
        time.sleep(0.4)
        early.send_signal(signal.SIGINT)
        code, (out, err) = early.wait(), early.communicate()
        assert code in (130, trial.STOPPED, -signal.SIGINT) and "Traceback" not in err, (code, out, err)
        twice = subprocess.Popen([*script, "--iterations", "1000000"], **pipe)
        wait_for(lambda: list(Path().glob("runs/*/*/seed*/config.json")))
        time.sleep(0.5)
        for _ in range(3):
            twice.send_signal(signal.SIGINT)
        assert twice.wait() in (130, trial.STOPPED) and "Traceback" not in twice.communicate()[1]
        listing = f"{shlex.join(script)} --scale paper --list | head -n 1"
        done = subprocess.run(listing, shell=True, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("python reverse.py") and not done.stderr, done.stderr
        for words in (script, [*script, "--list"]):
            subprocess.run(f"{shlex.join(words)} >&-", shell=True, stderr=subprocess.DEVNULL, check=True)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with trial.Stop().listening():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


# ------------------------------------------------------------------------------------------------------------
# Where there is a card
# ------------------------------------------------------------------------------------------------------------


def test_with_a_card_its_tests_run():
    """All whose names say CUDA, in processes that see it, unlike the others. Smoke trials alone are elsewhere
    when they name no device."""
    tests, asked = [name for name in globals() if name.startswith("test_cuda_")], []
    assert len(tests) >= 6 and not torch.cuda.is_available()
    for there in (True, False):
        with mock.patch("torch.cuda.is_available", lambda there=there: there):
            assert machine.choose_device(task_of("").args.device).type == ("cuda" if there else "cpu")
            assert machine.choose_device(task_of("--scale smoke").args.device).type == "cpu"
        answers = dict(
            has_card=lambda there=there: there, with_card=lambda *words: asked.append(words) or (0, "")
        )
        with mock.patch.dict(globals(), answers):
            for name in tests:
                with contextlib.suppress(Skip):
                    globals()[name]()
    assert asked == [(__file__, "--on-card", name) for name in tests]
    bodies = {name: mock.Mock() for name in tests}
    with mock.patch.dict(globals(), {name: mock.Mock(__wrapped__=body) for name, body in bodies.items()}):
        assert main(["--on-card", tests[0]]) == 0
    assert [body.called for body in bodies.values()] == [name == tests[0] for name in tests]
    seen = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    for cards in ({}, {"CUDA_VISIBLE_DEVICES": "3"}):
        with mock.patch.dict(globals(), CARDS=cards):
            assert with_card("-c", seen) == (0, f"{cards.get('CUDA_VISIBLE_DEVICES')}\n")


WAYS = ["", "--no-graph", "--engine torch", "--precision fp32", "--precision bf16"]
WAYS += ["--deterministic", "--deterministic --log-every 50"]
CARD = {f"reverse.py --seed 0-2 --model {model}": WAYS for model in MODELS}  # {command: its ways on the card}
CARD |= {f"reverse.py --min-length 4 --model {model}": ["", "--no-graph"] for model in MODELS}
CARD |= {"delayed_add.py": [""], "predecessor.py --model gru": [""]}
# These are less stable, or were not tried: tf32 alone may move them by 0.01 and more.
CARD |= {"reverse.py --model mingru": ["--precision fp32"], "reverse.py --model mamba": ["--precision fp32"]}
CARD |= {f"stability.py --held-out 160 --train --model {model}": ["--precision fp32"] for model in MODELS}
CARD |= {"sort.py": ["--precision fp32"], "lm_shakespeare.py": ["--precision fp32"]}
CARD |= {"lm_wikitext.py --data data": ["", "--no-graph", "--engine torch"]}


def beside_others(words):
    return process(words, os.environ | {"PYTHONPATH": str(HERE), "TORCHINDUCTOR_COMPILE_THREADS": "2"})


def run_script(words, out):
    """A script's command line as a process that has to succeed."""
    script, *words = shlex.split(f"{words} --out {out}")
    code, _, err = beside_others([HERE / script, *words])
    assert code == 0, (script, words, err)


def losses_below(out, graph):
    """{trial or condition: cross-entropy on held-out data, or stability at the last snapshot}

    None of the trials has fallen back to what is not compiled, or not a graph.
    """
    found = {}
    for path in Path(out).rglob("result.json"):
        content = json.loads(path.read_text())
        assert content["compile_fault"] is None and content["graph"] == graph, (path, content)
        metrics = content["metrics"]
        perplexity = metrics.get("test_perplexity", metrics.get("valid_perplexity"))
        found[path.parent.name] = math.log(perplexity) if perplexity else metrics["cross_entropy"]
    for path in Path(out).rglob("stability.json"):
        by_condition = json.loads(path.read_text())["by_condition"]
        found |= {condition: values[max(values, key=int)] for condition, values in by_condition.items()}
    return found


def compare_with_a_cpu(device, commands):
    """-> {(command, way): the losses there}. Rounding of 1e-3 in all weights moves them by 0.002 at most."""
    flags = "--scale smoke --iterations 300 --batch 64 --lr 0.01"

    def losses(case):
        command, where, way = case
        run_script(f"{command} {flags} --device {where} {way}", out := re.sub(r"\W+", "-", " ".join(case)))
        return losses_below(out, where == "cuda" and "--no-graph" not in way)

    there = [(command, device, way) for command, ways in commands.items() for way in ways]
    cases = [*((command, "cpu", "") for command in commands), *there]
    with library(), ThreadPoolExecutor(min(8, machine.cores())) as pool:
        lm_tokens()
        found = dict(zip(cases, pool.map(losses, cases)))
    for command, _, way in there:
        wanted, got = found[command, "cpu", ""], found[command, device, way]
        assert len(wanted) >= 1 + 2 * ("0-2" in command) and wanted.keys() == got.keys(), (command, got)
        for name, loss in wanted.items():
            bound = 0.03 if "bf16" in way else 0.01
            assert abs(got[name] - loss) < bound, (command, way, name, got[name], loss)
    return {(command, way): found[command, device, way] for command, device, way in there}


@on_card
def test_cuda_trials_are_the_cpus():
    """Every task; every model in every way, three seeds side by side, the deterministic way twice."""
    found = compare_with_a_cpu("cuda", CARD)
    for command in (command for command, ways in CARD.items() if ways is WAYS):
        assert found[command, WAYS[-1]] == found[command, WAYS[-2]], command


def compare_with_double_precision(device, hidden, kinds=MODELS):
    """Loss and gradients of fast.py there, plain and compiled, with torch.nn's in double precision here."""
    tokens = torch.randint(300, (64, 16))
    inputs = torch.cat([tokens, torch.full_like(tokens, 300)], 1)
    parts = dict(inputs=inputs, targets=tokens.flip(1))
    for kind in kinds:
        model = common.Model(kind, "sin", 300, hidden, hidden, 32).double()
        wanted = gradients(model, common.Episode(**parts, steps=slice(16, 32)), ENGINES["torch"])
        there = {name: x.to(device) for name, x in parts.items()}
        episode = common.Episode(**there, steps=slice(16, 32), commands=16)
        model.float().to(device)
        for compiled in (False, fast.compile_fault(device.type) is None):
            loss, _, found = gradients(model, episode, machine.make_engine("fast", compiled))
            close(loss.cpu(), wanted[0], 1e-5)
            for name, gradient in wanted[2].items():
                error = (found[name].cpu().double() - gradient).norm() / gradient.norm()
                assert error < 1e-4, (kind, compiled, name, error)


@contextlib.contextmanager
def products_in(precision):
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, precision
    try:
        yield
    finally:
        switch.fp32_precision = before


@on_card
def test_cuda_gradients_are_those_of_double_precision():
    with products_in("ieee"):
        compare_with_double_precision(torch.device("cuda"), 512)


@on_card
def test_cuda_kernel_of_s4d_keeps_its_precision():
    layer = common.S4D(8, 512)
    wanted, there = copy.deepcopy(layer).double().kernel(128), layer.cuda()
    for precision, low in (("tf32", False), ("ieee", True)):
        with products_in(precision), torch.autocast("cuda", torch.bfloat16, enabled=low):
            close(there.kernel(128).cpu(), wanted, 1e-5)
            for compiled in (False, True):
                close(fast.kernel(there, compiled, 128).cpu(), wanted, 1e-5)


def stop_and_continue(device, iterations):
    """A trial that SIGTERM stops continues from its checkpoint in a new process, to the same end."""
    words = f"reverse.py --scale smoke --device {device} --engine fast --deterministic --lr 0.01"
    words = f"{words} --save-every 100 --iterations {iterations}"
    with workplace() as folder:
        command = [sys.executable, HERE / "reverse.py", *shlex.split(words)[1:], "--out", "stopped"]
        with open("log", "w") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: child.poll() is not None or list(folder.rglob("last.pt")), 180)
        child.send_signal(signal.SIGTERM)
        assert child.wait() == trial.STOPPED, Path("log").read_text()
        for out in ("stopped", "whole"):
            run_script(words, out)
        stopped, whole = (outcome(next(folder.glob(f"{out}/*/*/seed0"))) for out in ("stopped", "whole"))
        assert stopped == whole, (stopped[1:], whole[1:])


@on_card
def test_cuda_trial_continues_in_a_new_graph():
    stop_and_continue("cuda", 8000)


@on_card
def test_cuda_out_of_memory_is_one_line():
    code = "from suite import cli; import torch, reverse; torch.cuda.set_per_process_memory_fraction(1e-3)"
    code += "; raise SystemExit(cli.main(reverse.Reverse))"
    with workplace() as folder:
        code, _, err = beside_others(["-c", code, "--device", "cuda", "--batch", "4096"])
        assert code == trial.FAILED and "Traceback" not in err, err
        assert err.splitlines()[-1].startswith("reverse.py: out of memory: lower --batch"), err
        assert not list(folder.rglob("*.pt"))


# ------------------------------------------------------------------------------------------------------------
# Reports
# ------------------------------------------------------------------------------------------------------------

SYNTHETIC = [Reverse, sort.Sort, delayed_add.DelayedAddition, predecessor.Predecessor]


def test_student_t_is_the_textbooks():
    table = {(0.025, 2): 4.3027, (0.025, 4): 2.7764, (0.025, 10): 2.2281, (0.025, 30): 2.0423}
    table |= {(0.05, 8): 1.8595, (0.005, 5): 4.0321, (0.0005, 3): 12.924, (0.025, 1): 12.7062}
    for (tail, freedom), t in table.items():
        assert math.isclose(claims.t_quantile(tail, freedom), t, rel_tol=1e-4), (tail, freedom)
        assert math.isclose(claims.t_tail(t, freedom), tail, rel_tol=1e-3)
    for t in (-30, -1, 0, 0.3, 4, 1000):  # in closed form, of two degrees of freedom
        assert math.isclose(claims.t_tail(t, 2), (1 - t / math.sqrt(2 + t * t)) / 2, rel_tol=1e-6)
    # An example of Welch's test that textbooks have: t = -2.46, 25.0 degrees of freedom, p = .021
    a = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    b = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    found = claims.difference([a], [b])
    found = found.value / found.error, found.freedom, 2 * found.below()
    assert [round(x, 3) for x in found] == [-2.455, 24.989, 0.021]
    paired = claims.paired_difference([3, 5, 7], [1, 2, 6])
    close([paired.value, paired.error, paired.freedom], [2, math.sqrt(1 / 3), 2], 1e-9)
    gains = claims.difference([[5, 6, 7], [1, 2, 3]], [[4, 5, 6], [2, 3, 4]])
    close([gains.better, gains.worse, gains.error, gains.freedom], [4, 2, math.sqrt(4 / 3), 8], 1e-9)
    # Holm's: times 3, 2, 1, never falling; of a family of four what is missing counts as 1.
    close(claims.holm([0.02, 0.01, 0.04], 3), [0.04, 0.03, 0.04], 1e-9)
    close(claims.holm([0.02, 0.01, 0.04], 4), [0.06, 0.04, 0.08], 1e-9)


def test_a_yes_is_not_luck():
    """Normal data without any difference: how often the claim, or its opposite, is shown at 2.5%."""
    rng, times = np.random.default_rng(2), 2000
    cases = {
        "Welch": lambda a, b, *_: claims.difference([a], [b]),
        "paired": lambda a, b, *_: claims.paired_difference(a, b),
        "gains": lambda a, b, c, d: claims.difference([a, c], [b, d]),
    }
    for n, (name, make) in itertools.product((3, 5, 10), cases.items()):
        shown = []
        for spread in (1, 3):
            drawn = rng.normal(size=(times, 4, n)) * np.array([1, spread, spread, 1])[:, None]
            found = [make(*samples) for samples in drawn]
            shown += [p <= 0.025 for d in found for p in (d.above(), d.below())]
        assert np.mean(shown) <= 0.03, (n, name, np.mean(shown))


def trials_with(values, **flags):
    """[(flags, Outcome)] of one cell, a seed per value of the metric `a`; None: not finished."""
    found = []
    for seed, a in enumerate(values):
        cell = flags | {"seed": seed}
        found.append((cell, None if a is None else Outcome(cell, {"a": a, "b": a - 0.05})))
    return found


def judged(cells, **claim):
    """The verdict's word, and its numbers as floats."""
    usual = dict(figure="f", text="", metric=claims.metric("a"), better=SIN, worse=NONE)
    found = claims.judge(Claim(**(usual | claim)), Outcomes(cells))
    return found.word, [float(number) for number in re.findall(r"[-+]?\d+\.?\d*", found.numbers)]


def test_verdicts():
    none, sin = [0.50, 0.51, 0.52, 0.48], [0.69, 0.75, 0.64, 0.80]
    cells = trials_with(none, pe="none") + trials_with(sin, pe="sin")
    word, numbers = judged(cells)
    d = claims.difference([sin], [none])
    close(numbers, [0.72, 4, 0.5025, 4, 0.2175, *d.interval(), 2 * d.above()], 2e-3)
    assert word == YES and judged(cells, better=NONE, worse=SIN)[0] == NO
    noisy = trials_with([0.4, 0.6, 0.9, 0.2], pe="sin") + trials_with(none, pe="none")
    assert judged(noisy)[0] == UNDECIDED and judged(noisy, margin="0.02")[0] == UNDECIDED
    # Of the same trials `b` is a by 0.05 less: sure in pairs, within the spread otherwise.
    assert judged(noisy, worse=SIN, than=claims.metric("b"))[0] == YES
    # No gain: within the margin, of a number or in percent, or a loss; a gain denies it, however small.
    alike = trials_with([0.500, 0.501, 0.502], pe="none") + trials_with([0.501, 0.502, 0.500], pe="sin")
    better = trials_with([0.500, 0.501, 0.502], pe="none") + trials_with([0.511, 0.512, 0.510], pe="sin")
    for margin, of_alike in (("0.02", YES), ("1%", YES), ("0.001", UNDECIDED), ("0.1%", UNDECIDED)):
        assert judged(alike, margin=margin)[0] == of_alike
        assert judged(better, margin=margin)[0] == NO
        assert judged(better, better=NONE, worse=SIN, margin=margin)[0] == YES, "a loss"
    # Every seed the same: nothing to estimate a spread from, and no crash.
    for value, words in ((1.0, (UNDECIDED, YES)), (0.9, (NO, YES))):
        same = trials_with([1.0] * 3, pe="none") + trials_with([value] * 3, pe="sin")
        assert (judged(same)[0], judged(same, margin="0.2")[0]) == words


def test_claims_need_trials_and_something_to_compare():
    cells = trials_with([0.5, 0.6, 0.7], pe="none", vocab=8) + trials_with([0.8, 0.9, 1.0], pe="sin", vocab=8)
    fewer = [(flags, outcome if flags["seed"] else None) for flags, outcome in cells]
    assert judged(fewer) == (TOO_FEW, [2, 2]) and judged(fewer, worse=0.1)[0] == TOO_FEW
    assert judged(cells, worse=0.6)[0] == YES and judged(cells, worse=0.91)[0] == UNDECIDED
    word, numbers = judged(cells, better={}, worse=0.3)
    assert word == YES and numbers[1] == 0.6 or numbers[:2] == [8, 0.6], "the worst cell decides"
    assert judged(cells, better=dict(vocab=min), worse=dict(vocab=max))[0] == TOO_FEW, "one vocabulary"
    larger = trials_with([0.1, 0.2, 0.3], pe="none", vocab=32) + trials_with([0.1] * 3, pe="none", vocab=16)
    word, numbers = judged(cells + larger, better=NONE | dict(vocab=min), worse=NONE | dict(vocab=max))
    assert word == YES and (numbers[0], numbers[2]) == (0.6, 0.2), "8 against 32"
    assert judged(cells + larger, better=SIN, worse=NONE)[0] == TOO_FEW, "two vocabularies in one mean"
    claim = Claim("f", "", None, {}, {}, where=dict(model="gru"), per="vocab")
    grid = Outcomes([(dict(model=m, vocab=k), None) for m, k in (("gru", 8), ("lstm", 4), ("gru", 16))])
    assert [one.where for one in claims.expand(claim, grid)] == [dict(model="gru", vocab=k) for k in (8, 16)]
    assert list(claims.expand(claim, Outcomes([(dict(model="lstm", vocab=4), None)]))) == []


def test_a_gain_is_over_none_and_over_the_control_that_has_run():
    (claim,) = claims.gains("f", "it helps", SIN, claims.metric("a"))
    none, sin = trials_with([0.50, 0.51, 0.52], pe="none"), trials_with([0.60, 0.61, 0.62], pe="sin")
    constant = {a: trials_with([a, a + 0.01, a + 0.02], pe="constant") for a in (0.4, 0.6, 0.7)}
    dup, not_run = trials_with([0.40, 0.41, 0.42], pe="dup"), trials_with([None] * 3, pe="constant")
    wanted = [  # the control's trials, the verdict, what is named, what the numbers are of
        ([], YES, "(over none)", "0.6100"),
        (constant[0.4], YES, "(over none and constant)", "over none"),
        (constant[0.6], UNDECIDED, "(over none and constant)", "over constant"),
        (constant[0.7] + dup, NO, "(over none and constant)", "over constant"),
        (not_run + dup, YES, "(over none and dup)", "over none"),
        (not_run, TOO_FEW, "(over none and constant)", "n = 3 and 0"),
    ]
    for control, word, named, of in wanted:
        found = claims.judge(claim, Outcomes(none + sin + control))
        assert (found.word, found.claim.text) == (word, f"it helps {named}") and found.numbers.startswith(of)
    # Corrected, a verdict may lose its support; those that are not primary stay as they are.
    primary, plain = (
        claims.Verdict(dataclasses.replace(claim, primary=flag), Difference(1, 0, (5, 5), 0.4, 8), "", 0.02)
        for flag in (True, False)
    )
    assert [one.word for one in claims.correct([primary, plain], 10)] == [UNDECIDED, YES]


def test_primary_claims_are_few():
    for scale in claims.SCALES:
        found = []
        for task in report.TASKS:
            for figure, grid in task.grids.get(scale, {}).items():
                grid = Outcomes([(flags, None) for flags in grid])
                found += claims.judge_all(task.claims, figure, scale, grid)
        count = sum(one.claim.primary for one in found)
        assert count <= claims.MOST_PRIMARY and (count >= 8 or scale == "smoke"), (scale, count)


def as_the_paper_found(flags):
    """Metrics of any synthetic task: vanilla models suffer from large vocabularies and Rare integers; beyond
    the paper, half of an encoding, or a short one, is worth less."""
    vanilla = 0.9 - 0.02 * math.log2(flags["vocab"])
    token = {"sin": 0.99, "random": 0.97, "learned": 0.96}.get(flags["pe"], vanilla) + 0.001 * flags["seed"]
    token -= 0.02 * (flags.get("amplitude") == 1 or flags.get("bands") == "0:1")
    token -= {"input": 0.01, "output": 0.02}.get(flags.get("encode"), 0)
    lost = {"gru": slice(0, 64), "lstm": slice(0, 16), "s4d": slice(16, 32)}.get(flags["model"])
    by_condition = {condition: np.full(64, 63 / 64) for condition in reverse.CONDITIONS}
    for condition in reverse.AMONG_RARE if flags["pe"] in ("none", "constant", "dup") else ():
        by_condition[condition][lost] = 0.3
    return {
        **dict.fromkeys(["token_accuracy", "accuracy"], token),
        "damerau_levenshtein": 64 * (1 - token),
        "by_condition": {condition: values.tolist() for condition, values in by_condition.items()},
    }


def test_claims_are_true_where_the_papers_pattern_is():
    """... and undecided where all is alike, but for those that nothing helps and for absolute numbers."""
    all_alike = SIN | dict(amplitude=8, bands=None, encode=None)
    for task in SYNTHETIC:
        for claim, alike in itertools.product(task.claims, ({}, all_alike)):
            told = not alike or claim.margin or isinstance(claim.worse, float)
            found = []
            for scale in [scale for scale in ("paper", "desk", "quick") if scale in claim.scales]:
                grid = task.grids.get(scale, {}).get(claim.figure, [])
                outcomes = Outcomes([(f, Outcome(f, as_the_paper_found(f | alike))) for f in grid])
                found += claims.judge_all([claim], claim.figure, scale, outcomes)
            assert claim.scales == ("quick", "smoke") or found, claim
            assert {one.word for one in found} <= {YES if told else UNDECIDED, TOO_FEW}, claim
            assert any(one.difference for one in found) or not found, claim


def test_chance_of_sorting():
    """The best that one can answer without having read anything, over all sequences."""
    for vocab, length in ((3, 4), (5, 3), (2, 1)):
        rows = np.sort(list(itertools.product(range(vocab), repeat=length)), axis=1)
        best = np.mean([np.bincount(place).max() / len(rows) for place in rows.T])
        assert math.isclose(sort.chance(vocab, length), best)
    assert 0.20 < sort.chance(32, 32) < 0.22 and 1 / 16384 < sort.chance(16384, 64) < 0.01


def made_up(task, words):
    """Finished trials of a scale's grids -> their folders."""
    args, given = suite.flags.parse(task, shlex.split(words))
    for flags, _, bound in suite.flags.grid(task, args, given, figure=""):
        bound.folder.mkdir(parents=True, exist_ok=True)
        result = {
            "metrics": as_the_paper_found(flags),
            "config": bound.config,
            "iterations": 20,
            "seconds": 2.5,
        }
        files.write_json(bound.folder / "result.json", result | {"commit": "0123456789", "device": "a card"})
        (bound.folder / "curve.csv").write_text(CURVE)
    return sorted(Path(args.out).glob("*/*/seed*"))


CURVE = "iteration,loss,accuracy,learning_rate,seconds\n5,1.5,0.2,0.1,1.0\n10,1,0.3,0.1,2.0\n"


def test_broken_files_are_named_and_the_others_reported():
    def without(key, value=None):
        content = json.loads(whole)
        (content if key in content else content["metrics"]).update({key: value})
        return json.dumps(content).encode()

    with (
        workplace(),
        mock.patch.object(tables, "CAN_DRAW", False),
        mock.patch.object(report, "CAN_DRAW", False),
    ):
        folders = made_up(Reverse, "--scale smoke")
        broken = next(
            folder for folder in folders if "gru-none" in str(folder) and "dual-freq" in str(folder)
        )
        path, plain = broken / "result.json", folders[-1]
        whole = path.read_text()
        bad = [b"", b'{"metrics": {"token_acc', b"[]", b"\xff\xfe", without("metrics", [1]), b"[" * 10**5]
        bad += [without("seconds", x) for x in ("5", None, math.nan, 1e308, -1)] + [without("config", 3)]
        bad += [without("by_condition", x) for x in ({}, [], "x", {c: [] for c in reverse.CONDITIONS})]
        for content in bad:
            path.write_bytes(content)
            code, out, err = command("--scale smoke --report fig3", Reverse)
            said = [line for line in out.splitlines() if str(path) in line]
            assert code == 0 and len(said) == 1 and "5 of 6 trials" in out and not err, (
                content[:40],
                out,
                err,
            )
        for content in (bad[1], bad[3], without("iterations", "20"), without("seconds", math.nan)):
            path.write_bytes(content)
            code, out, err = captured(lambda: report.main(["--scale", "smoke"]))
            assert code == 0 and out.count(f"{path}: ") == 1 and not err, (content[:40], out, err)
        (plain / "result.json").unlink()
        for rows in ("5,1\n", "5,x,1,1,1\n", "5,1,nan,1,1\n"):
            (plain / "curve.csv").write_text(CURVE.splitlines()[0] + f"\n{rows}")
            code, out, err = captured(lambda: report.main(["--scale", "smoke"]))
            assert code == 0 and out.count(f"{plain / 'curve.csv'}: ") == 1 and not err, (rows, out)
        for folder in folders:
            (folder / "curve.csv").write_text("torn")
        out = command("--scale smoke --report fig2", Reverse)[1]
        assert "11 of 12 trials" in out and out.count("curve.csv: ") == 11, "results without their curves"
        Path("runs/bench").mkdir()
        for n, content in enumerate(("[]", "{", '{"configurations": {"a": 1}}')):
            Path(f"runs/bench/{n}.json").write_text(content)
        code, out, err = captured(lambda: report.main(shlex.split("--write R.md --scale smoke")))
        assert code == 0 and all(f"bench/{n}.json: " in out for n in range(3)) and not err


def test_trials_of_different_texts_are_not_compared():
    with workplace():
        made_up(sort.Sort, "--scale smoke")
        path = next(Path("runs/sort").glob("lstm-*-K8-*/*/result.json"))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"config": {"text_sha256": "another"}}))
        out = command("--scale smoke --report fig12", sort.Sort)[1]
        assert "2 different texts" in out and "mean" not in out


def test_progress_and_other_scales():
    with workplace():
        folders = made_up(sort.Sort, "--scale smoke")
        for folder in folders[1:4]:
            shutil.rmtree(folder)
        for folder in folders[1:3]:
            folder.mkdir()
        (folders[1] / "curve.csv").write_text(CURVE)
        with open(folders[1] / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            states = [report.progress(folder)[:3] for folder in folders[:4]]
            _, out, _ = captured(lambda: report.main(["--scale", "smoke", "quick"]))
        assert states == [("done", 20, 2.5), ("running", 10, 2.0), ("stopped", 0, 0), ("missing", 0, 0)]
        rows = [line.split() for line in out.splitlines() if line.startswith("sort.py")]
        assert {row[2] for row in rows} == {"smoke", "quick"}
        assert [int(row[3]) for row in rows] == [sum(map(int, row[4:8])) for row in rows], "each has a state"
        assert cli.other_scales(SYNTHETIC, "runs", ["smoke"]) == ""
        line = cli.other_scales(SYNTHETIC, "runs", ["paper"])
        assert f"{len(folders) - 3} of smoke" in line and "quick" not in line
        assert line in captured(lambda: report.main([]))[1] and line in command("--report", sort.Sort)[1]
        with mock.patch.object(report, "show_progress", side_effect=KeyboardInterrupt):
            assert captured(lambda: report.main([])) == (130, "", "report.py: interrupted\n")


def test_results_page_keeps_what_a_person_wrote_and_is_the_same_again():
    with workplace() as folder:
        made_up(sort.Sort, "--scale smoke --out results")
        words, page = shlex.split("--write RESULTS.md --out results --scale smoke"), folder / "RESULTS.md"
        report.main(words)
        first = page.read_text()
        made = first[first.index(report.BEGIN) : first.index(report.END)]
        head, tail = f"What was tried.\r\n<!-- not {report.BEGIN} -->\n", "\n## Machines\n\nNone."
        page.rename("elsewhere.md")
        page.symlink_to("elsewhere.md")
        Path("elsewhere.md").write_bytes((head + made + "an old line\n" + report.END + tail).encode())
        report.main(words)
        assert page.is_symlink() and page.read_bytes().decode() == head + made + report.END + tail
        assert "python sort.py --scale smoke --all fig12" in made and "0123456" in made
        assert "Nothing has run yet of: reverse.py fig2, smoke scale" in made
        headings = re.findall(r"^#+ (.*)", made, re.MULTILINE)
        assert len(set(headings)) == len(headings) and len(headings) >= 5
        for target in re.findall(r"\]\((.*?)\)", made):
            where = [report.anchor(heading) for heading in headings]
            assert target[1:] in where if target[0] == "#" else 1000 < Path(target).stat().st_size < 60_000
        text = (
            head + made + report.END + tail
        )  # a marker that lacks, twice, in a line with others, upside down
        for wrong in (
            made,
            f"{text}\n{made}",
            text.replace(report.END, f"a {report.END}"),
            report.END + "\n" + made,
        ):
            page.write_bytes(wrong.encode())
            code, _, err = captured(lambda: report.main(words))
            assert (code, err.count("\n"), page.read_bytes().decode()) == (2, 1, wrong)


def test_the_results_page_is_that_of_the_committed_trials():
    with workplace() as folder:
        shutil.copytree(HERE / "results", folder / "results")
        shutil.copy(HERE / "RESULTS.md", folder)
        report.main(shlex.split("--write RESULTS.md --out results --scale desk quick"))
        assert Path("RESULTS.md").read_text() == (HERE / "RESULTS.md").read_text()


# ------------------------------------------------------------------------------------------------------------
# Gradient stability, held to the Jacobian of the model's own forward pass; bench.py
# ------------------------------------------------------------------------------------------------------------


def go(layer, x, z=None):
    """The layer's last output and its state (of S4D without C) after reading x (T, 1, E) from the state z."""
    if isinstance(layer, common.S4D):
        u, (dtA, weights), C = layer.project(x)[:, 0], layer.discretised(), torch.view_as_complex(layer.C)
        state = torch.zeros_like(C) if z is None else torch.view_as_complex(z)
        for step in u:
            state = dtA.exp() * state + (weights / C) * step[:, None]
        y = 2 * (C * state).sum(1).real + layer.D * u[-1]
        return F.glu(layer.mix(F.gelu(y)), dim=0), torch.view_as_real(state)
    lstm = isinstance(layer, torch.nn.LSTM)  # z: (2, 1, H)
    plain, start = (torch.nn.LSTM, z if z is None else tuple(z[:, None])) if lstm else (torch.nn.GRU, z)
    out, state = plain.forward(layer, x, start)
    return out[-1, 0], torch.cat(state) if lstm else state


def jacobian(model, row, target):
    x = model.encoding.join(model.embedding(row[:, None]))
    output, state = lambda z: go(model.layer, x[target:], z)[0], go(model.layer, x[:target])[1].detach()
    assert torch.allclose(output(state), model.layer(x, slice(len(x) - 1, len(x)))[0, 0], 1e-4, 1e-6)
    return torch.func.jacrev(output)(state).flatten(1).detach()


def plain_stability(model, a, b, target):
    """The specification's sum_i w_i cos(J_i^A, J_i^B), with a loop over the rows of J."""
    found = []
    for A, B in ([jacobian(model, row, target) for row in pair] for pair in zip(a, b)):
        norms = [(x.norm() * y.norm()).item() for x, y in zip(A, B)]
        found.append(sum(n / sum(norms) * ((x @ y).item() / n) for n, x, y in zip(norms, A, B) if n > 0))
    return torch.tensor(found, dtype=torch.double)


def some(kind, pe, length=6, target=1, combine="concat"):
    torch.manual_seed(length)
    model = common.Model(kind, pe, 10, 8, 11, 2 * length, combine=combine).double()
    return model, *stability.draw_pairs(length, 10, length, target, 1), target


def test_stability_equals_jacrev_of_the_model():
    cases = [("none", 3, 1), ("sin", 3, 1), ("sin", 6, 4), ("dup", 5, 2), ("learned", 4, 4, "add")]
    for kind, (pe, n, t, *how) in itertools.product(MODELS, cases):
        model, a, b, _ = some(kind, pe, n, t, *how)
        found = stability.stability(model, a, b, t)
        assert (found - plain_stability(model, a, b, t)).abs().max() < 1e-10, (kind, pe, n, t)
        with mock.patch.object(stability, "AT_ONCE", 3):
            assert (stability.stability(model, a, b, t) - found).abs().max() < 1e-12
        for tolerance in (1e-12, 1e-5):
            there, back, same = (stability.stability(model, *ab, t) for ab in ((a, b), (b, a), (a, a)))
            assert max((x - y).abs().max() for x, y in ((same, 1), (there, back), (there, found))) < tolerance
            assert (there.abs() <= 1).all() and (t == n or (there < 1 - 1e-6).any())
            model.float()


def test_stability_counts_no_zero_rows():
    for kind, rows in itertools.product(("lstm", "s4d"), (5, 11)):
        model, a, _, target = case = some(kind, "sin")
        shut = model.layer.mix.bias[11:] if kind == "s4d" else model.layer.bias_ih_l0[33:]
        shut.data[:rows] = -1e4  # so many of the 11 outputs do not depend on the state at all
        assert (jacobian(model, a[0], target)[:rows] == 0).all()
        wanted = plain_stability(*case) if rows < 11 else 0
        assert (stability.stability(*case) - wanted).abs().max() < 1e-10


def test_stability_of_gradients_too_small_for_single_precision():
    for kind, length, shut in (("gru", 64, 0), ("lstm", 64, 0), ("lstm", 128, 0), ("lstm", 4, 7)):
        torch.manual_seed(1)
        model = common.Model(kind, "none", 16, 32, 64)
        model.layer.bias_ih_l0.data[:128] -= shut  # nearly closed input and forget gates
        a, b = stability.draw_pairs(1, 16, length, 1, 1)
        single = stability.stability(model, a, b, 1)
        close(single, stability.stability(model.double(), a, b, 1), 1e-4)


def test_stability_pairs():
    draw = lambda count: torch.stack(stability.draw_pairs(3, 10, 12, 5, count), 1).unflatten(0, (4, count))
    assert (draw(9) == draw(50)[:, :9]).all()
    for name, rows in zip(reverse.CONDITIONS, draw(50).tolist()):
        target, other = (5 * (kind == "rare") for kind in name.split("/"))
        for a, b in rows:  # 12 integers, the target at t = 5, and 8 commands
            assert a[:5] == b[:5] and a[5:12] != b[5:12] and a[12:] == b[12:] == [10] * 8
            assert all(0 <= x[t] - (target if t == 4 else other) < 5 for x in (a, b) for t in range(12))
        assert_uniform([x % 5 for a, b in rows for x in a[:12] + b[5:12]], 5)
    for words, target in (("s4d", 23), ("s4d --length 8", 3), ("s4d --length 1", 1), ("gru", 1)):
        assert task_of(f"--model {words}", Stability).args.target == target


def test_stability_from_trial_to_report():
    smoke, saved = "--scale smoke --model s4d --pairs 8", lambda: json.loads(path.read_text())
    evaluated = lambda words: command(words, Stability)[1].count("\niteration ")
    with workplace():
        folder = (task := task_of(smoke, Stability)).folder
        path, again = folder / "stability.json", "again" / folder.relative_to("runs")
        assert command(f"{smoke} --train", Stability)[0] == 0
        assert command("--scale smoke --model s4d --dual-freq --out again")[0] == 0
        assert outcome(folder) == outcome(again)
        first, model = saved()["by_condition"], common.Model("s4d", "sin", 8, 16, 16, 16).double()
        model.load_state_dict(torch.load(again / "last.pt", weights_only=True)["model"])
        wanted = plain_stability(model, *stability.draw_pairs(0, 8, 8, 3, 2), 3).view(4, 2).mean(1)
        close([values["20"] for values in first.values()], wanted, 1e-5)
        # Snapshots without numbers are evaluated, in fp32; all of them with --overwrite, or after damage.
        assert task.result() and evaluated(smoke) == 0
        for foreign in ("000011.pt", "000022.pt", "foo.pt", "000010 (copy).pt"):
            shutil.copy(folder / "snapshots/000010.pt", folder / "snapshots" / foreign)
        assert task.result() and evaluated(smoke) == 0
        content = saved()
        for values in content["by_condition"].values():
            del values["10"]
        path.write_text(json.dumps(content))
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # as training may have left it
        assert not task.result() and evaluated(f"--trial {folder} --pairs 8") == 1 and task.result()
        assert torch.backends.mkldnn.matmul.fp32_precision == "none" and saved()["precision"] == "fp32"
        assert saved()["by_condition"] == first
        path.write_text(path.read_text()[:-100])
        assert [evaluated(smoke + more) for more in ("", " --overwrite", " --target 1", "")] == [10] * 4
        assert saved()["by_condition"] == first
        out = command(f"{smoke} --report", Stability)[1]
        assert all(f"{values['20']:.4f}" in out for values in first.values()), out


def test_snapshots_that_cannot_be_used_are_named():
    weights = lambda path: torch.load(path, weights_only=True).items()
    scaled = lambda by: lambda path: torch.save({name: x * by for name, x in weights(path)}, path)
    spoils = [cut, Path.unlink, scaled(math.nan), scaled(1e38)]  # the last one's gradients are inf - inf
    spoils += [lambda path, x=x: torch.save(x, path) for x in ([1], torch.ones(3), {"other": 1})]
    with workplace():
        assert command("--scale smoke --iterations 5 --dual-freq")[0] == 0
        folder = folder_in(".")
        whole = (middle := folder / "snapshots/000003.pt").read_bytes()
        for spoil in spoils:
            spoil(middle)
            code, _, err = command("--scale smoke --iterations 5 --overwrite", Stability)
            assert code == 2 and err.count("\n") == 1 and "000003.pt" in err, err
            measured = folder / "stability.json"
            assert not measured.exists() or max(map(int, read_conditions(measured)[0])) == 2
            middle.write_bytes(whole)
        assert command("--scale smoke --iterations 5", Stability)[0] == 0
        assert [sorted(x) for x in read_conditions(measured)] == [list("12345")] * 4
        for damage in ({}, [], {"rare/rare": {}}, {name: {"1": "a"} for name in reverse.CONDITIONS}):
            measured.write_text(json.dumps(json.loads(measured.read_text()) | {"by_condition": damage}))
            assert command("--scale smoke --iterations 5", Stability)[0] == 0
            assert [sorted(x) for x in read_conditions(measured)] == [list("12345")] * 4
        middle.unlink()  # it is of no more use
        assert command(f"--trial {folder} --pairs 16 --model lstm --vocab 8", Stability)[0] == 0
        for words in ("--model gru", "--iterations 20", "--seed 0-4"):
            code, _, err = command(f"--trial {folder} {words}", Stability)
            assert code == 2 and err.count("\n") == 1 and "was trained with --" in err, err


def read_conditions(path):
    return list(json.loads(path.read_text())["by_condition"].values())


def test_stability_refusals():
    flags = ["", "--target 9", "--pairs 6", "--train --overwrite", "--min-length 4", "--trial no"]
    flags += ["--trial runs --train", "--iterations 2", "--iterations 3"]
    with workplace():
        for more in ("2", "2 --dual-freq --snapshot-every 0", "3 --dual-freq --snapshot-every 3"):
            assert command(f"--scale smoke --iterations {more}")[0] == 0
        next(Path().rglob("000003.pt")).write_bytes(b"torn")
        for words in flags + [f"--trial {folder}" for folder in Path().glob("*/*/*/seed0")]:
            code, _, err = command(f"--scale smoke {words}", Stability)
            assert (code, err.count("\n"), err[:21]) == (2, 1, "stability.py: error: "), (words, err)


def test_bench():
    run = lambda words: captured(lambda: bench.main(shlex.split(words)))
    small = "--vocab 9 --batch 5 --length 4 --hidden 6 --embed 6 --warmup 1 --iterations 999"
    small += " --engine fast --device cpu"
    for kind in MODELS:
        task = task_of(f"--model {kind} {small}", build=True)
        engine = machine.choose_engine(task, CPU)
        steps = [step(task, engine, CPU) for step in (bench.plain_step, bench.suite_step)]
        torch.manual_seed(0)
        for x, *both in zip(task.model().parameters(), *(step().parameters() for step in steps)):
            close(*(y - x for y in both), 1e-3)  # the first step of both is the same
    with workplace():
        code, printed, _ = run(f"--only gru-sin-64 s4d-sin-1024 --repeats 2 {small} --json numbers.json")
        assert code == 0 and "s4d-sin-1024, batch 5  plain" in printed
        assert (0, printed) == run("--show numbers.json")[:2]
    printed = run(f"--only lstm-sin-256 {small} --profile")[1]
    assert "aten::mm" in printed and "no kernel" not in printed and "threads, torch" in printed
    refusals = ["--precision bf16 --device cpu", "--no-such-flag", "--seed 0-1", "--list fig2"]
    refusals += ["--hidden 999999999", "--show kept.json"]
    with workplace():
        Path("kept.json").write_text("[]")
        for words in refusals:
            code, _, err = run(f"--only gru-sin-64 --json kept.json {words}")
            assert code == 2 and err.count("\n") == 1, (words, err)
        with mock.patch.object(bench, "measure", side_effect=KeyboardInterrupt):
            assert run(f"--only gru-sin-64 {small} --json kept.json")[0] == 130
        assert Path("kept.json").read_text() == "[]", "what was measured before is kept"


# ------------------------------------------------------------------------------------------------------------
# Tiny Shakespeare
# ------------------------------------------------------------------------------------------------------------

Shakespeare, A_FILE = lm_shakespeare.Shakespeare, (HERE / "lm_shakespeare.py").read_bytes()[:16_000]
A_TEXT = A_FILE.decode()
WHOLE_TEXT = Path(os.environ.get("TINY_SHAKESPEARE", HERE / "data" / "tinyshakespeare.txt"))
TOKENS = {"char": (65, 1_003_854, 111_540), "word": (13_331, 236_634, 26_293), "bpe": (159, 625_921, 70_229)}


@contextlib.contextmanager
def library(text=A_FILE):
    """A workplace with a text where lm_shakespeare.py looks for one."""
    with workplace() as folder:
        Path("data").mkdir()
        Path("data/tinyshakespeare.txt").write_bytes(text)
        yield folder


def plain_transformer(model, pe, tokens):
    """One sequence, head by head, pairs as complex numbers -> logits (T, K), scores (layers heads, T, T)."""
    waves = lambda size: (1j * t / 10000 ** (torch.arange(0, size, 2).double() / size)).exp()
    x, scores, t = model.embedding.weight[tokens], [], torch.arange(9)[:, None]
    if pe == "layernorm-learned":  # Eq. 9
        x = F.layer_norm(x, (12,), model.position.norm.weight, model.position.norm.bias)
    x = x + model.position.encoding.table if "learned" in pe else x
    x = x + torch.stack([waves(12).imag, waves(12).real], 2).flatten(1) if pe == "sin" else x  # Eq. 5
    turn = waves(6) if pe == "rotary" else 1  # Eq. 6
    for block in model.blocks:
        parts = (block.norm1(x) @ block.attention.read.weight.T).view(9, 3, 2, 6).permute(1, 2, 0, 3)
        heads = []
        for q, k, v in zip(*parts):  # (T, d) each
            q, k = (turn * torch.complex(y[:, ::2], y[:, 1::2]) for y in (q, k))
            scores.append((q @ k.conj().T).real / math.sqrt(6))
            heads.append(scores[-1].masked_fill(t.T > t, -math.inf).softmax(1) @ v)
        x = x + block.attention.write(torch.cat(heads, 1))
        x = x + block.network[2](block.network[0](block.norm2(x)).clamp(min=0))
    return model.readout(model.norm(x)), torch.stack(scores)


def test_transformer_is_the_plain_one():
    for pe in lm_shakespeare.ENCODINGS:
        torch.manual_seed(3)
        model, tokens = lm_shakespeare.Transformer(pe, 11, 12, 2, 2, 9).double(), torch.randint(11, (2, 9))
        with torch.no_grad():
            for parameter in model.parameters():  # large enough for everything to matter
                parameter.add_(torch.randn_like(parameter) * 0.3)
        logits, (plain, scores) = model(tokens), zip(*(plain_transformer(model, pe, row) for row in tokens))
        close(logits, torch.stack(plain), 1e-12)
        mean = torch.stack(scores).mean((0, 1))
        wanted = [mean.diagonal(-n).mean().item() for n in range(9)]
        assert np.allclose(lm_shakespeare.score_by_distance(model, tokens), wanted, atol=1e-5), pe
        episode = common.Episode(tokens[:, :-1], tokens[:, 1:], slice(None))
        loss, right = Shakespeare.loss_and_accuracy(None, model, episode, {})
        close(loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), 1e-12)
        assert abs(right - (logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean()) < 1e-12
        close(logits[:, :5], model(tokens[:, :5]), 1e-12)  # causal
        if "learned" not in pe:  # learned tables alone end at the 9 positions
            longer, twice = lm_shakespeare.Transformer(pe, 11, 12, 2, 2, 18).double(), tokens.repeat(1, 2)
            longer.load_state_dict(model.state_dict())
            close(model(twice), longer(twice), 1e-12)


def test_windows_and_initial_weights():
    words = "--scale smoke --width 64 --pe learned --positions 7 --batch 300 --context 5 --seed"
    with library():
        fresh, other = trial_of(f"{words} 4", Shakespeare), task_of(f"{words} 5", Shakespeare, build=True)
    for name, p in fresh.model.named_parameters():
        mean, deviation = (0, 0.02) if p.dim() > 1 else (int(name.endswith("weight")), 0)
        assert abs(p.std() - deviation) < 0.003 and abs(p.mean() - mean) < 0.003, name
    assert fresh.model.position.encoding.table.shape == (7, 64)
    task, cut = fresh.task, len(A_TEXT) * 9 // 10
    first, decode = task.training_episode(1), lambda ids: task.tokenizer.decode(ids.tolist())
    assert torch.equal(first.inputs, task.training_episode(torch.tensor(1)).inputs)
    assert not torch.equal(first.inputs, task.training_episode(2).inputs)
    assert not torch.equal(first.inputs, other.training_episode(1).inputs)
    seen = {(A_TEXT[n : n + 5], A_TEXT[n + 1 : n + 6]) for n in range(cut - 5)}
    assert {(decode(x), decode(y)) for x, y in zip(first.inputs, first.targets)} <= seen
    count = (len(A_TEXT) - cut - 1) // 5  # perplexity is that of consecutive windows
    logits = fresh.model(task.valid[: 5 * count].view(count, 5)).flatten(0, 1).double()
    wanted = F.cross_entropy(logits, task.valid[1 : 5 * count + 1]).exp()
    assert abs(task.evaluate(fresh.model, fresh.engine)["valid_perplexity"] / wanted - 1) < 1e-6
    spread = torch.cat([part.inputs for part in task.parts(task.train)])
    assert len(spread) == count
    assert list(map(decode, spread[[0, -1]])) == [A_TEXT[:5], A_TEXT[cut - 6 : cut - 1]]
    task.batch, task.train = 6000, task.train[:11]  # six places for 5 + 1 tokens, all alike
    assert_uniform(list(map(decode, task.training_episode(1).inputs)), 6)


def byte_pairs(ids, types):
    """Byte-pair encoding, one place after the other -> (pairs, integers)."""
    pairs = []
    for new in range(types, 159):
        counts = Counter(itertools.pairwise(ids))
        if max(counts.values(), default=0) < 2:
            break
        pairs.append(bytes(min(counts, key=lambda pair: (-counts[pair], pair))))
        before, ids = ids, []
        while before:
            two = bytes(before[:2]) == pairs[-1]
            ids.append(new if two else before[0])
            before = before[1 + two :]
    return pairs, ids


def test_tokenizers():
    rng, cut = np.random.default_rng(2), len(A_TEXT) * 9 // 10
    random = ["".join(rng.choice(list("ab c"), 300)) for _ in range(20)]
    for text in ("aaaaaaaabaaaab", "abc", "a", A_TEXT[:1500], *random):
        tokenizer = lm_shakespeare.Tokenizer("bpe", text)
        wanted = byte_pairs(tokenizer.encode(text).tolist(), len(tokenizer.types))
        tokenizer.learn_pairs(text)
        assert (tokenizer.pairs, tokenizer.encode(text).tolist()) == wanted
    for name in ("char", "bpe"):
        tokenizer, train, valid = lm_shakespeare.tokenized(A_TEXT, name)
        assert (tokenizer.decode(train), tokenizer.decode(valid)) == (A_TEXT[:cut], A_TEXT[cut:])
    altered, _, _ = lm_shakespeare.tokenized(A_TEXT[:cut] + A_TEXT[: cut - 1 : -1], "bpe")
    assert altered.types == tokenizer.types, "of the training part alone"
    tokenizer, train, valid = lm_shakespeare.tokenized("It's a word_1, a  word!\né", "word")
    assert tokenizer.decode([*train, *valid]) == "It ' s a word_1 , a word ! é" and len(valid) == 1


def test_committed_results_have_the_tokens_of_tiny_shakespeare():
    for path in HERE.glob("results/lm_shakespeare/*/*/result.json"):
        metrics, config = map(json.loads(path.read_text()).get, ("metrics", "config"))
        counts = tuple(metrics[name] for name in ("types", "train_tokens", "valid_tokens"))
        assert (config["text_sha256"], counts) == (lm_shakespeare.SHA256, TOKENS[config["tokenizer"]])
    if not WHOLE_TEXT.exists():
        raise Skip("no data/tinyshakespeare.txt: python lm_shakespeare.py --download")
    for name, wanted in TOKENS.items():
        tokenizer, train, valid = lm_shakespeare.tokenized(lm_shakespeare.read_text(WHOLE_TEXT), name)
        assert (len(tokenizer.types), len(train), len(valid)) == wanted


def test_shakespeare_is_sampled():
    words = "--scale smoke --pe layernorm-learned --lr 0.03 --iterations 150"
    with library() as folder:
        hints = [
            command(words, Shakespeare)[1].splitlines()[-1] for _ in range(2)
        ]  # when done, and done already
        assert hints[0] == hints[1]
        code, said, err = command(hints[0].partition("lm_shakespeare.py ")[2], Shakespeare)
        assert code == 0 and said.startswith('"""Tiny') and len(said) == 408, err
        code, said, err = command(f"{words} --sample 'The '", Shakespeare)
        task, saved = task_of(words, Shakespeare, build=True), folder_in(folder) / "last.pt"
        refused, _, why = command(f"{words} --sample 'The €'", Shakespeare)
        model, drawn = task.model(), task.tokenizer.encode("The ").tolist()
        model.load_state_dict(torch.load(saved, weights_only=True)["model"])
        for more in ("--seed 0-1", "--all table1"):
            several, out, fault = command(f"{words} --sample 'The ' {more}", Shakespeare)
            assert several == 2 and fault.count("\n") == 1 and "--sample does not go" in fault and not out
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        chances = model(torch.tensor([drawn[-8:]]))[0, -1].double().softmax(0).detach()
        drawn.append(torch.multinomial(chances, 1, generator=generator).item())
    assert code == 0 and said == task.tokenizer.decode(drawn) + "\n", err
    assert refused == 2 and why.count("\n") == 1 and "'The €'" in why


def test_bad_input_to_lm_shakespeare():
    cases = {
        "--context 9 --positions 8 --pe learned": "no larger --context",
        "--positions 8": "--positions 8 needs a learned --pe",
        "--heads 3": "--heads 3 does not divide --width 16",
        "--width 6": "must be even, got 3",
        "--width 7 --heads 7 --pe sin": "must be even, got 7",
        "--context 100000": "longer text",
        "--data data": "at --data data",
        "--sample ROMEO": "no trained trial in runs/lm_shakespeare/transformer-rotary-char-T8",
    }
    for flag in ("--width", "--layers", "--context", "--batch", "--pe learned --positions"):
        cases[f"{flag} 1000000000"] = "GiB of memory"
    cases = [(A_FILE, *case) for case in cases.items()]
    cases += [(b"\xff\xfe", "", "UTF-8"), (b"ab", "", "longer text"), (b"", "", "longer text")]
    cases.append(("".join(map(chr, range(200, 400))).encode(), "--tokenizer bpe", "the text 200 characters"))
    for text, words, said in cases:
        with library(text) as folder:
            code, out, err = command(f"--scale smoke {words}", Shakespeare)
            assert code == 2 and err.count("\n") == 1 and said in err and not out, (words, code, out, err)
            assert [p.name for p in folder.iterdir()] == ["data"], words


def test_defaults_and_grids_are_the_documents():
    wanted = dict(pe="rotary", tokenizer="char", layers=6, heads=6, context=256, width=384, batch=32)
    wanted |= dict(lr=1e-4, iterations=1000, clip=0, beta2=0.999, eps=1e-8, seed=0)
    task, other = task_of("", Shakespeare), task_of("--heads 2 --layers 16 --data x.txt", Shakespeare)
    assert wanted.items() <= vars(task.args).items() and {task.rate(i) for i in (1, 500, 1000)} == {1e-4}
    assert str(task.folder) == "runs/lm_shakespeare/transformer-rotary-char-T256/seed0"
    assert other.folder.parent.name == "transformer-rotary-char-T256-heads=2-layers=16"
    counts = {figure: len(grid) / 3 for figure, grid in lm_shakespeare.GRIDS["paper"].items()}
    assert counts == dict(table1=5, heads=7, layers=5, context=3, table2=3, decay=5)


# ------------------------------------------------------------------------------------------------------------
# Language model on WikiText
# ------------------------------------------------------------------------------------------------------------

SPLITS, SMALL = lm_wikitext.SPLITS, "--scale smoke --data data"  # 40 pieces, 32 targets of a paragraph
LENGTHS = [2, 1, 70, *range(5, 30)]  # a piece is one more than the last, or, a tenth of them, unknown
PIECES = [[(n * n + j) % 39 + 1 if (n + j) % 10 else 0 for j in range(n)] for n in LENGTHS]


def lm_text(*lines):
    """The same small text for all splits -> its hash."""
    text = "".join(f"{line}\r\n" for line in lines).encode()
    Path("data").mkdir(exist_ok=True)
    for split in SPLITS:
        Path(f"data/wiki.{split}.raw").write_bytes(text)
    return hashlib.sha256(hashlib.sha256(text).hexdigest().encode() * 3).hexdigest()


def lm_tokens(paragraphs=PIECES, text="a text"):
    """A text and, in the layout that trials read, made-up tokens -> their folder."""
    folder = Path(f"data/tokens-K40-{lm_text(text)[:16]}-1")
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        (folder / f"{split}.tokens").write_bytes(np.concatenate(paragraphs).astype("<u2").tobytes())
        (folder / f"{split}.ends").write_bytes(np.cumsum([0, *map(len, paragraphs)]).astype("<i8").tobytes())
    (folder / "pieces.model").write_bytes(b"")
    return lm_about(folder)


def lm_about(folder):
    """Vouch for the files that are there, as --prepare does."""
    hashes = {path.name: lm_wikitext.file_sha256(path) for path in folder.iterdir()}
    (folder / "about.json").write_text(json.dumps({"sha256": hashes}))
    return folder


def lm_task(words=""):
    task = task_of(f"{SMALL} {words}", lm_wikitext.WikiText)
    assert task.begin() is None
    task.build(CPU)
    return task


def lm(words=""):
    return command(f"{SMALL} {words}", lm_wikitext.WikiText)


def test_packed_paragraphs_equal_padded_ones():
    rows = [torch.tensor(x[:33]) for x in PIECES]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    targets, real = rows[:, 1:].clamp(min=0), rows[:, 1:] >= 0
    known = targets[real] != 0
    for kind, pe in [*itertools.product(("gru", "lstm"), ENCODINGS), ("lstm", "learned --combine add")]:
        with workplace():
            lm_tokens([[3, 0]])
            none = lm_task().training_episode(1)
            lm_tokens()
            task = lm_task(f"--model {kind} --pe {pe} --batch {len(PIECES) - 1}")
        torch.manual_seed(1)
        model, batch = task.model().double(), task.training_episode(1)  # an epoch
        assert len(batch.inputs) == sum(min(n - 1, 32) for n in LENGTHS), "nothing but real targets"
        assert len(model.embedding.weight) == 40, "there is no command"
        logits = common.Model.forward(model, rows[:, :-1].clamp(min=0), slice(None))  # (T, B, K)
        losses = F.cross_entropy(logits.permute(1, 2, 0), targets, reduction="none")[real]
        right = (logits.argmax(2).T == targets)[real][known].double().mean()
        wanted = losses[known].mean(), *torch.autograd.grad(losses[known].mean(), model.parameters())
        everything = [x.item() for x in (losses[known].mean().exp(), losses.mean().exp(), right)]
        of_even, paragraphs = lm_wikitext.even(batch, 32, 40), len(LENGTHS) - 1
        assert len(set(of_even.inputs.tolist())) == 40, "what is added is of all pieces alike"
        assert of_even.sizes.tolist() == [paragraphs] * 32 and len(of_even.targets) % (2 * paragraphs) == 0
        for engine in ENGINES.values():
            for pairs in (of_even, batch):
                loss, accuracy = task.loss_and_accuracy(model, pairs, engine)
                for got, want in zip((loss, *torch.autograd.grad(loss, model.parameters())), wanted):
                    close(got, want, 1e-9)
                assert abs(accuracy - right) < 1e-12
            for task.batch in (1, 5, 100):
                found = *task.perplexities(model, task.splits["test"], engine), accuracy
                close(found, everything, 1e-9)
            loss, _ = task.loss_and_accuracy(model, none, engine)
            assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, model.parameters()))


def test_a_graph_of_every_size_reads_its_own_batches():
    """Graphs whose replay runs what was captured."""
    sizes = []

    def record(once, pool):
        sizes.append(pool)
        return mock.Mock(replay=once)

    with workplace(), mock.patch.multiple(graphs, record=record), mock.patch("torch.cuda.graph_pool_handle"):
        lm_tokens([[1, 2, 3, 4], [5, 6], [7] * 80, [8, 9, 10]] * 3)
        found, wanted = (trial_in_memory(lm_task("--batch 2 --length 100")) for _ in range(2))
        found.engine = dataclasses.replace(found.engine, graph=True)
        found.make_step()
        for i in range(1, 20):
            found.step(i)
            trial.learn(wanted, wanted.task.training_episode(i, in_graph=True))
        assert 2 <= len(sizes) < 8 and len(set(sizes)) == 1, "a graph of each size, all in one memory"
        for x, y in zip(found.model.parameters(), wanted.model.parameters(), strict=True):
            assert torch.equal(x, y)


def test_epochs_are_permutations_and_the_unigram_model_by_hand():
    with workplace():
        for count, batch in ((7, 3), (7, 7), (3, 10), (1, 4), (50, 1), (4, 4)):
            lm_tokens([[1, 2]] * count)
            task = lm_task(f"--batch {batch} --seed 3")
            iterations = range(1, 1 + (2400 if count == 4 else 9 * count))
            drawn = list(itertools.chain(*(task.chosen(i).tolist() for i in iterations)))
            epochs = [tuple(drawn[n : n + count]) for n in range(0, len(drawn), count)]
            assert all(sorted(epoch) == list(range(count)) for epoch in epochs), "one was drawn twice or lost"
        assert_uniform(epochs, 24)
        tasks = [lm_task(f"--batch 3 --seed {seed}") for seed in range(5)]
        with mock.patch.object(lm_wikitext, "shuffled", wraps=lm_wikitext.shuffled) as shuffled:
            for i, task in itertools.product(
                range(1, 13), tasks
            ):  # seeds side by side: 36 draws of 4, 9 epochs
                task.chosen(i)
        assert shuffled.call_count == 5 * 9, "each epoch of each seed is shuffled once"
        lm_tokens()
        seen = Counter(itertools.chain(*PIECES))
        shares = [(seen[n] + 1) / (sum(LENGTHS) + 40) for x in PIECES for n in x[1:33] if n]
        found = lm_wikitext.unigram_perplexity(lm_task().splits, 40)
        assert abs(found * math.exp(np.mean(np.log(shares))) - 1) < 1e-12


def test_language_model_learns_and_notices_another_text():
    words = "--iterations 120 --lr 0.05"
    with workplace():
        lm_tokens()
        assert lm(words)[0] == 0
        _, metrics, _ = outcome(folder_in("."))
        assert metrics["test_perplexity"] < metrics["unigram_test_perplexity"] / 2
        result, committed = (
            folder_in(".") / "result.json",
            Path("results/lstm-none-K40-L32/seed0/result.json"),
        )
        committed.parent.mkdir(parents=True)
        shutil.copy(result, committed)
        with mock.patch.object(lm_wikitext, "RESULTS", Path("results")):
            said = [lm(more)[2] for more in (words, "--iterations 1")]
            lm_tokens(text="another")
            said += [lm(more)[2] for more in (words, "--iterations 2", "--iterations 3 --vocab 41")]
        assert "made with other text: text_sha256" in said[2], said
        assert ["not the text of this suite's results" in text for text in said] == [False] * 2 + [True] + [
            False
        ] * 2


LM_REFUSED = [  # words, what is done to a text with tokens, what is said
    ("--data elsewhere", Path.exists, "has no wiki.train.raw, wiki.valid.raw, wiki.test.raw"),
    ("", lambda tokens: lm_text("another"), "python lm_wikitext.py --prepare"),
    ("--model s4d", Path.exists, "use gru or lstm"),
    ("--model mingru", Path.exists, "use gru or lstm"),
    ("--batch 1000000000 --hidden 1000000", Path.exists, "GiB of memory at least"),
    ("", lambda tokens: lm_tokens([[1], [2]]), "no paragraph of train has two pieces"),
    ("--prepare", lambda tokens: lm_text(" = A = ", "", " "), "wiki.train.raw has no paragraph"),
    ("--prepare", lambda tokens: Path("data/wiki.test.raw").write_bytes(b"a\nc\xff\n"), "begins b'c\\xff"),
    ("--prepare --vocab 5000", lambda tokens: lm_text("a cat sat"), "lower it, or use --scale quick"),
    ("--prepare --vocab 5", lambda tokens: lm_text("a cat sat"), "(raise it): "),
    ("--prepare --seed 0-1", Path.exists, "--prepare does not go with --all or a range of seeds"),
    ("--prepare --all", Path.exists, "--prepare does not go with --all or a range of seeds"),
]  # fmt: skip


def test_language_model_refuses_in_one_line_and_creates_nothing():
    there = importlib.util.find_spec("sentencepiece")
    for words, spoil, expected in LM_REFUSED:
        with workplace() as folder:
            spoil(lm_tokens())
            before = sorted(folder.rglob("*"))
            code, _, err = lm(words)
            if "--prepare" in words and "does not go" not in expected and not there:
                expected = "pip install sentencepiece"
            assert code == 2 and err.count("\n") == 1 and expected in err, (words, err)
            assert sorted(folder.rglob("*")) == before, words


def numbers(name, kind, change):
    """Damage that the hashes do not show: `change` the array in a file before they are taken."""

    def spoil(tokens):
        found = np.fromfile(tokens / name, kind)
        change(found)
        (tokens / name).write_bytes(found.tobytes())
        lm_about(tokens)

    return spoil


DAMAGED = {  # what is said -> what was done to the tokens
    "train.tokens is not what --prepare wrote": lambda tokens: flip(tokens / "train.tokens"),
    "test.ends is not what": lambda tokens: os.truncate(tokens / "test.ends", 16),
    "pieces.model'": lambda tokens: (tokens / "pieces.model").unlink(),
    "about.json lacks 'sha256'": lambda tokens: (tokens / "about.json").write_text("{}"),
    "Expecting value": lambda tokens: (tokens / "about.json").write_text(""),
    "train.ends does not cut": numbers("train.ends", "<i8", lambda ends: ends.put(3, 10**12)),
    "test.ends does not cut": numbers("test.ends", "<i8", lambda ends: ends.put(0, -5)),
    "valid.ends does not cut": numbers("valid.ends", "<i8", lambda ends: ends.put(-1, 10**12)),
    "valid.tokens has piece 40, where the last one is 39": numbers(
        "valid.tokens", "<u2", lambda x: x.put(9, 40)
    ),
}


def test_damaged_tokens_are_never_trained_on():
    for (said, spoil), words in itertools.product(DAMAGED.items(), ("", "--prepare")):
        with workplace() as folder:
            spoil(lm_tokens())
            before = sorted(folder.rglob("*"))
            code, _, err = lm(words)
            assert code == 2 and err.count("\n") == 1 and said in err and "is damaged: remove it" in err, err
            assert sorted(folder.rglob("*")) == before, said


def test_tokens_are_those_of_sentencepiece():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")
    from sentencepiece import SentencePieceProcessor

    words = "the cat sat on a mat and dogs ran far away from old houses while rain fell , then it stopped"
    kept = [" ".join(words.split()[n:] * (1 + n % 3)) for n in range(20)]
    kept += ["= 3 is a sum", " a cat \u2028 sat \x0b on\r a mat ", " a", " " + "xyx yxy " * 600]
    with workplace(), mock.patch("os.access") as may_write:
        lm_text(" = Heading = ", "", *kept, " ", "\r", " = = Sub = = ")
        for may_write.return_value, place in ((False, "runs/lm_wikitext"), (True, "data")):
            code, _, err = lm("--prepare --vocab 36")
            assert code == 0 and len(list(Path(place).glob("tokens-K36-*/pieces.model"))) == 1, err
        (model,) = Path("data").glob("tokens-*/pieces.model")
        pieces, task = SentencePieceProcessor(model_file=str(model)), lm_task("--vocab 36")
        wanted, found = [pieces.encode(x) for x in kept], task.splits["train"]
        assert found.tokens.tolist() == list(itertools.chain(*wanted)) and min(map(len, wanted)) == 1
        cut = [found.tokens[s : s + n + 1].tolist() for s, n in zip(found.starts, found.counts)]
        assert cut == [w[:33] for w in wanted if len(w) > 1]
        assert all(wanted[-1]), "lines above SentencePiece's usual limit are learned from"
        assert lm("--vocab 36 --iterations 2")[0] == 0
        result = json.loads((folder_in(".") / "result.json").read_text())
        assert result["metrics"]["unknown_tokens"]["train"] == sum(w.count(0) for w in wanted)
        assert result["config"]["pieces_sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()


@contextlib.contextmanager
def server(files):
    """An address that serves {name: (bytes, how many of them are sent before the line is cut)}."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content, sent = files[self.path[1:]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:sent])

        def log_message(self, *about):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


def test_download_is_whole_or_not_at_all():
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as file:
        for split in SPLITS:
            file.writestr(f"wikitext-103-raw/wiki.{split}.raw", f"{split} text")
    whole, torn = packed.getvalue(), packed.getvalue().replace(b"n text", b"N text")
    cases = [(whole, 300, "IncompleteRead"), (b"<html>", 6, "not a zip"), (torn, len(torn), "CRC")]
    cases.append((whole, len(whole), "no tokens yet"))
    served = {}
    with workplace(), server(served) as address:
        addresses = ["file:nowhere", f"{address}/archive"]
        for content, sent, expected in cases:
            served["archive"] = content, sent
            with mock.patch.object(lm_wikitext, "ADDRESSES", addresses):
                code, _, err = lm("--download")
            assert code == 2 and err.count("\n") == 1 and expected in err, err
            assert sent == len(whole) or not list(Path().rglob("*.*"))
        assert all(Path(f"data/wiki.{split}.raw").read_text() == f"{split} text" for split in SPLITS)
        served["text"] = A_FILE, len(A_FILE)
        hashes = {hashlib.sha256(A_FILE).hexdigest(): 0, "another": 2}
        for wanted, code in reversed(hashes.items()):
            with mock.patch.multiple(lm_shakespeare, ADDRESS=f"{address}/text", SHA256=wanted):
                found, _, err = command("--scale smoke --data text --download", Shakespeare)
            assert (found, Path("text").exists()) == (code, not code) and err.count("another file") == bool(
                code
            )


# ------------------------------------------------------------------------------------------------------------
# Job arrays; .ci/test_slurm.sh has those on a real SLURM
# ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def element(line, index="0", *, ends=0, scontrol="exit 1", seconds=0.01):
    """An element of a job array, of made-up programs: --list prints `line`, a trial prints its flags."""
    python = f'if [ "$2" = --list ]; then cat line; else printf "<%s>" ran "$@"; exit {ends}; fi'
    sleep, timeout = (shutil.which(name) for name in ("sleep", "timeout"))
    made_up = {"python": python, "scontrol": scontrol, "sleep": f"exec {sleep} {seconds}"}
    made_up["timeout"] = f'echo asked >&2; shift; exec {timeout} {seconds} "$@"'
    with workplace() as folder:
        Path("line").write_text(line)
        for name, text in made_up.items():
            Path(name).write_text(f"#!/bin/sh\n{text}\n")
            Path(name).chmod(0o755)
        env = os.environ | dict(PATH=f"{folder}:{os.environ['PATH']}", SLURM_ARRAY_TASK_ID=index)
        env.pop("PYTHON", None)
        script = ["bash", str(HERE / "slurm_array.sh"), "reverse.py", "fig2"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with subprocess.Popen(script, env=env | {"SLURM_ARRAY_JOB_ID": "7"}, **pipes) as running:
            yield running


def test_an_element_of_a_job_array_runs_its_trial_or_nothing():
    if not shutil.which("timeout"):
        raise Skip("no program `timeout`")
    lines = {"python reverse.py --out 'a  b' --seed 3": "<ran><reverse.py><--out><a  b><--seed><3>"}
    lines |= dict.fromkeys(
        ["", "b' --seed 0", "touch x", "python other.py", "python reverse.py.x", "python"], ""
    )
    cases = [(line, "0", wanted) for line, wanted in lines.items()] + [("python reverse.py 'a", "0", "")]
    cases += [("python reverse.py", index, "") for index in ("-1", "abc", "", "0x0", "1", "9" * 30)]
    for line, index, wanted in cases:
        with element(line, index) as running:
            out, err = running.communicate()
            wrong = "" if wanted else "slurm_array.sh: error: "
            assert (running.returncode, out) == (0 if wanted else 2, wanted) and wrong in err, (
                line,
                index,
                err,
            )


def test_an_element_asks_a_silent_controller_for_a_while():
    if not shutil.which("timeout"):
        raise Skip("no program `timeout`")
    for scontrol in ("exit 1", f"exec {shutil.which('sleep')} 100"):
        with element("python reverse.py", ends=75, scontrol=scontrol) as running:
            _, err = running.communicate()
            assert (running.returncode, err.count("asked")) == (75, 20), err
            assert err.count("slurm_array.sh: scontrol has not requeued 7_0 in 20 tries") == 1, err
    with element("python reverse.py", ends=75, scontrol="touch asked; exit 1", seconds=1) as running:
        wait_for(Path("asked").exists)
        start = time.monotonic()
        running.terminate()
        assert running.wait() == 75 and time.monotonic() - start < 10


# ------------------------------------------------------------------------------------------------------------
# The house and the README
# ------------------------------------------------------------------------------------------------------------

FLOORS = [  # who imports stands above what is imported
    "report",
    "stability bench",
    "reverse sort delayed_add predecessor lm_wikitext lm_shakespeare",
    "beyond suite.cli",
    "suite.trial suite.flags suite.tables",
    "suite.task suite.machine suite.fetch suite.drawing",
    "suite.files suite.fast suite.claims",
    "common suite.progress suite.graphs",
    "suite",
]
OPTIONAL = {"matplotlib", "sentencepiece"}  # packages that may be imported inside a function


def imported(node):
    """The modules that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"suite.{alias.name}" if node.module == "suite" else node.module for alias in node.names]


def test_imports_run_down_only_and_stand_at_the_top():
    floor = {name: n for n, names in enumerate(FLOORS) for name in names.split()} | {"suite.__version__": 99}
    paths = [*HERE.glob("*.py"), *HERE.glob("suite/*.py")]
    name_of = lambda path: ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")
    assert {name_of(path) for path in paths} - {"test_all"} == floor.keys() - {"suite.__version__"}
    for path in (path for path in paths if path.name != "test_all.py"):
        tree = ast.parse(path.read_text())
        inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)):
            for name in imported(node):
                below = floor.get(name, 99) > floor[name_of(path)]
                assert below, f"{path.name} imports {name}, which does not stand below it"
                optional = name.split(".")[0] in OPTIONAL or name.startswith("torch.")
                assert node not in inside or optional, f"{path.name} imports {name} inside a function"


def test_readme_names_every_file_at_the_top():
    table = (HERE / "README.md").read_text().split("## Where to look")[1].split("\n## ")[0]
    for path in HERE.iterdir():
        if path.suffix in (".py", ".sh", ".md", ".npz", ".cff") and path.name != "README.md":
            assert f"`{path.name}`" in table, path.name


README = (HERE / "README.md").read_text()


def test_readme_task_runs():
    """The README's example of a task, as somebody would try it; and what it refuses, it refuses at once."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with workplace() as folder, mock.patch.dict(os.environ, PYTHONPATH=str(HERE)):
        Path("echo.py").write_text(code)
        spec = importlib.util.spec_from_file_location("echo", "echo.py")
        sys.modules["echo"] = echo = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(echo)
        code, out, err = command("--scale smoke --device cpu --all echo", echo.Echo)
        assert code == 0 and "2 of 2 trials finished" in out, err
        assert len(list(folder.glob("runs/echo/lstm-*/seed0/result.json"))) == 2
        code, out, err = command("--report", echo.Echo)  # it has two scales
        assert code == 0 and "2 of smoke scale are: --scale smoke" in out, err
        code, _, err = command("--scale smoke --vocab 2 --length 2", echo.Echo)
        assert code == 2 and err.count("\n") == 1 and "4 sequences" in err


@contextlib.contextmanager
def readme_texts():
    """A workplace with small texts where the language models look for theirs."""
    letters = "".join(f"{'abcdefghij'[n % 10] * (n % 7)} The cat {n} sat on a mat\n" for n in range(400))
    with (
        library(letters.encode()),
        mock.patch.object(lm_shakespeare, "SHA256", hashlib.sha256(letters.encode()).hexdigest()),
    ):
        Path("data/wikitext-103-raw").mkdir()
        for split in lm_wikitext.SPLITS:
            Path(f"data/wikitext-103-raw/wiki.{split}.raw").write_text(letters)
        yield


def readme_commands():
    blocks = re.findall(r"```\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].split("&&")[-1].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("python ")]


def test_readme_commands_run():
    """At smoke scale; of grids a part."""
    scripts = {f"{task.name}.py": task for task in report.TASKS}
    commands = [shlex.split(line)[1:] for line in dict.fromkeys(readme_commands())]
    assert len(commands) >= 10 and {words[0] for words in commands} >= {"test_all.py", "report.py", *scripts}
    with readme_texts():
        for script, *words in commands:
            if (
                script == "test_all.py"
                or script == "lm_wikitext.py"
                and not importlib.util.find_spec("sentencepiece")
            ):
                continue
            if "--scale" in words:
                del words[words.index("--scale") : words.index("--scale") + 2]
            words += ["--scale", "smoke"]
            if "--all" in words:
                words += ["--pe", "sin", "--device", "cpu"] + ["--vocab", "8"] * (
                    script != "lm_shakespeare.py"
                )
            run = report.main if script == "report.py" else functools.partial(cli.main, scripts[script])
            code, _, err = captured(lambda run=run, words=words: run(words))
            assert code in (0, None), (script, words, code, err)


def test_readme_numbers_are_those_of_the_committed_results():
    """Every verdict in it is one that RESULTS.md has, which another test makes again from the results."""
    rows = re.findall(r"^\| .* \| (yes|no|undecided) \| (.*?) \|", README, re.MULTILINE)
    results = (HERE / "RESULTS.md").read_text()
    for word, numbers in rows:
        assert f" | {word} | {numbers} | " in results, numbers
    assert len(rows) >= 5


# ------------------------------------------------------------------------------------------------------------


def main(words):
    """Run the tests whose names hold one of the words -> exit code."""
    if words[:1] == ["--fixture"]:
        for case in check_fixture(words[1]):
            print(f"{case}: logits, loss, gradients and, where given, stability agree")
        return 0
    if words[:1] == ["--on-card"]:
        globals()[words[1]].__wrapped__()
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
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
