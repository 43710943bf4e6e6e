"""What a command line does: one trial, or many as processes, or a list of them.

    raise SystemExit(cli.main(Reverse))  # at the end of a script

A flag's value is that of the figure's row, else what is typed, else the scale's, else the
paper's. `task_class` is a script's class, a subclass of Task; `task` is an instance, one trial.
"""

import argparse
import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import common
from common import UsageError
from suite import files, jobs, leave, listen, machine, training
from suite.figures import cross
from suite.task import MOST, SCALES, Flag


def parse_seeds(text):
    first, dash, last = text.partition("-")
    first, last = int(first), int(last) if dash else int(first)
    if not 0 <= first <= last < min(MOST, first + 100):
        raise ValueError
    return range(first, last + 1) if dash else first


def parse_bands(text):
    low, high = map(float, text.split(":"))
    if not 0 <= low < high <= 1:
        raise ValueError
    return f"{low:g}:{high:g}"  # alike for the same numbers: it names a folder


FLAGS = [
    Flag("model", "lstm", "the layer", choices=common.LAYERS),
    Flag("pe", "sin", "encoding of the time step", choices=common.ENCODINGS),
    Flag("vocab", 16384, "vocabulary size, K", int, least=2, below=10_000_000),
    Flag("length", 64, "input length, L", int, least=1, below=5000),
    Flag(
        "seed",
        0,
        "random seed (--list, --all and report.py also take a range)",
        parse_seeds,
        wanted="one seed, or a range of at most 100, such as 0-4",
    ),
    Flag("hidden", 512, "hidden size", int, least=1, below=20_000),
    Flag(
        "embed",
        512,
        "size of the token embedding, and of the positional encoding",
        int,
        least=1,
        below=10_000,
    ),
    Flag("iterations", 300_000, "training iterations", int, least=1),
    Flag("batch", 512, "batch size", int, least=1, below=1_000_000),
    Flag("lr", 1e-3, "peak learning rate", float),
    Flag("warmup", None, "warm-up iterations (1000, or a tenth of --iterations if less)", int),
    Flag(
        "held_out",
        None,
        "held-out test sequences (1024; dual_frequency.py: 64 L)",
        int,
        least=1,
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
        "time steps with the encoding: of the input, the output, or both",
        choices=("input", "output", "both"),
    ),
    Flag(
        "amplitude",
        None,
        "norm of the encoding's vectors (1; learned: square root of --embed)",
        float,
    ),
    Flag(
        "bands",
        "0:1",
        "fraction of the sinusoid's frequencies, from 0 (fastest) to 1",
        parse_bands,
        wanted="LOW:HIGH with 0 <= LOW < HIGH <= 1",
    ),
    Flag("beta1", 0.9, "Adam's beta1", float, below=1),
    Flag("beta2", 0.999, "Adam's beta2; released code: 0.98", float, below=1),
    Flag("eps", 1e-8, "Adam's epsilon; released code: 1e-9", float),
    Flag("clip", 1.0, "clip norm of the gradient (0 disables)", float),
]
PLUMBING = [
    Flag("out", "runs", "folder of all trials"),
    Flag("overwrite", False, "delete the trial's folder and start again", bool),
    Flag("evaluate", False, "evaluate a finished trial again, from last.pt", bool),
    Flag("save_every", 5000, "iterations between checkpoints", int, least=1),
    Flag(
        "snapshot_every",
        None,
        "iterations between snapshots of the weights (0 disables; dual_frequency.py: 5000)",
        int,
    ),
    Flag("log_every", 100, "iterations per row of curve.csv", int, least=1),
    Flag("device", "auto", "auto: cuda if available", choices=("auto", "cpu", "cuda")),
    Flag(
        "engine",
        "auto",
        "fast: hand-written; torch: torch.nn; equal up to rounding",
        choices=("auto", "fast", "torch"),
    ),
    Flag(
        "precision", None, "matmul precision on CUDA (tf32)", choices=("fp32", "tf32", "bf16")
    ),
    Flag("no_graph", False, "do not capture CUDA graphs (for debugging)", bool),
    Flag("deterministic", False, "bitwise reproducible on CUDA, slower", bool),
    Flag(
        "jobs",
        None,
        "number of trials that --all runs in parallel (one per core or GPU)",
        int,
        least=1,
        below=1000,
    ),
    Flag(
        "index",
        None,
        "with --all or --list: only this trial, counted from 0 (for SLURM arrays)",
        int,
    ),
]
PLUMBING = [flag._replace(affects_result=False) for flag in PLUMBING]
NOT_CARRIED = {"list", "all", "jobs", "index"}  # what a trial's command leaves out


# -- From words to flags, and back
class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(files.BAD_FLAGS, f"{self.prog}: error: {' '.join(str(message).split())}\n")


def argparse_type(flag):
    """A conversion that says what would be right."""
    number = {int: "a whole number", float: "a number"}.get(flag.type)
    wanted = flag.wanted or f"{number} from {flag.least} to below {flag.below}"

    def convert(text):
        with contextlib.suppress(ValueError):
            value = flag.type(text)
            if not number or flag.least <= value < flag.below:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return convert


def flags_of(task_class):
    """{name: Flag}, its own in place of the shared ones."""
    return {flag.name: flag for flag in (*FLAGS, *PLUMBING, *task_class.flags)}


def defaults_of(task_class):
    """The paper's."""
    defaults = {name: flag.default for name, flag in flags_of(task_class).items()}
    return defaults | task_class.scales["paper"]


def parse(task_class, argv):
    """-> (args, what was typed)"""
    parser = Parser(
        task_class.script(),
        description=sys.modules[task_class.__module__].__doc__,
        epilog="\n".join(explain(task_class)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    scale = parser.add_argument_group("size of model, data and training")
    affects_result = parser.add_argument_group("settings of a trial")
    plumbing = parser.add_argument_group("how it is run (the result does not depend on it)")
    scale.add_argument("--scale", choices=task_class.scales, help="set of defaults (paper)")
    defaults = defaults_of(task_class) | task_class.scales.get(find_scale(argv), {})
    for name, flag in flags_of(task_class).items():
        if name not in task_class.without:
            add_flag(affects_result if flag.affects_result else plumbing, flag, defaults[name])
    # const: the value where no figure is named
    figure = dict(nargs="?", const=(), choices=task_class.figures, metavar="FIGURE")
    names = ", ".join(task_class.figures)
    plumbing.add_argument(
        "--list", help=f"print the command of each trial of {names}", **figure
    )
    plumbing.add_argument("--all", help="run all trials of a figure, then report.py", **figure)
    given = vars(parser.parse_args(argv))
    defaults |= dict(scale="paper", list=None, all=None)
    return argparse.Namespace(**(defaults | given)), given


def find_scale(argv):
    """What is typed after --scale, since the parser of all flags is made with its defaults."""
    parser = Parser(add_help=False)
    parser.add_argument("--scale", default="paper")
    return parser.parse_known_args(argv)[0].scale


def explain(task_class):
    """What the values of --scale and --pe mean."""
    yield "scales, whose defaults --help --scale SCALE shows:"
    for name in task_class.scales:
        yield f"  {name:9} {SCALES.get(name, '')}"
    if "pe" not in {flag.name for flag in task_class.flags}:
        yield "\nencodings:"
        for name, encoding in common.ENCODINGS.items():
            yield f"  {name:9} {(encoding.__doc__ or '').partition(chr(10))[0]}"


def add_flag(group, flag, default):
    shown = "" if default in (None, False) else f" ({default})"
    options = dict(action="store_true")
    if flag.type is not bool:
        options = dict(type=argparse_type(flag), choices=flag.choices)
    group.add_argument(as_word(flag.name), help=flag.help + shown, **options)


def as_word(flag):
    return f"--{flag.replace('_', '-')}"


def as_words(flags):
    """{flag: value} as the words of a command line. True is the flag without a value; None
    is left out, so that the flag has its default."""
    words = []
    for flag, value in flags.items():
        if isinstance(value, range):  # of seeds
            value = f"{value[0]}-{value[-1]}"
        if value is True:
            words.append(as_word(flag))
        elif value is not None:
            words += [as_word(flag), str(value)]
    return words


# -- From flags to a trial
def parse_task(task_class, argv):
    """The task of one trial, from its command line."""
    return make_task(task_class, parse(task_class, argv)[0])


def make_task(task_class, args, **row):
    """The task of one trial, whose flags fit together; `row` overrides `args`."""
    args = argparse.Namespace(**(vars(args) | row))
    if isinstance(args.seed, range):
        raise UsageError("--seed takes a range with --list, --all and report.py alone")
    defaults = defaults_of(task_class) | task_class.defaults(
        args
    )  # the paper's, and what follows
    for flag, value in defaults.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    names = [flag.name for flag in flags_of(task_class).values() if flag.affects_result]
    if args.precision == "bf16":  # the others differ by rounding alone
        names.append("precision")
    config = {
        name: getattr(args, name) for name in sorted(names) if name not in task_class.without
    }
    task = task_class(args, config, name_folder(task_class, args, config, defaults))
    task.check()
    if args.overwrite and args.evaluate:
        raise UsageError("--overwrite deletes what --evaluate needs")
    return task


def name_folder(task_class, args, config, defaults):
    """OUT/TASK/MODEL-PE-K..-L..[-flag=value of all off the paper's default]/seedN"""
    words = [f"{before}{config[flag]}" for flag, before in task_class.folder_words.items()]
    for flag, value in config.items():
        if flag not in ("seed", *task_class.folder_words) and value != defaults[flag]:
            words.append(flag.replace("_", "-") + ("" if value is True else f"={value}"))
    folder = Path(args.out, task_class.name, "-".join(words), f"seed{args.seed}")
    for path in reversed(folder.parents):
        if len(os.fsencode(path.name)) > 255:
            raise UsageError(f"too many or too long flags for a folder's name: {path.name}")
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {args.out}: {path} is not a folder")
    return folder


# -- From a figure to its trials
def trials_of_figure(task_class, args, given, figure):
    """[jobs.Trial]: those of a figure, or of all figures if it is (); each folder once.

    A typed flag selects the rows that have that value. Typed seeds replace the rows' own.
    Other typed flags are added to every trial.
    """
    if figure and args.scale not in task_class.figures[figure].grids:
        has = " and ".join(task_class.figures[figure].grids)
        raise UsageError(f"{figure} has no {args.scale} scale; it has {has}")
    trials = {}
    for name in [figure] if figure else task_class.figures:
        for row in task_class.figures[name].grids.get(args.scale, []):
            if any(given.get(k, v) != v for k, v in row.items() if k != "seed"):
                continue
            row = row | {"seed": given.get("seed", row["seed"])}
            for row_of_seed in cross(**row):
                trial = make_trial(task_class, args, given, row_of_seed)
                trials.setdefault(trial.folder, trial)
    if not trials:
        what = f"{figure or task_class.script()} at --scale {args.scale}"
        raise UsageError(f"no trial of {what} has the flags given, or its grid is still empty")
    return choose_trial(list(trials.values()), args)


def make_trial(task_class, args, given, row):
    carried = {k: v for k, v in given.items() if k not in NOT_CARRIED | row.keys()}
    return jobs.Trial(make_task(task_class, args, **row), row, as_words(row | carried))


def choose_trial(trials, args):
    """That of --index alone."""
    if args.index is None:
        return trials
    if args.index >= len(trials):
        raise UsageError(
            f"--index {args.index}: there are {len(trials)} trials, counted from 0"
        )
    return [trials[args.index]]


# -- A script's command line
def main(task_class):
    jobs.end_with_parent()
    return exit_code(task_class.script(), lambda: dispatch(task_class, sys.argv[1:]))


def dispatch(task_class, argv):
    args, given = parse(task_class, argv)
    figure = args.all if args.list is None else args.list
    if figure is None:
        if args.index is not None:
            raise UsageError("--index is for --all and --list")
        task = make_task(task_class, args)
        if why := too_large_here(task_class, args, given):
            print(why)
        return run_one(task, argv)
    trials = trials_of_figure(task_class, args, given, figure)
    if args.list is not None:
        for trial in trials:
            print(f"python {task_class.script()} {shlex.join(trial.words)}")
        return 0
    if args.index is not None:
        return run_one(trials[0].task, trials[0].words)
    if why := too_large_here(task_class, args, given):
        raise UsageError(f"{len(trials)} trials: {why}, or for this one add --device cpu")
    return run_many(task_class, args, given, trials)


def too_large_here(task_class, args, given):
    """A line if the paper's training would run on a CPU, and nobody has asked for that."""
    asked = "device" in given or "iterations" in given
    if args.scale == "paper" and not asked and machine.choose_device(args).type == "cpu":
        smaller = " or ".join(name for name in task_class.scales if name != "paper")
        time = "a CPU needs days or weeks for each trial"
        return f"the paper's size is for a GPU, {time}; for a smaller one add --scale {smaller}"


def run_one(task, argv):
    stop = Stop()
    task.setup()
    return task.run(argv, stop) if task.run else training.train(task, argv, stop)


def run_many(task_class, args, given, trials):
    """All as processes, and then their report."""
    stop = Stop()
    for trial in trials:  # a missing text is said once, not by every trial
        trial.task.setup()
    trials[0].task.build("cpu")  # so are flags that leave no data to train on
    gpus = []
    if machine.choose_device(args).type == "cuda":
        gpus = machine.gpus()
    at_once = args.jobs or len(gpus) or machine.cores()
    script = sys.modules[task_class.__module__].__file__
    with stop.between_iterations():
        code = jobs.Jobs(script, trials, at_once, gpus).run(stop)
    if code != files.STOPPED:
        report = Path(__file__).parents[1] / "report.py"
        figure = [args.all] if args.all else []
        left_out = NOT_CARRIED | {"overwrite"}
        words = as_words({k: v for k, v in given.items() if k not in left_out})
        subprocess.run(
            [sys.executable, report, script, *figure, *words, "--brief"], check=False
        )
    return code


# -- How a process ends
class Stop:
    """Hears signals, which suite/__init__.py did until now. Inside `between_iterations` the
    first only sets `requested`; outside it raises KeyboardInterrupt. A second Ctrl-C exits at
    once."""

    def __init__(self):
        self.requested = self.iterating = False
        listen(self.hear)

    def hear(self, number, frame):
        # What waits for a stalled output goes on, and what is said from now on may be lost
        set_blocking(False)
        if self.requested:
            if number == signal.SIGINT:
                set_blocking(True)
                os._exit(130)
        else:
            self.requested = True
            if not self.iterating:
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def between_iterations(self):
        self.iterating = True
        yield
        self.iterating = False
        if self.requested:
            raise KeyboardInterrupt


class Output(io.FileIO):
    """Writes at once, and drops what cannot be written: a closed terminal, a broken pipe or a
    full log must not end a trial before it has saved."""

    def write(self, content):
        with contextlib.suppress(OSError):
            super().write(content)
        return len(content)


def make_output(stream):
    """The same stream with an Output below it, which has no buffer."""
    if stream is None:  # it was closed
        return open(os.devnull, "w")
    try:
        raw = Output(stream.fileno(), "w", closefd=False)
    except OSError:  # no file, but a notebook's stream
        return stream
    options = dict(encoding=stream.encoding, errors="backslashreplace")
    return io.TextIOWrapper(raw, **options, write_through=True)


def set_blocking(blocking):
    """Whether this process waits for a stopped terminal or a full pipe."""
    for number in 1, 2:
        with contextlib.suppress(OSError):  # it was closed
            os.set_blocking(number, blocking)


def exit_code(name, work):
    """The exit code of work(); what goes wrong is said in one line."""
    sys.stdout, sys.stderr = make_output(sys.stdout), make_output(sys.stderr)
    try:
        Stop()  # from here on a signal raises KeyboardInterrupt
        return work()
    except KeyboardInterrupt:
        command = "the same command"
        if "--overwrite" in sys.argv:
            command += " without --overwrite"
        code, why = files.STOPPED, f"stopped; {command} continues"
    except UsageError as error:
        code, why = files.BAD_FLAGS, f"error: {error}"
    except files.End as error:
        code, why = error.args
    except (OSError, UnicodeError) as error:
        code, why = files.FAILED, error
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(error):
            raise
        code = files.FAILED
        why = "out of memory: lower --batch, --hidden, --embed or --vocab"
    finally:
        listen(leave)
    print(f"{name}: {' '.join(str(why).split())}", file=sys.stderr if code else sys.stdout)
    set_blocking(True)
    return code
