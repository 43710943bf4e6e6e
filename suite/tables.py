"""What is read of a trial, tables of many, and the lines that are printed of a figure."""

from suite import files
from suite.claims import (
    LEVEL,
    MOST_PRIMARY,
    TOO_FEW,
    Outcome,
    Outcomes,
    bootstrap_interval,
    claims_of,
    correct,
    judge_all,
    t_quantile,
)
from suite.drawing import CAN_DRAW, draw, pictures, write_numbers

import json
import warnings
from dataclasses import dataclass

import numpy as np

TEXT = ("text_sha256", "pieces_sha256")  # in a trial's config: fingerprints of the files that it read
LARGEST = 1e100  # of a metric: its square is still a number
LONGEST = 1e10  # seconds

# ------------------------------------------------------------------------------------------------------------
# Files that a report reads
# ------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """A file that cannot be used: one line, with its name and what is wrong."""


def checked(path, parse):
    """parse(the file's text). Whatever is wrong with it becomes Broken: the others are still reported."""
    try:
        with warnings.catch_warnings(action="ignore"):  # NumPy's, of means of nothing
            return parse(path.read_bytes().decode())
    except Exception as error:  # noqa: BLE001 - any fault in a file is its own
        raise Broken(f"{path}: {fault(error)}") from None


def fault(error):
    """What is wrong, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not whole JSON: {error}"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    words = str(error) if type(error) in (ValueError, TypeError) else f"{type(error).__name__}: {error}"
    return " ".join(words.split())


def number(value, name, least=-LARGEST, most=LARGEST):
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} is {repr(value)[:40]}, which is no number that it can be")
    return value


def dictionary(value, name):
    if not isinstance(value, dict):
        raise TypeError(f"{name} is no dictionary")
    return value


def progress_of(text):
    """result.json -> (iterations, seconds)"""
    content = dictionary(json.loads(text), "it")
    iterations = number(content["iterations"], "iterations", 0, 2**31)
    return iterations, number(content["seconds"], "seconds", 0, LONGEST)


def curve_of(text):
    """curve.csv -> {column: [values]}"""
    header, *rows = [line.split(",") for line in text.splitlines()] or [[]]
    if any(len(row) != len(header) for row in rows):
        raise ValueError("its lines are not all of the same columns")
    curve = {name: [number(float(row[n]), name) for row in rows] for n, name in enumerate(header)}
    if missing := {"iteration", "loss", "accuracy", "seconds"} - curve.keys():
        raise ValueError(f"it has no column {min(missing)}")
    return curve


def outcome_of(figure, flags, task, text, curve):
    """The Outcome in result.json, or in a figure's own file."""
    content = dictionary(json.loads(text), "it")
    metrics = content["metrics"] if figure.file == "result.json" else content
    config = dictionary(content.get("config", {}), "config")
    if what := task.unlike(content):
        raise ValueError(f"it {what}")
    for name in ("vocab", "length"):
        number(config.get(name, 1), name, 1)
    for process in files.processes(content):
        dictionary(process, "earlier")
    run = dictionary(content.get("run", {}), "run")
    if not isinstance(run.get("data", ""), str):
        raise TypeError("run's data is no file's name")
    seconds = number(content["seconds"], "seconds", 0, LONGEST)
    texts = tuple(str(config.get(name)) for name in TEXT)
    return Outcome(flags, dictionary(metrics, "metrics"), config, content, seconds, texts, curve)


def read_outcome(figure, claims, flags, task):
    """A finished trial, of which all metrics are numbers; raises Broken."""
    curve = checked(task.folder / "curve.csv", curve_of) if figure.needs_curve else {}

    def parse(text):
        outcome = outcome_of(figure, flags, task, text, curve)
        for name, metric in figure.metrics.items():
            number(metric(outcome), name)
        for claim in claims:
            number(claim.metric(outcome), "a claim's number")
            number((claim.than or claim.metric)(outcome), "a claim's number")
        for *_, line, points in figure.lines(outcome):
            for value in points.values():
                number(value, line)
        return outcome

    return checked(task.folder / figure.file, parse)


def load(figure, claims, trials, rows=None):
    """[flags.Listed] -> (Outcomes, a line for every trial that is left out though it has run).

    `rows` are the flags of the whole grid, where these trials are a part of it.
    """
    found, broken = [], []
    for flags, _, task in trials:
        outcome = None
        try:
            if (task.folder / figure.file).exists():
                outcome = read_outcome(figure, claims, flags, task)
                if figure.training and (path := task.folder / "curve.csv").exists():
                    outcome.curve.update(checked(path, curve_of))
            elif (path := task.folder / files.DIVERGED).exists():
                broken.append(
                    f"not finite, left out: {task.folder}: {path.read_text(errors='replace').strip()}"
                )
        except (Broken, OSError) as error:  # the latter of another user's folder
            what = "no curve of it is drawn" if outcome else "left out"
            broken.append(f"cannot be read, {what}: {error}")
        found.append((flags, outcome))
    return Outcomes(found, rows), broken


# ------------------------------------------------------------------------------------------------------------
# Tables: a line for each cell, which is the trials that differ in their seed alone
# ------------------------------------------------------------------------------------------------------------


def aligned(rows, indent=""):
    """Rows of words -> lines in which they stand in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [indent + "  ".join(word.ljust(w) for word, w in zip(row, widths)).rstrip() for row in rows]


def cell_table(outcomes, columns):
    """The cells with finished trials: their flags, then what each column says, {heading: its words}.

    A flag that a part of the grid does not set, or sets to None, is at its default there.
    """
    flags = list(dict.fromkeys(flag for flags, _ in outcomes.trials for flag in flags if flag != "seed"))
    rows = [[*(flag.replace("_", "-") for flag in flags), *columns]]
    for cell, trials in outcomes.cells().items():
        if trials.finished():
            values = [dict(cell).get(flag) for flag in flags]
            words = ["-" if value is None else str(value) for value in values]
            rows.append(words + [column(trials) for column in columns.values()])
    return aligned(rows, "  ")


def count(trials):
    return str(len(trials.finished()))


def mean(metric, digits=4):
    return lambda trials: f"{np.mean(trials.values(metric)):,.{digits}f}"


def interval(metric):
    def words(trials):
        found = bootstrap_interval(trials.values(metric))
        return "[{:.4f}, {:.4f}]".format(*found) if found else "-"

    return words


def of_each(metric):
    return lambda trials: " ".join(f"{value:.4f}" for value in trials.values(metric))


def mean_columns(name, metric):
    """The mean, its interval (the paper's: percentile bootstrap), n, and every seed's value."""
    columns = {"mean": mean(metric), "95% bootstrap interval": interval(metric), "n": count}
    return columns | {f"{name} of each seed": of_each(metric)}


# ------------------------------------------------------------------------------------------------------------
# What is printed of a figure
# ------------------------------------------------------------------------------------------------------------

MEANING = """\
  yes: the 95% interval of the difference (t test) lies above zero; no: below it; undecided: neither is shown.
  Over two (none and a control) yes: above zero over both; no: below over one, at twice the p.
  With a margin (something does not help) yes: the interval lies below the margin; no: above zero.
  [low, high] is that interval, p two-sided. Of a primary claim p decides, corrected (Holm): here as
  if of ten or more, by report.py --write for as many as all scripts have.
  In tables and pictures: the 95% percentile bootstrap interval of a mean, as in the paper. vanilla: none."""


def figure_lines(figure, scale, outcomes, broken, verdicts):
    """Its tables and verdicts."""
    lines = [f"  {line}" for line in broken]
    if len(texts := outcomes.texts()) > 1:
        counts = " and ".join(map(str, texts.values()))
        lines.append(f"  trials of {len(texts)} different texts, not compared: {counts} of them")
    if len(texts) != 1:  # nothing is finished, or not comparable
        return lines + missing(outcomes, broken)
    usual = lambda outcomes, scale: [mean_columns(*item) for item in figure.metrics.items()]
    for columns in (figure.tables or usual)(outcomes, scale):
        lines += ["", *cell_table(outcomes, columns)]
    lacking = missing(outcomes, broken)
    lines += ["", *lacking, ""] if lacking else [""]
    for one in verdicts:
        mark = " (primary)" if one.claim.primary else ""
        lines.append(f"  {one.word}: {one.claim.text}{mark}: {one.numbers}")
    lines += few_trials(verdicts)
    return lines + (figure.note(scale) if figure.note else [])


def missing(outcomes, broken, most=8):
    """A line that names the cells that lack trials, by the flags in which cells differ, and how many."""
    found, cells = outcomes.cells(), []
    common = set.intersection(*map(set, found)) if found else set()
    for cell, trials in found.items():
        if lacking := len(trials.trials) - len(trials.finished()):
            told = [(k, v) for k, v in cell if (k, v) not in common and v is not None]
            words = " ".join(k.replace("_", "-") if v is True else str(v) for k, v in told) or "all"
            cells.append(f"{words} ({lacking})")
    more = f" and {len(cells) - most} more" if len(cells) > most else ""
    what = "without a result" if broken else "still to run"
    return [f"  {what}: {', '.join(cells[:most])}{more}"] if cells else []


def made_by(outcomes):
    """On what, with which PyTorch and at which commits its trials ran."""
    processes = [process for one in outcomes.finished() for process in files.processes(one.about)]
    distinct = lambda name: sorted({str(process.get(name) or "unknown") for process in processes})
    commits = [commit[:7] for commit in distinct("commit")]
    edited = ", with changes that no commit has" if any(process.get("dirty") for process in processes) else ""
    device, torch, commit = map(" and ".join, (distinct("device"), distinct("torch"), commits))
    return f"{device}; torch {torch}; commit {commit}{edited}"


def few_trials(verdicts):
    """What so few trials can and cannot show."""
    counts = [n for one in verdicts if one.difference for n in one.difference.counts if n]
    if not counts or (n := min(counts)) >= 5:
        return []
    reach = t_quantile(LEVEL, 2 * n - 2) * np.sqrt(2 / n)
    return [
        f"  With n = {n}, cells that differ by less than about {reach:.1f} standard deviations of a seed are",
        "  undecided until there are more seeds, growths and primary claims by more. The suite works.",
    ]


@dataclass
class Section:
    """What a report says of a figure."""

    task: type
    scale: str
    name: str  # of the figure
    chosen: list  # the given flags that make it another figure than the scale's, as in a folder's name
    outcomes: Outcomes
    broken: list
    verdicts: list  # before any correction

    @property
    def figure(self):
        return self.task.figures[self.name]

    def lines(self):
        return figure_lines(self.figure, self.scale, self.outcomes, self.broken, self.verdicts)

    def draw(self, out, kinds, numbers=False):
        """[(picture's title, its path, why it is not written)]; none of trials that are not comparable.

        Of each, files of these kinds where there is matplotlib, and with `numbers` a CSV file of its points.
        """
        if len(self.outcomes.texts()) != 1:
            return []
        scale = [] if self.scale == "paper" else [self.scale]
        stem, found = "-".join([self.task.name, self.name, *scale, *self.chosen]), []
        for path, figure, part in pictures(self.figure, stem, self.outcomes, out):
            fault = None
            try:
                if numbers:
                    write_numbers(figure, path, part)
                if CAN_DRAW:
                    draw(figure, self.scale, path, part, kinds)
            except Exception as error:  # noqa: BLE001 - a broken matplotlib must not take the tables along
                fault = error if isinstance(error, OSError) else repr(error)
            found.append((figure.title, path, fault))
        return found


def section(task, scale, name, chosen, trials):
    claims = claims_of(task, name, scale)
    outcomes, broken = load(task.figures[name], claims, trials, task.grids[scale][name])
    return Section(task, scale, name, chosen, outcomes, broken, judge_all(claims, outcomes))


def print_figures(task, scale, figures, out, chosen):
    """Print and draw figures of a task, {name: [flags.Listed]} -> how many trials are finished."""
    finished, judged = 0, 0
    for name, trials in figures.items():
        one = section(task, scale, name, chosen, trials)
        finished += (done := len(one.outcomes.finished()))
        # The other scripts' primary claims are not known here: as for the most that there may be.
        one.verdicts = correct(one.verdicts, MOST_PRIMARY)
        judged += sum(verdict.word != TOO_FEW for verdict in one.verdicts)
        print(f"\n{name} ({scale} scale): {one.figure.title}. {done} of {len(trials)} trials finished")
        print(*one.lines(), sep="\n")
        if " and " in (made := made_by(one.outcomes)):
            print(f"  made by unlike machines, versions or commits: {made}")
        # The SVG first: a picture that was drawn as a PNG gives another one.
        for _, path, fault in one.draw(out, [".svg", ".png"], numbers=True):
            written = f"{path.with_suffix('.csv')}{', .png, .svg' if CAN_DRAW else ''}"
            print(f"  not written: {fault}" if fault else f"  written: {written}")
    if judged:
        print(f"\n{MEANING}")
    if not CAN_DRAW:
        print("\nmatplotlib is not installed, so no figure was drawn (pip install matplotlib, then --report)")
    return finished
