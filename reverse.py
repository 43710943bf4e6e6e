"""Reverse ordering (Figs. 2, 3, 11-14): read L integers, then, at L commands, answer them last first.

    python reverse.py --model lstm --pe sin --vocab 16384 --seed 0  # one cell of Fig. 2, one seed
    python reverse.py --list fig2                                   # the commands of all its trials
    python reverse.py --scale quick --all fig2                      # two minutes on two cores

    in   3 1 4 _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . 4 1 3        . is not answered and has no loss

The paper's sentence, which Fig. 2 tests: with the clock, --pe sin, a GRU, an LSTM and S4D "can handle a
larger vocabulary". The model is Model in common.py, the training loop is `loop` in suite/trial.py.
"""

import functools
import math
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F

import beyond
import common
from common import Episode, Refused, distinct_rows, random_bits, scale_bits, uniform_integers
from suite import run
from suite.task import BOTH, BOTH_METRICS, SEEDS, SMOKE, WITH_CONSTANT, WITH_DUP, Flag, Task, cross
from suite.verdicts import (
    LEVEL,
    better,
    controls,
    crossing,
    difference,
    each_seed,
    gain,
    higher,
    higher_in_pairs,
    name_of,
    no_gain,
    with_article,
)

FRESH = range(5, 11)  # seeds that nothing had seen when desk's fig2 was laid down
DESK_S4D = dict(model="s4d", iterations=10_000, lr=1e-2)


def fig2_at_desk(seeds):
    rows = cross(model="gru", pe=WITH_CONSTANT, vocab=[4, 8, 16, 32], length=32, seed=seeds)
    rows += cross(model="lstm", pe=WITH_CONSTANT, vocab=[16, 32, 64, 256], length=32, seed=seeds)
    return rows + cross(**DESK_S4D, pe=WITH_CONSTANT, vocab=[16, 32, 64, 256], length=32, seed=seeds)


FIG2 = {  # vocab is K, length is L, where it is not the scale's
    "paper": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256], seed=SEEDS)
    + cross(model=["lstm", "s4d"], pe=BOTH, vocab=[2**n for n in range(8, 15)], seed=SEEDS),
    "desk": fig2_at_desk(FRESH),
    "quick": cross(model="gru", vocab=[8, 16], seed=range(4), pe=BOTH),  # pairs side by side
    "smoke": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=[8, 16], seed=range(1)),
}


class Reverse(Task):
    name = "reverse"

    def draw(self, k, shape):
        """(*shape, L) integers below K, from the key k alone."""
        return uniform_integers(k, (*shape, self.length), self.vocab)

    def episode(self, rows):
        """What is read, (B, 2L), what is to be answered, (B, L), and at which steps."""
        answers = slice(self.length, 2 * self.length)
        return Episode(self.with_commands(rows), rows.flip(1), answers, commands=self.length)

    scales = {
        "paper": {},
        "desk": dict(length=16, vocab=64, hidden=128, embed=128, batch=64, lr=3e-3, iterations=30_000),
        "quick": dict(length=16, vocab=16, hidden=64, embed=64, batch=64, lr=1e-2, iterations=1200),
        "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
    }
    flags = (
        Flag("min_length", None, "draw each row's length from this to L; --held-out is per length", int, 1),
        Flag("dual_freq", False, "half of the integers are seven times rarer (section 4.2)", bool),
    )

    @classmethod
    def variant(cls, args):
        if args.dual_freq:
            return DualFrequency
        return cls if args.min_length is None else VariableLength

    def test_rows(self, device):
        return self.rows_of_length(self.length, device)

    def rows_of_length(self, length, device):
        """Held-out rows; a length's do not depend on the other lengths."""
        draw = lambda k, shape: uniform_integers(k, (*shape, length), self.vocab)
        rows = distinct_rows(draw, self.args.held_out, self.seed, common.HELD_OUT, length, device=device)
        return F.pad(rows, (0, self.length - length), value=self.vocab)


class VariableLength(Reverse):
    """Rows of lengths from --min-length to --length (Appendix B); what is left of a short row is commands."""

    def check(self):
        if self.args.min_length > self.length:
            raise Refused(f"--min-length {self.args.min_length} is above --length {self.length}")
        if self.args.encode != "both":
            raise Refused("--encode needs inputs of one length: leave out --min-length")
        super().check()

    def lengths(self):
        return range(self.args.min_length, self.length + 1)

    def mass(self, rows):
        shares = [self.args.held_out * float(self.vocab) ** -n for n in self.lengths()]
        return sum(shares) / len(shares)

    def test_rows(self, device):
        return torch.cat([self.rows_of_length(n, device) for n in self.lengths()])

    def draw(self, k, shape):
        rows = super().draw(k, shape)
        lengths = self.lengths()[0] + uniform_integers(common.scramble(k), (*shape, 1), len(self.lengths()))
        return rows.masked_fill(torch.arange(self.length, device=rows.device) >= lengths, self.vocab)

    def episode(self, rows):
        lengths = (rows < self.vocab).sum(1, keepdim=True)  # (B, 1)
        j = torch.arange(self.length, device=rows.device)
        targets = rows.gather(1, (lengths - 1 - j).clamp(min=0))
        steps = (lengths + j).clamp(max=2 * self.length - 1)
        return Episode(self.with_commands(rows), targets, steps, weight=j < lengths, commands=self.length)

    def told(self, metrics, right):
        by_length = zip(self.lengths(), right.reshape(len(self.lengths()), -1, self.length))
        return metrics | {"by_length": {str(n): float(r[:, :n].mean()) for n, r in by_length}}


class DualFrequency(Reverse):
    """K/2 Frequent integers, then K/2 Rare ones (section 4.2). A test row has one target among disturbants of
    one kind, and only the target's retrieval counts."""

    @classmethod
    def defaults(cls, args):
        snapshots = min(5000, max(1, args.iterations // 10))
        held_out = 16 * len(CONDITIONS) * args.length
        return super().defaults(args) | {"held_out": held_out, "snapshot_every": snapshots}

    def check(self):
        cells = len(CONDITIONS) * self.length
        if self.args.min_length is not None:
            raise Refused("--dual-freq has inputs of one length: leave out --min-length")
        if self.vocab % 2:
            raise Refused(f"--dual-freq halves the vocabulary: --vocab {self.vocab} is odd")
        if self.args.held_out % cells:
            raise Refused(f"--held-out has to be a multiple of {cells}, 4 conditions x --length")
        super().check()

    def mass(self, rows):
        rare = (rows >= self.vocab // 2).sum(1).double()
        log_probability = rare * math.log(1 / 8) + (self.length - rare) * math.log(7 / 8)
        return (log_probability + self.length * math.log(2 / self.vocab)).exp().sum().item()

    def draw(self, k, shape):
        """Rare with probability 1/8, else Frequent; uniform inside the group."""
        bits = random_bits(k, (*shape, self.length))
        rare = (bits >> 61 & 7) == 0  # three bits that the integer does not use
        return scale_bits(bits, self.vocab // 2) + rare * (self.vocab // 2)

    def patterns(self):
        """{pattern, True where Rare: [(condition, position of the target), ...] that use it}.

        Those of one pattern are drawn together, so that none is used twice.
        """
        patterns = defaultdict(list)
        for condition, name in enumerate(CONDITIONS):
            target, disturbants = (kind == "rare" for kind in name.split("/"))
            for position in range(self.length):
                pattern = [disturbants] * self.length
                pattern[position] = target
                patterns[tuple(pattern)].append((condition, position))
        return patterns

    def test_rows(self, device):
        """In the order of condition, position of the target, repeat; no row occurs twice."""
        half, each = self.vocab // 2, self.args.held_out // (len(CONDITIONS) * self.length)
        test = torch.empty(len(CONDITIONS), self.length, each, self.length, dtype=torch.int64, device=device)
        for number, (pattern, uses) in enumerate(self.patterns().items()):
            first = torch.tensor(pattern, device=device) * half  # each position's first integer
            draw = lambda k, shape, first=first: uniform_integers(k, (*shape, self.length), half) + first
            count = each * len(uses)
            rows = distinct_rows(draw, count, self.seed, common.HELD_OUT, number, device=device)
            for use, part in zip(uses, rows.split(each)):
                test[use] = part
        return test.flatten(0, 2)

    def test_episode(self):
        episode = super().test_episode()
        row = torch.arange(len(episode.inputs), device=episode.inputs.device)[:, None]
        position = row * len(CONDITIONS) * self.length // len(row) % self.length
        target = episode.inputs.gather(1, position)
        return Episode(episode.inputs, target, 2 * self.length - 1 - position)

    def told(self, metrics, right):
        """One answer per row: neither whole sequences nor distances."""
        by_condition = right.reshape(len(CONDITIONS), self.length, -1).mean(2)  # (4, L)
        metrics = {k: metrics[k] for k in ("token_accuracy", "cross_entropy")}
        return metrics | {"by_condition": dict(zip(CONDITIONS, by_condition.tolist()))}


# -- Figures: what is told of their trials, and verdicts
def crossings(runs, level=0.95, **where):
    """log2 of the K at which accuracy falls to a level, of each seed that has all vocabularies."""
    places = np.log2(sorted(runs.all("vocab", **where)))
    return [crossing(places, heights, level) for heights in each_seed(runs, "vocab", **where).values()]


def areas(runs, **where):
    """The area under accuracy over log2 K, of each seed that has all vocabularies.

    Neighbours are joined by straight lines. It is divided by the range of log2 K: all right is 1.
    """
    places = np.log2(sorted(runs.all("vocab", **where)))
    widths, found = np.diff(places), []
    for heights in each_seed(runs, "vocab", **where).values():
        means = (np.array(heights[1:]) + heights[:-1]) / 2
        found.append(widths @ means / widths.sum())
    return found


def clock_raises(runs, text, measure, model, primary=""):
    """Is a measure, of which each seed has one number, higher with the clock than with every control?"""
    found = {pe: measure(runs, model=model, pe=pe) for pe in ("sin", *controls(runs))}
    return better(text, found.pop("sin"), found, primary)


def in_words(runs):
    """What the clock does to each model at each vocabulary, and how sure that is."""
    for model in runs.all("model"):
        for vocab in runs.all("vocab", model=model):
            none, sin = (runs.values(model=model, vocab=vocab, pe=pe) for pe in BOTH)
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
    low, high = (f"{100 * end:.2g}" for end in added.interval())
    of = f"with 95% confidence ({added.n} seeds each)"
    if added.below() <= LEVEL:
        return f"{high.lstrip('-')} to {low.lstrip('-')} points fewer, {of}"
    if added.above() <= LEVEL:
        return f"{low} to {high} points more, {of}"
    return f"undecided, between {low} and {high} points, {of}"


def handled(runs, level=0.95):
    """The vocabulary that each model handles."""
    for model in runs.all("model"):
        vocabs = sorted(runs.all("vocab", model=model))
        found = {pe: crossings(runs, level, model=model, pe=pe) for pe in runs.all("pe", model=model)}
        seeds = [at for each in found.values() for at in each]
        ends = sum(at in np.log2([vocabs[0], vocabs[-1]]) for at in seeds)
        if len(vocabs) > 2 and seeds:
            means = ", ".join(f"{2 ** np.mean(at):.3g} ({pe})" for pe, at in found.items() if at)
            of = f"{ends} of {len(seeds)} seeds at an end"
            yield f"The accuracy of {with_article(model)} falls to {level:.0%} at K = {means}; {of}."


def handled_and_intervals(runs):
    """The same at 80% too, with what the clock adds."""
    for level in (0.95, 0.8):
        yield from handled(runs, level)
        measure = functools.partial(crossings, level=level)
        for model in runs.all("model"):
            added = clock_raises(runs, "", measure, model).numbers
            if added:
                of = f"the K at {level:.0%} of {with_article(model)}"
                yield f"What the clock adds to log2 of {of}: {added}."


@Reverse.figure("fig2", "Reverse ordering", FIG2, metrics=BOTH_METRICS, notes=(in_words, handled))
def fig2(runs, primary="title"):
    for model in runs.all("model"):
        vocabs, name = runs.all("vocab", model=model), with_article(model)
        text = f"The clock helps {name} at K = {max(vocabs)}, the largest."
        yield gain(runs, text, primary=primary, model=model, vocab=max(vocabs))
        if len(vocabs) > 2:  # two vocabularies are too far apart for a line between them
            text = f"The clock raises the vocabulary that {name} handles (log2 K at 95% accuracy)."
            yield clock_raises(runs, text, crossings, model, primary)


FIG2_MORE = {"desk": fig2_at_desk(range(11, 14))}
WITH_INTERVALS = dict(metrics=BOTH_METRICS, notes=(handled_and_intervals,))


@Reverse.figure("fig2-more", "Reverse ordering, seeds 11 to 13", FIG2_MORE, **WITH_INTERVALS)
def fig2_more(runs):
    for model in runs.all("model"):
        text = f"The clock raises the area under the accuracy of {with_article(model)} over log2 K."
        yield clock_raises(runs, text, areas, model, primary="end")


SHORT = cross(model="gru", pe=WITH_CONSTANT, vocab=[16, 64, 256], seed=SEEDS)
SHORT += cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 256, 1024], seed=SEEDS)
SHORT += cross(**DESK_S4D, pe=WITH_CONSTANT, vocab=[64, 256, 1024], seed=SEEDS)
TWICE = cross(model="gru", pe=WITH_CONSTANT, vocab=[16, 256], iterations=60_000, seed=SEEDS)
TWICE += cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024], iterations=60_000, seed=SEEDS)
TWICE += cross(**DESK_S4D | dict(iterations=20_000), pe=WITH_CONSTANT, vocab=[64, 1024], seed=SEEDS)
PAPERS_SIZE = dict(length=64, hidden=512, embed=512, batch=512, lr=1e-3)
EARLY = cross(model="gru", pe=WITH_CONSTANT, vocab=64, **PAPERS_SIZE, iterations=20_000, seed=range(3))
TOLD = dict(metrics=BOTH_METRICS, notes=(handled,))


@Reverse.figure("fig2-early", "The paper's size, early in training", {"desk": EARLY}, **TOLD, picture=False)
@Reverse.figure("fig2-short-twice", "Reverse ordering, L = 16, twice the training", {"desk": TWICE}, **TOLD)
@Reverse.figure("fig2-short", "Reverse ordering, L = 16", {"desk": SHORT}, **TOLD)
def explored(runs):
    """The same questions, asked after such trials had been seen."""
    return fig2(runs, primary="")


# Fig. 3: what hurts is Rare disturbants, not Rare targets
KINDS = "frequent", "rare"
CONDITIONS = [f"{target}/{disturbants}" for target in KINDS for disturbants in KINDS]
AMONG_FREQUENT, AMONG_RARE = ("frequent/frequent", "rare/frequent"), ("frequent/rare", "rare/rare")
WORST = {"lstm": (0, "first"), "s4d": (1, "second")}  # the quarter of positions that the paper names
DESK_DUAL = dict(dual_freq=True, held_out=4096, iterations=20_000, snapshot_every=2000)
S4D_DUAL = dict(dual_freq=True, held_out=4096, iterations=4000, length=8, hidden=64, embed=64, lr=1e-2)
FIG3 = {
    "paper": cross(model="gru", pe=BOTH, vocab=64, dual_freq=True, seed=SEEDS)
    + cross(model="lstm", pe=BOTH, vocab=1024, dual_freq=True, seed=SEEDS)
    + cross(model="s4d", pe=BOTH, vocab=2048, dual_freq=True, seed=SEEDS),
    "desk": cross(model="lstm", pe=WITH_CONSTANT, vocab=256, **DESK_DUAL, seed=SEEDS)
    + cross(model="gru", pe=WITH_CONSTANT, vocab=64, lr=1e-2, **DESK_DUAL, seed=SEEDS)
    + cross(model="s4d", pe=WITH_DUP, vocab=256, **S4D_DUAL, seed=SEEDS),
    "smoke": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=8, dual_freq=True, seed=range(1)),
}
FIG3_FRESH = {"desk": cross(model="lstm", pe=WITH_CONSTANT, vocab=256, **DESK_DUAL, seed=FRESH)}


def retrieval(*conditions):
    return lambda run: np.mean([run.metrics["by_condition"][c] for c in conditions])


def by_quarter(run, condition):
    """The accuracy in each quarter of the target's positions; the first quarter is read first."""
    return np.reshape(run.metrics["by_condition"][condition], (4, -1)).mean(axis=1)


def by_position(run):
    for condition, values in run.metrics["by_condition"].items():
        yield f"{name_of(run.flags['model'])}, {condition}", run.flags["pe"], dict(enumerate(values, 1))


DUAL = dict(
    x="position of the target (1: read first)",
    curves=by_position,
    metrics={"among Rare": retrieval(*AMONG_RARE), "among Frequent": retrieval(*AMONG_FREQUENT)},
)


@Reverse.figure("fig3-fresh", "Frequent and Rare integers, seeds 5 to 10", FIG3_FRESH, **DUAL)
@Reverse.figure("fig3", "Frequent and Rare integers (target/disturbants)", FIG3, **DUAL)
def fig3(runs):
    for model in runs.all("model"):
        name, none = with_article(model), runs.where(model=model, pe="none")
        frequent, rare = (none.values(retrieval(c)) for c in ("frequent/frequent", "frequent/rare"))
        text = f"Rare disturbants hurt Frequent targets of {name} without a clock."
        yield higher_in_pairs(text, frequent, rare)
        text = f"The clock helps {name} among Rare disturbants."
        yield gain(runs, text, retrieval(*AMONG_RARE), model=model)
        yield from judge_targets(runs, model)


def judge_targets(runs, model):
    """What the paper says of each kind of target, and of positions."""
    name, late = with_article(model), "(asked after the data were seen)"
    for kind in KINDS:
        text = f"The clock helps {name} answer {kind.capitalize()} targets among Rare disturbants {late}."
        yield gain(runs, text, retrieval(f"{kind}/rare"), model=model)
    if model in WORST:
        worst, ordinal = WORST[model]
        none = [by_quarter(run, "frequent/rare") for run in runs.where(model=model, pe="none")]
        there = [quarters[worst] for quarters in none]
        elsewhere = [np.delete(quarters, worst).mean() for quarters in none]
        text = f"Among Rare disturbants {name} without a clock answers Frequent targets"
        text += f" worse in the {ordinal} quarter of positions than elsewhere {late}."
        yield higher_in_pairs(text, elsewhere, there)


# Figs. 11 to 14 and section 4.1; where lengths vary, desk's are 16 to 32, of a smaller model
LARGE, DESK_LSTM = dict(model="lstm", vocab=16384), dict(model="lstm", vocab=1024)
SMALL = dict(hidden=64, embed=64, lr=2e-2)
VARYING = dict(model="lstm", vocab=16, iterations=3000, length=32, **SMALL)
OF_FIG13 = ["none", "sin", "random", "learned"]
FIG11 = {
    "paper": cross(pe=BOTH, **LARGE, min_length=32, seed=SEEDS),
    "desk": cross(**VARYING, pe=WITH_DUP, min_length=16, seed=SEEDS),
}
FIG12 = {
    "paper": cross(pe=WITH_DUP, **LARGE, seed=SEEDS),
    "desk": cross(**DESK_LSTM, pe=["none", "constant", "dup", "sin"], seed=SEEDS),
}
FIG13 = {
    "paper": cross(pe=OF_FIG13, **LARGE, seed=SEEDS),
    "desk": cross(**DESK_LSTM, pe=["constant", *OF_FIG13], amplitude=None, seed=SEEDS)
    + cross(**DESK_LSTM, pe="learned", amplitude=1.0, seed=SEEDS),
}
FIG14 = {
    "paper": cross(pe=OF_FIG13, **LARGE, min_length=32, seed=SEEDS),
    "desk": cross(**VARYING, pe=["dup", *OF_FIG13], min_length=[None, 16], seed=SEEDS),
}


def by_length(run):
    points = {int(n): x for n, x in run.metrics["by_length"].items()}
    yield name_of(run.flags["model"]), run.flags["pe"], points


@Reverse.figure("fig11", "Varying length", FIG11, metrics=BOTH_METRICS, x="input length", curves=by_length)
def fig11(runs):
    yield gain(runs, "The clock helps an LSTM although the length varies.")


@Reverse.figure("fig12", "The embedding twice", FIG12, metrics=BOTH_METRICS, x="pe", picture=False)
def fig12(runs):
    none, dup = runs.values(pe="none"), runs.values(pe="dup")
    yield no_gain("The embedding twice does not help an LSTM (by .02 or more).", dup, none, 0.02)


def others(runs):
    """What random and learned vectors do in place of the clock."""
    for pe in ("random", "learned"):
        yield gain(runs, f"{pe.capitalize()} vectors help an LSTM.", pe=pe)
        yield higher(f"The clock is better than {pe} vectors.", runs.values(pe="sin"), runs.values(pe=pe))


@Reverse.figure("fig13", "Other encodings", FIG13, metrics=BOTH_METRICS, x=("pe", "amplitude"))
def fig13(runs):
    yield from others(runs.where(amplitude=None))
    if 1.0 in runs.all("amplitude"):
        text = "The clock is better than learned vectors that begin at its length."
        yield higher(text, runs.values(pe="sin"), runs.values(pe="learned", amplitude=1.0))


@Reverse.figure("fig14", "Other encodings, varying length", FIG14, x=("pe", "min_length"))
def fig14(runs):
    yield from others(runs.where(min_length=max(n or 0 for n in runs.all("min_length"))))


def trained_more(**cell):
    """`none` as usual, for twice the iterations, and with twice the batch."""
    longer = cross(**cell, pe="none", iterations=[300_000, 600_000], batch=512, seed=SEEDS)
    return longer + cross(**cell, pe="none", iterations=300_000, batch=1024, seed=SEEDS)


MORE = {
    "paper": trained_more(model="gru", vocab=256)
    + trained_more(**LARGE)
    + trained_more(model="s4d", vocab=16384),
    "desk": cross(**DESK_LSTM, pe=WITH_CONSTANT, iterations=[30_000, 60_000], batch=64, seed=SEEDS)
    + cross(**DESK_LSTM, pe="none", iterations=30_000, batch=128, seed=SEEDS),
}


@Reverse.figure("section4.1", "More iterations, larger batches", MORE, x=("pe", "iterations", "batch"))
def section_4_1(runs):
    iterations, batches = runs.all("iterations"), runs.all("batch")
    usual, longest, batch, largest = min(iterations), max(iterations), min(batches), max(batches)
    for model in runs.all("model"):
        name, of = with_article(model), runs.where(model=model)
        none = of.values(pe="none", iterations=usual, batch=batch)
        longer = of.values(pe="none", iterations=longest, batch=batch)
        larger = of.values(pe="none", iterations=usual, batch=largest)
        yield no_gain(f"Twice the iterations do not help {name} without a clock.", longer, none, 0.02)
        yield no_gain(f"Twice the batch does not help {name} without a clock.", larger, none, 0.02)
        if "sin" in of.all("pe"):
            clock, more = of.values(pe="sin", iterations=usual), dict(longer=longer, larger=larger)
            yield better(f"The clock helps {name} more than either.", clock, more)


beyond.add_to(Reverse, "Reverse ordering", dict(model="gru", vocab=16, length=32, **SMALL, iterations=2000))
beyond.mamba(Reverse)
beyond.end_of_training(Reverse)

if __name__ == "__main__":
    raise SystemExit(run.main(Reverse))
