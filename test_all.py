"""Everything, small.

    python test_all.py           # all tests
    python test_all.py NAME ...  # those with one of these in their names
    python test_all.py cuda      # a GPU against the CPU

Numbers are compared with an independent way to get them. What README.md promises of signals,
kills, files, flags and exit codes is tested by processes: children are forked from this one, so
that they start at once. Every test has a new folder of its own, and is in it.
"""

import argparse
import contextlib
import csv
import fcntl
import functools
import importlib.util
import io
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import chain, cycle, permutations, product
from pathlib import Path
from unittest import SkipTest, mock

import numpy as np
import torch
import torch.nn.functional as F

import bench
import beyond
import common
import dual_frequency
import lm_shakespeare
import lm_wikitext
import report
import stability
from delayed_add import DelayedAddition
from dual_frequency import DualFrequency
from lm_shakespeare import Shakespeare
from lm_wikitext import WikiText
from predecessor import Predecessor
from rarity import Rarity
from reverse import Reverse
from sort import Sort
from stability import Stability
from suite import (
    cli,
    files,
    jobs,
    machine,
    plots,
    rnn_kernels,
    statistics,
    tables,
    training,
)
from suite.figures import (
    AREA,
    BUDGET,
    K95,
    WITH_CONSTANT,
    Claim,
    Contrast,
    Figure,
    Measure,
    Result,
    as_measure,
    cross,
    measurements,
    select,
)
from variable_length import VariableLength

HERE = Path(__file__).resolve().parent
README = (HERE / "README.md").read_text()
CPU = torch.device("cpu")
SMOKE = "--scale smoke --device cpu"
TINY = "--model gru --vocab 8 --iterations 9 --batch 8 --hidden 8 --embed 8"
BATTERY = [  # tasks, each with flags
    (Reverse, ""),
    (VariableLength, "--min-length 3"),
    (DualFrequency, ""),
    (Sort, ""),
    (DelayedAddition, ""),
    (Predecessor, ""),
    (Rarity, "--meanings 2"),
]
PAPERS = "gru", "lstm", "s4d"
TABLES = "sin", "random", "learned"
CLOCKS = *TABLES, "constant", "ramp", "counter", "shuffled"
PLAIN, FAST = machine.Engine("torch"), machine.Engine("fast")
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that are started here
WITH_GPUS = dict(os.environ)
if "--on-gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else forking would fail


# -- Command lines, in this process or in others
@contextlib.contextmanager
def workplace():
    """A new folder, and the current one for a while."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def ends(wanted, words, task=Reverse):
    """The command line ends with this exit code and, unless that is 0, one line on stderr.

    Returns all that it says. `task` may also be the module `report`.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["", *shlex.split(words)]),
        mock.patch.object(signal, "signal"),  # this process keeps its handlers
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = report.main() if task is report else cli.main(task)
        except SystemExit as stop:
            code = stop.code
    out, err = out.getvalue(), err.getvalue()
    assert code == wanted and err.count("\n") == (wanted != 0), (words, code, out, err)
    return out + err


def refuses(words, task=Reverse):
    """One line, exit code 2, and nothing is created or changed."""
    before = read_files()
    said = ends(2, words, task)
    assert read_files() == before and "usage:" not in said, (words, said)
    return said


def fork(words, task=Reverse, before=None):
    """The command line in a child process, which calls `before` first.

    What it says is added to the files stdout and stderr.
    """
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:  # whatever happens, a child must never return into the tests
        for number, name in (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        for number in SIGNALS:  # under nohup and in the background, too
            signal.signal(number, signal.SIG_DFL)
        if before:
            before()
        sys.argv[1:] = shlex.split(words)
        code = cli.main(task)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def child_ends(wanted, words, task=Reverse, before=None):
    """As `ends`, in a child process. Returns what it says on stderr."""
    Path("stderr").unlink(missing_ok=True)
    code = wait(fork(words, task, before))
    said = Path("stderr").read_text()
    assert code == wanted and "Traceback" not in said, (words, code, said)
    return said


def wait(child):
    """Its exit code; -9 where signal 9 has ended it."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def wait_for(condition):
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def process(*words):
    """Python with these words -> (exit code, what it printed, what it said on stderr)"""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def task_of(words="", task=Reverse, build=False):
    """The task of a command line, with its data if wanted."""
    found = cli.parse_task(task, shlex.split(words))
    if build:
        found.setup()
        found.build(CPU)
    return found


# -- What trials leave
def read_files():
    """{path: content}; of a folder False."""
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def read_checkpoints():
    """{path: content}, with the snapshots"""
    return {path: path.read_bytes() for path in Path().rglob("*.pt")}


def folder_in(place="."):
    """The folder of the only trial."""
    (folder,) = Path(place).glob("runs/*/*/seed*")
    return folder


def load(path):
    return files.load(path, CPU)


def load_last():
    """The last checkpoint of the only trial."""
    return load(folder_in() / "last.pt")


def read_json(path):
    return json.loads(Path(path).read_text())


def find_results():
    """The result files of all trials."""
    return list(Path().rglob("result.json"))


def read_curve(folder):
    """curve.csv without its seconds."""
    return np.loadtxt(folder / "curve.csv", delimiter=",", skiprows=1)[:, :-1]


def outcome(folder):
    """What interruptions must not change."""
    weights = {}
    for name, x in load(folder / "last.pt")["model"].items():
        weights[name] = x.numpy().tobytes()
    return weights, read_curve(folder).tolist(), read_json(folder / "result.json")["metrics"]


# -- Assertions on numbers
def gradients(model, batch, engine):
    """-> loss, accuracy, {parameter: its gradient}"""
    model.zero_grad()
    features = engine.features(model, batch)
    loss, accuracy = common.loss_and_accuracy(features, model.readout, batch)
    loss.backward()
    return loss, accuracy, {name: p.grad for name, p in model.named_parameters()}


def close(got, wanted, tolerance):
    """The largest error, relative to the largest number that is wanted."""
    got, wanted = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, wanted))
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error, largest = (got - wanted).abs().max().item(), wanted.abs().max().item()
    assert error <= tolerance * largest, f"error {error:.3g}, largest number {largest:.3g}"


def assert_fair(counts, expected):
    """Pearson's statistic is below a bound that a fair draw passes up to e^-10."""
    free = len(counts) - 1
    statistic = sum((n - mean) ** 2 / mean for n, mean in zip(counts, expected))
    bound = free + 2 * math.sqrt(10 * free) + 20  # Laurent and Massart, 2000
    assert statistic < bound, f"chi-square {statistic:.1f} with {free} degrees of freedom"


def assert_uniform(outcomes, cells):
    counts = Counter(outcomes)
    assert len(counts) == cells, f"{len(counts)} of {cells} outcomes"
    assert_fair(counts.values(), [counts.total() / cells] * cells)


# -- common.py: the released code's numbers, and every part by hand
OURS = {  # name in released_code.npz: ours
    "embedding": "embedding.weight",
    "readout_w": "readout.weight",
    "readout_b": "readout.bias",
    "pe": "encoding.table",
    "w_ih": "layer.weight_ih_l0",
    "w_hh": "layer.weight_hh_l0",
    "b_ih": "layer.bias_ih_l0",
    "b_hh": "layer.bias_hh_l0",
    "in_proj_w": "layer.project.weight",
    "in_proj_b": "layer.project.bias",
    "log_dt": "layer.log_dt",
    "C": "layer.C",
    "log_A_real": "layer.log_A_real",
    "A_imag": "layer.A_imag",
    "D": "layer.D",
    "mix_w": "layer.mix.weight",
    "mix_b": "layer.mix.bias",
}


def check_released_case(kind, pe, theirs):
    vocab, hidden = theirs["readout_w"].shape
    embedding, tokens = theirs["embedding"], theirs["tokens"]
    length = tokens.shape[1] // 2
    model = common.Model(common.LAYERS[kind], pe, vocab, embedding.shape[1], hidden, 2 * length)
    model.to(embedding.dtype)
    model.load_state_dict({OURS[name]: theirs[name] for name in OURS.keys() & theirs.keys()})
    tolerance = 2e-5 if kind == "s4d" else 1e-9  # theirs in float32
    answered = slice(length, 2 * length)
    batch = common.Batch(tokens, tokens[:, :length].flip(1), answered, commands=length)
    for engine in PLAIN, FAST:
        every_step = common.Batch(tokens, None, slice(None))
        logits = model.readout(engine.features(model, every_step)).transpose(0, 1)
        close(logits, theirs["logits"], tolerance)
        loss, _, found = gradients(model, batch, engine)
        close(loss, theirs["loss"], tolerance)
        norm = torch.nn.utils.get_total_norm(list(found.values()))
        close(norm, theirs["grad_norm"], tolerance)
        if kind != "s4d":
            close(found["embedding.weight"], theirs["grad_embedding"], tolerance)
    if "stability" in theirs:
        target = int(theirs.get("stab_prefix", 0)) + 1
        found = stability.stability(model, theirs["stab_a"], theirs["stab_b"], target)
        close(found, theirs["stability"], 1e-4 if kind == "s4d" else tolerance)


def test_released_code_gives_the_same_numbers():
    """With the author's weights: logits, loss, gradients and stability of the author's code."""
    cases = {}  # {case: {name: tensor}}
    for path, numbers in np.load(HERE / "released_code.npz").items():
        case, _, name = path.partition("/")
        cases.setdefault(case, {})[name] = torch.from_numpy(numbers)
    assert len(cases) == 12
    for case, theirs in cases.items():
        check_released_case(*case.split("-"), theirs)


def test_integers_are_those_of_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # from 0 on
    zero = torch.tensor(0)
    assert [x % 2**64 for x in common.random_bits(zero, (3,)).tolist()] == published
    # All committed trials depend on these
    assert common.key(5, 1, 300_000).item() == 6436624988395588352
    assert (common.TRAINING, common.HELD_OUT, common.ANALYSIS) == (1, 2, 3)
    half = task_of("--vocab 2 --length 4 --held-out 8", build=True).held_out.rows
    assert common.hash_rows(half.flatten()).item() == 2819039426430213613


def encoding_of(words, seed=0):
    torch.manual_seed(seed)
    return task_of(f"--vocab 9 --hidden 3 {words}").model().encoding


def waves(steps, size):
    """(steps, size/2) e^(i t / 10000^(2n/size))"""
    t, n = torch.arange(steps)[:, None], torch.arange(size // 2).double()
    return (1j * t / 10000 ** (2 * n / size)).exp()


def test_encodings_by_hand():
    table, by_hand = common.sinusoid(300, 6) * math.sqrt(3), waves(300, 6)
    close(table[:, ::2], by_hand.imag, 1e-12)  # Eq. 1
    close(table[:, 1::2], by_hand.real, 1e-12)  # Eq. 2
    vectors = encoding_of("--embed 6 --pe constant").vectors(22)
    assert torch.equal(vectors, vectors[:1].expand(22, 6))


def test_random_encodings_are_drawn_from_the_seed_and_kept_with_the_weights():
    for pe in "random", "ramp", "shuffled", "constant":
        words = f"--length 8 --embed 6 --pe {pe}"
        encoding, same = encoding_of(words), encoding_of(words)
        assert torch.equal(encoding.table, same.table)
        assert not torch.equal(encoding.table, encoding_of(words, seed=1).table)
        assert list(encoding.state_dict()) == ["table"] and not list(encoding.parameters())


def test_encodings_are_scaled_joined_and_cut():
    """--amplitude, --combine and --encode."""
    tokens = torch.randn(16, 2, 4)
    zeroed = {"both": slice(0), "input": slice(8, 16), "output": slice(8)}
    for pe, combine, encode in product(CLOCKS, ("concat", "add"), zeroed):
        words = f"--length 8 --embed 4 --pe {pe}"
        plain = encoding_of(words).vectors(16).float()
        own_length = 2 if pe == "learned" else 1  # the root of 4
        vectors = plain * 3 / own_length
        if pe not in ("learned", "ramp"):
            close(vectors.norm(dim=1), torch.full((16,), 3.0), 1e-6)
        vectors = vectors[:, None].repeat(1, 2, 1)  # (T, B, E)
        vectors[zeroed[encode]] = 0
        wanted = tokens + vectors if combine == "add" else torch.cat([tokens, vectors], 2)
        encoding = encoding_of(f"{words} --amplitude 3 --combine {combine} --encode {encode}")
        close(encoding.join(tokens), wanted, 1e-6)


def test_bands_keep_a_part_of_the_sinusoid():
    kept = {
        "0:1": [0, 1, 2, 3],
        "0.25:0.75": [1, 2],
        "0.1:1": [1, 2, 3],
    }
    for bands, pairs in kept.items():
        wanted = torch.zeros(12, 4).cdouble()
        wanted[:, pairs] = waves(12, 8)[:, pairs] / math.sqrt(len(pairs)) * 2
        encoding = encoding_of(f"--length 6 --embed 8 --bands {bands} --amplitude 2")
        close(encoding.vectors(12), torch.view_as_real(wanted).flip(2).flatten(1), 1e-6)


def check_layer(layer, by_equations):
    """Outputs at a slice of steps, and at other steps in each row."""
    layer.double()
    for p in layer.parameters():
        p.data += torch.randn_like(p) / 4
    x = torch.randn(7, 2, 3).double()
    everything = by_equations(layer, x)
    close(layer(x, slice(2, 6)), everything[2:6], 1e-10)
    of_rows = torch.stack([everything[[0, 6], 0], everything[[3, 5], 1]], 1)
    close(layer(x, torch.tensor([[0, 6], [3, 5]])), of_rows, 1e-10)


def run_s4d(layer, x, state=0):
    """state <- exp(dt A) state + (exp(dt A) - 1)/A u, y = 2 Re C state + D u

    -> outputs, the last state
    """
    A = torch.complex(-layer.log_A_real.exp(), layer.A_imag)
    C = torch.view_as_complex(layer.C)
    decay = (A * layer.log_dt.exp()[:, None]).exp()
    outputs = []
    for u in layer.project(x):
        state = decay * state + (decay - 1) / A * u[..., None]
        y = 2 * (C * state).sum(-1).real + layer.D * u
        outputs.append(F.glu(layer.mix(F.gelu(y))))
    return torch.stack(outputs), state


def mamba_by_its_recurrence(layer, x):
    """h_t = exp(delta_t A) h_t-1 + delta_t b_t u_t, y_t = c_t h_t + D u_t"""
    u, gate = layer.project(x).chunk(2, 2)  # (T, B, D)
    u = F.pad(u.permute(1, 2, 0), (3, 0))  # of a step and the three before it
    u = F.silu(layer.conv(u)).permute(2, 0, 1)
    delta, b, c = layer.choose(u).split([1, 16, 16], 2)
    delta, A = F.softplus(layer.delta(delta)), -layer.log_A.exp()  # (T, B, D), (D, N)
    state, outputs = torch.zeros(len(b[0]), *A.shape), []
    for t in range(len(u)):
        added = (delta[t] * u[t])[:, :, None] * b[t][:, None]
        state = (delta[t][:, :, None] * A).exp() * state + added
        outputs.append((state * c[t][:, None]).sum(2) + layer.D * u[t])
    return layer.answer(torch.stack(outputs) * F.silu(gate))


def mingru_by_its_recurrence(layer, x):
    """h_t = (1 - z_t) h_t-1 + z_t h~_t"""
    z, candidate = F.linear(x, layer.weight, layer.bias).chunk(2, 2)
    h = [x.new_zeros(2, 5)]
    for t in range(len(x)):
        h.append(torch.lerp(h[t], candidate[t], z[t].sigmoid()))
    return torch.stack(h[1:])


def mamba_stack_by_hand(stack, x):
    """--blocks 2: each block reads a norm of the residual path and adds to it."""
    x = stack.project(x)
    for norm, block in zip(stack.norms, stack.blocks):
        x = x + mamba_by_its_recurrence(block, norm(x))
    return stack.norms[-1](x)


def test_layers_by_their_equations():
    torch.manual_seed(0)
    check_layer(common.S4D(3, 5, order=6), lambda *given: run_s4d(*given)[0])
    check_layer(beyond.Mamba(3, 5), mamba_by_its_recurrence)
    check_layer(common.MinGRU(3, 5), mingru_by_its_recurrence)
    words = "--model mamba --blocks 2 --pe none --vocab 9 --embed 3 --hidden 5"
    check_layer(task_of(words, beyond.Beyond).model().layer, mamba_stack_by_hand)


def test_s4d_begins_as_published():
    torch.manual_seed(0)
    layer = common.S4D(4, 2000)
    steps = torch.linspace(math.log(1e-3), math.log(1e-1), 2000)  # what a fair draw is near to
    close(layer.log_dt.sort().values, steps, 0.02)
    close(layer.log_A_real[7].exp(), [0.5] * 32, 1e-6)
    close(layer.A_imag[7], math.pi * torch.arange(32), 1e-6)


def one_edit_from(x):
    """Strings of 0, 1 and 2 that one edit makes of x."""
    for i in range(len(x) + 1):
        before, rest = x[:i], x[i:]
        yield before + rest[1:]  # deleted
        yield before + rest[1:2] + rest[:1] + rest[2:]  # swapped
        for a in "012":
            yield before + a + rest  # inserted
            yield before + a + rest[1:]  # replaced


def distances_from(start, strings):
    """The least number of edits to each string, breadth first: the unrestricted distance."""
    found, edge = {start: 0}, [start]
    for x in edge:
        for y in one_edit_from(x):
            if y in strings and y not in found:
                found[y] = found[x] + 1
                edge.append(y)
    return found


def letters(strings):
    """(N, L)"""
    return np.array([list(x) for x in strings])


def test_edit_distances_by_search():
    strings = {"".join(x) for n in range(6) for x in product("012", repeat=n)}
    for start in (x for x in strings if len(x) in (1, 2, 4)):
        found = distances_from(start, strings)
        for n in range(1, 5):
            others = [x for x in found if len(x) == n]
            assert len(others) == 3**n
            ours, theirs = letters([start] * len(others)), letters(others)
            got = common.damerau_levenshtein(ours, theirs)
            assert got.tolist() == [found[x] for x in others], start


def is_answer(batch):
    """(B, M) whether an answer counts."""
    if batch.weight is None:
        return torch.ones_like(batch.targets).bool()
    return batch.weight.bool()


def test_metrics_by_hand():
    targets, weight = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    predictions = torch.tensor([[2, 1, 3], [4, 5, 9]])  # two are swapped
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]])
    batch = common.Batch(None, targets, None, weight)
    metrics = common.sequence_metrics(batch, predictions, losses)
    assert list(metrics.values()) == [3 / 5, 1 / 2, 3.0, 1 / 2], metrics


def train_plainly(task, model, clip, rates):
    """With --beta1 0.8 --beta2 0.98 --eps 1e-3, clipped by hand -> the rows of curve.csv"""
    adam = torch.optim.Adam(model.parameters(), betas=(0.8, 0.98), eps=1e-3, foreach=False)
    rows = []
    for i, rate in enumerate(rates, 1):
        loss, accuracy, found = gradients(model, task.training_batch(i), PLAIN)
        rows.append([i, loss.item(), accuracy.item(), rate])
        norm = math.sqrt(sum(g.square().sum().item() for g in found.values()))
        assert norm > 0.1, "clipping does something"
        for g in found.values():
            g.mul_(min(1, clip / (norm + 1e-6)))
        adam.param_groups[0]["lr"] = rate
        adam.step()
    return rows


def test_training_is_plain_adam():
    rates = 0.005, 0.01, 0.0075, 0.0025, 0  # half a cosine after a warm-up of two iterations
    for clip in 0.05, 0:
        words = f"{SMOKE} --model gru --lr 0.01 --clip {clip} --warmup 2 --iterations 5"
        words += " --log-every 1 --beta1 0.8 --beta2 0.98 --eps 1e-3 --seed 3"
        task = task_of(words, build=True)
        torch.manual_seed(3)
        model = task.model()
        rows = train_plainly(task, model, clip or math.inf, rates)  # 0: never
        with workplace():
            ends(0, words)
            weights, found = load_last()["model"], read_curve(folder_in())
        assert np.allclose(found, rows, rtol=1e-5, atol=1e-9)
        for name, p in model.named_parameters():
            assert torch.allclose(p, weights[name], rtol=0, atol=2e-5), name


# -- Data: what is drawn, held out, asked and counted
def check_batches(device, compiled=False):
    for script, flags in BATTERY:
        words = f"--vocab 50 --length 6 --batch 40 {flags}"
        task = task_of(words, script, build=True)
        alike = task_of(f"{words} --model gru --iterations 3 --lr 1", script)  # its data are
        alike.build(device)
        other = task_of(f"{words} --seed 4", script, build=True)
        draw = alike.training_batch
        if compiled:
            draw = torch.compile(draw, dynamic=False)
        batch, again = task.training_batch(7), draw(torch.tensor(7, device=device))
        for x, y in zip(batch, again):
            assert torch.equal(x, y.cpu()) if isinstance(x, torch.Tensor) else x == y
        assert torch.equal(task.held_out.rows, alike.held_out.rows.cpu())
        assert not torch.equal(task.held_out.rows, other.held_out.rows)
        assert not torch.equal(batch.inputs, task.training_batch(8).inputs)
        assert not torch.equal(batch.inputs, other.training_batch(7).inputs)


def test_a_batch_depends_on_the_seed_and_the_iteration_alone():
    check_batches(CPU)


SCARCE = [  # held out is more than a tenth of what there is
    (Reverse, "--vocab 2 --length 4 --held-out 8"),
    (VariableLength, "--vocab 4 --length 4 --held-out 5 --min-length 2"),
    (DualFrequency, "--vocab 4 --length 3 --held-out 12"),
    (Sort, "--vocab 3 --length 3 --held-out 13"),
    (DelayedAddition, "--vocab 2 --length 2 --held-out 6"),
    (Predecessor, "--vocab 4 --length 3 --held-out 16"),
]


def enumerate_rows(task):
    """Every row, and how likely training draws it, relative to the others."""
    K, L = task.vocab, task.length
    if isinstance(task, Predecessor):
        for x in permutations(range(K), L):
            for query in x[1:]:
                yield (*x, query), 1
    elif isinstance(task, VariableLength):
        for n in range(task.args.min_length, L + 1):
            for x in product(range(K), repeat=n):
                yield (*x, *[K] * (L - n)), K**-n
    elif isinstance(task, DualFrequency):
        for x in product(range(K), repeat=L):
            yield x, 7 ** sum(np.less(x, K / 2))
    else:
        width = 2 * L if isinstance(task, DelayedAddition) else L
        for x in product(range(K), repeat=width):
            yield x, 1


def test_held_out_rows_are_never_trained_on_and_all_others_as_likely_as_they_should_be():
    for script, flags in SCARCE:
        task = task_of(f"{flags} --batch 512", script, build=True)
        rows, weights = task.held_out.rows, dict(enumerate_rows(task))
        held_out = set(map(tuple, rows.tolist()))
        assert len(held_out) == len(rows) and held_out < weights.keys()
        probability = sum(weights[row] for row in held_out) / sum(weights.values())
        assert probability > 0.1 and abs(task.probability(rows) - probability) < 1e-12
        with mock.patch.object(task, "make_batch", torch.clone):  # so that a batch is its rows
            trained = torch.cat([task.training_batch(i) for i in range(1, 41)])
            task.held_out.max_redraws = 1  # what it refuses is the fallback row now
            spared = task.training_batch(1)
        assert held_out.isdisjoint(map(tuple, spared.tolist()))
        counts = Counter(map(tuple, trained.tolist()))
        allowed = {row: weight for row, weight in weights.items() if row not in held_out}
        assert counts.keys() <= allowed.keys(), script
        expected = np.array(list(allowed.values())) * counts.total() / sum(allowed.values())
        assert_fair([counts[row] for row in allowed], expected)


def read_batch(batch, b):
    """What row b reads, and {step: what it has to answer there}."""
    read, steps, answers = batch.inputs[b].tolist(), batch.steps, {}
    steps = range(len(read))[steps] if isinstance(steps, slice) else steps[b].tolist()
    assert len(steps) == len(batch.targets[b])
    for m in is_answer(batch)[b].nonzero()[:, 0].tolist():
        answers[steps[m]] = batch.targets[b, m].item()
    return read, answers


def answers_by_hand(script, x):
    """The first answered step, and what is answered from there on; of L = 5."""
    if script is Predecessor:
        return 5, [x[x.index(x[5]) - 1]]
    if script is DelayedAddition:
        return 5, [(x[4 - i] + x[5 + i]) % 10 for i in range(5)]
    if script is Rarity:
        return len(x), [code % 2 for code in reversed(x)]
    return len(x), sorted(x) if script is Sort else x[::-1]


def test_batches_by_brute_force():
    for script, flags in BATTERY:
        task = task_of(f"--vocab 10 --length 5 --held-out 20 {flags}", script, build=True)
        positions = task.positions()
        rows = task.draw(common.key(1), (300,))
        batch = task.make_batch(rows)
        for b, row in enumerate(rows.tolist()):
            x = [integer for integer in row if integer < 10]
            first, answers = answers_by_hand(script, x)
            wanted = x + [10] * (positions - len(x)), dict(enumerate(answers, first))
            assert read_batch(batch, b) == wanted, (script, row)
        assert (batch.inputs[:, positions - batch.commands :] == 10).all()


def check_conditions(task, right, by_condition):
    """Of dual_frequency.py: two rows for each condition and position of the target in turn."""
    close(list(by_condition.values()), right.view(4, 8, 2).mean(2), 1e-6)
    rows, batch = task.held_out.rows.tolist(), task.test_batch()
    for b, (condition, position, _) in enumerate(product(by_condition, range(8), range(2))):
        target, disturbants = condition.split("/")
        x = rows[b]
        assert read_batch(batch, b)[1] == {15 - position: x[position]}
        kinds = ["rare" if integer >= 4 else "frequent" for integer in x]
        assert kinds.pop(position) == target and set(kinds) == {disturbants}


def test_loss_accuracy_and_evaluation_by_hand():
    """From all logits of the held-out set; also by length, or by condition and position."""
    for script, flags in BATTERY:
        task = task_of(f"--scale smoke --held-out 64 --batch 7 {flags}", script, build=True)
        model, batch = task.model(), task.test_batch()
        targets, counts = batch.targets, is_answer(batch)
        logits = model(batch).detach().transpose(0, 1)  # (N, M, K)
        right = (logits.argmax(-1) == targets).double()
        wanted = [F.cross_entropy(logits[counts], targets[counts]), right[counts].mean()]
        close(gradients(model, batch, PLAIN)[:2], wanted, 1e-6)
        metrics = task.evaluate(model, PLAIN)
        accuracy = metrics["accuracy" if script is Predecessor else "token_accuracy"]
        close(accuracy, wanted[1], 1e-12)
        close(metrics["cross_entropy"], wanted[0], 1e-6)
        assert ("by_length" in metrics) == (script is VariableLength)
        for length, accuracy in metrics.get("by_length", {}).items():
            of_length = right[counts.sum(1) == int(length)]
            close(accuracy, of_length[:, : int(length)].mean(), 1e-12)
        if script is DualFrequency:
            check_conditions(task, right, metrics["by_condition"])


# -- The fast engine: the plain models' numbers and gradients
def compare_engines(words, script=Reverse):
    torch.manual_seed(0)
    words = f"--vocab 8 --batch 7 --hidden 10 --embed 6 --held-out 20 {words}"
    task = task_of(words, script, build=True)
    model, batch = task.model().double(), task.training_batch(1)
    logits, answered = model(batch).transpose(0, 1), is_answer(batch)
    loss = F.cross_entropy(logits[answered], batch.targets[answered])
    wanted = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()))
    )
    right = (logits.argmax(-1) == batch.targets)[answered].double().mean()
    for engine in PLAIN, FAST:
        found_loss, accuracy, found = gradients(model, batch, engine)
        close(found_loss, loss, 1e-10)
        close(accuracy, right, 1e-10)
        for name, gradient in wanted.items():
            close(found[name], gradient, 1e-10)
    plain, metrics = (task.evaluate(model, engine) for engine in (PLAIN, FAST))
    close(metrics.pop("cross_entropy"), plain.pop("cross_entropy"), 1e-10)
    assert metrics == plain


def compare_encoding(kind, pe, combine, script, flags):
    words = f"--length 5 --model {kind} --pe {pe} --combine {combine} {flags}"
    if pe in CLOCKS and script not in (Reverse, VariableLength):
        words += " --encode output --amplitude 2"
    if pe == "sin":
        words += " --bands 0.3:1"
    compare_engines(words, script)


def test_engines_agree_with_every_encoding_and_task_and_at_sizes_of_1_to_3():
    encodings = [(pe, "concat") for pe in common.ENCODINGS]
    encodings += [(pe, "add") for pe in CLOCKS]
    tasks = cycle(BATTERY)
    for kind in PAPERS:
        for pe, combine in encodings:
            compare_encoding(kind, pe, combine, *next(tasks))
        for script, flags in BATTERY:
            compare_encoding(kind, "sin", "concat", script, flags)
        for length, batch in product((1, 2, 3), (1, 3)):
            sizes = f"--length {length} --vocab 40 --batch {batch} --hidden 40"
            compare_engines(f"{sizes} --model {kind}")
        compare_engines(f"--length 3 --hidden 1 --model {kind}")  # as W.T is W


def as_on_cuda():
    """The steps that are written for CUDA compute."""
    return mock.patch.object(rnn_kernels, "on_cpu", lambda x: False)


def test_engines_agree_as_cuda_computes_them_and_in_small_chunks():
    patches = [as_on_cuda()]
    patches += [mock.patch.object(common, "chunk_rows", lambda matrix, n=n: n) for n in (1, 6)]
    cases = (VariableLength, "--min-length 3"), (Reverse, "--pe learned"), (Reverse, "")
    for kind, patch, (script, flags) in product(PAPERS, patches, cases):
        with patch:
            compare_engines(f"--length 5 --model {kind} {flags}", script)


def test_an_iteration_never_waits_for_its_device():
    """On the meta device what needs a value raises, and so does what meets tensors of a CPU."""
    meta = torch.device("meta")
    for (script, flags), kind in product(BATTERY, PAPERS):
        task = task_of(f"{SMOKE} --model {kind} {flags}", script, build=True)
        t = training.Training(task, [], CPU, FAST)
        for owner in t, task, task.held_out:
            for name, x in vars(owner).items():
                if isinstance(x, torch.Tensor | torch.nn.Module):
                    setattr(owner, name, x.to(meta))
        t.sums = {name: x.to(meta) for name, x in t.sums.items()}
        t.optimizer = torch.optim.Adam(t.model.parameters(), foreach=False)
        iteration = torch.zeros((), dtype=torch.int64, device=meta)
        t.train_step(task.training_batch(iteration))


# -- One trial: whatever disturbs it, the result is bitwise identical
LONG = f"{SMOKE} --model gru --iterations 60 --save-every 10 --log-every 10 --snapshot-every 15"


@functools.cache
def run_undisturbed():
    """-> the outcome"""
    with workplace():
        child_ends(0, LONG)
        return outcome(folder_in())


def finish(parts):
    """Continue to the end, and compare; `parts`: the iterations earlier processes came to."""
    child_ends(0, LONG)
    folder = folder_in()
    assert outcome(folder) == run_undisturbed()
    assert not (folder / "previous.pt").exists()
    snapshots = sorted(int(path.stem) for path in (folder / "snapshots").iterdir())
    assert snapshots == [15, 30, 45, 60]
    earlier = read_json(folder / "result.json")["earlier"]
    assert [part["until"] for part in earlier] == parts


def task_with_signal(number, at=25, times=1):
    """A task that gets a signal in this iteration, or when it is evaluated."""

    def send(now):
        if now == at:
            for _ in range(times):
                os.kill(os.getpid(), number)

    class Signalled(Reverse):
        def training_batch(self, i):
            send(i)
            return super().training_batch(i)

        def evaluate(self, model, engine):
            send("the end")
            return super().evaluate(model, engine)

    return Signalled


def test_four_signals_save_and_the_same_command_ends_bitwise_identical():
    for number in SIGNALS:
        with workplace():
            said = child_ends(75, f"{LONG} --overwrite", task_with_signal(number))
            assert "the same command without --overwrite continues" in said
            assert load_last()["iteration"] == 25
            said = child_ends(75, LONG, task_with_signal(number, at="the end"))
            assert "the same command continues" in said
            finish([25, 60])


def test_a_second_ctrl_c_ends_at_once():
    child_ends(130, LONG, task_with_signal(signal.SIGINT, times=2))
    assert load_last()["iteration"] == 20


FAKE_TORCH = """
import os, time
receiver = os.getpid() if os.environ["TO"] == "python" else os.getppid()
os.kill(receiver, int(os.environ["SIGNAL"]))
time.sleep(60)
"""


def stop_early(number, words, to):
    """Send a signal to a program while it imports PyTorch -> (exit code, stderr)."""
    Path("torch.py").write_text(FAKE_TORCH)
    Path("scontrol").write_text("#!/bin/sh\necho JobState=CANCELLED")  # nothing to requeue
    Path("scontrol").chmod(0o755)
    here = Path.cwd()
    done = subprocess.run(
        words,
        cwd=HERE,
        env=os.environ
        | dict(PATH=f"{here}:{os.environ['PATH']}", PYTHON=sys.executable, TO=to)
        | dict(PYTHONPATH=str(here), SIGNAL=str(int(number)), SLURM_ARRAY_TASK_ID="0"),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: [signal.signal(x, signal.SIG_DFL) for x in SIGNALS],
    )
    return done.returncode, done.stderr


def test_a_signal_while_pytorch_is_imported_ends_with_75_and_one_line():
    scripts = {task.script() for task in report.TASKS}
    for script, number in zip(sorted(scripts), cycle(SIGNALS)):
        code, err = stop_early(number, [sys.executable, script], "python")
        assert (code, err) == (75, f"{script}: stopped; the same command continues\n")
    for number in SIGNALS:
        words = f"bash slurm_array.sh reverse.py fig2 {SMOKE}".split()
        code, err = stop_early(number, words, "bash")
        assert (code, err) == (75, "reverse.py: stopped; the same command continues\n")


def test_nohup_is_respected():
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    child_ends(0, LONG, task_with_signal(signal.SIGHUP), ignore)


def print_to_nobody(stream):
    """In a child process: both streams fail from now on."""
    if stream == "none at all":
        sys.stdout = sys.stderr = None  # as >&- leaves it
        return
    if stream == "a full log":
        there = os.open("/dev/full", os.O_WRONLY)
    else:
        ours, there = os.openpty() if stream == "a closed terminal" else os.pipe()
        os.close(ours)
    os.dup2(there, 1)
    os.dup2(there, 2)


def test_a_trial_saves_although_nothing_can_be_printed():
    streams = ["none at all", "a closed terminal", "a broken pipe"]
    if Path("/dev/full").exists():
        streams.append("a full log")
    for stream in streams:
        before = functools.partial(print_to_nobody, stream)
        with workplace():
            assert wait(fork(LONG, task_with_signal(signal.SIGHUP), before)) == 75, stream
            assert load_last()["iteration"] == 25
            assert wait(fork(LONG, Reverse, before)) == 0, stream
            assert outcome(folder_in()) == run_undisturbed()


def stall(stream):
    """In a child process: nobody reads what is printed from now on, until it cannot go on."""
    if stream == "a full pipe":
        _, there = os.pipe()
    else:
        _, there = os.openpty()
        termios.tcflow(there, termios.TCOOFF)  # as Ctrl-S does
    os.set_blocking(there, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(there, b"x")
    os.set_blocking(there, True)
    for number in 1, 2:
        os.dup2(there, number)


def test_a_signal_saves_within_a_second_although_the_output_is_stalled():
    for stream in "a full pipe", "a stopped terminal":

        class Stalled(Reverse):
            def training_batch(self, i):
                if i == 25:
                    stall(stream)  # noqa: B023
                return super().training_batch(i)

        with workplace():
            child = fork(LONG, Stalled)
            wait_for(lambda: len(read_checkpoints()) == 3)  # of iterations 10, 15 and 20
            time.sleep(0.5)
            assert load_last()["iteration"] == 20, "it waits"
            os.kill(child, signal.SIGTERM)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)  # nothing to one that has ended
            assert wait(child) == 75, stream
            finish([30])


def test_a_terminal_that_is_not_utf_8_trains():
    with mock.patch.dict(os.environ, PYTHONIOENCODING="ascii", PYTHONUTF8="0"):
        words = f"{HERE}/reverse.py {SMOKE} --iterations 2 --out \u00e9"
        code, out, err = process(*shlex.split(words))
    assert code == 0 and not err and "\\xe9/reverse" in out, (out, err)
    assert Path("\u00e9").is_dir()


def damage(content):
    """The content cut, emptied, or with one bit turned in one of seven places."""
    yield content[:-999]
    yield b""
    for n in range(7):
        at = n * (len(content) - 1) // 6
        yield content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_damaged_checkpoints_are_passed_over_and_never_kept():
    """The last, else the one before, else the start: all lead to the same end."""
    child_ends(75, LONG, task_with_signal(signal.SIGTERM))
    last, previous = folder_in() / "last.pt", folder_in() / "previous.pt"
    whole = last.read_bytes()
    Path("runs").rename("kept")
    for content in damage(whole):
        shutil.copytree("kept", "runs")
        last.write_bytes(content)
        child_ends(75, LONG, task_with_signal(signal.SIGTERM, at=22))
        assert load(previous)["iteration"] == 20 and load(last)["iteration"] == 22
        finish([20, 22])
        shutil.rmtree("runs")
    shutil.copytree("kept", "runs")
    for path in last, previous:
        path.write_bytes(whole[:-999])
    finish([])


def test_a_checkpoint_with_other_content_ends_a_trial_with_1_and_is_kept():
    child_ends(75, LONG, task_with_signal(signal.SIGTERM))
    path, good = folder_in() / "last.pt", load_last()
    for content in (
        [],
        {"model": good["model"]},  # a snapshot
        good | {"processes": []},
        good | {"model": {}},
        good | {"optimizer": good["optimizer"] | {"state": 3}},
        good | {"optimizer": good["optimizer"] | {"state": {0: {"step": torch.ones(())}}}},
        good | {"iteration": "x"},
        good | {"iteration": 10**9},
        good | {"seconds": "x"},
        good | {"rows": [["x"]]},
        good | {"rng_states": []},
        Path(),  # which cannot be loaded
    ):
        files.save(path, content)
        kept = read_checkpoints()
        assert f"{path} cannot be read" in child_ends(1, LONG)
        assert read_checkpoints() == kept
    files.save(path, good)
    finish([25])


def die_at(call):
    """In a child process: it is killed at the n-th open, flush, rename or delete of a file."""
    calls = iter(range(call))

    def counted(function):
        def replacement(*args):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return replacement

    for name in "open", "fsync", "replace", "unlink":
        setattr(os, name, counted(getattr(os, name)))


def test_killed_while_it_writes_and_raced():
    for call in range(0, 100, 6):
        with workplace():
            child = fork(LONG, before=functools.partial(die_at, call))
            assert wait(child) == -signal.SIGKILL
            child_ends(0, LONG)
            assert outcome(folder_in()) == run_undisturbed()
    racing = [fork(LONG), fork(LONG)]
    assert sorted(map(wait, racing)) in ([0, 0], [0, 73])
    assert outcome(folder_in()) == run_undisturbed()


def test_a_trial_that_another_process_runs_is_left_alone():
    words = f"{SMOKE} --iterations 30000 --save-every 100 --log-every 1000"
    child = fork(words)
    wait_for(read_checkpoints)
    ends(73, words)
    ends(73, f"{words} --overwrite")
    assert (folder_in() / "config.json").exists()
    os.kill(child, signal.SIGTERM)
    assert wait(child) == 75


def rename_folder(words, begin_another):
    """A task that loses its folder in iteration 6; another process may finish it anew."""

    class Renamed(Reverse):
        def training_batch(self, i):
            if i == 6:
                self.folder.rename("renamed")
                if begin_another:
                    assert wait(fork(words)) == 0
                    shutil.copytree(self.folder, "theirs")
            return super().training_batch(i)

    return Renamed


def test_a_trial_that_loses_its_folder_ends_with_73_and_touches_no_other_ones_files():
    for flags in "--save-every 10", "--snapshot-every 10", "--log-every 10":
        words = f"{SMOKE} --iterations 30 --save-every 15 --log-every 15 {flags}"
        with workplace():
            said = child_ends(73, words, rename_folder(words, begin_another=True))
            assert said.count("\n") == 1 and "deleted or renamed" in said
            ours = {path.name: path.read_bytes() for path in folder_in().rglob("*.*")}
            kept = {path.name: path.read_bytes() for path in Path("theirs").rglob("*.*")}
            assert ours == kept and "result.json" in kept
    child_ends(73, words, rename_folder(words, begin_another=False))
    assert not list(Path().glob("runs/*/*/*"))


def test_what_is_not_finite_ends_a_trial_with_3():
    # Embeddings that were not read: a step of 0 / 0, and the loss is finite
    ends(3, f"{SMOKE} --vocab 999 --eps 0 --save-every 1")
    assert not read_checkpoints()
    words = f"{SMOKE} --model s4d --lr 1000 --warmup 10 --save-every 1 --snapshot-every 1"
    for _ in range(2):
        ends(3, words)
        kept = read_checkpoints()
        assert kept and not find_results()
        for path in kept:
            assert all(x.isfinite().all() for x in load(path)["model"].values())


def fails(words, before=None):
    """One line, exit code 1, and nothing half written."""
    assert child_ends(1, words, before=before).count("\n") == 1
    assert not list(Path().rglob("*.tmp"))


def fill_disk():
    """No file may be as large as a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))


def test_a_full_disk_or_an_unreadable_file_ends_a_trial_with_1():
    fails(LONG, fill_disk)
    child_ends(75, LONG, task_with_signal(signal.SIGTERM))
    kept = read_checkpoints()
    fails(LONG, fill_disk)
    assert len(kept) == 3 and read_checkpoints() == kept
    last = folder_in() / "last.pt"
    last.rename("elsewhere")
    last.mkdir()  # it cannot be read
    fails(LONG)
    last.rmdir()
    Path("elsewhere").rename(last)
    Path("text").write_bytes(b"\xff")
    ends(1, f"{SMOKE} --data text", Shakespeare)
    finish([25])


def test_out_of_memory_ends_a_trial_with_1():
    if sys.platform != "linux":
        raise SkipTest("no limit on memory")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 2**28

    def limit_memory():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    fails(f"{SMOKE} --batch 100000 --hidden 64", limit_memory)


NAME = "lstm-random-K8-L8-batch=8-embed=16-held-out=32-hidden=16-iterations=20-lr=0.5"


def test_what_a_trial_leaves():
    words = f"{SMOKE} --pe random --lr 0.5"
    ends(0, words, DualFrequency)
    folder, before = folder_in(), read_files()
    assert folder == Path("runs/dual_frequency", NAME, "seed0")
    result = read_json(folder / "result.json")
    assert result["task"] == "dual_frequency" and result["argv"] == words.split()
    assert result["iterations"] == 20 and result["parameters"] == 3480
    assert result["earlier"] == [] and result["torch"] == torch.__version__
    said = ends(0, words, DualFrequency)  # finished: shown, and nothing is touched
    assert read_files() == before and f"{result['metrics']['token_accuracy']:.4g}" in said


def test_a_row_of_the_curve_is_the_mean_since_the_last_one():
    ends(0, SMOKE)
    seldom = read_curve(folder_in())[:, 1:3]
    ends(0, f"{SMOKE} --log-every 1 --overwrite")
    each = read_curve(folder_in())[:, 1:3]
    close(seldom, each.reshape(4, 5, 2).mean(1), 1e-6)


def test_a_terminal_shows_one_line_and_a_log_lines_now_and_then():
    words = f"{SMOKE} --iterations 400"
    ours, theirs = os.openpty()
    child = fork(words, before=functools.partial(os.dup2, theirs, 1))
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(ours, 4096):
            said += part
    assert wait(child) == 0
    assert re.search(rb"\rreverse lstm sin K8 L8 seed 0  \d+%  \S+ left  accuracy ", said)
    assert b"iteration 100/400" not in said
    log = ends(0, f"{words} --overwrite")
    assert "iteration 100/400" in log and "\r" not in log


def test_a_trial_shows_two_of_its_answers():
    said = " ".join(ends(0, SMOKE).split())
    task = task_of(SMOKE, build=True)
    model, batch = task.model(), task.test_batch().rows(slice(-2, None))
    model.load_state_dict(load_last()["model"])
    answers = model(batch).argmax(-1).T  # (2, M)
    for row, wanted in zip(answers.tolist(), batch.targets.tolist()):
        marked = " ".join(f"{x}" if x == y else f"{x}*" for x, y in zip(row, wanted))
        assert f"answered {marked} " in said
    (path,) = find_results()
    path.write_text(json.dumps(read_json(path) | {"examples": [1]}))
    assert "cannot be read" in ends(1, SMOKE)


# -- Flags; many trials
LONG_NAME = """--amplitude 1.23456789 --bands 0.1234:0.9876 --batch 12345 --beta1 0.123456789
    --beta2 0.1234567890123 --clip 1.23456789 --combine add --embed 9998 --encode output
    --eps 0.123456789 --held-out 12345 --hidden 12345 --iterations 12345 --lr 0.1234567890123
    --pe shuffled --warmup 1234"""
REFUSED = {  # after --scale smoke
    Reverse: [
        "--all fig2 --precision bf16",
        "--all fig2 --model lstm --vocab 8 --length 1",
        "--index 0",
        "--x 1",
        "--vocab 1",
        "--vocab 2147483646",
        "--embed 2147483646",
        "--hidden 2147483646",
        "--length 2147483646",
        "--held-out 2147483646",
        "--batch 2147483646",
        "--seed 0-50000000 --list",
        "--jobs 2147483646 --all fig2",
        "--out file",
        "--out file/folder",
        f"--out {'long' * 64}",
        LONG_NAME,
        "--lr nan",
        "--embed 7",
        "--seed 5-3",
        "--seed 0-4",
        "--iterations",
        "--warmup 11 --iterations 10",
        "--vocab 2 --length 3",
        "--vocab 2 --length 3 --held-out 5",
        "--bands 0.51:0.55",
        "--bands 0.5:0.5",
        "--pe counter --embed 3",
        "--model mingru --engine fast",
        "--device cuda",
        "--all fig99",
        "--list fig2 --vocab 31",
    ],
    DualFrequency: [
        "--vocab 15",
        "--held-out 100",
        "--held-out 12 --vocab 2 --length 3",
    ],
    beyond.Beyond: ["--blocks 2", "--model mamba --blocks 2147483646"],
    Shakespeare: ["--layers 2147483646", "--heads 2147483646", "--context 2147483646"],
    Rarity: ["--vocab 8 --meanings 3", "--meanings 16"],
    VariableLength: ["--length 4 --min-length 5", "--encode input"],
    Predecessor: ["--length 1", "--vocab 3", "--length 2000000 --vocab 9000000"],
    Stability: [
        "",  # its trial is not trained
        "--train --target 9",
        "--train --pairs 6",
        "--model mingru",
    ],
}


def test_bad_flags_are_refused_before_anything_is_created():
    Path("file").touch()
    for task, cases in REFUSED.items():
        for words in cases:
            refuses(f"--scale smoke {words}", task)
    refuses(".", report)  # there is no trial
    shutil.copy(HERE / "RESULTS.md", "page.md")
    refuses("--write page.md --out .", report)
    refuses(f"'{HERE}/README.md'", report)
    said = refuses("--vocab 2 --length 4 --model gru --hidden 8")
    assert "only 16 sequences exist" in said and "raise --vocab or --length" in said
    assert "hidden=12345" in refuses(LONG_NAME), "the flags that it has are named"
    for words in "fig99", "--scale huge", "fig2 --lr x", "--scale smoke --vocab 123":
        refuses(f"'{HERE}/reverse.py' {words}", report)


def test_the_papers_size_on_a_cpu_is_refused_unless_it_is_asked_for():
    nothing = {name: lambda *_: 0 for name in ("run_one", "run_many")}
    with mock.patch.multiple(cli, **nothing):
        said = refuses("--all fig2 --model gru")
        for words in "--device cpu", "--iterations 9", "--scale desk":
            ends(0, f"--all fig2 --model gru {words}")
        assert "for a GPU" in ends(0, "--model gru"), "a single trial starts"
        assert "for a GPU" not in ends(0, "--scale quick") + ends(0, "--device cpu")
    assert "40 trials: " in said and "--scale desk or quick" in said and "--device cpu" in said


def test_a_folder_of_other_flags_is_refused():
    ends(0, SMOKE)
    path = folder_in() / "result.json"
    whole = path.read_text()
    (folder_in() / "config.json").write_text("{")  # which is never read
    for old, new in [  # it was edited, or copied from another trial
        ('"lr": 0.001', '"lr": 0.25'),
        ('"bands": "0:1",', ""),
        ('"bands": ', '"new": 1, "bands": '),
        ('"task": "reverse"', '"task": "sort"'),
    ]:
        path.write_text(whole.replace(old, new))
        refuses(SMOKE)
    for bad in "[" * 100_000, '{"config": []}', '{"config": {}, "metrics": {}}', "[]", "null":
        path.write_text(bad)
        ends(1, SMOKE)
    path.write_text(whole.replace('"lr": 0.001', '"lr": 0.25'))
    ends(0, f"{SMOKE} --overwrite")


def test_a_finished_trial_is_evaluated_again():
    words = f"{SMOKE} --model gru"
    refuses(f"{words} --evaluate")
    ends(0, words)
    refuses(f"{words} --evaluate --overwrite")
    path = folder_in() / "result.json"
    before = read_json(path)
    path.write_text(json.dumps(before | {"metrics": {}, "examples": []}))
    ends(0, f"{words} --evaluate")
    after = read_json(path)
    assert after.pop("evaluated")["argv"] == shlex.split(f"{words} --evaluate")
    for name in before.keys() - {"finished", "peak_memory_bytes"}:
        assert after[name] == before[name], name
    assert ends(0, words).count("is finished") == 1
    (folder_in() / "last.pt").write_bytes(b"damaged")
    child = child_ends(1, f"{words} --evaluate")
    assert "no checkpoint of its last iteration" in child


def test_code_that_no_commit_has_makes_a_trial_dirty():
    tracked = subprocess.check_output(["git", "-C", HERE, "ls-files", "-z"], text=True)
    answers = {"status": "", "rev-parse": str(HERE), "ls-files": tracked}
    with mock.patch.object(machine, "git", lambda *words: answers[words[0]]):
        with mock.patch.dict(sys.modules):
            for name in {"mine", "echo"} & sys.modules.keys():  # of other tests
                del sys.modules[name]
            assert machine.is_dirty() is False
            answers["ls-files"] = tracked.replace("suite/machine.py\0", "")
            assert machine.is_dirty() is True, "an imported module is not tracked"
        answers |= {"status": " M common.py", "ls-files": tracked}
        assert machine.is_dirty() is True
        answers["status"] = None
        assert machine.is_dirty() is None, "there is no git"


def test_a_checkpoint_or_a_snapshot_of_another_trial_is_refused():
    words = f"{SMOKE} --pairs 8 --train"
    for seed in 0, 1:
        ends(0, f"{words} --seed {seed}", Stability)
    for path in Path().rglob("000020.pt"):
        shutil.copy(path, path.with_name("copy of 000020.pt"))  # is not one of the trial's
    for name in "000020.pt", "last.pt":
        ours, theirs = sorted(Path().rglob(name))
        kept = ours.read_bytes()
        shutil.copy(theirs, ours)
        said = ends(2, f"{words} --seed 0 --overwrite", Stability)
        assert "seed 1 there, 0 here" in said
        files.save(ours, {"config": 3})
        said = ends(1, f"{words} --seed 0 --overwrite", Stability)
        assert f"{ours} cannot be read" in said
        ours.write_bytes(kept)
        min(find_results()).unlink()  # so that its training has to go on
    ends(0, SMOKE, Sort)
    Path("runs/sort").rename("runs/reverse")
    next(Path("runs/reverse").rglob("result.json")).unlink()
    assert "task sort there, reverse here" in ends(2, SMOKE)


PLUMBING = [
    "--log-every 3",
    "--out x",
    "--precision fp32",
    "--engine torch",
    "--overwrite",
    "--warmup 1000",  # these three are the paper's
    "--amplitude 1",
    "--bands 0:1",
]
SCIENCE = [
    "",
    "--vocab 8",
    "--length 8",
    "--hidden 8",
    "--embed 8",
    "--pe none",
    "--combine add",
    "--encode input",
    "--amplitude 2",
    "--bands 0:0.5",
    "--iterations 9",
    "--batch 9",
    "--held-out 9",
    "--lr 0.1",
    "--warmup 7",
    "--clip 0",
    "--beta1 0",
    "--beta2 0",
    "--eps 1",
    "--precision bf16",
]


def test_folder_names_hold_what_changes_results():
    for words in PLUMBING:
        assert task_of(words).folder.parent.name == "lstm-sin-K16384-L64", words
    names = {task_of(words).folder.parent.name for words in SCIENCE}
    assert len(names) == len(SCIENCE)
    folder = task_of("--min-length 3", VariableLength).folder
    assert folder.parent.name == "lstm-sin-K16384-L64-min-length=3"


def test_codes_that_share_no_answer_are_reversal():
    shared, own = task_of("--vocab 8 --meanings 4", Rarity), task_of("--vocab 8", Rarity)
    plain = task_of("--vocab 8", Reverse)
    assert (own.folder, own.config) == (plain.folder, plain.config)
    assert shared.folder.parent.name == f"{plain.folder.parent.name}-meanings=4"
    for x, y in zip(own.model().parameters(), plain.model().parameters(), strict=True):
        assert x.shape == y.shape
    assert shared.model().readout.out_features == 4


def trials_of(task, figure, scale, *words):
    args, given = cli.parse(task, ["--scale", scale, *words])
    return cli.trials_of_figure(task, args, given, figure)


APPENDIX_A = dict(
    length=64,
    hidden=512,
    embed=512,
    batch=512,
    iterations=300_000,
    held_out=1024,
    lr=1e-3,
    warmup=1000,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    clip=1,
    combine="concat",
    encode="both",
)
TRIALS = {  # of the paper's figures
    Reverse: dict(fig2=180, fig12=15, fig13=20),
    DualFrequency: dict(fig3=30),
    VariableLength: dict(fig11=10, fig14=20),
    Sort: dict(fig8=110),
    DelayedAddition: dict(fig7=40),
    Predecessor: dict(fig10=50),
    Stability: dict(fig5=30),
}


def test_defaults_and_grids_are_the_papers():
    for trial in trials_of(Reverse, "fig2", "paper"):
        assert APPENDIX_A.items() <= vars(trial.task.args).items()
    for task, figures in TRIALS.items():
        for figure, count in figures.items():
            assert len(trials_of(task, figure, "paper")) == count, figure


def test_help_shows_a_scales_defaults_and_what_encodings_are():
    said = " ".join(ends(0, "--help --scale smoke").split())
    assert "training iterations (20)" in said
    assert "constant The control: one fixed random unit vector at every step" in said


def list_commands(words, task=Reverse):
    """What --list prints, without a double."""
    lines = ends(0, f"--list {words}", task).splitlines()
    assert len(set(lines)) == len(lines)
    return lines


def test_list_and_its_filters():
    one = "--model gru --pe sin --vocab 32 --seed 3"
    assert list_commands(f"fig2 --jobs 3 {one}") == [f"python reverse.py {one}"]
    carried = "--out 'a b' --beta2 0.98"
    assert list_commands(f"fig2 {one} {carried}") == [f"python reverse.py {one} {carried}"]
    seeds = list_commands("fig2 --model gru --seed 3-9")
    assert len(seeds) == 8 * 7, "in place of the figure's 0 to 4"
    for task, scale in product(report.TASKS, ("desk", "quick", "smoke")):
        if any(scale in figure.grids for figure in task.figures.values()):
            for line in list_commands(f"--scale {scale}", task):
                task_of(line.partition(".py")[2], task)  # every command is accepted


def test_all_runs_what_list_prints_and_one_trials_end_does_not_end_the_others():
    words = f"fig2 {SMOKE} --model lstm --vocab 8 --seed 0-1"
    run_all = f"--jobs 2 --all {words}"
    trials = [task_of(line.partition(".py")[2]) for line in list_commands(words)]
    done, broken, locked, new = (task.folder for task in trials)
    ends(0, f"{SMOKE} --model lstm --vocab 8 --pe none --seed 0")
    before = (done / "result.json").read_bytes()
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_text("")  # in place of its folder: this trial ends with 1
    with files.lock(locked):  # as another process would
        assert wait(fork(run_all)) == 73, Path("stderr").read_text()
    broken.unlink()
    broken.mkdir()
    (broken / "result.json").write_text("{")  # again with 1
    assert wait(fork(run_all)) == 1, Path("stderr").read_text()
    (broken / "result.json").unlink()
    (locked / "result.json").unlink()
    assert {path.parent for path in find_results()} == {done, new}
    assert wait(fork(run_all)) == 0
    assert {path.parent for path in find_results()} == {done, broken, locked, new}
    assert (done / "result.json").read_bytes() == before, "what is done is skipped"
    assert not (done / "log.txt").exists()
    assert all((folder / "log.txt").exists() for folder in (broken, locked, new))


def test_a_folder_that_cannot_be_written_is_said_once_and_ends_all():
    denied = PermissionError(13, "Permission denied", "runs")
    with mock.patch.object(Path, "mkdir", side_effect=denied):
        said = ends(1, f"{SMOKE} --all fig2 --jobs 2")
    assert said.count("Permission denied") == 1 and not read_files()


def test_jobs_take_turns_on_the_gpus():
    trials, script = trials_of(Reverse, "fig2", "smoke")[:3], Path("script.py")
    script.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    queue = jobs.Jobs(script, trials, 3, ["7", "5"])
    with contextlib.redirect_stdout(None):
        for trial in trials:
            queue.begin(trial)
    for process in queue.running:
        process.wait()
    assert [(trial.folder / "log.txt").read_text() for trial in trials] == ["7\n", "5\n", "7\n"]


def test_the_time_left_of_all_comes_from_each_trials_own_progress():
    trials = trials_of(Reverse, "fig2", "smoke", "--model", "lstm")  # four
    queue = jobs.Jobs("reverse.py", trials, 2, [])
    for number in range(2):
        queue.running[number] = queue.waiting.pop(0), None
    assert queue.say_progress() == "0 of 4 done"
    # 100 s each; a trial without progress takes as long as the others. Two at a time
    for (trial, _), share, left in zip(
        queue.running.values(), (0.2, 0.6), ("0:03:10", "0:02:40")
    ):
        trial.folder.mkdir(parents=True)
        content = dict(share=share, accuracy=0.5, duration=100)
        (trial.folder / "progress.json").write_text(json.dumps(content))
        assert queue.say_progress() == f"0 of 4 done, {left} left"
    queue.running.clear()
    queue.waiting = queue.waiting[:1]
    assert queue.say_progress() == "0 of 4 done, 0:01:40 left"


def test_a_trial_reports_its_progress_and_shows_its_metrics_in_order():
    child_ends(75, LONG, task_with_signal(signal.SIGTERM))
    found = read_json(folder_in() / "progress.json")
    assert found["share"] == 20 / 60 and found["duration"] > 0
    assert found["accuracy"] == load_last()["rows"][-1][2]
    said = ends(0, LONG)
    assert not (folder_in() / "progress.json").exists()
    names = [name.replace("_", " ") for name in read_json(find_results()[0])["metrics"]]
    shown = re.findall(r"(?m)^([a-z ]+): [0-9.]+$", said)
    assert len(shown) == 4 and shown == names[:4]


def read_last_rows():
    """{folder: the last row of its curve}"""
    return {path.parent: path.read_text().split()[-1] for path in Path().rglob("curve.csv")}


def test_all_stops_all_and_continues_and_no_job_outlives_it():
    words = f"{SMOKE} --iterations 1500 --save-every 20 --log-every 20 --model lstm --vocab 8"
    words += " --seed 0-1 --jobs 2 --all fig2"  # four trials
    child = fork(words)
    wait_for(lambda: len(read_last_rows()) == 2)
    os.kill(child, signal.SIGINT)
    assert wait(child) == 75 and len(read_last_rows()) == 2, "no other trial has begun"
    stopped, child = read_last_rows(), fork(words)
    wait_for(lambda: not read_last_rows().items() & stopped.items())  # both have gone on
    if sys.platform == "linux":  # killed, it takes along what it has started, which saves
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL
        for folder in stopped:
            with open(folder / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until its job has ended
        assert not find_results()
        child = fork(words)
    assert wait(child) == 0
    said = Path("stdout").read_text()
    assert re.search(r"fig2\n.*4 of 4 trials", said), "it reports"
    parts = [read_json(path)["earlier"] for path in find_results()]
    assert len(parts) == 4 and sum(map(bool, parts)) == 2


def test_a_folder_that_vanishes_ends_only_its_trial():
    words = f"{SMOKE} --iterations 900 --save-every 20 --model lstm --vocab 8 --jobs 1"
    child = fork(f"{words} --seed 0 --all fig2")
    wait_for(read_checkpoints)
    vanishing = next(Path().rglob("last.pt")).parent
    while vanishing.exists():  # its process may just be writing there
        shutil.rmtree(vanishing, ignore_errors=True)
    assert wait(child) == 73
    (result,) = find_results()
    assert result.parent != vanishing


def run_element(index, out):
    """An element of a job array; its exit code."""
    there = os.environ | {"PYTHON": sys.executable, "SLURM_ARRAY_TASK_ID": index}
    words = shlex.split(f"bash slurm_array.sh reverse.py fig2 {SMOKE} --model gru --out")
    return subprocess.run(
        [*words, out], env=there, cwd=HERE, capture_output=True, check=False
    ).returncode


def test_a_slurm_element_is_the_nth_trial_and_no_shell_reads_what_is_typed():
    out = f"{Path.cwd()}/a b\ntouch c; $(touch d) 'e"
    assert run_element("2", out) == 0
    third = list_commands(f"fig2 {SMOKE} --model gru")[2]
    (result,) = find_results()
    assert read_json(result)["argv"][:6] == shlex.split(third)[2:8]
    assert run_element("4", out) == 2, "beyond the list"
    assert not (HERE / "c").exists() and not (HERE / "d").exists()


# -- Statistics, contrasts, claims and tables, held to SciPy's numbers
def test_welchs_test_is_that_of_textbooks():
    """Their example: t = -2.46, 25.0 degrees of freedom, p = .021"""
    a = "27.5 21.0 19.0 23.6 17.0 17.9 16.9 20.1 21.9 22.6 23.1 19.6 19.0 21.7 21.4"
    b = "27.1 22.0 20.8 23.4 23.4 23.5 25.8 22.0 24.8 20.2 21.9 22.1 22.9 20.5 24.4"
    a, b = (list(map(float, numbers.split())) for numbers in (a, b))
    found = statistics.estimate([a, b], [1, -1])
    assert round(found.value / found.error, 3) == -2.455
    assert round(found.dof, 3) == 24.989
    assert round(found.p(), 3) == 0.021
    for dof, t in (2, 4.302653), (5, 2.570582), (9.3, 2.251082):
        close(statistics.t_quantile(0.025, dof), t, 1e-5)
    same = statistics.estimate([[0.1] * 4, [0.1] * 7], [1, -1])
    assert round(same.p(), 9) == 1 and same.interval() == (0, 0)
    assert statistics.estimate([a, b[:2]], [1, -1]) is None, "too few seeds"


def test_holms_correction():
    """The smallest p times how many there are, the next times one less, and so on."""
    found = statistics.holm([0.04, 0.03, 0.01, 1.0])
    close(found, [0.09, 0.09, 0.04, 1.0], 1e-12)  # .04 x 2 is less than the one before


def make_results(cells, metric="token accuracy"):
    """Results of [(flags, values of a metric, a seed each)]; None: not finished."""
    found = []
    for flags, values in cells:
        for seed, value in enumerate(values):
            result = Result(flags | {"seed": seed})
            if value is not None:
                config = {"vocab": 16} | result.flags
                result = result._replace(config=config, values={metric: value})
            found.append(result)
    return found


NONE = [0.50, 0.51, 0.52, 0.48]
CONSTANT = [0.53, 0.50, 0.55, 0.51]
PE = [0.69, 0.75, 0.64, 0.80]
ARMS = [({"pe": "none"}, NONE), ({"pe": "constant"}, CONSTANT), ({"pe": "sin"}, PE)]
PE_OVER_NONE, PE_OVER_CONSTANT = "+0.218 [+0.110, +0.325]", "+0.198 [+0.091, +0.304]"


def lines_of(results, **options):
    figure = Figure("", {}, **options)
    measures = [*map(as_measure, figure.metrics), *figure.summaries]
    found = []
    for part in tables.describe, tables.table, tables.contrast_table:
        found += part(figure, results, measures)
    return [re.sub(" {2,}", "|", line) for line in found]


def test_a_table_of_known_data():
    cells = [({"vocab": K} | flags, values) for K in (4, 8) for flags, values in ARMS]
    found = make_results([*cells, ({"vocab": 8, "pe": "dup"}, [None, 0.4, 0.6, None])])
    row = "0.502 ±0.027|0.522 ±0.035|{}|0.720 ±0.111"
    row += f"|{PE_OVER_NONE}|.006|{PE_OVER_CONSTANT}|.008"
    assert lines_of(found) == [
        "token accuracy",
        "n = 2 to 4",
        "chance 0.25 to 0.12",
        "26 of 28 trials",
        "K|no PE|constant|dup|PE|PE - no PE|p|PE - constant|p",
        f"4|{row.format('-')}",
        f"8|{row.format('0.500 (n = 2)')}",
    ]


def test_contrasts_add_up_cells_and_pair_seeds():
    high, low = [0.60, 0.70, 0.65, 0.72], [0.55, 0.64, 0.62, 0.65]
    runs = [({"pe": "none", "budget": x}, values) for x, values in ((2, high), (1, low))]
    none = dict(pe="none", budget=2), dict(pe="none", budget=1)
    paired = Contrast("2x - 1x", *none, paired=True)
    absent = Contrast("3x - 1x", dict(pe="none", budget=3), none[1])
    found = lines_of(make_results(runs), contrasts=(paired, absent))
    assert found[-2].startswith("1|0.615"), "the absent contrast has no line"
    assert found[-1] == "2x - 1x|+0.052 [+0.025, +0.080]|.009"
    arms = [*ARMS, ({"pe": "dup"}, CONSTANT[::-1])]
    sums = Contrast("sum", [{"pe": "sin"}, {"pe": "constant"}], [{"pe": "none"}, {"pe": "dup"}])
    assert (
        lines_of(make_results(arms), contrasts=(sums,))[-1]
        == "sum|+0.218 [+0.115, +0.320]|.003"
    )


def test_a_metric_that_half_the_trials_lack_hides_nothing():
    found = make_results(ARMS)
    for n, result in enumerate(found):
        result.values.update({"new": 0.25} if n % 2 else {})
    both = dict.fromkeys(["token accuracy", "new"])
    found = lines_of(found, metrics=both)
    assert found[-4] == "token accuracy" and PE_OVER_NONE in found[-3]
    assert found[-2:] == ["new", "|".join(["0.250 (n = 2)"] * 3 + ["-"] * 4)]


def test_what_a_preregistered_claim_says():
    """The larger p counts; if PE is below one of the others, twice the smaller one does."""
    cases = [
        (PE, "supported"),
        (CONSTANT, "inconclusive"),
        ([0.3, 0.31, 0.32, 0.3], "contradicted"),
    ]
    arms = [({"vocab": 16} | flags, values) for flags, values in ARMS]
    for pe, outcome in cases:
        results = make_results([*arms[:2], ({"vocab": 16, "pe": "sin"}, pe)])
        claim = Claim("family", "token accuracy", dict(model=None, vocab=16))
        *_, row, _ = tables.claims_table([(claim, "#link", results)])
        assert row.endswith(f"| {outcome} |") and "[K = 16](#link): token" in row, row
    # Holm takes 3 times the smallest p, 2 times the next: here .0077 and .0065 are the larger
    weaker = make_results([*arms[:2], ({"vocab": 16, "pe": "sin"}, CONSTANT)])
    claims = [(claim, "", runs) for runs in (weaker, make_results(arms), weaker)]
    *_, row, _, _ = tables.claims_table(claims)
    assert row.endswith("| .023 | supported |"), row
    for text in PE_OVER_NONE, PE_OVER_CONSTANT, "| 0.720 ±0.111 |":
        assert text in row
    half = make_results([*arms[:2], ({"vocab": 16, "pe": "sin"}, [*PE[:3], None])])
    *_, row, _ = tables.claims_table([(claim, "", half)])
    assert row.endswith("| - | trials missing |"), row


def of_vocabularies(accuracies):
    """Results with PE, of {K: accuracy}."""
    return make_results([({"vocab": K, "pe": "sin"}, [x]) for K, x in accuracies.items()])


def test_summaries_over_the_vocabulary_by_hand():
    """log2 of the K at which accuracy falls to 95%, by straight lines between neighbours."""
    cases = [  # accuracy at K = 4, 8, 16; what is on the page
        (0.96, 1.0, 0.9, 3.5, "11.31"),
        (1.0, 0.99, 0.96, 4.0, "not within 16 (0 of 1 seeds)"),
        (0.9, 0.99, 0.9, 2.0, "below 4 (1 of 1 censored)"),
    ]
    for a, b, c, wanted, text in cases:
        runs = of_vocabularies({4: a, 8: b, 16: c})
        close(K95.of(runs), wanted, 1e-9)
        assert lines_of(runs, summaries=(K95,))[-1] == f"|{text}"
    assert K95.of(of_vocabularies({4: 0.9, 16: 0.8})) is None, "too far apart"
    runs = of_vocabularies({4: 1.0, 8: 0.9, 16: 0.8})
    del runs[-1].values["token accuracy"]
    assert K95.of(runs) is None, "a trial without token accuracy"
    runs = of_vocabularies({16: 0.6, 4: 1.0, 32: 0.5})  # at 4, 2 and 5 in log2
    close(AREA.of(runs), (2 * 0.8 + 0.55) / 3, 1e-9)


def test_the_equivalent_budget_by_hand():
    """No PE has .5 at 1x, .7 at 4x and .8 at 8x: so .6 at 2x."""
    for pe, wanted, text in [
        (0.6, 1, "2.000"),
        (0.75, 2.5, "5.657"),
        (0.45, 0, "below 1x (1 of 1 censored)"),
        (0.85, 3, "not within 8x (0 of 1 seeds)"),
    ]:
        cells = []
        for budget, none, sin in (1, 0.5, pe), (4, 0.7, 0.9), (8, 0.8, 0.9):
            flags = {"iterations": 100 * budget}
            cells += [(flags | {"pe": "none"}, [none]), (flags | {"pe": "sin"}, [sin])]
        runs = make_results(cells)
        close(BUDGET.of(runs), wanted, 1e-9)
        assert text in lines_of(runs, summaries=(BUDGET,))[-1]


def test_metrics_of_targets_and_positions_by_hand():
    """Of Frequent targets among Rare disturbants the first quarter is .3 below."""
    accuracies = dict.fromkeys(dual_frequency.CONDITIONS, [0.9] * 8)
    accuracies["frequent/rare"] = [0.6] * 2 + [0.9] * 6
    result = Result({"model": "lstm"}, {"by_condition": accuracies})
    metrics = dual_frequency.DualFrequency.figures["fig3"].metrics.values()
    wanted = [0.8625, 0.9, 0.825, 0.9, 0.075, 0, 0.3]
    close([metric(result) for metric in metrics], wanted, 1e-9)
    second = Result({"model": "s4d"}, result.metrics)
    close([metric(second) for metric in metrics], [*wanted[:-1], -0.1], 1e-9)


# -- report.py, RESULTS.md, README.md, the house
def make_report(words):
    with mock.patch.object(plots, "CAN_DRAW", False):
        return ends(0, words, report)


def train_two():
    """-> the result file of PE, and what a report says then."""
    for pe in "none", "sin":
        ends(0, f"{SMOKE} --model gru --vocab 8 --pe {pe}")
    (path,) = Path().rglob("gru-sin-*/seed0/result.json")
    return path, f"'{HERE}/reverse.py' fig2 --scale smoke"


def test_a_result_that_cannot_be_used_is_named_and_left_out():
    path, words = train_two()
    whole, content = path.read_text(), read_json(path)
    accuracy = content["metrics"]["token_accuracy"]
    said = make_report(words)
    assert "2 of 12" in said and f"{accuracy:.3f}" in said
    bad = ["[" * 100_000, "[]", "", "\xff", whole[:-20]]
    bad += [whole.replace('"lr": 0.001', '"lr": 0.25'), whole.replace('"reverse"', '"sort"')]
    for number in "7", "NaN", "1e999", "9" * 5000, "null", '"0.5"':
        bad.append(whole.replace(f'_accuracy": {accuracy}', f'_accuracy": {number}'))
    for wrong in {"config": {}}, {"metrics": 3}, {"seconds": None}, {"earlier": [3]}:
        bad.append(json.dumps(content | wrong))
    for text in bad:
        path.write_text(text, encoding="latin1")
        said = make_report(words)
        assert "1 of 12" in said and said.count(f"left out: {path}") == 1, text[:80]
    path.write_text(whole.replace("token_a", "a"))  # it lacks the metric, and counts without
    assert "2 of 12" in make_report(words)
    path.write_text(whole)
    for name in "text_sha256", "tokens_sha256":  # of two texts: they are not compared
        path.write_text(whole.replace('"config": {', f'"config": {{"{name}": ["a"],'))
        assert "0 of 12" in make_report(words)


def test_nothing_that_a_file_says_reaches_a_page_as_it_is():
    path, words = train_two()
    hostile = "\x1b[31m<script>|`\ud800"
    for result in find_results():
        made = {"device": hostile, "dirty": result == path}
        result.write_text(json.dumps(read_json(result) | made))
    said = make_report(words) + ends(0, "runs", report)
    assert not set("\x1b<>`\ud800") & set(said.replace("```", "").replace("<.001", ""))
    assert "with local changes (1 of 2)" in said
    lengths = f"{SMOKE} --vocab 8 --model lstm --pe sin --min-length 3 --iterations 9"
    ends(0, lengths, VariableLength)
    (path,) = Path().rglob("variable_length/*/*/result.json")
    content, figure = read_json(path), VariableLength.figures["fig11"]
    trial = jobs.Trial(task_of(lengths, VariableLength), {"model": "lstm", "pe": "sin"}, [])
    assert report.make_result(trial, content, figure).lines
    for bad in None, "1", 10**400, [1]:
        content["metrics"]["by_length"]["4"] = bad
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            report.make_result(trial, content, figure)
            raise AssertionError(bad)
    Path("bench").mkdir()
    Path("bench/x.json").write_text("[]")
    lines = report.bench_lines(".")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert not list(lines)
    assert "left out: bench/x.json" in said.getvalue()


def test_a_result_of_another_task_enters_no_table():
    ends(0, f"{SMOKE} --vocab 8 --model gru", Sort)
    shutil.copytree("runs/sort", "runs/reverse")
    said = make_report(f"'{HERE}/reverse.py' fig2 --scale smoke")
    assert "0 of 12" in said and "task sort there, reverse here" in said


def test_every_finished_trial_is_a_row_of_trials_csv():
    path, _ = train_two()
    rows = list(csv.DictReader(io.StringIO(ends(0, "runs", report))))
    assert [row["pe"] for row in rows] == ["none", "sin"] and "model" not in rows[0]
    accuracy = read_json(path)["metrics"]["token_accuracy"]
    assert float(rows[1]["token_accuracy"]) == accuracy and rows[1]["folder"] == str(
        path.parent
    )
    path.write_text("{}")
    assert f"left out: {path}" in ends(0, "runs", report)


def test_a_users_figure_has_its_table_at_every_scale():
    rows = dict(model="gru", vocab=8, seed=range(1))
    mine = Figure(
        "Mine", {scale: cross(**rows, pe=["none", "sin"]) for scale in ("quick", "smoke")}
    )
    with mock.patch.dict(Reverse.figures, mine=mine):
        for scale in mine.grids:
            ends(0, f"--scale {scale} --pe sin {TINY}")
            said = make_report(f"'{HERE}/reverse.py' mine --scale {scale} {TINY}")
            assert "no PE  PE" in said and "PE - no PE" in said, said


def test_a_figure_is_drawn():
    if not plots.CAN_DRAW:
        raise SkipTest("no matplotlib")
    ends(0, SMOKE)
    ends(0, f"'{HERE}/reverse.py' fig2 --scale smoke", report)
    (picture,) = Path().rglob("*.svg")
    assert ">LSTM</text>" in picture.read_text()


def test_the_results_page_is_that_of_the_committed_results():
    shutil.copytree(HERE / "results", "results")
    Path("results/trials.csv").unlink()
    page = Path("RESULTS.md")
    shutil.copy(HERE / page, page)
    assert not make_report("--write RESULTS.md --out results")
    for path in page, Path("results/trials.csv"):
        assert path.read_bytes() == (HERE / path).read_bytes(), f"another {path}"


def mean_accuracies(results, **flags):
    """{encoding: mean token accuracy} of the trials with these flags."""
    found = {}
    for result in select(results, flags):
        found.setdefault(result.flags["pe"], []).append(result.values["token accuracy"])
    return {pe: np.mean(values) for pe, values in found.items()}


def readme_cells(results, **flags):
    """Token accuracies of no PE, the control and PE, as README's table has them."""
    means = mean_accuracies(results, **flags)
    return "|".join(f"{means[pe]:.0%}" for pe in WITH_CONSTANT)


def test_the_readmes_numbers_are_those_of_the_committed_results():
    def load(task, figure):
        args = argparse.Namespace(scale="desk", out=HERE / "results", words=[])
        return report.load(task, figure, args)

    readme = README.replace("**", "").replace(r"\*", "")
    readme = re.sub(r" \((longer: )?[48]x\)", "", readme)
    short, long = load(Reverse, "fig2"), load(beyond.Beyond, "fig2-end")
    lower = load(beyond.Beyond, "fig2-end-lower")
    assert f"|GRU, K = 8|{readme_cells(short, model='gru', vocab=8)}|" in readme
    for model, cell in beyond.CELLS.items():
        first = readme_cells(short, model=model, vocab=cell.vocab)
        last = readme_cells(lower)
        if model != "gru":
            iterations = cell.iterations * cell.times[-1]
            last = readme_cells(long, model=model, iterations=iterations)
        assert f"|{model.upper()}, K = {cell.vocab}|{first}|{last}|" in readme
    for pe, text in ("none", "0.790 ±0.009"), ("sin", "0.864 ±0.013"):
        gru = select(short, dict(model="gru", vocab=32, pe=pe))
        values = measurements(gru, Measure("token accuracy"))
        assert text in readme and tables.format_mean(values, Measure("")) == text


def test_the_readmes_example_is_that_of_the_committed_results():
    words = f"'{HERE}/reverse.py' fig2 --scale quick --brief --out '{HERE}/results'"
    table, _, last = make_report(words).partition("```text\n")[2].partition("```\n")
    assert table.count("\n") == 3 and table in README
    assert last.startswith("All metrics: python report.py reverse.py fig2 --scale quick")


def test_bench_counts_every_trial_of_the_paper_once():
    content = read_json(HERE / "results/bench/h200.json")
    lines = "\n".join(bench.costs(content))
    assert re.search(r"reverse\.py fig2 +180 ", lines)
    assert re.search(r"each trial once +500 ", lines)
    task = task_of("--model gru --vocab 64 --length 16")
    hours = bench.hours(task, bench.times_of_sequences(content))
    measured = np.median(content["configurations"]["gru-sin-64"]["suite"])  # of 64
    close(hours, measured / 4 * 300 / 3600, 1e-9)


def find_code(language):
    """README's blocks of code."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", README)
    return [code for name, code in blocks if name == language]


def test_readmes_encoding_is_compared_and_its_model_loaded():
    (code,) = find_code("python")
    Path("mine.py").write_text(code)
    code, out, err = process("mine.py", "--scale", "desk", "--list", "mine")
    assert code == 0 and not err and out.count("python mine.py --model gru") == 12, out + err
    code, out, err = process("mine.py", *f"--pe square {SMOKE}".split())
    assert code == 0 and not err, out + err
    task = task_of(SMOKE)
    ends(0, SMOKE)
    model, test = task.trained_model(), task.test_batch()
    accuracy = (model(test).argmax(-1).T == test.targets).double().mean()
    close(accuracy, read_json(task.folder / "result.json")["metrics"]["token_accuracy"], 1e-6)


def test_readme_commands_run():
    """Each is accepted; one trial of reverse.py is trained, at smoke scale."""
    commands = re.findall(r"(?m)^(?:.*&& )?python (.*?)(?:  #.*)?$", "\n".join(find_code("")))
    tasks = {task.script(): task for task in report.TASKS}
    for script, *words in map(shlex.split, commands):
        if script not in tasks:
            assert script in ("report.py", "bench.py", "test_all.py")
            continue
        task = tasks[script]
        args, given = cli.parse(task, words)
        figure = args.all if args.list is None else args.list
        if figure is not None:
            cli.trials_of_figure(task, args, given, figure)
        elif task is Reverse:
            ends(0, f"{shlex.join(words)} {SMOKE}")
    assert find_results()


FLOORS = """
    common
    statistics figures files
    graphs rnn_kernels fast task machine
    progress training plots
    jobs cli
    tables
    reverse dual_frequency variable_length
    sort delayed_add predecessor lm_wikitext lm_shakespeare
    stability beyond rarity bench
    report
"""


def test_every_script_looks_at_python_before_it_imports_pytorch():
    old = "import runpy, sys; sys.version_info = (3, 10, 9); sys.argv = ['']; "
    old += "sys.modules.update(torch=None, numpy=None); "  # which may not be installed
    for path in HERE.glob("*.py"):
        if path.name not in ("common.py", "test_all.py"):
            code, out, err = process("-c", f"{old}runpy.run_path({str(path)!r})")
            assert code == 2 and not out and err.count("\n") == 1, (path, err)
            assert "Python 3.11 or later" in err


def test_imports_run_down_only():
    """Every file imports those alone that stand before it."""
    floors = FLOORS.split()
    assert {path.stem for path in HERE.glob("suite/[!_]*.py")} <= set(floors)
    for number, room in enumerate(floors):
        (path,) = [*HERE.glob(f"{room}.py"), *HERE.glob(f"suite/{room}.py")]
        not_before = "|".join(floors[number:])
        found = re.search(rf"(?m)^\s*(from|import) .*\b({not_before})\b", path.read_text())
        assert not found, (room, found)


# -- stability.py, held to the Jacobian of the model's own forward pass
def run_layer(layer, x, z=None):
    """-> the last output (D,), the state after x as one tensor; z is the state before x."""
    if isinstance(layer, common.S4D):
        outputs, state = run_s4d(layer, x, 0 if z is None else torch.view_as_complex(z))
        state = torch.view_as_real(state)
    elif isinstance(layer, torch.nn.LSTM):  # z (2, 1, H)
        before = None if z is None else (z[:1], z[1:])
        outputs, state = torch.nn.LSTM.forward(layer, x, before)
        state = torch.cat(state)
    else:
        outputs, state = torch.nn.GRU.forward(layer, x, z)
    return outputs[-1, 0], state


def jacobian(model, row, target):
    """d output / d state, the state right after the target (of S4D without C)."""
    x, layer = model.encoding.join(model.embedding(row[:, None])), model.layer
    _, state = run_layer(layer, x[:target])

    def output(z):
        return run_layer(layer, x[target:], z)[0]

    last = slice(len(x) - 1, len(x))
    assert torch.allclose(output(state), layer(x, last)[0, 0], 1e-4, 1e-6)
    return torch.func.jacrev(output)(state.detach()).flatten(1).detach()


def plain_stability(model, a, b, target):
    """The specification's sum_i w_i cos(J_i^A, J_i^B); a row of zeros has no weight."""
    found = []
    for row_a, row_b in zip(a, b):
        A, B = jacobian(model, row_a, target), jacobian(model, row_b, target)
        norms = A.norm(dim=1) * B.norm(dim=1)
        cosines = ((A * B).sum(1) / norms).nan_to_num()
        found.append((norms / norms.sum() * cosines).sum())
    return torch.stack(found)


def make_case(kind, pe, length=6, target=1, combine="concat"):
    """-> a model in double precision, and a pair of each condition as rows a and b"""
    torch.manual_seed(length)
    model = common.Model(
        common.LAYERS[kind], pe, 10, 8, 11, 2 * length, combine=combine
    ).double()
    a, b = stability.draw_pairs(length, 10, length, target, 1)
    return model, a, b


def test_stability_is_that_of_autograds_jacobian():
    cases = [  # encoding, length, target, perhaps --combine
        ("none", 3, 1),
        ("sin", 3, 1),
        ("sin", 6, 4),
        ("dup", 5, 2),
        ("learned", 4, 4, "add"),
    ]
    for kind, case in product(PAPERS, cases):
        model, a, b = make_case(kind, *case)
        _, _, target, *_ = case
        found = stability.stability(model, a, b, target)
        close(found, plain_stability(model, a, b, target), 1e-10)
        close(stability.stability(model, a, b, target, at_once=3), found, 1e-12)
        close(stability.stability(model.float(), a, b, target), found, 1e-5)


def test_stability_where_gradients_vanish():
    for kind, rows in product(("lstm", "s4d"), (5, 11)):
        model, a, b = make_case(kind, "sin")
        layer = model.layer
        gate = layer.mix.bias[11:] if kind == "s4d" else layer.bias_ih_l0[33:]
        gate.data[:rows] = -1e4  # so many of the 11 outputs do not depend on the state at all
        wanted = plain_stability(model, a, b, 1) if rows < 11 else torch.zeros(4)
        close(stability.stability(model, a, b, 1), wanted, 1e-10)


def test_stability_pairs_share_the_target_and_what_is_before_it():
    """Of 12 integers, 10 in all; the target at t = 5, then 8 commands."""
    pairs = stability.draw_pairs(3, 10, 12, 5, 50)
    a, b = (rows.view(4, 50, 20) for rows in pairs)
    assert torch.equal(a[..., :5], b[..., :5]) and (a[..., 5:12] != b[..., 5:12]).any(-1).all()
    for rows in a, b:
        assert (rows[..., 12:] == 10).all()
        for of_condition, name in zip(rows, dual_frequency.CONDITIONS):
            target, disturbants = (5 if kind == "rare" else 0 for kind in name.split("/"))
            least = torch.full((12,), disturbants)
            least[4] = target
            drawn = (of_condition[:, :12] - least).flatten().tolist()
            assert_uniform(drawn, 5)
            assert set(drawn) == set(range(5))


def test_stabilitys_target_is_the_papers():
    for words, target in ("s4d", 23), ("s4d --length 1", 1), ("gru", 1):
        assert task_of(f"--model {words}", Stability).args.target == target


def test_stability_of_a_trial():
    words = f"{SMOKE} --model s4d --pairs 8 --seed 3"
    ends(0, f"{words} --train", Stability)
    folder = folder_in()
    before = outcome(folder)
    path = folder / "stability.json"
    by_condition = read_json(path)["by_condition"]
    for values in by_condition.values():
        assert list(map(int, values)) == list(range(2, 21, 2))
    model = task_of(words, Stability).model().double()
    model.load_state_dict(load_last()["model"])
    wanted = plain_stability(model, *stability.draw_pairs(3, 8, 8, 3, 2), 3)
    last = [by_condition[condition]["20"] for condition in dual_frequency.CONDITIONS]
    close(last, wanted.view(4, 2).mean(1), 1e-5)
    refuses(f"{words} --target 1", Stability)
    with mock.patch.object(common.Sinusoid, "fast", False):
        refuses(f"{words} --seed 4 --train", Stability)
    with files.lock(folder):
        ends(73, f"{words} --overwrite", Stability)
    ends(0, words, Stability)
    assert read_json(path)["by_condition"] == by_condition
    ends(0, f"{SMOKE} --model s4d --seed 3 --overwrite", DualFrequency)  # whose trial it is
    assert outcome(folder) == before and not path.exists()


# -- Language models: tiny Shakespeare
TEXT = (HERE / "common.py").read_text()[:12_000]


def write_shakespeare():
    Path("data").mkdir()
    Path("data/tinyshakespeare.txt").write_text(TEXT)


def plain_position(model, pe, x):
    if pe == "layernorm-learned":  # Eq. 9
        norm = model.position.norm
        x = F.layer_norm(x, (12,), norm.weight, norm.bias)
    if "learned" in pe:
        x = x + model.position.encoding.table
    if pe == "sin":  # Eq. 5: sine before cosine
        x = x + torch.view_as_real(waves(9, 12)).flip(2).flatten(1)
    return x


def plain_heads(block, pe, x):
    """-> outputs and scores of each head; pairs of queries and keys are complex numbers"""
    later = torch.ones(9, 9).triu(1).bool()
    read = (block.norm1(x) @ block.attention.read.weight.T).view(9, 3, 2, 6)
    outputs, scores = [], []
    for head in range(2):
        q, k, v = read[:, :, head].unbind(1)  # (T, d)
        q, k = q[:, ::2] + 1j * q[:, 1::2], k[:, ::2] + 1j * k[:, 1::2]
        if pe == "rotary":  # Eq. 6
            q, k = q * waves(9, 6), k * waves(9, 6)
        scores.append((q @ k.conj().T).real / math.sqrt(6))
        outputs.append(scores[-1].masked_fill(later, -math.inf).softmax(1) @ v)
    return outputs, scores


def plain_transformer(model, pe, tokens):
    """One sequence -> logits (T, K), scores (layers heads, T, T)."""
    x, every_score = plain_position(model, pe, model.embedding.weight[tokens]), []
    for block in model.blocks:
        heads, scores = plain_heads(block, pe, x)
        every_score += scores
        x = x + block.attention.write(torch.cat(heads, 1))
        x = x + block.network[2](block.network[0](block.norm2(x)).clamp(min=0))
    return model.readout(model.norm(x)), torch.stack(every_score)


def test_transformer_is_the_plain_one():
    for pe in lm_shakespeare.ENCODINGS:
        torch.manual_seed(3)
        model = lm_shakespeare.Transformer(pe, 11, 12, 2, 2, 9).double()
        tokens = torch.randint(11, (2, 9))
        for parameter in model.parameters():  # large enough for everything to matter
            parameter.data += torch.randn_like(parameter) * 0.3
        plain, scores = zip(*(plain_transformer(model, pe, row) for row in tokens))
        features = model.features(common.Batch(tokens, None, None))
        close(model.readout(features), torch.stack(plain, 1), 1e-12)
        mean = torch.stack(scores).mean((0, 1))
        wanted = [mean.diagonal(-n).mean().item() for n in range(9)]
        close(lm_shakespeare.score_by_distance(model, tokens), wanted, 1e-4)


def test_perplexity_of_a_text():
    write_shakespeare()
    task = task_of(f"{SMOKE} --batch 300 --context 5", Shakespeare, build=True)
    tokens = torch.tensor([task.types.index(x) for x in TEXT])
    train, valid = tokens[:10_800].unfold(0, 6, 1), tokens[10_800:].unfold(0, 6, 1)  # 90%, 10%
    first = task.training_batch(1)
    drawn = torch.cat([first.inputs, first.targets[:, -1:]], 1)
    assert set(map(tuple, drawn.tolist())) <= set(map(tuple, train.tolist()))
    model, consecutive = task.model(), valid[::5]
    features = model.features(common.Batch(consecutive[:, :5], None, None))
    logits = model.readout(features).flatten(0, 1).double()
    perplexity = F.cross_entropy(logits, consecutive[:, 1:].T.flatten()).exp()
    metrics = task.evaluate(model, PLAIN)
    close(metrics["valid_perplexity"], perplexity, 1e-5)


def test_tokenizers_give_the_text_back():
    cases = [
        ("bpe", TEXT[:1500], "", TEXT[:1500]),
        ("word", "It's a word_1, a  word!\né", " ", "It ' s a word_1 , a word ! é"),
    ]
    for name, text, between, wanted in cases:
        types, train, valid = lm_shakespeare.tokenize(text, name)
        assert between.join(types[n] for n in (*train, *valid)) == wanted
        assert len(train) < 700, "pairs are joined"


# -- Language models: WikiText, of 40 pieces and 32 targets in a paragraph
SMALL = f"{SMOKE} --data data"


def make_paragraph(n):
    """n pieces from 1 to 39, and a tenth of them unknown."""
    return [(n * n + j) % 39 + 1 if (n + j) % 10 else 0 for j in range(n)]


LENGTHS = [2, 1, 70, *range(5, 30)]
PIECES = [make_paragraph(n) for n in LENGTHS]


def write_lm_text(*lines):
    lm_wikitext.digest.cache_clear()
    Path("data").mkdir(exist_ok=True)
    content = "".join(f"{line}\r\n" for line in lines).encode()
    for split in lm_wikitext.SPLITS:
        Path(f"data/wiki.{split}.raw").write_bytes(content)


def write_lm_tokens(paragraphs=PIECES, text="a text"):
    """A text and, in the layout that trials read, made-up tokens."""
    write_lm_text(text)
    fingerprint = lm_wikitext.text_sha256(Path("data"))
    folder = Path(f"data/tokens-K40-{fingerprint[:16]}")
    folder.mkdir(exist_ok=True)
    for split in lm_wikitext.SPLITS:
        np.concatenate(paragraphs).astype("<u2").tofile(folder / f"{split}.tokens")
        np.cumsum([0, *map(len, paragraphs)]).astype("<i8").tofile(folder / f"{split}.ends")
    (folder / "pieces.model").write_bytes(b"")


def lm_task(words=""):
    return task_of(f"{SMALL} {words}", WikiText, build=True)


def read_one_by_one(model):
    """The plain model's logits (N, K) and targets (N,), of one paragraph after the other."""
    logits, targets = [], []
    for pieces in PIECES:
        x = torch.tensor(pieces[:33])
        if len(x) > 1:
            logits.append(model(common.Batch(x[None, :-1], None, slice(None)))[:, 0])
            targets.append(x[1:])
    return torch.cat(logits), torch.cat(targets)


def check_packed(task, model, batch, even):
    """Loss, accuracy and gradients of known targets, and perplexities, of both engines."""
    logits, targets = read_one_by_one(model)
    known, right = targets != 0, logits.argmax(1) == targets
    loss = F.cross_entropy(logits[known], targets[known])
    gradients = torch.autograd.grad(loss, model.parameters())
    for engine, patch in (PLAIN, None), (FAST, None), (FAST, as_on_cuda()):
        with patch or contextlib.nullcontext():
            for pairs in batch, even:
                features = task.features(model, pairs, engine)
                found_loss, accuracy = common.loss_and_accuracy(features, model.readout, pairs)
                close(found_loss, loss, 1e-9)
                close(accuracy, right[known].double().mean(), 1e-9)
                found = torch.autograd.grad(found_loss, model.parameters())
                for got, wanted in zip(found, gradients, strict=True):
                    close(got, wanted, 1e-9)
            of_known, of_all = task.perplexities(model, task.splits["test"], engine)
            close(of_known, loss.exp(), 1e-9)
            close(of_all, F.cross_entropy(logits, targets).exp(), 1e-9)


def test_packed_paragraphs_equal_those_read_one_by_one():
    cases = list(product(("gru", "lstm"), ("none", "dup", *TABLES)))
    cases.append(("lstm", "learned --combine add"))
    predicting = len(PIECES) - 1  # of one piece nothing is predicted
    for kind, pe in cases:
        with workplace():
            write_lm_tokens()
            task = lm_task(f"--model {kind} --pe {pe} --batch {predicting}")
            batch = task.training_batch(1)  # an epoch
        even = lm_wikitext.pad_to_few_sizes(batch, 32, 40)
        check_packed(task, task.model().double(), batch, even)


def test_epochs_are_permutations():
    for count, batch in (7, 3), (7, 7), (3, 10), (1, 4), (4, 4):
        with workplace():
            write_lm_tokens([[1, 2]] * count)
            task = lm_task(f"--batch {batch} --seed 3")
        drawn = []
        for i in range(1, 1 + 300 * count):
            drawn += task.paragraphs_of_batch(i).tolist()
        epochs = [tuple(drawn[n : n + count]) for n in range(0, len(drawn), count)]
        for epoch in epochs:
            assert sorted(epoch) == list(range(count)), "drawn twice, or lost"
    assert_uniform(epochs, 24)  # of four


def test_the_unigram_model_by_hand():
    write_lm_tokens()
    task = lm_task()
    seen = Counter(chain(*PIECES))
    known = [n for pieces in PIECES for n in pieces[1:33] if n]
    shares = [(seen[n] + 1) / (sum(LENGTHS) + 40) for n in known]
    metrics = task.evaluate(task.model(), FAST)
    close(metrics["unigram_test_perplexity"], 1 / np.exp(np.mean(np.log(shares))), 1e-12)


def test_language_model_learns_and_refuses_another_text_or_other_tokens():
    words = f"{SMALL} --iterations 120 --lr 0.05"
    write_lm_text("a text")
    refuses(SMALL, WikiText)  # without tokens
    write_lm_tokens()
    ends(0, words, WikiText)
    wanted = outcome(folder_in())
    _, _, metrics = wanted
    assert metrics["test_perplexity"] < metrics["unigram_test_perplexity"] / 2
    write_lm_tokens(text="another")
    refuses(words, WikiText)
    write_lm_tokens(PIECES[1:])
    refuses(words, WikiText)
    assert outcome(folder_in()) == wanted


WORDS = "the cat sat on a mat and dogs ran far away from old houses while rain fell , then stop"


def test_tokens_are_those_of_sentencepiece():
    if not importlib.util.find_spec("sentencepiece"):
        raise SkipTest("no sentencepiece")
    from sentencepiece import SentencePieceProcessor

    kept = [WORDS[n:] for n in range(0, 80, 4)]
    kept += ["= 3 is a sum", " a cat \u2028 sat \x0b on\r a mat ", " a"]
    kept.append("xyx yxy " * 600)  # above SentencePiece's usual limit
    write_lm_text(" = Heading = ", "", *kept, " ", "\r", " = = Sub = = ")
    refuses(f"{SMALL} --prepare --vocab 5000", WikiText)
    ends(0, f"{SMALL} --prepare --vocab 36", WikiText)
    (path,) = Path("data").glob("tokens-K36-*/pieces.model")
    pieces = SentencePieceProcessor(model_file=str(path))
    found = lm_task("--vocab 36").splits["train"]
    wanted = [pieces.encode(paragraph) for paragraph in kept]
    assert found.tokens.tolist() == list(chain(*wanted))
    borders = np.cumsum([0, *map(len, wanted)]).tolist()
    assert np.fromfile(path.with_name("train.ends"), "<i8").tolist() == borders


# -- CUDA: what needs a GPU
def run_with_gpu(*words):
    """Python in a process of its own that sees the GPUs."""
    with mock.patch.dict(os.environ, WITH_GPUS, clear=True):
        return process(*words)


@functools.cache
def has_gpu():
    code, _, _ = run_with_gpu("-c", "import torch; assert torch.cuda.is_available()")
    return code == 0


def test_cuda_batches():
    for compiled in False, True:
        check_batches(torch.device("cuda"), compiled)


FP32 = ["--precision fp32"]
THREE = ["--precision fp32", "--precision fp32 --no-graph", "--precision fp32 --deterministic"]
REPEATED = "--deterministic", "--deterministic --log-every 50"  # bitwise identical
WAYS = ["", "--no-graph", "--engine torch", "--precision fp32", "--precision bf16", *REPEATED]
ON_GPU = {  # command: its ways on the GPU
    "reverse.py --model gru": WAYS,
    "reverse.py --model lstm": WAYS,
    "reverse.py --model s4d": WAYS,
    "variable_length.py --model gru": ["", "--no-graph"],
    "variable_length.py --model lstm": ["", "--no-graph"],
    "variable_length.py --model s4d": ["", "--no-graph"],
    "delayed_add.py": [""],
    "predecessor.py --model gru": [""],
    "sort.py": FP32,
    "stability.py --train --model gru": FP32,
    "stability.py --train --model lstm": FP32,
    "stability.py --train --model s4d": FP32,
    "reverse.py --model mingru": [*THREE, "--precision bf16"],  # tf32 alone may move these
    "beyond.py --model mamba": [*THREE, "--precision bf16"],  # three by 0.01 and more
    "beyond.py --model mamba --blocks 2": [*THREE, "--precision bf16"],
    "lm_shakespeare.py --iterations 100 --lr 0.001": FP32,
    "lm_wikitext.py --data data": ["", "--no-graph", "--engine torch"],
}


def measure_trial(case):
    """{what: cross-entropy, or the last stability} of a trial, or {what is wrong: nan}."""
    (command, where, way), out = case, tempfile.mkdtemp(dir=".")
    script, *words = shlex.split(command)
    usual = f"--scale smoke --iterations 300 --batch 64 --lr 0.01 {way}"  # words come after it
    flags = [*usual.split(), *words, "--device", where, "--out", out]
    code, _, err = process(HERE / script, *flags)
    if code:
        return {err: math.nan}
    (path,) = Path(out).rglob("result.json")
    result = read_json(path)
    graph = where == "cuda" and "no-graph" not in way
    compiled = where == "cuda" and result["engine"] == "fast"
    if (result["graph"], result["compiled"]) != (graph, compiled):
        return {f"graph is {result['graph']}, compiled {result['compiled']}": math.nan}
    metrics = result["metrics"]
    found = {"loss": metrics.get("cross_entropy") or math.log(metrics["valid_perplexity"])}
    for path in Path(out).rglob("stability.json"):
        for condition, values in read_json(path)["by_condition"].items():
            found[condition] = values["300"]
    return found


def test_cuda_trials_are_the_cpus():
    cases = [(command, "cpu", "") for command in ON_GPU]
    for command, ways in ON_GPU.items():
        cases += [(command, "cuda", way) for way in ways]
    write_shakespeare()
    write_lm_tokens()
    with ThreadPoolExecutor(min(8, machine.cores())) as pool:
        found = dict(zip(cases, pool.map(measure_trial, cases)))
    wrong = []  # all that is, since GPU time is dear
    for (command, where, way), got in found.items():
        wanted, bound = found[command, "cpu", ""], 0.03 if "bf16" in way else 0.01
        for name, x in wanted.items():
            if not abs(got.get(name, math.nan) - x) < bound:
                wrong.append((command, where, way, name, got, wanted))
    for model in PAPERS:
        one, two = (found[f"reverse.py --model {model}", "cuda", way] for way in REPEATED)
        if one != two:
            wrong.append((model, "--deterministic", one, two))
    assert not wrong, "\n".join(map(str, wrong))


def test_cuda_gradients_are_those_of_double_precision():
    """Of 4,000 integers: from some 3,000 on CUDA sums by other kernels."""
    machine.prepare(FAST, torch.device("cuda"))  # products in fp32
    sizes = "--length 16 --batch 250 --hidden 256 --embed 256"
    for kind, vocab in product((*PAPERS, "mamba"), (300, 2000)):
        task = task_of(f"{sizes} --model {kind} --vocab {vocab}", build=True)
        model, batch = task.model().double(), task.training_batch(1)
        loss, _, wanted = gradients(model, batch, PLAIN)
        there = batch._replace(inputs=batch.inputs.cuda(), targets=batch.targets.cuda())
        model.zero_grad()  # else .cuda() would take along the gradients that are wanted
        model.float().cuda()
        engine = machine.choose_engine(task.args, torch.device("cuda"))
        found_loss, _, found = gradients(model, there, engine)
        close(found_loss.cpu(), loss, 1e-5)
        for name, gradient in wanted.items():
            error = (found[name].cpu().double() - gradient).norm() / gradient.norm()
            assert error < 1e-4, (kind, name, error)


def test_cuda_trial_continues_in_a_new_graph():
    words = "--scale smoke --device cuda --engine fast --deterministic --lr 0.01"
    words = f"{words} --save-every 100 --iterations 8000 --out".split()
    command = [sys.executable, HERE / "reverse.py", *words, "stopped/runs"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: child.poll() is not None or read_checkpoints())
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 75
    for out in "stopped", "whole":
        code, _, err = process(HERE / "reverse.py", *words, f"{out}/runs")
        assert code == 0, err
    assert outcome(folder_in("stopped")) == outcome(folder_in("whole"))


SMALL_CARD = """
import torch
import reverse
from suite import cli
torch.cuda.set_per_process_memory_fraction(1e-3)
raise SystemExit(cli.main(reverse.Reverse))
"""


def test_cuda_out_of_memory_is_one_line():
    code, _, err = process("-c", SMALL_CARD, "--device", "cuda", "--batch", "4096")
    assert code == 1 and err.count("\n") == 1, err
    assert not read_checkpoints()


# -- This file's own command line
def attempt(name):
    """-> (name, "passed", "skipped" or "failed", seconds, why)"""
    start, said, why = time.monotonic(), "passed", ""
    try:
        with workplace():
            if not name.startswith("test_cuda_"):
                globals()[name]()
            elif not has_gpu():
                raise SkipTest("no CUDA device")
            else:
                code, out, err = run_with_gpu(
                    "-c", f"from test_all import *; {name}()", "--on-gpu"
                )
                assert code == 0, out + err
    except SkipTest as reason:
        said, why = "skipped", f" ({reason})"
    except BaseException:  # noqa: BLE001 - any exception is a failure
        said, why = "failed", f"\n{traceback.format_exc()}"
    return name, said, time.monotonic() - start, why


def main(words):
    parts = words or [""]
    names = []
    for name in globals():
        if name.startswith("test_") and any(part in name for part in parts):
            names.append(name)
    counts = dict(passed=0, failed=0, skipped=0)
    with workplace():
        ends(0, SMOKE)  # what PyTorch imports late, once for all forked processes
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        for name, said, seconds, why in pool.map(attempt, names):
            counts[said] += 1
            print(f"{said} {seconds:6.2f} s  {name}{why}", flush=True)
    print(", ".join(f"{count} {said}" for said, count in counts.items()))
    return 1 if counts["failed"] or not names else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
