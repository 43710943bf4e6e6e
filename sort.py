"""Sorting (Figs. 8, 12): read L integers, then, at L commands, answer them in ascending order.

    python sort.py --model lstm --pe sin --vocab 16384 --seed 0     # one cell of Fig. 8, one seed
    python sort.py --list fig8                                      # the commands of all its trials
    python sort.py --scale quick --all fig8                         # a reduced Fig. 8 on a CPU
    python sort.py --report                                         # tables, figures and claims so far

    in   3 1 4 1 _ _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . . 1 1 3 4        . is not answered and has no loss

The order of the input does not matter here, so the encoding has less to offer than in reverse ordering.
--encode gives it while the integers are read (input) or answered (output) alone, to see where it helps.
At quick scale a trial takes half a minute on one CPU core.
"""

from suite import cli
from suite.claims import BOTH_METRICS, Figure, dup_does_not_help, helps, helps_at_largest, helps_below_largest
from suite.flags import BOTH, SEEDS, SMOKE, WITH_CONSTANT, WITH_CONTROLS, WITH_DUP, cross
from suite.task import Task

import math

import numpy as np

from common import Episode


class Sort(Task):
    name = "sort"

    def episode(self, rows):
        answers = slice(self.length, 2 * self.length)
        return Episode(self.with_commands(rows), rows.sort(dim=1).values, answers, commands=self.length)


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

SCALES = {
    "paper": {},
    "desk": dict(length=16, vocab=1024, hidden=128, embed=128, batch=64, lr=1e-2, iterations=20_000),
    "quick": dict(length=32, vocab=128, hidden=64, embed=64, batch=64, lr=1e-2, iterations=2000),
    "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
}
GRIDS = {
    "paper": {
        "fig8": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256], seed=SEEDS)
        + cross(model="lstm", pe=BOTH, vocab=[256, 512, 1024, 2048, 4096, 8192, 16384], seed=SEEDS),
        "fig12": cross(model="lstm", pe=WITH_DUP, vocab=16384, seed=SEEDS),
    },
    "desk": {"fig8": cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024], seed=SEEDS)},
    "quick": {
        "fig8": cross(model="gru", pe=WITH_CONTROLS, vocab=32, lr=2e-2, seed=SEEDS)
        + cross(model="lstm", pe=WITH_CONTROLS, vocab=128, lr=1e-2, seed=SEEDS),
        "fig12": cross(model="lstm", pe=WITH_DUP, vocab=128, seed=SEEDS),
    },
    "smoke": {
        "fig8": cross(model=["gru", "lstm"], pe=BOTH, vocab=[8, 16], seed=range(1)),
        "fig12": cross(model="lstm", pe=WITH_DUP, vocab=8, seed=range(1)),
    },
}


def chance(vocab, length):
    """Of a model without memory: at each place of the answer, the integer that stands there most often.

    P(the j-th smallest is at most k) = P(at least j of the integers are at most k).
    """
    log_factorials = np.array([math.lgamma(n + 1) for n in range(length + 1)])
    log_ways = log_factorials[-1] - log_factorials - log_factorials[::-1]
    below, n = np.arange(1, vocab)[:, None] / vocab, np.arange(length + 1)
    exactly = np.exp(log_ways + n * np.log(below) + (length - n) * np.log(1 - below))
    exactly = np.concatenate([exactly, n[None] == length])  # (K, L + 1): n of the integers are at most k
    at_least = exactly[:, ::-1].cumsum(1)[:, ::-1][:, 1:]  # (K, L): j of them or more
    return float(np.diff(at_least, axis=0, prepend=0).max(0).mean())


def marginal(scale):
    return [
        f"  The paper calls it marginal beside that in reversal: reverse.py --report fig2 --scale {scale}"
    ]


FIGURES = {
    "fig8": Figure("Sorting", BOTH_METRICS, "vocab", chance=chance, note=marginal),
    "fig12": Figure("Sorting, the embedding twice", BOTH_METRICS, "pe"),
}

CLAIMS = [*dup_does_not_help("fig12"), *helps("fig12"), *helps_at_largest("fig8")]
CLAIMS += helps_below_largest(GRIDS, "fig8")
Sort.scales, Sort.grids = SCALES, GRIDS
Sort.figures, Sort.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(Sort))
