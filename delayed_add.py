"""Reverse ordering + delayed addition (Fig. 7): read x1..xL, then add xL..x1 to y1..yL, modulo K.

    python delayed_add.py --model lstm --pe sin --vocab 1024 --seed 0     # one cell of Fig. 7, one seed
    python delayed_add.py --list fig7                                     # the commands of all its trials
    python delayed_add.py --scale quick --all fig7                        # a reduced Fig. 7 on a CPU
    python delayed_add.py --report                                        # tables, figures and claims so far

    in   3 1 4 2 9 8        x = 3 1 4, then y = 2 9 8, without a command; time runs 1 .. 2L
    out  . . . 6 0 1        4+2, 1+9, 3+8 with K = 10; . is not answered and has no loss

Twice the iterations of the other tasks, as in the paper (Appendix A.1), which found it too hard for GRUs.
Accuracy stays low for long before it climbs: at quick scale for the first third of the iterations. There a
trial takes half a minute on one CPU core.
"""

from suite import cli
from suite.claims import (
    ACCURACY,
    AT_LARGEST,
    Claim,
    Figure,
    accuracy,
    at_scales,
    grows,
    helps,
    helps_below_largest,
    uniform_chance,
)
from suite.flags import BOTH, SEEDS, SMOKE, WITH_CONSTANT, WITH_CONTROLS, cross
from suite.task import Task

import beyond
from common import Episode, count_sequences, uniform_integers


class DelayedAddition(Task):
    name = "delayed_add"

    def exist(self):
        return count_sequences(self.vocab, 2 * self.length)

    def draw(self, k, shape):
        """(*shape, 2L): x and y, which are held out together."""
        return uniform_integers(k, (*shape, 2 * self.length), self.vocab)

    def episode(self, rows):
        x, y = rows.split(self.length, dim=1)
        return Episode(rows, (x.flip(1) + y) % self.vocab, slice(self.length, 2 * self.length))


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

SCALES = {
    "paper": dict(vocab=1024, length=16, iterations=600_000),
    "desk": dict(length=8, vocab=128, hidden=128, embed=128, batch=64, lr=1e-3, iterations=20_000),
    "quick": dict(length=8, vocab=32, hidden=64, embed=64, batch=64, lr=1e-2, iterations=3000),
    "smoke": SMOKE | dict(length=4, vocab=8, held_out=32),
}
GRIDS = {
    "paper": {
        "fig7": cross(model="lstm", pe=BOTH, vocab=[896, 960, 1024, 1088], seed=SEEDS),
        "fig7-gru": cross(model="gru", pe=BOTH, vocab=896, seed=SEEDS),
    },
    "desk": {"fig7": cross(model="lstm", pe=WITH_CONSTANT, vocab=[32, 64, 128], seed=SEEDS)},
    "quick": {"fig7": cross(model="lstm", pe=WITH_CONTROLS, vocab=32, seed=SEEDS)}
    | beyond.grids(
        dict(model="lstm", vocab=32), beyond.IN_ADDITION, dict(vocab=32, iterations=3000, lr=1e-2)
    ),
    "smoke": {"fig7": cross(model="lstm", pe=BOTH, vocab=[8, 16], seed=range(1))},
}
BY_VOCAB = dict(metrics=ACCURACY, x="vocab", chance=uniform_chance)
FIGURES = {
    "fig7": Figure("Reverse ordering + delayed addition", **BY_VOCAB),
    "fig7-gru": Figure("Delayed addition by a GRU", **BY_VOCAB),
}
FIGURES |= beyond.figures(beyond.IN_ADDITION, "Delayed addition")
GRU_FAILS = "GRUs, with the encoding or without, answer less than half (our number) even at this length"
CLAIMS = [
    *helps("fig7", AT_LARGEST, vocab=max),
    *helps_below_largest(GRIDS, "fig7"),
    *at_scales(("paper", "desk", "smoke"), grows("fig7")),
    Claim("fig7-gru", GRU_FAILS, lambda outcome: 1 - accuracy(outcome), {}, 0.5, scales=("paper",)),
    *beyond.claims(beyond.IN_ADDITION),
]
DelayedAddition.scales, DelayedAddition.grids = SCALES, GRIDS
DelayedAddition.figures, DelayedAddition.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(DelayedAddition))
