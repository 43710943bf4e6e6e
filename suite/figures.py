"""A figure as data: its grid of trials, metrics and contrasts. report.py makes tables of it."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

BOTH = ["none", "sin"]
WITH_CONSTANT = ["none", "constant", "sin"]
WITH_DUP = ["none", "dup", "sin"]
WITH_CONTROLS = ["none", "constant", "dup", "sin"]
CONTROLS = ["constant", "dup"]  # as many inputs as with PE, but no position


def cross(**flags):
    """All combinations: cross(model="lstm", vocab=[256, 512]) is ten trials, five of each."""
    flags.setdefault("seed", range(5))  # the paper's five
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


# -- What a script says of a figure
class Measure(NamedTuple):
    """A number of each trial, or a summary of one seed's trials that differ in flags `over`."""

    label: str
    over: tuple = ()
    compute: Callable | None = None  # [Result] -> a number, or a censored one
    show: Callable = float  # a mean as it is shown, where numbers are logarithms
    unit: str = ""

    def of(self, results):
        """The number; None where a trial is missing, and for a summary of less than three."""
        if not self.over:
            return results[0].values.get(self.label)
        complete = all("token accuracy" in result.values for result in results)
        return self.compute(results) if complete and len(results) > 2 else None


def as_measure(measure):
    """Scripts give a figure's metric by its label."""
    return measure if isinstance(measure, Measure) else Measure(measure)


class Contrast(NamedTuple):
    """A difference between cells of a grid, each given by its flags; a list adds up cells."""

    label: str
    high: dict | list
    low: dict | list
    paired: bool = False  # by seed
    measure: str = ""  # the figure's first metric

    def terms(self):
        """[(sign, flags of a cell)]"""
        terms = []
        for sign, side in (1, self.high), (-1, self.low):
            cells = side if isinstance(side, list) else [side]
            terms += [(sign, cell) for cell in cells]
        return terms


class Claim(NamedTuple):
    """A preregistered claim: PE is above no PE and above the control, or another contrast."""

    family: str  # Holm's correction takes its claims together
    measure: str | Measure
    cell: dict
    contrast: Contrast | None = None


ACCURACY = {"token accuracy": "token_accuracy"}
WITH_EDITS = ACCURACY | {"edit distance": "damerau_levenshtein"}


class Figure(NamedTuple):
    """Trials, and what is measured and compared.

    report.py prints each metric and summary for every cell (flags other than encoding and
    seed), and the differences between PE and no PE and between PE and the control.
    """

    title: str
    grids: dict  # scale -> [{flag: value}, ...], a row per trial
    metrics: dict = ACCURACY  # label -> a name in a trial's metrics, or a function of a Result
    summaries: tuple = ()
    contrasts: tuple = ()  # in addition to PE - no PE and PE - control
    claims: tuple = ()
    tuned: tuple = ()  # flags that follow from the encoding, and so distinguish no cells
    note: str = ""
    # The plot has each metric over the flag or flags x, a line per encoding; or else `curves`
    x: str | tuple = "vocab"
    curves: Callable | None = None  # of a Result: yields (panel, line, {x: y})
    y: str = "token accuracy"  # of the curves
    picture: bool = True


# -- Trials as a report reads them, and what is measured
class Result(NamedTuple):
    """A trial of a figure. Unless it is finished, it has flags alone."""

    flags: dict  # its row of the figure's grid
    metrics: dict = {}
    config: dict = {}
    folder: Path | None = None
    seconds: float = 0.0  # of training
    processes: tuple = ()  # provenance of each process that trained it
    values: dict = {}  # the figure's metrics that it has
    lines: tuple = ()  # the figure's curves

    @property
    def curve(self):
        """curve.csv; curve["loss"] is a column."""
        path = self.folder / "curve.csv"
        return np.genfromtxt(path, delimiter=",", names=True, ndmin=1)


class Measurement(NamedTuple):
    flags: dict  # those that its trials share
    value: float | None  # None: a trial is missing, or lacks the metric


def measurements(results, measure):
    """One for each trial, or for each group of trials that a summary is computed from."""
    groups = defaultdict(list)
    for result in results:
        shared = {f: x for f, x in result.flags.items() if f not in measure.over}
        groups[tuple(shared.items())].append(result)
    return [Measurement(dict(shared), measure.of(group)) for shared, group in groups.items()]


def select(trials, flags):
    """Those Results or Measurements that have these flags; None: a flag is not given."""
    return [x for x in trials if all(x.flags.get(f) == value for f, value in flags.items())]


def finished_of(results):
    return [result for result in results if result.config]


def chance(result):
    """The accuracy of guessing."""
    return 1 / result.config.get("meanings", result.config["vocab"])


# -- Names
ENCODING_NAMES = {"none": "no PE", "sin": "PE"}
FLAG_NAMES = {"vocab": "K", "length": "L", "meanings": "M"}


def name_of(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


def name_cell(flags):
    """["GRU", "K = 32"], without the flags that are not given."""
    names = []
    for flag, value in flags.items():
        if value is not None:
            name = f"{FLAG_NAMES.get(flag, flag)} = {value}"
            names.append(name_of(value) if flag == "model" else name)
    return names


# -- Summaries of accuracy over the vocabulary, and over the training budget
class CensoredBelow(float):
    """The lower boundary of the grid: the true value lies below it."""


class CensoredAbove(float):
    """The upper boundary of the grid: the true value lies above it."""


def accuracies_over(flag, results):
    """-> the flag's values in ascending order, and the accuracies there."""
    return zip(*sorted((r.flags[flag], r.values["token accuracy"]) for r in results))


def crossing(xs, ys, limit):
    """The first x where ys, joined by straight lines, fall below a limit."""
    if ys[0] < limit:
        return CensoredBelow(xs[0])
    for (left, before), (right, after) in itertools.pairwise(zip(xs, ys)):
        if after < limit:
            return left + (before - limit) / (before - after) * (right - left)
    return CensoredAbove(xs[-1])


def k_at(accuracy):
    """The largest vocabulary with this accuracy, as log2 K."""

    def compute(results):
        vocabs, ys = accuracies_over("vocab", results)
        return crossing(np.log2(vocabs), ys, accuracy)

    label = f"K at {accuracy:.0%} token accuracy (differences: in log2 K)"
    return Measure(label, ("vocab",), compute, np.exp2)


def area_over_log2_k(results):
    """Divided by the range of log2 K: 1 if all answers are correct."""
    vocabs, ys = accuracies_over("vocab", results)
    xs = np.log2(vocabs)
    return np.trapezoid(ys, xs) / (xs[-1] - xs[0])


def equivalent_budget(results):
    """log2 of the budget at which no PE reaches what PE has at the smallest budget."""
    none, sin = select(results, dict(pe="none")), select(results, dict(pe="sin"))
    if not none or not sin:
        return None  # where flags select trials
    budgets, no_pe = accuracies_over("iterations", none)
    _, pe = accuracies_over("iterations", sin)
    multiples = np.log2(np.divide(budgets, budgets[0]))
    return crossing(multiples, np.negative(no_pe), -pe[0])  # where -accuracy falls below


AREA = Measure("area under token accuracy over log2 K", ("vocab",), area_over_log2_k)
K95, K80 = k_at(0.95), k_at(0.80)
OVER_K = AREA, K95, K80
BUDGET = Measure(
    "budget at which no PE reaches PE's accuracy at 1x (differences: in log2)",
    ("pe", "iterations", "lr"),
    equivalent_budget,
    np.exp2,
    "x",
)
