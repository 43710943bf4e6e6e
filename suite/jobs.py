"""Trials as parallel processes, none of which outlives the one that started it."""

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
from suite import files, machine, stop
from suite.files import FAILED, End
from suite.progress import LiveLine, format_eta
from suite.task import Task

libc = ctypes.CDLL(None)


class Trial(NamedTuple):
    """A trial of a figure."""

    task: Task
    row: dict  # its row of the figure's grid
    words: list  # of its command, after the script

    @property
    def folder(self):
        return self.task.folder


class Jobs:
    """The trials of a figure that are not finished, `at_once` of them in parallel."""

    def __init__(self, script, trials, at_once, gpus):
        self.script, self.at_once = script, at_once
        self.waiting = [trial for trial in trials if not is_finished(trial.task)]
        self.count = len(self.waiting)
        self.running, self.codes = {}, []  # {process: (its Trial, its GPU)}
        self.progress = {}  # {folder: the last progress.json that was read}
        self.free = list(itertools.islice(itertools.cycle(gpus), at_once))  # each job's
        self.line = LiveLine()

    def run(self):
        """Until all have ended or a signal comes -> the exit code."""
        print(f"{self.count} trials to run, {self.at_once} in parallel")
        try:
            while (self.running or self.waiting) and not stop.requested:
                while self.waiting and self.free:
                    self.begin(self.waiting.pop(0))
                for process in list(self.running):
                    if process.poll() is not None:
                        self.end(process)
                self.line.update(self.format_progress)
                time.sleep(0.05)
        finally:  # whatever happens to this process, no job outlives it
            self.line.clear()
            for process in self.running:
                process.terminate()
            self.codes += [process.wait() for process in self.running]
        # The largest: stopped, else running elsewhere, else what went wrong
        return max((code if code >= 0 else FAILED for code in self.codes), default=0)

    def begin(self, trial):
        """Start a trial's process, which writes to log.txt in the trial's folder."""
        try:
            trial.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # a file: the other trials go on
            print(error)
            self.codes.append(FAILED)
            return
        gpu = self.free.pop(0)
        threads = max(1, machine.cores() // self.at_once)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with open(trial.folder / "log.txt", "a") as log:
            process = subprocess.Popen(
                [sys.executable, self.script, *trial.words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - no other thread runs Python
                start_new_session=True,  # the terminal's signals are for this process alone
            )
        self.running[process] = trial, gpu

    def end(self, process):
        trial, gpu = self.running.pop(process)
        self.free.append(gpu)
        self.codes.append(process.returncode)
        if process.returncode:
            self.line.clear()
            log = trial.folder / "log.txt"
            print(f"exit code {process.returncode}: {log} ({shlex.join(trial.words)})")

    def format_progress(self):
        """How many trials are done, and how long the others will take."""
        text = f"{self.codes.count(0)} of {self.count} trials done"
        running = [trial for trial, _ in self.running.values()]
        for trial in running:
            with contextlib.suppress(End):  # a power cut may have damaged it
                if found := files.read_json(trial.folder / "progress.json"):
                    self.progress[trial.folder] = found
        if self.progress and running:
            text += f", {format_eta(self.seconds_left(running + self.waiting))}"
        return text

    def seconds_left(self, trials):
        """Those without progress are taken to last as long as the mean of the others."""
        mean = statistics.mean(found["duration"] for found in self.progress.values())
        new = dict(share=0, duration=mean)
        found = [self.progress.get(trial.folder, new) for trial in trials]
        left = sum((1 - x["share"]) * x["duration"] for x in found)
        return left / min(self.at_once, len(trials))


def is_finished(task):
    """None where other flags or a damaged file are in the way: the trial's process says so."""
    with contextlib.suppress(End, UsageError, OSError):
        return files.is_finished(task)


def end_with_parent():
    """In a job, on Linux: save and end when the parent dies, even by kill -9."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        libc.prctl(set_death_signal, signal.SIGTERM)
