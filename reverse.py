"""Reverse ordering (Figs. 2, 12, 13): read L integers, then, at L commands, answer them
last first.

    python reverse.py --model lstm --pe sin --vocab 16384 --seed 0  # a cell of Fig. 2, one seed
    python reverse.py --list fig2                                   # the commands of its trials
    python reverse.py --scale quick --all fig2                      # 2-4 minutes on two cores

    in   3 1 4 _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . 4 1 3        . is not answered and has no loss

The paper's sentence, which Fig. 2 tests: with the clock, --pe sin, a GRU, an LSTM and S4D "can
handle a larger vocabulary". The model is Model in common.py, the training loop is `loop` in
suite/training.py. Rare integers: dual_frequency.py. Inputs of many lengths: variable_length.py.
"""

import numpy as np

import beyond
import common
from common import Episode, distinct_rows, uniform_integers
from suite import cli
from suite.task import (
    BOTH,
    BOTH_METRICS,
    SMOKE,
    WITH_CONSTANT,
    WITH_CONTROLS,
    WITH_DUP,
    Figure,
    Task,
    cross,
)
from suite.verdicts import (
    LEVEL,
    better,
    clock_raises,
    crossings,
    difference,
    gain,
    higher,
    no_gain,
    no_gain_of_dup,
    vocabulary_sentences,
    with_article,
)

FRESH = range(5, 11)  # no trial had used these seeds when desk's grid was fixed


def cross_models(gru_vocab, vocab, s4d_iterations=10_000, **flags):
    """Desk's rows: a GRU's at the K in `gru_vocab`, the other models' at those in `vocab`."""
    of_s4d = dict(iterations=s4d_iterations, lr=1e-2)
    return [
        *cross(model="gru", pe=WITH_CONSTANT, vocab=gru_vocab, **flags),
        *cross(model="lstm", pe=WITH_CONSTANT, vocab=vocab, **flags),
        *cross(model="s4d", pe=WITH_CONSTANT, vocab=vocab, **flags | of_s4d),
    ]


def fig2_at_desk(seeds):
    return cross_models([4, 8, 16, 32], [16, 32, 64, 256], length=32, seed=seeds)


FIG2 = {  # vocab is K and length is L; what a row does not name is the scale's
    "paper": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256])
    + cross(model=["lstm", "s4d"], pe=BOTH, vocab=[2**n for n in range(8, 15)]),
    "desk": fig2_at_desk(FRESH),
    # pe comes last, so that the two trials of a pair run one after the other
    "quick": cross(model="gru", vocab=[8, 16], seed=range(4), pe=BOTH),
    "smoke": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=[8, 16], seed=range(1)),
}


class Reverse(Task):
    name = "reverse"
    scales = {
        "desk": dict(
            length=16, vocab=64, hidden=128, embed=128, batch=64, lr=3e-3, iterations=30_000
        ),
        "quick": dict(
            length=16, vocab=16, hidden=64, embed=64, batch=64, lr=1e-2, iterations=1200
        ),
        "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
    }

    def draw(self, k, shape):
        """(*shape, L) integers below K, from the key k alone."""
        return uniform_integers(k, (*shape, self.length), self.vocab)

    def episode(self, rows):
        """What is read, (B, 2L), what is to be answered, (B, L), and at which steps."""
        answers = slice(self.length, 2 * self.length)
        return Episode(self.with_commands(rows), rows.flip(1), answers, commands=self.length)

    def test_rows(self, device):
        """(N, L) integers that are held out, for each L others, as in variable_length.py."""
        stream = self.seed, common.HELD_OUT, self.length
        return distinct_rows(self.draw, self.args.held_out, *stream, device=device)


# -- Fig. 2: a larger vocabulary
def gain_sentences(runs):
    """What the clock does to each model at each vocabulary, and how sure that is."""
    for model in runs.levels("model"):
        for vocab in runs.levels("vocab", model=model):
            of = runs.where(model=model, vocab=vocab)
            none, sin = (of.values(pe=pe) for pe in BOTH)
            if none and sin:
                right = f"{np.mean(none):.0%} of its answers right without the clock"
                right += f" and {np.mean(sin):.0%} with it"
                sure = how_sure(none, sin)
                yield f"At K = {vocab} {with_article(model)} has {right}: {sure}."


def how_sure(none, sin):
    """The interval of what the clock adds, in words."""
    added = difference([sin], [none])
    if added is None:
        return "too few seeds to be sure"
    low, high = (f"{100 * end:.1f}" for end in added.interval())
    confidence = f"with 95% confidence ({added.n} seeds each)"
    if added.p_below() <= LEVEL:
        return f"{high.lstrip('-')} to {low.lstrip('-')} points fewer, {confidence}"
    if added.p_above() <= LEVEL:
        return f"{low} to {high} points more, {confidence}"
    return f"undecided, between {low} and {high} points, {confidence}"


def fig2_notes(runs):
    return [*gain_sentences(runs), *vocabulary_sentences(runs)]


@Reverse.figure("fig2", "Reverse ordering", FIG2, metrics=BOTH_METRICS, notes=fig2_notes)
def fig2(runs):
    for model in runs.levels("model"):
        of, name = runs.where(model=model), with_article(model)
        vocabs = of.levels("vocab")
        text = f"The clock helps {name} at K = {max(vocabs)}, the largest."
        yield gain(of, text, primary="title", vocab=max(vocabs))
        if len(vocabs) > 2:  # two vocabularies are too far apart for a line between them
            text = f"The clock raises the vocabulary that {name} handles"
            text += " (log2 K at 95% accuracy)."
            yield clock_raises(of, text, crossings, primary="title")


# -- Figs. 12 and 13: other vectors in place of the clock
LARGE, DESK_LSTM = dict(model="lstm", vocab=16384), dict(model="lstm", vocab=1024)
OF_FIG13 = ["none", "sin", "random", "learned"]
FIG12 = {
    "paper": cross(pe=WITH_DUP, **LARGE),
    "desk": cross(**DESK_LSTM, pe=WITH_CONTROLS),
}
FIG13 = {
    "paper": cross(pe=OF_FIG13, **LARGE),
    "desk": cross(**DESK_LSTM, pe=["constant", *OF_FIG13], amplitude=None)
    + cross(**DESK_LSTM, pe="learned", amplitude=1.0),
}


@Reverse.figure(
    "fig12", "The embedding twice", FIG12, metrics=BOTH_METRICS, x="pe", picture=False
)
def fig12(runs):
    yield no_gain_of_dup(runs, "an LSTM")


def judge_vectors(runs):
    """What random and learned vectors do in place of the clock."""
    for pe in ("random", "learned"):
        yield gain(runs, f"{pe.capitalize()} vectors help an LSTM.", pe=pe)
        text = f"The clock is better than {pe} vectors."
        yield higher(text, runs.values(pe="sin"), runs.values(pe=pe))


@Reverse.figure("fig13", "Other encodings", FIG13, metrics=BOTH_METRICS, x=("pe", "amplitude"))
def fig13(runs):
    yield from judge_vectors(runs.where(amplitude=None))
    if 1.0 in runs.levels("amplitude"):
        text = "The clock is better than learned vectors that begin at its length."
        yield higher(text, runs.values(pe="sin"), runs.values(pe="learned", amplitude=1.0))


SMALL = dict(length=32, hidden=64, embed=64, lr=2e-2)
SMALL_LSTM = dict(model="lstm", vocab=16, iterations=3000, **SMALL)
FIXED_LENGTH = {"desk": cross(**SMALL_LSTM, pe=["dup", *OF_FIG13])}


# Beside Fig. 14, of variable_length.py
Reverse.figures["fig14-fixed"] = Figure(
    "Other encodings, the length fixed", FIXED_LENGTH, judge_vectors, x="pe"
)


# -- Section 4.1: is it only a matter of more training?
def trained_more(pe="none", iterations=300_000, batch=512, **cell):
    """As usual and for twice the iterations; of `none` also with twice the batch."""
    longer = [iterations, 2 * iterations]
    rows = cross(**cell, pe=pe, iterations=longer, batch=batch)
    return rows + cross(**cell, pe="none", iterations=iterations, batch=2 * batch)


MORE = {
    "paper": trained_more(model="gru", vocab=256)
    + trained_more(**LARGE)
    + trained_more(model="s4d", vocab=16384),
    "desk": trained_more(WITH_CONSTANT, iterations=30_000, batch=64, **DESK_LSTM),
}


@Reverse.figure(
    "section4.1", "More iterations, larger batches", MORE, x=("pe", "iterations", "batch")
)
def section_4_1(runs):
    iterations, batches = runs.levels("iterations"), runs.levels("batch")
    for model in runs.levels("model"):
        name, of = with_article(model), runs.where(model=model)
        usual = of.values(pe="none", iterations=min(iterations), batch=min(batches))
        longer = of.values(pe="none", iterations=max(iterations))
        larger = of.values(pe="none", batch=max(batches))
        text = f"Twice the iterations do not help {name} without a clock."
        yield no_gain(text, longer, usual, 0.02)
        text = f"Twice the batch does not help {name} without a clock."
        yield no_gain(text, larger, usual, 0.02)
        if "sin" in of.levels("pe"):
            clock = of.values(pe="sin", iterations=min(iterations))
            more = dict(longer=longer, larger=larger)
            yield better(f"The clock helps {name} more than either.", clock, more)


# -- Beyond the paper
SMALL_GRU = dict(model="gru", vocab=16, **SMALL, iterations=2000)
SHORT = cross_models([16, 64, 256], [64, 256, 1024])
TWICE_AS_LONG = cross_models([16, 256], [64, 1024], s4d_iterations=20_000, iterations=60_000)
Reverse.figures |= beyond.like_fig2(Reverse.figures["fig2"], SHORT, TWICE_AS_LONG)
Reverse.figures |= beyond.more_of_fig2(fig2_at_desk(range(11, 14)))
Reverse.figures |= beyond.which_clock("Reverse ordering", SMALL_GRU)
Reverse.figures |= beyond.mamba()
Reverse.figures |= beyond.end_of_training()

if __name__ == "__main__":
    raise SystemExit(cli.main(Reverse))
