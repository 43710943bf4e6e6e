"""Predecessor query (Fig. 10): read L different integers, then one of them again; answer the one before it.

    python predecessor.py --model lstm --pe sin --vocab 1024 --seed 0     # one cell of Fig. 10, one seed
    python predecessor.py --list fig10                                    # the commands of all its trials
    python predecessor.py --scale quick --all fig10                       # a reduced Fig. 10 on a CPU
    python predecessor.py --report                                        # tables, figures and claims so far

    in   3 1 4 2 4        the query, 4, is never the first integer; time runs 1 .. L+1
    out  . . . . 1        one answer per sequence; . is not answered and has no loss

A model first learns to answer any integer that it has read, so that accuracy passes 1/(L-1) on its way up.
The caption of Fig. 10 counts 65,536 test tokens; 1024 test sequences have 1024 answers. Its vocabularies are
in the released code only.
"""

from suite import cli
from suite.claims import AT_LARGEST, Figure, at_scales, grows, helps, helps_below_largest, metric
from suite.flags import BOTH, SEEDS, SMOKE, WITH_CONSTANT, WITH_DUP, cross
from suite.task import Task

import math

import torch

import common
from common import Episode, Refused, random_bits, scale_bits, uniform_integers


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


class Predecessor(Task):
    name = "predecessor"

    def check(self):
        if self.length < 2:
            raise Refused(f"a query needs a predecessor: --length must be at least 2, got {self.length}")
        if self.vocab < self.length:
            raise Refused(
                f"--length {self.length} different integers need a --vocab of as many, got {self.vocab}"
            )
        super().check()

    def positions(self):
        return self.length + 1

    def exist(self):
        """Sequences with their query."""
        most = 100  # of more there are over 100!, as good as infinitely many
        return math.perm(self.vocab, self.length) * (self.length - 1) if self.length <= most else math.inf

    def draw(self, k, shape):
        """(*shape, L+1): the integers and the query, which are held out together."""
        x = different_integers(k, shape, self.length, self.vocab)
        asked = 1 + uniform_integers(common.mix(k), (*shape, 1), self.length - 1)
        return torch.cat([x, x.gather(-1, asked)], dim=-1)

    def episode(self, rows):
        x, query = rows.split([self.length, 1], dim=1)
        asked = (x == query).byte().argmax(1, keepdim=True)  # (B, 1)
        return Episode(rows, x.gather(1, asked - 1), slice(self.length, self.length + 1))

    def evaluate(self, model, engine):
        metrics = super().evaluate(model, engine)
        return {"accuracy": metrics["token_accuracy"], "cross_entropy": metrics["cross_entropy"]}


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

SCALES = {
    "paper": dict(vocab=1024, length=16),
    "desk": dict(length=4, hidden=128, embed=128, batch=64, lr=3e-3, iterations=20_000),
    "quick": dict(length=4, vocab=64, hidden=64, embed=64, batch=64, lr=1e-2, iterations=4000),
    "smoke": SMOKE | dict(length=4, vocab=8, held_out=32),
}
GRIDS = {
    "paper": {"fig10": cross(model="lstm", pe=BOTH, vocab=[512, 640, 768, 896, 1024], seed=SEEDS)},
    "desk": {"fig10": cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024], seed=SEEDS)},
    "quick": {"fig10": cross(model="lstm", pe=WITH_DUP, vocab=64, seed=SEEDS)},
    "smoke": {"fig10": cross(model="lstm", pe=BOTH, vocab=[8, 16], seed=range(1))},
}


def chance(vocab, length):
    """Of a model that knows the query alone: any other integer may come before it."""
    return 1 / (vocab - 1)


accuracy = metric("accuracy")
FIGURES = {"fig10": Figure("Predecessor query", {"accuracy": accuracy}, "vocab", chance=chance)}
CLAIMS = [
    *helps("fig10", AT_LARGEST, accuracy, vocab=max),
    *helps_below_largest(GRIDS, "fig10", accuracy),
    *at_scales(("paper", "desk", "smoke"), grows("fig10", accuracy)),
]
Predecessor.scales, Predecessor.grids = SCALES, GRIDS
Predecessor.figures, Predecessor.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(Predecessor))
