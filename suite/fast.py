"""The models of common.py, computed faster, for --engine fast.

Tests check that results are equal up to rounding. Each distinct token and each time step is
projected once, and x_token[token] + x_step[t] is the input's projection. GRU and LSTM use
rnn_kernels.py, which defines U, G and sizes. S4D computes its convolution only at target
steps, and only once for inputs that all sequences share.
"""

import math

import torch
import torch.nn.functional as F

import common
from suite.graphs import maybe_compile
from suite.rnn_kernels import RecurrentScan, recurrent_parameters

SUPPORTED_LAYERS = common.GRU, common.LSTM, common.S4D


# -- Layers: their input projections; S4D's forward pass
def input_projection(layer):
    """Return the input weight (G, E or 2E), and the sum of the layer's biases (G,)."""
    if isinstance(layer, common.S4D):  # G = H
        return layer.project.weight, layer.project.bias
    bias = layer.bias_hh_l0
    H = layer.hidden_size
    if isinstance(layer, common.GRU):  # leave out b_hn, which the reset gate scales
        bias = F.pad(bias[:-H], (0, H))
    return layer.weight_ih_l0, layer.bias_ih_l0 + bias


def complex_mul(a, b):
    """Multiply two complex numbers, given as (real, imaginary) pairs."""
    x, y = a
    u, v = b
    return x * u - y * v, x * v + y * u


def complex_exp(real, imag):
    modulus = real.exp()
    return modulus * imag.cos(), modulus * imag.sin()


def kernel_tables(layer, n_steps):
    """Compute S4D.kernel's tables without complex numbers, for torch.compile."""
    dt = layer.log_dt.exp()[:, None, None]
    A_real, A_imag = -layer.log_A_real.exp()[..., None], layer.A_imag[..., None]  # (H, N/2, 1)
    dtA_real, dtA_imag = A_real * dt, A_imag * dt
    # ZOH weights C (exp(dt A) - 1) / A
    real, imag = complex_exp(dtA_real, dtA_imag)
    A_abs2 = A_real * A_real + A_imag * A_imag
    ratio = [x / A_abs2 for x in complex_mul((real - 1, imag), (A_real, -A_imag))]
    weights = complex_mul(layer.C.unsqueeze(-2).unbind(-1), ratio)
    # Lag l = stride i + j
    stride = math.isqrt(n_steps - 1) + 1
    lags = torch.arange(n_steps, device=dt.device)
    coarse_lags, fine_lags = lags[::stride], lags[:stride]
    exponentials = complex_exp(dtA_real * coarse_lags, dtA_imag * coarse_lags)
    real, imag = complex_mul(weights, exponentials)
    coarse = torch.cat([real, -imag], 1)
    fine = torch.cat(complex_exp(dtA_real * fine_lags, dtA_imag * fine_lags), 1)
    return coarse, fine


def s4d_features(layer, x_token, x_step, tokens, steps, compiled):
    """Return S4D's output (M, B, H) for tokens (n, B), followed by command tokens."""
    start, stop = common.required_range(steps, len(x_step))
    tokens = tokens[:stop]
    n = len(tokens)
    u = F.embedding(tokens, x_token)
    u = (u + x_step[:n, None]).permute(2, 0, 1)  # (H, n, B)
    shared = x_step[n:stop].T[..., None]  # (H, stop - n, 1): shared by all sequences

    coarse, fine = maybe_compile(kernel_tables, compiled)(layer, stop)
    kernel = layer.kernel_from_tables(coarse, fine, stop)
    flipped_kernel = F.pad(kernel.flip(1), (0, stop - start - 1))
    hankel = flipped_kernel.unfold(1, n, 1)[:, : stop - start]  # (H, M, n), last step first
    y = hankel.contiguous() @ u.contiguous()
    skip = u[:, start:]  # the skip connection's input
    if n < stop:
        hankel = flipped_kernel[:, n:].unfold(1, stop - n, 1).contiguous()
        y = y + hankel @ shared
        repeated = shared[:, max(0, start - n) :].expand(-1, -1, u.shape[2])
        skip = torch.cat([skip, repeated], 1)
    y = y.flip(1) + layer.D[:, None, None] * skip
    return layer.output(y, steps)


# -- The models
def project_inputs(model, embeddings, n_steps):
    """Project embeddings (U, E) and time steps -> x_token (U, G), x_step (n_steps, G)."""
    weight, bias = input_projection(model.layer)
    vectors = model.encoding.vectors(n_steps)
    E = embeddings.shape[1]
    if vectors is None:  # no PE; dup reads the embedding twice
        weight = weight.unflatten(1, (-1, E)).sum(1)
        return F.linear(embeddings, weight), bias.expand(n_steps, -1)
    # With --combine add, the weight has E columns, so each of these slices is the whole weight
    x_token = F.linear(embeddings, weight[:, :E])
    x_step = F.linear(vectors.to(bias.dtype), weight[:, -E:], bias)
    return x_token, x_step


def features(model, batch, compiled):
    """Return features (M, B, H), or (N, H) of a packed batch, like Model.features."""
    inputs, n_commands, packed = batch.inputs, batch.n_commands, batch.batch_sizes is not None
    if packed:
        sizes = batch.batch_sizes.tolist()
    else:
        B, T = inputs.shape
        sizes = [B] * T
        inputs = inputs[:, : T - n_commands].T  # (T - n_commands, B)
    embeddings, tokens = model.embedding.weight, inputs
    if inputs.is_cpu:  # project only tokens in the batch; on a GPU, `unique` would synchronise
        used, tokens = inputs.unique(return_inverse=True)
        used = F.pad(used, (0, 1), value=len(embeddings) - 1)  # and the command, the last token
        embeddings = model.embedding(used)
    x_token, x_step = project_inputs(model, embeddings, len(sizes))
    if n_commands:
        x_step = torch.cat([x_step[:-n_commands], x_step[-n_commands:] + x_token[-1]])
    if isinstance(model.layer, common.S4D):
        return s4d_features(model.layer, x_token, x_step, tokens, batch.target_steps, compiled)
    parameters = recurrent_parameters(model.layer)
    h = RecurrentScan.apply(*parameters, x_token, x_step, tokens.flatten(), sizes, compiled)
    return common.select_steps(h if packed else h.view(T, B, -1), batch.target_steps)
