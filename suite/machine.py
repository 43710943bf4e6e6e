"""The machine: its device, how a trial computes on it, its memory, and what is recorded of it."""

from suite import compiling, fast

import contextlib
import hashlib
import math
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import common
from common import Refused

# Large pages for large tensors, where Linux leaves the choice to programs: a tenth of an iteration on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def cores():
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_device(name):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda, but PyTorch finds no CUDA device here (use --device cpu)")
    return torch.device(name)


# ------------------------------------------------------------------------------------------------------------
# The engine: how a trial computes
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """How a trial computes; decided once."""

    name: str  # "fast" or "torch"
    compiled: bool = False
    compile_fault: str | None = None
    precision: str = "fp32"  # of matrix products
    graph: bool = False  # the iteration is a CUDA graph
    deterministic: bool = False
    onednn: bool = False  # float32 products by oneDNN: on AMD's CPUs faster than MKL, on Intel's slower

    def loss_and_accuracy(self, model, episode):
        if self.name == "fast":
            return fast.loss_and_accuracy(model, episode, self.compiled)
        return common.loss_and_accuracy(model, episode)

    def logits(self, model, inputs, steps):
        """(M, B, K)"""
        if self.name == "fast":
            return fast.logits(model, inputs, steps, self.compiled)
        return model(inputs, steps)

    def about(self):
        """What is recorded of it."""
        names = "compiled", "compile_fault", "precision", "graph", "deterministic"
        return {"engine": self.name} | {name: getattr(self, name) for name in names}


def by_hand_is_faster(args, amd):
    """Whether fast.py is faster than torch.nn on a CPU: measured at hidden 64 to 512, batch 1 to 128, on an
    AMD EPYC with one thread and on an Intel Xeon with one and two.

    A step's work is about hidden^2 batch. torch.nn's LSTM has a kernel of oneDNN's, its GRU has none.
    """
    work = args.hidden**2 * args.batch
    if args.model == "lstm":
        return args.batch >= (32 if amd else 8) and work >= (2**20 if amd else 2**19)
    return args.model != "s4d" or work >= (2**18 if amd else 2**16)


def choose_engine(task, device):
    """A trial's engine, from its flags and the device alone: the same after every resume."""
    args, cuda, asked = task.args, device.type == "cuda", getattr(task.args, "engine", "torch")
    if not cuda and args.precision in ("tf32", "bf16"):
        raise Refused(f"--precision {args.precision} is for CUDA; this trial would run on a CPU, in fp32")
    known = asked != "torch" and fast.knows(common.LAYERS[args.model], common.ENCODINGS[args.pe])
    if asked == "fast" and not known:
        raise Refused(f"--engine fast does not know --model {args.model} with --pe {args.pe} (use torch)")
    always = cuda or task.fast_at_every_size or asked == "fast"
    amd = not cuda and "AMD" in device_name(device)
    chosen = known and (always or by_hand_is_faster(args, amd))
    wanted = chosen and cuda  # on a CPU it gains a tenth at most, and every trial would wait for it
    fault = compiling.compile_fault(device.type) if wanted else None
    return Engine(
        "fast" if chosen else "torch",
        compiled=wanted and fault is None,
        compile_fault=fault,
        precision=args.precision or ("tf32" if cuda else "fp32"),
        graph=cuda and not args.no_graph,
        deterministic=args.deterministic,
        onednn=amd and compiling.onednn_is_exact(),
    )


def prepare(engine, device, one_thread=False):
    """Set the switches of PyTorch that an engine needs; they hold for the whole process."""
    products = "ieee" if engine.precision == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = products
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if engine.onednn else "none"
    if engine.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # read at the first product on CUDA
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(engine.deterministic)
    if device.type == "cpu" and one_thread and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------------------


def total_memory(device):
    """Bytes of the card, or of the machine; infinite where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return math.inf


def refuse_what_cannot_fit(task, device):
    """Now, in a line, rather than by the kernel's killer or after minutes of building."""
    there = total_memory(device)
    try:
        needed = task.memory()
    except RuntimeError as error:
        if "overflow" not in str(error) and "too large" not in str(error):
            raise
        needed = math.inf  # more than PyTorch can count
    if needed > there:
        amount = "more memory than can be counted"
        if not math.isinf(needed):
            amount = f"{needed / 2**30:,.0f} GiB of memory at least"
        here = f"this machine has {there / 2**30:,.0f} GiB"
        lower = f"lower {task.what_to_lower} (another experiment, in a folder of its own)"
        raise Refused(f"this trial needs {amount}, {here}: {lower}")


def is_out_of_memory(error):
    """Only some such errors are torch.OutOfMemoryError; the others are RuntimeErrors, known by their text.

    While a CUDA graph is recorded it may come out as the failure to end the graph, raised in its course.
    """
    words = "not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED"
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    says = isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
    return says or is_out_of_memory(error.__context__)


def peak_memory(device, alone):
    """Peak bytes: allocated on the card (of seeds side by side: reserved), or of the process."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated if alone else torch.cuda.max_memory_reserved)(device)
    with contextlib.suppress(OSError, StopIteration):  # on Linux; what follows counts a parent's memory too
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ------------------------------------------------------------------------------------------------------------
# What is recorded
# ------------------------------------------------------------------------------------------------------------


def git(*words):
    """What git prints, or None without git or outside a repository."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version_of_code(script):
    """The commit, and whether the script or a tracked file differs from it; None where git does not track
    this file, though it may lie inside of another repository."""
    tracked = lambda path: git("ls-files", "--error-unmatch", str(Path(path).resolve())) is not None
    if not tracked(__file__):
        return {"commit": None, "dirty": None}
    changed = git("status", "--porcelain", "--untracked-files=no") != ""
    return {"commit": git("rev-parse", "HEAD"), "dirty": changed or not tracked(script)}


def script_of(task):
    """The file that says what a trial is, beside common.py."""
    here = getattr(sys.modules[type(task).__module__], "__file__", common.__file__)  # a notebook has none
    return Path(here).resolve().with_name(f"{task.trainer()}.py")


def code_of(task):
    """A fingerprint of these two files."""
    files = [path for path in (script_of(task), Path(common.__file__)) if path.exists()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "cpu: " + next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    return f"cpu: {platform.machine()}"


def provenance(task, argv, model, engine, device):
    """What config.json and result.json hold of a trial's origin."""
    plumbing = {k: v for k, v in sorted(vars(task.args).items()) if k not in task.config and v is not None}
    return {
        "task": task.trainer(),
        "config": task.config,
        "run": plumbing,
        "argv": argv,
        **version_of_code(script_of(task)),
        "code": code_of(task),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        **engine.about(),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
