"""Choose the device and engine of a trial, and record its provenance."""

import ctypes
import functools
import os
import platform
import re
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

# Opt in to transparent huge pages, which save 10% of a CPU iteration
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if sys.platform == "linux":  # keep freed memory in the process: another 10%
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)


def available_cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()  # macOS


def choose_device(args):
    cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        raise UsageError("--device cuda: PyTorch finds no CUDA device (use --device cpu)")
    if args.precision in ("tf32", "bf16") and not cuda:
        raise UsageError(f"--precision {args.precision} requires CUDA; CPUs use fp32")
    return torch.device("cuda" if cuda else "cpu")


def job_slots(args):
    """Return a GPU for each parallel trial, or None for each CPU core."""
    if choose_device(args).type == "cpu":
        return [None] * available_cores()
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    return [str(n) for n in range(torch.cuda.device_count())]


class Engine(NamedTuple):
    """Implementation and numerical settings of a trial."""

    engine: str  # "fast" or "torch"
    compiled: bool = False
    precision: str = "fp32"  # of matmuls
    graph: bool = False  # capture training steps as CUDA graphs
    deterministic: bool = False
    onednn: bool = False  # float32 matmuls by oneDNN: faster than MKL on AMD CPUs

    def features(self, model, batch):
        """Compute model.features(batch)."""
        bf16 = self.precision == "bf16" and torch.is_grad_enabled()  # in training only
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            if self.engine == "fast":
                return fast.features(model, batch, self.compiled)
            return model.features(batch)


@functools.cache
def onednn_keeps_fp32():
    """Return whether oneDNN multiplies float32 matrices in full precision.

    PyTorch uses oneDNN only if fp32_precision is "bf16". On CPUs with bfloat16 matmul
    instructions, oneDNN then rounds to bfloat16.
    """
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # `set_torch_options` resets it
    product, exact = (a @ b).double(), a.double() @ b.double()
    return bool((product - exact).norm() < 1e-6 * exact.norm())


def choose_engine(args, device):
    """Choose the engine; a trial resumed on the same machine gets the same one."""
    cuda = device.type == "cuda"
    name = args.engine
    if name != "torch":
        layer, encoding = common.LAYERS[args.model], common.ENCODINGS[args.pe]
        supported = layer in fast.SUPPORTED_LAYERS and encoding.supports_fast_engine
        if name == "fast" and not supported:
            model = f"--model {args.model} with --pe {args.pe}"
            raise UsageError(f"--engine fast does not support {model} (use torch)")
        # torch.nn is faster for small LSTMs on a CPU
        small_lstm = not cuda and args.model == "lstm" and args.hidden <= 64
        if name == "auto":
            name = "fast" if supported and not small_lstm else "torch"
    compiled = cuda and name == "fast" and graphs.compile_works()
    precision = args.precision or ("tf32" if cuda else "fp32")
    large = args.hidden >= 128  # MKL is faster for small matmuls
    onednn = not cuda and large and "AMD" in device_name(device) and onednn_keeps_fp32()
    graph = cuda and not args.no_graph
    return Engine(name, compiled, precision, graph, args.deterministic, onednn)


def set_torch_options(engine, device, hidden=512):
    """Set PyTorch's process-wide options for an engine."""
    precision = "ieee" if engine.precision == "fp32" else "tf32"  # bf16: tf32 outside autocast
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.rnn.fp32_precision = precision
    # "bf16" selects oneDNN, see onednn_keeps_fp32
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if engine.onednn else "none"
    if engine.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # read at the first CUDA matmul
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(engine.deterministic)
    if device.type == "cpu" and hidden < 256:
        torch.set_num_threads(1)  # more threads hardly help


def is_out_of_memory(error):
    """Return whether an error or its context reports that memory ran out.

    Not all such errors are torch.OutOfMemoryError, and graph capture raises another on top.
    """
    phrases = "not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED"
    found = isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases)
    return found or (error is not None and is_out_of_memory(error.__context__))


def peak_memory(device):
    """Return peak memory in bytes: allocated on the GPU, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def git(*args):
    """Return the output of a git command in this folder; None if it fails."""
    try:
        return subprocess.check_output(
            ["git", "--no-optional-locks", *args],
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
            errors="replace",
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def is_dirty():
    """Return whether a tracked file has changed or an imported module is untracked."""
    changes = git("status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return None
    root, sys_prefix = Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()
    imported = []
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/").resolve()
        own = path.is_relative_to(root) and not path.is_relative_to(sys_prefix)
        if own and path.is_file():  # some of PyTorch's modules name files that do not exist
            imported.append(path)
    return changes != "" or git("ls-files", "--error-unmatch", *imported) is None


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    model = re.search("model name\t: (.+)", path.read_text() if path.exists() else "")
    return f"cpu: {model[1] if model else platform.machine()}"


def provenance(engine, device):
    """Return the provenance of a process: command, commit, versions, hardware and engine."""
    return {
        "argv": sys.argv[1:],
        "commit": git("rev-parse", "HEAD"),
        "dirty": is_dirty(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        **engine._asdict(),
        "threads": torch.get_num_threads(),
    }
