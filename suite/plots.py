"""Plots of a figure's trials, if matplotlib is installed.

Points are {(metric, panel's title, encoding, x): [the value of each seed]}; x is a number or
the label of a cell.
"""

import importlib.util
import itertools
import math
from collections import defaultdict

import numpy as np

from suite.figures import name_of
from suite.statistics import estimate

# Each encoding has the same colour and marker in all plots, and a user's encodings have the
# last ones. Colour-blind readers can tell the colours apart
ENCODINGS = """
    none sin constant dup random learned ramp counter shuffled rotary layernorm-learned
"""
COLORS = """
    #000000 #0072B2 #D55E00 #CC79A7 #E69F00 #009E73 #999933 #882255 #AA4499 #332288 #56B4E9
    #117733 #661100 #44AA99 #DDCC77
"""
MARKERS = "osPv^D<h*dXp>H8"
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
FLAGS = {  # in the label of a cell
    "vocab": "K = {}",
    "meanings": "codes, M = {}",
    "iterations": "{:,}\niterations",
    "amplitude": "initial\nnorm {:g}",
    "encode": "{} steps\nonly",
    "bands": "bands\n{}",
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
def x_of(figure, flags, config):
    """A number, or the label of a cell: its flags except the encoding."""
    if isinstance(figure.x, str):
        return "" if figure.x == "pe" else flags.get(figure.x, config[figure.x])
    shown = [flag for flag in figure.x[1:] if flags.get(flag) is not None]
    label = [FLAGS.get(flag, f"{flag} = {{}}").format(flags[flag]) for flag in shown]
    return "\n".join(label) or "default"


def points_of(figure, result):
    """Yields (metric, title of a panel, encoding, x, y)."""
    for title, encoding, points in result.lines:
        for x, y in points.items():
            yield figure.y, title, encoding, x, y
    if figure.curves:
        return
    x = x_of(figure, result.flags, result.config)
    point = name_of(result.config.get("model", "")), result.flags["pe"], x
    for metric, y in result.values.items():
        yield metric, *point, y
        if figure.x == "iterations" and "accuracy" in metric:
            yield f"error (1 - {metric})", *point, 1 - y


# -- Drawing
def plot(figure, runs, path):
    """Write an SVG: a row per metric and a column per model, or the panels of curves."""
    import matplotlib.figure

    points, chances = defaultdict(list), defaultdict(dict)
    for result in runs:
        for metric, title, encoding, x, y in points_of(figure, result):
            points[metric, title, encoding, x].append(y)
            if metric.endswith("accuracy"):
                answers = result.config.get("meanings", result.config["vocab"])
                chances[metric, title][x] = 1 / answers
    metrics, titles, encodings, _ = map(dict.fromkeys, zip(*points))
    names = dict.fromkeys([*ENCODINGS.split(), *encodings])
    styles = dict(zip(names, itertools.cycle(zip(COLORS.split(), MARKERS))))
    across = min(4, len(titles))
    down = math.ceil(len(metrics) * len(titles) / across)
    axes = {}  # the last of each metric, with which others share the y axis
    with matplotlib.rc_context(LOOKS):
        page = matplotlib.figure.Figure(
            (max(7, 2.8 * across), 2.4 * down + 1), layout="constrained"
        )
        for number, (metric, title) in enumerate(itertools.product(metrics, titles), 1):
            panel = {key[2:]: ys for key, ys in points.items() if key[:2] == (metric, title)}
            if panel:
                axis = axes[metric] = page.add_subplot(
                    down, across, number, sharey=axes.get(metric), title=title
                )
                draw_panel(axis, figure, panel, styles, chances[metric, title])
                axis.set_ylabel(NAMES.get(metric, metric).format(runs[0].config.get("length")))
                if metric.startswith("error") or "perplexity" in metric:
                    axis.set_yscale("log")
                elif "accuracy" in metric:
                    axis.set_ylim(-0.04, 1.04)
                    axis.axhline(0.95, label="95% accuracy", linestyle="--", **THIN)
        page.suptitle(figure.title)
        add_legend(page, points)
        path.parent.mkdir(parents=True, exist_ok=True)
        page.savefig(path, metadata={"Date": None})


def draw_panel(axis, figure, panel, styles, chance):
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
    width = cells * 0.8 / len(encodings)
    every = len(xs) // 20 + 1  # with a marker and an interval
    for number, encoding in enumerate(encodings):
        shift = width * (number + 0.5) - 0.4 * cells
        samples = {
            place + shift: panel[encoding, x]
            for x, place in zip(xs, places)
            if (encoding, x) in panel
        }
        means = [*map(np.mean, samples.values())]
        margins = [margin(ys) for ys in samples.values()]
        color, marker = styles[encoding]
        options = dict(color=color, label=NAMES.get(encoding, encoding))
        options |= dict(
            fmt=marker if cells else f"{marker}-", markevery=every, errorevery=every
        )
        axis.errorbar(samples.keys(), means, margins, **options)
        for x, ys in samples.items() if cells else ():
            axis.scatter(x + width * np.linspace(-0.3, 0.3, len(ys)), ys, 4, color, alpha=0.5)
    if chance:
        options = dict(label="chance", fmt="none" if cells else ":", **THIN)
        axis.errorbar(places, [chance[x] for x in xs], xerr=cells / 2, **options)


def margin(ys):
    """Half the width of the interval of the mean; 0 where seeds are too few for one."""
    found = estimate([ys])
    return found.margin() if found else 0


def add_legend(page, points):
    handles = {}
    for axis in page.axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found))
    counts = sorted({*map(len, points.values())})
    page.legend(
        handles.values(),
        handles,
        title=f"mean over seeds, 95% CI (Student's t), n = {', '.join(map(str, counts))}",
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
