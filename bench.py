"""Time a training step against plain PyTorch.

    python bench.py                                       # sizes of --scale paper and desk
    python bench.py --only lstm-sin-256 --precision fp32  # one model

The steps of three implementations are timed in turn, in one process:

suite  this repository with its default engine, including the time to draw batches
torch  the same with --engine torch
plain  idiomatic torch.nn code: readout at the target steps only, cross-entropy, clipping and
       Adam; no torch.compile or CUDA graphs; one fixed batch, so drawing batches is not timed.
       With --precision bf16, plain uses TF32, and plain/suite includes the gain from bf16

The table has times per training step and the ratios plain/suite and torch/suite; above 1,
`suite` is faster. On a CPU, models with fewer than 256 units use one thread. If all models are
timed at their default sizes, bench.py also estimates the training hours of the paper's figures.
"""

from suite import cli, files, machine  # isort: skip # before PyTorch

import itertools
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F

from beyond import Beyond
from delayed_add import DelayedAddition
from dual_frequency import DualFrequency
from lm_wikitext import WikiText
from predecessor import Predecessor
from reverse import Reverse
from sort import Sort
from suite.tables import align
from suite.training import Trainer
from variable_length import VariableLength

PAPER_TASKS = [  # tasks of the paper; stability.py trains no model of its own
    Reverse,
    DualFrequency,
    VariableLength,
    Sort,
    DelayedAddition,
    Predecessor,
    WikiText,
]

CONFIGURATIONS = {  # model-encoding-K[-desk]: batch size on a CPU; CUDA uses the scale's
    "lstm-sin-256": 64,
    "lstm-sin-1024": 64,
    "lstm-sin-16384": 32,
    "gru-sin-64": 64,
    "s4d-sin-1024": 64,
    "mamba-sin-256": 16,
    # L = 32, 128 units. Last, since they leave the process with one thread
    "gru-sin-32-desk": 64,
    "lstm-sin-64-desk": 64,
    "s4d-sin-256-desk": 64,
}
REPEATS = 5  # timings of each step
COLUMNS = "plain", "torch", "suite"
COST_NOTE = """\
Assumes one trial at a time, with time proportional to sequence length and batch size. Other
K: the time at the model's nearest measured K, adjusted by the LSTM's slope in K. Language-model
paragraphs count as 1,024 steps, the maximum. Excludes held-out tests and stability.
"""


def make_plain_step(task, device):
    model, batch = task.make_model().to(device), task.training_batch(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    targets = batch.targets.T.flatten()

    def step():
        loss = F.cross_entropy(model(batch).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def make_suite_step(task, engine, device):
    trainer, iterations = Trainer(task, device, engine), itertools.count(1)
    trainer.learning_rate.fill_(1e-3)
    trainer.build_step()
    return lambda: trainer.step(next(iterations))


def time_step(step, engine, n_calls, device):
    """Return the mean time of a step in milliseconds."""
    machine.set_torch_options(engine, device)
    started = time.perf_counter()
    for _ in range(n_calls):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / n_calls


def time_configuration(name, device, task_argv):
    model, encoding, vocab, *desk = name.split("-")
    flags = f"--model {model} --pe {encoding} --vocab {vocab}"
    if desk:
        flags += " --scale desk --length 32"
    n_calls = 20
    if device.type == "cpu":
        flags += f" --batch {CONFIGURATIONS[name]}"
        n_calls = 10 if desk else 1
    task = cli.parse_task(Beyond, [*flags.split(), *task_argv])
    task.prepare_data(device)
    engine = machine.choose_engine(task.args, device)
    torch_engine = engine._replace(engine="torch", compiled=False)
    machine.set_torch_options(engine, device, task.args.hidden)
    plain_engine = torch_engine._replace(onednn=False)  # PyTorch's default
    steps_and_engines = (
        (make_plain_step(task, device), plain_engine),
        (make_suite_step(task, torch_engine, device), torch_engine),
        (make_suite_step(task, engine, device), engine),
    )
    rounds = []
    for _ in range(1 + REPEATS):  # the first is a warm-up
        rounds.append([time_step(*x, n_calls, device) for x in steps_and_engines])
    return {"batch": task.batch_size, **dict(zip(COLUMNS, zip(*rounds[1:])))}


def timing_table(content):
    """Yield the lines of a table of the timings."""
    where = f"{content['device']}, threads: {content['threads']}, torch {content['torch']}"
    yield f"{where}; milliseconds per step, medians of {content['repeats']}"
    rows = [["", "batch", *COLUMNS, "plain/suite", "torch/suite"]]
    for name, timings in content["configurations"].items():
        ms = {c: statistics.median(timings[c]) for c in COLUMNS if c in timings}
        row = [f"{ms[c]:.4g}" if c in ms else "-" for c in COLUMNS]
        row += [f"{ms[c] / ms['suite']:.2f}" if c in ms else "-" for c in COLUMNS[:2]]
        rows.append([name, str(timings["batch"]), *row])
    yield from align(rows)


def hours(task, times):
    """Estimate a trial's hours from {model: {K: milliseconds per sequence of L = 64}}."""
    args, ms_by_vocab, lstm = task.args, times[task.args.model], times["lstm"]
    nearest = min(ms_by_vocab, key=lambda k: abs(math.log(k / args.vocab)))
    low, high = min(lstm), max(lstm)
    slope = (lstm[high] - lstm[low]) / (high - low)
    sequence_ms = ms_by_vocab[nearest] + slope * (args.vocab - nearest)
    sequences = args.batch * args.iterations * task.n_steps() / (2 * 64)  # of L = 64
    return sequences * sequence_ms / 3_600_000


def hours_table(content):
    """Yield lines with each paper figure's cost, if all models needed were timed."""
    needed = {"lstm-sin-256", "lstm-sin-16384", "gru-sin-64", "s4d-sin-1024"}
    if not needed <= content["configurations"].keys():
        return
    times, hours_by_folder = defaultdict(dict), {}
    for name, timings in content["configurations"].items():
        model, _, vocab, *desk = name.split("-")
        if not desk:
            times[model][int(vocab)] = statistics.median(timings["suite"]) / timings["batch"]
    yield ""
    yield f"{'at --scale paper':26}  trials  {'hours':>7}"
    for task_class in PAPER_TASKS:
        for name, figure in task_class.figures.items():
            if "paper" in figure.grids:
                trials = cli.trials_of_figure(task_class, {}, name)
                figure_hours = {trial.folder: hours(trial.task, times) for trial in trials}
                yield format_row(f"{task_class.script()} {name}", figure_hours)
                hours_by_folder |= figure_hours
    yield format_row("all, each trial once", hours_by_folder)
    yield from COST_NOTE.splitlines()


def format_row(name, trial_hours):
    """Format the number of trials and their total hours."""
    return f"{name:26}  {len(trial_hours):6}  {sum(trial_hours.values()):7,.0f}"


def main():
    parser = cli.Parser(
        "bench.py",
        __doc__,
        usage="bench.py [flags] [training flags such as --precision, see reverse.py]",
    )
    parser.add_argument(
        "--only",
        choices=CONFIGURATIONS,
        default=CONFIGURATIONS,
        nargs="+",
        metavar="NAME",
        help=f"models to time, as MODEL-PE-K[-desk] (default: {', '.join(CONFIGURATIONS)})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save timings")
    args, task_argv = parser.parse_known_args()
    given = cli.parse(Reverse, task_argv)
    task = cli.make_task(Reverse, given)
    device = machine.choose_device(task.args)
    if device.type == "cuda":  # the default stream cannot capture CUDA graphs
        torch.cuda.set_stream(torch.cuda.Stream())
    content = machine.provenance(machine.choose_engine(task.args, device), device)
    timings = {name: time_configuration(name, device, task_argv) for name in args.only}
    content |= {"repeats": REPEATS, "configurations": timings}
    lines = [*timing_table(content)]
    if given.keys() <= {"device", "precision"}:  # other flags may change the costs
        lines += hours_table(content)
    print(*lines, sep="\n")
    if args.json:
        files.write_json(args.json, content)


if __name__ == "__main__":
    raise SystemExit(cli.run_script("bench.py", main))
