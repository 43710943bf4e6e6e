"""Mamba sooner: the same numbers as common.Mamba's, held equal to it by tests.

The states h_t = a_t h_t-1 + b_t v_t, where a_t = exp(Delta_t A) and v_t = Delta_t u_t, are swept by hand, and
so are their gradients: a step is one function of what fits the cache. After the tokens all rows read the same
and have the same a, b and v: from there on a row's answers are products with the last state of its own.

S counts what a state has of real numbers: N; or, of complex states, the real parts, then the imaginary ones.
With y = 2 Re(c h) = 2 Re c Re h - 2 Im c Im h both kinds are written to and read out alike, (B, S) with
(B, S, D), and differ by their decay alone. That is in powers of 2, which are sooner than those of e.
"""

from suite.compiling import pointwise

import math

import torch
import torch.nn.functional as F

import common

LN2 = math.log(2)


# ------------------------------------------------------------------------------------------------------------
# One step, pointwise; `turn` is None where states are real
# ------------------------------------------------------------------------------------------------------------


def decay_of(delta, decay, turn, a):
    """Writes a (B, S, D), for a step size (B, 1, D)."""
    if turn is None:
        torch.mul(delta, decay, out=a).exp2_()
    else:
        (real, imaginary), size, angle = a.chunk(2, dim=1), (delta * decay).exp2_(), delta * turn
        real.copy_(angle.cos().mul_(size))
        imaginary.copy_(angle.sin_().mul_(size))


def times(a, x, into, turn, sign=1):
    """Writes a x, or with the sign -1 x times the conjugate of a."""
    if turn is None:
        torch.mul(a, x, out=into)
    else:
        (p, q), (x, y), (real, imaginary) = (z.chunk(2, dim=1) for z in (a, x, into))
        real.copy_((p * x).addcmul_(q, y, value=-sign))
        imaginary.copy_((p * y).addcmul_(q, x, value=sign))


def scan_step(delta, v, b, decay, turn, before, a, now):
    """Writes a and the state `now` (B, S, D) from the one before; delta, v (B, 1, D), b (B, S, 1)."""
    decay_of(delta, decay, turn, a)
    times(a, before, now, turn)
    now.addcmul_(b, v)


def scan_step_back(delta, v, b, rates, turn, c, d_y, before, a, d_h, d_before, d_rates, d_delta, d_v, d_b):
    """From the gradient d_h of a state: writes that of the one before, to which its answer adds c d_y (None
    where it has none), and adds to the rates'; d_delta and d_v are (B, D), d_b is (B, S)."""
    product = d_h * b
    torch.sum(product, 1, out=d_v)
    torch.sum(torch.mul(d_h, v, out=product), 2, out=d_b)
    times(a, d_h, d_before, turn, -1)
    times(before, d_before, product, turn, -1)
    if c is not None:
        d_before.addcmul_(c, d_y)
    d_rates.addcmul_(product, delta)
    torch.sum(product.mul_(rates), 1, out=d_delta)


class Scan(torch.autograd.Function):
    """delta, v (T, B, D), b (T, B, S), c (M, B, S), decay, turn (N, D), compiled -> y (M, B, D), of the last
    M steps, and the last state (B, S, D)."""

    @staticmethod
    def forward(ctx, delta, v, b, c, decay, turn, compiled):
        step = pointwise(scan_step, compiled)
        a, h = (v.new_empty(*b.shape, v.shape[2]) for _ in range(2))
        before = v.new_zeros(h.shape[1:])
        for *taken, a_now, now in zip(delta[:, :, None], v[:, :, None], b[..., None], a, h):
            step(*taken, decay, turn, before, a_now, now)
            before = now
        ctx.save_for_backward(delta, v, b, c, decay, turn, a, h)
        ctx.compiled = compiled
        y = (c[:, :, None] @ h[len(h) - len(c) :]).squeeze(2)
        return y.to(v.dtype), before.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_y, d_last):
        delta, v, b, c, decay, turn, a, h = ctx.saved_tensors
        step = pointwise(scan_step_back, ctx.compiled)
        rates = decay * LN2 if turn is None else torch.cat([decay * LN2, turn])
        d_h, d_before = d_last.clone(memory_format=torch.contiguous_format), v.new_empty(h.shape[1:])
        d_rates, start = torch.zeros_like(d_h), torch.zeros_like(d_h)
        found = d_delta, d_v, d_b = [torch.empty_like(x) for x in (delta, v, b)]
        silent = len(h) - len(c)
        read = [(None, None)] * silent + list(zip(c[..., None], d_y[:, :, None]))
        if len(c):
            d_h.addcmul_(*read[-1])
        taken = zip(delta[:, :, None], v[:, :, None], b[..., None])
        steps = list(zip(taken, [(None, None), *read], [start, *h[:-1]], a, zip(*found)))
        for each, out, before, a_now, into in reversed(steps):
            step(*each, rates, turn, *out, before, a_now, d_h, d_before, d_rates, *into)
            d_h, d_before = d_before, d_h
        d_c, d_rates = (d_y[:, :, None] @ h[silent:].mT).squeeze(2), d_rates.sum(0)
        d_turn = None if turn is None else d_rates[len(decay) :]
        return d_delta, d_v, d_b, d_c, d_rates[: len(decay)] * LN2, d_turn, None


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
    begins at zero; the last state (B, S, D); and, of those steps, delta (M, B, D) and c (M, B, S)."""
    if layer.conv is not None:
        u = Convolution.apply(u, layer.conv.weight[:, 0].T.contiguous(), layer.conv.bias)
    u = F.silu(u)
    delta, b, c = layer.choose(u).to(u.dtype).split(layer.parts, -1)
    delta, silent = F.softplus(layer.delta(delta)), len(u) - answered
    if layer.turn is not None:
        c = 2 * torch.cat([c[..., : c.shape[-1] // 2], -c[..., c.shape[-1] // 2 :]], -1)
    y, last = Scan.apply(delta, delta * u, b, c[silent:], *rates(layer), compiled)
    return y + layer.D * u[silent:], last, delta[silent:], c[silent:]


def remembered(layer, last, delta, c):
    """What the rows' states `last` add to M later answers; delta and c (M, 1, ...) are alike for all."""
    (decay, turn), since, c = rates(layer), delta.cumsum(0), c.squeeze(1)[..., None]  # (M, 1, D), (M, S, 1)
    read, size = c, (since * decay * LN2).exp()  # exp2 is compiled at run time on CUDA
    if turn is not None:
        angle, (x, y) = since * turn, c.chunk(2, dim=1)
        read = torch.cat([angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x], dim=1)
        size = torch.cat([size, size], dim=1)
    return torch.einsum("msd,bsd->mbd", size * read, last)


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
