"""The machine: its device, how a trial computes on it, and what is recorded of both."""

import ctypes
import functools
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import common
from common import UsageError
from suite import fast, graphs

# Large pages, where Linux leaves the choice to programs: a tenth of an iteration on a CPU
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if sys.platform == "linux":  # freed memory is kept, warm, and not given back: another tenth
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)


def cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()  # macOS


def choose_device(args):
    cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        raise UsageError("--device cuda: PyTorch finds no CUDA device here (use --device cpu)")
    if args.precision in ("tf32", "bf16") and not cuda:
        raise UsageError(f"--precision {args.precision} is for CUDA: on a CPU it is fp32")
    return torch.device("cuda" if cuda else "cpu")


def gpus_of_jobs(args):
    """CUDA_VISIBLE_DEVICES of as many jobs as fit: one per GPU, or None per CPU core."""
    if choose_device(args).type == "cpu":
        return [None] * cores()
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    return [str(n) for n in range(torch.cuda.device_count())]


class Engine(NamedTuple):
    """How a trial computes."""

    name: str  # "fast" or "torch"
    compiled: bool = False
    precision: str = "fp32"  # of matrix products
    graph: bool = False  # the iteration is a CUDA graph
    deterministic: bool = False
    onednn: bool = False  # float32 products by oneDNN: faster than MKL on AMD's CPUs

    def features(self, model, batch):
        """(M, B, H): what the readout reads."""
        if self.name == "fast":
            return fast.features(model, batch, self.compiled)
        return model.features(batch)


@functools.cache
def onednn_is_exact():
    """Whether oneDNN, which the setting "bf16" selects, leaves float32 as precise as it is.

    It rounds to bfloat16 on CPUs that multiply such numbers.
    """
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # until `prepare` sets it
    product, exact = (a @ b).double(), a.double() @ b.double()
    return bool((product - exact).norm() < 1e-6 * exact.norm())


def choose_engine(args, device):
    """From the flags and the device alone: the same after every resume."""
    cuda, name = device.type == "cuda", args.engine
    known = name != "torch" and common.LAYERS[args.model] in fast.LAYERS
    known = known and common.ENCODINGS[args.pe].fast
    if name == "fast" and not known:
        what = f"--model {args.model} with --pe {args.pe}"
        raise UsageError(f"--engine fast does not know {what} (use torch)")
    if name == "auto":
        small_lstm = args.model == "lstm" and args.hidden <= 64  # for which torch.nn is good
        name = "fast" if known and (cuda or not small_lstm) else "torch"
    compiled = cuda and name == "fast" and graphs.compiles()
    precision = args.precision or ("tf32" if cuda else "fp32")
    large = args.hidden >= 128  # small products are sooner done by MKL
    onednn = not cuda and large and "AMD" in device_name(device) and onednn_is_exact()
    graph = cuda and not args.no_graph
    return Engine(name, compiled, precision, graph, args.deterministic, onednn)


def prepare(engine, device, hidden=512):
    """Set the switches of PyTorch that an engine needs; they hold for the whole process."""
    products = "ieee" if engine.precision == "fp32" else "tf32"  # bf16: what autocast leaves
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.rnn.fp32_precision = products
    # "bf16" selects oneDNN, see onednn_is_exact
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if engine.onednn else "none"
    if engine.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # read at the first product on CUDA
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(engine.deterministic)
    if device.type == "cpu" and hidden < 256:
        torch.set_num_threads(1)  # a second one is of little use


def is_out_of_memory(error):
    """By its words: not all are torch.OutOfMemoryError. While a graph is captured another error
    follows, whose context it is."""
    words = "not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED"
    here = isinstance(error, MemoryError) or any(word in str(error) for word in words)
    return here or (error is not None and is_out_of_memory(error.__context__))


def peak_memory(device):
    """Bytes: allocated on the gpu, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def git(*words):
    """What git prints in this folder; None where there is no git."""
    command = ["git", "--no-optional-locks", *words]
    options = dict(cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, errors="replace")
    try:
        return subprocess.check_output(command, **options).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def is_dirty():
    """Whether a tracked file has changed, or a module that was imported is not tracked."""
    changes = git("status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return None
    root, installed = Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()
    own = []
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/").resolve()
        if path.is_relative_to(root) and not path.is_relative_to(installed):
            own.append(path)
    return changes != "" or git("ls-files", "--error-unmatch", *own) is None


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    _, _, rest = (path.read_text() if path.exists() else "").partition("model name\t: ")
    return f"cpu: {rest.partition(chr(10))[0] or platform.machine()}"


def provenance(engine, device):
    """What is recorded of a process that trains or evaluates."""
    return {
        "argv": sys.argv[1:],
        "commit": git("rev-parse", "HEAD"),
        "dirty": is_dirty(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "engine": engine.name,
        "compiled": engine.compiled,
        "precision": engine.precision,
        "graph": engine.graph,
        "deterministic": engine.deterministic,
        "threads": torch.get_num_threads(),
    }
