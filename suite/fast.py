"""What common.py's models compute, faster: the same numbers, as the tests demand.

The input weights meet every integer and every step once, not every row: a layer's input
is table[token] + clock[t]. GRU and LSTM are swept by hand (sweeps.py). S4D convolves
only what is answered, and what all rows share only once. The readout's logits exist in
chunks, and their gradients are computed with them.
"""

import math

import torch
import torch.nn.functional as F

import common
from suite import sweeps
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


def powers(decay, turn, exponents):
    """exp(exponent dt A), real and imaginary parts, (H, N/2, len(exponents)) each."""
    size = (decay[..., None] * exponents).exp()
    angle = turn[..., None] * exponents
    return size * angle.cos(), size * angle.sin()


def kernel_tables(log_dt, C, log_A_real, A_imag, time):
    """S4D.kernel's two tables, in real numbers alone: torch.compile has no complex ones."""
    dt = log_dt.exp()[:, None]
    A_real = -log_A_real.exp()
    decay, turn = A_real * dt, A_imag * dt

    # C (exp(dt A) - 1) / A
    x = decay.exp() * turn.cos() - 1
    y = decay.exp() * turn.sin()
    square = A_real * A_real + A_imag * A_imag
    x, y = (x * A_real + y * A_imag) / square, (y * A_real - x * A_imag) / square
    C_real, C_imag = C.unbind(-1)
    w_real = C_real * x - C_imag * y
    w_imag = C_real * y + C_imag * x

    # The kernel at l = S i + j: rows for i, columns for j
    stride = math.isqrt(time - 1) + 1
    i = torch.arange(-(-time // stride), device=dt.device)
    j = torch.arange(stride, device=dt.device)
    x, y = powers(decay, turn, stride * i)
    real = w_real[..., None] * x - w_imag[..., None] * y
    minus_imag = -w_real[..., None] * y - w_imag[..., None] * x
    columns = torch.cat(powers(decay, turn, j), 1)
    return torch.cat([real, minus_imag], 1), columns


def s4d_features(layer, table, clock, tokens, steps, compiled):
    """S4D's (M, B, H). n steps read tokens; what is read later is the same in all rows."""
    start, stop = common.span(steps, len(clock))
    n = len(tokens)
    own = F.embedding(tokens, table) + clock[:n, None]  # (n, B, H)
    own = own.permute(2, 0, 1)  # (H, n, B)
    shared = clock[n:].T  # (H, T - n)
    read = min(stop, n)
    alike = stop - read  # steps that read the same in all rows

    parameters = layer.log_dt, layer.C, layer.log_A_real, layer.A_imag
    tables = pointwise(kernel_tables, compiled)(*parameters, stop)
    kernel = layer.kernel_of_tables(*tables, stop)
    response = F.pad(kernel.flip(1), (0, stop - start - 1))
    toeplitz = response.unfold(1, read, 1)[:, : stop - start]  # (H, M, read), last answer first
    y = toeplitz.contiguous() @ own[:, :read].contiguous()
    direct = own[:, start:stop]  # what the answered steps read, for D
    if alike:
        toeplitz = response[:, read:].unfold(1, alike, 1).contiguous()
        y = y + toeplitz @ shared[:, :alike, None]
        repeated = shared[:, max(0, start - read) : alike, None]
        direct = torch.cat([direct, repeated.expand(-1, -1, own.shape[2])], 1)
    return layer.emit(y.flip(1) + layer.D[:, None, None] * direct, steps)


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
    return table, F.linear(vectors.to(bias.dtype), weight[:, -E:], bias)


def features(model, inputs, steps, commands=0, compiled=False):
    """(B, T) integers -> (M, B, H), what is read out; all rows end with so many `commands`."""
    layer = model.layer
    rows, time = inputs.shape
    before_commands = inputs[:, : time - commands].T  # (T - commands, B)
    embedded, tokens = used_embeddings(model, before_commands)
    table, clock = input_products(model, embedded, time)
    if commands:
        clock = torch.cat([clock[:-commands], clock[-commands:] + table[-1]])
    if isinstance(layer, common.S4D):
        return s4d_features(layer, table, clock, tokens, steps, compiled)
    h = sweeps.sweep(layer, table, clock, tokens.flatten(), [rows] * time, compiled)
    return common.select(h.view(time, rows, -1), steps)


def loss_and_accuracy(model, episode, compiled=False):
    """Mean cross-entropy, and the part of an episode's answers that is right."""
    h = features(model, episode.inputs, episode.steps, episode.commands, compiled)
    targets, weights = episode.targets.T.flatten(), episode.mean_weights()
    return cross_entropy(h.flatten(0, 1), model.readout, targets, weights, compiled)


# -- Cross-entropy of a linear readout by chunks of rows: N x K logits never exist together
CHUNK, CUDA_CHUNK = 2**25, 2**27  # logits that exist at a time


def chunk_rows(weight):
    """How many rows of features meet the readout's weight at a time."""
    logits = CUDA_CHUNK if weight.is_cuda else CHUNK
    return max(1, logits // len(weight))


def score(logits, target, weights):
    """-> loss and accuracy. In place of the (n, K) logits comes the loss's gradient.

    `target` and `weights` are (n, 1).
    """
    top = logits.amax(1, keepdim=True)
    total = (logits - top).exp().sum(1, keepdim=True)
    own = logits.gather(1, target)
    columns = torch.arange(logits.shape[1], device=logits.device)
    found = torch.where(logits == top, columns, len(columns))
    answer = found.amin(1, keepdim=True)  # the first, as argmax
    loss = ((top - own + total.log()) * weights).sum()
    right = ((answer == target) * weights).sum()
    probabilities = (logits - top).exp() / total
    logits.copy_((probabilities - (columns == target).to(logits.dtype)) * weights)
    return loss, right


def score_in_place(logits, target, weights):
    """As score, by few operators, for a CPU."""
    top, answer = logits.max(1, keepdim=True)
    own = logits.gather(1, target)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    loss = ((top - own + total.log()) * weights).sum()
    right = ((answer == target) * weights).sum()
    logits.mul_(weights / total)
    logits.scatter_(1, target, logits.gather(1, target) - weights)
    return loss, right


class CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. Gradients are computed with the loss, while logits exist."""

    @staticmethod
    def forward(ctx, features, matrix, bias, targets, weights, compiled):
        cuda = matrix.is_cuda
        step = sweeps.choose_step(score, score_in_place, matrix.device, compiled)
        low = matrix.to(features.dtype)
        low_bias = bias.to(features.dtype)
        loss, right = 0, 0
        d_features = torch.zeros_like(features)
        d_matrix = torch.zeros_like(matrix)
        d_bias = torch.zeros_like(bias)
        rows = chunk_rows(matrix)
        ones = matrix.new_ones(min(rows, len(features)))
        for start in range(0, len(features), rows):
            part = slice(start, start + rows)
            logits = torch.addmm(low_bias, features[part], low.T).to(matrix.dtype)  # (n, K)
            part_weights = weights[part, None].to(matrix.dtype)
            part_loss, part_right = step(logits, targets[part, None], part_weights)
            loss += part_loss
            right += part_right
            if not ctx.needs_input_grad[0]:  # an evaluation
                continue
            d = logits.to(low.dtype)  # the loss's gradient by now
            torch.mm(d, low, out=d_features[part])
            if cuda and d.dtype == d_matrix.dtype:  # in one pass; a CPU would round otherwise
                d_matrix.addmm_(d.T, features[part])
            else:
                d_matrix += d.T @ features[part]
            if cuda:
                d_bias.addmv_(logits.T, ones[: len(d)])
            else:
                d_bias += d.sum(0)
        ctx.save_for_backward(d_features, d_matrix, d_bias)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        d_inputs = [d * d_loss.to(d.dtype) for d in ctx.saved_tensors]
        return *d_inputs, None, None, None


def cross_entropy(features, readout, targets, weights=None, compiled=False):
    """Mean cross-entropy of features (N, H) read out against targets (N,), and the accuracy.

    `weights` (N,) are the rows' own in these means, and sum to one; None: all alike.
    """
    weight, bias = readout.weight, readout.bias
    if weights is None:
        weights = weight.new_full((len(features),), 1 / len(features))
    return CrossEntropy.apply(features, weight, bias, targets, weights, compiled)
