"""Everything, small: python test_all.py [NAME ...]; a card against the CPU: python test_all.py cuda

Numbers are compared with an independent way to get them. What README.md promises of signals, kills, files,
flags and exit codes is tested by processes: children are forked from this one, so that they start at once.
"""

import ast
import contextlib
import fcntl
import functools
import importlib.util
import io
import itertools
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
import time
import traceback
import unittest
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import bench
import beyond
import common
import lm_shakespeare
import lm_wikitext
import report
import reverse
import stability
from delayed_add import DelayedAddition
from lm_shakespeare import Shakespeare
from lm_wikitext import WikiText
from predecessor import Predecessor
from reverse import Reverse
from sort import Sort
from stability import Stability
from suite import fast, machine, pictures, run, sweeps, trial, verdicts

HERE, CPU, Skip = Path(__file__).resolve().parent, torch.device("cpu"), unittest.SkipTest
README, SMOKE = (HERE / "README.md").read_text(), "--scale smoke --device cpu"
BATTERY = [(Reverse, ""), (Reverse, "--min-length 3"), (Reverse, "--dual-freq")]  # tasks and flags
BATTERY += [(Sort, ""), (DelayedAddition, ""), (Predecessor, "")]
PAPERS, TABLES = ("gru", "lstm", "s4d"), ("sin", "random", "learned")
CLOCKS = *TABLES, "constant", "ramp", "counter", "shuffled"
ENGINES = {name: machine.Engine(name) for name in ("torch", "fast")}
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
listed = lambda task, figure, *words: run.listed(task, *run.parse(task, ["--scale", *words]), figure)
files = lambda: {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
columns = lambda folder: np.loadtxt(folder / "curve.csv", delimiter=",", skiprows=1)[:, :-1]  # no seconds
folder_in = lambda place=".": next(Path(place).glob("runs/*/*/seed*"))  # of the only trial
load = lambda path: trial.load(path, CPU)
read_json = lambda path: json.loads(Path(path).read_text())
wait = lambda child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # -signal where one has killed it
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that are started here
CARDS = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
os.environ |= {} if "--on-card" in sys.argv else {"CUDA_VISIBLE_DEVICES": ""}  # else forking would fail


# -- Command lines, in this process or in others; tasks; what trials leave; assertions on numbers
@contextlib.contextmanager
def workplace():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def captured(function, *args):
    """-> (what it returns or exits with, what it printed, what it said on stderr)"""
    out, err, handlers = io.StringIO(), io.StringIO(), [signal.getsignal(number) for number in SIGNALS]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = function(*args)
        except SystemExit as stop:
            code = stop.code
    for number, handler in zip(SIGNALS, handlers):
        signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue()


def ends(wanted, words, task=Reverse):
    """The command line ends with this exit code and, unless that is 0, one line on stderr -> both outputs."""
    report.load.cache_clear()  # a report is usually a process of its own
    report.verdicts_at.cache_clear()
    with mock.patch.object(sys, "argv", ["", *shlex.split(words)]):
        code, out, err = captured(report.main) if task is report else captured(run.main, task)
    assert code == wanted and err.count("\n") == (wanted != 0), (words, code, out, err)
    return out + err


def refuses(words, task=Reverse):
    """One line, exit code 2, and nothing is created or changed."""
    before = files()
    said = ends(2, words, task)
    assert files() == before and "usage:" not in said, (words, said)


def fork(words, task=Reverse, before=lambda: None):
    """The command line in a child process, which calls `before` first; what it says is added to two files."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:  # whatever happens, a child must never return into the tests
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        for number in SIGNALS:  # under nohup and in the background, too
            signal.signal(number, signal.SIG_DFL)
        before()
        sys.argv[1:] = shlex.split(words)
        code = run.main(task)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def forked(wanted, words, task=Reverse, before=lambda: None):
    """As `ends`, in a child process -> what it says on stderr."""
    Path("stderr").unlink(missing_ok=True)
    code, said = wait(fork(words, task, before)), Path("stderr").read_text()
    assert code == wanted and "Traceback" not in said, (words, code, said)
    return said


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def process(*words):
    how = dict(env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True)
    done = subprocess.run([sys.executable, *map(str, words)], check=False, **how)
    return done.returncode, done.stdout, done.stderr


def task_of(words="", task=Reverse, build=False):
    """The task of a command line, with its data if wanted."""
    found = run.trial_of(task, shlex.split(words))
    if build:
        found.build(CPU)
    return found


def outcome(folder):
    """What interruptions must not change."""
    weights = {name: x.numpy().tobytes() for name, x in load(folder / "last.pt")["model"].items()}
    return weights, columns(folder).tolist(), read_json(folder / "result.json")["metrics"]


def gradients(model, episode, engine):
    """-> loss, accuracy, {parameter: its gradient}"""
    model.zero_grad()
    loss, accuracy = engine.loss_and_accuracy(model, episode)
    loss.backward()
    return loss, accuracy, {name: p.grad for name, p in model.named_parameters()}


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


# -- common.py: the released code's numbers, and every part by hand
THEIRS = dict(embedding="embedding.weight", readout_w="readout.weight", readout_b="readout.bias")  # -> ours
THEIRS |= dict(w_ih="layer.weight_ih_l0", w_hh="layer.weight_hh_l0", b_ih="layer.bias_ih_l0")
THEIRS |= dict(b_hh="layer.bias_hh_l0", in_proj_w="layer.project.weight", in_proj_b="layer.project.bias")
THEIRS |= dict(mix_w="layer.mix.weight", mix_b="layer.mix.bias", pe="encoding.table")
THEIRS |= {name: f"layer.{name}" for name in ("log_dt", "C", "log_A_real", "A_imag", "D")}


def test_released_code_gives_the_same_numbers():
    """With the author's weights: logits, loss, gradients and stability of the author's code."""
    cases = {}
    for name, x in np.load(HERE / "released_code.npz").items():
        cases.setdefault(name.partition("/")[0], {})[name.partition("/")[2]] = torch.from_numpy(x)
    assert len(cases) == 12
    for case, numbers in cases.items():
        (kind, pe), tokens, embedding = case.split("-"), numbers["tokens"], numbers["embedding"]
        (vocab, hidden), length = numbers["readout_w"].shape, tokens.shape[1] // 2
        model = common.Model(kind, pe, vocab, embedding.shape[1], hidden, 2 * length).to(embedding.dtype)
        model.load_state_dict({ours: numbers[name] for name, ours in THEIRS.items() if name in numbers})
        steps, tolerance = slice(length, 2 * length), 2e-5 if kind == "s4d" else 1e-9  # theirs in float32
        episode = common.Episode(tokens, tokens[:, :length].flip(1), steps, commands=length)
        for engine in ENGINES.values():
            close(engine.logits(model, tokens, slice(None)).transpose(0, 1), numbers["logits"], tolerance)
            loss, _, found = gradients(model, episode, engine)
            close(loss, numbers["loss"], tolerance)
            close(torch.cat([g.flatten() for g in found.values()]).norm(), numbers["grad_norm"], tolerance)
            if kind != "s4d":
                close(found["embedding.weight"], numbers["grad_embedding"], tolerance)
        if "stability" in numbers:
            target = int(numbers.get("stab_prefix", 0)) + 1
            found = stability.stability(model, numbers["stab_a"], numbers["stab_b"], target)
            close(found, numbers["stability"], tolerance * (5 if kind == "s4d" else 1))


def test_integers_are_splitmix64_and_distinct_rows_the_first_of_a_stream():
    zero, published = torch.tensor(0), [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [x % 2**64 for x in common.random_bits(zero, (3,)).tolist()] == published
    assert common.uniform_integers(zero, (3,), 1000).tolist() == [1000 * (x % 2**32) >> 32 for x in published]
    assert common.key(5, 1, 300_000).item() == 6436624988395588352  # all committed trials depend on this
    assert (common.TRAINING, common.HELD_OUT, common.ANALYSIS) == (1, 2, 3)
    drawn = []  # rows of four of two integers
    draw = lambda k, shape: drawn.extend(rows := common.uniform_integers(k, (*shape, 4), 2)) or rows
    rows = common.distinct_rows(draw, 16, 0).tolist()  # all that exist
    assert len(drawn) > 16 and rows == [list(x) for x in dict.fromkeys(tuple(x.tolist()) for x in drawn)]


def test_encodings_by_hand():
    table = common.sinusoid(300, 6)
    for t, i in itertools.product(range(300), range(3)):  # Equations 1 and 2
        angle = t / 10000 ** (2 * i / 6)
        close(table[t, 2 * i : 2 * i + 2] * math.sqrt(3), [math.sin(angle), math.cos(angle)], 1e-12)
    close(common.Sinusoid(9, 4).vectors(6), common.sinusoid(6, 4), 1e-12)
    make = lambda pe, seed: torch.manual_seed(seed) and common.ENCODINGS[pe](11, 6)
    for pe in ("random", "ramp", "shuffled", "constant"):  # drawn from the seed, and kept with the weights
        one, same, other = (make(pe, seed) for seed in (0, 0, 1))
        assert torch.equal(one.table, same.table) and not torch.equal(one.table, other.table)
        assert list(one.state_dict()) == ["table"] and not list(one.parameters())
    assert len(set(map(tuple, make("constant", 0).vectors(22).tolist()))) == 1


def test_encodings_are_joined_scaled_and_cut():
    """--combine, --encode, --amplitude and --bands."""
    flags = "--vocab 9 --hidden 3"
    encoding_of = lambda words: torch.manual_seed(0) and task_of(f"{flags} {words}").model().encoding
    tokens, zeroed = torch.randn(16, 2, 4), dict(both=slice(0), input=slice(8, 16), output=slice(8))
    for pe, combine, phase in itertools.product(CLOCKS, ("concat", "add"), zeroed):
        words = f"--length 8 --embed 4 --pe {pe}"
        plain, longer = encoding_of(words).vectors(16), encoding_of(f"{words} --amplitude 3").vectors(16)
        close(longer, plain * 3 / (2 if pe == "learned" else 1), 1e-6)  # the root of 4
        if pe not in ("learned", "ramp"):
            close(longer.norm(dim=1), 3 * torch.ones(16), 1e-6)
        vectors = plain.detach().float()[:, None].clone()
        vectors[zeroed[phase]] = 0
        wanted = tokens + vectors if combine == "add" else torch.cat([tokens, vectors.expand(-1, 2, -1)], 2)
        assert torch.equal(encoding_of(f"{words} --combine {combine} --encode {phase}").join(tokens), wanted)
    cases = {"0:0.25": [0], "0.25:0.75": [1, 2], "0.2:0.5": [1], "0.74:1": [3], "0.1:1": [1, 2, 3]}
    for (bands, pairs), steps in itertools.product(cases.items(), (7, 12)):
        wanted, kept = torch.zeros(steps, 8), [2 * i + j for i in pairs for j in (0, 1)]
        wanted[:, kept] = common.sinusoid(steps, 8)[:, kept].float() * math.sqrt(4 / len(pairs)) * 2
        found = encoding_of(f"--length 6 --embed 8 --bands {bands} --amplitude 2")
        close(found.vectors(steps), wanted, 1e-6)


def check_layer(layer, by_equations):
    """Outputs at a slice of steps, and at other steps in each row, with all gradients."""
    layer, x = layer.double(), torch.randn(7, 2, 3, dtype=torch.float64)
    for p in layer.parameters():
        p.data += torch.randn_like(p) / 4
    steps, wanted = torch.tensor([[0, 6], [3, 5]]), by_equations(layer, x)
    cases = [(slice(2, 6), wanted[2:6]), (steps, torch.stack([wanted[steps[b], b] for b in range(2)], 1))]
    for answered, outputs in cases:
        found, weights = layer(x, answered), torch.randn_like(outputs)
        close(found, outputs, 1e-10)
        for p in layer.parameters():
            grads = [torch.autograd.grad((y * weights).sum(), p, retain_graph=True) for y in (found, outputs)]
            close(grads[0][0], grads[1][0], 1e-8)


def s4d_by_recurrence(layer, x, state=0):
    """state <- exp(dt A) state + (exp(dt A) - 1)/A u, y = 2 Re C state + D u -> outputs, the last state"""
    A, dt, outputs = torch.complex(-layer.log_A_real.exp(), layer.A_imag), layer.log_dt.exp()[:, None], []
    for u in layer.project(x):
        state = (A * dt).exp() * state + ((A * dt).exp() - 1) / A * u[..., None]
        y = 2 * (torch.view_as_complex(layer.C) * state).sum(-1).real + layer.D * u
        outputs.append(F.glu(layer.mix(F.gelu(y))))
    return torch.stack(outputs), state


def mamba_by_its_recurrence(layer, x):
    """h_t = exp(delta_t A) h_t-1 + delta_t b_t u_t, y_t = c_t h_t + D u_t, one row after the other."""
    silu, outputs, A = lambda x: x / (1 + (-x).exp()), [], -layer.log_A.exp()  # A (D, N)
    for row in x.unbind(1):
        u, gate = (row @ layer.project.weight.T).chunk(2, 1)  # (T, D)
        before = [F.pad(u, (0, 0, n, 0))[: len(u)] for n in (3, 2, 1, 0)]  # n steps ago
        u = silu(sum(layer.conv.weight[:, 0, k] * x for k, x in enumerate(before)) + layer.conv.bias)
        chosen, order = u @ layer.choose.weight.T, A.shape[1]
        delta, b, c = chosen.split([chosen.shape[1] - 2 * order, order, order], 1)
        delta = (1 + (delta @ layer.delta.weight.T + layer.delta.bias).exp()).log()  # (T, D)
        state, y = torch.zeros_like(A), []
        for t in range(len(u)):
            state = (delta[t, :, None] * A).exp() * state + (delta[t] * u[t])[:, None] * b[t]
            y.append(state @ c[t])
        outputs.append((torch.stack(y) + layer.D * u) * silu(gate) @ layer.answer.weight.T)
    return torch.stack(outputs, 1)


def mamba_stack_by_hand(stack, x):
    """--blocks 2: each block reads a norm of the residual path and adds to it."""
    normed = lambda x, norm: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    x = x @ stack.project.weight.T + stack.project.bias
    for norm, block in zip(stack.norms, stack.blocks):
        x = x + mamba_by_its_recurrence(block, normed(x, norm))
    return normed(x, stack.norms[-1])


def test_layers_by_their_equations():
    torch.manual_seed(0)
    check_layer(common.S4D(3, 5, order=6), lambda *given: s4d_by_recurrence(*given)[0])
    check_layer(common.Mamba(3, 5), mamba_by_its_recurrence)
    model = task_of("--model mamba --blocks 2 --pe none --vocab 9 --embed 3 --hidden 5").model()
    check_layer(model.layer, mamba_stack_by_hand)
    layer = common.S4D(4, 2000)  # as it begins
    assert_uniform(((layer.log_dt / math.log(10) + 3) * 5).int().tolist(), 10)  # between -3 and -1
    close(layer.log_A_real.exp(), torch.full((2000, 32), 0.5), 1e-6)
    close(layer.A_imag, math.pi * torch.arange(32).expand(2000, 32), 1e-6)
    close(layer.C.flatten(0, 1).std(0), [math.sqrt(0.5)] * 2, 0.1)


def distances_from(start, strings):
    """The least number of edits to each string, breadth first: what the unrestricted distance means."""
    found, edge = {start: 0}, [start]
    for x in edge:
        near = [x[:i] + x[i + 1 :] for i in range(len(x))]
        near += [(*x[:i], a, *x[i + n :]) for i in range(len(x) + 1) for n in (0, 1) for a in range(3)]
        near += [(*x[:i], x[i + 1], x[i], *x[i + 2 :]) for i in range(len(x) - 1)]
        for y in strings.intersection(near) - found.keys():
            found[y] = found[x] + 1
            edge.append(y)
    return found


def test_edit_distances_by_search():
    strings = {x for n in range(6) for x in itertools.product(range(3), repeat=n)}
    for start in (x for x in strings if len(x) in (1, 2, 4)):
        found = distances_from(start, strings)
        for n in range(1, 5):
            others = [x for x in found if len(x) == n]
            got = common.damerau_levenshtein(np.array([start] * len(others)), np.array(others))
            assert got.tolist() == [found[x] for x in others], start


def test_metrics_by_hand():
    targets, weight = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    predictions = torch.tensor([[2, 1, 3], [4, 5, 9]])  # neighbours swapped; right but for the padding
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]])
    metrics = common.sequence_metrics(common.Episode(None, targets, None, weight), predictions, losses)
    assert list(metrics.values()) == [3 / 5, 1 / 2, 3.0, 1 / 2], metrics
    logits = torch.randn(3, 2, 7)  # (M, B, K)
    logits[:2, 0, 1:3] = 9.0  # a tie, of a right and a wrong answer
    for counted in (None, weight):
        cells = (torch.ones(2, 3) if counted is None else counted).nonzero().tolist()
        losses = [F.cross_entropy(logits[m, b], targets[b, m]) for b, m in cells]
        right = [logits[m, b].tolist().index(logits[m, b].max()) == targets[b, m] for b, m in cells]
        found = common.loss_and_accuracy(lambda *_: logits, common.Episode(None, targets, None, counted))
        close(torch.stack(found), [np.mean(losses), np.mean(right)], 1e-6)


def test_training_is_adam_by_hand():
    for clip in (0.05, 0):  # 0: never
        words = f"{SMOKE} --model gru --lr 0.01 --clip {clip} --beta1 0.8 --beta2 0.98 --eps 1e-3 --warmup 2"
        words += " --iterations 5 --log-every 1"
        t, rows = trial.Trial(task_of(words, build=True), [], CPU, ENGINES["torch"]), []
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
        with workplace():
            ends(0, words)
            saved, found = load(folder_in() / "last.pt")["model"], columns(folder_in())
        assert np.allclose(found, rows, rtol=1e-5, atol=1e-9)
        for name, p in t.model.named_parameters():
            assert torch.allclose(p, saved[name], rtol=0, atol=2e-5), name


# -- Data: what is drawn, held out, asked and counted
def test_a_batch_depends_on_the_seed_and_the_iteration_alone(device=CPU, drawn=lambda draw: draw):
    for script, flags in BATTERY:
        words = f"--vocab 50 --length 6 --batch 40 {flags}"
        others = "", "--model gru --iterations 3 --lr 1", "--seed 4"
        one, two, other = (task_of(f"{words} {more}", script) for more in others)
        for task, place in ((one, CPU), (two, device), (other, CPU)):
            task.build(place)
        later, found = one.training_episode(7), drawn(two.training_episode)(torch.tensor(7, device=device))
        pairs = [(one.held_out.rows, two.held_out.rows), *zip(later, found, strict=True)]
        assert all(torch.equal(x, y.cpu()) for x, y in pairs if isinstance(x, torch.Tensor))
        assert not torch.equal(later.inputs, one.training_episode(8).inputs)
        assert not torch.equal(later.inputs, other.training_episode(7).inputs)
        assert not torch.equal(one.held_out.rows, other.held_out.rows)


def everything(task):
    """{row: how likely training draws it, relative to the others}, by enumeration."""
    K, L, of_length = task.vocab, task.length, lambda n: itertools.product(range(task.vocab), repeat=n)
    if isinstance(task, reverse.VariableLength):
        lengths = range(task.args.min_length, L + 1)
        return {(*x, *[K] * (L - n)): K**-n for n in lengths for x in of_length(n)}
    if isinstance(task, reverse.DualFrequency):
        return {x: 7 ** sum(integer < K / 2 for integer in x) for x in of_length(L)}
    if isinstance(task, Predecessor):
        return {(*x, query): 1 for x in itertools.permutations(range(K), L) for query in x[1:]}
    return dict.fromkeys(of_length(2 * L if task.name == "delayed_add" else L), 1)


def test_held_out_rows_are_never_trained_on_and_all_others_as_likely_as_they_should_be():
    scarce = ["--vocab 2 --length 4 --held-out 8", "--vocab 4 --length 4 --held-out 5 --min-length 2"]
    scarce += ["--vocab 4 --length 3 --held-out 12 --dual-freq", "--vocab 3 --length 3 --held-out 13"]
    scarce += ["--vocab 2 --length 2 --held-out 6", "--vocab 4 --length 3 --held-out 16"]
    for (script, _), flags in zip(BATTERY, scarce, strict=True):
        task = task_of(flags, script, build=True)
        likely, held_out = everything(task), set(map(tuple, task.held_out.rows.tolist()))
        assert len(held_out) == len(task.held_out.rows) and held_out < likely.keys()
        mass = sum(likely[row] for row in held_out) / sum(likely.values())
        assert mass > 0.1 and abs(task.mass(task.held_out.rows) - mass) < 1e-12
        drawn = [task.draw(common.key(5), (40, 512)).flatten(0, 1)]
        task.batch, task.episode = 512, lambda rows: rows
        trained = [task.training_episode(i) for i in range(1, 41)]
        allowed = {row: weight for row, weight in likely.items() if row not in held_out}
        for rows, weights in ((drawn, likely), (trained, allowed)):
            counts = Counter(map(tuple, torch.cat(rows).tolist()))
            assert counts.keys() <= weights.keys(), (flags, counts.keys() - weights.keys())
            expected = np.array(list(weights.values())) * counts.total() / sum(weights.values())
            chi_square_is_clean([counts[row] for row in weights], expected)


def read_and_answered(episode, b):
    """What row b reads, and {step: what it has to answer there}."""
    targets, steps, weight = episode.targets[b].tolist(), episode.steps, episode.weight
    steps = range(episode.inputs.shape[1])[steps] if isinstance(steps, slice) else steps[b].tolist()
    counted = [True] * len(targets) if weight is None else weight[b].tolist()
    return episode.inputs[b].tolist(), {s: t for s, t, c in zip(steps, targets, counted, strict=True) if c}


def test_episodes_by_brute_force():
    for script, flags in BATTERY:
        task = task_of(f"--vocab 10 --length 5 --held-out 20 {flags}", script, build=True)
        rows = task.draw(common.key(1), (300,))
        episode = task.episode(rows)
        for b, row in enumerate(rows.tolist()):
            x = [integer for integer in row if integer < 10]
            first, answers = len(x), sorted(x) if script is Sort else x[::-1]
            if script is Predecessor:
                first, answers = 5, [x[x.index(x[5]) - 1]]
            elif script is DelayedAddition:
                first, answers = 5, [(x[4 - i] + x[5 + i]) % 10 for i in range(5)]
            read = x + [10] * (task.positions() - len(x))
            assert read_and_answered(episode, b) == (read, dict(enumerate(answers, first))), (script, row)
        assert (episode.inputs[:, task.positions() - episode.commands :] == 10).all()


def test_evaluation_by_hand():
    """Of the held-out set from all logits at once; and by length, or by condition and position."""
    for script, flags in BATTERY:
        task = task_of(f"--scale smoke --held-out 64 --batch 7 {flags}", script, build=True)
        model, episode = task.model(), task.test_episode()
        logits, targets = model(episode.inputs, episode.steps).transpose(0, 1), episode.targets  # (N, M, K)
        counted = torch.ones_like(targets, dtype=bool) if episode.weight is None else episode.weight.bool()
        right, metrics = (logits.argmax(-1) == targets).double(), task.evaluate(model, ENGINES["torch"])
        close(metrics.get("token_accuracy", metrics.get("accuracy")), right[counted].mean(), 1e-12)
        close(metrics["cross_entropy"], F.cross_entropy(logits[counted], targets[counted]), 1e-6)
        for length, accuracy in metrics.get("by_length", {}).items():
            close(accuracy, right[counted.sum(1) == int(length)][:, : int(length)].mean(), 1e-12)
        if "dual" in flags:
            assert np.allclose(list(metrics["by_condition"].values()), right.view(4, 8, 2).mean(2))
            rare = (task.held_out.rows >= 4).view(4, 8, 2, 8)
            for (c, name), p in itertools.product(enumerate(metrics["by_condition"]), range(8)):
                target, others = (kind == "rare" for kind in name.split("/"))
                assert (rare[c, p] == torch.tensor([target if i == p else others for i in range(8)])).all()
                row = 16 * c + 2 * p
                assert read_and_answered(episode, row)[1] == {15 - p: task.held_out.rows[row, p].item()}


# -- The fast engine: the plain models' numbers and gradients
def compare_engines(words, script=Reverse):
    torch.manual_seed(0)
    task = task_of(f"--vocab 8 --batch 7 --hidden 10 --embed 6 --held-out 20 {words}", script, build=True)
    model = task.model().double()
    wanted, found = (gradients(model, task.training_episode(1), engine) for engine in ENGINES.values())
    close(torch.stack(found[:2]), torch.stack(wanted[:2]), 1e-10)
    for name, gradient in wanted[2].items():
        close(found[2][name], gradient, 1e-10)
    plain, metrics = (task.evaluate(model, engine) for engine in ENGINES.values())
    close(metrics.pop("cross_entropy"), plain.pop("cross_entropy"), 1e-10)
    assert metrics == plain


def test_engines_agree():
    """Every encoding, concatenated or added, every task, and sizes of 1 to 3."""
    cases = [(pe, "concat") for pe in common.ENCODINGS] + [(pe, "add") for pe in CLOCKS]
    cases = [(*case, *BATTERY[n % 6]) for n, case in enumerate(itertools.product(PAPERS, cases))]
    cases += [(kind, ("sin", "concat"), *case) for kind in PAPERS for case in BATTERY]
    for kind, (pe, combine), script, flags in cases:
        flags += " --encode output --amplitude 2" * (script is not Reverse and pe in CLOCKS)
        flags += " --bands 0.3:1" * (pe == "sin")
        words = f"--length 5 --model {kind} --pe {pe} --combine {combine} {flags}"
        compare_engines(words, script)
    for kind, length, batch in itertools.product(PAPERS, (1, 2, 3), (1, 3)):
        compare_engines(f"--length {length} --vocab 40 --batch {batch} --hidden 40 --model {kind}")


def test_engines_agree_as_cuda_computes_them_and_in_small_chunks():
    patches = [mock.patch.object(sweeps, "choose_step", lambda step, *_: step)]  # the twins for CUDA
    patches += [mock.patch.object(fast, "CHUNK", chunk) for chunk in (7, 50)]  # of rows
    for kind, patch, flags in itertools.product(PAPERS, patches, ("--min-length 3", "--pe learned", "")):
        with patch:
            compare_engines(f"--length 5 --model {kind} {flags}")


def test_an_iteration_never_waits_for_its_device():
    """On the meta device an operation that needs a value raises, and so does one with tensors of a CPU."""
    meta = torch.device("meta")
    for (script, flags), kind in itertools.product(BATTERY, PAPERS):
        task = task_of(f"{SMOKE} --model {kind} {flags}", script, build=True)
        t = trial.Trial(task, [], CPU, ENGINES["fast"])
        held_out, t.task.spare = t.task.held_out, t.task.spare.to(meta)
        held_out.rows, held_out.hashes = held_out.rows.to(meta), held_out.hashes.to(meta)
        t.task.seed_there, t.model, t.sums = t.task.seed_there.to(meta), t.model.to(meta), t.sums.to(meta)
        t.optimizer = torch.optim.Adam(t.model.parameters(), foreach=False)
        trial.learn(t, t.task.training_episode(torch.zeros((), dtype=torch.int64, device=meta)))


# -- One trial: whatever disturbs it, it ends with the same bits
LONG = f"{SMOKE} --iterations 60 --save-every 10 --log-every 10 --snapshot-every 15"


@functools.cache
def undisturbed(words=LONG):
    with workplace():
        start = time.monotonic()
        forked(0, words)
        return outcome(folder_in()), time.monotonic() - start


def finish(parts):
    """Continue to the end, and compare; `parts`: the iterations that earlier processes came to."""
    forked(0, LONG)
    folder = folder_in()
    assert outcome(folder) == undisturbed()[0] and not (folder / "previous.pt").exists()
    assert sorted(int(path.stem) for path in (folder / "snapshots").iterdir()) == [15, 30, 45, 60]
    assert [part["until"] for part in read_json(folder / "result.json")["earlier"]] == parts


def signalled(number, at=25, times=1):
    """A task that gets a signal in this iteration."""

    class Signalled(Reverse):
        def training_episode(self, i):
            for _ in range(times * (i == at)):
                os.kill(os.getpid(), number)
            return super().training_episode(i)

    return Signalled


def test_four_signals_save_and_the_same_command_ends_with_the_same_bits():
    for number in SIGNALS:
        with workplace():
            forked(75, LONG, signalled(number))
            assert load(folder_in() / "last.pt")["iteration"] == 25
            evaluate = lambda *_, number=number: os.kill(os.getpid(), number)
            forked(75, LONG, type("Evaluated", (Reverse,), dict(evaluate=evaluate)))
            finish([25, 60])
    with workplace():
        forked(130, LONG, signalled(signal.SIGINT, times=2))  # the second one ends at once
        assert load(folder_in() / "last.pt")["iteration"] == 20
    with workplace():  # as nohup wants it
        forked(0, LONG, signalled(signal.SIGHUP), lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))


def test_damaged_checkpoints_are_passed_over_and_never_kept():
    """The last, else the one before, else the start: all lead to the same end."""
    with workplace():
        forked(75, LONG, signalled(signal.SIGTERM))
        Path("runs").rename("kept")
        flip = lambda x, at: x[:at] + bytes([x[at] ^ 4]) + x[at + 1 :]
        damages = [lambda x, n=n: flip(x, n * (len(x) - 1) // 6) for n in range(7)]
        for damage in (lambda x: x[:-999], lambda x: b"", *damages):
            shutil.copytree("kept", "runs")
            last, previous = (folder_in() / name for name in ("last.pt", "previous.pt"))
            last.write_bytes(damage(last.read_bytes()))
            forked(75, LONG, signalled(signal.SIGTERM, at=22))
            assert (load(previous)["iteration"], load(last)["iteration"]) == (20, 22)
            finish([20, 22])
            shutil.rmtree("runs")
        shutil.copytree("kept", "runs")
        for path in folder_in().glob("*.pt"):
            path.write_bytes(path.read_bytes()[:-999])
        finish([])


def test_killed_at_random_moments_and_raced():
    words = LONG.replace("60", "240").replace("--save-every 10", "--save-every 4")
    (wanted, seconds), rng, codes = undisturbed(words), np.random.default_rng(5), Counter()
    with workplace():
        while codes[-signal.SIGKILL] < 15:
            children = [fork(words) for _ in range(rng.integers(1, 3))]
            time.sleep(rng.uniform(0.05, 0.25) * seconds)
            for child in children:
                os.kill(child, signal.SIGKILL)
                codes[wait(child)] += 1
            for last in Path().rglob("last.pt"):
                if rng.random() < 0.2:
                    os.truncate(last, rng.integers(1 + last.stat().st_size))
            if list(Path().rglob("result.json")):
                shutil.rmtree("runs")  # finished before its time: again
        assert codes.keys() <= {-signal.SIGKILL, 73, 0}, (codes, Path("stderr").read_text())
        racing = [fork(words) for _ in range(2)]
        assert sorted(map(wait, racing)) in ([0, 0], [0, 73]) and outcome(folder_in()) == wanted


def test_a_trial_that_another_process_runs_is_left_alone():
    words = f"{SMOKE} --iterations 10000000 --save-every 100"
    with workplace():
        child = fork(words)
        wait_for(lambda: list(Path().rglob("last.pt")))
        for more in ("", "--overwrite"):
            ends(73, f"{words} {more}")
        os.kill(child, signal.SIGTERM)
        assert wait(child) == 75 and load(folder_in() / "last.pt")["iteration"] >= 100


def test_what_is_not_finite_ends_a_trial_with_3():
    words = f"{SMOKE} --model s4d --lr 1000 --warmup 10 --save-every 1 --snapshot-every 1"
    with workplace():
        for _ in range(2):
            ends(3, words)
            kept = [load(folder_in() / "last.pt")["model"], *map(load, Path().rglob("snapshots/*.pt"))]
            assert all(x.isfinite().all() for weights in kept for x in weights.values())
            assert not list(Path().rglob("result.json"))


def test_a_full_disk_or_an_unreadable_file_ends_a_trial_with_1():
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # below a checkpoint's size
    with workplace():
        assert forked(1, LONG, before=full).count("\n") == 1 and not list(Path().rglob("*.tmp"))
        forked(75, LONG, signalled(signal.SIGTERM))
        kept = {path: content for path, content in files().items() if path.suffix == ".pt"}
        assert forked(1, LONG, before=full).count("\n") == 1 and not list(Path().rglob("*.tmp"))
        assert len(kept) == 3 and kept.items() <= files().items()
        last = folder_in() / "last.pt"
        last.rename("elsewhere")
        last.mkdir()  # it cannot be read
        assert forked(1, LONG).count("\n") == 1
        last.rmdir()
        Path("elsewhere").rename(last)
        finish([25])


def test_out_of_memory_ends_a_trial_with_1():
    if sys.platform != "linux":
        raise Skip("no limit on memory")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limited = lambda: resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
    with workplace():
        assert forked(1, f"{SMOKE} --batch 100000 --hidden 64", before=limited).count("\n") == 1


def test_what_a_trial_leaves():
    words = f"{SMOKE} --dual-freq --pe random --lr 0.5"
    with workplace():
        ends(0, words)
        folder, before, result = folder_in(), files(), read_json(folder_in() / "result.json")
        name = "lstm-random-K8-L8-batch=8-dual-freq-embed=16-held-out=32-hidden=16-iterations=20-lr=0.5"
        assert folder.as_posix() == f"runs/reverse/{name}/seed0"
        wanted = dict(task="reverse", iterations=20, parameters=3480, argv=words.split(), earlier=[])
        keys = {"config", "seconds", "commit", "dirty", "torch", "device", "engine", "threads", "finished"}
        assert wanted.items() <= result.items() and keys <= result.keys()
        last, snapshot = load(folder / "last.pt")["model"], load(folder / "snapshots/000020.pt")
        assert last.keys() == snapshot.keys() and all(torch.equal(last[k], snapshot[k]) for k in last)
        said, seldom = ends(0, words), columns(folder)  # finished: shown, and nothing is touched
        assert files() == before and f"{result['metrics']['token_accuracy']:.4g}" in said
        ends(0, f"{words} --log-every 1 --overwrite")
        each = columns(folder)[:, 1:3].reshape(4, 5, 2)  # a row is the mean since the last one
        assert np.allclose(seldom[:, 1:3], each.mean(1), rtol=1e-6)


# -- Flags; many trials
REFUSED = {  # after --scale smoke
    Reverse: """--vocab 1, --vocab 2147483648, --vocab x, --lr nan, --lr -1, --embed 7, --seed 5-3, --x 1, x,
        --seed 0-4, --vocab 2 --length 3, --vocab 2 --length 3 --held-out 5, --length 4 --min-length 5,
        --list fig99, --all fig99, --list fig2 --vocab 31, --precision bf16, --vocab 15 --dual-freq,
        --warmup 11 --iterations 10, --dual-freq --min-length 3, --dual-freq --held-out 100, --iterations,
        --dual-freq --vocab 2 --length 3 --held-out 12, --encode input --min-length 3, --bands 0.51:0.55,
        --bands 0.5:0.5, --pe counter --embed 3, --blocks 2, --model mingru --engine fast, --device cuda""",
    DelayedAddition: "--vocab 2 --length 2",
    Predecessor: "--length 1, --vocab 3, --vocab 4 --length 2 --held-out 13",
    Stability: ", --target 9, --pairs 6, --min-length 4, --model mingru",  # the first: not trained
}


def test_bad_flags_are_refused_before_anything_is_created():
    with workplace():
        for task, cases in REFUSED.items():
            for words in cases.split(","):
                refuses(f"--scale smoke {words.strip()}", task)
        for words in ("fig99", "--scale huge", "fig2 --lr x"):
            refuses(f"'{HERE}/reverse.py' {words}", report)


def test_a_folder_of_other_flags_is_refused():
    with workplace():
        ends(0, SMOKE)
        for name in ("config.json", "result.json"):  # it was edited, or copied
            path, whole = folder_in() / name, (folder_in() / name).read_text()
            path.write_text(whole.replace('"lr": 0.001', '"lr": 0.25'))
            refuses(SMOKE)
            path.write_text(whole.replace('"bands"', '"b"'))  # of a version that had no such flag
            ends(0, SMOKE)
        path.write_text(whole.replace('"lr": 0.001', '"lr": 0.25'))
        ends(0, f"{SMOKE} --overwrite")


def test_folder_names_hold_what_changes_results():
    name = lambda words: task_of(words).folder.parent.name
    plumbing = "--save-every 7|--log-every 3|--snapshot-every 9|--out x|--precision fp32|--engine torch"
    plumbing += "|--no-graph|--deterministic|--overwrite|--warmup 1000|--amplitude 1|--bands 0:1"
    assert {name(words) for words in plumbing.split("|")} == {"lstm-sin-K16384-L64"}
    science = "--lr 0.1|--warmup 7|--min-length 3|--dual-freq|--clip 0|--combine add|--amplitude 2|--pe none"
    science += "|--bands 0:0.5|--encode input|--model mamba --blocks 2|--vocab 8|--length 8|--precision bf16"
    science += "|--hidden 8|--embed 8|--iterations 9|--batch 9|--held-out 9|--beta1 0|--beta2 0|--eps 1|"
    assert len({name(words) for words in science.split("|")}) == len(science.split("|"))


def test_defaults_and_grids_are_the_papers():
    wanted = dict(length=64, iterations=300_000, batch=512, hidden=512, embed=512, lr=1e-3, warmup=1000)
    wanted |= dict(beta1=0.9, beta2=0.999, eps=1e-8, clip=1, held_out=1024, combine="concat", encode="both")
    assert all(wanted.items() <= vars(one.args).items() for one in listed(Reverse, "fig2", "paper"))
    counts = {Reverse: dict(fig2=180, fig3=30, fig11=10, fig12=15, fig13=20, fig14=20), Sort: dict(fig8=110)}
    counts |= {DelayedAddition: dict(fig7=40), Predecessor: dict(fig10=50), Stability: dict(fig5=30)}
    for task, figures in counts.items():
        assert figures == {figure: len(listed(task, figure, "paper")) for figure in figures}


def test_list_and_its_filters():
    lines = lambda words, task=Reverse: ends(0, words, task).splitlines()
    assert len(set(lines("--list"))) == len(lines("--list"))
    one = "--model gru --pe sin --vocab 32 --seed 3"
    assert lines(f"--list fig2 --jobs 3 {one}") == [f"python reverse.py {one}"]
    assert len(set(lines("--list fig2 --model gru --seed 3-9"))) == 8 * 7, "in place of the figure's 0 to 4"
    carried = f"--list fig2 {one} --out 'a b' --beta2 0.98"
    assert lines(carried) == [f"python reverse.py {one} --out 'a b' --beta2 0.98"]
    for task, scale in itertools.product(report.TASKS, ("desk", "quick", "smoke")):
        if any(scale in figure.grids for figure in task.figures.values()):
            for line in lines(f"--scale {scale} --list", task):
                task_of(line.partition(".py")[2], task)  # every command is accepted


def test_all_runs_what_list_prints_and_one_trials_end_does_not_end_the_others():
    words = f"{SMOKE} --model lstm --vocab 8 --seed 0-1"  # four trials
    run_all = lambda: wait(fork(f"{words} --all fig2 --jobs 2"))
    with workplace():
        lines = ends(0, f"{words} --list fig2").splitlines()
        folders = [task_of(line.partition(".py")[2]).folder for line in lines]
        ends(0, f"{SMOKE} --model lstm --vocab 8 --pe none --seed 0")
        before = (folders[0] / "result.json").read_bytes()
        for folder in folders[1:3]:
            folder.mkdir(parents=True)
        (folders[1] / "result.json").write_text("{")  # this trial ends with 1
        with trial.locked(folders[2]):  # as another process would
            assert run_all() == 73, Path("stderr").read_text()
        (folders[1] / "result.json").unlink()
        assert [(folder / "result.json").exists() for folder in folders] == [True, False, False, True]
        assert run_all() == 0 and set(folders) == {path.parent for path in Path().rglob("result.json")}
        assert (folders[0] / "result.json").read_bytes() == before, "what is done is skipped"
        assert all((folder / "log.txt").exists() for folder in folders[1:])


def test_all_stops_all_and_continues_and_no_job_outlives_it():
    words = f"{SMOKE} --iterations 1500 --save-every 20 --log-every 20 --model lstm --vocab 8"
    words += " --seed 0-1 --jobs 2 --all fig2"  # four trials
    iterations = lambda: {path.parent: path.read_text().split()[-1] for path in Path().rglob("curve.csv")}
    with workplace():
        child = fork(words)
        wait_for(lambda: len(iterations()) == 2)
        os.kill(child, signal.SIGINT)
        assert wait(child) == 75 and len(iterations()) == 2, "no other trial has begun"
        stopped, child = iterations(), fork(words)
        wait_for(lambda: all(row != stopped[folder] for folder, row in iterations().items()))
        if sys.platform == "linux":  # killed without a word, it takes along what it has started, which saves
            os.kill(child, signal.SIGKILL)
            assert wait(child) == -signal.SIGKILL
            for folder in stopped:
                with open(folder / "lock") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # until its job has ended
            assert not list(Path().rglob("result.json"))
            child = fork(words)
        assert wait(child) == 0 and re.search(r"fig2\n.*4 of 4 trials", Path("stdout").read_text()), (
            "it reports"
        )
        parts = [read_json(path)["earlier"] for path in Path().rglob("result.json")]
        assert len(parts) == 4 and sum(map(bool, parts)) == 2


# -- Statistics and verdicts
def test_statistics_are_the_textbooks():
    table = {(0.025, 1): 12.7062, (0.025, 4): 2.7764, (0.05, 8): 1.8595, (0.005, 5): 4.0321}
    for (tail, freedom), t in table.items():
        assert math.isclose(verdicts.t_quantile(tail, freedom), t, rel_tol=1e-4), (tail, freedom)
    # An example of Welch's test that textbooks have: t = -2.46, 25.0 degrees of freedom, p = .021
    a = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    b = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    d = verdicts.difference([a], [b])
    assert [round(x, 3) for x in (d.value / d.error, d.freedom, 2 * d.below())] == [-2.455, 24.989, 0.021]
    primary = [verdicts.Verdict("", "", p, primary="a") for p in (0.02, 0.01, 0.04)]
    primary.append(verdicts.Verdict("", "", 0.001))
    primary.append(verdicts.Verdict("", primary="a"))  # it has not run, and counts
    close([one.shown for one in verdicts.holm(primary)[:4]], [0.06, 0.04, 0.08, 0.001], 1e-9)
    values = np.random.default_rng(7).normal(size=200)  # the paper's bootstrap, where a normal one is as good
    normal = values.mean() + 1.96 * values.std() / math.sqrt(200) * np.array([-1, 1])
    assert np.allclose(verdicts.bootstrap_interval(values), normal, rtol=0, atol=0.01)


def made_up(cells):
    """Runs of [(flags, values of token_accuracy, a seed each)]."""
    rows = [flags | {"seed": seed} for flags, values in cells for seed in range(len(values))]
    values = [value for _, each in cells for value in each]
    found = [verdicts.Run(row, {"token_accuracy": x}, {}, None) for row, x in zip(rows, values)]
    return verdicts.Runs(found, rows)


def test_each_family_is_corrected_by_itself():
    """Holm's p of a claim: the largest of (how many are not smaller) x p over its p and all smaller ones."""
    families = ["a", "b", "a", "b", "b", "a", "b", "a", "a"]
    p = np.random.default_rng(3).random(len(families)) / 4
    claims = [verdicts.Verdict("", "", x, x / 2, primary) for x, primary in zip(p, families)]
    for claim, corrected in zip(claims, verdicts.holm(claims), strict=True):
        together = [one.shown for one in claims if one.primary == claim.primary]
        smaller = [x for x in together if x <= claim.shown]
        wanted = max(x * sum(y >= x for y in together) for x in smaller)
        close([corrected.shown], [min(1, wanted)], 1e-12)
        close([corrected.opposite], [min(1, wanted / 2)], 1e-12)


def test_verdicts():
    low, high, noisy = [0.50, 0.51, 0.52, 0.48], [0.69, 0.75, 0.64, 0.80], [0.4, 0.6, 0.9, 0.2]
    cases = [(high, low, "yes"), (low, high, "no"), (noisy, low, "undecided")]
    for a, b, word in [*cases, ([0.1] * 3, [0.1] * 3, "undecided")]:
        assert verdicts.higher("", a, b).word == word
    assert verdicts.higher("", [1.0, 1.0], low).word == "too few trials"
    less = [x - 0.05 + 0.001 * n for n, x in enumerate(noisy)]  # in pairs sure, else within the spread
    assert verdicts.higher("", noisy, less).word == "undecided"
    assert verdicts.higher_in_pairs("", noisy, less).word == "yes"
    assert [verdicts.above("", high, x).word for x in (0.5, 0.7, 0.9)] == ["yes", "undecided", "no"]
    # No gain: below the margin; a gain denies it, however small
    near, more = [0.500, 0.501, 0.502], [0.510, 0.511, 0.512]
    found = [verdicts.no_gain("", x, near, m).word for x, m in ((near, 0.02), (near, 0.001), (more, 0.02))]
    assert found == ["yes", "undecided", "no"]
    # A gain is over none and over a control: the larger p counts, and of the opposite twice the p
    for control, word in ((0.4, "yes"), (0.6, "undecided"), (0.7, "no")):
        cells = {"none": 0.50, "constant": control, "sin": 0.60}
        runs = made_up([({"pe": pe}, [x, x + 0.01, x + 0.02]) for pe, x in cells.items()])
        assert verdicts.gain(runs, "").word == word


def test_the_vocabulary_that_is_handled_by_hand():
    """log2 of the K at which accuracy falls to 95%, by straight lines between neighbours; K = 4, 8, 16."""
    for accuracies, wanted in (((0.96, 1.0, 0.9), 3.5), ((1.0, 0.99, 0.96), 4.0), ((0.9, 0.99, 0.9), 2.0)):
        cells = [({"vocab": vocab, "pe": "sin"}, [x]) for vocab, x in zip((4, 8, 16), accuracies)]
        close(reverse.crossings(made_up(cells), pe="sin"), [wanted], 1e-9)
    close(reverse.crossings(made_up(cells), 0.97, pe="sin"), [2.0], 1e-9)  # of the last accuracies
    # The area under them: K = 4, 16, 32 are 2, 4 and 5 in log2
    cells = [({"vocab": vocab, "pe": "sin"}, [x]) for vocab, x in ((16, 0.6), (4, 1.0), (32, 0.5))]
    close(reverse.areas(made_up(cells), pe="sin"), [(2 * 0.8 + 1 * 0.55) / 3], 1e-9)


def at_the_end(none, sin):
    """Runs of three seeds around {multiple of the training: the mean accuracy}."""
    spread = np.array([-0.004, 0, 0.004])  # a seed's is the same everywhere, so that pairs have none
    cells = []
    for pe, means in (("none", none), ("sin", sin)):
        for times, mean in means.items():
            cells.append(({"model": "gru", "pe": pe, "iterations": 100 * times}, mean + spread))
    return made_up(cells)


def test_what_a_claim_at_the_end_of_training_means():
    for before, none, sin, wanted in (
        (0.799, 0.80, 0.90, ("the clock raises where training ends", "undecided")),
        (0.780, 0.80, 0.90, ("still ahead after 8 times", "undecided")),
        (0.780, 0.80, 0.81, ("still ahead after 8 times", "a speed-up alone")),
        (0.780, 0.80, 0.79, ("still ahead after 8 times", "a speed-up alone")),
        (0.780, 0.80, 0.77, ("still ahead after 8 times", "undecided")),
        (0.960, 0.98, 0.99, ("left out", "left out")),
    ):
        runs = at_the_end({1: 0.5, 4: before, 8: none}, {1: 0.6, 4: 0.7, 8: sin})
        for reading, words in zip(beyond.readings(runs), wanted, strict=True):
            assert reading.startswith(words), (reading, words)
        claim = verdicts.gain(runs, "", iterations=800)._replace(readings=("if yes", "if not"))
        read = "if yes" if claim.word == "yes" else "if not"
        assert report.sentence(claim).endswith(f"; read as: {read}")
        assert (claim.word == "yes") == (sin > none)
    assert beyond.readings(made_up([])) == ("", ""), "no trials, no reading"


def test_what_the_clock_is_worth_in_training():
    """Between 1 and 4 times .5 to .7, so that .6 is at 2 times, and between 4 and 8 times .7 to .8."""
    for clock, wanted in ((0.6, 1.0), (0.75, 2.5), (0.45, 0.0), (0.85, 3.0)):
        runs = at_the_end({1: 0.5, 4: 0.7, 8: 0.8}, {1: clock, 4: 0.9, 8: 0.9})
        close(np.exp2(beyond.worths(runs)), [2**wanted] * 3, 1e-9)
        (line,) = beyond.worth_in_training(runs)
        at_an_end = 3 if wanted in (0, 3) else 0
        assert f"{2**wanted:.2f} [" in line and f"; {at_an_end} of 3 seeds at an end" in line


def test_verdicts_on_targets_and_positions_by_hand():
    """Of Frequent targets among Rare disturbants positions 1 and 2 of 8 are .30 below the others, +-.01."""
    rows, found = [{"model": "lstm", "pe": "none", "seed": seed} for seed in range(3)], []
    for row, lost in zip(rows, (0.29, 0.30, 0.31)):
        accuracies = dict.fromkeys(reverse.CONDITIONS, [0.9] * 8)
        accuracies["frequent/rare"] = [0.9 - lost, 0.9 - lost, *[0.9] * 6]
        found.append(verdicts.Run(row, {"by_condition": accuracies}, {}, None))
    *_, judged = reverse.judge_targets(verdicts.Runs(found, rows), "lstm")
    assert judged.word == "yes" and judged.numbers == "+0.300 [+0.275, +0.325], n = 3"


# -- report.py, RESULTS.md, README.md, the house
def reports(words):
    with mock.patch.object(pictures, "CAN_DRAW", False):
        return ends(0, words, report)


def test_a_result_that_cannot_be_read_or_is_of_other_flags_is_named_and_left_out():
    words = f"'{HERE}/reverse.py' fig2 --scale smoke"
    with workplace():
        for pe in ("none", "sin"):
            ends(0, f"{SMOKE} --model gru --vocab 8 --pe {pe}")
        one, two = Path().rglob("gru-*/seed0/result.json")
        whole, content = one.read_text(), read_json(one)
        out, accuracy = reports(words), report.short(content["metrics"]["token_accuracy"])
        assert "2 of 12" in out and accuracy in out
        other = whole.replace('"lr": 0.001', '"lr": 0.25')
        for bad in (other, whole.replace("token_a", "a"), "[]", "3", "{", "", "\xff", whole[:-20]):
            one.write_text(bad, encoding="latin1")
            out = reports(words)
            assert "1 of 12" in out and str(one) in out and str(one) in reports("--scale smoke"), bad
        for path, before in ((one, whole), (two, two.read_text())):  # of two texts: not compared
            path.write_text(before.replace('"config": {', f'"config": {{"text_sha256": "{path.parts[2]}",'))
        assert "0 of 12" in reports(words)


def test_the_summary_says_how_sure_it_is():
    low, high = [0.4, 0.41, 0.42], [0.6, 0.61, 0.62]  # Welch's interval, by SciPy: .1773 to .2227
    of = "with 95% confidence (3 seeds each)"
    assert reverse.how_sure(low, high) == f"18 to 22 points more, {of}"
    assert reverse.how_sure(high, low) == f"18 to 22 points fewer, {of}"
    assert reverse.how_sure(low, low) == f"undecided, between -2.3 and 2.3 points, {of}"
    assert "too few" in reverse.how_sure(low, high[:2])


def test_a_report_tells_local_changes_and_says_so_where_it_finds_nothing():
    with workplace():
        for pe in ("none", "sin"):
            ends(0, f"{SMOKE} --model gru --vocab 8 --pe {pe}")
        one, two = Path().rglob("gru-*/seed0/result.json")
        for path, dirty in ((one, True), (two, False)):
            path.write_text(json.dumps(read_json(path) | {"dirty": dirty}))
        assert "with local changes (1 of 2)" in reports(f"'{HERE}/reverse.py' fig2 --scale smoke")
        out = ends(2, f"'{HERE}/reverse.py' --scale smoke --vocab 123", report)
        assert "no figure has trials of --scale smoke --vocab 123" in out


def test_a_figure_is_drawn():
    if not pictures.CAN_DRAW:
        raise Skip("no matplotlib")
    with workplace():
        ends(0, SMOKE)
        ends(0, f"'{HERE}/reverse.py' fig2 --scale smoke", report)
        assert re.search(">LSTM</text>", next(Path().rglob("*.svg")).read_text())


def test_every_committed_result_belongs_to_a_figure():
    committed = {path.relative_to(HERE).parent for path in HERE.glob("results/*/*/seed*/result.json")}
    for task in report.TASKS:
        for figure in (name for name, one in task.figures.items() if one.grids.get("desk")):
            committed -= {one.folder for one in listed(task, figure, "desk", "--out", "results")}
    assert not committed, sorted(map(str, committed))


def test_the_results_page_is_that_of_the_committed_results():
    with workplace():
        Path("results").symlink_to(HERE / "results")
        shutil.copy(HERE / "RESULTS.md", "RESULTS.md")
        assert not reports("--write RESULTS.md --out results")
        assert Path("RESULTS.md").read_bytes() == (HERE / "RESULTS.md").read_bytes(), "another page"


def test_the_readmes_first_numbers_stand_in_the_results():
    """Every number with a decimal point before the first heading, as it is rounded there."""
    numbers = r"(?<![\w.])[-+]?\d*\.\d+(?![\w.])"
    known = np.abs([float(x) for x in re.findall(numbers, (HERE / "RESULTS.md").read_text())])
    first_screen = re.sub(r"\[[^]]*\]\([^)]*\)", "", README.partition("\n## ")[0])  # but for links
    for shown in re.findall(numbers, first_screen):
        error = np.abs(known - abs(float(shown))).min()
        assert error <= 0.5001 * 10 ** -len(shown.partition(".")[2]), f"{shown} is not in RESULTS.md"


fenced = lambda language: re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_bench_counts_every_trial_of_the_paper_once():
    content = read_json(HERE / "results/bench/h200.json")
    _, _, fig2, *_, total = [line.split() for line in bench.costs(content)][:-3]
    assert fig2[:3] == ["reverse.py", "fig2", "180"] and total[-2] == "500"
    times, measured = bench.Times(content), np.median(content["configurations"]["gru-sin-64"]["suite"])
    trial_of = lambda words: run.trial_of(Reverse, ["--model", "gru", "--vocab", *words.split()])
    assert math.isclose(times.hours(trial_of("64")), measured * 300_000 / 1000 / 3600)
    assert math.isclose(times.hours(trial_of("64 --length 16 --batch 1024")), times.hours(trial_of("64")) / 2)
    assert times.hours(trial_of("32")) < times.hours(trial_of("64")) < times.hours(trial_of("65"))


def test_readme_task_runs():
    (code,) = fenced("python")
    with workplace():
        Path("echo.py").write_text(code)
        small = "--scale quick --iterations 20 --batch 8 --hidden 16 --embed 16 --seed 0 --device cpu"
        code, out, err = process("echo.py", *small.split(), "--all", "echo")
        assert code == 0 and not err and list(Path().glob("runs/echo/*/seed0/result.json")), (code, out, err)


def test_readme_commands_run():
    found = re.findall(r"^(?:.*&& )?python (.*?)(?:  #.*)?$", "\n".join(fenced("")), re.MULTILINE)
    scripts = {f"{task.name}.py": task for task in report.TASKS}
    assert {"reverse.py", "test_all.py", "report.py"} <= {line.split()[0] for line in found}
    for script, *words in map(shlex.split, found):
        assert (HERE / script).exists() or script == "echo.py", script
        if task := scripts.get(script):
            args, given = run.parse(task, words)
            if (figure := args.all if args.list is None else args.list) is not None:
                run.listed(task, args, given, figure)
            elif task is Reverse:
                with workplace():
                    ends(0, f"{shlex.join(words)} --scale smoke --device cpu")


def test_imports_run_down_only_and_stand_at_the_top():
    """Who imports stands behind what is imported; optional packages alone are imported inside a function."""
    order = """common suite.graphs suite.sweeps suite.fast suite.task suite.machine suite.trial suite.verdicts
        suite.pictures suite.run beyond reverse sort delayed_add predecessor lm_wikitext lm_shakespeare
        stability bench report""".split()  # noqa: SIM905
    assert {f"suite.{path.stem}" for path in HERE.glob("suite/*.py")} - {"suite.__init__"} <= set(order)
    for importer in order:
        tree = ast.parse((HERE / f"{importer.replace('.', '/')}.py").read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {node for function in functions for node in ast.walk(function)}
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)):
            found = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                found = [f"suite.{name}" if node.module == "suite" else node.module for name in found]
            for name in found:
                up = name in order and order.index(name) >= order.index(importer)
                optional = name.split(".")[0] in ("matplotlib", "sentencepiece")
                assert not up and (optional or node not in inside), f"{importer} imports {name}"


# -- stability.py, held to the Jacobian of the model's own forward pass
def jacobian(model, row, target):
    """d output / d state, the state right after the target (of S4D without C)."""
    x, layer = model.encoding.join(model.embedding(row[:, None])), model.layer

    def go(x, z=None):
        if isinstance(layer, common.S4D):
            out, state = s4d_by_recurrence(layer, x, 0 if z is None else torch.view_as_complex(z))
            return out[-1, 0], torch.view_as_real(state)
        lstm = isinstance(layer, torch.nn.LSTM)  # z: (2, 1, H)
        plain, start = (torch.nn.LSTM, z if z is None else tuple(z[:, None])) if lstm else (torch.nn.GRU, z)
        out, state = plain.forward(layer, x, start)
        return out[-1, 0], torch.cat(state) if lstm else state

    output, state = lambda z: go(x[target:], z)[0], go(x[:target])[1].detach()
    assert torch.allclose(output(state), layer(x, slice(len(x) - 1, len(x)))[0, 0], 1e-4, 1e-6)
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


def test_stability_is_that_of_autograds_jacobian():
    cases = [("none", 3, 1), ("sin", 3, 1), ("sin", 6, 4), ("dup", 5, 2), ("learned", 4, 4, "add")]
    for kind, (pe, n, t, *how) in itertools.product(PAPERS, cases):
        model, a, b, _ = some(kind, pe, n, t, *how)
        found = stability.stability(model, a, b, t)
        assert (found - plain_stability(model, a, b, t)).abs().max() < 1e-10, (kind, pe, n, t)
        assert (stability.stability(model, a, b, t, at_once=3) - found).abs().max() < 1e-12
        for tolerance in (1e-12, 1e-5):
            there, back, same = (stability.stability(model, *ab, t) for ab in ((a, b), (b, a), (a, a)))
            assert max((x - y).abs().max() for x, y in ((same, 1), (there, back), (there, found))) < tolerance
            assert (there.abs() <= 1).all() and (t == n or (there < 1 - 1e-6).any())
            model.float()


def test_stability_where_gradients_vanish():
    for kind, rows in itertools.product(("lstm", "s4d"), (5, 11)):
        case = some(kind, "sin")
        shut = case[0].layer.mix.bias[11:] if kind == "s4d" else case[0].layer.bias_ih_l0[33:]
        shut.data[:rows] = -1e4  # so many of the 11 outputs do not depend on the state at all
        assert (stability.stability(*case) - (plain_stability(*case) if rows < 11 else 0)).abs().max() < 1e-10


def test_stability_pairs_share_the_target_and_what_is_before_it():
    draw = lambda count: torch.stack(stability.draw_pairs(3, 10, 12, 5, count), 1).unflatten(0, (4, count))
    for name, rows in zip(reverse.CONDITIONS, draw(50).tolist()):
        target, other = (5 * (kind == "rare") for kind in name.split("/"))
        for a, b in rows:  # 12 integers, the target at t = 5, and 8 commands
            assert a[:5] == b[:5] and a[5:12] != b[5:12] and a[12:] == b[12:] == [10] * 8
            assert all(0 <= x[t] - (target if t == 4 else other) < 5 for x in (a, b) for t in range(12))
        assert_uniform([x % 5 for a, b in rows for x in a[:12] + b[5:12]], 5)
    for words, target in (("s4d", 23), ("s4d --length 8", 3), ("s4d --length 1", 1), ("gru", 1)):
        assert task_of(f"--model {words}", Stability).args.target == target


def test_stability_of_a_trial():
    words, trained = f"{SMOKE} --model s4d --pairs 8 --seed 3", f"{SMOKE} --model s4d --seed 3 --dual-freq"
    with workplace():
        ends(0, f"{words} --train", Stability)
        folder, path, before = folder_in(), folder_in() / "stability.json", outcome(folder_in())
        by_condition = read_json(path)["by_condition"]
        assert all(list(map(int, values)) == [*range(2, 21, 2)] for values in by_condition.values())
        model = common.Model("s4d", "sin", 8, 16, 16, 16).double()
        model.load_state_dict(load(folder / "last.pt")["model"])
        wanted = plain_stability(model, *stability.draw_pairs(3, 8, 8, 3, 2), 3).view(4, 2).mean(1)
        close([by_condition[condition]["20"] for condition in reverse.CONDITIONS], wanted, 1e-5)
        refuses(f"{words} --target 1", Stability)
        with trial.locked(folder):
            ends(73, f"{words} --overwrite", Stability)
        ends(0, words, Stability)
        assert read_json(path)["by_condition"] == by_condition
        ends(0, f"{trained} --overwrite")  # the trial is one of reverse.py
        assert outcome(folder) == before and not path.exists()


# -- Language models
TEXT = (HERE / "common.py").read_text()[:12_000]


@contextlib.contextmanager
def library():
    with workplace() as folder:
        Path("data").mkdir()
        Path("data/tinyshakespeare.txt").write_text(TEXT)
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
        plain, scores = zip(*(plain_transformer(model, pe, row) for row in tokens))
        logits = model.readout(model.features(tokens))
        close(logits, torch.stack(plain), 1e-12)
        close(model.readout(model.features(tokens[:, :5])), logits[:, :5], 1e-12)  # causal
        mean = torch.stack(scores).mean((0, 1))
        wanted = [mean.diagonal(-n).mean().item() for n in range(9)]
        assert np.allclose(lm_shakespeare.score_by_distance(model, tokens), wanted, atol=1e-5), pe
        episode = common.Episode(tokens[:, :-1], tokens[:, 1:], slice(None))
        loss, right = Shakespeare.loss_and_accuracy(None, model, episode, ENGINES["torch"])
        close(loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), 1e-12)
        assert abs(right - (logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean()) < 1e-12


def test_perplexity_of_a_text():
    with library():
        task = task_of(f"{SMOKE} --batch 300 --context 5", Shakespeare)
        task.begin()
    task.build(CPU)
    model, first, tokens = task.model(), task.training_episode(1), [task.types.index(x) for x in TEXT]
    train, valid = (part.unfold(0, 6, 1) for part in torch.tensor(tokens).split([10_800, 1200]))  # 90%, 10%
    drawn = torch.cat([first.inputs, first.targets[:, -1:]], 1)
    assert set(map(tuple, drawn.tolist())) <= set(map(tuple, train.tolist()))
    logits = model.readout(model.features(valid[::5, :5])).flatten(0, 1).double()  # of consecutive windows
    found = task.evaluate(model, ENGINES["torch"])["valid_perplexity"]
    close(found, F.cross_entropy(logits, valid[::5, 1:].flatten()).exp(), 1e-5)


def test_tokenizers_give_the_text_back():
    for text in ("aaaaaaaabaaaab" * 2, "abc" * 9, TEXT[:1500]):
        cut = len(text) * 9 // 10
        for name in ("char", "bpe"):
            types, train, valid = lm_shakespeare.tokenized(text, name)
            assert ["".join(types[n] for n in part) for part in (train, valid)] == [text[:cut], text[cut:]]
        pairs = Counter(itertools.pairwise(train.tolist())).values()
        assert len(types) == 159 or max(pairs, default=1) == 1, "no pair is left to be joined"
    types, train, valid = lm_shakespeare.tokenized("It's a word_1, a  word!\né", "word")
    assert " ".join(types[n] for n in [*train, *valid]) == "It ' s a word_1 , a word ! é" and len(valid) == 1


SMALL = f"{SMOKE} --data data"  # 40 pieces, 32 targets of a paragraph
LENGTHS = [2, 1, 70, *range(5, 30)]  # a piece is one more than the last, or, a tenth of them, unknown
PIECES = [[(n * n + j) % 39 + 1 if (n + j) % 10 else 0 for j in range(n)] for n in LENGTHS]


def lm_text(*lines):
    lm_wikitext.text_sha256.cache_clear()
    Path("data").mkdir(exist_ok=True)
    for split in lm_wikitext.SPLITS:
        Path(f"data/wiki.{split}.raw").write_bytes("".join(f"{line}\r\n" for line in lines).encode())


def lm_tokens(paragraphs=PIECES, text="a text"):
    """A text and, in the layout that trials read, made-up tokens."""
    lm_text(text)
    folder = Path(f"data/tokens-K40-{lm_wikitext.text_sha256(Path('data'))[:16]}")
    folder.mkdir(exist_ok=True)
    for split in lm_wikitext.SPLITS:
        np.concatenate(paragraphs).astype("<u2").tofile(folder / f"{split}.tokens")
        np.cumsum([0, *map(len, paragraphs)]).astype("<i8").tofile(folder / f"{split}.ends")
    (folder / "pieces.model").write_bytes(b"")


def lm_task(words=""):
    task = task_of(f"{SMALL} {words}", WikiText)
    task.begin()
    task.build(CPU)
    return task


def test_packed_paragraphs_equal_padded_ones():
    rows = [torch.tensor(x[:33]) for x in PIECES]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    targets, real = rows[:, 1:].clamp(min=0), rows[:, 1:] >= 0
    known, as_on_cuda = targets[real] != 0, mock.patch.object(sweeps, "choose_step", lambda step, *_: step)
    cases = [*itertools.product(("gru", "lstm"), ("none", "dup", *TABLES)), ("lstm", "learned --combine add")]
    for kind, pe in cases:
        with workplace():
            lm_tokens()
            task = lm_task(f"--model {kind} --pe {pe} --batch {len(PIECES) - 1}")
            model, batch = task.model().double(), task.training_episode(1)  # an epoch
        assert len(batch.inputs) == sum(min(n - 1, 32) for n in LENGTHS), "nothing but real targets"
        logits = common.Model.forward(model, rows[:, :-1].clamp(min=0), slice(None))  # (T, B, K)
        losses = F.cross_entropy(logits.permute(1, 2, 0), targets, reduction="none")[real]
        right = (logits.argmax(2).T == targets)[real][known].double().mean()
        wanted = losses[known].mean(), *torch.autograd.grad(losses[known].mean(), model.parameters())
        everything = [x.item() for x in (losses[known].mean().exp(), losses.mean().exp(), right)]
        of_even = lm_wikitext.even(batch, 32, 40)
        assert of_even.sizes.tolist() == [len(PIECES) - 1] * 32, "of few sizes, each of which has a graph"
        for engine, patch in (("torch", None), ("fast", None), ("fast", as_on_cuda)):
            with patch or contextlib.nullcontext():
                for pairs in (of_even, batch):
                    loss, accuracy = task.loss_and_accuracy(model, pairs, ENGINES[engine])
                    for got, want in zip((loss, *torch.autograd.grad(loss, model.parameters())), wanted):
                        close(got, want, 1e-9)
                found = task.perplexities(model, task.splits["test"], ENGINES[engine])
                close((*found, accuracy), everything, 1e-9)


def test_epochs_are_permutations_and_the_unigram_model_by_hand():
    with workplace():
        for count, batch in ((7, 3), (7, 7), (3, 10), (1, 4), (4, 4)):
            lm_tokens([[1, 2]] * count)
            task = lm_task(f"--batch {batch} --seed 3")
            drawn = list(itertools.chain(*(task.chosen(i).tolist() for i in range(1, 1 + 300 * count))))
            epochs = [tuple(drawn[n : n + count]) for n in range(0, len(drawn), count)]
            assert all(sorted(epoch) == list(range(count)) for epoch in epochs), "drawn twice, or lost"
        assert_uniform(epochs, 24)
        lm_tokens()
        task, seen = lm_task(), Counter(itertools.chain(*PIECES))
    shares = [(seen[n] + 1) / (sum(LENGTHS) + 40) for x in PIECES for n in x[1:33] if n]
    metrics = task.evaluate(task.model(), ENGINES["fast"])
    assert abs(metrics["unigram_test_perplexity"] * math.exp(np.mean(np.log(shares))) - 1) < 1e-12


def test_language_model_learns_and_refuses_another_text():
    words = f"{SMALL} --iterations 120 --lr 0.05"
    with workplace():
        lm_text("a text")
        refuses(SMALL, WikiText)  # without tokens
        lm_tokens()
        ends(0, words, WikiText)
        metrics = (wanted := outcome(folder_in()))[2]
        assert metrics["test_perplexity"] < metrics["unigram_test_perplexity"] / 2
        lm_tokens(text="another")
        refuses(words, WikiText)
        assert outcome(folder_in()) == wanted


def test_tokens_are_those_of_sentencepiece():
    if not importlib.util.find_spec("sentencepiece"):
        raise Skip("no sentencepiece")
    from sentencepiece import SentencePieceProcessor

    words = "the cat sat on a mat and dogs ran far away from old houses while rain fell , then it stopped"
    kept = [" ".join(words.split()[n:] * (1 + n % 3)) for n in range(20)]
    kept += ["= 3 is a sum", " a cat \u2028 sat \x0b on\r a mat ", " a", " " + "xyx yxy " * 600]
    with workplace():
        lm_text(" = Heading = ", "", *kept, " ", "\r", " = = Sub = = ")
        refuses(f"{SMALL} --prepare --vocab 5000", WikiText)
        ends(0, f"{SMALL} --prepare --vocab 36", WikiText)
        (path,) = Path("data").glob("tokens-K36-*/pieces.model")
        pieces, found = SentencePieceProcessor(model_file=str(path)), lm_task("--vocab 36").splits["train"]
    wanted = [pieces.encode(x) for x in kept]  # lines above SentencePiece's usual limit too
    assert found.tokens.tolist() == list(itertools.chain(*wanted)) and min(map(len, wanted)) == 1
    targets = [found.tokens[s : s + n + 1].tolist() for s, n in zip(found.starts, found.counts)]
    assert targets == [w[:33] for w in wanted if len(w) > 1]


# -- CUDA: what needs a card
def with_card(*words):
    """Python in a process of its own that sees the cards."""
    there = {name: x for name, x in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | CARDS
    with mock.patch.dict(os.environ, there, clear=True):
        return process(*words)


has_card = functools.cache(lambda: with_card("-c", "import torch; assert torch.cuda.is_available()")[0] == 0)


def test_cuda_batches():
    for drawn in (lambda draw: draw, functools.partial(torch.compile, dynamic=False)):
        test_a_batch_depends_on_the_seed_and_the_iteration_alone(torch.device("cuda"), drawn)


WAYS = ["", "--no-graph", "--engine torch", "--precision fp32", "--precision bf16"]
WAYS += ["--deterministic", "--deterministic --log-every 50"]
FP32 = [f"--precision fp32{more}" for more in ("", " --no-graph", " --deterministic")]
CARD = {f"reverse.py --model {model}": WAYS for model in PAPERS}  # {command: its ways on the card}
CARD |= {f"reverse.py --min-length 4 --model {model}": ["", "--no-graph"] for model in PAPERS}
CARD |= {"delayed_add.py": [""], "predecessor.py --model gru": [""], "sort.py": FP32[:1]}
CARD |= {f"stability.py --train --model {model}": FP32[:1] for model in PAPERS}
for name in ("mingru", "mamba", "mamba --blocks 2"):  # tf32 alone may move these by 0.01 and more
    CARD[f"reverse.py --model {name}"] = [*FP32, "--precision bf16"]
CARD |= {"lm_shakespeare.py --iterations 100 --lr 0.001": FP32[:1], "lm_wikitext.py --data data": WAYS[:3]}


def numbers_of(case):
    """{what: cross-entropy, or stability at the last snapshot} of a trial, or what is wrong with it."""
    (command, where, way), out = case, re.sub(r"\W+", "-", " ".join(case))
    usual = f"--scale smoke --iterations 300 --batch 64 --lr 0.01 {way}"  # what a command says comes after it
    script, *words = shlex.split(command.replace(".py", f".py {usual}"))
    code, _, err = process(HERE / script, *words, "--device", where, "--out", out)
    if code:
        return err
    (path,) = Path(out).rglob("result.json")
    result, metrics = read_json(path), read_json(path)["metrics"]
    wanted = where == "cuda" and "no-graph" not in way, where == "cuda" and result["engine"] == "fast"
    if (result["graph"], result["compiled"]) != wanted:
        return f"graph is {result['graph']}, compiled {result['compiled']}"
    found = {"loss": metrics.get("cross_entropy") or math.log(metrics["valid_perplexity"])}
    for path in Path(out).rglob("stability.json"):
        found |= {c: values["300"] for c, values in read_json(path)["by_condition"].items()}
    return found


def test_cuda_trials_are_the_cpus():
    cases = [(command, "cuda", way) for command, ways in CARD.items() for way in ways]
    cases += [(command, "cpu", "") for command in CARD]
    with library(), ThreadPoolExecutor(min(8, machine.cores())) as pool:
        lm_tokens()
        found = dict(zip(cases, pool.map(numbers_of, cases)))
    wrong = [(case, got) for case, got in found.items() if isinstance(got, str)]  # all, since a card is dear
    for (command, where, way), got in found.items():
        wanted, bound = found[command, "cpu", ""], 0.03 if "bf16" in way else 0.01
        if isinstance(wanted, dict) and isinstance(got, dict):
            far = [name for name, x in wanted.items() if not abs(got.get(name, math.nan) - x) < bound]
            wrong += [(command, where, way, far, got, wanted)] * bool(far)
    for model in PAPERS:
        one, two = (found[f"reverse.py --model {model}", "cuda", way] for way in WAYS[-2:])
        wrong += [(model, "--deterministic", one, two)] * (one != two)
    assert not wrong, "\n".join(map(str, wrong))


def test_cuda_gradients_are_those_of_double_precision():
    machine.prepare(ENGINES["fast"], torch.device("cuda"))  # products in fp32
    for kind, vocab in itertools.product((*PAPERS, "mamba"), (300, 2000)):
        tokens = torch.randint(vocab, (250, 16))  # from some 3,000 integers on CUDA sums by other kernels
        inputs = torch.cat([tokens, torch.full_like(tokens, vocab)], 1)
        model = common.Model(kind, "sin", vocab, 256, 256, 32).double()
        episode = common.Episode(inputs, tokens.flip(1), slice(16, 32))
        loss, _, wanted = gradients(model, episode, ENGINES["torch"])
        episode = episode._replace(inputs=inputs.cuda(), targets=episode.targets.cuda(), commands=16)
        model.zero_grad()  # else .cuda() would take along the gradients that are wanted
        model.float().cuda()
        engine = machine.choose_engine(task_of(f"--model {kind}").args, torch.device("cuda"))
        for one in {engine, engine._replace(compiled=False)}:
            with mock.patch.object(fast, "CUDA_CHUNK", 2**18):  # several chunks, of which the last is smaller
                found = gradients(model, episode, one)
            close(found[0].cpu(), loss, 1e-5)
            for name, gradient in wanted.items():
                error = (found[2][name].cpu().double() - gradient).norm() / gradient.norm()
                assert error < 1e-4, (kind, one, name, error)


def test_cuda_trial_continues_in_a_new_graph():
    words = "--scale smoke --device cuda --engine fast --deterministic --lr 0.01 --save-every 100"
    words = [HERE / "reverse.py", *words.split(), "--iterations", "8000", "--out"]
    with workplace() as folder:
        child = subprocess.Popen([sys.executable, *words, "stopped/runs"], stdout=subprocess.DEVNULL)
        wait_for(lambda: child.poll() is not None or list(folder.rglob("last.pt")), 180)
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 75
        codes = [process(*words, f"{out}/runs")[0] for out in ("stopped", "whole")]
        assert codes == [0, 0] and outcome(folder_in("stopped")) == outcome(folder_in("whole"))


def test_cuda_out_of_memory_is_one_line():
    code = "import torch, reverse; from suite import run; torch.cuda.set_per_process_memory_fraction(1e-3)"
    code += "; raise SystemExit(run.main(reverse.Reverse))"
    with workplace() as folder:
        code, _, err = process("-c", code, "--device", "cuda", "--batch", "4096")
        assert code == 1 and err.count("\n") == 1 and not list(folder.rglob("*.pt")), err


def attempt(name):
    start, said, why = time.monotonic(), "passed", ""
    try:
        if not name.startswith("test_cuda_"):
            globals()[name]()
        elif not has_card():
            raise Skip("no CUDA device")
        elif (ended := with_card(__file__, "--on-card", name))[0]:
            raise AssertionError("".join(ended[1:]))
    except Skip as reason:
        said, why = "skipped", str(reason)
    except BaseException:  # noqa: BLE001 - any exception is a failure
        said, why = "failed", traceback.format_exc()
    return name, said, time.monotonic() - start, why


def main(words):
    if words[:1] == ["--on-card"]:
        return globals()[words[1]]()
    names = [x for x in globals() if x.startswith("test_") and any(word in x for word in words or [""])]
    counts = Counter(passed=0, failed=0)
    with workplace():
        ends(0, SMOKE)  # what PyTorch imports late, once for all forked processes
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        for name, said, seconds, why in pool.map(attempt, names):
            counts[said] += 1
            reason = f" ({why})" if said == "skipped" else f"\n{why}"
            print(f"{said} {seconds:6.2f} s  {name}{reason if why else ''}", flush=True)
    print(", ".join(f"{count} {said}" for said, count in counts.items()))
    return 1 if counts["failed"] or not names else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
