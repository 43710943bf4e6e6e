"""What a script provides: its task, as a subclass of `Task`. README.md has a complete example."""

from suite import fast, files

import functools
import os

import torch

import common
from common import Refused

NAMED = dict(model="", pe="", vocab="K", length="L")  # flag -> what stands before its value
BAD_FLAGS = 2  # the exit code of what is Refused


@functools.cache  # a grid has few of them, and hundreds of trials
def try_encoding(encoding, positions, embed, bands):
    """Raise Refused now if the encoding cannot be built; on the meta device, so that nothing is computed."""
    name, shape = encoding.__name__, lambda x: " x ".join(map(str, x.shape))
    with torch.device("meta"):
        made = encoding(positions, embed, bands=bands)
        joined = made.join(torch.empty(positions, 1, embed))
        vectors = made.vectors(positions) if encoding.join is common.Encoding.join else None
    if vectors is not None and vectors.shape != (positions, embed):
        raise Refused(f"{name}'s vectors are {shape(vectors)}, of {positions} steps and --embed {embed}")
    if joined.shape != (positions, 1, made.inputs):
        raise Refused(
            f"{name}'s join makes {shape(joined)} of {positions} steps, but its `inputs` are {made.inputs}"
        )


def differences(before, config):
    """How a file's flags, `before`, differ from `config`, in words, or None. Only flags in both count."""
    differ = [k for k in sorted(before.keys() & config.keys()) if before[k] != config[k]]
    if not differ:
        return None
    names = [k if k.endswith("sha256") else f"--{k.replace('_', '-')}" for k in differ]
    kind = "text" if any(k.endswith("sha256") for k in differ) else "flags"
    what = ", ".join(f"{n} {before[k]} there, {config[k]} here" for n, k in zip(names, differ))
    return f"was made with other {kind}: {what}"


class Task:
    """A script's task is a subclass; an instance holds the flags of one trial.

    It has to say what an `episode` is; the rest is as in the paper's reversal by default.
    """

    name = ""  # the script's, and the first folder under --out
    scales: dict  # scale -> its defaults; "paper" holds what differs from the defaults in flags.py
    grids: dict  # scale -> figure -> [{flag: value}, ...], one entry per trial (see flags.cross)
    figures: dict  # figure -> claims.Figure, how to print and draw it
    claims = ()  # claims.Claim, what the paper says about these figures
    without = ()  # shared flags that mean nothing here, such as "--held-out"
    only_alone = ()  # names of flags that do something else than train, as "prepare": not for several trials
    named = NAMED  # what begins a folder's name, and with what
    trials_of = ""  # the task whose trials these are, where it is another
    # True: training_episode(i) has fixed shapes, takes i as a tensor too and never makes the host wait (no
    # .item()), so that the whole iteration is one CUDA graph. False: training_episode(i, in_graph=True) is a
    # tuple of tensors in few sizes, each of which has a graph of its own.
    graph = True
    what_to_lower = "--batch, --length, --hidden, --embed or --vocab"  # where memory does not suffice
    fast_at_every_size = False  # --engine auto is fast.py at every size and on every device

    @staticmethod
    def add_flags(science, plumbing):
        """More flags, each by science(name, default, help, ...), or plumbing(...) if it changes no result."""

    @classmethod
    def implied(cls, given):
        """{flag: value} of the flags that follow from those given on the command line."""
        return {}

    @classmethod
    def variant(cls, args):
        """The class that the flags ask for, this one or a subclass."""
        return cls

    @classmethod
    def defaults(cls, args):
        """{flag: default} of the flags whose default depends on other flags."""
        return {"held_out": 1024, "amplitude": common.ENCODINGS[args.pe].usual(args.embed)}

    @classmethod
    def trainer(cls):
        """The name of its trials' script and folder: its own, or that of the task it shares them with."""
        return cls.trials_of or cls.name

    @classmethod
    def folder_of(cls, args, name):
        """Where the trial of these flags is; `name` says those that change its result."""
        return f"{args.out}/{cls.trainer()}/{name}/seed{args.seed}"

    def __init__(self, args, config, folder):
        """`config` holds the flags that change the result."""
        self.args, self.config, self.folder = args, config, folder
        self.batch, self.seed = args.batch, args.seed
        self.vocab, self.length = getattr(args, "vocab", None), getattr(args, "length", None)
        self.held_out = self.spare = self.seed_there = None  # made by `build`

    def check(self):
        """Raise Refused, in one line, where flags do not fit together; nothing is built yet."""
        a = self.args
        for flag, what in (("no_conv", "convolution"), ("rotate", "such states"), ("slow", "such states")):
            if getattr(a, flag, False) and a.model != "mamba":
                raise Refused(
                    f"--{flag.replace('_', '-')} is for mamba alone: --model {a.model} has no {what}"
                )
        if getattr(a, "rotate", False) and getattr(a, "slow", False):
            raise Refused("--rotate has slow states already: leave out --slow")
        positions = min(self.positions(), 2**20)  # one that can be built with so many can be with more
        try_encoding(common.ENCODINGS[a.pe], positions, a.embed, self.for_encoding()["bands"])
        if "held_out" in a and a.held_out > (exist := self.exist()):
            raise Refused(f"--held-out {a.held_out} is more than the {exist} sequences that can be held out")

    @classmethod
    def check_all(cls, tasks):
        """Raise Refused where none of these trials can run, or one is of another text."""

    # -- the model

    def positions(self):
        """Time steps of an episode: the length of encodings that have a last position."""
        return 2 * self.length

    def for_encoding(self):
        """What an encoding is told; the first --length steps are the input, those after them the output."""
        a = self.args
        left_out = {"both": None, "input": slice(self.length, None), "output": slice(self.length)}
        unencoded = left_out[getattr(a, "encode", "both")]
        bands = tuple(map(float, a.bands.split(":")))
        return dict(combine=a.combine, unencoded=unencoded, amplitude=a.amplitude, bands=bands)

    def model(self):
        a = self.args
        sizes = a.vocab, a.embed, a.hidden, self.positions()
        for_layer = None
        if a.model == "mamba":
            given = lambda flag: getattr(a, flag, False)
            for_layer = dict(conv=not given("no_conv"), rotate=given("rotate"), slow=given("slow"))
        return common.Model(a.model, a.pe, *sizes, for_layer, **self.for_encoding())

    def rate(self, i):
        return common.learning_rate(i, self.args.lr, self.args.warmup, self.args.iterations)

    def is_small(self):
        """Whether the model is so small that a second CPU thread does not pay while other trials wait."""
        return self.args.hidden < 256

    def memory(self):
        """A low estimate of the bytes that a trial needs, counted in numbers of four."""
        a, time = self.args, self.positions()
        with torch.device("meta"):
            model = self.model()
        parameters = sum(p.numel() for p in model.parameters())  # and gradients, and Adam's two moments
        states, logits = a.batch * time * 4 * a.hidden, min(a.batch * a.vocab, 2**25)  # logits in chunks
        if a.model == "mamba":
            states *= 8  # 2 H channels of 16
        held_out = 2 * (getattr(a, "held_out", 0) + a.batch) * time  # integers of eight bytes
        return 4 * (4 * parameters + states + logits + held_out + time * a.embed)

    # -- the data

    def exist(self):
        """How many different rows `draw` can return."""
        return common.count_sequences(self.vocab, self.length)

    def draw(self, k, shape):
        """(*shape, W) integers of the training distribution, from the key k."""
        return common.uniform_integers(k, (*shape, self.length), self.vocab)

    def with_commands(self, rows):
        """(B, L) integers -> (B, 2L): the same, then L commands."""
        return torch.cat([rows, torch.full_like(rows, self.vocab)], dim=1)

    def episode(self, rows):
        """(B, W) integers -> the common.Episode of what is read and what is answered."""
        raise NotImplementedError

    def mass(self, rows):
        """The chance that a training draw is a held-out row: here, of rows that are equally likely."""
        return len(rows) / self.exist()

    def test_rows(self, device):
        """(N, W) integers that are held out, from the seed alone."""
        count = self.args.held_out
        return common.distinct_rows(self.draw, count, self.seed, common.HELD_OUT, device=device)

    def build(self, device):
        """Whatever takes time or memory. A task whose data are not as it says is refused."""
        rows = self.test_rows(device)
        mass = self.mass(rows)
        self.held_out = common.HeldOut(rows, mass)
        self.seed_there = torch.tensor(self.seed, device=device)  # a tensor: compiled code serves all seeds
        k = common.key(self.seed, common.TRAINING, 0, device=device)  # training starts at iteration 1
        candidates = self.draw(k, (1024,))
        again, others = self.draw(k, (1024,)), self.draw(common.mix(k), (1024,))
        if not torch.equal(candidates, again) or torch.equal(candidates, others):
            raise Refused(f"{self.name}'s draw does not depend on its key, or not on it alone")
        held_out = self.held_out.contains(candidates)
        if (share := held_out.double().mean().item()) > mass + 0.1:  # the chance of so many is below 1e-9
            what = f"{share:.0%} of the rows that {self.name} draws are held out, by its mass() {mass:.1%}"
            raise Refused(f"{what}: mend mass(), or exist() and draw()")
        self.spare = candidates[~held_out][0]
        self.check_episode(self.training_episode(1))
        if not fast.knows(common.LAYERS[self.args.model], common.ENCODINGS[self.args.pe]):
            self.check_model(self.model().to(device).eval())

    @torch.no_grad()
    def check_model(self, model):
        """Raise Refused where a model of one's own does not answer each row by itself."""
        episode, name = self.test_episode(), type(model.layer).__name__
        first, second, both = (episode.rows(part) for part in (slice(1), slice(1, 2), slice(2)))
        first, second, together = (model(part.inputs, part.steps) for part in (first, second, both))
        wanted, found = (*both.targets.T.shape, self.vocab), tuple(together.shape)
        if found != wanted:
            raise Refused(
                f"{name} makes logits {found}, not {wanted}: its forward ends with select(h, steps)"
            )
        if not torch.allclose(together, torch.cat([first, second], dim=1), rtol=1e-2, atol=1e-3):
            raise Refused(
                f"{name} mixes the rows of a batch: its input is (T, B, inputs), not (B, T, inputs)"
            )

    def check_episode(self, episode):
        """Raise Refused where an episode is not what models, engines and metrics rely on."""
        inputs, targets, steps, weight, last = episode
        time = inputs.shape[1]
        answered = (len(inputs), len(range(time)[steps])) if isinstance(steps, slice) else tuple(steps.shape)
        shape = tuple(targets.shape)
        wrong = None
        if time != self.positions():
            wrong = f"has {time} steps, but its positions() {self.positions()}"
        elif not 0 <= last <= time or (inputs[:, time - last :] != self.vocab).any():
            wrong = f"reads more than commands in its last commands={last} steps"
        elif inputs.min() < 0 or inputs.max() > self.vocab:
            wrong = f"reads other integers than 0 to K = {self.vocab}, the command"
        elif shape != answered or targets.dtype != torch.int64:
            wrong = f"answers {answered} steps, but its targets are {shape}, {targets.dtype}"
        elif targets.min() < 0 or targets.max() >= self.vocab:
            wrong = f"has other targets than 0 to K - 1 = {self.vocab - 1}, what a model can answer"
        elif weight is not None and tuple(weight.shape) != shape:
            wrong = f"has targets of shape {shape}, but a weight of {tuple(weight.shape)}"
        if wrong:
            raise Refused(f"an episode of {self.name} {wrong}")

    def training_rows(self, i):
        """(B, W) integers: for every row candidates are drawn, and the first allowed one is taken."""
        k = common.key(self.seed_there, common.TRAINING, i, device=self.spare.device)
        candidates = self.draw(k, (self.held_out.rounds, self.batch))  # (R, B, W)
        return self.held_out.first_allowed(candidates, self.spare)

    def training_episode(self, i):
        """The batch of iteration i, an integer or a 0-dimensional tensor on the device."""
        return self.episode(self.training_rows(i))

    def test_episode(self):
        return self.episode(self.held_out.rows)

    # -- a trial

    run = None  # a task that does not train a trial, or not only, has run(self, argv, stop) -> an exit code

    def has_begun(self):
        """Whether a process would continue what another one has saved."""
        return os.path.exists(self.folder / "last.pt")  # False, not an error, where it cannot be looked for

    def result(self):
        """The metrics of the trial if it is done, else None."""
        return files.finished_metrics(self.folder)

    def unlike(self, content):
        """Why the content of a result's file is not to be reported as this trial's, in words; or None."""
        return differences(content.get("config", {}), self.config)

    def hint(self):
        """A line to print below the metrics of a finished trial, if there is anything to say."""

    def begin(self):
        """Prepare files -> an exit code where the flags asked for nothing more, else None, to train."""

    def loss_and_accuracy(self, model, episode, engine):
        return engine.loss_and_accuracy(model, episode)

    def answers(self, model, episode, engine):
        """Predictions and cross-entropies, (N, M) each."""
        return common.answers(functools.partial(engine.logits, model), episode, self.batch)

    def evaluate(self, model, engine):
        """The metrics of the held-out test."""
        episode = self.test_episode()
        return common.sequence_metrics(episode, *self.answers(model, episode, engine))
