"""How long a training step takes, against the plain PyTorch step that a user would write.

    python bench.py                                       # configurations of the paper's size
    python bench.py --only lstm-sin-256 --repeats 3       # one of them
    python bench.py --only lstm-sin-256 --precision fp32  # all other flags are reverse.py's
    python bench.py --json speed.json                     # keep the numbers
    python bench.py --show speed.json                     # the table of such a file
    python bench.py --only lstm-sin-256 --profile         # where the time goes: send this for a slow trial

Plain: the model of common.py, readout at all steps, cross-entropy, clipping, default Adam, in PyTorch's
default precision; on CUDA in the suite's (tf32, where that is bf16). The suite's step is the training loop's
own and draws its batch too; plain gets one for nothing. Both take turns in one process and have done four
steps before; times are medians. What a part of the suite gains: --engine torch is without fast.py,
--no-graph on CUDA without a graph.
"""

from suite import cli, files, flags, machine
from suite.tables import Broken, aligned, checked
from suite.trial import Trial

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from common import Refused
from reverse import Reverse

PAPER_ITERATIONS = 300_000
CONFIGURATIONS = {  # model-encoding-K: batch on a CPU; on CUDA it is the paper's
    "lstm-sin-256": 64,
    "lstm-sin-1024": 64,
    "lstm-sin-16384": 32,
    "lstm-none-256": 64,
    "gru-sin-64": 64,
    "s4d-sin-1024": 64,
    "s4d-sin-2048": 64,
    "mamba-sin-256": 16,
}
NOT_HERE = "list", "all", "report", "jobs", "overwrite", "model", "pe"  # of reverse.py's flags


def task_of(name, device, more):
    model, encoding, vocab = name.split("-")
    words = ["--model", model, "--pe", encoding, "--vocab", vocab]
    if device.type == "cpu":
        words += ["--batch", str(CONFIGURATIONS[name])]
    task = flags.complete(Reverse, flags.parse(Reverse, [*words, *more])[0])
    machine.choose_engine(task, device)  # refuses now rather than after other configurations
    machine.refuse_what_cannot_fit(task, device)
    return task


# A step sets PyTorch's switches first, since the other one has its own.


def plain_step(task, engine, device):
    torch.manual_seed(task.seed)
    model, episode = task.model().to(device), task.training_episode(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine = replace(engine, onednn=False)

    def step():
        machine.prepare(engine, device)
        logits = model(episode.inputs, slice(None))[task.length :]
        loss = F.cross_entropy(logits.flatten(0, 1), episode.targets.T.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def suite_step(task, engine, device):
    machine.prepare(engine, device)
    t = Trial(task, [])
    t.engine = engine
    t.initialise()
    t.make_step()

    def step():
        machine.prepare(engine, device)
        t.iteration += 1
        t.rate.fill_(task.rate(t.iteration))
        t.step(t.iteration)

    return step


def seconds(step, each, device):
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(each):
        step()
    wait()
    return (time.perf_counter() - started) / each


def measure(task, device, repeats):
    """What --json keeps of a configuration; the steps are timed in turn."""
    task.build(device)
    engine = machine.choose_engine(task, device)
    steps = {"plain": plain_step(task, engine, device), "suite": suite_step(task, engine, device)}
    found = {variant: {"ms": []} for variant in steps}
    for step in steps.values():
        seconds(step, 4, device)
    for _ in range(repeats):
        for variant, step in steps.items():
            found[variant]["ms"].append(1000 * seconds(step, 20 if device.type == "cuda" else 1, device))
    return {"batch": task.batch, "variants": found}


def profile(name, task, device, steps):
    """Print where an iteration's time goes: PyTorch's table of operators and, on CUDA, kernels."""
    task.build(device)
    engine = machine.choose_engine(task, device)
    step = suite_step(task, engine, device)
    seconds(step, 4, device)
    with torch.profiler.profile() as found:
        took = 1000 * seconds(step, steps, device)
    spent = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = found.key_averages()
    print(f"{name}, batch {task.batch}, {engine.about()}: {took:.3g} ms an iteration, and of {steps}:")
    if not any(getattr(each, spent) for each in averages):
        print("the profiler saw no kernel (it needs CUPTI, and permission to use it); of the host, then:")
        spent = "self_cpu_time_total"
    print(averages.table(sort_by=spent, row_limit=20, max_name_column_width=80))


def made_on(content):
    on = f"{content['device']}, {content['threads']} threads, torch {content['torch']}"
    return ", ".join([on, *map(str, content.get("flags", []))])


def table(content):
    """The lines of a file that --json wrote."""
    rows = [["configuration", "step", "ms", "plain/this", f"hours/{PAPER_ITERATIONS:,}"]]
    for name, found in content["configurations"].items():
        plain = statistics.median(found["variants"]["plain"]["ms"])
        for variant, x in found["variants"].items():
            ms = statistics.median(x["ms"])
            title = f"{name}, batch {found['batch']}" if variant == "plain" else ""
            times = f"{ms:.3g} [{min(x['ms']):.3g}, {max(x['ms']):.3g}]", f"{plain / ms:.2f}"
            rows.append([title, variant, *times, f"{ms * PAPER_ITERATIONS / 3.6e6:.2f}"])
    return [made_on(content), f"medians [least, most] of {content['repeats']}", "", *aligned(rows)]


def run(args, more, device, tasks):
    if device.type == "cuda":  # a CUDA graph is not captured on the default stream
        torch.cuda.set_stream(torch.cuda.Stream())
    for task in tasks.values():  # chooses the threads, which are recorded below
        machine.prepare(machine.choose_engine(task, device), device, task.is_small())
    content = {
        "device": machine.device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": machine.version_of_code(__file__)["commit"],
        "flags": more,
        "repeats": args.repeats,
        "configurations": {},
    }
    if args.profile:
        print(f"{made_on(content)}, commit {content['commit']}")
        for name, task in tasks.items():
            profile(name, task, device, args.repeats)
        return
    for name, task in tasks.items():
        content["configurations"][name] = measure(task, device, args.repeats)
        if args.json:
            files.write_json(args.json, content)
    print(*table(content), sep="\n")


def show(path):
    try:
        print(*checked(path, lambda text: table(json.loads(text))), sep="\n")
    except Broken as error:
        raise Refused(f"--show {error}") from None


def main(argv=None):
    about = dict(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = flags.Parser("bench.py", allow_abbrev=False, **about)
    flag = parser.add_argument
    flag("--only", choices=CONFIGURATIONS, nargs="+", default=CONFIGURATIONS, help="configurations (all)")
    flag("--repeats", type=flags.COUNT, default=5, help="timings of each step, or steps to profile (5)")
    flag("--json", type=flags.file_path, metavar="FILE", help="write the numbers")
    flag("--show", type=flags.file_path, metavar="FILE", help="print the table of such a file, run nothing")
    flag("--profile", action="store_true", help="print where the suite's step spends its time instead")
    args, more = parser.parse_known_args(argv)
    return cli.exit_code(parser, lambda: obey(args, more))


def obey(args, more):
    if args.show:
        show(args.show)
        return 0
    reverse_args, given = flags.parse(Reverse, more)
    if wrong := [name for name in NOT_HERE if name in given]:
        raise Refused(f"--{wrong[0]} is for trials: bench.py measures steps, of what --only names")
    if isinstance(reverse_args.seed, range):
        raise Refused("--seed takes one number here")
    device = machine.choose_device(reverse_args.device)
    tasks = {name: task_of(name, device, more) for name in args.only}
    if args.json:  # whether it can be written is found out before minutes of measuring
        files.write_json(probe := args.json.with_name(f".{args.json.name}.probe"), {})
        probe.unlink()
    run(args, more, device, tasks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
