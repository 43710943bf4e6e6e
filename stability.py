"""Gradient stability (Fig. 5): does what is read before a token's retrieval turn the gradient?

    python stability.py --model lstm --pe sin --vocab 1024 --seed 0  # dual_frequency.py's trial
    python stability.py --all fig5 --train                           # trained where need be

    A   7 3 1 4 _ _ _ _    Two sequences share the target (7); their disturbants are all
    B   7 2 2 5 _ _ _ _    Frequent or all Rare. How alike are the Jacobians from the state
                      ^    after the target to the output at the step that has to answer it
                           (^)? 1: the same; 0: nothing in common.

All snapshots are evaluated, and stability.json is written beside the trial's
result.json. Letters: P pairs, S sequences, T steps up to the answer, D outputs, H
state, K vocabulary, G gates' inputs.
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
    FIG3_FRESH_SEEDS,
    FREQUENCIES,
    DualFrequency,
)
from reverse import FAMILY
from suite.figures import Claim, Figure, name_of
from suite.rnn_kernels import recurrence
from suite.task import Flag


# -- Pairs of sequences, and how alike their Jacobians are
def draw_pairs(seed, vocab, length, target, count, device="cpu"):
    """-> A and B, (4 count, T) each: `count` pairs of each condition in turn, from the seed."""
    half = vocab // 2  # from here on integers are Rare
    pairs = []
    for condition, name in enumerate(CONDITIONS):
        k = common.key(seed, common.ANALYSIS, condition, device=device)
        of_target, of_disturbants = map(
            FREQUENCIES.index, name.split("/")
        )  # 0: Frequent, 1: Rare
        rows = common.uniform_integers(k, (count, 2, length), half)
        rows += of_disturbants * half
        rows[:, :, target - 1] += (of_target - of_disturbants) * half
        # Up to the target they are the same, so that they share the state (section 4.3)
        rows[:, 1, :target] = rows[:, 0, :target]
        pairs.append(F.pad(rows, (0, length + 1 - target), value=vocab))
    return torch.cat(pairs).unbind(1)


@torch.no_grad()
def stability(model, a, b, target, at_once=64):
    """(P,): sum_i w_i cos(J_i^A, J_i^B), with w_i in proportion to |J_i^A||J_i^B|.

    A and B are rows of tokens, (P, T); i is an output. At H = 512 the Jacobians of 64
    pairs need 1 GiB.
    """
    similarity = recurrent_similarity
    if isinstance(model.layer, common.S4D):
        similarity = s4d_similarity
    # What the layer reads is table[token] + by_step[step]: (K+1, G), (T, G)
    table, by_step = fast.input_products(model, model.embedding.weight, a.shape[1])
    found = []
    for part in zip(a.split(at_once), b.split(at_once)):
        rows = torch.cat(part)  # (S, T), first all A, then all B
        inputs = table[rows.T] + by_step[:, None]  # (T, S, G)
        found.append(similarity(model.layer, inputs, target))
    return torch.cat(found)


def weighted_cosine(inner):
    """(P,) from inner(m, n) = <J_i^m, J_i^n>, (P, D), where 0 is A and 1 is B."""
    ab, aa, bb = inner(0, 1).double(), inner(0, 0).double(), inner(1, 1).double()
    total = (aa * bb).sqrt().sum(-1)  # of the weights, before they are divided by it
    smallest = torch.finfo(torch.double).tiny
    return (ab.sum(-1) / total.clamp(min=smallest)).clamp(-1, 1)


# -- GRU and LSTM: a product of Jacobians, from the answering step back to the target
def recurrent_similarity(layer, inputs, target):
    """(P,) of a GRU or an LSTM, whose gates' inputs are (T, S, G)."""
    cell, weight, bias = recurrence(layer)
    sequences, H = inputs.shape[1], layer.hidden_size
    parts = 2 if isinstance(layer, common.LSTM) else 1  # of the state: c and h, or h
    state = [inputs.new_zeros(sequences, H)] * parts
    slopes = []
    for x in inputs:
        product = F.linear(state[-1], weight)
        state, of_step = differentiate(cell, x, product, bias, state)
        slopes.append(of_step)
    # J = (d h_out / d z_out) (d z_out / d z_out-1) ... (d z_t+1 / d z_t), from the left
    identity = torch.eye(H).to(inputs).repeat(sequences, 1, 1)
    J = [torch.zeros_like(identity), identity][-parts:]  # by c and h, (S, D, H) each
    for t in reversed(range(target, len(inputs))):
        J = step_back(J, slopes[t], weight)
        if (len(inputs) - t) % 8 == 0 or t == target:  # at the end too, for products of J
            J = rescale(J)
    halves = [part.chunk(2) for part in J]  # A's and B's, (P, D, H)

    def inner(m, n):
        return sum((half[m] * half[n]).sum(-1) for half in halves)

    return weighted_cosine(inner)


def differentiate(cell, x, product, bias, state):
    """-> the new state, and the slopes of each of its parts, by product and by the old c or h.

    Given the product, a step is elementwise: the gradient of a sum has all slopes.
    """
    with torch.enable_grad():
        inputs = [part.detach().requires_grad_() for part in (product, state[0])]
        new = cell.compute(*cell.gates(x, inputs[0], bias), inputs[1])[-len(state) :]
        slopes = [torch.autograd.grad(part.sum(), inputs, retain_graph=True) for part in new]
    return [part.detach() for part in new], slopes


def step_back(J, slopes, weight):
    """d h_out / d (new state) -> d h_out / d (old state)"""
    back = [torch.zeros_like(part) for part in J]
    for part, (by_product, by_state) in zip(J, slopes):
        gates = len(weight) // part.shape[2]
        M = torch.zeros_like(part)  # (S, H, H): the sum over gates of diag(slope) W
        for slope, W in zip(by_product.chunk(gates, 1), weight.chunk(gates)):
            M.addcmul_(slope[:, :, None], W)
        back[-1].baddbmm_(part, M)  # h alone meets the weight
        back[0].addcmul_(part, by_state[:, None])
    return back


def rescale(J):
    """Each sequence's J divided by its largest entry, or in 127 steps it would underflow.

    Factors cancel in the cosine.
    """
    largest = torch.stack([part.flatten(1).abs().amax(1) for part in J]).amax(0)  # (S,)
    largest = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return [part / largest[:, None, None] for part in J]


# -- S4D: the state is linear in time, so that only the answering step differs between sequences
def s4d_similarity(layer, inputs, target):
    """As recurrent_similarity. J[i, (h, n)] = M[i, h] w[h, n]; all sequences have the same w.

    M[i, h] = (p_i W[i, h] + q_i V[i, h]) slope_h, where y is the layer's sum, slope the
    GELU's, and the output h_i = a_i sigmoid(b_i) with a = W gelu(y) and b = V gelu(y).
    """
    kernel = layer.kernel(len(inputs)).flip(1)  # (H, T)
    y = sum(k * x for k, x in zip(kernel.T, inputs))
    # (S, H) at the answering step; in double precision, or slopes would underflow
    y = (y + layer.D * inputs[-1]).double()
    weight, bias = layer.mix.weight.double(), layer.mix.bias.double()
    W, V = weight.chunk(2)  # (D, H)
    mixed = F.linear(F.gelu(y), weight, bias)  # a and b
    slope = slopes_of(F.gelu, y).chunk(2)  # A's and B's
    p, q = (part.chunk(2) for part in slopes_of(F.glu, mixed).chunk(2, 1))  # (P, D) each
    w = squared_output_weights(layer, len(inputs) - target)

    def inner(m, n):
        v = slope[m] * slope[n] * w  # (P, H)
        ww, wv, vv = v @ (W * W).T, v @ (W * V).T, v @ (V * V).T  # (P, D)
        return p[m] * p[n] * ww + (p[m] * q[n] + q[m] * p[n]) * wv + q[m] * q[n] * vv

    return weighted_cosine(inner)


def slopes_of(function, x):
    """The derivative of a function whose outputs have an input each, or two as F.glu."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]


def squared_output_weights(layer, steps):
    """(H,) |w_h|^2 after so many steps, up to a factor that all channels share.

    The input weight (exp(dt A) - 1) / A is inside the state, as in Gu et al. (2022), not in w.
    """
    C = torch.view_as_complex(layer.C)
    w = C * (layer.discretise()[0] * steps).exp()  # (H, N/2)
    return w.abs().double().square().sum(1)


# -- The trials
class Stability(DualFrequency):
    """Has a folder and flags of a trial of dual_frequency.py, `trained`, which it evaluates."""

    name, file = "stability", "stability.json"
    flags = (
        Flag("model", "lstm", "the layer", choices=("gru", "lstm", "s4d")),
        Flag(
            "pairs", 1024, "pairs, a quarter per condition", int, least=4, affects_result=False
        ),
        Flag("target", None, "its step (1; s4d: 23 of 64)", int, least=1, affects_result=False),
        Flag("train", False, "train the trial first where need be", bool, affects_result=False),
    )

    @classmethod
    def defaults(cls, args):
        target = 1
        if args.model == "s4d":
            target = max(1, round(23 * args.length / 64))
        return super().defaults(args) | dict(target=target)

    def __init__(self, args, config, folder):
        # --overwrite makes the evaluation anew
        self.trained = cli.make_task(DualFrequency, args, overwrite=False, evaluate=False)
        # No part of the folder's name, but compared
        config |= dict(pairs=args.pairs, target=args.target)
        super().__init__(args, config, self.trained.folder)

    def check(self):
        super().check()
        a = self.args
        if a.pairs % len(CONDITIONS):
            raise UsageError(f"--pairs {a.pairs} is not a multiple of 4, one part a condition")
        if not common.ENCODINGS[a.pe].fast:
            raise UsageError(f"--pe {a.pe} has a `join` that is not known here")
        if not 0 < a.snapshot_every <= a.iterations:
            raise UsageError(f"--snapshot-every {a.snapshot_every} leaves no snapshot")
        if a.target > self.length:
            where = f"outside the input: choose from 1 to {self.length}"
            raise UsageError(f"--target {a.target} is {where}")

    def run(self, argv, stop):
        """Show stability.json; where there is none, train if need be, and evaluate."""
        path = self.folder / self.file
        if not files.is_finished(self):
            if not self.args.train and not files.is_finished(self.trained):
                raise UsageError(f"{self.folder} is not trained to its end: --train does that")
            training.train(self.trained, argv, stop)
            with files.lock(self.folder):
                files.write_json(path, self.measure(argv))
        with files.naming(path):
            for condition, values in files.read_json(path)["by_condition"].items():
                print(f"{condition}: {list(values.values())[-1]:.4f} at the last snapshot")
        return 0

    def measure(self, argv):
        """What stability.json holds."""
        args, device = self.args, machine.choose_device(self.args)
        paths = self.folder.glob("snapshots/*.pt")
        snapshots = {int(path.stem): path for path in paths if path.stem.isdigit()}
        if not snapshots:
            makes = "dual_frequency.py --overwrite makes them"
            raise UsageError(f"{self.folder} has no snapshots: {makes}")
        engine = machine.Engine("torch", deterministic=args.deterministic)
        machine.prepare(engine, device, args.hidden)  # training in this process has set its own
        started = time.perf_counter()
        model = self.model().to(device)
        count = args.pairs // len(CONDITIONS)
        a, b = draw_pairs(self.seed, self.vocab, self.length, args.target, count, device)
        found = {condition: {} for condition in CONDITIONS}
        for iteration, path in sorted(snapshots.items()):
            snapshot = files.load(path, device)
            with files.naming(path):
                what = files.compare_flags(snapshot["config"], self.trained.config)
                files.require_same(path, what)
                model.load_state_dict(snapshot["model"])
            of_pairs = stability(model, a, b, args.target)
            means = of_pairs.view(len(CONDITIONS), -1).mean(1).tolist()
            for condition, mean in zip(CONDITIONS, means):
                found[condition][iteration] = mean
            words = " ".join(f"{mean:.4f}" for mean in means)
            print(f"snapshot {iteration}: {words}")
        return {
            "by_condition": found,
            "task": self.name,
            "seconds": time.perf_counter() - started,
            "config": self.config,
        } | machine.provenance(argv, engine, device)


# -- Fig. 5
def over_snapshots(result, conditions):
    """The mean stability of these conditions, from the first snapshot to the last."""
    by_condition = result.metrics["by_condition"]
    return np.mean([list(by_condition[c].values()) for c in conditions], axis=0)


def among_rare(result):
    return over_snapshots(result, AMONG_RARE)[-1]


def among_frequent(result):
    return over_snapshots(result, AMONG_FREQUENT)[-1]


def gap(result):
    return among_frequent(result) - among_rare(result)


def gap_at_first(result):
    """The gap at the first snapshot minus its mean over all snapshots."""
    gaps = over_snapshots(result, AMONG_FREQUENT) - over_snapshots(result, AMONG_RARE)
    return gaps[0] - gaps.mean()


def by_iteration(result):
    for condition, values in result.metrics["by_condition"].items():
        panel = f"{name_of(result.flags['model'])}, {condition}"
        points = {int(iteration): value for iteration, value in values.items()}
        yield panel, result.flags["pe"], points


METRICS = {
    "stability among Rare disturbants": among_rare,
    "stability among Frequent disturbants": among_frequent,
    "stability: Frequent - Rare disturbants": gap,
}
OPTIONS = dict(
    curves=by_iteration,
    x="iteration of the snapshot",
    y="stability",
)
# Desk's S4D was evaluated with fewer pairs
DESK = [row | dict(pairs=256) if row["model"] == "s4d" else row for row in FIG3["desk"]]
Stability.figures["fig5"] = Figure(
    "Gradient stability (target/disturbants)",
    FIG3 | {"desk": DESK},
    METRICS | {"this gap: first snapshot - mean of all": gap_at_first},
    **OPTIONS,
)
Stability.figures["fig5-fresh"] = Figure(
    "Gradient stability, seeds 5 to 10",
    FIG3_FRESH_SEEDS,
    METRICS,
    claims=(Claim(FAMILY, "stability among Rare disturbants", dict(model="lstm", vocab=256)),),
    **OPTIONS,
)

if __name__ == "__main__":
    raise SystemExit(cli.main(Stability))
