"""One trial: the training loop, its checkpoints, and the files of its folder.

Data depend on (seed, iteration) alone, so a checkpoint and the flags decide all that follows: a trial that
was stopped ends with the same bits as one that was not. The model of a finished trial:

    task = run.trial_of(Reverse, ["--scale", "quick"])
    model = task.model()
    model.load_state_dict(trial.load(task.folder / "last.pt", "cpu")["model"])
"""

import contextlib
import datetime
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import signal
import sys
import time

import torch

from common import Refused
from suite import graphs, machine

FAILED, BAD_FLAGS, NOT_FINITE, RUNNING_ELSEWHERE, STOPPED = 1, 2, 3, 73, 75  # exit codes; 0: done


class End(Exception):
    """The trial ends here: an exit code and a line that says why."""


# -- Training
def train(task, argv, stop):
    """Train a trial to its end, from its last checkpoint on, and evaluate it -> the exit code."""
    args = task.args
    if is_finished(task):
        return show(task)
    device = machine.choose_device(args.device)
    engine = machine.choose_engine(args, device)
    machine.prepare(engine, device, args.hidden)
    if device.type == "cuda":  # a CUDA graph is not captured on the default stream
        torch.cuda.set_stream(torch.cuda.Stream())
    task.build(device)
    trial = Trial(task, argv, device, engine)
    with locked(task.folder):
        trial.begin()
        stop.saves = True
        loop(trial, stop)
        stop.saves = False  # all is saved: from here on a signal ends the process at once
        trial.conclude()
    return show(task)


def loop(trial, stop):
    """From the iteration after the checkpoint to the last one."""
    args, task = trial.args, trial.task
    started = time.perf_counter() - trial.seconds
    while trial.iteration < args.iterations:
        i = trial.iteration + 1
        rate = task.rate(i)
        trial.rate.fill_(rate)
        trial.step(i)
        trial.iteration, trial.seconds = i, time.perf_counter() - started

        last = i == args.iterations
        if last or i % args.log_every == 0:
            trial.log(rate)
        if args.snapshot_every and i % args.snapshot_every == 0:
            trial.snapshot()
        stopping = stop.requested
        if last or stopping or i % args.save_every == 0:
            trial.save()
        if stopping:
            raise End(STOPPED, f"stopped at iteration {i}; the same command continues")


def learn(trial, episode):
    """One training step; the host never waits for the device."""
    bf16 = trial.engine.precision == "bf16"
    with torch.autocast(trial.device.type, torch.bfloat16, enabled=bf16):
        loss, accuracy = trial.task.loss_and_accuracy(trial.model, episode, trial.engine)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trial.model.parameters(), trial.args.clip or math.inf)
    trial.optimizer.step()
    trial.optimizer.zero_grad()
    trial.sums += torch.stack([loss.detach(), accuracy, norm])


class Trial:
    """A model, its optimizer, how far they are, and their folder."""

    def __init__(self, task, argv, device, engine):
        """The state before the first iteration; weights are drawn on the CPU."""
        self.task, self.args, self.folder = task, task.args, task.folder
        self.device, self.engine = device, engine
        self.generators = [torch, torch.cuda] if device.type == "cuda" else [torch]  # of dropout and the like
        a = self.args
        torch.manual_seed(a.seed)
        self.model = task.model().to(device)
        self.rate = torch.zeros((), device=device)  # a tensor, so that a CUDA graph reads it anew
        adam = dict(betas=(a.beta1, a.beta2), eps=a.eps, fused=True, capturable=engine.graph)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate, **adam)
        # Of loss, accuracy and gradient norm, since the last row of curve.csv
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.iteration, self.seconds, self.rows, self.random = 0, 0.0, [], []
        self.earlier = []  # what is recorded of the processes that trained a part of it
        size = sum(p.numel() for p in self.model.parameters())
        self.about = {"task": task.name, "config": task.config, "parameters": size}
        self.about |= machine.provenance(argv, engine, device)

    def begin(self):
        """Load last.pt; if it is damaged, previous.pt; else start anew. All lead to the same end."""
        if self.args.overwrite:
            clear(self.folder)
        for path in (self.folder / "last.pt", self.folder / "previous.pt"):
            try:
                if path.exists():
                    self.resume(load(path, self.device))
                    break
            except End as damaged:
                print(f"{damaged.args[1]}, so it is passed over", file=sys.stderr)
                path.unlink()  # or the next save would make it previous.pt
        write_json(self.folder / "config.json", self.about)
        print(f"{self.folder}\n{self.about['parameters']:,} parameters, {self.about['device']}")
        large = self.about["parameters"] > 10**6 and "quick" in self.task.scales
        if self.device.type == "cpu" and large:
            print("this size is for a GPU: --scale quick takes a minute")
        print(f"from iteration {self.iteration} on", flush=True)
        self.make_step()
        for source, state in zip(self.generators, self.random):  # rehearsals of the step draw too
            source.set_rng_state(state.cpu())

    def make_step(self):
        """Set step(i), which runs iteration i: directly, as a CUDA graph, or as one per size of batch."""
        episode, first = self.task.training_episode, self.iteration + 1
        if not self.engine.graph:
            self.step = lambda i: learn(self, episode(i))
        elif self.task.in_graph:
            if self.engine.compiled:  # a hundred small kernels become a handful
                episode = torch.compile(episode, dynamic=False)
            self.step = graphs.whole(lambda i: learn(self, episode(i)), first, self.tensors)
        else:
            batches = lambda i: episode(i, in_graph=True)
            self.step = graphs.by_size(lambda batch: learn(self, batch), batches, self.tensors)

    def tensors(self):
        """What a training step changes."""
        moments = [x for each in self.optimizer.state.values() for x in each.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments, self.sums]

    def save(self):
        """Write last.pt; the one before becomes previous.pt."""
        self.require_finite()
        content = {name: getattr(self, name) for name in ("iteration", "seconds", "sums", "rows")}
        content |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content["random"] = [source.get_rng_state() for source in self.generators]
        content["processes"] = [*self.earlier, self.about | {"until": self.iteration}]
        save(self.folder / "last.pt", content, self.folder / "previous.pt")
        self.write_curve()

    def resume(self, saved):
        self.model.load_state_dict(saved["model"])
        here = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0] |= here  # the checkpoint may come from another kind of device
        self.sums.copy_(saved["sums"])
        self.iteration, self.seconds, self.rows = saved["iteration"], saved["seconds"], saved["rows"]
        self.random, self.earlier = saved["random"], saved["processes"]

    def snapshot(self):
        self.require_finite()
        path = self.folder / "snapshots" / f"{self.iteration:06d}.pt"
        path.parent.mkdir(exist_ok=True)
        save(path, self.model.state_dict())

    def require_finite(self):
        if not torch.stack([x.isfinite().all() for x in (self.sums, *self.model.parameters())]).all():
            raise End(NOT_FINITE, f"not finite at iteration {self.iteration}; the last checkpoint is kept")

    def log(self, rate):
        """A row of curve.csv, means since the last one, and a line. This waits for the device."""
        self.require_finite()
        n = self.iteration - (self.rows[-1][0] if self.rows else 0)
        loss, accuracy, _ = (self.sums / n).tolist()
        self.sums.zero_()
        self.rows.append([self.iteration, loss, accuracy, rate, round(self.seconds, 3)])
        left = (self.args.iterations / self.iteration - 1) * self.seconds
        line = f"iteration {self.iteration}/{self.args.iterations}  loss {loss:.4f}  accuracy {accuracy:.4f}"
        print(f"{line}  {datetime.timedelta(seconds=round(left))} left", flush=True)

    def write_curve(self):
        header = "iteration,loss,accuracy,learning_rate,seconds"
        lines = [header, *(",".join(map(str, row)) for row in self.rows)]
        write(self.folder / "curve.csv", "\n".join([*lines, ""]).encode())

    def conclude(self):
        """Evaluate and write result.json; the checkpoint before the last is of no more use."""
        self.write_curve()
        self.model.eval()
        metrics = self.task.evaluate(self.model, self.engine)
        result = self.about | {
            "earlier": self.earlier,
            "metrics": metrics,
            "iterations": self.iteration,
            "seconds": round(self.seconds, 3),
            "iterations_per_second": round(self.iteration / self.seconds, 3),
            "peak_memory_bytes": machine.peak_memory(self.device),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        write_json(self.folder / "result.json", result)
        (self.folder / "previous.pt").unlink(missing_ok=True)


def is_finished(task):
    """Whether there is a result to keep. Files of other flags are refused: they were edited or copied."""
    if task.args.overwrite:
        return False
    for name in ("config.json", task.file):
        content = read_json(task.folder / name)
        if content and (what := differences(content | content["config"], task.config)):
            raise Refused(f"{task.folder} {what} (--overwrite starts anew)")
    return (task.folder / task.file).exists()


def differences(before, config):
    """How flags that a file and a trial both have differ, in words; or None."""
    differ = [k for k in sorted(before.keys() & config.keys()) if before[k] != config[k]]
    what = ", ".join(f"{k} {before[k]} there, {config[k]} here" for k in differ)
    return f"was made with other flags or another text: {what}" if differ else None


def show(task):
    """Print the metrics -> 0."""
    print(f"{task.folder} is finished")
    metrics = read_json(task.folder / "result.json")["metrics"]
    for name, value in reversed(metrics.items()):  # the first one last, where --all finds it
        if isinstance(value, int | float):
            print(f"{name.replace('_', ' ')}: {value:.6g}")
    return 0


# -- Signals
class Stop:
    """Hears signals. After the first the iteration ends and is saved; a second Ctrl-C ends at once.

    Where nothing has to be saved, the first one ends the process.
    """

    def __init__(self):
        self.requested = self.saves = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
                signal.signal(number, self)

    def __call__(self, number, frame):
        if not self.saves:
            os.write(2, b"\nstopped; the same command continues\n")  # print may have been interrupted
            os._exit(STOPPED)
        if self.requested and number == signal.SIGINT:
            os._exit(130)
        os.write(2, b"\nsaving after this iteration; Ctrl-C again stops at once\n")
        self.requested = True


# -- Files: written whole or not at all
def write(path, content, keep=None):
    """Replace `path`; what was there before becomes `keep`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk names no file


def write_json(path, content):
    try:
        text = json.dumps(content, indent=1, allow_nan=False, default=lambda x: x.tolist())
    except ValueError:
        raise End(NOT_FINITE, f"a number is not finite: {path}") from None
    write(path, f"{text}\n".encode())


def read_json(path):
    """None where there is no such file."""
    try:
        content = json.loads(path.read_text())
        dict(content["config"])  # or it is no file of ours
        return content
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise End(FAILED, f"{path} cannot be read: {error!r}") from None


def save(path, content, keep=None):
    """What torch.save writes, and then its SHA-256."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write(path, buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest(), keep)


def load(path, device):
    content = path.read_bytes()
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        raise End(FAILED, f"{path} is damaged")
    return torch.load(io.BytesIO(content[:-32]), map_location=device, weights_only=True)


@contextlib.contextmanager
def locked(folder):
    """Create the folder, and keep other processes from it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise End(RUNNING_ELSEWHERE, f"{folder} is being run by another process") from None
        yield


def clear(folder):
    """Results first, config.json last: a delete cut short never looks like a finished trial."""
    shutil.rmtree(folder / "snapshots", ignore_errors=True)
    for name in ("result.json", "stability.json", "previous.pt", "last.pt", "curve.csv", "config.json"):
        (folder / name).unlink(missing_ok=True)
