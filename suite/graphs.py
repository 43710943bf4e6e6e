"""Fewer launches: functions compiled to one loop, training steps captured as CUDA graphs."""

import functools
import warnings

import torch


# -- Compiling
@functools.cache
def pointwise(function, compiled):
    """The function, compiled if wanted: for the first sizes that come, then for all others."""
    if not compiled:
        return function
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function)


@functools.cache
def compiles():
    """Whether torch.compile works on CUDA here: it needs Triton and a C++ compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device="cuda"))
        return True
    except Exception as error:  # noqa: BLE001 - whatever is missing, the same functions run without
        print(f"not compiled, so the same numbers take longer: {error!r:.300}")
        return False


# -- CUDA graphs: a step is captured once, then started by a single launch
def capture(once, state, pool):
    """A CUDA graph of `once`, after three runs to warm up; their changes of state() and of
    random generators are undone."""
    before = {x: x.detach().clone() for x in state()}
    device = torch.cuda.current_device()
    with warnings.catch_warnings(), torch.random.fork_rng([device]):
        warnings.simplefilter("ignore")  # Adam's, that it is not in a graph yet
        for _ in range(3):
            once()
    with torch.no_grad():
        for x in state():
            if x in before:
                x.copy_(before[x])
            else:  # one of Adam's moments, born in the first step
                x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        once()
    return graph


def replayed(step, state):
    """step(inputs), of a tuple of tensors, as a CUDA graph for each size of the inputs.

    The first inputs of a size stay: later ones are copied into them before the replay. The
    graphs share their memory: none keeps anything there from one iteration to the next.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()

    def replay(inputs):
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        size = tuple(x.shape for x in tensors)
        if size not in graphs:
            graphs[size] = capture(lambda: step(inputs), state, pool), tensors
        graph, captured = graphs[size]
        for into, x in zip(captured, tensors):
            into.copy_(x)
        graph.replay()

    return replay
