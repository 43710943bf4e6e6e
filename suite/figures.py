"""Figures as data: grids of trials, metrics, contrasts and claims; report.py shows them."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

NONE_AND_PE = ["none", "sin"]
WITH_CONSTANT = ["none", "constant", "sin"]
WITH_DUP = ["none", "dup", "sin"]
WITH_CONTROLS = ["none", "constant", "dup", "sin"]
CONTROLS = ["constant", "dup"]  # same input size as with PE, but no position


def cross(**flags):
    """Return all combinations; cross(vocab=[256, 512]) gives ten trials, five seeds each."""
    flags.setdefault("seed", range(5))  # as in the paper
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


# -- Definition of a figure
class Measure(NamedTuple):
    """A metric of each trial, or a summary of trials that differ only in flags in `over`."""

    label: str
    over: tuple = ()
    compute: Callable | None = None  # [Result] -> a number, possibly censored
    display: Callable = float  # transform for display, such as exp2 of logarithms
    unit: str = ""

    def of(self, results):
        """Return the value; None if trials are missing, or fewer than three for a summary."""
        if not self.over:
            return results[0].by_label.get(self.label)
        complete = all("token accuracy" in result.by_label for result in results)
        return self.compute(results) if complete and len(results) > 2 else None


def as_measure(measure):
    """Return a Measure, given one or a metric's label."""
    return measure if isinstance(measure, Measure) else Measure(measure)


class Contrast(NamedTuple):
    """A difference between arms of a grid, selected by flags; lists of arms are summed."""

    label: str
    high: dict | list
    low: dict | list
    paired: bool = False  # pair trials by seed
    measure: str = ""  # default: the figure's first metric

    def terms(self):
        """Yield (sign, flags of an arm)."""
        for sign, side in (1, self.high), (-1, self.low):
            arms = side if isinstance(side, list) else [side]
            for arm in arms:
                yield sign, arm


def compare_encodings(high, low):
    """Return the Contrast of two encodings, such as PE - no PE."""
    names = [ENCODING_NAMES.get(pe, pe) for pe in (high, low)]
    return Contrast(" - ".join(names), dict(pe=high), dict(pe=low))


def compare_gains(label, high, low, baseline="none", measure=""):
    """Return the Contrast of PE's gains over a baseline in two cells."""
    base, sin = dict(pe=baseline), dict(pe="sin")
    return Contrast(label, [high | sin, low | base], [high | base, low | sin], measure=measure)


class Claim(NamedTuple):
    """A preregistered claim: PE exceeds no PE and the control, or `contrast` is positive."""

    family: str  # claims that are Holm-corrected together
    measure: str | Measure
    cell: dict  # flags that select its trials
    contrast: Contrast | None = None


ACCURACY = {"token accuracy": "token_accuracy"}
ACCURACY_AND_EDITS = ACCURACY | {"edit distance": "damerau_levenshtein"}


class Figure(NamedTuple):
    """Trials, metrics and comparisons of a figure.

    report.py prints each metric and summary for every cell (a setting of all flags except
    encoding and seed), and the differences PE - no PE and PE - control.
    """

    title: str
    grids: dict  # scale -> [{flag: value}, ...], one row per trial
    metrics: dict = ACCURACY  # label -> metric name in result.json, or function of Result
    summaries: tuple = ()
    contrasts: tuple = ()  # in addition to PE - no PE and PE - control
    claims: tuple = ()
    tuned: tuple = ()  # flags tuned per encoding, which do not define cells
    note: str = ""
    # Plots show each metric over flag x, one line per encoding, or `curves` if given. x can
    # also be "pe", or ("pe", flag, ...): points side by side for each setting of the flags
    x: str | tuple = "vocab"
    curves: Callable | None = None  # Result -> iterable of (panel, encoding, {x: y})
    y: str = "token accuracy"  # y label of the curves
    plot: bool = True


# -- Results and measurements
class Result(NamedTuple):
    """A trial of a figure; an unfinished one has only flags."""

    flags: dict  # its row of the figure's grid
    metrics: dict = {}  # of result.json
    config: dict = {}
    folder: Path | None = None
    seconds: float = 0.0  # training time
    processes: tuple = ()  # provenance of each process that trained it
    by_label: dict = {}  # {label: value} of Figure.metrics, where available
    curves: tuple = ()  # those of Figure.curves

    @property
    def curve_csv(self):
        """Return curve.csv as an array with named columns, such as "loss"."""
        path = self.folder / "curve.csv"
        return np.genfromtxt(path, delimiter=",", names=True, ndmin=1)


class Measurement(NamedTuple):
    """The value of a Measure for one trial or group of trials."""

    flags: dict  # flags that its trials share
    value: float | None  # None: a trial is missing, or lacks the metric


def measurements(results, measure):
    """Return one Measurement per trial or, for a summary, per group of trials."""
    groups = defaultdict(list)
    for result in results:
        shared = {f: x for f, x in result.flags.items() if f not in measure.over}
        groups[tuple(shared.items())].append(result)
    return [Measurement(dict(shared), measure.of(group)) for shared, group in groups.items()]


def matching(items, flags):
    """Return the Results or Measurements with these flags; None matches a missing flag."""
    return [x for x in items if all(x.flags.get(f) == value for f, value in flags.items())]


def finished_of(results):
    return [result for result in results if result.config]


def chance(x):
    """Return chance accuracy of a Result or a Task."""
    return 1 / x.config.get("meanings", x.config["vocab"])


# -- Names
ENCODING_NAMES = {"none": "no PE", "sin": "PE"}
FLAG_NAMES = {"vocab": "K", "length": "L", "meanings": "M"}
CAPTIONS = {
    "hidden": "{} units",
    "embed": "embedding size {}",
    "held_out": "{:,} test sequences",
    "min_length": "lengths from {}",
    "snapshot_every": "snapshots every {:,} iterations",
    "iterations": "{:,} iterations",
    "lr": "learning rate {:g}",
}


def name_model(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


def name_flag(flag):
    return FLAG_NAMES.get(flag, flag.replace("_", " "))


def name_cell(flags):
    """Return labels such as ["GRU", "K = 32"], without flags that are None."""
    names = []
    for flag, value in flags.items():
        if value is not None:
            caption = CAPTIONS.get(flag, f"{name_flag(flag)} = {{}}")
            names.append(name_model(value) if flag == "model" else caption.format(value))
    return names


# -- Summaries of accuracy over vocabulary size and training budget
class CensoredBelow(float):
    """The lower boundary of the grid: the true value lies below it."""


class CensoredAbove(float):
    """The upper boundary of the grid: the true value lies above it."""


def accuracies_over(flag, results):
    """Return the flag's values, in ascending order, and the token accuracy at each."""
    return zip(*sorted((r.flags[flag], r.by_label["token accuracy"]) for r in results))


def crossing(xs, ys, threshold):
    """Return the first, interpolated x where ys fall below a threshold; may be censored."""
    if ys[0] < threshold:
        return CensoredBelow(xs[0])
    for (left, before), (right, after) in itertools.pairwise(zip(xs, ys)):
        if after < threshold:
            return left + (before - threshold) / (before - after) * (right - left)
    return CensoredAbove(xs[-1])


def k_at(accuracy):
    """Return a Measure: log2 of the K at which token accuracy first falls below this."""

    def compute(results):
        vocabs, ys = accuracies_over("vocab", results)
        return crossing(np.log2(vocabs), ys, accuracy)

    label = f"K at {accuracy:.0%} token accuracy (differences: in log2 K)"
    return Measure(label, ("vocab",), compute, np.exp2)


def mean_over_log2_k(results):
    """Return the mean token accuracy over the range of log2 K, by the trapezoidal rule."""
    vocabs, ys = accuracies_over("vocab", results)
    xs = np.log2(vocabs)
    return np.trapezoid(ys, xs) / (xs[-1] - xs[0])


def speed_up(label, log2_ratio):
    """Return a Measure: log2 of the ratio of no PE's budget to PE's at the same accuracy.

    `log2_ratio` takes log2 of the budgets (1x: 0), and the accuracies without and with PE.
    """

    def compute(results):
        none, sin = matching(results, dict(pe="none")), matching(results, dict(pe="sin"))
        if not none or not sin:
            return None  # one arm is not selected
        budgets, no_pe = accuracies_over("iterations", none)
        _, pe = accuracies_over("iterations", sin)
        return log2_ratio(np.log2(np.divide(budgets, budgets[0])), no_pe, pe)

    return Measure(label, ("pe", "iterations", "lr"), compute, np.exp2, "x")


MEAN_ACCURACY = Measure("mean token accuracy over log2 K", ("vocab",), mean_over_log2_k)
K95, K80 = k_at(0.95), k_at(0.80)
K_SUMMARIES = MEAN_ACCURACY, K95, K80
SPEED_UPS = (
    speed_up(
        "speed-up from PE, to the accuracy of PE at 1x",
        # log2(budget at which no PE reaches it / 1x); negated, as `crossing` expects a fall
        lambda log2_budgets, no_pe, pe: crossing(log2_budgets, np.negative(no_pe), -pe[0]),
    ),
    speed_up(
        "speed-up from PE, to the final accuracy of no PE",
        # log2(longest budget / budget at which PE reaches it)
        lambda log2_budgets, no_pe, pe: crossing(
            log2_budgets[-1] - log2_budgets[::-1], pe[::-1], no_pe[-1]
        ),
    ),
)
