"""Many trials as processes: a few at a time, none of which outlives the one that started it."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from common import Refused
from suite import files, machine
from suite.files import FAILED, STOPPED, End
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
    """Trials that wait, run as processes, and have ended."""

    def __init__(self, script, trials, at_once):
        self.script, self.total, self.at_once = script, len(trials), at_once
        self.waiting = [trial for trial in trials if not is_finished(trial.task)]
        self.done_before = self.total - len(self.waiting)
        self.running, self.codes = {}, []  # {process: its Trial}; exit codes
        self.began = time.monotonic()

    def run(self, stop):
        """Run all, or until a signal comes -> the exit code."""
        print(
            f"{self.done_before} of {self.total} done before; {self.at_once} at a time",
            flush=True,
        )
        try:
            while (self.running or self.waiting) and not stop.requested:
                while self.waiting and len(self.running) < self.at_once:
                    self.start(self.waiting.pop(0))
                for process in [p for p in self.running if p.poll() is not None]:
                    self.end(process)
                time.sleep(0.05)
        finally:  # whatever happens to this process, no other goes on without it
            for process in self.running:
                process.terminate()
            self.codes += [process.wait() for process in self.running]
        if STOPPED in self.codes:
            return STOPPED
        return max((code if code >= 0 else FAILED for code in self.codes), default=0)

    def start(self, trial):
        """A trial's process, which writes to log.txt in the trial's folder."""
        print(f"begins: {shlex.join(trial.words)}", flush=True)
        folder, hidden = trial.folder, trial.task.args.hidden
        threads = 1 if hidden < 256 else max(1, machine.cores() // self.at_once)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        environment["SUITE_PARENT"] = str(os.getpid())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "log.txt", "a") as log:
                process = subprocess.Popen(
                    [sys.executable, self.script, *trial.words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # the terminal's signals are for this process
                )
            self.running[process] = trial
        except OSError as error:
            print(error, flush=True)
            self.codes.append(FAILED)

    def end(self, process):
        """Say how it ended, and how long the others will take."""
        trial, code = self.running.pop(process), process.returncode
        self.codes.append(code)
        print(f"ends: {shlex.join(trial.words)}")
        print(f"  exit code {code}: {last_line(trial.folder / 'log.txt')}")
        minutes = (time.monotonic() - self.began) / 60
        left = minutes / len(self.codes) * (len(self.waiting) + len(self.running))
        done = self.done_before + self.codes.count(0)
        print(f"{done} of {self.total} done, about {left:.0f} minutes left", flush=True)


def last_line(path):
    with contextlib.suppress(OSError):  # its folder may have vanished
        *_, last = "", *path.read_text(errors="replace").splitlines()
        return last


def is_finished(task):
    """If the folder has other flags or cannot be read, the trial's process says so."""
    with contextlib.suppress(End, Refused, OSError):
        return files.is_finished(task)


def end_with_parent():
    """In a job, on Linux: be told to save and end when the parent dies, be it by kill -9."""
    parent, set_death_signal = os.environ.get("SUITE_PARENT"), 1  # of prctl
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has died already
            raise SystemExit(STOPPED)
