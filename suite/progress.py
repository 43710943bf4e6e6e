"""What is said while a trial runs."""

import contextlib
import datetime
import functools
import shutil
import sys
import time

import numpy as np


def say(text, **how):
    """Print; a log on a full disk, or one that nobody reads any more, must not end a trial."""
    with contextlib.suppress(OSError):
        print(text, flush=True, **how)


@functools.cache
def say_once(text):
    say(text, file=sys.stderr)


DAY = 86400  # seconds


def duration(seconds):
    return str(datetime.timedelta(seconds=round(seconds))) if 0 <= seconds < 1e10 else "unknown"


def in_words(seconds):
    """A long duration in its largest unit."""
    for unit, length in (("years", 365 * DAY), ("days", DAY), ("hours", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"


class Live:
    """A line on the terminal that the next one overwrites; on anything but a terminal, nothing."""

    def __init__(self, wanted=True):
        self.wanted = bool(wanted and sys.stdout and sys.stdout.isatty())
        self.open, self.shown = False, 0.0

    def is_due(self):
        return self.wanted and time.monotonic() - self.shown > 0.5

    def show(self, text, end=""):
        if self.wanted:
            columns = shutil.get_terminal_size().columns - 1
            say(f"\r{text[:columns]}\x1b[K", end=end)
            self.open, self.shown = not end, time.monotonic()

    def close(self):
        """End the line, so that the next text begins one of its own."""
        if self.open:
            say("")
        self.open = False


class Progress:
    """Of one trial: on a terminal a live line; elsewhere a line for every row of curve.csv."""

    def __init__(self, args, alone):
        self.args, self.alone, self.live = args, alone, Live(alone)
        self.label = "" if alone else f"seed {args.seed}: "
        self.first, self.started = 0, 0.0  # iteration and seconds of training where this process took over
        self.estimated = not alone  # how long it will take has been said, or is not wanted

    def start(self, iteration, seconds):
        self.first, self.started = iteration, seconds
        self.live.show("first iteration...")

    def show(self, trial, rate):
        last, logged = trial.iteration == self.args.iterations, trial.logged()
        if not self.estimated and (logged or trial.device.type == "cpu"):  # there no step waits for a device
            self.estimate(trial)
        if self.live.wanted and (last or self.live.is_due()):
            row = trial.rows[-1] if logged else trial.row(rate)
            self.live.show(self.line(trial, row), end="\n" if last else "")
        elif not self.live.wanted and logged:
            say(self.line(trial, trial.rows[-1]))

    def left(self, trial):
        """Seconds to the last iteration, at the speed so far."""
        spent, done = trial.seconds - self.started, trial.iteration - self.first
        return (self.args.iterations - trial.iteration) * spent / done

    def estimate(self, trial):
        """After the first iterations, where they promise hours: how many, and what would take minutes."""
        if trial.iteration - self.first < 3 and trial.seconds - self.started < 10:
            return
        self.estimated = True
        if (left := self.left(trial)) > 3600:
            shorter = "; --scale quick takes minutes" if "quick" in trial.task.scales else ""
            where = "CPU" if trial.device.type == "cpu" else "GPU"
            count = self.args.iterations - trial.iteration
            self.live.close()
            say(f"{count:,} iterations are left, about {in_words(left)} on this {where}{shorter}")

    def line(self, trial, row):
        done, seconds = trial.iteration - self.first, trial.seconds - self.started
        speed = f"{done / seconds:.1f} it/s" if done > seconds else f"{seconds / done:.1f} s/it"
        text = f"iteration {row[0]}/{self.args.iterations}  loss {row[1]:.4f}  accuracy {row[2]:.4f}"
        left = self.left(trial)
        return f"{self.label}{text}  {speed}  {duration(left) if left < 2 * DAY else in_words(left)} left"

    def evaluating(self):
        if self.live.wanted:
            self.live.show("evaluating...")
        elif self.alone:
            say("evaluating")


def show_metrics(metrics):
    """The metrics in plain words; of those by condition or length, the mean of each; a list is not shown."""
    for name, value in metrics.items():
        if isinstance(value, list):
            continue
        parts = value.items() if isinstance(value, dict) else [("", value)]
        texts = [(part, f"{x:,}" if isinstance(x, int) else f"{np.mean(x):.4f}") for part, x in parts]
        numbers = " ".join(f"{part} {text}".strip() for part, text in texts)
        say(f"{name.replace('_', ' ')}: {numbers}")
