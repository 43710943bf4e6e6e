"""Plots of a figure's trials, if matplotlib is installed.

A panel is {(encoding, x): [one value per seed]}; x is a number or a cell's label.
"""

import importlib.util
import io
import itertools
import math
import textwrap
from collections import defaultdict

import numpy as np

from common import ENCODINGS
from suite import files
from suite.figures import (
    as_metric,
    cell_labels,
    chance,
    evaluate_metric,
    matching,
    model_label,
)
from suite.stats import ALPHA, claim_p_values, estimate, holm
from suite.tables import cells_of, default_contrasts, estimate_contrast, key_flags

# Encodings have the same colour and marker in all plots; those that a script adds come last.
# The palette is safe for colour-blind readers
COLORS = """
    #000000 #0072B2 #E69F00 #009E73 #CC79A7 #D55E00 #999933 #882255 #AA4499 #332288 #56B4E9
    #117733 #661100 #44AA99 #DDCC77
"""
MARKERS = "os^DvP<h*dXp>H8"
LABELS = {  # in legends and on axes
    "none": "no PE",
    "sin": "sinusoidal PE",
    "constant": "constant control",
    "dup": "duplicated embedding",
    "vocab": "vocabulary size K",
    "iterations": "training budget",
    "pe": "encoding",
    "edit distance": "edit distance\n(out of {}; lower is better)",
}
THIN_LINE = dict(color="#666666", linewidth=0.7)
RC_PARAMS = {
    "font.size": 8,
    "lines.markersize": 4,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.formatter.min_exponent": 4,  # 0.1 instead of a power of ten
    "svg.fonttype": "none",  # keep text searchable
    "svg.hashsalt": "report",  # reproducible output
}
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None  # avoids a slow import


# -- Points
def x_value(figure, result):
    """Return a trial's x: a number, or the label of its cell."""
    if figure.x == "pe":
        return ""
    if isinstance(figure.x, str):
        return result.config[figure.x]
    cell = {flag: result.flags.get(flag) for flag in figure.x[1:]}
    return "\n".join(textwrap.fill(name, 14) for name in cell_labels(cell)) or "default"


def lines_of(figure, result):
    """Yield (metric, panel title, encoding, {x: y})."""
    model, encoding = model_label(result.config.get("model", "")), result.flags["pe"]
    if figure.curves:
        for panel, points in result.curves:
            yield figure.y, ", ".join(filter(None, [model, panel])), encoding, points
        return
    x = x_value(figure, result)
    for metric, y in result.values.items():
        if metric in ("log-odds", "log error"):  # only in tables
            continue
        yield metric, model, encoding, {x: y}
        if figure.x == "iterations" and "accuracy" in metric:
            yield f"error (1 - {metric})", model, encoding, {x: 1 - y}


# -- Drawing
def plot(figure, results, path):
    """Write an SVG of a figure."""
    import matplotlib.figure

    with matplotlib.rc_context(RC_PARAMS):
        fig = matplotlib.figure.Figure(layout="constrained")
        if figure.x == "gain":
            draw_gains(fig, figure, results)
            legend_title = "95% CI (Welch)"
        else:
            draw_panels(fig, figure, results)
            legend_title = "mean over n seeds, 95% CI (Student's t)"
        if not fig.axes:
            return
        fig.suptitle(figure.title)
        add_legend(fig, legend_title)
        svg = io.BytesIO()
        fig.savefig(svg, format="svg", metadata={"Date": None})
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, svg.getvalue(), durable=False)


def draw_gains(fig, figure, results):
    """Draw PE's differences from no PE and the control with 95% CIs, one row per cell.

    Rows are pale unless both are significantly positive or one is significantly negative
    (Holm's correction over all rows).
    """
    values = evaluate_metric(results, as_metric(next(iter(figure.metrics))))
    contrasts, rows = default_contrasts(values), {}
    for cell in cells_of(values, key_flags(figure, values)):
        selected = matching(values, cell)
        estimates = [estimate_contrast(contrast, selected) for contrast in contrasts]
        if estimates and None not in estimates:
            rows[", ".join(cell_labels(cell))] = estimates
    fig.set_size_inches(7, 0.22 * len(rows) + 1.2)
    ax = fig.add_subplot(xlabel="difference in token accuracy")
    ax.axvline(0, **THIN_LINE)
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    p_values = holm([min(claim_p_values(estimates)) for estimates in rows.values()])
    ordered = sorted(zip(p_values, itertools.count(), rows.values()), reverse=True)
    for p, y, estimates in ordered:  # smallest p last: the legend is not pale
        styles = zip(estimates, contrasts, MARKERS, COLORS.split(), (y - 0.15, y + 0.15))
        for difference, contrast, marker, color, y_marker in styles:
            options = dict(color=color, label=contrast.label, alpha=1 if p <= ALPHA else 0.3)
            ax.errorbar(
                difference.value, y_marker, xerr=difference.margin, fmt=marker, **options
            )


def draw_panels(fig, figure, results):
    """Draw a panel per metric and model, or per set of curves; four per row."""
    panels = defaultdict(lambda: defaultdict(list))  # {(metric, title): panel}
    chances = defaultdict(dict)
    for result in results:
        for metric, title, encoding, line in lines_of(figure, result):
            for x, y in line.items():
                panels[metric, title][encoding, x].append(y)
                if metric.endswith("accuracy"):
                    chances[metric, title][x] = chance(result)
    if not panels:
        return
    metrics, titles = map(dict.fromkeys, zip(*panels))
    encodings = dict.fromkeys([*ENCODINGS, *(result.flags["pe"] for result in results)])
    styles = dict(zip(encodings, itertools.cycle(zip(COLORS.split(), MARKERS))))
    n_columns = min(4, len(titles))
    n_rows = math.ceil(len(metrics) * len(titles) / n_columns)
    fig.set_size_inches(max(7, 2.8 * n_columns), 2.4 * n_rows + 1)
    axes = {}  # {metric: its latest Axes}, to share the y range
    for position, key in enumerate(itertools.product(metrics, titles), 1):
        if key in panels:
            metric, title = key
            n = " or ".join(map(str, sorted({len(ys) for ys in panels[key].values()})))
            ax = axes[metric] = fig.add_subplot(
                n_rows, n_columns, position, sharey=axes.get(metric)
            )
            ax.set_title(f"{title} (n = {n})")
            draw_panel(ax, figure, panels[key], styles, chances[key])
            format_y_axis(ax, metric, results[0].config.get("length"))


def format_y_axis(ax, metric, length):
    ax.set_ylabel(LABELS.get(metric, metric).format(length))
    if metric.startswith("error") or "perplexity" in metric:
        ax.set_yscale("log")
    elif "accuracy" in metric:
        ax.set_ylim(-0.04, 1.04)
        ax.axhline(0.95, label="95% accuracy", linestyle="--", **THIN_LINE)


def draw_panel(ax, figure, panel, styles, chance_at):
    """Draw lines over numeric x, or points side by side over categories or a single x."""
    encodings, xs = (list(dict.fromkeys(values)) for values in zip(*panel))
    if isinstance(figure.x, str):
        ax.set_xlabel(LABELS.get(figure.x, figure.x))
        xs.sort()
    categorical = len(xs) == 1 or isinstance(xs[0], str)
    positions = range(len(xs)) if categorical else xs
    if figure.curves:
        ax.locator_params(axis="x", nbins=4)
    else:
        if not categorical:
            ax.set_xscale("log", base=2)
        ticks = [f"{x / xs[0]:g}x" for x in xs] if figure.x == "iterations" else xs
        ax.set_xticks(positions, ticks)
    width = 0.8 / len(encodings) if categorical else 0
    for number, encoding in enumerate(encodings, 1):
        shift = width * (number - 0.5 - len(encodings) / 2)
        samples = {
            position + shift: panel[encoding, x]
            for x, position in zip(xs, positions)
            if (encoding, x) in panel
        }
        draw_samples(ax, samples, width, *styles[encoding], LABELS.get(encoding, encoding))
    if chance_at:
        ax.errorbar(
            positions,
            [chance_at[x] for x in xs],
            xerr=categorical / 2,
            fmt="none" if categorical else ":",
            label="chance",
            **THIN_LINE,
        )


def draw_samples(ax, samples, width, color, marker, label):
    """Draw means, with 95% CIs if there are enough seeds.

    If `width` is 0, a line joins them. Otherwise, each seed's value is also drawn.
    """
    stride = len(samples) // 20 + 1  # of markers and error bars
    estimates = [estimate([ys]) for ys in samples.values()]
    margins = [x.margin if x else 0 for x in estimates]
    means = [np.mean(ys) for ys in samples.values()]
    ax.errorbar(
        samples.keys(),
        means,
        margins,
        fmt=marker if width else f"{marker}-",
        color=color,
        label=label,
        markevery=stride,
        errorevery=stride,
    )
    if width:
        for x, ys in samples.items():
            ax.scatter(x + width * np.linspace(-0.3, 0.3, len(ys)), ys, 4, color, alpha=0.5)


def add_legend(fig, title):
    handles = {}
    for ax in fig.axes:
        ax_handles, labels = ax.get_legend_handles_labels()
        handles.update(zip(labels, ax_handles))
    fig.legend(
        handles.values(),
        handles,
        title=title,
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
