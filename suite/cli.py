"""Command line: run one trial, run all trials of a figure in parallel, or list them.

    raise SystemExit(cli.main(Reverse))  # at the end of a script

A flag that neither the command line nor the figure sets has the scale's value or, if the scale
does not set it, the paper's. A flag that both set selects the figure's trials with this value;
only --seed replaces the figure's value. `task_class` is a script's subclass of Task, and `task`
is an instance of it, which is one trial. `given` holds the flags given on the command line, and
`flags` those of a figure's trial.
"""

import argparse
import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import common
from common import UsageError
from suite import files, interrupts, jobs, machine, training
from suite.figures import grid
from suite.task import FLAGS, Flag, parse_bands, parse_seeds

EXECUTION_FLAGS = [
    Flag("out", "runs", "output folder for all trials"),
    Flag("overwrite", False, "delete the trial's checkpoints and results, then retrain"),
    Flag("evaluate", False, "evaluate a finished trial's last.pt again, without training"),
    Flag("save_every", 5000, "iterations between checkpoints, for resuming", at_least=1),
    Flag(
        "snapshot_every",
        None,
        "iterations between weight snapshots, all of which are kept (default: none; in "
        "dual_frequency.py: min(5000, iterations / 10))",
        int,
    ),
    Flag("log_every", 100, "iterations per log line and row of curve.csv", at_least=1),
    Flag("device", "auto", "auto: CUDA if available", choices=("auto", "cpu", "cuda")),
    Flag(
        "engine",
        "auto",
        "fast: custom kernels; torch: torch.nn; auto: whichever is faster for the model. Their "
        "outputs agree up to rounding",
        choices=("auto", "fast", "torch"),
    ),
    Flag(
        "precision",
        None,
        "matmul precision on CUDA (default: tf32)",
        str,
        choices=("fp32", "tf32", "bf16"),
    ),
    Flag("no_graph", False, "do not capture CUDA graphs (for debugging)"),
    Flag("deterministic", False, "make CUDA runs bitwise reproducible; slower"),
    Flag(
        "jobs",
        None,
        "number of trials to run in parallel (default: one per core or GPU)",
        int,
        at_least=1,
        below=1000,
    ),
    Flag(
        "index",
        None,
        "only trial N of the selected ones, counted from 0 (for slurm_array.sh)",
        int,
    ),
]
EXECUTION_FLAGS = [flag._replace(identifies_trial=False) for flag in EXECUTION_FLAGS]

FIGURE_RULES = """\
If the figure's commands (see --list) set a flag, it selects trials: --model gru keeps only the
GRUs. If they do not, it changes all trials: --clip 0 trains all without clipping. --seed
replaces the figure's seeds. FIGURE defaults to all figures."""
EXIT_CODES = """
exit codes: 0 done, 1 failed, 2 invalid flags, 3 training diverged, 73 folder deleted or used
by another process, 75 or 130 interrupted (run again to resume)"""
METAVARS = {int: "N", float: "X", parse_seeds: "N|A-B", parse_bands: "START:END"}


# -- Parsing and formatting flags
class Parser(argparse.ArgumentParser):
    def __init__(self, prog, description, **options):
        formatter = argparse.RawDescriptionHelpFormatter
        options |= dict(formatter_class=formatter, allow_abbrev=False)
        super().__init__(prog, description=description, **options)

    def error(self, message):
        hint = "; see --help" if message.startswith("unrecognized") else ""
        self.exit(files.BAD_FLAGS, f"{self.prog}: error: {' '.join(message.split())}{hint}\n")


def parse(task_class, argv):
    """Return {flag: value} of the flags given on the command line."""
    script = task_class.script()
    parser = Parser(
        script,
        description=sys.modules[task_class.__module__].__doc__,
        usage=f"{script} [flags]",
        epilog="\n".join(epilog_lines(task_class)),
        argument_default=argparse.SUPPRESS,
    )
    own = parser.add_argument_group(f"flags of {script}")
    experiment = parser.add_argument_group("experiment")
    figures = parser.add_argument_group("all trials of a figure or table", FIGURE_RULES)
    execution = parser.add_argument_group("execution")
    figure_name = dict(nargs="?", choices=task_class.figures, metavar="FIGURE")
    figures.add_argument(
        "--list",
        help="print the commands of a figure's trials",
        **figure_name,
    )
    figures.add_argument(
        "--all",
        help="run all unfinished trials of a figure, then print its table",
        **figure_name,
    )
    experiment.add_argument(
        "--scale", choices=task_class.scales, help="preset sizes, see below (default: paper)"
    )
    shared = {flag.name for flag in (*FLAGS, *EXECUTION_FLAGS)}
    for name, flag in flags_of(task_class).items():
        group = experiment if flag.identifies_trial else execution
        if name in ("jobs", "index"):
            group = figures
        elif name not in shared:
            group = own
        if name not in task_class.unused_flags:
            add_flag(group, flag)
    return vars(parser.parse_args(argv))


def flags_of(task_class):
    """Return {name: Flag}, defaults at paper scale; the task's flags override shared ones."""
    flags = {flag.name: flag for flag in (*FLAGS, *EXECUTION_FLAGS, *task_class.extra_flags)}
    for name, default in task_class.scales["paper"].items():
        flags[name] = flags[name]._replace(default=default)
    return flags


def epilog_lines(task_class):
    """Yield lines that explain scales, encodings, figures, exit codes and output."""
    yield "scales (a figure may override them; --list prints the exact command of each trial):"
    uses = dict(
        paper=" (the paper's sizes; up to 2 hours per trial on an H200)",
        desk=" (reduced sizes; minutes to an hour per trial on a CPU)",
        quick=" (CPU, seconds per trial)",
        smoke=" (tests)",
    )
    for name, flags in task_class.scales.items():
        order = [k for k in flags_of(task_class) if k not in task_class.unused_flags]
        flags = {k: flags[k] for k in order if k in flags and name != "paper"}
        shown = shlex.join(format_flags(flags)) or "the defaults above"
        yield f"  {name}{uses.get(name, '')}: {shown}"
    if "pe" not in {flag.name for flag in task_class.extra_flags}:
        yield "\nencodings:"
        for name, encoding in common.ENCODINGS.items():
            summary = (encoding.__doc__ or "").partition("\n")[0]
            yield f"  {name}: {summary}"
    yield "\nfigures, with the number of trials at each scale:"
    for name, figure in task_class.figures.items():
        sizes = [f"{scale} {len(trials)}" for scale, trials in figure.grids.items()]
        yield f"  {name}: {figure.title} ({', '.join(sizes)})"
    yield EXIT_CODES
    yield f"output: OUT/TASK/MODEL-PE-.../seedN/{task_class.result_file}, read by report.py"


def add_flag(group, flag):
    if flag.default is False:
        options = dict(action="store_true")
    else:
        kind = flag.type or type(flag.default)
        options = dict(type=kind, choices=flag.choices, metavar=METAVARS.get(kind))
    shown = f" (default: {flag.default})" if flag.default else ""
    group.add_argument(option_string(flag.name), help=flag.help + shown, **options)


def option_string(name):
    return f"--{name.replace('_', '-')}"


def format_flags(flags):
    """Return the command-line arguments of a trial, given {flag: value}.

    True is a bare flag; None and flags of the --all command itself are omitted.
    """
    words = []
    for flag, value in flags.items():
        if value is None or flag in ("list", "all", "jobs", "index"):
            continue
        words.append(option_string(flag))
        if isinstance(value, range):  # of seeds
            words.append(f"{value[0]}-{value[-1]}")
        elif value is not True:
            words.append(str(value))
    return words


# -- From flags to a task
def parse_task(task_class, argv):
    """Return the task of one trial, given its command line."""
    return make_task(task_class, parse(task_class, argv))


def make_task(task_class, flags):
    """Return the task of one trial; flags that are None or missing take their defaults."""
    known = flags_of(task_class)
    paper = {name: flag.default for name, flag in known.items()}
    preset = task_class.scales[flags.get("scale", "paper")]
    args = argparse.Namespace(**paper | preset | flags)
    if isinstance(args.seed, range):
        raise UsageError("--seed accepts a range only with --list, --all and report.py")
    if args.overwrite and args.evaluate:
        raise UsageError("--overwrite deletes the checkpoint that --evaluate needs")
    # --precision is recorded, and part of the folder's name, only if it is bf16. Runs in fp32
    # and tf32 count as the same trial
    recorded = {"precision"} if args.precision == "bf16" else set()
    for name, flag in known.items():
        value = getattr(args, name)
        if isinstance(value, int | float) and not flag.at_least <= value < flag.below:
            bounds = f"must be at least {flag.at_least} and below {flag.below:,}"
            raise UsageError(f"{option_string(name)} {value}: {bounds}")
        if flag.identifies_trial and name not in task_class.unused_flags:
            recorded.add(name)
    defaults = paper | task_class.defaults(args)
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        if name in task_class.omitted_at_default and getattr(args, name) == default:
            recorded.remove(name)
    config = {name: getattr(args, name) for name in sorted(recorded)}
    task = task_class(args, config, trial_folder(task_class, args, config, defaults))
    task.check()
    return task


def trial_folder(task_class, args, config, defaults):
    """Return OUT/TASK/MODEL-PE-K..-L..[-flag=value for each flag not at paper scale]/seedN."""
    parts = [f"{prefix}{config[flag]}" for flag, prefix in task_class.folder_prefixes.items()]
    for flag, value in config.items():
        if flag not in ("seed", *task_class.folder_prefixes) and value != defaults[flag]:
            parts.append(f"{flag.replace('_', '-')}={value}")
    folder = Path(args.out, task_class.name, "-".join(parts), f"seed{args.seed}")
    for path in folder.parents:
        if os.path.isfile(path):
            raise UsageError(f"{path} is a file, not a folder")
        if len(path.name) > 255:
            raise UsageError(f"too many flags for a folder's name: {path.name}")
    return folder


# -- Trials of a figure
def trials_of_figure(task_class, given, figure_name):
    """Return the Jobs of a figure, or of all if its name is None, without duplicates.

    FIGURE_RULES says how the given flags apply. --index selects one trial.
    """
    scale, trials = given.get("scale", "paper"), {}
    names = [figure_name] if figure_name else task_class.figures
    figures = [task_class.figures[name] for name in names]
    all_flags = [flags for figure in figures for flags in figure.grids.get(scale, [])]
    subject = f"{figure_name or task_class.script()} at --scale {scale}"
    if not all_flags:
        scales = dict.fromkeys(s for figure in figures for s, x in figure.grids.items() if x)
        raise UsageError(f"{subject} has no trials: use --scale {' or '.join(scales)}")
    left_out = Counter()
    for trial_flags in all_flags:
        differ = [k for k, x in trial_flags.items() if k != "seed" and given.get(k, x) != x]
        if differ:
            left_out[tuple(differ)] += 1
            continue
        for flags in grid(**trial_flags | {"seed": given.get("seed", trial_flags["seed"])}):
            task = make_task(task_class, given | flags)
            argv = format_flags(flags | given | flags)  # in the figure's order, its values win
            trials.setdefault(task.folder, jobs.Job(task, flags, argv))
    trials = list(trials.values())
    if not trials:
        raise UsageError(f"{subject} has no trial with {mismatch(all_flags, given)}")
    for (name, *others), n in left_out.items() if "all" in given else ():
        if not others and any(name not in trial.flags for trial in trials):
            flag = f"{option_string(name)} {given[name]}"
            print(f"note: {flag} skips {n} trials that set another value", file=sys.stderr)
    if "index" not in given:
        return trials
    if given["index"] >= len(trials):
        raise UsageError(
            f"{subject} has {len(trials)} trials: --index must be 0 to {len(trials) - 1}"
        )
    return [trials[given["index"]]]


def mismatch(all_flags, given):
    """Return, as text, a given flag whose value no trial has, and the trials' values."""
    for flag, value in given.items():
        values = list(dict.fromkeys(str(flags[flag]) for flags in all_flags if flag in flags))
        if flag != "seed" and values and str(value) not in values:
            return f"{option_string(flag)} {value} (choose from {', '.join(values)})"
    return "this combination of flags"


# -- Entry points
def main(task_class):
    return run_script(task_class.script(), lambda: dispatch(task_class))


def dispatch(task_class):
    given = parse(task_class, sys.argv[1:])
    if not given.keys() & {"list", "all"}:
        for name in given.keys() & {"index", "jobs"}:
            raise UsageError(f"--{name} requires --all or --list")
        return run_one(make_task(task_class, given), given)
    trials = trials_of_figure(task_class, given, given.get("list", given.get("all")))
    if "list" in given:
        for trial in trials:
            print(f"python {task_class.script()} {shlex.join(trial.argv)}")
        return 0
    if "index" in given:
        sys.argv[1:] = trials[0].argv  # recorded in result.json
        return run_one(trials[0].task, given)
    if warning := cpu_warning(trials[0].task, given):
        raise UsageError(f"{warning}; --scale paper runs all {len(trials)} trials anyway")
    return run_many(task_class, given, trials)


def cpu_warning(task, given):
    """Return a warning if the paper's scale would run on a CPU by default, else None."""
    explicit = given.keys() & {"scale", "device", "iterations", "prepare"}
    if not explicit and machine.choose_device(task.args).type == "cpu":
        smaller = ", ".join(name for name in task.scales if name != "paper")
        time = "days or weeks per trial on a CPU"
        return f"paper scale needs a GPU ({time}); smaller scales: {smaller}"


def check_inputs(task):
    """Check --evaluate, then load what the trial reads, such as a text."""
    if task.args.evaluate and not (task.folder / "result.json").exists():
        raise UsageError(f"--evaluate needs a finished trial: {task.folder}")
    task.load_inputs()


def run_one(task, given):
    if warning := cpu_warning(task, given):
        print(f"warning: {warning}")
    check_inputs(task)
    return task.run() if task.run else training.train(task)


def run_many(task_class, given, trials):
    """Run all trials in parallel processes, then report.py."""
    for trial in trials:  # report a missing text once, not in every trial
        check_inputs(trial.task)
    first = trials[0].task
    first.prepare_data("cpu")  # likewise fail here, once, if flags leave no training data
    slots = machine.job_slots(first.args)
    script = sys.modules[task_class.__module__].__file__
    with interrupts.deferred():  # a signal takes effect at the end of the block
        code = jobs.run(script, trials, first.args.jobs or len(slots), slots)
    report = Path(__file__).parents[1] / "report.py"
    shown = {flag: x for flag, x in given.items() if flag not in ("overwrite", "evaluate")}
    words = [script, *filter(None, [given["all"]]), *format_flags(shown), "--brief"]
    subprocess.run([sys.executable, report, *words], check=False)
    return code


# -- Output and exit codes
class TolerantStream(io.TextIOWrapper):
    """A stream that ignores write errors, so that a trial survives a closed terminal."""

    def write(self, text):
        with contextlib.suppress(OSError):
            super().write(text)


def tolerant(stream):
    """Return the stream, unbuffered and ignoring write errors."""
    if stream is None:  # the stream is closed
        return open(os.devnull, "w")
    with contextlib.suppress(OSError):  # a notebook's stream has no file
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        return TolerantStream(raw, stream.encoding, "backslashreplace", write_through=True)
    return stream


def run_script(name, main):
    """Call main(); print expected errors in one line; return the exit code."""
    sys.stdout, sys.stderr = tolerant(sys.stdout), tolerant(sys.stderr)
    interrupts.install()
    try:
        return main()
    except UsageError as error:
        code, message = files.BAD_FLAGS, f"error: {error}"
    except files.Exit as error:
        code, message = error.args
    except (OSError, UnicodeError) as error:
        code, message = files.FAILED, error
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(error):
            raise
        code = files.FAILED
        message = "out of memory: reduce --batch, --hidden, --embed or --vocab"
    print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr if code else sys.stdout)
    return code
