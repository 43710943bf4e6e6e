"""Mamba, faster: the same numbers as common.Mamba's, held equal to it by tests.

The states h_t = a_t h_t-1 + b_t v_t, where a_t = exp(Delta_t A) and v_t = Delta_t u_t, are swept by hand, and
so are their gradients: a step is one function of what fits the cache. After the tokens every row reads the
same command, and once the convolution sees no token any more, a, b and v are alike in all rows: what these
steps write is computed once, and a row adds what its own last state still gives.

A state comes in P parts: one, or if it is complex the real and the imaginary one. With y = 2 Re(c h) =
2 Re c Re h - 2 Im c Im h both kinds are written to and read out alike, by a sum over the parts, and differ by
their decay alone. The decay is computed as a power of 2, which is faster than one of e.
"""

from suite.compiling import pointwise

import math

import torch
import torch.nn.functional as F

import common

LN2 = math.log(2)


# ------------------------------------------------------------------------------------------------------------
# One step, pointwise: of tuples of parts; `turn` is None where states are real
# ------------------------------------------------------------------------------------------------------------


def decay_of(delta, log2_decay, turn, a):
    """Writes a (B, N, D), for a step size (B, 1, D)."""
    if turn is None:
        torch.mul(delta, log2_decay, out=a[0]).exp2_()
    else:
        size, angle = (delta * log2_decay).exp2_(), delta * turn
        torch.mul(size, angle.cos(), out=a[0])
        torch.mul(size, angle.sin_(), out=a[1])


def multiply(a, x, into, sign=1):
    """Writes a x, or with the sign -1 x times the conjugate of a."""
    torch.mul(a[0], x[0], out=into[0])
    if len(a) == 2:
        into[0].addcmul_(a[1], x[1], value=-sign)
        torch.mul(a[0], x[1], out=into[1]).addcmul_(a[1], x[0], value=sign)


def over_parts(x, y):
    """The sum of x y over the parts."""
    product = x[0] * y[0]
    return product if len(x) == 1 else product.addcmul_(x[1], y[1])


def scan_step(delta, v, b, log2_decay, turn, before, a, now):
    """Writes a and the state `now` (B, N, D) from the one before; delta, v (B, 1, D), b (B, N, 1)."""
    decay_of(delta, log2_decay, turn, a)
    multiply(a, before, now)
    for part, written in zip(now, b):
        part.addcmul_(written, v)


def scan_step_back(delta, v, b, A, c, d_y, before, a, d_h, d_before, d_A, d_delta, d_v, d_b):
    """From d_h, the gradient of a state: writes d_before, that of the state before it, d_delta and d_v
    (B, D), d_b (P, B, N); adds to d_A (B, N, D). c and d_y are of the answer of the step before, if any."""
    torch.sum(over_parts(d_h, b), 1, out=d_v)
    d_b.copy_((torch.stack(d_h) * v).sum(3))
    multiply(a, d_h, d_before, -1)
    product = [torch.empty_like(part) for part in d_h]
    multiply(before, d_before, product, -1)
    torch.sum(over_parts(product, A), 1, out=d_delta)
    for part, into in zip(product, d_A):
        into.addcmul_(part, delta)
    if c is not None:
        for read, into in zip(c, d_before):
            into.addcmul_(read, d_y)


class Scan(torch.autograd.Function):
    """delta, v (T, B, D), b (P, T, B, N), c (P, M, B, N), log2_decay, turn (N, D), compiled, gradients
    -> y (M, B, D), of the last M steps, and the last state (P, B, N, D)."""

    @staticmethod
    def forward(ctx, delta, v, b, c, log2_decay, turn, compiled, gradients):
        step = pointwise(scan_step, compiled, dynamic=False)
        exponents = log2_decay.detach(), None if turn is None else turn.detach()  # else it compiles twice
        h = v.new_empty(*b.shape, v.shape[2])
        a = torch.empty_like(h) if gradients else torch.empty_like(h[:, :1]).expand_as(h)
        before = tuple(v.new_zeros(len(b), *h.shape[2:]))
        taken = zip(delta.detach()[:, :, None], v.detach()[:, :, None], by_step(b.detach()[..., None]))
        for each, a_now, now in zip(taken, by_step(a), by_step(h)):
            step(*each, *exponents, before, a_now, now)
            before = now
        ctx.save_for_backward(delta, v, b, c, log2_decay, turn, a, h)
        ctx.compiled = compiled
        y = sum(read[:, :, None] @ part[len(part) - len(read) :] for read, part in zip(c, h))
        return y.squeeze(2).to(v.dtype), torch.stack(before)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y, d_last):
        delta, v, b, c, log2_decay, turn, a, h = ctx.saved_tensors
        step, silent = pointwise(scan_step_back, ctx.compiled, dynamic=False), h.shape[1] - c.shape[1]
        A = (log2_decay * LN2,) if turn is None else (log2_decay * LN2, turn)
        zero = torch.zeros(d_last.shape, dtype=v.dtype, device=v.device)
        d_h = zero + d_last  # contiguous, which d_last need not be
        if c.shape[1]:
            d_h += c[:, -1, :, :, None] * d_y[-1, :, None]
        d_h, d_before, d_A, start = (tuple(x) for x in (d_h, torch.empty_like(zero), zero.clone(), zero))
        d_delta, d_v, d_b = torch.empty_like(delta), torch.empty_like(v), torch.empty_like(b.transpose(0, 1))
        taken = zip(delta[:, :, None], v[:, :, None], by_step(b[..., None]))
        read = [(None, None)] * (silent + 1) + list(zip(by_step(c[..., None]), d_y[:, :, None]))
        # `read` and the states are of the step before each: zip leaves out their last, which has no step
        steps = list(zip(taken, read, [start, *by_step(h)], by_step(a), d_delta, d_v, d_b))
        for each, of_before, before, a_now, *into in reversed(steps):
            step(*each, A, *of_before, before, a_now, d_h, d_before, d_A, *into)
            d_h, d_before = d_before, d_h
        d_c = torch.stack([(d_y[:, :, None] @ part[silent:].mT).squeeze(2) for part in h])
        d_decay, d_turn = d_A[0].sum(0) * LN2, None if turn is None else d_A[1].sum(0)
        return d_delta, d_v, d_b.transpose(0, 1), d_c, d_decay, d_turn, None, None


def by_step(x):
    """(P, T, ...) -> for every step the tuple of its parts."""
    return list(zip(*x))


# ------------------------------------------------------------------------------------------------------------
# The convolution: every channel's last inputs, weighed
# ------------------------------------------------------------------------------------------------------------


class Convolution(torch.autograd.Function):
    """x (T + W - 1, B, D), weight (W, D), bias (D,) -> (T, B, D)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        time = len(x) - len(weight) + 1
        ctx.save_for_backward(x, weight)
        y = torch.addcmul(bias, x[:time], weight[0])
        for k in range(1, len(weight)):
            y.addcmul_(x[k : k + time], weight[k])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y):
        (x, weight), time = ctx.saved_tensors, len(d_y)
        d_x, d_weight = torch.zeros_like(x), torch.empty_like(weight)
        for k in range(len(weight)):
            d_x[k : k + time].addcmul_(d_y, weight[k])
            torch.sum(d_y * x[k : k + time], (0, 1), out=d_weight[k])
        return d_x, d_weight, d_y.sum((0, 1))


# ------------------------------------------------------------------------------------------------------------
# The layer
# ------------------------------------------------------------------------------------------------------------


def exponents_of(layer):
    """log2_decay (N, D), of a step size of one, and turn (N, D) or None."""
    turn = None if layer.turn is None else layer.turn.T.contiguous()
    return (-layer.log_A.exp().T / LN2).contiguous(), turn


def scanned(layer, u, answered, exponents, compiled):
    """u (W - 1 + T, B, D) -> y, last, delta, c. y (M, B, D): what the last `answered` steps, M, answer before
    the gate, from a state of zero. last (P, B, N, D): the last state. delta (M, B, D), c (P, M, B, N): of the
    answered steps."""
    if layer.conv is not None:
        u = Convolution.apply(u, layer.conv.weight[:, 0].T.contiguous(), layer.conv.bias)
    u = F.silu(u)
    delta, b, c = layer.choose(u).to(u.dtype).split(layer.widths, -1)
    delta, silent = F.softplus(layer.delta(delta)), len(u) - answered
    if layer.turn is None:
        b, c = b[None], c[None]
    else:
        b, (real, imaginary) = torch.stack(b.chunk(2, -1)), c.chunk(2, -1)
        c = torch.stack([2 * real, -2 * imaginary])
    gradients = torch.is_grad_enabled()  # inside the function it never is
    y, last = Scan.apply(delta, delta * u, b, c[:, silent:], *exponents, compiled, gradients)
    return y + layer.D * u[silent:], last, delta[silent:], c[:, silent:]


def remembered(last, delta, c, log2_decay, turn):
    """What each row's last state adds to the M answers after it, where delta (M, 1, D) and c (P, M, 1, N) are
    the same for all rows."""
    since, read = delta.cumsum(0), c.squeeze(2)[..., None]
    if turn is not None:
        angle, (x, y) = since * turn, read  # (M, N, D), (M, N, 1)
        read = torch.stack([angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x])
    read = read * (since * log2_decay * LN2).exp()  # (P, M, N, D); on CUDA exp2 is slow to begin
    return torch.einsum("pmnd,pbnd->mbd", read, last)


def mamba(layer, table, clock, tokens, steps, compiled):
    """layer(x, steps), where layer.project(x_t) = table[token_t] + clock_t."""
    time, before = len(clock), 0 if layer.conv is None else layer.conv.kernel_size[0] - 1
    start, stop = common.span(steps, time)
    own = min(stop, len(tokens) + before)  # up to here rows differ: the convolution still sees tokens
    first, tokens = min(start, own), tokens[:own]
    exponents, table, clock = exponents_of(layer), table.to(layer.D.dtype), clock.to(layer.D.dtype)
    (for_u, for_gate), (clock_u, clock_gate) = table.chunk(2, -1), clock.chunk(2, -1)

    def inputs(table, clock, begin):
        rows = F.embedding(tokens[begin:], table) + clock[begin : len(tokens), None]
        later = clock[max(begin, len(tokens)) : own, None]
        return torch.cat([rows, later.expand(-1, tokens.shape[1], -1)])

    u = F.pad(inputs(for_u, clock_u, 0), (0, 0, 0, 0, before, 0))
    y, last, *_ = scanned(layer, u, own - first, exponents, compiled)
    y = y * F.silu(inputs(for_gate, clock_gate, first))
    if own < stop:
        u = clock_u[own - before : stop, None]
        alike, *_, delta, c = scanned(layer, u, stop - own, exponents, compiled)
        later = (alike + remembered(last, delta, c, *exponents)) * F.silu(clock_gate[own:stop, None])
        y = torch.cat([y, later[max(0, start - own) :]])
    h = layer.answer(y)
    return h if isinstance(steps, slice) else common.select(h, steps)
