"""Mamba sooner: the same numbers as common.Mamba's, held equal to it by tests.

The states h_t = a_t h_t-1 + b_t v_t, where a_t = exp(Delta_t A) and v_t = Delta_t u_t, are swept by hand, and
so are their gradients: a step is one function of what fits the cache. After the tokens all rows read the same
and have the same a, b and v: from there on a row's answers are products with the last state of its own.

A state comes in P parts: one, or if it is complex the real and the imaginary one. With y = 2 Re(c h) =
2 Re c Re h - 2 Im c Im h both kinds are written to and read out alike, by a sum over the parts, and differ by
their decay alone. That is in powers of 2, which are sooner than those of e.
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


def decay_of(delta, decay, turn, a):
    """Writes a (B, N, D), for a step size (B, 1, D)."""
    if turn is None:
        torch.mul(delta, decay, out=a[0]).exp2_()
    else:
        size, angle = (delta * decay).exp2_(), delta * turn
        torch.mul(size, angle.cos(), out=a[0])
        torch.mul(size, angle.sin_(), out=a[1])


def times(a, x, into, sign=1):
    """Writes a x, or with the sign -1 x times the conjugate of a."""
    torch.mul(a[0], x[0], out=into[0])
    if len(a) == 2:
        into[0].addcmul_(a[1], x[1], value=-sign)
        torch.mul(a[0], x[1], out=into[1]).addcmul_(a[1], x[0], value=sign)


def over_parts(x, y):
    """The sum of x y over the parts."""
    product = x[0] * y[0]
    return product if len(x) == 1 else product.addcmul_(x[1], y[1])


def scan_step(delta, v, b, decay, turn, before, a, now):
    """Writes a and the state `now` (B, N, D) from the one before; delta, v (B, 1, D), b (B, N, 1)."""
    decay_of(delta, decay, turn, a)
    times(a, before, now)
    for part, written in zip(now, b):
        part.addcmul_(written, v)


def scan_step_back(delta, v, b, rates, c, d_y, before, a, d_h, d_before, d_rates, d_delta, d_v, d_b):
    """From the gradient d_h of a state: writes that of the one before, to which its answer adds c d_y (None
    where it has none), and adds to the rates'; d_delta and d_v are (B, D), d_b is (P, B, N)."""
    torch.sum(over_parts(d_h, b), 1, out=d_v)
    d_b.copy_((d_h * v).sum(3))
    times(a, d_h, d_before, -1)
    product = [torch.empty_like(part) for part in d_before]
    times(before, d_before, product, -1)
    torch.sum(over_parts(product, rates), 1, out=d_delta)
    for part, into in zip(product, d_rates):
        into.addcmul_(part, delta)
    if c is not None:
        for part, read in zip(d_before, c):
            part.addcmul_(read, d_y)


class Scan(torch.autograd.Function):
    """delta, v (T, B, D), b (P, T, B, N), c (P, M, B, N), decay, turn (N, D), compiled -> y (M, B, D), of the
    last M steps, and the last state (P, B, N, D)."""

    @staticmethod
    def forward(ctx, delta, v, b, c, decay, turn, compiled):
        step = pointwise(scan_step, compiled)
        a, h = (v.new_empty(*b.shape, v.shape[2]) for _ in range(2))
        before = tuple(v.new_zeros(len(b), *h.shape[2:]))
        for *taken, b_now, a_now, now in zip(delta[:, :, None], v[:, :, None], *by_step(b[..., None], a, h)):
            step(*taken, b_now, decay, turn, before, a_now, now)
            before = now
        ctx.save_for_backward(delta, v, b, c, decay, turn, a, h)
        ctx.compiled = compiled
        y = sum(c_part[:, :, None] @ part[len(part) - len(c_part) :] for c_part, part in zip(c, h))
        return y.squeeze(2).to(v.dtype), torch.stack(before)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y, d_last):
        delta, v, b, c, decay, turn, a, h = ctx.saved_tensors
        step, silent = pointwise(scan_step_back, ctx.compiled), h.shape[1] - c.shape[1]
        rates = (decay * LN2,) if turn is None else (decay * LN2, turn)
        d_h = d_last.clone(memory_format=torch.contiguous_format)
        d_before, d_rates, start = torch.empty_like(d_h), torch.zeros_like(d_h), torch.zeros_like(d_h)
        d_delta, d_v, d_b = torch.empty_like(delta), torch.empty_like(v), torch.empty_like(b.transpose(0, 1))
        read = [(None, None)] * silent + list(zip(*by_step(c[..., None]), d_y[:, :, None]))
        if c.shape[1]:
            d_h += c[:, -1, :, :, None] * d_y[-1, :, None]
        taken = zip(delta[:, :, None], v[:, :, None], *by_step(b[..., None]))
        decays, states = by_step(a, h)
        steps = list(zip(taken, [(None, None), *read], [tuple(start), *states], decays, d_delta, d_v, d_b))
        for each, out, before, a_now, *into in reversed(steps):
            step(*each, rates, *out, before, a_now, d_h, tuple(d_before), tuple(d_rates), *into)
            d_h, d_before = d_before, d_h
        d_c = torch.stack([(d_y[:, :, None] @ part[silent:].mT).squeeze(2) for part in h])
        d_decay, *d_turn = (part.sum(0) for part in d_rates)
        return d_delta, d_v, d_b.transpose(0, 1), d_c, d_decay * LN2, *(d_turn or [None]), None


def by_step(*tensors):
    """Of each (P, T, ...) a list over the steps of tuples of parts."""
    return [list(zip(*x)) for x in tensors]


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


def rates(layer):
    """The decay (N, D), a power of two, and the turn (N, D) or None."""
    turn = None if layer.turn is None else layer.turn.T.contiguous()
    return (-layer.log_A.exp().T / LN2).contiguous(), turn


def scanned(layer, u, answered, compiled):
    """u (W - 1 + T, B, D) -> what the last `answered` steps, M, answer before the gate (M, B, D) if the state
    begins at zero; the last state (P, B, N, D); and, of those steps, delta (M, B, D) and c (P, M, B, N)."""
    if layer.conv is not None:
        u = Convolution.apply(u, layer.conv.weight[:, 0].T.contiguous(), layer.conv.bias)
    u = F.silu(u)
    delta, b, c = layer.choose(u).to(u.dtype).split(layer.parts, -1)
    delta, silent = F.softplus(layer.delta(delta)), len(u) - answered
    if layer.turn is None:
        b, c = b[None], c[None]
    else:
        b, (real, imaginary) = torch.stack(b.chunk(2, -1)), c.chunk(2, -1)
        c = torch.stack([2 * real, -2 * imaginary])
    y, last = Scan.apply(delta, delta * u, b, c[:, silent:], *rates(layer), compiled)
    return y + layer.D * u[silent:], last, delta[silent:], c[:, silent:]


def remembered(layer, last, delta, c):
    """What states of rows add to M later answers; delta (M, 1, D) and c (P, M, 1, N) are alike for all."""
    (decay, turn), since, read = rates(layer), delta.cumsum(0), c.squeeze(2)[..., None]  # (P, M, N, 1)
    if turn is not None:
        angle, (x, y) = since * turn, read
        read = torch.stack([angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x])
    read = read * (since * decay * LN2).exp()  # (P, M, N, D); exp2 would be compiled at run time on CUDA
    return torch.einsum("pmnd,pbnd->mbd", read, last)


def mamba(layer, table, clock, tokens, steps, compiled):
    """As layer(x, steps) of an x whose products with the input weights are table[token] + clock."""
    time, before = len(clock), 0 if layer.conv is None else layer.conv.kernel_size[0] - 1
    start, stop, _ = steps.indices(time) if isinstance(steps, slice) else (0, time, 1)
    own = min(stop, len(tokens) + before)  # so many steps differ between rows,
    first, tokens = min(start, own), tokens[:own]  # and are answered from here on
    table, clock = table.to(layer.D.dtype), clock.to(layer.D.dtype)
    (for_u, for_gate), (clock_u, clock_gate) = table.chunk(2, -1), clock.chunk(2, -1)

    def read(table, clock, begin):
        rows = F.embedding(tokens[begin:], table) + clock[begin : len(tokens), None]
        later = clock[max(begin, len(tokens)) : own, None]
        return torch.cat([rows, later.expand(-1, tokens.shape[1], -1)])

    u = F.pad(read(for_u, clock_u, 0), (0, 0, 0, 0, before, 0))
    y, last, *_ = scanned(layer, u, own - first, compiled)
    y = y * F.silu(read(for_gate, clock_gate, first))
    if own < stop:
        alike, *_, delta, c = scanned(layer, clock_u[own - before : stop, None], stop - own, compiled)
        later = (alike + remembered(layer, last, delta, c)) * F.silu(clock_gate[own:stop, None])
        y = torch.cat([y, later[max(0, start - own) :]])
    h = layer.answer(y)
    return h if isinstance(steps, slice) else common.select(h, steps)
