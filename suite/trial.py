"""One trial, from its folder to result.json: checkpoints, signals, and the training loop, `train`.

A checkpoint and the flags decide all that follows, since data depend on (seed, iteration) alone: a trial that
was stopped ends with the same bits as one that was not.

The model of a finished trial, in a program of one's own:

    args, _ = flags.parse(Reverse, ["--scale", "quick", "--seed", "0"])
    task = flags.complete(Reverse, args)
    model = task.model()
    trial.load_weights(model, task.folder / "last.pt", "cpu", "model")
    model.eval()
"""

from suite import files, graphs, machine
from suite.files import Torn
from suite.progress import Progress, say, say_once, show_metrics
from suite.task import BAD_FLAGS, differences

import contextlib
import datetime
import functools
import json
import math
import os
import signal
import sys
import time
import traceback

import torch

from common import Refused

FAILED, NOT_FINITE, RUNNING_ELSEWHERE, STOPPED = 1, 3, 73, 75  # exit codes, beside BAD_FLAGS; 0: done
# What the last bits depend on, but for a CPU's threads
BITS = ["device", "engine", "compiled", "precision", "deterministic", "torch", "commit"]
# What is kept of each process that trained a part of a trial, or evaluated a part of its snapshots
PROCESS = [*BITS, "threads", "dirty", "code"]
HEADER = "iteration,loss,accuracy,learning_rate,seconds"  # of curve.csv


class NotFinite(Exception):
    pass


class Stopped(BaseException):  # torch.compile makes an Exception one of its own
    """A signal came while a trial was evaluated, when there is nothing to save."""


class Stop:
    """Set by a signal: trials end their iteration, save, and exit with 75.

    A second Ctrl-C stops at once, and so does any signal before training.
    """

    SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP

    def __init__(self, saving="saving after this iteration"):
        self.requested = False
        self.training = False  # whether there is something to save
        self.evaluating = False
        self.saving = saving
        self.jobs = []  # whose processes must not outlive this one

    def __call__(self, number, frame):
        at_once = not self.training or self.requested and number == signal.SIGINT
        doing = "giving up the evaluation" if self.evaluating else self.saving
        what = "stopped at once" if at_once else f"{doing}; Ctrl-C again stops at once"
        if at_once or not self.requested:
            with contextlib.suppress(OSError):  # not print, which may have been interrupted in its midst
                os.write(2, f"\n{signal.Signals(number).name}: {what}\n".encode())
        if at_once:
            for job in self.jobs:
                job.send(signal.SIGKILL)
            os._exit(130 if self.training else STOPPED)
        self.requested = True
        if self.evaluating:
            raise Stopped

    @contextlib.contextmanager
    def listening(self):
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # it is to survive a closed terminal
        heard = [s for s in self.SIGNALS if not (nohup and s == signal.SIGHUP)]
        before = {s: signal.signal(s, self) for s in heard}
        try:
            yield self
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    @contextlib.contextmanager
    def interrupting(self):
        """What stands here is given up as soon as a signal comes, or if one has come."""
        if self.requested:
            raise Stopped
        self.evaluating = True
        try:
            yield
        finally:
            self.evaluating = False


def other_flags(folder, config):
    """How the flags of a folder's files differ from these, in words, or None.

    Its name already tells every flag off its default. If they still differ, a file was edited or copied, or a
    default has changed.
    """
    for name in ("config.json", "result.json"):
        content = files.read_usable_json(folder / name, "config")
        if content and (what := differences(content["config"], config)):
            return what
    return None


def other_code(task, content):
    """In words, that a trial's file was made by another version of its script or of common.py; None where it
    was not, or does not say."""
    codes = {process.get("code") for process in files.processes(content)} if content else set()
    if codes - {None, machine.code_of(task)}:
        return f"with another {machine.script_of(task).name} or common.py than now"


def earlier_processes(before, now, until):
    """What a file says of earlier ones: of the last one too where it was unlike this process, `now`."""
    earlier, last = before.get("earlier", []), {name: before.get(name) for name in PROCESS}
    if last == {name: now[name] for name in PROCESS}:
        return earlier
    return [*earlier, last | {"until": until}]


def refuse_other_flags(folder, config):
    if what := other_flags(folder, config):
        raise Refused(f"{folder} {what} (--overwrite starts anew)")


def refuse_another_text(tasks, text):
    """Refuse trials of another text, which --all would take for done. A single one says so as it begins."""
    for task in tasks:
        if not task.args.overwrite:
            refuse_other_flags(task.folder, task.config | {"text_sha256": text})


def again(args):
    """What continues a trial that has saved its state."""
    return "the same command" + (" without --overwrite" if args.overwrite else "")


def load_weights(model, path, device, key=None):
    """Those of a snapshot, or under `key` in a checkpoint; they are refused if they are not this model's."""
    try:
        content = files.load_tensors(path, device)
        model.load_state_dict(content if key is None else content[key])
    except Exception as error:
        if isinstance(error, OSError) or machine.is_out_of_memory(error):
            raise
        what = repr(error).replace("\n", " ")[:200]
        raise Refused(f"{path} cannot be used: {what}") from None
    if not all(x.isfinite().all() for x in model.parameters()):
        raise Refused(f"{path} cannot be used: its weights are not finite")


def names_of_not_finite(metrics):
    """The names of the metrics that hold an infinity or a NaN, however deep."""

    def finite(x):
        if isinstance(x, dict | list):
            return all(map(finite, x.values() if isinstance(x, dict) else x))
        return not isinstance(x, float) or math.isfinite(x)

    return [name for name, value in metrics.items() if not finite(value)]


# ------------------------------------------------------------------------------------------------------------
# One trial
# ------------------------------------------------------------------------------------------------------------


class Trial:
    """A model, its optimizer, how far they are, and their folder."""

    def __init__(self, task, argv, alone=True):
        self.task, self.args, self.folder, self.argv, self.alone = task, task.args, task.folder, argv, alone
        self.device = machine.choose_device(task.args.device)
        on_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.stream(torch.cuda.Stream()) if on_cuda else contextlib.nullcontext()
        self.progress = Progress(task.args, alone)
        self.code = None  # the exit code, once it has ended
        self.lock = self.engine = self.origin = self.step = None
        self.torn = False  # last.pt was damaged: the next save must not make it previous.pt
        self.seconds_to_start = 0.0
        # The state, see `initialise`
        self.model = self.optimizer = self.rate = self.sums = None
        self.iteration, self.checked, self.rows = 0, 0, []
        self.random = None  # states of random generators, of a checkpoint
        self.seconds = 0.0  # spent in training, over all resumes
        self.clock_zero = 0.0  # perf_counter() less these seconds

    # -- from the folder to the first iteration

    def start(self):
        """Go on from the last checkpoint, or end where the trial is done or another process has it."""
        task, args, folder, begun = self.task, self.args, self.folder, time.perf_counter()
        if (code := task.begin()) is not None:
            return self.end(code)
        if not args.overwrite:
            refuse_other_flags(folder, task.config)
            if self.ends_as_finished():
                return
        self.engine = machine.choose_engine(task, self.device)
        machine.refuse_what_cannot_fit(task, self.device)
        machine.prepare(self.engine, self.device, task.is_small())
        task.build(self.device)
        self.take_folder()
        if self.lock is None:
            say(f"{folder} is being run by {files.holder(folder / 'lock')}", file=sys.stderr)
            return self.end(RUNNING_ELSEWHERE)
        if args.overwrite:
            if files.is_locked(folder / "stability.lock"):
                raise Refused(f"{folder} is being evaluated by {files.holder(folder / 'stability.lock')}")
            files.clear(folder)
        elif self.ends_as_finished():  # by another process, since we looked
            return
        self.resume()
        if not self.iteration:  # remains of a start that ended before its first checkpoint
            files.clear(folder)
        self.record_origin()
        self.make_step()
        self.restore_random()
        self.progress.start(self.iteration, self.seconds)
        self.seconds_to_start = time.perf_counter() - begun

    def take_folder(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = files.lock(self.folder / "lock")
        except (OSError, RecursionError) as error:  # thousands of folders deep
            if files.is_of_the_disk(error):
                raise
            raise Refused(f"cannot write to --out {self.args.out[:200]}: {error}") from None

    def ends_as_finished(self):
        """Whether there is a result: then it is shown, and the trial ends."""
        result = files.read_usable_json(self.folder / "result.json", "metrics")
        if result and result["metrics"]:
            other = other_code(self.task, result)
            say(f"{self.folder} is finished{f', {other}' if other else ''}:")
            self.show(result["metrics"])
            self.end(0)
        return self.code == 0

    def record_origin(self):
        """config.json, and a word where a resumed trial will not have the bits of an undisturbed one."""
        before = files.read_usable_json(self.folder / "config.json", "config")
        if self.iteration and before:
            self.keep_snapshot_interval(before.get("run", {}))
        self.origin = machine.provenance(self.task, self.argv, self.model, self.engine, self.device)
        threads = self.origin["threads"]
        if before is None:
            files.write_json(self.folder / "config.json", self.origin)
        else:
            self.keep_earlier(before)
        size = f"{self.origin['parameters']:,} parameters"
        say(f"{self.folder}: {size}, {self.origin['device']}, {threads} thread{'s' * (threads > 1)}")
        if fault := self.engine.compile_fault:
            say_once(f"not compiled, so the same numbers take longer: torch.compile fails with {fault}")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def keep_earlier(self, before):
        """What trained a part of a resumed trial otherwise stays in config.json, for result.json."""
        known = before.get("earlier", [])
        self.say_what_changed(known[0] if known else before)
        if earlier := earlier_processes(before, self.origin, self.iteration):
            self.origin["earlier"] = earlier
        if earlier != known:
            files.write_json(self.folder / "config.json", self.origin)

    def say_what_changed(self, before):
        """Of what the last bits depend on, since a resumed trial began."""
        names = [*BITS, "threads"] if self.device.type == "cpu" else BITS
        pairs = [(name, before.get(name), self.origin[name]) for name in names]
        if changed := [f"{name} {old}, now {new}" for name, old, new in pairs if old != new]:
            what = f"begun with {'; '.join(changed)}"
            say(f"{self.folder}: {what}: the last bits may differ", file=sys.stderr)
        if other := other_code(self.task, before):
            say(
                f"{self.folder}: begun {other}: if they train otherwise, the end is neither's",
                file=sys.stderr,
            )

    def keep_snapshot_interval(self, run):
        """Of a resumed trial: stability.py wants all snapshots of one interval."""
        every = run.get("snapshot_every", self.args.snapshot_every)
        if every != self.args.snapshot_every:
            say(f"{self.folder}: --snapshot-every stays {every}, with which it began", file=sys.stderr)
            self.args.snapshot_every = every

    def make_step(self):
        """Set step(i), which runs iteration i: as a CUDA graph, one for each size of batch, or directly."""
        self.step = lambda i: learn(self, self.task.training_episode(i))
        first, episode = self.iteration + 1, self.task.training_episode
        if self.engine.graph and self.task.graph:
            if self.engine.compiled:  # a hundred small kernels become a handful
                episode = torch.compile(episode, dynamic=False)
            step = lambda i: learn(self, episode(i))
            self.step = graphs.whole(step, first, self.tensors, self.device)
        elif self.engine.graph:
            episode = functools.partial(episode, in_graph=True)
            self.step = graphs.by_size(functools.partial(learn, self), episode, first, self.tensors)
        elif self.engine.compiled:
            graphs.rehearse(lambda: self.step(first), 1, self.tensors)

    # -- to the exit code

    @contextlib.contextmanager
    def failures(self):
        """A failure ends this trial alone, in one line where it is not a fault of the program."""
        try:
            yield
        except (Refused, Torn) as error:
            self.end(BAD_FLAGS, f"error: {error}")
        except NotFinite as error:
            kept = f"the last good checkpoint is kept in {self.folder}"
            checkpoint = kept if self.task.has_begun() else "nothing was saved"
            with contextlib.suppress(OSError):
                files.write(self.folder / files.DIVERGED, f"{error}\n")
            self.end(NOT_FINITE, f"{error}; {checkpoint}")
        except Stopped:
            self.end(STOPPED, f"stopped while evaluating; {again(self.args)} evaluates")
        except OSError as error:
            where = "" if error.filename else f"{self.folder}: "  # a disk that does not answer names no file
            kept = f"; checkpoints are kept, {again(self.args)} continues"
            more = kept if self.task.has_begun() else ""
            self.end(FAILED, f"{where}{error}{more}")
        except Exception as error:  # noqa: BLE001 - the others go on
            if machine.is_out_of_memory(error):
                fewer = "" if self.alone else ", or train fewer seeds at a time"
                kept = "; checkpoints are kept" if self.task.has_begun() else ""
                self.end(FAILED, f"out of memory: lower {self.task.what_to_lower}{fewer}{kept}")
            else:
                traceback.print_exc()
                self.end(FAILED)

    def end(self, code, why=None):
        self.code = code
        self.progress.live.close()
        if why:
            which = "" if self.alone else f"{self.folder}: "
            say(f"{self.task.name}.py: {which}{' '.join(why.splitlines())}", file=sys.stderr)
        if self.lock:
            self.lock.close()
        self.model = self.optimizer = self.step = None  # others may need their memory

    def conclude(self, stop):
        """Evaluate, write result.json; the checkpoint before the last is of no more use."""
        self.progress.evaluating()
        self.model.eval()
        with stop.interrupting():
            metrics = self.task.evaluate(self.model, self.engine)
        metrics = json.loads(json.dumps(metrics, default=lambda x: x.tolist()))  # also tensors and arrays
        if bad := names_of_not_finite(metrics):
            raise NotFinite(f"{', '.join(bad)} not finite after iteration {self.iteration}")
        memory = "peak_memory_bytes" if self.alone else "peak_memory_bytes_of_all"
        result = self.origin | {
            "metrics": metrics,
            "iterations": self.iteration,
            "seconds": round(self.seconds, 3),
            "iterations_per_second": round(self.iteration / self.seconds, 3),
            "seconds_to_start": round(self.seconds_to_start, 3),
            memory: machine.peak_memory(self.device, self.alone),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self.write_curve()  # again: one killed after its last checkpoint has an older one
        files.write_json(self.folder / "result.json", result)
        for name in ("previous.pt", files.DIVERGED):
            (self.folder / name).unlink(missing_ok=True)
        self.progress.live.close()
        self.show(metrics)
        self.end(0)

    def show(self, metrics):
        show_metrics(metrics)
        if hint := self.task.hint():
            say(hint)

    def save_and_stop(self):
        self.save()
        self.end(STOPPED, f"stopped at iteration {self.iteration}; {again(self.args)} continues")

    # -- the state, and its checkpoints

    def initialise(self):
        """The state before the first iteration; weights are drawn on the CPU."""
        torch.manual_seed(self.args.seed)
        self.model = self.task.model().to(self.device)
        self.rate = torch.zeros((), device=self.device)  # a tensor, so that a CUDA graph reads it anew
        betas = self.args.beta1, self.args.beta2
        adam = dict(betas=betas, eps=self.args.eps, fused=True, capturable=self.engine.graph)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate, **adam)
        self.iteration, self.seconds = 0, 0.0
        self.checked = 0  # losses and gradients were finite up to here
        # Of loss, accuracy and gradient norm, since the last row of curve.csv
        self.sums, self.rows = torch.zeros(3, dtype=torch.float64, device=self.device), []

    def tensors(self):
        """What a training step changes."""
        moments = [x for each in self.optimizer.state.values() for x in each.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments, self.sums]

    def resume(self):
        """Continue from last.pt, else previous.pt, else the start: all lead to the same end.

        Only a damaged file is passed over. Any other failure, of a disk or of another version's checkpoint,
        ends the trial: to start anew would in time overwrite good checkpoints.
        """
        for path in (self.folder / "last.pt", self.folder / "previous.pt"):
            if not path.exists():
                continue
            self.initialise()  # anew for each: a failed load may have changed it
            try:
                self.load(files.load_tensors(path, self.device))
                return say(f"continuing from {path.name}, iteration {self.iteration}")
            except Torn as error:
                self.torn = True
                say(f"{path} cannot be used: {error}", file=sys.stderr)
            except Exception as error:
                if isinstance(error, OSError) or machine.is_out_of_memory(error):
                    raise
                what = repr(error).replace("\n", " ")[:200]
                raise Refused(f"{path} is whole, but not of this model or version: {what}") from None
        say("starting at iteration 0")
        self.initialise()

    def load(self, saved):
        if any(len(row) != len(HEADER.split(",")) for row in saved["rows"]):
            raise ValueError("its curve has other columns")
        if saved["iteration"] > self.args.iterations:
            raise ValueError(f"iteration {saved['iteration']} is beyond --iterations")
        self.model.load_state_dict(saved["model"])
        here = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0] |= here  # the checkpoint may come from another kind of device
        self.sums.copy_(saved["sums"])
        self.iteration, self.seconds, self.rows = saved["iteration"], saved["seconds"], saved["rows"]
        self.checked, self.random = self.iteration, saved.get("random")

    def save(self):
        """Write last.pt; the one before becomes previous.pt."""
        self.check()
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content |= {name: getattr(self, name) for name in ("iteration", "seconds", "sums", "rows")}
        content["random"] = [source.get_rng_state() for source in self.generators()]
        previous = None if self.torn else self.folder / "previous.pt"
        files.save_tensors(self.folder / "last.pt", content, keep=previous)
        self.torn = False
        (self.folder / files.DIVERGED).unlink(missing_ok=True)  # it has come further, or will say so again
        self.write_curve()

    def generators(self):
        """Of what a model draws as it trains, such as dropout. Seeds side by side share them."""
        return [torch, torch.cuda] if self.device.type == "cuda" else [torch]

    def restore_random(self):
        """After the step is made: its rehearsals draw too."""
        for source, state in zip(self.generators(), self.random or []):
            source.set_rng_state(state.cpu())

    def snapshot(self):
        self.check()
        path = self.folder / "snapshots" / f"{self.iteration:06d}.pt"
        path.parent.mkdir(exist_ok=True)
        files.save_tensors(path, self.model.state_dict())

    def check(self):
        if not torch.stack([x.isfinite().all() for x in (self.sums, *self.model.parameters())]).all():
            window = f"between iterations {self.checked + 1} and {self.iteration}"
            raise NotFinite(f"loss, gradient or weights not finite {window}")
        self.checked = self.iteration

    # -- curve.csv

    def write_curve(self):
        lines = [HEADER, *(",".join(map(repr, row)) for row in self.rows)]
        files.write(self.folder / "curve.csv", "\n".join(lines) + "\n")

    def row(self, rate):
        """A row of curve.csv: means since the last one."""
        n = self.iteration - (self.rows[-1][0] if self.rows else 0)
        loss, accuracy, _ = (self.sums / n).tolist()
        return [self.iteration, loss, accuracy, rate, round(self.seconds, 3)]

    def log(self, rate):
        self.check()  # waits for the device
        self.seconds = time.perf_counter() - self.clock_zero
        self.rows.append(self.row(rate))
        self.sums.zero_()

    def logged(self):
        """Whether the last row is of this iteration."""
        return bool(self.rows) and self.rows[-1][0] == self.iteration


# ------------------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------------------


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


LARGEST_RATE = torch.finfo(torch.float32).max  # --lr may be more than a float32 holds


def train(trials, stop):
    """Train until each trial has an exit code -> the codes. Several take turns, on CUDA in streams."""
    for t in trials:
        with t.stream, t.failures():
            t.start()
    stop.training = True
    for t in (t for t in trials if t.code is None):  # the clock runs once all have compiled and captured
        t.clock_zero = time.perf_counter() - t.seconds
    while going := [t for t in trials if t.code is None]:
        for t in going:
            with t.stream, t.failures():
                args, i = t.args, t.iteration + 1
                if i <= args.iterations:  # otherwise only the result is missing
                    rate = t.task.rate(i)
                    t.rate.fill_(min(rate, LARGEST_RATE))
                    t.step(i)
                    t.iteration, t.seconds = i, time.perf_counter() - t.clock_zero

                    last = i == args.iterations
                    if last or i % args.log_every == 0:
                        t.log(rate)
                    if args.snapshot_every and i % args.snapshot_every == 0:
                        t.snapshot()
                    if last or i % args.save_every == 0:
                        t.save()
                    if not stop.requested:
                        t.progress.show(t, rate)
                if t.iteration == args.iterations:
                    t.conclude(stop)
                elif stop.requested:
                    t.save_and_stop()
    return [t.code for t in trials]
