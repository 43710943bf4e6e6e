"""What a command line does: one trial, or many as processes, or a list of them.

    raise SystemExit(run.main(Reverse))  # at the end of a script

A flag's value is that of the figure's row, else what is typed, else the scale's, else the paper's.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import common
from common import Refused
from suite import machine, trial
from suite.task import MOST, Flag


def seeds(text):
    """one seed, or a range such as 0-4"""
    first, dash, last = text.partition("-")
    first, last = int(first), int(last) if dash else int(first)
    if not 0 <= first <= last < MOST:
        raise ValueError
    return range(first, last + 1) if dash else first


def bands(text):
    """LOW:HIGH with 0 <= LOW < HIGH <= 1"""
    low, high = map(float, text.split(":"))
    if not 0 <= low < high <= 1:
        raise ValueError
    return f"{low:g}:{high:g}"  # alike for the same numbers: it names a folder


LAYERS, ENCODINGS = tuple(common.LAYERS), tuple(common.ENCODINGS)
FLAGS = [
    Flag("model", "lstm", "the layer", choices=LAYERS),
    Flag("pe", "sin", "encoding of the time step", choices=ENCODINGS),
    Flag("vocab", 16384, "number of different integers, K", int, least=2),
    Flag("length", 64, "integers in the input, L", int, least=1),
    Flag("seed", 0, "of weights, data and held-out set; 0-4: five trials of a figure", seeds),
    Flag("hidden", 512, "size of the layer's state", int, least=1),
    Flag("embed", 512, "size of the embedding, and of the encoding", int, least=1),
    Flag("blocks", 1, "of mamba; from 2 on with norm and residual path", int, least=1),
    Flag("iterations", 300_000, "batches to train on", int, least=1),
    Flag("batch", 512, "sequences per iteration", int, least=1),
    Flag("lr", 1e-3, "peak of the learning rate", float),
    Flag("warmup", None, "iterations of linear warm-up (1000 or, if less, iterations/10)", int),
    Flag("held_out", None, "test sequences, never trained on (1024; dual_frequency.py: 64 L)", int, least=1),
    Flag("combine", "concat", "encoding with embedding", choices=("concat", "add")),
    Flag("encode", "both", "steps with the encoding", choices=("input", "output", "both")),
    Flag("amplitude", None, "length of the encoding's vectors (1; learned: the root of --embed)", float),
    Flag("bands", "0:1", "part of the sinusoid's frequencies, from 0, the fastest", bands),
    Flag("beta1", 0.9, "Adam's first decay", float, below=1),
    Flag("beta2", 0.999, "Adam's second decay; released code: 0.98", float, below=1),
    Flag("eps", 1e-8, "Adam's epsilon; released code: 1e-9", float),
    Flag("clip", 1.0, "largest gradient norm, 0: any", float),
]
PLUMBING = [
    Flag("out", "runs", "folder of all trials"),
    Flag("overwrite", False, "delete the trial's folder and start anew", bool),
    Flag("save_every", 5000, "iterations between checkpoints", int, least=1),
    Flag("snapshot_every", None, "iterations between kept weights, 0: none (dual_frequency.py: 5000)", int),
    Flag("log_every", 100, "iterations per row of curve.csv", int, least=1),
    Flag("device", "auto", "auto: cuda if there", choices=("auto", "cpu", "cuda")),
    Flag("engine", "auto", "by hand, or torch.nn: equal but for rounding", choices=("auto", "fast", "torch")),
    Flag("precision", None, "of products (CUDA: tf32)", choices=("fp32", "tf32", "bf16")),
    Flag("no_graph", False, "on CUDA: no graph of the iteration, to debug", bool),
    Flag("deterministic", False, "on CUDA: the same bits every time, slower", bool),
    Flag("jobs", None, "of --all: processes at a time (on a CPU one per core, on CUDA 1)", int, least=1),
]
PLUMBING = [flag._replace(science=False) for flag in PLUMBING]
NOT_CARRIED = {"list", "all", "jobs"}  # what a trial's command leaves out


# -- From words to a trial
class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(trial.BAD_FLAGS, f"{self.prog}: error: {' '.join(str(message).split())}\n")


def checked(flag):
    """An argparse type that says what would be right."""
    number = {int: "a whole number", float: "a number"}.get(flag.kind)
    wanted = f"{number} from {flag.least} to below {flag.below}" if number else flag.kind.__doc__

    def convert(text):
        with contextlib.suppress(ValueError):
            value = flag.kind(text)
            if not number or flag.least <= value < flag.below:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return convert


def flags_of(task):
    """{name: Flag}, its own in place of the shared ones."""
    return {flag.name: flag for flag in (*FLAGS, *PLUMBING, *task.flags)}


def defaults_of(task):
    return {name: flag.default for name, flag in flags_of(task).items()} | task.scales["paper"]


def parse(task, argv):
    """-> (args, what was typed)"""
    how = dict(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    how |= dict(description=sys.modules[task.__module__].__doc__)
    parser = Parser(f"{task.name}.py", formatter_class=argparse.RawDescriptionHelpFormatter, **how)
    science, plumbing = map(parser.add_argument_group, ("these change the result", "these do not"))
    defaults = dict(scale="paper", list=None, all=None) | defaults_of(task)
    for name, flag in flags_of(task).items():
        if name not in task.without:
            usual = "" if defaults[name] in (None, False) else f" ({defaults[name]})"
            more = dict(type=checked(flag), choices=flag.choices)
            more = dict(action="store_true") if flag.kind is bool else more
            group = science if flag.science else plumbing
            group.add_argument(as_word(name), help=flag.help + usual, **more)
    figure = dict(nargs="?", const="", choices=["", *task.figures], metavar="FIGURE")
    plumbing.add_argument("--scale", choices=task.scales, help="a set of defaults (paper)")
    plumbing.add_argument("--list", help=f"print a command per trial: {', '.join(task.figures)}", **figure)
    plumbing.add_argument("--all", help="run these trials, then report.py", **figure)
    given = vars(parser.parse_args(argv))
    return argparse.Namespace(**(defaults | task.scales[given.get("scale", "paper")] | given)), given


def trial_of(task, argv):
    """The task of one trial, from its command line."""
    return complete(task, parse(task, argv)[0])


def complete(task, args):
    """The task of one trial, with the flags whose default depends on others.

    Its folder is OUT/TASK/MODEL-PE-K..-L..[-flag=value of all off the paper's default]/seedN.
    """
    if isinstance(args.seed, range):
        raise Refused("--seed takes a range with --list, --all and report.py alone")
    args = argparse.Namespace(**vars(args))
    usual = defaults_of(task) | task.defaults(args)
    for flag, value in usual.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    if args.warmup > args.iterations:
        raise Refused(f"--warmup {args.warmup} is above --iterations {args.iterations}")
    names = [name for name, flag in flags_of(task).items() if flag.science and name not in task.without]
    names += ["precision"] * (args.precision == "bf16")  # the others differ by rounding alone
    config = {name: getattr(args, name) for name in sorted(names)}
    words = [f"{before}{config[name]}" for name, before in task.named.items()]
    for name, value in config.items():
        if name not in ("seed", *task.named) and value != usual[name]:
            words.append(name.replace("_", "-") + ("" if value is True else f"={value}"))
    folder = Path(args.out, task.name, "-".join(words), f"seed{args.seed}")
    found = task(args, config, folder)
    found.check()
    return found


def as_word(flag):
    return f"--{flag.replace('_', '-')}"


def as_words(flags):
    """{flag: value} as the words of a command line; a value of True stands for the bare flag."""
    words = []
    for flag, value in flags.items():
        text = f"{value[0]}-{value[-1]}" if isinstance(value, range) else str(value)  # of seeds
        words += [as_word(flag)] if value is True else [as_word(flag), text] * (value is not False)
    return words


# -- The trials of a figure
def listed(task, args, given, figure):
    """The tasks of a figure's trials, or of all figures'; each knows its row of the figure and its command.

    A typed flag selects the rows that have that value. Typed seeds replace the rows' own. Other typed flags
    are added to every trial.
    """
    trials = {}
    for name in [figure] if figure else task.figures:
        for row in task.figures[name].grids.get(args.scale, []):
            if any(given.get(k, v) != v for k, v in row.items() if k != "seed"):
                continue
            seeds = given.get("seed", row["seed"])
            carried = {k: v for k, v in given.items() if k not in NOT_CARRIED | row.keys()}
            for seed in seeds if isinstance(seeds, range) else [seeds]:
                flags = {k: v for k, v in (row | {"seed": seed}).items() if v is not None}
                one = complete(task, argparse.Namespace(**(vars(args) | flags)))
                one.row, one.words = row | {"seed": seed}, as_words(flags | carried)
                trials.setdefault(one.folder, one)
    if not trials:
        raise Refused(f"no trial of {figure or task.name} at --scale {args.scale} has the flags given")
    return list(trials.values())


def start(script, task, jobs):
    """A trial's process, which writes to log.txt in the trial's folder."""
    task.folder.mkdir(parents=True, exist_ok=True)
    threads = 1 if task.args.hidden < 256 else max(1, machine.cores() // jobs)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"SUITE_PARENT": str(os.getpid())}
    with open(task.folder / "log.txt", "a") as log:  # in its own session: the terminal's signals are for us
        how = dict(stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        return subprocess.Popen([sys.executable, script, *task.words], **how)


def is_finished(task):
    """If the folder has other flags or cannot be read, the trial's process says so."""
    with contextlib.suppress(trial.End, Refused, OSError):
        return trial.is_finished(task)


def run_all(script, trials, jobs, stop):
    """Run the trials that are not finished as processes, `jobs` at a time -> the exit code."""
    waiting = [one for one in trials if not is_finished(one)]
    before, began = len(trials) - len(waiting), time.monotonic()
    running, codes = {}, []  # {process: its trial}
    stop.saves = True
    print(f"{before} of {len(trials)} done before; {jobs} at a time", flush=True)
    try:
        while (running or waiting) and not stop.requested:
            while waiting and len(running) < jobs:
                one = waiting.pop(0)
                print(f"begins: {shlex.join(one.words)}", flush=True)
                try:
                    running[start(script, one, jobs)] = one
                except OSError as error:
                    print(error, flush=True)
                    codes.append(trial.FAILED)
            for process in [one for one in running if one.poll() is not None]:
                one = running.pop(process)
                codes.append(process.returncode)
                last = "".join((one.folder / "log.txt").read_text(errors="replace").splitlines()[-1:])
                print(f"ends: {shlex.join(one.words)}\n  exit code {codes[-1]}: {last}")
                left = (time.monotonic() - began) / 60 / len(codes) * (len(waiting) + len(running))
                done = f"{before + codes.count(0)} of {len(trials)} done"
                print(f"{done}, about {left:.0f} minutes left", flush=True)
            time.sleep(0.05)
    finally:  # whatever happens to this process, no other goes on without it
        for process in running:
            process.terminate()
        codes += [process.wait() for process in running]
    if stop.requested or trial.STOPPED in codes:
        return trial.STOPPED
    return max((code if code >= 0 else trial.FAILED for code in codes), default=0)


def end_with_parent():
    """In a job, on Linux: be told to save and end when the parent dies, be it by kill -9."""
    parent, set_death_signal = os.environ.get("SUITE_PARENT"), 1  # of prctl
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has died already
            raise SystemExit(trial.STOPPED)


# -- A script's command line
def main(task, argv=None):
    end_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(f"{task.name}.py", lambda: obey(task, argv))


def obey(task, argv):
    script = sys.modules[task.__module__].__file__
    args, given = parse(task, argv)
    if args.list is not None:
        for one in listed(task, args, given, args.list):
            print(f"python {task.name}.py {shlex.join(one.words)}")
        return 0
    if args.all is None:
        found, stop = complete(task, args), trial.Stop()
        found.begin()
        return found.run(argv, stop) if found.run else trial.train(found, argv, stop)
    trials = listed(task, args, given, args.all)
    for one in trials:  # now, or every one would refuse by itself
        one.begin()
    cuda = machine.choose_device(args.device).type == "cuda"
    jobs = args.jobs or (1 if cuda else machine.cores())
    code = run_all(script, trials, jobs, trial.Stop())
    if code != trial.STOPPED:
        words = as_words({k: v for k, v in given.items() if k not in NOT_CARRIED | {"overwrite"}})
        report = Path(__file__).parents[1] / "report.py"
        subprocess.run([sys.executable, report, script, *filter(None, [args.all]), *words], check=False)
    return code


def exit_code(name, work):
    """That of work(); what goes wrong is said in one line."""
    try:
        return work()
    except Refused as error:
        code, why = trial.BAD_FLAGS, f"error: {error}"
    except trial.End as error:
        code, why = error.args
    except OSError as error:
        code, why = trial.FAILED, error
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(error):
            raise
        code, why = trial.FAILED, "out of memory: lower --batch, --hidden, --embed or --vocab"
    print(f"{name}: {' '.join(str(why).split())}", file=sys.stderr if code else sys.stdout)
    return code
