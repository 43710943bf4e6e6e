"""Base class of the tasks, and the flags that tasks share, with the paper's values as defaults.

sort.py is a small example of a subclass.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

import common
from suite import files

MAX_VALUE = 100_000_000  # of numeric flags, to avoid overflow


class Flag(NamedTuple):
    """A command-line flag; the name `min_length` becomes --min-length."""

    name: str
    default: object  # None: unset, or computed in Task.defaults
    help: str
    type: Callable | None = None  # None: the type of the default
    at_least: float = 0  # smallest number allowed
    below: float = MAX_VALUE  # upper bound, exclusive
    choices: Iterable | None = None
    identifies_trial: bool = True  # recorded; part of the folder name unless at its default


# -- Flags that tasks share; their defaults are the paper's
def parse_seeds(text):
    """Parse a seed, or a range of seeds such as 0-4."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    seeds = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    if not 1 <= len(seeds) <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a seed or 1 to 100 seeds such as 0-4")
    return seeds


def parse_bands(text):
    """Check START:END, a range of frequencies; return it in normal form."""
    try:
        start, end = map(float, text.split(":"))
    except ValueError:
        start = end = 0.0
    if not 0 <= start < end <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not START:END with 0 <= START < END <= 1")
    return f"{start:g}:{end:g}"  # normalised, for the folder name


FLAGS = [
    Flag(
        "model",
        "lstm",
        "recurrent layer (s4d: a state-space model; mingru: an example of a new layer)",
        choices=common.LAYERS,
    ),
    Flag("pe", "sin", "positional encoding", choices=common.ENCODINGS),
    Flag("vocab", 16384, "vocabulary size, K", at_least=2, below=10_000_000),
    Flag("length", 64, "input length, L", at_least=1, below=5000),
    Flag(
        "seed",
        0,
        "random seed, or a range such as 0-4 with --list, --all or report.py (default: 0)",
        parse_seeds,
    ),
    Flag("hidden", 512, "hidden size", at_least=1, below=20_000),
    Flag(
        "embed",
        512,
        "size of the token embedding, and also of the positional encoding",
        at_least=1,
        below=10_000,
    ),
    Flag("iterations", 300_000, "number of training iterations", at_least=1),
    Flag("batch", 512, "batch size", at_least=1, below=1_000_000),
    Flag("lr", 1e-3, "peak learning rate (linear warm-up, then cosine decay to 0)"),
    Flag(
        "warmup",
        None,
        "warm-up iterations (default: min(1000, iterations / 10))",
        int,
    ),
    Flag(
        "held_out",
        None,
        "number of test sequences, held out from training (default: 1024; dual_frequency.py: "
        "64 x --length)",
        int,
        at_least=1,
        below=1_000_000,
    ),
    Flag(
        "combine",
        "concat",
        "how the encoding is combined with the embedding",
        choices=("concat", "add"),
    ),
    Flag(
        "encode",
        "both",
        "time steps that receive the encoding: input, output or both; others receive zeros",
        choices=("input", "output", "both"),
    ),
    Flag(
        "amplitude",
        None,
        "Euclidean norm of each encoding vector (for ramp: of the last one; for learned: RMS "
        "norm before training) (default: 1; for learned: sqrt(--embed))",
        float,
    ),
    Flag(
        "bands",
        "0:1",
        "for --pe sin or shuffled, the frequencies to keep, from the highest (0) to the lowest "
        "(1): 0:0.5 keeps the higher half",
        parse_bands,
    ),
    Flag("beta1", 0.9, "Adam's beta1", below=1),
    Flag("beta2", 0.999, "Adam's beta2", below=1),
    Flag("eps", 1e-8, "Adam's epsilon"),
    Flag("clip", 1.0, "gradient clipping norm; 0 disables clipping"),
]
# Settings that the tasks share at scales desk (laptops) and smoke (tests)
DESK = dict(hidden=128, embed=128, batch=64, iterations=20_000)
SMOKE = dict(
    vocab=8,
    held_out=32,
    iterations=20,
    batch=8,
    hidden=16,
    embed=16,
    save_every=10,
    log_every=5,
    device="cpu",
)


class Task:
    """A task: subclasses define name, scales, data and targets.

    An instance is a trial: the task with one configuration and seed.
    """

    name = ""  # folder name of its trials
    scales = {}  # scale -> {flag: value}, overriding the defaults of FLAGS
    figures: dict  # name -> figures.Figure
    extra_flags = ()  # added to FLAGS, or replacing those of the same name
    unused_flags = ()  # names of shared flags that do not apply
    omitted_at_default = ()  # flags that are not recorded at their default
    folder_prefixes = dict(model="", pe="", vocab="K", length="L")  # e.g. lstm-sin-K256-L32
    # If True, the CUDA graph also draws the batch. training_batch(i) must then accept a tensor
    # and not synchronise. If False, the batch is the graph's input, and each batch shape has a
    # graph of its own
    batch_in_graph = True
    result_file = "result.json"  # marks a finished trial
    run = None  # optional: run(self) -> exit code, instead of training
    model_class = common.Model

    def __init_subclass__(cls):
        cls.scales = {"paper": {}} | cls.scales
        if "name" in vars(cls):  # a subclass without a `name` shares its parent's figures
            cls.figures = {}

    @classmethod
    def script(cls):
        """Return the script's file name, such as reverse.py; scripts may share a `name`."""
        return Path(sys.modules[cls.__module__].__file__).name

    @classmethod
    def defaults(cls, args):
        """Return {flag: default} for defaults that depend on other flags or the task."""
        return dict(
            held_out=1024,
            warmup=min(1000, args.iterations // 10),
            snapshot_every=0,
            amplitude=common.ENCODINGS[args.pe].table_norm(args.embed),
        )

    def __init__(self, args, config, folder):
        """Store the flags: `args` are all, `config` those that affect the result."""
        self.args, self.config, self.folder = args, config, folder
        self.batch_size, self.seed = args.batch, args.seed
        self.vocab, self.length = args.vocab, args.length

    def check(self):
        """Raise common.UsageError if flags are incompatible."""
        a = self.args
        if a.warmup > a.iterations:
            raise common.UsageError(f"--warmup {a.warmup} exceeds --iterations {a.iterations}")
        encoding = common.ENCODINGS[a.pe]
        for flag in FLAGS:
            if flag.name in encoding.unused_flags and getattr(a, flag.name) != flag.default:
                raise common.UsageError(f"--{flag.name} has no effect with --pe {a.pe}")
        # The constructor checks its arguments
        encoding(self.n_steps(), a.embed, **self.encoding_options())

    def load_inputs(self):
        """Load files that the trial reads, such as a text; by default, there are none."""

    # -- the model

    def n_steps(self):
        """Return the number of time steps in a sequence."""
        return 2 * self.length

    def encoding_options(self):
        """Return the encoding's keyword arguments."""
        a = self.args
        zeroed_steps = {  # the output starts at step --length, counted from 0
            "both": None,
            "input": slice(self.length, None),
            "output": slice(self.length),
        }
        return dict(
            combine=a.combine,
            zeroed_steps=zeroed_steps[a.encode],
            amplitude=a.amplitude,
            bands=tuple(map(float, a.bands.split(":"))),
        )

    def layer_class(self):
        """Return the layer's constructor, called with (input_size, hidden)."""
        return common.LAYERS[self.args.model]

    def make_model(self):
        a = self.args
        return self.model_class(
            self.layer_class(),
            a.pe,
            a.vocab,
            a.embed,
            a.hidden,
            self.n_steps(),
            **self.encoding_options(),
        )

    def load_model(self):
        """Return the model of a finished trial, on the CPU; also build the held-out set."""
        self.prepare_data("cpu")
        model = self.make_model()
        model.load_state_dict(files.load(self.folder / "last.pt", "cpu")["model"])
        return model

    def learning_rate(self, i):
        return common.learning_rate(i, self.args.lr, self.args.warmup, self.args.iterations)

    # -- the data

    def draw(self, rng_key, shape):
        """Draw sequences (*shape, W), given rng_key; by default, L uniform integers below K."""
        return common.uniform_integers(rng_key, (*shape, self.length), self.vocab)

    def make_batch(self, sequences):
        """Return the common.Batch of inputs and targets for sequences (B, W)."""
        raise NotImplementedError

    def held_out_probability(self, sequences):
        """Return the probability that a random sequence is one of `sequences`."""
        return len(sequences) * float(self.vocab) ** -sequences.shape[1]

    def held_out_sequences(self, device, *substream):
        """Return the held-out sequences (N, W) as a function of seed and substream."""
        count, stream = self.args.held_out, (self.seed, common.HELD_OUT_STREAM, *substream)
        return common.distinct_sequences(self.draw, count, *stream, device=device)

    def batch_with_commands(self, sequences, targets, steps=None, mask=None):
        """Return a Batch of sequences (B, L) followed by L commands.

        Targets are at `steps`, by default at the commands.
        """
        commands = torch.full_like(sequences, self.vocab)
        inputs = torch.cat([sequences, commands], dim=1)  # (B, 2L)
        steps = slice(self.length, None) if steps is None else steps
        return common.Batch(inputs, targets, steps, mask, n_commands=self.length)

    def prepare_data(self, device):
        """Build the held-out set, and draw a fallback training sequence outside it."""
        sequences = self.held_out_sequences(device)
        self.held_out_set = common.HeldOutSet(sequences, self.held_out_probability(sequences))
        # A tensor: an integer would cause recompilation for every seed
        self.seed_on_device = torch.tensor(self.seed, device=device)
        # Drawn for iteration 0; training starts at 1
        rng_key = common.derive_key(self.seed, common.TRAIN_STREAM, 0, device=device)
        candidates = self.draw(rng_key, (1024,))
        self.fallback_sequence = candidates[~self.held_out_set.contains(candidates)][0]

    def training_batch(self, i):
        """Return the batch of iteration i (integer or tensor), a function of seed and i."""
        rng_key = common.derive_key(
            self.seed_on_device, common.TRAIN_STREAM, i, device=self.fallback_sequence.device
        )
        shape = self.held_out_set.n_candidates, self.batch_size
        candidates = self.draw(rng_key, shape)  # (R, B, W)
        return self.make_batch(
            self.held_out_set.first_allowed(candidates, self.fallback_sequence)
        )

    def held_out_batch(self):
        return self.make_batch(self.held_out_set.sequences)

    def evaluate(self, model, engine):
        """Return {metric: value} on the held-out set."""
        batch = self.held_out_batch()
        predictions, losses = common.predict(engine.features, model, batch, self.batch_size)
        metrics = common.sequence_metrics(batch, predictions, losses)
        return self.task_metrics(metrics, (predictions == batch.targets).cpu().numpy())

    def examples(self, model, engine):
        """Return inputs, targets and predictions for the last two held-out sequences."""
        batch = self.held_out_batch().select(slice(-2, None))  # the longest, if lengths vary
        predictions, _ = common.predict(engine.features, model, batch, self.batch_size)
        inputs = batch.inputs[:, : self.n_steps() - batch.n_commands]
        examples = zip(inputs.tolist(), batch.targets.tolist(), predictions.tolist())
        return [dict(inputs=x, targets=y, predictions=z) for x, y, z in examples]

    def task_metrics(self, metrics, correct):
        """Return the task's metrics, by default with accuracy by position.

        `metrics` come from common.py; `correct` (N, M) marks correct predictions.
        """
        return metrics | {"accuracy_by_position": correct.mean(0).tolist()}
