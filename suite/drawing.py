"""Pictures of figures, where matplotlib is installed."""

from suite import files
from suite.claims import Figure, Outcomes, bootstrap_interval, name_of

import csv
import importlib.util
import io
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# Colours which colour-blind readers can tell apart, always the same for an encoding: of Okabe and Ito all but
# the yellow, which is faint on white; of Tol olive and wine; and a grey. No picture has rotary and constant.
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

# ------------------------------------------------------------------------------------------------------------
# Which pictures there are, and their panels
# ------------------------------------------------------------------------------------------------------------


def pictures(figure, stem, outcomes, out):
    """-> [(path, Figure, Outcomes)]: of many panels one for each model; and one of the training."""
    parts = {stem: (figure, outcomes)}
    if len(panels_of(figure, outcomes)) > 8:
        models = dict.fromkeys(flags.get("model") for flags, _ in outcomes.trials)
        if len(models) > 1:
            parts = {f"{stem}-{model}": (figure, outcomes.where(model=model)) for model in models}
    if figure.training:
        title = f"{figure.title}, while it is trained"
        trained = Figure(title, {}, "iteration", by_iteration, "accuracy of training batches")
        parts[f"{stem}-training"] = trained, at_both_ends(outcomes)
    folder = Path(out) / "figures"
    return [(folder / f"{name}.svg", *part) for name, part in parts.items() if part[1].finished()]


def at_both_ends(outcomes):
    """Those with a curve, of none, constant and sin, at each model's smallest and largest vocabulary."""
    found, chosen = [], Outcomes(outcomes.trials)  # a filtered grid has ends of its own
    for model in dict.fromkeys(flags["model"] for flags, _ in chosen.trials):
        smallest, largest = (chosen.where(model=model).where(vocab=end).trials for end in (min, max))
        found += smallest if smallest == largest else smallest + largest
    wanted = ("none", "constant", "sin")
    return Outcomes([(f, one) for f, one in found if one and one.curve and f["pe"] in wanted])


def by_iteration(outcome, points=30):
    """Accuracies on training batches, thinned to so many points: each is a part of the SVG's size."""
    iterations, accuracies = outcome.curve["iteration"], outcome.curve["accuracy"]
    every = max(1, math.ceil(len(iterations) / points))
    panel = f"{name_of(outcome.flags['model'])}, K = {outcome.flags['vocab']}"
    yield panel, outcome.flags["pe"], dict(zip(iterations[::-every][::-1], accuracies[::-every][::-1]))


@dataclass
class Panel:
    title: str
    y: str
    lines: dict = field(default_factory=dict)  # {line: {x: [value of each seed]}}
    vocabs: set = field(default_factory=set)
    lengths: set = field(default_factory=set)


def panels_of(figure, outcomes):
    """-> [Panel]"""
    panels, more = {}, flags_not_drawn(figure, outcomes)
    for outcome in outcomes.finished():
        for title, y, line, points in figure.lines(outcome):
            line = ", ".join([line, *(f"{flag} {outcome.flags.get(flag)}" for flag in more)])
            panel = panels.setdefault((title, y), Panel(title, y))
            panel.vocabs |= {outcome.config.get("vocab", outcome.flags.get("vocab"))} - {None}
            panel.lengths |= {outcome.config.get("length")} - {None}
            drawn = panel.lines.setdefault(line, {})
            for x, value in points.items():
                drawn.setdefault(x, []).append(value)
    for panel in panels.values():
        if None in places(panel):  # a flag that some trials leave out: words, as the tables have them
            for line, points in panel.lines.items():
                words = ["-" if x is None else str(x) for x in points]
                panel.lines[line] = dict(zip(words, points.values()))
    if figure.x.startswith("iteration"):  # where trials differ in --log-every, what all have is compared
        for panel in panels.values():
            for line, points in panel.lines.items():
                most = max(map(len, points.values()))
                panel.lines[line] = {x: values for x, values in points.items() if len(values) == most}
    return list(panels.values())


def flags_not_drawn(figure, outcomes):
    """The flags by which cells differ that would be one point of a line: each value has a line of its own."""
    first, more = {}, {}  # of each point the first cell
    if figure.curves:
        return []
    for cell in map(dict, outcomes.cells()):
        other = first.setdefault(figure.place(cell), cell)
        more |= {flag: None for flag in cell | other if cell.get(flag) != other.get(flag)}
    return list(more)


def title(figure, panel, lengths):
    """With K and L where they are the x axis, or differ from panel to panel."""
    words = [panel.title]
    if figure.x == "vocab":
        words.append("K = " + " to ".join(map(str, sorted({min(panel.vocabs), max(panel.vocabs)}))))
    if len(panel.lengths) == 1 and (figure.x == "vocab" or len(lengths) > 1):
        words.append(f"L = {min(panel.lengths)}")
    return ", ".join(words)


def caption(figure, scale, panels, lengths):
    """Of the whole picture, with K and L where all panels have the same."""
    words = [figure.title, f"{scale} scale"]
    if figure.x != "vocab":
        vocabs = set().union(*(panel.vocabs for panel in panels))
        words += [f"{k} = {min(found)}" for k, found in (("K", vocabs), ("L", lengths)) if len(found) == 1]
    return ", ".join(words)


# ------------------------------------------------------------------------------------------------------------
# Drawing
# ------------------------------------------------------------------------------------------------------------


def write_numbers(figure, path, outcomes):
    """The points of a picture as a CSV file: means, their intervals, and the values of all trials."""
    rows = [["panel", "y", "line", "x", "mean", "low", "high", "n", "values"]]
    for panel in panels_of(figure, outcomes):
        for line, points in panel.lines.items():
            for x, values in points.items():
                where = [" ".join(str(word).split()) for word in (panel.title, panel.y, line, x)]
                low, high = bootstrap_interval(values) or ("", "")
                each = " ".join(map(str, values))
                rows.append([*where, float(np.mean(values)), low, high, len(values), each])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    files.put(path.with_suffix(".csv"), text.getvalue())


def draw(figure, scale, path, outcomes, kinds):
    """A picture of the outcomes, written to `path` in files of these kinds."""
    import matplotlib

    panels = panels_of(figure, outcomes)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc says
        matplotlib.rcParams.update(LOOKS)
        picture = draw_panels(figure, panels)
        lengths = set().union(*(panel.lengths for panel in panels))
        for axis, panel in zip(picture.axes, panels):
            axis.set_title(title(figure, panel, lengths))
        picture.suptitle(caption(figure, scale, panels, lengths))
        add_legend(picture, figure, panels)
        path.parent.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            drawn = io.BytesIO()
            picture.savefig(drawn, format=kind[1:], dpi=150, metadata={"Date": None})
            files.put(path.with_suffix(kind), drawn.getvalue())


def draw_panels(figure, panels):
    """-> a picture of them; where there are several models a column for each, and a row for each metric."""
    import matplotlib.figure

    across, share_y = min(len(panels), 4), bool(figure.curves)
    models = {panel.title for panel in panels}
    if not figure.curves and len(models) > 1:
        across, order, share_y = len(models), list(figure.metrics), "row"
        panels.sort(key=lambda panel: order.index(panel.y))
    down = math.ceil(len(panels) / across)
    widths = [max(map(width, panels[column::across])) for column in range(across)]
    size = (max(sum(widths), 5.5), 2.5 * down + 1)  # inches; below a width of 5.5 the caption is cut off
    picture = matplotlib.figure.Figure(size, layout="constrained")
    axes = picture.subplots(down, across, squeeze=False, sharey=share_y, width_ratios=widths).flat
    lines = list(dict.fromkeys(line for panel in panels for line in panel.lines))  # of one colour each
    for n, (axis, panel) in enumerate(zip(axes, panels)):
        axis.set(ylabel=panel.y, xlabel=LABELS.get(figure.x, figure.x))
        draw_panel(axis, figure, panel, lines)
        if share_y and n % across:  # the first of the row says it
            axis.set_ylabel("")
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, panel in zip(picture.axes, panels):  # when all are drawn, whose y axis they may share
        if figure.zero:
            axis.set_ylim(bottom=0)
        if figure.x.startswith("iteration"):
            write_ends(axis, panel)
    return picture


def width(panel):
    """Inches: enough for the words on the x axis."""
    return max(3, 0.55 * sum(isinstance(x, str) for x in places(panel)))


def places(panel):
    """On the x axis; words in the grid's order."""
    return list(dict.fromkeys(x for points in panel.lines.values() for x in points))


def draw_panel(axis, figure, panel, lines):
    """Lines over x; or points side by side, where x is a word or there is a single one."""
    axis.grid(axis="y", alpha=0.3)
    axis.locator_params(axis="y", nbins=5)  # each grid line is a part of the SVG's size
    xs = places(panel)
    side_by_side = isinstance(xs[0], str) or len(xs) == 1
    xs = xs if side_by_side else sorted(xs)
    draw_one = draw_points if side_by_side else draw_each if figure.each else draw_line
    for line, points in panel.lines.items():
        other = dict(color=f"C{(3 + lines.index(line)) % 10}", marker="p")  # matplotlib's own, from C3 on
        style = STYLES.get(line, other)
        draw_one(axis, line, {x: points[x] for x in xs if x in points}, style)
    if figure.log_y:
        axis.set_yscale("log")
    levels = chances(figure, panel) if figure.x == "vocab" and "accuracy" in panel.y else {}
    if side_by_side:
        axis.margins(x=0.3 if len(xs) < 5 else 0.08)
        level = f" (chance: {levels[xs[0]]:.2g})" if levels else ""
        axis.set_xlabel(axis.get_xlabel() + ("" if isinstance(xs[0], str) else f" = {xs[0]}{level}"))
    elif levels:
        axis.plot(list(levels), list(levels.values()), ":", color="gray", label="chance: without memory")
    if figure.curves and not side_by_side:
        axis.locator_params(axis="x", nbins=5, integer=True)
    elif not side_by_side:  # flags double from trial to trial, where none is 0
        if min(xs) > 0:
            axis.set_xscale("log", base=2)
        axis.set_xticks(xs, map(str, xs))


def chances(figure, panel):
    """{K: what a model without memory gets}, where the panel is of one length."""
    if figure.chance is None or len(panel.lengths) != 1:
        return {}
    return {vocab: figure.chance(vocab, min(panel.lengths)) for vocab in sorted(panel.vocabs)}


def draw_line(axis, line, points, style):
    """With a marker at every point, or at none where they are many: a marker here and there misleads."""
    many = len(points) > 70
    style = style | dict(marker="" if many else style["marker"], markersize=4 if len(points) < 20 else 2)
    means, errors = means_and_errors(points)
    if len(points) == 1:  # a band of one point could not be seen
        axis.errorbar(list(points), means, errors, label=line, **style)
    else:
        below, above = errors
        axis.plot(list(points), means, label=line, **style)
        axis.fill_between(list(points), means - below, means + above, color=style["color"], alpha=0.15)


def draw_each(axis, line, points, style):
    for n, values in enumerate(zip(*points.values())):
        label = "" if n else line
        axis.plot(list(points), values, label=label, color=style["color"], linewidth=0.8, alpha=0.7)


def draw_points(axis, line, points, style):
    """With every seed's value as a dash; the name on the x axis is the line's where x is no word."""
    names = [x if isinstance(x, str) else line for x in points]
    for name, values in zip(names, points.values()):
        axis.plot([name] * len(values), values, "_", color=style["color"], markersize=10, alpha=0.6)
    label = "" if all(line in name for name in names) else line  # the legend has what the x axis has not
    axis.errorbar(names, *means_and_errors(points), linestyle="none", label=label, **style)


def write_ends(axis, panel):
    """The lines' last values, which may lie close together: in the corner, lower or upper, that is free."""
    ends = {line: float(np.mean(points[max(points)])) for line, points in panel.lines.items()}
    _, mean = axis.transData.transform((0, np.mean(list(ends.values()))))
    _, middle = axis.transAxes.transform((0, 0.5))
    where = dict(x=0.98, y=0.03, va="bottom") if mean > middle else dict(x=0.98, y=0.97, va="top")
    text = "\n".join(["in the end", *(f"{line} {value:.4g}" for line, value in ends.items())])
    axis.text(s=text, ha="right", size=6, transform=axis.transAxes, **where)


def means_and_errors(points):
    """{x: values} -> the means, and how far their intervals reach below and above them."""
    means = [np.mean(values) for values in points.values()]
    ends = [bootstrap_interval(v) or (mean, mean) for v, mean in zip(points.values(), means)]
    return means, np.abs(np.transpose(ends) - means)


def add_legend(picture, figure, panels):
    """One for all panels, below them; its title is the caption. Points have their names on the x axis."""
    handles = {}
    for axis in picture.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    lines = [points for panel in panels for points in panel.lines.values()]
    counts = {len(values) for points in lines for values in points.values()}
    n = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    dashes = "" if handles else ", dashes: seeds"
    shown = "a line per trial" if figure.each else "mean and 95% percentile bootstrap interval"
    said = f"{shown}{dashes}; n = {n}"
    if not handles and figure.x != "vocab" and "token accuracy" in figure.metrics:
        levels = {level for panel in panels for level in chances(figure, panel).values()}
        said += "".join(f"; chance: {level:.2g}" for level in levels if len(levels) == 1)
    names = MEANINGS if figure.names is None else figure.names
    across = int(picture.get_figwidth() / 1.9)
    how = dict(loc="outside lower center", ncols=across, frameon=False, title=said)
    picture.legend(handles.values(), [names.get(name, name) for name in handles], **how)
