"""Tables of a figure's results: means, contrasts, and preregistered claims."""

import itertools
import operator
from collections import Counter, defaultdict

import numpy as np

from suite.figures import (
    CONTROLS,
    ENCODING_NAMES,
    NONE_AND_PE,
    CensoredAbove,
    CensoredBelow,
    as_measure,
    chance,
    compare_encodings,
    finished_of,
    matching,
    measurements,
    name_cell,
    name_flag,
    name_model,
)
from suite.statistics import ALPHA, claim_p_values, estimate, holm

COLUMN_ORDER = ["none", "constant", "dup", "sin"]  # other encodings follow
CAPTION_FLAGS = "vocab", "length", "hidden", "iterations", "lr"


# -- Formatting
def format_p(p):
    return "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0")


def format_difference(difference):
    """Return the difference with its 95% CI, and its p-value, as text."""
    if difference is None:
        return ["-", "-"]
    low, high = difference.interval()
    return [f"{difference.value:+.3f} [{low:+.3f}, {high:+.3f}]", format_p(difference.p())]


def is_censored(measurement):
    return isinstance(measurement.value, CensoredBelow | CensoredAbove)


def format_mean(measured, measure):
    """Return, as text, the mean, its 95% CI or censored count, and n if values are missing."""
    values = [x.value for x in measured if x.value is not None]
    if not values:
        return "-"
    n, display = len(values), measure.display
    n_censored = sum(map(is_censored, measured))
    mean, ci = display(np.mean(values)), estimate([values])
    decimals = 3 - sum(mean >= size for size in (10, 100, 1000))  # four digits
    text = f"{mean:,.{decimals}f}"
    if n_censored:
        if len(set(values)) == 1:
            text = f"{mean:g}{measure.unit}"
        kinds = {type(x.value) for x in measured if is_censored(x)}
        sign = {CensoredAbove: ">", CensoredBelow: "<"}[kinds.pop()] if len(kinds) == 1 else ""
        text = f"{sign}{text} ({n_censored} of {n} censored)"
    elif ci and display is float:  # untransformed
        text += f" ±{ci.margin:,.{decimals}f}"
    elif ci:
        low, high = map(display, ci.interval())
        text += f" [{low:,.{decimals}f}, {high:,.{decimals}f}]"
    return text if n == len(measured) else f"{text} (n = {n})"


def format_flag(flag, value):
    if value is None:
        return "-"
    return name_model(value) if flag == "model" else str(value)


def align(rows):
    """Yield lines with aligned columns; a row with a single entry is a heading."""
    wide = [row for row in rows if len(row) > 1] or rows
    widths = [max(map(len, column)) for column in zip(*wide)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()


# -- Contrasts
def default_contrasts(items):
    """Return the contrasts PE - no PE and PE - control."""
    encodings = {x.flags.get("pe") for x in items}
    if not encodings.issuperset(NONE_AND_PE):
        return []
    control = [pe for pe in CONTROLS if pe in encodings][:1]
    return [compare_encodings("sin", pe) for pe in ["none", *control]]


def estimate_contrast(contrast, measured):
    """Return the Estimate of a contrast; None if there are too few seeds."""
    signs, arms = zip(*contrast.terms())
    samples = []
    for arm in arms:
        in_arm = matching(measured, arm)
        samples.append({x.flags["seed"]: x.value for x in in_arm if x.value is not None})
    if not contrast.paired:
        return estimate([[*sample.values()] for sample in samples], signs)
    seeds = set.intersection(*map(set, samples))
    return estimate([[np.dot(signs, [sample[seed] for sample in samples]) for seed in seeds]])


# -- The tables of a figure
def key_flags(figure, results):
    """Return the flags that distinguish cells: the model, and flags that vary within one."""
    n_models = len(cells_of(results, ["model"]))
    keys = ["model"] if n_models > 1 else []
    for flag in dict.fromkeys(itertools.chain(*(x.flags for x in results))):
        n_values = len(cells_of(results, ["model", flag]))
        if n_values > n_models and flag not in ("pe", "seed", *figure.tuned):
            keys.append(flag)
    return keys


def cells_of(items, keys, omitted=()):
    """Return the distinct combinations of values of the flags `keys`, except `omitted`."""
    cells = []
    for x in items:
        cell = {key: x.flags.get(key) for key in keys if key not in omitted}
        if cell not in cells:
            cells.append(cell)
    return cells


def make_caption(figure, results, measures, scale):
    """Return shared settings, seeds, chance accuracy and trials; then a line per model."""
    finished = finished_of(results)
    shared = constant_flags([x.config for x in finished], CAPTION_FLAGS)
    parts, by_model = [f"{scale} scale"], [*describe_models(results, shared)]
    if len(by_model) == 1:
        parts.append(by_model.pop())
    parts += name_cell(shared)
    if len(measures) == 1:
        parts.append(measures[0].label)
    if finished:
        seeds = Counter(str(result.flags | dict(seed=0)) for result in finished).values()
        parts.append(f"n = {format_range(min(seeds), max(seeds))}")
        if "accuracy" in " ".join(figure.metrics):
            chances = [*map(chance, finished)]
            parts.append(f"chance {format_range(max(chances), min(chances))}")
    parts.append(f"{len(finished)} of {len(results)} trials")
    return ";\n".join([f"{figure.title}: {'; '.join(parts)}", *by_model])


def describe_models(results, omitted):
    """Yield the settings of each model, or of models that share them, as text."""
    flags = dict.fromkeys(itertools.chain(*(x.flags for x in results)))
    models_by_label = defaultdict(list)
    for cell in cells_of(results, ["model"]):
        trials = matching(results, cell)
        settings = constant_flags([x.flags for x in trials], flags)
        settings |= constant_flags([x.config for x in finished_of(trials)], CAPTION_FLAGS)
        for flag in ("model", "pe", "seed", *omitted):
            settings.pop(flag, None)
        label = ", ".join(name_cell(settings))
        models_by_label[label].append(name_model(cell["model"] or ""))
    for label, names in models_by_label.items():
        if text := ": ".join(filter(None, [", ".join(names), label])):
            yield text


def constant_flags(rows, flags):
    """Return {flag: value} of those flags that have one value in all rows."""
    constant = {}
    for flag in flags:
        values = {row.get(flag) for row in rows}
        if len(values) == 1:
            constant[flag] = values.pop()
    return constant


def format_range(first, last):
    return " to ".join(dict.fromkeys([f"{first:.3g}", f"{last:.3g}"]))


def means_table(figure, results, measures):
    """Return the lines of a table: a header, then each metric's name and a row per cell."""
    keys = key_flags(figure, results)
    encodings = list(dict.fromkeys(result.flags["pe"] for result in results))
    encodings.sort(key=(COLUMN_ORDER + encodings).index)
    groups = [matching(results, cell) for cell in cells_of(results, keys)]
    labels = dict.fromkeys(c.label for group in groups for c in default_contrasts(group))
    if len(labels) > 2:  # controls differ between cells
        over_none, *over_controls = labels
        names = [label.removeprefix("PE - ") for label in over_controls]
        labels = [over_none, f"PE - {' or '.join(names)}"]
    header = [*map(name_flag, keys)]
    header += [ENCODING_NAMES.get(pe, pe) for pe in encodings]
    for label in labels:
        header += [label, "p"]
    rows = [header]
    for measure in measures:
        measured = measurements(results, measure)
        if any(x.value is not None for x in measured):
            if len(measures) > 1:
                rows.append([measure.label])
            for row in table_rows(keys, encodings, measured, measure):
                rows.append(row + ["-"] * (len(header) - len(row)))
    return align(rows)


def table_rows(keys, encodings, measured, measure):
    """Yield each row as a list of strings."""
    arms = [{}] if "pe" in measure.over else [dict(pe=pe) for pe in encodings]
    for cell in cells_of(measured, keys, measure.over):
        in_cell = matching(measured, cell)
        row = [format_flag(key, cell.get(key, "")) for key in keys]
        row += [format_mean(matching(in_cell, arm), measure) for arm in arms]
        for contrast in default_contrasts(in_cell):
            both = matching(in_cell, contrast.high) + matching(in_cell, contrast.low)
            has_ci = not any(map(is_censored, both))
            row += format_difference(estimate_contrast(contrast, in_cell) if has_ci else None)
        yield row


def contrast_table(figure, results, measures):
    """Return the lines of a table of the figure's contrasts, one row per matching cell."""
    keys, rows = key_flags(figure, results), []
    for contrast in figure.contrasts:
        measured = measurements(results, as_measure(contrast.measure or measures[0]))
        arms = [flags for _, flags in contrast.terms()]
        for cell in cells_of(measured, keys, set().union(*arms)):
            if all(matching(measured, cell | flags) for flags in arms):
                label = ", ".join([contrast.label, *name_cell(cell)])
                difference = estimate_contrast(contrast, matching(measured, cell))
                rows.append([label, *format_difference(difference)])
    return align(rows)


# -- Preregistered claims
CLAIMS_HEADER = "claim", "no PE", "control", "PE", "difference [95% CI]", "p (Holm)", "outcome"


def claims_table(claims):
    """Yield Markdown for [(Claim, link to its figure, [Result])], Holm-corrected by family."""
    families = defaultdict(list)
    for claim, link, results in claims:
        families[claim.family].append(claim_row(claim, link, results))
    for family, tested in families.items():
        yield f"**{family}** ({len(tested)} claims)\n"
        rows, p_values = zip(*tested)
        outcomes = [["-", "trials missing"]] * len(rows)
        if None not in p_values:
            outcomes = map(judge, p_values, holm([*map(min, p_values)]))
        rows = [CLAIMS_HEADER, ["---"] * len(CLAIMS_HEADER), *map(operator.add, rows, outcomes)]
        columns = [column for column in zip(*rows) if set(column[2:]) != {"-"}]
        for row in zip(*columns):
            yield f"| {' | '.join(row)} |"
        yield ""


def claim_row(claim, link, results):
    """Return a claim's table row and its p-values, which are None if trials are missing."""
    measure = as_measure(claim.measure)
    measured = matching(measurements(results, measure), claim.cell)
    contrasts = [claim.contrast] if claim.contrast else default_contrasts(measured)
    estimates = [estimate_contrast(contrast, measured) for contrast in contrasts]
    differences = [format_difference(x)[0] for x in estimates]
    if claim.contrast:
        subject, means = claim.contrast.label, ["-"] * 3
    else:
        subject = ", ".join(name_cell(claim.cell))
        arms = contrasts[0].low, contrasts[-1].low, contrasts[0].high  # no PE, control, PE
        means = [format_mean(matching(measured, arm), measure) for arm in arms]
        differences = [f"{c.label}: {text}" for c, text in zip(contrasts, differences)]
    sizes = [len(matching(measured, arm)) for c in contrasts for _, arm in c.terms()]
    label = f"[{subject}]({link}): {measure.label}, n = {format_range(min(sizes), max(sizes))}"
    row = [label, *means, "<br>".join(differences)]
    missing = None in estimates or any(x.value is None for x in measured)
    return row, None if missing else claim_p_values(estimates)


def judge(p_values, corrected):
    """Return the corrected p-value, as text, and the verdict."""
    p_all_above, p_any_below = p_values
    verdict = "inconclusive"
    if corrected <= ALPHA:
        verdict = "supported" if p_all_above < p_any_below else "contradicted"
    return [format_p(corrected), verdict]
