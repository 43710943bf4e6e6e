"""Tables of a figure's results: means, contrasts, and preregistered claims."""

import itertools
from collections import Counter, defaultdict

import numpy as np

from suite.figures import (
    BOTH,
    CONTROLS,
    ENCODING_NAMES,
    FLAG_NAMES,
    CensoredAbove,
    CensoredBelow,
    Contrast,
    as_measure,
    chance,
    finished_of,
    measurements,
    name_cell,
    name_of,
    select,
)
from suite.statistics import LEVEL, all_above, estimate, holm

COLUMN_ORDER = ["none", "constant", "dup", "sin"]  # other encodings follow
MAIN_FLAGS = "vocab", "length", "hidden", "iterations", "lr"


# -- Formatting
def format_p(p):
    return "<.001" if p < 0.001 else f"{p:.3f}".replace("0.", ".", 1)


def format_difference(estimate):
    """Return the difference with its 95% CI, and its p-value, as text."""
    if estimate is None:
        return ["-", "-"]
    low, high = estimate.interval()
    return [f"{estimate.value:+.3f} [{low:+.3f}, {high:+.3f}]", format_p(estimate.p())]


def is_censored(measurement):
    return isinstance(measurement.value, CensoredBelow | CensoredAbove)


def format_mean(measured, measure):
    """Return the mean with its 95% CI, and how many values are censored or missing, as text."""
    values = [x.value for x in measured if x.value is not None]
    if not values:
        return "-"
    n, show = len(values), measure.show
    censored = [x for x in measured if is_censored(x)]
    if censored and len(set(values)) == 1:
        sign = ">" if isinstance(values[0], CensoredAbove) else "<"
        return f"{sign}{show(values[0]):g}{measure.unit} ({n} of {n} censored)"
    mean = show(np.mean(values))
    decimals = 3 - sum(mean >= size for size in (10, 100, 1000))  # four digits
    text = f"{mean:,.{decimals}f}"
    if not censored and (found := estimate([values])):
        low, high = map(show, found.interval())
        interval = f"±{found.margin:,.{decimals}f}"
        if show is not float:
            interval = f"[{low:,.{decimals}f}, {high:,.{decimals}f}]"
        text += f" {interval}"
    if censored:
        text += f" ({len(censored)} of {n} censored)"
    return text if n == len(measured) else f"{text} (n = {n})"


def format_flag(flag, value):
    if value is None:
        return "-"
    return name_of(value) if flag == "model" else str(value)


def align(rows):
    """Yield lines with aligned columns; a row with a single entry is a heading."""
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1))]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()


# -- Contrasts
def default_contrasts(trials):
    """Return the contrasts PE - no PE and PE - control."""
    encodings = {x.flags.get("pe") for x in trials}
    if not encodings.issuperset(BOTH):
        return []
    control = [pe for pe in CONTROLS if pe in encodings][:1]
    return [
        Contrast(f"PE - {ENCODING_NAMES.get(pe, pe)}", dict(pe="sin"), dict(pe=pe))
        for pe in ["none", *control]
    ]


def evaluate(contrast, measured):
    """Return the Estimate of a contrast; None if there are too few seeds."""
    signs, cells = zip(*contrast.terms())
    samples = []
    for cell in cells:
        in_cell = select(measured, cell)
        samples.append({x.flags["seed"]: x.value for x in in_cell if x.value is not None})
    if not contrast.paired:
        return estimate([[*sample.values()] for sample in samples], signs)
    seeds = set.intersection(*map(set, samples))
    return estimate([[np.dot(signs, [sample[seed] for sample in samples]) for seed in seeds]])


# -- The tables of a figure
def split_flags(figure, results):
    """Return the flags that distinguish cells, and those with one value per model."""
    rows = [result.flags for result in results]
    models = {row.get("model") for row in rows}
    keys, settings = [], []
    if len(models) > 1:
        keys.append("model")
    for flag in dict.fromkeys(itertools.chain(*rows)):
        if flag not in ("model", "pe", "seed", *figure.tuned):
            pairs = {(row.get("model"), row.get(flag)) for row in rows}
            (keys if len(pairs) > len(models) else settings).append(flag)
    return keys, settings


def cells_of(measured, keys, omitted=()):
    """Return the flags of each cell, without those that a summary or contrast ranges over."""
    keys = [key for key in keys if key not in omitted]
    cells = dict.fromkeys(tuple(x.flags.get(key) for key in keys) for x in measured)
    return [dict(zip(keys, values)) for values in cells]


def describe(figure, results, measures):
    """Yield caption parts: settings without a column, seeds, chance accuracy, trials."""
    finished = finished_of(results)
    shared = shared_settings(finished)
    models = defaultdict(list)  # {settings: models that share them}
    keys, settings = split_flags(figure, results)
    for model in dict.fromkeys(result.flags.get("model") for result in results):
        trials = select(results, dict(model=model))
        cell = {flag: trials[0].flags.get(flag) for flag in settings}
        cell |= shared_settings(finished_of(trials))
        cell = {flag: value for flag, value in cell.items() if flag not in shared}
        models[", ".join(name_cell(cell))].append(name_of(model or ""))
    for words, names in models.items():
        text = ": ".join(filter(None, [", ".join(names), words]))
        if text and (words or "model" not in keys):
            yield text
    yield from name_cell(shared)
    if len(measures) == 1:
        yield measures[0].label
    if finished:
        seeds = Counter(str(result.flags | dict(seed=0)) for result in finished)
        yield f"n = {format_range([str(n) for n in sorted(seeds.values())])}"
        if "accuracy" in " ".join(figure.metrics):
            chances = sorted(map(chance, finished), reverse=True)
            yield f"chance {format_range([f'{x:.3g}' for x in chances])}"
    yield f"{len(finished)} of {len(results)} trials"


def shared_settings(finished):
    """Return {flag: value} of the main flags that have the same value in all trials."""
    values = {flag: {trial.config.get(flag) for trial in finished} for flag in MAIN_FLAGS}
    return {flag: x.pop() for flag, x in values.items() if len(x) == 1 and None not in x}


def format_range(words):
    """Return "FIRST to LAST", or one word if both are equal."""
    return " to ".join(dict.fromkeys([words[0], words[-1]]))


def table(figure, results, measures):
    """Return the lines of a table: a header, then each metric's name and a row per cell."""
    keys, _ = split_flags(figure, results)
    encodings = list(dict.fromkeys(result.flags["pe"] for result in results))
    encodings.sort(key=(COLUMN_ORDER + encodings).index)
    cells = [select(results, cell) for cell in cells_of(results, keys)]
    labels = dict.fromkeys(x.label for cell in cells for x in default_contrasts(cell))
    if len(labels) > 2:
        labels = ["PE - no PE", "PE - control"]
    header = [FLAG_NAMES.get(key, key.replace("_", "-")) for key in keys]
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
    arms = [dict(pe=pe) for pe in encodings]
    if "pe" in measure.over:
        arms = [{}]
    for cell in cells_of(measured, keys, measure.over):
        in_cell = select(measured, cell)
        words = [format_flag(key, cell.get(key, "")) for key in keys]
        words += [format_mean(select(in_cell, arm), measure) for arm in arms]
        for contrast in default_contrasts(in_cell):
            trials = select(in_cell, contrast.high) + select(in_cell, contrast.low)
            found = None if any(map(is_censored, trials)) else evaluate(contrast, in_cell)
            words += format_difference(found)
        yield words


def contrast_table(figure, results, measures):
    """Return the lines of a table of the figure's contrasts, one row per matching cell."""
    keys, _ = split_flags(figure, results)
    rows = []
    for contrast in figure.contrasts:
        measured = measurements(results, as_measure(contrast.measure or measures[0]))
        sides = [flags for _, flags in contrast.terms()]
        for cell in cells_of(measured, keys, set().union(*sides)):
            if all(select(measured, cell | flags) for flags in sides):
                label = ", ".join([contrast.label, *name_cell(cell)])
                difference = evaluate(contrast, select(measured, cell))
                rows.append([label, *format_difference(difference)])
    return align(rows) if rows else []


# -- Preregistered claims
CLAIMS_HEADER = """\
| claim | no PE | control | PE | difference [95% CI] | p (Holm) | outcome |
| --- | --- | --- | --- | --- | --- | --- |"""


def claims_table(claims):
    """Yield Markdown for [(Claim, link to its figure, [Result])], Holm-corrected by family."""
    families = defaultdict(list)
    for claim, link, results in claims:
        families[claim.family].append(test_claim(claim, link, results))
    for family, tested in families.items():
        yield f"**{family}** ({len(tested)} claims)\n"
        yield CLAIMS_HEADER
        rows, p_values = zip(*tested)
        outcomes = [["-", "trials missing"]] * len(rows)
        if None not in p_values:
            outcomes = map(outcome, *map(holm, zip(*p_values)))
        for row, verdict in zip(rows, outcomes):
            yield f"| {' | '.join([*row, *verdict])} |"
        yield ""


def test_claim(claim, link, results):
    """Return a claim's table row and its p-values, which are None if trials are missing."""
    measure = as_measure(claim.measure)
    measured = select(measurements(results, measure), claim.cell)
    contrasts = [claim.contrast] if claim.contrast else default_contrasts(measured)
    estimates = [evaluate(contrast, measured) for contrast in contrasts]
    differences = [format_difference(found)[0] for found in estimates]
    if claim.contrast:
        subject, means = claim.contrast.label, ["-"] * 3
    else:
        subject = ", ".join(name_cell(claim.cell))
        arms = contrasts[0].low, contrasts[-1].low, contrasts[0].high
        means = [format_mean(select(measured, arm), measure) for arm in arms]
        labels = [contrast.label for contrast in contrasts]
        differences = map(": ".join, zip(labels, differences))
    row = [f"[{subject}]({link}): {measure.label}", *means, "<br>".join(differences)]
    missing = None in estimates or any(x.value is None for x in measured)
    return row, None if missing else all_above(estimates)


def outcome(p_above, p_below):
    """Return the corrected two-sided p-value, as text, and the verdict."""
    verdict = "inconclusive"
    if p_below <= LEVEL:
        verdict = "contradicted"
    elif p_above <= LEVEL:
        verdict = "supported"
    return [format_p(min(1.0, 2 * min(p_above, p_below))), verdict]
