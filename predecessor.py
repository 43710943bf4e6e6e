"""Predecessor query (Fig. 10): read L different integers, then one again: which came before it?

    python predecessor.py --model lstm --pe sin --vocab 1024 --seed 0
    python predecessor.py --scale desk --all fig10

    in   3 1 4 2 4        the query, 4, is never the first integer; time runs 1 .. L+1
    out  . . . . 1        one answer per sequence; . is not scored

The vocabularies of Fig. 10 are in the released code only.
"""

from suite import cli  # isort: skip # before PyTorch

import math

import torch

import common
from common import Batch, UsageError, random_bits, scale_bits, uniform_integers
from suite.figures import BOTH, WITH_CONSTANT, Figure, cross
from suite.task import SMOKE, Task


class Predecessor(Task):
    name = "predecessor"
    scales = {
        "paper": dict(vocab=1024, length=16),
        "desk": dict(length=4, hidden=128, embed=128, batch=64, lr=3e-3, iterations=20_000),
        "smoke": SMOKE | dict(length=4, vocab=8, held_out=32),
    }

    def check(self):
        if not 2 <= self.length <= self.vocab:
            most = f"--vocab {self.vocab}, as the integers are different"
            raise UsageError(f"--length has to be from 2 to {most}")
        super().check()

    def positions(self):
        return self.length + 1

    def probability(self, rows):
        """Of all sequences with their query."""
        return len(rows) / (math.perm(self.vocab, self.length) * (self.length - 1))

    def draw(self, k, shape):
        """(*shape, L+1): the integers and the query, which are held out together.

        The first is one of K, the next the r-th smallest of the K-1 others, and so on.
        Decoded backwards: what comes after an integer was counted without it, so what
        is not below it moves up by one.
        """
        choices = self.vocab - torch.arange(self.length, device=k.device)
        x = scale_bits(random_bits(k, (*shape, self.length)), choices)
        for t in reversed(range(self.length - 1)):
            x[..., t + 1 :] += x[..., t + 1 :] >= x[..., t : t + 1]
        asked = 1 + uniform_integers(common.splitmix64_mix(k), (*shape, 1), self.length - 1)
        return torch.cat([x, x.gather(-1, asked)], dim=-1)

    def make_batch(self, rows):
        x, query = rows.split([self.length, 1], dim=1)
        asked = (x == query).byte().argmax(1, keepdim=True)  # (B, 1)
        return Batch(rows, x.gather(1, asked - 1), slice(self.length, self.length + 1))

    def summarise(self, metrics, right):
        return {
            "accuracy": metrics["token_accuracy"],
            "cross_entropy": metrics["cross_entropy"],
        }


FIG10 = {
    "paper": cross(model="lstm", pe=BOTH, vocab=[512, 640, 768, 896, 1024]),
    "desk": cross(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024]),
}
Predecessor.figures["fig10"] = Figure(
    "Predecessor query", FIG10, metrics={"accuracy": "accuracy"}
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Predecessor))
