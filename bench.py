"""How long a training step takes, against the plain PyTorch step that a user would write.

    python bench.py                                 # six configurations of the paper's size
    python bench.py --only lstm-sin-256 --repeats 3 # one of them
    python bench.py --json speed.json               # keep the numbers
    python bench.py --show speed.json               # the table of such a file

Plain: embedding, concatenation, nn.LSTM (nn.GRU, the suite's S4D as a layer), readout at all steps,
cross-entropy, clipping, default Adam, in PyTorch's default precision; on CUDA again with tf32 products. The
suite's step is the training loop's own and draws its batch too; plain gets one for nothing. All take turns in
one process and have done four steps before; times are medians. `of limit` is the time that the necessary
operations need at the device's measured rate of products, as a share of the step's time. Necessary are the
products of the recurrence (or of S4D's Toeplitz matrices and mixing), of the readout at answered steps, and
of the input weights with every integer that occurs and every step; each once forward, twice backward.
Memory is the peak of a process that takes two such steps, on CUDA that of its allocations.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import common
import recurrence
import reverse
import trial

LENGTH, SIZE, PAPER_ITERATIONS = 64, 512, 300_000
CONFIGURATIONS = {  # name -> model, encoding, K, batch on a CPU (512 on CUDA)
    "lstm-sin-256": ("lstm", "sin", 256, 64),
    "lstm-sin-1024": ("lstm", "sin", 1024, 64),
    "lstm-sin-16384": ("lstm", "sin", 16384, 32),
    "lstm-none-256": ("lstm", "none", 256, 64),
    "gru-sin-64": ("gru", "sin", 64, 64),
    "s4d-sin-1024": ("s4d", "sin", 1024, 64),
    "s4d-sin-2048": ("s4d", "sin", 2048, 64),
}
SKIPPED = {"cpu": "s4d-sin-2048", "cuda": "s4d-sin-1024"}  # by default: six on either


class Plain(nn.Module):
    def __init__(self, model, encoding, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab + 1, SIZE)
        times = common.sinusoid(2 * LENGTH, SIZE).float() if encoding == "sin" else torch.empty(2 * LENGTH, 0)
        self.register_buffer("times", times[:, None])
        layer = {"gru": nn.GRU, "lstm": nn.LSTM, "s4d": common.S4D}[model]
        self.layer, self.readout = layer(SIZE + times.shape[1], SIZE), nn.Linear(SIZE, vocab)

    def forward(self, inputs):
        embedded = self.embedding(inputs.T)  # (T, B, E)
        x = torch.cat([embedded, self.times.expand(-1, inputs.shape[0], -1)], dim=2)
        h = self.layer(x, slice(None)) if isinstance(self.layer, common.S4D) else self.layer(x)[0]
        return self.readout(h)


def plain_step(model, encoding, vocab, data, device):
    torch.manual_seed(0)
    network = Plain(model, encoding, vocab).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    episode = data.training_episode(1)

    def step():
        logits = network(episode.inputs)[LENGTH:]
        loss = F.cross_entropy(logits.flatten(0, 1), episode.targets.T.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return step


def variants(device):
    """name -> flags of the suite's step, or the precision of products in a plain one."""
    if device.type == "cuda":
        suite = {"suite tf32": "", "suite bf16": "--precision bf16", "no graph": "--no-graph"}
        return {"plain": "ieee", "plain tf32": "tf32"} | suite
    return {"plain": "ieee", "not compiled": "--iterations 999", "suite": ""}


def build(name, variant, flags, device, folder):
    """-> the step, and what has to be set before it runs."""
    model, encoding, vocab, batch = CONFIGURATIONS[name]
    batch = 512 if device.type == "cuda" else batch
    words = f"--model {model} --pe {encoding} --vocab {vocab} --batch {batch} --device {device.type}"
    words += f" --hidden {SIZE} --embed {SIZE} --length {LENGTH} --log-every 1000000 "
    words += flags if flags.startswith("--") else ""
    _, args, _ = trial.parse(reverse.TASK, words.split())
    trial.complete(reverse.TASK, args)
    data = reverse.TASK.build(args, device)
    if variant.startswith("plain"):
        return plain_step(model, encoding, vocab, data, device), partial(plain_precision, flags)
    setting = partial(trial.prepare, trial.choose_engine(reverse.TASK, args, device), device)
    setting()
    state = trial.State(reverse.TASK, args, device)
    return partial(next, trial.train(state, data, args, folder)), setting


def plain_precision(products):
    """PyTorch's defaults, but for the precision of CUDA's products."""
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = products, "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(name, variant, flags):
    """Bytes: the peak of a process of its own, on a CPU, that takes two such steps."""
    with tempfile.TemporaryDirectory() as folder:
        step, setting = build(name, variant, flags, torch.device("cpu"), Path(folder))
        setting()
        seconds(step, 2, torch.device("cpu"))
    return trial.peak_memory(torch.device("cpu"))


def seconds(step, each, device):
    synchronize(device)
    started = time.perf_counter()
    for _ in range(each):
        step()
    synchronize(device)
    return (time.perf_counter() - started) / each


def necessary_operations(name, cuda):
    """Floating-point operations of a step that no method can spare."""
    model, encoding, vocab, batch = CONFIGURATIONS[name]
    batch = 512 if cuda else batch
    answers, clock = batch * LENGTH, 2 * LENGTH if encoding == "sin" else 0
    rows = min(vocab, answers) + 1 + clock
    if model == "s4d":
        products = SIZE * LENGTH * LENGTH * batch + answers * SIZE * 2 * SIZE + rows * SIZE * SIZE
    else:
        gates = {"lstm": 4, "gru": 3}[model] * SIZE
        products = 2 * answers * SIZE * gates + rows * SIZE * gates
    return 3 * 2 * (products + answers * SIZE * vocab)


def product_rate(device, repeats=5):
    """Operations per second of a large product, in the suite's default precision."""
    size = 8192 if device.type == "cuda" else 2048
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if recurrence.onednn_is_exact() else "none"
    a, b = torch.randn(2, size, size, device=device)
    product = lambda: a @ b
    seconds(product, 2, device)
    return 2 * size**3 / min(seconds(product, 2, device) for _ in range(repeats))


def measure(name, device, repeats):
    """{variant: {"ms": [...], "bytes": ...}}: in turn, `repeats` times."""
    cuda, steps, found = device.type == "cuda", {}, {}
    with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(torch.cuda.Stream() if cuda else None):
        for variant, flags in variants(device).items():
            before = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            steps[variant] = step, setting = build(name, variant, flags, device, Path(folder))
            setting()
            seconds(step, 4, device)
            peak = torch.cuda.max_memory_allocated() - before if cuda else None
            found[variant] = {"bytes": peak or in_a_process(name, variant, flags), "ms": []}
        for _, (variant, (step, setting)) in itertools.product(range(repeats), steps.items()):
            setting()
            found[variant]["ms"].append(1000 * seconds(step, 20 if cuda else 1, device))
    return found


def in_a_process(*case):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(memory, *case).result()


def show(content):
    """The table of a file that --json wrote."""
    rate = content["product_rate"]
    print(f"{content['device']}, {content['threads']} threads, torch {content['torch']}")
    print(f"products: {rate / 1e9:.0f} G operations/s; medians [least, most] of {content['repeats']}\n")
    heading = ["configuration", "step", "ms", "plain/this", "hours/300,000", "of limit", "peak GiB"]
    rows = [heading]
    for name, found in content["configurations"].items():
        medians = {variant: statistics.median(x["ms"]) for variant, x in found["variants"].items()}
        for variant, x in found["variants"].items():
            ms, limit = medians[variant], 1000 * found["operations"] / rate
            rows.append(
                [
                    f"{name}, batch {found['batch']}" if variant == "plain" else "",
                    variant,
                    f"{ms:.3g} [{min(x['ms']):.3g}, {max(x['ms']):.3g}]",
                    f"{medians['plain'] / ms:.2f}",
                    f"{ms * PAPER_ITERATIONS / 3.6e6:.2f}",
                    f"{limit / ms:.0%}",
                    f"{x['bytes'] / 2**30:.2f}",
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def main(argv=None):
    parser = trial.Parser(
        "bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--only", choices=list(CONFIGURATIONS), nargs="+", help="configurations (six)")
    flag("--repeats", type=trial.COUNT, default=5, help="timings of each step (5)")
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if there (auto)")
    flag("--json", metavar="FILE", help="write the numbers")
    flag("--show", metavar="FILE", help="print the table of such a file, run nothing")
    args = parser.parse_args(argv)
    try:
        if args.show:
            show(json.loads(Path(args.show).read_text()))
            return 0
        device = trial.choose_device(argparse.Namespace(device=args.device, precision=None))
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    content = {
        "device": trial.device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": trial.git("rev-parse", "HEAD"),
        "onednn": device.type == "cpu" and recurrence.onednn_is_exact(),
        "repeats": args.repeats,
        "product_rate": product_rate(device),
        "configurations": {},
    }
    if args.json:
        trial.write_json(Path(args.json), content)  # refuses now rather than after minutes
    cuda = device.type == "cuda"
    for name in args.only or [x for x in CONFIGURATIONS if x != SKIPPED[device.type]]:
        content["configurations"][name] = {
            "batch": 512 if cuda else CONFIGURATIONS[name][3],
            "operations": necessary_operations(name, cuda),
            "variants": measure(name, device, args.repeats),
        }
    show(content)
    if args.json:
        trial.write_json(Path(args.json), content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
