"""Sorting (Figs. 8, 12): read L integers, then, at L commands, answer them in order.

    python sort.py --model lstm --pe sin --vocab 16384 --seed 0
    python sort.py --scale desk --all fig8

    in   3 1 4 1 _ _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . . 1 1 3 4        . is not answered and has no loss

It is as reverse.py but for the answers.
"""

from common import Episode, uniform_integers
from suite import cli
from suite.task import (
    BOTH,
    BOTH_METRICS,
    SMOKE,
    WITH_CONSTANT,
    WITH_CONTROLS,
    WITH_DUP,
    Task,
    cross,
)
from suite.verdicts import gain, gain_by_vocabulary, no_gain_of_dup

FIG8 = {
    "paper": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256])
    + cross(model="lstm", pe=BOTH, vocab=[2**n for n in range(8, 15)]),
    "desk": cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024]),
}
# The rate was found on seed 100, before any of these trials: RESULTS.md, Protocol
LONG = cross(model="gru", length=32, vocab=64, lr=1e-2, pe=WITH_CONTROLS, seed=range(5, 11))
FIG8_LONG = {"desk": LONG}
FIG12 = {"paper": cross(model="lstm", pe=WITH_DUP, vocab=16384)}


class Sort(Task):
    name = "sort"
    scales = {
        "desk": dict(
            length=16, vocab=1024, hidden=128, embed=128, batch=64, lr=1e-2, iterations=20_000
        ),
        "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
    }

    def draw(self, k, shape):
        return uniform_integers(k, (*shape, self.length), self.vocab)

    def episode(self, rows):
        inputs, targets = self.with_commands(rows), rows.sort(dim=1).values
        steps = slice(self.length, 2 * self.length)
        return Episode(inputs, targets, steps, commands=self.length)


@Sort.figure("fig8", "Sorting", FIG8, metrics=BOTH_METRICS)
def fig8(runs):
    return gain_by_vocabulary(runs.where(model="lstm"), "an LSTM sort")


@Sort.figure(
    "fig8-long", "Sorting, L = 32, the embedding twice", FIG8_LONG, metrics=BOTH_METRICS, x="pe"
)
def fig8_long(runs):
    yield gain(runs, "The clock helps a GRU sort at K = 64.")
    yield no_gain_of_dup(runs, "a GRU sort")


@Sort.figure("fig12", "Sorting, the embedding twice", FIG12, metrics=BOTH_METRICS, x="pe")
def fig12(runs):
    yield no_gain_of_dup(runs, "an LSTM sort")


if __name__ == "__main__":
    raise SystemExit(cli.main(Sort))
