"""Trial folders -> tables with intervals, figures, verdicts on the paper's claims.

A `Figure` says what one trial contributes; `show` gathers a figure's trials, prints a table per metric with
the mean over seeds, its 95% bootstrap interval, n and every seed's value, and draws the figure where
matplotlib is installed. `python report.py` lists how far every figure of every script is.
"""

import datetime
import fcntl
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common import bootstrap_interval, bootstrap_resamples

ENOUGH = 3  # trials on each side of a claim
SCRIPTS = ["reverse", "sort", "delayed_add", "predecessor", "lm_wikitext", "lm_shakespeare"]
TEXT = ("text_sha256", "pieces_sha256")  # trial.FINGERPRINTS, of the files a trial read
STATES = ["done", "running", "failed", "stopped", "missing"]


@dataclass
class Figure:
    """Drawn with a panel per model and metric and a line per encoding over the flag `x`; or, with `curves`,
    with the lines (panel, line, {x: y}) that curves(flags, metrics) yields for every trial."""

    title: str
    metrics: dict  # name -> function of a trial's metrics that gives one number
    x: str
    curves: Callable | None = None
    y: str = "accuracy"  # of the curves
    file: str = "result.json"  # or stability.json, whose metrics stand at its top level
    curve: bool = False  # read curve.csv too, as metrics["curve"]: {column: [values]}
    log_y: bool = False
    table: Callable | None = None  # table(cells, scale) prints it, where that is not a table per metric

    def lines(self, flags, metrics):
        """What one trial adds to the drawing: (panel, y label, line, {x: y})."""
        if self.curves:
            return [(panel, self.y, line, points) for panel, line, points in self.curves(flags, metrics)]
        panel, line, x = flags.get("model", "").upper(), flags["pe"], flags[self.x]
        return [(panel, name, line, {x: metric(metrics)}) for name, metric in self.metrics.items()]


@dataclass
class Claim:
    figure: str
    text: str
    check: Callable  # Cells -> (True, False or None for not enough trials; the numbers)
    where: dict = field(default_factory=dict)  # the trials it is about; not shown for a grid without any
    scales: tuple = ("paper", "quick", "smoke")  # an absolute number is claimed at paper scale only


class Cells:
    """The trials of a grid, [(flags, metrics or None)], and what tables and claims ask of them."""

    def __init__(self, trials):
        self.trials = trials

    def where(self, **flags):
        """Those with these flags; a value of min or max stands for the smallest or largest of the grid."""
        for k, v in flags.items():
            flags[k] = v({f[k] for f, _ in self.trials}) if callable(v) and self.trials else v
        return Cells([t for t in self.trials if all(t[0].get(k) == v for k, v in flags.items())])

    def values(self, metric):
        return [metric(metrics) for _, metrics in self.trials if metrics]

    def groups(self):
        """{flags without the seed: Cells}, in the order of the grid."""
        found = {}
        for flags, metrics in self.trials:
            cell = tuple((k, v) for k, v in flags.items() if k != "seed")
            found.setdefault(cell, Cells([])).trials.append((flags, metrics))
        return found


def above(threshold, metric, where):
    """Claim: every cell's mean is above the threshold."""

    def check(cells):
        values = {cell: c.values(metric) for cell, c in cells.where(**where).groups().items()}
        fewest = min(map(len, values.values()), default=0)
        if fewest < ENOUGH:
            return None, f"n = {fewest} in the smallest of {len(values)} cells"
        worst = min(values, key=lambda cell: np.mean(values[cell]))
        return bool(
            np.mean(values[worst]) > threshold
        ), f"lowest {np.mean(values[worst]):.4f} ({describe(worst)})"

    return check


def higher(metric, better, worse, than=None):
    """Claim: `metric` of the trials with the flags `better` is above that (or `than`) of those with `worse`.

    Holds where the 95% bootstrap interval of the difference of means lies above zero.
    """

    def check(cells):
        a, b = cells.where(**better), cells.where(**worse)
        if len(a.groups()) != 1 or (a.trials == b.trials and than is None):
            return None, "the grid has nothing to compare"
        return difference(a.values(metric), b.values(than or metric), paired=a.trials == b.trials)

    return check


def not_higher(metric, a, b, than=None):
    """Claim: no improvement is found. Holds where the interval of the difference does not lie above zero, so
    that few or noisy trials are enough; the numbers say how much could have been missed."""

    def check(cells):
        holds, numbers = higher(metric, a, b, than)(cells)
        return None if holds is None else not holds, numbers

    return check


def difference(a, b, paired=False):
    """`paired`: two numbers of the same trials, so that a resample takes both of a trial."""
    if min(len(a), len(b)) < ENOUGH:
        return None, f"n = {len(a)} and {len(b)}"
    if paired:
        resamples = bootstrap_resamples(np.subtract(a, b))
    else:
        resamples = bootstrap_resamples(a, 0) - bootstrap_resamples(b, 1)
    low, high = np.percentile(resamples, [2.5, 97.5])
    numbers = f"{np.mean(a):.4f} (n={len(a)}) against {np.mean(b):.4f} (n={len(b)})"
    return bool(low > 0), f"{numbers}, difference {np.mean(a) - np.mean(b):+.4f} [{low:+.4f}, {high:+.4f}]"


# ------------------------------------------------------------------------------------------------------------
# What several tasks report
# ------------------------------------------------------------------------------------------------------------


def accuracy(metrics):
    return metrics["token_accuracy"]


def distance(metrics):
    return metrics["damerau_levenshtein"]


ACCURACY = {"token accuracy": accuracy}
BOTH_METRICS = ACCURACY | {"Damerau-Levenshtein distance": distance}
NONE, SIN, DUP = dict(pe="none"), dict(pe="sin"), dict(pe="dup")
DUP_CLAIMS = [
    Claim("fig12", "as many parameters do not help (dup)", not_higher(accuracy, DUP, NONE)),
    Claim("fig12", "the encoding helps", higher(accuracy, SIN, NONE)),
    Claim("fig12", "the encoding helps more than dup", higher(accuracy, SIN, DUP)),
]


def helps_at_each_vocab(figure, metric, grids):
    """A claim for every vocabulary of a figure, at whatever scale."""
    flags = itertools.chain(*(grid[figure] for grid in grids.values()))
    return [
        Claim(figure, f"the encoding helps at K = {vocab}", higher(metric, SIN, NONE), dict(vocab=vocab))
        for vocab in sorted({f["vocab"] for f in flags})
    ]


# ------------------------------------------------------------------------------------------------------------


def read_curve(path):
    header, *rows = path.read_text().splitlines()
    return dict(zip(header.split(","), np.array([row.split(",") for row in rows], dtype=float).T.tolist()))


def read_result(figure, flags, folder):
    """-> (metrics or None, what is wrong with the file or None); a file is good if the figure can use it."""
    try:
        content = json.loads((folder / figure.file).read_text())
        metrics = content["metrics"] if figure.file == "result.json" else content
        config = content.get("config") or {}
        metrics = metrics | {"seconds": content.get("seconds"), "text": {k: config.get(k) for k in TEXT}}
        if figure.curve:
            metrics = metrics | {"curve": read_curve(folder / "curve.csv")}
        _ = [float(metric(metrics)) for metric in figure.metrics.values()], figure.lines(flags, metrics)
        return metrics, None
    except FileNotFoundError:
        return None, None
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the others are still reported
        return None, f"{type(error).__name__}: {error}"


def describe(cell):
    return " ".join(f"{k.replace('_', '-')} {v}" for k, v in cell)


def table(cells, name, metric):
    """One line per cell: its flags, mean, interval, n, every seed's value."""
    rows = [[]]
    for cell, trials in cells.items():
        rows[0] = [k.replace("_", "-") for k, _ in cell] + [
            "mean",
            "95% interval",
            "n",
            f"{name} of each seed",
        ]
        if not (values := trials.values(metric)):
            continue
        interval = bootstrap_interval(values)
        rows.append(
            [str(v) for _, v in cell]
            + [
                f"{np.mean(values):.4f}",
                "[{:.4f}, {:.4f}]".format(*interval) if interval else "-",
                str(len(values)),
            ]
            + [" ".join(f"{v:.4f}" for v in values)]
        )
    print_columns(rows, "  ")


def print_columns(rows, indent=""):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print(indent + "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())


def load(figure, trials):
    """[(flags, folder)] -> (Cells, what is wrong with the files that cannot be read)."""
    found, broken = [], []
    for flags, folder in trials:
        metrics, fault = read_result(figure, flags, folder)
        found.append((flags, metrics))
        if fault:
            broken.append(f"{folder / figure.file}: {fault}")
    return Cells(found), broken


def texts(cells):
    """How many finished trials read each text."""
    return Counter(tuple(metrics["text"].values()) for _, metrics in cells.trials if metrics)


def show(task, scale, figures):
    """Print and draw the figures of a task: {figure: [(flags, folder), ...]}."""
    missing_matplotlib = False
    for name, trials in figures.items():
        figure = task.figures[name]
        cells, broken = load(figure, trials)
        finished = sum(metrics is not None for _, metrics in cells.trials)
        print(f"\n{name} ({scale} scale): {figure.title}. {finished} of {len(trials)} trials finished")
        for fault in broken:
            print(f"  cannot be read, left out: {fault}")
        if len(counts := texts(cells)) > 1:
            parts = " and ".join(str(n) for n in counts.values())
            print(f"  trials of {len(counts)} different texts, not compared: {parts} of them")
        if len(counts) != 1:
            continue
        if figure.table:
            figure.table(cells, scale)
        for metric_name, metric in {} if figure.table else figure.metrics.items():
            print()
            table(cells.groups(), metric_name, metric)
        print()
        for claim in task.claims:
            about = cells.where(**claim.where)
            if claim.figure != name or scale not in claim.scales or not about.trials:
                continue
            holds, numbers = claim.check(about)
            verdict = {True: "holds", False: "fails", None: "not enough trials"}[holds]
            print(f"  {verdict}: {claim.text}: {numbers}")
        try:
            file_name = f"{task.name}-{name}" if scale == "paper" else f"{task.name}-{name}-{scale}"
            print(f"  drawn: {draw(figure, cells, file_name)}")
        except ImportError:
            missing_matplotlib = True
    if missing_matplotlib:
        print("\nmatplotlib is not installed, so no figure was drawn (pip install matplotlib, then --report)")


# ------------------------------------------------------------------------------------------------------------


def gather(figure, cells):
    """-> {(panel, y label): {line: {x: [value of each seed]}}}"""
    panels = {}
    for flags, metrics in cells.trials:
        for panel, y_label, line, points in figure.lines(flags, metrics) if metrics else ():
            drawn = panels.setdefault((panel, y_label), {}).setdefault(line, {})
            for x, y in points.items():
                drawn.setdefault(x, []).append(y)
    return panels


def draw(figure, cells, name):
    """Means with 95% intervals, one panel per (panel, y label) -> path of the PNG; an SVG lies beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = gather(figure, cells)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    picture, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    first = {}  # axis of each y label: panels with the same one share its range
    for axis, ((panel, y_label), lines) in zip(axes.flat, panels.items()):
        if first.setdefault(y_label, axis) is not axis:
            axis.sharey(first[y_label])
        for line, points in lines.items():
            xs = sorted(points) if all(not isinstance(x, str) for x in points) else list(points)
            means = np.array([np.mean(points[x]) for x in xs])
            intervals = [bootstrap_interval(points[x]) or (m, m) for x, m in zip(xs, means)]
            low, high = np.array(intervals).T
            (drawn,) = axis.plot(
                xs, means, "o-" if len(xs) < 16 else "-", markersize=4, linewidth=1.2, label=line
            )
            axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color(), linewidth=0)
            if len(xs) < 16:
                axis.vlines(xs, low, high, color=drawn.get_color(), linewidth=1.2)
        if figure.x in ("vocab", "heads", "layers", "context"):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(set().union(*lines.values())), minor=False)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.minorticks_off()
        if figure.log_y:
            axis.set_yscale("log")
        axis.set(title=panel, xlabel=figure.x, ylabel=y_label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    picture.suptitle(f"{figure.title} (mean, 95% interval)", fontsize="medium")
    Path("figures").mkdir(exist_ok=True)
    path = Path("figures") / f"{name}.png"
    picture.savefig(path, dpi=150)
    picture.savefig(path.with_suffix(".svg"))
    plt.close(picture)
    return path


# ------------------------------------------------------------------------------------------------------------
# Progress over many trials: python report.py [--out DIR] [--scale SCALE]
# ------------------------------------------------------------------------------------------------------------


def is_locked(folder):
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def progress(folder):
    """-> (state, iterations done, seconds spent) of a trial, as far as its last save tells."""
    try:
        result = json.loads((folder / "result.json").read_text())
        if result["metrics"]:
            return "done", int(result["iterations"]), float(result["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        *_, row = (folder / "curve.csv").read_text().splitlines()
        iterations, seconds = int(row.split(",")[0]), float(row.split(",")[-1])
    except (OSError, ValueError):  # none saved yet
        iterations, seconds = 0, 0.0
    if is_locked(folder):
        return "running", iterations, seconds
    if (folder / "failed.json").exists():
        return "failed", iterations, seconds
    return ("stopped" if folder.exists() else "missing"), iterations, seconds


def progress_row(trials):
    """[(iterations wanted, folder)] -> counts by state, time spent, time left at the measured speed."""
    found = [(wanted, *progress(folder)) for wanted, folder in trials]
    counts = Counter(state for _, state, _, _ in found)
    done, spent = sum(x[2] for x in found), sum(x[3] for x in found)
    usual = spent / done if done else None
    left = 0
    for wanted, state, iterations, seconds in found:
        if state != "done" and left is not None:
            speed = seconds / iterations if iterations else usual
            left = None if speed is None else left + (wanted - iterations) * speed
    times = ["unknown" if t is None else str(datetime.timedelta(seconds=round(t))) for t in (spent, left)]
    return [str(len(trials)), *(str(counts[state]) for state in STATES), *times]


def main(argv=None):
    import trial

    parser = trial.Parser(prog="report.py", description="How far every figure of every script is.")
    parser.add_argument("--out", default="runs", help="folder of all trials (runs)")
    parser.add_argument("--scale", choices=["paper", "quick", "smoke"], default="paper", help="(paper)")
    given = parser.parse_args(argv)
    words = [w for k, v in vars(given).items() for w in trial.as_flag(k, v)]
    rows = [["script", "figure", "trials", *STATES, "spent", "left"]]
    for script in SCRIPTS:
        task = importlib.import_module(script).TASK
        _, args, given = trial.parse(task, words)
        for figure in task.grids[args.scale]:
            grid = trial.grid(task, args, given, figure)
            trials = [(chosen.iterations, trial.trial_folder(task, chosen)) for _, _, chosen in grid]
            rows.append([f"{script}.py", figure, *progress_row(trials)])
    print_columns(rows)
    print("stopped: interrupted, to be continued by the same command; figures may share trials.")
    print("Fig. 5 is computed from the snapshots of Fig. 3's trials: python stability.py --report")


if __name__ == "__main__":
    main()
