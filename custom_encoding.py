"""Example: compare an encoding of your own with no PE and with sinusoidal PE in reversal.

    python custom_encoding.py --scale quick --all square  # small GRUs: 4 minutes
    python custom_encoding.py --scale desk --all square   # K = L = 32: 3 core-hours

The encoding of this example consists of square waves. Copy this file and change `Square`.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import torch

from common import ENCODINGS, Encoding
from reverse import Reverse
from suite.figures import Figure, encoding_contrast, grid


class Square(Encoding):
    """Square waves with half periods of 1, 2, 3, ... time steps."""

    def make_table(self, n_steps, size):
        t = torch.arange(n_steps)[:, None]
        half_period = 1 + torch.arange(size) % (n_steps // 2)
        return (1 - 2 * (t // half_period % 2)) / size**0.5  # (n_steps, size), norm 1


ENCODINGS["square"] = Square


class CustomEncoding(Reverse):
    name = "reverse"  # the folder of reverse.py, whose finished trials are reused


ARMS = dict(model="gru", pe=["none", "square", "sin"])
CustomEncoding.figures["square"] = Figure(
    "Square waves",
    {
        "quick": grid(**ARMS, vocab=[8, 16], seed=range(4)),
        "desk": grid(**ARMS, vocab=32, length=32, seed=range(5, 9)),
    },
    contrasts=[encoding_contrast("square", pe) for pe in ("none", "sin")],
)

if __name__ == "__main__":
    raise SystemExit(cli.main(CustomEncoding))
