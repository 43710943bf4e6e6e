"""Plots of a figure's trials, if matplotlib is installed.

Points are {(metric, panel's title, encoding, x): [the value of each seed]}; x is a number or
the label of a cell.
"""

import importlib.util
import itertools
import math
import textwrap
from collections import defaultdict

import numpy as np

from common import ENCODINGS
from suite.figures import chance, name_cell, name_of
from suite.statistics import estimate

# Each encoding has the same colour and marker in all plots, and those of a script the last
# ones. Colour-blind readers can tell the colours apart
COLORS = """
    #000000 #0072B2 #E69F00 #009E73 #CC79A7 #D55E00 #999933 #882255 #AA4499 #332288 #56B4E9
    #117733 #661100 #44AA99 #DDCC77
"""
MARKERS = "os^DvP<h*dXp>H8"
NAMES = {  # in legends and on axes
    "none": "no PE",
    "sin": "sinusoidal PE",
    "constant": "constant control",
    "dup": "duplicated embedding",
    "vocab": "vocabulary size K",
    "iterations": "training budget",
    "pe": "encoding",
    "edit distance": "edit distance\n(of {}; lower is better)",
}
THIN = dict(color="#666666", linewidth=0.7)
LOOKS = {
    "font.size": 8,
    "lines.markersize": 4,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.formatter.min_exponent": 4,  # 0.1 rather than a power of ten
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same file whenever it is drawn
}
CAN_DRAW = importlib.util.find_spec("matplotlib") is not None  # importing it is slow


# -- Points
def x_of(figure, result):
    """A number, or the label of a cell: its flags except the encoding."""
    if figure.x == "pe":
        return ""
    if isinstance(figure.x, str):
        return result.config[figure.x]
    cell = {flag: result.flags.get(flag) for flag in figure.x[1:]}
    return "\n".join(textwrap.fill(name, 14) for name in name_cell(cell)) or "default"


def lines_of(figure, result):
    """Yields (metric, title of a panel, encoding, {x: y})."""
    if figure.curves:
        for line in result.lines:
            yield figure.y, *line
        return
    title, encoding = name_of(result.config.get("model", "")), result.flags["pe"]
    x = x_of(figure, result)
    for metric, y in result.values.items():
        yield metric, title, encoding, {x: y}
        if figure.x == "iterations" and "accuracy" in metric:
            yield f"error (1 - {metric})", title, encoding, {x: 1 - y}


# -- Drawing
def plot(figure, results, path):
    """Write an SVG: a row per metric and a column per model, or the panels of curves."""
    import matplotlib.figure

    points, chances = defaultdict(list), defaultdict(dict)
    for result in results:
        for metric, title, encoding, line in lines_of(figure, result):
            for x, y in line.items():
                points[metric, title, encoding, x].append(y)
                if metric.endswith("accuracy"):
                    chances[metric, title][x] = chance(result)
    if not points:
        return
    metrics, titles, encodings, _ = map(dict.fromkeys, zip(*points))
    names = dict.fromkeys([*ENCODINGS, *encodings])
    styles = dict(zip(names, itertools.cycle(zip(COLORS.split(), MARKERS))))
    across = min(4, len(titles))
    down = math.ceil(len(metrics) * len(titles) / across)
    axes = {}  # the last of each metric, with which others share the y axis
    with matplotlib.rc_context(LOOKS):
        size = max(7, 2.8 * across), 2.4 * down + 1
        page = matplotlib.figure.Figure(size, layout="constrained")
        for place, (metric, title) in enumerate(itertools.product(metrics, titles), 1):
            panel = {key[2:]: ys for key, ys in points.items() if key[:2] == (metric, title)}
            if panel:
                shared = dict(sharey=axes.get(metric), title=title)
                axis = axes[metric] = page.add_subplot(down, across, place, **shared)
                draw_panel(axis, figure, panel, styles, chances[metric, title])
                label_y(axis, metric, results[0].config.get("length"))
        page.suptitle(figure.title)
        add_legend(page, {len(ys) for ys in points.values()})
        path.parent.mkdir(parents=True, exist_ok=True)
        page.savefig(path, metadata={"Date": None})


def label_y(axis, metric, length):
    axis.set_ylabel(NAMES.get(metric, metric).format(length))
    if metric.startswith("error") or "perplexity" in metric:
        axis.set_yscale("log")
    elif "accuracy" in metric:
        axis.set_ylim(-0.04, 1.04)
        axis.axhline(0.95, label="95% accuracy", linestyle="--", **THIN)


def draw_panel(axis, figure, panel, styles, guessing):
    """Lines over numbers, or points side by side over cells and over a single x."""
    encodings, xs = (list(dict.fromkeys(names)) for names in zip(*panel))
    if isinstance(figure.x, str):
        axis.set_xlabel(NAMES.get(figure.x, figure.x))
        xs.sort()
    cells = len(xs) == 1 or isinstance(xs[0], str)
    places = range(len(xs)) if cells else xs
    if not figure.curves:
        if not cells:
            axis.set_xscale("log", base=2)
        ticks = [f"{x / xs[0]:g}x" for x in xs] if figure.x == "iterations" else xs
        axis.set_xticks(places, ticks)
    width = 0.8 / len(encodings) if cells else 0
    for number, encoding in enumerate(encodings, 1):
        shift = width * (number - 0.5 - len(encodings) / 2)
        samples = {}
        for x, place in zip(xs, places):
            if (encoding, x) in panel:
                samples[place + shift] = panel[encoding, x]
        draw_samples(axis, samples, width, *styles[encoding], NAMES.get(encoding, encoding))
    if guessing:
        options = dict(label="chance", fmt="none" if cells else ":", **THIN)
        axis.errorbar(places, [guessing[x] for x in xs], xerr=cells / 2, **options)


def draw_samples(axis, samples, width, color, marker, label):
    """Means with 95% CI, joined by lines; or in cells of this width, with every value."""
    every = len(samples) // 20 + 1  # with a marker and an interval
    options = dict(color=color, label=label, markevery=every, errorevery=every)
    estimates = [estimate([ys]) for ys in samples.values()]
    margins = [found.margin if found else 0 for found in estimates]
    means = [np.mean(ys) for ys in samples.values()]
    style = marker if width else f"{marker}-"
    axis.errorbar(samples.keys(), means, margins, fmt=style, **options)
    if width:
        for x, ys in samples.items():
            axis.scatter(x + width * np.linspace(-0.3, 0.3, len(ys)), ys, 4, color, alpha=0.5)


def add_legend(page, counts):
    handles = {}
    for axis in page.axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found))
    n = ", ".join(map(str, sorted(counts)))
    page.legend(
        handles.values(),
        handles,
        title=f"mean over seeds, 95% CI (Student's t), n = {n}",
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
