"""Reversal (Figs. 2, 12, 13): read L integers, then output them in reverse order.

    python reverse.py --model lstm --pe sin --vocab 16384 --seed 0  # one trial of Fig. 2
    python reverse.py --list fig2                                   # list all its trials
    python reverse.py --scale quick --all fig2                      # 16 small GRUs: 3 minutes
    sbatch --array=0-179 slurm_array.sh reverse.py fig2             # all 180 trials, on SLURM

    in   3 1 4 _ _ _        _ is the command token; time steps 1 .. 2L
    out  . . . 4 1 3        . is not scored

The paper (Morita, TMLR 2024) reports that GRU, LSTM and S4D handle larger vocabularies with
sinusoidal positional encoding (PE, --pe sin) than without. Shared code: suite/task.py
(defaults, batches), suite/training.py (training loop) and common.py (model, loss, training
step).
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

from suite.figures import (
    ACCURACY_AND_EDITS,
    K95,
    K_SUMMARIES,
    NONE_AND_PE,
    WITH_CONSTANT,
    WITH_CONTROLS,
    WITH_DUP,
    Claim,
    Contrast,
    Figure,
    encoding_contrast,
    grid,
)
from suite.task import DESK, SMOKE, Task

PREREGISTERED_SEEDS = range(5, 11)  # not used before


class Reverse(Task):
    name = "reverse"
    scales = {
        "desk": DESK | dict(length=16, vocab=64, lr=3e-3, iterations=30_000),
        "quick": dict(
            length=16, vocab=16, hidden=64, embed=64, batch=64, lr=1e-2, iterations=1200
        ),
        "smoke": SMOKE | dict(length=8),
    }

    def make_batch(self, sequences):
        """Make a batch from integers (B, L): inputs (B, 2L) and reversed targets (B, L)."""
        return self.batch_with_commands(sequences, sequences.flip(1))

    def held_out_sequences(self, device):
        """Draw the test sequences (N, L), the same as variable_length.py's of length L."""
        return super().held_out_sequences(device, self.length)


# -- Fig. 2: larger vocabularies. The flag `vocab` is K, and `length` is L. Flags that are not
# given take the scale's defaults
def fig2_grid(gru_vocab, vocab, s4d_iterations=10_000, **flags):
    """Return a desk-scale grid: K from `gru_vocab` for the GRU, from `vocab` for the others."""
    flags["pe"] = WITH_CONSTANT
    s4d = flags | dict(model="s4d", iterations=s4d_iterations, lr=1e-2)
    return (
        grid(model="gru", vocab=gru_vocab, **flags)
        + grid(model="lstm", vocab=vocab, **flags)
        + grid(vocab=vocab, **s4d)
    )


FIG2_DESK = dict(gru_vocab=[4, 8, 16, 32], vocab=[16, 32, 64, 256], length=32)
LARGEST_K = {"gru": 32, "lstm": 256, "s4d": 256}  # in FIG2_DESK
FIG2_FAMILY = "Reversal at L = 32"  # six claims here, and a seventh in stability.py
Reverse.figures["fig2"] = Figure(
    "Reversal, by vocabulary size",
    {
        "paper": grid(model="gru", pe=NONE_AND_PE, vocab=[32, 64, 128, 256])
        + grid(model=["lstm", "s4d"], pe=NONE_AND_PE, vocab=[2**n for n in range(8, 15)]),
        "desk": fig2_grid(**FIG2_DESK, seed=PREREGISTERED_SEEDS),
        "quick": grid(model="gru", vocab=[8, 16], seed=range(4), pe=NONE_AND_PE),
        "smoke": grid(model=["gru", "lstm", "s4d"], pe=NONE_AND_PE, vocab=[8, 16], seed=0),
    },
    ACCURACY_AND_EDITS,
    summaries=K_SUMMARIES,
    claims=[
        Claim(FIG2_FAMILY, cell=dict(model=model, vocab=K)) for model, K in LARGEST_K.items()
    ]
    + [Claim(FIG2_FAMILY, K95)],
)

# -- Figs. 12 and 13: other encodings in place of the sinusoid
PAPER_LSTM, DESK_LSTM = dict(model="lstm", vocab=16384), dict(model="lstm", vocab=1024)
FIG13_ENCODINGS = ["none", "sin", "random", "learned"]
DUP_MINUS_NONE = encoding_contrast("dup", "none")


def random_and_learned_contrasts(control):
    """Return Contrasts that compare random and learned vectors with no PE, `control` and PE.

    Learned vectors of initial norm 1 are also compared with no PE and PE.
    """
    contrasts = []
    for pe in ("random", "learned"):
        pairs = (pe, "none"), (pe, control), ("sin", pe)
        contrasts += [encoding_contrast(plus, minus) for plus, minus in pairs]
    learned_unit = dict(pe="learned", amplitude=1.0)
    return [
        *contrasts,
        Contrast("learned, initial norm 1 - no PE", learned_unit, dict(pe="none")),
        Contrast("PE - learned, initial norm 1", dict(pe="sin"), learned_unit),
    ]


Reverse.figures["fig12"] = Figure(
    "Duplicated embedding",
    {
        "paper": grid(pe=WITH_DUP, **PAPER_LSTM),
        "desk": grid(**DESK_LSTM, pe=WITH_CONTROLS),
    },
    ACCURACY_AND_EDITS,
    contrasts=[DUP_MINUS_NONE],
    plot=False,
)
Reverse.figures["fig13"] = Figure(
    "Random and learned encodings",
    {
        "paper": grid(pe=FIG13_ENCODINGS, **PAPER_LSTM),
        "desk": grid(**DESK_LSTM, pe=["constant", *FIG13_ENCODINGS], amplitude=None)
        + grid(**DESK_LSTM, pe="learned", amplitude=1.0),
    },
    ACCURACY_AND_EDITS,
    contrasts=random_and_learned_contrasts("constant"),
    x=("pe", "amplitude"),
)


# -- Section 4.1: does more training replace PE?
TRAINING_BEATS_PE_FAMILY = "Post hoc: more training without PE beats PE"


def paper_budget_grid(**flags):
    """Return a grid: no PE and PE as in the paper, no PE with twice the iterations or batch."""
    return (
        grid(**flags, pe="none", iterations=[300_000, 600_000], batch=512)
        + grid(**flags, pe="sin", iterations=300_000, batch=512)
        + grid(**flags, pe="none", iterations=300_000, batch=1024)
    )


def doubling_contrasts(iterations, batch):
    """Return four Contrasts: no PE with twice the iterations, or twice the batch size.

    The baseline is no PE, or PE, with neither doubled.
    """
    none = dict(pe="none", iterations=iterations, batch=batch)
    longer, larger = none | dict(iterations=2 * iterations), none | dict(batch=2 * batch)
    sin = none | dict(pe="sin")
    return [
        Contrast("no PE: 2x - 1x iterations", longer, none),
        Contrast("no PE: 2x - 1x batch size", larger, none),
        Contrast("no PE with 2x iterations - PE", longer, sin),
        Contrast("no PE with 2x batch size - PE", larger, sin),
    ]


DESK_CONTRASTS = doubling_contrasts(30_000, 64)
Reverse.figures["section4.1"] = Figure(
    "More iterations, larger batches",
    {
        "paper": paper_budget_grid(model="gru", vocab=256)
        + paper_budget_grid(**PAPER_LSTM)
        + paper_budget_grid(model="s4d", vocab=16384),
        "desk": grid(**DESK_LSTM, pe=WITH_CONSTANT, iterations=[30_000, 60_000], batch=64)
        + grid(**DESK_LSTM, pe=NONE_AND_PE, iterations=30_000, batch=128),
    },
    contrasts=doubling_contrasts(300_000, 512) + DESK_CONTRASTS,
    # No PE with 2x batch size - PE; beyond.py has claims on more iterations
    claims=[Claim(TRAINING_BEATS_PE_FAMILY, cell={}, contrast=DESK_CONTRASTS[-1])],
    x=("pe", "iterations", "batch"),
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Reverse))  # run one trial (training.train) or a figure
