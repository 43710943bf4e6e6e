"""Gradient stability (Fig. 5): does the gradient at a token depend on the other tokens?

    python stability.py --model lstm --pe sin --vocab 1024 --seed 0 --train  # one trial
    python stability.py --all fig5 --train                                   # all trials

    A   7 3 1 4 _ _ _ _    Sequences A and B are equal up to the target (here 7); the tokens
    B   7 2 2 5 _ _ _ _    after it are drawn independently. The target is output at step ^.
                      ^

J is the Jacobian of the layer's output at ^ with respect to the layer's state just after it
reads the target. Its rows are a_i for A and b_i for B. A pair's stability is the mean cosine
similarity of a_i and b_i, weighted by |a_i| |b_i|: sum_i <a_i, b_i> / sum_i |a_i| |b_i|. It is
1 if all a_i and b_i align, 0 if they are orthogonal, and -1 if they are opposite. It is then
averaged over pairs, for each combination of Frequent or Rare target and disturbants (the other
tokens). In training, each Rare token is drawn one seventh as often as a Frequent one.

This script evaluates each weight snapshot of a trial that dual_frequency.py has trained with
the same flags (--train trains it first; trials of other scripts cannot be used).
"""

from suite import cli, fast, files, machine, training  # isort: skip # before PyTorch

import time

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import UsageError
from dual_frequency import (
    AMONG_FREQUENT,
    AMONG_RARE,
    CONDITIONS,
    FIG3,
    FIG3_NEW_SEEDS,
    DualFrequency,
)
from reverse import FIG2_FAMILY
from suite.figures import Claim, Figure
from suite.rnn_kernels import recurrent_parameters
from suite.task import Flag


# -- Sequence pairs and the similarity of their Jacobians. In shapes, P is the number of pairs,
# S the number of sequences, and T the number of steps up to the output step ^. K is the
# vocabulary size, H the hidden size, and D = H the number of rows of J. G is the number of
# layer inputs per step: all gate pre-activations or, in S4D, H channels
def draw_pairs(seed, vocab, length, target_step, count, device="cpu"):
    """Draw A and B, (4 count, T) each, in CONDITIONS order; target_step counts from 1."""
    half = vocab // 2  # the first Rare integer
    pairs = []
    for index, (rare_target, rare_disturbants) in enumerate(CONDITIONS.values()):
        rng_key = common.derive_key(seed, common.PAIR_STREAM, index, device=device)
        rare = torch.full((length,), rare_disturbants, device=device)
        rare[target_step - 1] = rare_target
        sequences = common.uniform_integers(rng_key, (count, 2, length), half) + half * rare
        # A and B are equal up to the target, so the state after it is the same (section 4.3)
        sequences[:, 1, :target_step] = sequences[:, 0, :target_step]
        pairs.append(F.pad(sequences, (0, length + 1 - target_step), value=vocab))
    return torch.cat(pairs).unbind(1)


@torch.no_grad()
def stability(model, a, b, target_step, chunk_size=64):
    """Return the weighted cosine similarity (P,) of the Jacobians of a and b, tokens (P, T).

    At H = 512, a chunk of 64 pairs needs 1 GiB.
    """
    s4d = isinstance(model.layer, common.S4D)
    similarity = s4d_stability if s4d else recurrent_stability
    # The layer's input is x_token[token] + x_step[step]: (K+1, G), (T, G)
    x_token, x_step = fast.project_inputs(model, model.embedding.weight, a.shape[1])
    similarities = []
    for chunk in zip(a.split(chunk_size), b.split(chunk_size)):
        sequences = torch.cat(chunk)  # (S, T), first all A, then all B
        inputs = x_token[sequences.T] + x_step[:, None]  # (T, S, G)
        similarities.append(similarity(model.layer, inputs, target_step))
    return torch.cat(similarities)


def weighted_cosine(inner_products):
    """Return the weighted cosine similarity (P,); it is 0 if a Jacobian is 0.

    inner_products(i, j) returns those of matching Jacobian rows, (P, D), of sequences i and j
    (0: A, 1: B).
    """
    ab, aa, bb = (inner_products(i, j).double() for i, j in ((0, 1), (0, 0), (1, 1)))
    norms = (aa * bb).sqrt().sum(-1)  # sum_i |a_i| |b_i|
    return (ab.sum(-1) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(-1, 1)


# -- GRU and LSTM: product of step Jacobians, from the output step to the target
def recurrent_stability(layer, inputs, target_step):
    """Return GRU or LSTM stability (P,) from gate inputs (T, S, G)."""
    cell, weight, bias = recurrent_parameters(layer)
    n_sequences, H = inputs.shape[1], layer.hidden_size
    n_parts = 2 if isinstance(layer, common.LSTM) else 1  # of the state: (c, h), or (h,)
    state = inputs.new_zeros(n_parts, n_sequences, H)
    # For each step and each part of the new state, its derivatives w.r.t. W h and state[0]
    grads = []
    for x in inputs:
        Wh = F.linear(state[-1], weight)
        # If W h is held fixed, the step is elementwise. The gradient of the sum of all elements
        # then contains the derivative of each
        with torch.enable_grad():
            leaves = Wh.requires_grad_(), state[0].requires_grad_()
            new = cell.update(*cell.preactivations(x, Wh, bias), leaves[1])[-n_parts:]
            grads.append([torch.autograd.grad(z.sum(), leaves, retain_graph=True) for z in new])
        state = [part.detach() for part in new]
    # J = (d h_T / d s_T) (d s_T / d s_{T-1}) ... (d s_{t+1} / d s_t), with the state s and the
    # target's step t
    J = inputs.new_zeros(n_parts, n_sequences, H, H)  # w.r.t. each part, (n_parts, S, D, H)
    J[-1] = torch.eye(H)
    for steps, step_grads in enumerate(reversed(grads[target_step:]), 1):
        J = chain_step(J, step_grads, weight)
        if steps % 8 == 0:
            J = rescale(J)
    J_ab = rescale(J).chunk(2, 1)  # A's and B's, (n_parts, P, D, H)

    def inner_products(i, j):
        return (J_ab[i] * J_ab[j]).sum(-1).sum(0)

    return weighted_cosine(inner_products)


def chain_step(J, grads, weight):
    """Given J w.r.t. a step's new state, return J w.r.t. its old state, by the chain rule."""
    J_old, H = torch.zeros_like(J), J.shape[-1]
    for part, (d_Wh, d_state) in zip(J, grads):
        M = torch.zeros_like(part)  # (S, H, H): the sum over gates of diag(grad) W
        for grad, W in zip(d_Wh.split(H, 1), weight.split(H)):
            M.addcmul_(grad[:, :, None], W)
        J_old[-1].baddbmm_(part, M)  # only h is multiplied by W
        J_old[0].addcmul_(part, d_state[:, None])
    return J_old


def rescale(J):
    """Divide each sequence's J by its largest absolute entry, which keeps the cosine.

    Without this, a product of up to 127 step Jacobians (L = 64) would underflow.
    """
    largest = J.abs().amax((0, 2, 3))[:, None, None]  # (S, 1, 1)
    return J / largest.clamp(min=torch.finfo(J.dtype).tiny)


# -- S4D: a linear recurrence, so Jacobians differ only in the output step's nonlinearity
def s4d_stability(layer, inputs, target_step):
    """Return S4D stability (P,), from J[i, (h, n)] = M[i, h] w[h, n].

    w, which all sequences share, is proportional to the derivative of y_h w.r.t. state n. With
    y as the GELU's input, [value, gate] is mix(gelu(y)), and the output is value *
    sigmoid(gate). The derivatives of the output w.r.t. value and gate are p and q. The halves
    of mix's weight are W (for value) and V (for gate). Therefore,
    M[i, h] = (p_i W[i, h] + q_i V[i, h]) gelu'(y_h).
    """
    kernel = layer.kernel(len(inputs)).flip(1)  # (H, T)
    y = sum(k * x for k, x in zip(kernel.T, inputs))
    # (S, H) at the output step; float32 derivatives would underflow
    y = (y + layer.D * inputs[-1]).double()
    weight, bias = layer.mix.weight.double(), layer.mix.bias.double()
    W, V = weight.chunk(2)  # (D, H)
    mixed = F.linear(F.gelu(y), weight, bias)  # value and gate
    grad = elementwise_grad(F.gelu, y).chunk(2)  # A's and B's
    p, q = (half.chunk(2) for half in elementwise_grad(F.glu, mixed).chunk(2, 1))  # (P, D) each
    # w = C exp((T - target_step) dt A), up to a constant factor, which cancels. As in Gu et al.
    # (2022), the input is multiplied by (exp(dt A) - 1) / A before it enters the state.
    # S4D.discretise moves this factor into C, so `layer.C` is used here
    decay = (layer.discretise()[0] * (len(inputs) - target_step)).exp()
    w = torch.view_as_complex(layer.C) * decay  # (H, N/2)
    w_norm2 = w.abs().double().square().sum(1)  # |w_h|^2, (H,)

    def inner_products(i, j):
        v = grad[i] * grad[j] * w_norm2  # (P, H)
        WW, WV, VV = v @ (W * W).T, v @ (W * V).T, v @ (V * V).T  # (P, D)
        return p[i] * p[j] * WW + (p[i] * q[j] + q[i] * p[j]) * WV + q[i] * q[j] * VV

    return weighted_cosine(inner_products)


def elementwise_grad(function, x):
    """Return the derivative of a function whose inputs each affect one output only."""
    return torch.func.grad(lambda x: function(x).sum())(x)


# -- The trials
class Stability(DualFrequency):
    """Evaluate a dual_frequency.py trial, `source_task`, whose folder and flags it shares."""

    name, result_file = "stability", "stability.json"
    extra_flags = [
        Flag("model", "lstm", "recurrent layer", choices=("gru", "lstm", "s4d")),
        Flag(
            "pairs",
            1024,
            "sequence pairs; a quarter for each combination of Frequent or Rare target and "
            "disturbants",
            at_least=4,
            identifies_trial=False,
        ),
        Flag(
            "target",
            None,
            "time step of the target (default: 1; s4d: 23/64 of L, as in the paper)",
            int,
            at_least=1,
            identifies_trial=False,
        ),
        Flag("train", False, "train the model first if needed", identifies_trial=False),
        Flag(
            "overwrite",
            False,
            "recompute stability.json; the trained model is kept",
            identifies_trial=False,
        ),
    ]
    unused_flags = ["evaluate"]

    @classmethod
    def defaults(cls, args):
        s4d_target = max(1, round(23 * args.length / 64))
        return super().defaults(args) | dict(target=s4d_target if args.model == "s4d" else 1)

    def __init__(self, args, config, folder):
        # --overwrite redoes the evaluation, not the training
        self.source_task = cli.make_task(DualFrequency, vars(args) | dict(overwrite=False))
        # Recorded in stability.json and checked, but not part of the folder's name
        config |= dict(pairs=args.pairs, target=args.target)
        super().__init__(args, config, self.source_task.folder)

    def check(self):
        super().check()
        a = self.args
        if a.pairs % len(CONDITIONS):
            raise UsageError(f"--pairs {a.pairs} must be a multiple of 4 (4 conditions)")
        if not common.ENCODINGS[a.pe].supports_fast_engine:
            raise UsageError(f"stability.py does not support --pe {a.pe}")
        if not 0 < a.snapshot_every <= a.iterations:
            bounds = f"must be from 1 to --iterations {a.iterations}"
            raise UsageError(f"--snapshot-every {a.snapshot_every} {bounds}")
        if a.target > self.length:
            raise UsageError(f"--target {a.target} is outside the input, 1 to {self.length}")

    def load_inputs(self):
        if not (self.args.train or files.can_skip(self) or files.can_skip(self.source_task)):
            raise UsageError(f"{self.folder}: training is unfinished; add --train")

    def run(self):
        """Train and evaluate unless done, and print the stability at the last snapshot."""
        path = self.folder / self.result_file
        if not files.can_skip(self):
            if not files.can_skip(self.source_task):
                training.train(self.source_task)
            with files.lock(self.folder):
                files.write_json(path, self.evaluate_snapshots())
        print(f"stability at the last snapshot, by target/disturbants (all snapshots: {path}):")
        with files.prefix_errors(path):
            for condition, values in files.read_json(path)["by_condition"].items():
                print(f"{condition}: {list(values.values())[-1]:.4f}")
        return 0

    def evaluate_snapshots(self):
        """Return the content of stability.json."""
        args, device = self.args, machine.choose_device(self.args)
        paths = self.folder.glob("snapshots/*.pt")
        snapshots = {int(path.stem): path for path in paths if path.stem.isdigit()}
        if not snapshots:
            raise UsageError(
                f"{self.folder} has no snapshots: use dual_frequency.py --overwrite"
            )
        engine = machine.Engine("torch", deterministic=args.deterministic)
        machine.set_torch_options(engine, device, args.hidden)  # training may have set others
        started = time.perf_counter()
        model = self.make_model().to(device)
        count = args.pairs // len(CONDITIONS)
        a, b = draw_pairs(self.seed, self.vocab, self.length, args.target, count, device)
        by_condition = {condition: {} for condition in CONDITIONS}
        print("stability by target/disturbants:")
        print("iteration", *CONDITIONS)
        for iteration, path in sorted(snapshots.items()):
            snapshot = files.load(path, device)
            with files.prefix_errors(path):
                files.require_same_flags(snapshot["config"], self.source_task.config)
                model.load_state_dict(snapshot["model"])
            per_pair = stability(model, a, b, args.target)
            means = per_pair.view(len(CONDITIONS), -1).mean(1).tolist()
            for condition, mean in zip(CONDITIONS, means):
                by_condition[condition][iteration] = mean
            columns = [f"{mean:{len(name)}.4f}" for name, mean in zip(CONDITIONS, means)]
            print(f"{iteration:9}", *columns)
        return {
            "by_condition": by_condition,
            "task": self.name,
            "seconds": time.perf_counter() - started,
            "config": self.config,
        } | machine.provenance(engine, device)


# -- Fig. 5
def mean_stability(result, conditions):
    """Return stability averaged over `conditions`, one value per snapshot."""
    by_condition = result.metrics["by_condition"]
    return np.mean([list(by_condition[c].values()) for c in conditions], axis=0)


def stability_gaps(result):
    """Return the gap in stability, Frequent - Rare disturbants, at each snapshot."""
    return mean_stability(result, AMONG_FREQUENT) - mean_stability(result, AMONG_RARE)


def initial_gap_excess(result):
    """Return the gap at the first snapshot minus its mean over all snapshots."""
    gaps = stability_gaps(result)
    return gaps[0] - gaps.mean()


def snapshot_curves(result):
    for condition, values in result.metrics["by_condition"].items():
        yield condition.title(), {int(iteration): value for iteration, value in values.items()}


METRICS = {
    "stability among Rare disturbants": lambda x: mean_stability(x, AMONG_RARE)[-1],
    "stability among Frequent disturbants": lambda x: mean_stability(x, AMONG_FREQUENT)[-1],
    "stability: Frequent - Rare disturbants": lambda x: stability_gaps(x)[-1],
}
FIG5_OPTIONS = dict(
    curves=snapshot_curves,
    x="iteration of the snapshot",
    y="stability",
)
# At desk scale, S4D has fewer pairs
FIG5_DESK = [x | dict(pairs=256) if x["model"] == "s4d" else x for x in FIG3["desk"]]
Stability.figures["fig5"] = Figure(
    "Gradient stability by frequency of target/disturbants",
    FIG3 | {"desk": FIG5_DESK},
    METRICS | {"Frequent - Rare, first snapshot minus mean of snapshots": initial_gap_excess},
    **FIG5_OPTIONS,
)
Stability.figures["fig5-new-seeds"] = Figure(
    "Gradient stability, new seeds (5 to 10)",
    FIG3_NEW_SEEDS,
    METRICS,
    claims=(
        Claim(FIG2_FAMILY, "stability among Rare disturbants", dict(model="lstm", vocab=256)),
    ),
    **FIG5_OPTIONS,
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Stability))
