"""A figure as data: its grid of trials, metrics and contrasts. report.py makes tables of it."""

import itertools
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
class Summary(NamedTuple):
    """A number computed from several trials of one seed, which differ in the flags `over`."""

    label: str
    over: tuple
    compute: Callable  # [Result] -> a number, Censored at the grid's boundary, or None
    show: Callable = float  # a mean as it is shown, where numbers are logarithms
    unit: str = ""


class Contrast(NamedTuple):
    """A difference between cells of a grid, each given by its flags; a list adds up cells."""

    label: str
    high: dict | list
    low: dict | list
    paired: bool = False  # by seed
    measure: str | Summary = ""  # the figure's first metric


class Claim(NamedTuple):
    """A preregistered claim: PE is above no PE and above the control, or other contrasts."""

    family: str  # Holm's correction takes its claims together
    measure: str | Summary
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


# -- Finished trials
class Result(NamedTuple):
    """A finished trial, as report.py has read and checked it."""

    flags: dict  # its row of the figure's grid
    metrics: dict
    folder: Path | None = None
    config: dict | None = None
    seconds: float = 0.0  # of training
    processes: tuple = ()  # provenance of each process that trained it
    values: dict = {}  # the figure's metrics; None where the trial lacks one
    lines: tuple = ()  # the figure's curves

    @property
    def curve(self):
        """curve.csv; curve["loss"] is a column."""
        path = self.folder / "curve.csv"
        return np.genfromtxt(path, delimiter=",", names=True, ndmin=1)


class Results(list):
    """The finished trials of a figure, and the rows of its whole grid."""

    def __init__(self, found, rows):
        super().__init__(found)
        self.rows = rows

    def where(self, **flags):
        """Those with these flags; None: their row does not name the flag."""
        found = [result for result in self if has(result.flags, flags)]
        return Results(found, [row for row in self.rows if has(row, flags)])

    def levels(self, flag):
        """The values that a flag has in the grid."""
        return list(dict.fromkeys(row.get(flag) for row in self.rows))


def has(row, flags):
    return all(row.get(flag) == value for flag, value in flags.items())


def without(row, flags):
    return {flag: value for flag, value in row.items() if flag not in flags}


# -- Measures: a metric of each trial, or a summary of several
def planned(results, measure):
    """The flags of each number that the whole grid gives."""
    over = measure.over if isinstance(measure, Summary) else ()
    return distinct(without(row, over) for row in results.rows)


def points(results, measure):
    """[(flags, number)] of the finished trials."""
    if isinstance(measure, Summary):
        return summarise(results, measure)
    found = [(result.flags, result.values[measure]) for result in results]
    return [(flags, number) for flags, number in found if number is not None]


def summarise(results, summary):
    """[(flags, number)] of the groups whose trials all have a token accuracy."""
    found = []
    for flags in planned(results, summary):
        rows = [row for row in results.rows if without(row, summary.over) == flags]
        group = [r for r in results if r.flags in rows]
        group = [r for r in group if r.values["token accuracy"] is not None]
        if len(group) == len(rows) and (number := summary.compute(group)) is not None:
            found.append((flags, number))
    return found


def distinct(rows):
    """The rows without repetitions."""
    return [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows)]


def default_contrasts(rows):
    """PE - no PE, and PE - control."""
    encodings = {row.get("pe") for row in rows}
    if not encodings >= set(BOTH):
        return []
    control = [pe for pe in CONTROLS if pe in encodings][:1]
    return [
        Contrast(f"PE - {ENCODING_NAMES.get(pe, pe)}", dict(pe="sin"), dict(pe=pe))
        for pe in ["none", *control]
    ]


ENCODING_NAMES = {"none": "no PE", "sin": "PE"}


def name_of(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


# -- Summaries of accuracy over the vocabulary, and over the training budget
class Censored(float):
    """A value at the boundary of the grid: the true one lies beyond it."""

    def __new__(cls, value, above):
        self = super().__new__(cls, value)
        self.above = above
        return self


def accuracies_over(results, flag, pe=None):
    """-> the flag's values in ascending order, and the accuracies there, of one encoding."""
    results = [r for r in results if pe in (None, r.flags["pe"])]
    return zip(*sorted((r.flags[flag], r.values["token accuracy"]) for r in results))


def crossing(xs, ys, limit):
    """The first x where ys, joined by straight lines, fall below a limit."""
    if ys[0] < limit:
        return Censored(xs[0], above=False)
    for (left, before), (right, after) in itertools.pairwise(zip(xs, ys)):
        if after < limit:
            return left + (before - limit) / (before - after) * (right - left)
    return Censored(xs[-1], above=True)


def k_at(accuracy):
    """The largest vocabulary with this accuracy, as log2 K."""

    def compute(results):
        vocabs, ys = accuracies_over(results, "vocab")
        return crossing(np.log2(vocabs), ys, accuracy) if len(vocabs) > 2 else None

    label = f"K at {accuracy:.0%} token accuracy (differences: in log2 K)"
    return Summary(label, ("vocab",), compute, np.exp2)


def area_over_log2_k(results):
    """Divided by the range of log2 K: 1 if all answers are correct."""
    vocabs, ys = accuracies_over(results, "vocab")
    xs = np.log2(vocabs)
    return np.trapezoid(ys, xs) / (xs[-1] - xs[0]) if len(vocabs) > 2 else None


def equivalent_budget(results):
    """log2 of the budget at which no PE reaches what PE has at the smallest budget."""
    budgets, no_pe = accuracies_over(results, "iterations", "none")
    _, pe = accuracies_over(results, "iterations", "sin")
    multiples = np.log2(np.divide(budgets, budgets[0]))
    return crossing(multiples, np.negative(no_pe), -pe[0])  # where -accuracy falls below


AREA = Summary("area under token accuracy over log2 K", ("vocab",), area_over_log2_k)
K95, K80 = k_at(0.95), k_at(0.80)
OVER_K = AREA, K95, K80
BUDGET = Summary(
    "budget at which no PE reaches PE's accuracy at 1x (differences: in log2)",
    ("pe", "iterations", "lr"),
    equivalent_budget,
    np.exp2,
    "x",
)
