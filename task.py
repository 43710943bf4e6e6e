"""What a script provides: its task, as a subclass of `Task`. README.md has a complete example."""

import functools

import torch

import common
import fast
import trial
from common import Refused

NAMED = dict(model="", pe="", vocab="K", length="L")  # flag -> what stands before its value


@functools.cache  # a grid has few of them, and hundreds of trials
def can_be_made(encoding, embed, bands):
    """An encoding refuses what it cannot be; none is kept."""
    with torch.device("meta"):
        encoding(1, embed, bands=bands)


class Task:
    """A script's task is a subclass; an instance holds the flags of one trial.

    It has to say what an `episode` is; the rest is as in the paper's reversal by default. cli.py adds
    `config`, the flags that change the result, and `folder`.
    """

    name = ""  # the script's, and the first folder under --out
    scales: dict  # scale -> its defaults; "paper" holds what differs from the defaults in cli.py
    grids: dict  # scale -> figure -> [{flag: value}, ...], one entry per trial (see cli.cross)
    figures: dict  # figure -> report.Figure, how to print and draw it
    claims = ()  # report.Claim, what the paper says about these figures
    without = ()  # shared flags that mean nothing here, such as "--held-out"
    only_alone = ()  # flags that do something else than train: not for several trials at once
    named = NAMED  # what begins a folder's name, and with what
    under = ""  # the first folder, where the trials are another task's
    # training_episode(i) takes i as a tensor too and never waits for the device: it is part of a CUDA graph.
    # False: training_episode(i, in_graph=True) is a tuple of tensors in few sizes, each of which has a graph.
    graph = True
    sizes = "--batch, --length, --hidden, --embed or --vocab"  # what to lower where memory does not suffice
    always_fast = False  # --engine auto is fast at every size and on every device

    @staticmethod
    def add_flags(science, plumbing):
        """More flags, each by science(name, default, help, ...), or plumbing(...) if it changes no result."""

    @classmethod
    def implied(cls, given):
        """{flag: value} of the flags that follow from those given on the command line."""
        return {}

    @classmethod
    def bind(cls, args):
        return cls(args)

    def __init__(self, args):
        self.args = args
        self.vocab, self.length, self.batch, self.seed = args.vocab, args.length, args.batch, args.seed

    def defaults(self):
        """Of flags whose default depends on others."""
        return {"held_out": 1024, "amplitude": common.ENCODINGS[self.args.pe].usual(self.args.embed)}

    def check(self):
        """Raise Refused, in one line, where flags do not fit together; nothing is built yet."""
        a, encoding = self.args, common.ENCODINGS[self.args.pe]
        for flag, usual in dict(combine="concat", encode="both", amplitude=None, bands="0:1").items():
            if flag not in encoding.accepts and getattr(a, flag, usual) != usual:
                others = ", ".join(pe for pe, one in common.ENCODINGS.items() if flag in one.accepts)
                raise Refused(f"--{flag} means nothing with --pe {a.pe}: choose from {others}")
        if getattr(a, "no_conv", False) and a.model != "mamba":
            raise Refused(f"--no-conv is for mamba alone: --model {a.model} has no convolution")
        can_be_made(encoding, a.embed, self.how_encoded()["bands"])
        if "held_out" in a and a.held_out > (exist := self.exist()):
            raise Refused(f"--held-out {a.held_out} is more than the {exist} sequences that exist")

    def positions(self):
        """Time steps of an episode: the length of encodings that have a last position."""
        return 2 * self.length

    def how_encoded(self):
        """What an encoding is told; the first --length steps are the input, those after them the output."""
        a, phases = self.args, dict(input=slice(self.length, None), output=slice(self.length))
        unencoded = phases.get(getattr(a, "encode", "both"))
        bands = tuple(map(float, a.bands.split(":")))
        return dict(combine=a.combine, unencoded=unencoded, amplitude=a.amplitude, bands=bands)

    def model(self):
        a = self.args
        sizes = a.vocab, a.embed, a.hidden, self.positions()
        of_layer = dict(conv=False) if a.no_conv else None
        return common.Model(a.model, a.pe, *sizes, of_layer, **self.how_encoded())

    def rate(self, i):
        return common.learning_rate(i, self.args.lr, self.args.warmup, self.args.iterations)

    def exist(self):
        """How many different sequences there are, of what `draw` draws."""
        return common.power(self.vocab, self.length)

    def draw(self, k, shape):
        """(*shape, W) integers of the training distribution, from the key k."""
        return common.uniform_integers(k, (*shape, self.length), self.vocab)

    def with_commands(self, rows):
        """(B, L) -> (B, 2L): as many commands follow."""
        return torch.cat([rows, torch.full_like(rows, self.vocab)], dim=1)

    def episode(self, rows):
        """(B, W) integers -> the common.Episode of what is read and what is answered."""
        raise NotImplementedError

    def mass(self, rows):
        """The share of the training distribution that the held-out rows are."""
        return len(rows) / self.exist()

    def test_rows(self, device):
        """(N, W) integers that are held out, from the seed alone."""
        count = self.args.held_out
        return common.distinct_rows(self.draw, count, self.seed, common.HELD_OUT, device=device)

    def build(self, device):
        """Whatever takes time or memory."""
        if (count := max(self.args.held_out, 1024)) * self.length > 10**6:
            trial.say(f"drawing {count} sequences of length {self.length}")
        rows = self.test_rows(device)
        self.held_out = common.HeldOut(self.draw, rows, self.mass(rows), self.seed)

    def training_episode(self, i):
        return self.episode(self.held_out.training_rows(i, self.batch))

    def test_episode(self):
        return self.episode(self.held_out.rows)

    def loss_and_accuracy(self, model, episode, how):
        if how["engine"] == "fast":
            return fast.loss_and_accuracy(model, episode, how["compiled"])
        return common.loss_and_accuracy(model(episode.inputs, episode.steps), episode)

    def answers(self, model, episode, how):
        """Predictions and cross-entropies, (N, M) each."""
        if how["engine"] == "fast":
            model = functools.partial(fast.logits, model, compiled=how["compiled"])
        return common.answers(model, episode, self.batch)

    def evaluate(self, model, how):
        """The metrics of the held-out test."""
        episode = self.test_episode()
        return common.sequence_metrics(episode, *self.answers(model, episode, how))

    def begin(self):
        """What has to be there before training -> an exit code where that was all, else None."""

    def run(self, argv, stop):
        """One trial -> its exit code."""
        return trial.train([trial.Trial(self, argv)], stop)[0]

    def hint(self):
        """A line to print below the metrics of a finished trial, if there is anything to say."""

    def result(self):
        """The metrics of the trial if it is done."""
        return trial.finished(self.folder)

    def is_small(self):
        """Whether a second thread on a CPU costs more than it gives where other work waits."""
        return self.args.hidden < 256

    def memory(self):
        """Bytes that a trial needs, at about the least."""
        a, time = self.args, self.positions()
        with torch.device("meta"):
            model = self.model()
        parameters = sum(p.numel() for p in model.parameters())  # and gradients, and Adam's two moments
        states, logits = a.batch * time * 4 * a.hidden, min(a.batch * a.vocab, fast.CHUNK)
        held_out = 2 * (getattr(a, "held_out", 0) + a.batch) * time  # of 8 bytes
        return 4 * (4 * parameters + states + logits + held_out + time * a.embed)
