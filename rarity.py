"""Rarity or information per token? Reversal with K input tokens but only M output classes.

    python rarity.py --model s4d --pe sin --vocab 256 --meanings 16 --seed 0
    python rarity.py --scale desk --all rarity

    in   13 1 24 _ _ _        K = 30 tokens, M = 10 classes (here, the last digit)
    out  .  . .  4 1 3        as in reverse.py, but the target of token c is c mod M

In reverse.py, a larger K makes each token rarer, and also increases the information per token
(log2 K bits). Here, K sets the rarity of input tokens, and M the information to remember.
Tokens with the same target are synonyms. With M = K, the task is that of reverse.py. The flag
for M is --meanings.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

from torch import nn

from common import UsageError
from reverse import Reverse, fig2_grid
from suite.figures import (
    ACCURACY_AND_LOG_ERROR,
    ENCODING_NAMES,
    NONE_AND_PE,
    Claim,
    Contrast,
    Figure,
    gain_difference,
    model_label,
)
from suite.task import Flag


class Rarity(Reverse):
    name = "reverse"  # trials with M = K share reverse.py's folders
    extra_flags = [
        Flag(
            "meanings",
            None,
            "number of output classes, M; divides K (default: K)",
            int,
            at_least=2,
        )
    ]
    omitted_at_default = ["meanings"]

    @classmethod
    def defaults(cls, args):
        return super().defaults(args) | dict(meanings=args.vocab)

    def check(self):
        if self.vocab % self.args.meanings:
            raise UsageError(
                f"--meanings {self.args.meanings} does not divide --vocab {self.vocab}"
            )
        super().check()

    def make_model(self):
        model = super().make_model()
        if self.args.meanings < self.vocab:
            model.readout = nn.Linear(self.args.hidden, self.args.meanings)
        return model

    def make_batch(self, sequences):
        batch = super().make_batch(sequences)
        return batch._replace(targets=batch.targets % self.args.meanings)


M_AT_K256 = {"gru": 8, "lstm": 16, "s4d": 16}  # output classes


def desk_grid():
    """Return the new trials, and those of fig2-all-seeds at K = M and (LSTM, S4D) K = 256."""
    new = fig2_grid([256], [256], length=32, seed=range(17, 23))
    new = [trial | dict(meanings=M_AT_K256[trial["model"]]) for trial in new]
    return new + fig2_grid([8], [16, 256], length=32, seed=range(5, 14))


def rarity_contrasts(metric=""):
    """Yield the preregistered contrasts R1 and R2 of each model (PROTOCOLS.md).

    Splitting replaces each of M tokens by 256 / M synonyms. R1 is the metric without PE at
    K = M, minus that at K = 256 with M classes. R2 is the difference PE - no PE at K = 256 with
    M classes, minus the same difference at K = M. In accuracy, R1 is positive if splitting
    hurts, and R2 is positive if PE then helps more. In log error, the signs are reversed.
    """
    none = dict(pe="none")
    for model, M in M_AT_K256.items():
        small = dict(model=model, vocab=M)
        split = dict(model=model, vocab=256, meanings=M)
        name = f"{model_label(model)} {metric}".strip()
        yield Contrast(
            f"{name}: R1, no PE, K = {M} minus (K = 256, M = {M})",
            small | none,
            split | none,
            metric=metric,
        )
        label = f"{name}: R2, PE - no PE, (K = 256, M = {M}) minus K = {M}"
        yield gain_difference(label, split, small, metric=metric)


def drop_contrasts():
    """Yield Contrasts: the drop from K = 16 to 256, and its part due to splitting tokens."""
    for model in "lstm", "s4d":
        for pe in NONE_AND_PE:
            small = dict(model=model, pe=pe, vocab=16)
            large = small | dict(vocab=256)
            name = f"{model_label(model)}, {ENCODING_NAMES[pe]}:"
            if pe == "sin":  # no PE: already R1
                split = large | dict(meanings=16)
                yield Contrast(f"{name} K = 16 minus (K = 256, M = 16)", small, split)
            yield Contrast(f"{name} K = 16 minus K = 256", small, large)


RARITY_FAMILY = "Vocabulary size or rarity"
Rarity.figures["rarity"] = Figure(
    RARITY_FAMILY,
    {"desk": desk_grid()},
    metrics=ACCURACY_AND_LOG_ERROR,
    contrasts=[
        *rarity_contrasts(),
        *rarity_contrasts("log error"),
        *drop_contrasts(),
    ],
    claims=[
        Claim(RARITY_FAMILY, cell={}, contrast=contrast) for contrast in rarity_contrasts()
    ],
    x=("pe", "vocab", "meanings"),
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Rarity))
