"""Compiling pointwise functions, and what else PyTorch can do on a device."""

import functools

import torch


@functools.cache
def pointwise(function, compiled, dynamic=None):
    """The function, compiled if wanted: for the first sizes that come, then once more for all others; with
    `dynamic` False once for each size, since only with known sizes a step is one kernel."""
    if not compiled:
        return function
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=dynamic)


@functools.cache
def compile_fault(device):
    """Why torch.compile does not work here (it needs a C++ compiler, on CUDA Triton), by trying; or None."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # noqa: BLE001 - whatever is missing, the same functions run without
        return " ".join(str(error).partition("\n\n")[0].split())[:300] or repr(error)


@functools.cache
def onednn_is_exact():
    """Whether products of float32 keep their precision in oneDNN, to which "bf16" sends them on a CPU: they
    do where it has no units for bf16."""
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    product = (a @ b).double()
    torch.backends.mkldnn.matmul.fp32_precision = before
    exact = a.double() @ b.double()
    return bool((product - exact).norm() < 1e-6 * exact.norm())
