"""All tests, at small sizes.

    python test_all.py           # all tests
    python test_all.py NAME ...  # those with one of these in their names
    python test_all.py cuda      # a GPU against the CPU

Numbers are compared with independent computations. Signals, kills, files, flags and exit codes
are tested with real processes, most of them forked from this one because they start faster.
Every test runs in a new folder of its own.
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
    stats,
    tables,
    training,
)
from suite.figures import (
    K95,
    MEAN_ACCURACY,
    SPEED_UPS,
    WITH_CONSTANT,
    Claim,
    Contrast,
    Figure,
    Result,
    as_metric,
    log_odds,
    matching,
)
from variable_length import VariableLength

HERE = Path(__file__).resolve().parent
README, RESULTS = ((HERE / name).read_text() for name in ("README.md", "RESULTS.md"))
CPU = torch.device("cpu")
SMOKE = "--scale smoke --device cpu"
SYNTHETIC_TASKS = [  # every synthetic task, with flags
    (Reverse, ""),
    (VariableLength, "--min-length 3"),
    (DualFrequency, ""),
    (Sort, ""),
    (DelayedAddition, ""),
    (Predecessor, ""),
    (Rarity, "--meanings 2"),
]
PAPER_MODELS = "gru", "lstm", "s4d"
PAPER_ENCODINGS = "sin", "random", "learned"
TABLE_ENCODINGS = *PAPER_ENCODINGS, "constant", "ramp", "counter", "shuffled"
TORCH, FAST = machine.Engine("torch"), machine.Engine("fast")
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that are started here
WITH_GPUS = dict(os.environ)
if "--on-gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else forking would fail


# -- Command lines, in this process or in others
@contextlib.contextmanager
def temp_cwd():
    """Create a temporary folder and make it the current one."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def run_cli(expected, words, task=Reverse):
    """Run a command line; assert its exit code and, unless that is 0, one line on stderr.

    Returns its output. `task` may also be the module `report`.
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
    assert code == expected and err.count("\n") == (expected != 0), (words, code, out, err)
    return out + err


def assert_rejects(words, task=Reverse):
    """One line, exit code 2, and nothing is created or changed."""
    before = read_files()
    message = run_cli(2, words, task)
    assert read_files() == before and "usage:" not in message, (words, message)
    return message


def reset_signals():
    """In a child process, which may inherit ignored signals (nohup, background jobs)."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def fork(words, task=Reverse, preexec_fn=None):
    """Run a command line in a child process, which calls `preexec_fn` first.

    Its output is appended to the files stdout and stderr.
    """
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:  # whatever happens, a child must never return into the tests
        for number, name in (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        reset_signals()
        if preexec_fn:
            preexec_fn()
        sys.argv[1:] = shlex.split(words)
        code = cli.main(task)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def run_child(expected, words, task=Reverse, preexec_fn=None):
    """As `run_cli`, in a child process. Returns its stderr."""
    Path("stderr").unlink(missing_ok=True)
    code = wait(fork(words, task, preexec_fn))
    message = Path("stderr").read_text()
    assert code == expected and "Traceback" not in message, (words, code, message)
    return message


def wait(child):
    """Wait for a child -> its exit code, or -9 if it was killed by signal 9."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def wait_for(condition):
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def run(*command, preexec_fn=None, **variables):
    """Run a program -> (exit code, stdout, stderr)"""
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | {"PYTHONPATH": str(HERE)} | variables,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=preexec_fn,
    )
    return done.returncode, done.stdout, done.stderr


def run_python(*words):
    return run(sys.executable, *words)


def run_element(index, *flags, **options):
    """Run an element of a SLURM job array -> (exit code, stdout, stderr)"""
    words = f"bash '{HERE}/slurm_array.sh' '{HERE}/reverse.py' fig2 {SMOKE} --model gru"
    options |= dict(PYTHON=sys.executable, SLURM_ARRAY_TASK_ID=index)
    return run(*shlex.split(words), *flags, **options)


def task_of(words="", task=Reverse, build=False):
    """The task of a command line; `build` adds its held-out set."""
    found = cli.parse_task(task, shlex.split(words))
    if build:
        found.load_inputs()
        found.prepare_data(CPU)
    return found


# -- What trials leave
def read_files():
    """{path: content, or False for a folder}"""
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def read_checkpoints():
    """{path: content} of all checkpoints and snapshots"""
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
    """Weights, curve and metrics, which interruptions must not change."""
    weights = {}
    for name, x in load(folder / "last.pt")["model"].items():
        weights[name] = x.numpy().tobytes()
    return weights, read_curve(folder).tolist(), read_json(folder / "result.json")["metrics"]


# -- Assertions on numbers
def gradients(model, batch, features):
    """-> loss, accuracy, {parameter: gradient}, with an engine's features(model, batch)"""
    model.zero_grad()
    h = features(model, batch)
    loss, accuracy = common.loss_and_accuracy(h, model.readout, batch)
    loss.backward()
    return loss, accuracy, {name: p.grad for name, p in model.named_parameters()}


def assert_close(actual, expected, tolerance):
    """Assert a small error, relative to the largest expected number."""
    actual, expected = (
        torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected)
    )
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= tolerance * largest, f"error {error:.3g}, largest number {largest:.3g}"


def assert_chi_square(counts, expected):
    """Pearson's statistic is below a bound that fair draws exceed with probability e^-10."""
    dof = len(counts) - 1
    statistic = sum((n - mean) ** 2 / mean for n, mean in zip(counts, expected))
    bound = dof + 2 * math.sqrt(10 * dof) + 20  # Laurent and Massart, 2000
    assert statistic < bound, f"chi-square {statistic:.1f} with {dof} degrees of freedom"


def assert_uniform(outcomes, cells):
    counts = Counter(outcomes)
    assert len(counts) == cells, f"{len(counts)} of {cells} outcomes"
    assert_chi_square(counts.values(), [counts.total() / cells] * cells)


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
    every_step = common.Batch(tokens, None, slice(None))
    answered = slice(length, 2 * length)
    batch = common.Batch(tokens, tokens[:, :length].flip(1), answered, n_commands=length)
    for engine in TORCH, FAST:
        logits = model.readout(engine.features(model, every_step)).transpose(0, 1)
        loss, _, found = gradients(model, batch, engine.features)
        ours = {"logits": logits, "loss": loss, "grad_embedding": found["embedding.weight"]}
        ours["grad_norm"] = torch.nn.utils.get_total_norm(list(found.values()))
        for name in ours.keys() & theirs.keys():
            assert_close(ours[name], theirs[name], tolerance)
    if "stability" in theirs:
        target = int(theirs.get("stab_prefix", 0)) + 1
        found = stability.stability(model, theirs["stab_a"], theirs["stab_b"], target)
        assert_close(found, theirs["stability"], 1e-4 if kind == "s4d" else tolerance)


def test_matches_released_code():
    """With the author's weights: logits, loss, gradients and stability of the author's code."""
    cases = {}  # {case: {name: tensor}}
    for path, numbers in np.load(HERE / "released_code.npz").items():
        case, _, name = path.partition("/")
        cases.setdefault(case, {})[name] = torch.from_numpy(numbers)
    assert len(cases) == 12
    for case, theirs in cases.items():
        check_released_case(*case.split("-"), theirs)


def test_data_match_golden_hashes():
    """The hashes of a held-out set and of a batch, which must never change."""
    task = task_of("--vocab 2 --length 4 --held-out 8", build=True)
    rows = task.held_out_set.sequences, task.training_batch(300_000).inputs
    hashes = [common.hash_sequences(x.flatten()).item() for x in rows]
    assert hashes == [2819039426430213613, -5580236179090936445]


def encoding_of(words):
    torch.manual_seed(0)
    return task_of(f"--vocab 9 --hidden 3 {words}").make_model().encoding


def waves(steps, size):
    """(steps, size/2) e^(i t / 10000^(2n/size))"""
    t, n = torch.arange(steps)[:, None], torch.arange(size // 2).double()
    return (1j * t / 10000 ** (2 * n / size)).exp()


def test_amplitude_combine_and_encode():
    """--amplitude, --combine and --encode."""
    tokens = torch.randn(16, 2, 4)
    zeroed_steps = {"both": slice(0), "input": slice(8, 16), "output": slice(8)}
    for pe, combine, encode in product(TABLE_ENCODINGS, ("concat", "add"), zeroed_steps):
        words = f"--length 8 --embed 4 --pe {pe}"
        vectors = 3 * encoding_of(words).vectors(16).float()
        if pe == "learned":
            vectors = vectors / 2  # its own norm is the root of 4
        elif pe != "ramp":
            assert_close(vectors.norm(dim=1), torch.full((16,), 3.0), 1e-6)
        vectors[zeroed_steps[encode]] = 0
        vectors = vectors[:, None].expand(16, 2, 4)
        expected = tokens + vectors if combine == "add" else torch.cat([tokens, vectors], 2)
        encoding = encoding_of(f"{words} --amplitude 3 --combine {combine} --encode {encode}")
        assert_close(encoding(tokens), expected, 1e-6)
    constant = encoding_of("--embed 6 --pe constant").vectors(22)
    assert torch.equal(constant, constant[:1].expand(22, 6))


def test_bands_of_the_sinusoid():
    expected = torch.view_as_real(waves(12, 8)).flip(2)  # (T, 4, 2) of sines and cosines
    expected[:, [0, 3]] = 0
    encoding = encoding_of("--length 6 --embed 8 --bands 0.25:0.75 --amplitude 2")
    assert_close(encoding.vectors(12), expected.flatten(1) * 2 / math.sqrt(2), 1e-6)


def check_layer(layer, by_equations):
    """Outputs at a slice of steps, and at other steps in each row."""
    layer.double()
    for p in layer.parameters():
        p.data += torch.randn_like(p) / 4
    x = torch.randn(7, 2, 3).double()
    everything = by_equations(layer, x)
    assert_close(layer(x, slice(2, 6)), everything[2:6], 1e-10)
    of_rows = torch.stack([everything[[0, 6], 0], everything[[3, 5], 1]], 1)
    assert_close(layer(x, torch.tensor([[0, 6], [3, 5]])), of_rows, 1e-10)


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
    u, gate = layer.in_proj(x).chunk(2, 2)  # (T, B, D)
    u = F.pad(u.permute(1, 2, 0), (3, 0))  # of a step and the three before it
    u = F.silu(layer.conv1d(u)).permute(2, 0, 1)
    delta, b, c = layer.x_proj(u).split([1, 16, 16], 2)
    delta = F.softplus(layer.dt_proj(delta))
    decays = (delta[..., None] * -layer.A_log.exp()).exp()  # (T, B, D, N)
    added = (delta * u)[..., None] * b[:, :, None]
    state, outputs = 0, []
    for t in range(len(u)):
        state = decays[t] * state + added[t]
        outputs.append((state * c[t][:, None]).sum(2))
    return layer.out_proj((torch.stack(outputs) + layer.D * u) * F.silu(gate))


def mingru_by_its_recurrence(layer, x):
    """h_t = (1 - z_t) h_t-1 + z_t h~_t"""
    z, candidate = F.linear(x, layer.weight, layer.bias).chunk(2, 2)
    h = [x.new_zeros(2, 5)]
    for t in range(len(x)):
        h.append(torch.lerp(h[t], candidate[t], z[t].sigmoid()))
    return torch.stack(h[1:])


def test_layers_by_their_equations():
    torch.manual_seed(0)
    check_layer(common.S4D(3, 5, state_size=6), lambda *given: run_s4d(*given)[0])
    check_layer(beyond.Mamba(3, 5), mamba_by_its_recurrence)
    check_layer(common.MinGRU(3, 5), mingru_by_its_recurrence)


def test_s4d_initialisation():
    layer = common.S4D(4, 2000)
    steps = torch.linspace(math.log(1e-3), math.log(1e-1), 2000)  # what a fair draw is near to
    assert_close(layer.log_dt.sort().values, steps, 0.02)
    assert_close(layer.log_A_real[7].exp(), [0.5] * 32, 1e-6)
    assert_close(layer.A_imag[7], math.pi * torch.arange(32), 1e-6)


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


def test_damerau_levenshtein_matches_bfs():
    strings = {"".join(x) for n in range(6) for x in product("012", repeat=n)}
    for start in (x for x in strings if len(x) in (1, 2, 4)):
        found = distances_from(start, strings)
        for n in range(1, 5):
            others = [x for x in found if len(x) == n]
            ours, theirs = letters([start] * len(others)), letters(others)
            actual = common.damerau_levenshtein(ours, theirs)
            assert actual.tolist() == [found[x] for x in others], start


def evaluate_by_hand(model, batch):
    """-> loss, whether each answer is right (B, M), whether it counts (B, M)"""
    mask = torch.ones_like(batch.targets).bool()
    if batch.mask is not None:
        mask = batch.mask
    logits = model(batch).transpose(0, 1)  # (B, M, K)
    loss = F.cross_entropy(logits[mask], batch.targets[mask])
    return loss, (logits.argmax(-1) == batch.targets).double(), mask


def test_metrics_by_hand():
    targets, mask = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[True, True], [True, False]])
    predictions = torch.tensor([[2, 1], [3, 9]])  # two are swapped
    losses = torch.tensor([[1.0, 2.0], [6.0, 100.0]])
    batch = common.Batch(None, targets, None, mask)
    metrics = common.sequence_metrics(batch, predictions, losses)
    assert list(metrics.values()) == [1 / 3, 1 / 2, 3.0, 1 / 2], metrics


def train_plainly(task, model, rates):
    """Train with the hyperparameters of the test below -> losses and accuracies (N, 2)"""
    adam = torch.optim.Adam(model.parameters(), betas=(0.8, 0.98), eps=1e-3, foreach=False)
    rows = []
    for i, rate in enumerate(rates, 1):
        loss, accuracy, _ = gradients(model, task.training_batch(i), TORCH.features)
        rows.append([loss.item(), accuracy.item()])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.1, "clipping does something"
        adam.param_groups[0]["lr"] = rate
        adam.step()
    return np.array(rows)


def test_training_matches_reference_loop():
    words = f"{SMOKE} --model gru --lr 0.012 --warmup 3 --iterations 6 --log-every 2"
    words += " --clip 0.05 --beta1 0.8 --beta2 0.98 --eps 1e-3 --seed 3"
    rates = 0.004, 0.008, 0.012, 0.009, 0.003, 0  # half a cosine after a warm-up of three
    task = task_of(words, build=True)
    torch.manual_seed(3)
    model = task.make_model()
    means = train_plainly(task, model, rates).reshape(3, 2, 2).mean(1)
    run_cli(0, words)
    expected = np.column_stack([[2, 4, 6], means, rates[1::2]])
    assert np.allclose(read_curve(folder_in()), expected, rtol=1e-5, atol=1e-9)
    for name, weights in load_last()["model"].items():
        assert torch.allclose(weights, model.state_dict()[name], rtol=0, atol=2e-5), name


# -- Data: what is drawn, held out, asked and counted
def check_batches(device, compiled=False):
    for task_class, flags in SYNTHETIC_TASKS:
        words = f"--vocab 50 --length 6 --batch 40 {flags}"
        task = task_of(words, task_class, build=True)
        alike = task_of(
            f"{words} --model gru --iterations 3 --lr 1", task_class
        )  # its data are
        alike.prepare_data(device)
        other = task_of(f"{words} --seed 4", task_class, build=True)
        draw = alike.training_batch
        if compiled:
            draw = torch.compile(draw, dynamic=False)
        batch, again = task.training_batch(7), draw(torch.tensor(7, device=device))
        for x, y in zip(batch, again):
            assert torch.equal(x, y.cpu()) if isinstance(x, torch.Tensor) else x == y
        assert torch.equal(task.held_out_set.sequences, alike.held_out_set.sequences.cpu())
        assert not torch.equal(task.held_out_set.sequences, other.held_out_set.sequences)
        for different in task.training_batch(8), other.training_batch(7):
            assert not torch.equal(batch.inputs, different.inputs)


def test_batch_depends_on_seed_and_iteration_only():
    check_batches(CPU)


SCARCE = [  # more than a tenth of all rows are held out
    (Reverse, "--vocab 2 --length 4 --held-out 8"),
    (VariableLength, "--vocab 4 --length 4 --held-out 5 --min-length 2"),
    (DualFrequency, "--vocab 4 --length 3 --held-out 12"),
    (Sort, "--vocab 3 --length 3 --held-out 13"),
    (DelayedAddition, "--vocab 2 --length 2 --held-out 6"),
    (Predecessor, "--vocab 4 --length 3 --held-out 16"),
]


def enumerate_rows(task):
    """Every row and its relative probability in training."""
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


def test_training_skips_held_out_sequences_and_keeps_the_distribution():
    for task_class, flags in SCARCE:
        task = task_of(f"{flags} --batch 512", task_class, build=True)
        rows, weights = task.held_out_set.sequences, dict(enumerate_rows(task))
        held_out = set(map(tuple, rows.tolist()))
        assert len(held_out) == len(rows) and held_out < weights.keys()
        probability = sum(weights[row] for row in held_out) / sum(weights.values())
        assert probability > 0.1 and abs(task.held_out_probability(rows) - probability) < 1e-12
        with mock.patch.object(task, "make_batch", torch.clone):  # so that a batch is its rows
            trained = torch.cat([task.training_batch(i) for i in range(1, 41)])
            task.held_out_set.n_candidates = 1  # what it refuses is the fallback row now
            spared = task.training_batch(1)
        assert held_out.isdisjoint(map(tuple, spared.tolist()))
        counts = Counter(map(tuple, trained.tolist()))
        allowed = {row: weight for row, weight in weights.items() if row not in held_out}
        assert counts.keys() <= allowed.keys(), task_class
        expected = np.array(list(allowed.values())) * counts.total() / sum(allowed.values())
        assert_chi_square([counts[row] for row in allowed], expected)


def read_batch(batch, b):
    """-> the inputs of row b, {step: target}"""
    read, targets = batch.inputs[b].tolist(), batch.targets[b].tolist()
    steps = batch.target_steps
    steps = range(len(read))[steps] if isinstance(steps, slice) else steps[b].tolist()
    weights = [1] * len(targets) if batch.mask is None else batch.mask[b]
    answers = zip(steps, targets, weights, strict=True)
    return read, {step: target for step, target, weight in answers if weight}


def expected_targets(task_class, x):
    """-> the first answered step, the targets from there on (L = 5)"""
    if task_class is Predecessor:
        return 5, [x[x.index(x[5]) - 1]]
    if task_class is DelayedAddition:
        return 5, [(x[4 - i] + x[5 + i]) % 10 for i in range(5)]
    if task_class is Rarity:
        return len(x), [code % 2 for code in reversed(x)]
    return len(x), sorted(x) if task_class is Sort else x[::-1]


def test_inputs_and_targets_by_task():
    for task_class, flags in SYNTHETIC_TASKS:
        task = task_of(f"--vocab 10 --length 5 --held-out 20 {flags}", task_class, build=True)
        rows = task.draw(common.derive_key(1), (300,))
        batch = task.make_batch(rows)
        for b, row in enumerate(rows.tolist()):
            x = [integer for integer in row if integer < 10]
            first, answers = expected_targets(task_class, x)
            read = x + [10] * (task.n_steps() - len(x))
            expected = read, dict(enumerate(answers, first))
            assert read_batch(batch, b) == expected, (task_class, row)


def check_conditions(task, correct, by_condition):
    """dual_frequency.py has two rows per condition and position of the target, in order."""
    assert_close(list(by_condition.values()), correct.view(4, 8, 2).mean(2), 1e-6)
    rows, batch = task.held_out_set.sequences.tolist(), task.held_out_batch()
    for b, (condition, position, _) in enumerate(product(by_condition, range(8), range(2))):
        assert read_batch(batch, b)[1] == {15 - position: rows[b][position]}
        kinds = ["rare" if integer >= 4 else "frequent" for integer in rows[b]]
        target, disturbants = condition.split("/")
        assert kinds.pop(position) == target and set(kinds) == {disturbants}


def test_evaluation_by_hand():
    """Held-out metrics, also by length, and by condition and position."""
    for task_class, flags in SYNTHETIC_TASKS:
        task = task_of(f"--scale smoke --held-out 64 --batch 7 {flags}", task_class, build=True)
        model = task.make_model()
        loss, correct, mask = evaluate_by_hand(model, task.held_out_batch())
        metrics = task.evaluate(model, TORCH)
        accuracy = metrics["accuracy" if task_class is Predecessor else "token_accuracy"]
        assert_close(accuracy, correct[mask].mean(), 1e-12)
        assert_close(metrics["cross_entropy"], loss, 1e-6)
        if task_class is VariableLength:
            for length, accuracy in metrics["by_length"].items():
                of_length = mask & (mask.sum(1, keepdim=True) == int(length))
                assert_close(accuracy, correct[of_length].mean(), 1e-12)
        if task_class is DualFrequency:
            check_conditions(task, correct, metrics["by_condition"])


# -- The fast engine: the plain models' numbers and gradients
def compare_engines(words, task_class=Reverse):
    torch.manual_seed(0)
    words = f"--vocab 8 --batch 7 --hidden 10 --embed 6 --held-out 20 {words}"
    task = task_of(words, task_class, build=True)
    model, batch = task.make_model().double(), task.training_batch(1)
    loss, correct, mask = evaluate_by_hand(model, batch)
    expected = torch.autograd.grad(loss, model.parameters())
    for engine in TORCH, FAST:
        found_loss, accuracy, found = gradients(model, batch, engine.features)
        assert_close(found_loss, loss, 1e-10)
        assert_close(accuracy, correct[mask].mean(), 1e-10)
        for actual, gradient in zip(found.values(), expected, strict=True):
            assert_close(actual, gradient, 1e-10)
    plain, metrics = (task.evaluate(model, engine) for engine in (TORCH, FAST))
    assert_close(metrics.pop("cross_entropy"), plain.pop("cross_entropy"), 1e-10)
    assert metrics == plain


def test_engines_agree_with_every_encoding_and_task_and_at_sizes_of_1_to_3():
    tasks = cycle(SYNTHETIC_TASKS)
    for kind in PAPER_MODELS:
        for pe, how in product(
            common.ENCODINGS, ("--combine add --amplitude 2", "--amplitude 3")
        ):
            how = how if pe in TABLE_ENCODINGS else ""
            task_class, flags = next(tasks)
            compare_engines(f"--length 5 --model {kind} --pe {pe} {how} {flags}", task_class)
        for task_class, flags in SYNTHETIC_TASKS[2:]:
            compare_engines(f"--length 5 --model {kind} --encode output {flags}", task_class)
        for length, batch in product((1, 2, 3), (1, 3)):
            sizes = f"--length {length} --vocab 40 --batch {batch} --hidden 40"
            compare_engines(f"{sizes} --model {kind}")
        compare_engines(f"--length 3 --hidden 1 --model {kind}")  # as W.T is W


def force_cuda_path():
    """The steps that are written for CUDA compute."""
    return mock.patch.object(rnn_kernels, "on_cpu", lambda x: False)


def test_engines_agree_on_cuda_path_and_in_small_chunks():
    patches = [force_cuda_path()]
    patches += [mock.patch.object(common, "rows_per_chunk", lambda w, n=n: n) for n in (1, 6)]
    cases = (VariableLength, "--min-length 3"), (Reverse, "--pe learned"), (Reverse, "")
    for kind, patch, (task_class, flags) in product(PAPER_MODELS, patches, cases):
        with patch:
            compare_engines(f"--length 5 --model {kind} {flags}", task_class)


def test_training_step_never_synchronises():
    """On the meta device what needs a value raises, and so does what meets tensors of a CPU."""
    for (task_class, flags), kind in product(SYNTHETIC_TASKS, PAPER_MODELS):
        task = task_of(f"{SMOKE} --model {kind} {flags}", task_class, build=True)
        t = training.Trainer(task, CPU, FAST)
        for owner in t, task, task.held_out_set:
            for name, x in vars(owner).items():
                if isinstance(x, torch.Tensor | torch.nn.Module):
                    setattr(owner, name, x.to("meta"))
        t.sums = {name: x.to("meta") for name, x in t.sums.items()}
        t.optimizer = torch.optim.Adam(t.model.parameters(), foreach=False)
        iteration = torch.zeros((), dtype=torch.int64, device="meta")
        t.train_on(task.training_batch(iteration))


# -- One trial: whatever disturbs it, the result is bitwise identical
TRIAL = (
    f"{SMOKE} --model gru --iterations 60 --save-every 10 --log-every 10 --snapshot-every 15"
)


@functools.cache
def run_undisturbed():
    """-> the outcome"""
    with temp_cwd():
        run_child(0, TRIAL)
        return outcome(folder_in())


def resume_and_check(parts):
    """Continue to the end and compare; `parts`: last iterations of earlier processes."""
    run_child(0, TRIAL)
    folder = folder_in()
    assert outcome(folder) == run_undisturbed()
    left = {path.name for path in folder.rglob("*.*")}
    snapshots = {f"0000{iteration}.pt" for iteration in (15, 30, 45, 60)}
    assert left == snapshots | {"config.json", "curve.csv", "last.pt", "result.json"}
    earlier = read_json(folder / "result.json")["earlier"]
    assert [part["until"] for part in earlier] == parts


def task_with_callback(disturb, at=25):
    """A task that calls disturb(task) in iteration `at`, or ("the end") when evaluated."""

    class Disturbed(Reverse):
        def training_batch(self, i):
            if i == at:
                disturb(self)
            return super().training_batch(i)

        def evaluate(self, model, engine):
            if at == "the end":
                disturb(self)
            return super().evaluate(model, engine)

    return Disturbed


def task_with_signal(number, at=25):
    return task_with_callback(lambda task: signal.raise_signal(number), at)


def test_signals_checkpoint_and_resuming_is_bitwise_identical():
    for number in SIGNALS:
        with temp_cwd():
            message = run_child(75, f"{TRIAL} --overwrite", task_with_signal(number))
            assert "run the same command without --overwrite again to resume" in message
            assert load_last()["iteration"] == 25
            progress = read_json(folder_in() / "progress.json")
            assert progress["fraction"] == 20 / 60 and progress["duration"] > 0
            message = run_child(75, TRIAL, task_with_signal(number, at="the end"))
            assert "run the same command again to resume" in message
            resume_and_check([25, 60])


def test_second_ctrl_c_exits_at_once():
    def press_twice(task):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    run_child(130, TRIAL, task_with_callback(press_twice))
    assert load_last()["iteration"] == 20


FAKE_TORCH = """
import os, time
os.kill(os.getppid() if "SLURM_ARRAY_TASK_ID" in os.environ else os.getpid(), {})
time.sleep(60)
"""


def test_signal_during_torch_import_exits_75():
    Path("scontrol").touch(0o755)  # nothing to requeue
    here = str(Path.cwd())
    options = dict(preexec_fn=reset_signals, PYTHONPATH=here)
    scripts = sorted({task.script() for task in report.TASKS})
    for script, number in zip(scripts, cycle(SIGNALS)):
        Path("torch.py").write_text(FAKE_TORCH.format(int(number)))
        code, _, err = run(sys.executable, HERE / script, **options)
        assert (code, err) == (75, f"{script}: stopped; run the same command again to resume\n")
        code, _, err = run_element("0", PATH=f"{here}:{os.environ['PATH']}", **options)
        assert (code, err) == (
            75,
            "reverse.py: stopped; run the same command again to resume\n",
        )


def print_to_nobody(stream):
    """In a child process: writing to stdout and stderr fails from now on."""
    if stream == "a full log":
        there = os.open("/dev/full", os.O_WRONLY)
    else:
        ours, there = os.openpty() if stream == "a closed terminal" else os.pipe()
        os.close(ours)
    for number in 1, 2:
        os.dup2(there, number)


def test_trial_survives_broken_output():
    streams = ["a closed terminal", "a broken pipe"]
    if Path("/dev/full").exists():
        streams.append("a full log")
    for stream in streams:
        preexec_fn = functools.partial(print_to_nobody, stream)
        with temp_cwd():
            assert wait(fork(TRIAL, task_with_signal(signal.SIGHUP), preexec_fn)) == 75, stream
            assert load_last()["iteration"] == 25
            assert wait(fork(TRIAL, Reverse, preexec_fn)) == 0, stream
            assert outcome(folder_in()) == run_undisturbed()


def stall():
    """In a child process: a terminal stopped by Ctrl-S, with a full buffer."""
    _, there = os.openpty()
    termios.tcflow(there, termios.TCOOFF)
    os.set_blocking(there, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(there, b"x")
    os.set_blocking(there, True)
    for number in 1, 2:
        os.dup2(there, number)


def test_signal_saves_within_a_second_despite_stalled_output():
    child = fork(TRIAL, task_with_callback(lambda task: [stall(), print("this waits")]))
    wait_for(lambda: len(read_checkpoints()) == 3)  # of iterations 10, 15 and 20
    time.sleep(0.5)  # it is blocked
    os.kill(child, signal.SIGTERM)
    time.sleep(1)
    os.kill(child, signal.SIGKILL)  # nothing to one that has ended
    assert wait(child) == 75
    resume_and_check([25])


def damage(content):
    """The content cut, emptied, or with one bit turned in one of seven places."""
    yield content[:-999]
    yield b""
    for n in range(7):
        at = n * (len(content) - 1) // 6
        yield content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_corrupt_checkpoints_are_skipped_and_not_kept():
    """The last, else the one before, else the start: all lead to the same end."""
    run_child(75, TRIAL, task_with_signal(signal.SIGTERM))
    last, previous = folder_in() / "last.pt", folder_in() / "previous.pt"
    whole = last.read_bytes()
    Path("runs").rename("kept")
    for content in damage(whole):
        shutil.copytree("kept", "runs")
        last.write_bytes(content)
        run_child(75, TRIAL, task_with_signal(signal.SIGTERM, at=22))
        assert load(previous)["iteration"] == 20
        resume_and_check([20, 22])
        shutil.rmtree("runs")
    shutil.copytree("kept", "runs")
    for path in last, previous:
        path.write_bytes(whole[:-999])
    resume_and_check([])


def assert_fails(words, preexec_fn=None):
    """Assert one line, exit code 1, and no half-written file."""
    assert run_child(1, words, preexec_fn=preexec_fn).count("\n") == 1
    assert not list(Path().rglob("*.tmp"))


def limit_file_size():
    """No file may be as large as a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))


def test_full_disk_or_unreadable_checkpoint_exits_1():
    assert_fails(TRIAL, limit_file_size)
    run_child(75, TRIAL, task_with_signal(signal.SIGTERM))
    path, good, kept = folder_in() / "last.pt", load_last(), read_checkpoints()
    assert_fails(TRIAL, limit_file_size)
    assert len(kept) == 3 and read_checkpoints() == kept
    snapshot = {"model": good["model"]}
    for content in [], snapshot, good | {"model": {}}, good | {"iteration": 10**9}:
        files.save(path, content)
        kept = read_checkpoints()
        assert_fails(TRIAL)
        assert read_checkpoints() == kept
    path.unlink()
    path.mkdir()
    assert_fails(TRIAL)
    path.rmdir()
    files.save(path, good)
    resume_and_check([25])


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


def test_resuming_after_sigkill_and_folder_lock():
    for call in range(0, 100, 6):
        with temp_cwd():
            child = fork(TRIAL, preexec_fn=functools.partial(die_at, call))
            assert wait(child) == -signal.SIGKILL
            run_child(0, TRIAL)
            assert outcome(folder_in()) == run_undisturbed()
    racing = [fork(TRIAL), fork(TRIAL)]
    assert sorted(map(wait, racing)) in ([0, 0], [0, 73])
    with files.lock(folder_in()):  # as another process would
        run_cli(73, f"{TRIAL} --overwrite")
    assert outcome(folder_in()) == run_undisturbed()


def test_trial_without_its_folder_exits_73():
    def rename_folder(task):
        task.folder.rename("renamed")
        assert wait(fork(TRIAL)) == 0  # another process finishes it anew
        shutil.copytree(task.folder, "theirs")

    def read_folder(folder):
        return {path.name: path.read_bytes() for path in folder.rglob("*.*")}

    assert "deleted or renamed" in run_child(73, TRIAL, task_with_callback(rename_folder))
    assert read_folder(folder_in()) == read_folder(Path("theirs"))
    assert find_results()


def test_divergence_exits_3():
    # Adam divides 0 by 0 for unread embeddings, while the loss is finite
    run_cli(3, f"{SMOKE} --vocab 999 --eps 0 --save-every 1")
    assert not read_checkpoints()
    words = f"{SMOKE} --model s4d --lr 1000 --warmup 10 --save-every 1 --snapshot-every 1"
    for _ in range(2):
        run_cli(3, words)
        kept = read_checkpoints()
        assert kept and not find_results()
        for path in kept:
            assert all(x.isfinite().all() for x in load(path)["model"].values())


def test_out_of_memory_exits_1():
    if sys.platform != "linux":
        raise SkipTest("no limit on memory")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 2**28
    limit_memory = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (limit, limit))
    assert_fails(f"{SMOKE} --batch 100000 --hidden 64", limit_memory)


def test_progress_on_terminals_and_in_logs():
    words = f"{SMOKE} --iterations 400"
    ours, theirs = os.openpty()
    child = fork(words, preexec_fn=functools.partial(os.dup2, theirs, 1))
    os.close(theirs)
    message = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(ours, 4096):
            message += part
    assert wait(child) == 0
    assert re.search(rb"\r *\d+%  \S+ left  train accuracy .*\r", message)
    log = run_cli(0, f"{words} --overwrite")
    assert "100/400" in log and "\r" not in log


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
        "--hidden 2147483646",
        "--length 2147483646",
        "--batch 2147483646",
        "--out file",
        f"--out {'long' * 64}",
        LONG_NAME,
        "--lr nan",
        "--embed 7",
        "--seed 0-4",
        "--list fig2 --seed 0-99999999999999999999",
        "--warmup 11 --iterations 10",
        "--vocab 2 --length 3",
        "--vocab 2 --length 3 --held-out 5",
        "--bands 0.51:0.55",
        "--bands 0.5:0.5",
        "--pe none --amplitude 2",
        "--pe random --bands 0:0.5",
        "--pe counter --embed 3",
        "--pe learned --embed -3",
        "--model mingru --engine fast",
        "--device cuda",
        "--all fig99",
        "--list fig2 --vocab 31",
    ],
    DualFrequency: ["--vocab 15", "--held-out 100", "--held-out 12 --vocab 2 --length 3"],
    beyond.Beyond: ["--blocks 2", "--model mamba --blocks 2147483646"],
    Shakespeare: ["--layers 2147483646", "--context 2147483646"],
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


def test_invalid_flags_are_rejected_before_anything_is_created():
    Path("file").touch()
    for task, cases in REFUSED.items():
        for words in cases:
            assert_rejects(f"--scale smoke {words}", task)
    shutil.copy(HERE / "RESULTS.md", "page.md")
    script = f"'{HERE}/reverse.py'"
    for words in f"'{HERE}/README.md'", "--write page.md --out .", f"{script} fig99":
        assert_rejects(words, report)
    for words in "--scale huge", "fig2 --lr x", "--scale smoke --vocab 123":
        assert_rejects(f"{script} {words}", report)
    assert_rejects("--vocab 2 --length 4 --model gru --hidden 8")
    with mock.patch.object(cli, "run_many"):  # the paper's size on a CPU
        assert "scales: desk" in assert_rejects("--all fig2")


def test_rejects_mismatched_or_invalid_results():
    run_cli(0, SMOKE)
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
        assert_rejects(SMOKE)
    for bad in "[" * 100_000, '{"config": []}', '{"config": {}, "metrics": {}}', "null":
        path.write_text(bad)
        run_cli(1, SMOKE)
    run_cli(0, f"{SMOKE} --overwrite")


def test_finished_trial_is_shown_or_reevaluated():
    evaluate = f"{SMOKE} --evaluate"
    assert_rejects(evaluate)
    run_cli(0, SMOKE)
    before, path = read_files(), folder_in() / "result.json"
    result = read_json(path)
    assert f"{result['metrics']['token_accuracy']:.4g}" in run_cli(0, SMOKE)
    assert_rejects(f"{evaluate} --overwrite")
    assert read_files() == before and result["argv"] == SMOKE.split()
    path.write_text(json.dumps(result | {"metrics": {}, "examples": []}))
    run_cli(0, evaluate)
    after = read_json(path)
    assert after.pop("evaluated")["argv"] == evaluate.split()
    varying = dict.fromkeys(["finished", "peak_memory_bytes", "until"])
    assert after | varying == result | varying
    (folder_in() / "last.pt").write_bytes(b"damaged")
    assert "no checkpoint of its last iteration" in run_child(1, evaluate)


def test_is_dirty_detects_uncommitted_code():
    paths = machine.git("ls-files", "--full-name", ":/").splitlines()
    tracked, changes = {HERE / path for path in paths}, ""

    def git(command, *words):
        if command == "ls-files":  # an error, unless all these files are tracked
            return "" if tracked.issuperset(words[1:]) else None
        return changes

    patch = mock.patch.object(machine, "git", git)
    with patch, mock.patch.dict(sys.modules), contextlib.chdir(HERE):
        for name in {"mine", "echo"} & sys.modules.keys():  # of other tests
            del sys.modules[name]
        assert machine.is_dirty() is False
        tracked.remove(HERE / "suite/machine.py")
        assert machine.is_dirty() is True  # an imported module is not tracked
        changes = " M common.py"
        assert machine.is_dirty() is True
    with mock.patch.object(machine, "git", lambda *_: None):
        assert machine.is_dirty() is None  # there is no git


def test_rejects_checkpoint_or_snapshot_of_another_trial():
    words = f"{SMOKE} --pairs 8 --train"
    for seed in 0, 1:
        run_cli(0, f"{words} --seed {seed}", Stability)
    again = f"{words} --seed 0 --overwrite"
    for name in "000020.pt", "last.pt":
        ours, theirs = sorted(Path().rglob(name))
        kept = ours.read_bytes()
        shutil.copy(theirs, ours)
        assert "seed 1 in the file, not 0" in run_cli(2, again, Stability)
        files.save(ours, {"config": 3})
        assert f"{ours} cannot be read" in run_cli(1, again, Stability)
        ours.write_bytes(kept)
        min(find_results()).unlink()  # so that its training has to go on


SAME_FOLDER = [
    "--log-every 3",
    "--out x",
    "--precision fp32",
    "--engine torch",
    "--overwrite",
    "--warmup 1000",  # these three are the paper's
    "--amplitude 1",
    "--bands 0:1",
]
OWN_FOLDER = [
    "",
    "--vocab 8",
    "--length 8",
    "--pe none",
    "--combine add",
    "--encode input",
    "--amplitude 2",
    "--bands 0:0.5",
    "--iterations 9",
    "--batch 9",
    "--warmup 7",
    "--clip 0",
    "--beta2 0",
    "--precision bf16",
]


def test_folder_names_contain_flags_that_affect_results():
    for words in SAME_FOLDER:
        assert task_of(words).folder.parent.name == "lstm-sin-K16384-L64", words
    names = {task_of(words).folder.parent.name for words in OWN_FOLDER}
    assert len(names) == len(OWN_FOLDER)
    folder = task_of("--min-length 3", VariableLength).folder
    assert folder.parent.name == "lstm-sin-K16384-L64-min-length=3"


def trials_of(task, figure, scale, *words):
    typed = cli.parse(task, ["--scale", scale, *words])
    return cli.trials_of_figure(task, typed, figure)


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


def test_paper_defaults_and_grids():
    for trial in trials_of(Reverse, "fig2", "paper"):
        assert APPENDIX_A.items() <= vars(trial.task.args).items()
    counts = [len(trials_of(task, None, "paper")) for task in bench.PAPER_TASKS]
    assert counts == [225, 30, 20, 115, 50, 50, 10]
    assert task_of("--model s4d", Stability).args.target == 23


def list_commands(words, task=Reverse):
    """The lines that --list prints; no line occurs twice."""
    lines = run_cli(0, f"--list {words}", task).splitlines()
    assert len(set(lines)) == len(lines)
    return lines


def test_list_and_its_filters():
    one = "--model gru --pe sin --vocab 32 --seed 3 --out 'a b' --beta2 0.98"
    assert list_commands(f"fig2 --jobs 3 {one}") == [f"python reverse.py {one}"]
    seeds = list_commands("fig2 --model gru --seed 3-9")
    assert len(seeds) == 8 * 7, "in place of the figure's 0 to 4"
    for scale in "desk", "quick", "smoke":
        for task, name in report.figures_at(scale):
            for line in list_commands(f"{name} --scale {scale}", task):
                task_of(line.partition(".py")[2], task)  # every command is accepted


def test_all_flag_runs_listed_trials_despite_failures():
    words = f"fig2 {SMOKE} --model lstm --vocab 8 --seed 0-1"
    trials = [task_of(line.partition(".py")[2]) for line in list_commands(words)]
    done, broken, locked, new = (task.folder for task in trials)
    run_cli(0, f"{SMOKE} --model lstm --vocab 8 --pe none --seed 0")
    before = (done / "result.json").read_bytes()

    def run_all(expected, *finished):
        code = wait(fork(f"--jobs 2 --all {words}"))
        assert code == expected, Path("stderr").read_text()
        assert {path.parent for path in find_results()} == {*finished}

    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.touch()  # in place of its folder: this trial ends with 1
    with files.lock(locked):  # as another process would
        run_all(73, done, new)
    run_all(1, done, locked, new)
    broken.unlink()
    run_all(0, done, broken, locked, new)
    assert (done / "result.json").read_bytes() == before  # what is done is skipped
    assert {path.parent for path in Path().rglob("log.txt")} == {broken, locked, new}


def test_all_flag_estimates_the_time_left():
    trials = trials_of(Reverse, "fig2", "smoke", "--model", "lstm")  # four
    progress = {}
    # 100 s each; a trial without progress takes as long as the others. Two at a time
    for trial, fraction, left in zip(trials, (0.2, 0.6), ("0:03:10", "0:02:40")):
        trial.folder.mkdir(parents=True)
        content = dict(fraction=fraction, accuracy=0.5, duration=100)
        (trial.folder / "progress.json").write_text(json.dumps(content))
        jobs.read_progress(trials, progress)
        assert jobs.format_eta(trials, progress, 2) == f", {left} left"


def read_last_rows():
    """{folder: the last row of its curve}"""
    return {path.parent: path.read_text().split()[-1] for path in Path().rglob("curve.csv")}


def test_all_flag_stops_and_resumes_and_leaves_no_orphans():
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
    assert "4 of 4 trials" in Path("stdout").read_text(), "it reports"
    parts = [read_json(path)["earlier"] for path in find_results()]
    assert len(parts) == 4 and sum(map(bool, parts)) == 2


def test_slurm_array_task_runs_its_trial_without_a_shell():
    out = "a b\ntouch c; $(touch d) 'e"
    for index, expected in ("2", 0), ("4", 2):  # beyond the list
        code, _, err = run_element(index, "--out", out)
        assert code == expected, err
    third = list_commands(f"fig2 {SMOKE} --model gru")[2]
    (result,) = find_results()
    assert read_json(result)["argv"][:6] == shlex.split(third)[2:8]
    assert not Path("c").exists() and not Path("d").exists()


# -- Statistics, contrasts, claims and tables, held to SciPy's numbers
def test_welchs_t_test():
    """Their example: t = -2.46, 25.0 degrees of freedom, p = .021"""
    a = "27.5 21.0 19.0 23.6 17.0 17.9 16.9 20.1 21.9 22.6 23.1 19.6 19.0 21.7 21.4"
    b = "27.1 22.0 20.8 23.4 23.4 23.5 25.8 22.0 24.8 20.2 21.9 22.1 22.9 20.5 24.4"
    a, b = (list(map(float, numbers.split())) for numbers in (a, b))
    found = stats.estimate([a, b], [1, -1])
    t = found.value / found.stderr
    assert np.allclose([t, found.dof, found.p()], [-2.455, 24.989, 0.021], rtol=0, atol=5e-4)
    same = stats.estimate([[0.1] * 4, [0.1] * 7], [1, -1])
    assert_close(same.p(), 1, 1e-9)


def test_holms_correction():
    """The smallest p times how many there are, the next times one less, and so on."""
    found = stats.holm([0.04, 0.03, 0.01, 1.0])
    assert_close(found, [0.09, 0.09, 0.04, 1.0], 1e-12)  # .04 x 2 is less than the one before


def make_results(cells):
    """Results of [(flags, token accuracy of each seed)]; None: not finished."""
    found = []
    for flags, accuracies in cells:
        for seed, accuracy in enumerate(accuracies):
            result = Result(flags | {"seed": seed})
            if accuracy is not None:
                config = {"vocab": 16} | result.flags
                result = result._replace(config=config, values={"token accuracy": accuracy})
            found.append(result)
    return found


CONSTANT = [0.53, 0.50, 0.55, 0.51]
PE = [0.69, 0.75, 0.64, 0.80]
ARMS = [
    ({"pe": "none"}, [0.50, 0.51, 0.52, 0.48]),
    ({"pe": "constant"}, CONSTANT),
    ({"pe": "sin"}, PE),
]
PE_OVER_NONE, PE_OVER_CONSTANT = "+0.218 [+0.110, +0.325]", "+0.198 [+0.091, +0.304]"


def lines_of(results, **options):
    figure = Figure("", {}, **options)
    metrics = [*map(as_metric, figure.metrics), *figure.summaries]
    found = [tables.make_caption(figure, results, metrics, "desk")]
    for part in tables.means_table, tables.contrast_table:
        found += part(figure, results, metrics)
    return [re.sub(" {2,}", "|", line) for line in found]


def test_table_of_known_data():
    cells = [({"vocab": K} | flags, values) for K in (4, 8) for flags, values in ARMS]
    found = make_results([*cells, ({"vocab": 8, "pe": "dup"}, [None, 0.4, 0.6, None])])
    row = "0.502 ±0.027|0.522 ±0.035|{}|0.720 ±0.111"
    row += f"|{PE_OVER_NONE}|.006|{PE_OVER_CONSTANT}|.008"
    assert lines_of(found) == [
        ": desk scale; token accuracy; n = 2 to 4; chance 0.25 to 0.125; 26 of 28 trials",
        "K|no PE|constant|dup|PE|PE - no PE|p|PE - constant|p",
        f"4|{row.format('-')}",
        f"8|{row.format('0.500 (n = 2)')}",
    ]
    assert lines_of(make_results(ARMS[2:]))[-1] == "0.720 ±0.111"


def test_contrasts_of_lists_and_pairs():
    none, constant, dup, pe = ({"pe": name} for name in ("none", "constant", "dup", "sin"))
    sums = Contrast("sum", [pe, constant], [none, dup])
    paired = Contrast("paired", constant, none, paired=True)  # by .03, -.01, .03 and .03
    absent = Contrast("absent", {"pe": "learned"}, none)
    results = make_results([*ARMS, (dup, CONSTANT[::-1])])
    assert lines_of(results, contrasts=(sums, absent, paired))[-2:] == [
        "sum|+0.218 [+0.115, +0.320]|.003",
        "paired|+0.020 [-0.012, +0.052]|.139",
    ]


def test_outcomes_of_preregistered_claims():
    """The larger of two p supports; twice the smaller of the other direction contradicts."""

    def last_row(*accuracies_with_pe):
        claims = []
        for accuracies in accuracies_with_pe:
            arms = [*ARMS[:2], ({"pe": "sin"}, accuracies)]
            claim = Claim("family", "token accuracy", dict(model=None))
            claims.append((claim, "#link", make_results(arms)))
        *_, row, _ = tables.claims_table(claims)
        return row

    below = [0.3, 0.31, 0.32, 0.3]
    for pe, word in (PE, "supported"), (CONSTANT, "inconclusive"), (below, "contradicted"):
        assert last_row(pe).endswith(f"| {word} |")
    # Holm takes 3 times the smallest p, 2 times the next: here .0077 and .0065 are the larger
    assert last_row(below, PE).endswith("| .008 | supported |")
    row = last_row(CONSTANT, CONSTANT, PE)
    assert row.endswith("| .023 | supported |")
    for text in PE_OVER_NONE, PE_OVER_CONSTANT, "| 0.720 ±0.111 |":
        assert text in row
    assert last_row([*PE[:3], None]).endswith("| trials missing |")


def of_vocabularies(accuracies):
    """Results with PE, of {K: accuracy}."""
    return make_results([({"vocab": K, "pe": "sin"}, [x]) for K, x in accuracies.items()])


def test_summaries_over_the_vocabulary_by_hand():
    """log2 of the K at which accuracy falls to 95%, by straight lines between neighbours."""
    cases = [  # accuracy at K = 4, 8, 16; what is on the page
        (0.96, 1.0, 0.9, 3.5, "11.31"),
        (1.0, 0.99, 0.96, 4.0, ">16 (1 of 1 censored)"),
        (0.9, 0.99, 0.9, 2.0, "<4 (1 of 1 censored)"),
    ]
    for a, b, c, expected, text in cases:
        runs = of_vocabularies({4: a, 8: b, 16: c})
        assert_close(K95.evaluate(runs), expected, 1e-9)
        assert lines_of(runs, summaries=(K95,))[-1] == f"|{text}"
    del runs[-1].values["token accuracy"]
    assert K95.evaluate(runs) is None, "a trial without token accuracy"
    runs = of_vocabularies({16: 0.6, 4: 1.0, 32: 0.5})  # at 4, 2 and 5 in log2
    assert_close(MEAN_ACCURACY.evaluate(runs), (2 * 0.8 + 0.55) / 3, 1e-9)


def test_speed_ups_by_hand():
    """No PE has .5 at 1x, .7 at 4x and .8 at 8x: so .6 at 2x. PE has .9 at 4x and 8x."""
    for pe, *expected in (0.6, 1, 5 / 3), (0.45, 0, 13 / 9), (0.85, 3, 3):
        cells = []
        for budget, none, sin in (1, 0.5, pe), (4, 0.7, 0.9), (8, 0.8, 0.9):
            for name, accuracy in ("none", none), ("sin", sin):
                cells.append(({"iterations": budget, "pe": name}, [accuracy]))
        assert_close(
            [metric.evaluate(make_results(cells)) for metric in SPEED_UPS], expected, 1e-9
        )


def test_metrics_of_targets_and_positions_by_hand():
    """Of Frequent targets among Rare disturbants the first quarter is .3 below."""
    accuracies = dict.fromkeys(dual_frequency.CONDITIONS, [0.9] * 8)
    accuracies["frequent/rare"] = [0.6] * 2 + [0.9] * 6
    for model, weakness in ("lstm", 0.3), ("s4d", -0.1):
        result = Result({"model": model}, {"by_condition": accuracies}, {"held_out": 32})
        metrics = DualFrequency.figures["fig3"].metrics.values()
        drop = math.log(9 * 0.175 / 0.825)
        expected = [0.8625, 0.9, 0.825, 0.9, 0.075, 0, drop, 0, 0, -0.075, weakness]
        assert_close([metric(result) for metric in metrics], expected, 1e-9)
    assert_close(log_odds(1, 4), math.log(7), 1e-9)  # no error counts as half an error of 4


# -- report.py, RESULTS.md, README.md
def make_report(words):
    with mock.patch.object(plots, "HAS_MATPLOTLIB", False):
        return run_cli(0, words, report)


def train_two():
    """-> the result file of the trial with PE, the words of a report on both trials"""
    for pe in "none", "sin":
        run_cli(0, f"{SMOKE} --model gru --vocab 8 --pe {pe}")
    (path,) = Path().rglob("gru-sin-*/seed0/result.json")
    return path, f"'{HERE}/reverse.py' fig2 --scale smoke"


def test_invalid_results_are_named_and_skipped():
    path, words = train_two()
    whole, content = path.read_text(), read_json(path)
    accuracy = content["metrics"]["token_accuracy"]
    message = make_report(words)
    assert "2 of 12" in message and f"{accuracy:.3f}" in message
    bad = ["[" * 100_000, "[]", "\xff", whole[:-20]]
    bad += [whole.replace('"lr": 0.001', '"lr": 0.25'), whole.replace('"reverse"', '"sort"')]
    for number in "7", "NaN", "1e999", "9" * 5000, "null", '"0.5"':
        bad.append(whole.replace(f'_accuracy": {accuracy}', f'_accuracy": {number}'))
    for wrong in {"config": {}}, {"metrics": 3}, {"seconds": None}, {"earlier": [3]}:
        bad.append(json.dumps(content | wrong))
    for text in bad:
        path.write_text(text, encoding="latin1")
        message = make_report(words)
        assert "1 of 12" in message and message.count(f"skipped {path}") == 1, text[:80]
    for old, new, expected in [
        ("token_a", "a", "2 of 12"),  # it lacks the metric, and counts without
        ('"config": {', '"config": {"text_sha256": "a",', "0 of 12"),  # two texts
        ('"dirty": ', '"dirty": 1, "was": ', "with uncommitted changes"),
    ]:
        path.write_text(whole.replace(old, new))
        assert expected in make_report(words)


def test_every_finished_trial_is_a_row_of_trials_csv():
    path, _ = train_two()
    none, pe = csv.DictReader(io.StringIO(run_cli(0, "runs", report)))
    assert (none["pe"], pe["pe"], pe["folder"]) == ("none", "sin", str(path.parent))
    assert float(pe["token_accuracy"]) == read_json(path)["metrics"]["token_accuracy"]
    path.write_text("{}")
    _, out, err = run_python(HERE / "report.py", "runs")
    assert f"skipped {path}" in err and "skipped" not in out


def test_figure_is_plotted():
    if not plots.HAS_MATPLOTLIB:
        raise SkipTest("no matplotlib")
    run_cli(0, SMOKE)
    run_cli(0, f"'{HERE}/reverse.py' fig2 --scale smoke", report)
    (picture,) = Path().rglob("*.svg")
    assert ">LSTM (n = 1)</text>" in picture.read_text()
    trials = [(arm | {"vocab": K}, xs[: K - 5]) for K in (7, 8) for arm, xs in ARMS]
    plots.plot(Figure("", {}, x="gain"), make_results(trials), picture)
    text = picture.read_text()
    assert ">K = 8<" in text and ">K = 7<" not in text  # too few seeds


def test_results_page_is_up_to_date():
    shutil.copytree(HERE / "results", "results")
    Path("results/trials.csv").unlink()
    page = Path("RESULTS.md")
    shutil.copy(HERE / page, page)
    assert not make_report("--write RESULTS.md --out results")
    for path in page, Path("results/trials.csv"):
        assert path.read_bytes() == (HERE / path).read_bytes(), f"another {path}"


def readme_cells(results, **flags):
    """README's table cells: token accuracy of no PE, the control and PE in %, with 95% CIs"""
    cells = []
    for pe in WITH_CONSTANT:
        found = matching(results, dict(pe=pe, **flags))
        accuracy = stats.estimate([[100 * result.values["token accuracy"] for result in found]])
        cells.append(f"{accuracy.value:.1f} ±{accuracy.margin:.1f}")
    return "|".join(cells)


def test_readme_numbers_match_committed_results():
    def load(figure):
        args = argparse.Namespace(scale="desk", out=HERE / "results", task_argv=[])
        return report.load_results(beyond.Beyond, figure, args)

    for setting, short, long, multiple in (
        ("GRU, K = 32", "fig2-all-seeds", "longer-training-same-lr", 4),
        ("LSTM, K = 64", "fig2-all-seeds", "longer-training-tuned", 4),
        ("S4D, K = 256", "fig2-all-seeds", "longer-training", 8),
        ("GRU, K = 256, L = 16", "fig2-l16", "fig2-l16-2x", 2),
    ):
        model, vocab = re.match(r"(\w+), K = (\d+)", setting).groups()
        flags = dict(model=model.lower(), vocab=int(vocab))
        iterations = multiple * (10_000 if model == "S4D" else 30_000)
        first = readme_cells(load(short), **flags)
        last = readme_cells(load(long), **flags, iterations=iterations)
        assert f"|{setting}|1x|{first}|\n||{multiple}x|{last}|" in README


def test_numbers_in_the_text_are_in_generated_tables():
    text, _, generated = RESULTS.partition("## All figures")
    text += README.partition("## The paper's claims")[2].partition("## Extending it")[0]
    numbers = re.findall(r"[-+]?\d+\.\d{3}(?: ±\d\.\d{3}| \[[-+., \d]+\])?", text)  # with CIs
    numbers += re.findall(r"(?<!\d)\.\d{3}\b", text)  # p-values
    assert not [x for x in numbers if x not in generated]


def count_outcomes(family, vocabularies=""):
    """Count a family's supported, contradicted and inconclusive claims in RESULTS.md."""
    rows = RESULTS.partition(f": {family}** ")[2].partition("\n**")[0]
    outcomes = re.findall(rf"(?m)^\| \[.*{vocabularies}.* \| (\w+) \|$", rows)
    return [outcomes.count(x) for x in ("supported", "contradicted", "inconclusive")]


def test_readme_claims_match_results_page():
    rows = re.findall(r"(?m)^\|\[(.*)\]\(RESULTS.*\|(\d+).*\|(\d+).*\|(\d+)\|$", README)
    counts = {claim: list(map(int, count)) for claim, *count in rows}
    families = {
        "PE helps at K = 32 to 16384": ("PE helps reversal", r"K = (?:32|64|256|1024)\b"),
        "PE raises the largest K with 95% accuracy": ("PE raises K95",),
        "PE helps delayed addition": ("PE helps delayed addition",),
        "PE helps sorting slightly": ("PE helps sorting",),
        "PE helps predecessor queries": ("PE helps predecessor queries",),
        "PE helps with variable length": ("PE helps at variable length",),
    }
    for claim, family in families.items():
        assert counts[claim] == count_outcomes(*family), claim
    supported, contradicted, inconclusive = count_outcomes("more training without PE beats PE")
    claim = "Two to eight times the data cannot replace PE"
    assert counts[claim] == [contradicted, supported, inconclusive]
    outcomes = count_outcomes("PE helps reversal")
    assert f"We tested {sum(outcomes)} settings" in README
    assert f"PE helps in [{outcomes[0]}](" in README


def test_readme_example_matches_committed_results():
    words = f"'{HERE}/reverse.py' fig2 --scale quick --brief --out '{HERE}/results'"
    *_, header, first, second, last = make_report(words).splitlines()
    assert f"{header}\n{first}\n{second}" in README
    assert last.startswith("More metrics: python report.py reverse.py fig2 --scale quick")
    words = f"'{HERE}/custom_encoding.py' square --scale quick --out '{HERE}/results'"
    *_, first, second = make_report(words).splitlines()
    assert f"```text\n{first}\n{second}\n```" in README


def find_code(language):
    """README's blocks of code."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", README)
    return [code for name, code in blocks if name == language]


def test_readme_encoding_and_load_model():
    (code,) = find_code("python")
    assert code in (HERE / "custom_encoding.py").read_text()
    code, out, err = run_python(HERE / "custom_encoding.py", *f"--pe square {SMOKE}".split())
    assert code == 0 and not err, out + err
    task = task_of(SMOKE)
    run_cli(0, SMOKE)
    model, test = task.load_model(), task.held_out_batch()
    accuracy = (model(test).argmax(-1).T == test.targets).double().mean()
    assert_close(
        accuracy, read_json(task.folder / "result.json")["metrics"]["token_accuracy"], 1e-6
    )


def test_readme_commands_are_accepted():
    commands = re.findall(r"(?m)^(?:.*&& )?python (.*?)(?:  #.*)?$", "\n".join(find_code("")))
    tasks = {task.script(): task for task in report.TASKS}
    for script, *words in map(shlex.split, commands):
        if script not in tasks:
            assert script in ("report.py", "bench.py", "test_all.py")
            continue
        typed = cli.parse(tasks[script], words)
        if "all" in typed:
            cli.trials_of_figure(tasks[script], typed, typed["all"])
        else:
            cli.make_task(tasks[script], typed)


# -- stability.py, held to the Jacobian of the model's own forward pass
def run_layer(layer, x, z=None):
    """-> the last output (D,), the state after x; z is the state before x"""
    if isinstance(layer, common.S4D):
        outputs, state = run_s4d(layer, x, 0 if z is None else torch.view_as_complex(z))
        return outputs[-1, 0], torch.view_as_real(state)
    outputs, state = super(type(layer), layer).forward(x, z)  # torch.nn's
    return outputs[-1, 0], state


@torch.no_grad()
def jacobian(model, row, target):
    """d output / d state, the state right after the target (of S4D without C)."""
    x, layer = model.encoding(model.embedding(row[:, None])), model.layer
    _, state = run_layer(layer, x[:target])

    def output(z):
        return run_layer(layer, x[target:], z)[0]

    last = slice(len(x) - 1, len(x))
    assert torch.allclose(output(state), layer(x, last)[0, 0], 1e-4, 1e-6)
    found = torch.func.jacrev(output)(state)
    parts = found if isinstance(found, tuple) else [found]  # an LSTM has two
    return torch.cat([part.flatten(1) for part in parts], 1)


def plain_stability(model, a, b, target):
    """The specification's sum_i w_i cos(J_i^A, J_i^B)."""
    found = []
    for row_a, row_b in zip(a, b):
        A, B = jacobian(model, row_a, target), jacobian(model, row_b, target)
        norms = A.norm(dim=1) * B.norm(dim=1)
        cosines = (A * B).sum(1) / norms
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


def test_stability_matches_autograd_jacobian():
    cases = [  # encoding, length, target, perhaps --combine
        ("none", 3, 1),
        ("sin", 6, 4),
        ("dup", 5, 2),
        ("learned", 4, 4, "add"),
    ]
    for kind, case in product(PAPER_MODELS, cases):
        model, a, b = make_case(kind, *case)
        target = case[2]
        expected = plain_stability(model, a, b, target)
        assert_close(stability.stability(model, a, b, target, chunk_size=3), expected, 1e-10)
        assert_close(stability.stability(model.float(), a, b, target), expected, 1e-5)


def test_stability_is_0_where_gradients_vanish():
    for kind in "lstm", "s4d":
        model, a, b = make_case(kind, "sin")
        layer = model.layer
        gate = layer.mix.bias[11:] if kind == "s4d" else layer.bias_ih_l0[33:]
        gate.data[:] = -1e4  # no output depends on the state
        assert not stability.stability(model, a, b, 1).any()


def test_stability_pairs_share_the_target_and_what_is_before_it():
    """Of 12 integers, 10 in all; the target at t = 5, then 8 commands."""
    pairs = stability.draw_pairs(3, 10, 12, 5, 50)
    a, b = (rows.view(4, 50, 20) for rows in pairs)
    assert torch.equal(a[..., :5], b[..., :5]) and (a[..., 5:12] != b[..., 5:12]).any(-1).all()
    for rows, (n, condition) in product((a, b), enumerate(dual_frequency.CONDITIONS)):
        assert (rows[n, :, 12:] == 10).all()
        target, disturbants = (5 if kind == "rare" else 0 for kind in condition.split("/"))
        least = torch.full((12,), disturbants)
        least[4] = target
        drawn = rows[n, :, :12] - least
        assert_uniform(drawn.flatten().tolist(), 5)
        assert drawn.max() == 4


def test_stability_of_a_trial():
    words = f"{SMOKE} --model s4d --pairs 8 --seed 3"
    run_cli(0, f"{words} --train", Stability)
    folder = folder_in()
    before, path = outcome(folder), folder / "stability.json"
    found = read_json(path)["by_condition"]
    model = task_of(words, Stability).make_model().double()
    model.load_state_dict(load_last()["model"])
    expected = plain_stability(model, *stability.draw_pairs(3, 8, 8, 3, 2), 3)
    assert list(found) == list(dual_frequency.CONDITIONS)
    for values, of_pairs in zip(found.values(), expected.view(4, 2)):
        assert list(map(int, values)) == list(range(2, 21, 2))
        assert_close(values["20"], of_pairs.mean(), 1e-5)
    assert_rejects(f"{words} --target 1", Stability)
    run_cli(0, words, Stability)
    assert read_json(path)["by_condition"] == found
    run_cli(0, f"{SMOKE} --model s4d --seed 3 --overwrite", DualFrequency)  # whose trial it is
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
    read = (block.norm1(x) @ block.attention.qkv.weight.T).view(9, 3, 2, 6)
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
        x = x + block.attention.proj(torch.cat(heads, 1))
        x = x + block.mlp[2](block.mlp[0](block.norm2(x)).clamp(min=0))
    return model.readout(model.norm(x)), torch.stack(every_score)


def test_transformer_matches_reference():
    for pe in lm_shakespeare.ENCODINGS:
        torch.manual_seed(3)
        model = lm_shakespeare.Transformer(pe, 11, 12, 2, 2, 9).double()
        tokens = torch.randint(11, (2, 9))
        for parameter in model.parameters():  # large enough for everything to matter
            parameter.data += torch.randn_like(parameter) * 0.3
        plain, scores = zip(*(plain_transformer(model, pe, row) for row in tokens))
        features = model.features(common.Batch(tokens, None, None))
        assert_close(model.readout(features), torch.stack(plain, 1), 1e-12)
        mean = torch.stack(scores).mean((0, 1))
        expected = [mean.diagonal(-n).mean().item() for n in range(9)]
        assert_close(lm_shakespeare.score_by_distance(model, tokens), expected, 1e-4)


def test_perplexity_of_a_text():
    write_shakespeare()
    task = task_of(f"{SMOKE} --batch 300 --context 5", Shakespeare, build=True)
    tokens = torch.tensor([task.vocabulary.index(x) for x in TEXT])
    train, valid = tokens[:10_800].unfold(0, 6, 1), tokens[10_800:].unfold(0, 6, 5)  # 90%, 10%
    drawn = task.training_batch(1)
    windows = torch.cat([drawn.inputs, drawn.targets[:, -1:]], 1)
    assert set(map(tuple, windows.tolist())) <= set(map(tuple, train.tolist()))
    model = task.make_model()
    batch = common.Batch(valid[:, :5], valid[:, 1:], slice(None))
    logits = model.readout(model.features(batch)).double()  # (T, B, K)
    perplexity = F.cross_entropy(logits.permute(1, 2, 0), batch.targets).exp()
    assert_close(task.evaluate(model, TORCH)["valid_perplexity"], perplexity, 1e-5)


# -- Language models: WikiText, of 40 pieces and 32 targets in a paragraph
SMALL = f"{SMOKE} --data data"


def make_paragraph(n):
    """n pieces from 1 to 39, and a tenth of them unknown."""
    return [(n * n + j) % 39 + 1 if (n + j) % 10 else 0 for j in range(n)]


PIECES = [make_paragraph(n) for n in (2, 1, 70, *range(5, 30))]


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
            h = common.Model.features(model, common.Batch(x[None, :-1], None, slice(None)))
            logits.append(model.readout(h)[:, 0])
            targets.append(x[1:])
    return torch.cat(logits), torch.cat(targets)


def check_packed(task, model, engine, batches):
    """Loss and gradients of known targets, and perplexities."""
    logits, targets = read_one_by_one(model)
    known = targets != 0
    loss = F.cross_entropy(logits[known], targets[known])
    expected = torch.autograd.grad(loss, model.parameters())
    for batch in batches:
        found_loss, _, found = gradients(model, batch, engine.features)
        assert_close(found_loss, loss, 1e-9)
        for actual, gradient in zip(found.values(), expected, strict=True):
            assert_close(actual, gradient, 1e-9)
    of_known, of_all = task.perplexities(model, task.splits["test"], engine)
    assert_close(of_known, loss.exp(), 1e-9)
    assert_close(of_all, F.cross_entropy(logits, targets).exp(), 1e-9)


def test_packed_paragraphs_match_unpacked():
    write_lm_tokens()
    cases = list(product(("gru", "lstm"), ("none", "dup", *PAPER_ENCODINGS)))
    cases.append(("lstm", "learned --combine add"))
    predicting = len(PIECES) - 1  # of one piece nothing is predicted
    for kind, pe in cases:
        task = lm_task(f"--model {kind} --pe {pe} --batch {predicting}")
        model, batch = task.make_model().double(), task.training_batch(1)  # an epoch
        batches = batch, lm_wikitext.pad_to_bucket(batch, 32, 40)
        for engine in TORCH, FAST:
            check_packed(task, model, engine, batches)
        with force_cuda_path():
            check_packed(task, model, FAST, batches)


def test_epochs_are_permutations():
    for count, batch in (3, 10), (4, 3):
        with temp_cwd():
            write_lm_tokens([[1, 2]] * count)
            task = lm_task(f"--batch {batch} --seed 3")
        drawn = [task.paragraphs_of_batch(i).tolist() for i in range(1, 1 + 300 * count)]
        drawn = list(chain(*drawn))
        epochs = [tuple(drawn[n : n + count]) for n in range(0, len(drawn), count)]
        for epoch in epochs:
            assert sorted(epoch) == list(range(count)), "drawn twice, or lost"
    assert_uniform(epochs, 24)  # of four


def test_language_model_learns_and_rejects_other_texts_or_tokens():
    words = f"{SMALL} --iterations 120 --lr 0.05"
    write_lm_text("a text")
    assert_rejects(SMALL, WikiText)  # without tokens
    write_lm_tokens()
    run_cli(0, words, WikiText)
    expected = outcome(folder_in())
    _, _, metrics = expected
    seen = Counter(chain(*PIECES))
    known = [n for pieces in PIECES for n in pieces[1:33] if n]
    shares = [(seen[n] + 1) / (seen.total() + 40) for n in known]
    unigram = 1 / np.exp(np.mean(np.log(shares)))
    assert_close(metrics["unigram_test_perplexity"], unigram, 1e-12)
    assert metrics["test_perplexity"] < unigram / 2
    for other in dict(text="another"), dict(paragraphs=PIECES[1:]):
        write_lm_tokens(**other)
        assert_rejects(words, WikiText)
    assert outcome(folder_in()) == expected


WORDS = "the cat sat on a mat and dogs ran far away from old houses while rain fell , then stop"


def test_tokens_match_sentencepiece():
    if not importlib.util.find_spec("sentencepiece"):
        raise SkipTest("no sentencepiece")
    from sentencepiece import SentencePieceProcessor

    kept = [WORDS[n:] for n in range(0, 80, 4)]
    kept += ["= 3 is a sum", " a cat \u2028 sat \x0b on\r a mat ", " a"]
    kept.append("xyx yxy " * 600)  # above SentencePiece's usual limit
    write_lm_text(" = Heading = ", "", *kept, " ", "\r", " = = Sub = = ")
    assert_rejects(f"{SMALL} --prepare --vocab 5000", WikiText)
    run_cli(0, f"{SMALL} --prepare --vocab 36", WikiText)
    (path,) = Path("data").glob("tokens-K36-*/pieces.model")
    pieces = SentencePieceProcessor(model_file=str(path))
    found = lm_task("--vocab 36").splits["train"]
    expected = [pieces.encode(paragraph) for paragraph in kept]
    assert found.tokens.tolist() == list(chain(*expected))
    borders = np.cumsum([0, *map(len, expected)]).tolist()
    assert np.fromfile(path.with_name("train.ends"), "<i8").tolist() == borders


# -- CUDA: what needs a GPU
def run_with_gpu(*words):
    """Python in a process of its own that sees the GPUs."""
    with mock.patch.dict(os.environ, WITH_GPUS, clear=True):
        return run_python(*words)


@functools.cache
def has_gpu():
    code, _, _ = run_with_gpu("-c", "import torch; assert torch.cuda.is_available()")
    return code == 0


def test_cuda_batches():
    for compiled in False, True:
        check_batches(torch.device("cuda"), compiled)


FP32 = ["--precision fp32"]
FP32_MODES = [
    "--precision fp32",
    "--precision fp32 --no-graph",
    "--precision fp32 --deterministic",
]
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
    "reverse.py --model mingru": [*FP32_MODES, "--precision bf16"],  # tf32 alone may move these
    "beyond.py --model mamba": [*FP32_MODES, "--precision bf16"],  # three by 0.01 and more
    "beyond.py --model mamba --blocks 2": [*FP32_MODES, "--precision bf16"],
    "lm_shakespeare.py --iterations 100 --lr 0.001": FP32,
    "lm_wikitext.py --data data": ["", "--no-graph", "--engine torch"],
}


def measure_trial(case):
    """{name: number} of a trial: its cross-entropy, its last stability by condition."""
    (command, where, way), out = case, tempfile.mkdtemp(dir=".")
    script, *words = shlex.split(command)
    usual = f"--scale smoke --iterations 300 --batch 64 --lr 0.01 {way}"  # words come after it
    flags = [*usual.split(), *words, "--device", where, "--out", out]
    code, _, err = run_python(HERE / script, *flags)
    assert code == 0, err
    (path,) = Path(out).rglob("result.json")
    result = read_json(path)
    metrics = result["metrics"]
    found = {"loss": metrics.get("cross_entropy") or math.log(metrics["valid_perplexity"])}
    assert result["graph"] == (where == "cuda" and "no-graph" not in way), case
    assert result["compiled"] == (where == "cuda" and result["engine"] == "fast"), case
    for path in Path(out).rglob("stability.json"):
        for condition, values in read_json(path)["by_condition"].items():
            found[condition] = values["300"]
    return found


def test_cuda_trials_match_cpu():
    cases = [(command, "cpu", "") for command in ON_GPU]
    for command, ways in ON_GPU.items():
        cases += [(command, "cuda", way) for way in ways]
    write_shakespeare()
    write_lm_tokens()
    with ThreadPoolExecutor(min(8, machine.available_cores())) as pool:
        found = dict(zip(cases, pool.map(measure_trial, cases)))
    wrong = []  # all that is, since GPU time is dear
    for (command, where, way), actual in found.items():
        expected, bound = found[command, "cpu", ""], 0.03 if "bf16" in way else 0.01
        for name, x in expected.items():
            if not abs(actual.get(name, math.nan) - x) < bound:
                wrong.append((command, where, way, name, actual, expected))
    for model in PAPER_MODELS:
        one, two = (found[f"reverse.py --model {model}", "cuda", way] for way in REPEATED)
        if one != two:
            wrong.append((model, "--deterministic", one, two))
    assert not wrong, "\n".join(map(str, wrong))


def test_cuda_gradients_match_double_precision():
    """With 4,000 tokens: above some 3,000, CUDA uses other reduction kernels."""
    machine.set_torch_options(FAST, torch.device("cuda"))  # products in fp32
    sizes = "--length 16 --batch 250 --hidden 256 --embed 256"
    for kind, vocab in product((*PAPER_MODELS, "mamba"), (300, 2000)):
        task = task_of(f"{sizes} --model {kind} --vocab {vocab}", build=True)
        model, batch = task.make_model().double(), task.training_batch(1)
        loss, _, expected = gradients(model, batch, TORCH.features)
        there = batch._replace(inputs=batch.inputs.cuda(), targets=batch.targets.cuda())
        model.zero_grad()  # else .cuda() would copy the expected gradients, too
        model.float().cuda()
        engine = machine.choose_engine(task.args, torch.device("cuda"))
        found_loss, _, found = gradients(model, there, engine.features)
        assert_close(found_loss.cpu(), loss, 1e-5)
        for name, gradient in expected.items():
            error = (found[name].cpu().double() - gradient).norm() / gradient.norm()
            assert error < 1e-4, (kind, name, error)


def test_cuda_trial_resumes_in_a_new_graph():
    words = "--scale smoke --device cuda --engine fast --deterministic --lr 0.01"
    words = f"{words} --save-every 100 --iterations 8000 --out".split()
    command = [sys.executable, HERE / "reverse.py", *words, "stopped/runs"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: child.poll() is not None or read_checkpoints())
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 75
    for out in "stopped", "whole":
        code, _, err = run_python(HERE / "reverse.py", *words, f"{out}/runs")
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
    code, _, err = run_python("-c", SMALL_CARD, "--device", "cuda", "--batch", "4096")
    assert code == 1 and err.count("\n") == 1, err
    assert not read_checkpoints()


# -- This file's own command line
def attempt(name):
    """-> (name, "passed", "skipped" or "failed", seconds, why)"""
    start, message, why = time.monotonic(), "passed", ""
    try:
        with temp_cwd():
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
        message, why = "skipped", f" ({reason})"
    except BaseException:  # noqa: BLE001 - any exception is a failure
        message, why = "failed", f"\n{traceback.format_exc()}"
    return name, message, time.monotonic() - start, why


def main(words):
    parts = words or [""]
    names = []
    for name in globals():
        if name.startswith("test_") and any(part in name for part in parts):
            names.append(name)
    counts = dict(passed=0, failed=0, skipped=0)
    with temp_cwd():
        run_cli(0, SMOKE)  # what PyTorch imports late, once for all forked processes
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        for name, message, seconds, why in pool.map(attempt, names):
            counts[message] += 1
            print(f"{message} {seconds:6.2f} s  {name}{why}", flush=True)
    print(", ".join(f"{count} {message}" for message, count in counts.items()))
    return 1 if counts["failed"] or not names else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
