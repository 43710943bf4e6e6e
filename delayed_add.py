"""Reverse ordering + delayed addition (Fig. 7): read x1..xL, then add xL..x1 to y1..yL, modulo K.

    python delayed_add.py --model lstm --pe sin --vocab 1024 --seed 0     # one cell of Fig. 7, one seed
    python delayed_add.py --list fig7                                     # the commands of all its trials
    python delayed_add.py --scale quick --all fig7                        # a reduced Fig. 7 on a CPU
    python delayed_add.py --report                                        # tables, figures and claims so far

    in   3 1 4 2 9 8        x = 3 1 4, then y = 2 9 8, without a command; time runs 1 .. 2L
    out  . . . 6 0 1        4+2, 1+9, 3+8 with K = 10; . is not answered and has no loss

At quick scale (32 s a trial on two cores of an AMD EPYC) token accuracy ends at 0.57 without, 0.84 with the
encoding.
Twice the iterations of the other tasks, as in the paper (Appendix A.1), which found it too hard for GRUs.
Accuracy stays low for long before it climbs: at quick scale for the first third of the iterations. There a
trial takes about a minute on one CPU core.
"""

import common
import report
import trial
from common import Data, Episode, HeldOut, Refused, distinct_rows, uniform_integers
from report import ACCURACY, Figure, accuracy
from trial import SEEDS, SMOKE, cross


class DelayedAddition(Data):
    """The data of one trial: training episodes by iteration, and the held-out test."""

    def __init__(self, args, device):
        self.vocab, self.length, self.batch = args.vocab, args.length, args.batch
        rows = distinct_rows(self.draw, args.held_out, args.seed, common.HELD_OUT, device=device)
        self.held_out = HeldOut(self.draw, rows, args.held_out / self.vocab ** (2 * self.length), args.seed)

    def draw(self, k, shape):
        """(*shape, 2L): x and y, which are held out together."""
        return uniform_integers(k, (*shape, 2 * self.length), self.vocab)

    def episode(self, rows):
        x, y = rows.split(self.length, dim=1)
        return Episode(rows, (x.flip(1) + y) % self.vocab, slice(self.length, 2 * self.length))


def check(args):
    if args.held_out > (exist := args.vocab ** (2 * args.length)):
        what = f"the {exist} sequences x, y that exist (vocab^(2 length))"
        raise Refused(f"--held-out {args.held_out} is more than {what}")


# ------------------------------------------------------------------------------------------------------------
# The trials of the figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

BOTH = ["none", "sin"]
SCALES = {
    "paper": dict(vocab=1024, length=16, iterations=600_000),
    "quick": dict(
        length=8, vocab=32, hidden=128, embed=64, batch=64, lr=3e-3, iterations=3000, save_every=500
    ),
    "smoke": SMOKE | dict(length=4, vocab=8, held_out=32),
}
GRIDS = {
    "paper": {"fig7": cross(model="lstm", pe=BOTH, vocab=[896, 960, 1024, 1088], seed=SEEDS)},
    "quick": {"fig7": cross(model="lstm", pe=BOTH, vocab=32, seed=SEEDS)},
    "smoke": {"fig7": cross(model="lstm", pe=BOTH, vocab=[8, 16], seed=range(1))},
}
FIGURES = {"fig7": Figure("Reverse ordering + delayed addition", ACCURACY, "vocab")}
CLAIMS = report.helps_at_each_vocab("fig7", accuracy, GRIDS)

TASK = trial.Task(
    name="delayed_add",
    build=DelayedAddition,
    scales=SCALES,
    grids=GRIDS,
    figures=FIGURES,
    claims=CLAIMS,
    positions=lambda args: 2 * args.length,
    derive=lambda args: {"held_out": 1024},
    check=check,
)

if __name__ == "__main__":
    raise SystemExit(trial.main(TASK, report.show))
