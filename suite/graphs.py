"""CUDA graphs: a training step is recorded once, then started by a single launch.

`state()` lists the tensors that a step changes, so that recording leaves no trace.
"""

import warnings

import torch


def rehearse(once, times, state):
    """Warm up: run `once` so many times, then restore the state."""
    before = {x: x.detach().clone() for x in state()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Adam's, that it is not in a graph yet
        for _ in range(times):
            once()
    with torch.no_grad():
        for x in state():
            if x in before:
                x.copy_(before[x])
            else:  # one of Adam's moments, born in the first step
                x.zero_()


def record(once, pool=None):
    """A CUDA graph of what has been rehearsed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        once()
    return graph


def whole(step, first, state, device):
    """One graph of step(i), where i is a tensor that counts on by itself -> a function that replays it."""
    counter = torch.tensor(first, device=device)

    def once():
        step(counter)
        counter.add_(1)

    rehearse(once, 3, state)
    counter.fill_(first)
    graph = record(once)

    graph.counter = counter  # or its memory would be given away
    return lambda i: graph.replay()  # whose counter is at i already


def by_size(learn, episode, first, state):
    """One graph of learn(batch) for every size of batch.

    A size's first batch stays as its input: later ones are copied into it before the replay. The graphs share
    their memory: none keeps anything there from one iteration to the next.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()

    def of(batch):
        size = tuple(x.shape for x in batch)
        if size not in graphs:
            once = lambda: learn(batch)
            rehearse(once, 3, state)
            graphs[size] = record(once, pool), batch
        return graphs[size]

    def step(i):
        batch = episode(i)
        graph, there = of(batch)
        for into, x in zip(there, batch):
            into.copy_(x)
        graph.replay()

    of(episode(first))  # before the clock starts
    return step
