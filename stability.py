"""Gradient stability (Fig. 5): does what is read between a token and its retrieval turn the gradient?

    python stability.py --model lstm --pe sin --vocab 1024 --seed 0  # of a trial of reverse.py --dual-freq
    python stability.py --all fig5 --train                           # trained where need be

    A   7 3 1 4 _ _ _ _    Two sequences share the target (7); their disturbants are all Frequent or all Rare.
    B   7 2 2 5 _ _ _ _    How alike are the Jacobians from the state after the target to the output at the
                      ^    step that has to answer it (^)? 1: the same; 0: nothing in common.

All snapshots are evaluated, and stability.json is written beside the trial's result.json.
Letters: P pairs, S sequences, T steps up to the answer, D outputs, H state, K vocabulary, G gates' inputs.
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import Refused
from reverse import AMONG_FREQUENT, AMONG_RARE, CONDITIONS, KINDS, DualFrequency, Reverse
from suite import cli, fast, files, machine, training
from suite.task import Flag
from suite.verdicts import above, gain, higher, higher_in_pairs, name_of


def draw_pairs(seed, vocab, length, target, count, device="cpu"):
    """-> A and B, (4 count, T) each: `count` pairs of each condition in turn, from the seed alone."""
    pairs = []
    for condition, name in enumerate(CONDITIONS):
        k = common.key(seed, common.ANALYSIS, condition, device=device)
        of_target, of_disturbants = map(KINDS.index, name.split("/"))  # 0: Frequent, 1: Rare
        rows = common.uniform_integers(k, (count, 2, length), vocab // 2) + of_disturbants * (vocab // 2)
        rows[:, :, target - 1] += (of_target - of_disturbants) * (vocab // 2)
        rows[:, 1, :target] = rows[:, 0, :target]  # so that they share the state (section 4.3)
        pairs.append(F.pad(rows, (0, length + 1 - target), value=vocab))
    return torch.cat(pairs).unbind(1)


@torch.no_grad()
def stability(model, a, b, target, at_once=64):  # at H = 512 the Jacobians of 64 pairs need 1 GiB
    """(P,): sum_i w_i cos(J_i^A, J_i^B) of token rows a and b (P, T), w_i in proportion to |J_i^A||J_i^B|."""
    similarity = s4d_similarity if isinstance(model.layer, common.S4D) else recurrent_similarity
    table, clock = fast.input_products(model, model.embedding.weight, a.shape[1])  # (K+1, G), (T, G)
    parts = map(torch.cat, zip(a.split(at_once), b.split(at_once)))  # (S, T), first all A, then all B
    return torch.cat([similarity(model.layer, table[rows.T] + clock[:, None], target) for rows in parts])


def weighted_cosine(ab, aa, bb):
    """(P,) from <J_i^A, J_i^B>, <J_i^A, J_i^A>, <J_i^B, J_i^B>, (P, D) each."""
    ab, weights = ab.double().sum(-1), (aa.double() * bb.double()).sqrt().sum(-1)
    return (ab / weights.clamp(min=torch.finfo(torch.double).tiny)).clamp(-1, 1)


def recurrent_similarity(layer, inputs, target):
    """(P,) of a GRU or an LSTM, whose gates' inputs are (T, S, G)."""
    step, parts = (lstm_step, 2) if isinstance(layer, common.LSTM) else (gru_step, 1)
    state, backs = [inputs.new_zeros(inputs.shape[1], layer.hidden_size)] * parts, []
    for x in inputs:
        state, back = step(layer, x, *state)
        backs.append(back)
    identity = torch.eye(layer.hidden_size).to(inputs).repeat(inputs.shape[1], 1, 1)
    # J = (d h_out / d z_out) (d z_out / d z_out-1) ... (d z_t+1 / d z_t), from the left
    J = [identity, torch.zeros_like(identity)][:parts]  # d h_out / d h and c, (S, D, H) each
    for number, back in enumerate(reversed(backs[target:]), 1):
        J = back(*J)
        if number % 8 == 0 or number == len(backs) - target:
            # Factors cancel; in 127 steps J would fall below the smallest float32
            largest = torch.stack([part.flatten(1).abs().amax(1) for part in J]).amax(0)[:, None, None]
            J = [part / largest.clamp(min=torch.finfo(part.dtype).tiny) for part in J]
    pairs = [part.chunk(2) for part in J]  # A's and B's, (P, D, H)
    inner = lambda i, j: sum((part[i] * part[j]).sum(-1) for part in pairs)  # (P, D)
    return weighted_cosine(inner(0, 1), inner(0, 0), inner(1, 1))


def gru_step(layer, x, h):
    """-> the state after the step, and a function from d h_out / d that state to d h_out / d h."""
    (x_r, x_z, x_n), (p_r, p_z, p_n) = x.chunk(3, 1), F.linear(h, layer.weight_hh_l0).chunk(3, 1)
    r, z, q = (x_r + p_r).sigmoid(), (x_z + p_z).sigmoid(), p_n + layer.bias_hh_l0[-layer.hidden_size :]
    n = (x_n + r * q).tanh()

    def back(J):
        to_n = (1 - z) * (1 - n * n)
        slopes = to_n * q * r * (1 - r), (h - n) * z * (1 - z), to_n * r
        M = through_gates(slopes, layer.weight_hh_l0.chunk(3))
        M.diagonal(dim1=1, dim2=2).add_(z)
        return [J @ M]

    return [(1 - z) * n + z * h], back


def lstm_step(layer, x, h, c):
    """As gru_step, of a state of two parts."""
    i, f, g, o = (x + F.linear(h, layer.weight_hh_l0)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    u = new.tanh()

    def back(J_h, J_c):
        *W_ifg, W_o = layer.weight_hh_l0.chunk(4)
        to_c, to_o = (g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)), u * o * (1 - o)
        J_c.addcmul_(J_h, (o * (1 - u * u))[:, None])  # h depends on c too
        J_h = torch.baddbmm((J_h * to_o[:, None]) @ W_o, J_c, through_gates(to_c, W_ifg))
        return [J_h, J_c.mul_(f[:, None])]

    return [o * u, new], back


def through_gates(slopes, weights):
    """(S, H, H): the sum over gates of diag(slope) W, each slope (S, H) and each W (H, H)."""
    M = slopes[0][:, :, None] * weights[0]
    for slope, W in zip(slopes[1:], weights[1:]):
        M.addcmul_(slope[:, :, None], W)
    return M


def s4d_similarity(layer, inputs, target):
    """As recurrent_similarity. J[i, (h, n)] = M[i, h] w[h, n], with the same w for every sequence."""
    y = sum(k * x for k, x in zip(layer.kernel(len(inputs)).flip(1).T, inputs))
    y = (y + layer.D * inputs[-1]).double()  # (S, H) at the answering step; no underflow from here on
    # The input weight (exp(dt A) - 1) / A is inside the state, as in Gu et al. (2022): w has only C.
    w = torch.view_as_complex(layer.C) * (layer.discretise()[0] * (len(inputs) - target)).exp()  # (H, N/2)
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


class Stability(DualFrequency):
    name, home, file = "stability", "reverse", "stability.json"
    flags = (
        *Reverse.flags,
        Flag("model", "lstm", "the layer", choices=("gru", "lstm", "s4d")),
        Flag("pairs", 1024, "pairs, a quarter per condition", int, least=4, science=False),
        Flag("target", None, "its step, from 1 (1; s4d: 23 of 64)", int, least=1, science=False),
        Flag("train", False, "train the trial first where that is not done", bool, science=False),
    )

    @classmethod
    def variant(cls, args):
        args.dual_freq = True
        return cls

    @classmethod
    def defaults(cls, args):
        target = max(1, round(23 * args.length / 64)) if args.model == "s4d" else 1
        return super().defaults(args) | dict(target=target)

    def check(self):
        super().check()
        self.config["target"] = self.args.target  # of stability.json, not of the trial
        if self.args.pairs % len(CONDITIONS):
            raise Refused(f"--pairs {self.args.pairs} is not a multiple of 4, one part for each condition")
        if not 0 < self.args.snapshot_every <= self.args.iterations:
            raise Refused(f"--snapshot-every {self.args.snapshot_every} leaves no snapshot")
        if self.args.target > self.length:
            raise Refused(f"--target {self.args.target} is outside the input: choose from 1 to {self.length}")

    def run(self, argv, stop):
        """Show stability.json; where there is none, train the trial if need be, and evaluate it."""
        self.config["pairs"] = self.args.pairs
        if self.args.overwrite or not files.is_finished(self):
            trained = cli.make_task(Reverse, self.args)
            trained.args.overwrite = False  # it is the evaluation that is made anew
            if not self.args.train and not files.is_finished(trained):
                raise Refused(f"{self.folder} is not trained to its end: --train does that")
            training.train(trained, argv, stop)
            with files.lock(self.folder):
                files.write_json(self.folder / self.file, self.measure(trained, argv))
        for condition, values in files.read_json(self.folder / self.file)["by_condition"].items():
            print(f"{condition}: {list(values.values())[-1]:.4f} at the last snapshot")
        return 0

    def measure(self, trained, argv):
        """What stability.json holds of the snapshots of a trained task."""
        args, device = self.args, machine.choose_device(self.args.device)
        snapshots = sorted(self.folder.glob("snapshots/*.pt"), key=lambda path: int(path.stem))
        if not snapshots:
            raise Refused(f"{self.folder} has no snapshots: reverse.py --dual-freq --overwrite makes them")
        engine = machine.Engine("torch", deterministic=args.deterministic)
        machine.prepare(engine, device, args.hidden)  # training in this process has set its own
        model, started = self.model().to(device), time.perf_counter()
        a, b = draw_pairs(self.seed, self.vocab, self.length, args.target, args.pairs // 4, device)
        found = {condition: {} for condition in CONDITIONS}
        for path in snapshots:
            snapshot = files.load(path, device)
            files.require_same_flags(path, snapshot["config"], trained.config)
            model.load_state_dict(snapshot["model"])
            means = stability(model, a, b, args.target).view(len(CONDITIONS), -1).mean(1).tolist()
            for condition, mean in zip(CONDITIONS, means):
                found[condition][str(int(path.stem))] = mean
            print(f"iteration {int(path.stem)}:", *(f"{mean:.4f}" for mean in means), flush=True)
        content = dict(pairs=args.pairs, target=args.target, by_condition=found, task=self.name)
        content |= dict(seconds=time.perf_counter() - started, config=self.config)
        return content | machine.provenance(argv, engine, device)


def over_snapshots(result, conditions):
    """The mean stability of these conditions, from the first snapshot to the last."""
    return np.mean([list(result.metrics["by_condition"][c].values()) for c in conditions], axis=0)


def by_iteration(result):
    for condition, values in result.metrics["by_condition"].items():
        panel = f"{name_of(result.flags['model'])}, {condition}"
        yield panel, result.flags["pe"], {int(i): value for i, value in values.items()}


RARE = lambda result: over_snapshots(result, AMONG_RARE)[-1]
FREQUENT = lambda result: over_snapshots(result, AMONG_FREQUENT)[-1]
gap = lambda result: over_snapshots(result, AMONG_FREQUENT) - over_snapshots(result, AMONG_RARE)
FIG5 = dict(metrics={"among Rare": RARE, "among Frequent": FREQUENT})
FIG5 |= dict(curves=by_iteration, x="iteration of the snapshot", y="stability")


@Stability.figure("fig5", "Gradient stability (target/disturbants)", Reverse.figures["fig3"].grids, **FIG5)
def fig5(runs):
    for model, vocab in dict.fromkeys((row["model"], row["vocab"]) for row in runs.rows):
        name, of = f"{name_of(model)}'s gradients at K = {vocab}", runs.where(model=model)
        yield gain(of, f"Among Rare disturbants {name} are more stable with the clock.", RARE)
        text = f"Without a clock {name} are less stable among Rare disturbants than among Frequent."
        yield higher_in_pairs(text, of.values(FREQUENT, pe="none"), of.values(RARE, pe="none"))
        if model == "s4d":
            text = f"This gap of {name} is wider at the first snapshot than on average."
            yield above(text, of.values(lambda result: gap(result)[0] - gap(result).mean(), pe="none"), 0)


@Stability.figure("fig5-fresh", "Gradients, seeds 5 to 10", Reverse.figures["fig3-fresh"].grids, **FIG5)
def fig5_fresh(runs):
    text = "Among Rare disturbants an LSTM's gradients are more stable with the clock than with none"
    yield gain(runs, f"{text} and with constant, at the last snapshot.", RARE, primary="title")
    yield higher(f"{text} (the paper's contrast).", runs.values(RARE, pe="sin"), runs.values(RARE, pe="none"))


if __name__ == "__main__":
    raise SystemExit(cli.main(Stability))
