"""Reverse ordering + delayed addition (Fig. 7): read x1..xL, then add xL..x1 to y1..yL, mod K.

    python delayed_add.py --model lstm --pe sin --vocab 1024 --seed 0
    python delayed_add.py --scale desk --all fig7

    in   3 1 4 2 9 8        x = 3 1 4, then y = 2 9 8, without commands; time runs 1 .. 2L
    out  . . . 6 0 1        4+2, 1+9, 3+8 with K = 10; . is not scored

At the paper's size it trains for twice the iterations of the other tasks (Appendix A.1), at
smaller scales not. The paper found it too hard for GRUs.
"""

from suite import cli  # isort: skip # before PyTorch

from common import Batch, uniform_integers
from suite.figures import BOTH, WITH_CONSTANT, WITH_CONTROLS, Contrast, Figure, cross
from suite.task import SMOKE, Task


class DelayedAddition(Task):
    name = "delayed_add"
    scales = {
        "paper": dict(vocab=1024, length=16, iterations=600_000),
        "desk": dict(
            length=8, vocab=128, hidden=128, embed=128, batch=64, lr=1e-3, iterations=20_000
        ),
        "smoke": SMOKE | dict(length=4, vocab=8, held_out=32),
    }

    def draw(self, k, shape):
        """(*shape, 2L): x and y, which are held out together."""
        return uniform_integers(k, (*shape, 2 * self.length), self.vocab)

    def make_batch(self, rows):
        x, y = rows.split(self.length, dim=1)
        return Batch(rows, (x.flip(1) + y) % self.vocab, slice(self.length, 2 * self.length))


SMALL = dict(model="lstm", vocab=32, hidden=64, embed=64, lr=1e-2, iterations=3000)
FIG7 = {
    "paper": cross(model="lstm", pe=BOTH, vocab=[896, 960, 1024, 1088]),
    "desk": cross(model="lstm", pe=WITH_CONSTANT, vocab=[32, 64, 128]),
}
DelayedAddition.figures["fig7"] = Figure("Reverse ordering + delayed addition", FIG7)
DelayedAddition.figures["fig7-small"] = Figure(
    "Delayed addition, 64 units, 3,000 iterations", {"desk": cross(**SMALL, pe=WITH_CONTROLS)}
)
DelayedAddition.figures["fig7-gru"] = Figure(
    "Delayed addition by a GRU", {"paper": cross(model="gru", pe=BOTH, vocab=896)}, x="pe"
)

# -- Which property of PE helps: encodings that lack one, and parts of the sinusoid
ENCODINGS = ["none", "dup", "sin", "random", "ramp", "counter", "shuffled"]
MISSING = {"random": "order", "ramp": "a period", "shuffled": "continuity"}
PHASES = {
    "PE while reading": dict(encode="input"),
    "PE while answering": dict(encode="output"),
}
THIRDS = {
    "fast third of the frequencies": dict(bands="0:0.3334"),
    "middle third": dict(bands="0.3334:0.6667"),
    "slow third": dict(bands="0.6667:1"),
}


def which_encoding(title, cell, parts=PHASES):
    """`cell`: flags of all trials; `parts` of the sinusoid are tried alone."""
    rows = cross(**cell, pe=ENCODINGS)
    contrasts = []
    whole = dict(encode=None, bands=None)
    sin, none, dup = (dict(pe=pe, **whole) for pe in ("sin", "none", "dup"))
    for pe, missing in MISSING.items():
        contrasts.append(Contrast(f"sin - {pe} (lacks {missing})", sin, dict(pe=pe)))
    contrasts.append(Contrast("random - no PE", dict(pe="random"), none))
    contrasts.append(Contrast("random - dup", dict(pe="random"), dup))
    for part, flags in parts.items():
        rows += cross(**cell, pe="sin", **flags)
        alone = whole | dict(pe="sin", **flags)
        contrasts.append(Contrast(f"{part} - no PE", alone, none))
        contrasts.append(Contrast(f"{part} - dup", alone, dup))
    return Figure(
        f"{title}: which property of PE helps",
        {"desk": rows},
        contrasts=(*contrasts,),
        x=("pe", "encode", "bands"),
    )


DelayedAddition.figures["clocks"] = which_encoding("Delayed addition", SMALL, PHASES | THIRDS)

if __name__ == "__main__":
    raise SystemExit(cli.main(DelayedAddition))
