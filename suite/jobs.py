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
from suite.progress import LiveLine, say_left
from suite.task import Task


class Trial(NamedTuple):
    """A trial of a figure."""

    task: Task
    row: dict  # its row of the figure's grid
    words: list  # of its command, after the script

    @property
    def folder(self):
        return self.task.folder


def run_all(script, trials, at_once, stop):
    """Run the trials that are not finished, until a signal comes -> the exit code."""
    waiting = [trial for trial in trials if not is_finished(trial.task)]
    before, began, line = len(trials) - len(waiting), time.monotonic(), LiveLine()
    running, codes = {}, []  # {process: its Trial}

    def say_progress():
        shares = [progress(trial) for trial in running.values()]
        done = len(codes) + sum(shares)
        far = f"{before + codes.count(0)} of {len(trials)} done"
        if done:
            left = len(waiting) + len(running) - sum(shares)
            far += f", {say_left((time.monotonic() - began) / done * left)}"
        doing = [f"{t.task.describe()} {x:.0%}" for t, x in zip(running.values(), shares)]
        return f"{far}  running: {', '.join(doing)}" if line.live and doing else far

    print(f"{before} of {len(trials)} done before; {at_once} at a time", flush=True)
    try:
        while (running or waiting) and not stop.requested:
            while waiting and len(running) < at_once:
                trial = waiting.pop(0)
                if not line.live:
                    print(f"begins: {shlex.join(trial.words)}", flush=True)
                try:
                    running[start(script, trial, at_once)] = trial
                except OSError as error:
                    print(error, flush=True)
                    codes.append(FAILED)
            for process in [process for process in running if process.poll() is not None]:
                trial = running.pop(process)
                codes.append(process.returncode)
                line.clear()
                if codes[-1] or not line.live:
                    say_end(trial, codes[-1])
                say_pair(trial, trials)
                if not line.live:
                    print(say_progress(), flush=True)
            if line.is_due():
                line.draw(say_progress())
            time.sleep(0.05)
    finally:  # whatever happens to this process, no other goes on without it
        line.clear()
        for process in running:
            process.terminate()
        codes += [process.wait() for process in running]
    if STOPPED in codes:
        return STOPPED
    return max((code if code >= 0 else FAILED for code in codes), default=0)


def progress(trial):
    """The share of its iterations that a trial has done, by its log."""
    with contextlib.suppress(OSError):
        log = (trial.folder / "log.txt").read_text(errors="replace")
        for line in reversed(log.splitlines()):
            if line.startswith("iteration "):
                done, _, iterations = line.split()[1].partition("/")
                return int(done) / int(iterations)
    return 0.0


def say_pair(trial, trials):
    """What a trial and its twin, with the clock or without, had; when both have ended."""
    accuracies = []
    for pe in ("none", "sin"):
        row = trial.row | {"pe": pe}
        for twin in trials:
            if twin.row == row and is_finished(twin.task):
                metrics = files.read_json(twin.folder / "result.json")["metrics"]
                accuracies.append(metrics.get("token_accuracy"))
    if trial.row.get("pe") in ("none", "sin") and len(accuracies) == 2 and all(accuracies):
        args, (none, sin) = trial.task.args, accuracies
        what = f"{args.model}, K = {args.vocab}, seed {args.seed}"
        print(f"{what}: {none:.2f} without, {sin:.2f} with the clock", flush=True)


def is_finished(task):
    """If the folder has other flags or cannot be read, the trial's process says so."""
    with contextlib.suppress(End, Refused, OSError):
        return files.is_finished(task)


def start(script, trial, at_once):
    """A trial's process, which writes to log.txt in the trial's folder."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    threads = 1 if trial.task.args.hidden < 256 else max(1, machine.cores() // at_once)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    environment["SUITE_PARENT"] = str(os.getpid())
    with open(trial.folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, script, *trial.words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's signals are for this process alone
        )


def say_end(trial, code):
    lines = [""]
    with contextlib.suppress(OSError):  # its folder may have vanished
        lines += (trial.folder / "log.txt").read_text(errors="replace").splitlines()
    print(f"ends: {shlex.join(trial.words)}\n  exit code {code}: {lines[-1]}")


def end_with_parent():
    """In a job, on Linux: be told to save and end when the parent dies, be it by kill -9."""
    parent, set_death_signal = os.environ.get("SUITE_PARENT"), 1  # of prctl
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has died already
            raise SystemExit(STOPPED)
