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
weights, and a diagonal; one sweep from the answer back to the target multiplies these up, for many sequences
at once. S4D: the state reaches the output through one sum per channel: inner products of Jacobian rows have a
closed form. Products are in fp32 whatever the trial was trained in.
"""

from suite import cli, fast, files, machine
from suite.claims import CONTROLS, NONE, SIN, Claim, Figure, name_of
from suite.files import Torn
from suite.flags import COUNT, as_words, command_line, complete, declare, place
from suite.progress import say
from suite.trial import (
    RUNNING_ELSEWHERE,
    STOPPED,
    Trial,
    earlier_processes,
    load_weights,
    refuse_other_flags,
    train,
)

import math
import operator
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
import reverse
from common import Refused
from reverse import AMONG_RARE, CONDITIONS, KINDS, OF_GRU, OF_LSTM, OF_S4D, DualFrequency, worst

# ------------------------------------------------------------------------------------------------------------
# The statistic: P pairs, S sequences, T steps up to the answer, D outputs, H state, t target (1-based)
# ------------------------------------------------------------------------------------------------------------


def draw_pairs(seed, vocab, length, target, count, device="cpu"):
    """-> A and B, (4 count, T) each: `count` pairs of each condition in turn, from the seed alone.

    They share all that is read up to the target, and so the state there (section 4.3); only S4D's target has
    anything before it. They end with the command that asks for the target, step 2L + 1 - t.
    """
    pairs = []
    for condition, name in enumerate(CONDITIONS):
        k = common.key(seed, common.ANALYSIS, condition, device=device)
        rows = common.uniform_integers(k, (count, 2, length), vocab // 2)
        of_target, of_disturbants = map(KINDS.index, name.split("/"))
        is_rare = torch.full((length,), of_disturbants, device=device)
        is_rare[target - 1] = of_target
        rows += is_rare * (vocab // 2)
        rows[:, 1, :target] = rows[:, 0, :target]
        pairs.append(F.pad(rows, (0, length + 1 - target), value=vocab))
    return torch.cat(pairs).unbind(1)


TRAIN_ANEW = "reverse.py --dual-freq --overwrite trains it anew"
AT_ONCE = 64  # pairs: enough to keep a device busy; at H = 512 the Jacobians of so many need 1 GiB


@torch.no_grad()
def stability(model, a, b, target):
    """(P,): sum_i w_i cos(J_i^A, J_i^B) of token rows a and b (P, T), w_i in proportion to |J_i^A||J_i^B|."""
    similarity = s4d_similarity if isinstance(model.layer, common.S4D) else recurrent_similarity
    table, clock = fast.input_products(model, model.embedding.weight, a.shape[1])  # (K+1, G), (T, G)
    found = []
    for rows in map(torch.cat, zip(a.split(AT_ONCE), b.split(AT_ONCE))):  # (S, T), first all A, then all B
        found.append(similarity(model.layer, table[rows.T] + clock[:, None], target))
    return torch.cat(found)


def weighted_cosine(ab, aa, bb):
    """(P,) from the inner products <J_i^A, J_i^B>, <J_i^A, J_i^A>, <J_i^B, J_i^B>, each (P, D).

    The weights cancel the cosines' denominators, so that a zero row counts for nothing, as it should.
    """
    ab, weights = ab.double().sum(-1), (aa.double() * bb.double()).sqrt().sum(-1)
    return (ab / weights.clamp(min=torch.finfo(torch.double).tiny)).clamp(-1, 1)


# GRU and LSTM: J = (d h_out / d z_out) (d z_out / d z_out-1) ... (d z_t+1 / d z_t), from the left

RESCALED = 8  # time steps between rescalings: few enough for float32, enough to cost nothing


def recurrent_similarity(layer, inputs, target):
    """(P,) of two sequences each, whose inputs to the gates are (T, S, G)."""
    lstm, backs = isinstance(layer, torch.nn.LSTM), []
    state = [inputs.new_zeros(inputs.shape[1], layer.hidden_size)] * (2 if lstm else 1)
    for x in inputs:
        state, back = (lstm_step if lstm else gru_step)(layer, x, *state)
        backs.append(back)

    identity = torch.eye(layer.hidden_size).to(inputs).repeat(inputs.shape[1], 1, 1)
    # d h_out / d h and d c, (S, D, H) each
    J = [identity, torch.zeros_like(identity)] if lstm else [identity]
    for number, back in enumerate(reversed(backs[target:]), 1):
        J = back(*J)
        if number % RESCALED == 0:
            rescale(J)
    rescale(J)
    pairs = [part.chunk(2) for part in J]  # A's and B's, (P, D, H)
    inner = lambda i, j: sum((part[i] * part[j]).sum(-1) for part in pairs)  # (P, D)
    return weighted_cosine(inner(0, 1), inner(0, 0), inner(1, 1))


def rescale(J):
    """Divide a sequence's whole Jacobian by its largest element, in place: that cancels in the statistic.

    Through 127 steps of an untrained LSTM it would fall below the smallest float32.
    """
    largest = torch.stack([part.flatten(1).abs().amax(1) for part in J]).amax(0)[:, None, None]
    for part in J:
        part /= largest.clamp(min=torch.finfo(part.dtype).tiny)


def through_gates(slopes, weights):
    """(S, H, H): the sum over gates of diag(slope) W, each slope (S, H) and each W (H, H)."""
    M = slopes[0][:, :, None] * weights[0]
    for slope, W in zip(slopes[1:], weights[1:]):
        M.addcmul_(slope[:, :, None], W)
    return M


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


# S4D: J[i, (h, n)] = M[i, h] w[h, n], with the same w for every sequence


def s4d_similarity(layer, inputs, target):
    """As recurrent_similarity; in double precision from the state on: it is cheap, and nothing underflows."""
    time = len(inputs)
    y = sum(k * x for k, x in zip(layer.kernel(time).flip(1).T, inputs))
    y = (y + layer.D * inputs[-1]).double()  # (S, H) at the answering step
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


class Stability(DualFrequency):
    name, trials_of = "stability", "reverse"

    @staticmethod
    def add_flags(science, plumbing):
        DualFrequency.add_flags(science, plumbing)
        plumbing("--pairs", 1024, "pairs, a quarter per condition", type=COUNT)
        plumbing("--target", None, "time step of the target, from 1 (1; S4D: 23 of 64 integers)", type=COUNT)
        plumbing("--trial", None, "the trial's folder, instead of the flags that name it", type=place)
        plumbing("--train", False, "train the trial first where that is not done", action="store_true")

    @classmethod
    def implied(cls, given):
        """With --trial: the flags of that trial, read from its config.json as from a command line."""
        if (folder := given.get("trial")) is None:
            return {}
        if given.keys() & {"train", "list", "all", "report"}:
            raise Refused("--trial is one trial's folder: leave out --train, --list, --all and --report")
        config = cls.config_in(Path(folder))
        if differ := [name for name in given.keys() & config.keys() if given[name] != config[name]]:
            flags = ", ".join(" ".join(as_words(name, config[name])) for name in sorted(differ))
            raise Refused(f"{folder} was trained with {flags}: leave out the flags that differ")
        words = command_line({name: value for name, value in config.items() if value is not None})
        read = vars(declare(cls).parser.parse_args(words))
        if changed := [name for name, value in read.items() if value != config[name]]:
            what = f"{config[changed[0]]!r} as --{changed[0].replace('_', '-')}"
            raise Refused(f"{folder}/config.json has {what}, which no trial has")
        return read

    @classmethod
    def config_in(cls, folder):
        """The flags in a trial's config.json, but for --precision: all is in fp32 here."""
        try:
            content = files.read_json(folder / "config.json", "config")
        except Torn as error:
            raise Refused(str(error)) from None
        config = content["config"] if content else {}
        if not config.get("dual_freq"):
            raise Refused(f"{folder} is not the folder of a dual-frequency trial")
        config.pop("precision", None)
        if foreign := config.keys() - declare(cls).science:
            raise Refused(f"{folder}/config.json has {next(iter(foreign))!r}, which is no flag of a trial")
        return config

    @classmethod
    def variant(cls, args):
        args.dual_freq = True
        return cls

    @classmethod
    def defaults(cls, args):
        """S4D's target is where vanilla S4D is worst among Rare disturbants, 23 of 64."""
        target = max(1, round(23 * args.length / 64)) if args.model == "s4d" else 1
        return super().defaults(args) | {"target": target}

    @classmethod
    def folder_of(cls, args, name):
        return args.trial or super().folder_of(args, name)

    def check(self):
        args = self.args
        super().check()
        if args.model not in ("gru", "lstm", "s4d"):
            raise Refused(f"the gradients of --model {args.model} are not known (use gru, lstm or s4d)")
        if not fast.knows(common.LAYERS[args.model], common.ENCODINGS[args.pe]):
            raise Refused(f"the gradients with --pe {args.pe}, whose join is its own, are not known")
        if args.pairs % len(CONDITIONS):
            raise Refused(f"--pairs {args.pairs} is not a multiple of 4, one part per condition")
        if args.target > self.length:
            raise Refused(f"--target {args.target} is outside the sequence: choose from 1 to {self.length}")
        if args.train and args.overwrite:
            raise Refused("--overwrite evaluates anew; to train anew, use reverse.py --dual-freq --overwrite")

    @classmethod
    def check_all(cls, tasks):
        if not tasks[0].args.train and not any(task.snapshots(set()) for task in tasks):
            raise Refused("no trial of these has snapshots: --train trains them first")

    def run(self, argv, stop):
        """Train first where that is wanted, then evaluate the trial."""
        args = self.args
        if args.train:
            training = Trial(complete(reverse.Reverse, args), argv)
            if code := train([training], stop)[0]:
                return code
        refuse_other_flags(self.folder, self.config)
        before = files.read_usable_json(path := self.folder / "stability.json", "by_condition")
        if before and not args.overwrite and (what := self.other_settings(before)):
            raise Refused(f"{path} {what}: --overwrite replaces them")
        content, missing = self.measured(args.overwrite)
        if not missing and not content["by_condition"][CONDITIONS[0]]:
            raise Refused(f"{self.folder} has no snapshots: {self.how_to_get_snapshots()}")
        if lost := [snapshot.name for snapshot in missing.values() if not snapshot.exists()]:
            names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            raise Refused(f"{self.folder}/snapshots lacks {names}: {TRAIN_ANEW}")
        lock_path = self.folder / "stability.lock"
        if (lock := files.lock(lock_path)) is None:
            say(f"{self.folder} is being evaluated by {files.holder(lock_path)}", file=sys.stderr)
            return RUNNING_ELSEWHERE
        with lock:
            return self.measure(argv, stop)

    def how_to_get_snapshots(self):
        if files.finished_metrics(self.folder):
            return "reverse.py --dual-freq --overwrite --snapshot-every N trains it anew, and keeps them"
        return "train the trial first (--train), with --snapshot-every above 0"

    def other_settings(self, content):
        """The settings of a stability.json in words, where they are not these; else None."""
        names = ("pairs", "target")
        if all(content.get(name) == getattr(self.args, name) for name in names):
            return None
        return "has the numbers of " + " ".join(f"--{name} {content.get(name)}" for name in names)

    def unlike(self, content):
        if not files.finished_metrics(self.folder):
            return "is of a trial that is not finished"
        if what := super().unlike(content) or self.other_settings(content):
            return what
        if not is_whole(content):
            return None  # its numbers are refused as they are read
        lacking = len(self.missing(content))
        return f"lacks {lacking} snapshots: stability.py goes on with them" if lacking else None

    def measured(self, anew=False):
        """The content of stability.json, and {iteration: file} of what it lacks."""
        content = files.read_usable_json(self.folder / "stability.json", "by_condition")
        if anew or content is None or self.other_settings(content) or not is_whole(content):
            settings = {"pairs": self.args.pairs, "target": self.args.target}
            content = settings | {"by_condition": {c: {} for c in CONDITIONS}, "seconds": 0.0}
        return content, self.missing(content)

    def missing(self, content):
        """{iteration: file} of the snapshots that a stability.json has no numbers of."""
        known = set(map(int, content["by_condition"][CONDITIONS[0]]))
        return {i: path for i, path in self.snapshots(known).items() if i not in known}

    def snapshots(self, known):
        """{iteration: file} of all that the trial has written by now; other files there are not its own."""
        content = files.read_usable_json(self.folder / "config.json", "run")
        run = content["run"] if content else {}
        every = run.get("snapshot_every", self.args.snapshot_every)
        if not isinstance(every, int) or every < 1:
            return {}
        folder, iterations = self.folder / "snapshots", range(every, self.args.iterations + 1, every)
        if not files.finished_metrics(self.folder):
            numbers = (int(path.stem) for path in folder.glob("*.pt") if path.stem.isdecimal())
            there = known | {i for i in numbers if (folder / f"{i:06d}.pt").exists()}
            last = max((i for i in there if i in iterations), default=0)
            iterations = range(every, last + 1, every)  # not all that the flags promise: they may be millions
        return {i: folder / f"{i:06d}.pt" for i in iterations}

    def has_begun(self):
        return os.path.exists(self.folder / "stability.json")

    def result(self):
        """The last snapshot's stability, once the trial is finished and all are measured; else None."""
        content, missing = self.measured()
        if missing or not content["by_condition"][CONDITIONS[0]] or not files.finished_metrics(self.folder):
            return None
        frequent, rare = (by_snapshot(content["by_condition"], c)[-1] for c in (AMONG_FREQUENT, AMONG_RARE))
        return {"stability among frequent": frequent, "among rare": rare}

    def measure(self, argv, stop):
        """The snapshots that have no numbers yet."""
        args, (content, missing) = self.args, self.measured(self.args.overwrite)
        device = machine.choose_device(args.device)
        engine = machine.Engine("torch", deterministic=args.deterministic)
        machine.prepare(engine, device, self.is_small())  # training in this process has set its own
        model = self.model().to(device)
        origin = machine.provenance(self, argv, model, engine, device)
        measured = content["by_condition"][CONDITIONS[0]]
        if measured and (earlier := earlier_processes(content, origin, max(map(int, measured)))):
            origin["earlier"] = earlier
        content |= origin
        count = args.pairs // len(CONDITIONS)
        a, b = draw_pairs(self.seed, self.vocab, self.length, args.target, count, device)
        what = f"{len(missing)} snapshots to evaluate, {args.pairs} pairs, target at t = {args.target}"
        say(f"{self.folder}: {what}")
        for iteration, snapshot in missing.items():
            if stop.requested:
                return STOPPED
            started = time.perf_counter()
            try:
                load_weights(model, snapshot, device)
                means = stability(model, a, b, args.target).view(len(CONDITIONS), -1).mean(1).tolist()
                if not all(map(math.isfinite, means)):
                    what = "the stability of its gradients is not finite"
                    raise Refused(f"{snapshot} cannot be used: {what}")
            except Refused as error:
                raise Refused(f"{error}; {TRAIN_ANEW}") from None
            for condition, mean in zip(CONDITIONS, means):
                content["by_condition"][condition][str(iteration)] = mean
            content["seconds"] += (took := time.perf_counter() - started)
            files.write_json(self.folder / "stability.json", content)
            text = "  ".join(f"{condition} {mean:.4f}" for condition, mean in zip(CONDITIONS, means))
            say(f"iteration {iteration}  {text}  {took:.1f} s")
        say(f"{self.folder / 'stability.json'} has all {len(content['by_condition'][CONDITIONS[0]])}")
        return 0


def is_whole(content):
    """Whether a stability.json has finite numbers, of the same snapshots under all conditions."""
    tables = [content["by_condition"].get(condition) for condition in CONDITIONS]
    if not all(isinstance(x, dict) and x.keys() == tables[0].keys() for x in tables):
        return False
    numbers = [content.get("seconds"), *(number for x in tables for number in x.values())]
    finite = all(isinstance(number, float) and math.isfinite(number) for number in numbers)
    return finite and all(map(str.isdecimal, tables[0]))


# ------------------------------------------------------------------------------------------------------------
# Fig. 5, and what the paper claims
# ------------------------------------------------------------------------------------------------------------


def by_snapshot(by_condition, conditions):
    """Means over conditions, from the first snapshot to the last."""
    found = [by_condition[c] for c in conditions]
    return [float(np.mean([x[i] for x in found])) for i in sorted(found[0], key=int)]


def of_snapshots(which, *conditions):
    """which(the list of all snapshots' stabilities): the first, the last, the lowest."""
    return lambda outcome: which(by_snapshot(outcome.metrics["by_condition"], conditions))


def gap(which):
    """How much less stable the gradient is under Rare disturbants than under Frequent ones."""

    def metric(outcome):
        found = outcome.metrics["by_condition"]
        sides = by_snapshot(found, AMONG_FREQUENT), by_snapshot(found, AMONG_RARE)
        return which([frequent - rare for frequent, rare in zip(*sides)])

    return metric


def by_iteration(outcome):
    for condition, values in outcome.metrics["by_condition"].items():
        model, target = name_of(outcome.flags["model"]), outcome.metrics["target"]
        panel = f"{model}, {condition} (target at t = {target})"
        yield panel, outcome.flags["pe"], {int(iteration): value for iteration, value in values.items()}


AMONG_FREQUENT = ("frequent/frequent", "rare/frequent")
FIRST, LAST = operator.itemgetter(0), operator.itemgetter(-1)
METRICS = {
    f"stability at the last snapshot, {c} (target/disturbants)": of_snapshots(LAST, c) for c in CONDITIONS
}
ALIKE = "stability (1: gradients are the same,\n0: have nothing in common)"
CURVES = dict(curves=by_iteration, y=ALIKE, file="stability.json")
FIGURES = {
    "fig5": Figure("Gradient stability", METRICS, "iteration of the snapshot", **CURVES),
    "fig5-fresh": Figure("Gradient stability, fresh seeds", METRICS, "iteration of the snapshot", **CURVES),
}

EVERYWHERE = worst(*(of_snapshots(min, condition) for condition in CONDITIONS))
AT_FIRST, AT_LAST = of_snapshots(FIRST, *AMONG_RARE), of_snapshots(LAST, *AMONG_RARE)
FALL = of_snapshots(lambda found: found[0] - found[-1], *AMONG_RARE)
HELPS = "under Rare disturbants {model} is more stable with the encoding"
FALLS = "without the encoding {model} loses stability under Rare disturbants, from first to last snapshot"
FASTER = "without the encoding an LSTM loses more stability under Rare disturbants than a GRU does"
RARE = "without the encoding {model} ends less stable under Rare disturbants than under Frequent ones"
NARROWS = "the encoding narrows {model}'s gap between Frequent and Rare disturbants, at the last snapshot"
STAYS = "position-encoded {model} is stable in every condition at all snapshots (above 0.5, our number)"
STABLE = "S4D under Rare disturbants is stable at all snapshots either way (above 0.9, our number)"
EARLY = "at the first snapshot vanilla S4D is less stable under Rare disturbants than under Frequent ones"
CLOSES = (
    "vanilla S4D's gap between Frequent and Rare disturbants is larger at the first snapshot than on average"
)
CLAIMS = []
for model in (OF_GRU, OF_LSTM):
    CLAIMS += [
        Claim("fig5", HELPS, AT_LAST, SIN, NONE, controls=CONTROLS, where=model, primary=model == OF_LSTM),
        Claim("fig5", FALLS, AT_FIRST, NONE, NONE, than=AT_LAST, where=model),
        Claim("fig5", RARE, of_snapshots(LAST, *AMONG_FREQUENT), NONE, NONE, than=AT_LAST, where=model),
        Claim("fig5", NARROWS, gap(LAST), NONE, SIN, controls=CONTROLS, where=model),
        Claim("fig5", STAYS, EVERYWHERE, SIN, 0.5, where=model, scales=("paper",)),
    ]
CLAIMS += [
    Claim("fig5", FASTER, FALL, NONE | OF_LSTM, NONE | OF_GRU),
    Claim("fig5", HELPS, AT_LAST, SIN, NONE, controls=CONTROLS, where=OF_S4D),
    Claim("fig5", STABLE, of_snapshots(min, *AMONG_RARE), {}, 0.9, where=OF_S4D, scales=("paper",)),
    Claim("fig5", EARLY, gap(FIRST), NONE, 0.0, where=OF_S4D),
    Claim("fig5", CLOSES, gap(FIRST), NONE, NONE, than=gap(np.mean), where=OF_S4D),
]
PAIRS = {"paper": {}, "desk": {}, "quick": dict(pairs=256), "smoke": dict(pairs=16)}
SCALES = {scale: defaults | PAIRS[scale] for scale, defaults in reverse.SCALES.items()}
GRIDS = {scale: {"fig5": figures["fig3"]} for scale, figures in reverse.GRIDS.items()}
GRIDS["desk"]["fig5-fresh"] = reverse.GRIDS["desk"]["fig3-fresh"]
Stability.scales, Stability.grids = SCALES, GRIDS
Stability.figures, Stability.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(Stability))
