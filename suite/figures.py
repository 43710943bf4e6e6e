"""Figures as data: grids of trials, metrics, contrasts and claims; report.py shows them.

A cell is a group of trials that differ only in encoding, seed and tuned flags. It is selected
by a dictionary of the flags they share. Unqualified, PE means the sinusoid (--pe sin), and the
control is `constant` or, where there is none, `dup`.
"""

import itertools
import math
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


def grid(**flags):
    """Return all combinations of the values as trials; unless given, seeds are 0 to 4."""
    flags.setdefault("seed", range(5))  # as in the paper
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


# -- Definition of a figure
class Metric(NamedTuple):
    """A metric of single trials, or a summary of a group of trials.

    A summary's `across` names the flags in which the trials of a group differ. For example, K95
    summarises trials that differ only in K.
    """

    label: str  # shown in tables; also its key in Result.values
    across: tuple = ()
    compute: Callable | None = None  # summaries: [Result] -> a number, possibly censored
    display: Callable = float  # transform for display, such as exp2 of logarithms
    unit: str = ""

    def evaluate(self, results):
        """Return the value, or None if trials are missing or a summary has fewer than three."""
        if not self.across:
            return results[0].values.get(self.label)
        complete = all("token accuracy" in result.values for result in results)
        return self.compute(results) if complete and len(results) > 2 else None


def as_metric(metric):
    """Return a Metric, given one or its label."""
    return metric if isinstance(metric, Metric) else Metric(metric)


class Contrast(NamedTuple):
    """Mean metric of the trials that match `plus`, minus that of those that match `minus`."""

    label: str
    plus: dict | list  # flags, or a list of such dictionaries, whose means are summed
    minus: dict | list
    paired: bool = False  # pair trials by seed
    metric: str = ""  # its label; default: the figure's first metric

    def terms(self):
        """Yield (sign, flags that select trials)."""
        for sign, side in (1, self.plus), (-1, self.minus):
            for flags in side if isinstance(side, list) else [side]:
                yield sign, flags


def encoding_contrast(plus, minus):
    """Return the Contrast of two encodings, such as PE - no PE."""
    names = [ENCODING_NAMES.get(pe, pe) for pe in (plus, minus)]
    return Contrast(" - ".join(names), dict(pe=plus), dict(pe=minus))


def gain_difference(label, setting, reference, over="none", metric=""):
    """Return a difference in differences: PE's gain in `setting` minus that in `reference`.

    The gain is over the encoding `over`, which is no PE or a control.
    """
    other, sin = dict(pe=over), dict(pe="sin")
    plus = [setting | sin, reference | other]
    return Contrast(label, plus, [setting | other, reference | sin], metric=metric)


class Claim(NamedTuple):
    """A claim: PE exceeds no PE and the control, or `contrast` is positive.

    It is preregistered unless its family starts with "Post hoc".
    """

    family: str  # claims that are Holm-corrected together
    metric: str | Metric = "token accuracy"
    cell: dict | None = None  # {}: all trials; None: one claim for each cell
    contrast: Contrast | None = None


ACCURACY = {"token accuracy": "token_accuracy"}
ACCURACY_AND_EDITS = ACCURACY | {"edit distance": "damerau_levenshtein"}


class Figure(NamedTuple):
    """Trials, metrics and comparisons of a figure, table or section.

    report.py prints each metric and summary for every cell, and the differences PE - no PE and
    PE - control.
    """

    title: str
    grids: dict  # scale -> [{flag: value}, ...], one dict per trial
    metrics: dict = ACCURACY  # label -> metric name in result.json, or function of Result
    summaries: tuple = ()
    # In addition to PE - no PE and PE - control; those without trials are omitted
    contrasts: tuple = ()
    claims: tuple = ()
    tuned: tuple = ()  # flags, such as a tuned learning rate, that may differ within a cell
    note: str = ""
    # x axis of the plots:
    #   a flag: a line for each encoding
    #   "pe": a single category; ("pe", flag, ...): one for each combination of the flags
    #   "gain": the differences PE - no PE and PE - control of all cells
    #   with `curves`: only the label of the axis
    x: str | tuple = "vocab"
    # Result -> iterable of (panel, {x: y}); titled "MODEL, panel", or MODEL if panel is empty
    curves: Callable | None = None
    y: str = "token accuracy"  # y label of the curves
    plot: bool = True


# -- Results and values of metrics
class Result(NamedTuple):
    """A trial of a figure; an unfinished one has only flags."""

    flags: dict  # as in the figure's grid
    metrics: dict = {}  # of result.json
    config: dict = {}
    folder: Path | None = None
    seconds: float = 0.0  # training time
    processes: tuple = ()  # provenance of each process that trained it
    values: dict = {}  # {label: value} of Figure.metrics, where available
    curves: tuple = ()  # those of Figure.curves

    @property
    def training_curve(self):
        """Return curve.csv as an array with named columns, such as "loss"."""
        path = self.folder / "curve.csv"
        return np.genfromtxt(path, delimiter=",", names=True, ndmin=1)


class MetricValue(NamedTuple):
    """The value of a Metric for one trial or, for a summary, a group of trials."""

    flags: dict  # flags that its trials share
    value: float | None  # None: trials are missing, or lack the metric


def evaluate_metric(results, metric):
    """Return a MetricValue for each trial or, for a summary, for each group of trials."""
    groups = defaultdict(list)
    for result in results:
        shared = {f: x for f, x in result.flags.items() if f not in metric.across}
        groups[tuple(shared.items())].append(result)
    return [
        MetricValue(dict(shared), metric.evaluate(group)) for shared, group in groups.items()
    ]


def matching(items, flags):
    """Return the Results or MetricValues with these flags; None matches a missing flag."""
    return [x for x in items if all(x.flags.get(f) == value for f, value in flags.items())]


def finished_results(results):
    return [result for result in results if result.config]


def count_test_tokens(result):
    return result.config["held_out"] * result.config["length"]


def error_rate(accuracy, n):
    """Return the error rate of n outputs; zero errors count as half an error."""
    return max(1 - accuracy, 0.5 / n)


def log_odds(accuracy, n):
    """Return log(accuracy / error) of n outputs."""
    error = error_rate(accuracy, n)
    return math.log((1 - error) / error)


def token_log_odds(result):
    return log_odds(result.metrics["token_accuracy"], count_test_tokens(result))


def token_log_error(result):
    return math.log(error_rate(result.metrics["token_accuracy"], count_test_tokens(result)))


ACCURACY_AND_LOG_ODDS = ACCURACY | {"log-odds": token_log_odds}
ACCURACY_AND_LOG_ERROR = ACCURACY | {"log error": token_log_error}


def chance(x):
    """Return chance accuracy of a Result or a Task."""
    return 1 / x.config.get("meanings", x.config["vocab"])


# -- Names
ENCODING_NAMES = {"none": "no PE", "sin": "PE"}
FLAG_NAMES = {"vocab": "K", "length": "L", "meanings": "M"}
FLAG_FORMATS = {
    "hidden": "{} units",
    "embed": "embedding size {}",
    "held_out": "{:,} test sequences",
    "min_length": "lengths from {}",
    "snapshot_every": "snapshots every {:,} iterations",
    "iterations": "{:,} iterations",
    "lr": "learning rate {:g}",
}


def model_label(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


def flag_label(flag):
    return FLAG_NAMES.get(flag, flag.replace("_", " "))


def cell_labels(flags):
    """Return labels such as ["GRU", "K = 32"], without flags that are None."""
    names = []
    for flag, value in flags.items():
        if value is not None:
            caption = FLAG_FORMATS.get(flag, f"{flag_label(flag)} = {{}}")
            names.append(model_label(value) if flag == "model" else caption.format(value))
    return names


# -- Summaries of accuracy over vocabulary size and training budget
class LeftCensored(float):
    """The smallest value of the grid; the true value lies below it."""


class RightCensored(float):
    """The largest value of the grid; the true value lies above it."""


def accuracies_over(flag, results):
    """Return the flag's values, in ascending order, and the token accuracy at each."""
    return zip(*sorted((r.flags[flag], r.values["token accuracy"]) for r in results))


def crossing(xs, ys, threshold):
    """Return the x at which ys first fall below a threshold: interpolated, or censored."""
    if ys[0] < threshold:
        return LeftCensored(xs[0])
    for (left, before), (right, after) in itertools.pairwise(zip(xs, ys)):
        if after < threshold:
            return left + (before - threshold) / (before - after) * (right - left)
    return RightCensored(xs[-1])


def k_at(accuracy):
    """Return a Metric: log2 of the K at which token accuracy first falls below `accuracy`."""

    def compute(results):
        vocabs, ys = accuracies_over("vocab", results)
        return crossing(np.log2(vocabs), ys, accuracy)

    label = f"K at {accuracy:.0%} token accuracy (differences: in log2 K)"
    return Metric(label, ("vocab",), compute, np.exp2)


def mean_over_log2_k(results):
    """Return the mean token accuracy over the range of log2 K, by the trapezoidal rule."""
    vocabs, ys = accuracies_over("vocab", results)
    xs = np.log2(vocabs)
    return np.trapezoid(ys, xs) / (xs[-1] - xs[0])


def speed_up(label, log2_ratio):
    """Return a Metric: log2 of (budget without PE / budget with PE) at the same accuracy.

    `log2_ratio` computes it from log2 of the budgets (0 for the shortest), and from the
    accuracies at these budgets, first without PE and then with PE.
    """

    def compute(results):
        none, sin = matching(results, dict(pe="none")), matching(results, dict(pe="sin"))
        if not none or not sin:
            return None  # flags select only one encoding
        budgets, no_pe = accuracies_over("iterations", none)
        _, pe = accuracies_over("iterations", sin)
        return log2_ratio(np.log2(np.divide(budgets, budgets[0])), no_pe, pe)

    across = "pe", "iterations", "lr"  # lr may be tuned for each budget
    return Metric(label, across, compute, np.exp2, "x")


def log2_budget_to_match(log2_budgets, no_pe, pe):
    """Return log2 of the budget at which models without PE match those with PE at 1x."""
    errors = np.subtract(1, no_pe)  # `crossing` looks for a fall
    return crossing(log2_budgets, errors, 1 - pe[0])


def log2_budget_saved(log2_budgets, no_pe, pe):
    """Return log2 of (longest budget / budget at which PE matches no PE's final accuracy)."""
    log2_savings = log2_budgets[-1] - log2_budgets[::-1]  # from the longest budget down
    return crossing(log2_savings, pe[::-1], no_pe[-1])


MEAN_ACCURACY = Metric("mean token accuracy over log2 K", ("vocab",), mean_over_log2_k)
K95, K80 = k_at(0.95), k_at(0.80)
K_SUMMARIES = MEAN_ACCURACY, K95, K80
SPEED_UPS = (
    speed_up("speed-up by PE to its own accuracy at 1x", log2_budget_to_match),
    speed_up("speed-up by PE to the final accuracy of no PE", log2_budget_saved),
)
