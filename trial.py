"""One trial, from its folder to result.json: the training loop, checkpoints, signals.

`train` is the loop. A checkpoint and the flags decide all that follows, since
data depend on (seed, iteration) alone: a trial that was stopped ends with the same bits as one that was not.
"""

import contextlib
import datetime
import fcntl
import functools
import io
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

import common
import fast
from common import Refused

# Large pages for large tensors, where Linux leaves the choice to programs: a tenth of an iteration on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

FAILED, USAGE_ERROR, NOT_FINITE, RUNNING_ELSEWHERE, STOPPED = 1, 2, 3, 73, 75  # exit codes; 0: done

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


def write_json(path, content):
    write(path, json.dumps(content, indent=1) + "\n")


def lock(path):
    """The file `path`, open and locked; None where another process holds it."""
    file = open(path, "w")  # noqa: SIM115 - held until the trial ends
    for wait in (0.2, 0):  # `python report.py` looks at locks for an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(wait)
    file.close()
    say(f"{path.parent} is being run by another process", file=sys.stderr)


def say(text, **how):
    """Print; a log on a full disk, or one that nobody reads any more, must not end a trial."""
    with contextlib.suppress(OSError):
        print(text, flush=True, **how)


@functools.cache
def say_once(text):
    say(text, file=sys.stderr)


def pack(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Torn(Exception):
    """A file that was not written whole, or changed since."""


def unpack(path, device):
    """The content of a checkpoint."""
    content = path.read_bytes()
    try:
        damaged = zipfile.ZipFile(io.BytesIO(content)).testzip()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - it is read: whatever is wrong now is wrong with its bytes
        raise Torn(repr(error)) from None
    if damaged is not None:
        raise Torn(f"wrong checksum of {damaged}")
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def load_weights(model, path, device, key=None):
    """Those of a snapshot, or under `key` in a checkpoint; they are refused if they are not this model's."""
    try:
        content = unpack(path, device)
        model.load_state_dict(content if key is None else content[key])
    except Exception as error:
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        what = repr(error).replace("\n", " ")[:200]
        raise Refused(f"{path} cannot be used: {what}") from None
    if not all(x.isfinite().all() for x in model.parameters()):
        raise Refused(f"{path} cannot be used: its weights are not finite")


def read_json(path, key):
    """The dictionary under `key` in a file, and all of it; None twice where there is no usable file."""
    try:
        content = json.loads(path.read_text())
        return dict(content[key]), content
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (ValueError, KeyError, TypeError) as error:
        say(f"{path} cannot be used: {error!r}", file=sys.stderr)
        return None, None


def finished(folder):
    """The metrics of a trial that is done."""
    return read_json(folder / "result.json", "metrics")[0]


def refuse_other_flags(folder, config):
    """A folder's name holds every flag that matters, so this catches edited files and changed defaults.

    Of a flag that an older version did not have, the name says that it is at its default.
    """
    before, _ = read_json(folder / "config.json", "config")
    if before is None:
        return  # none yet, or torn: the folder's name vouches for it
    differ = [k for k in sorted(before.keys() & config.keys()) if before[k] != config[k]]
    if differ:
        names = [k if k.endswith("sha256") else f"--{k.replace('_', '-')}" for k in differ]
        what = ", ".join(f"{n} {before[k]} there, {config[k]} here" for n, k in zip(names, differ))
        kind = "text" if any(k.endswith("sha256") for k in differ) else "flags"
        raise Refused(f"{folder} was made with other {kind}: {what} (--overwrite starts anew)")


def clear(folder):
    """Delete all but the lock; config.json last, since it vouches for the checkpoints."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


# ------------------------------------------------------------------------------------------------------------
# The machine: device, engine, precision, memory; what is recorded of it
# ------------------------------------------------------------------------------------------------------------


def choose_device(args):
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda, but PyTorch finds no CUDA device here (use --device cpu)")
    if name == "cpu" and args.precision in ("tf32", "bf16"):
        raise Refused(f"--precision {args.precision} is for CUDA; this trial would run on a CPU, in fp32")
    return torch.device(name)


def choose_engine(task, device):
    """How this trial computes, from its flags and the device alone: the same after every resume."""
    args, cuda = task.args, device.type == "cuda"
    engine = getattr(args, "engine", "torch")
    known = engine != "torch" and fast.knows(common.LAYERS[args.model], common.ENCODINGS[args.pe])
    if engine == "fast" and not known:
        raise Refused(f"--engine fast does not know --model {args.model} with --pe {args.pe} (use torch)")
    large = cuda or task.always_fast or engine == "auto" and args.hidden >= 256 and args.batch >= 32
    chosen = known and (large or engine == "fast")
    wanted = chosen and (cuda or args.iterations >= 1000)  # compiling takes seconds
    fault = fast.compile_fault(device.type) if wanted else None
    return {
        "engine": "fast" if chosen else "torch",
        "compiled": wanted and fault is None,
        "compile_fault": fault,
        "precision": args.precision or ("tf32" if cuda else "fp32"),
        "graph": cuda and not args.no_graph,
        "deterministic": args.deterministic,
    }


def prepare(task, how, device):
    """Switches of PyTorch that the trial's way of computing needs; they hold for the whole process."""
    products = "ieee" if how["precision"] == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = products
    onednn = device.type == "cpu" and how["engine"] == "fast" and fast.onednn_is_exact()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if onednn else "none"
    if how["deterministic"]:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # read at the first product on CUDA
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(how["deterministic"])
    if device.type == "cpu" and task.is_small() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def refuse_what_cannot_fit(task, device):
    """Now, in a line, rather than by the kernel's killer or after minutes of building."""
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        needed = task.memory()
    except RuntimeError:  # more than PyTorch can count
        needed = math.inf
    if needed > there:
        amounts = f"{needed / 2**30:,.0f} GiB of memory at least, this machine has {there / 2**30:,.0f}"
        raise Refused(f"this trial needs {amounts}: lower {task.sizes}")


def is_out_of_memory(error):
    """PyTorch has a class for some of these alone; the others are RuntimeErrors that say so."""
    words = "not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED"
    says = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return says or isinstance(error, MemoryError | torch.OutOfMemoryError)


def peak_memory(device, alone):
    """Bytes: of the card's allocations, of seeds side by side all that they keep; or of the process."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated if alone else torch.cuda.max_memory_reserved)(device)
    with contextlib.suppress(OSError, StopIteration):  # on Linux; what follows counts a parent's memory too
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


def provenance(task, argv, model, how, device):
    status = git("status", "--porcelain", "--untracked-files=no")
    plumbing = {k: v for k, v in sorted(vars(task.args).items()) if k not in task.config and v is not None}
    return {
        "task": task.name,
        "config": task.config,
        "run": plumbing,
        "argv": argv,
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else status != "",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        **how,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


# ------------------------------------------------------------------------------------------------------------
# One trial
# ------------------------------------------------------------------------------------------------------------


class NotFinite(Exception):
    pass


class Trial:
    """A model, its optimizer, how far they are, and their folder; `code` is the exit code, once ended."""

    def __init__(self, task, argv, alone=True):
        self.task, self.args, self.folder, self.argv, self.alone = task, task.args, task.folder, argv, alone
        self.device, self.code, self.lock = choose_device(task.args), None, None
        self.progress = Progress(self)
        self.torn = False  # whether last.pt is, and so must not replace what is good
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext()

    # -- from the folder to the first iteration, and to the exit code

    def start(self):
        """Go on from the last checkpoint, or end where the trial is done or another process has it."""
        task, args, folder, begun = self.task, self.args, self.folder, time.perf_counter()
        if (code := task.begin()) is not None:
            return self.end(code)
        if not args.overwrite:
            refuse_other_flags(folder, task.config)
            if self.is_done():
                return
        self.how = choose_engine(task, self.device)
        refuse_what_cannot_fit(task, self.device)
        prepare(task, self.how, self.device)
        task.build(self.device)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(folder / "lock")
        except OSError as error:
            raise Refused(f"cannot write to --out {args.out}: {error}") from None
        if self.lock is None:
            return self.end(RUNNING_ELSEWHERE)
        if args.overwrite:
            clear(folder)
        elif self.is_done():  # by another process, since we looked
            return
        self.resume()
        self.record()
        self.step = captured(self) if self.how["graph"] else functools.partial(iteration, self)
        if self.how["compiled"] and not self.how["graph"]:
            rehearse(self, functools.partial(self.step, self.iteration + 1), 1)
        self.progress.start = self.iteration, self.seconds
        self.to_start = time.perf_counter() - begun

    def is_done(self):
        if metrics := finished(self.folder):
            say(f"{self.folder} is finished:")
            self.show(metrics)
            self.end(0)
        return self.code == 0

    def record(self):
        """config.json, and a word where a resumed trial will not have the bits of an undisturbed one."""
        self.origin = provenance(self.task, self.argv, self.model, self.how, self.device)
        config, before = read_json(self.folder / "config.json", "config")
        if config is None:
            write_json(self.folder / "config.json", self.origin)
        elif self.iteration and self.device.type == "cpu" and before.get("threads") != self.origin["threads"]:
            what = f"begun with {before.get('threads')} threads and continued with {self.origin['threads']}"
            say(f"{self.folder}: {what}: the last bits may differ", file=sys.stderr)
        size, threads = f"{self.origin['parameters']:,} parameters", f"{self.origin['threads']} threads"
        say(f"{self.folder}: {size}, {self.origin['device']}, {threads}")
        if fault := self.how["compile_fault"]:
            say_once(f"not compiled, so the same numbers take longer: torch.compile fails with {fault}")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextlib.contextmanager
    def failures(self):
        """A failure ends this trial alone, in one line where it is not a fault of the program."""
        try:
            yield
        except (Refused, Torn) as error:
            self.end(USAGE_ERROR, f"error: {error}")
        except NotFinite as error:
            self.end(NOT_FINITE, f"{error}; the last good checkpoint is kept in {self.folder}")
        except OSError as error:
            self.end(FAILED, f"{error}; checkpoints are kept, the same command continues")
        except Exception as error:  # noqa: BLE001 - the others go on
            if is_out_of_memory(error):
                fewer = "" if self.alone else ", or train fewer seeds at a time"
                kept = "" if self.args.overwrite else "; checkpoints are kept"
                self.end(FAILED, f"out of memory: lower {self.task.sizes}{fewer}{kept}")
            else:
                traceback.print_exc()
                self.end(FAILED)

    def end(self, code, why=None):
        self.code = code
        if why:
            which = "" if self.alone else f"{self.folder}: "
            say(f"{self.progress.interrupted()}{self.task.name}.py: {which}{why}", file=sys.stderr)
        if self.lock:
            self.lock.close()
        self.model = self.optimizer = self.step = None  # others may need their memory

    def finish(self):
        """Evaluate, write result.json; the checkpoint before the last is of no more use."""
        metrics = self.task.evaluate(self.model, self.how)
        if bad := not_finite(metrics):
            raise NotFinite(f"{', '.join(bad)} not finite after iteration {self.iteration}")
        memory = "peak_memory_bytes" if self.alone else "peak_memory_bytes_of_all"
        result = self.origin | {
            "metrics": metrics,
            "iterations": self.iteration,
            "seconds": round(self.seconds, 3),
            "iterations_per_second": round(self.iteration / self.seconds, 3),
            "seconds_to_start": round(self.to_start, 3),
            memory: peak_memory(self.device, self.alone),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        write_json(self.folder / "result.json", result)
        (self.folder / "previous.pt").unlink(missing_ok=True)
        self.show(metrics)
        self.end(0)

    def show(self, metrics):
        show_metrics(metrics)
        if hint := self.task.hint():
            say(hint)

    def stopped(self):
        self.save()
        again = "the same command" + (" without --overwrite" if self.args.overwrite else "")
        say(f"stopped at iteration {self.iteration}; {again} continues", file=sys.stderr)
        self.end(STOPPED)

    # -- the state, and its checkpoints

    def initialise(self):
        """The state before the first iteration; weights are drawn on the CPU."""
        torch.manual_seed(self.args.seed)
        self.model = self.task.model().to(self.device)
        self.rate = torch.zeros((), device=self.device)  # a tensor, so that a CUDA graph reads it anew
        adam = dict(betas=(0.9, self.args.beta2), eps=self.args.eps, fused=True, capturable=self.how["graph"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate, **adam)
        self.iteration, self.seconds = 0, 0.0
        self.checked = 0  # losses and gradients were finite up to here
        # Of loss, accuracy and gradient norm, since the last row of curve.csv
        self.sums, self.rows = torch.zeros(3, dtype=torch.float64, device=self.device), []

    def resume(self):
        """Continue from last.pt, else previous.pt, else the start: all lead to the same end.

        Only a torn file is passed over. Starting anew because of a disk that did not answer, or of another
        version's checkpoint, would in time overwrite what is good.
        """
        for path in (self.folder / "last.pt", self.folder / "previous.pt"):
            if not path.exists():
                continue
            self.initialise()  # anew for each: a failed load may have changed it
            try:
                self.load(unpack(path, self.device))
                return say(f"continuing from {path.name}, iteration {self.iteration}")
            except Torn as error:
                self.torn = True
                say(f"{path} cannot be used: {error}", file=sys.stderr)
            except Exception as error:
                if isinstance(error, OSError) or is_out_of_memory(error):
                    raise
                what = repr(error).replace("\n", " ")[:200]
                raise Refused(f"{path} is whole, but not of this model or version: {what}") from None
        say("starting at iteration 0")
        self.initialise()

    def load(self, saved):
        if not (isinstance(saved["iteration"], int) and isinstance(saved["rows"], list)):
            raise Torn("its iteration is no number")
        if saved["iteration"] > self.args.iterations:
            raise ValueError(f"iteration {saved['iteration']} is beyond --iterations")
        self.model.load_state_dict(saved["model"])
        here = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0] |= here  # the checkpoint may come from another kind of device
        self.sums.copy_(saved["sums"])
        self.iteration, self.seconds, self.rows = saved["iteration"], saved["seconds"], saved["rows"]
        self.checked = self.iteration

    def save(self):
        """last.pt becomes previous.pt."""
        self.check()
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content |= {name: getattr(self, name) for name in ("iteration", "seconds", "sums", "rows")}
        write(self.folder / "last.pt", pack(content), None if self.torn else self.folder / "previous.pt")
        self.torn = False
        lines = [
            "iteration,loss,accuracy,learning_rate,seconds",
            *(",".join(map(repr, r)) for r in self.rows),
        ]
        write(self.folder / "curve.csv", "\n".join(lines) + "\n")

    def snapshot(self):
        self.check()
        path = self.folder / "snapshots" / f"{self.iteration:06d}.pt"
        path.parent.mkdir(exist_ok=True)
        write(path, pack(self.model.state_dict()))

    def check(self):
        if not torch.stack([x.isfinite().all() for x in (self.sums, *self.model.parameters())]).all():
            window = f"between iterations {self.checked + 1} and {self.iteration}"
            raise NotFinite(f"loss, gradient or weights not finite {window}")
        self.checked = self.iteration

    def row(self, rate):
        """A row of curve.csv: means since the last one."""
        n = self.iteration - (self.rows[-1][0] if self.rows else 0)
        loss, accuracy, _ = (self.sums / n).tolist()
        return [self.iteration, loss, accuracy, rate, round(self.seconds, 3)]

    def log(self, rate):
        self.check()  # waits for the device
        self.seconds = time.perf_counter() - self.started
        self.rows.append(self.row(rate))
        self.sums.zero_()


def not_finite(metrics):
    """The names of the metrics that hold an infinity or a NaN, however deep."""

    def finite(x):
        if isinstance(x, dict | list | tuple):
            return all(map(finite, x.values() if isinstance(x, dict) else x))
        return not isinstance(x, float) or math.isfinite(x)

    return [name for name, value in metrics.items() if not finite(value)]


# ------------------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------------------


def iteration(trial, i):
    """One training step, in which the host never waits for the device; i may be a tensor there."""
    learn(trial, trial.task.training_episode(i))


def learn(trial, episode):
    bf16 = trial.how["precision"] == "bf16"
    with torch.autocast(trial.device.type, torch.bfloat16, enabled=bf16):
        loss, accuracy = trial.task.loss_and_accuracy(trial.model, episode, trial.how)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trial.model.parameters(), trial.args.clip or math.inf)
    trial.optimizer.step()
    trial.optimizer.zero_grad()
    trial.sums += torch.stack([loss.detach(), accuracy, norm])


def rehearse(trial, once, times):
    """Run a training step so often, for all that is compiled and set up by the first; it leaves no trace."""

    def tensors():
        moments = [x for each in trial.optimizer.state.values() for x in each.values()]
        return [*trial.model.parameters(), *moments, trial.sums]

    before = {x: x.detach().clone() for x in tensors()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Adam's, that it is not in a graph yet
        for _ in range(times):
            once()
    with torch.no_grad():
        for x in tensors():
            x.copy_(before[x]) if x in before else x.zero_()


def capture(once, pool=None):
    """A CUDA graph of what has been rehearsed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        once()
    return graph


def captured(trial):
    """The iteration as a CUDA graph -> a function that replays it."""
    return captured_whole(trial) if trial.task.graph else captured_by_size(trial)


def captured_whole(trial):
    """Of one graph, which counts by itself."""
    counter = torch.tensor(trial.iteration + 1, device=trial.device)
    trial.counter = counter  # the graph reads its memory, but does not keep it
    episode = trial.task.training_episode
    if trial.how["compiled"]:  # a hundred small kernels become a handful
        episode = torch.compile(episode, dynamic=False)

    def once():
        learn(trial, episode(counter))
        counter.add_(1)

    rehearse(trial, once, 3)
    counter.fill_(trial.iteration + 1)
    graph = capture(once)
    return lambda i: graph.replay()


def captured_by_size(trial):
    """Of a graph for every size of batch, read from where its first batch lies.

    They share their memory: none keeps anything there from one iteration to the next.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()

    def of(batch):
        size = tuple(x.shape for x in batch)
        if size not in graphs:
            once = functools.partial(learn, trial, batch)
            rehearse(trial, once, 3)
            graphs[size] = capture(once, pool), batch
        return graphs[size]

    def step(i):
        batch = trial.task.training_episode(i, in_graph=True)
        graph, there = of(batch)
        for into, x in zip(there, batch):
            into.copy_(x)
        graph.replay()

    of(trial.task.training_episode(trial.iteration + 1, in_graph=True))  # before the clock starts
    return step


LARGEST = torch.finfo(torch.float32).max


def train(trials, stop):
    """Train until each trial has an exit code -> the codes. Several take turns, on CUDA in streams."""
    for t in trials:
        with t.stream, t.failures():
            t.start()
    stop.training = True
    for t in (t for t in trials if t.code is None):  # the clock runs once all have compiled and captured
        t.started = time.perf_counter() - t.seconds
    while going := [t for t in trials if t.code is None]:
        for t in going:
            with t.stream, t.failures():
                args, i = t.args, t.iteration + 1
                if i <= args.iterations:  # otherwise only the result is missing
                    rate = t.task.rate(i)
                    t.rate.fill_(min(rate, LARGEST))
                    t.step(i)
                    t.iteration, t.seconds = i, time.perf_counter() - t.started

                    last = i == args.iterations
                    if last or i % args.log_every == 0:
                        t.log(rate)
                    if args.snapshot_every and i % args.snapshot_every == 0:
                        t.snapshot()
                    if last or i % args.save_every == 0:
                        t.save()
                    if not stop.requested:
                        t.progress.show(rate)
                if t.iteration == args.iterations:
                    t.finish()
                elif stop.requested:
                    t.stopped()
    return [t.code for t in trials]


class Stop:
    """Set by a signal: trials end their iteration, save, and exit with 75.

    A second Ctrl-C stops at once, and so does any signal while there is nothing to save.
    """

    SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
    requested = training = False

    def __call__(self, number, frame):
        at_once = not self.training or self.requested and number == signal.SIGINT
        what = "stopped at once" if at_once else "saving after this iteration"
        if at_once or not self.requested:
            with contextlib.suppress(OSError):  # not print, which may have been interrupted in its midst
                os.write(2, f"\n{signal.Signals(number).name}: {what}\n".encode())
        if at_once:
            os._exit(130 if self.training else STOPPED)
        self.requested = True

    @contextlib.contextmanager
    def listening(self):
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # that is to go on
        heard = [s for s in self.SIGNALS if not (nohup and s == signal.SIGHUP)]
        before = {s: signal.signal(s, self) for s in heard}
        try:
            yield self
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


# ------------------------------------------------------------------------------------------------------------
# What is said
# ------------------------------------------------------------------------------------------------------------


class Progress:
    """On a terminal one live line; elsewhere one line for every row of curve.csv."""

    def __init__(self, trial):
        self.trial, self.live = trial, trial.alone and sys.stdout and sys.stdout.isatty()
        self.label = "" if trial.alone else f"seed {trial.args.seed}: "
        self.shown, self.open, self.start = 0.0, False, (0, 0.0)

    def show(self, rate):
        trial, now = self.trial, time.perf_counter()
        last = trial.iteration == trial.args.iterations
        if self.live and (now - self.shown > 0.5 or last):
            fresh = bool(trial.rows) and trial.rows[-1][0] == trial.iteration
            text = self.line(trial.rows[-1] if fresh else trial.row(rate))
            columns = shutil.get_terminal_size().columns - 1
            say(f"\r{text[:columns]}\x1b[K", end="\n" if last else "")
            self.shown, self.open = now, not last
        elif not self.live and trial.rows and trial.rows[-1][0] == trial.iteration:
            say(self.line(trial.rows[-1]))

    def interrupted(self):
        """What ends the live line, where one is open."""
        self.open, was_open = False, self.open
        return "\n" if was_open else ""

    def line(self, row):
        done, seconds = self.trial.iteration - self.start[0], self.trial.seconds - self.start[1]
        speed = f"{done / seconds:.1f} it/s" if done > seconds else f"{seconds / done:.1f} s/it"
        left = datetime.timedelta(seconds=round((self.trial.args.iterations - row[0]) * seconds / done))
        text = f"iteration {row[0]}/{self.trial.args.iterations}  loss {row[1]:.4f}  accuracy {row[2]:.4f}"
        return f"{self.label}{text}  {speed}  {left} left"


def show_metrics(metrics):
    """The metrics in plain words; of those by condition or length, the mean of each; a list is not shown."""
    for name, value in metrics.items():
        if isinstance(value, list):
            continue
        parts = value.items() if isinstance(value, dict) else [("", value)]
        texts = [(part, f"{x:,}" if isinstance(x, int) else f"{np.mean(x):.4f}") for part, x in parts]
        numbers = "".join(f" {part} {text}".replace("  ", " ") for part, text in texts)
        say(f"{name.replace('_', ' ')}:{numbers}")
