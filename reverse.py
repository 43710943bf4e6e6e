"""Reverse ordering (Figs. 2, 3, 11-14): read L integers, then, at L commands, answer them last first.

    python reverse.py --model lstm --pe sin --vocab 16384 --seed 0     # one cell of Fig. 2, one seed
    python reverse.py --list fig2                                      # the commands of all its trials
    python reverse.py --scale quick --all fig2                         # a reduced Fig. 2 on a CPU, LSTM alone
    python reverse.py --report                                         # tables, figures and claims so far

    in   3 1 4 _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . 4 1 3        . is not answered and has no loss

--min-length N draws every row's length from N..L; the rest of a short row is commands without answers.
--dual-freq makes half of the integers Rare; its test retrieves one target among disturbants of one kind.

What to expect: the loss begins at ln K. At quick scale (45 s a trial on two cores of an AMD EPYC) token
accuracy is 0.23 after a quarter of the iterations and ends at 0.49 without, 0.54 with the encoding; a wider
input without a clock, --pe dup, gains as much there (README, Results). At paper scale nothing has been timed.
Departs from the paper where that is silent: gradients are clipped, as in the released code (--clip).
"""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

import common
import report
import trial
from common import Data, Episode, HeldOut, Refused, distinct_rows, random_bits, scale_bits, uniform_integers
from report import (
    ACCURACY,
    BOTH_METRICS,
    NONE,
    SIN,
    Claim,
    Figure,
    above,
    accuracy,
    distance,
    higher,
    not_higher,
)
from trial import SEEDS, SMOKE, cross

# ------------------------------------------------------------------------------------------------------------
# Dual frequency (section 4.2): K/2 Frequent integers, then K/2 Rare ones
# ------------------------------------------------------------------------------------------------------------

KINDS = ("frequent", "rare")
CONDITIONS = [f"{target}/{disturbants}" for target in KINDS for disturbants in KINDS]


def dual_frequency_integers(k, shape, vocab):
    """Rare with probability 1/8, else Frequent; uniform inside the group."""
    bits = random_bits(k, shape)
    rare = (bits >> 61 & 7) == 0  # three bits that the integer does not use
    return scale_bits(bits, vocab // 2) + rare * (vocab // 2)


def dual_frequency_mass(rows, vocab):
    """The probability that a training sequence is one of the rows."""
    rare = (rows >= vocab // 2).sum(1).double()
    log_probability = rare * math.log(1 / 8) + (rows.shape[1] - rare) * math.log(7 / 8)
    return (log_probability + rows.shape[1] * math.log(2 / vocab)).exp().sum().item()


def dual_frequency_patterns(length):
    """{which positions are Rare: [(condition, position of the target), ...]}: what needs such sequences."""
    patterns = defaultdict(list)
    for condition, name in enumerate(CONDITIONS):
        target, disturbants = (kind == "rare" for kind in name.split("/"))
        for position in range(length):
            pattern = [disturbants] * length
            pattern[position] = target
            patterns[tuple(pattern)].append((condition, position))
    return patterns


def dual_frequency_test(seed, vocab, length, count, device):
    """(4, L, count / 4L, L): different sequences for each condition and position of the target."""
    each = count // (len(CONDITIONS) * length)
    test = torch.empty(len(CONDITIONS), length, each, length, dtype=torch.int64, device=device)
    for number, (pattern, uses) in enumerate(dual_frequency_patterns(length).items()):
        first = torch.tensor(pattern, device=device) * (vocab // 2)  # of the group of every position

        def draw(k, shape, first=first):
            return uniform_integers(k, (*shape, length), vocab // 2) + first

        rows = distinct_rows(draw, each * len(uses), seed, common.HELD_OUT, number, device=device)
        for use, part in zip(uses, rows.split(each)):
            test[use] = part
    return test


# ------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------


class Reverse(Data):
    """The data of one trial: training episodes by iteration, and the held-out test."""

    def __init__(self, args, device):
        self.vocab, self.length, self.min_length = args.vocab, args.length, args.min_length
        self.dual_freq, self.batch = args.dual_freq, args.batch
        if self.dual_freq:
            rows = dual_frequency_test(args.seed, self.vocab, self.length, args.held_out, device)
            rows = rows.flatten(0, 2)
            mass = dual_frequency_mass(rows, self.vocab)
        else:
            lengths = self.lengths()
            rows = torch.cat([self.test_rows(args.seed, n, args.held_out, device) for n in lengths])
            mass = sum(args.held_out / self.vocab**n for n in lengths) / len(lengths)
        self.held_out = HeldOut(self.draw, rows, mass, args.seed)

    def lengths(self):
        return range(self.min_length or self.length, self.length + 1)

    def test_rows(self, seed, length, count, device):
        def draw(k, shape):
            return uniform_integers(k, (*shape, length), self.vocab)

        rows = distinct_rows(draw, count, seed, common.HELD_OUT, length, device=device)
        return torch.nn.functional.pad(rows, (0, self.length - length), value=self.vocab)

    def draw(self, k, shape):
        """(*shape, L) integers of the training distribution; K, the command, after the end of a short row."""
        if self.dual_freq:
            return dual_frequency_integers(k, (*shape, self.length), self.vocab)
        rows = uniform_integers(k, (*shape, self.length), self.vocab)
        if self.min_length is None:
            return rows
        lengths = self.min_length + uniform_integers(common.mix(k), (*shape, 1), len(self.lengths()))
        return rows.masked_fill(torch.arange(self.length, device=rows.device) >= lengths, self.vocab)

    def episode(self, rows):
        inputs = torch.cat([rows, torch.full_like(rows, self.vocab)], dim=1)  # (B, 2L)
        if self.min_length is None:
            return Episode(inputs, rows.flip(1), slice(self.length, 2 * self.length), None, self.length)
        lengths = (rows < self.vocab).sum(1, keepdim=True)  # (B, 1)
        j = torch.arange(self.length, device=rows.device)
        targets = rows.gather(1, (lengths - 1 - j).clamp(min=0))
        steps = (lengths + j).clamp(max=2 * self.length - 1)
        return Episode(inputs, targets, steps, j < lengths, self.length)

    def test_episode(self):
        episode = self.episode(self.held_out.rows)
        if not self.dual_freq:
            return episode
        each = len(episode.inputs) // (len(CONDITIONS) * self.length)  # rows: condition, position, repeat
        position = torch.arange(self.length, device=episode.inputs.device).repeat_interleave(each)
        position = position.repeat(len(CONDITIONS))[:, None]
        target = episode.inputs.gather(1, position)
        return Episode(episode.inputs, target, 2 * self.length - 1 - position)

    def evaluate(self, model):
        episode = self.test_episode()
        predictions, losses = common.answers(model, episode, self.batch)
        metrics = common.sequence_metrics(episode, predictions, losses)
        right = (predictions == episode.targets).cpu().numpy()
        if self.dual_freq:  # one answer per row: neither whole sequences nor distances
            by_condition = right.reshape(len(CONDITIONS), self.length, -1).mean(2)  # (4, L)
            metrics = {k: metrics[k] for k in ("token_accuracy", "cross_entropy")}
            metrics["by_condition"] = dict(zip(CONDITIONS, by_condition.tolist()))
        elif self.min_length is not None:
            by_length = right.reshape(len(self.lengths()), -1, self.length)  # (lengths, rows of each, L)
            metrics["by_length"] = {str(n): float(r[:, :n].mean()) for n, r in zip(self.lengths(), by_length)}
        return metrics


def add_flags(group):
    flag = group.add_argument
    flag("--min-length", type=trial.COUNT, metavar="N", help="draw each row's length from N..L (all L)")
    flag("--dual-freq", action="store_true", help="half of the integers are Rare (section 4.2)")


def derive(args):
    dual = args.dual_freq
    return {
        "held_out": 16 * len(CONDITIONS) * args.length if dual else 1024,  # of each length, where it varies
        "snapshot_every": min(5000, max(1, args.iterations // 10)) if dual else 0,
    }


def check(args):
    lengths = range(args.min_length or args.length, args.length + 1)
    if not lengths:
        raise Refused(f"--min-length {args.min_length} is above --length {args.length}")
    if not args.dual_freq:
        if args.held_out > args.vocab ** lengths[0]:
            exist = f"{args.vocab ** lengths[0]} sequences of length {lengths[0]} that exist"
            raise Refused(f"--held-out {args.held_out} is more than the {exist} (vocab^length)")
        return
    if args.min_length is not None:
        raise Refused("--dual-freq has sequences of one length: leave out --min-length")
    if args.vocab % 2:
        raise Refused(f"--dual-freq splits the vocabulary in halves: --vocab {args.vocab} is odd")
    cells = len(CONDITIONS) * args.length
    if args.held_out % cells:
        raise Refused(f"--held-out {args.held_out} is not a multiple of {cells} (4 conditions x --length)")
    needed = max(map(len, dual_frequency_patterns(args.length).values())) * args.held_out // cells
    if needed > (exist := (args.vocab // 2) ** args.length):
        raise Refused(
            f"--held-out {args.held_out} needs {needed} sequences of a kind, but only {exist} exist"
        )


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

BOTH, ALL = ["none", "sin"], ["none", "sin", "random", "learned"]
LSTM_LARGE = dict(model="lstm", vocab=16384)
# Shorter and longer trained than the rest: the paper's pattern needs Rare integers that have been learned.
QUICK_DUAL_FREQ = dict(vocab=128, dual_freq=True, length=8, iterations=5400, held_out=4096)
SCALES = {
    "paper": {},
    "quick": dict(
        length=16, vocab=128, hidden=128, embed=32, batch=64, lr=3e-3, iterations=2700, save_every=500
    ),
    "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
}
GRIDS = {
    "paper": {
        "fig2": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256], seed=SEEDS)
        + cross(model="lstm", pe=BOTH, vocab=[256, 512, 1024, 2048, 4096, 8192, 16384], seed=SEEDS)
        + cross(model="s4d", pe=BOTH, vocab=[256, 512, 1024, 2048, 4096, 8192, 16384], seed=SEEDS),
        "fig3": cross(model="gru", pe=BOTH, vocab=64, dual_freq=True, seed=SEEDS)
        + cross(model="lstm", pe=BOTH, vocab=1024, dual_freq=True, seed=SEEDS)
        + cross(model="s4d", pe=BOTH, vocab=2048, dual_freq=True, seed=SEEDS),
        "fig11": cross(pe=BOTH, **LSTM_LARGE, min_length=32, seed=SEEDS),
        "fig12": cross(pe=["none", "dup", "sin"], **LSTM_LARGE, seed=SEEDS),
        "fig13": cross(pe=ALL, **LSTM_LARGE, seed=SEEDS),
        "fig14": cross(pe=ALL, **LSTM_LARGE, min_length=32, seed=SEEDS),
        "section4.1": cross(pe="none", **LSTM_LARGE, iterations=[300_000, 600_000], batch=512, seed=SEEDS)
        + cross(pe="none", **LSTM_LARGE, iterations=300_000, batch=1024, seed=SEEDS),
    },
    "quick": {
        "fig2": cross(model="lstm", pe=BOTH, vocab=128, seed=range(3)),
        "fig2-models": cross(model=["gru", "lstm"], pe=BOTH, vocab=128, seed=SEEDS)
        + cross(model="s4d", pe=BOTH, vocab=512, seed=SEEDS),
        "fig3": cross(model="lstm", pe=BOTH, **QUICK_DUAL_FREQ, seed=SEEDS),
        "fig11": cross(model="lstm", pe=BOTH, vocab=128, min_length=8, seed=SEEDS),
        "fig12": cross(model="lstm", pe=["none", "dup", "sin"], vocab=128, seed=SEEDS),
        "fig12-wide": cross(model="lstm", pe=["none", "dup", "sin"], vocab=128, embed=128, seed=SEEDS),
        "fig13": cross(model="lstm", pe=ALL, vocab=128, seed=SEEDS),
        "fig14": cross(model="lstm", pe=ALL, vocab=128, min_length=8, seed=SEEDS),
    },
    "smoke": {
        "fig2": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=[8, 16], seed=range(1)),
        "fig3": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=8, dual_freq=True, seed=range(1)),
        "fig11": cross(model="lstm", pe=BOTH, vocab=8, min_length=4, seed=range(1)),
        "fig12": cross(model="lstm", pe=["none", "dup", "sin"], vocab=8, seed=range(1)),
        "fig13": cross(model="lstm", pe=ALL, vocab=8, seed=range(1)),
        "fig14": cross(model="lstm", pe=ALL, vocab=8, min_length=4, seed=range(1)),
    },
}


def retrieval(*conditions, first=0.0, last=1.0):
    """Mean accuracy over conditions and a part of the target's positions (as fractions of L)."""

    def metric(metrics):
        found = [metrics["by_condition"][c] for c in conditions]
        return float(np.mean([x[round(first * len(x)) : round(last * len(x))] for x in found]))

    return metric


def worst(*metrics):
    return lambda trial_metrics: min(metric(trial_metrics) for metric in metrics)


def by_position(flags, metrics):
    for condition, values in metrics["by_condition"].items():
        yield f"{flags['model'].upper()}, {flags['pe']}", condition, dict(enumerate(values, 1))


def by_length(flags, metrics):
    yield flags["model"].upper(), flags["pe"], {int(n): x for n, x in metrics["by_length"].items()}


def by_training(flags, metrics):
    x = f"{flags['iterations']:,} x {flags['batch']}"
    yield flags["model"].upper(), flags["pe"], {x: accuracy(metrics)}


RETRIEVAL = {f"accuracy, {c} (target/disturbants)": retrieval(c) for c in CONDITIONS}
FIGURES = {
    "fig2": Figure("Reverse ordering", BOTH_METRICS, "vocab"),
    "fig2-models": Figure("Reverse ordering, all three models", BOTH_METRICS, "vocab"),
    "fig3": Figure("Reverse ordering, Frequent and Rare integers", RETRIEVAL, "target position", by_position),
    "fig11": Figure("Reverse ordering, variable length", BOTH_METRICS, "input length", by_length),
    "fig12": Figure("Reverse ordering, the embedding twice", BOTH_METRICS, "pe"),
    "fig12-wide": Figure("The embedding twice, where it is as wide as the layer", BOTH_METRICS, "pe"),
    "fig13": Figure("Reverse ordering, other encodings", BOTH_METRICS, "pe"),
    "fig14": Figure("Other encodings, variable length", BOTH_METRICS, "input length", by_length),
    "section4.1": Figure("More iterations, larger batches", ACCURACY, "iterations x batch", by_training),
}

RANDOM, LEARNED = dict(pe="random"), dict(pe="learned")
SMALLEST, LARGEST = dict(vocab=min), dict(vocab=max)
AMONG_RARE = ("frequent/rare", "rare/rare")
CLAIMS = []
for name in common.LAYERS:
    M, about = name.upper(), dict(model=name)
    CLAIMS += [
        Claim(
            "fig2",
            f"vanilla {M} degrades as the vocabulary grows",
            higher(accuracy, NONE | SMALLEST, NONE | LARGEST),
            about,
        ),
        Claim(
            "fig2",
            f"the encoding helps {M} at the largest vocabulary",
            higher(accuracy, SIN | LARGEST, NONE | LARGEST),
            about,
        ),
        Claim(
            "fig2",
            f"the encoding lowers {M}'s edit distance at the largest vocabulary",
            higher(distance, NONE | LARGEST, SIN | LARGEST),
            about,
        ),
        Claim(
            "fig3",
            f"Rare disturbants hurt vanilla {M}'s Frequent targets",
            higher(retrieval("frequent/frequent"), NONE, NONE, than=retrieval("frequent/rare")),
            about,
        ),
        Claim(
            "fig3",
            f"vanilla {M} loses less on Rare targets than to Rare disturbants",
            higher(retrieval("rare/frequent"), NONE, NONE, than=retrieval("frequent/rare")),
            about,
        ),
        Claim(
            "fig3",
            f"the encoding helps {M} among Rare disturbants",
            higher(retrieval(*AMONG_RARE), SIN, NONE),
            about,
        ),
    ]
CLAIMS += [
    Claim(
        "fig2",
        f"position-encoded {name.upper()} is above 95% at every vocabulary",
        above(0.95, accuracy, SIN),
        dict(model=name),
        ("paper",),
    )
    for name in ("gru", "lstm")
]
CLAIMS += [
    Claim(
        "fig3",
        "vanilla LSTM among Rare disturbants is worse in the first quarter than after it",
        higher(retrieval(*AMONG_RARE, first=1 / 4), NONE, NONE, than=retrieval(*AMONG_RARE, last=1 / 4)),
        dict(model="lstm"),
    ),
    Claim(
        "fig3",
        "position-encoded GRU is nearly perfect (95%) but for Rare targets among Rare in the first half",
        above(0.95, worst(*(retrieval(c) for c in CONDITIONS[:3]), retrieval("rare/rare", first=1 / 2)), SIN),
        dict(model="gru"),
        ("paper",),
    ),
    Claim(
        "fig3",
        "position-encoded LSTM is nearly perfect (95%) in every condition",
        above(0.95, worst(*map(retrieval, CONDITIONS)), SIN),
        dict(model="lstm"),
        ("paper",),
    ),
]
SECOND = retrieval(*AMONG_RARE, first=1 / 4, last=1 / 2)
for part, other in (("first quarter", dict(last=1 / 4)), ("second half", dict(first=1 / 2))):
    text = f"vanilla S4D among Rare disturbants is worse in the second quarter than in the {part}"
    check_ = higher(retrieval(*AMONG_RARE, **other), NONE, NONE, than=SECOND)
    CLAIMS.append(Claim("fig3", text, check_, dict(model="s4d")))
CLAIMS += [
    Claim("fig11", "the encoding helps although the length varies", higher(accuracy, SIN, NONE)),
    *report.DUP_CLAIMS,
    Claim(
        "section4.1",
        "twice the iterations do not help vanilla LSTM",
        not_higher(accuracy, dict(iterations=600_000), dict(iterations=300_000, batch=512)),
    ),
    Claim(
        "section4.1",
        "twice the batch does not help vanilla LSTM",
        not_higher(accuracy, dict(batch=1024), dict(iterations=300_000, batch=512)),
    ),
]
for figure in ("fig13", "fig14"):
    CLAIMS += [
        Claim(figure, "random vectors help", higher(accuracy, RANDOM, NONE)),
        Claim(figure, "learned vectors help", higher(accuracy, LEARNED, NONE)),
        Claim(figure, "sin is better than random", higher(accuracy, SIN, RANDOM)),
        Claim(figure, "sin is better than learned", higher(accuracy, SIN, LEARNED)),
    ]
# The claims of a figure, asked of another grid at quick scale
for other in ("fig2-models", "fig12-wide"):
    CLAIMS += [replace(claim, figure=other) for claim in CLAIMS if claim.figure == other.split("-")[0]]

TASK = trial.Task(
    name="reverse",
    build=Reverse,
    scales=SCALES,
    grids=GRIDS,
    figures=FIGURES,
    claims=CLAIMS,
    positions=lambda args: 2 * args.length,
    derive=derive,
    check=check,
    add_flags=add_flags,
)

if __name__ == "__main__":
    raise SystemExit(trial.main(TASK, report.show))
