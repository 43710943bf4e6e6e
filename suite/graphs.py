"""Fewer kernel launches, by torch.compile and CUDA graphs."""

import functools
import warnings

import torch


# -- Compiling
@functools.cache
def maybe_compile(function, compiled):
    """Return torch.compile(function) if `compiled`, else the function itself."""
    if not compiled:
        return function
    torch._dynamo.config.recompile_limit = 64  # many shapes: packed batches
    return torch.compile(function)


@functools.cache
def compile_works():
    """Return whether torch.compile works on CUDA; it needs Triton and a C++ compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device="cuda"))
        return True
    except Exception as error:  # noqa: BLE001 - fall back to eager mode
        print(f"torch.compile failed; continuing in slower eager mode: {error!r:.300}")
        return False


# -- CUDA graphs: capture a step, then replay it with a single launch
def capture(step, mutable_tensors, pool):
    """Return a CUDA graph of `step`, which changes mutable_tensors().

    After the warm-up, these and the states of the random generators are restored.
    """
    before = {x: x.detach().clone() for x in mutable_tensors()}
    # Adam with capturable=True warns outside a graph
    no_warnings = warnings.catch_warnings(action="ignore")
    with no_warnings, torch.random.fork_rng([torch.cuda.current_device()]):
        for _ in range(3):  # warm-up
            step()
    with torch.no_grad():
        for x in mutable_tensors():
            if x in before:
                x.copy_(before[x])
            else:  # Adam state, created in the first step
                x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        step()
    return graph


def make_replay(step, mutable_tensors):
    """Return a function that replays step(inputs) as a CUDA graph, one for each input shape.

    Before a replay, inputs are copied into the tensors that were captured for their shapes. All
    graphs share a memory pool, since none keeps data in it between iterations.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()

    def replay(inputs):
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        shapes = tuple(x.shape for x in tensors)
        if shapes not in graphs:
            graphs[shapes] = capture(lambda: step(inputs), mutable_tensors, pool), tensors
        graph, static_inputs = graphs[shapes]
        for static, x in zip(static_inputs, tensors):
            static.copy_(x)
        graph.replay()

    return replay
