"""Predecessor query (Fig. 10): read L different integers, then one of them again; answer the one before it.

    python predecessor.py --model lstm --pe sin --vocab 1024 --seed 0     # one cell of Fig. 10, one seed
    python predecessor.py --list fig10                                    # the commands of all its trials
    python predecessor.py --scale quick --all fig10                       # a reduced Fig. 10 on a CPU
    python predecessor.py --report                                        # tables, figures and claims so far

    in   3 1 4 2 4        the query, 4, is never the first integer; time runs 1 .. L+1
    out  . . . . 1        one answer per sequence; . is not answered and has no loss

A model first learns to answer any integer that it has read, so that accuracy passes 1/(L-1) on its way up.
At quick scale (35 s a trial on two cores of an AMD EPYC) it ends at 0.72 without, 0.74 with the encoding.
The caption of Fig. 10 counts 65,536 test tokens; 1024 test sequences have 1024 answers. Its vocabularies are
in the released code only.
"""

import math

import torch

import common
import report
import trial
from common import Data, Episode, HeldOut, Refused, distinct_rows, random_bits, scale_bits, uniform_integers
from report import Figure
from trial import SEEDS, SMOKE, cross


def different_integers(k, shape, length, vocab):
    """(*shape, L) different integers of 0..K-1 in random order, every ordered choice equally likely.

    The first is one of K, the next the r-th smallest of the K-1 others, and so on (a Lehmer code). Decoded
    backwards: what comes after an integer was counted without it, so what is not below it moves up by one.
    """
    choices = vocab - torch.arange(length, device=k.device)
    x = scale_bits(random_bits(k, (*shape, length)), choices)
    for t in range(length - 2, -1, -1):
        x[..., t + 1 :] += x[..., t + 1 :] >= x[..., t : t + 1]
    return x


class Predecessor(Data):
    """The data of one trial: training episodes by iteration, and the held-out test."""

    def __init__(self, args, device):
        self.vocab, self.length, self.batch = args.vocab, args.length, args.batch
        rows = distinct_rows(self.draw, args.held_out, args.seed, common.HELD_OUT, device=device)
        self.held_out = HeldOut(self.draw, rows, args.held_out / queries(args), args.seed)

    def draw(self, k, shape):
        """(*shape, L+1): the integers and the query, which are held out together."""
        x = different_integers(k, shape, self.length, self.vocab)
        asked = 1 + uniform_integers(common.mix(k), (*shape, 1), self.length - 1)
        return torch.cat([x, x.gather(-1, asked)], dim=-1)

    def episode(self, rows):
        x, query = rows.split([self.length, 1], dim=1)
        asked = (x == query).byte().argmax(1, keepdim=True)  # (B, 1)
        return Episode(rows, x.gather(1, asked - 1), slice(self.length, self.length + 1))

    def evaluate(self, model):
        metrics = super().evaluate(model)
        return {"accuracy": metrics["token_accuracy"], "cross_entropy": metrics["cross_entropy"]}


def queries(args):
    """How many sequences with their query exist."""
    return math.perm(args.vocab, args.length) * (args.length - 1)


def check(args):
    if args.length < 2:
        raise Refused(f"a query needs a predecessor: --length must be at least 2, got {args.length}")
    if args.vocab < args.length:
        raise Refused(
            f"--length {args.length} different integers need as large a vocabulary, got --vocab {args.vocab}"
        )
    if args.held_out > (exist := queries(args)):
        raise Refused(f"--held-out {args.held_out} is more than the {exist} sequences and queries that exist")


# ------------------------------------------------------------------------------------------------------------
# The trials of the figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

BOTH = ["none", "sin"]
SCALES = {
    "paper": dict(vocab=1024, length=16),
    "quick": dict(
        length=4, vocab=64, hidden=128, embed=64, batch=64, lr=5e-3, iterations=5000, save_every=500
    ),
    "smoke": SMOKE | dict(length=4, vocab=8, held_out=32),
}
GRIDS = {
    "paper": {"fig10": cross(model="lstm", pe=BOTH, vocab=[512, 640, 768, 896, 1024], seed=SEEDS)},
    "quick": {"fig10": cross(model="lstm", pe=BOTH, vocab=64, seed=SEEDS)},
    "smoke": {"fig10": cross(model="lstm", pe=BOTH, vocab=[8, 16], seed=range(1))},
}


def accuracy(metrics):
    return metrics["accuracy"]


FIGURES = {"fig10": Figure("Predecessor query", {"accuracy": accuracy}, "vocab")}
CLAIMS = report.helps_at_each_vocab("fig10", accuracy, GRIDS)

TASK = trial.Task(
    name="predecessor",
    build=Predecessor,
    scales=SCALES,
    grids=GRIDS,
    figures=FIGURES,
    claims=CLAIMS,
    positions=lambda args: args.length + 1,
    derive=lambda args: {"held_out": 1024},
    check=check,
)

if __name__ == "__main__":
    raise SystemExit(trial.main(TASK, report.show))
