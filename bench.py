"""How long a training step takes, against plain PyTorch.

    python bench.py                                       # the paper's sizes, and desk's
    python bench.py --only lstm-sin-256 --precision fp32  # one; other flags are reverse.py's

plain: what a careful user would write with torch.nn.GRU and the like: readout at the answered
steps only, cross-entropy, clipping, Adam, in the same precision (for bf16 TF32). torch: this
suite with --engine torch. suite: its default engine. Both draw their batches, too. The three
take turns in one process. On a CPU, models below 256 units use one thread.

Then it says what each figure of the paper costs on this device, in hours of training.
"""

from suite import cli, files, machine  # isort: skip # before PyTorch

import itertools
import math
import statistics
import time
from argparse import RawDescriptionHelpFormatter
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
from suite.training import Training
from variable_length import VariableLength

OF_THE_PAPER = [  # what trains for its figures
    Reverse,
    DualFrequency,
    VariableLength,
    Sort,
    DelayedAddition,
    Predecessor,
    WikiText,
]

CONFIGURATIONS = {  # model-encoding-K[-desk]: batch on a CPU; on CUDA it is the scale's
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
HOW = """\
One trial after another; time grows with steps and batch. Where a K was not measured, it is the
time at the model's nearest K, corrected by what K adds to an LSTM's. A paragraph of the
language model counts as its longest, 1,024 steps. Held-out tests and stability are not counted.
"""


def plain_step(task, device):
    model, batch = task.model().to(device), task.training_batch(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    targets = batch.targets.T.flatten()

    def step():
        loss = F.cross_entropy(model(batch).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def suite_step(task, engine, device):
    training, iterations = Training(task, device, engine), itertools.count(1)
    training.rate.fill_(1e-3)
    training.build_step()
    return lambda: training.step(next(iterations))


def milliseconds(step, engine, count, device):
    machine.prepare(engine, device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / count


def measure(name, device, words):
    model, encoding, vocab, *desk = name.split("-")
    flags = ["--model", model, "--pe", encoding, "--vocab", vocab]
    if desk:
        flags += ["--scale", "desk", "--length", "32"]
    count = 20
    if device.type == "cpu":
        flags += ["--batch", str(CONFIGURATIONS[name])]
        count = 10 if desk else 1
    task = cli.parse_task(Beyond, [*flags, *words])
    task.build(device)
    engine = machine.choose_engine(task.args, device)
    plain = engine._replace(name="torch", compiled=False)
    engines = {"plain": plain._replace(onednn=False), "torch": plain, "suite": engine}
    machine.prepare(engine, device, task.args.hidden)
    steps = {"plain": plain_step(task, device)}
    for column in ("torch", "suite"):
        steps[column] = suite_step(task, engines[column], device)
    times = {column: [] for column in steps}
    for _ in range(1 + REPEATS):
        for column, step in steps.items():
            times[column].append(milliseconds(step, engines[column], count, device))
    return {"batch": task.batch, **{column: found[1:] for column, found in times.items()}}


def table(content):
    """The lines of what --json keeps."""
    where = f"{content['device']}, {content['threads']} threads, torch {content['torch']}"
    yield f"{where}; milliseconds, medians of {content['repeats']}"
    rows = [["", "batch", *COLUMNS, "plain/suite", "torch/suite"]]
    for name, found in content["configurations"].items():
        ms = {c: statistics.median(found[c]) for c in COLUMNS if c in found}
        ratios = {c: ms[c] / ms["suite"] for c in ms}
        words = [f"{ms[c]:.4g}" if c in ms else "-" for c in COLUMNS]
        words += [f"{ratios[c]:.2f}" if c in ms else "-" for c in ("plain", "torch")]
        rows.append([name, str(found["batch"]), *words])
    yield from align(rows)


def times_of_sequences(content):
    """{model: {K: milliseconds that a sequence of L = 64 takes in the suite's step}}"""
    times = defaultdict(dict)
    for name, found in content["configurations"].items():
        model, _, vocab, *desk = name.split("-")
        if not desk:
            times[model][int(vocab)] = statistics.median(found["suite"]) / found["batch"]
    return times


def hours(task, times):
    """Of a whole trial, as HOW says."""
    args, lstm = task.args, times["lstm"]
    known = times[args.model]
    nearest = min(known, key=lambda k: abs(math.log(k / args.vocab)))
    few, many = min(lstm), max(lstm)
    of_token = (lstm[many] - lstm[few]) / (many - few)
    of_sequence = known[nearest] + of_token * (args.vocab - nearest)
    sequences = args.batch * args.iterations * task.positions() / (2 * 64)
    return sequences * of_sequence / 3_600_000


def costs(content):
    """The lines about what the paper's figures cost."""
    needed = {"lstm-sin-256", "lstm-sin-16384", "gru-sin-64", "s4d-sin-1024"}
    if not needed <= content["configurations"].keys():
        return
    times, every = times_of_sequences(content), {}
    yield ""
    yield f"{'at --scale paper':26}  trials  {'hours':>7}"
    for task_class in OF_THE_PAPER:
        typed = cli.parse(task_class, [])
        for name, figure in task_class.figures.items():
            if "paper" in figure.grids:
                trials = cli.trials_of_figure(task_class, typed, name)
                of_figure = {trial.folder: hours(trial.task, times) for trial in trials}
                yield line_of(f"{task_class.script()} {name}", of_figure)
                every |= of_figure
    yield line_of("all, each trial once", every)
    yield from HOW.splitlines()


def line_of(name, found):
    """How many trials, and the sum of their hours, {folder: hours}."""
    return f"{name:26}  {len(found):6}  {sum(found.values()):7,.0f}"


def main():
    raw = RawDescriptionHelpFormatter
    parser = cli.Parser("bench.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", choices=CONFIGURATIONS, nargs="+", default=CONFIGURATIONS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    args, words = parser.parse_known_args()
    typed = cli.parse(Reverse, words)
    device = machine.choose_device(cli.make_task(Reverse, typed).args)
    if device.type == "cuda":  # a CUDA graph is not captured on the default stream
        torch.cuda.set_stream(torch.cuda.Stream())
    content = machine.provenance(machine.Engine("fast"), device)
    found = {name: measure(name, device, words) for name in args.only}
    content |= {"repeats": REPEATS, "configurations": found}
    if args.json:
        files.write_json(args.json, content)
    lines = list(table(content))
    if typed.keys() <= {"device", "precision"}:  # else these are not the paper's sizes
        lines += costs(content)
    print(*lines, sep="\n")


if __name__ == "__main__":
    raise SystemExit(cli.exit_code("bench.py", main))
