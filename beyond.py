"""Beyond the paper: shorter inputs, what in the clock helps, Mamba, the end of training.

    python reverse.py --scale desk --all fig2-short    # Fig. 2's questions at L = 16
    python delayed_add.py --scale desk --all clocks    # parts of the sinusoid, other clocks
    python reverse.py --scale desk --all mamba         # Mamba of one block and of two
    python reverse.py --scale desk --all fig2-end      # is it only that learning is faster?

Each function that returns {name: Figure} is called by reverse.py or delayed_add.py, which add
these figures to their own.
"""

import functools
from typing import NamedTuple

import numpy as np

from suite.task import BOTH, BOTH_METRICS, WITH_CONSTANT, WITH_CONTROLS, Figure, cross
from suite.verdicts import (
    HANDLED,
    all_of,
    areas,
    better,
    clock_raises,
    crossing,
    crossings,
    difference,
    each_seed,
    gain,
    gain_by_vocabulary,
    higher,
    number,
    vocabulary_sentences,
    with_article,
)

# -- Fig. 2 of other trials
PAPERS_SIZE = dict(length=64, hidden=512, embed=512, batch=512, lr=1e-3)


def like_fig2(fig2, short, twice):
    """Figures with fig2's questions on rows of other trials.

    They are exploratory: such trials had been seen before.
    """

    def exploratory(runs):
        return [verdict._replace(primary="") for verdict in fig2.verdicts(runs)]

    def figure(title, rows, **options):
        options |= dict(metrics=BOTH_METRICS, notes=vocabulary_sentences)
        return Figure(title, {"desk": rows}, exploratory, **options)

    cell = dict(**PAPERS_SIZE, iterations=20_000, seed=range(3))
    early = cross(model="gru", pe=WITH_CONSTANT, vocab=64, **cell)
    return {
        "fig2-short": figure("Reverse ordering, L = 16", short),
        "fig2-short-twice": figure("Reverse ordering, L = 16, twice the training", twice),
        "fig2-early": figure("The paper's size, early in training", early, picture=False),
    }


def more_of_fig2(rows):
    """Fig. 2 with other seeds, and a measure that needs no such limit as 95%."""

    def judge(runs):
        for model in runs.levels("model"):
            text = "The clock raises the area under the accuracy of"
            text += f" {with_article(model)} over log2 K."
            yield clock_raises(runs.where(model=model), text, areas, primary="end")

    title = "Reverse ordering, seeds 11 to 13"
    options = dict(metrics=BOTH_METRICS, notes=vocabulary_intervals)
    return {"fig2-more": Figure(title, {"desk": rows}, judge, **options)}


def vocabulary_intervals(runs):
    """The vocabulary that each model handles, at two accuracies, and what the clock adds."""
    for accuracy in (HANDLED, 0.8):
        yield from vocabulary_sentences(runs, accuracy)
        measure = functools.partial(crossings, accuracy=accuracy)
        for model in runs.levels("model"):
            # Of a verdict the numbers alone
            added = clock_raises(runs.where(model=model), "", measure).numbers
            if added:
                of = f"the K at {accuracy:.0%} of {with_article(model)}"
                yield f"What the clock adds to log2 of {of}: {added}."


# -- Which clock
PHASES = {
    "clock while reading": dict(encode="input"),
    "clock while answering": dict(encode="output"),
}
THIRDS = {
    "fast third of its frequencies": dict(bands="0:0.3334"),
    "middle third of its frequencies": dict(bands="0.3334:0.6667"),
    "slow third of its frequencies": dict(bands="0.6667:1"),
}
MISSING = {"random": "order", "ramp": "a period", "shuffled": "continuity"}
CLOCKS = ["none", "dup", "sin", "random", "ramp", "counter", "shuffled"]


def which_clock(title, cell, parts=PHASES):
    """`cell` holds all trials' flags; `parts` are those of the clock that are tried alone."""
    rows = cross(**cell, pe=CLOCKS)
    for flags in parts.values():
        rows += cross(**cell, pe="sin", **flags)

    def judge(runs):
        whole = runs.where(encode=None, bands=None)
        sin = whole.values(pe="sin")
        for pe, missing in MISSING.items():
            text = f"{title}: the clock is better than one without {missing} ({pe})."
            yield higher(text, sin, whole.values(pe=pe))
        text = f"{title}: random vectors help (asked after the data were seen)."
        yield gain(whole, text, pe="random")
        controls = {pe: whole.values(pe=pe) for pe in ("none", "dup")}
        for part, flags in parts.items():
            text = f"{title}: the {part} alone helps."
            yield better(text, runs.values(**flags), controls)

    x = ("pe", "encode", "bands")
    return {"clocks": Figure(f"{title}: which clock", {"desk": rows}, judge, x=x)}


# -- Mamba, a model of today
MAMBA = dict(model="mamba", length=32, hidden=64, embed=64)
# Blocks, K, the rate best for pe none on seed 100
DEPTHS = (1, 16, 3e-2), (2, 16, 1e-2), (2, 256, 1e-2)


def mamba():
    """Figures of reverse ordering by Mamba."""
    one_block = dict(lr=2e-2, iterations=2000, pe=WITH_CONTROLS)
    rows = cross(**MAMBA, **one_block, vocab=[16, 64, 256, 1024])
    deep = []
    for blocks, vocab, lr in DEPTHS:
        cell = dict(blocks=blocks, vocab=vocab, lr=lr, iterations=4000)
        deep += cross(**MAMBA, **cell, pe=WITH_CONSTANT)

    def judge_vocabularies(runs):
        return gain_by_vocabulary(runs, "one block of Mamba")

    def judge_depths(runs):
        for blocks, vocab, _ in DEPTHS:
            of = f"{blocks} block{'s' * (blocks > 1)}"
            text = f"The clock helps Mamba of {of} at K = {vocab}."
            yield gain(runs, text, blocks=blocks, vocab=vocab)
        none, sin = (runs.where(pe=pe, vocab=16) for pe in BOTH)
        plus = [sin.values(blocks=1), none.values(blocks=2)]
        minus = [none.values(blocks=1), sin.values(blocks=2)]
        text = "The clock helps one block more than two, at K = 16."
        yield all_of(text, {"over none": difference(plus, minus)})

    return {
        "mamba-vocab": Figure("One block of Mamba, L = 32", {"desk": rows}, judge_vocabularies),
        "mamba": Figure(
            "Mamba of one block and of two",
            {"desk": deep},
            judge_depths,
            x=("pe", "blocks", "vocab"),
        ),
    }


# -- The end of training. All of this was fixed before its trials: RESULTS.md, Protocol
class Cell(NamedTuple):
    vocab: int
    rate: float  # fig2's, as are the iterations
    iterations: int
    times: tuple  # the lengths of training, as multiples of these iterations
    seeds: range
    best: dict  # each encoding's rate, from fig2-rates


CELLS = {
    "gru": Cell(32, 3e-3, 30_000, (1, 4), range(11, 15), {"none": 6e-3, "sin": 6e-3}),
    "lstm": Cell(64, 3e-3, 30_000, (1, 4), range(11, 15), {"none": 3e-3, "sin": 6e-3}),
    "s4d": Cell(256, 1e-2, 10_000, (1, 4, 8), range(11, 17), {"none": 2e-2, "sin": 2e-2}),
}


def to_find_rates():
    rows = []
    for model, cell in CELLS.items():
        flags = dict(model=model, vocab=cell.vocab, length=32, iterations=cell.iterations)
        rates = [cell.rate / 2, cell.rate, cell.rate * 2]
        rows += cross(**flags, pe=BOTH, lr=rates, seed=100)
    return rows


def to_the_end():
    rows = []
    for model, cell in CELLS.items():
        flags = dict(model=model, vocab=cell.vocab, length=32, seed=cell.seeds)
        iterations = [cell.iterations * times for times in cell.times]
        for pe in BOTH:
            rows += cross(**flags, pe=pe, lr=cell.best[pe], iterations=iterations)
        flags |= dict(pe="constant", lr=cell.best["none"], iterations=iterations[-1])
        rows += cross(**flags)
    return rows


def at_a_lower_rate():
    """A GRU's longest trials, but those without a clock have fig2's rate."""
    cell = CELLS["gru"]
    flags = dict(model="gru", vocab=cell.vocab, length=32, seed=cell.seeds)
    flags["iterations"] = cell.iterations * cell.times[-1]
    rows = cross(**flags, pe=["none", "constant"], lr=cell.rate)
    return rows + cross(**flags, pe="sin", lr=cell.best["sin"])


def best_rates(runs):
    for model in runs.levels("model"):
        for pe in BOTH:
            tried = runs.where(model=model, pe=pe)
            if tried and len(tried) == len(tried.rows):
                best = max(tried, key=lambda result: number(result, "token_accuracy"))
                name, rate = with_article(model), best.flags["lr"]
                yield f"The best rate of {name} with {pe} is {rate:g}."


def worths(runs):
    """log2 of how many times the training `none` needs to be as good as the clock after 1.

    One number for each seed. Between the lengths of training `none` goes along a
    straight line in log2.
    """
    iterations = sorted(runs.levels("iterations"))
    places = np.log2(np.divide(iterations, iterations[0]))
    found = []
    for seed, none in each_seed(runs.where(pe="none"), "iterations").items():
        # One number, or none if that trial is not done
        for clock in runs.values(pe="sin", iterations=iterations[0], seed=seed):
            # Where `none` rises above the clock: where -none falls below -clock
            found.append(crossing(places, np.negative(none), -clock))
    return found


def worth_in_training(runs):
    for model in runs.levels("model"):
        of = runs.where(model=model)
        found = worths(of)
        worth = difference([found])
        if worth is None:
            continue
        mean, low, high = np.exp2([worth.value, *worth.interval()])
        most = max(of.levels("iterations")) // min(of.levels("iterations"))
        outermost = sum(at in (0, np.log2(most)) for at in found)
        text = f"What {with_article(model)} has with the clock at 1 time the training, it has"
        text += " without at"
        times = f"{mean:.2f} [{low:.2f}, {high:.2f}] times"
        at_end = f"{outermost} of {len(found)} seeds at an end (1 or {most} times)"
        yield f"{text} {times}; {at_end}."


def readings(runs):
    """What one model's claim at the longest training means: if it is yes, and if not.

    The limits are those of "How (A) is read" in RESULTS.md. What `none` gains is paired: a
    seed's trials share first weights, data and held-out set.
    """
    none, sin = (each_seed(runs.where(pe=pe), "iterations").values() for pe in BOTH)
    ends = [accuracies[-1] for accuracies in none]
    lead = difference([[accuracies[-1] for accuracies in sin]], [ends])
    last_gain = difference([[accuracies[-1] - accuracies[-2] for accuracies in none]])
    if lead is None or len(runs) < len(runs.rows):
        return "", ""
    if np.mean(ends) > 0.97:
        return ("left out, none ends above .97",) * 2
    times = max(runs.levels("iterations")) // min(runs.levels("iterations"))
    yes = f"still ahead after {times} times the training; the end was not reached"
    if last_gain.interval()[1] < 0.01:
        yes = "the clock raises where training ends"
    low, high = lead.interval()
    otherwise = "a speed-up alone" if -0.02 <= low and high <= 0.02 else "undecided"
    gained = f"(none gained {last_gain.words()} from the last lengthening)"
    return f"{yes} {gained}", f"{otherwise} {gained}"


def judge_the_end(runs):
    for model, cell in CELLS.items():
        of = runs.where(model=model)
        times = cell.times[-1]
        text = f"After {times} times the training the clock helps {with_article(model)}"
        text += f" at K = {cell.vocab}."
        claim = gain(of, text, primary="end", iterations=times * cell.iterations)
        yield claim._replace(readings=readings(of))


def judge_a_lower_rate(runs):
    text = "After 4 times the training the clock helps a GRU, also if it has half the rate"
    yield gain(runs, f"{text} without (asked after the data were seen).")


# -- Longer training with learning rates tuned for it. Preregistered: RESULTS.md, Protocol
def equal_rates():
    """A GRU's three arms at 4x the training budget and one learning rate."""
    flags = dict(model="gru", vocab=32, length=32, iterations=120_000, lr=3e-3)
    return cross(**flags, pe=WITH_CONSTANT, seed=range(11, 15))


def long_rates():
    """Learning rates for 4x (LSTM) and 16x (S4D) the training budget, on a separate seed."""
    lstm = dict(model="lstm", vocab=64, length=32, iterations=120_000, seed=100)
    s4d = dict(model="s4d", vocab=256, length=32, iterations=160_000, seed=100)
    return (
        cross(**lstm, pe="none", lr=[0.75e-3, 1.5e-3, 3e-3])
        + cross(**lstm, pe="sin", lr=[1.5e-3, 3e-3, 6e-3])
        + cross(**s4d, pe=BOTH, lr=[1e-2, 2e-2])
    )


def end_of_training():
    """Figures of reverse ordering at the end of training."""
    return {
        "long-equal": Figure(
            "GRU, 4x training budget, equal learning rates",
            {"desk": equal_rates()},
            picture=False,
        ),
        "long-rates": Figure(
            "Learning rates for longer training, seed 100",
            {"desk": long_rates()},
            notes=best_rates,
            picture=False,
        ),
        "fig2-rates": Figure(
            "Rates, seed 100", {"desk": to_find_rates()}, notes=best_rates, picture=False
        ),
        "fig2-end": Figure(
            "Reverse ordering, the end of training",
            {"desk": to_the_end()},
            judge_the_end,
            x="iterations",
            notes=worth_in_training,
        ),
        "fig2-end-lower": Figure(
            "The end of training of a GRU, at half the rate without the clock",
            {"desk": at_a_lower_rate()},
            judge_a_lower_rate,
            picture=False,
        ),
    }
