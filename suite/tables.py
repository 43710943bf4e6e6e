"""Tables of a figure's results: means, contrasts, and preregistered claims."""

from collections import Counter

import numpy as np

from suite.cli import as_words
from suite.figures import (
    ENCODING_NAMES,
    Censored,
    default_contrasts,
    distinct,
    has,
    name_of,
    planned,
    points,
    without,
)
from suite.statistics import LEVEL, all_above, estimate, holm

ORDER = ["none", "constant", "dup", "sin"]  # of columns; other encodings follow
HEADERS = {"vocab": "K", "length": "L", "meanings": "M"}


# -- Numbers as text
def decimals(x):
    """How many to show: four digits in all, or what is before the point."""
    return max(0, 3 - sum(abs(x) >= size for size in (10, 100, 1000)))


def short(x):
    return f"{x:,.{decimals(x)}f}"


def p_text(p):
    return "<.001" if p < 0.001 else f"{p:.3f}".replace("0.", ".", 1)


def difference_text(difference):
    low, high = difference.interval()
    return f"{difference.value:+.3f} [{low:+.3f}, {high:+.3f}]"


def mean_text(numbers, measure, planned_seeds):
    """A mean with its 95% confidence interval; how many seeds are censored or missing."""
    if not numbers:
        return "-"
    show, n = getattr(measure, "show", float), len(numbers)
    censored = [x for x in numbers if isinstance(x, Censored)]
    if len(censored) == n and len(set(censored)) == 1:
        edge = f"{show(censored[0]):g}{measure.unit}"
        if censored[0].above:
            return f"not within {edge} (0 of {n} seeds)"
        return f"below {edge} ({n} of {n} censored)"
    mean, found = show(np.mean(numbers)), estimate([numbers])
    text, digits = short(mean), decimals(mean)
    if found and show is float:
        text += f" ±{found.margin():,.{digits}f}"
    elif found:
        low, high = map(show, found.interval())
        text += f" [{low:,.{digits}f}, {high:,.{digits}f}]"
    if censored:
        text += f" ({len(censored)} of {n} censored)"
    return text if n == planned_seeds else f"{text} (n = {n})"


def word_of(flag, value):
    if value is None:
        return "-"
    return name_of(value) if flag == "model" else str(value)


def align(rows):
    """Lines of columns. A row of one word is a heading."""
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1))]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()


# -- Contrasts
def as_list(x):
    return x if isinstance(x, list) else [x]


def select(rows, flags):
    return [row for row in rows if has(row, flags)]


def sample(numbers, flags):
    """{seed: number} of the points with these flags."""
    return {row["seed"]: number for row, number in numbers if has(row, flags)}


def evaluate(contrast, numbers):
    """The Estimate of a contrast among [(flags, number)]; None where seeds are too few."""
    high = [sample(numbers, flags) for flags in as_list(contrast.high)]
    low = [sample(numbers, flags) for flags in as_list(contrast.low)]
    if not contrast.paired:
        return estimate([[*x.values()] for x in high], [[*x.values()] for x in low])
    seeds = set.intersection(*map(set, high + low))
    return estimate([[sum(x[s] for x in high) - sum(x[s] for x in low) for s in seeds]])


def contrast_words(contrast, numbers):
    """The difference with its interval, and p."""
    difference = evaluate(contrast, numbers)
    if difference is None:
        return ["-", "-"]
    return [difference_text(difference), p_text(difference.p())]


# -- The tables of a figure
class FigureTable:
    """A row for every cell: all flags that vary, except encoding, seed and tuned ones."""

    def __init__(self, figure, results, measures):
        self.figure, self.results, self.measures = figure, results, measures
        self.models = {m: results.where(model=m) for m in results.levels("model")}
        flags = dict.fromkeys(flag for row in results.rows for flag in row)
        self.flags = [f for f in flags if f not in ("model", "pe", "seed", *figure.tuned)]
        self.keys = [f for f in self.flags if self.varies(f)]
        if len(self.models) > 1:
            self.keys.insert(0, "model")
        encodings = results.levels("pe")
        self.encodings = sorted(encodings, key=(ORDER + encodings).index)

    def varies(self, flag):
        return any(len(of_model.levels(flag)) > 1 for of_model in self.models.values())

    def settings(self):
        """The flags that have no column, with the models that share them."""
        models = {}
        for model, of_model in self.models.items():
            flags = {f: of_model.levels(f)[0] for f in self.flags if f not in self.keys}
            models.setdefault(" ".join(as_words(flags)), []).append(name_of(model or ""))
        for words, names in models.items():
            if words:
                yield f"{', '.join(names)} {words}".strip()

    def describe(self):
        """The flags that have no column; how many seeds; the accuracy of guessing."""
        yield from self.settings()
        if len(self.measures) == 1:
            yield self.measures[0]
        if not self.results:
            return
        cells = Counter(str(without(result.flags, ["seed"])) for result in self.results)
        yield "n = " + " to ".join(map(str, sorted({min(cells.values()), max(cells.values())})))
        if "accuracy" in " ".join(self.figure.metrics):
            configs = [result.config for result in self.results]
            answers = {config.get("meanings", config["vocab"]) for config in configs}
            ends = sorted({min(answers), max(answers)})
            yield "chance " + " to ".join(f"{1 / n:.2g}" for n in ends)

    def cells(self, plan, over=()):
        keys = [f for f in self.keys if f not in over]
        return distinct({f: row.get(f) for f in keys} for row in plan)

    def lines(self):
        """A header, and for each metric or summary a row per cell, below its name."""
        cells = self.cells(self.results.rows)
        found = [default_contrasts(select(self.results.rows, cell)) for cell in cells]
        labels = dict.fromkeys(c.label for contrasts in found for c in contrasts)
        if len(labels) > 2:
            labels = ["PE - no PE", "PE - control"]
        header = [HEADERS.get(f, f.replace("_", "-")) for f in self.keys]
        header += [ENCODING_NAMES.get(pe, pe) for pe in self.encodings]
        rows = [header + [word for label in labels for word in (label, "p")]]
        for measure in self.measures:
            block = [*self.block(measure)]
            if block and len(self.measures) > 1:
                rows.append([getattr(measure, "label", measure)])
            rows += block
        width = max(map(len, rows))
        yield from align([row + ["-"] * (width - len(row)) * (len(row) > 1) for row in rows])

    def block(self, measure):
        """The rows of one metric or summary."""
        numbers, plan = points(self.results, measure), planned(self.results, measure)
        over = getattr(measure, "over", ())
        arms = [{}] if "pe" in over else [dict(pe=pe) for pe in self.encodings]
        for cell in self.cells(plan, over) if numbers else []:
            words = [word_of(f, cell[f]) if f in cell else "" for f in self.keys]
            of_cell = [(row, x) for row, x in numbers if has(row, cell)]
            for arm in arms:
                seeds = len(select(plan, cell | arm))
                words.append(mean_text([*sample(of_cell, arm).values()], measure, seeds))
            for contrast in default_contrasts(select(plan, cell)):
                words += contrast_words(contrast, of_cell)
            yield words

    def contrasts(self):
        """A row for each of the figure's own contrasts, in every cell that it leaves open."""
        rows = []
        for contrast in self.figure.contrasts:
            measure = contrast.measure or self.measures[0]
            numbers, plan = points(self.results, measure), planned(self.results, measure)
            sides = as_list(contrast.high) + as_list(contrast.low)
            for cell in self.cells(plan, [f for side in sides for f in side]):
                if all(select(plan, cell | side) for side in sides):
                    words = [word_of(f, x) for f, x in cell.items()]
                    of_cell = [(row, x) for row, x in numbers if has(row, cell)]
                    label = ", ".join([contrast.label, *words])
                    rows.append([label, *contrast_words(contrast, of_cell)])
        if rows:
            yield from align(rows)


# -- Preregistered claims
CLAIMS_HEADER = "| claim | no PE | control | PE | difference [95% CI] | p | outcome |"


def claims_table(claims):
    """Markdown lines of [(Claim, link to its figure, Results)], Holm-corrected by family."""
    for family in dict.fromkeys(claim.family for claim, _, _ in claims):
        judged = [Judged(*row) for row in claims if row[0].family == family]
        yield f"**{family}** ({len(judged)} claims)\n"
        yield CLAIMS_HEADER
        yield "|" + " --- |" * CLAIMS_HEADER.count(" |")
        missing = any(claim.missing for claim in judged)
        for claim, p in zip(judged, zip(*map(holm, zip(*(claim.p for claim in judged))))):
            verdict = ["-", "trials missing"] if missing else outcome(*p)
            yield f"| {' | '.join([*claim.words(), *verdict])} |"
        yield ""


class Judged:
    """A claim and its contrasts' estimates."""

    def __init__(self, claim, link, results):
        self.claim, self.link, cell = claim, link, results.where(**claim.cell)
        self.numbers = points(cell, claim.measure)
        self.contrasts = default_contrasts(cell.rows)
        if claim.contrast:
            self.contrasts = [claim.contrast]
        self.estimates = [evaluate(c, self.numbers) for c in self.contrasts]
        self.missing = len(cell.rows) > len(cell) or None in self.estimates
        self.p = (1.0, 1.0) if self.missing else all_above(self.estimates)

    def words(self):
        """What is claimed, the means of no PE, control and PE, and the differences."""
        first, last, means = self.contrasts[0], self.contrasts[-1], ["-"] * 3
        if not self.claim.contrast:
            arms = [sample(self.numbers, side) for side in (first.low, last.low, first.high)]
            means = [mean_text([*arm.values()], self.claim.measure, len(arm)) for arm in arms]
        differences = [difference_text(found) if found else "-" for found in self.estimates]
        labels = [contrast.label for contrast in self.contrasts]
        differences = "<br>".join(map(": ".join, zip(labels, differences)))
        model, *others = self.claim.cell.items()
        cell = ", ".join([word_of(*model), *(f"{HEADERS.get(f, f)} = {x}" for f, x in others)])
        measure = getattr(self.claim.measure, "label", self.claim.measure)
        return [f"[{cell}]({self.link}): {measure}", *means, differences]


def outcome(p_above, p_below):
    """The corrected two-sided p, and what it means."""
    word = "inconclusive"
    if p_below <= LEVEL:
        word = "contradicted"
    elif p_above <= LEVEL:
        word = "supported"
    return [p_text(min(1.0, 2 * min(p_above, p_below))), word]
