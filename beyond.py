"""Beyond the paper: shorter inputs, which property of PE helps, Mamba, longer training.

    python beyond.py --scale desk --all fig2-short    # Fig. 2's questions at L = 16
    python beyond.py --scale desk --all clocks        # parts of the sinusoid, other encodings
    python beyond.py --scale desk --all mamba         # Mamba with one block and with two
    python beyond.py --scale desk --all fig2-end      # does PE only accelerate training?

Task and trial folders are those of reverse.py.
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import common
from common import UsageError, select, span
from delayed_add import ablate_encoding
from reverse import DESK_GRID, FIG13_ENCODINGS, Reverse, compare_vectors, model_grid
from suite.figures import (
    AREA,
    BOTH,
    BUDGET,
    K95,
    OVER_K,
    WITH_CONSTANT,
    WITH_CONTROLS,
    WITH_EDITS,
    Claim,
    Contrast,
    Figure,
    cross,
)
from suite.task import Flag
from variable_length import SMALL, SMALL_LSTM


# -- Mamba, a newer architecture
class Mamba(nn.Module):
    """Selective SSM block (Gu and Dao, 2023), no norm; D = 2H channels, N states."""

    def __init__(self, inputs, hidden, order=16, width=4):
        super().__init__()
        channels, rank = 2 * hidden, math.ceil(hidden / 16)
        self.widths = rank, order, order
        self.in_proj = nn.Linear(inputs, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels)
        self.x_proj = nn.Linear(channels, sum(self.widths), bias=False)
        self.dt_proj = nn.Linear(rank, channels)
        delta = torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_proj.bias = nn.Parameter(delta.expm1().log())  # the inverse of softplus
        self.A_log = nn.Parameter(torch.arange(1.0, order + 1).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        self.out_proj = nn.Linear(channels, hidden, bias=False)

    def forward(self, x, steps):
        first, stop = span(steps, len(x))
        u, gate = self.in_proj(x[:stop]).chunk(2, -1)  # (T, B, D)
        u = F.silu(self.convolve(u))
        delta, b, c = self.x_proj(u).to(u.dtype).split(self.widths, -1)
        delta = F.softplus(self.dt_proj(delta))  # (T, B, D)
        A = (-self.A_log.exp().T / math.log(2)).repeat(x.shape[1], 1, 1)  # (B, N, D)
        each = zip(delta[:, :, None], (delta * u)[:, :, None], b[..., None], c[..., None])
        h, outputs = torch.zeros_like(A), []
        for t, (d, added, write, read) in enumerate(each):  # (B, 1, D), ..., (B, N, 1)
            decay = (d * A).exp2()  # faster than exp
            h = torch.addcmul(decay * h, write, added)
            if t >= first:
                outputs.append((read * h).sum(1))
        y = (torch.stack(outputs) + self.D * u[first:]) * F.silu(gate[first:])  # (M, B, D)
        return self.out_proj(y if isinstance(steps, slice) else select(y, steps))

    def convolve(self, u):
        """Apply self.conv1d causally, faster on a CPU."""
        weight = self.conv1d.weight[:, 0].T  # (width, D)
        padded = F.pad(u, (0, 0, 0, 0, len(weight) - 1, 0))
        return self.conv1d.bias + sum(w * padded[k : k + len(u)] for k, w in enumerate(weight))


class MambaStack(nn.Module):
    """Stack Mamba blocks with pre-norm (RMSNorm) residual connections."""

    def __init__(self, inputs, hidden, blocks):
        super().__init__()
        self.in_proj = nn.Linear(inputs, hidden)
        self.blocks = nn.ModuleList(Mamba(hidden, hidden) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(blocks + 1))

    def forward(self, x, steps):
        x = self.in_proj(x)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x), slice(None))
        return self.norms[-1](select(x, steps))


def mamba(inputs, hidden, blocks=1):
    return Mamba(inputs, hidden) if blocks == 1 else MambaStack(inputs, hidden, blocks)


common.LAYERS["mamba"] = mamba


class Beyond(Reverse):
    name = "reverse"
    flags = (
        Flag("blocks", 1, "Mamba blocks (2+: norms and residuals)", int, at_least=1, below=100),
    )

    def __init__(self, args, config, folder):
        super().__init__(args, config, folder)
        if args.blocks == 1:
            del config["blocks"]  # as in reverse.py's config

    def check(self):
        if self.args.blocks > 1 and self.args.model != "mamba":
            raise UsageError(f"--blocks is for --model mamba, not {self.args.model}")
        super().check()

    def layer(self):
        if self.args.model == "mamba":
            return functools.partial(mamba, blocks=self.args.blocks)
        return super().layer()


MAMBA = dict(model="mamba", length=32, hidden=64, embed=64)
# Blocks, K, and the learning rate tuned without PE on seed 100
DEPTHS = (1, 16, 3e-2), (2, 16, 1e-2), (2, 256, 1e-2)
mamba_rows = []
for blocks, vocab, lr in DEPTHS:
    cell = dict(blocks=blocks, vocab=vocab, lr=lr, iterations=4000)
    mamba_rows += cross(**MAMBA, **cell, pe=WITH_CONSTANT)
one_block = dict(lr=2e-2, iterations=2000, pe=WITH_CONTROLS)
Beyond.figures["mamba-vocab"] = Figure(
    "Mamba with one block, L = 32",
    {"desk": cross(**MAMBA, **one_block, vocab=[16, 64, 256, 1024])},
)
Beyond.figures["mamba"] = Figure(
    "Mamba with one block and with two",
    {"desk": mamba_rows},
    contrasts=(
        Contrast(
            "K = 16: PE's gain with 1 block - with 2",
            [dict(pe="sin", vocab=16, blocks=1), dict(pe="none", vocab=16, blocks=2)],
            [dict(pe="none", vocab=16, blocks=1), dict(pe="sin", vocab=16, blocks=2)],
        ),
    ),
    tuned=("lr",),
    x=("pe", "blocks", "vocab"),
)

# -- Variants of Fig. 2; exploratory, since similar trials had been seen before
PAPER_SIZE = dict(length=64, hidden=512, embed=512, batch=512, lr=1e-3)
EARLY = dict(model="gru", pe=WITH_CONSTANT, vocab=64, iterations=20_000, seed=range(3))
Beyond.figures["fig2-short"] = Figure(
    "Reverse ordering, L = 16",
    {"desk": model_grid([16, 64, 256], [64, 256, 1024])},
    metrics=WITH_EDITS,
    summaries=(K95,),
)
Beyond.figures["fig2-short-twice"] = Figure(
    "Reverse ordering, L = 16, 2x training budget",
    {"desk": model_grid([16, 256], [64, 1024], s4d_iterations=20_000, iterations=60_000)},
    metrics=WITH_EDITS,
)
Beyond.figures["fig2-early"] = Figure(
    "Paper-size GRU, early in training",
    {"desk": cross(**PAPER_SIZE, **EARLY)},
    metrics=WITH_EDITS,
    picture=False,
)
FAMILY = "Longer training, and fig2 on new seeds"
Beyond.figures["fig2-more"] = Figure(
    "Reverse ordering, seeds 11 to 13",
    {"desk": model_grid(**DESK_GRID, seed=range(11, 14))},
    claims=tuple(Claim(FAMILY, AREA, dict(model=model)) for model in ("gru", "lstm", "s4d")),
    metrics=WITH_EDITS,
    summaries=OVER_K,
)

Beyond.figures["fig2-all"] = Figure(
    "Reversal, L = 32, 128 units, nine seeds",
    {"desk": model_grid(**DESK_GRID, seed=range(5, 14))},
    summaries=OVER_K,
)

# -- Which property of PE helps; and Fig. 14's encodings at a fixed length
Beyond.figures["clocks"] = ablate_encoding(
    "Reverse ordering", dict(model="gru", iterations=2000, **SMALL)
)
Beyond.figures["fig14-fixed"] = Figure(
    "Other encodings, fixed length",
    {"desk": cross(**SMALL_LSTM, pe=["dup", *FIG13_ENCODINGS])},
    contrasts=(*compare_vectors("dup"),),
    x="pe",
)


# -- Longer training. Grids and claims are preregistered: RESULTS.md, Protocols
class Cell(NamedTuple):
    vocab: int
    lr: float  # in fig2, like iterations
    iterations: int
    budgets: tuple  # training budgets, as multiples of `iterations`
    seeds: range
    tuned_lr: dict  # tuned learning rate per encoding (fig2-rates)


CELLS = {
    "gru": Cell(32, 3e-3, 30_000, (1, 4), range(11, 15), {"none": 6e-3, "sin": 6e-3}),
    "lstm": Cell(64, 3e-3, 30_000, (1, 4), range(11, 15), {"none": 3e-3, "sin": 6e-3}),
    "s4d": Cell(256, 1e-2, 10_000, (1, 4, 8), range(11, 17), {"none": 2e-2, "sin": 2e-2}),
}


def learning_rate_grid():
    rows = []
    for model, cell in CELLS.items():
        flags = dict(model=model, vocab=cell.vocab, length=32, iterations=cell.iterations)
        rates = [cell.lr / 2, cell.lr, cell.lr * 2]
        rows += cross(**flags, pe=BOTH, lr=rates, seed=100)
    return rows


def long_training_grid():
    rows = []
    for model, cell in CELLS.items():
        flags = dict(model=model, vocab=cell.vocab, length=32, seed=cell.seeds)
        iterations = [cell.iterations * times for times in cell.budgets]
        for pe in BOTH:
            rows += cross(**flags, pe=pe, lr=cell.tuned_lr[pe], iterations=iterations)
        flags |= dict(pe="constant", lr=cell.tuned_lr["none"], iterations=iterations[-1])
        rows += cross(**flags)
    return rows


def long_training_claims():
    for model, cell in CELLS.items():
        longest = dict(vocab=cell.vocab, iterations=cell.iterations * cell.budgets[-1])
        yield Claim(FAMILY, "token accuracy", dict(model=model) | longest)


def compare_budgets():
    """Compare the two longest budgets without PE."""
    for model, cell in CELLS.items():
        before, last = cell.budgets[-2:]
        none = dict(model=model, pe="none")
        yield Contrast(
            f"{model.upper()}, no PE: {last}x - {before}x budget (paired)",
            none | dict(iterations=last * cell.iterations),
            none | dict(iterations=before * cell.iterations),
            paired=True,
        )


LONG_GRU = dict(model="gru", vocab=32, length=32, iterations=120_000, seed=range(11, 15))
GRU_CONTROLS = cross(**LONG_GRU, pe=["none", "constant"], lr=3e-3)
Beyond.figures["fig2-rates"] = Figure(
    "Learning rates, seed 100",
    {"desk": learning_rate_grid()},
    picture=False,
    note="fig2-end uses the best learning rates; the control uses no PE's.",
)
Beyond.figures["fig2-end"] = Figure(
    "Reverse ordering, longer training",
    {"desk": long_training_grid()},
    summaries=(BUDGET,),
    contrasts=(*compare_budgets(),),
    claims=(*long_training_claims(),),
    tuned=("lr",),
    x="iterations",
)
Beyond.figures["fig2-end-lower"] = Figure(
    "GRU, 4x training budget, no PE and control at half the learning rate (post hoc)",
    {"desk": GRU_CONTROLS + cross(**LONG_GRU, pe="sin", lr=CELLS["gru"].tuned_lr["sin"])},
    tuned=("lr",),
    picture=False,
)


# -- Longer training, with learning rates tuned for it
def long_learning_rate_grid():
    """Return learning-rate grids at 4x (LSTM) and 16x (S4D) budget on a separate seed."""
    lstm = dict(model="lstm", vocab=64, length=32, iterations=120_000, seed=100)
    s4d = dict(model="s4d", vocab=256, length=32, iterations=160_000, seed=100)
    return (
        cross(**lstm, pe="none", lr=[0.75e-3, 1.5e-3, 3e-3])
        + cross(**lstm, pe="sin", lr=[1.5e-3, 3e-3, 6e-3])
        + cross(**s4d, pe=BOTH, lr=[1e-2, 2e-2])
    )


Beyond.figures["long-equal"] = Figure(
    "GRU, 4x training budget, equal learning rates",
    {"desk": GRU_CONTROLS + cross(**LONG_GRU, pe="sin", lr=3e-3)},
    picture=False,
)
Beyond.figures["long-rates"] = Figure(
    "Learning rates for longer training, seed 100",
    {"desk": long_learning_rate_grid()},
    picture=False,
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Beyond))
