"""Reverse ordering (Figs. 2, 12, 13): read L integers, then, at L commands, output them in
reverse order.

    python reverse.py --model lstm --pe sin --vocab 16384 --seed 0  # a cell of Fig. 2, one seed
    python reverse.py --list fig2                                   # the commands of its trials
    python reverse.py --scale quick --all fig2                      # 3 minutes on two cores

    in   3 1 4 _ _ _        _ is the command; time runs 1 .. 2L without a break
    out  . . . 4 1 3        . is not scored

The paper's claim: with sinusoidal positional encoding (PE, --pe sin), a GRU, an LSTM and S4D
"can handle a larger vocabulary". Model, loss and step: common.py; how a batch is drawn:
suite/task.py; the training loop: suite/training.py.
"""

from suite import cli  # isort: skip # before PyTorch

import common
from common import Batch, distinct_rows, uniform_integers
from suite.figures import (
    BOTH,
    K95,
    OVER_K,
    WITH_CONSTANT,
    WITH_CONTROLS,
    WITH_DUP,
    WITH_EDITS,
    Claim,
    Contrast,
    Figure,
    cross,
)
from suite.task import SMOKE, Task

FRESH = range(5, 11)  # seeds that had not been used when desk's grid was fixed


class Reverse(Task):
    name = "reverse"
    scales = {
        "desk": dict(
            length=16, vocab=64, hidden=128, embed=128, batch=64, lr=3e-3, iterations=30_000
        ),
        "quick": dict(
            length=16, vocab=16, hidden=64, embed=64, batch=64, lr=1e-2, iterations=1200
        ),
        "smoke": SMOKE | dict(length=8, vocab=8, held_out=32),
    }

    def draw(self, k, shape):
        """(*shape, L) integers below K, from the key k alone."""
        return uniform_integers(k, (*shape, self.length), self.vocab)

    def make_batch(self, rows):
        """(B, L) integers -> inputs (B, 2L), targets (B, L), and the steps with a target."""
        answers = slice(self.length, 2 * self.length)
        return Batch(self.with_commands(rows), rows.flip(1), answers, commands=self.length)

    def test_rows(self, device):
        """(N, L) held-out integers; they depend on L, as in variable_length.py."""
        stream = self.seed, common.HELD_OUT, self.length
        return distinct_rows(self.draw, self.args.held_out, *stream, device=device)


# -- Fig. 2: a larger vocabulary. vocab is K and length is L; other flags are the scale's
def cross_models(gru_vocab, vocab, s4d_iterations=10_000, **flags):
    """Desk's grid: the GRU's K in `gru_vocab`, the other models' in `vocab`."""
    flags |= dict(pe=WITH_CONSTANT)
    rows = cross(model="gru", vocab=gru_vocab, **flags)
    rows += cross(model="lstm", vocab=vocab, **flags)
    s4d = dict(model="s4d", iterations=s4d_iterations, lr=1e-2)
    return rows + cross(vocab=vocab, **flags | s4d)


AT_DESK = dict(gru_vocab=[4, 8, 16, 32], vocab=[16, 32, 64, 256], length=32)
FIG2 = {
    "paper": cross(model="gru", pe=BOTH, vocab=[32, 64, 128, 256])
    + cross(model=["lstm", "s4d"], pe=BOTH, vocab=[2**n for n in range(8, 15)]),
    "desk": cross_models(**AT_DESK, seed=FRESH),
    "quick": cross(model="gru", vocab=[8, 16], seed=range(4), pe=BOTH),
    "smoke": cross(model=["gru", "lstm", "s4d"], pe=BOTH, vocab=[8, 16], seed=range(1)),
}
LARGEST = {"gru": 32, "lstm": 256, "s4d": 256}  # K
TITLE = "A larger vocabulary (reversal, L = 32)"
Reverse.figures["fig2"] = Figure(
    "Reverse ordering",
    FIG2,
    WITH_EDITS,
    summaries=OVER_K,
    claims=(
        *(Claim(TITLE, "token accuracy", dict(model=m, vocab=K)) for m, K in LARGEST.items()),
        *(Claim(TITLE, K95, dict(model=model)) for model in LARGEST),
    ),
)

# -- Figs. 12 and 13: other vectors in place of the sinusoid
LARGE, DESK_LSTM = dict(model="lstm", vocab=16384), dict(model="lstm", vocab=1024)
OF_FIG13 = ["none", "sin", "random", "learned"]
DUP = Contrast("dup - no PE", dict(pe="dup"), dict(pe="none"))
FIG12 = {"paper": cross(pe=WITH_DUP, **LARGE), "desk": cross(**DESK_LSTM, pe=WITH_CONTROLS)}
FIG13 = {
    "paper": cross(pe=OF_FIG13, **LARGE),
    "desk": cross(**DESK_LSTM, pe=["constant", *OF_FIG13], amplitude=None)
    + cross(**DESK_LSTM, pe="learned", amplitude=1.0),
}


def compare_vectors(control):
    """Random and learned vectors against no PE, a control and the sinusoid."""
    for pe in ("random", "learned"):
        usual = dict(pe=pe, amplitude=None)
        for other in ("none", control):
            yield Contrast(f"{pe} - {other}", usual, dict(pe=other))
        yield Contrast(f"sin - {pe}", dict(pe="sin"), usual)
    unit = dict(pe="learned", amplitude=1.0)
    yield Contrast("sin - learned, initial norm 1", dict(pe="sin"), unit)


Reverse.figures["fig12"] = Figure(
    "The embedding twice", FIG12, WITH_EDITS, contrasts=(DUP,), x="pe", picture=False
)
OTHERS = dict(contrasts=(*compare_vectors("constant"),), x=("pe", "amplitude"))
Reverse.figures["fig13"] = Figure("Other encodings", FIG13, WITH_EDITS, **OTHERS)


# -- Section 4.1: is it only a matter of more training?
def train_more(pe="none", iterations=300_000, batch=512, **cell):
    """As usual and with twice the iterations; without PE also with twice the batch."""
    rows = cross(**cell, pe=pe, iterations=[iterations, 2 * iterations], batch=batch)
    return rows + cross(**cell, pe="none", iterations=iterations, batch=2 * batch)


def compare_training(iterations, batch):
    none = dict(pe="none", iterations=iterations, batch=batch)
    longer, larger = none | dict(iterations=2 * iterations), none | dict(batch=2 * batch)
    yield Contrast("no PE: 2x - 1x iterations", longer, none)
    yield Contrast("no PE: 2x - 1x batch size", larger, none)
    yield Contrast("PE - no PE with 2x iterations", none | dict(pe="sin"), longer)
    yield Contrast("PE - no PE with 2x batch size", none | dict(pe="sin"), larger)


MORE = {
    "paper": train_more(model="gru", vocab=256)
    + train_more(**LARGE)
    + train_more(model="s4d", vocab=16384),
    "desk": train_more(WITH_CONSTANT, iterations=30_000, batch=64, **DESK_LSTM),
}
Reverse.figures["section4.1"] = Figure(
    "More iterations, larger batches",
    MORE,
    contrasts=(*compare_training(300_000, 512), *compare_training(30_000, 64)),
    x=("pe", "iterations", "batch"),
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Reverse))
