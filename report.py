"""Trial folders -> tables with intervals, verdicts on the paper's claims, pictures, RESULTS.md.

    python report.py                                                   # how far every figure is
    python report.py --write RESULTS.md --out results --scale quick    # all tables and verdicts

A `Figure` says what one trial contributes, a `Claim` what the paper says about them. `show` prints a figure's
tables, with the mean over seeds, its 95% bootstrap interval, n and every seed's value, then a verdict per
claim, and draws it where matplotlib is installed.
"""

import datetime
import fcntl
import importlib
import importlib.util
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from common import Refused, bootstrap_interval, bootstrap_resamples

ENOUGH = 3  # trials on each side of a claim
VERDICTS = {True: "holds", False: "fails", None: "not enough trials"}
TASKS = {"reverse": "Reverse", "sort": "Sort", "delayed_add": "DelayedAddition", "predecessor": "Predecessor"}
TASKS |= {"stability": "Stability", "lm_wikitext": "WikiText", "lm_shakespeare": "Shakespeare"}
SCALES = ["paper", "desk", "quick", "smoke"]
TEXT = ("text_sha256", "pieces_sha256")  # in a trial's config: fingerprints of the files that it read
MARKER = "<!-- made by python report.py --write; edit above this line only -->"


def name_of(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


@dataclass
class Figure:
    """Drawn with a panel per model and metric and in it a line per encoding over the flag `x`; or, with
    `curves`, with the lines (panel, line, {x: y}) that curves(flags, metrics) yields for every trial."""

    title: str
    metrics: dict  # name -> function of a trial's metrics that gives one number
    x: str  # a flag; with `curves` what their x is, in words
    curves: Callable | None = None
    y: str = "token accuracy"  # of the curves
    file: str = "result.json"  # or stability.json, whose metrics stand at its top level
    curve: bool = False  # read curve.csv too, as metrics["curve"]: {column: [values]}
    log_y: bool = False
    table: Callable | None = None  # table(cells, scale) -> lines, where that is not a table per metric
    note: Callable | None = None  # note(cells) -> lines to stand below the verdicts
    beyond: bool = False  # the paper; in RESULTS.md below all that is of it

    def lines(self, flags, metrics):
        """What one trial adds to the drawing: (panel, y label, line, {x: y})."""
        if self.curves:
            return [(panel, self.y, line, points) for panel, line, points in self.curves(flags, metrics)]
        panel, line, x = name_of(flags.get("model", "")), flags["pe"], flags[self.x]
        return [(panel, name, line, {x: metric(metrics)}) for name, metric in self.metrics.items()]


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper about a figure: trials with the flags `better` are above those with `worse`.

        Claim("fig2", "the encoding helps {model} at the largest vocabulary", accuracy,
              better=SIN | dict(vocab=max), worse=NONE | dict(vocab=max), per="model")

    It holds where the 95% bootstrap interval of the difference of means lies above zero, and is not shown of
    a grid without trials on both sides. `min` or `max` as a flag's value stands for the smallest or largest
    among the trials that it is about. Of edit distances and perplexities, the trials that should have the
    larger ones are `better`.
    """

    figure: str
    text: str  # {model}, {vocab}, ... stand for the values in `where` and of `per`
    metric: Callable  # a trial's metrics -> a number
    better: dict  # flags that leave one cell
    worse: dict | float  # flags; or a number, and the mean of every cell of `better` is above it
    than: Callable | None = None  # the metric of `worse`, where it is another; of the same trials, in pairs
    where: dict = field(default_factory=dict)  # the trials it is about
    over: dict | None = None  # flags: what is compared are gains over the trials that differ in these
    per: str = ""  # a flag: one claim for each of its values in the grid
    no_gain: bool = False  # claims that `better` is not above; few or noisy trials are enough for that
    scales: tuple = tuple(SCALES)  # an absolute number is claimed at paper scale only


class Cells:
    """The trials of a grid, [(flags, metrics or None)], and what tables and claims ask of them."""

    def __init__(self, trials):
        self.trials = trials

    def where(self, **flags):
        """Those with these flags; a value of min or max stands for the smallest or largest of the grid."""
        for k, v in flags.items():
            flags[k] = v({f[k] for f, _ in self.trials}) if callable(v) and self.trials else v
        return Cells([t for t in self.trials if all(t[0].get(k) == v for k, v in flags.items())])

    def finished(self):
        return [metrics for _, metrics in self.trials if metrics]

    def values(self, metric):
        return [metric(metrics) for metrics in self.finished()]

    def groups(self):
        """{flags without the seed: Cells}, in the order of the grid."""
        found = {}
        for flags, metrics in self.trials:
            cell = tuple((k, v) for k, v in flags.items() if k != "seed")
            found.setdefault(cell, Cells([])).trials.append((flags, metrics))
        return found

    def texts(self):
        """How many finished trials read each text; trials of different ones are not compared."""
        return Counter(tuple(metrics["text"].values()) for metrics in self.finished())


# ------------------------------------------------------------------------------------------------------------
# Claims
# ------------------------------------------------------------------------------------------------------------


def expand(claim, cells):
    """The claims that one row stands for in a grid: one per value of `per`, with the text filled in."""
    sides = [side for side in (claim.better, claim.worse) if isinstance(side, dict)]
    for value in dict.fromkeys(flags.get(claim.per) for flags, _ in cells.where(**claim.where).trials):
        where = claim.where | ({claim.per: value} if claim.per else {})
        if all(cells.where(**where).where(**side).trials for side in sides):
            words = {k: name_of(v) if k == "model" else v for k, v in where.items()}
            yield replace(claim, text=claim.text.format(**words), where=where, per="")


def judge(claim, cells):
    """-> (True, False or None for not enough trials; the numbers) of a claim without `per`."""
    about = cells.where(**claim.where)
    better = about.where(**claim.better)
    if not isinstance(claim.worse, dict):
        return all_above(claim.worse, claim.metric, better.groups())
    worse = about.where(**claim.worse)
    same = better.trials == worse.trials
    if len(better.groups()) != 1 or (same and claim.than is None):
        return None, "the grid has nothing to compare"
    samples = [better.values(claim.metric), worse.values(claim.than or claim.metric)]
    if claim.over is not None:
        bases = [about.where(**side | claim.over) for side in (claim.worse, claim.better)]
        samples += [base.values(claim.metric) for base in bases]
    n, m, *_ = counts = [len(values) for values in samples]
    if min(counts) < ENOUGH:
        return None, f"n = {n} and {m}"
    if same:  # two numbers of the same trials, so that a resample takes both of a trial
        resamples = bootstrap_resamples(np.subtract(*samples))
    else:
        resamples = sum((-1) ** i * bootstrap_resamples(values, i) for i, values in enumerate(samples))
    low, high = np.percentile(resamples, [2.5, 97.5])
    a, b, base_b, base_a = [np.mean(values) for values in samples] + [0.0] * (4 - len(samples))
    a, b = a - base_a, b - base_b
    numbers = f"{a:.4f} (n={n}) against {b:.4f} (n={m}), difference {a - b:+.4f} [{low:+.4f}, {high:+.4f}]"
    return bool(low > 0) != claim.no_gain, numbers


def all_above(threshold, metric, cells):
    values = {cell: trials.values(metric) for cell, trials in cells.items()}
    fewest = min(map(len, values.values()), default=0)
    if fewest < ENOUGH:
        return None, f"n = {fewest} in the smallest of {len(values)} cells"
    cell = min(values, key=lambda cell: np.mean(values[cell]))
    words = " ".join(f"{k.replace('_', '-')} {v}" for k, v in cell)
    return bool(np.mean(values[cell]) > threshold), f"lowest {np.mean(values[cell]):.4f} ({words})"


# What several tasks report
accuracy, distance = itemgetter("token_accuracy"), itemgetter("damerau_levenshtein")
ACCURACY = {"token accuracy": accuracy}
BOTH_METRICS = ACCURACY | {"Damerau-Levenshtein distance": distance}
NONE, SIN, DUP = dict(pe="none"), dict(pe="sin"), dict(pe="dup")
CONSTANT = dict(pe="constant")


def gains(figure, text, better, metric=accuracy, per="", **at):
    """What a clock gains by itself: it is above none, and above as many inputs without a clock."""
    yield Claim(figure, text, metric, better, NONE | at, per=per)
    yield Claim(figure, f"{text} more than constant", metric, better, CONSTANT | at, per=per)
    yield Claim(figure, f"{text} more than dup", metric, better, DUP | at, per=per)


def helps(figure, whom="", metric=accuracy, per="", **at):
    return gains(figure, f"the encoding helps {whom}".strip(), SIN | at, metric, per, **at)


def helps_at_largest(figure):
    """... of every model at its largest vocabulary, and in edit distance too."""
    where, large = "at the largest vocabulary", dict(vocab=max)
    yield from helps(figure, f"{{model}} {where}", per="model", **large)
    lowers = f"the encoding lowers {{model}}'s edit distance {where}"
    yield Claim(figure, lowers, distance, NONE | large, SIN | large, per="model")


def grows(figure):
    """... more, the larger the vocabulary."""
    text, small = "the encoding's help for {model} grows with the vocabulary", SIN | dict(vocab=min)
    yield Claim(figure, text, accuracy, SIN | dict(vocab=max), small, over=NONE, per="model")


NO_GAIN = Claim("fig12", "as many parameters do not help (dup)", accuracy, DUP, NONE, no_gain=True)
DUP_CLAIMS = [NO_GAIN, *helps("fig12")]


# ------------------------------------------------------------------------------------------------------------
# Tables and verdicts
# ------------------------------------------------------------------------------------------------------------


def read(figure, flags, folder):
    """A trial's metrics, with "seconds", "text", "lines" to draw, and "about", all that its file has."""
    content = json.loads((folder / figure.file).read_text())
    metrics = dict(content["metrics"] if figure.file == "result.json" else content)
    text = {name: content.get("config", {}).get(name) for name in TEXT}
    metrics |= {"seconds": content["seconds"], "text": text, "about": content}
    if figure.curve:
        header, *rows = (folder / "curve.csv").read_text().splitlines()
        values = np.array([row.split(",") for row in rows], dtype=float)
        metrics["curve"] = dict(zip(header.split(","), values.T.tolist()))
    for metric in figure.metrics.values():
        float(metric(metrics))  # raises where a value is missing, so that later nothing does
    metrics["lines"] = figure.lines(flags, metrics)
    return metrics


def load(figure, trials):
    """[(flags, folder)] -> (Cells, what is wrong with the files that cannot be read)."""
    found, broken = [], []
    for flags, folder in trials:
        path, metrics = folder / figure.file, None
        try:
            metrics = read(figure, flags, folder) if path.exists() else None
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the others are still reported
            broken.append(f"{path}: {type(error).__name__}: {error}")
        found.append((flags, metrics))
    return Cells(found), broken


def columns(rows, indent=""):
    """Rows of words -> lines in which they stand in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [indent + "  ".join(word.ljust(w) for word, w in zip(row, widths)).rstrip() for row in rows]


def table(cells, name, metric):
    """One line per cell: its flags, mean, interval, n, every seed's value."""
    flags = [k.replace("_", "-") for k in cells.trials[0][0] if k != "seed"]
    rows = [[*flags, "mean", "95% interval", "n", f"{name} of each seed"]]
    for cell, trials in cells.groups().items():
        if values := trials.values(metric):
            interval = bootstrap_interval(values)
            numbers = [f"{np.mean(values):.4f}", "[{:.4f}, {:.4f}]".format(*interval) if interval else "-"]
            seeds = " ".join(f"{v:.4f}" for v in values)
            words = ["-" if v is None else str(v) for _, v in cell]
            rows.append([*words, *numbers, str(len(values)), seeds])
    return columns(rows, "  ")


def report_lines(task, scale, name, cells, broken):
    """What is printed of a figure; RESULTS.md has all but the first line."""
    figure, done = task.figures[name], len(cells.finished())
    lines = [f"{name} ({scale} scale): {figure.title}. {done} of {len(cells.trials)} trials finished"]
    lines += [f"  cannot be read, left out: {fault}" for fault in broken]
    if len(texts := cells.texts()) > 1:
        counts = " and ".join(map(str, texts.values()))
        lines.append(f"  trials of {len(texts)} different texts, not compared: {counts} of them")
    if len(texts) != 1:
        return lines
    if figure.table:
        lines += figure.table(cells, scale)
    else:
        lines += [line for item in figure.metrics.items() for line in ["", *table(cells, *item)]]
    lines.append("")
    for row in task.claims:
        for claim in expand(row, cells) if row.figure == name and scale in row.scales else ():
            holds, numbers = judge(claim, cells)
            lines.append(f"  {VERDICTS[holds]}: {claim.text}: {numbers}")
    return lines + (figure.note(cells) if figure.note else [])


def show(task, scale, figures, out):
    """Print and draw the figures of a task: {figure: [(flags, folder), ...]}."""
    finished = 0
    for name, trials in figures.items():
        cells, broken = load(task.figures[name], trials)
        finished += len(cells.finished())
        print("", *report_lines(task, scale, name, cells, broken), sep="\n")
        if CAN_DRAW and len(cells.texts()) == 1:
            for path, part in pictures(task, scale, name, cells, out):
                print(f"  {draw(task.figures[name], scale, path, part, ['.png', '.svg'])}")
    if not finished and (line := other_scales([task], out, scale)):
        print(f"\n{line}")
    if not CAN_DRAW:
        print("\nmatplotlib is not installed, so no figure was drawn (pip install matplotlib, then --report)")


# ------------------------------------------------------------------------------------------------------------
# Pictures
# ------------------------------------------------------------------------------------------------------------

# Colours which colour-blind readers can tell apart, always the same for an encoding: of Okabe and Ito all but
# the yellow, which is faint on white; of Tol olive and wine; and a grey.
STYLES = {
    "none": dict(color="#000000", marker="o"),
    "sin": dict(color="#0072B2", marker="s"),
    "random": dict(color="#E69F00", marker="^"),
    "learned": dict(color="#009E73", marker="D"),
    "dup": dict(color="#CC79A7", marker="v"),
    "rotary": dict(color="#D55E00", marker="P"),
    "layernorm-learned": dict(color="#56B4E9", marker="X"),
    "ramp": dict(color="#999933", marker="<"),
    "counter": dict(color="#882255", marker="h"),
    "shuffled": dict(color="#888888", marker="*"),
    "constant": dict(color="#D55E00", marker="P"),
}
# What a legend says beside a name
MEANINGS = {
    "none": "none: vanilla",
    "constant": "constant: one fixed vector",
    "dup": "dup: the embedding twice",
    "sin": "sin: the clock",
}
LABELS = {"pe": "encoding", "vocab": "vocabulary size K"}  # of the x axis, where a flag's name does not do
CAN_DRAW = importlib.util.find_spec("matplotlib") is not None  # importing it would slow every trial's start

# An SVG keeps its words as text, and is the same file whenever it is drawn.
LOOKS = {"font.size": 8, "axes.titlesize": 8, "lines.markersize": 4}
LOOKS |= {"svg.fonttype": "none", "svg.hashsalt": "report"}


def pictures(task, scale, name, cells, out):
    """-> [(path, its cells)]: of many panels a picture for each model."""
    stem = "-".join([task.name, name, *([] if scale == "paper" else [scale])])
    parts = {stem: cells}
    if len(gather(cells)) > 8:
        models = dict.fromkeys(flags["model"] for flags, _ in cells.trials)
        parts = {f"{stem}-{model}": cells.where(model=model) for model in models}
    return [(Path(out) / "figures" / f"{stem}.svg", part) for stem, part in parts.items() if part.finished()]


def draw(figure, scale, path, cells, kinds):
    """A panel per (panel, y label), written to `path` -> a line that says where, or why it is not."""
    import matplotlib.figure

    panels = gather(cells)
    across, alike = min(len(panels), 4), bool(figure.curves)
    if not figure.curves and len(models := {panel for panel, _ in panels}) > 1:  # a column each
        across, order, alike = len(models), list(figure.metrics), "row"
        panels = dict(sorted(panels.items(), key=lambda item: order.index(item[0][1])))
    down = math.ceil(len(panels) / across)
    with matplotlib.rc_context(LOOKS):
        size = (max(3 * across, 4.5), 2.5 * down + 1)  # inches; below a width of 4.5 the caption is cut off
        picture = matplotlib.figure.Figure(size, layout="constrained")
        axes = picture.subplots(down, across, squeeze=False, sharey=alike).flat
        for axis, ((panel, y_label), lines) in zip(axes, panels.items()):
            axis.set(title=panel, ylabel=y_label, xlabel=LABELS.get(figure.x, figure.x))
            draw_panel(axis, figure, lines, chance=figure.x == "vocab" and y_label in ACCURACY)
        for axis in axes[len(panels) :]:
            axis.remove()
        same, levels = sizes(cells), "token accuracy" in figure.metrics and figure.x != "vocab"
        words = [figure.title, f"{scale} scale", *(f"{letter} = {value}" for letter, value in same.items())]
        picture.suptitle(", ".join(words))
        add_legend(picture, panels, f"; chance: {1 / same['K']:.2g}" if levels and "K" in same else "")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for kind in kinds:
                picture.savefig(path.with_suffix(kind), dpi=150, metadata={"Date": None})
        except OSError as error:
            return f"not drawn: {error}"
    return f"drawn: {path.with_suffix(kinds[0])}"


def sizes(cells):
    """{letter: value} of K and L, where all trials have the same."""
    found = {}
    for letter, flag in (("K", "vocab"), ("L", "length")):
        configs = [metrics["about"].get("config", {}) for metrics in cells.finished()]
        found[letter] = {config.get(flag) for config in configs} - {None}
    return {letter: values.pop() for letter, values in found.items() if len(values) == 1}


def gather(cells):
    """-> {(panel, y label): {line: {x: [value of each seed]}}}"""
    panels = {}
    for metrics in cells.finished():
        for panel, y_label, line, points in metrics["lines"]:
            drawn = panels.setdefault((panel, y_label), {}).setdefault(line, {})
            for x, y in points.items():
                drawn.setdefault(x, []).append(y)
    return panels


def draw_panel(axis, figure, lines, chance):
    """Lines over x; or points side by side, where x is a word or there is a single one."""
    axis.grid(axis="y", alpha=0.3)
    axis.locator_params(axis="y", nbins=5)  # each grid line is a part of the SVG's size
    xs = list(dict.fromkeys(x for points in lines.values() for x in points))  # words: as in the grid
    side_by_side = isinstance(xs[0], str) or len(xs) == 1
    xs = xs if side_by_side else sorted(xs)
    draw_one = draw_points if side_by_side else draw_line
    for n, (line, points) in enumerate(lines.items()):
        style = STYLES.get(line, dict(color=f"C{n}", marker="o"))
        draw_one(axis, line, {x: points[x] for x in xs if x in points}, style)
    if side_by_side:
        axis.margins(x=0.3 if len(xs) < 5 else 0.08)
        level = f" (chance: {1 / xs[0]:.2g})" if chance else ""
        axis.set_xlabel(axis.get_xlabel() + ("" if isinstance(xs[0], str) else f" = {xs[0]}{level}"))
    elif chance:
        axis.plot(xs, [1 / x for x in xs], ":", color="gray", label="chance, 1/K")
    if figure.log_y:
        axis.set_yscale("log")
    if not figure.curves and not side_by_side:  # flags double from trial to trial
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, map(str, xs))


def draw_line(axis, line, points, style):
    means, (below, above) = means_and_errors(points)
    axis.plot(list(points), means, markevery=max(1, len(points) // 3), label=line, **style)
    axis.fill_between(list(points), means - below, means + above, color=style["color"], alpha=0.15)


def draw_points(axis, line, points, style):
    """With every seed's value as a dash; the name on the x axis is the line's where x is no word."""
    names = [x if isinstance(x, str) else line for x in points]
    for name, values in zip(names, points.values()):
        axis.plot([name] * len(values), values, "_", color=style["color"], markersize=10, alpha=0.6)
    axis.errorbar(names, *means_and_errors(points), linestyle="none", **style)


def means_and_errors(points):
    """{x: values} -> the means, and how far their intervals reach below and above them."""
    means = [np.mean(values) for values in points.values()]
    ends = [bootstrap_interval(v) or (mean, mean) for v, mean in zip(points.values(), means)]
    return means, np.abs(np.transpose(ends) - means)


def add_legend(picture, panels, chance):
    """One for all panels, below them; its title is the caption. Points have their names on the x axis."""
    handles = {}
    for axis in picture.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    counts = {len(v) for lines in panels.values() for points in lines.values() for v in points.values()}
    n = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    caption = f"mean and 95% bootstrap interval{'' if handles else ', dashes: seeds'}; n = {n}{chance}"
    across = int(picture.get_figwidth() / 1.5)  # of 4.5 inches and more
    how = dict(loc="outside lower center", ncols=across, frameon=False, title=caption)
    picture.legend(handles.values(), [MEANINGS.get(name, name) for name in handles], **how)


# ------------------------------------------------------------------------------------------------------------
# Many trials: how far they are, and RESULTS.md
# ------------------------------------------------------------------------------------------------------------

STATES = ["done", "running", "stopped", "missing"]
BEYOND = "Beyond the paper"


def progress(folder):
    """-> (state, iterations done, seconds spent) of a trial, as far as its last save tells."""
    try:
        result = json.loads((folder / "result.json").read_text())
        return "done", result["iterations"], result["seconds"]
    except (OSError, ValueError, LookupError, TypeError):  # not finished, or broken
        state = "stopped" if folder.exists() else "missing"
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        state = "running"
    except OSError:  # there is no lock
        pass
    try:
        iteration, *_, seconds = (folder / "curve.csv").read_text().splitlines()[-1].split(",")
        return state, int(iteration), float(seconds)
    except (OSError, ValueError, LookupError):  # none saved yet
        return state, 0, 0.0


def duration(seconds):
    return str(datetime.timedelta(seconds=round(seconds)))


def show_progress(out, scale):
    """A line per figure: how many trials are in each state, time spent, time left at the speed so far."""
    rows = [["script", "figure", "trials", *STATES, "spent", "left"]]
    tasks, finished = [task for task in task_classes() if not task.trials_of], 0
    for task in tasks:
        for name, trials in campaign(task, out, scale).items():
            states, iterations, seconds = zip(*(progress(one.task.folder) for one in trials))
            finished += states.count("done")
            counts = [len(trials), *(states.count(state) for state in STATES)]
            done, wanted = sum(iterations), sum(one.task.args.iterations for one in trials)
            spent = sum(seconds)
            left = duration(spent * (wanted - done) / done) if done else "unknown"
            rows.append([f"{task.name}.py", name, *map(str, counts), duration(spent), left])
    print(*columns(rows), sep="\n")
    print("stopped: interrupted, to be continued by the same command; figures may share trials.")
    print("Fig. 5 is computed from the snapshots of Fig. 3's trials: python stability.py --report")
    if not finished and (line := other_scales(tasks, out, scale)):
        print(line)


def task_classes():
    return [getattr(importlib.import_module(script), name) for script, name in TASKS.items()]


def campaign(task, out, scale):
    """-> {figure: [Listed]}: the flags and the task of all its trials at a scale."""
    from suite import flags  # which imports this module

    if scale not in task.scales:
        return {}
    args, given = flags.parse(task, ["--out", str(out), "--scale", scale])
    return {figure: flags.grid(task, args, given, figure) for figure in task.grids[scale]}


def other_scales(tasks, out, scale):
    """A line about the finished trials of other scales where this one has none, else an empty one."""
    files = {one: set() for one in SCALES}  # figures share trials
    for one, task in itertools.product(SCALES, tasks):
        for name, trials in campaign(task, out, one).items():
            paths = {trial.task.folder / task.figures[name].file for trial in trials}
            files[one] |= {path for path in paths if path.exists()}
    if files[scale] or not any(files.values()):
        return ""
    found = " and ".join(f"{len(paths)} of {one} scale are" for one, paths in files.items() if paths)
    flags = " or ".join(f"--scale {one}" for one, paths in files.items() if paths)
    return f"no trial of {scale} scale is finished in {out}; {found}: {flags}"


def origin(cells):
    """How many trials there are, how long they took, and what they ran on."""
    about = [metrics["about"] for metrics in cells.finished()]
    distinct = lambda values: " and ".join(sorted(set(values)))
    device = distinct(str(one.get("device")) for one in about)
    version = distinct(str(one.get("torch")) for one in about)
    commit = distinct(str(one.get("commit"))[:7] for one in about)
    seconds = np.median([one["seconds"] for one in about])
    n = f"{len(about)} of {len(cells.trials)} trials, median {seconds:.3g} s each"
    return f"{n}; {device}; torch {version}; commit {commit}."


def section(task, scale, name, trials, out, folder):
    """A figure's part of a RESULTS.md in `folder`: its lines, none where no trial is finished."""
    figure = task.figures[name]
    cells, broken = load(figure, [(one.flags, one.task.folder) for one in trials])
    if not cells.finished():
        return []
    lines = [f"### {name}: {figure.title}", "", f"`python {task.name}.py --scale {scale} --all {name}`", ""]
    for path, part in pictures(task, scale, name, cells, out):
        if CAN_DRAW and len(cells.texts()) == 1:
            draw(figure, scale, path, part, [".svg"])
        if path.exists():
            lines += [f"![{figure.title}]({os.path.relpath(path, folder)})", ""]
    report = report_lines(task, scale, name, cells, broken)[1:]
    body = "\n".join(line.removeprefix("  ") for line in report).strip("\n")
    return [*lines, "```text", body, "```", "", origin(cells), ""]


def write(path, out, scale):
    """Make RESULTS.md anew below its marker."""
    text = path.read_text() if path.exists() else f"# Results\n\n{MARKER}"
    if MARKER not in text:
        raise Refused(f"{path} has no line {MARKER}: put it below what is to be kept")
    lines, tasks = [text[: text.index(MARKER)] + MARKER, ""], task_classes()
    parts = {f"{task.name}.py": [] for task in tasks} | {BEYOND: []}
    for task in tasks:
        for name, trials in campaign(task, out, scale).items():
            heading = BEYOND if task.figures[name].beyond else f"{task.name}.py"
            parts[heading] += section(task, scale, name, trials, out, path.parent)
    for heading, found in parts.items():
        lines += [f"## {heading}", "", *found] if found else []
    for file in sorted(out.glob("bench/*.json")):
        table = importlib.import_module("bench").table(json.loads(file.read_text()))
        lines += [f"## bench.py, {file.stem}", "", "```text", *table, "```", ""]
    path.write_text("\n".join(lines))


def main(argv=None):
    from suite import cli, flags

    parser = flags.Parser("report.py", description="How far every figure of every script is.")
    parser.add_argument("--out", default="runs", type=Path, help="folder of all trials (runs)")
    parser.add_argument("--scale", choices=SCALES, default="paper", help="(paper)")
    parser.add_argument("--write", metavar="FILE", type=Path, help="make FILE, such as RESULTS.md, instead")
    args = parser.parse_args(argv)
    try:
        if args.write:
            write(args.write, args.out, args.scale)
        else:
            show_progress(args.out, args.scale)
    except BrokenPipeError:  # of `| head`
        pass
    except (OSError, Refused) as error:
        parser.error(error)
    finally:
        cli.leave_quietly()


if __name__ == "__main__":
    main()
