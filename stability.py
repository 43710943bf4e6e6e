"""Gradient stability (Fig. 5): does what is read between a token and its retrieval turn the gradient?

    python stability.py --model lstm --pe sin --vocab 1024 --seed 0    # all snapshots of one trial
    python stability.py --trial runs/reverse/lstm-sin-K1024-L64-dual-freq/seed0    # the same
    python stability.py --scale quick --all fig5 --train               # a reduced Fig. 5 on a CPU
    python stability.py --report                                       # tables, figure, claims so far

    A   7 3 1 4 _ _ _ _    two sequences share the target (7); their disturbants are all Frequent or all Rare.
    B   7 2 2 5 _ _ _ _    How alike are the Jacobians from the state after the target to the output at the
                      ^    step that has to answer it (^)? 1: the same; 0: nothing in common

The trials are those of reverse.py --dual-freq, found by its flags; --train trains what is missing first. The
numbers go to stability.json beside result.json; snapshots that have theirs are skipped, without --overwrite.

No autograd. GRU and LSTM: the Jacobian of one time step is a sum of row-scaled blocks of the recurrent
weights; one sweep from the answer back to the target multiplies these up, for many sequences at once. S4D:
the state reaches the output through one sum per channel: inner products of Jacobian rows have a closed form.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
import report
import reverse
import trial
from common import Refused
from report import NONE, SIN, Claim, Figure, above, higher
from reverse import AMONG_RARE, CONDITIONS, KINDS

# ------------------------------------------------------------------------------------------------------------
# Pairs of sequences. P pairs, S sequences, T steps up to the answer, D outputs, H state, t target (1-based)
# ------------------------------------------------------------------------------------------------------------


def draw_pairs(seed, vocab, length, target, count, device="cpu"):
    """(4, count, 2, T): A and B of `count` pairs of each condition, from the seed alone.

    They share all that is read up to the target, and so the state there (section 4.3); only S4D's target has
    anything before it. They end with the command that asks for the target, step 2L + 1 - t.
    """
    pairs = []
    for condition, name in enumerate(CONDITIONS):
        k = common.key(seed, common.ANALYSIS, condition, device=device)
        rows = common.uniform_integers(k, (count, 2, length), vocab // 2)
        kinds = torch.full((length,), KINDS.index(name.split("/")[1]), device=device)
        kinds[target - 1] = KINDS.index(name.split("/")[0])
        rows += kinds * (vocab // 2)
        rows[:, 1, :target] = rows[:, 0, :target]
        pairs.append(F.pad(rows, (0, length + 1 - target), value=vocab))
    return torch.stack(pairs)


def default_target(model, length):
    """GRU, LSTM: the first token; S4D: where vanilla S4D is worst among Rare disturbants, 23 of 64."""
    return max(1, round(23 * length / 64)) if model == "s4d" else 1


# ------------------------------------------------------------------------------------------------------------
# The statistic
# ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def stability(model, a, b, target, memory=4.0):
    """(P,): sum_i w_i cos(J_i^A, J_i^B) of token rows a and b (P, T), w_i in proportion to |J_i^A||J_i^B|.

    So many pairs are taken at a time that they need `memory` GiB at most, beside the model.
    """
    layer, H = model.layer, model.readout.in_features
    if isinstance(layer, common.S4D):
        similarity, floats = s4d_similarity, 100 * H
    else:
        similarity = recurrent_similarity
        floats = 2 * (6 * H**2 + 14 * H * a.shape[1])  # of two sequences: matrices, and vectors of each step
    pairs = max(1, int(memory * 2**30 / (floats * model.readout.weight.element_size())))
    by_integer, by_step = model.input_products(model.embedding.weight, a.shape[1])  # (K+1, G), (T, G)
    read = lambda rows, step: by_integer[rows[:, step]] + by_step[step]
    chunks = [similarity(layer, read, torch.cat(ab), target) for ab in zip(a.split(pairs), b.split(pairs))]
    return torch.cat(chunks)


def weighted_cosine(ab, aa, bb):
    """(P,) from the inner products <J_i^A, J_i^B>, <J_i^A, J_i^A>, <J_i^B, J_i^B>, each (P, D).

    The weights cancel the cosines' denominators, so that a zero row counts for nothing, as it should.
    """
    ab, weights = ab.double().sum(-1), (aa.double() * bb.double()).sqrt().sum(-1)
    return (ab / weights.clamp(min=torch.finfo(torch.double).tiny)).clamp(-1, 1)


# ------------------------------------------------------------------------------------------------------------
# GRU and LSTM: J = (d h_out / d z_out) (d z_out / d z_out-1) ... (d z_t+1 / d z_t), from the left
# ------------------------------------------------------------------------------------------------------------

RESCALED = 8  # time steps between rescalings: few enough for float32, enough to cost nothing


def recurrent_similarity(layer, read, rows, target):
    sweep = lstm_jacobian if isinstance(layer, torch.nn.LSTM) else gru_jacobian
    parts = sweep(layer, read, rows, target)
    rescale(*parts)
    parts = [part.chunk(2) for part in parts]  # A's and B's, (P, D, H)
    inner = [sum((part[i] * part[j]).sum(-1) for part in parts) for i, j in ((0, 1), (0, 0), (1, 1))]
    return weighted_cosine(*inner)


def through_gates(slopes, weights, out):
    """(S, H, H): the sum over gates of diag(slope) W, each slope (S, H) and each W (H, H)."""
    torch.mul(slopes[0][:, :, None], weights[0], out=out)
    for slope, W in zip(slopes[1:], weights[1:]):
        out.addcmul_(slope[:, :, None], W)
    return out


def rescale(*parts):
    """Divide a sequence's whole Jacobian by its largest element, in place: that cancels in the statistic.

    Through 127 steps of an untrained LSTM it would fall below the smallest float32.
    """
    largest = torch.stack([part.flatten(1).abs().amax(1) for part in parts]).amax(0)[:, None, None]
    for part in parts:
        part /= largest.clamp(min=torch.finfo(part.dtype).tiny)


def gru_jacobian(layer, read, rows, target):
    """-> [d h_out / d h_t], (S, D, H)."""
    weights, bias_n = layer.weight_hh_l0.chunk(3), layer.bias_hh_l0[-layer.hidden_size :]
    h = layer.weight_hh_l0.new_zeros(len(rows), layer.hidden_size)
    steps = []
    for step in range(rows.shape[1]):
        from_h = F.linear(h, layer.weight_hh_l0).chunk(3, 1)
        r, z, n = read(rows, step).chunk(3, 1)
        r, z = (r + from_h[0]).sigmoid(), (z + from_h[1]).sigmoid()
        q = from_h[2] + bias_n
        n = (n + r * q).tanh()
        if step >= target:
            to_n = (1 - z) * (1 - n * n)
            steps.append(((to_n * q * r * (1 - r), (h - n) * z * (1 - z), to_n * r), z))
        h = (1 - z) * n + z * h

    J = torch.eye(layer.hidden_size).to(h).repeat(len(h), 1, 1)  # (S, D, H)
    spare, M = torch.empty_like(J), torch.empty_like(J)
    for number, (slopes, z) in enumerate(reversed(steps), 1):
        through_gates(slopes, weights, out=M).diagonal(dim1=1, dim2=2).add_(z)  # d h_t / d h_t-1
        J, spare = torch.bmm(J, M, out=spare), J
        if number % RESCALED == 0:
            rescale(J)
    return [J]


def lstm_jacobian(layer, read, rows, target):
    """-> [d h_out / d h_t, d h_out / d c_t], (S, D, H) each."""
    *W_ifg, W_o = layer.weight_hh_l0.chunk(4)
    h = c = layer.weight_hh_l0.new_zeros(len(rows), layer.hidden_size)
    steps = []
    for step in range(rows.shape[1]):
        gates = read(rows, step) + F.linear(h, layer.weight_hh_l0)
        i, f, g, o = gates.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c_before, c = c, f * c + i * g
        u = c.tanh()
        h = o * u
        if step >= target:
            to_c = (g * i * (1 - i), c_before * f * (1 - f), i * (1 - g * g))
            steps.append((to_c, u * o * (1 - o), o * (1 - u * u), f))

    J_h = torch.eye(layer.hidden_size).to(h).repeat(len(h), 1, 1)  # (S, D, H)
    J_c, spare, M = torch.zeros_like(J_h), torch.empty_like(J_h), torch.empty_like(J_h)
    for number, (to_c, to_o, h_by_c, f) in enumerate(reversed(steps), 1):
        J_c.addcmul_(J_h, h_by_c[:, None])
        torch.mm(J_h.mul_(to_o[:, None]).flatten(0, 1), W_o, out=spare.view(-1, layer.hidden_size))
        spare.baddbmm_(J_c, through_gates(to_c, W_ifg, out=M))
        J_c *= f[:, None]
        J_h, spare = spare, J_h
        if number % RESCALED == 0:
            rescale(J_h, J_c)
    return [J_h, J_c]


# ------------------------------------------------------------------------------------------------------------
# S4D: J[i, (h, n)] = M[i, h] w[h, n], with the same w for every sequence
# ------------------------------------------------------------------------------------------------------------


def s4d_similarity(layer, read, rows, target):
    """(P,), in double precision from the state on: it is cheap here, and nothing underflows."""
    time = rows.shape[1]
    kernel = layer.kernel(time)  # (H, T)
    y = sum(kernel[:, time - 1 - step] * read(rows, step) for step in range(time))
    y = (y + layer.D * read(rows, time - 1)).double()  # (S, H) at the answering step
    # The input weight (exp(dt A) - 1) / A is inside the state, as in Gu et al. (2022): only C is left for w.
    w = torch.view_as_complex(layer.C) * (layer.discretised()[0] * (time - target)).exp()  # (H, N/2)
    w = w.abs().double().square().sum(1)  # (H,) |w_h|^2, but for a factor that all channels share
    gelu_slope = (1 + (y / math.sqrt(2)).erf()) / 2 + y * (-y * y / 2).exp() / math.sqrt(2 * math.pi)

    W, V = layer.mix.weight.double().chunk(2)  # (D, H); h_i = a_i sigmoid(b_i), a = W gelu(y), b = V gelu(y)
    a, b = F.linear(F.gelu(y), layer.mix.weight.double(), layer.mix.bias.double()).chunk(2, 1)  # (S, D)
    p, q = b.sigmoid(), a * b.sigmoid() * (-b).sigmoid()  # M[i, h] = (p_i W[i, h] + q_i V[i, h]) gelu_slope_h
    A, B = zip(*(x.chunk(2) for x in (p, q, gelu_slope)))

    def inner(one, two):
        (p1, q1, slope1), (p2, q2, slope2) = one, two
        v = slope1 * slope2 * w  # (P, H)
        ww, wv, vv = v @ (W * W).T, v @ (W * V).T, v @ (V * V).T  # (P, D)
        return p1 * p2 * ww + (p1 * q2 + q1 * p2) * wv + q1 * q2 * vv

    return weighted_cosine(inner(A, B), inner(A, A), inner(B, B))


# ------------------------------------------------------------------------------------------------------------
# One trial: every snapshot of its weights -> stability.json
# ------------------------------------------------------------------------------------------------------------


def add_flags(group):
    reverse.add_flags(group)
    flag = group.add_argument
    flag("--pairs", type=trial.COUNT, default=1024, help="pairs, a quarter per condition (%(default)s)")
    flag("--target", type=trial.COUNT, help="time step of the target, from 1 (1; S4D: 23 of 64 integers)")
    flag("--memory", type=trial.POSITIVE, default=4.0, help="GiB of working memory at most (4)")
    flag("--trial", metavar="FOLDER", help="the trial's folder, instead of the flags that name it")
    flag("--train", action="store_true", help="train the trial first where that is not done")


def check(args):
    reverse.check(args)
    if args.pairs % len(CONDITIONS):
        raise Refused(f"--pairs {args.pairs} is not a multiple of 4, one part per condition")
    if args.train and args.overwrite:
        raise Refused("--overwrite evaluates anew; to train anew, use reverse.py --dual-freq --overwrite")
    if args.trial is None:
        chosen_target(args)
    elif args.train or args.list is not None or args.all is not None:
        raise Refused("--trial is one trial's folder: leave out --train, --list and --all")


def chosen_target(args):
    if args.target and args.target > args.length:
        raise Refused(f"--target {args.target} is outside the sequence: choose from 1 to {args.length}")
    return args.target or default_target(args.model, args.length)


def read_config(folder):
    config = trial.read_config(folder)
    if config is None:
        raise Refused(f"no trial in {folder}: train it first (--train does, or reverse.py)")
    if not config.get("dual_freq"):
        raise Refused(f"{folder} is not a dual-frequency trial (reverse.py --dual-freq)")
    return config


def read_numbers(folder):
    """The content of stability.json, or None where there is none that can be used."""
    try:
        content = json.loads((folder / "stability.json").read_text())
        usable = [content["by_condition"][c] for c in CONDITIONS], content["pairs"], content["target"]
        return content if all(usable) and content["seconds"] >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run(task, args, words, stop):
    """Find one trial, or train it first where that is wanted, and evaluate it."""
    if args.train and (code := trial.run(reverse.TASK, args, words, stop)):
        return code
    folder = Path(args.trial or trial.trial_folder(task, args))
    args = argparse.Namespace(**(vars(args) | read_config(folder)))
    chosen_target(args)  # may refuse
    device = trial.choose_device(args)
    snapshots = {int(path.stem): path for path in folder.glob("snapshots/*.pt")}
    if not snapshots:
        raise Refused(f"{folder} has no snapshots of its weights: --snapshot-every above 0 keeps them")

    with trial.locked(folder / "stability.lock") as ours:
        if not ours:
            return trial.RUNNING_ELSEWHERE
        return evaluate(task, args, words, stop, folder, snapshots, device)


def evaluate(task, args, words, stop, folder, snapshots, device):
    """The snapshots that stability.json does not have yet, each written as soon as it is done."""
    target = chosen_target(args)
    path, settings = folder / "stability.json", {"pairs": args.pairs, "target": target}
    known = read_numbers(folder)
    if args.overwrite or not known or {k: known.get(k) for k in settings} != settings:
        known = {"by_condition": {name: {} for name in CONDITIONS}, "seconds": 0.0}
    by_condition, seconds = known["by_condition"], known["seconds"]
    state = trial.State(reverse.TASK, args, device)
    origin = trial.provenance(task, args, words, state, device) | settings
    pairs = draw_pairs(args.seed, args.vocab, args.length, target, args.pairs // len(CONDITIONS), device)
    a, b = pairs.flatten(0, 1).unbind(1)  # (P, T) each
    print(f"{folder}: {len(snapshots)} snapshots, {args.pairs} pairs, target at t = {target}", flush=True)
    for iteration in sorted(snapshots):
        if str(iteration) in by_condition[CONDITIONS[-1]]:
            continue
        if stop.requested:
            return trial.STOPPED
        load_snapshot(state.model, snapshots[iteration], device)
        started = time.perf_counter()
        means = stability(state.model, a, b, target, args.memory).view(len(CONDITIONS), -1).mean(1).tolist()
        took = time.perf_counter() - started
        for name, mean in zip(CONDITIONS, means):
            by_condition[name][str(iteration)] = mean
        seconds += took
        content = {
            "by_condition": by_condition,
            "seconds": round(seconds, 3),
            "seconds_per_snapshot": round(seconds / len(by_condition[name]), 3),
            "peak_memory_bytes": trial.peak_memory(device),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        trial.write_json(path, origin | content)
        text = "  ".join(f"{name} {mean:.4f}" for name, mean in zip(CONDITIONS, means))
        print(f"iteration {iteration}  {text}  {took:.1f} s", flush=True)
    print(f"{path} has them all")
    return 0


def load_snapshot(model, path, device):
    try:
        model.load_state_dict(trial.unpack(path, device))
    except Exception as error:  # noqa: BLE001 - whatever a torn file raises
        raise Refused(f"{path} cannot be used: {error!r}".replace("\n", " ")) from None


# ------------------------------------------------------------------------------------------------------------
# Fig. 5, and what the paper claims
# ------------------------------------------------------------------------------------------------------------


def at(which, *conditions):
    """Mean over conditions at the first (min) or the last (max) snapshot."""

    def metric(content):
        found = [content["by_condition"][c] for c in conditions]
        return float(np.mean([values[which(values, key=int)] for values in found]))

    return metric


def gap(which):
    """How much less stable the gradient is under Rare disturbants than under Frequent ones."""
    frequent, rare = at(which, "frequent/frequent", "rare/frequent"), at(which, *AMONG_RARE)
    return lambda content: frequent(content) - rare(content)


def by_iteration(flags, content):
    panel = f"{flags['model'].upper()}, {flags['pe']} (target at t = {content['target']})"
    for condition, values in content["by_condition"].items():
        yield panel, condition, {int(iteration): value for iteration, value in values.items()}


def show(task, scale, figures):
    """The report, and a word where the trials that it compares are not alike."""
    report.show(task, scale, figures)
    kinds = {}
    for flags, folder in itertools.chain(*figures.values()):
        if content := read_numbers(folder):
            last = max(map(int, content["by_condition"][CONDITIONS[0]]))
            kinds.setdefault(flags["model"], set()).add((content["pairs"], content["target"], last))
    for model, kind in kinds.items():
        if len(kind) > 1:
            print(f"  {model} trials differ in (pairs, target, last snapshot): {sorted(kind)}")


METRICS = {f"stability at the last snapshot, {c} (target/disturbants)": at(max, c) for c in CONDITIONS}
METRICS |= {"seconds per snapshot": lambda content: content["seconds_per_snapshot"]}
FIGURES = {
    "fig5": Figure("Gradient stability", METRICS, "iteration", by_iteration, "stability", "stability.json")
}

FIRST, LAST = at(min, *AMONG_RARE), at(max, *AMONG_RARE)
STABLE = "S4D under Rare disturbants is stable either way (above 0.9; the paper gives no number)"
CLOSES = "the gap between Frequent and Rare disturbants shrinks for vanilla S4D, first to last snapshot"
CLAIMS = [
    Claim("fig5", STABLE, above(0.9, LAST, {}), dict(model="s4d"), ("paper",)),
    Claim("fig5", CLOSES, higher(gap(min), NONE, NONE, than=gap(max)), dict(model="s4d")),
]
for model in ("lstm", "gru"):
    helps = f"under Rare disturbants {model.upper()} is more stable with the encoding"
    falls = "... and without it less stable at the last snapshot than at the first"
    CLAIMS[:0] = [
        Claim("fig5", helps, higher(LAST, SIN, NONE), dict(model=model)),
        Claim("fig5", falls, higher(FIRST, NONE, NONE, than=LAST), dict(model=model)),
    ]

SMALLER = {"paper": {}, "quick": dict(pairs=256), "smoke": dict(pairs=16)}
TASK = dataclasses.replace(
    reverse.TASK,
    name="stability",
    folder="reverse",
    run=run,
    scales={scale: defaults | SMALLER[scale] for scale, defaults in reverse.SCALES.items()},
    grids={scale: {"fig5": figures["fig3"]} for scale, figures in reverse.GRIDS.items()},
    figures=FIGURES,
    claims=CLAIMS,
    check=check,
    add_flags=add_flags,
)


def main(argv=None):
    return trial.main(TASK, show, ["--dual-freq", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
