"""Vocabulary size or rarity? Reverse ordering of K codes that share M answers.

    python rarity.py --model s4d --pe sin --vocab 256 --meanings 16 --seed 0
    python rarity.py --scale desk --all rarity --out results

    in   13 1 24 _ _ _        K = 30 codes, M = 10 answers: the last digit counts
    out  .  . .  4 1 3        as in reverse.py, except that code c is answered by c mod M

A larger K makes each token rarer and leaves more to remember. Here K sets how rare each input
token is, and M how much has to be remembered of it. With M = K this is reverse.py's task, and
its trials are reverse.py's.
"""

from torch import nn

from common import Refused
from reverse import Reverse
from suite import cli
from suite.figures import WITH_CONSTANT, Figure, cross
from suite.task import Flag


class Rarity(Reverse):
    name = "reverse"  # trials with M = K have the folders of reverse.py
    flags = (
        Flag("meanings", None, "number of answers, M; divides K (K: reversal)", int, least=2),
    )

    @classmethod
    def defaults(cls, args):
        return super().defaults(args) | dict(meanings=args.vocab)

    def __init__(self, args, config, folder):
        super().__init__(args, config, folder)
        self.meanings = args.meanings
        if self.meanings == self.vocab:
            del config["meanings"]

    def check(self):
        if self.vocab % self.meanings:
            raise Refused(f"--meanings {self.meanings} does not divide --vocab {self.vocab}")
        super().check()

    def model(self):
        model = super().model()
        if self.meanings < self.vocab:
            model.readout = nn.Linear(self.args.hidden, self.meanings)
        return model

    def episode(self, rows):
        episode = super().episode(rows)
        return episode._replace(targets=episode.targets % self.meanings)


def rarity_at_desk():
    """K = 256 codes with M answers, and the committed trials of reverse.py at K = M and 256."""
    shared = dict(pe=WITH_CONSTANT, length=32)
    s4d = dict(model="s4d", iterations=10_000, lr=1e-2)
    new, committed = range(17, 23), range(5, 14)
    return (
        cross(**s4d, vocab=256, meanings=16, **shared, seed=new)
        + cross(model="lstm", vocab=256, meanings=16, **shared, seed=new)
        + cross(model="gru", vocab=256, meanings=8, **shared, seed=new)
        + cross(**s4d, vocab=[16, 256], **shared, seed=committed)
        + cross(model="lstm", vocab=[16, 256], **shared, seed=committed)
        + cross(model="gru", vocab=8, **shared, seed=committed)
    )


Rarity.figures["rarity"] = Figure(
    "Vocabulary size or rarity", {"desk": rarity_at_desk()}, x=("pe", "vocab", "meanings")
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Rarity))
