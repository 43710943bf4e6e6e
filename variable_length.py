"""Reversal of inputs of varying length (Figs. 11, 14).

    python variable_length.py --model lstm --pe sin --vocab 16384 --seed 0
    python variable_length.py --scale desk --all fig11

    in   3 1 4 _ _ _ _ _        _ is the command token; time steps 1 .. 2L, here with L = 4
    out  . . . 4 1 3 . .        . is not scored

Sequence lengths are random (Appendix B); those below L are padded with commands.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import torch
import torch.nn.functional as F

from common import (
    HELD_OUT_STREAM,
    UsageError,
    distinct_sequences,
    splitmix64_mix,
    uniform_integers,
)
from reverse import FIG13_ENCODINGS, PAPER_LSTM, Reverse, random_and_learned_contrasts
from suite.figures import ACCURACY_AND_EDITS, NONE_AND_PE, WITH_DUP, Claim, Figure, grid
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
            "minimum input length (maximum: --length); --held-out counts sequences per length",
            at_least=1,
        )
    ]
    unused_flags = ["encode"]  # the first target step differs between sequences

    def check(self):
        if self.args.min_length > self.length:
            raise UsageError(
                f"--min-length {self.args.min_length} exceeds --length {self.length}"
            )
        super().check()

    def input_lengths(self):
        """Return all input lengths, which are equally likely."""
        return range(self.args.min_length, self.length + 1)

    def draw(self, rng_key, shape):
        """Draw sequences of random length, padded with commands to (*shape, L)."""
        sequences = super().draw(rng_key, shape)
        length_key = splitmix64_mix(rng_key)  # of a second, independent stream
        extra = uniform_integers(length_key, (*shape, 1), len(self.input_lengths()))
        lengths = self.args.min_length + extra
        padding = torch.arange(self.length, device=sequences.device) >= lengths
        return sequences.masked_fill(padding, self.vocab)

    def make_batch(self, sequences):
        """Make a batch as in reverse.py, with targets right after the last integers."""
        lengths = (sequences < self.vocab).sum(1, keepdim=True)  # (B, 1)
        j = torch.arange(self.length, device=sequences.device)  # index of a target
        targets = sequences.gather(1, (lengths - 1 - j).clamp(min=0))
        steps = (lengths + j).clamp(max=2 * self.length - 1)
        return self.batch_with_commands(sequences, targets, steps, mask=j < lengths)

    def held_out_sequences(self, device):
        """Draw --held-out sequences of each length in turn, (N, L)."""
        return torch.cat([self.held_out_of_length(n, device) for n in self.input_lengths()])

    def held_out_of_length(self, length, device):
        """Draw the --held-out sequences of one length, (N, L), from a stream of their own."""

        def draw(rng_key, shape):
            return uniform_integers(rng_key, (*shape, length), self.vocab)

        count = self.args.held_out
        sequences = distinct_sequences(
            draw, count, self.seed, HELD_OUT_STREAM, length, device=device
        )
        return F.pad(sequences, (0, self.length - length), value=self.vocab)

    def held_out_probability(self, sequences):
        """Return the probability that a random sequence is one of `sequences`."""
        total = sum(self.vocab**-n for n in self.input_lengths())
        return self.args.held_out * total / len(self.input_lengths())

    def task_metrics(self, metrics, correct):
        """Add token accuracy by length to the metrics."""
        correct = correct.reshape(len(self.input_lengths()), -1, self.length)
        by_length = {n: float(r[:, :n].mean()) for n, r in zip(self.input_lengths(), correct)}
        return metrics | {"by_length": by_length}


# -- Figs. 11 and 14; at desk scale, a smaller model and lengths from 16 to 32
SMALL_REVERSAL = dict(length=32, hidden=64, embed=64, lr=2e-2, vocab=16)
SMALL_REVERSAL_LSTM = dict(model="lstm", iterations=3000, **SMALL_REVERSAL)


def length_curves(result):
    """Yield token accuracy over input length, as one curve."""
    points = {int(n): accuracy for n, accuracy in result.metrics["by_length"].items()}
    yield "", points


VariableLength.figures["fig11"] = Figure(
    "Reversal, variable length",
    {
        "paper": grid(pe=NONE_AND_PE, **PAPER_LSTM, min_length=32),
        "desk": grid(**SMALL_REVERSAL_LSTM, pe=WITH_DUP, min_length=16),
    },
    ACCURACY_AND_EDITS,
    claims=[Claim("Post hoc: PE helps at variable length")],
    x="input length",
    curves=length_curves,
)
VariableLength.figures["fig14"] = Figure(
    "Random and learned encodings, variable length",
    {
        "paper": grid(pe=FIG13_ENCODINGS, **PAPER_LSTM, min_length=32),
        "desk": grid(**SMALL_REVERSAL_LSTM, pe=["dup", *FIG13_ENCODINGS], min_length=16),
    },
    contrasts=random_and_learned_contrasts("dup"),
    x="pe",
)

if __name__ == "__main__":
    raise SystemExit(cli.main(VariableLength))
