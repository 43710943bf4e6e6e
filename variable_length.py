"""Reverse ordering of inputs of varying length (Figs. 11, 14).

    python variable_length.py --model lstm --pe sin --vocab 16384 --seed 0
    python variable_length.py --scale desk --all fig11

    in   3 1 4 _ _ _ _ _        _ is the command token; time steps 1 .. 2L, here with L = 4
    out  . . . 4 1 3 . .        . is not scored

The length of each row is random (Appendix B). Shorter rows are padded with commands.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import torch
import torch.nn.functional as F

from common import TEST_STREAM, UsageError, distinct_rows, splitmix64_mix, uniform_integers
from reverse import FIG13_ENCODINGS, PAPER_LSTM, Reverse, compare_random_and_learned
from suite.figures import ACCURACY_AND_EDITS, NONE_AND_PE, WITH_DUP, Figure, cross, name_model
from suite.task import Flag


class VariableLength(Reverse):
    name = "variable_length"
    scales = {
        "desk": Reverse.scales["desk"] | dict(min_length=8),
        "smoke": Reverse.scales["smoke"] | dict(min_length=4),
    }
    extra_flags = [
        Flag(
            "min_length",
            32,
            "length of the shortest input (longest: --length); --held-out is per length",
            at_least=1,
        )
    ]
    unused_flags = ["encode"]  # the first target step differs between rows

    def check(self):
        if self.args.min_length > self.length:
            raise UsageError(f"--min-length exceeds --length {self.length}")
        super().check()

    def input_lengths(self):
        """Return all input lengths, which are equally likely."""
        return range(self.args.min_length, self.length + 1)

    def draw(self, rng_key, shape):
        """Draw rows of random length, padded with commands to (*shape, L)."""
        rows = super().draw(rng_key, shape)
        length_key = splitmix64_mix(rng_key)  # of a second, independent stream
        extra = uniform_integers(length_key, (*shape, 1), len(self.input_lengths()))
        lengths = self.args.min_length + extra
        padding = torch.arange(self.length, device=rows.device) >= lengths
        return rows.masked_fill(padding, self.vocab)

    def make_batch(self, rows):
        """Make a batch as in reverse.py, with targets right after each row's last integer."""
        lengths = (rows < self.vocab).sum(1, keepdim=True)  # (B, 1)
        j = torch.arange(self.length, device=rows.device)  # index of a target
        targets = rows.gather(1, (lengths - 1 - j).clamp(min=0))
        steps = (lengths + j).clamp(max=2 * self.length - 1)
        return self.batch_with_commands(rows, targets, steps, mask=j < lengths)

    def test_rows(self, device):
        """Draw --held-out rows of each length in turn, (N, L)."""
        return torch.cat([self.test_rows_of_length(n, device) for n in self.input_lengths()])

    def test_rows_of_length(self, length, device):
        """Draw the --held-out rows of one length, (N, L), independently of other lengths."""

        def draw(rng_key, shape):
            return uniform_integers(rng_key, (*shape, length), self.vocab)

        count = self.args.held_out
        rows = distinct_rows(draw, count, self.seed, TEST_STREAM, length, device=device)
        return F.pad(rows, (0, self.length - length), value=self.vocab)

    def held_out_probability(self, rows):
        """Return the probability of drawing a held-out row, averaged over lengths."""
        total = sum(self.vocab**-n for n in self.input_lengths())
        return self.args.held_out * total / len(self.input_lengths())

    def task_metrics(self, metrics, correct):
        """Add token accuracy by length to the metrics."""
        correct = correct.reshape(len(self.input_lengths()), -1, self.length)
        by_length = {n: float(r[:, :n].mean()) for n, r in zip(self.input_lengths(), correct)}
        return metrics | {"by_length": by_length}


# -- Figs. 11 and 14; at desk scale, lengths are 16 to 32 and the model is smaller
SMALL_REVERSAL = dict(length=32, hidden=64, embed=64, lr=2e-2, vocab=16)
SMALL_REVERSAL_LSTM = dict(model="lstm", iterations=3000, **SMALL_REVERSAL)


def length_curves(result):
    """Yield token accuracy over input length, as one curve."""
    points = {int(n): accuracy for n, accuracy in result.metrics["by_length"].items()}
    yield name_model(result.flags["model"]), result.flags["pe"], points


VariableLength.figures["fig11"] = Figure(
    "Variable length",
    {
        "paper": cross(pe=NONE_AND_PE, **PAPER_LSTM, min_length=32),
        "desk": cross(**SMALL_REVERSAL_LSTM, pe=WITH_DUP, min_length=16),
    },
    ACCURACY_AND_EDITS,
    x="input length",
    curves=length_curves,
)
VariableLength.figures["fig14"] = Figure(
    "Random and learned encodings, variable length",
    {
        "paper": cross(pe=FIG13_ENCODINGS, **PAPER_LSTM, min_length=32),
        "desk": cross(**SMALL_REVERSAL_LSTM, pe=["dup", *FIG13_ENCODINGS], min_length=16),
    },
    contrasts=compare_random_and_learned("dup"),
    x="pe",
)

if __name__ == "__main__":
    raise SystemExit(cli.main(VariableLength))
