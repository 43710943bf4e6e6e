"""Reversal + delayed addition (Fig. 7): read x1..xL, then add xL..x1 to y1..yL, mod K.

    python delayed_add.py --model lstm --pe sin --vocab 1024 --seed 0
    python delayed_add.py --scale desk --all fig7

    in   3 1 4 2 9 8        x = 3 1 4, then y = 2 9 8, no commands; time steps 1 .. 2L
    out  . . . 6 0 1        4+2, 1+9, 3+8 modulo K = 10; . is not scored

The paper uses 2x the iterations of the other tasks (Appendix A.1) and finds the task too hard
for GRUs. Smaller scales use no extra iterations.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

from common import Batch, uniform_integers
from suite.figures import (
    NONE_AND_PE,
    WITH_CONSTANT,
    WITH_CONTROLS,
    Claim,
    Contrast,
    Figure,
    encoding_contrast,
    grid,
)
from suite.task import DESK, SMOKE, Task


class DelayedAddition(Task):
    name = "delayed_add"
    scales = {
        "paper": dict(vocab=1024, length=16, iterations=600_000),
        "desk": DESK | dict(length=8, vocab=128, lr=1e-3),
        "smoke": SMOKE | dict(length=4),
    }

    def draw(self, rng_key, shape):
        """Draw x and y, (*shape, 2L), so that both are held out together."""
        return uniform_integers(rng_key, (*shape, 2 * self.length), self.vocab)

    def make_batch(self, sequences):
        x, y = sequences.split(self.length, dim=1)
        return Batch(sequences, (x.flip(1) + y) % self.vocab, slice(self.length, None))


FIG7_CLAIM = Claim("Post hoc: PE helps delayed addition")
SMALL_LSTM = dict(model="lstm", vocab=32, hidden=64, embed=64, lr=1e-2, iterations=3000)
DelayedAddition.figures["fig7"] = Figure(
    "Reversal + delayed addition",
    {
        "paper": grid(model="lstm", pe=NONE_AND_PE, vocab=[896, 960, 1024, 1088]),
        "desk": grid(model="lstm", pe=WITH_CONSTANT, vocab=[32, 64, 128]),
    },
    claims=[FIG7_CLAIM],
)
DelayedAddition.figures["fig7-64-units"] = Figure(
    "Delayed addition, 64 units, 3,000 iterations",
    {"desk": grid(**SMALL_LSTM, pe=WITH_CONTROLS)},
    claims=[FIG7_CLAIM],
)
DelayedAddition.figures["fig7-gru"] = Figure(
    "Delayed addition, GRU", {"paper": grid(model="gru", pe=NONE_AND_PE, vocab=896)}, x="pe"
)

# -- Which property of PE helps: encodings that lack one, and parts of the sinusoid
DIFFERENCE_FROM_PE = {
    "random": "unrelated vectors",
    "ramp": "not periodic",
    "shuffled": "not continuous",
}
SEQUENCE_HALVES = {
    "PE in the first half": dict(pe="sin", encode="input"),
    "PE in the second half": dict(pe="sin", encode="output"),
}
FREQUENCY_THIRDS = {
    "high-frequency third of PE": dict(pe="sin", bands="0:0.3334"),
    "middle third of PE": dict(pe="sin", bands="0.3334:0.6667"),
    "low-frequency third of PE": dict(pe="sin", bands="0.6667:1"),
}


def ablation_figure(title, setting, variants=SEQUENCE_HALVES):
    """Return a figure: PE against other encodings, its `variants` against no PE and dup."""
    trials = grid(**setting, pe=["none", "dup", "sin", "random", "ramp", "counter", "shuffled"])
    contrasts = [
        Contrast(f"PE - {pe} ({difference})", dict(pe="sin"), dict(pe=pe))
        for pe, difference in DIFFERENCE_FROM_PE.items()
    ]
    contrasts += [encoding_contrast("random", pe) for pe in ("none", "dup")]
    for variant, flags in variants.items():
        trials += grid(**setting, **flags)
        contrasts.append(Contrast(f"{variant} - no PE", flags, dict(pe="none")))
        contrasts.append(Contrast(f"{variant} - dup", flags, dict(pe="dup")))
    return Figure(
        f"{title}: which property of PE helps",
        {"desk": trials},
        contrasts=contrasts,
        x=("pe", "encode", "bands"),
    )


DelayedAddition.figures["pe-ablation"] = ablation_figure(
    "Delayed addition", SMALL_LSTM, SEQUENCE_HALVES | FREQUENCY_THIRDS
)

if __name__ == "__main__":
    raise SystemExit(cli.main(DelayedAddition))
