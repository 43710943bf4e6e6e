"""The command line: run one trial, run all trials of a figure in parallel, or list them.

    raise SystemExit(cli.main(Reverse))  # at the end of a script

A flag has the value of the figure's row, else the typed one, else the scale's, else the
paper's. `task_class` is a script's subclass of Task; `task` is an instance, one trial; `typed`
holds the typed flags.
"""

import argparse
import contextlib
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import common
from common import UsageError
from suite import files, jobs, machine, stop, training
from suite.figures import cross
from suite.task import Flag


def seeds(text):
    """A seed, or a range of seeds such as 0-4."""
    first, dash, last = text.partition("-")
    found = range(int(first), int(last) + 1) if dash else int(text)
    if dash and len(found) not in range(1, 101):
        raise argparse.ArgumentTypeError(f"{text} is not a range of 1 to 100 seeds")
    return found


def bands(text):
    low, high = map(float, text.split(":"))
    if not 0 <= low < high <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not LOW:HIGH with 0 <= LOW < HIGH <= 1")
    return f"{low:g}:{high:g}"  # alike for the same numbers: it names a folder


FLAGS = [
    Flag("model", "lstm", "recurrent layer", choices=common.LAYERS),
    Flag("pe", "sin", "positional encoding", choices=common.ENCODINGS),
    Flag("vocab", 16384, "vocabulary size, K", least=2, below=10_000_000),
    Flag("length", 64, "input length, L", least=1, below=5000),
    Flag(
        "seed",
        0,
        "random seed (--list, --all and report.py also take a range)",
        seeds,
    ),
    Flag("hidden", 512, "hidden size", least=1, below=20_000),
    Flag(
        "embed",
        512,
        "size of the token embedding and of the positional encoding",
        least=1,
        below=10_000,
    ),
    Flag("iterations", 300_000, "number of training iterations", least=1),
    Flag("batch", 512, "batch size", least=1, below=1_000_000),
    Flag("lr", 1e-3, "peak learning rate"),
    Flag("warmup", None, "warm-up iterations (1000, or a tenth of --iterations if less)", int),
    Flag(
        "held_out",
        None,
        "number of held-out test sequences (1024; dual_frequency.py: 64 L)",
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
        "time steps with positional encoding: of the input, the output, or both",
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
        bands,
    ),
    Flag("beta1", 0.9, "Adam's beta1", below=1),
    Flag("beta2", 0.999, "Adam's beta2; released code: 0.98", below=1),
    Flag("eps", 1e-8, "Adam's epsilon; released code: 1e-9"),
    Flag("clip", 1.0, "gradient clipping norm (0 disables)"),
]
PLUMBING = [
    Flag("out", "runs", "output folder of all trials"),
    Flag("overwrite", False, "delete the trial's folder and start again"),
    Flag("evaluate", False, "recompute result.json of a finished trial from last.pt"),
    Flag("save_every", 5000, "iterations between checkpoints", least=1),
    Flag(
        "snapshot_every",
        None,
        "iterations between snapshots of the weights (0 disables; dual_frequency.py: 5000)",
        int,
    ),
    Flag("log_every", 100, "iterations per row of curve.csv", least=1),
    Flag("device", "auto", "device (auto: cuda if available)", choices=("auto", "cpu", "cuda")),
    Flag(
        "engine",
        "auto",
        "fast: hand-written kernels; torch: torch.nn; equal up to rounding",
        choices=("auto", "fast", "torch"),
    ),
    Flag(
        "precision",
        None,
        "matmul precision on CUDA (tf32)",
        str,
        choices=("fp32", "tf32", "bf16"),
    ),
    Flag("no_graph", False, "do not capture CUDA graphs (for debugging)"),
    Flag("deterministic", False, "bitwise reproducible on CUDA, slower"),
    Flag(
        "jobs",
        None,
        "number of trials that --all runs in parallel (one per core or GPU)",
        int,
        least=1,
        below=1000,
    ),
    Flag("index", None, "only the n-th trial of --all or --list, from 0 (SLURM arrays)", int),
]
PLUMBING = [flag._replace(affects_result=False) for flag in PLUMBING]


# -- From words to flags, and back
class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(files.BAD_FLAGS, f"{self.prog}: error: {' '.join(str(message).split())}\n")


def parse(task_class, argv):
    """{flag: value} of the typed flags."""
    parser = Parser(
        task_class.script(),
        description=sys.modules[task_class.__module__].__doc__,
        epilog="\n".join(explain(task_class)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    settings = parser.add_argument_group("experiment")
    plumbing = parser.add_argument_group("execution (does not affect the result)")
    settings.add_argument("--scale", choices=task_class.scales, help="set of defaults (paper)")
    defaults = defaults_of(task_class)
    for name, flag in flags_of(task_class).items():
        if name not in task_class.without:
            add_flag(settings if flag.affects_result else plumbing, flag, defaults[name])
    figure = dict(nargs="?", choices=task_class.figures)
    plumbing.add_argument("--list", help="print the command of each trial", **figure)
    plumbing.add_argument("--all", help="run all trials, then report.py", **figure)
    return vars(parser.parse_args(argv))


def flags_of(task_class):
    """{name: Flag}, its own in place of the shared ones."""
    return {flag.name: flag for flag in (*FLAGS, *PLUMBING, *task_class.flags)}


def defaults_of(task_class):
    """The paper's."""
    defaults = {name: flag.default for name, flag in flags_of(task_class).items()}
    return defaults | task_class.scales["paper"]


def explain(task_class):
    """What the values of --scale and --pe mean."""
    for name, flags in task_class.scales.items():
        yield f"--scale {name}: {shlex.join(as_words(flags)) or 'the defaults above'}"
    if "pe" not in {flag.name for flag in task_class.flags}:
        for name, encoding in common.ENCODINGS.items():
            yield f"--pe {name}: {(encoding.__doc__ or '').partition(chr(10))[0]}"


def add_flag(group, flag, default):
    shown = "" if default in (None, False) else f" ({default})"
    options = dict(action="store_true")
    if flag.default is not False:
        options = dict(type=flag.type or type(flag.default), choices=flag.choices)
    group.add_argument(as_word(flag.name), help=flag.help + shown, **options)


def as_word(flag):
    return f"--{flag.replace('_', '-')}"


def as_words(flags):
    """{flag: value} as the words of a command line. True is the flag without a value; None
    is left out: the flag has its default."""
    words = []
    for flag, value in flags.items():
        if isinstance(value, range):  # of seeds
            value = f"{value[0]}-{value[-1]}"
        if value is True:
            words.append(as_word(flag))
        elif value is not None:
            words += [as_word(flag), str(value)]
    return words


def carried(typed):
    """The flags of a figure's command that are also those of its trials."""
    return {k: x for k, x in typed.items() if k not in ("list", "all", "jobs", "index")}


# -- From flags to a trial
def parse_task(task_class, argv):
    """The task of one trial, from its command line."""
    return make_task(task_class, parse(task_class, argv))


def make_task(task_class, flags):
    """The task of one trial; a flag that is None or missing has its default."""
    paper = defaults_of(task_class)
    scale = task_class.scales[flags.get("scale", "paper")]
    args = argparse.Namespace(**paper | scale | flags)
    if isinstance(args.seed, range):
        raise UsageError("--seed takes a range with --list, --all and report.py alone")
    if args.overwrite and args.evaluate:
        raise UsageError("--overwrite deletes what --evaluate needs")
    names = {"precision"} if args.precision == "bf16" else set()  # others differ by rounding
    for name, flag in flags_of(task_class).items():
        value = getattr(args, name)
        if isinstance(value, int | float) and not flag.least <= value < flag.below:
            choose = f"choose from {flag.least} to below {flag.below}"
            raise UsageError(f"{as_word(name)} {value}: {choose}")
        if flag.affects_result and name not in task_class.without:
            names.add(name)
    defaults = paper | task_class.defaults(args)
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    config = {name: getattr(args, name) for name in sorted(names)}
    task = task_class(args, config, name_folder(task_class, args, config, defaults))
    task.check()
    return task


def name_folder(task_class, args, config, defaults):
    """OUT/TASK/MODEL-PE-K..-L..[-flag=value of all off the paper's default]/seedN"""
    words = [f"{before}{config[flag]}" for flag, before in task_class.folder_words.items()]
    for flag, value in config.items():
        if flag not in ("seed", *task_class.folder_words) and value != defaults[flag]:
            words.append(f"{flag.replace('_', '-')}={value}")
    folder = Path(args.out, task_class.name, "-".join(words), f"seed{args.seed}")
    for path in folder.parents:
        if len(path.name) > 255 or os.path.isfile(path):
            raise UsageError(f"{path} is a file, or too long for the name of a folder")
    return folder


# -- From a figure to its trials
def trials_of_figure(task_class, typed, figure):
    """[jobs.Trial] of a figure, or of all figures if it is None; each folder once.

    A typed flag selects the rows with that value. Typed seeds replace the rows' seeds.
    Other typed flags are added to every trial, and --index selects one trial.
    """
    scale, trials = typed.get("scale", "paper"), {}
    for name in [figure] if figure else task_class.figures:
        for row in task_class.figures[name].grids.get(scale, []):
            if any(typed.get(k, x) != x for k, x in row.items() if k != "seed"):
                continue
            for flags in cross(**row | {"seed": typed.get("seed", row["seed"])}):
                task = make_task(task_class, typed | flags)
                words = as_words(flags | carried(typed) | flags)  # those of the row first
                trials.setdefault(task.folder, jobs.Trial(task, flags, words))
    trials = list(trials.values())
    if "index" in typed:
        trials = trials[typed["index"] :][:1]
    if not trials:
        what = f"{figure or task_class.script()} at --scale {scale} with these flags"
        raise UsageError(f"no trial of {what}, or --index is above the last")
    return trials


# -- A script's command line
def main(task_class):
    return exit_code(task_class.script(), lambda: dispatch(task_class))


def dispatch(task_class):
    typed = parse(task_class, sys.argv[1:])
    if not typed.keys() & {"list", "all"}:
        if "index" in typed:
            raise UsageError("--index is for --all and --list")
        task = make_task(task_class, typed)
        for warning in warn_of_size(task, typed):
            print(warning)
        return run_one(task)
    trials = trials_of_figure(task_class, typed, typed.get("list", typed.get("all")))
    if "list" in typed:
        for trial in trials:
            print(f"python {task_class.script()} {shlex.join(trial.words)}")
        return 0
    if "index" in typed:
        sys.argv[1:] = trials[0].words  # as if it had been typed: results record it
        return run_one(trials[0].task)
    for warning in warn_of_size(trials[0].task, typed):
        raise UsageError(f"{len(trials)} trials: {warning}, or for this one --scale paper")
    return run_many(task_class, typed, trials)


def warn_of_size(task, typed):
    """Yield a warning if the paper's size would run on a CPU and nobody has asked for that."""
    asked = typed.keys() & {"scale", "device", "iterations"}
    if not asked and machine.choose_device(task.args).type == "cpu":
        smaller = " or ".join(name for name in task.scales if name != "paper")
        time = "a CPU needs days or weeks for each trial"
        yield f"the paper's size is for a GPU, {time}; for a smaller one add --scale {smaller}"


def run_one(task):
    task.setup()
    return task.run() if task.run else training.train(task)


def run_many(task_class, typed, trials):
    """Run all trials in parallel processes, then report.py."""
    for trial in trials:  # a missing text is reported once, not by every trial
        trial.task.setup()
    first = trials[0].task
    first.build("cpu")  # so are flags that leave no data to train on
    gpus = machine.gpus_of_jobs(first.args)
    script = sys.modules[task_class.__module__].__file__
    with stop.deferred():
        code = jobs.run(script, trials, first.args.jobs or len(gpus), gpus)
    if code != files.STOPPED:
        report = Path(__file__).parents[1] / "report.py"
        figure = [typed["all"]] if typed["all"] else []
        words = [script, *figure, *as_words(carried(typed)), "--brief"]
        subprocess.run([sys.executable, report, *words], check=False)
    return code


# -- How a process ends
class Output(io.TextIOWrapper):
    """Drops what cannot be written: a closed terminal, a broken pipe or a full log must not
    end a trial before it has saved."""

    def write(self, text):
        with contextlib.suppress(OSError):
            super().write(text)


def make_output(stream):
    """An Output to the same file, without a buffer."""
    if stream is None:  # it was closed
        return open(os.devnull, "w")
    with contextlib.suppress(OSError):  # no file, but a notebook's stream
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        return Output(raw, stream.encoding, "backslashreplace", write_through=True)
    return stream


def exit_code(name, work):
    """The exit code of work(); what goes wrong is said in one line."""
    sys.stdout, sys.stderr = make_output(sys.stdout), make_output(sys.stderr)
    stop.listen()
    try:
        return work()
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
    print(f"{name}: {' '.join(str(why).split())}", file=sys.stderr if code else sys.stdout)
    return code
