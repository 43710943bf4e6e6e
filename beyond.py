"""Experiments on reversal that are not in the paper. Here, PE means --pe sin.

    python beyond.py --scale desk --all fig2-l16         # Fig. 2 at L = 16
    python beyond.py --scale desk --all pe-ablation      # which property of PE helps?
    python beyond.py --scale desk --all longer-training  # does PE only accelerate training?
    python beyond.py --scale desk --all mamba-vocab      # does PE help Mamba?

All figures are defined at --scale desk. Most use the settings of reverse.py's fig2 at this
scale: L = 32; 30,000 iterations (S4D: 10,000). In titles, 1x is this number of iterations
(Mamba: 2,000). Finished trials of reverse.py in the same --out folder are reused.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import common
from common import UsageError, required_range, select_steps
from delayed_add import ablation_figure
from reverse import (
    FIG2_DESK,
    FIG13_ENCODINGS,
    TRAINING_BEATS_PE_FAMILY,
    Reverse,
    fig2_grid,
    random_and_learned_contrasts,
)
from suite.figures import (
    ACCURACY_AND_EDITS,
    ACCURACY_AND_LOG_ERROR,
    ACCURACY_AND_LOG_ODDS,
    K95,
    K_SUMMARIES,
    MEAN_ACCURACY,
    NONE_AND_PE,
    SPEED_UPS,
    WITH_CONSTANT,
    WITH_CONTROLS,
    Claim,
    Contrast,
    Figure,
    cell_labels,
    flag_label,
    gain_difference,
    grid,
)
from suite.task import Flag
from variable_length import SMALL_REVERSAL, SMALL_REVERSAL_LSTM


# -- Mamba, a newer architecture
class Mamba(nn.Module):
    """Mamba block (Gu and Dao, 2023), no norm or residual; C = 2H channels, N = 16 states."""

    def __init__(self, input_size, hidden):
        super().__init__()
        channels, rank, d_state = 2 * hidden, math.ceil(hidden / 16), 16
        self.split_sizes = rank, d_state, d_state
        self.in_proj = nn.Linear(input_size, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels)
        self.x_proj = nn.Linear(channels, sum(self.split_sizes), bias=False)
        self.dt_proj = nn.Linear(rank, channels)
        dt = torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_proj.bias = nn.Parameter(dt.expm1().log())  # the inverse of softplus
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        self.out_proj = nn.Linear(channels, hidden, bias=False)

    def forward(self, x, steps):
        start, stop = required_range(steps, len(x))
        u, gate = self.in_proj(x[:stop]).chunk(2, -1)  # (T, B, C)
        u = F.silu(self.convolve(u))
        dt, b, c = self.x_proj(u).to(u.dtype).split(self.split_sizes, -1)
        dt = F.softplus(self.dt_proj(dt))  # (T, B, C)
        A_over_ln2 = (-self.A_log.exp().T / math.log(2)).repeat(x.shape[1], 1, 1)  # (B, N, C)
        per_step = zip(dt[:, :, None], (dt * u)[:, :, None], b[..., None], c[..., None])
        h, outputs = torch.zeros_like(A_over_ln2), []
        for t, (dt_t, dt_u, b_t, c_t) in enumerate(per_step):  # (B, 1, C), ..., (B, N, 1)
            decay = (dt_t * A_over_ln2).exp2()  # exp(dt A), but faster
            h = torch.addcmul(decay * h, b_t, dt_u)
            if t >= start:
                outputs.append((c_t * h).sum(1))
        y = (torch.stack(outputs) + self.D * u[start:]) * F.silu(gate[start:])
        return self.out_proj(y if isinstance(steps, slice) else select_steps(y, steps))

    def convolve(self, u):
        """Convolve causally with self.conv1d's weights; calling conv1d is slower on a CPU."""
        weight = self.conv1d.weight[:, 0].T  # (width, C)
        padded = F.pad(u, (0, 0, 0, 0, len(weight) - 1, 0))
        return self.conv1d.bias + sum(w * padded[k : k + len(u)] for k, w in enumerate(weight))


class MambaStack(nn.Module):
    """Mamba blocks with pre-norm (RMSNorm) residual connections, and a final norm."""

    def __init__(self, input_size, hidden, blocks):
        super().__init__()
        self.in_proj = nn.Linear(input_size, hidden)
        self.blocks = nn.ModuleList(Mamba(hidden, hidden) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(blocks + 1))

    def forward(self, x, steps):
        x = self.in_proj(x)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x), slice(None))
        return self.norms[-1](select_steps(x, steps))


common.LAYERS["mamba"] = Mamba


class Beyond(Reverse):
    """Reversal with our own figures, and with stacked Mamba blocks."""

    name = "reverse"  # reverse.py's trials are reused
    extra_flags = [
        Flag(
            "blocks",
            1,
            "number of Mamba blocks; if more than 1, with norms and residual connections",
            at_least=1,
            below=100,
        )
    ]
    omitted_at_default = ["blocks"]  # with one block, config and folder are reverse.py's

    def check(self):
        if self.args.blocks > 1 and self.args.model != "mamba":
            raise UsageError(f"--blocks is for --model mamba, not {self.args.model}")
        super().check()

    def layer_class(self):
        if self.args.blocks == 1:
            return super().layer_class()
        return functools.partial(MambaStack, blocks=self.args.blocks)


def add_figure(name, title, trials, **options):
    """Add a figure; all here are at desk scale."""
    Beyond.figures[name] = Figure(title, {"desk": trials}, **options)


MAMBA = dict(model="mamba", length=32, hidden=64, embed=64)
add_figure(
    "mamba-vocab",
    "Mamba with one block, K = 16 to 1,024",
    grid(**MAMBA, lr=2e-2, iterations=2000, pe=WITH_CONTROLS, vocab=[16, 64, 256, 1024]),
)
MAMBA_LONGER = dict(iterations=4000, pe=WITH_CONSTANT)
add_figure(
    "mamba",
    "Mamba with one or two blocks, 2x (4,000 iterations)",
    # Learning rates were tuned without PE on seed 100
    grid(**MAMBA, blocks=1, vocab=16, lr=3e-2, **MAMBA_LONGER)
    + grid(**MAMBA, blocks=2, vocab=[16, 256], lr=1e-2, **MAMBA_LONGER),
    contrasts=[
        gain_difference(
            "K = 16: PE's gain, 1 block minus 2 blocks",
            dict(vocab=16, blocks=1),
            dict(vocab=16, blocks=2),
        )
    ],
    tuned=["lr"],
    x=("pe", "blocks", "vocab"),
)


# -- Variants of Fig. 2. Claims are preregistered (PROTOCOLS.md) unless called post hoc
def gain_contrasts(model, flag, large, small, **shared):
    """Return Contrasts of PE's gain at the large value of `flag` minus that at the small one.

    The gain is over no PE and over the control, in accuracy and in log-odds.
    """
    at_large, at_small = ({"model": model, **shared, flag: x} for x in (large, small))
    label = ", ".join(cell_labels(dict(model=model, **shared)))
    change = " minus ".join(f"{flag_label(flag)} = {value}" for value in (large, small))
    return [
        gain_difference(
            f"{label}: gain in {metric} over {name}, {change}", at_large, at_small, over, metric
        )
        for metric in ACCURACY_AND_LOG_ODDS
        for over, name in (("none", "no PE"), ("constant", "the control"))
    ]


def gain_growth(*cases):
    """Return Contrasts of PE's gain at two Ks; a case is (model, larger K, smaller K)."""
    return [
        contrast
        for model, *vocabs in cases
        for contrast in gain_contrasts(model, "vocab", *vocabs)
    ]


MODELS = "gru", "lstm", "s4d"
K95_CLAIM = Claim("Post hoc: PE raises K95", K95)
add_figure(
    "fig2-l16",
    "Reversal, shorter inputs (L = 16)",  # the default at desk scale
    fig2_grid([16, 64, 256], [64, 256, 1024]),
    metrics=ACCURACY_AND_EDITS | ACCURACY_AND_LOG_ODDS,
    summaries=[K95],
    claims=[K95_CLAIM],
    contrasts=gain_growth(
        ("gru", 256, 16), ("gru", 256, 64), ("lstm", 1024, 64), ("s4d", 1024, 64)
    ),
)
LONGER_TRAINING_CLAIM = Claim("Post hoc: PE helps after longer training")
add_figure(
    "fig2-l16-2x",
    "Reversal, shorter inputs (L = 16), 2x iterations",
    fig2_grid([16, 256], [64, 1024], s4d_iterations=20_000, iterations=60_000),
    metrics=ACCURACY_AND_EDITS,
    claims=[LONGER_TRAINING_CLAIM],
)
add_figure(
    "fig2-k8-gru-2x",
    "Reversal, small vocabulary (GRU, K = 8, L = 32), 2x iterations",
    grid(
        model="gru", vocab=8, length=32, iterations=60_000, pe=WITH_CONSTANT, seed=range(11, 15)
    ),
    claims=[Claim("Small vocabulary, 2x"), LONGER_TRAINING_CLAIM],
    plot=False,
)
SMALL_VOCAB_LSTM = dict(model="lstm", vocab=8)
add_figure(
    "fig2-k8-lstm",
    "Reversal, small vocabulary (LSTM, K = 8, L = 32)",
    grid(**SMALL_VOCAB_LSTM, length=32, pe=WITH_CONSTANT, seed=range(5, 10)),
    metrics=ACCURACY_AND_LOG_ODDS,
    claims=[Claim("Small vocabulary, LSTM", metric) for metric in ACCURACY_AND_LOG_ODDS],
    plot=False,
)
add_figure(
    "fig2-k8-lstm-pilot",
    "Reversal, small vocabulary (LSTM, K = 8, L = 32), exploratory",
    grid(**SMALL_VOCAB_LSTM, length=32, pe=WITH_CONSTANT, seed=range(11, 14)),
    metrics=ACCURACY_AND_LOG_ODDS,
    plot=False,
)
PAPER_GRU = dict(length=64, hidden=512, embed=512, batch=512, lr=1e-3, model="gru")
add_figure(
    "fig2-512-units",
    "GRU of the paper's size, trained for 20,000 iterations (paper: 300,000)",
    grid(**PAPER_GRU, pe=WITH_CONSTANT, vocab=64, iterations=20_000, seed=range(3)),
    metrics=ACCURACY_AND_EDITS,
    plot=False,
)
LONGER_AND_NEW_SEEDS_FAMILY = "Longer training, and fig2 on new seeds"
add_figure(
    "fig2-new-seeds",
    "Reversal, L = 32, seeds 11 to 13",
    fig2_grid(**FIG2_DESK, seed=range(11, 14)),
    claims=[Claim(LONGER_AND_NEW_SEEDS_FAMILY, MEAN_ACCURACY)],
    metrics=ACCURACY_AND_EDITS,
    summaries=K_SUMMARIES,
)


add_figure(
    "fig2-all-seeds",
    "Reversal, L = 32",
    fig2_grid(**FIG2_DESK, seed=range(5, 14)),
    metrics=ACCURACY_AND_LOG_ODDS,
    summaries=K_SUMMARIES,
    claims=[K95_CLAIM],
    contrasts=gain_growth(
        ("gru", 32, 4),
        ("gru", 32, 8),
        ("lstm", 256, 16),
        ("s4d", 256, 16),
        ("s4d", 64, 32),
        ("s4d", 256, 64),
    ),
)

add_figure(
    "fig2-gains",
    "Gain from PE in reversal, L = 16 and 32",
    fig2_grid(**FIG2_DESK, seed=range(5, 14))
    + fig2_grid([16, 64, 256], [64, 256, 1024], length=16),
    claims=[Claim("Post hoc: PE helps reversal")],
    x="gain",
)

add_figure(
    "fig2-l16-vs-l32",
    "Reversal, L = 16 and 32 at the same K",
    fig2_grid([16], [64, 256], length=16)
    + fig2_grid([16], [64, 256], length=32, seed=range(5, 14)),
    metrics=ACCURACY_AND_LOG_ODDS,
    contrasts=[
        contrast
        for model, K in (("gru", 16), ("lstm", 64), ("lstm", 256), ("s4d", 64), ("s4d", 256))
        for contrast in gain_contrasts(model, "length", 32, 16, vocab=K)
    ],
    plot=False,
)

# -- Which property of PE helps; and Fig. 14's encodings at a fixed length
Beyond.figures["pe-ablation"] = ablation_figure(
    "Reversal", dict(model="gru", iterations=2000, **SMALL_REVERSAL)
)
add_figure(
    "fig14-fixed-length",
    "Random and learned encodings, fixed length",
    grid(**SMALL_REVERSAL_LSTM, pe=["dup", *FIG13_ENCODINGS]),
    contrasts=random_and_learned_contrasts("dup"),
    x="pe",
)


# -- Longer training
class LongRun(NamedTuple):
    """Settings of a model in lr-search and longer-training."""

    vocab: int
    lr: float  # as in fig2
    iterations: int  # at 1x
    multiples: tuple  # training budgets, as multiples of `iterations`
    seeds: range
    baseline_lr: float  # of no PE and the control, selected in lr-search
    pe_lr: float


LONG_RUNS = {
    "gru": LongRun(32, 3e-3, 30_000, (1, 4), range(11, 15), 6e-3, 6e-3),
    "lstm": LongRun(64, 3e-3, 30_000, (1, 4), range(11, 15), 3e-3, 6e-3),
    "s4d": LongRun(256, 1e-2, 10_000, (1, 4, 8), range(11, 17), 2e-2, 2e-2),
}
lr_trials, long_trials, long_claims, long_contrasts = [], [], [], []  # of the figures below
for model, run in LONG_RUNS.items():
    flags = dict(model=model, vocab=run.vocab, length=32)
    lrs = [run.lr / 2, run.lr, run.lr * 2]
    lr_trials += grid(**flags, iterations=run.iterations, pe=NONE_AND_PE, lr=lrs, seed=100)

    budgets = [run.iterations * multiple for multiple in run.multiples]
    flags["seed"] = run.seeds
    long_trials += grid(**flags, pe="none", lr=run.baseline_lr, iterations=budgets)
    long_trials += grid(**flags, pe="sin", lr=run.pe_lr, iterations=budgets)
    # The control is trained only at the shortest and the longest budget
    ends = [budgets[0], budgets[-1]]
    long_trials += grid(**flags, pe="constant", lr=run.baseline_lr, iterations=ends)
    cell = dict(model=model, vocab=run.vocab, iterations=budgets[0])
    long_claims.append(Claim("Post hoc: PE helps at tuned rates", cell=cell))
    cell = cell | dict(iterations=budgets[-1])
    long_claims.append(Claim(LONGER_AND_NEW_SEEDS_FAMILY, cell=cell))
    if model != "gru":  # the GRU collapses without PE at this learning rate
        long_claims.append(LONGER_TRAINING_CLAIM._replace(cell=cell))

    # Without PE, is the longest budget still better than the second longest?
    shorter, longest = run.multiples[-2:]
    none = dict(model=model, pe="none")
    long_contrasts.append(
        Contrast(
            f"{model.upper()}, no PE: {longest}x minus {shorter}x budget (paired)",
            none | dict(iterations=budgets[-1]),
            none | dict(iterations=budgets[-2]),
            paired=True,
        )
    )

LONG_GRU = dict(model="gru", vocab=32, length=32, iterations=120_000, seed=range(11, 15))
GRU_BASELINES_LOW_LR = grid(**LONG_GRU, pe=["none", "constant"], lr=3e-3)  # tuned: 6e-3
add_figure(
    "lr-search",
    "Learning-rate search for longer-training, at 1x (seed 100)",
    lr_trials,
    plot=False,
    note="longer-training uses the best rates with and without PE (control: as without PE).",
)
add_figure(
    "longer-training",
    "Longer training: 4x (S4D: 8x), learning rates tuned at 1x",
    long_trials,
    summaries=SPEED_UPS,
    contrasts=long_contrasts,
    claims=long_claims,
    tuned=["lr"],
    x="iterations",
)
add_figure(
    "longer-training-low-lr",
    "GRU at 4x (post hoc): learning rate 3e-3 (no PE, control), 6e-3 (PE)",
    GRU_BASELINES_LOW_LR + grid(**LONG_GRU, pe="sin", lr=6e-3),
    tuned=["lr"],
    plot=False,
)


# -- Can more training replace PE? Reuses trials of other figures
def no_pe_minus_pe(model, longer, shorter):
    """Return the Contrast of no PE at the longer budget minus PE at the shorter."""
    return Contrast(
        f"{model.upper()}: no PE at {longer // shorter}x - PE at 1x",
        dict(model=model, pe="none", iterations=longer),
        dict(model=model, pe="sin", iterations=shorter),
    )


def add_budget_figure(name, length, trials, claimed=MODELS, note=""):
    """Add a figure with contrasts of no PE at the longest budget minus PE at the shortest.

    For models in `claimed`, the contrast is also a claim.
    """
    contrasts = {}
    for model in MODELS:
        budgets = [trial["iterations"] for trial in trials if trial["model"] == model]
        contrasts[model] = no_pe_minus_pe(model, max(budgets), min(budgets))
    add_figure(
        name,
        f"Can more training replace PE? (L = {length})",
        [trial for trial in trials if trial["pe"] != "constant"],
        summaries=SPEED_UPS,
        contrasts=[*contrasts.values()],
        claims=[
            Claim(TRAINING_BEATS_PE_FAMILY, cell={}, contrast=contrasts[model])
            for model in claimed
        ],
        tuned=["lr"],
        note=note,
        x="iterations",
    )


FIG2_GRU = LONG_GRU | dict(iterations=30_000, seed=range(5, 14))
GRU_TRIALS_SAME_LR = GRU_BASELINES_LOW_LR + grid(**LONG_GRU, pe="sin", lr=3e-3)
add_budget_figure(
    "training-vs-pe",
    32,
    grid(**FIG2_GRU, pe=NONE_AND_PE, lr=3e-3)
    + GRU_TRIALS_SAME_LR
    # Not the GRU of long_trials: without PE, it collapses at 4x at its tuned rate
    + [trial for trial in long_trials if trial["model"] != "gru"],
    claimed=["gru", "s4d"],
    note="Learning rates of the LSTM: 3e-3 (no PE), 6e-3 (PE).",
)
L16 = dict(length=16, pe=NONE_AND_PE)
add_budget_figure(
    "training-vs-pe-l16",
    16,
    grid(**L16, model="gru", vocab=256, lr=3e-3, iterations=[30_000, 60_000])
    + grid(**L16, model="lstm", vocab=1024, lr=3e-3, iterations=[30_000, 60_000])
    + grid(**L16, model="s4d", vocab=1024, lr=1e-2, iterations=[10_000, 20_000]),
)

# -- The end of training, a preregistered family: GRU with one learning rate for all encodings,
# LSTM with rates tuned at 4x, S4D up to 16x
END_OF_TRAINING_FAMILY = "The end of training"
LONG_LSTM = dict(model="lstm", vocab=64, length=32, iterations=120_000)
LONG_S4D = dict(model="s4d", vocab=256, length=32, iterations=160_000)
add_figure(
    "longer-training-same-lr",
    "GRU at 4x: learning rate 3e-3 for all encodings",
    GRU_TRIALS_SAME_LR,
    claims=[LONGER_TRAINING_CLAIM, Claim(END_OF_TRAINING_FAMILY)],
    plot=False,
)
add_figure(
    "lr-search-longer",
    "Learning-rate search for longer training: LSTM at 4x, S4D at 16x (seed 100)",
    grid(**LONG_LSTM, pe="none", lr=[0.75e-3, 1.5e-3, 3e-3], seed=100)
    + grid(**LONG_LSTM, pe="sin", lr=[1.5e-3, 3e-3, 6e-3], seed=100)
    + grid(**LONG_S4D, pe=NONE_AND_PE, lr=[1e-2, 2e-2], seed=100),
    plot=False,
)
LSTM_TRIALS_TUNED_AT_4X = grid(
    **LONG_LSTM, pe=["none", "constant"], lr=1.5e-3, seed=range(17, 21)
)
LSTM_TRIALS_TUNED_AT_4X += grid(**LONG_LSTM, pe="sin", lr=3e-3, seed=range(17, 21))
add_figure(
    "longer-training-tuned",
    "LSTM at 4x: learning rates tuned at 4x",
    LSTM_TRIALS_TUNED_AT_4X,
    claims=[LONGER_TRAINING_CLAIM, Claim(END_OF_TRAINING_FAMILY)],
    tuned=["lr"],
    plot=False,
)
LOG_RATIO_CONTRAST = Contrast(
    "S4D: log (error without PE / error with PE), 16x minus 8x (paired)",
    [dict(pe="none", iterations=160_000), dict(pe="sin", iterations=80_000)],
    [dict(pe="sin", iterations=160_000), dict(pe="none", iterations=80_000)],
    paired=True,
    metric="log error",
)
add_figure(
    "longer-training-s4d",
    "S4D, trained for up to 160,000 iterations (16x)",
    grid(
        **LONG_S4D | dict(iterations=[10_000, 40_000, 80_000, 160_000]),
        pe=NONE_AND_PE,
        lr=2e-2,
        seed=range(11, 15),
    ),
    metrics=ACCURACY_AND_LOG_ERROR,
    summaries=SPEED_UPS,
    contrasts=[
        LOG_RATIO_CONTRAST,
        Contrast(
            "no PE: 16x minus 8x (paired)",
            dict(pe="none", iterations=160_000),
            dict(pe="none", iterations=80_000),
            paired=True,
        ),
    ],
    claims=[Claim(END_OF_TRAINING_FAMILY, "log error", {}, LOG_RATIO_CONTRAST)],
    x="iterations",
)
GRU_CONTRAST, LSTM_CONTRAST = (no_pe_minus_pe(m, 120_000, 30_000) for m in ("gru", "lstm"))
add_figure(
    "training-vs-pe-tuned",
    "Can more training replace PE? (L = 32; no PE at 4x, PE at 1x, best rates)",
    [trial for trial in GRU_BASELINES_LOW_LR + LSTM_TRIALS_TUNED_AT_4X if trial["pe"] == "none"]
    + [
        trial for trial in long_trials if trial["pe"] == "sin" and trial["iterations"] == 30_000
    ],
    contrasts=[GRU_CONTRAST, LSTM_CONTRAST],
    claims=[Claim(TRAINING_BEATS_PE_FAMILY, cell={}, contrast=LSTM_CONTRAST)],
    tuned=["lr"],
    plot=False,
)


def binned_curve(result):
    """Yield training accuracy, averaged in 50 equal bins over training."""
    bins = result.training_curve.reshape(50, -1)
    points = dict(zip(bins["iteration"][:, -1], bins["accuracy"].mean(1)))
    yield "", points


add_figure(
    "longer-training-curves",
    "Training curves: GRU (K = 32) and LSTM (K = 64) at 4x, S4D (K = 256) at 8x",
    GRU_TRIALS_SAME_LR
    + LSTM_TRIALS_TUNED_AT_4X
    + [trial for trial in long_trials if trial["iterations"] == 80_000],
    tuned=["lr"],
    x="iteration",
    y="training accuracy",
    curves=binned_curve,
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Beyond))
