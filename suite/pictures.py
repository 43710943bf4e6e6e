"""Pictures of figures, where matplotlib is installed.

A panel has lines, {encoding: {x: [the value of each seed]}}.
"""

import importlib.util
import itertools
import math
from collections import defaultdict

import numpy as np

from suite.figures import name_of
from suite.statistics import bootstrap_interval

# Colours that colour-blind readers can tell apart, always the same for an encoding
STYLES = {
    "none": ("#000000", "o"),
    "sin": ("#0072B2", "s"),
    "random": ("#E69F00", "^"),
    "learned": ("#009E73", "D"),
    "dup": ("#CC79A7", "v"),
    "constant": ("#D55E00", "P"),
    "ramp": ("#999933", "<"),
    "counter": ("#882255", "h"),
    "shuffled": ("#888888", "*"),
    "rotary": ("#D55E00", "P"),
    "layernorm-learned": ("#56B4E9", "X"),
}
OTHERS = [  # of encodings that a user adds
    ("#332288", "p"),
    ("#AA4499", "d"),
    ("#117733", ">"),
    ("#661100", "H"),
]
NAMES = {
    "none": "no PE",
    "sin": "sinusoidal PE",
    "constant": "constant control",
    "dup": "duplicated embedding",
}
LABELS = {
    "vocab": "vocabulary size K",
    "pe": "encoding",
}
LIMIT = 0.95  # the paper's, drawn as a thin line
THIN = dict(color="#666666", linewidth=0.7)
LOOKS = {
    "font.size": 8,
    "axes.titlesize": 8,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # words stay text
    "svg.hashsalt": "report",  # the same file whenever it is drawn
}
CAN_DRAW = importlib.util.find_spec("matplotlib") is not None  # importing it is slow


def x_of(figure, flags, config):
    """A trial's place on the x axis: a number, or words where several flags make it up."""
    if isinstance(figure.x, str):
        return flags.get(figure.x, config[figure.x])
    first, *others = figure.x
    words = [flags[first]]
    for flag in others:
        if flags.get(flag) is not None:
            words += [flag.replace("_", "-"), str(flags[flag])]
    return "\n".join(words)


def points_of(figure, runs):
    """Yields (result, title of a panel, its metric, line, {x: y})."""
    if figure.curves:
        for result in runs:
            for title, line, points in result.lines:
                yield result, title, figure.y, line, points
        return
    for name in figure.metrics:
        for result in runs:
            flags = result.flags
            if result.values[name] is not None:
                points = {x_of(figure, flags, result.config): result.values[name]}
                yield result, name_of(flags.get("model", "")), name, flags["pe"], points


def panels_of(figure, runs):
    """-> {(title, metric): {line: {x: [the value of each seed]}}}, {(title, metric): {K}}"""
    panels, vocabs = {}, defaultdict(set)
    for result, title, metric, line, points in points_of(figure, runs):
        vocabs[title, metric].add(result.config.get("vocab"))
        drawn = panels.setdefault((title, metric), {}).setdefault(line, {})
        for x, y in points.items():
            drawn.setdefault(x, []).append(y)
    return panels, vocabs


def label_of(metric, runs):
    """What stands beside an axis."""
    if metric == "edit distance":
        lengths = sorted({result.config["length"] for result in runs})
        return f"edit distance\n(of {' or '.join(map(str, lengths))}; lower is better)"
    return LABELS.get(metric, metric)


def styles_of(panels):
    """{line: (colour, marker)}, the same in every panel."""
    lines = dict.fromkeys(line for lines in panels.values() for line in lines)
    unknown = [line for line in lines if line not in STYLES]
    return STYLES | dict(zip(unknown, itertools.cycle(OTHERS)))


def draw(figure, runs, path):
    """Draw an SVG."""
    import matplotlib.figure

    panels, vocabs = panels_of(figure, runs)
    # A column for each model, a row for each metric; or else curves
    across = len({title for title, _ in panels})
    if figure.curves:
        across = min(len(panels), 4)
    down = math.ceil(len(panels) / across)
    with matplotlib.rc_context(LOOKS):
        wide = max(5.5, across * max(2.6, *map(width_of_words, panels.values())))  # inches
        picture = matplotlib.figure.Figure((wide, 2.4 * down + 1), layout="constrained")
        axes = picture.subplots(down, across, squeeze=False).flat
        styles = styles_of(panels)
        for axis, ((title, metric), lines) in zip(axes, panels.items()):
            axis.set(title=title, ylabel=label_of(metric, runs))
            draw_panel(axis, figure, metric, lines, styles, vocabs[title, metric])
        for axis in axes[len(panels) :]:
            axis.remove()
        share_axes(picture.axes)
        picture.suptitle(figure.title)
        legend(picture, panels)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, metadata={"Date": None})


def width_of_words(lines):
    """The inches that an axis needs for its words side by side."""
    words = [x for x in xs_of(lines) if isinstance(x, str)]
    longest = max(map(len, "\n".join(words).split("\n")))
    return len(words) * max(0.75, 0.08 * longest)


def xs_of(lines):
    return list(dict.fromkeys(x for samples in lines.values() for x in samples))


def draw_panel(axis, figure, metric, lines, styles, vocabs):
    """Lines over x, or points side by side where x is a word or there is a single one."""
    xs = xs_of(lines)
    side_by_side = isinstance(xs[0], str) or len(xs) == 1
    over_vocabularies = figure.x == "vocab" and not side_by_side
    if isinstance(figure.x, str):
        label = LABELS.get(figure.x, figure.x)
        axis.set_xlabel(label if len(xs) > 1 else f"{label} = {xs[0]}")
    axis.grid(axis="y", alpha=0.3)
    for line, samples in lines.items():
        draw_one = draw_points if side_by_side else draw_line
        draw_one(axis, line, samples, *styles[line])
    if over_vocabularies:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(xs), map(str, sorted(xs)))
    if "perplexity" in metric:
        axis.set_yscale("log")
    if "accuracy" in metric:
        draw_limits(axis, vocabs, over_vocabularies)


def draw_limits(axis, vocabs, over_vocabularies):
    """Thin lines: what guessing reaches, and over vocabularies 95%."""
    guessing = dict(label="chance, 1/K", linestyle=":", **THIN)
    if over_vocabularies:
        axis.axhline(LIMIT, label=f"{LIMIT:.0%}", linestyle="--", **THIN)
        axis.plot(sorted(vocabs), [1 / vocab for vocab in sorted(vocabs)], **guessing)
    elif len(vocabs) == 1:
        axis.axhline(1 / min(vocabs), **guessing)


def share_axes(axes):
    """Panels of one label have the same y axis, with room for markers at its ends."""
    for label in {axis.get_ylabel() for axis in axes}:
        these = [axis for axis in axes if axis.get_ylabel() == label]
        lows, highs = zip(*(axis.get_ylim() for axis in these))
        low, high = min(lows), max(highs)
        if "accuracy" in label or "stability" in label:
            low, high = min(low, -0.04), max(high, 1.04)
        elif "distance" in label:
            low = min(low, -0.04 * high)
        for axis in these:
            axis.set_ylim(low, high)


def means_and_intervals(samples):
    """{x: values} -> the means, and the ends of their intervals, (2, as many)."""
    means = [np.mean(values) for values in samples.values()]
    return means, np.transpose([bootstrap_interval(values) for values in samples.values()])


def draw_line(axis, line, samples, color, marker):
    samples = dict(sorted(samples.items()))
    means, intervals = means_and_intervals(samples)
    marker = "" if len(samples) > 20 else marker
    axis.plot(list(samples), means, label=line, color=color, marker=marker)
    axis.fill_between(list(samples), *intervals, color=color, alpha=0.15)


def draw_points(axis, line, samples, color, marker):
    """With every seed's value as a dash."""
    names = [x if isinstance(x, str) else line for x in samples]
    means, intervals = means_and_intervals(samples)
    dashes = dict(marker="_", linestyle="none", color=color, markersize=10, alpha=0.6)
    for name, values in zip(names, samples.values()):
        axis.plot([name] * len(values), values, **dashes)
    errors = np.abs(intervals - means)
    axis.errorbar(names, means, errors, linestyle="none", color=color, marker=marker)
    axis.margins(x=0.1)


def legend(picture, panels):
    handles = {}
    for axis in picture.axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found))
    every = [samples for lines in panels.values() for samples in lines.values()]
    counts = {len(values) for samples in every for values in samples.values()}
    n = " to ".join(map(str, sorted({min(counts), max(counts)})))
    said = f"mean over seeds and its 95% interval (percentile bootstrap), n = {n}"
    across = max(1, int(picture.get_figwidth() / 1.9))
    options = dict(loc="outside lower center", ncols=across, frameon=False, title=said)
    picture.legend(handles.values(), [NAMES.get(name, name) for name in handles], **options)
