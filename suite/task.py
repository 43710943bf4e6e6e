"""What a script provides: a subclass of `Task`. README.md has an example."""

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

import common
from suite import files

MOST = 100_000_000  # larger ones might overflow
SMOKE = dict(
    iterations=20,
    batch=8,
    hidden=16,
    embed=16,
    save_every=10,
    log_every=5,
    device="cpu",
)


class Flag(NamedTuple):
    """A flag of the command line: `min_length` is --min-length there."""

    name: str
    default: object  # None may depend on other flags, see Task.defaults
    help: str
    type: Callable | None = None  # None: the default's
    least: float = 0  # of int and float
    below: float = MOST
    choices: Iterable | None = None
    affects_result: bool = True  # it changes the result, so it is a part of the folder's name


class Task:
    """A subclass has a name and scales, and says what it draws and asks."""

    name = ""  # the folder of its trials
    scales = {}  # scale -> its defaults, where they differ from the paper's
    figures: dict  # name -> figures.Figure
    flags = ()  # its own Flags
    without = ()  # names of shared flags that mean nothing here
    folder_words = dict(model="", pe="", vocab="K", length="L")  # flag -> word before its value
    # True: the CUDA graph of a step draws its batch, so training_batch(i) takes a tensor i
    # and never makes the host wait. False: batches are an input, with a graph for each size
    one_graph = True
    file = "result.json"  # what a finished trial has
    run = None  # a task that does not just train has run(self) -> exit code

    def __init_subclass__(cls):
        cls.scales = {"paper": {}} | cls.scales
        if "name" in vars(cls):  # another script, with figures of its own
            cls.figures = {}

    @classmethod
    def script(cls):
        """The file's name, such as reverse.py; several scripts may share a `name`."""
        return Path(sys.modules[cls.__module__].__file__).name

    @classmethod
    def defaults(cls, args):
        """{flag: value} of those whose default depends on other flags."""
        return dict(
            held_out=1024,
            warmup=min(1000, args.iterations // 10),
            snapshot_every=0,
            amplitude=common.ENCODINGS[args.pe].default_norm(args.embed),
        )

    def __init__(self, args, config, folder):
        """`config` holds the flags that change the result."""
        self.args, self.config, self.folder = args, config, folder
        self.batch, self.seed = args.batch, args.seed
        self.vocab, self.length = args.vocab, args.length

    def check(self):
        """Raise common.UsageError where flags do not fit together."""
        a = self.args
        if a.warmup > a.iterations:
            raise common.UsageError(f"--warmup {a.warmup} is above --iterations {a.iterations}")
        # Made once, which refuses what does not fit
        common.ENCODINGS[a.pe](self.positions(), a.embed, **self.encoding_options())

    def setup(self):
        """Find what a trial needs beside its flags, such as a text. Comes before all else."""

    # -- the model

    def positions(self):
        """Time steps of a sequence."""
        return 2 * self.length

    def encoding_options(self):
        """What the encoding is made with; the output begins after --length steps."""
        a = self.args
        unencoded = {
            "both": None,
            "input": slice(self.length, None),
            "output": slice(self.length),
        }
        return dict(
            combine=a.combine,
            unencoded=unencoded[a.encode],
            amplitude=a.amplitude,
            bands=tuple(map(float, a.bands.split(":"))),
        )

    def layer(self):
        """layer(inputs, hidden) makes the model's layer."""
        return common.LAYERS[self.args.model]

    def model(self):
        a = self.args
        return common.Model(
            self.layer(),
            a.pe,
            a.vocab,
            a.embed,
            a.hidden,
            self.positions(),
            **self.encoding_options(),
        )

    def trained_model(self, device="cpu"):
        """That of a finished trial. The held-out set is built, too."""
        self.build(device)
        model = self.model().to(device)
        model.load_state_dict(files.load(self.folder / "last.pt", device)["model"])
        return model

    def rate(self, i):
        return common.learning_rate(i, self.args.lr, self.args.warmup, self.args.iterations)

    def features(self, model, batch, engine):
        return engine.features(model, batch)

    # -- the data

    def draw(self, k, shape):
        """(*shape, W) integers of the training distribution, from the key k alone."""
        raise NotImplementedError

    def make_batch(self, rows):
        """(B, W) integers -> the common.Batch of what is read and what is answered."""
        raise NotImplementedError

    def probability(self, rows):
        """The chance that a training draw is one of the rows: here all are equally likely."""
        return len(rows) * float(self.vocab) ** -rows.shape[1]

    def test_rows(self, device):
        """(N, W) integers that are held out, from the seed alone."""
        count, stream = self.args.held_out, (self.seed, common.HELD_OUT)
        return common.distinct_rows(self.draw, count, *stream, device=device)

    def with_commands(self, rows):
        """(B, L) integers -> (B, 2L): the same, then L commands."""
        return torch.cat([rows, torch.full_like(rows, self.vocab)], dim=1)

    def build(self, device):
        """The held-out set, and a training row that is not in it."""
        rows = self.test_rows(device)
        self.held_out = common.HeldOut(rows, self.probability(rows))
        # A tensor, or code would be compiled for every seed anew
        self.seed_on_device = torch.tensor(self.seed, device=device)
        # Of iteration 0, which does not train: the first is 1
        first = common.key(self.seed, common.TRAINING, 0, device=device)
        candidates = self.draw(first, (1024,))
        self.fallback_row = candidates[~self.held_out.contains(candidates)][0]

    def training_batch(self, i):
        """The batch of iteration i, an integer or a tensor: of (seed, i) alone."""
        k = common.key(self.seed_on_device, common.TRAINING, i, device=self.fallback_row.device)
        candidates = self.draw(k, (self.held_out.max_redraws, self.batch))  # (R, B, W)
        return self.make_batch(self.held_out.first_allowed(candidates, self.fallback_row))

    def test_batch(self):
        return self.make_batch(self.held_out.rows)

    def predict(self, model, engine, batch):
        """Answers and cross-entropies, (N, M) each."""
        features = functools.partial(self.features, model, engine=engine)
        return common.predict(features, model.readout, batch, self.batch)

    def evaluate(self, model, engine):
        """{name: number} of the held-out test."""
        batch = self.test_batch()
        predictions, losses = self.predict(model, engine, batch)
        metrics = common.sequence_metrics(batch, predictions, losses)
        return self.summarise(metrics, (predictions == batch.targets).cpu().numpy())

    def examples(self, model, engine):
        """What was read, wanted and answered in the last two held-out sequences."""
        batch = self.test_batch().rows(slice(-2, None))  # of many lengths, the longest
        answers, _ = self.predict(model, engine, batch)
        read = batch.inputs[:, : batch.inputs.shape[1] - batch.commands]
        rows = zip(read.tolist(), batch.targets.tolist(), answers.tolist())
        return [dict(zip(("read", "wanted", "answered"), row)) for row in rows]

    def summarise(self, metrics, correct):
        """Return the metrics to keep; `correct`, (N, M), marks correct predictions."""
        return metrics | {"accuracy_by_position": correct.mean(0).tolist()}
