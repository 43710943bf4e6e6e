"""What a script provides: a task, a subclass of `Task`, and its figures. README.md has a complete example."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

import common

MOST = 2**31 - 1  # larger numbers overflow
SEEDS = range(5)
BOTH, WITH_CONSTANT, WITH_DUP = ["none", "sin"], ["none", "constant", "sin"], ["none", "dup", "sin"]
SMOKE = dict(iterations=20, batch=8, hidden=16, embed=16, save_every=10, log_every=5, device="cpu")


def cross(**flags):
    """All combinations: cross(model="lstm", vocab=[256, 512], seed=SEEDS) is ten trials."""
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


class Flag(NamedTuple):
    """A flag of the command line: `min_length` is --min-length there."""

    name: str
    default: object  # None may depend on other flags, see Task.defaults
    help: str
    kind: Callable = str  # int, float, str, bool, or a function of the text
    least: float = 0  # of int and float
    below: float = MOST
    choices: tuple | None = None
    science: bool = True  # it changes the result, so it is a part of the folder's name


ACCURACY = {"accuracy": "token_accuracy"}
BOTH_METRICS = ACCURACY | {"edits": "damerau_levenshtein"}


class Figure(NamedTuple):
    """Trials, and what is told of them: a table and a picture of metrics, and verdicts.

    The picture has each metric over the flag x, a line for each encoding. With `curves` it has those instead.
    """

    title: str
    grids: dict  # scale -> [{flag: value}, ...], a row per trial
    verdicts: Callable  # of verdicts.Runs: yields verdicts.Verdict
    metrics: dict = ACCURACY  # name -> one of a trial's metrics, or a function
    x: str | tuple = "vocab"
    curves: Callable | None = None  # of a verdicts.Run: yields (panel, line, {x: y})
    y: str = "token accuracy"  # of the curves
    notes: tuple = ()  # generators of Runs: lines that stand below the table
    picture: bool = True


class Task:
    """A subclass has a name and scales, and says what it draws and asks."""

    name = ""  # the script's
    scales: dict  # scale -> its defaults, where they differ from the paper's
    figures: dict  # name -> Figure, see `figure`
    flags = ()  # its own Flags
    without = ()  # names of shared flags that mean nothing here
    named = dict(model="", pe="", vocab="K", length="L")  # of a folder: flag -> word before its value
    # Whether training_episode(i) can be a part of a CUDA graph: i may be a tensor, shapes are fixed, and the
    # host never waits. If not, training_episode(i, in_graph=True) gives tensors of few sizes, a graph each.
    in_graph = True
    file = "result.json"  # what a finished trial has
    run = None  # a task that does not just train has run(self, argv, stop) -> exit code

    def __init_subclass__(cls):
        if "name" in vars(cls):
            cls.figures = {}

    @classmethod
    def figure(cls, name, title, grids, **more):
        """A decorator for the generator of a figure's verdicts: adds the figure to the task."""

        def add(verdicts):
            cls.figures[name] = Figure(title, grids, verdicts, **more)
            return verdicts

        return add

    @classmethod
    def defaults(cls, args):
        """The flags whose default depends on other flags."""
        warmup, amplitude = min(1000, args.iterations // 10), common.ENCODINGS[args.pe].usual(args.embed)
        return dict(held_out=1024, warmup=warmup, snapshot_every=0, amplitude=amplitude)

    def __init__(self, args, config, folder):
        """`config` holds the flags that change the result."""
        self.args, self.config, self.folder = args, config, folder
        self.batch, self.seed, self.vocab, self.length = args.batch, args.seed, args.vocab, args.length

    def check(self):
        """Raise common.Refused where flags do not fit together."""
        if self.args.blocks > 1 and self.args.model != "mamba":
            raise common.Refused(f"--blocks is for --model mamba, not {self.args.model}")
        common.ENCODINGS[self.args.pe](self.positions(), self.args.embed, **self.for_encoding())

    def begin(self):
        """Before a trial, and before --all: find what it needs beside flags, such as a text."""

    # -- the model

    def positions(self):
        """Time steps of an episode."""
        return 2 * self.length

    def for_encoding(self):
        """What the encoding is made with; the output begins after --length steps."""
        a, length = self.args, self.length
        left_out = {"both": None, "input": slice(length, None), "output": slice(length)}
        bands = tuple(map(float, a.bands.split(":")))
        return dict(combine=a.combine, unencoded=left_out[a.encode], amplitude=a.amplitude, bands=bands)

    def model(self):
        a = self.args
        sizes = a.vocab, a.embed, a.hidden, self.positions(), a.blocks
        return common.Model(a.model, a.pe, *sizes, **self.for_encoding())

    def rate(self, i):
        return common.learning_rate(i, self.args.lr, self.args.warmup, self.args.iterations)

    def loss_and_accuracy(self, model, episode, engine):
        return engine.loss_and_accuracy(model, episode)

    # -- the data

    def draw(self, k, shape):
        """(*shape, W) integers of the training distribution, from the key k alone."""

    def mass(self, rows):
        """The chance that a training draw is one of the rows: here all rows are equally likely."""
        return len(rows) * float(self.vocab) ** -rows.shape[1]

    def test_rows(self, device):
        """(N, W) integers that are held out, from the seed alone."""
        return common.distinct_rows(self.draw, self.args.held_out, self.seed, common.HELD_OUT, device=device)

    def with_commands(self, rows):
        """(B, L) integers -> (B, 2L): the same, then L commands."""
        return torch.cat([rows, torch.full_like(rows, self.vocab)], dim=1)

    def episode(self, rows):
        """(B, W) integers -> the common.Episode of what is read and what is answered."""

    def build(self, device):
        """The held-out set, and a training row that is not in it."""
        rows = self.test_rows(device)
        self.held_out = common.HeldOut(rows, self.mass(rows))
        self.seed_there = torch.tensor(self.seed, device=device)  # a tensor: compiled code serves all seeds
        candidates = self.draw(common.key(self.seed, common.TRAINING, 0, device=device), (1024,))
        self.spare = candidates[~self.held_out.contains(candidates)][0]

    def training_episode(self, i):
        """The batch of iteration i, an integer or a 0-dimensional tensor: a function of (seed, i) alone."""
        k = common.key(self.seed_there, common.TRAINING, i, device=self.spare.device)
        candidates = self.draw(k, (self.held_out.rounds, self.batch))  # (R, B, W)
        return self.episode(self.held_out.first_allowed(candidates, self.spare))

    def test_episode(self):
        return self.episode(self.held_out.rows)

    def evaluate(self, model, engine):
        """{name: number} of the held-out test."""
        episode = self.test_episode()
        logits = lambda inputs, steps: engine.logits(model, inputs, steps)
        predictions, losses = common.answers(logits, episode, self.batch)
        metrics = common.sequence_metrics(episode, predictions, losses)
        return self.told(metrics, (predictions == episode.targets).cpu().numpy())

    def told(self, metrics, right):
        """What is kept of the metrics, and others, from `right`, (N, M): is each answer right?"""
        return metrics
