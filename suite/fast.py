"""What common.py's models compute, faster: the same numbers, as the tests demand.

The input weights meet every integer and every step once, not every row: a layer's input
is table[token] + by_step[t]. GRU and LSTM are scanned by hand (rnn_kernels.py). S4D convolves
only at answered steps, and inputs that all rows share only once.
"""

import math

import torch
import torch.nn.functional as F

import common
from suite import rnn_kernels
from suite.graphs import pointwise

KNOWN = common.GRU, common.LSTM, common.S4D  # the layers that this engine has


# -- The layers: what meets their input; S4D's forward pass
def input_weights(layer):
    """The input's weight (G, E or 2E) and the bias (G,) of the same sum."""
    if isinstance(layer, common.S4D):
        return layer.project.weight, layer.project.bias
    bias = layer.bias_hh_l0
    H = layer.hidden_size
    if isinstance(layer, common.GRU):  # whose candidate has its own bias, inside the reset gate
        bias = F.pad(bias[:-H], (0, H))
    return layer.weight_ih_l0, layer.bias_ih_l0 + bias


def multiply(a, b):
    """The product of two complex numbers, each a pair of real and imaginary part."""
    x, y = a
    u, v = b
    return x * u - y * v, x * v + y * u


def exp_of(real, imag, exponents):
    """exp(exponent (real + i imag)), a pair of (H, N/2, len(exponents))."""
    size = (real[..., None] * exponents).exp()
    angle = imag[..., None] * exponents
    return size * angle.cos(), size * angle.sin()


def kernel_tables(log_dt, C, log_A_real, A_imag, time):
    """S4D.kernel's two tables, in real numbers alone: torch.compile has no complex ones."""
    dt = log_dt.exp()[:, None]
    A_real = -log_A_real.exp()
    dtA = A_real * dt, A_imag * dt
    # The weights C (exp(dt A) - 1) / A
    size = dtA[0].exp()
    grown = size * dtA[1].cos() - 1, size * dtA[1].sin()
    square = A_real * A_real + A_imag * A_imag
    of_A = [x / square for x in multiply(grown, (A_real, -A_imag))]
    weights = multiply(C.unbind(-1), of_A)
    # The kernel at l = S i + j: rows for i, columns for j
    stride = math.isqrt(time - 1) + 1
    i = torch.arange(-(-time // stride), device=dt.device)
    j = torch.arange(stride, device=dt.device)
    weights = [w[..., None] for w in weights]
    real, imag = multiply(weights, exp_of(*dtA, stride * i))
    rows = torch.cat([real, -imag], 1)
    columns = torch.cat(exp_of(*dtA, j), 1)
    return rows, columns


def s4d_features(layer, table, by_step, tokens, steps, compiled):
    """S4D's (M, B, H). n steps read tokens; what is read later is the same in all rows."""
    start, stop = common.span(steps, len(by_step))
    n = len(tokens)
    u = F.embedding(tokens, table)
    u = (u + by_step[:n, None]).permute(2, 0, 1)  # (H, n, B)
    shared = by_step[n:].T  # (H, T - n)
    read = min(stop, n)
    alike = stop - read  # steps that read the same in all rows

    make_tables = pointwise(kernel_tables, compiled)
    rows, columns = make_tables(layer.log_dt, layer.C, layer.log_A_real, layer.A_imag, stop)
    kernel = layer.kernel_from_tables(rows, columns, stop)
    response = F.pad(kernel.flip(1), (0, stop - start - 1))
    toeplitz = response.unfold(1, read, 1)[:, : stop - start]  # (H, M, read), last answer first
    y = toeplitz.contiguous() @ u[:, :read].contiguous()
    direct = u[:, start:stop]  # what the answered steps read, for D
    if alike:
        toeplitz = response[:, read:].unfold(1, alike, 1).contiguous()
        y = y + toeplitz @ shared[:, :alike, None]
        repeated = shared[:, max(0, start - read) : alike, None]
        direct = torch.cat([direct, repeated.expand(-1, -1, u.shape[2])], 1)
    y = y.flip(1) + layer.D[:, None, None] * direct
    return layer.output(y, steps)


# -- The models
def used_embeddings(model, tokens):
    """Embeddings of the integers that occur, the command's last; tokens as their places there.

    On a GPU of all integers: what occurs would have to be waited for.
    """
    if tokens.device.type != "cpu":
        return model.embedding.weight, tokens
    used, places = tokens.unique(return_inverse=True)
    command = model.embedding.num_embeddings - 1
    return model.embedding(F.pad(used, (0, 1), value=command)), places


def input_products(model, embedded, time):
    """The input weights' products with embeddings (R, E) and steps -> (R, G), (time, G)."""
    weight, bias = input_weights(model.layer)
    vectors = model.encoding.vectors(time)
    E = embedded.shape[1]
    if vectors is None:  # every column meets the embedding, once or, of dup, twice
        columns = weight.unflatten(1, (-1, E)).sum(1)
        return F.linear(embedded, columns), bias.expand(time, -1)
    # Where the vectors are added, both have all columns
    table = F.linear(embedded, weight[:, :E])
    by_step = F.linear(vectors.to(bias.dtype), weight[:, -E:], bias)
    return table, by_step


def features(model, batch, compiled=False):
    """What Model.features computes: (M, B, H)."""
    layer, steps, commands = model.layer, batch.steps, batch.commands
    rows, time = batch.inputs.shape
    before_commands = batch.inputs[:, : time - commands].T  # (T - commands, B)
    embedded, tokens = used_embeddings(model, before_commands)
    table, by_step = input_products(model, embedded, time)
    if commands:
        by_step = torch.cat([by_step[:-commands], by_step[-commands:] + table[-1]])
    if isinstance(layer, common.S4D):
        return s4d_features(layer, table, by_step, tokens, steps, compiled)
    sizes = [rows] * time
    h = rnn_kernels.scan(layer, table, by_step, tokens.flatten(), sizes, compiled)
    return common.select(h.view(time, rows, -1), steps)
