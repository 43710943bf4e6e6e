"""Flags, folder names, grids of trials.

Where a flag's value comes from; what stands first wins:
    the grid's row, of a trial that is listed; where the flag is typed too, rows of other values are left out
        (but typed seeds stand in place of the grid's)
    what follows from others that are typed: Task.implied
    what is typed
    the scale: Task.scales
    the default: Task.scales["paper"], else what is declared below
    where that is None: Task.defaults, which depend on the values of other flags

A folder's name leaves out what is at its default.
"""

from suite import __version__
from suite.claims import Outcomes, judge_all
from suite.task import BAD_FLAGS, Task

import argparse
import functools
import itertools
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import common
from common import Refused

SEEDS = range(5)
BOTH = ["none", "sin"]  # encodings that most grids compare, here without a control
WITH_DUP, WITH_CONSTANT = ["none", "dup", "sin"], ["none", "constant", "sin"]
WITH_CONTROLS = ["none", "constant", "dup", "sin"]
SMOKE = dict(iterations=20, batch=8, hidden=16, embed=16, save_every=10, log_every=5, device="cpu")


def cross(**flags):
    """All combinations: cross(model="lstm", vocab=[256, 512], seed=SEEDS) is ten trials."""
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


# ------------------------------------------------------------------------------------------------------------
# What a flag's value may be
# ------------------------------------------------------------------------------------------------------------


def number(kind, wanted, accept):
    """An argparse type that says what would be right."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accept(value) or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value + 0  # -0.0 + 0 is 0.0, which names the same folder

    return convert


MOST = 2**31 - 1  # larger counts overflow somewhere, and fit no memory
COUNT = number(int, "a whole number from 1 to 2^31 - 1", lambda x: 1 <= x <= MOST)
AT_LEAST_2 = number(int, "a whole number from 2 to 2^31 - 1", lambda x: 2 <= x <= MOST)
NATURAL = number(int, "a whole number from 0 to 2^31 - 1", lambda x: 0 <= x <= MOST)
SEED = number(int, "a whole number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)
POSITIVE = number(float, "a finite number above 0", lambda x: x > 0)
NOT_NEGATIVE = number(float, "a finite number of at least 0", lambda x: x >= 0)
FRACTION = number(float, "a number in [0, 1)", lambda x: 0 <= x < 1)


def seed_or_range(text):
    """One seed, or a range of them such as 0-4."""
    first, dash, last = text.partition("-")
    if not (first and dash):
        return SEED(text)
    if not SEED(first) <= SEED(last) < SEED(first) + 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST, rising, of a thousand seeds at most")
    return range(int(first), int(last) + 1)


def bands(text):
    """LOW:HIGH, written alike for the same numbers: it names a folder."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = math.nan
    if not 0 <= low < high <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH with 0 <= LOW < HIGH <= 1")
    return f"{low + 0.0:.15g}:{high:.15g}"  # -0.0 + 0.0 is 0.0


def one_line(text):
    """Text without what would break the lines of --list, or a file's name."""
    if any(character in text for character in "\n\r\0"):
        raise argparse.ArgumentTypeError(f"{text!r} has a line break or NUL in it")
    if any("\ud800" <= character <= "\udfff" for character in text):  # as Python reads other bytes
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")
    return text


def file_path(text):
    """A file's, to be read or written."""
    path = Path(os.path.expanduser(one_line(text)))
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that exists")
    return path


def not_empty(text):
    if not text:
        raise argparse.ArgumentTypeError("it is empty: an unset variable?")
    return one_line(text)


def place(text):
    """A folder's or a file's path, which need not be there."""
    return os.path.expanduser(not_empty(text))  # a shell leaves the ~ of --out=~/runs as it is


# ------------------------------------------------------------------------------------------------------------
# Flags: each is declared once; its group says whether it changes a result
# ------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--") and word.partition("=")[2] == "--":  # argparse makes an empty list of it
                self.error(f"{word}: -- is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        self.exit(BAD_FLAGS, f"{self.prog}: error: {' '.join(str(message).splitlines())}\n")


METAVARS = {COUNT: "N", AT_LEAST_2: "N", NATURAL: "N", seed_or_range: "N", bands: "LOW:HIGH"}
METAVARS |= {POSITIVE: "X", NOT_NEGATIVE: "X", FRACTION: "X", one_line: "TEXT", place: "FOLDER"}


class Declared(NamedTuple):
    """A task's flags."""

    parser: Parser  # it returns what was typed and nothing else: `parse` adds the defaults
    defaults: dict  # every flag's, at paper scale
    science: set  # the names of those that change a result
    kinds: dict  # of each its type or choices, as argparse is told


@functools.cache
def declare(task):
    about = dict(description=sys.modules[task.__module__].__doc__, allow_abbrev=False)
    parser = Parser(f"{task.name}.py", formatter_class=argparse.RawDescriptionHelpFormatter, **about)
    parser.add_argument("--version", action="version", version=__version__)
    defaults, science, kinds = {}, set(), {}

    def group(title, changes_results):
        """A function that declares a flag; --help shows the groups in this order."""
        into = parser.add_argument_group(title)

        def flag(name, default, help, **more):
            key = name[2:].replace("-", "_")
            defaults[key] = value = task.scales.get("paper", {}).get(key, default)
            if changes_results:
                science.add(key)
            shown = "" if value is None or value is False else f" ({value})"
            if not more.keys() & {"type", "choices", "action"}:
                more["type"] = one_line
            if more.get("type") in METAVARS:
                more.setdefault("metavar", METAVARS[more["type"]])
            kinds[key] = more
            into.add_argument(name, default=argparse.SUPPRESS, help=help + shown, **more)

        return flag

    def if_wanted(flag):
        def declared(name, *about, **more):
            if name not in task.without:
                flag(name, *about, **more)

        return declared

    trial, plumbing = group("the trial (these change its result)", True), group("where and how often", False)
    trial_flags(if_wanted(trial))
    task.add_flags(trial, plumbing)
    run_flags(if_wanted(plumbing))
    many_flags(if_wanted(group("many trials", False)), task)
    model_flags(if_wanted(group("more of the model (these change the result)", True)))
    training_flags(if_wanted(group("more of the training (these change the result)", True)))
    computing_flags(if_wanted(group("how it is computed (no other result, but for bf16)", False)))
    return Declared(parser, defaults, science, kinds)


def refuse_wrong_scales(task):
    if "paper" not in task.scales:
        raise Refused(f"{task.name} has no scale 'paper', which holds what differs from the defaults")
    for name, values in task.scales.items():
        if what := fault_of_values(task, values):
            raise Refused(f"{task.name}'s scale {name!r} {what}")


def fault_of_values(task, values):
    """What is wrong with {flag: value}, in words, or None. A value is to be what is read when it is typed."""
    kinds = declare(task).kinds
    for flag, value in values.items():
        if flag not in kinds:
            return f"sets {flag}: there is no such flag"
        if value is None or value is False:  # left at its default
            continue
        read = kinds[flag].get("type", type(value))
        try:
            typed = read(str(value))
        except argparse.ArgumentTypeError as error:
            return f"sets {flag}: {error}"
        if typed != value or value not in kinds[flag].get("choices", [value]):
            return f"sets {flag} to {value!r}, which is none of its values"
        if type(typed) is not type(value):  # 0 and 0.0 name two folders
            return f"sets {flag} to {value!r}: write {typed!r}"


def trial_flags(flag):
    flag("--model", "lstm", "the layer", choices=list(common.LAYERS))
    flag("--pe", "sin", "encoding of the time step", choices=list(common.ENCODINGS))
    flag("--vocab", 16384, "number of different integers, K", type=AT_LEAST_2)
    flag("--length", 64, "integers in the input, L", type=COUNT)
    flag("--seed", 0, "draws weights, data and held-out set; 0-4: five trials", type=seed_or_range)
    flag("--hidden", 512, "size of the layer's state", type=COUNT)
    flag("--embed", 512, "size of the embedding, and of the encoding", type=COUNT)
    flag("--iterations", 300_000, "batches to train on", type=COUNT)
    flag("--batch", 512, "sequences per iteration", type=COUNT)
    flag("--lr", 1e-3, "peak of the learning rate", type=POSITIVE)


def run_flags(flag):
    flag("--device", "auto", "auto: cuda if there", choices=["auto", "cpu", "cuda"])
    flag("--out", "runs", "folder of all trials", type=place)
    flag("--overwrite", False, "delete the trial's folder and start anew", action="store_true")
    flag("--save-every", 5000, "iterations between checkpoints", type=COUNT)
    flag(
        "--snapshot-every",
        None,
        "iterations between kept weights (0: none; --dual-freq: 5000 or, if less, iterations/10)",
        type=NATURAL,
    )
    flag("--log-every", 100, "iterations per row of curve.csv", type=COUNT)


def many_flags(flag, task):
    figure = dict(nargs="?", const=False, type=not_empty, metavar="FIGURE")  # False: all figures
    flag("--scale", "paper", "set of defaults and grids", choices=list(task.scales))
    flag("--list", None, f"print a command per trial: {', '.join(task.figures)}", **figure)
    flag("--all", None, "run them, --jobs at a time, then report", **figure)
    flag("--report", None, "tables, figures, claims of trials on disk", **figure)
    flag("--jobs", None, "processes at a time (on a CPU one per core, on CUDA 1)", type=COUNT)


def model_flags(flag):
    flag("--combine", "concat", "encoding with embedding", choices=["concat", "add"])
    phases = "where the encoding is: in the steps that read the input, or in those after them"
    flag("--encode", "both", phases, choices=["input", "output", "both"])
    lengths = "length of the encoding's vectors (1; learned ones start at the root of --embed)"
    flag("--amplitude", None, lengths, type=POSITIVE)
    part = "share of the sinusoid's frequencies that is kept, 0 the fastest"
    flag("--bands", "0:1", part, type=bands)
    flag("--no-conv", False, "mamba without its short convolution", action="store_true")
    flag("--rotate", False, "mamba with complex states, which turn; half as many", action="store_true")
    flag("--slow", False, "mamba with states that decay as slowly as those of --rotate", action="store_true")


def training_flags(flag):
    flag("--held-out", None, "test sequences, never trained on (1024; --dual-freq: 64 L)", type=COUNT)
    flag("--warmup", None, "iterations of linear warm-up (1000 or, if less, iterations/10)", type=NATURAL)
    flag("--beta1", 0.9, "Adam's first decay", type=FRACTION)
    flag("--beta2", 0.999, "Adam's second decay; released code: 0.98", type=FRACTION)
    flag("--eps", 1e-8, "Adam's epsilon; released code: 1e-9", type=NOT_NEGATIVE)
    flag("--clip", 1.0, "largest gradient norm, 0: any", type=NOT_NEGATIVE)


def computing_flags(flag):
    engines = "fast: suite/fast.py; torch: torch.nn; auto: fast, but on a CPU torch for a small lstm or s4d"
    flag("--engine", "auto", engines, choices=["auto", "fast", "torch"])
    precisions = "of products (CUDA: tf32, CPU: fp32); bf16 trains in folders of its own, is tested in tf32"
    flag("--precision", None, precisions, choices=["fp32", "tf32", "bf16"])
    flag("--no-graph", False, "on CUDA: no graph of the iteration, to debug", action="store_true")
    flag("--deterministic", False, "on CUDA: the same bits every time, slower", action="store_true")


def parse(task, argv):
    """-> (args, what was typed). The scale sets defaults; an explicit flag wins."""
    parser, defaults, *_ = declare(task)
    refuse_wrong_scales(task)
    given = vars(parser.parse_args(argv))
    scale = task.scales[given.get("scale", "paper")]
    return argparse.Namespace(**(defaults | scale | given | task.implied(given))), given


# ------------------------------------------------------------------------------------------------------------
# From flags to the task of one trial
# ------------------------------------------------------------------------------------------------------------

ENCODING_FLAGS = "combine", "encode", "amplitude", "bands"


def complete(task, args):
    """The task of one trial: the flags whose default depends on others are set, and all fit together.

    Its folder is OUT/TASK/MODEL-PE-K..-L..[-flag=value of all off the paper's default]/seedN, its `config`
    the flags that change the result.
    """
    defaults = declare(task).defaults
    args = argparse.Namespace(**vars(args))
    base, task = task, task.variant(args)
    if task.trainer() != base.trainer():
        raise Refused(
            f"with these flags {base.name} is {task.name}: its variant() has to return its own class"
        )
    usual = defaults | {"warmup": min(1000, args.iterations // 10), "snapshot_every": 0} | task.defaults(args)
    for flag, value in usual.items():
        if getattr(args, flag, value) is None:
            setattr(args, flag, value)
    if "warmup" in args and args.warmup > args.iterations:
        raise Refused(f"--warmup {args.warmup} is above --iterations {args.iterations}")
    refuse_meaningless(args, usual)
    science = science_of(base, args)
    config = {k: v for k, v in sorted(vars(args).items()) if k in science}
    found = task(args, config, Path(task.folder_of(args, folder_name(task, config, usual))))
    found.check()
    return found


def science_of(task, args):
    """The flags that change the result; of the precisions, bf16 alone does so beyond rounding."""
    return declare(task).science | ({"precision"} if args.precision == "bf16" else set())


def refuse_meaningless(args, usual):
    """Flags about encodings that this encoding cannot follow."""
    for flag in ENCODING_FLAGS:
        changed = flag in args and getattr(args, flag) != usual[flag]
        if changed and flag not in followed(common.ENCODINGS[args.pe]):
            others = ", ".join(pe for pe, one in common.ENCODINGS.items() if flag in followed(one))
            raise Refused(f"--{flag} means nothing with --pe {args.pe}: choose from {others}")


def followed(encoding):
    """The flags about encodings that have an effect: those it accepts, unless it inherits that from a class
    whose `join` or `vectors` it has replaced, and may follow none."""
    origin = lambda name: next(one for one in encoding.__mro__ if name in vars(one))
    its_own = all(issubclass(origin("accepts"), origin(name)) for name in ("join", "vectors"))
    return encoding.accepts if its_own else ()


def folder_name(task, config, usual):
    begins = [f"{before}{config[flag]}" for flag, before in task.named.items()]
    others = [flag for flag in config if flag not in ("seed", *task.named) and config[flag] != usual[flag]]
    return "-".join([*begins, *(flag_in_folder(flag, config[flag]) for flag in others)])


def flag_in_folder(flag, value):
    name = flag.replace("_", "-")
    value = f"{value[0]}-{value[-1]}" if isinstance(value, range) else value
    return name if value is True else f"{name}={value}"


def as_words(flag, value):
    """A flag on a command line; a value of True stands for the bare flag, one of False for none."""
    name = f"--{flag.replace('_', '-')}"
    if isinstance(value, bool):
        return [name] * value
    return [f"{name}={value}"] if str(value).startswith("-") else [name, str(value)]


def command_line(flags):
    """{flag: value} as the words of a command line."""
    return [word for flag, value in flags.items() for word in as_words(flag, value)]


# ------------------------------------------------------------------------------------------------------------
# Grids
# ------------------------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """A trial of a grid."""

    flags: dict  # the grid's
    words: list  # of its command line
    task: Task


def choices(given):
    """{flag: its values} of what was typed: several of a range of seeds, else one."""
    return {k: v if isinstance(v, range) else [v] for k, v in given.items()}


NOT_CARRIED = {"list", "all", "report", "jobs"}


@functools.cache
def refuse_wrong_grids(task):
    """Refuse grids and claims that do not fit the task: they would mislead, or be of no effect."""
    grids = [(scale, *item) for scale, figures in task.grids.items() for item in figures.items()]
    for scale, name, rows in grids:
        if what := fault_of_grid(task, scale, name, rows):
            raise Refused(f"{task.name}'s grid {name!r} at {scale} scale {what}")
    for claim in vars(task).get("claims", ()):  # not of those that are another task's
        rows = [rows for scale, name, rows in grids if name == claim.figure and claim.is_made_at(scale)]
        try:
            outcomes = [Outcomes([(row, None) for row in one]) for one in rows]
            whys = [verdict.why for one in outcomes for verdict in judge_all([claim], one)]
        except (KeyError, IndexError, ValueError) as error:
            whys = [f"its words or flags are not the grid's: {error!r}"]
        if not any(why.startswith("n = 0") for why in whys):  # all is there but the trials
            what = whys[0] if whys else f"no grid of {claim.figure!r} has such trials"
            raise Refused(f"{task.name}'s claim {claim.text!r}: {what}")


def fault_of_grid(task, scale, name, rows):
    """What is wrong with it, in words, or None."""
    if scale not in task.scales or name not in task.figures:
        return "is of no scale or figure of the task"
    science, own, figure = declare(task).science | {"precision"}, {}, task.figures[name]
    wanted = set() if figure.curves else {"pe", figure.x}
    wanted |= {"model", "pe", "vocab"} if figure.training else set()
    for row in rows:
        if what := fault_of_values(task, row):
            return what
        if lacking := wanted - row.keys():
            return f"does not set {min(lacking)}, by which its figure is drawn"
        other = own.setdefault(frozenset(item for item in row.items() if item[0] in science), row)
        if differ := [flag for flag in row if row[flag] != other.get(flag)]:
            return f"has several values of {differ[0]}, which is declared to change no result"


def figure_grids(task, scale, figure=False):
    """{figure: its rows} of a scale; it must have the figure, if one is named."""
    refuse_wrong_grids(task)
    grids = task.grids.get(scale, {})
    if figure and figure not in grids:
        scales = [name for name, others in task.grids.items() if figure in others]
        there = f"it is at --scale {' or '.join(scales)}" if scales else f"choose from {', '.join(grids)}"
        raise Refused(f"no figure {figure!r} at --scale {scale} ({there})")
    return grids


def grid(task, args, given, figure):
    """[Listed] of a figure's trials, or of all figures' for False; a flag of None is left at its default.

    A given flag that the grid sets too keeps only the trials that agree, but seeds stand in place of the
    grid's; the others go into every command.
    """
    trials = {}
    wanted = choices(given)
    for flags in rows_of(task, args, given, figure):
        if all(flags[k] in wanted[k] for k in flags.keys() & wanted.keys()):
            carried = {k: v for k, v in given.items() if k not in NOT_CARRIED | flags.keys()}
            typed = {k: v for k, v in flags.items() if v is not None}
            words = command_line(typed | carried)
            found = complete(task, argparse.Namespace(**(vars(args) | typed)))
            trials.setdefault(found.folder, Listed(flags, words, found))
    return list(trials.values())


def rows_of(task, args, given, figure):
    """The rows of a figure's grid, or of all figures' for False; given seeds stand in place of the grid's."""
    grids = figure_grids(task, args.scale, figure)
    rows = grids[figure] if figure else list(itertools.chain(*grids.values()))
    if "seed" not in given:
        return rows
    cells = {tuple((k, v) for k, v in row.items() if k != "seed"): row for row in rows}
    return [row | {"seed": seed} for row in cells.values() for seed in choices(given)["seed"]]


def refuse_half_set(task, args, given, figure):
    """Refuse a flag that a part of a figure's trials set: it would select of these and change the others."""
    rows, wanted = rows_of(task, args, given, figure), choices(given)
    for flag in given:
        others = wanted.keys() - {flag}
        rest = [row for row in rows if all(row[k] in wanted[k] for k in row.keys() & others)]
        own = [row for row in rest if flag in row]
        if own and len(own) < len(rest):
            name, flag = figure or "all figures", as_words(flag, True)[0]
            what = f"{len(own)} of these {len(rest)} trials of {name} have their own {flag}"
            raise Refused(f"{what}: say by other flags, such as --model, which ones are meant")


def trials_of_scale(task, out, scale, seeds=None):
    """{figure: [Listed]} of a scale, none where the task has no such scale; seeds of None: the grids' own."""
    if scale not in task.scales:
        return {}
    args, given = parse(task, [f"--out={out}", "--scale", scale])
    given |= {} if seeds is None else {"seed": seeds}
    return {figure: grid(task, args, given, figure) for figure in task.grids.get(scale, {})}
