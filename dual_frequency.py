"""Reversal of Frequent and Rare integers (Fig. 3): where does PE help?

    python dual_frequency.py --model lstm --pe sin --vocab 1024 --seed 0
    python dual_frequency.py --scale desk --all fig3

    in   3 1 9 _ _ _        a training sequence, as in reverse.py
    out  . . . 9 1 3        K = 10: integers 0 to 4 are Frequent, 5 to 9 are Rare

In training, each Rare integer is drawn one seventh as often as a Frequent one. In a test
sequence, one integer is the target; the others, the disturbants, are all Frequent or all Rare.
Only the step that outputs the target is scored. The paper reports that without PE, Rare
disturbants reduce accuracy, but Rare targets do not (section 4.2).
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import numpy as np
import torch

from common import (
    HELD_OUT_STREAM,
    UsageError,
    distinct_sequences,
    random_bits,
    scale_bits,
    uniform_integers,
)
from reverse import PREREGISTERED_SEEDS, Reverse
from suite.figures import (
    NONE_AND_PE,
    WITH_CONSTANT,
    WITH_DUP,
    Figure,
    grid,
    log_odds,
)

CONDITIONS = {  # target/disturbants: 1 if Rare
    "frequent/frequent": (0, 0),
    "frequent/rare": (0, 1),
    "rare/frequent": (1, 0),
    "rare/rare": (1, 1),
}
AMONG_FREQUENT = "frequent/frequent", "rare/frequent"
AMONG_RARE = "frequent/rare", "rare/rare"


class DualFrequency(Reverse):
    """Reversal in which integers below K/2 are Frequent and the others Rare."""

    name = "dual_frequency"

    @classmethod
    def defaults(cls, args):
        return super().defaults(args) | dict(
            held_out=64 * args.length,  # 16 for each condition and target position
            snapshot_every=min(5000, max(1, args.iterations // 10)),
        )

    def check(self):
        if self.vocab % 2:
            raise UsageError(f"--vocab {self.vocab} is odd, but half of the vocabulary is Rare")
        if self.args.held_out % (4 * self.length):  # conditions x target positions
            raise UsageError(
                f"--held-out {self.args.held_out} must be a multiple of {4 * self.length} "
                "(4 conditions x --length)"
            )
        super().check()

    def draw(self, rng_key, shape):
        """Draw Rare integers with probability 1/8, else Frequent; each group is uniform."""
        bits = random_bits(rng_key, (*shape, self.length))
        rare = (bits >> 61 & 7) == 0  # the top three bits, which scale_bits ignores
        return scale_bits(bits, self.vocab // 2) + rare * (self.vocab // 2)

    def held_out_probability(self, sequences):
        """Return the probability that a random sequence is one of `sequences`."""
        rare = (sequences >= self.vocab // 2).sum(1).double()
        probabilities = (1 / 8) ** rare * (7 / 8) ** (self.length - rare)
        return probabilities.sum().item() * (2 / self.vocab) ** self.length

    # -- Test set: a target among disturbants, ordered by condition, position, repeat

    def patterns(self):
        """Return, for each condition and target position, L values: 1 if Rare, else 0."""
        return [
            (disturbants,) * position
            + (target,)
            + (disturbants,) * (self.length - 1 - position)
            for target, disturbants in CONDITIONS.values()
            for position in range(self.length)
        ]

    def held_out_sequences(self, device):
        """Draw distinct test sequences, (N, L), from one stream per distinct pattern.

        Equal patterns, such as those of all target positions in frequent/frequent, share a
        stream and divide its sequences.
        """
        half, patterns = self.vocab // 2, self.patterns()
        repeats = self.args.held_out // len(patterns)

        def draw(rng_key, shape):
            return uniform_integers(rng_key, (*shape, self.length), half)

        chunks = {}  # the sequences of each pattern, `repeats` at a time
        for index, pattern in enumerate(dict.fromkeys(patterns)):
            count = repeats * patterns.count(pattern)
            sequences = distinct_sequences(
                draw, count, self.seed, HELD_OUT_STREAM, index, device=device
            )
            sequences += half * torch.tensor(pattern, device=device)
            chunks[pattern] = iter(sequences.split(repeats))
        return torch.cat([next(chunks[pattern]) for pattern in patterns])

    def held_out_batch(self):
        sequences = self.held_out_set.sequences
        repeats = len(sequences) // len(self.patterns())
        index = torch.arange(len(sequences), device=sequences.device)[:, None]
        position = index // repeats % self.length  # of the target, (N, 1)
        steps = 2 * self.length - 1 - position  # when the target is retrieved
        return self.batch_with_commands(sequences, sequences.gather(1, position), steps)

    def task_metrics(self, metrics, correct):
        """Replace metrics of whole sequences by accuracy per condition and target position."""
        by_condition = correct.reshape(4, self.length, -1).mean(2)  # (4, L)
        return {
            "token_accuracy": metrics["token_accuracy"],
            "cross_entropy": metrics["cross_entropy"],
            "by_condition": dict(zip(CONDITIONS, by_condition.tolist())),
        }


# -- Fig. 3
FIG3_DESK_FLAGS = dict(held_out=4096, iterations=20_000, snapshot_every=2000)
S4D_DESK_FLAGS = dict(held_out=4096, iterations=4000, length=8, hidden=64, embed=64, lr=1e-2)
FIG3 = {
    "paper": grid(model="gru", pe=NONE_AND_PE, vocab=64)
    + grid(model="lstm", pe=NONE_AND_PE, vocab=1024)
    + grid(model="s4d", pe=NONE_AND_PE, vocab=2048),
    "desk": grid(model="lstm", pe=WITH_CONSTANT, vocab=256, **FIG3_DESK_FLAGS)
    + grid(model="gru", pe=WITH_CONSTANT, vocab=64, lr=1e-2, **FIG3_DESK_FLAGS)
    + grid(model="s4d", pe=WITH_DUP, vocab=256, **S4D_DESK_FLAGS),
}
FIG3_NEW_SEEDS = {
    "desk": grid(
        model="lstm", pe=WITH_CONSTANT, vocab=256, **FIG3_DESK_FLAGS, seed=PREREGISTERED_SEEDS
    )
}


def retrieval_accuracy(*conditions):
    """Return a metric: the mean accuracy in these conditions."""
    return lambda result: np.mean([result.metrics["by_condition"][c] for c in conditions])


def accuracy_difference(first, second):
    """Return a metric: the accuracy in one condition minus that in another."""
    return lambda result: retrieval_accuracy(first)(result) - retrieval_accuracy(second)(result)


def log_odds_difference(first, second):
    """Return a metric: the log-odds in one condition minus those in another."""

    def compute(result):
        n = result.config["held_out"] // len(CONDITIONS)  # outputs per condition
        x, y = (log_odds(retrieval_accuracy(c)(result), n) for c in (first, second))
        return x - y

    return compute


def worst_quarter_gap(result):
    """Return mean accuracy outside the paper's worst quarter of positions minus that in it.

    Targets are Frequent and disturbants Rare. The paper names the first quarter as worst for
    the LSTM and the second for S4D, but none for the GRU: KeyError then makes report.py omit
    the metric.
    """
    quarters = np.array_split(result.metrics["by_condition"]["frequent/rare"], 4)
    means = [quarter.mean() for quarter in quarters]
    worst = means.pop({"lstm": 0, "s4d": 1}[result.flags["model"]])
    return np.mean(means) - worst


def position_curves(result):
    """Yield accuracy over the target's position, one curve per condition."""
    for condition, values in result.metrics["by_condition"].items():
        yield condition.title(), dict(enumerate(values, 1))


FIG3_OPTIONS = dict(
    metrics={
        "accuracy among Rare disturbants": retrieval_accuracy(*AMONG_RARE),
        "accuracy among Frequent disturbants": retrieval_accuracy(*AMONG_FREQUENT),
        "accuracy, Frequent targets among Rare": retrieval_accuracy("frequent/rare"),
        "accuracy, Rare targets among Rare": retrieval_accuracy("rare/rare"),
        "Frequent targets: Frequent - Rare disturbants": accuracy_difference(
            "frequent/frequent", "frequent/rare"
        ),
        "Rare targets: Frequent - Rare disturbants": accuracy_difference(
            "rare/frequent", "rare/rare"
        ),
        "Frequent targets: Frequent - Rare disturbants, log-odds": log_odds_difference(
            "frequent/frequent", "frequent/rare"
        ),
        "Rare targets: Frequent - Rare disturbants, log-odds": log_odds_difference(
            "rare/frequent", "rare/rare"
        ),
        "Frequent disturbants: Frequent - Rare targets": accuracy_difference(*AMONG_FREQUENT),
        "Rare disturbants: Frequent - Rare targets": accuracy_difference(*AMONG_RARE),
        "Frequent among Rare: other quarters - 1st (S4D: 2nd)": worst_quarter_gap,
    },
    curves=position_curves,
    x="position of the target (1: read first)",
)
DualFrequency.figures["fig3"] = Figure(
    "Accuracy by frequency of target/disturbants", FIG3, **FIG3_OPTIONS
)
DualFrequency.figures["fig3-new-seeds"] = Figure(
    "Accuracy by frequency of target/disturbants, new seeds (5 to 10)",
    FIG3_NEW_SEEDS,
    **FIG3_OPTIONS,
)

if __name__ == "__main__":
    raise SystemExit(cli.main(DualFrequency))
