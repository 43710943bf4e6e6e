"""What a command line does: one trial, many trials as processes, a list of them, a report.

raise SystemExit(cli.main(Task))      # at the end of a script; Task is a subclass of suite.task.Task
"""

from suite import files, flags, machine, tables
from suite.flags import Listed
from suite.progress import Live, duration, say
from suite.trial import (
    FAILED,
    NOT_FINITE,
    RUNNING_ELSEWHERE,
    STOPPED,
    Stop,
    Trial,
    again,
    other_code,
    other_flags,
    train,
)

import argparse
import collections
import contextlib
import ctypes
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import Refused

# ------------------------------------------------------------------------------------------------------------
# Many trials as processes
# ------------------------------------------------------------------------------------------------------------

SET_DEATH_SIGNAL = 1  # of Linux's prctl
PARENT = "SUITE_PARENT"  # in a job's environment, the process that started it
ENDS = {RUNNING_ELSEWHERE: "runs elsewhere", STOPPED: "stopped, saved", NOT_FINITE: "not finite"}
ENDS[-signal.SIGKILL] = "killed"


def end_with_parent():
    """In a job, on Linux: be told to save and end when the parent dies, be it by kill -9."""
    parent = os.environ.get(PARENT)
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has died already
            raise SystemExit(STOPPED)


class Job:
    """One trial's command, and its process."""

    def __init__(self, script, words, task):
        self.script, self.words, self.task = script, words, task
        self.process, self.began, self.took = None, 0.0, 0.0
        self.share = 0.0  # of its iterations that are done
        self.errors = collections.deque(maxlen=100)  # the last lines of its stderr
        self.readers = []

    def is_finished(self):
        """Whether nothing is left to do. Of a trial of other flags, or one that cannot be read, its process
        will say so."""
        task = self.task
        try:
            return task.result() and not other_flags(task.folder, task.config) and not task.args.overwrite
        except OSError:
            return False

    def has_other_code(self):
        result = files.read_usable_json(self.task.folder / "result.json", "metrics")
        return other_code(self.task, result) is not None

    def start(self, at_once, cuda):
        """Start the process, and threads that read what it prints. On a CPU the processes share the cores."""
        threads = 1 if self.task.is_small() else max(1, machine.cores() // at_once)
        own = {} if cuda or at_once == 1 else {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, self.script, *self.words]
        # A session of its own: of the terminal's signals only the parent hears, and says so once.
        apart = dict(env=own | os.environ | {PARENT: str(os.getpid())}, start_new_session=True)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        self.process = subprocess.Popen(command, **apart, **pipes)
        self.began = time.monotonic()
        reads = self.read_output, self.read_errors
        self.readers = [threading.Thread(target=read, daemon=True) for read in reads]
        for reader in self.readers:
            reader.start()

    def send(self, number):
        if self.process:  # there is none where it could not be started
            self.process.send_signal(number)

    def read_output(self):
        for line in self.process.stdout:
            if found := re.search(r"iteration (\d+)/(\d+)", line):
                self.share = int(found[1]) / int(found[2])

    def read_errors(self):
        self.errors.extend(self.process.stderr)

    def end(self):
        """-> the exit code of a process that has ended."""
        self.took = time.monotonic() - self.began
        for reader in self.readers:
            reader.join(1)
        return self.process.returncode

    def outcome(self, code):
        if code:
            return ENDS.get(code, f"exit code {code}")
        metrics = self.task.result() or {}
        numbers = [(name, x) for name, x in metrics.items() if isinstance(x, float)]
        return ", ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in numbers[:3])


class Campaign:
    """Runs jobs, some at once. A live line says how far they are; another line, when one has ended."""

    def __init__(self, jobs, at_once, cuda, stop):
        self.all, self.waiting, self.running, self.ended = jobs, [], [], []
        self.at_once, self.cuda, self.stop = min(at_once, len(jobs)), cuda, stop
        self.codes, self.live = [], Live()
        self.args = jobs[0].task.args  # alike in all but for the trial

    def run(self):
        """-> the worst exit code. A job that was stopped from outside ends them all."""
        self.stop.training, self.stop.saving = True, "stopping and saving all that runs"
        self.waiting = [job for job in self.all if not job.is_finished()]
        self.stop.jobs = self.running
        begun = 0 if self.args.overwrite else sum(job.task.has_begun() for job in self.waiting)
        other = sum(job.has_other_code() for job in self.all if job not in self.waiting)
        with_other = f" ({other} with another script or common.py than now)" if other else ""
        done = f"{self.done()} done before{with_other}"
        what = f"{done}, {begun} to be continued, {self.at_once} at a time"
        say(f"{len(self.all)} commands, {what}")
        told = False
        to_start = lambda: self.waiting and not self.stop.requested
        try:
            while self.running or to_start():
                while len(self.running) < self.at_once and to_start():
                    self.running.append(self.waiting.pop(0))
                    self.running[-1].start(self.at_once, self.cuda)
                if self.stop.requested and not told:
                    self.tell_all_to_stop()
                    told = True
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.take_back(job)
                if self.live.is_due():
                    self.live.show(self.how_far())
                time.sleep(0.05)
        finally:  # whatever happens to this process, no other goes on without it
            self.tell_all_to_stop()
        self.live.close()
        say(self.closing_line())
        return STOPPED if self.stop.requested else worst(self.codes)

    def tell_all_to_stop(self):
        for job in self.running:
            job.send(signal.SIGTERM)

    def take_back(self, job):
        self.running.remove(job)
        code = job.end()
        if code == -signal.SIGTERM and self.stop.requested:  # it had not begun to listen
            self.waiting.append(job)
            return
        self.ended.append(job)
        self.codes.append(code if code >= 0 else FAILED)
        self.stop.requested |= code == STOPPED
        self.live.close()
        if code != STOPPED:
            for line in job.errors:
                say(line.rstrip("\n"), file=sys.stderr)
        what = f"{shlex.join(job.words)}: {job.outcome(code)}, {job.took:.0f} s"
        say(f"{self.done()} of {len(self.all)} done; {what}")

    def done(self):
        return len(self.all) - len(self.waiting) - len(self.running) - sum(code != 0 for code in self.codes)

    def how_far(self):
        text = f"{self.done()} of {len(self.all)} done"
        if self.running:
            shares = [f"{job.share:.0%}" for job in self.running]
            text += ", running " + (" and ".join(shares) if len(shares) < 5 else f"{len(shares)}")
        left = self.left()
        return text + (f", {duration(left)} left" if left else "")

    def left(self):
        """Seconds, from those that finished, or from how far the first ones are; None where nothing tells."""
        took = [job.took for job, code in zip(self.ended, self.codes) if code == 0]
        if not took:
            took = [(time.monotonic() - job.began) / job.share for job in self.running if job.share > 0.02]
        if not took:
            return None
        work = len(self.waiting) + sum(1 - job.share for job in self.running)
        return sum(took) / len(took) * work / self.at_once

    def closing_line(self):
        saved, elsewhere = self.codes.count(STOPPED), self.codes.count(RUNNING_ELSEWHERE)
        failed = len(self.codes) - self.codes.count(0) - saved - elsewhere
        counts = {"saved": saved, "failed": failed, "running elsewhere": elsewhere}
        counts["not begun"] = len(self.waiting)
        others = [f", {n} {what}" for what, n in counts.items() if n]
        line = f"{self.done()} of {len(self.all)} done{''.join(others)}"
        if not (saved or self.waiting):
            return line
        untouched = "; what has not begun is as it was" if self.args.overwrite and self.waiting else ""
        return f"{line}; {again(self.args)} continues{untouched}"


def worst(codes):
    """The exit code of many: 75 (stopped) if any has it, else the largest; 73 (elsewhere) does not count."""
    if STOPPED in codes:
        return STOPPED
    return max((code for code in codes if code != RUNNING_ELSEWHERE), default=0)


# ------------------------------------------------------------------------------------------------------------
# What a command line asks for
# ------------------------------------------------------------------------------------------------------------


def refuse_no_trial(task, args, given, figure):
    """No trial of a figure has the flags given: say which flag is why."""
    if not task.grids.get(args.scale):
        there = " or ".join(f"--scale {name}" for name, grids in task.grids.items() if grids)
        raise Refused(f"{task.name} has no figure at {args.scale} scale" + (there and f": {there}"))
    rows, name = flags.rows_of(task, args, given, figure), figure or "any figure"
    for flag, wanted in flags.choices(given).items():
        values = dict.fromkeys(row[flag] for row in rows if row.get(flag) is not None)
        if values and not values.keys() & set(wanted):
            there, flag = ", ".join(str(value) for value in values), flags.as_words(flag, True)[0]
            raise Refused(f"no trial of {name} at {args.scale} scale has that {flag}: there is {there}")
    raise Refused(f"no trial of {name} has the flags given")


def listed(task, args, given, figure):
    """The trials of a figure that have the flags given."""
    flags.refuse_half_set(task, args, given, figure)
    trials = flags.grid(task, args, given, figure)
    if not trials:
        refuse_no_trial(task, args, given, figure)
    return trials


def show(task, args, given, figure):
    found = {}
    for name in [figure] if figure else flags.figure_grids(task, args.scale):
        if trials := flags.grid(task, args, given, name):
            found[name] = trials
    if not found:
        refuse_no_trial(task, args, given, figure)
    chosen = [flags.flag_in_folder(k, given[k]) for k in sorted(given.keys() & flags.science_of(task, args))]
    finished = tables.print_figures(task, args.scale, found, Path(args.out), chosen)
    if finished:
        return
    if line := other_scales([task], args.out, [args.scale]) or other_trials(task, args.out):
        print(f"\n{line}")


def other_trials(task, out):
    """A line about finished trials where none is reported, or an empty one."""
    folder, names = Path(out, task.trainer()), {figure.file for figure in task.figures.values()}
    count = sum(len(list(folder.glob(f"*/seed*/{name}"))) for name in names)
    what = "have other flags (--report takes flags too) or are left out"
    return f"{count} finished trials in {folder} {what}" if count else ""


def finished_of_scales(tasks, out, seeds=None):
    """{scale: how many of its trials are finished}, of those that have any."""
    counts = {}
    for one in dict.fromkeys(name for task in tasks for name in task.scales):
        paths = set()  # figures share trials
        for task in tasks:
            for figure, trials in flags.trials_of_scale(task, out, one, seeds).items():
                paths |= {trial.task.folder / task.figures[figure].file for trial in trials}
        counts[one] = sum(map(os.path.exists, paths))  # False in another user's folder
    return {scale: count for scale, count in counts.items() if count}


def other_scales(tasks, out, scales, seeds=None):
    """A line about the finished trials of other scales where these have none, else an empty one."""
    counts = finished_of_scales(tasks, out, seeds)
    if not counts or counts.keys() & set(scales):
        return ""
    found = " and ".join(f"{count} of {name} scale are" for name, count in counts.items())
    words = " or ".join(f"--scale {name}" for name in counts)
    return f"no trial of {' or '.join(scales)} scale is finished in {out}; {found}: {words}"


def run(task, args, given, argv, stop):
    """One trial, or those of a range of seeds, or with --all a figure's -> the exit code."""
    cuda = machine.choose_device(args.device).type == "cuda"
    many = isinstance(args.seed, range)
    several = many or args.all is not None
    if several and (alone := [flag for flag in task.only_alone if flag in given]):
        raise Refused(f"--{alone[0]} does not go with --all or a range of seeds")
    if args.all is not None:
        trials = listed(task, args, given, args.all)
        if args.scale == "paper" and not cuda and task.run is None:
            say("the paper's scale is for a GPU; --scale quick takes minutes on this CPU")
    elif many:
        typed, trials = {k: v for k, v in given.items() if k not in flags.NOT_CARRIED}, []
        for seed in args.seed:
            found = flags.complete(task, argparse.Namespace(**(vars(args) | {"seed": seed})))
            trials.append(Listed({}, flags.command_line(typed | {"seed": seed}), found))
    else:
        one = flags.complete(task, args)
        return one.run(argv, stop) if one.run else train([Trial(one, argv)], stop)[0]
    task.check_all([one.task for one in trials])
    if cuda and args.all is None and task.run is None:
        if args.jobs:
            raise Refused(
                "--jobs: on CUDA the seeds of a range take turns in one process; name fewer of them"
            )
        return worst(train([Trial(one.task, one.words, alone=False) for one in trials], stop))
    jobs = [Job(inspect.getfile(task), one.words, one.task) for one in trials]
    return Campaign(jobs, args.jobs or (1 if cuda else machine.cores()), cuda, stop).run()


def main(task, argv=None):
    """A script's command line -> its exit code."""
    end_with_parent()
    return exit_code(flags.declare(task).parser, lambda: obey(task, argv), task.what_to_lower)


def obey(task, argv):
    if argv is None:
        argv, own = sys.argv[1:], Path(sys.argv[0]).resolve()
        other = own.with_name(f"{task.name}.py")
        if own.suffix == ".py" and own != other:
            what = f"{own.name} has a task of the name {task.name!r}"
            raise Refused(f"{what}, whose commands and trials would be taken for {other.name}'s")
    args, given = flags.parse(task, argv)
    asked = [f"--{flag}" for flag in ("list", "all", "report") if flag in given]
    if len(asked) > 1:
        raise Refused(f"{' and '.join(asked)}: one at a time")
    if "jobs" in given and not asked and not isinstance(args.seed, range):
        raise Refused("--jobs is for --all, or for a range of seeds")
    if args.list is not None:
        for one in listed(task, args, given, args.list):
            print(f"python {task.name}.py {shlex.join(one.words)}")
        return 0
    if args.report is not None:
        show(task, args, given, args.report)
        return 0
    with Stop().listening() as stop:
        code = run(task, args, given, argv, stop)
    if args.all is not None and code != STOPPED:
        with contextlib.suppress(BrokenPipeError):
            show(task, args, given, args.all)
    return code


def exit_code(parser, work, to_lower="--batch"):
    """That of work(); what goes wrong in it is said in one line."""
    try:
        return work()
    except Refused as error:
        parser.error(error)
    except BrokenPipeError:  # of `--report | head`: what was asked for has been read
        return 0
    except OSError as error:
        say(f"{parser.prog}: {error}", file=sys.stderr)
        return FAILED
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(error):
            raise
        say(f"{parser.prog}: out of memory: lower {to_lower}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        say(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    finally:
        leave_quietly()


def leave_quietly():
    """Python flushes its output as it ends: that must not fail for a reader that has gone, or a full disk."""
    try:
        sys.stdout.flush()
    except AttributeError:  # it was closed from the start
        pass
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
