"""Predecessor query (Fig. 10): read L distinct integers, then a query; output its predecessor.

    python predecessor.py --model lstm --pe sin --vocab 1024 --seed 0
    python predecessor.py --scale desk --all fig10

    in   3 1 4 2 4        the query, 4, is never the first integer; time steps 1 .. L+1
    out  . . . . 1        one target per sequence; . is not scored

Vocabulary sizes are those of the released code; the paper does not state them.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import math

import torch

from common import Batch, UsageError, random_bits, scale_bits, splitmix64_mix, uniform_integers
from suite.figures import NONE_AND_PE, WITH_CONSTANT, Claim, Figure, grid
from suite.task import DESK, SMOKE, Task


class Predecessor(Task):
    name = "predecessor"
    scales = {
        "paper": dict(vocab=1024, length=16),
        "desk": DESK | dict(length=4, lr=3e-3),
        "smoke": SMOKE | dict(length=4),
    }

    def check(self):
        if not 2 <= self.length <= self.vocab:
            raise UsageError(f"--length must be from 2 to --vocab {self.vocab}")
        super().check()

    def n_steps(self):
        return self.length + 1

    def held_out_probability(self, sequences):
        """Return the probability that a random sequence is one of `sequences`."""
        return len(sequences) / (math.perm(self.vocab, self.length) * (self.length - 1))

    def draw(self, rng_key, shape):
        """Draw L distinct integers, then a query among them: (*shape, L+1).

        The query is drawn here so that it is held out with the integers. The integers are
        drawn as ranks (a Lehmer code): element t = 0, 1, ... is the rank of the t-th integer
        among the K - t integers that have not occurred. The loop turns ranks into integers,
        from the last element to the first: later values >= x[t] are incremented, to skip x[t].
        """
        n_choices = self.vocab - torch.arange(self.length, device=rng_key.device)
        x = scale_bits(random_bits(rng_key, (*shape, self.length)), n_choices)
        for t in reversed(range(self.length - 1)):
            x[..., t + 1 :] += x[..., t + 1 :] >= x[..., t : t + 1]
        query_key = splitmix64_mix(rng_key)
        query_position = 1 + uniform_integers(query_key, (*shape, 1), self.length - 1)
        return torch.cat([x, x.gather(-1, query_position)], dim=-1)

    def make_batch(self, sequences):
        x, query = sequences.split([self.length, 1], dim=1)
        query_position = (x == query).byte().argmax(1, keepdim=True)  # (B, 1)
        return Batch(sequences, x.gather(1, query_position - 1), slice(self.length, None))

    def task_metrics(self, metrics, correct):
        return {
            "accuracy": metrics["token_accuracy"],
            "cross_entropy": metrics["cross_entropy"],
        }


Predecessor.figures["fig10"] = Figure(
    "Predecessor query",
    {
        "paper": grid(model="lstm", pe=NONE_AND_PE, vocab=[512, 640, 768, 896, 1024]),
        "desk": grid(model="lstm", pe=WITH_CONSTANT, vocab=[64, 1024]),
    },
    {"accuracy": "accuracy"},
    claims=[Claim("Post hoc: PE helps predecessor queries", "accuracy")],
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Predecessor))
