"""Reverse ordering (Figs. 2, 3, 11-14): read L integers, then, at L commands, answer them last first.

    python reverse.py --model lstm --pe sin --vocab 16384 --seed 0     # one cell of Fig. 2, one seed
    python reverse.py --list fig2                                      # the commands of all its trials
    python reverse.py --scale quick --all fig2                         # a reduced Fig. 2 on a CPU, GRU alone
    python reverse.py --report                                         # tables, figures and claims so far

    in   3 1 4 _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . 4 1 3        . is not answered and has no loss

--min-length N draws every row's length from N..L; the rest of a short row is commands without answers.
--dual-freq: integers below K/2 are Frequent, the others Rare, a seventh as likely. A test sequence has one
target among disturbants, the other integers, which are all Frequent or all Rare; only the target's answer
counts.

What to expect: the loss begins at ln K; RESULTS.md has the accuracies at the end.
The paper does not speak of clipping; gradients are clipped as in its released code (--clip).
"""

from suite import cli
from suite.claims import (
    ACCURACY,
    BOTH_METRICS,
    CONTROLS,
    NO_GAIN,
    NONE,
    SIN,
    Claim,
    Figure,
    accuracy,
    at_scales,
    dup_does_not_help,
    grows,
    helps,
    helps_at_largest,
    helps_below_largest,
    name_of,
    uniform_chance,
)
from suite.flags import BOTH, COUNT, SEEDS, SMOKE, WITH_CONSTANT, WITH_CONTROLS, WITH_DUP, cross
from suite.task import Task

import math
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F

import beyond
import common
from common import Episode, Refused, count_sequences, distinct_rows, random_bits, scale_bits, uniform_integers

KINDS = ("frequent", "rare")
CONDITIONS = [f"{target}/{disturbants}" for target in KINDS for disturbants in KINDS]


class Reverse(Task):
    name = "reverse"

    @staticmethod
    def add_flags(science, plumbing):
        lengths = "draw each row's length from N..L (all L); --held-out counts per length"
        science("--min-length", None, lengths, type=COUNT, metavar="N")
        science("--dual-freq", False, "half of the integers are seven times rarer", action="store_true")

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

    def episode(self, rows):
        answers = slice(self.length, 2 * self.length)
        return Episode(self.with_commands(rows), rows.flip(1), answers, commands=self.length)


class VariableLength(Reverse):
    """Rows of lengths from --min-length to --length (Appendix B); what is left of a short row is commands."""

    def check(self):
        if self.args.min_length > self.length:
            raise Refused(f"--min-length {self.args.min_length} is above --length {self.length}")
        if 2 * self.args.held_out > self.exist():
            what = f"half of the {self.exist()} sequences of length {self.args.min_length}"
            raise Refused(f"--held-out {self.args.held_out} is more than {what}, which are trained on too")
        if self.args.encode != "both":
            what = "with --min-length every row ends its input at a step of its own"
            raise Refused(f"--encode {self.args.encode} is one part of the steps: {what}")
        super().check()

    def lengths(self):
        return range(self.args.min_length, self.length + 1)

    def exist(self):
        """Of the shortest length, which has the fewest."""
        return count_sequences(self.vocab, self.args.min_length)

    def mass(self, rows):
        shares = [self.args.held_out / count_sequences(self.vocab, n) for n in self.lengths()]
        return sum(shares) / len(shares)

    def test_rows(self, device):
        return torch.cat([self.rows_of_length(n, device) for n in self.lengths()])

    def draw(self, k, shape):
        rows = super().draw(k, shape)
        lengths = self.lengths()[0] + uniform_integers(common.mix(k), (*shape, 1), len(self.lengths()))
        return rows.masked_fill(torch.arange(self.length, device=rows.device) >= lengths, self.vocab)

    def episode(self, rows):
        lengths = (rows < self.vocab).sum(1, keepdim=True)  # (B, 1)
        j = torch.arange(self.length, device=rows.device)
        targets = rows.gather(1, (lengths - 1 - j).clamp(min=0))
        steps = (lengths + j).clamp(max=2 * self.length - 1)
        return Episode(self.with_commands(rows), targets, steps, weight=j < lengths, commands=self.length)

    def evaluate(self, model, engine):
        episode = self.test_episode()
        predictions, losses = self.answers(model, episode, engine)
        right = (predictions == episode.targets).cpu().numpy()
        by_length = zip(self.lengths(), right.reshape(len(self.lengths()), -1, self.length))
        metrics = common.sequence_metrics(episode, predictions, losses)
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
            raise Refused("--dual-freq has sequences of one length: leave out --min-length")
        if self.vocab % 2:
            raise Refused(f"--dual-freq splits the vocabulary in halves: --vocab {self.vocab} is odd")
        if self.args.held_out % cells:
            raise Refused(
                f"--held-out {self.args.held_out} is not a multiple of {cells} (4 conditions x --length)"
            )
        super().check()

    def exist(self):
        """The most test rows: a quarter, at length 1 a half, are all Frequent; (K/2)^L such rows exist."""
        return (4 if self.length > 1 else 2) * count_sequences(self.vocab // 2, self.length)

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
        """{which positions are Rare: [(condition, target's position), ...] that need such sequences}.

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
        each = len(episode.inputs) // (len(CONDITIONS) * self.length)
        position = torch.arange(self.length, device=episode.inputs.device).repeat_interleave(each)
        position = position.repeat(len(CONDITIONS))[:, None]
        target = episode.inputs.gather(1, position)
        return Episode(episode.inputs, target, 2 * self.length - 1 - position)

    def evaluate(self, model, engine):
        """One answer per row: neither whole sequences nor distances."""
        episode = self.test_episode()
        predictions, losses = self.answers(model, episode, engine)
        metrics = common.sequence_metrics(episode, predictions, losses)
        right = (predictions == episode.targets).cpu().numpy()
        by_condition = right.reshape(len(CONDITIONS), self.length, -1).mean(2)  # (4, L)
        metrics = {k: metrics[k] for k in ("token_accuracy", "cross_entropy")}
        return metrics | {"by_condition": dict(zip(CONDITIONS, by_condition.tolist()))}


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

FRESH = range(5, 11)  # seeds that nothing had seen when desk's fig2 was laid down
OF_FIG13 = ["none", "sin", "random", "learned"]
LSTM_LARGE = dict(model="lstm", vocab=16384)
# Short inputs, and in the grid many iterations: the paper's pattern needs Rare integers that are learned.
QUICK_DUAL_FREQ = dict(dual_freq=True, length=8, lr=1e-2, held_out=4096)
QUICK_GRU, QUICK_LSTM = dict(length=32, lr=2e-2, iterations=2000), dict(length=32, lr=2e-2, iterations=3000)
LONGER_LSTM = dict(model="lstm", vocab=16, iterations=3000)
QUICK_S4D = dict(length=16, lr=5e-3, iterations=3000)
QUICK_MAMBA = dict(iterations=2000, lr=2e-2)
DESK_S4D = dict(model="s4d", iterations=10_000, lr=1e-2)
DESK_LSTM = dict(model="lstm", vocab=1024)
DESK_DUAL_FREQ = dict(dual_freq=True, held_out=4096, iterations=20_000, snapshot_every=2000)
SCALES = {
    "paper": {},
    "desk": dict(length=16, vocab=64, hidden=128, embed=128, batch=64, lr=3e-3, iterations=30_000),
    "quick": dict(length=32, vocab=16, hidden=64, embed=64, batch=64, lr=2e-2, iterations=1000),
    "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
}


def trained_more(**trial):
    """Vanilla models as usual, for twice the iterations, and with twice the batch."""
    longer = cross(**trial, pe="none", iterations=[300_000, 600_000], batch=512, seed=SEEDS)
    return longer + cross(**trial, pe="none", iterations=300_000, batch=1024, seed=SEEDS)


GRIDS = {
    "paper": {
        "fig2": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256], seed=SEEDS)
        + cross(model=["lstm", "s4d"], pe=BOTH, vocab=[2**n for n in range(8, 15)], seed=SEEDS),
        "fig3": cross(model="gru", pe=BOTH, vocab=64, dual_freq=True, seed=SEEDS)
        + cross(model="lstm", pe=BOTH, vocab=1024, dual_freq=True, seed=SEEDS)
        + cross(model="s4d", pe=BOTH, vocab=2048, dual_freq=True, seed=SEEDS),
        "fig11": cross(pe=BOTH, **LSTM_LARGE, min_length=32, seed=SEEDS),
        "fig12": cross(pe=WITH_DUP, **LSTM_LARGE, seed=SEEDS),
        "fig13": cross(pe=OF_FIG13, **LSTM_LARGE, seed=SEEDS),
        "fig14": cross(pe=OF_FIG13, **LSTM_LARGE, min_length=32, seed=SEEDS),
        "fixed-or-varying": cross(pe=OF_FIG13, **LSTM_LARGE, min_length=[None, 32], seed=SEEDS),
        "section4.1": trained_more(model="gru", vocab=256)
        + trained_more(**LSTM_LARGE)
        + trained_more(model="s4d", vocab=16384),
    },
    "desk": {
        "fig2": cross(model="gru", pe=WITH_CONSTANT, vocab=[4, 8, 16, 32], length=32, seed=FRESH)
        + cross(model="lstm", pe=WITH_CONSTANT, vocab=[16, 32, 64, 256], length=32, seed=FRESH)
        + cross(**DESK_S4D, pe=WITH_CONSTANT, vocab=[16, 32, 64, 256], length=32, seed=FRESH),
        "fig2-first": cross(model="gru", pe=WITH_CONSTANT, vocab=[8, 16, 32], length=32, seed=SEEDS)
        + cross(model="gru", pe="dup", vocab=32, length=32, seed=SEEDS),
        "fig2-short": cross(model="gru", pe=WITH_CONSTANT, vocab=[16, 64, 256], seed=SEEDS)
        + cross(model="gru", pe="dup", vocab=256, seed=SEEDS)
        + cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 256, 1024], seed=SEEDS)
        + cross(model="lstm", pe="dup", vocab=1024, seed=SEEDS)
        + cross(**DESK_S4D, pe=WITH_CONSTANT, vocab=[64, 256, 1024], seed=SEEDS)
        + cross(**DESK_S4D, pe="dup", vocab=1024, seed=SEEDS),
        "fig2-short-twice": cross(
            model="gru", pe=WITH_CONSTANT, vocab=[16, 256], iterations=60_000, seed=SEEDS
        )
        + cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024], iterations=60_000, seed=SEEDS)
        + cross(**DESK_S4D | dict(iterations=20_000), pe=WITH_CONSTANT, vocab=[64, 1024], seed=SEEDS),
        "fig3-fresh": cross(model="lstm", pe=WITH_CONSTANT, vocab=256, **DESK_DUAL_FREQ, seed=FRESH),
        "fig3": cross(model="lstm", pe=WITH_CONSTANT, vocab=256, **DESK_DUAL_FREQ, seed=SEEDS)
        + cross(model="gru", pe=WITH_CONSTANT, vocab=64, lr=1e-2, **DESK_DUAL_FREQ, seed=SEEDS),
        "fig12": cross(**DESK_LSTM, pe=WITH_CONTROLS, seed=SEEDS),
        "fig13": cross(
            **DESK_LSTM, pe=["none", "constant", "sin", "random", "learned"], amplitude=None, seed=SEEDS
        )
        + cross(**DESK_LSTM, pe="learned", amplitude=1.0, seed=SEEDS),
        "section4.1": cross(**DESK_LSTM, pe=WITH_CONSTANT, iterations=[30_000, 60_000], batch=64, seed=SEEDS)
        + cross(**DESK_LSTM, pe="none", iterations=30_000, batch=128, seed=SEEDS),
    },
    "quick": {
        "fig2": cross(model="gru", pe=WITH_CONTROLS, vocab=[8, 16], seed=range(3)),
        "fig2-full": cross(model="gru", pe=WITH_CONTROLS, vocab=[8, 16, 32], **QUICK_GRU, seed=SEEDS)
        + cross(model="lstm", pe=WITH_CONTROLS, vocab=[8, 16, 32], **QUICK_LSTM, seed=SEEDS)
        + cross(model="s4d", pe=WITH_CONTROLS, vocab=[64, 256, 1024], **QUICK_S4D, seed=SEEDS),
        "fig3": cross(model="gru", pe=WITH_DUP, vocab=32, iterations=4000, **QUICK_DUAL_FREQ, seed=SEEDS)
        + cross(model="lstm", pe=WITH_DUP, vocab=128, iterations=6000, **QUICK_DUAL_FREQ, seed=SEEDS)
        + cross(model="s4d", pe=WITH_DUP, vocab=256, iterations=4000, **QUICK_DUAL_FREQ, seed=SEEDS),
        "fig11": cross(**LONGER_LSTM, pe=WITH_DUP, min_length=16, seed=SEEDS),
        "fig12": cross(**LONGER_LSTM, pe=WITH_DUP, seed=SEEDS),
        "fig13": cross(**LONGER_LSTM, pe=[*OF_FIG13, "dup"], seed=SEEDS),
        "fig14": cross(**LONGER_LSTM, pe=[*OF_FIG13, "dup"], min_length=16, seed=SEEDS),
        "fixed-or-varying": cross(**LONGER_LSTM, pe=OF_FIG13, min_length=[None, 16], seed=SEEDS),
        "section4.1": cross(model="lstm", pe=BOTH, vocab=16, iterations=3000, batch=64, seed=SEEDS)
        + cross(model="lstm", pe="none", vocab=16, iterations=6000, batch=64, seed=SEEDS)
        + cross(model="lstm", pe="none", vocab=16, iterations=3000, batch=128, seed=SEEDS),
    }
    | beyond.grids(dict(model="gru", vocab=16, iterations=2000), beyond.SHARED, QUICK_MAMBA | dict(vocab=16))
    | {
        "mamba-vocab": cross(
            model="mamba", **QUICK_MAMBA, pe=WITH_CONTROLS, vocab=[16, 64, 256, 1024], seed=SEEDS
        )
    },
    "smoke": {
        "fig2": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=[8, 16], seed=range(1)),
        "fig3": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=8, dual_freq=True, seed=range(1)),
        "fig11": cross(model="lstm", pe=BOTH, vocab=8, min_length=4, seed=range(1)),
        "fig12": cross(model="lstm", pe=WITH_DUP, vocab=8, seed=range(1)),
        "fig13": cross(model="lstm", pe=OF_FIG13, vocab=8, seed=range(1)),
        "fig14": cross(model="lstm", pe=OF_FIG13, vocab=8, min_length=4, seed=range(1)),
    },
}


def retrieval(*conditions, first=0.0, last=1.0):
    """Mean accuracy over conditions and a part of the target's positions (fractions of L; at least one)."""

    def metric(outcome):
        found = [outcome.metrics["by_condition"][c] for c in conditions]
        start = min(round(first * len(found[0])), len(found[0]) - 1)
        stop = max(round(last * len(found[0])), start + 1)
        return float(np.mean([x[start:stop] for x in found]))

    return metric


def log_odds(outcome):
    """Those of a right answer; half an answer added on either side keeps them finite."""
    answers = outcome.config["held_out"] * outcome.config["length"]
    right = accuracy(outcome) * answers
    return math.log((right + 0.5) / (answers - right + 0.5))


def worst(*metrics):
    return lambda outcome: min(metric(outcome) for metric in metrics)


def by_position(outcome):
    for condition, values in outcome.metrics["by_condition"].items():
        panel = f"{name_of(outcome.flags['model'])}, {condition} (target/disturbants)"
        yield panel, outcome.flags["pe"], dict(enumerate(values, 1))


def by_length(outcome):
    points = {int(n): x for n, x in outcome.metrics["by_length"].items()}
    yield name_of(outcome.flags["model"]), outcome.flags["pe"], points


def by_variation(outcome):
    flags = outcome.flags
    length = "fixed" if flags["min_length"] is None else "varying"
    yield f"{name_of(flags['model'])}, {length} length", flags["pe"], {flags["pe"]: accuracy(outcome)}


def by_training(outcome):
    flags = outcome.flags
    x = f"{flags['pe']}\n{flags['iterations']:,}\nx {flags['batch']}"
    yield name_of(flags["model"]), flags["pe"], {x: accuracy(outcome)}


UNLIKE = "  Vectors have length 1, learned ones at first the root of --embed (equal: quick's `amplitude`)."
RETRIEVAL = {f"accuracy, {c} (target/disturbants)": retrieval(c) for c in CONDITIONS}
BY_VOCAB = dict(x="vocab", training=True, chance=uniform_chance)
POSITION = "position of the target in the input (1: read first)"
FIGURES = {
    "fig2": Figure("Reverse ordering", BOTH_METRICS, **BY_VOCAB),
    "fig2-full": Figure("Reverse ordering, all three models", ACCURACY, **BY_VOCAB),
    "fig2-first": Figure("Reverse ordering, a GRU's first seeds", BOTH_METRICS, **BY_VOCAB),
    "fig2-short": Figure("Reverse ordering of 16 tokens", BOTH_METRICS, **BY_VOCAB),
    "fig2-short-twice": Figure(
        "Reverse ordering of 16 tokens, trained twice as long", BOTH_METRICS, **BY_VOCAB
    ),
    "fig3": Figure("Reverse ordering, Frequent and Rare integers", RETRIEVAL, POSITION, by_position),
    "fig3-fresh": Figure("Frequent and Rare integers, fresh seeds", RETRIEVAL, POSITION, by_position),
    "fig11": Figure("Reverse ordering, variable length", BOTH_METRICS, "input length", by_length),
    "fig12": Figure("Reverse ordering, the embedding twice", BOTH_METRICS, "pe"),
    "fig13": Figure("Reverse ordering, other encodings", BOTH_METRICS, "pe", note=lambda scale: [UNLIKE]),
    "fig14": Figure("Other encodings, variable length", BOTH_METRICS, "input length", by_length),
    "fixed-or-varying": Figure(
        "Other encodings, fixed and variable length", ACCURACY, "encoding", by_variation
    ),
    "section4.1": Figure(
        "More iterations, larger batches",
        ACCURACY,
        "encoding, iterations x batch",
        by_training,
        chance=uniform_chance,
    ),
} | beyond.figures(beyond.IN_REVERSAL, "Reverse ordering")

RANDOM, LEARNED = (dict(pe=pe, amplitude=None) for pe in ("random", "learned"))  # at their usual length
SMALL, LARGE = dict(vocab=min), dict(vocab=max)
FREQUENT_AMONG_FREQUENT, FREQUENT_AMONG_RARE, RARE_AMONG_FREQUENT, _ = map(retrieval, CONDITIONS)
AMONG_RARE = ("frequent/rare", "rare/rare")
ANY_AMONG_RARE = retrieval(*AMONG_RARE)
FIRST_QUARTER, SECOND_QUARTER = (retrieval(*AMONG_RARE, first=n / 4, last=(n + 1) / 4) for n in (0, 1))
AFTER_FIRST, SECOND_HALF = retrieval(*AMONG_RARE, first=1 / 4), retrieval(*AMONG_RARE, first=1 / 2)
BUT_ALL_RARE_EARLY = worst(*(retrieval(c) for c in CONDITIONS[:3]), retrieval("rare/rare", first=1 / 2))
EVERYWHERE = worst(*map(retrieval, CONDITIONS))
PAPER = ("paper",)
ABOVE_95 = "position-encoded {model} is above 95% at every vocabulary"
NEARLY_PERFECT = (
    "position-encoded GRU is nearly perfect (95%, our number) but for "
    "Rare targets among Rare in the first half"
)
RARE_HURTS = "Rare disturbants hurt vanilla {model}'s Frequent targets"
NOT_RARITY = "vanilla {model} loses less on Rare targets than to Rare disturbants"
ALWAYS_95 = "position-encoded LSTM is nearly perfect (95%, our number) in every condition"
RETRIEVED = "vanilla {model} answers Rare targets among Frequent disturbants (95%, our number)"
DEGRADES = "vanilla {model} degrades as the vocabulary grows"
LONGER = "twice the iterations do not help vanilla {model}"
MORE_THAN = "the encoding helps more than twice the iterations"
MORE_THAN_LARGER = "the encoding helps more than twice the batch"
LARGER = "twice the batch does not help vanilla {model}"
LSTM_EARLY = "vanilla LSTM among Rare disturbants is worse in the first quarter than after it"
S4D_FIRST = "S4D, with the encoding or without, answers the integer read first in 96%"
S4D_SECOND = "vanilla S4D among Rare disturbants is worse in the second quarter than in the"
OF_GRU, OF_LSTM, OF_S4D = (dict(model=name) for name in ("gru", "lstm", "s4d"))
BASE = dict(iterations=min, batch=min)
NOT_HELPED = dict(per="model", margin=NO_GAIN)
FIXED, VARYING = SIN | dict(min_length=None), SIN | dict(min_length=max)


def claims_of_fig2(figure, primary=False, growth=True):
    """What the clock does to each model, over all vocabularies.

    Near an accuracy of 1 there is no room for help, but in log-odds there is: growth in both is robust.
    """
    found = [Claim(figure, DEGRADES, accuracy, NONE | SMALL, NONE | LARGE, per="model")]
    found += helps_at_largest(figure, primary)
    if growth:
        found += grows(figure, primary=primary) + grows(figure, log_odds, measured=", in log-odds")
    return found


def rare_hurts(model):
    sides = dict(higher=NONE, lower=NONE, than=FREQUENT_AMONG_RARE)
    return Claim("fig3", RARE_HURTS, FREQUENT_AMONG_FREQUENT, **sides, where=model, primary=model == OF_LSTM)


# Primary: the title's finding, in the figure of all three models; and what explains it, in the LSTM alone.
CLAIMS = [
    *at_scales(("paper", "desk"), claims_of_fig2("fig2", primary=True)),
    *at_scales(("quick", "smoke"), claims_of_fig2("fig2", growth=False)),
    *claims_of_fig2("fig2-full", primary=True),
    *claims_of_fig2("fig2-first"),
    *claims_of_fig2("fig2-short"),
    *claims_of_fig2("fig2-short-twice"),
    Claim("fig2", ABOVE_95, accuracy, SIN, 0.95, where=OF_GRU, scales=PAPER),
    Claim("fig2", ABOVE_95, accuracy, SIN, 0.95, where=OF_LSTM, scales=PAPER),
    *(rare_hurts(model) for model in (OF_GRU, OF_LSTM, OF_S4D)),
    Claim("fig3", RETRIEVED, RARE_AMONG_FREQUENT, NONE, 0.95, per="model", scales=PAPER),
    Claim("fig3", NOT_RARITY, RARE_AMONG_FREQUENT, NONE, NONE, than=FREQUENT_AMONG_RARE, per="model"),
    *helps("fig3", "{model} among Rare disturbants", ANY_AMONG_RARE, per="model"),
    Claim("fig3", LSTM_EARLY, AFTER_FIRST, NONE, NONE, than=FIRST_QUARTER, where=OF_LSTM),
    Claim("fig3", NEARLY_PERFECT, BUT_ALL_RARE_EARLY, SIN, 0.95, where=OF_GRU, scales=PAPER),
    Claim("fig3", ALWAYS_95, EVERYWHERE, SIN, 0.95, where=OF_LSTM, scales=PAPER),
    *(
        Claim("fig3", f"{S4D_FIRST}, {c}", retrieval(c, last=1 / 64), {}, 0.96, where=OF_S4D, scales=PAPER)
        for c in CONDITIONS
    ),
    Claim(
        "fig3", f"{S4D_SECOND} first quarter", FIRST_QUARTER, NONE, NONE, than=SECOND_QUARTER, where=OF_S4D
    ),
    Claim("fig3", f"{S4D_SECOND} second half", SECOND_HALF, NONE, NONE, than=SECOND_QUARTER, where=OF_S4D),
    *helps("fig11", "at varying length"),
    *dup_does_not_help("fig12"),
    *helps("fig12"),
    Claim("section4.1", LONGER, accuracy, NONE | BASE | dict(iterations=max), NONE | BASE, **NOT_HELPED),
    Claim("section4.1", MORE_THAN, accuracy, SIN | BASE, NONE | BASE | dict(iterations=max)),
    Claim("section4.1", MORE_THAN_LARGER, accuracy, SIN | BASE, NONE | BASE | dict(batch=max)),
    Claim("section4.1", LARGER, accuracy, NONE | BASE | dict(batch=max), NONE | BASE, **NOT_HELPED),
]
for figure in ("fig2", "fig2-full", "fig2-first", "fig2-short", "fig2-short-twice"):
    CLAIMS += helps_below_largest(GRIDS, figure)
for figure, at in (("fig13", ""), ("fig14", " at varying length")):
    CLAIMS += [
        Claim(figure, f"random vectors help{at}", accuracy, RANDOM, NONE, controls=CONTROLS),
        Claim(figure, f"learned vectors help{at}", accuracy, LEARNED, NONE, controls=CONTROLS),
        Claim(figure, f"sin is better than random{at}", accuracy, SIN, RANDOM),
        Claim(figure, f"sin is better than learned{at}", accuracy, SIN, LEARNED),
    ]
for pe in ("random", "learned"):
    more = f"sin's lead over {pe} is larger at varying length"
    CLAIMS.append(Claim("fixed-or-varying", more, accuracy, VARYING, FIXED, over=dict(pe=pe)))
SHORT = "sin is better than learned vectors that start at its length"
CLAIMS.append(Claim("fig13", SHORT, accuracy, SIN, dict(pe="learned", amplitude=1.0)))
CLAIMS += beyond.claims(beyond.IN_REVERSAL)
Reverse.scales, Reverse.grids = SCALES, GRIDS
Reverse.figures, Reverse.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(Reverse))
