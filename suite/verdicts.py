"""Statistics, and verdicts on trials; report.py says what yes, no and undecided mean."""

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

LEVEL = 0.025  # of each of the two directions: together a 95% interval
ENOUGH = 3  # trials on each side
HANDLED = 0.95  # the accuracy that a vocabulary has to have to count as handled


# -- Finished trials
class Result(NamedTuple):
    """A finished trial."""

    flags: dict  # its row of the figure
    metrics: dict
    folder: Path | None = None
    config: dict | None = None
    seconds: float = 0.0  # of training
    processes: tuple = ()  # what is recorded of those that trained it, one after the other

    @property
    def curve(self):
        """curve.csv; curve["loss"] is a column."""
        path = self.folder / "curve.csv"
        return np.genfromtxt(path, delimiter=",", names=True, ndmin=1)


class Results(list):
    """The finished trials of a figure, and the rows of its whole grid."""

    def __init__(self, found, rows):
        super().__init__(found)
        self.rows = rows

    def where(self, **flags):
        """Those with these flags; None: their row does not name the flag."""

        def has(row):
            return all(row.get(k) == v for k, v in flags.items())

        found = [result for result in self if has(result.flags)]
        return Results(found, [row for row in self.rows if has(row)])

    def values(self, metric="token_accuracy", **flags):
        """The metric of those with these flags, a number for each trial."""
        return [number(result, metric) for result in self.where(**flags)]

    def levels(self, flag, **flags):
        """The values that a flag has in the grid, in the rows with these flags."""
        return list(dict.fromkeys(row.get(flag) for row in self.where(**flags).rows))


def number(result, metric):
    """A metric is a name in a trial's metrics, or a function of a Result."""
    return float(metric(result) if callable(metric) else result.metrics[metric])


def each_seed(runs, flag):
    """{seed: token accuracies in the order of the flag's values}, of seeds that have all."""
    found = {}
    for seed in runs.levels("seed"):
        these = sorted(runs.where(seed=seed), key=lambda result: result.flags[flag])
        if len(these) == len(runs.levels(flag)):
            found[seed] = [number(result, "token_accuracy") for result in these]
    return found


def name_of(model):
    return {"mingru": "minGRU", "mamba": "Mamba"}.get(model, model.upper())


def with_article(model):
    return {"gru": "a GRU", "lstm": "an LSTM"}.get(model, name_of(model))


# -- Intervals, and differences of means
def bootstrap_interval(values):
    """The paper's interval of a mean: 95% percentile bootstrap."""
    resampled = np.random.default_rng(0).choice(np.float64(values), (10_000, len(values)))
    return np.percentile(resampled.mean(axis=1), [2.5, 97.5])


ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 20_001)


def chances(freedom):
    """The chance that Student's t is below sqrt(freedom) tan(angle), for each of ANGLES.

    Over the angle its density is, but for a factor, cos(angle) ** (freedom - 1).
    """
    density = np.cos(ANGLES) ** (freedom - 1)
    below = np.cumsum(density) - density / 2  # trapezoids
    return below / below[-1]


def t_tail(t, freedom):
    """The chance that Student's t exceeds `t`, which is that it is below -t."""
    angle = np.arctan(-t / np.sqrt(freedom))
    return float(np.interp(angle, ANGLES, chances(freedom)))


def t_quantile(tail, freedom):
    """The t that Student's t exceeds with this chance."""
    angle = np.interp(tail, chances(freedom), ANGLES)
    return float(-np.sqrt(freedom) * np.tan(angle))


class Difference(NamedTuple):
    """A sum or difference of the means of samples."""

    value: float
    error: float  # its standard error
    freedom: float  # Welch's and Satterthwaite's degrees of freedom
    n: int  # the smallest sample

    def p_above(self):
        """One-sided p: the chance of a difference so large if there were none."""
        return self.tail(self.value)

    def p_below(self, margin=0.0):
        """The chance of one so far below the margin if it were at the margin."""
        return self.tail(margin - self.value)

    def tail(self, distance):
        if self.error == 0:  # all values of every sample are the same
            return 0.0 if distance > 0 else 1.0
        return t_tail(distance / self.error, self.freedom)

    def interval(self):
        reach = t_quantile(LEVEL, self.freedom) * self.error
        return self.value - reach, self.value + reach

    def words(self):
        low, high = self.interval()
        return f"{self.value:+.3f} [{low:+.3f}, {high:+.3f}]"


def mean_and_square(sample):
    """A mean and its standard error squared, both exact where all values are equal."""
    less = np.subtract(sample, sample[0])
    return sample[0] + less.mean(), less.var(ddof=1) / len(less)


def difference(plus, minus=()):
    """The sum of the means of the samples in `plus` less that of those in `minus`.

    None where a sample is too small.
    """
    samples = [*plus, *minus]
    n = min(map(len, samples))
    if n < ENOUGH:
        return None
    means, squares = zip(*map(mean_and_square, samples))
    value = sum(means[: len(plus)]) - sum(means[len(plus) :])
    total = sum(squares)
    each = [square**2 / (len(sample) - 1) for square, sample in zip(squares, samples)]
    freedom = total**2 / sum(each) if total else n  # without an error any will do
    return Difference(float(value), float(np.sqrt(total)), float(freedom), n)


# -- Verdicts
class Verdict(NamedTuple):
    text: str  # a sentence that says task, model, K and L where the figure's title does not
    numbers: str = ""  # none where there are too few trials
    p_yes: float = 1.0  # one-sided p of the sentence
    p_no: float = 1.0  # and of its opposite
    primary: str = ""  # the family of claims that it is corrected with; none: exploratory
    readings: tuple = ("", "")  # what it means if it is yes, and if not

    @property
    def word(self):
        if not self.numbers:
            return "too few trials"
        if self.p_no <= LEVEL:
            return "no"
        return "yes" if self.p_yes <= LEVEL else "undecided"

    @property
    def p(self):
        """Two-sided."""
        return min(1.0, 2 * min(self.p_yes, self.p_no))


def all_of(text, differences, primary=""):
    """Of differences, {name: Difference}.

    For yes all have to be above zero: the largest p counts. For no one below zero is
    enough: its p is multiplied by their number.
    """
    found = differences.values()
    if None in found:
        return Verdict(text, primary=primary)
    p_no = min(1.0, len(found) * min(d.p_below() for d in found))
    numbers = ", ".join(f"{name} {d.words()}".strip() for name, d in differences.items())
    numbers += f", n = {min(d.n for d in found)}"
    return Verdict(text, numbers, max(d.p_above() for d in found), p_no, primary)


def higher(text, high, low):
    """One sample's mean is above another's (Welch's t)."""
    return all_of(text, {"": difference([high], [low])})


def higher_in_pairs(text, high, low):
    """The same, of two numbers of the same trials (paired t)."""
    return all_of(text, {"": difference([np.subtract(high, low)])})


def above(text, values, threshold):
    """A mean is above a number that was fixed before."""
    return all_of(text, {f"less {threshold}": difference([np.subtract(values, threshold)])})


def better(text, high, lows, primary=""):
    """A sample's mean is above that of each other sample, {name: sample}."""
    differences = {f"over {name}": difference([high], [low]) for name, low in lows.items()}
    return all_of(text, differences, primary)


def controls(runs):
    """What the clock has to be better than: none, and as many inputs without a clock."""
    for pe in ("constant", "dup"):
        if pe in runs.levels("pe"):
            return ["none", pe]
    return ["none"]


def clock_raises(runs, text, measure, pe="sin", primary=""):
    """The clock raises a measure above every control's; measure(Results): [a seed's number].

    A primary claim is judged when all trials of `runs` are done.
    """
    if primary and len(runs) < len(runs.rows):
        return Verdict(text, primary=primary)
    lows = {control: measure(runs.where(pe=control)) for control in controls(runs)}
    return better(text, measure(runs.where(pe=pe)), lows, primary)


def gain(runs, text, metric="token_accuracy", pe="sin", primary="", **where):
    """The clock raises a metric above every control's, among the trials with these flags."""

    def values(these):
        return these.values(metric)

    return clock_raises(runs.where(**where), text, values, pe, primary)


def no_gain(text, high, low, margin):
    """Yes: a gain would be below the margin. No: there is a gain, even one below the margin."""
    gained = difference([high], [low])
    if gained is None:
        return Verdict(text)
    numbers = f"{gained.words()}, margin {margin:.3g}, n = {gained.n}"
    return Verdict(text, numbers, gained.p_below(margin), gained.p_above())


def no_gain_of_dup(runs, what):
    """Of Fig. 12: as many inputs as with the clock do not make up for it."""
    text = f"The embedding twice does not help {what} (by .02 or more)."
    return no_gain(text, runs.values(pe="dup"), runs.values(pe="none"), 0.02)


def gain_by_vocabulary(runs, what, metric="token_accuracy"):
    for vocab in runs.levels("vocab"):
        yield gain(runs, f"The clock helps {what} at K = {vocab}.", metric, vocab=vocab)


def holm(verdicts):
    """The verdicts; each family of primary ones corrected by Holm, each direction apart."""
    corrected = list(verdicts)
    families = {verdict.primary for verdict in verdicts} - {""}
    for family, name in itertools.product(families, ("p_yes", "p_no")):
        these = [i for i, verdict in enumerate(verdicts) if verdict.primary == family]
        p = {i: getattr(verdicts[i], name) for i in these}
        largest = 0.0
        for rank, i in enumerate(sorted(p, key=p.get)):
            largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
            corrected[i] = corrected[i]._replace(**{name: largest})
    return corrected


# -- What figures over the vocabulary ask
def crossing(places, heights, limit):
    """The first place where heights, joined by straight lines, fall below a limit.

    If the first height is below, it is the first place; if none is, the last.
    """
    if heights[0] < limit:
        return places[0]
    for (left, before), (right, after) in itertools.pairwise(zip(places, heights)):
        if after < limit:
            return left + (before - limit) / (before - after) * (right - left)
    return places[-1]


def crossings(runs, accuracy=HANDLED):
    """log2 of the K at which a seed falls to this accuracy, of seeds with all vocabularies."""
    places, seeds = np.log2(sorted(runs.levels("vocab"))), each_seed(runs, "vocab")
    return [crossing(places, heights, accuracy) for heights in seeds.values()]


def areas(runs):
    """The area under accuracy over log2 K, of each seed that has all vocabularies.

    Neighbours are joined by straight lines. It is divided by the range of log2 K: all
    right is 1.
    """
    places, seeds = np.log2(sorted(runs.levels("vocab"))), each_seed(runs, "vocab")
    width = places[-1] - places[0]
    return [np.trapezoid(heights, places) / width for heights in seeds.values()]


def vocabulary_sentences(runs, accuracy=HANDLED):
    """The vocabulary that each model handles."""
    for model in runs.levels("model"):
        of = runs.where(model=model)
        vocabs = sorted(of.levels("vocab"))
        crossed = {pe: crossings(of.where(pe=pe), accuracy) for pe in of.levels("pe")}
        every = [at for of_pe in crossed.values() for at in of_pe]
        if len(vocabs) > 2 and every:
            falls = f"The accuracy of {with_article(model)} falls to {accuracy:.0%}"
            means = [f"{2 ** np.mean(at):.3g} ({pe})" for pe, at in crossed.items() if at]
            outermost = sum(at in np.log2([vocabs[0], vocabs[-1]]) for at in every)
            at_end = f"{outermost} of {len(every)} seeds at an end"
            yield f"{falls} at K = {', '.join(means)}; {at_end}."
