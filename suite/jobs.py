"""Run trials as parallel subprocesses that end when their parent does."""

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
from suite import files, interrupts, machine
from suite.files import FAILED, NOT_FINITE, Exit
from suite.progress import ProgressLine, format_time_left
from suite.task import Task

libc = ctypes.CDLL(None)


class Job(NamedTuple):
    """A trial to run: its Task instance, flags and command line."""

    task: Task
    flags: dict  # as in the figure's grid
    argv: list  # command-line arguments after the script

    @property
    def folder(self):
        return self.task.folder


def run(script, trials, n_parallel, slots):
    """Run the unfinished trials until done or a signal; return the largest exit code.

    `slots` lists the GPUs or, on a CPU, None for each core. If there are fewer slots than
    `n_parallel`, they are reused. A trial killed by a signal counts as failed.
    """
    waiting = [trial for trial in trials if not can_skip(trial.task)]
    free_slots = list(itertools.islice(itertools.cycle(slots), n_parallel))
    exit_codes = [0] * (len(trials) - len(waiting))  # of finished trials
    running, progress, line = {}, {}, ProgressLine()  # running: {process: (trial, GPU)}

    def format_progress():
        active = [trial for trial, _ in running.values()]
        read_progress(active + waiting, progress)
        left = format_eta(active + waiting, progress, n_parallel)
        accuracies = format_accuracies(active, progress)
        return f"{exit_codes.count(0)} of {len(trials)} trials done{left}{accuracies}"

    print(f"{len(trials)} trials: {len(waiting)} to run, {n_parallel} in parallel")
    try:
        while (running or waiting) and not interrupts.requested:
            while waiting and free_slots:
                trial, gpu = waiting.pop(0), free_slots.pop(0)
                try:
                    running[start(script, trial, n_parallel, gpu)] = trial, gpu
                except FileExistsError as error:  # a file has the folder's name
                    print(error)
                    exit_codes.append(FAILED)
                    free_slots.append(gpu)
            for process in [process for process in running if process.poll() is not None]:
                trial, gpu = running.pop(process)
                free_slots.append(gpu)
                exit_codes.append(process.returncode)
                if process.returncode:
                    line.clear()
                    diverged = process.returncode == NOT_FINITE
                    why = "diverged" if diverged else f"exit code {process.returncode}"
                    print(f"{why}, see {trial.folder / 'log.txt'}")
            line.update(format_progress)
            time.sleep(0.05)
    finally:  # end all processes, whatever happens
        line.clear()
        for process in running:
            process.terminate()
        exit_codes += [process.wait() for process in running]
    print(f"{exit_codes.count(0)} of {len(trials)} trials done")
    return max((code if code >= 0 else FAILED for code in exit_codes), default=0)


def start(script, trial, n_parallel, gpu):
    """Start a trial's process, which writes to log.txt in the trial's folder."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    n_threads = max(1, machine.available_cores() // n_parallel)
    environment = {"OMP_NUM_THREADS": str(n_threads)} | os.environ
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with open(trial.folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, script, *trial.argv],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no other thread runs Python
            start_new_session=True,  # only the parent handles the terminal's signals
        )


def read_progress(trials, progress):
    """Update `progress`, {folder: content of its progress.json}."""
    for trial in trials:
        with contextlib.suppress(Exit):  # a power cut may have damaged the file
            if content := files.read_json(trial.folder / "progress.json"):
                progress[trial.folder] = content


def format_eta(trials, progress, n_parallel):
    """Return ", H:MM:SS left", or "" if no trial has made progress.

    Trials without progress are assumed to take the mean duration of the others.
    """
    if not progress or not trials:
        return ""
    mean = statistics.mean(x["duration"] for x in progress.values())
    not_started = dict(fraction=0, duration=mean)
    reports = [progress.get(trial.folder, not_started) for trial in trials]
    left = sum((1 - x["fraction"]) * x["duration"] for x in reports)
    return f", {format_time_left(left / min(n_parallel, len(trials)))}"


def format_accuracies(trials, progress):
    """Return the latest training accuracies of running trials, as text."""
    latest = [progress[trial.folder] for trial in trials if trial.folder in progress]
    accuracies = [f"{x['accuracy']:.2f}" for x in latest]
    return f"  train accuracy of running trials: {', '.join(accuracies)}" if latest else ""


def can_skip(task):
    """Return files.can_skip(task); None on errors, which the trial's own process reports."""
    with contextlib.suppress(Exit, UsageError, OSError):
        return files.can_skip(task)


def end_with_parent():
    """Make a trial save and exit when its parent dies, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # from Linux's prctl.h
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
