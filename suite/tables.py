"""Tables of a figure's results: means, contrasts, and claims."""

import itertools
from collections import Counter, defaultdict

import numpy as np

from suite.figures import (
    CONTROLS,
    ENCODING_NAMES,
    NONE_AND_PE,
    LeftCensored,
    RightCensored,
    as_metric,
    cell_labels,
    chance,
    encoding_contrast,
    evaluate_metric,
    finished_results,
    flag_label,
    matching,
    model_label,
)
from suite.stats import ALPHA, claim_p_values, estimate, holm

COLUMN_ORDER = ["none", "constant", "dup", "sin"]  # other encodings follow
CAPTION_FLAGS = "vocab", "length", "hidden", "iterations", "lr"


# -- Formatting
def format_p(p):
    return "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0")


def format_difference(difference):
    """Return [difference with its 95% CI, p-value], two strings."""
    if difference is None:
        return ["-", "-"]
    low, high = difference.interval()
    return [f"{difference.value:+.3f} [{low:+.3f}, {high:+.3f}]", format_p(difference.p())]


def is_censored(x):
    return isinstance(x.value, LeftCensored | RightCensored)


def format_mean(values, metric):
    """Format the mean, its 95% CI or censored count, and n if values are missing."""
    sample = [x.value for x in values if x.value is not None]
    if not sample:
        return "-"
    n, display = len(sample), metric.display
    censored = [x.value for x in values if is_censored(x)]
    mean, ci = display(np.mean(sample)), estimate([sample])
    decimals = 3 - sum(mean >= size for size in (10, 100, 1000))  # four digits
    text = f"{mean:,.{decimals}f}"
    if censored:
        if len(set(sample)) == 1:
            text = f"{mean:g}{metric.unit}"
        kinds = {*map(type, censored)}
        sign = {RightCensored: ">", LeftCensored: "<"}[kinds.pop()] if len(kinds) == 1 else ""
        text = f"{sign}{text} ({len(censored)} of {n} censored)"
    elif ci and display is float:  # untransformed
        text += f" ±{ci.margin:,.{decimals}f}"
    elif ci:
        low, high = map(display, ci.interval())
        text += f" [{low:,.{decimals}f}, {high:,.{decimals}f}]"
    return text if n == len(values) else f"{text} (n = {n})"


def format_flag(flag, value):
    if value is None:
        return "-"
    return model_label(value) if flag == "model" else str(value)


def align(rows):
    """Yield lines with aligned columns; a row with a single entry is a heading."""
    wide = [row for row in rows if len(row) > 1] or rows
    widths = [max(map(len, column)) for column in zip(*wide)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()


# -- Contrasts
def default_contrasts(items):
    """Return PE - no PE and PE - control (constant or else dup), if they are present."""
    encodings = {x.flags.get("pe") for x in items}
    if not encodings.issuperset(NONE_AND_PE):
        return []
    controls = [pe for pe in CONTROLS if pe in encodings]
    return [encoding_contrast("sin", pe) for pe in ["none", *controls[:1]]]


def estimate_contrast(contrast, values):
    """Return the Estimate of a contrast; None if there are too few seeds."""
    signs, selections = zip(*contrast.terms())
    samples = []
    for flags in selections:
        selected = matching(values, flags)
        samples.append({x.flags["seed"]: x.value for x in selected if x.value is not None})
    if not contrast.paired:
        return estimate([[*sample.values()] for sample in samples], signs)
    seeds = set.intersection(*map(set, samples))
    return estimate([[np.dot(signs, [sample[seed] for sample in samples]) for seed in seeds]])


# -- The tables of a figure
def key_flags(figure, results):
    """Return the flags that distinguish cells: the model and those that vary within a model."""
    n_models = len(cells_of(results, ["model"]))
    keys = ["model"] if n_models > 1 else []
    for flag in dict.fromkeys(itertools.chain(*(x.flags for x in results))):
        n_combinations = len(cells_of(results, ["model", flag]))
        if n_combinations > n_models and flag not in ("pe", "seed", *figure.tuned):
            keys.append(flag)
    return keys


def cells_of(items, keys, omitted=()):
    """Return the distinct combinations of values of the flags `keys`, except `omitted`."""
    keys = [key for key in keys if key not in omitted]
    cells = dict.fromkeys(tuple(x.flags.get(key) for key in keys) for x in items)
    return [dict(zip(keys, cell)) for cell in cells]


def make_caption(figure, results, metrics, scale):
    """Return the caption: title, shared settings, seeds, chance, trials; a line per model."""
    finished = finished_results(results)
    shared = constant_flags([x.config for x in finished], CAPTION_FLAGS)
    parts, by_model = [f"{scale} scale"], [*describe_models(results, shared)]
    if len(by_model) == 1:
        parts.append(by_model.pop())
    parts += cell_labels(shared)
    if len(metrics) == 1:
        parts.append(metrics[0].label)
    if finished:
        # Count trials that differ only in the seed
        n_seeds = Counter(str(result.flags | dict(seed=0)) for result in finished).values()
        parts.append(f"n = {format_range(min(n_seeds), max(n_seeds))}")
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
        settings |= constant_flags([x.config for x in finished_results(trials)], CAPTION_FLAGS)
        for flag in ("model", "pe", "seed", *omitted):
            settings.pop(flag, None)
        label = ", ".join(cell_labels(settings))
        models_by_label[label].append(model_label(cell["model"] or ""))
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


def means_table(figure, results, metrics):
    """Return the lines of a table: a header, then each metric's name and a row per cell."""
    keys = key_flags(figure, results)
    encodings = list(dict.fromkeys(result.flags["pe"] for result in results))
    encodings.sort(key=(COLUMN_ORDER + encodings).index)
    groups = [matching(results, cell) for cell in cells_of(results, keys)]
    labels = dict.fromkeys(c.label for group in groups for c in default_contrasts(group))
    if len(labels) > 2:  # controls differ between cells; they share a column
        over_none, *over_controls = labels
        names = [label.removeprefix("PE - ") for label in over_controls]
        labels = [over_none, f"PE - {' or '.join(names)}"]
    header = [*map(flag_label, keys)]
    header += [ENCODING_NAMES.get(pe, pe) for pe in encodings]
    for label in labels:
        header += [label, "p"]
    rows = [header]
    for metric in metrics:
        values = evaluate_metric(results, metric)
        if any(x.value is not None for x in values):
            if len(metrics) > 1:
                rows.append([metric.label])
            for row in table_rows(keys, encodings, values, metric):
                rows.append(row + ["-"] * (len(header) - len(row)))
    return align(rows)


def table_rows(keys, encodings, values, metric):
    """Yield each row as a list of strings."""
    # The value of a summary across encodings is in the first column
    selections = [{}] if "pe" in metric.across else [dict(pe=pe) for pe in encodings]
    for cell in cells_of(values, keys, metric.across):
        in_cell = matching(values, cell)
        row = [format_flag(key, cell.get(key, "")) for key in keys]
        row += [format_mean(matching(in_cell, flags), metric) for flags in selections]
        for contrast in default_contrasts(in_cell):
            both = matching(in_cell, contrast.plus) + matching(in_cell, contrast.minus)
            censored = any(map(is_censored, both))
            row += format_difference(None if censored else estimate_contrast(contrast, in_cell))
        yield row


def contrast_table(figure, results, metrics):
    """Return the lines of a table of the figure's contrasts, one row per matching cell."""
    keys, rows = key_flags(figure, results), []
    for contrast in figure.contrasts:
        values = evaluate_metric(results, as_metric(contrast.metric or metrics[0]))
        selections = [flags for _, flags in contrast.terms()]
        for cell in cells_of(values, keys, set().union(*selections)):
            if all(matching(values, cell | flags) for flags in selections):
                label = ", ".join([contrast.label, *cell_labels(cell)])
                difference = estimate_contrast(contrast, matching(values, cell))
                rows.append([label, *format_difference(difference)])
    return align(rows)


# -- Claims
CLAIMS_HEADER = "claim", "no PE", "control", "PE", "difference [95% CI]", "p (Holm)", "outcome"


def claims_table(claims):
    """Yield Markdown for [(Claim, link to its figure, [Result])], Holm-corrected by family."""
    families = defaultdict(list)
    for claim, link, results in claims:
        families[claim.family].append(claim_row(claim, link, results))
    for family, rows_and_p_pairs in families.items():
        yield f"**{family}** (claims: {len(rows_and_p_pairs)})\n"
        rows, p_pairs = zip(*rows_and_p_pairs)
        outcomes = [["-", "trials missing"]] * len(rows)
        if None not in p_pairs:
            outcomes = map(judge, p_pairs, holm([*map(min, p_pairs)]))
        rows = [row + outcome for row, outcome in zip(rows, outcomes)]
        rows = [CLAIMS_HEADER, ["---"] * len(CLAIMS_HEADER), *rows]
        columns = [column for column in zip(*rows) if set(column[2:]) != {"-"}]  # not empty
        for row in zip(*columns):
            yield f"| {' | '.join(row)} |"
        yield ""


def claims_of(figure, results):
    """Yield a figure's claims, one per cell; those without a contrast need PE and no PE."""
    keys = key_flags(figure, results)
    for claim in figure.claims:
        cells = [claim.cell]
        if claim.cell is None:
            cells = cells_of(results, keys, as_metric(claim.metric).across)
        for cell in cells:
            if claim.contrast or default_contrasts(matching(results, cell)):
                yield claim._replace(cell=cell)


def claim_row(claim, link, results):
    """Return a claim's table row and its p-values, which are None if trials are missing."""
    metric = as_metric(claim.metric)
    values = matching(evaluate_metric(results, metric), claim.cell)
    contrasts = [claim.contrast] if claim.contrast else default_contrasts(values)
    estimates = [estimate_contrast(contrast, values) for contrast in contrasts]
    differences = [format_difference(x)[0] for x in estimates]
    if claim.contrast:
        subject, means = claim.contrast.label, ["-"] * 3
    else:
        flags = {flag: results[0].flags.get(flag) for flag in ("model", "vocab")}
        subject = ", ".join(cell_labels(claim.cell or flags))
        over_none, over_control = contrasts[0], contrasts[-1]
        selections = over_none.minus, over_control.minus, over_none.plus  # no PE, control, PE
        means = [format_mean(matching(values, flags), metric) for flags in selections]
        differences = [f"{c.label}: {text}" for c, text in zip(contrasts, differences)]
    sizes = [len(matching(values, flags)) for c in contrasts for _, flags in c.terms()]
    label = f"[{subject}]({link}): {metric.label}, n = {format_range(min(sizes), max(sizes))}"
    row = [label, *means, "<br>".join(differences)]
    missing = None in estimates or any(x.value is None for x in values)
    return row, None if missing else claim_p_values(estimates)


def judge(p_pair, corrected):
    """Return [p-value, outcome], given a claim's two p-values and their corrected minimum.

    The smaller p-value of the pair gives the direction.
    """
    p_all_positive, p_any_negative = p_pair
    outcome = "inconclusive"
    if corrected <= ALPHA:
        outcome = "supported" if p_all_positive < p_any_negative else "contradicted"
    return [format_p(corrected), outcome]
