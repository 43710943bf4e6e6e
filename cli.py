"""The command line of every script: flags, folder names, grids, and running many trials.

raise SystemExit(cli.main(Task))      # at the end of a script; Task is a subclass of task.Task
"""

import argparse
import datetime
import functools
import inspect
import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036 - said here rather than by whatever fails first
    raise SystemExit(f"Python 3.11 or later is needed; this is {sys.version.split()[0]}")
signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # PyTorch takes seconds to import

import common
import report
import trial
from common import Refused
from task import Task

signal.signal(signal.SIGINT, signal.default_int_handler)

SEEDS = range(5)
BOTH, WITH_DUP = ["none", "sin"], ["none", "dup", "sin"]  # encodings that most grids compare
CONTROLLED = ["none", "constant", "sin"]  # the fairer control alone
CONTROLS = ["none", "constant", "dup", "sin"]
SMOKE = dict(iterations=20, batch=8, hidden=16, embed=16, save_every=10, log_every=5, device="cpu")


def cross(**flags):
    """All combinations: cross(model="lstm", vocab=[256, 512], seed=SEEDS) is ten trials."""
    choices = [v if isinstance(v, list | range) else [v] for v in flags.values()]
    return [dict(zip(flags, values)) for values in itertools.product(*choices)]


# ------------------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(trial.USAGE_ERROR, f"{self.prog}: error: {message}\n")


def number(kind, wanted, accept):
    """An argparse type that says what would be right."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accept(value) or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return convert


MOST = 2**31 - 1  # beyond it lies no machine's memory, but many a counter's end
COUNT = number(int, "a whole number from 1 to 2^31 - 1", lambda x: 1 <= x <= MOST)
AT_LEAST_2 = number(int, "a whole number from 2 to 2^31 - 1", lambda x: 2 <= x <= MOST)
NATURAL = number(int, "a whole number from 0 to 2^31 - 1", lambda x: 0 <= x <= MOST)
SEED = number(int, "a whole number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)
POSITIVE = number(float, "a finite number above 0", lambda x: x > 0)
NOT_NEGATIVE = number(float, "a finite number of at least 0", lambda x: x >= 0)
FRACTION = number(float, "a number in [0, 1)", lambda x: 0 <= x < 1)


def seeds(text):
    """One seed, or a range of them such as 0-4."""
    first, dash, last = text.partition("-")
    if first and dash and SEED(first) <= SEED(last) < SEED(first) + 1000:
        return range(int(first), int(last) + 1)
    return SEED(text)


def bands(text):
    """LOW:HIGH, written alike for the same numbers: it names a folder."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = math.nan
    if not 0 <= low < high <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH with 0 <= LOW < HIGH <= 1")
    return f"{low:.15g}:{high:.15g}"


@functools.cache
def declare(task):
    """-> the parser, every flag's default at paper scale, and the names of the flags that change a result.

    The parser returns what was typed and nothing else: `parse` adds the defaults.
    """
    about = dict(description=sys.modules[task.__module__].__doc__, allow_abbrev=False)
    parser = Parser(f"{task.name}.py", formatter_class=argparse.RawDescriptionHelpFormatter, **about)
    defaults, science = {}, set()

    def group(title, changes_results):
        into = parser.add_argument_group(title)

        def flag(name, default, help, **how):
            key = name[2:].replace("-", "_")
            defaults[key] = value = task.scales["paper"].get(key, default)
            if changes_results:
                science.add(key)
            shown = "" if value is None or value is False else f" ({value})"
            into.add_argument(name, default=argparse.SUPPRESS, help=help + shown, **how)

        return flag

    def shared(flag):
        return lambda name, *about, **how: name in task.without or flag(name, *about, **how)

    model_flags(shared(group("model", True)))
    data, plumbing = group("data", True), group("this run (changes no result but for bf16)", False)
    data_flags(shared(data))
    task.add_flags(data, plumbing)
    training_flags(shared(group("training (Adam; the defaults are those of what is reproduced)", True)))
    run_flags(shared(plumbing))
    many_flags(shared(group("many trials", False)), task)
    return parser, defaults, science


def model_flags(flag):
    flag("--model", "lstm", "the layer", choices=list(common.LAYERS))
    flag("--no-conv", False, "mamba without its short convolution", action="store_true")
    flag("--pe", "sin", "encoding of the time step", choices=list(common.ENCODINGS))
    flag("--combine", "concat", "encoding with embedding", choices=["concat", "add"])
    phases = "where the encoding is: in the steps that read the input, or in those after them"
    flag("--encode", "both", phases, choices=["input", "output", "both"])
    lengths = "length of the encoding's vectors (1; learned ones start at the root of --embed)"
    flag("--amplitude", None, lengths, type=POSITIVE, metavar="A")
    part = "share of the sinusoid's frequencies that is kept, 0 the fastest"
    flag("--bands", "0:1", part, type=bands, metavar="LOW:HIGH")
    flag("--hidden", 512, "size of the layer's state", type=COUNT)
    flag("--embed", 512, "size of the embedding, and of the encoding", type=COUNT)


def data_flags(flag):
    flag("--vocab", 16384, "number of different integers, K", type=AT_LEAST_2)
    flag("--length", 64, "integers in the input, L", type=COUNT)
    flag("--held-out", None, "test sequences, never trained on (1024)", type=COUNT)
    flag("--seed", 0, "draws weights, data and held-out set; 0-4: five trials", type=seeds)


def training_flags(flag):
    flag("--iterations", 300_000, "batches to train on", type=COUNT)
    flag("--batch", 512, "sequences per iteration", type=COUNT)
    flag("--lr", 1e-3, "peak of the learning rate", type=POSITIVE)
    flag("--warmup", None, "iterations of linear warm-up (1000 or, if less, iterations/10)", type=NATURAL)
    flag("--beta2", 0.999, "Adam's second decay; released code: 0.98", type=FRACTION)
    flag("--eps", 1e-8, "Adam's epsilon; released code: 1e-9", type=NOT_NEGATIVE)
    flag("--clip", 1.0, "largest gradient norm, 0: any", type=NOT_NEGATIVE)


def run_flags(flag):
    flag("--device", "auto", "auto: cuda if there", choices=["auto", "cpu", "cuda"])
    auto = "fast.py; torch: torch.nn; auto: torch on a CPU below hidden 256 or batch 32, else fast"
    flag("--engine", "auto", f"fast: {auto}", choices=["auto", "fast", "torch"])
    precisions = "of matrix products: fp32; tf32; bf16, in folders of its own (tf32 on CUDA, fp32 on a CPU)"
    flag("--precision", None, precisions, choices=["fp32", "tf32", "bf16"])
    flag("--no-graph", False, "on CUDA: no graph of the iteration, to debug", action="store_true")
    flag("--deterministic", False, "on CUDA: the same bits every time, slower", action="store_true")
    flag("--out", "runs", "folder of all trials")
    flag("--save-every", 5000, "iterations between checkpoints", type=COUNT)
    flag("--snapshot-every", None, "iterations between kept weights, 0: none", type=NATURAL)
    flag("--log-every", 100, "iterations per row of curve.csv", type=COUNT)
    flag("--overwrite", False, "delete the trial's folder and start anew", action="store_true")


def many_flags(flag, task):
    figure = dict(nargs="?", const="", metavar="FIGURE")
    flag("--scale", "paper", "set of defaults and grids", choices=list(task.scales))
    flag("--list", None, f"print a command per trial: {', '.join(task.figures)}", **figure)
    flag("--all", None, "run them, --jobs at a time, then report", **figure)
    flag("--report", None, "tables, figures, claims of trials on disk", **figure)
    flag("--jobs", None, "processes at a time (on a CPU one per core, on CUDA 1)", type=COUNT)


def parse(task, argv):
    """-> (args, what was typed). The scale sets defaults; an explicit flag wins."""
    parser, defaults, _ = declare(task)
    given = vars(parser.parse_args(argv))
    scale = task.scales[given.get("scale", "paper")]
    return argparse.Namespace(**(defaults | scale | given | task.implied(given))), given


def complete(task, args):
    """The task of one trial: the flags whose default depends on others are set, and all fit together.

    Its folder is OUT/TASK/MODEL-PE-K..-L..[-flag=value of all off the paper's default]/seedN, its `config`
    the flags that change the result; of the precisions, bf16 alone does so beyond rounding.
    """
    bound = task.bind(args := argparse.Namespace(**vars(args)))
    derived = {"warmup": min(1000, args.iterations // 10), "snapshot_every": 0} | bound.defaults()
    for flag, value in derived.items():
        if getattr(args, flag, value) is None:
            setattr(args, flag, value)
    if "warmup" in args and args.warmup > args.iterations:
        raise Refused(f"--warmup {args.warmup} is above --iterations {args.iterations}")
    if "\n" in args.out:
        raise Refused("--out with a line break: --list prints a line per trial")
    bound.check()
    _, defaults, science = declare(task)
    science = science | {"precision"} if args.precision == "bf16" else science
    bound.config = {k: v for k, v in sorted(vars(args).items()) if k in science}
    named, usual = {"seed", *task.named}, defaults | derived
    words = [word(k, v) for k, v in bound.config.items() if k not in named and v != usual[k]]
    name = "-".join([*(f"{before}{getattr(args, k)}" for k, before in task.named.items()), *words])
    bound.folder = Path(args.out) / (task.under or task.name) / name / f"seed{args.seed}"
    return bound


def word(flag, value):
    return flag.replace("_", "-") + ("" if value is True else f"={value}")


def as_flag(name, value):
    """One flag as command-line words; a value of True stands for the bare flag."""
    return [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])


# ------------------------------------------------------------------------------------------------------------
# Many trials
# ------------------------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    flags: dict  # the grid's
    words: list  # of its command line
    task: Task


NOT_CARRIED = {"list", "all", "report", "jobs"}


def grid(task, args, given, figure):
    """[Listed] of a figure's trials, or of all figures' for ''; a flag of None is left at its default.

    A given flag that the grid sets too keeps only the trials that agree; the others go into every command.
    """
    grids = task.grids[args.scale]
    if figure and figure not in grids:
        raise Refused(f"unknown figure {figure!r} (choose from {', '.join(grids)})")
    trials = {}
    wanted = {k: v if isinstance(v, range) else [v] for k, v in given.items()}
    for flags in grids[figure] if figure else itertools.chain(*grids.values()):
        if all(flags[k] in wanted[k] for k in flags.keys() & wanted.keys()):
            carried = {k: v for k, v in given.items() if k not in NOT_CARRIED | flags.keys()}
            typed = {k: v for k, v in flags.items() if v is not None}
            words = [w for k, v in (typed | carried).items() for w in as_flag(k, v)]
            bound = complete(task, argparse.Namespace(**(vars(args) | typed)))
            trials.setdefault(bound.folder, Listed(flags, words, bound))
    return list(trials.values())


def seeds_together(trials):
    """[(words, tasks)]: one command for the trials that differ in their seed alone."""
    alike = {}
    for flags, words, task in trials:
        others = tuple((k, v) for k, v in vars(task.args).items() if k != "seed")
        alike.setdefault(others, []).append((words, task))
    jobs = []
    for group in alike.values():
        tasks = [task for _, task in group]
        first, last = tasks[0].args.seed, tasks[-1].args.seed
        jobs.append(([*group[0][0], "--seed", f"{first}-{last}"], tasks))
    return jobs


def in_short(task):
    """The metrics of a finished trial that are one number each."""
    metrics = task.result() or {}
    numbers = [(name, x) for name, x in metrics.items() if isinstance(x, float)]
    return ", ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in numbers[:3])


ENDS = {0: "", -signal.SIGKILL: "killed", trial.RUNNING_ELSEWHERE: "runs elsewhere"}


def start(task, words, tasks, at_once, cuda):
    """The process of one command; on a CPU several share the cores: threads would wait for one another."""
    threads = 1 if tasks[0].is_small() else max(1, cores() // at_once)
    own = {} if cuda or at_once == 1 else {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, inspect.getfile(task), *words]
    return subprocess.Popen(command, env=own | os.environ, stdout=subprocess.DEVNULL)


def run_all(task, jobs, at_once, cuda, stop):
    """Run [(words, tasks)] as processes, some at once -> the worst exit code. A stopped one ends it all."""
    waiting, running, codes, asked = list(enumerate(jobs, 1)), {}, [], False
    stop.training = True  # in the processes
    started, took = time.monotonic(), []
    at_once = min(at_once, len(jobs))
    trial.say(f"{len(jobs)} commands, {at_once} at a time")

    def line(number, text, tasks):
        left = ""
        if took:
            todo = len(waiting) + len(running)
            left = datetime.timedelta(seconds=round((time.monotonic() - started) / len(took) * todo))
            left = f"; {left} left"
        trial.say(f"[{number}/{len(jobs)}] {tasks[0].folder}: {text}{left}")

    try:
        while running or waiting and not stop.requested:
            while waiting and len(running) < at_once and not stop.requested:
                number, (words, tasks) = waiting.pop(0)
                if all(bound.result() for bound in tasks) and not tasks[0].args.overwrite:
                    line(number, f"is finished: {in_short(tasks[-1])}", tasks)
                    continue
                running[start(task, words, tasks, at_once, cuda)] = number, tasks, time.monotonic()
            if stop.requested and not asked:
                asked = [process.send_signal(signal.SIGTERM) for process in running] or True
            for process in [p for p in running if p.poll() is not None]:
                number, tasks, since = running.pop(process)
                codes.append(process.returncode if process.returncode >= 0 else trial.FAILED)
                took.append(time.monotonic() - since)
                text = ENDS.get(process.returncode, f"exit code {process.returncode}") or in_short(tasks[-1])
                line(number, f"{text}, {took[-1]:.0f} s", tasks)
                stop.requested |= codes[-1] == trial.STOPPED
            time.sleep(0.02)
    finally:  # whatever happens to this process, no other goes on without it
        for process in running:
            process.send_signal(signal.SIGTERM)
    return trial.STOPPED if stop.requested else worst(codes)


def worst(codes):
    """Of several trials: 75 if one is to be continued; that one runs elsewhere is no fault."""
    if trial.STOPPED in codes:
        return trial.STOPPED
    return max((code for code in codes if code != trial.RUNNING_ELSEWHERE), default=0)


def cores():
    return len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------------------------------
# What a command line asks for
# ------------------------------------------------------------------------------------------------------------


def some(trials, figure):
    if not trials:
        raise Refused(f"no trial of {figure or 'any figure'} has the flags given")
    return trials


def show(task, args, given, figure):
    found = {}
    for name in [figure] if figure else task.grids[args.scale]:
        if trials := grid(task, args, given, name):
            found[name] = [(flags, bound.folder) for flags, _, bound in trials]
    report.show(task, args.scale, some(found, figure), Path(args.out))


def run(task, args, given, argv, stop):
    """One trial, or those of a range of seeds, or with --all a figure's."""
    cuda = trial.choose_device(args).type == "cuda"
    many = isinstance(args.seed, range)
    several = many or args.all is not None
    if several and (alone := [flag for flag in task.only_alone if flag in given]):
        raise Refused(f"--{alone[0]} does not go with --all or a range of seeds")
    if args.all is not None:
        trials = some(grid(task, args, given, args.all), args.all)
    elif not many:
        return complete(task, args).run(argv, stop)
    else:
        each = [argparse.Namespace(**(vars(args) | {"seed": seed})) for seed in args.seed]
        trials = [Listed({}, [*argv, "--seed", str(one.seed)], complete(task, one)) for one in each]
    together = cuda and many and task.run is Task.run
    if together and args.all is None:
        return worst(trial.train([trial.Trial(t, words, False) for _, words, t in trials], stop))
    jobs = seeds_together(trials) if together else [(words, [bound]) for _, words, bound in trials]
    return run_all(task, jobs, args.jobs or (1 if cuda else cores()), cuda, stop)


def main(task, argv=None):
    """A script's command line -> its exit code."""
    (parser, _, _), code = declare(task), 0
    argv = sys.argv[1:] if argv is None else argv
    try:
        args, given = parse(task, argv)
        if args.list is not None:
            for _, words, _ in some(grid(task, args, given, args.list), args.list):
                print(f"python {task.name}.py {shlex.join(words)}")
        elif args.report is not None:
            show(task, args, given, args.report)
        else:
            with trial.Stop().listening() as stop:
                code = run(task, args, given, argv, stop)
            if args.all is not None and code != trial.STOPPED:
                show(task, args, given, args.all)
    except Refused as error:
        parser.error(error)
    except BrokenPipeError:  # of `--report | head`: what was asked for has been read
        pass
    except OSError as error:
        trial.say(f"{parser.prog}: {error}", file=sys.stderr)
        return code or trial.FAILED
    except (RuntimeError, MemoryError) as error:
        if not trial.is_out_of_memory(error):
            raise
        trial.say(f"{parser.prog}: out of memory: lower {task.sizes}", file=sys.stderr)
        return trial.FAILED
    except KeyboardInterrupt:
        trial.say(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    finally:
        leave_quietly()
    return code


def leave_quietly():
    """Python flushes its output as it ends: that must not fail for a reader that has gone, or a full disk."""
    try:
        sys.stdout.flush()
    except AttributeError:  # it was closed from the start
        pass
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
