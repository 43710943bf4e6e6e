"""The same numbers, faster: what common.py's models compute, rewritten; held equal to them by tests.

The input weights meet every integer and every step once, not every row: a layer's input is table[token] +
clock[t]. GRU and LSTM are swept by hand (sweeps.py). S4D convolves only what is answered, and what all rows
share only once. The readout's logits exist in chunks, and their gradients are computed with them.
"""

import math

import torch
import torch.nn.functional as F

import common
from suite.graphs import pointwise
from suite.sweeps import gru_sweep, lstm_sweep

# -- The layers: their input's weight and bias, and what they make of its table and clock
SWEEPS = {common.GRU: gru_sweep, common.LSTM: lstm_sweep}
KNOWN = (*SWEEPS, common.S4D)  # whose input must be a sum over token and step


def input_weights(layer):
    """The input's weight (G, E or 2E) and the bias (G,) of the same sum."""
    if isinstance(layer, common.S4D):
        return layer.project.weight, layer.project.bias
    bias, H = layer.bias_hh_l0, layer.hidden_size
    if isinstance(layer, common.GRU):  # whose candidate has its own bias, inside the reset gate
        bias = F.pad(bias[:-H], (0, H))
    return layer.weight_ih_l0, layer.bias_ih_l0 + bias


def kernel_tables(log_dt, C, log_A_real, A_imag, time):
    """The two tables whose product is S4D's kernel, in real numbers: CUDA's compiler has no complex ones."""
    dt, A_real, (C_real, C_imag) = log_dt.exp()[:, None], -log_A_real.exp(), C.unbind(-1)
    decay, turn = A_real * dt, A_imag * dt
    x, y = decay.exp() * turn.cos() - 1, decay.exp() * turn.sin()  # exp(dt A) - 1
    square = A_real * A_real + A_imag * A_imag
    x, y = (x * A_real + y * A_imag) / square, (y * A_real - x * A_imag) / square  # and divided by A
    w_real, w_imag = C_real * x - C_imag * y, C_real * y + C_imag * x
    stride = math.isqrt(time - 1) + 1
    i, j = (torch.arange(n, device=dt.device) for n in (-(-time // stride), stride))
    size, angle = (decay[..., None] * (stride * i)).exp(), turn[..., None] * (stride * i)
    x, y = size * angle.cos(), size * angle.sin()  # exp(S i dt A)
    rows = w_real[..., None] * x - w_imag[..., None] * y, -w_real[..., None] * y - w_imag[..., None] * x
    size, angle = (decay[..., None] * j).exp(), turn[..., None] * j
    return torch.cat(rows, 1), torch.cat([size * angle.cos(), size * angle.sin()], 1)


def convolved(layer, table, clock, tokens, steps, compiled):
    """S4D; what is read after the tokens is the same in all rows."""
    start, stop = common.span(steps, len(clock))
    own = F.embedding(tokens, table) + clock[: len(tokens), None]  # (R, B, H)
    own, shared = own.permute(2, 0, 1), clock[len(tokens) :].T  # (H, R, B), (H, T - R)
    tables = pointwise(kernel_tables, compiled)(layer.log_dt, layer.C, layer.log_A_real, layer.A_imag, stop)
    response = F.pad(layer.kernel_of_tables(*tables, stop).flip(1), (0, stop - start - 1))
    read = min(stop, own.shape[1])
    alike = stop - read  # steps that read the same in all rows
    toeplitz = response.unfold(1, read, 1)[:, : stop - start].contiguous()  # (H, M, R), the last answer first
    y = toeplitz @ own[:, :read].contiguous()
    direct = own[:, start:stop]
    if alike:
        toeplitz = response[:, read:].unfold(1, alike, 1).contiguous()
        y = y + toeplitz @ shared[:, :alike, None]
        repeated = shared[:, max(0, start - read) : alike, None].expand(-1, -1, own.shape[2])
        direct = torch.cat([direct, repeated], 1)
    return layer.emit(y.flip(1) + layer.D[:, None, None] * direct, steps)


# -- The models
def occurring(model, tokens):
    """Embeddings of the integers that occur and, last, the command's; tokens as their places there."""
    if tokens.device.type != "cpu":  # a GPU would be waited for: of all integers
        return model.embedding.weight, tokens
    used, places = tokens.unique(return_inverse=True)
    return model.embedding(F.pad(used, (0, 1), value=model.embedding.num_embeddings - 1)), places


def input_products(model, embedded, time):
    """The input weights' products with embeddings (R, E) and with the steps -> (R, G), (time, G)."""
    (weight, bias), vectors = input_weights(model.layer), model.encoding.vectors(time)
    E = embedded.shape[1]
    if vectors is None:  # every column meets the embedding, once or, of dup, twice
        return F.linear(embedded, weight.unflatten(1, (-1, E)).sum(1)), bias.expand(time, -1)
    return F.linear(embedded, weight[:, :E]), F.linear(vectors.to(bias.dtype), weight[:, -E:], bias)


def features(model, inputs, steps, commands=0, compiled=False):
    """(B, T) integers -> (M, B, H), what is read out; all rows end with so many `commands`."""
    layer, (rows, time) = model.layer, inputs.shape
    embedded, tokens = occurring(model, inputs[:, : time - commands].T)  # tokens (T - commands, B)
    table, clock = input_products(model, embedded, time)
    if commands:
        clock = torch.cat([clock[:-commands], clock[-commands:] + table[-1]])
    if isinstance(layer, common.S4D):
        return convolved(layer, table, clock, tokens, steps, compiled)
    h = SWEEPS[type(layer)](layer, table, clock, tokens.flatten(), [rows] * time, compiled)
    return common.select(h.view(time, rows, -1), steps)


def loss_and_accuracy(model, episode, compiled=False):
    """Mean cross-entropy and share of right answers over an episode's answers."""
    answered = features(model, episode.inputs, episode.steps, episode.commands, compiled).flatten(0, 1)
    return cross_entropy(answered, model.readout, episode.targets.T.flatten(), episode.share(), compiled)


# -- Cross-entropy of a linear readout, in chunks of rows: the N x K logits never exist together
CHUNK, CUDA_CHUNK = 2**25, 2**27  # logits that exist at a time


def chunk_rows(weight):
    """How many rows of features meet the readout's weight at a time."""
    return max(1, (CUDA_CHUNK if weight.is_cuda else CHUNK) // len(weight))


def score(logits, target, share):
    """Loss and share of right answers of (n, K) logits, which become its gradient; target, share (n, 1)."""
    top = logits.amax(1, keepdim=True)
    total, own = (logits - top).exp().sum(1, keepdim=True), logits.gather(1, target)
    columns = torch.arange(logits.shape[1], device=logits.device)
    answer = torch.where(logits == top, columns, len(columns)).amin(1, keepdim=True)  # the first, as argmax
    loss, right = ((top - own + total.log()) * share).sum(), ((answer == target) * share).sum()
    logits.copy_(((logits - top).exp() / total - (columns == target).to(logits.dtype)) * share)
    return loss, right


def score_by_operators(logits, target, share):
    """As score, in place."""
    top, answer = logits.max(1, keepdim=True)
    own = logits.gather(1, target)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    loss, right = ((top - own + total.log()) * share).sum(), ((answer == target) * share).sum()
    logits.mul_(share / total)
    logits.scatter_(1, target, logits.gather(1, target) - share)
    return loss, right


class CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`; the gradients are computed with the loss, while a chunk's logits exist."""

    @staticmethod
    def forward(ctx, features, weight, bias, targets, share, compiled, gradients):
        step = pointwise(score, compiled) if compiled or weight.is_cuda else score_by_operators
        rows, low, low_bias = chunk_rows(weight), weight.to(features.dtype), bias.to(features.dtype)
        loss, right = weight.new_zeros(()), weight.new_zeros(())
        d_features, d_weight, d_bias = (torch.zeros_like(x) for x in (features, weight, bias))
        ones = weight.new_ones(min(rows, len(features)))
        for part in (slice(n, n + rows) for n in range(0, len(features), rows)):
            logits = torch.addmm(low_bias, features[part], low.T).to(weight.dtype)  # (n, K)
            part_loss, part_right = step(logits, targets[part, None], share[part, None].to(weight.dtype))
            loss += part_loss
            right += part_right
            if gradients:
                d = logits.to(low.dtype)
                torch.mm(d, low, out=d_features[part])
                if d.is_cuda and d.dtype == d_weight.dtype:  # in one pass, where a CPU would round otherwise
                    d_weight.addmm_(d.T, features[part])
                else:
                    d_weight += d.T @ features[part]
                if d.is_cuda:
                    d_bias.addmv_(logits.T, ones[: len(d)])
                else:
                    d_bias += d.sum(0)
        ctx.save_for_backward(d_features, d_weight, d_bias)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        return *(d * d_loss.to(d.dtype) for d in ctx.saved_tensors), None, None, None, None


def cross_entropy(features, readout, targets, share=None, compiled=False):
    """Mean cross-entropy of features (N, H) read out against targets (N,), and the share of right answers;
    `share` (N,) weighs the rows and sums to one (None: all alike)."""
    weight, bias = readout.weight, readout.bias
    if share is None:
        share = weight.new_full((1,), 1 / len(features)).expand(len(features))
    gradients = torch.is_grad_enabled()  # inside the function it never is
    return CrossEntropy.apply(features, weight, bias, targets, share, compiled, gradients)
