"""Figures and claims, rows of data beside the task that they are about, and the statistics that judge them.

A `Figure` says what one trial contributes, a `Claim` what the paper says about them. A claim's verdict is
that of a t test: `yes` where the 95% interval of the difference lies above zero, `no` where it lies below
(the opposite is shown), else `undecided`. Primary claims, the paper's own sentences and a few on what is
beyond it, are corrected for being several (Holm); all others are exploratory.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

YES, NO, UNDECIDED, TOO_FEW = "yes", "no", "undecided", "not enough trials"
ENOUGH = 3  # trials on each side of a claim
LEVEL = 0.025  # of each of the two directions: together a 95% interval
MOST_PRIMARY = 10  # of a scale; and as many on what is beyond the paper


def name_of(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


# ------------------------------------------------------------------------------------------------------------
# Figures, and the trials that they show
# ------------------------------------------------------------------------------------------------------------


@dataclass
class Figure:
    """How to print and draw a grid. Without `curves`: a panel for each model and metric, in it a line for
    each encoding over the flag `x`. With them: the lines (panel, line, {x: y}) of curves(outcome)."""

    title: str
    metrics: dict  # name -> function of an Outcome that gives one number
    x: str  # a flag; with `curves` what their x is, in words
    curves: Callable | None = None
    y: str = "token accuracy"  # of the curves
    file: str = "result.json"  # or stability.json, whose metrics stand at its top level
    needs_curve: bool = False  # curve.csv too
    # A second picture, from curve.csv: accuracy against iterations. The grid has to set model, pe and vocab.
    training: bool = False
    each: bool = False  # of `curves`: a line per trial, not their mean and its interval
    zero: bool = True  # the y axes begin at zero
    log_y: bool = False
    chance: Callable | None = None  # chance(K, L): the accuracy of a model without memory
    names: dict | None = None  # of the legend's lines, where they are not those of a recurrent model
    tables: Callable | None = None  # tables(outcomes, scale) -> [{heading: column}]; else one per metric
    note: Callable | None = None  # note(scale) -> lines to stand below the verdicts
    beyond: bool = False  # beyond the paper: last in RESULTS.md

    def lines(self, outcome):
        """What one trial adds to the drawing: (panel, y label, line, {x: y})."""
        if self.curves:
            return [(panel, self.y, line, points) for panel, line, points in self.curves(outcome)]
        panel, line, x = self.place(outcome.flags)
        return [(panel, name, line, {x: metric(outcome)}) for name, metric in self.metrics.items()]

    def place(self, flags):
        """Where trials with these flags are drawn, without `curves`: (panel, line, x)."""
        x = flags[self.x]
        if self.x == "pe" and flags.get("amplitude") is not None:
            x = f"{x},\nlength {flags['amplitude']:g}"
        return name_of(flags.get("model", "")), flags["pe"], x


@dataclass(frozen=True)
class Outcome:
    """What a report reads of a finished trial."""

    flags: dict  # the grid's
    metrics: dict
    config: dict = field(default_factory=dict)  # every flag that changes the result
    about: dict = field(default_factory=dict)  # the whole file: device, commit, versions
    seconds: float = 0.0
    text: tuple = ()  # fingerprints of the files that it read
    curve: dict = field(default_factory=dict)  # {column: [values]} of curve.csv, where a figure asks for it


class Outcomes:
    """The trials of a grid, [(flags, Outcome or None)], and what tables and claims ask of them.

    `rows` are the flags of the whole grid, also where `trials` are a part of it: max is the largest there.
    """

    def __init__(self, trials, rows=None):
        self.trials = trials
        self.rows = [flags for flags, _ in trials] if rows is None else rows

    def resolved(self, flags):
        """The flags; a value of min or max becomes the smallest or largest of the grid."""
        values = {k: self.values_of(k) for k, v in flags.items() if callable(v)}
        return {k: v(values[k]) if values.get(k) else v for k, v in flags.items()}

    def where(self, **flags):
        """Those with these flags, `resolved`."""
        flags = self.resolved(flags)
        has = lambda row: all(row.get(k) == v for k, v in flags.items())
        return Outcomes([t for t in self.trials if has(t[0])], [row for row in self.rows if has(row)])

    def values_of(self, flag):
        return {row[flag] for row in self.rows if row.get(flag) is not None}

    def finished(self):
        return [outcome for _, outcome in self.trials if outcome]

    def values(self, metric):
        return [float(metric(outcome)) for outcome in self.finished()]

    def cells(self):
        """{flags without the seed: Outcomes}, in the order of the grid."""
        found = {}
        for flags, outcome in self.trials:
            cell = tuple((k, v) for k, v in flags.items() if k != "seed")
            found.setdefault(cell, Outcomes([])).trials.append((flags, outcome))
        return found

    def texts(self):
        """How many finished trials read each text; trials of different ones are not compared."""
        return Counter(outcome.text for outcome in self.finished())


# ------------------------------------------------------------------------------------------------------------
# Statistics
# ------------------------------------------------------------------------------------------------------------

NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)


def t_tail(t, freedom):
    """The chance that Student's t exceeds `t`.

    With t = sqrt(freedom) tan(angle) its density is cos(angle) ** (freedom - 1), but for a factor.
    """
    start = np.arctan(t / np.sqrt(freedom))

    def integral(low, high):
        angles = (low + high) / 2 + (high - low) / 2 * NODES
        return (high - low) / 2 * (WEIGHTS * np.cos(angles) ** (freedom - 1)).sum()

    return float(integral(start, np.pi / 2) / (2 * integral(0, np.pi / 2)))


@cache
def t_quantile(tail, freedom):
    """The t that Student's t exceeds with this chance, below one half: halving an interval of angles."""
    low, high = 0.0, np.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        t = np.sqrt(freedom) * np.tan(middle)
        low, high = (middle, high) if t_tail(t, freedom) > tail else (low, middle)
    return float(np.sqrt(freedom) * np.tan(low))


def bootstrap_interval(values):
    """The paper's interval of a mean, 95% percentile bootstrap; None with fewer than two values."""
    if len(values) < 2:
        return None
    resampled = np.random.default_rng(0).choice(np.float64(values), (10_000, len(values)))
    return tuple(np.percentile(resampled.mean(axis=1), [2.5, 97.5]).tolist())


@dataclass(frozen=True)
class Difference:
    """Of two means, or of two gains, as a t test sees it."""

    higher: float
    lower: float
    counts: tuple  # trials on either side
    error: float  # standard error of the difference
    freedom: float  # degrees of freedom of that error
    label: str = ""  # which of a claim's comparisons this is, where it has several

    @property
    def value(self):
        return self.higher - self.lower

    def above(self, threshold=0.0):
        """p-value: the chance of a difference so large if the true one were not above the threshold."""
        return self.tail(self.value - threshold)

    def below(self, threshold=0.0):
        return self.tail(threshold - self.value)

    def tail(self, distance):
        if self.error == 0:  # all values of every sample are the same
            return 0.0 if distance > 0 else 1.0
        return t_tail(distance / self.error, self.freedom)

    def interval(self):
        """95%; where no sample has any spread, the difference alone."""
        reach = t_quantile(LEVEL, self.freedom) * self.error
        return self.value - reach, self.value + reach

    @property
    def words(self):
        low, high = self.interval()
        return f"{self.value:+.4f} [{low:+.4f}, {high:+.4f}]"


def difference(higher, lower):
    """Welch's t of two lists of samples. The second sample of a list is a base: its mean is taken off.

    The degrees of freedom are Welch's and Satterthwaite's, for a difference of differences too.
    """
    means = [mean(side[0]) - sum(map(mean, side[1:])) for side in (higher, lower)]
    counts = min(map(len, higher)), min(map(len, lower))
    return Difference(*means, counts, *spread(*higher, *lower))


def paired_difference(higher, lower):
    """Paired t: two numbers of the same trials."""
    counts = len(higher), len(lower)
    return Difference(
        float(np.mean(higher)), float(np.mean(lower)), counts, *spread(np.subtract(higher, lower))
    )


def mean(sample):
    """Of equal values exactly theirs: a rounding error beside no spread would be significant."""
    return float(sample[0] + np.mean(np.subtract(sample, sample[0])))


def spread(*samples):
    """-> (standard error, degrees of freedom) of a sum or difference of the samples' means."""
    squares = np.array([np.var(np.subtract(sample, sample[0]), ddof=1) / len(sample) for sample in samples])
    each = np.array([len(sample) - 1 for sample in samples])
    total = squares.sum()
    shares = squares / total if total > 0 else each / each.sum()
    return float(np.sqrt(total)), float(1 / (shares**2 / each).sum())


def holm(p_values, family):
    """Holm's correction, where p_values are some of a family's; the others count as 1."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (family - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


# ------------------------------------------------------------------------------------------------------------
# Claims and their verdicts
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A sentence about a figure, mostly the paper's: trials with the flags `higher` are above `lower`'s.

        Claim("fig2", "the encoding helps {model} at the largest vocabulary", accuracy,
              higher=SIN | dict(vocab=max), lower=NONE | dict(vocab=max), per="model")

    `min` or `max` as a flag's value stands for the smallest or largest among the trials that it is about.

    With `over` gains are compared: higher=SIN | dict(vocab=max), lower=SIN | dict(vocab=min), over=NONE says
    that the gain of sin over none grows with the vocabulary.

    With `than` two numbers of the same trials are compared, in pairs: metric=first, higher=NONE, lower=NONE,
    than=last says that without an encoding the first is above the last.

    With `controls` it must be true of the cell without encoding and of a control in its place, the first of
    them that has run. Its p-value is the larger of the two; the numbers begin with that comparison's.

    With a margin it claims that there is no gain: higher=DUP, lower=NONE, margin="0.02" is `no` where the
    interval lies above zero, however little, else `yes` where it lies below .02 (a loss is no gain).
    """

    figure: str
    text: str  # {model}, ... stand for the values in `where` and of `per`, {higher[vocab]} for a side's
    metric: Callable  # an Outcome -> a number
    higher: dict  # flags that leave one cell
    lower: dict | float  # flags of one cell; or a number, and the mean of every cell of `higher` is above it
    than: Callable | None = None  # the metric of `lower`, where it is another; of the same trials, in pairs
    where: dict = field(default_factory=dict)  # the trials it is about
    over: dict | None = None  # flags: what is compared are gains over the trials that differ in these
    controls: tuple = ()  # flags, each of which replaces those of the side, or of `over`, that has pe none
    per: str = ""  # a flag: one claim for each of its values in the grid
    margin: str = ""  # claims no gain: of so much, such as "0.02", or "1%" of the mean of `lower`
    primary: bool = False  # one of the few that are corrected for being several
    scales: tuple = ()  # made at these alone, or at all; an absolute number is claimed at paper scale only

    def is_made_at(self, scale):
        return not self.scales or scale in self.scales


@dataclass(frozen=True)
class Verdict:
    """What the trials say of a claim."""

    claim: Claim
    difference: Difference | None = None  # None: not enough trials
    why: str = ""  # there are not enough
    shown: float = 1.0  # p-value of the claim, one-sided
    opposite: float = 1.0  # and of its opposite
    beside: tuple = ()  # Differences: the other comparisons of a claim with `controls`

    @property
    def word(self):
        if self.difference is None:
            return TOO_FEW
        if self.opposite <= LEVEL:
            return NO
        return YES if self.shown <= LEVEL else UNDECIDED

    @property
    def numbers(self):
        if self.difference is None:
            return self.why
        d, p = self.difference, min(1.0, 2 * min(self.shown, self.opposite))
        n, m = (f" (n={count})" if count else "" for count in d.counts)
        label = f"{d.label}: " if d.label else ""
        means = f"{label}{d.higher:.4f}{n} against {d.lower:.4f}{m}"
        margin = f", margin {self.claim.margin}" if self.claim.margin else ""
        p_value = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
        others = [f"; {other.label}: {other.words}" for other in self.beside]
        return f"{means}, difference {d.words}{margin}, {p_value}{''.join(others)}"


def expand(claim, outcomes):
    """The claims that one row stands for in a grid: one per value of `per`, with the text filled in."""
    sides = [side for side in (claim.higher, claim.lower) if isinstance(side, dict)]
    bases = [] if claim.over is None else [side | claim.over for side in sides]
    for value in dict.fromkeys(flags.get(claim.per) for flags, _ in outcomes.where(**claim.where).trials):
        where = claim.where | ({claim.per: value} if claim.per else {})
        subject = outcomes.where(**where)
        if all(subject.where(**side).trials for side in sides + bases):
            words = {k: name_of(v or "") if k == "model" else v for k, v in where.items()}
            words |= {name: subject.resolved(side) for name, side in zip(("higher", "lower"), sides)}
            yield replace(claim, text=claim.text.format(**words), where=where, per="")


def judge(claim, outcomes):
    """The Verdict on a claim without `per`, before any correction."""
    subject = outcomes.where(**claim.where)
    if not isinstance(claim.lower, dict):
        return decided(claim, *against_number(claim, subject))
    over_none, why = compare(claim, subject)
    differences = [over_none]
    if claim.controls:
        control, over_control, why_not = with_control(claim, subject)
        names = f"none and {control}" if control else "none"
        claim = replace(claim, text=f"{claim.text} (over {names})")
        if control:
            over_none = over_none and replace(over_none, label="over none")
            differences, why = [over_none, over_control], why or why_not
    return decided(claim, differences, why)


def decided(claim, differences, why):
    """All differences have to show the claim: the largest p-value counts (intersection-union).

    One is enough for the opposite: its smallest p-value is multiplied by their number (Bonferroni).
    """
    if why:
        return Verdict(claim, why=why)
    found = [(*p_values(claim, one), one) for one in differences]  # (shown, opposite, Difference)
    found.sort(key=lambda one: (one[0], -one[2].value))
    shown, _, weakest = found[-1]
    opposite = min(1.0, len(found) * min(one[1] for one in found))
    beside = tuple(one[2] for one in found[:-1]) if claim.controls else ()
    return Verdict(claim, weakest, "", shown, opposite, beside)


def p_values(claim, d):
    """Of the claim and of its opposite, one-sided."""
    if not claim.margin:
        return d.above(), d.below()
    percent = claim.margin.endswith("%")
    margin = float(claim.margin[:-1]) / 100 * abs(d.lower) if percent else float(claim.margin)
    return d.below(margin), d.above()


def compare(claim, subject):
    """-> (the Difference of the claim's two sides, why there is none)"""
    higher, lower = subject.where(**claim.higher), subject.where(**claim.lower)
    same = higher.trials == lower.trials
    for flag in claim.higher.keys() & claim.lower.keys():  # min is max where the grid has one value
        if {claim.higher[flag], claim.lower[flag]} == {min, max} and len(subject.values_of(flag)) == 1:
            return None, "the grid has nothing to compare"
    sides = [[higher.values(claim.metric)], [lower.values(claim.than or claim.metric)]]
    samples = [higher, lower]
    if claim.over is not None:
        for side, flags in zip(sides, (claim.higher, claim.lower)):
            samples.append(subject.where(**flags | claim.over))
            side.append(samples[-1].values(claim.metric))
    if any(len(sample.cells()) > 1 for sample in samples):
        return None, "more than one cell has these flags: say which by where or per"
    if not all(sample.cells() for sample in samples) or (same and claim.than is None):
        return None, "the grid has nothing to compare"
    fewest = [min(map(len, side)) for side in sides]
    if min(fewest) < ENOUGH:
        return None, f"n = {fewest[0]} and {fewest[1]}"
    if same:
        return paired_difference(sides[0][0], sides[1][0]), ""
    return difference(*sides), ""


def with_control(claim, subject):
    """-> (name, Difference, why there is none) for the first control that has run.

    A name of "" stands for a grid without any control: the claim is about `lower` alone.
    """
    found = []
    for control in claim.controls:
        if claim.over is not None:
            one, sides = replace(claim, over=claim.over | control), [claim.higher, claim.lower]
        elif claim.lower["pe"] == "none":
            one, sides = replace(claim, lower=claim.lower | control), [claim.lower]
        else:  # of a distance, which is higher without a clock
            one, sides = replace(claim, higher=claim.higher | control), [claim.higher]
        if all(subject.where(**side | control).trials for side in sides):
            d, why = compare(one, subject)
            found.append((control["pe"], d and replace(d, label=f"over {control['pe']}"), why))
    for one in found:
        if one[1]:
            return one
    return found[0] if found else ("", None, "")


def against_number(claim, subject):
    """-> (the Differences of all cells of `higher` from the number, why there are none)"""
    found, cells = [], subject.where(**claim.higher).cells()
    for cell, trials in cells.items():
        values = trials.values(claim.metric)
        if len(values) < ENOUGH:
            return [], f"n = {len(values)} in a cell"
        given = [f"{k.replace('_', '-')} {v}" for k, v in cell if v is not None]
        name = f"of {' '.join(given)}" if len(cells) > 1 else ""
        found.append(Difference(mean(values), claim.lower, (len(values), 0), *spread(values), name))
    return found, "" if found else "the grid has nothing to compare"


def claims_of(task, figure, scale):
    """The rows about a figure at a scale."""
    return [claim for claim in task.claims if claim.figure == figure and claim.is_made_at(scale)]


def judge_all(rows, outcomes):
    """The Verdicts on the claims that these rows stand for, before any correction."""
    claims = [claim for row in rows for claim in expand(row, outcomes)]
    if len(outcomes.texts()) > 1:
        return [Verdict(claim, why="of different texts, not compared") for claim in claims]
    return [judge(claim, outcomes) for claim in claims]


def correct(verdicts, least=0):
    """The same Verdicts: primary ones corrected by Holm, as a family of all of these or of `least`."""
    family = max(least, sum(one.claim.primary for one in verdicts))
    primary = [i for i, one in enumerate(verdicts) if one.claim.primary and one.difference]
    shown = holm([verdicts[i].shown for i in primary], family)
    opposite = holm([verdicts[i].opposite for i in primary], family)
    verdicts = list(verdicts)
    for i, p, q in zip(primary, shown, opposite):
        verdicts[i] = replace(verdicts[i], shown=p, opposite=q)
    return verdicts


# ------------------------------------------------------------------------------------------------------------
# What several tasks report and claim
# ------------------------------------------------------------------------------------------------------------


def metric(name):
    """The number of this name among a trial's metrics."""

    def of(outcome):
        if name not in outcome.metrics:
            there = ", ".join(outcome.metrics)
            raise ValueError(
                f"its metrics have no {name!r}, but {there}: without the file it is evaluated anew"
            )
        return outcome.metrics[name]

    return of


accuracy, distance = metric("token_accuracy"), metric("damerau_levenshtein")
ACCURACY = {"token accuracy": accuracy}
BOTH_METRICS = ACCURACY | {"Damerau-Levenshtein distance": distance}
NONE, SIN, DUP, CONSTANT = (dict(pe=pe) for pe in ("none", "sin", "dup", "constant"))
CONTROLS = (CONSTANT, DUP)  # as many inputs without a clock, the fairer one first
NO_GAIN = "0.02"  # of accuracy, to be excluded for "yes"; a gain that is shown, however small, is "no"


def uniform_chance(vocab, length):
    """Of a model without memory, where every integer is as likely an answer."""
    return 1 / vocab


def gains(figure, text, higher, metric=accuracy, per="", primary=False, **at):
    """What a clock gains by itself: it is above none, and above as many inputs without a clock."""
    return [Claim(figure, text, metric, higher, NONE | at, controls=CONTROLS, per=per, primary=primary)]


def helps(figure, whom="", metric=accuracy, per="", primary=False, **at):
    return gains(figure, f"the encoding helps {whom}".strip(), SIN | at, metric, per, primary, **at)


AT_LARGEST = "at K = {higher[vocab]}, the largest"


def helps_at_largest(figure, primary=False):
    """The encoding helps every model at its largest vocabulary, and in edit distance too."""
    large, lowers = dict(vocab=max), f"the encoding lowers {{model}}'s edit distance {AT_LARGEST}"
    return [
        *helps(figure, f"{{model}} {AT_LARGEST}", per="model", primary=primary, **large),
        Claim(figure, lowers, distance, NONE | large, SIN | large, controls=CONTROLS, per="model"),
    ]


def grows(figure, metric=accuracy, primary=False, measured=""):
    """The encoding helps more, the larger the vocabulary."""
    range_of = "from K = {lower[vocab]} to {higher[vocab]}"
    text = f"the encoding's help for {{model}} grows {range_of}{measured}"
    small, large = SIN | dict(vocab=min), SIN | dict(vocab=max)
    more = dict(over=NONE, controls=CONTROLS, per="model", primary=primary)
    return [Claim(figure, text, metric, large, small, **more)]


def at_scales(scales, claims):
    """The claims, made at these scales alone."""
    return [replace(claim, scales=scales) for claim in claims]


def helps_below_largest(grids, figure, metric=accuracy):
    """Each model at each vocabulary of the figure but its largest, which has a claim of its own."""
    found = []
    for scale, of_scale in grids.items():
        cells = dict.fromkeys((row["model"], row["vocab"]) for row in of_scale.get(figure, []))
        for model, vocab in cells:
            if vocab < max(other for name, other in cells if name == model):
                whom, at = f"{name_of(model)} at K = {vocab}", dict(model=model, vocab=vocab)
                found += at_scales((scale,), helps(figure, whom, metric, **at))
    return found


def dup_does_not_help(figure):
    text = "as many parameters without a clock do not help (dup)"
    return [Claim(figure, text, accuracy, DUP, NONE, margin=NO_GAIN)]
