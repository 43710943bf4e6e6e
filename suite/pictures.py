"""Pictures of figures, where matplotlib is installed."""

import importlib.util
import math

import numpy as np

from suite.verdicts import bootstrap_interval, name_of, number

# Colours that colour-blind readers can tell apart, always the same for an encoding
STYLES = {"none": ("#000000", "o"), "sin": ("#0072B2", "s"), "random": ("#E69F00", "^")}
STYLES |= {"learned": ("#009E73", "D"), "dup": ("#CC79A7", "v"), "constant": ("#D55E00", "P")}
STYLES |= {"ramp": ("#999933", "<"), "counter": ("#882255", "h"), "shuffled": ("#888888", "*")}
STYLES |= {"rotary": ("#D55E00", "P"), "layernorm-learned": ("#56B4E9", "X")}
NAMES = {
    "constant": "constant: one fixed vector",
    "dup": "dup: the embedding twice",
    "sin": "sin: the clock",
}
LABELS = {"vocab": "vocabulary size K", "pe": "encoding", "accuracy": "token accuracy"}
LABELS |= {"edits": "edit distance"}
CAN_DRAW = (
    importlib.util.find_spec("matplotlib") is not None
)  # importing it would slow every trial's start
# An SVG keeps its words as text, and is the same file whenever it is drawn
LOOKS = {"font.size": 8, "axes.titlesize": 8, "lines.markersize": 4}
LOOKS |= {"svg.fonttype": "none", "svg.hashsalt": "report"}


def place(figure, flags):
    """Where a trial stands on the x axis: a number, or words where several flags make it up."""
    if isinstance(figure.x, str):
        return flags[figure.x]
    words = [flags["pe"]]
    for flag in figure.x:
        if flag != "pe" and flags.get(flag) is not None:
            words += [flag.replace("_", "-"), str(flags[flag])]
    return "\n".join(words)


def panels_of(figure, runs):
    """-> {(title, y label): {line: {x: [the value of each seed]}}}"""
    panels = {}
    for result in runs:
        if figure.curves:
            points = [(panel, figure.y, line, xs) for panel, line, xs in figure.curves(result)]
        else:
            model, line, x = (
                name_of(result.flags.get("model", "")),
                result.flags["pe"],
                place(figure, result.flags),
            )
            points = [
                (model, name, line, {x: number(result, of)})
                for name, of in figure.metrics.items()
            ]
        for panel, y, line, xs in points:
            drawn = panels.setdefault((panel, y), {}).setdefault(line, {})
            for x, value in xs.items():
                drawn.setdefault(x, []).append(value)
    return panels


def draw(figure, runs, caption, path):
    """Draw an SVG."""
    import matplotlib
    import matplotlib.figure

    panels = panels_of(figure, runs)
    order, across = list(panels), min(len(panels), 4)
    if not figure.curves:  # a column for each model, a row for each metric
        order.sort(key=lambda panel: list(figure.metrics).index(panel[1]))
        across = len({title for title, _ in panels})
    down = math.ceil(len(panels) / across)
    with matplotlib.rc_context(LOOKS):
        words = max(
            sum(isinstance(x, str) for x in places(lines)) for lines in panels.values()
        )  # on an axis
        wide = max(
            5.5, across * max(2.6, 0.75 * words)
        )  # inches; less would cut the caption off
        picture = matplotlib.figure.Figure((wide, 2.4 * down + 1), layout="constrained")
        axes = picture.subplots(down, across, squeeze=False).flat
        for axis, panel in zip(axes, order):
            axis.set(title=panel[0], ylabel=LABELS.get(panel[1], panel[1]))
            draw_panel(axis, figure, panel[1], panels[panel])
        for axis in axes[len(order) :]:
            axis.remove()
        picture.suptitle(caption)
        legend(picture, panels)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, metadata={"Date": None})


def places(lines):
    return list(dict.fromkeys(x for points in lines.values() for x in points))


def draw_panel(axis, figure, y, lines):
    """Lines over x; or points side by side, where x is a word or there is a single one."""
    xs = places(lines)
    side_by_side = isinstance(xs[0], str) or len(xs) == 1
    if isinstance(figure.x, str):
        axis.set_xlabel(LABELS.get(figure.x, figure.x) + f" = {xs[0]}" * (len(xs) == 1))
    axis.grid(axis="y", alpha=0.3)
    for line, points in lines.items():
        style = dict(zip(("color", "marker"), STYLES.get(line, ())))
        if side_by_side:
            draw_points(axis, line, points, style)
        else:
            draw_line(axis, line, dict(sorted(points.items())), style)
    if figure.x == "vocab" and not side_by_side:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(xs), map(str, sorted(xs)))
    if "perplexity" in y:
        axis.set_yscale("log")
    elif "accuracy" in y or "stability" in y:
        axis.set_ylim(bottom=0)


def means_and_errors(points):
    """{x: values} -> the means, and how far their intervals reach below and above them."""
    means = np.array([np.mean(values) for values in points.values()])
    return means, np.abs(np.transpose([bootstrap_interval(v) for v in points.values()]) - means)


def draw_line(axis, line, points, style):
    means, (below, above) = means_and_errors(points)
    many = dict(marker="") if len(points) > 20 else {}
    (drawn,) = axis.plot(list(points), means, label=line, **style | many)
    axis.fill_between(
        list(points), means - below, means + above, color=drawn.get_color(), alpha=0.15
    )


def draw_points(axis, line, points, style):
    """With every seed's value as a dash."""
    names = [x if isinstance(x, str) else line for x in points]
    for name, values in zip(names, points.values()):
        axis.plot(
            [name] * len(values),
            values,
            "_",
            color=style.get("color"),
            markersize=10,
            alpha=0.6,
        )
    axis.errorbar(names, *means_and_errors(points), linestyle="none", **style)
    axis.margins(x=0.1)


def legend(picture, panels):
    handles = {}
    for axis in picture.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    counts = {
        len(v)
        for lines in panels.values()
        for points in lines.values()
        for v in points.values()
    }
    n = " to ".join(map(str, sorted({min(counts), max(counts)})))
    said = f"mean and 95% percentile bootstrap interval over seeds, n = {n}"
    across = max(1, int(picture.get_figwidth() / 1.9))
    how = dict(loc="outside lower center", ncols=across, frameon=False, title=said)
    picture.legend(handles.values(), [NAMES.get(name, name) for name in handles], **how)
