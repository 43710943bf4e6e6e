"""Many trials as processes: a few at a time, none of which outlives the one that started it."""

import contextlib
import ctypes
import itertools
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from common import UsageError
from suite import files, machine
from suite.files import FAILED, STOPPED, End
from suite.progress import LiveLine, format_eta
from suite.task import Task


class Trial(NamedTuple):
    """A trial of a figure."""

    task: Task
    row: dict  # its row of the figure's grid
    words: list  # of its command, after the script

    @property
    def folder(self):
        return self.task.folder


class Jobs:
    """The trials of a figure that are not finished, `at_once` at a time."""

    def __init__(self, script, trials, at_once, gpus):
        self.script, self.trials, self.at_once = script, trials, at_once
        self.waiting = [trial for trial in trials if not is_finished(trial.task)]
        self.before = len(trials) - len(self.waiting)
        self.running, self.codes = {}, []  # {process: (its Trial, its gpu)}
        self.progress = {}  # {folder: the last progress.json that was read}
        # A gpu for every job at once, counted round; None: as this process sees them
        self.free = list(itertools.islice(itertools.cycle(gpus or [None]), at_once))
        self.line = LiveLine()

    def run(self, stop):
        """Until all have ended or a signal comes -> the exit code."""
        done = f"{self.before} of {len(self.trials)} done before"
        print(f"{done}; {self.at_once} at a time")
        try:
            while (self.running or self.waiting) and not stop.requested:
                while self.waiting and self.free:
                    self.begin(self.waiting.pop(0))
                for process in list(self.running):
                    if process.poll() is not None:
                        self.end(process)
                if self.line.is_due():
                    self.line.draw(self.say_progress())
                time.sleep(0.05)
        finally:  # whatever happens to this process, no other goes on without it
            self.line.clear()
            for process in self.running:
                process.terminate()
            self.codes += [process.wait() for process in self.running]
        # The largest: stopped, else running elsewhere, else what went wrong
        return max((code if code >= 0 else FAILED for code in self.codes), default=0)

    def begin(self, trial):
        if not self.line.live:
            print(f"begins: {shlex.join(trial.words)}")
        try:
            process = start(self.script, trial, self.at_once, self.free[0])
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            print(error)  # of this trial alone
            self.codes.append(FAILED)
        else:
            self.running[process] = trial, self.free.pop(0)

    def end(self, process):
        trial, gpu = self.running.pop(process)
        self.free.append(gpu)
        self.codes.append(process.returncode)
        self.line.clear()
        if process.returncode or not self.line.live:
            say_end(trial, process.returncode)
        if not self.line.live:
            print(self.say_progress())

    def say_progress(self):
        """How many are done, how long the others will take, how far each is."""
        said = f"{self.before + self.codes.count(0)} of {len(self.trials)} done"
        running, names = [trial for trial, _ in self.running.values()], []
        for trial in running:
            names.append(trial.task.describe())
            path = trial.folder / "progress.json"
            with contextlib.suppress(End), files.naming(path):  # it cannot be read just now
                if found := files.read_json(path):
                    found = {name: float(x) for name, x in found.items()}
                    names[-1] += f" {found['share']:.0%}, accuracy {found['accuracy']:.2f}"
                    self.progress[trial.folder] = found
        if self.progress and running + self.waiting:
            said += f", {format_eta(self.seconds_left(running + self.waiting))}"
        if self.line.live and names:
            said += f"  running: {'; '.join(names)}"
        return said

    def seconds_left(self, trials):
        """A trial without progress is taken to last as long as the mean of those with."""
        duration = statistics.mean(found["duration"] for found in self.progress.values())
        new = dict(share=0, duration=duration)
        found = [self.progress.get(trial.folder, new) for trial in trials]
        left = [(1 - x["share"]) * x["duration"] for x in found]
        return max(*left, sum(left) / self.at_once)


def is_finished(task):
    """None where other flags or a damaged file are in the way: the trial's process says so."""
    with contextlib.suppress(End, UsageError, OSError):
        return files.is_finished(task)


def start(script, trial, at_once, gpu):
    """A trial's process, which writes to log.txt in the trial's folder."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, machine.cores() // at_once)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    environment["SUITE_PARENT"] = str(os.getpid())
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with open(trial.folder / "log.txt", "w" if trial.task.args.overwrite else "a") as log:
        return subprocess.Popen(
            [sys.executable, script, *trial.words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's signals are for this process alone
        )


def say_end(trial, code):
    print(f"ends: {shlex.join(trial.words)}")
    if code:  # the log's last line says why; its folder may have vanished
        with contextlib.suppress(OSError):
            lines = (trial.folder / "log.txt").read_text(errors="replace").splitlines()
            print(f"  exit code {code}: {''.join(lines[-1:])}")


def end_with_parent():
    """In a job, on Linux: be told to save and end when the parent dies, be it by kill -9."""
    parent, set_death_signal = os.environ.get("SUITE_PARENT"), 1  # of prctl
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has died already
            raise SystemExit(STOPPED)
