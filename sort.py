"""Sorting (Figs. 8, 12): read L integers, then output them in ascending order.

    python sort.py --model lstm --pe sin --vocab 16384 --seed 0
    python sort.py --scale desk --all fig8

    in   3 1 4 1 _ _ _ _        _ is the command token; time steps 1 .. 2L
    out  . . . . 1 1 3 4        . is not scored

Given the same flags, sort.py draws the same candidate training sequences as reverse.py.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

from reverse import DUP_MINUS_NONE, PREREGISTERED_SEEDS
from suite.figures import (
    ACCURACY_AND_EDITS,
    NONE_AND_PE,
    WITH_CONSTANT,
    WITH_CONTROLS,
    WITH_DUP,
    Claim,
    Figure,
    grid,
)
from suite.task import DESK, SMOKE, Task


class Sort(Task):
    name = "sort"
    scales = {
        "desk": DESK | dict(length=16, vocab=1024, lr=1e-2),
        "smoke": SMOKE | dict(length=8),
    }

    def make_batch(self, sequences):
        return self.batch_with_commands(sequences, sequences.sort().values)


FIG8_CLAIM = Claim("Post hoc: PE helps sorting")
Sort.figures["fig8"] = Figure(
    "Sorting",
    {
        "paper": grid(model="gru", pe=NONE_AND_PE, vocab=[32, 64, 128, 256])
        + grid(model="lstm", pe=NONE_AND_PE, vocab=[2**n for n in range(8, 15)]),
        "desk": grid(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024]),
    },
    ACCURACY_AND_EDITS,
    claims=[FIG8_CLAIM],
)
# The learning rate was tuned on seed 100, before any of these trials (PROTOCOLS.md)
FIG8_L32 = dict(model="gru", length=32, vocab=64, lr=1e-2, pe=WITH_CONTROLS)
Sort.figures["fig8-l32"] = Figure(
    "Sorting, L = 32",
    {"desk": grid(**FIG8_L32, seed=PREREGISTERED_SEEDS)},
    ACCURACY_AND_EDITS,
    claims=[FIG8_CLAIM],
    contrasts=[DUP_MINUS_NONE],
    x="pe",
)
Sort.figures["fig12"] = Figure(
    "Sorting, duplicated embedding",
    {"paper": grid(model="lstm", pe=WITH_DUP, vocab=16384)},
    ACCURACY_AND_EDITS,
    contrasts=[DUP_MINUS_NONE],
    x="pe",
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Sort))
