"""Trials as parallel processes, none of which outlives the one that started it."""

import contextlib
import ctypes
import itertools
import os
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


def run(script, trials, at_once, gpus):
    """Run the trials that are not finished, until a signal comes -> the exit code."""
    waiting = [trial for trial in trials if not is_finished(trial.task)]
    free = list(itertools.islice(itertools.cycle(gpus), at_once))  # each job's GPU
    count, codes, progress, line = len(waiting), [], {}, LiveLine()
    running = {}  # {process: (its Trial, its GPU)}

    def format_progress():
        now = [trial for trial, _ in running.values()]
        left = format_left(now + waiting, progress, at_once)
        known = [progress[trial.folder] for trial in now if trial.folder in progress]
        accuracies = [f"{found['accuracy']:.2f}" for found in known]
        running_now = f"  accuracy of those running: {', '.join(accuracies)}" if known else ""
        return f"{codes.count(0)} of {count} trials done{left}{running_now}"

    print(f"{count} trials to run, {at_once} in parallel")
    try:
        while (running or waiting) and not stop.requested:
            while waiting and free:
                trial, gpu = waiting.pop(0), free.pop(0)
                try:
                    running[start(script, trial, at_once, gpu)] = trial, gpu
                except FileExistsError as error:  # no folder: the other trials go on
                    print(error)
                    codes.append(FAILED)
                    free.append(gpu)
            for process in [process for process in running if process.poll() is not None]:
                trial, gpu = running.pop(process)
                free.append(gpu)
                codes.append(process.returncode)
                if process.returncode:
                    line.clear()
                    print(f"exit code {process.returncode}: {trial.folder / 'log.txt'}")
            line.update(format_progress)
            time.sleep(0.05)
    finally:  # whatever happens to this process, no job outlives it
        line.clear()
        for process in running:
            process.terminate()
        codes += [process.wait() for process in running]
    # The largest: stopped, else running elsewhere, else what went wrong
    return max((code if code >= 0 else FAILED for code in codes), default=0)


def start(script, trial, at_once, gpu):
    """A trial's process, which writes to log.txt in the trial's folder."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(max(1, machine.cores() // at_once))} | os.environ
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with open(trial.folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, script, *trial.words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no other thread runs Python
            start_new_session=True,  # the terminal's signals are for this process alone
        )


def format_left(trials, progress, at_once):
    """The time that these trials take; `progress` keeps what their progress.json said.

    Trials without progress are taken to last as long as the mean of the others.
    """
    for trial in trials:
        path = trial.folder / "progress.json"
        with contextlib.suppress(End), files.naming(path):  # a power cut may have damaged it
            if found := files.read_json(path):
                progress[trial.folder] = {name: float(x) for name, x in found.items()}
    if not progress or not trials:
        return ""
    mean = statistics.mean(found["duration"] for found in progress.values())
    new = dict(share=0, duration=mean)
    found = [progress.get(trial.folder, new) for trial in trials]
    left = sum((1 - x["share"]) * x["duration"] for x in found)
    return f", {format_eta(left / min(at_once, len(trials)))}"


def is_finished(task):
    """None where other flags or a damaged file are in the way: the trial's process says so."""
    with contextlib.suppress(End, UsageError, OSError):
        return files.is_finished(task)


def end_with_parent():
    """In a job, on Linux: save and end when the parent dies, even by kill -9."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        libc.prctl(set_death_signal, signal.SIGTERM)
