"""The life of one trial: flags, folder, training loop, checkpoints, signals, result.json; and grids of them.

A task script describes itself as a `Task` and calls `main`. Everything here is the same for all of them.
"""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import io
import itertools
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import common
import recurrence
from common import Refused

# Large pages for large tensors, where Linux leaves the choice to programs: a tenth of an iteration on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

USAGE_ERROR, NOT_FINITE, RUNNING_ELSEWHERE, STOPPED = 2, 3, 73, 75  # exit codes; 0 done, 1 a failure
SEEDS = range(5)

# ------------------------------------------------------------------------------------------------------------
# What a task script provides
# ------------------------------------------------------------------------------------------------------------


def recurrent_model(task, args):
    sizes = args.vocab, args.embed, args.hidden, task.positions(args)
    return common.Model(args.model, args.pe, *sizes, args.combine, task.unencoded(args))


def warm_up_and_cosine(args, i):
    return common.learning_rate(i, args.lr, args.warmup, args.iterations)


@dataclasses.dataclass(eq=False)  # compared and cached by identity
class Task:
    name: str  # the first folder under --out, and the script's name
    build: Callable  # build(args, device) -> an object with training_episode(i) and evaluate(model)
    scales: dict  # scale -> its defaults; "paper" holds what differs from the defaults of add_flags
    grids: dict  # scale -> figure -> [{flag: value}, ...], one entry per trial (see `cross`)
    figures: dict  # figure -> report.Figure, how to print and draw it
    claims: list  # [report.Claim], what the paper says about these figures
    positions: Callable  # args -> time steps of one episode, the length of random and learned encodings
    derive: Callable  # args -> defaults that depend on other flags
    check: Callable  # args -> None; raises Refused, in one line, where flags do not fit together
    add_flags: Callable = lambda parser: None  # the task's own flags
    unencoded: Callable = lambda args: None  # args -> slice of the time steps without encoding, if any
    graph: bool = True  # training_episode(i) takes i as a tensor too and never waits for the device
    fast: bool = False  # --engine auto is fast at every size and on every device
    model: Callable = recurrent_model  # model(task, args) -> a module with loss_and_accuracy(episode)
    rate: Callable = warm_up_and_cosine  # rate(args, i) -> learning rate of iteration i = 1..N
    named: dict = dataclasses.field(default_factory=lambda: NAMED)  # flags that begin every folder's name
    folder: str = ""  # under --out, where it is another task's: stability.py reads the trials of reverse.py
    run: Callable | None = None  # what is done with one trial, where that is not `run` below
    without: tuple = ()  # shared flags that mean nothing to this task, such as "--held-out": it has none


NAMED = {"model": "", "pe": "", "vocab": "K", "length": "L"}  # flag -> what stands before its value


def cross(**flags):
    """All combinations: cross(model="lstm", vocab=[256, 512], seed=SEEDS) is ten trials."""
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


SMOKE = dict(iterations=20, batch=8, hidden=16, embed=16, save_every=10, log_every=5)

# ------------------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------------------

# What cannot change a result beyond rounding, or chooses what to do. Every other flag names the folder.
PLUMBING = {"device", "out", "save_every", "snapshot_every", "log_every", "overwrite"}
PLUMBING |= {"engine", "no_graph", "deterministic", "scale", "list", "all", "report"}
PLUMBING |= {"data", "download", "prepare"}  # of the language models: where the text is
PLUMBING |= {"search", "sample"}  # of lm_shakespeare.py
PLUMBING |= {"pairs", "target", "memory", "trial", "train"}  # of stability.py, about trials that exist
# Not flags: hashes of the files a trial reads, set by the task's `run`. Recorded and compared like the flags,
# they name no folder, so that --report needs no text.
FINGERPRINTS = {"text_sha256", "pieces_sha256"}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def number(kind, wanted, accept):
    """An argparse type that says what would be right."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not math.isfinite(value) or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return convert


COUNT = number(int, "a whole number of at least 1", lambda x: x >= 1)
NATURAL = number(int, "a whole number of at least 0", lambda x: x >= 0)
VOCAB = number(int, "a whole number from 2 to 2^31", lambda x: 2 <= x <= 2**31)
SEED = number(int, "a whole number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)


def seeds(text):
    """One seed, or a range of them such as 0-4."""
    first, dash, last = text.partition("-")
    if first and dash and SEED(first) <= SEED(last):
        return range(int(first), int(last) + 1)
    return SEED(text)


POSITIVE = number(float, "a finite number above 0", lambda x: x > 0)
NOT_NEGATIVE = number(float, "a finite number of at least 0", lambda x: x >= 0)
FRACTION = number(float, "a number in [0, 1)", lambda x: 0 <= x < 1)


ENGINE = "fast: recurrence.py; auto: torch.nn on a CPU below hidden 256 or batch 32, else fast (auto)"
ENGINE_FAST = "auto and fast: recurrence.py; torch: torch.nn (auto)"
PRECISION = "of matrix products: fp32; tf32; bf16, in folders of its own (tf32 on CUDA, fp32 on a CPU)"


def make_parser(task):
    script = f"{task.name}.py"
    parser = Parser(
        prog=script,
        description=sys.modules[(task.run or task.build).__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def adder(group):
        return lambda name, **how: name in task.without or group.add_argument(name, **how)

    flag = adder(parser.add_argument_group("model"))
    flag("--model", choices=list(common.LAYERS), default="lstm", help="the layer (lstm)")
    flag("--pe", choices=common.ENCODINGS, default="sin", help="encoding of the time step (sin)")
    flag("--combine", choices=["concat", "add"], default="concat", help="encoding with embedding (concat)")
    flag("--hidden", type=COUNT, default=512, help="size of the layer's state (512)")
    flag("--embed", type=COUNT, default=512, help="size of the embedding, and of the encoding (512)")

    group = parser.add_argument_group("data")
    flag = adder(group)
    flag("--vocab", type=VOCAB, default=16384, help="number of different integers, K (%(default)s)")
    flag("--length", type=COUNT, default=64, help="integers in the input, L (%(default)s)")
    flag("--held-out", type=COUNT, help="test sequences, never trained on (1024)")
    flag("--seed", type=seeds, default=0, help="draws weights, data and held-out set; 0-4: five trials (0)")
    task.add_flags(group)

    flag = adder(parser.add_argument_group("training (Adam; the defaults are the paper's)"))
    flag("--iterations", type=COUNT, default=300_000, help="batches to train on (%(default)s)")
    flag("--batch", type=COUNT, default=512, help="sequences per iteration (%(default)s)")
    flag("--lr", type=POSITIVE, default=1e-3, help="peak of the learning rate (%(default)s)")
    flag("--warmup", type=NATURAL, help="iterations of linear warm-up (1000 or, if less, iterations/10)")
    flag("--beta2", type=FRACTION, default=0.999, help="Adam's second decay; released code: 0.98 (0.999)")
    flag("--eps", type=NOT_NEGATIVE, default=1e-8, help="Adam's epsilon; released code: 1e-9 (1e-8)")
    flag(
        "--clip",
        type=NOT_NEGATIVE,
        default=1.0,
        help="largest gradient norm, 0: any (%(default)s; the paper is silent)",
    )

    flag = adder(parser.add_argument_group("this run (changes no result but for bf16)"))
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if there (auto)")
    flag(
        "--engine",
        choices=["auto", "fast", "torch"],
        default="auto",
        help=ENGINE_FAST if task.fast else ENGINE,
    )
    flag("--precision", choices=["fp32", "tf32", "bf16"], help=PRECISION)
    flag("--no-graph", action="store_true", help="on CUDA: no graph of the iteration, to debug")
    flag("--deterministic", action="store_true", help="on CUDA: the same bits every time, slower")
    flag("--out", default="runs", help="folder of all trials (runs)")
    flag("--save-every", type=COUNT, default=5000, help="iterations between checkpoints (%(default)s)")
    flag("--snapshot-every", type=NATURAL, help="iterations between kept weights, 0: none")
    flag("--log-every", type=COUNT, default=100, help="iterations per row of curve.csv (%(default)s)")
    flag("--overwrite", action="store_true", help="delete the trial's folder and start anew")

    flag = adder(parser.add_argument_group("many trials"))
    flag("--scale", choices=list(task.scales), default="paper", help="set of defaults and grids (paper)")
    figures = ", ".join(task.figures)
    flag("--list", nargs="?", const="", metavar="FIGURE", help=f"print a command per trial: {figures}")
    flag("--all", nargs="?", const="", metavar="FIGURE", help="run its trials in turn, then report")
    flag("--report", nargs="?", const="", metavar="FIGURE", help="tables, figures, claims of trials on disk")
    parser.set_defaults(**task.scales["paper"])
    return parser


def parse(task, argv):
    """-> (parser, args, the flags given explicitly). The scale sets defaults; an explicit flag wins."""
    parser = make_parser(task)
    scale = parser.parse_args(argv).scale
    parser.set_defaults(**task.scales[scale])
    args = parser.parse_args(argv)
    unset = object()
    given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), unset)))
    return parser, args, {k: v for k, v in vars(given).items() if v is not unset}


def derived_defaults(task, args):
    return {"warmup": min(1000, args.iterations // 10), "snapshot_every": 0} | task.derive(args)


def complete(task, args):
    """Fill the defaults that depend on other flags, and refuse what does not fit together."""
    for flag, value in derived_defaults(task, args).items():
        if getattr(args, flag, value) is None:
            setattr(args, flag, value)
    if "warmup" in args and args.warmup > args.iterations:
        raise Refused(f"--warmup {args.warmup} is above --iterations {args.iterations}")
    if "\n" in args.out:
        raise Refused("--out with a line break: --list prints a line per trial")
    if "embed" in args and args.pe == "sin" and args.embed % 2:
        raise Refused(f"--pe sin needs an even --embed (sine and cosine pairs), got {args.embed}")
    if "combine" in args and args.combine == "add" and args.pe in ("none", "dup"):
        raise Refused(
            f"--combine add needs an encoding to add; --pe {args.pe} has none (use sin, random, learned)"
        )
    task.check(args)


@functools.cache
def paper_defaults(task):
    return vars(make_parser(task).parse_args([]))


def as_flag(name, value):
    """One flag as command-line words; a value of True stands for the bare flag."""
    return [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])


def science(args):
    """Every value that changes the result. Of the precisions, bf16 alone does so beyond rounding."""
    plumbing = PLUMBING if args.precision == "bf16" else PLUMBING | {"precision"}
    return {k: v for k, v in sorted(vars(args).items()) if k not in plumbing}


def trial_folder(task, args):
    """OUT/TASK/MODEL-PE-K..-L..[-flag=value of all off the paper's default]/seedN, for completed args.

    What stands in the place of MODEL-PE-K..-L.. is the task's: `Task.named`.
    """
    usual = paper_defaults(task) | derived_defaults(task, args)
    named = {"seed", *task.named} | FINGERPRINTS
    other = {k: v for k, v in science(args).items() if k not in named and v != usual[k]}
    words = [k.replace("_", "-") + ("" if v is True else f"={v}") for k, v in other.items()]
    name = "-".join([*(f"{before}{getattr(args, k)}" for k, before in task.named.items()), *words])
    return Path(args.out) / (task.folder or task.name) / name / f"seed{args.seed}"


def choose_device(args):
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda, but PyTorch finds no CUDA device here (use --device cpu)")
    if name == "cpu" and args.precision in ("tf32", "bf16"):
        raise Refused(f"--precision {args.precision} is for CUDA; this trial would run on a CPU, in fp32")
    return torch.device(name)


def choose_engine(task, args, device):
    """How this trial computes, from its flags and the device alone: the same after every resume."""
    cuda, engine = device.type == "cuda", getattr(args, "engine", "torch")
    large = engine == "auto" and (cuda or task.fast or args.hidden >= 256 and args.batch >= 32)
    fast = engine == "fast" or large
    long = cuda or args.iterations >= 1000  # compiling takes seconds
    return {
        "engine": "fast" if fast else "torch",
        "compiled": fast and long and recurrence.can_compile(device.type),
        "precision": args.precision or ("tf32" if cuda else "fp32"),
        "graph": cuda and task.graph and not args.no_graph,
        "deterministic": args.deterministic,
    }


# ------------------------------------------------------------------------------------------------------------
# Files: written to a temporary name, synced, renamed
# ------------------------------------------------------------------------------------------------------------


def write(path, data, keep=None):
    """Replace `path` whole or not at all; what was there before is renamed to `keep`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
        file.flush()
        os.fsync(file.fileno())
    if keep and path.exists():
        os.replace(path, keep)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


@contextlib.contextmanager
def locked(path):
    """Hold the lock file `path` and yield True, or False where another process holds it."""
    with open(path, "w") as file:
        for wait in (0.2, 0):  # `python report.py` looks at locks for an instant
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(wait)
            else:
                yield True
                return
        say(f"{path.parent} is being run by another process", file=sys.stderr)
        yield False


def write_json(path, content):
    write(path, json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def reported_if_disk_fails(what):
    try:
        yield
    except OSError as error:
        say(f"could not save {what}: {error}", file=sys.stderr)


def say(text, **how):
    """Print while a trial trains: a full disk under the log must not end it."""
    with contextlib.suppress(OSError):
        print(text, flush=True, **how)


def pack(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpack(path, device):
    """A checkpoint; an exception of some kind for a torn or altered one."""
    if (damaged := zipfile.ZipFile(path).testzip()) is not None:
        raise OSError(f"wrong checksum of {damaged}")
    return torch.load(path, map_location=device, weights_only=True)


# ------------------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------------------


class NotFinite(Exception):
    pass


class State:
    """What a checkpoint holds: the model, its optimizer, and how far they are."""

    def __init__(self, task, args, device):
        torch.manual_seed(args.seed)
        self.model, self.how = task.model(task, args).to(device), choose_engine(task, args, device)
        self.model.fast, self.model.compiled = self.how["engine"] == "fast", self.how["compiled"]
        self.schedule = functools.partial(task.rate, args)
        self.rate = torch.zeros((), device=device)  # a tensor, so that a CUDA graph reads it anew
        adam = dict(betas=(0.9, args.beta2), eps=args.eps, fused=True, capturable=self.how["graph"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate, **adam)
        self.iteration, self.seconds = 0, 0.0
        self.checked = 0  # losses and gradients were finite up to here
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # since the last row; see `train`
        self.rows = []  # of curve.csv

    def check(self):
        if not self.sums.isfinite().all():
            window = f"between iterations {self.checked + 1} and {self.iteration}"
            raise NotFinite(f"loss or gradient not finite {window}")
        self.checked = self.iteration

    def row(self, rate):
        """A row of curve.csv: means since the last one."""
        n = self.iteration - (self.rows[-1][0] if self.rows else 0)
        loss, accuracy, _ = (self.sums / n).tolist()
        return [self.iteration, loss, accuracy, rate, round(self.seconds, 3)]

    def log(self, rate):
        self.rows.append(self.row(rate))
        self.sums.zero_()

    def save(self, folder):
        """last.pt becomes previous.pt. A full disk costs this save: training goes on, older ones stay."""
        self.check()
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content |= {name: getattr(self, name) for name in ("iteration", "seconds", "sums", "rows")}
        header = "iteration,loss,accuracy,learning_rate,seconds\n"
        with reported_if_disk_fails(f"iteration {self.iteration}"):
            write(folder / "last.pt", pack(content), keep=folder / "previous.pt")
            write(
                folder / "curve.csv", header + "".join(",".join(map(repr, row)) + "\n" for row in self.rows)
            )

    def load(self, path):
        saved = unpack(path, self.sums.device)
        self.model.load_state_dict(saved["model"])
        here = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0] |= here  # the checkpoint may come from another kind of device
        self.sums.copy_(saved["sums"])
        self.iteration, self.seconds, self.rows = saved["iteration"], saved["seconds"], saved["rows"]
        self.checked = self.iteration

    def snapshot(self, folder):
        self.check()
        path = folder / "snapshots" / f"{self.iteration:06d}.pt"
        with reported_if_disk_fails(path.name):
            path.parent.mkdir(exist_ok=True)
            write(path, pack(self.model.state_dict()))


def resume(task, args, device, folder, file=None):
    """Continue from last.pt, else previous.pt, else the start: data depend on (seed, i), so all agree."""
    for path in (folder / "last.pt", folder / "previous.pt"):
        if not path.exists():
            continue
        state = State(task, args, device)  # anew for each: a failed load may have changed it
        try:
            state.load(path)
        except Exception as error:  # noqa: BLE001 - whatever a torn file raises, an older checkpoint will do
            say(f"{path} cannot be used: {error!r}", file=sys.stderr)
            continue
        say(f"continuing from {path.name}, iteration {state.iteration}", file=file)
        return state
    say("starting at iteration 0")
    return State(task, args, device)


def iteration(state, data, args, i):
    """One training step, in which the host never waits for the device; i may be a tensor there."""
    episode, bf16 = data.training_episode(i), state.how["precision"] == "bf16"
    with torch.autocast(state.sums.device.type, torch.bfloat16, enabled=bf16):
        loss, accuracy = state.model.loss_and_accuracy(episode)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), args.clip or math.inf)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.sums += torch.stack([loss.detach(), accuracy, norm])


def captured(state, data, args):
    """The iteration as one CUDA graph, which counts by itself -> a function that replays it."""
    counter = torch.tensor(state.iteration + 1, device=state.sums.device)
    state.counter = counter  # the graph reads its memory, but does not keep it

    def once():
        iteration(state, data, args, counter)
        counter.add_(1)

    def tensors():
        moments = [x for each in state.optimizer.state.values() for x in each.values()]
        return [*state.model.parameters(), *moments, state.sums, counter]

    before = {x: x.detach().clone() for x in tensors()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Adam's, that it is not in a graph yet
        for _ in range(3):  # capture needs a warm-up, which leaves no trace
            once()
    with torch.no_grad():
        for x in tensors():
            x.copy_(before[x]) if x in before else x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        once()
    return graph.replay


def train(state, data, args, folder):
    """The training loop. Yields the rate of each iteration: its caller may stop, or advance other trials."""
    started = time.perf_counter() - state.seconds
    step = captured(state, data, args) if state.how["graph"] else None
    while state.iteration < args.iterations:
        i = state.iteration + 1
        rate = state.schedule(i)
        state.rate.fill_(rate)
        step() if step else iteration(state, data, args, i)
        state.iteration, state.seconds = i, time.perf_counter() - started

        last = i == args.iterations
        if last or i % args.log_every == 0:
            state.check()  # waits for the device
            state.seconds = time.perf_counter() - started
            state.log(rate)
        if args.snapshot_every and i % args.snapshot_every == 0:
            state.snapshot(folder)
        if last or i % args.save_every == 0:
            state.save(folder)
        yield rate


def prepare(how, device):
    """Switches of PyTorch that the trial's way of computing needs; they hold for the whole process."""
    products = "ieee" if how["precision"] == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = products
    onednn = device.type == "cpu" and how["engine"] == "fast" and recurrence.onednn_is_exact()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if onednn else "none"
    if how["deterministic"]:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # read at the first product on CUDA
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(how["deterministic"])


# ------------------------------------------------------------------------------------------------------------
# One trial from beginning to end
# ------------------------------------------------------------------------------------------------------------


def git(*words):
    """What git prints, or None without git or outside a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "cpu: " + next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    return f"cpu: {platform.machine()}"


def provenance(task, args, words, state, device):
    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "task": task.name,
        "config": science(args),
        "run": {k: v for k, v in sorted(vars(args).items()) if k in PLUMBING and v is not None},
        "argv": words,
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else status != "",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        **state.how,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in state.model.parameters()),
    }


def peak_memory(device):
    """Bytes: of the card's allocations, or of the process so far (with --all: the largest trial so far)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):  # on Linux; what follows counts a parent's memory too
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def not_finite(metrics):
    """The names of the metrics that hold an infinity or a NaN, however deep."""

    def finite(x):
        if isinstance(x, dict | list | tuple):
            return all(map(finite, x.values() if isinstance(x, dict) else x))
        return not isinstance(x, float) or math.isfinite(x)

    return [name for name, value in metrics.items() if not finite(value)]


def show_metrics(metrics):
    """The metrics in plain words; of those by condition or length, the mean of each; a list is not shown."""
    for name, value in metrics.items():
        if isinstance(value, list):
            continue
        parts = value.items() if isinstance(value, dict) else [("", value)]
        texts = [(part, f"{x:,}" if isinstance(x, int) else f"{np.mean(x):.4f}") for part, x in parts]
        numbers = "".join(f" {part} {text}".replace("  ", " ") for part, text in texts)
        say(f"{name.replace('_', ' ')}:{numbers}")


def read_config(folder):
    """The flags that a folder was made with, or None where no config.json can be read."""
    try:
        return dict(json.loads((folder / "config.json").read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_other_flags(folder, args):
    """A folder's name holds every flag that matters, so this catches edited files and changed defaults."""
    before, now = read_config(folder), science(args)
    if before is None:
        return  # none yet, or torn: the folder's name vouches for it
    differ = [k for k in sorted(before | now) if before.get(k) != now.get(k)]
    if differ:
        names = [k if k in FINGERPRINTS else f"--{k.replace('_', '-')}" for k in differ]
        what = ", ".join(f"{n} {before.get(k)} there, {now.get(k)} here" for n, k in zip(names, differ))
        kind = "text" if set(differ) & FINGERPRINTS else "flags"
        raise Refused(f"{folder} was made with other {kind}: {what} (--overwrite starts anew)")


def finished(folder):
    """The content of result.json, or None where there is none that can be read."""
    try:
        result = json.loads((folder / "result.json").read_text())
        return result if result["metrics"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def say_finished(folder, result):
    print(f"{folder} is finished:")
    show_metrics(result["metrics"])
    return 0


class Stop:
    """Set by SIGTERM, SIGINT or SIGUSR1: the trial ends its iteration, saves, and exits with 75."""

    requested = False

    def __call__(self, number, frame):
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C stops at once
        say(f"\n{signal.Signals(number).name}: saving after this iteration", file=sys.stderr)


@contextlib.contextmanager
def stop_signals():
    stop = Stop()
    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def live(task, args, words, stop, alone=True):
    """One trial with completed args, from where it is to result.json; yields every iteration -> exit code."""
    folder = trial_folder(task, args)
    if not args.overwrite:
        refuse_other_flags(folder, args)
        if result := finished(folder):
            return say_finished(folder, result)
    device = choose_device(args)
    data = task.build(args, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise Refused(f"cannot write to --out {args.out}: {error}") from None
    with locked(folder / "lock") as ours:
        if not ours:
            return RUNNING_ELSEWHERE
        if args.overwrite:
            clear(folder)
        elif result := finished(folder):  # by another process, since we looked
            return say_finished(folder, result)
        try:
            return (yield from live_locked(task, args, words, stop, folder, device, data, alone))
        except NotFinite as error:
            say(f"{error}; the last good checkpoint is kept in {folder}", file=sys.stderr)
            mark_failed(folder, str(error))
            return NOT_FINITE
        except Exception as error:
            mark_failed(folder, repr(error))
            raise


def mark_failed(folder, error):
    """For `python report.py`; the next start removes it."""
    with reported_if_disk_fails("failed.json"):
        write_json(folder / "failed.json", {"error": error})


def clear(folder):
    """Delete all but the lock; config.json last, since it vouches for the checkpoints."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def live_locked(task, args, words, stop, folder, device, data, alone):
    prepare(choose_engine(task, args, device), device)
    state = resume(task, args, device, folder)
    origin = provenance(task, args, words, state, device)
    if read_config(folder) is None:
        write_json(folder / "config.json", origin)
    size, threads = f"{origin['parameters']:,} parameters", f"{origin['threads']} threads"
    say(f"{folder}: {size}, {origin['device']}, {threads}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    progress = Progress(state, args, alone)
    (folder / "failed.json").unlink(missing_ok=True)
    for rate in train(state, data, args, folder):
        progress.show(rate)
        if stop.requested and state.iteration < args.iterations:
            state.save(folder)
            again = "the same command" + (" without --overwrite" if args.overwrite else "")
            say(f"stopped at iteration {state.iteration}; {again} continues", file=sys.stderr)
            return STOPPED
        yield
    metrics = data.evaluate(state.model)
    if bad := not_finite(metrics):
        raise NotFinite(f"{', '.join(bad)} not finite after iteration {state.iteration}")
    result = origin | {
        "metrics": metrics,
        "iterations": state.iteration,
        "seconds": round(state.seconds, 3),
        "iterations_per_second": round(state.iteration / state.seconds, 3),
        "peak_memory_bytes": peak_memory(device),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_json(folder / "result.json", result)
    show_metrics(result["metrics"])
    return 0


class Progress:
    """On a terminal one live line; elsewhere one line for every row of curve.csv."""

    def __init__(self, state, args, alone):
        self.state, self.args, self.live = state, args, alone and sys.stdout.isatty()
        self.label = "" if alone else f"seed {args.seed}: "
        self.shown, self.rows = 0.0, len(state.rows)
        self.start = (state.iteration, state.seconds)

    def show(self, rate):
        state, now = self.state, time.perf_counter()
        last = state.iteration == self.args.iterations
        if self.live and (now - self.shown > 0.5 or last):
            fresh = bool(state.rows) and state.rows[-1][0] == state.iteration
            self.line(state.rows[-1] if fresh else state.row(rate), "\r", "\n" if last else "\x1b[K")
            self.shown = now
        elif not self.live and len(state.rows) > self.rows:
            self.line(state.rows[-1], "", "\n")
        self.rows = len(state.rows)

    def line(self, row, before, after):
        done, seconds = self.state.iteration - self.start[0], self.state.seconds - self.start[1]
        speed = done / seconds
        left = datetime.timedelta(seconds=round((self.args.iterations - row[0]) / speed))
        text = f"iteration {row[0]}/{self.args.iterations}  loss {row[1]:.4f}  accuracy {row[2]:.4f}"
        say(f"{before}{self.label}{text}  {speed:.1f} it/s  {left} left", end=after)


# ------------------------------------------------------------------------------------------------------------
# Grids of trials, and the command line
# ------------------------------------------------------------------------------------------------------------


def grid(task, args, given, figure):
    """-> [(the grid's flags, command words, completed args)] of a figure's trials, or of all figures' for ''.

    A given flag that the grid sets too keeps only the trials that agree; the others go into every command.
    """
    grids = task.grids[args.scale]
    if figure and figure not in grids:
        raise Refused(f"unknown figure {figure!r} (choose from {', '.join(grids)})")
    trials = {}
    wanted = {k: v if isinstance(v, range) else [v] for k, v in given.items()}
    for flags in grids[figure] if figure else itertools.chain(*grids.values()):
        if all(flags[k] in wanted[k] for k in flags.keys() & wanted.keys()):
            carried = {k: v for k, v in given.items() if k not in {"list", "all", "report", *flags}}
            chosen = argparse.Namespace(**(vars(args) | flags))
            complete(task, chosen)
            words = [w for k, v in (flags | carried).items() for w in as_flag(k, v)]
            trials.setdefault(trial_folder(task, chosen), (flags, words, chosen))
    return list(trials.values())


def attempt(task, action):
    """A trial's exit code, or None while it runs; a broken one must not stop the others."""
    try:
        return action()
    except StopIteration as end:
        return end.value
    except Refused as error:
        print(f"{task.name}.py: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        print(f"{task.name}.py: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    return 1


def train_together(task, trials, stop):
    """Advance trials in turn, on CUDA each on a stream of its own -> their exit codes."""
    running, codes = {}, []
    for _, words, args in trials:
        stream = torch.cuda.Stream() if choose_device(args).type == "cuda" else None
        running[live(task, args, words, stop, len(trials) == 1)] = stream
    while running:
        for life, stream in list(running.items()):
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                code = attempt(task, functools.partial(next, life))
            if code is not None:
                codes.append(code)
                del running[life]
    return codes


def run(task, args, words, stop):
    """Train one trial -> its exit code."""
    return train_together(task, [({}, words, args)], stop)[0]


def together(task, trials, stop):
    """What the task does with trials, by default training -> their exit codes."""
    if task.run is None:
        return train_together(task, trials, stop)
    return [attempt(task, functools.partial(task.run, task, args, words, stop)) for _, words, args in trials]


def groups(trials, given):
    """Those that run together: on CUDA the seeds of a range, else each by itself."""
    if not isinstance(given.get("seed"), range) or choose_device(trials[0][2]).type != "cuda":
        return [[trial] for trial in trials]
    alike = {}
    for trial in trials:
        flags = {k: v for k, v in vars(trial[2]).items() if k != "seed"}
        alike.setdefault(tuple(flags.items()), []).append(trial)
    return list(alike.values())


def run_all(task, grouped, stop):
    """Every group of trials in turn -> the worst exit code; a stopped one ends it all."""
    codes = []
    for number, trials in enumerate(grouped, 1):
        for _, words, _ in trials:
            print(f"[{number}/{len(grouped)}] python {task.name}.py {shlex.join(words)}", flush=True)
        codes += together(task, trials, stop)
        if STOPPED in codes or stop.requested:
            return STOPPED
    return max((code for code in codes if code != RUNNING_ELSEWHERE), default=0)


def main(task, report, argv=None):
    """A task's command line; `report(task, scale, {figure: [(flags, folder)]})` prints and draws."""
    parser, args, given = parse(task, argv)

    def trials_of(figure):
        if not (trials := grid(task, args, given, figure)):
            raise Refused(f"no trial of {figure or 'any figure'} has the flags given")
        return trials

    def report_on(figure):
        trials_of(figure)  # refuses where there are none
        found = {}
        for name in [figure] if figure else task.grids[args.scale]:
            if trials := grid(task, args, given, name):
                found[name] = [(flags, trial_folder(task, chosen)) for flags, _, chosen in trials]
        report(task, args.scale, found)

    try:
        if args.list is not None:
            for _, words, _ in trials_of(args.list):
                print(f"python {task.name}.py {shlex.join(words)}")
            return 0
        if args.report is not None:
            report_on(args.report)
            return 0
        with stop_signals() as stop:
            if args.all is not None:
                choose_device(args)
                trials = trials_of(args.all)
                code = run_all(task, groups(trials, given), stop)
                if code != STOPPED:
                    report_on(args.all)
                return code
            complete(task, args)
            choose_device(args)
            words = sys.argv[1:] if argv is None else argv
            if not isinstance(args.seed, range):
                return together(task, [({}, words, args)], stop)[0]
            each = [argparse.Namespace(**(vars(args) | {"seed": seed})) for seed in args.seed]
            trials = [({}, [*words, "--seed", str(one.seed)], one) for one in each]
            return run_all(task, groups(trials, given), stop)
    except Refused as error:
        parser.error(error)
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
