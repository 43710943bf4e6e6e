"""Everything, small, on a CPU: python test_all.py [NAME ...]. Also collectable by pytest.

    python test_all.py --fixture FILE     # the comparison with the released code alone, on another such file
Numbers are compared with an independent way to get them. Disturbed trials are forked from this process.
Where what is tested, from the lowest room of the house to its roof, a section for each:
    common.py                 integers, the released code's numbers, encodings, layers, metrics, Adam by hand
    suite/task, fast, machine what is drawn and held out; fast.py's numbers are the plain models'; memory
    suite/files, trial        stopped, killed, damaged or raced, a trial ends with the same bits
    suite/flags, cli          refusals, folder names, --list; --all goes on, stops, dies with its parent
    claims to report.py       statistics and verdicts; broken files; RESULTS.md is of the committed trials
    reverse.py and others     episodes by brute force, the paper's grids; stability.py by Jacobians; bench.py
    lm_shakespeare, wikitext  the Transformer, tokenizers, samples by hand; packed paragraphs, downloads
    slurm_array.sh, house     a SLURM element; imports run down only; what the README says and shows
    CUDA                      test_cuda_...: with a card alone, in processes of their own
"""

import suite.flags
from suite import claims, cli, fast, files, machine, progress, sweeps, tables, trial
from suite.claims import NO, NONE, SIN, TOO_FEW, UNDECIDED, YES, Claim, Difference, Outcome, Outcomes

import ast
import contextlib
import csv
import errno
import functools
import gc
import hashlib
import http.client
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
import textwrap
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
import lm_shakespeare
import lm_wikitext
import report
import reverse
import stability
from delayed_add import DelayedAddition
from lm_shakespeare import Shakespeare
from predecessor import Predecessor
from reverse import Reverse
from sort import Sort
from stability import Stability

HERE = Path(__file__).resolve().parent
FIXTURE, README = HERE / "released_code.npz", (HERE / "README.md").read_text()
CPU, Skip = torch.device("cpu"), unittest.SkipTest
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, too
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that are started here
# PyTorch cannot fork once it has seen a card: what needs one runs in processes of its own, which see it.
CARDS = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
if "--on-card" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

ENCODINGS = [name for name, one in common.ENCODINGS.items() if one.join in fast.JOINS]  # fast.py knows these
PAPERS, MODELS = ("gru", "lstm", "s4d"), ("gru", "lstm", "s4d", "mamba")  # the latter suite/fast.py knows
MAMBAS = "mamba --no-conv", "mamba --rotate", "mamba --no-conv --rotate", "mamba --slow"
ENGINES = {name: machine.Engine(name) for name in ("torch", "fast")}
TABLES = ("sin", "random", "learned")
CLOCKS = (*TABLES, "constant", "ramp", "counter", "shuffled")
BATTERY = [(Reverse, ""), (Reverse, "--min-length 3"), (Reverse, "--dual-freq")]  # tasks and flags
BATTERY += [(Sort, ""), (DelayedAddition, ""), (Predecessor, "")]
SMOKE = "--scale smoke --device cpu"

command = lambda words, task=Reverse: captured(cli.main, task, shlex.split(words))
wait = lambda child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # -signal where one killed it
log = lambda: Path("child.log").read_text()  # of a child process
folder_in = lambda folder: next(Path(folder).glob("runs/*/*/seed*"))  # of one trial
no_pictures = lambda: mock.patch.object(tables, "CAN_DRAW", False)
read_json = lambda path: json.loads(Path(path).read_text())
load = lambda path: torch.load(path, map_location=CPU, weights_only=True)

# -- Helpers -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def captured(function, *args):
    """-> (what it returns or exits with, stdout, stderr), in this process."""
    out, err = io.StringIO(), io.StringIO()
    suite.progress.say_once.cache_clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = function(*args)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def ends(wanted, words, *said, task=Reverse):
    """A command line ends with this exit code, at most one line on stderr, and says all of it -> stdout."""
    code, out, err = command(words, task)
    assert code == wanted and err.count("\n") <= 1, (words, code, out, err)
    assert all(text in out + err for text in said), (words, said, out, err)
    return out


def refuses(said, words, task=Reverse):
    """A command line ends with exit code 2 and one line on stderr, which says so, and creates nothing."""
    before = sorted(Path().rglob("*"))
    out = ends(2, words, said, task=task)
    assert sorted(Path().rglob("*")) == before and (not out or re.search("--(prepare|download)", words)), out


def assert_refused(wanted, function, *args):
    unittest.TestCase().assertRaisesRegex(common.Refused, f"^.*{wanted}.*$", function, *args)


def fork(words, limit=None, of=resource.RLIMIT_FSIZE):
    """The command line in a child process, whose log is child.log; `limit`: the largest file it may write."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:  # whatever happens, a child must never return into the test run
        with open("child.log", "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if limit:
            resource.setrlimit(of, (limit, limit))
        code = cli.main(Reverse, shlex.split(words))
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def process(words):
    env = os.environ | dict(PYTHONPATH=str(HERE), TORCHINDUCTOR_COMPILE_THREADS="2")
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def task_of(words, task=Reverse, build=False):
    """The task of a command line, with its data if wanted."""
    found = suite.flags.complete(task, suite.flags.parse(task, shlex.split(words))[0])
    if build:
        found.build(CPU)
    return found


def trial_of(words, task=Reverse):
    """A trial of that command line in memory, before its first iteration, without a folder."""
    found = trial.Trial(task_of(words, task, build=True), [])
    found.engine = machine.choose_engine(found.task, CPU)
    found.initialise()
    return found


def columns(folder):
    rows = (folder / "curve.csv").read_text().splitlines()[1:]
    return [[float(word) for word in row.split(",")[:4]] for row in rows]


def outcome(folder):
    """What must not depend on interruptions: weights, metrics, curve.csv but for its seconds."""
    weights = {k: v.numpy().tobytes() for k, v in load(folder / "last.pt")["model"].items()}
    return weights, read_json(folder / "result.json")["metrics"], columns(folder)


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


# -- common.py: integers, the released code's numbers, each part by hand -------------------------------------

THEIRS = dict(embedding="embedding.weight", readout_w="readout.weight", readout_b="readout.bias")  # -> ours
THEIRS |= dict(w_ih="layer.weight_ih_l0", w_hh="layer.weight_hh_l0", b_ih="layer.bias_ih_l0")
THEIRS |= dict(b_hh="layer.bias_hh_l0", in_proj_w="layer.project.weight", in_proj_b="layer.project.bias")
THEIRS |= dict(mix_w="layer.mix.weight", mix_b="layer.mix.bias", pe="encoding.table")
THEIRS |= {name: f"layer.{name}" for name in ("log_dt", "C", "log_A_real", "A_imag", "D")}


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
    assert_refused("17 .* only 16", common.distinct_rows, draw, 17, 0)


def gradients(model, episode, engine):
    """-> loss, accuracy, {parameter: its gradient}."""
    model.zero_grad()
    loss, accuracy = engine.loss_and_accuracy(model, episode)
    loss.backward()
    return loss, accuracy, {name: p.grad for name, p in model.named_parameters()}


def check_fixture(path):
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
    wanted = [f"{kind}-{pe}" for kind in ("gru", "lstm") for pe in ("none", "dup", *TABLES)]
    assert sorted(check_fixture(FIXTURE)) == sorted([*wanted, "s4d-none", "s4d-sin"])


def test_encodings_by_hand():
    table, random = common.sinusoid(300, 6), common.Random(2000, 3)
    for t, i in itertools.product(range(300), range(3)):  # Equations 1 and 2
        angle = t / 10000 ** (2 * i / 6)
        close(table[t, 2 * i : 2 * i + 2] * math.sqrt(3), [math.sin(angle), math.cos(angle)], 1e-12)
    assert_uniform(((random.table[:, 0] + 1) * 5).int().clamp(max=9).tolist(), 10)  # as on a sphere
    close(common.Sinusoid(6, 4).unscaled(9), common.sinusoid(9, 4), 1e-12)  # the others have a last position
    assert_refused("6 positions", common.Learned(6, 4).join, torch.zeros(7, 1, 4))
    make = lambda pe, seed: (torch.manual_seed(seed), common.ENCODINGS[pe](11, 6))[1]
    for pe in ("random", "ramp", "shuffled", "constant"):  # drawn from the seed, and kept with the weights
        one, same, other = (make(pe, seed) for seed in (0, 0, 1))
        assert torch.equal(one.table, same.table) and not torch.equal(one.table, other.table)
        assert list(one.state_dict()) == ["table"] and not list(one.parameters())
    ramp, constant = make("ramp", 0).vectors(11), make("constant", 0).vectors(22)
    close(ramp, ramp[-1] / ramp[-1].norm() * torch.arange(1, 12)[:, None] / 11, 1e-6)
    assert torch.equal(constant, constant[:1].expand_as(constant))
    shuffled, sinusoid = make("shuffled", 0).table.tolist(), common.sinusoid(11, 6).tolist()
    assert shuffled != sinusoid and sorted(shuffled) == sorted(sinusoid)
    for t, row in enumerate(make("counter", 0).table.tolist()):
        digits = [2 * int(digit) - 1 for digit in reversed(f"{t:04b}")]  # 11 steps need four
        assert np.allclose(row, np.array([*digits, *digits[:2]]) / math.sqrt(6))
    assert_refused("5 binary digits", common.Counter, 17, 4)


def test_encodings_are_joined_scaled_and_cut():
    tokens, zeroed = torch.randn(16, 2, 4), dict(both=slice(0), input=slice(8, 16), output=slice(8))
    flags = "--length 8 --vocab 9 --hidden 3 --embed 4"
    for pe, combine, phase in itertools.product(CLOCKS, ("concat", "add"), zeroed):
        words = f"{flags} --pe {pe} --combine {combine} --encode {phase}"
        encoding = task_of(words, Sort).model().encoding
        vectors = encoding.unscaled(16).detach().float()[:, None].clone()
        vectors[zeroed[phase]] = 0
        beside = torch.cat([tokens, vectors.expand(-1, 2, -1)], 2)
        assert torch.equal(encoding.join(tokens), tokens + vectors if combine == "add" else beside)
    assert torch.equal(common.Duplicate(5, 4).join(tokens), torch.cat([tokens, tokens], 2))
    for pe in CLOCKS:
        tasks = [task_of(f"{flags} --pe {pe} {more}") for more in ("", "--amplitude 3")]
        plain, longer = ((torch.manual_seed(0), task.model().encoding.vectors(16))[1] for task in tasks)
        close(longer, plain * 3 / (2 if pe == "learned" else 1), 1e-6)  # the root of 4
        if pe not in ("learned", "ramp"):
            close(longer.norm(dim=1), 3 * torch.ones(16), 1e-6)
    assert task_of("--embed 8 --bands 0.0:1.0 --amplitude 1").folder == task_of("--embed 8").folder
    cases = {"0:0.25": [0], "0.25:0.75": [1, 2], "0.2:0.5": [1], "0.74:1": [3], "0.1:1": [1, 2, 3]}
    for (bands, pairs), steps in itertools.product(cases.items(), (7, 30)):
        task = task_of(f"--vocab 9 --hidden 3 --length 6 --embed 8 --bands {bands} --amplitude 2")
        wanted, kept = torch.zeros(steps, 8), [2 * i + j for i in pairs for j in (0, 1)]
        wanted[:, kept] = common.sinusoid(steps, 8)[:, kept].float() * math.sqrt(4 / len(pairs)) * 2
        close(task.model().encoding.vectors(steps), wanted, 1e-6)


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
    layer = common.S4D(4, 2000)  # as it begins
    assert_uniform(((layer.log_dt.detach().double() / math.log(10) + 3) * 5).int().tolist(), 10)
    close(layer.log_A_real.exp(), torch.full((2000, 32), 0.5), 1e-6)
    close(layer.A_imag, math.pi * torch.arange(32).expand(2000, 32), 1e-6)
    for x, spread in ((layer.C.flatten(0, 1), [math.sqrt(0.5)] * 2), (layer.D, 1.0)):
        close(x.std(0), spread, 0.1)


def test_weights_begin_as_pytorchs():
    for kind in ("gru", "lstm"):
        for name, p in common.Model(kind, "learned", 999, 100, 100).named_parameters():
            spread = 1 if name in ("embedding.weight", "encoding.table") else 0.1 / math.sqrt(3)
            assert abs(p.mean()) < 0.4 * spread and abs(p.std() / spread - 1) < 0.2, (kind, name)


def check_layer(kind, by_equations, *how):
    """Outputs (T, B, H), of any steps."""
    torch.manual_seed(0)
    layer, x = common.LAYERS[kind](3, 5, *how).double(), torch.randn(7, 2, 3, dtype=torch.float64)
    for p in layer.parameters():
        p.data = torch.randn_like(p) / 2
    steps, wanted = torch.tensor([[0, 6], [3, 5]]), by_equations(layer, x).detach()
    close(layer(x, slice(2, 6)), wanted[2:6], 1e-12)
    close(layer(x, steps), torch.stack([wanted[steps[b], b] for b in range(2)], 1), 1e-12)


def test_mingru_by_its_equations():
    def by_equations(layer, x):
        """As a weighted sum over the past, each input's weight a product of gates."""
        z = 1 / (1 + (-x @ layer.weight[:5].T - layer.bias[:5]).exp())
        candidates, found = F.linear(x, layer.weight[5:], layer.bias[5:]), torch.zeros(7, 2, 5).double()
        for s, t in itertools.combinations_with_replacement(range(7), 2):
            found[t] += z[s] * candidates[s] * (1 - z[s + 1 : t + 1]).prod(0)
        return found

    check_layer("mingru", by_equations)


def mamba_by_its_equations(layer, x):
    """A channel at a time, every state as the sum over the past: decayed by exp(A times the steps since)."""
    silu = lambda v: v / (1 + (-v).exp())
    T, outputs, turns = len(x), [], layer.turn is not None
    A = torch.complex(-layer.log_A.exp(), layer.turn if turns else torch.zeros_like(layer.log_A))  # (D, N)
    whole = lambda v: torch.complex(v[:, :8], v[:, 8:]) if turns else v.to(A.dtype)
    for row in x.unbind(1):
        u, gate = (row @ layer.project.weight.T).split(10, 1)  # (T, D), D = 2 H
        if layer.conv is not None:
            before = [F.pad(u, (0, 0, n, 0))[:T] for n in (3, 2, 1, 0)]  # n steps ago
            u = sum(layer.conv.weight[:, 0, k] * before[k] for k in range(4)) + layer.conv.bias
        u = silu(u)
        chosen = u @ layer.choose.weight.T
        delta = (1 + (chosen[:, :1] @ layer.delta.weight.T + layer.delta.bias).exp()).log()  # (T, D)
        b, c = whole(chosen[:, 1:17]), whole(chosen[:, 17:])
        y = torch.zeros_like(u)
        for t, d, s in itertools.product(range(T), range(10), range(T)):
            if s <= t:
                state = (A[d] * delta[s + 1 : t + 1, d].sum()).exp() * delta[s, d] * b[s] * u[s, d]  # (N,)
                y[t, d] += (1 + turns) * (c[t] @ state).real
        outputs.append((y + layer.D * u) * silu(gate) @ layer.answer.weight.T)
    return torch.stack(outputs, 1)


def test_mamba_by_its_equations():
    for conv, rotate in itertools.product((True, False), repeat=2):
        check_layer("mamba", mamba_by_its_equations, conv, rotate)
    layer, turning = common.Mamba(4, 2000), common.Mamba(4, 5, rotate=True)
    slow = common.Mamba(4, 5, slow=True)
    logarithms = F.softplus(layer.delta.bias.detach().double()).log10()  # between -3 and -1
    assert_uniform(((logarithms + 3) * 5).int().tolist(), 10)
    assert layer.delta.in_features == 125 and layer.D.eq(1).all()
    close(layer.log_A.exp(), torch.arange(1, 17).expand(4000, 16), 1e-6)
    close(turning.log_A.exp(), torch.full((10, 8), 0.5), 1e-6)
    close(turning.turn, math.pi * torch.arange(8).expand(10, 8), 1e-6)
    close(slow.log_A.exp(), torch.full((10, 16), 0.5), 1e-6)
    kinds = {"--no-conv": common.Mamba(4, 5, conv=False), "--rotate": turning, "--slow": slow}
    for flags, wanted in kinds.items():
        found = task_of(f"--model mamba --pe none --embed 4 --hidden 5 {flags}").model().layer
        assert found.state_dict().keys() == wanted.state_dict().keys() and found.log_A.equal(wanted.log_A)
    count = lambda x: sum(p.numel() for p in x.parameters())
    assert count(turning) == count(common.Mamba(4, 5))


def plain_distance(a, b):
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
    with mock.patch.object(common, "CELLS", 60):  # two pairs at a time
        a, b = ([[*range(n, n + 4)] for n in range(k, k + 7)] for k in (0, 1))
        assert common.damerau_levenshtein(a, b).tolist() == [2] * 7
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
    moved = [x.roll(1, 1) for x in (targets, weight, predictions, losses)]  # the padding comes first
    again = common.sequence_metrics(common.Episode(None, moved[0], None, moved[1]), *moved[2:])
    assert again == metrics, again
    logits = torch.randn(3, 2, 7)  # (M, B, K)
    logits[:2, 0, 1:3] = 9.0  # a tie, of a right and a wrong answer
    for counted in (None, weight):
        cells = (torch.ones(2, 3) if counted is None else counted).nonzero().tolist()
        each = [(logits[m, b], targets[b, m]) for b, m in cells]
        wanted = sum(-x.log_softmax(0)[target] for x, target in each) / len(each)
        right = sum(x.tolist().index(x.max()) == target for x, target in each) / len(each)
        found = common.loss_and_accuracy(lambda *_: logits, common.Episode(None, targets, None, counted))
        close(torch.stack(found), [wanted.item(), right], 1e-6)


def test_training_is_adam_by_hand():
    for clip in (0.05, 0):  # 0: never
        words = f"{SMOKE} --model gru --lr 0.01 --clip {clip} --beta1 0.8 --beta2 0.98 --eps 1e-3 --warmup 2"
        words += " --iterations 5 --log-every 1"
        t, rows = trial_of(words), []
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in t.model.parameters()]
        for i, rate in enumerate((0.005, 0.01, 0.0075, 0.0025, 0), 1):  # half a cosine after the warm-up
            loss, accuracy, found = gradients(t.model, t.task.training_episode(i), ENGINES["torch"])
            norm = math.sqrt(sum((g**2).sum().item() for g in found.values()))
            assert norm > 0.1, "clipping does something"
            rows.append([i, loss.item(), accuracy.item(), rate])
            for p, g, (m, v) in zip(t.model.parameters(), found.values(), moments, strict=True):
                g = g * min(1, (clip or math.inf) / (norm + 1e-6))
                m.mul_(0.8).add_(0.2 * g)
                v.mul_(0.98).add_(0.02 * g**2)
                p.data -= rate * m / (1 - 0.8**i) / ((v / (1 - 0.98**i)).sqrt() + 1e-3)
        with workplace() as folder:
            ends(0, words)
            saved = load(folder_in(folder) / "last.pt")
        assert np.allclose([row[:4] for row in saved["rows"]], rows, rtol=1e-5, atol=1e-9)
        for name, p in t.model.named_parameters():
            assert torch.allclose(p, saved["model"][name], rtol=0, atol=2e-5), name


# -- suite/task.py: what is drawn, what is held out, what is evaluated ---------------------------------------


def everything(task):
    """{row: how likely training draws it, relative to the others}, by enumeration."""
    K, L = task.vocab, task.length
    of_length = lambda n: itertools.product(range(K), repeat=n)
    if isinstance(task, reverse.VariableLength):
        lengths = range(task.args.min_length, L + 1)
        return {(*x, *[K] * (L - n)): K**-n for n in lengths for x in of_length(n)}
    if isinstance(task, reverse.DualFrequency):
        return {x: 7 ** sum(integer < K / 2 for integer in x) for x in of_length(L)}
    if isinstance(task, Predecessor):
        return {(*x, query): 1 for x in itertools.permutations(range(K), L) for query in x[1:]}
    return dict.fromkeys(of_length(2 * L if task.name == "delayed_add" else L), 1)


def test_a_batch_depends_on_the_seed_and_the_iteration_alone(device=CPU, drawn=lambda draw: draw):
    for script, flags in BATTERY:
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
        streams = {common.HELD_OUT: (one.test_rows, CPU), common.TRAINING: (one.training_rows, 7)}
        streams[common.ANALYSIS] = (stability.draw_pairs, 0, 50, 6, 1, 1)
        for stream, (drawing, *how) in streams.items():
            with mock.patch.object(common, "key", wraps=common.key) as key:
                drawing(*how)
            assert {call.args[1] for call in key.call_args_list} == {stream}


def test_a_batch_is_compiled_once_for_all_seeds():
    def backend(graph, inputs):
        compiled.append(script)
        return graph.forward

    torch.compiler.reset()
    compiled = []
    for script, flags in BATTERY:
        for seed in range(3):
            task = task_of(f"--vocab 50 --length 6 --batch 40 {flags} --seed {seed}", script, build=True)
            batch = torch.compile(task.training_episode, backend=backend, dynamic=False)
            assert torch.equal(batch(torch.tensor(7)).inputs, task.training_episode(7).inputs)
    assert compiled == [script for script, flags in BATTERY]


def test_held_out_rows_are_never_trained_on_and_all_others_as_they_are_drawn():
    assert common.HeldOut(torch.zeros(1024, 4).long(), 0.25).rounds == 30  # its docstring's
    scarce = "--vocab 2 --length 4 --held-out 8|--vocab 4 --length 4 --held-out 5 --min-length 2"
    scarce += "|--vocab 4 --length 3 --held-out 12 --dual-freq|--vocab 3 --length 3 --held-out 13"
    scarce += "|--vocab 2 --length 2 --held-out 6|--vocab 4 --length 3 --held-out 16"
    for (script, _), flags in zip(BATTERY, scarce.split("|"), strict=True):
        task = task_of(flags, script, build=True)
        likely, held_out = everything(task), set(map(tuple, task.held_out.rows.tolist()))
        assert len(held_out) == len(task.held_out.rows) and held_out < likely.keys()
        mass = sum(likely[row] for row in held_out) / sum(likely.values())
        assert mass > 0.1 and abs(task.mass(task.held_out.rows) - mass) < 1e-12
        drawn = [task.draw(common.key(5), (40, 512)).flatten(0, 1)]
        drawn += [task.draw(common.key(6, n), (1,)) for n in range(4096)]  # the first row of each draw
        task.batch = 512
        trained = [task.training_rows(i) for i in range(1, 41)]
        allowed = {row: weight for row, weight in likely.items() if row not in held_out}
        for rows, weights in ((drawn, likely), (trained, allowed)):
            counts = Counter(map(tuple, torch.cat(rows).tolist()))
            assert counts.keys() <= weights.keys(), (flags, counts.keys() - weights.keys())
            expected = np.array(list(weights.values())) * counts.total() / sum(weights.values())
            chi_square_is_clean([counts[row] for row in weights], expected)


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
        wanted["cross_entropy"] = 100 * (1 - share)
        found = wanted.keys() & metrics.keys()
        assert len(found) == (2 if script is Predecessor or "dual" in flags else 3), metrics
        for name in found:
            close(metrics[name], wanted[name], 1e-6)
        if flags:
            short, parts = "min" in flags, metrics["by_length" if "min" in flags else "by_condition"]
            assert list(parts) == (list("345678") if short else reverse.CONDITIONS)
            close(list(parts.values()), right.view((6, 64) if short else (4, 8, 2)).mean(-1), 1e-6)


def test_what_a_task_says_wrongly_of_its_data_is_refused():
    def of(**changes):
        """A task whose episodes have these fields, functions of what they are."""

        class Wrong(Reverse):
            def episode(self, rows):
                episode = super().episode(rows)
                return episode._replace(**{k: change(getattr(episode, k)) for k, change in changes.items()})

        return Wrong

    class Rare(Sort):  # two rows in three have no integer but 0, which its mass() does not know
        def draw(self, k, shape):
            rows = super().draw(k, shape)
            return rows * (common.uniform_integers(common.mix(k), (*shape, 1), 3) == 0)

    class Random(Reverse):
        def draw(self, k, shape):
            return torch.randint(self.vocab, (*shape, self.length))

    class Same(Reverse):  # the same rows for every key
        def draw(self, k, shape):
            return super().draw(common.key(5), shape)

    cases = {
        "last commands=8 steps": of(inputs=lambda x: torch.cat([x[:, :8], x[:, :8]], 1)),
        "last commands=17": of(commands=lambda n: 17),
        "last commands=-1": of(commands=lambda n: -1),
        "has 17 steps, but its positions() 16": of(inputs=lambda x: F.pad(x, (1, 0))),
        "reads other integers than 0 to K = 8": of(inputs=lambda x: torch.where(x < 8, x - 1, x)),
        "than 0 to K = 8, the": of(inputs=lambda x: torch.where(x < 8, x + 9, x)),
        "answers (8, 7) steps": of(steps=lambda x: slice(9, 16)),
        "(8, 8), torch.int32": of(targets=lambda x: x.int()),
        "other targets than 0 to K - 1 = 7": of(targets=lambda x: x + 1),
        "other targets than 0 to K - 1": of(targets=lambda x: x - 1),
        "a weight of (8, 7)": of(weight=lambda _: torch.ones(8, 7)),
        "of the rows that sort draws are held out": Rare,
        "draw does not depend on its key, or not on it alone": Random,
        "draw does not depend on its key": Same,
    }
    with workplace():
        for said, wrong in cases.items():
            refuses(said, SMOKE, wrong)


# -- suite/fast.py, machine.py: the same numbers as the plain models; memory ---------------------------------


def compare_engines(words, script, dtype=torch.float64, tolerance=1e-10):
    torch.manual_seed(0)
    task = task_of(f"--vocab 8 --batch 7 --hidden 10 --embed 6 --held-out 20 {words}", script, build=True)
    model = task.model().to(dtype)
    wanted, found = (gradients(model, task.training_episode(1), engine) for engine in ENGINES.values())
    close(torch.stack(found[:2]), torch.stack(wanted[:2]), tolerance)
    for name, gradient in wanted[2].items():
        close(found[2][name], gradient, tolerance)
    plain, metrics = (task.evaluate(model, engine) for engine in ENGINES.values())
    close(metrics.pop("cross_entropy"), plain.pop("cross_entropy"), tolerance)
    assert metrics == plain and not trial.names_of_not_finite(metrics)


def test_an_iteration_never_waits_for_its_device():
    """On the meta device an operation that needs a value raises, and so does one with tensors of a CPU."""
    meta = torch.device("meta")
    for (script, flags), kind in itertools.product(BATTERY, (*MODELS, *MAMBAS)):
        t = trial_of(f"--scale smoke --device cpu --engine fast --model {kind} {flags}", script)
        held_out, t.task.spare = t.task.held_out, t.task.spare.to(meta)
        held_out.rows, held_out.hashes = held_out.rows.to(meta), held_out.hashes.to(meta)
        t.model, t.sums = t.model.to(meta), t.sums.to(meta)
        t.optimizer = torch.optim.Adam(t.model.parameters(), foreach=False)
        trial.learn(t, t.task.training_episode(torch.zeros((), dtype=torch.int64, device=meta)))


def test_a_model_and_an_encoding_of_ones_own():
    class Gate(common.Sinusoid):  # what it joins is no sum over token and step
        def join(self, tokens):
            return torch.cat([tokens, tokens * self.vectors(len(tokens))[:, None].float()], dim=-1)

    class Mean(torch.nn.Linear):  # all that a layer needs: (inputs, hidden), and the answered steps
        def forward(self, x, steps):
            return common.select(super().forward(x).cumsum(0), steps)

    class NoSelect(torch.nn.Linear):
        def forward(self, x, steps):
            return super().forward(x)

    class BatchFirst(torch.nn.RNN):
        def __init__(self, inputs, hidden):
            super().__init__(inputs, hidden, batch_first=True)

        def forward(self, x, steps):
            return common.select(super().forward(x)[0], steps)

    class Narrow(common.Random):
        def __init__(self, positions, size, **options):
            super().__init__(positions, size, **options)
            self.table = self.table[:, :1]

    class Wide(common.Random):
        def join(self, tokens):
            return torch.cat([tokens] * 3, dim=-1)

    encodings = mock.patch.dict(common.ENCODINGS, gate=Gate, narrow=Narrow, wide=Wide)
    layers = mock.patch.dict(common.LAYERS, mean=Mean, whole=NoSelect, rows=BatchFirst)
    with encodings, layers, workplace():
        suite.flags.declare.cache_clear()
        refuses("Narrow's vectors are 16 x 1, of 16 steps and --embed 16", "--scale smoke --pe narrow")
        refuses(
            "Wide's join makes 16 x 1 x 48 of 16 steps, but its `inputs` are 32", "--scale smoke --pe wide"
        )
        refuses("NoSelect makes logits (16, 2, 8), not (8, 2, 8)", "--scale smoke --model whole")
        refuses("BatchFirst mixes the rows of a batch", "--scale smoke --model rows")
        for flag in ("--combine add", "--bands 0:0.5"):  # it may not follow what Sinusoid does
            refuses("means nothing with --pe gate", f"--scale smoke --pe gate {flag}")
        for flags in ("--pe gate", "--model mean"):
            words = f"--scale smoke --device cpu --hidden 256 --batch 32 {flags}"
            ends(0, words)
            assert read_json(task_of(words).folder / "result.json")["engine"] == "torch"
            assert_refused(flags, machine.choose_engine, task_of(f"{flags} --engine fast"), CPU)
        refuses("with --pe gate, whose join is its own", "--scale smoke --pe gate", Stability)
    suite.flags.declare.cache_clear()


def test_engines_agree():
    cases = [*itertools.product(MODELS, ENCODINGS, ["concat"]), *itertools.product(MODELS, CLOCKS, ["add"])]
    cases = [(*case, *BATTERY[n % 6]) for n, case in enumerate(cases)]
    cases += [(kind, "sin", "concat", *case) for kind in (*MODELS, *MAMBAS) for case in BATTERY]
    for kind, pe, combine, script, flags in cases:
        flags += " --encode output --amplitude 2" * (script is not Reverse and pe in CLOCKS)
        words = f"--length 5 --model {kind} --pe {pe} --combine {combine} {flags}"
        compare_engines(words, script)
        compare_engines(words, script, torch.float32, 1e-5)
    for kind, length, batch in itertools.product((*MODELS, *MAMBAS), (1, 2, 3), (1, 3)):  # below its width
        compare_engines(f"--length {length} --vocab 40 --batch {batch} --hidden 40 --model {kind}", Reverse)
    task = task_of("--scale smoke", build=True)
    model, episode = task.model(), task.training_episode(1)
    losses = [3 * engine.loss_and_accuracy(model, episode)[0] for engine in ENGINES.values()]
    for wanted, found in zip(*(torch.autograd.grad(loss, model.parameters()) for loss in losses)):
        close(found, wanted, 1e-4)
    for kind in MODELS:
        patches = [mock.patch.object(sweeps, "by_operators", lambda *_: False)]  # what CUDA computes
        patches += [mock.patch.object(fast, "CHUNK", chunk) for chunk in (7, 50)]  # of rows
        for patch in patches:
            with patch:
                compare_engines(f"--length 5 --min-length 3 --model {kind}", Reverse)


def test_a_small_trial_takes_one_thread():
    """Alone and in a job of --all, where large ones share the cores; OMP_NUM_THREADS stands above both."""
    shared, three = str(max(1, machine.cores() // 2)), {"OMP_NUM_THREADS": "3"}
    for words, there, own, of_job in (("255", {}, 1, "1"), ("256", {}, 0, shared), ("255", three, 0, "3")):
        task, environment = task_of(f"--hidden {words}"), mock.patch.dict(os.environ, there, clear=True)
        with environment, mock.patch.object(torch, "set_num_threads") as threads:
            machine.prepare(ENGINES["torch"], CPU, task.is_small())
        with environment, mock.patch.object(subprocess, "Popen") as started:
            cli.Job("reverse.py", [], task).start(at_once=2, cuda=False)
        assert threads.mock_calls == [mock.call(1)] * own
        assert started.call_args.kwargs["env"]["OMP_NUM_THREADS"] == of_job


def test_a_cpus_maker_decides_what_is_faster():
    """oneDNN's products, where they are exact; and from which size on fast.py is."""
    for maker, exact, switch, engine in (
        ("AMD", True, "bf16", "torch"),
        ("AMD", False, "none", "torch"),
        ("Intel", True, "none", "fast"),
    ):
        with (
            mock.patch.object(machine, "device_name", return_value=f"cpu: {maker}"),
            mock.patch.object(suite.compiling, "onednn_is_exact", return_value=exact),
        ):
            found = machine.choose_engine(task_of("--hidden 128 --batch 32"), CPU)
        assert machine.choose_engine(task_of("--model gru --engine torch"), CPU).name == "torch"
        machine.prepare(found, CPU)
        assert torch.backends.mkldnn.matmul.fp32_precision == switch and found.name == engine, (maker, exact)


def test_out_of_memory_is_one_line():
    if sys.platform != "linux":
        raise Skip("no /proc, and no limit on memory")
    with workplace():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        child = fork(f"{SMOKE} --batch 100000 --hidden 64", used + 2**28, resource.RLIMIT_AS)
        assert wait(child) == trial.FAILED and "Traceback" not in log(), log()
        assert log().splitlines()[-1].startswith("reverse.py: out of memory: lower --batch"), log()
        assert "checkpoints are kept" not in log()
    failed = RuntimeError("operation failed due to a previous error during capture")
    assert not machine.is_out_of_memory(failed)
    failed.__context__ = torch.OutOfMemoryError()
    assert machine.is_out_of_memory(failed)


# -- suite/files.py, trial.py: whatever disturbs a trial, it ends with the same bits -------------------------

LONG = f"{SMOKE} --dual-freq --iterations 240 --save-every 20 --log-every 20"


@functools.cache
def undisturbed(words=LONG):
    with workplace() as folder:
        start = time.monotonic()
        assert wait(fork(words)) == 0, log()
        return outcome(folder_in(folder)), time.monotonic() - start


def finish():
    """Run to the end and compare; of all that was saved, no snapshot is missing."""
    assert wait(fork(LONG)) == 0, log()
    folder = folder_in(".")
    assert outcome(folder) == undisturbed()[0]
    assert sorted(p.stem for p in (folder / "snapshots").iterdir()) == [f"{i:06}" for i in range(24, 241, 24)]
    assert not (folder / "previous.pt").exists()


def stopping(at, number=signal.SIGTERM):
    """While it is entered, trials get a signal in this iteration."""
    plain = Reverse.training_episode

    def episode(task, i):
        if i == at:
            os.kill(os.getpid(), number)
        return plain(task, i)

    return mock.patch.object(Reverse, "training_episode", episode)


def stop_after_a_save(number=signal.SIGTERM):
    """-> the folder of a trial that a signal has stopped after its second save, at iteration 50."""
    with stopping(50, number):
        assert wait(fork(LONG)) == trial.STOPPED, log()
    Path("child.log").unlink()
    assert not (folder_in(".") / "result.json").exists()
    return folder_in(".")


def change(path, key, value):
    content = load(path)
    content[key] = value(content[key])
    torch.save(content, path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def from_a_card(path):
    groups = lambda adam: [group | {"capturable": True} for group in adam["param_groups"]]
    change(path, "optimizer", lambda adam: adam | {"param_groups": groups(adam)})


cut = lambda path: os.truncate(path, path.stat().st_size - 999)
LAST, PREVIOUS = "continuing from last.pt", "continuing from previous.pt"
SPOILS = Path.unlink, cut, flip
DAMAGES = [({}, LAST), ({"last.pt": from_a_card}, LAST)]  # of a stopped trial, and what the next start says
DAMAGES += [({"last.pt": spoil}, PREVIOUS) for spoil in SPOILS]
DAMAGES.append(({"last.pt": cut, "previous.pt": cut}, "starting at iteration 0"))
DAMAGES.append(({"config.json": lambda path: path.write_text("")}, "config.json cannot be used"))


def test_a_trial_ends_the_same_after_every_signal_and_every_damage():
    for number, (damages, said) in zip(itertools.cycle(trial.Stop.SIGNALS), DAMAGES):
        with workplace():
            stopped = stop_after_a_save(number)
            assert load(stopped / "last.pt")["iteration"] == 50
            for file, damage in damages.items():
                damage(stopped / file)
            finish()
            assert said in log(), (damages, log())


def test_what_is_whole_but_cannot_be_used_is_never_overwritten():
    other_keys = lambda path: change(path, "model", lambda _: {"other": torch.zeros(3)})
    beyond = lambda path: change(path, "iteration", lambda _: 1000)
    columns = lambda path: change(path, "rows", lambda rows: [[*row, 0.5] for row in rows])
    a_folder = lambda path: (path.unlink(), path.mkdir())
    for damage, code in ((other_keys, 2), (beyond, 2), (columns, 2), (a_folder, 1)):
        with workplace():
            stopped = stop_after_a_save()
            for name in ("last.pt", "previous.pt"):
                damage(stopped / name)
            times = [(p, p.stat().st_mtime_ns) for p in stopped.rglob("*") if p.name != "lock"]
            assert wait(fork(LONG)) == code and times == [(p, p.stat().st_mtime_ns) for p, _ in times]
            assert log().count("\n") == 1 and "last.pt" in log(), log()


def test_a_torn_checkpoint_never_replaces_a_good_one():
    with workplace():
        t = trial_of(SMOKE)
        t.folder.mkdir(parents=True)
        for t.iteration in (3, 6):
            t.save()
        cut(t.folder / "last.pt")
        assert captured(t.resume)[1] == "continuing from previous.pt, iteration 3\n" and t.iteration == 3
        t.save()
        assert files.load_tensors(t.folder / "previous.pt", CPU)["iteration"] == 3


def test_what_a_kill_cuts_short_is_whole_again():
    write, unlink = files.write, Path.unlink

    def killed(path, content, keep=None):
        if path.name == "curve.csv" and "\n20," in content:
            raise KeyboardInterrupt
        write(path, content, keep)

    with workplace():
        with mock.patch.object(files, "write", killed):
            ends(130, SMOKE)
        gc.collect()  # and with the trial its lock
        ends(0, SMOKE)
        assert (folder_in(".") / "curve.csv").read_text().splitlines()[-1].startswith("20,")
        written = []
        noting = lambda path, *more, **how: (written.append(path.name), write(path, *more, **how))
        with mock.patch.object(files, "write", noting):
            ends(0, f"{SMOKE} --overwrite --snapshot-every 10")
        each = [[f"0000{n}.pt", "last.pt", "curve.csv"] for n in (10, 20)]
        assert written == ["config.json", *each[0], *each[1], "curve.csv", "result.json"], written
        # What --overwrite has begun to delete is never taken for done, nor continued as another trial.
        everything = ["config.json", "curve.csv", "last.pt", "previous.pt", "result.json"]
        for count in range(5):
            Path(f"cleared{count}").mkdir()
            for name in everything:
                Path(f"cleared{count}", name).touch()
            deleted = []

            def dies(path, count=count, deleted=deleted):
                if len(deleted) == count:
                    raise KeyboardInterrupt
                deleted.append(path.name)
                unlink(path)

            with mock.patch.object(Path, "unlink", dies), contextlib.suppress(KeyboardInterrupt):
                files.clear(Path(f"cleared{count}"))
            left = {path.name for path in Path(f"cleared{count}").iterdir()}
            assert left == set(everything) - set(deleted) and "config.json" in left, left
            assert not left & {"last.pt", "previous.pt", "result.json"} or "curve.csv" in left, left
            assert not count or "result.json" not in left, left


def test_a_file_system_without_locks_is_refused():
    without = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    with workplace(), without:
        ends(2, SMOKE, "cannot write to --out runs", "flock")


def test_seeds_side_by_side_are_each_alone():
    flags = "--scale smoke --device cpu --model gru"
    with workplace() as out:
        for seed in (3, 5):
            ends(0, f"{flags} --seed {seed} --out {out}/alone")
        tasks = [task_of(f"{flags} --seed {seed} --out {out}/both") for seed in range(3, 7)]
        tasks[3].folder = out / ("x" * 300)  # one that cannot be read and one that cannot be written
        trials = [trial.Trial(task, [], False) for task in tasks]
        trials[1].folder = Path("/proc/nowhere")
        codes, printed, err = captured(trial.train, trials, trial.Stop())
        assert codes == [0, 2, 0, 1] and "cannot write" in err and "xxx" in err, (
            codes,
            err,
        )  # the others go on
        order = re.findall(r"seed (\d): iteration (\d+)/", printed)
        assert order[:4] == [("3", "5"), ("5", "5"), ("3", "10"), ("5", "10")], "they take turns"
        for seed in (3, 5):
            alone, both = (next(out.glob(f"{name}/*/*/seed{seed}")) for name in ("alone", "both"))
            assert outcome(alone) == outcome(both)


def test_killed_at_random_moments_and_raced():
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
                codes[wait(child)] += 1
            for last in folder.glob("runs/*/*/seed*/last.pt"):
                if (chance := rng.random()) < 0.2:
                    last.unlink()
                elif chance < 0.36:
                    os.truncate(last, rng.integers(last.stat().st_size))
            if list(folder.glob("runs/*/*/seed*/result.json")):
                shutil.rmtree(folder / "runs")  # finished before its time: again
        assert codes.keys() <= {-signal.SIGKILL, trial.RUNNING_ELSEWHERE, trial.FAILED, 0}, (codes, log())
        assert "Traceback" not in log(), log()
        racing = [fork(words) for _ in range(2)]
        assert sorted(map(wait, racing)) in ([0, 0], [0, trial.RUNNING_ELSEWHERE]), log()
        assert outcome(folder_in(folder)) == wanted


def test_what_a_model_draws_at_random_goes_on_after_a_stop():
    class Dropout(common.LSTM):
        def forward(self, x, steps):
            return super().forward(F.dropout(x, 0.5, self.training), steps)

    words = "--scale smoke --device cpu --model drop --out"
    with mock.patch.dict(common.LAYERS, drop=Dropout), workplace():
        suite.flags.declare.cache_clear()
        ends(0, f"{words} whole/runs")
        with stopping(10):
            ends(trial.STOPPED, f"{words} stopped/runs", "stopped at iteration 10")
        change(folder_in("stopped") / "last.pt", "seconds", lambda _: 1000.0)
        ends(0, f"{words} stopped/runs", "continuing from last.pt, iteration 10")
        assert outcome(folder_in("stopped")) == outcome(folder_in("whole"))
        assert read_json(folder_in("stopped") / "result.json")["seconds"] > 1000, "of all resumes"
    suite.flags.declare.cache_clear()


def test_full_disk_ends_the_trial_and_loses_nothing():
    full = mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with workplace() as folder:
        with full:
            ends(trial.FAILED, LONG, "runs/reverse", "No space left on device")
        assert not [*folder.rglob("*.tmp")]
        stopped = stop_after_a_save()
        kept = (stopped / "last.pt").read_bytes()
        with full:
            ends(trial.FAILED, LONG, "checkpoints are kept")
        assert (stopped / "last.pt").read_bytes() == kept and not [*folder.rglob("*.tmp")]
        gc.collect()  # and with the trial its lock
        finish()


def test_what_is_not_finite_stops_a_trial_and_a_signal_its_evaluation():
    for words in ("--lr 1e38 --warmup 10", "--lr 1e308"):
        words = f"{SMOKE} --save-every 1 --snapshot-every 1 {words}"
        with workplace() as folder:
            code, _, err = command(words)
            assert code == trial.NOT_FINITE and re.search(r"between iterations \d+ and \d+", err), err
            assert err.count("\n") == 1 and not (folder_in(folder) / "result.json").exists()
            kept = (folder_in(folder) / "last.pt").exists()
            assert ("is kept" in err, "nothing was saved" in err) == (kept, not kept), err
            assert report.progress(folder_in(folder))[0] == "not finite"
            with no_pictures():
                out = command(f"{words} --report fig12 --pe sin")[1]
            assert "not finite, left out: runs" in out and "without a result: all (1)" in out, out
            for saved in map(load, folder_in(folder).rglob("*.pt")):
                assert all(v.isfinite().all() for v in saved.get("model", saved).values()), "the kept is good"
            ends(trial.NOT_FINITE, words)
    plain = Reverse.loss_and_accuracy
    infinite = lambda *args: (plain(*args)[0], torch.tensor(math.inf))
    with workplace(), mock.patch.object(Reverse, "loss_and_accuracy", infinite):
        ends(trial.NOT_FINITE, SMOKE, "not finite between iterations 1 and 5")
    with workplace() as folder:
        with stopping(5):
            assert wait(fork(SMOKE)) == trial.STOPPED
        (folder_in(folder) / files.DIVERGED).write_text(
            "at iteration 7"
        )  # on another machine, or by other code
        with stopping(10):
            assert wait(fork(SMOKE)) == trial.STOPPED
        assert report.progress(folder_in(folder))[0] == "stopped", "it has come past that"
    bad = {"good": [0.5, {"x": 1}], "bad": {"x": [0.5, {"y": math.nan}]}, "worse": -math.inf}
    told = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))
    with workplace() as folder:
        with mock.patch.object(Reverse, "evaluate", lambda *_: bad):
            ends(trial.NOT_FINITE, SMOKE, ": bad, worse not finite after iteration 20")
        assert (folder_in(folder) / "last.pt").exists() and not (folder_in(folder) / "result.json").exists()
        with mock.patch.object(Reverse, "evaluate", told):
            ends(trial.STOPPED, SMOKE, "the same command evaluates")
            ends(trial.STOPPED, f"{SMOKE} --overwrite", "same command without --overwrite evaluates")
        ends(0, SMOKE, "continuing from last.pt, iteration 20")
        assert report.progress(folder_in(folder))[0] == "done" and not list(folder.rglob(files.DIVERGED))
        found = {"x": torch.ones(()), "by": {"y": np.arange(2)}}
        with mock.patch.object(Reverse, "evaluate", lambda *_: found):
            ends(0, f"{SMOKE} --overwrite")
        assert outcome(folder_in(folder))[1] == {"x": 1.0, "by": {"y": [0, 1]}}


def test_a_start_that_died_early_leaves_nothing_and_a_resume_says_what_has_changed():
    with workplace() as folder:
        t = trial.Trial(task_of(f"{SMOKE} --snapshot-every 3"), [])
        captured(t.start)  # and no more
        t.lock.close()
        (t.folder / "snapshots").mkdir()
        (t.folder / "snapshots" / "000003.pt").write_text("")
        with mock.patch.object(Reverse, "evaluate", side_effect=trial.Stopped) as evaluate:
            assert command(f"{SMOKE} --snapshot-every 10 --engine torch")[0] == trial.STOPPED
        assert not evaluate.call_args.args[0].training, "a layer like dropout is told that this is a test"
        assert sorted(p.stem for p in folder.rglob("snapshots/*")) == ["000010", "000020"]
        with mock.patch.object(machine, "code_of", return_value="another"):
            code, _, err = command(f"{SMOKE} --snapshot-every 7 --engine fast --deterministic")
        changed = "begun with engine torch, now fast; deterministic False, now True: the last bits may differ"
        assert code == 0 and changed in err, err
        assert "begun with another reverse.py or common.py than now" in err, err
        ends(0, SMOKE, "is finished, with another reverse.py or common.py than now:")
        with no_pictures():
            one = f"{SMOKE} --all fig2 --model lstm --vocab 8"
            ends(0, one, "1 done before (1 with another")
            files.write_json(result := t.folder / "result.json", read_json(result) | {"code": None})
            ends(0, one, "2 done before, 0")
        assert "--snapshot-every stays 10" in err, err
        assert read_json(t.folder / "result.json")["run"]["snapshot_every"] == 10
        (before,) = read_json(t.folder / "result.json")["earlier"]
        assert (before["engine"], before["until"], before["code"]) == ("torch", 20, machine.code_of(t.task))
        assert before["deterministic"] is False
        (t.folder / "snapshots").rename("elsewhere")
        (t.folder / "snapshots").symlink_to(Path("elsewhere").resolve())
        ends(0, f"{SMOKE} --overwrite")
        assert len(list(Path("elsewhere").iterdir())) == 2


def test_the_fingerprint_of_a_trials_code_is_that_of_its_script_and_of_common():
    one, code = task_of(SMOKE), machine.code_of
    found = [code(one), code(task_of(f"{SMOKE} --dual-freq --seed 3")), code(task_of("--pe none", Stability))]
    with workplace(), mock.patch.object(common, "__file__", "other.py"):
        for text in ("x = 1", "x = 2"):
            Path("other.py").write_text(text)
            found += [code(one), code(task_of(SMOKE, Sort))]
        Path("alias.py").symlink_to(reverse.__file__)
        with mock.patch.object(reverse, "__file__", "alias.py"):
            assert machine.script_of(one) == Path(reverse.__file__).resolve()
    assert len(set(found)) == 5 and len(set(found[:3])) == 1, found


def test_a_finished_trial_is_shown_and_a_result_that_cannot_be_read_made_again():
    with workplace() as folder:
        ends(0, SMOKE)
        wanted, result = outcome(folder_in(folder)), folder_in(folder) / "result.json"
        for content in ('{"metrics": [1, 2]}', '{"metrics": null}', "[]", "{", ""):
            result.write_text(content)
            code, _, err = command(SMOKE)
            assert code == 0 and "result.json cannot be used" in err, (content, err)
            assert len(set(err.splitlines())) == err.count("\n"), err  # each fault is said once
            assert outcome(result.parent) == wanted
        ends(0, SMOKE, "is finished", "token accuracy")


def test_what_a_trial_leaves():
    keys = "task config metrics iterations seconds iterations_per_second seconds_to_start peak_memory_bytes"
    keys += " argv parameters device torch python commit dirty threads finished"
    words = "--scale smoke --dual-freq --pe random --lr 0.5"
    with workplace() as folder:
        ends(0, words)
        found = folder_in(folder)
        name = "lstm-random-K8-L8-batch=8-dual-freq-embed=16-held-out=32-hidden=16-iterations=20-lr=0.5"
        assert found.relative_to(folder).as_posix() == f"runs/reverse/{name}/seed0"
        result = read_json(found / "result.json")
        assert set(keys.split()) <= result.keys() and result["argv"] == shlex.split(words)
        assert math.isclose(result["iterations_per_second"] * result["seconds"], 20, rel_tol=0.05), result
        assert (result["config"]["warmup"], result["iterations"], result["parameters"]) == (2, 20, 3480)
        last, snapshot = load(found / "last.pt")["model"], load(found / "snapshots/000020.pt")
        assert all(torch.equal(last[k], snapshot[k]) for k in last) and last.keys() == snapshot.keys()
        curve = np.array(columns(found))
        ends(0, f"{words} --log-every 1 --overwrite")
        each = np.array(columns(found))[:, 1:3].reshape(4, 5, 2)  # a row is the mean since the last one
        assert curve[:, 0].tolist() == [5, 10, 15, 20] and curve[-1, 3] == 0
        assert np.allclose(curve[:, 1:3], each.mean(1), rtol=1e-6)
        t = trial_of("--scale smoke --iterations 1000000")
        t.iteration, t.seconds, shown = 3, 3.0, progress.Progress(t.args, True)  # a second each
        shown.live.wanted = False  # though this may be a terminal
        said = [captured(shown.show, t, 0.1)[1] for _ in range(2)]
        left = "999,997 iterations are left, about 12 days on this CPU; --scale quick takes minutes\n"
        assert said == [left, ""]


# -- suite/flags.py: refusals, folder names, grids -----------------------------------------------------------

REFUSED = """
    --vocab 1 ~ --vocab | --vocab 2147483648 ~ 2^31 - 1 | --lr nan ~ --lr
    --vocab 2147483647 --embed 4096 ~ GiB of memory
    --length 2147483647 --embed 2147483646 ~ memory | --embed 7 ~ even | --seed 5-3 ~ --seed
    --length 4 --min-length 5 ~ --min-length 5 is above --length 4 | --vocab 2 --length 3 ~ 8 sequences
    --vocab 2 --length 3 --held-out 5 ~ half is the limit | --pe rotary ~ --pe | --list fig99 ~ fig99
    --list fig2 --vocab 31 ~ that --vocab: there is 8, 16 | --list fig2 --all fig2 ~ --list and --all
    --scale desk --list fig2 --lr 1 ~ 50 of these 150 trials | --jobs 2 ~ --jobs is for --all | --out= ~ empty
    --all= ~ empty
    --scale quick --list --min-length 9 ~ trials of all figures have their own --min-length
    --list fig14 --min-length 9 ~ that --min-length: there is 4
    --min-length 1 --vocab 32 --held-out 17 ~ half of the 32 sequences of length 1
    --precision bf16 ~ CPU | --vocab 15 --dual-freq ~ odd
    --warmup 11 --iterations 10 ~ --warmup 11 is above --iterations 10 | --beta2 1 ~ --beta2
    --dual-freq --min-length 3 ~ --min-length | --dual-freq --held-out 100 ~ multiple
    --dual-freq --vocab 2 --length 3 --held-out 12 ~ 4 sequences | --combine add --pe none ~ --combine
    --encode input --pe dup ~ --encode | --encode input --min-length 3 ~ --min-length
    --amplitude 1 --pe none ~ --amplitude | --amplitude 0 ~ --amplitude | --bands 0:0.5 --pe random ~ from sin
    --bands 0.51:0.55 ~ none of the 8 frequencies | --bands 0.5:0.5 ~ LOW < HIGH | --bands 0.5 ~ LOW:HIGH
    --no-conv ~ --no-conv is for mamba | --pe counter --embed 3 ~ 4 binary digits | --device cuda ~ CUDA
    --model s4d --rotate ~ --rotate is for mamba | --model mamba --rotate --slow ~ --slow
    --model mingru --engine fast ~ does not know --model mingru | --out file ~ --out | --unknown ~ --unknown
    --iterations ~ --iterations | stability --model mingru ~ use gru, lstm or s4d
    stability ~ --train | stability --target 9 ~ choose from 1 to 8 | stability --pairs 6 ~ a multiple of 4
    stability --train --overwrite ~ evaluates anew | stability --min-length 4 ~ of one length
    stability --trial no ~ not the folder | stability --all fig5 ~ --train trains them first
    delayed_add --vocab 2 --length 2 ~ 16 sequences
    predecessor --length 1 ~ at least 2 | predecessor --vocab 3 ~ --vocab
    predecessor --vocab 4 --length 2 --held-out 13 ~ 12 sequences"""


def test_bad_input_is_refused_in_one_line_and_creates_nothing():
    cases = [case.strip().split(" ~ ") for case in re.split(r" \| |\n", REFUSED.strip())]
    cases += [("--out 'a\nb'", "line break"), (f"--vocab {10**400}", "--vocab")]
    tasks = {task.name: task for task in report.TASKS}
    with workplace():
        Path("file").write_text("not a folder")
        for words, said in cases:
            name, _, others = words.partition(" ")
            words = others if name in tasks else words
            refuses(said, f"--scale smoke {words}", tasks.get(name, Reverse))


def test_what_a_shell_leaves_as_it_is():
    """A ~ behind =, a variable that was not set, and closed streams, whose numbers no file may take."""
    assert task_of("--out=~/mine").args.out == os.path.expanduser("~/mine")
    for task in (lm_wikitext.WikiText, Shakespeare):
        assert task_of("--data=~/mine", task).args.data == os.path.expanduser("~/mine")
    with workplace(), mock.patch.dict(os.environ, OMP_NUM_THREADS="", PYTHONPATH=str(HERE)):
        unset = "import os, suite; raise SystemExit('OMP_NUM_THREADS' in os.environ)"
        opened = "import os, suite; raise SystemExit(os.open('file', os.O_CREAT) < 3)"
        for code, closing in ((unset, ""), (opened, ">&- 2>&-"), (opened, "<&-")):
            words = ["sh", "-c", f'"$0" -c "$1" {closing}', sys.executable, code]
            assert subprocess.run(words, check=False).returncode == 0, (code, closing)


def test_other_flags_are_refused():
    with workplace() as folder:
        ends(0, SMOKE)
        path = folder_in(folder) / "config.json"
        content = read_json(path)
        del content["config"]["bands"]  # as of a version that had no such flag
        files.write_json(path, content)
        ends(0, SMOKE)
        content["config"] |= {"lr": 0.5, "beta2": 0.5}
        files.write_json(path, content)
        refuses("--beta2 0.5 there, 0.999 here, --lr 0.5 there, 0.001 here", SMOKE)
        code, _, err = command(f"{SMOKE} --seed 0-1 --jobs 2")  # does not take it for done
        assert code == 2 and err.count("--beta2 0.5 there") == 1 and list(folder.glob("runs/*/*/seed1")), err
        path.rename("config")
        content = read_json(result := path.with_name("result.json"))
        files.write_json(result, content | {"config": content["config"] | {"lr": 0.5}})
        refuses("--lr 0.5 there, 0.001 here", SMOKE)
        Path("config").rename(path)
        ends(0, f"{SMOKE} --overwrite")
        ends(0, SMOKE)
        before = sorted(path.parent.iterdir())
        with files.lock(path.parent / "lock"):  # of a trial that runs nothing is deleted
            ends(trial.RUNNING_ELSEWHERE, f"{SMOKE} --overwrite", "is being run by process")
        assert sorted(path.parent.iterdir()) == before


def test_a_commit_is_of_this_repository_not_of_one_around_it_and_has_the_script():
    if not shutil.which("git"):
        raise Skip("no git")
    assert bool(machine.version_of_code(reverse.__file__)["commit"]) == (HERE / ".git").exists()
    with workplace() as folder, mock.patch.object(machine, "__file__", str(folder / "suite" / "machine.py")):
        Path("suite").mkdir()
        run = lambda *words: subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x", *words], check=True
        )
        run("init", "-q")
        assert machine.version_of_code("mine.py") == {"commit": None, "dirty": None}
        Path("suite/machine.py").touch()
        run("add", "suite")
        run("commit", "-qm", "x")
        dirty = []
        for version in ("first", "second"):
            Path("mine.py").write_text(version)
            dirty.append(machine.version_of_code("mine.py")["dirty"])
            run("add", "mine.py")
            run("commit", "-qm", "x")
        Path("notes.py").touch()
        dirty.append(machine.version_of_code("mine.py")["dirty"])
        assert dirty == [True, True, False], "not in the commit; changed; all is in the commit"


def test_folder_names_hold_what_changes_results():
    plumbing = "--save-every 7|--log-every 3|--snapshot-every 9|--device cpu|--out x|--jobs 3|--overwrite"
    plumbing += "|--warmup 1000|--precision tf32|--precision fp32|--engine torch|--no-graph|--deterministic"
    science = "--lr 0.1|--warmup 7|--min-length 3|--dual-freq|--clip 0|--combine add|--amplitude 2"
    science += "|--bands 0:0.5|--encode input|--model mamba|--model mamba --no-conv|--model mamba --rotate"
    science += "|--model mamba --slow"
    name = lambda words: task_of(words).folder.parent.name
    plain = "lstm-sin-K16384-L64"
    own = {"model", "pe", "vocab", "seed", "amplitude", "min_length", "dual_freq"}
    assert suite.flags.declare(Reverse).science == own | TRAINING.keys() - {"snapshot_every"}
    assert task_of("").folder == Path(f"runs/reverse/{plain}/seed0")
    assert {name(words) for words in plumbing.split("|")} == {plain}
    assert len({name(words) for words in science.split("|")} | {plain}) == len(science.split("|")) + 1
    for flag in ("min-length=32", "precision=bf16"):
        assert name(f"--{flag}") == f"{plain}-{flag}"
    assert name("--scale quick").startswith("lstm-sin-K") and "hidden=" in name("--scale quick")


def test_list_and_its_filters():
    listed = lambda words: command(words)[1].splitlines()
    assert len(listed("--list fixed-or-varying")) == 40
    assert len(set(listed("--list"))) == len(listed("--list")) == 275, "figures share trials"
    one = "--model gru --pe sin --vocab 32 --seed 3"
    assert listed(f"--list fig2 --jobs 3 {one}") == [f"python reverse.py {one}"]
    assert len(listed("--scale desk --list fig2 --iterations 9 --model gru")) == 50
    more = listed("--list fig2 --model gru --seed 3-9")  # in place of the grid's 0 to 4
    assert len(set(more)) == 8 * 7 and more[6].endswith("--vocab 32 --seed 9"), more[:7]
    for out in ("a b", "-x"):
        (carried,) = listed(f"--list fig2 {one} --out='{out}' --beta2 0.98")
        args, given = suite.flags.parse(Reverse, shlex.split(carried)[2:])
        assert args.out == out and given["beta2"] == 0.98
    assert len(listed("--scale quick --list fig2 --iterations 50")) == 24  # a first look, as .ci/run does
    for line in listed("--scale quick --list") + listed("--scale smoke --list"):
        task_of(" ".join(line.split()[2:]))  # every command is accepted


def test_what_a_task_declares_and_cannot_mean_is_refused():
    helps = dict(figure="mine", text="a claim", metric=claims.accuracy, higher=SIN, lower=NONE, per="vocab")
    figure = claims.Figure("Mine", claims.ACCURACY, "vocab")

    def mine(claim=(), without="", scale="smoke", scales=Reverse.scales, **row):
        """A task with a figure of its own, whose claim, or a flag of its grid, is another."""
        row = dict(pe=["none", "sin"], model="lstm", vocab=[8, 16]) | row
        row.pop(without, None)
        own = dict(scales=scales, figures={"mine": figure}, claims=[Claim(**helps | dict(claim))])
        own["grids"] = {scale: {row.pop("named", "mine"): suite.flags.cross(**row)}}
        return type("Mine", (Reverse,), own)

    cases = {
        "sets lenght: there is no such flag": mine(lenght=3),
        "'paper' sets widht: there is no such flag": mine(scales={"paper": dict(widht=3)}),
        "no scale 'paper'": mine(scales={"smoke": {}}),
        "'mine' at smok scale is of no scale": mine(scale="smok"),
        "'main' at smoke scale is of no scale": mine(named="main"),
        "sets model to 'lstmm'": mine(model="lstmm"),
        "is not a whole number": mine(vocab=(8, 16)),
        "sets vocab to '16'": mine(vocab="16"),
        "sets clip to 0: write 0.0": mine(clip=0),
        "has several values of log_every": mine(log_every=[5, 10]),
        "does not set vocab": mine(without="vocab"),
        "does not set pe": mine(without="pe"),
        "no grid of 'mine' has such trials": mine(dict(where=dict(model="LSTM"))),
        "no grid of 'mime' has such trials": mine(dict(figure="mime")),
        "no grid of 'mine' has such": mine(dict(scales=("quick",))),
        "more than one cell has these flags": mine(dict(per="model")),
        "are not the grid's: KeyError('K')": mine(dict(text="at {K}")),
    }
    with workplace():
        words = "--scale smoke --list mine"
        for flag, values in dict(hidden=[8, 16], precision=["fp32", "bf16"]).items():
            more = mine(dict(where={flag: values[0]}), **{flag: values})
            assert [ends(0, words, task=one).count("\n") for one in (mine(), more)] == [4, 8]
        theirs = dict(grids=mine().grids, figures={"mine": figure}, trials_of="reverse")  # and no claims
        assert "--vocab 16" in ends(0, words, task=type("Mine", (Reverse,), theirs))
        for said, wrong in cases.items():
            refuses(said, words, wrong)
        refuses("has to return its own class", "--min-length 4", type("Mine", (Reverse,), dict(name="mine")))
        fewer = {"section4.1": suite.flags.cross(model="gru", pe="none", vocab=8, seed=range(1))}
        inherits = type("Mine", (Reverse,), dict(grids={"smoke": fewer}))  # claims of what its trials lack
        ends(0, "--scale smoke --report section4.1", "0 of 1 trials", task=inherits)


# -- suite/cli.py: many trials as processes, and signals outside of training ---------------------------------


def test_all_goes_on_and_ends_with_the_worst_code():
    words = f"{SMOKE} --all fig12"
    with workplace(), no_pictures():
        none, dup = (task_of(f"--scale smoke --pe {pe}").folder for pe in ("none", "dup"))
        none.parent.mkdir(parents=True)
        none.write_text("a file where a folder is expected")
        dup.mkdir(parents=True)
        with files.lock(dup / "lock"):  # as another process would
            code, out, _ = command(words)
        assert code == 2 and "exit code 2" in out and "runs elsewhere" in out, out
        assert "1 of 3 trials finished" in out
        none.unlink()
        with mock.patch.object(machine, "cores", lambda: 2):
            out = ends(0, words, "1 done before", "2 at a time", "3 of 3 trials finished")
        assert [line[:6] for line in out.splitlines() if "done;" in line] == ["2 of 3", "3 of 3"]
        with mock.patch.object(sys, "executable", "/nowhere/python"):
            ends(1, f"{words} --overwrite", "/nowhere/python")
    for one in (task_of(SMOKE), task_of("--pe none", Stability)):
        one.folder = Path("x" * 300)  # that cannot be read: its own process says so
        assert not cli.Job("", [], one).is_finished() and not one.has_begun()
    for code, wanted in ((-signal.SIGKILL, trial.FAILED), (trial.STOPPED, trial.STOPPED)):
        campaign = cli.Campaign([job := mock.Mock(words=["x"], errors=[], took=1.0)], 1, False, trial.Stop())
        campaign.running, job.end.return_value = [job], code
        captured(campaign.take_back, job)
        assert cli.worst(campaign.codes) == wanted and campaign.done() == 0, "a job that was killed"
        assert campaign.stop.requested == (code == trial.STOPPED), "one that was stopped ends them all"


def test_all_stops_all_at_once_and_continues_and_no_job_outlives_it():
    words, trials = f"{SMOKE} --all fig12 --iterations 1600 --save-every 50", "runs/*/*/seed*"
    curves = lambda: Path().glob(f"{trials}/curve.csv")
    iterations = lambda: {curve: int(columns(curve.parent)[-1][0]) for curve in curves()}
    with workplace() as folder:
        child = fork(f"{words} --jobs 2")
        wait_for(lambda: len(iterations()) == 2)
        if sys.platform == "linux":  # killed without a word, it takes along what it has started, which saves
            os.kill(child, signal.SIGKILL)
            assert wait(child) == -signal.SIGKILL
            wait_for(lambda: not any(map(files.is_locked, folder.glob(f"{trials}/lock"))))
            before, child = iterations(), fork(f"{words} --jobs 2")
            wait_for(lambda: all(n > before[curve] for curve, n in iterations().items()))
        os.kill(child, signal.SIGTERM)
        assert wait(child) == trial.STOPPED
        assert len(iterations()) == 2, "no further trial was begun"
        assert "2 saved, 1 not begun; the same command continues" in log(), log()
        with no_pictures():
            assert wait(fork(words)) == 0 and "3 of 3 trials finished" in log(), log()


def test_signals_outside_of_training_are_one_line():
    script = [sys.executable, str(HERE / "reverse.py"), *shlex.split(SMOKE)]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with workplace():
        early = subprocess.Popen(script, **pipe)
        twice = subprocess.Popen([*script, "--iterations", "1000000"], **pipe)
        if sys.platform == "linux":  # while PyTorch is imported
            wait_for(lambda: "libtorch" in Path(f"/proc/{early.pid}/maps").read_text())
        else:
            time.sleep(0.4)
        early.send_signal(signal.SIGINT)
        wait_for(lambda: list(Path().glob("runs/*/*/seed*/config.json")))
        for _ in range(3):
            twice.send_signal(signal.SIGINT)
        for child in (early, twice):
            _, err = child.communicate()
            assert child.returncode in (130, trial.STOPPED, -signal.SIGINT) and "Traceback" not in err, err
        for words, said in ((" --scale paper --list | head -n 1", "python reverse.py"), (" >&-", "")):
            done = subprocess.run(shlex.join(script) + words, shell=True, check=True, **pipe)
            assert done.stdout.startswith(said) and not done.stderr, done.stderr
    codes = trial.FAILED, trial.NOT_FINITE, trial.RUNNING_ELSEWHERE, trial.STOPPED
    assert codes == (1, 3, 73, 75)  # README.md's and slurm_array.sh's
    assert {1, 2, 10, 15} == {*map(int, trial.Stop.SIGNALS)} or sys.platform != "linux"
    stop = trial.Stop()
    stop.training = True
    with mock.patch.object(os, "_exit") as at_once:
        for number, calls in ((signal.SIGTERM, 0), (signal.SIGTERM, 0), (signal.SIGINT, 1)):
            stop(number, None)
            assert stop.requested and at_once.call_count == calls
    at_once.assert_called_once_with(130)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with trial.Stop().listening():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


# -- suite/claims.py: statistics and verdicts ----------------------------------------------------------------


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
    close([gains.higher, gains.lower, gains.error, gains.freedom], [4, 2, math.sqrt(4 / 3), 8], 1e-9)
    assert claims.difference([[5, 6, 7], [1, 2]], [[4, 5], [2, 3, 4]]).counts == (2, 2)
    assert claims.difference([[0.3] * 10], [[0.3] * 3]).value == 0, "a rounding error, and no spread"
    same = none_and_sin([0.1] * 3, [0.1] * 3)
    assert judged(same, higher=NONE, lower=0.1)[0] == UNDECIDED, "the same"
    holms = {3: [0.04, 0.03, 0.04], 4: [0.06, 0.04, 0.08]}  # by size of the family: what is missing is 1
    for family, corrected in holms.items():
        close(claims.holm([0.02, 0.01, 0.04], family), corrected, 1e-9)
    values = np.random.default_rng(7).normal(size=200)  # the paper's bootstrap, where a normal one is as good
    normal = values.mean() + 1.96 * values.std() / math.sqrt(200) * np.array([-1, 1])
    assert np.allclose(claims.bootstrap_interval(values), normal, rtol=0, atol=0.01)


def test_a_yes_is_not_luck():
    """Normal data without any difference: how often the claim, or its opposite, is shown at 2.5%."""
    rng, times = np.random.default_rng(2), 1000
    welch = lambda a, b, *_: claims.difference([a], [b])
    gains = lambda a, b, c, d: claims.difference([a, c], [b, d])
    paired = lambda a, b, *_: claims.paired_difference(a, b)
    for n, make in itertools.product((3, 5), (welch, gains, paired)):
        shown = []
        for spread in (1, 3):
            drawn = rng.normal(size=(times, 4, n)) * np.array([1, spread, spread, 1])[:, None]
            found = [make(*samples) for samples in drawn]
            shown += [p <= 0.025 for d in found for p in (d.above(), d.below())]
        assert np.mean(shown) <= 0.03, (n, make, np.mean(shown))


def none_and_sin(none, sin, more=(), **flags):
    """[(flags, Outcome)], a seed per value of the metric `a`; None: not finished."""
    found = []
    for pe, values in {"none": none, "sin": sin, **dict(more)}.items():
        for cell, a in ((flags | {"pe": pe, "seed": seed}, a) for seed, a in enumerate(values)):
            found.append((cell, a and Outcome(cell, {"a": a, "b": a - 0.05})))
    return found


def judged(cells, **claim):
    """The verdict's word, and its numbers as floats."""
    usual = dict(figure="f", text="", metric=claims.metric("a"), higher=SIN, lower=NONE)
    found = claims.judge(Claim(**(usual | claim)), Outcomes(cells))
    return found.word, [float(number) for number in re.findall(r"[-+]?\d+\.?\d*", found.numbers)]


def test_verdicts():
    none, sin = [0.50, 0.51, 0.52, 0.48], [0.69, 0.75, 0.64, 0.80]
    word, numbers = judged(cells := none_and_sin(none, sin))
    d = claims.difference([sin], [none])
    close(numbers, [0.72, 4, 0.5025, 4, 0.2175, *d.interval(), 2 * d.above()], 2e-3)
    assert word == YES and judged(cells, higher=NONE, lower=SIN)[0] == NO
    noisy = none_and_sin(none, [0.4, 0.6, 0.9, 0.2])
    assert judged(noisy)[0] == UNDECIDED and judged(noisy, margin="0.02")[0] == UNDECIDED
    # Of the same trials `b` is a by 0.05 less: sure in pairs, within the spread otherwise.
    assert judged(noisy, lower=SIN, than=claims.metric("b"))[0] == YES
    # No gain: below the margin, of a number or in percent, or a loss; a gain denies it, however small.
    lossy = none_and_sin(none, [0.47, 0.50, 0.44, 0.49])  # -0.03 [-0.07, +0.01]
    assert (judged(lossy)[0], judged(lossy, margin="0.02")[0]) == (UNDECIDED, YES)
    near = [0.500, 0.501, 0.502]
    alike, better = (none_and_sin(near, [x + more for x in near]) for more in (0, 0.01))
    for margin, of_alike in (("0.02", YES), ("1%", YES), ("0.001", UNDECIDED), ("0.1%", UNDECIDED)):
        assert judged(alike, margin=margin)[0] == of_alike and judged(better, margin=margin)[0] == NO
        assert judged(better, higher=NONE, lower=SIN, margin=margin)[0] == YES, "a loss"
    assert judged(none_and_sin(near, [0.50, 0.51, 0.52, 0.51]), margin="0.02")[0] == UNDECIDED, "one side"
    # Every seed the same: nothing to estimate a spread from, and no crash.
    for value, word in ((1.0, UNDECIDED), (0.9, NO)):
        assert judged(none_and_sin([1.0] * 3, [value] * 3))[0] == word
    # Too few trials, an absolute number, the worst of several cells, the smallest vocabulary and the largest
    cells = none_and_sin([0.5, 0.6, 0.7], [0.8, 0.9, 1.0], vocab=8)
    fewer = [(flags, outcome if flags["seed"] else None) for flags, outcome in cells]
    assert judged(fewer) == (TOO_FEW, [2, 2]) and judged(cells, lower=0.91)[0] == UNDECIDED
    assert judged(cells, lower=0.6)[0] == YES and judged(cells, higher={}, lower=0.3)[1][1] == 0.6
    cells += none_and_sin([0.1, 0.2, 0.3], [], vocab=32) + none_and_sin([0.1] * 3, [], vocab=16)
    word, numbers = judged(cells, higher=NONE | dict(vocab=min), lower=NONE | dict(vocab=max))
    assert (word, numbers[0], numbers[2]) == (YES, 0.6, 0.2) and judged(cells)[0] == TOO_FEW
    several = Claim("f", "", claims.metric("a"), SIN, NONE)
    few = none_and_sin([0.5, None, None], [0.8, 0.9, 1.0], vocab=32)
    few += none_and_sin([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], vocab=8)
    of_gains = dict(higher=SIN | dict(vocab=max), lower=SIN | dict(vocab=min), over=NONE)
    assert judged(few, **of_gains) == (TOO_FEW, [1, 3]), "of a base"
    assert judged(none_and_sin([], [0.8, 0.9]), lower=0.5) == (TOO_FEW, [2])
    assert "more than one cell" in claims.judge(several, Outcomes(cells)).why
    with unittest.TestCase().assertRaisesRegex(ValueError, "no 'c', but a, b"):
        claims.metric("c")(cells[0][1])
    # A gain is over none and over the control that has run; corrected, a verdict may lose its support.
    (claim,) = claims.gains("f", "it helps", SIN, claims.metric("a"), primary=True)
    for control, a, word in (("dup", 0.4, YES), ("constant", 0.6, UNDECIDED), ("constant", 0.7, NO)):
        control = {"constant": [None] * 3} | {control: [a, a + 0.01, a + 0.02]}
        cells = none_and_sin([0.50, 0.51, 0.52], [0.60, 0.61, 0.62], control)
        loses = dict(higher=NONE, lower=SIN, metric=lambda outcome: 1 - outcome.metrics["a"])  # a distance
        for one in (claim, Claim(**(vars(claim) | loses))):
            assert claims.judge(one, Outcomes(cells)).word == word, (control, one)
    weaker, other = claims.judge(claim, Outcomes(cells)).numbers.split("; ")  # of the last control
    assert weaker.startswith("over constant: 0.6100 (n=3) against 0.7100 (n=3), difference -0.1000 [")
    assert other.startswith("over none: +0.1000 [+0.0"), other
    found = claims.Verdict(claim, Difference(1, 0, (5, 5), 0.4, 8), "", 0.02)
    assert (found.word, claims.correct([found], 10)[0].word) == (YES, UNDECIDED)


def test_the_largest_of_a_filtered_grid_is_not_its_smallest():
    cells = none_and_sin([0.1, 0.2, 0.3], [0.5, 0.6, 0.7], iterations=1)
    longer = none_and_sin([0.8, 0.8, 0.9], [0.5, 0.6, 0.7], iterations=4)
    sides = dict(higher=SIN | dict(iterations=min), lower=NONE | dict(iterations=max))
    assert [judged(cells, **sides)[0], judged(cells + longer, **sides)[0]] == [claims.TOO_FEW, claims.NO]
    (growth,), grid = claims.grows("fig2"), [(row, None) for row in Reverse.grids["desk"]["fig2"]]
    rows, sin_alone = [row for row, _ in grid], [trial for trial in grid if trial[0]["pe"] == "sin"]
    asked = [len(list(claims.expand(growth, Outcomes(trials, rows)))) for trials in (grid, sin_alone)]
    assert asked == [3, 0], "a gain is not asked of trials without a base"


def test_help_is_claimed_once_at_every_vocabulary():
    for scale, figure, cells in (
        ("paper", "fig2", 18),
        ("desk", "fig2", 12),
        ("desk", "fig2-short-twice", 6),
    ):
        outcomes = Outcomes([(flags, None) for flags in Reverse.grids[scale][figure]])
        rows = claims.claims_of(Reverse, figure, scale)
        texts = [claim.text for row in rows for claim in claims.expand(row, outcomes)]
        found = re.findall(r"the encoding helps (\w+) at K = (\d+)(, the largest)?", "\n".join(texts))
        largest = {(model, max(int(k) for other, k, _ in found if other == model)) for model, *_ in found}
        assert len({(model, k) for model, k, _ in found}) == len(found) == cells, (figure, found)
        assert {(model, int(k)) for model, k, at_largest in found if at_largest} == largest, figure
    assert "the encoding's help for LSTM grows from K = 64 to 1024, in log-odds" in texts


def test_every_claim_finds_its_trials_and_few_are_primary():
    for scale in report.SCALES:
        primary = Counter()  # of the paper, and beyond it
        for task in report.TASKS:
            for name, grid in task.grids.get(scale, {}).items():
                outcomes = Outcomes([(flags, None) for flags in grid])
                found = claims.judge_all(claims.claims_of(task, name, scale), outcomes)
                whys = {one.why for one in found} - {"", "n = 0 and 0", "n = 0 in a cell"}
                assert not whys, (task, name, scale, whys)
                primary[task.figures[name].beyond] += sum(one.claim.primary for one in found)
        assert max(primary.values()) <= claims.MOST_PRIMARY, (scale, primary)
        assert primary[False] >= 8 or scale == "smoke", (scale, primary)


# -- suite/tables.py, report.py: whatever files hold; RESULTS.md ---------------------------------------------

CURVE = "iteration,loss,accuracy,learning_rate,seconds\n5,1.5,0.2,0.1,1.0\n10,1,0.3,0.1,2.0\n"


def made_up(task, words):
    """Finished trials of a scale's grids, in which an encoding helps -> their folders."""
    args, given = suite.flags.parse(task, shlex.split(words))
    about = dict(iterations=20, seconds=2.5, commit="0123456789", device="a card")
    for flags, _, bound in suite.flags.grid(task, args, given, figure=""):
        token = 0.7 + 0.2 * (flags["pe"] in TABLES) + 0.001 * flags["seed"]
        metrics = dict(token_accuracy=token, accuracy=token, damerau_levenshtein=64 * (1 - token))
        metrics["by_condition"] = {name: [token] * 64 for name in reverse.CONDITIONS}
        bound.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(bound.folder / "result.json", about | {"metrics": metrics, "config": bound.config})
        (bound.folder / "curve.csv").write_text(CURVE)
    return sorted(Path(args.out).glob("*/*/seed*"))


def reports(words, *named):
    """What report.py prints, which names these files once each."""
    code, out, err = captured(report.main, shlex.split(words))
    assert code == 0 and not err and all(out.count(f"{path}: ") == 1 for path in named), (named, out, err)
    return out


def test_another_users_folder_does_not_end_a_report():
    with workplace(), no_pictures():
        folders = made_up(Reverse, "--scale smoke")
        (folders[0] / "result.json").unlink()
        stat, whose = os.stat, folders[0] / files.DIVERGED

        def denied(path, **how):
            if str(path) == str(whose):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return stat(path, **how)

        with mock.patch.object(os, "stat", denied):
            assert f"cannot be read: [Errno 13] Permission denied: '{whose}'" in reports("--scale smoke")
            code, out, _ = command("--scale smoke --report")
            assert code == 0 and f"left out: [Errno 13] Permission denied: '{whose}'" in out
            whose = folders[1] / "result.json"  # not even whether there is one
            assert f"cannot be read: [Errno 13] Permission denied: '{whose}'" in reports("")


SMOKE_ALONE = type("SmokeAlone", (Reverse,), dict(grids={"smoke": Reverse.grids["smoke"]}, claims=()))


def test_broken_files_are_named_and_the_others_reported():
    def without(key, value=None):
        content = json.loads(whole)
        (content if key in content else content["metrics"])[key] = value
        return json.dumps(content).encode()

    with workplace(), no_pictures():
        folders = made_up(Reverse, "--scale smoke")
        elsewhere = f"finished in runs; {len(folders)} of smoke scale are: --scale smoke"
        assert elsewhere in reports("--scale paper")
        assert (
            "finished trials in runs/reverse have other" in command("--scale smoke --report fig2 --lr 9")[1]
        )
        refuses("reverse has no figure at quick scale: --scale smoke", "--scale quick --report", SMOKE_ALONE)
        assert "smoke" in (out := reports("")) and "quick" not in out
        path = next(f for f in folders if "gru-none" in str(f) and "dual-freq" in str(f)) / "result.json"
        whole, curve = path.read_text(), folders[-1] / "curve.csv"
        (folders[-1] / "result.json").unlink()
        states = lambda: re.search(r"fig2 +smoke +(.*)", reports("--scale smoke"))[1].split()
        assert states() == ["12", "11", "0", "1", "0", "0", "0:00:30", "0:00:01"]
        # of so many trials: done, running, stopped, not finite, missing; time spent, and left
        with files.lock(folders[-1] / "lock"):
            assert states()[2:4] == ["1", "0"]
        bad = [b"", b'{"metrics": {"token_acc', b"[]", b"\xff\xfe", without("metrics", [1]), b"[" * 10**5]
        bad += [without("seconds", x) for x in ("5", math.nan, 1e308, -1)] + [without("config", 3)]
        bad += [without("config", {"pe": "dup"})]  # a folder that was copied
        bad += [json.dumps(json.loads(whole) | {"run": {"data": ["a", "b"]}}).encode()]
        bad += [without("by_condition", x) for x in ({}, [], "x", {c: [] for c in reverse.CONDITIONS})]
        for content in bad:
            path.write_bytes(content)
            code, out, err = command("--scale smoke --report fig3")
            assert code == 0 and out.count(str(path)) == 1 and "5 of 6 trials" in out and not err, content
        path.write_text(json.dumps(json.loads(whole) | {"config": {"text_sha256": "another"}}))
        out = command("--scale smoke --report fig3")[1]
        assert "2 different texts, not compared" in out and "mean" not in out
        reports("--write R.md --scale smoke")
        assert "of different texts" in Path("R.md").read_text()
        whole_grid, part = (command(f"--scale smoke --report fig2 {vocab}")[1] for vocab in ("", "--vocab 8"))
        assert "16, the largest" in whole_grid and "of 6 trials" in part and "the largest" not in part, part
        Path("runs/bench").mkdir()
        Path("runs/bench/bad.json").write_text('{"configurations": {"a": 1}}')
        for rows, content in zip(("5,x,1,1,1", "5,1", "5,1,nan,1,1"), (bad[1], bad[3], bad[7])):
            path.write_bytes(content)
            curve.write_text(CURVE + f"{rows}\n")
            reports("--scale smoke", path, curve)
            reports("--write R.md --scale smoke", "bench/bad.json")


def test_the_points_of_a_picture_are_there_as_numbers():
    with workplace(), no_pictures():
        folders = made_up(Reverse, words := "--scale smoke --seed 0-2 --model lstm")
        assert "made by unlike" not in command(f"{words} --report fig3")[1]
        part = {"device": "another", "commit": None, "dirty": True}
        path = next(path for path in folders if "dual-freq" in str(path)) / "result.json"
        files.write_json(path, read_json(path) | {"earlier": [part]})
        with mock.patch.object(tables, "correct", wraps=claims.correct) as correct:
            out = command(f"{words} --report fig3")[1]
        made = "a card and another; torch unknown; commit 0123456 and unknown"
        assert f"commits: {made}, with changes that no commit has\n" in out, out
        (path,) = re.findall(r"written: (.*fig3.*\.csv)", out)
        assert correct.call_args.args[1] == claims.MOST_PRIMARY, "other scripts' claims are of the family"
        rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    names = "panel", "line", "mean", "low", "high", "n", "values"
    found = Counter(tuple(row[k] for k in names) for row in rows)
    panels = [f"LSTM, {condition} (target/disturbants)" for condition in reverse.CONDITIONS]
    for panel, pe in itertools.product(panels, ("none", "sin")):
        values = [0.7 + 0.2 * (pe == "sin") + 0.001 * seed for seed in range(3)]
        numbers = np.mean(values), *claims.bootstrap_interval(values), 3, " ".join(map(str, values))
        assert found.pop((panel, pe, *map(str, numbers))) == 64
    assert not found and [row["x"] for row in rows[:64]] == [str(n) for n in range(1, 65)]


def test_results_page_keeps_what_a_person_wrote_and_is_the_same_again():
    with workplace():
        made_up(Sort, "--scale smoke --out results")
        words, page = "--write RESULTS.md --out results --scale smoke", Path("RESULTS.md")
        reports(words)
        first = page.read_text()
        made = first[first.index(report.BEGIN) : first.index(report.END)]
        head, tail = f"What was tried.\r\n<!-- not {report.BEGIN} -->\n", "\n## Machines\n\nNone."
        page.rename("elsewhere.md")
        page.symlink_to("elsewhere.md")
        page.write_bytes((head + made + "an old line\n" + report.END + tail).encode())
        reports(words)
        written, linked = page.read_bytes().decode(), "- [Machines](#machines)\n"
        assert page.is_symlink() and written.count(linked) == 1
        assert written.replace(linked, "") == head + made + report.END + tail
        assert "python sort.py --scale smoke --all fig12" in made and "0123456" in made
        headings = re.findall(r"^#+ (.*)", made, re.MULTILINE)
        assert len(set(headings)) == len(headings) >= 5
        for target in re.findall(r"\]\((.*?)\)", made):
            known = target[1:] in map(report.anchor, headings)
            assert known if target[0] == "#" else 1000 < Path(target).stat().st_size < 60_000
        pictures = lambda: {path: path.read_bytes() for path in Path("results").rglob("*.svg")}
        before = pictures()
        assert command("--scale smoke --out results --report", Sort)[0] == 0 and pictures() == before
        made_up(Sort, "--scale smoke --out results --seed 7")  # another page, of other pictures
        with mock.patch.object(tables, "draw") as drawn:
            reports("--write other.md --out results --scale smoke --seed 7")
        assert "--all fig12 --seed=7" in Path("other.md").read_text()
        stems = [call.args[2].stem for call in drawn.call_args_list]
        assert bool(stems) == tables.CAN_DRAW and all("seed=7" in stem for stem in stems)
        with mock.patch.object(tables, "draw", side_effect=OSError("no space")):
            assert ("svg is not drawn: no space" in reports(words)) == tables.CAN_DRAW
        with mock.patch.object(tables, "draw", side_effect=ImportError("of another NumPy")):
            assert ("svg is not drawn: ImportError('of another" in reports(words)) == tables.CAN_DRAW
        with no_pictures():  # and with another --out, of which nothing is finished
            assert "matplotlib is not installed" in reports(words)
        folders = [
            path for path in made_up(DelayedAddition, "--scale smoke --out results") if "add" in str(path)
        ]
        for folder in folders:
            (folder / "result.json").unlink()
            (folder / files.DIVERGED).write_text("at iteration 7")
        reports(words, *folders)
        text = page.read_text()
        assert (
            f"- not finite, left out: {folders[0]}: at iteration 7" in text.split("nothing is reported:")[1]
        )
        for wrong in ("--out nowhere", "--out ''", "--write results", "--write nowhere/R.md"):
            code, _, err = captured(report.main, shlex.split(f"{words} {wrong}"))
            assert code == 2 and err.count("\n") == 1 and page.read_text() == text, err
        # A marker that lacks, twice, in a line with others, upside down
        twice, beside = f"{text}\n{made}", text.replace(report.END, f"a {report.END}")
        for wrong in (made, twice, beside, f"{report.END}\n{made}"):
            page.write_bytes(wrong.encode())
            code, _, err = captured(report.main, shlex.split(words))
            assert (code, err.count("\n"), page.read_bytes().decode()) == (2, 1, wrong)
    if not tables.CAN_DRAW:
        raise Skip("but for its pictures: matplotlib is not installed")


def test_the_results_page_is_that_of_the_committed_trials():
    with workplace() as folder, mock.patch.object(tables, "draw"):
        Path("results").symlink_to(HERE / "results")
        shutil.copy(HERE / "RESULTS.md", folder)
        reports(how := "--write RESULTS.md --out results --scale desk quick")
        same = Path("RESULTS.md").read_text() == (HERE / "RESULTS.md").read_text()
    assert same, f"another page is made now by python report.py {how}"


def test_cells_that_would_be_one_point_of_a_picture_are_lines():
    rows = [
        flags | {"model": "lstm", "lr": lr}
        for flags, _ in none_and_sin([0, 0], [0, 0], vocab=8)
        for lr in (1, 2)
    ]
    outcomes = Outcomes([(row, Outcome(row, {"token_accuracy": 0.5 * row["lr"]})) for row in rows])
    figure = claims.Figure("Mine", claims.ACCURACY, "vocab")
    (panel,) = suite.drawing.panels_of(figure, outcomes.where(lr=1))
    assert panel.lines == {"none": {8: [0.5, 0.5]}, "sin": {8: [0.5, 0.5]}}
    (panel,) = suite.drawing.panels_of(figure, outcomes)
    assert panel.lines["sin, lr 1"] == {8: [0.5, 0.5]} and panel.lines["none, lr 2"] == {8: [1.0, 1.0]}
    for row, one in outcomes.trials:
        row["lr"] = row["lr"] if row["lr"] == 1 else None  # a flag that a row leaves out
    figure = claims.Figure("Mine", claims.ACCURACY, "lr")
    (panel,) = suite.drawing.panels_of(figure, outcomes)
    assert panel.lines == {pe: {"1": [0.5, 0.5], "-": [1.0, 1.0]} for pe in ("none", "sin")}
    if not tables.CAN_DRAW:
        raise Skip("but for its picture: matplotlib is not installed")
    with workplace():
        suite.drawing.draw(figure, "smoke", Path("mine"), outcomes, [".svg"])
        said = set(re.findall(r">([^<>]+)</text>", Path("mine.svg").read_text()))
        assert {"-", "1", "none: vanilla", "sin: the clock"} <= said, said


# -- reverse.py, sort.py, delayed_add.py, predecessor.py -----------------------------------------------------

POWERS, LARGEST, TWO = [2**n for n in range(5, 15)], dict(lstm=[16384]), ["none", "sin"]
PAPER = [  # script, figure, {model: vocabularies}, encodings, other flags
    (Reverse, "fig2", dict(gru=POWERS[:4], lstm=POWERS[3:], s4d=POWERS[3:]), TWO, {}),
    (Reverse, "fig3", dict(gru=[64], lstm=[1024], s4d=[2048]), TWO, dict(dual_freq=True, held_out=4096)),
    (Reverse, "fig11", LARGEST, TWO, dict(min_length=32)),
    (Reverse, "fig12", LARGEST, ["none", "dup", "sin"], {}),
    (Reverse, "fig13", LARGEST, ["none", *TABLES], {}),
    (Reverse, "fig14", LARGEST, ["none", *TABLES], dict(min_length=32)),
    (Sort, "fig8", dict(gru=POWERS[:4], lstm=POWERS[3:]), TWO, {}),
    (Sort, "fig12", LARGEST, ["none", "dup", "sin"], {}),
    (DelayedAddition, "fig7-gru", dict(gru=[896]), TWO, dict(length=16, iterations=600_000)),
    (DelayedAddition, "fig7", dict(lstm=[896, 960, 1024, 1088]), TWO, dict(length=16, iterations=600_000)),
    (Predecessor, "fig10", dict(lstm=[512, 640, 768, 896, 1024]), TWO, dict(length=16)),
]
TRAINING = dict(length=64, iterations=300_000, batch=512, hidden=512, embed=512, lr=1e-3, warmup=1000)
TRAINING |= dict(clip=1.0, beta1=0.9, beta2=0.999, eps=1e-8, held_out=1024, snapshot_every=0)
TRAINING |= dict(combine="concat", encode="both", bands="0:1", no_conv=False, rotate=False, slow=False)


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


def test_chance_is_the_best_answer_without_memory():
    for vocab, length in ((2, 1), (3, 4), (5, 3)):
        rows = np.sort(list(itertools.product(range(vocab), repeat=length)), axis=1)
        most = [np.bincount(place).max() / len(rows) for place in rows.T]
        close(Sort.figures["fig8"].chance(vocab, length), np.mean(most), 1e-12)
    assert claims.uniform_chance(5, 3) == 1 / 5
    before = Counter(x for x, y in itertools.permutations(range(5), 2) if y == 3)  # the query is 3
    assert Predecessor.figures["fig10"].chance(5, 2) == max(before.values()) / before.total()


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
    found = paper(lm_wikitext.WikiText, "table1")
    assert sorted((a.pe, a.seed) for a in found) == [(pe, seed) for pe in TWO for seed in range(5)]
    wanted = TRAINING | dict(model="lstm", vocab=32768, length=1024, iterations=30_000)
    assert all(vars(a)[k] == wanted[k] for a in found for k in wanted.keys() & vars(a).keys())
    more = [(a.model, a.pe, a.vocab, a.iterations, a.batch, a.seed) for a in paper(Reverse, "section4.1")]
    sizes = [(300_000, 512), (600_000, 512), (300_000, 1024)]
    largest = [("gru", "none", 256), ("lstm", "none", 16384), ("s4d", "none", 16384)]
    cells = itertools.product(largest, sizes, range(5))
    assert sorted(more) == sorted((*cell, *size, seed) for cell, size, seed in cells)


# -- stability.py, held to the Jacobian of the model's own forward pass; bench.py ----------------------------


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
    for kind, (pe, n, t, *how) in itertools.product(PAPERS, cases):
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


def test_stability_where_gradients_vanish():
    for kind, rows in itertools.product(("lstm", "s4d"), (5, 11)):
        model, a, _, target = case = some(kind, "sin")
        shut = model.layer.mix.bias[11:] if kind == "s4d" else model.layer.bias_ih_l0[33:]
        shut.data[:rows] = -1e4  # so many of the 11 outputs do not depend on the state at all
        assert (jacobian(model, a[0], target)[:rows] == 0).all()
        assert (stability.stability(*case) - (plain_stability(*case) if rows < 11 else 0)).abs().max() < 1e-10
    for kind, length, shut in (("gru", 64, 0), ("lstm", 128, 0), ("lstm", 4, 7)):
        torch.manual_seed(1)
        model = common.Model(kind, "none", 16, 32, 64)
        model.layer.bias_ih_l0.data[:128] -= shut  # nearly closed input and forget gates
        pairs = stability.draw_pairs(1, 16, length, 1, 1)
        close(stability.stability(model, *pairs, 1), stability.stability(model.double(), *pairs, 1), 1e-4)


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
    smoke, saved = "--scale smoke --model s4d --seed 3 --pairs 8", lambda: read_json(path)["by_condition"]
    evaluated = lambda words: command(words, Stability)[1].count("\niteration ")
    with workplace(), no_pictures():
        folder = (task := task_of(smoke, Stability)).folder
        path, again = folder / "stability.json", "again" / folder.relative_to("runs")
        ends(0, f"{smoke} --train", task=Stability)
        ends(0, "--scale smoke --model s4d --seed 3 --dual-freq --out again")
        assert outcome(folder) == outcome(again)
        first, model = saved(), common.Model("s4d", "sin", 8, 16, 16, 16).double()
        model.load_state_dict(load(again / "last.pt")["model"])
        wanted = plain_stability(model, *stability.draw_pairs(3, 8, 8, 3, 2), 3).view(4, 2).mean(1)
        close([values["20"] for values in first.values()], wanted, 1e-5)
        (folder / "result.json").rename("kept")
        assert "a trial that is not finished" in command(f"{smoke} --report", Stability)[1]
        Path("kept").rename(folder / "result.json")
        # Snapshots without numbers are evaluated, in fp32; all of them with --overwrite, or after damage.
        fewer = {name: {k: v for k, v in values.items() if k != "10"} for name, values in first.items()}
        files.write_json(path, read_json(path) | {"by_condition": fewer, "device": "another"})
        assert not task.result() and evaluated(f"--trial {folder} --pairs 8") == 1 and task.result()
        (part,) = read_json(path)["earlier"]
        assert saved() == first and part["device"] == "another" and part["until"] == 20
        path.write_text(path.read_text()[:-100])
        for more in ("", " --overwrite", " --overwrite --target 1"):
            assert evaluated(smoke + more) == 10
        refuses("has the numbers of --pairs 8 --target 1: --overwrite replaces them", smoke, Stability)
        assert "left out" in command(f"{smoke} --report", Stability)[1]
        assert evaluated(f"{smoke} --overwrite") == 10
        files.write_json(path, read_json(path) | {"by_condition": fewer})
        assert "lacks 1 snapshots" in (out := command(f"{smoke} --report", Stability)[1]), out
        assert evaluated(smoke) == 1
        out = command(f"{smoke} --report", Stability)[1]
        assert saved() == first and all(f"{values['20']:.4f}" in out for values in first.values()), out


def test_claims_of_figs_3_and_5_read_what_they_say():
    curves = [[0.9, 0.5, 0.3, 0.9], [0.7, 0.4, 0.3, 0.9]]  # by disturbants, at snapshots 5, 10, 20 and 100
    snapshots = [dict(sorted(zip(("5", "10", "20", "100"), curve))) for curve in curves]
    by_snapshot = {c: snapshots[c.endswith("/rare")] for c in reverse.CONDITIONS}
    by_position = {c: [0.1, 0.2, 0.3, 0.4] for c in reverse.CONDITIONS}
    found = Outcome({}, {"by_condition": by_snapshot})
    of = stability.AT_FIRST, stability.AT_LAST, stability.FALL, stability.EVERYWHERE
    close([metric(found) for metric in of], [0.7, 0.9, -0.2, 0.3], 1e-12)
    close([stability.gap(which)(found) for which in (stability.FIRST, np.mean)], [0.2, 0.075], 1e-12)
    found = Outcome({}, {"by_condition": by_position})
    parts = dict(last=1 / 64), dict(first=1 / 4), dict(first=3 / 4), dict(first=1 / 2, last=3 / 4)
    close([reverse.retrieval("rare/rare", **part)(found) for part in parts], [0.1, 0.3, 0.4, 0.3], 1e-12)
    found = Outcome({}, {"token_accuracy": 0.75}, dict(held_out=2, length=4))  # 6 of 8 answers
    close(reverse.log_odds(found), math.log(6.5 / 2.5), 1e-12)
    short = Outcome({}, {"by_condition": {"rare/rare": [0.1, 0.2]}})
    close([reverse.retrieval("rare/rare", **part)(short) for part in parts], [0.1, 0.15, 0.2, 0.2], 1e-12)


def test_stability_refuses_what_it_cannot_use():
    words = "--scale smoke --iterations 5"
    scaled = lambda by: lambda path: torch.save({name: x * by for name, x in load(path).items()}, path)
    other = lambda path: torch.save({"other": 1}, path)
    with workplace():
        ends(0, f"{words} --dual-freq")
        folder = folder_in(".")
        middle, measured = folder / "snapshots/000003.pt", folder / "stability.json"
        snapshots = lambda: [list(values) for values in read_json(measured)["by_condition"].values()]
        whole = middle.read_bytes()
        for spoil in (cut, Path.unlink, other, scaled(math.nan), scaled(1e38)):  # gradients are inf - inf
            spoil(middle)
            ends(2, f"{words} --overwrite", "000003.pt", "trains it anew", task=Stability)
            assert snapshots() == [["1", "2"]] * 4
            middle.write_bytes(whole)
        for damage in ([], {"rare/rare": {}}, {name: {"1": "a"} for name in reverse.CONDITIONS}):
            files.write_json(measured, read_json(measured) | {"by_condition": damage})
            ends(0, words, task=Stability)
            assert snapshots() == [list("12345")] * 4
        for flag in ("--model gru", "--iterations 20", "--seed 0-4"):
            refuses("was trained with --", f"--trial {folder} {flag}", Stability)
        with files.lock(folder / "stability.lock"):
            ends(2, f"{words} --dual-freq --overwrite", "is being evaluated by process")
            ends(trial.RUNNING_ELSEWHERE, words, "is being evaluated by process", task=Stability)


def test_bench():
    run = lambda words: captured(bench.main, shlex.split(words))
    small = "--vocab 9 --batch 5 --length 4 --hidden 6 --embed 6 --warmup 1 --device cpu --only gru-sin-64"
    with workplace():
        printed = run(f"{small} s4d-sin-1024 --repeats 2 --json kept.json")[1]
        assert "s4d-sin-1024, batch 5  plain" in printed and "aten::mm" in run(f"{small} --profile")[1]
        wrong = "--precision bf16", "--no-such-flag", "--seed 0-1", "--hidden 999999999", "--json nowhere/x"
        for flag in wrong:
            code, _, err = run(f"{small} --json kept.json {flag}")
            assert code == 2 and err.count("\n") == 1, (flag, err)
        assert (0, printed) == run("--show kept.json")[:2], "what was measured before is kept"


# -- lm_shakespeare.py ---------------------------------------------------------------------------------------

A_FILE = (HERE / "lm_shakespeare.py").read_bytes()[:16_000]
A_TEXT, CUT = A_FILE.decode(), len(A_FILE.decode()) * 9 // 10  # what is before it is trained on


@contextlib.contextmanager
def library(text=A_FILE):
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
        for parameter in model.parameters():  # large enough for everything to matter
            parameter.data += torch.randn_like(parameter) * 0.3
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


def test_windows_and_initial_weights():
    words = "--scale smoke --width 64 --heads 4 --pe learned --positions 7 --batch 300 --context 5 --seed"
    with library():
        fresh, again, other = (trial_of(f"{words} {seed}", Shakespeare) for seed in (4, 4, 5))
    drawn, same, others = (t.model.embedding.weight for t in (fresh, again, other))
    assert torch.equal(drawn, same) and not torch.equal(drawn, others), "from the seed"
    assert [block.attention.heads for block in fresh.model.blocks] == [4, 4]
    for name, p in fresh.model.named_parameters():
        wanted = torch.tensor([0, 0.02] if p.dim() > 1 else [int(name.endswith("weight")), 0])
        assert (torch.stack([p.mean(), p.std()]) - wanted).abs().max() < 0.003, name
    task, first = fresh.task, fresh.task.training_episode(torch.tensor(1))
    for n, one in ((1, task), (2, task), (1, other.task)):
        assert torch.equal(first.inputs, one.training_episode(n).inputs) == (n == 1 and one is task)
    seen = {(A_TEXT[n : n + 5], A_TEXT[n + 1 : n + 6]) for n in range(CUT - 5)}
    decode = lambda ids: task.tokenizer.decode(ids.tolist())
    assert {(decode(x), decode(y)) for x, y in zip(first.inputs, first.targets)} <= seen
    count = (len(A_TEXT) - CUT - 1) // 5  # perplexity is that of consecutive windows
    logits = fresh.model(task.valid[: 5 * count].view(count, 5)).flatten(0, 1).double()
    metrics = task.evaluate(fresh.model, fresh.engine)
    wanted = F.cross_entropy(logits, task.valid[1 : 5 * count + 1]).exp()
    assert abs(metrics["valid_perplexity"] / wanted - 1) < 1e-5
    spread = [n * (CUT - 6) // (count - 1) for n in range(count)]  # that of as many over the training part
    cut = torch.stack([task.train[n : n + 6] for n in spread])
    wanted = F.cross_entropy(fresh.model(cut[:, :5]).flatten(0, 1).double(), cut[:, 1:].flatten()).exp()
    assert abs(metrics["train_perplexity"] / wanted - 1) < 1e-5


def test_tokenizers():
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

    random = ["".join(np.random.default_rng(seed).choice(list("ab c"), 300)) for seed in range(20)]
    for text in ("aaaaaaaabaaaab", "abc", "a", A_TEXT[:1500], *random):
        tokenizer = lm_shakespeare.Tokenizer("bpe", text)
        wanted = byte_pairs(tokenizer.encode(text).tolist(), len(tokenizer.types))
        tokenizer.learn_pairs(text)
        assert (tokenizer.pairs, tokenizer.encode(text).tolist()) == wanted
    for name in ("char", "bpe"):
        tokenizer, train, valid = lm_shakespeare.tokenized(A_TEXT, name)
        assert (tokenizer.decode(train), tokenizer.decode(valid)) == (A_TEXT[:CUT], A_TEXT[CUT:])
    altered, _, _ = lm_shakespeare.tokenized(A_TEXT[:CUT] + A_TEXT[: CUT - 1 : -1], "bpe")
    assert altered.types == tokenizer.types, "of the training part alone"
    tokenizer, train, valid = lm_shakespeare.tokenized("It's a word_1, a  word!\né", "word")
    assert tokenizer.decode([*train, *valid]) == "It ' s a word_1 , a word ! é" and len(valid) == 1


def test_shakespeare_is_sampled():
    words = "--scale smoke --pe layernorm-learned --lr 0.03 --iterations 150"
    with library() as folder:
        hint, again = (command(words, Shakespeare)[1].splitlines()[-1] for _ in "12")  # trained; done already
        code, said, err = command(hint.split("lm_shakespeare.py ")[1], Shakespeare)
        assert hint == again and code == 0 and said.startswith('"""Tiny') and len(said) == 408, err
        said = command(f"{words} --sample 'The '", Shakespeare)[1]
        refuses("'The €'", f"{words} --sample 'The €'", Shakespeare)
        refuses("--sample does not go", f"{words} --sample 'The ' --all table1", Shakespeare)
        Path("other.txt").write_bytes(A_FILE + b".")
        refuses("was made with other text", f"{words} --data other.txt --seed 0-1", Shakespeare)
        task = task_of(words, Shakespeare, build=True)
        model, drawn = task.model(), task.tokenizer.encode("The ").tolist()
        model.load_state_dict(load(folder_in(folder) / "last.pt")["model"])
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        chances = model(torch.tensor([drawn[-8:]]))[0, -1].double().softmax(0).detach()
        drawn.append(torch.multinomial(chances, 1, generator=generator).item())
    assert said == task.tokenizer.decode(drawn) + "\n"


def test_bad_input_to_lm_shakespeare():
    cases = """--context 9 --positions 8 --pe learned ~ no larger --context
        --positions 8 ~ --positions 8 needs a learned --pe | --width 6 ~ must be even, got 3
        --width 7 --heads 7 --pe sin ~ must be even, got 7 | --context 100000 ~ longer text
        --data data ~ at --data data | --context 1000000000 --batch 100000 ~ GiB of memory
        --heads 3 ~ --heads 3 does not divide --width 16
        --sample ROMEO ~ no trained trial in runs/lm_shakespeare/transformer-rotary-char-T8"""
    cases = [(A_FILE, *case.strip().split(" ~ ")) for case in re.split(r" \| |\n", cases)]
    cases += [(b"\xff\xfe", "", "UTF-8"), (b"ab", "", "longer text"), (b"", "", "longer text")]
    cases.append(("".join(map(chr, range(200, 400))).encode(), "--tokenizer bpe", "the text 200 characters"))
    for text, words, said in cases:
        with library(text):
            refuses(said, f"--scale smoke {words}", Shakespeare)


def test_defaults_and_grids_are_the_documents():
    wanted = dict(pe="rotary", tokenizer="char", layers=6, heads=6, context=256, width=384, batch=32)
    wanted |= dict(lr=1e-4, iterations=1000, clip=0, beta2=0.999, eps=1e-8, seed=0)
    task, other = task_of("", Shakespeare), task_of("--heads 2 --layers 16 --data x.txt", Shakespeare)
    assert wanted.items() <= vars(task.args).items() and {task.rate(i) for i in (1, 500, 1000)} == {1e-4}
    assert str(task.folder) == "runs/lm_shakespeare/transformer-rotary-char-T256/seed0"
    assert other.folder.parent.name == "transformer-rotary-char-T256-heads=2-layers=16"
    counts = {figure: len(grid) / 3 for figure, grid in lm_shakespeare.GRIDS["paper"].items()}
    assert counts == dict(table1=5, heads=7, layers=5, context=3, table2=3, decay=5)


# -- lm_wikitext.py ------------------------------------------------------------------------------------------

SPLITS, SMALL = lm_wikitext.SPLITS, "--scale smoke --data data"  # 40 pieces, 32 targets of a paragraph
LENGTHS = [2, 1, 70, *range(5, 30)]  # a piece is one more than the last, or, a tenth of them, unknown
lm = lambda words="": command(f"{SMALL} {words}", lm_wikitext.WikiText)
PIECES = [[(n * n + j) % 39 + 1 if (n + j) % 10 else 0 for j in range(n)] for n in LENGTHS]


def lm_text(*lines):
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
        np.concatenate(paragraphs).astype("<u2").tofile(folder / f"{split}.tokens")
        np.cumsum([0, *map(len, paragraphs)]).astype("<i8").tofile(folder / f"{split}.ends")
    (folder / "pieces.model").write_bytes(b"")
    (folder / "about.json").unlink(missing_ok=True)
    hashes = {path.name: lm_wikitext.file_sha256(path) for path in folder.iterdir()}
    (folder / "about.json").write_text(json.dumps({"sha256": hashes}))
    return folder


def lm_task(words=""):
    task = task_of(f"{SMALL} {words}", lm_wikitext.WikiText)
    assert task.begin() is None
    task.build(CPU)
    return task


def test_packed_paragraphs_equal_padded_ones():
    rows = [torch.tensor(x[:33]) for x in PIECES]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    targets, real = rows[:, 1:].clamp(min=0), rows[:, 1:] >= 0
    known, as_on_cuda = targets[real] != 0, mock.patch.object(sweeps, "by_operators", lambda *_: False)
    with workplace():
        lm_tokens([[3, 7]])
        none = lm_task().training_episode(1)
        none.known.zero_()
    for kind, pe in [
        *itertools.product(("gru", "lstm"), ("none", "dup", *TABLES)),
        ("lstm", "learned --combine add"),
    ]:
        with workplace():
            lm_tokens()
            task = lm_task(f"--model {kind} --pe {pe} --batch {len(PIECES) - 1}")
        torch.manual_seed(1)
        model, batch = task.model().double(), task.training_episode(1)  # an epoch
        assert len(batch.inputs) == sum(min(n - 1, 32) for n in LENGTHS), "nothing but real targets"
        logits = common.Model.forward(model, rows[:, :-1].clamp(min=0), slice(None))  # (T, B, K)
        losses = F.cross_entropy(logits.permute(1, 2, 0), targets, reduction="none")[real]
        right = (logits.argmax(2).T == targets)[real][known].double().mean()
        wanted = losses[known].mean(), *torch.autograd.grad(losses[known].mean(), model.parameters())
        everything = [x.item() for x in (losses[known].mean().exp(), losses.mean().exp(), right)]
        of_even = lm_wikitext.even(batch, 32, 40)
        assert of_even.sizes.tolist() == [len(PIECES) - 1] * 32, "of few sizes, each of which has a graph"
        for name, patch in (("torch", None), ("fast", None), ("fast", as_on_cuda)):
            engine = ENGINES[name]
            with patch or contextlib.nullcontext():
                for pairs in (of_even, batch):
                    loss, accuracy = task.loss_and_accuracy(model, pairs, engine)
                    for got, want in zip((loss, *torch.autograd.grad(loss, model.parameters())), wanted):
                        close(got, want, 1e-9)
                close((*task.perplexities(model, task.splits["test"], engine), accuracy), everything, 1e-9)
                loss, _ = task.loss_and_accuracy(model, none, engine)
                assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, model.parameters()))


def test_epochs_are_permutations_and_the_unigram_model_by_hand():
    with workplace():

        def epochs(count, batch, iterations):
            lm_tokens([[1, 2]] * count)
            task = lm_task(f"--batch {batch} --seed 3")
            drawn = list(itertools.chain(*(task.chosen(i).tolist() for i in range(1, 1 + iterations))))
            found = [tuple(drawn[n : n + count]) for n in range(0, len(drawn), count)]
            assert all(sorted(epoch) == list(range(count)) for epoch in found), "one was drawn twice or lost"
            return found

        for count, batch in ((7, 3), (7, 7), (3, 10), (1, 4), (50, 1)):
            epochs(count, batch, 9 * count)
        assert_uniform(epochs(4, 4, 2400), 24)
        lm_tokens()
        seen, task = Counter(itertools.chain(*PIECES)), lm_task()
        for n, (name, split) in enumerate(task.splits.items()):  # of other pieces each
            task.splits[name] = split._replace(tokens=(split.tokens + n) % 40)
        targets = [(n + 2) % 40 for x in PIECES for n in x[1:33]]
        shares = [(seen[n] + 1) / (sum(LENGTHS) + 40) for n in targets if n]
        metrics = task.evaluate(model := task.model(), ENGINES["fast"])
        assert abs(metrics["unigram_test_perplexity"] * math.exp(np.mean(np.log(shares))) - 1) < 1e-12
        for name in ("valid", "test"):
            wanted = task.perplexities(model, task.splits[name], ENGINES["fast"])[0]
            assert metrics[f"{name}_perplexity"] == wanted
        assert metrics["valid_perplexity"] != metrics["test_perplexity"] != metrics["unigram_test_perplexity"]
        orders = {tuple(lm_wikitext.shuffled(seed, epoch, 50)) for seed in (0, 1) for epoch in (0, 1)}
        assert len(orders) == 4


def test_language_model_learns_and_notices_another_text():
    notices = lambda more: "not the text of this suite's results" in lm(more)[2]
    words = "--iterations 120 --lr 0.05"
    with workplace() as folder, mock.patch.object(lm_wikitext, "RESULTS", Path("results")):
        lm_tokens()
        assert lm(words)[0] == 0
        _, metrics, _ = outcome(folder_in(folder))
        assert metrics["test_perplexity"] < metrics["unigram_test_perplexity"] / 2
        shutil.copytree(folder_in(folder), "results/lstm-none-K40-L32/seed0")
        assert not notices(words) and not notices("--iterations 1")
        lm_tokens(text="another")
        assert notices(words) and notices("--iterations 2")
        assert not notices("--iterations 3 --vocab 41"), "no result of this vocabulary is committed"
        for more in ("", " --seed 0-1"):  # the first of several would be taken for done
            assert "made with other text: text_sha256" in lm(words + more)[2]


nothing = lambda tokens: None
LM_REFUSED = [  # words, what is done to a text with tokens, what is said
    ("--data elsewhere", nothing, "has no wiki.train.raw, wiki.valid.raw, wiki.test.raw"),
    ("", lambda tokens: lm_text("another"), "python lm_wikitext.py --prepare"),
    ("--model s4d", nothing, "use gru or lstm"),
    ("--batch 1000000000 --hidden 1000000", nothing, "GiB of memory at least"),
    ("", lambda tokens: lm_tokens([[1], [2]]), "no paragraph of train has two pieces"),
    ("", lambda tokens: lm_tokens([[5], [1, 0]]), "all pieces of train to be predicted are unknown"),
    ("", lambda tokens: lm_tokens([[1, 40]]), "train.tokens has piece 40, where the last one is 39"),
    ("", lambda tokens: flip(tokens / "train.tokens"), "is damaged: remove it, and --prepare makes it anew"),
    ("--prepare", lambda tokens: (tokens / "pieces.model").unlink(), "pieces.model'"),
    ("--prepare --all", nothing, "--prepare does not go with --all or a range of seeds"),
]
PREPARE_REFUSED = [  # what SentencePiece is needed for
    ("", lambda tokens: lm_text(" = A = ", "", " "), "wiki.train.raw has no paragraph"),
    ("", lambda tokens: Path("data/wiki.test.raw").write_bytes(b"a\nc\xff\n"), "begins b'c\\xff"),
    ("--vocab 5000", lambda tokens: lm_text("a cat sat"), "lower it, or use --scale quick"),
]


def test_a_text_of_long_lines_is_told():
    for length, told in ((32, False), (500, True)):
        with workplace():
            lm_tokens([np.arange(length) % 40])
            said = captured(lm_task)[2]
            assert ("of 500 training tokens only 32 are predicted" in said) is told, said


def test_language_model_refuses_in_one_line_and_creates_nothing():
    there, cases = importlib.util.find_spec("sentencepiece"), list(LM_REFUSED)
    for words, spoil, said in PREPARE_REFUSED:
        cases.append((f"--prepare {words}", spoil, said if there else "pip install sentencepiece"))
    for words, spoil, said in cases:
        with workplace():
            spoil(lm_tokens())
            refuses(said, f"{SMALL} {words}", lm_wikitext.WikiText)
    if not there:
        raise Skip("but for the refusals of --prepare: SentencePiece is not installed")


def test_tokens_are_those_of_sentencepiece():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("SentencePiece is not installed")
    from sentencepiece import SentencePieceProcessor

    words = "the cat sat on a mat and dogs ran far away from old houses while rain fell , then it stopped"
    kept = [" ".join(words.split()[n:] * (1 + n % 3)) for n in range(20)]
    kept += ["= 3 is a sum", " a cat \u2028 sat \x0b on\r a mat ", " a", " " + "xyx yxy " * 600]
    with workplace() as folder, mock.patch("os.access") as may_write:
        lm_text(" = Heading = ", "", *kept, " ", "\r", " = = Sub = = ")
        for may_write.return_value, place in ((False, "runs/lm_wikitext"), (True, "data")):
            assert lm("--prepare --vocab 36")[0] == 0
            (model,) = Path(place).glob("tokens-K36-*/pieces.model")
        pieces, found = SentencePieceProcessor(model_file=str(model)), lm_task("--vocab 36").splits["train"]
        wanted = [pieces.encode(x) for x in kept]  # lines above SentencePiece's usual limit too
        assert found.tokens.tolist() == list(itertools.chain(*wanted))
        cut = [found.tokens[s : s + n + 1].tolist() for s, n in zip(found.starts, found.counts)]
        assert cut == [w[:33] for w in wanted if len(w) > 1] and min(map(len, wanted)) == 1
        assert lm("--vocab 36 --iterations 2")[0] == 0
        result = read_json(folder_in(folder) / "result.json")
        assert result["metrics"]["unknown_tokens"]["train"] == sum(w.count(0) for w in wanted)
        assert result["config"]["pieces_sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()


def test_download_is_whole_or_not_at_all():
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as file:
        for split in SPLITS:
            file.writestr(f"wikitext-103-raw/wiki.{split}.raw", f"{split} text")
    whole, cut_off = packed.getvalue(), dict(side_effect=http.client.IncompleteRead(b"<html>"))
    contents = {"another file": b"<html>", "CRC": whole.replace(b"n text", b"N text"), "no tokens yet": whole}
    with workplace() as folder:
        archive, parked = folder / "archive", folder / "parked"
        with mock.patch("urllib.request.urlopen", **cut_off):
            refuses("IncompleteRead", f"{SMALL} --download", lm_wikitext.WikiText)
        for said, content in contents.items():
            archive.write_bytes(content)
            parked.write_bytes(b"<html>")
            addresses = ["file:nowhere", parked.as_uri(), archive.as_uri()]
            with mock.patch.object(lm_wikitext, "ADDRESSES", addresses):
                code, _, err = lm("--download")
            assert code == 2 and err.count("\n") == 1 and said in err, err
            assert content == whole or not list(folder.rglob("*.*"))
        assert all(Path(f"data/wiki.{split}.raw").read_text() == f"{split} text" for split in SPLITS)
        with mock.patch.object(lm_shakespeare, "ADDRESS", archive.as_uri()):
            refuses("another file", "--scale smoke --data text --download", Shakespeare)


# -- slurm_array.sh, the house and the README ----------------------------------------------------------------


def test_an_element_of_a_job_array_runs_its_trial_or_nothing():
    """With a made-up `python`: --list prints what the file `line` holds, a trial its flags."""
    good, script = "python reverse.py --out 'a  b' --seed 3", ["bash", HERE / "slurm_array.sh"]
    script += ["reverse.py", "fig2"]
    lines = ("", "b' --seed 0", "touch x", "python other.py", "python reverse.py.x", "python reverse.py 'a")
    cases = [*((line, "1") for line in lines), *((good, x) for x in ("-1", "abc", "", "0x0", "2", "9" * 30))]
    cases.append((good, "1", "--overwrite"))
    with workplace() as folder:
        Path("python").write_text('#!/bin/sh\n[ "$2" = --list ] && exec cat line\nprintf "<%s>" ran "$@"')
        Path("python").chmod(0o755)
        env = os.environ | dict(SLURM_ARRAY_JOB_ID="7", PYTHON="python")
        env["PATH"] = f"{folder}:{env['PATH']}"
        for line, index, *more in [(good, "1"), *cases]:
            Path("line").write_text(f"python reverse.py --seed 0\n{line}")
            env |= {"SLURM_ARRAY_TASK_ID": index}
            done = subprocess.run([*script, *more], env=env, capture_output=True, text=True, check=False)
            bad = (line, index, *more) in cases
            wanted = (2, "") if bad else (0, "<ran><reverse.py><--out><a  b><--seed><3>")
            assert (done.returncode, done.stdout) == wanted, (line, index, done)
            assert bad == ("slurm_array.sh: error: " in done.stderr), (line, index, done)


FLOORS = """report | stability bench | reverse sort delayed_add predecessor lm_wikitext lm_shakespeare
    | beyond suite.cli | suite.trial suite.flags suite.tables | suite.task suite.machine suite.fetch
    suite.drawing | suite.files suite.fast suite.claims | suite.scan suite.sweeps | common suite.compiling
    suite.progress suite.graphs | suite"""
OURS = set(FLOORS.replace("|", " ").split())  # scripts that a user has added are above them all


def test_imports_run_down_only_and_stand_at_the_top():
    """Who imports stands above what is imported; optional packages alone are imported inside a function."""
    floors = enumerate(FLOORS.split("|"))
    floor = {name: n for n, names in floors for name in names.split()}
    paths = [path for path in (*HERE.glob("*.py"), *HERE.glob("suite/*.py")) if path.name != "test_all.py"]
    name_of = lambda path: ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")
    there = set(map(name_of, paths))
    assert floor.keys() <= there and not [name for name in there - OURS if name.startswith("suite")]
    for path in paths:
        tree = ast.parse(path.read_text())
        inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"suite.{name}" for name in names] if node.module == "suite" else [node.module]
            for name in names:
                below = floor.get(name, 99) > floor.get(name_of(path), -1)
                assert below, f"{path.name} imports {name}, which does not stand below it"
                optional = name.split(".")[0] in ("matplotlib", "sentencepiece") or name.startswith("torch.")
                assert node not in inside or optional, f"{path.name} imports {name} inside a function"


def test_readme_task_runs():
    """The README's example of a task, as somebody would try it."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with workplace():
        Path("echo.py").write_text(code)
        small = "--scale quick --iterations 20 --batch 8 --hidden 16 --embed 16 --seed 0 --device cpu"
        code, out, err = process(["echo.py", *small.split(), "--all", "echo"])
        assert code == 0 and "2 of 2 trials finished" in out, err
        assert len(list(Path().glob("runs/echo/lstm-*/seed0/result.json"))) == 2
        shutil.copy("echo.py", "backwards.py")
        code, _, err = process(["backwards.py", "--list"])
        assert code == 2 and "would be taken for echo.py's" in err, err
        Path("alias.py").symlink_to("echo.py")
        imported = ["-c", "import echo; raise SystemExit(echo.cli.main(echo.Echo))"]
        assert [process([*words, "--list"])[0] for words in (["alias.py"], imported)] == [0, 0]


MORE = """
from suite import cli
from suite.claims import ACCURACY, Figure
from suite.flags import SMOKE, cross

from reverse import Reverse

class More(Reverse):
    name, trials_of, claims = "more", "reverse", ()
    scales = {"paper": {}, "mine": SMOKE | dict(length=6, vocab=8, held_out=16, iterations=2)}
    grids = {"mine": {"vary": cross(pe="none", model="gru", min_length=4, seed=range(1))}}
    figures = {"vary": Figure("Lengths", ACCURACY, "pe")}

raise SystemExit(cli.main(More))
"""


def test_a_script_that_hides_a_module_of_pythons():
    with workplace():
        Path("suite").symlink_to(HERE / "suite")
        for name in ("mine.py", "copy.py"):
            Path(name).touch()
            code, _, err = process(["-S", "-c", "import suite"])
            hides = name == "copy.py"
            assert (code, "copy.py has the name of a module of Python's" in err) == (hides, hides), err


def test_a_trained_model_in_a_program_of_ones_own():
    """As suite/trial.py says, of a smaller trial; it gives the trial's own metrics."""
    code = textwrap.dedent(trial.__doc__.split("one's own:")[1]).replace("quick", "smoke")
    with workplace():
        ends(0, "--scale smoke")
        exec(code, names := dict(Reverse=Reverse, flags=suite.flags, trial=trial))  # noqa: S102 - our own
        task = names["task"]
        task.build(CPU)
        assert task.evaluate(names["model"], ENGINES["torch"]) == outcome(task.folder)[1]


def test_more_grids_of_a_task():
    with workplace():
        Path("more.py").write_text(MORE)
        code, out, err = process(["more.py", "--scale", "mine", "--all", "vary", "--device", "cpu"])
        assert code == 0 and "1 of 1 trials finished" in out, (out, err)
        assert list(Path().glob("runs/reverse/gru-none-K8-L6-*min-length=4*/seed0/result.json"))


def test_readme_commands_run():
    scripts, cannot = {f"{task.name}.py": task for task in report.TASKS}, ["test_all.py"]
    lines = "\n".join(re.findall(r"```\n(.*?)```", README, re.DOTALL)).splitlines()
    lines = [line.split("#")[0].split("&&")[-1].strip() for line in lines]
    commands = [shlex.split(line)[1:] for line in dict.fromkeys(lines) if line.startswith("python ")]
    ours = {script for script in scripts if Path(script).stem in OURS}
    assert len(commands) >= 10 and {words[0] for words in commands} >= {"test_all.py", "report.py", *ours}
    if not importlib.util.find_spec("sentencepiece"):
        cannot.append("lm_wikitext.py")
    letters = "".join(f"{'abcdefghij'[n % 10] * (n % 7)} The cat {n} sat on a mat\n" for n in range(400))
    known = hashlib.sha256(letters.encode()).hexdigest()
    with library(letters.encode()), mock.patch.object(lm_shakespeare, "SHA256", known), no_pictures():
        Path("data/wikitext-103-raw").mkdir()
        for split in SPLITS:
            Path(f"data/wikitext-103-raw/wiki.{split}.raw").write_text(letters)
        for script, *words in (words for words in commands if words[0] not in cannot):
            if "--scale" in words:
                del words[words.index("--scale") : words.index("--scale") + 2]
            words += ["--scale", "smoke"]
            if "--all" in words:
                words += ["--pe", "sin", "--device", "cpu"] + ["--vocab", "8"] * ("lm_s" not in script)
            run = report.main if script == "report.py" else functools.partial(cli.main, scripts[script])
            code, _, err = captured(run, words)
            assert code == 0, (script, words, code, err)
    if "lm_wikitext.py" in cannot:
        raise Skip("but for lm_wikitext.py's commands: SentencePiece is not installed")


def test_readme_names_every_file_at_the_top():
    table = README.split("## Where to look")[1].split("\n## ")[0]
    others = {path.name for path in HERE.iterdir() if path.suffix in (".sh", ".md", ".npz", ".cff")}
    ours = {f"{name}.py" for name in OURS - {"suite"} if "." not in name} | {"test_all.py"}
    for name in ours | others - {"README.md"}:
        assert f"`{name}`" in table, name


def test_readme_answers_are_those_of_the_committed_results():
    bold = r"\| \*\*.*\| (\w+) \| (\w+) \| .*difference (\S+) \[(\S+), (\S+)\].*(p . [\d.]+)"
    rounded = lambda d, low, high, p: f"{float(d):+.2f} [{float(low):+.2f}, {float(high):+.2f}], {p}"
    rows = re.findall(bold, (HERE / "RESULTS.md").read_text())
    claimed = iter([(scale, word, rounded(*numbers)) for scale, word, *numbers in rows])
    answers = re.findall(r"\| [^|]*\?[^|]* \| (\w+)[^|]* \| (\w+) \| (.*?) \|", README)
    assert len(answers) >= 5
    for answer in answers:
        assert answer in claimed, f"{answer} is not among the primary claims of RESULTS.md, in their order"


def test_readme_accuracies_are_those_of_the_committed_results():
    """Its first table: every mean, its five seeds, and bold where that help is a verdict."""
    page, cells = (HERE / "RESULTS.md").read_text(), lambda line: [x.strip() for x in line.split("|")[1:-1]]
    heading, _, *rows = re.search(r"\| token accuracy.*?(?=\n\n)", README, re.DOTALL)[0].splitlines()
    assert re.findall(r"`(\w+)`", heading) == ["none", "constant", "sin"] * 2 and len(rows) == 9
    parts = [
        page.split(f"### reverse.py {name}, desk scale")[1].split("\n### ")[0]
        for name in ("fig2-short", "fig2-short-twice")
    ]
    for name, *shown in map(cells, rows):
        model, vocab = re.fullmatch(r"(GRU|LSTM|S4D), K = (\d+)", name).groups()
        for part, (none, constant, sin) in zip(parts, (shown[:3], shown[3:])):
            for pe, cell in (("none", none), ("constant", constant), ("sin", sin)):
                row = rf"^{model.lower()} +{pe} +{vocab} +\S+ +\S+ +(\S+) +\[.*?\] +(\d)"
                found = re.findall(row, part, re.MULTILINE)
                assert bool(found) is bool(cell), (name, pe)
                if found:
                    digits, (mean, n) = cell.strip("*"), found[0]
                    assert abs(float(digits) - float(mean)) <= 0.51 * 10 ** -len(digits.split(".")[1]), cell
                    assert int(n) == 5, (name, pe)
            word = re.findall(rf"^(\w+): the encoding helps {model} at K = {vocab}\b", part, re.MULTILINE)
            assert sin.startswith("**") is (word == [YES]), (name, word)


# -- CUDA: what needs a card ---------------------------------------------------------------------------------


def with_card(*words):
    """Python in a process that sees the cards, if any -> (exit code, what it printed)."""
    there = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | CARDS
    with mock.patch.dict(os.environ, there, clear=True):
        code, *said = process(words)
    return code, "".join(said)


has_card = functools.cache(lambda: with_card("-c", "import torch; assert torch.cuda.is_available()")[0] == 0)


def on_card(test):
    """A test that needs a card, and is skipped without one; all others are on a CPU everywhere."""

    @functools.wraps(test)
    def run():
        if not has_card():
            raise Skip("no CUDA device")
        code, said = with_card(__file__, "--on-card", test.__name__)
        assert code == 0, f"exit code {code}: {said}"

    return run


WAYS = ["", "--no-graph", "--engine torch", "--precision fp32", "--precision bf16"]
WAYS += ["--deterministic", "--deterministic --log-every 50"]
CARD = {f"reverse.py --seed 0-2 --model {model}": WAYS for model in PAPERS}  # {command: its ways on the card}
CARD |= {f"reverse.py --min-length 4 --model {model}": ["", "--no-graph"] for model in PAPERS}
CARD |= {"delayed_add.py": [""], "predecessor.py --model gru": [""]}
# These are less stable, or were not tried: tf32 alone may move them by 0.01 and more.
NEW = "--model mingru", "--model mamba", "--model mamba --rotate", "--model mamba --no-conv --rotate"
FP32 = [f"--precision fp32{more}" for more in ("", " --no-graph", " --deterministic")]
CARD |= {f"reverse.py {model}": [*FP32, "--precision bf16"] for model in NEW}
CARD |= {f"stability.py --held-out 160 --train --model {model}": ["--precision fp32"] for model in PAPERS}
CARD |= {"sort.py": ["--precision fp32"], "lm_shakespeare.py": ["--precision fp32"]}
CARD |= {"lm_wikitext.py --data data": ["", "--no-graph", "--engine torch"]}


@on_card
def test_cuda_batches():
    for drawn in (lambda draw: draw, functools.partial(torch.compile, dynamic=False)):
        test_a_batch_depends_on_the_seed_and_the_iteration_alone(torch.device("cuda"), drawn)


def run_script(words, out):
    script, *words = shlex.split(f"{words} --out {out}")
    code, _, err = process([HERE / script, *words])
    assert code == 0, (script, words, err)


def losses_below(out, graph):
    """{trial or condition: its cross-entropy, or stability at the last snapshot}; nothing has fallen back."""
    found = {}
    for path in Path(out).rglob("result.json"):
        content = read_json(path)
        assert content["compile_fault"] is None and content["graph"] == graph, (path, content)
        metrics = content["metrics"]
        perplexity = metrics.get("test_perplexity", metrics.get("valid_perplexity"))
        found[path.parent.name] = math.log(perplexity) if perplexity else metrics["cross_entropy"]
    for path in Path(out).rglob("stability.json"):
        by_condition = read_json(path)["by_condition"]
        found |= {condition: values[max(values, key=int)] for condition, values in by_condition.items()}
    return found


@on_card
def test_cuda_trials_are_the_cpus():
    flags = "--scale smoke --iterations 300 --batch 64 --lr 0.01"

    def losses(case):
        (command, where, way), out = case, re.sub(r"\W+", "-", " ".join(case))
        try:
            run_script(f"{command} {flags} --device {where} {way}", out)
            return losses_below(out, where == "cuda" and "--no-graph" not in way)
        except AssertionError as error:
            return str(error)

    there = [(command, "cuda", way) for command, ways in CARD.items() for way in ways]
    cases = [*((command, "cpu", "") for command in CARD), *there]
    with library(), ThreadPoolExecutor(min(8, machine.cores())) as pool:
        lm_tokens()
        found = dict(zip(cases, pool.map(losses, cases)))
    # All that is wrong, since a card is dear
    wrong = [(case, got) for case, got in found.items() if isinstance(got, str)]
    for case in there:
        command, _, way = case
        wanted, got = found[command, "cpu", ""], found[case]
        if isinstance(wanted, str) or isinstance(got, str):
            continue
        if len(wanted) < 1 + 2 * ("0-2" in command) or wanted.keys() != got.keys():
            wrong.append((case, wanted, got))
            continue
        bound = 0.03 if "bf16" in way else 0.01  # rounding of 1e-3 in all weights moves it by 0.002
        wrong += [(case, name, got[name], x) for name, x in wanted.items() if not abs(got[name] - x) < bound]
    for command in (command for command, ways in CARD.items() if ways is WAYS):
        one, two = (found[command, "cuda", way] for way in WAYS[-2:])
        wrong += [(command, "--deterministic", one, two)] * (one != two)
    assert not wrong, "\n".join(map(str, wrong))


@on_card
def test_cuda_gradients_are_those_of_double_precision():
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    kinds = [(kind, None) for kind in MODELS] + [("mamba", dict(conv=False, rotate=True))]
    for (kind, for_layer), vocab in itertools.product(kinds, (300, 2000)):
        rows = 64 if kind == "mamba" else 250  # from some 3,000 integers on CUDA sums by other kernels
        tokens = torch.randint(vocab, (rows, 16))
        inputs = torch.cat([tokens, torch.full_like(tokens, vocab)], 1)
        parts = dict(inputs=inputs, targets=tokens.flip(1))
        model = common.Model(kind, "sin", vocab, 512, 512, 32, for_layer).double()
        wanted = gradients(model, common.Episode(**parts, steps=slice(16, 32)), ENGINES["torch"])
        there = {name: x.cuda() for name, x in parts.items()}
        episode = common.Episode(**there, steps=slice(16, 32), commands=16)
        model.zero_grad()  # else .cuda() would take along the gradients that are wanted
        model.float().cuda()
        for compiled in (False, suite.compiling.compile_fault("cuda") is None):
            with mock.patch.object(fast, "CUDA_CHUNK", 2**18):  # several chunks, of which the last is smaller
                loss, _, found = gradients(model, episode, machine.Engine("fast", compiled))
            close(loss.cpu(), wanted[0], 1e-5)
            for name, gradient in wanted[2].items():
                error = (found[name].cpu().double() - gradient).norm() / gradient.norm()
                assert error < 1e-4, (kind, compiled, name, error)


@on_card
def test_cuda_kernel_of_s4d_keeps_its_precision():
    layer = common.S4D(8, 512).double()
    wanted, there = layer.kernel(128), layer.float().cuda()
    for precision, low in (("tf32", False), ("ieee", True)):
        torch.backends.cuda.matmul.fp32_precision = precision
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            close(there.kernel(128).cpu(), wanted, 1e-5)
            for compiled in (False, True):
                close(fast.kernel(there, compiled, 128).cpu(), wanted, 1e-5)


@on_card
def test_cuda_trial_continues_in_a_new_graph():
    words = "reverse.py --scale smoke --device cuda --engine fast --deterministic --lr 0.01"
    words = f"{words} --save-every 100 --iterations 8000"
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
def test_cuda_out_of_memory_is_one_line():
    code = "from suite import cli; import torch, reverse; torch.cuda.set_per_process_memory_fraction(1e-3)"
    code += "; raise SystemExit(cli.main(reverse.Reverse))"
    with workplace() as folder:
        code, _, err = process(["-c", code, "--device", "cuda", "--batch", "4096"])
        assert code == trial.FAILED and "Traceback" not in err, err
        assert err.splitlines()[-1].startswith("reverse.py: out of memory: lower --batch"), err
        assert not list(folder.rglob("*.pt"))


# ------------------------------------------------------------------------------------------------------------


def main(words):
    if not __debug__:
        print("python -O and PYTHONOPTIMIZE leave out assertions: nothing would be tested", file=sys.stderr)
        return 2
    if words[:1] == ["--fixture"] and len(words) == 2:
        cases = ", ".join(check_fixture(words[1]))
        print(f"logits, loss, gradients and, where given, stability agree: {cases}")
        return 0
    if words[:1] == ["--on-card"] and len(words) == 2 and words[1] in globals():
        globals()[words[1]].__wrapped__()
        return 0
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    counts = Counter(failed=0, passed=0)
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (words and not any(word in name for word in words)):
            continue
        said, start = "passed", time.monotonic()
        try:
            test()
        except Skip as reason:
            said, name = "skipped", f"{name} ({reason})"
        except Exception:  # noqa: BLE001 - any exception is a failure
            said = "failed"
            traceback.print_exc()
        counts[said] += 1
        print(f"{said} {time.monotonic() - start:6.2f} s  {name}", flush=True)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}")
    if not counts.total():
        print(f"no test has {' or '.join(words)} in its name", file=sys.stderr)
        return 2
    if counts["failed"]:
        return 1
    return 0 if counts["passed"] else 77  # nothing was tested


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
