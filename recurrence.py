"""GRU and LSTM recurrences, forward and backward by hand: one autograd Function each.

Both read a *table* and a *clock*: at step t a row's input product is clock[t] + table[token], so that neither
the embeddings nor their product with the input weights are ever written out for every row and step. A step
is one product with the state and one pointwise function; the gradients of the weights are one product each,
after the backward sweep.

    lstm(table (R, 4H), clock (T, 4H), tokens (n,), sizes (T,), compiled, weight (4H, H)) -> h (N, H)
    gru(table (R, 3H), clock (T, 3H), tokens (n,), sizes (T,), compiled, weight (3H, H), bias (H,)) -> h

Rows are flat and packed as in torch's PackedSequence: those of step 0, then those of step 1, ...; `sizes`
says how many each step has, never more than the one before; N is their sum. `tokens` may end early, after
any step: later steps read the clock alone. Gates are in torch's order, the state starts at zero. Products are
in the precision of the table (bfloat16, say), the carried state is in the weights'. `bias` is that of the
GRU's candidate state inside its reset gate; all others are the clock's.
"""

import functools

import torch

# ------------------------------------------------------------------------------------------------------------
# One step, pointwise: what torch.compile makes one loop of
# ------------------------------------------------------------------------------------------------------------


def tanh(x):
    """On a CPU several times as fast as torch's."""
    return 2 * (2 * x).sigmoid() - 1


def read(clock, table, tokens):
    return clock if tokens is None else clock + table[tokens]


def lstm_step(product, clock, table, tokens, cell, gates, c, h):
    """From the last h's product with the weights; writes the gates, c and h and carries `cell` on."""
    i, f, g, o = (product + read(clock, table, tokens)).to(cell.dtype).chunk(4, dim=1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), tanh(g), o.sigmoid()
    new = f * cell + i * g
    gates.copy_(torch.cat([i, f, g, o], dim=1))
    cell.copy_(new)
    c.copy_(new)
    h.copy_(o * tanh(new))


def lstm_step_back(gates, c, c_before, d_out, d_h, d_cell, d_gates):
    """From the gradients of the step's output and of the next step's state; carries `d_cell` back."""
    i, f, g, o = gates.to(d_cell.dtype).chunk(4, dim=1)
    d_h, t = d_out + d_h, tanh(c)
    d_c = d_cell + d_h * o * (1 - t * t)
    d_i, d_f, d_g = d_c * g * i * (1 - i), d_c * c_before * f * (1 - f), d_c * i * (1 - g * g)
    d_gates.copy_(torch.cat([d_i, d_f, d_g, d_h * t * o * (1 - o)], dim=1))
    d_cell.copy_(d_c * f)


def gru_step(product, bias, clock, table, tokens, state, gates, h):
    """As lstm_step; q is what the reset gate multiplies."""
    x_r, x_z, x_n = read(clock, table, tokens).to(state.dtype).chunk(3, dim=-1)
    p_r, p_z, p_n = product.to(state.dtype).chunk(3, dim=1)
    r, z, q = (x_r + p_r).sigmoid(), (x_z + p_z).sigmoid(), p_n + bias
    n = tanh(x_n + r * q)
    new = n + z * (state - n)
    gates.copy_(torch.cat([q, r, z, n], dim=1))
    state.copy_(new)
    h.copy_(new)


def gru_step_back(gates, h_before, d_out, d_h, d_state, d_gates):
    """As lstm_step_back; d_gates are q's, and those of the sums inside r, z and n."""
    q, r, z, n = gates.to(d_state.dtype).chunk(4, dim=1)
    d = d_out + d_h + d_state
    d_n = d * (1 - z) * (1 - n * n)
    d_r, d_z = d_n * q * r * (1 - r), d * (h_before - n) * z * (1 - z)
    d_gates.copy_(torch.cat([d_n * r, d_r, d_z, d_n], dim=1))
    d_state.copy_(d * z)


# ------------------------------------------------------------------------------------------------------------
# The sweeps
# ------------------------------------------------------------------------------------------------------------


def walk(sizes):
    """For every step (t, number of rows, their slice, the slice of the same rows one step earlier)."""
    steps, start, last = [], 0, None
    for t, n in enumerate(sizes):
        steps.append((t, n, slice(start, start + n), None if last is None else slice(last, last + n)))
        start, last = start + n, start
    return steps


def one_step_earlier(x, sizes):
    """x at the step before, for every row from step 1 on."""
    if sizes[0] == sizes[-1]:
        return x[: len(x) - sizes[0]]
    return torch.cat([x[earlier] for *_, earlier in walk(sizes)[1:]])


def input_gradients(d_x, tokens, sizes, table_rows, dtype):
    """Gradients of the table and the clock from those of their sums, (N, G); `dtype` is precise enough."""
    d_table = d_x.new_zeros(table_rows, d_x.shape[1], dtype=dtype)
    d_table.index_add_(0, tokens, d_x[: len(tokens)].to(dtype))
    if sizes[0] == sizes[-1]:
        return d_table, d_x.unflatten(0, (len(sizes), -1)).sum(1)
    return d_table, torch.stack([d.sum(0) for d in d_x.split(sizes)])


class LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight):
        table, clock, weight = table.detach(), clock.detach(), weight.detach()  # one kind for the compiler
        step, H, low = pointwise(lstm_step, compiled), weight.shape[1], weight.to(table.dtype)
        gates, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H))
        c, cell = weight.new_empty(len(h), H), weight.new_zeros(sizes[0], H)
        product = table.new_zeros(sizes[0], 4 * H)
        for t, n, at, earlier in walk(sizes):
            if t:
                torch.mm(h[earlier], low.T, out=product[:n])
            read = tokens[at] if at.start < len(tokens) else None
            step(product[:n], clock[t], table, read, cell[:n], gates[at], c[at], h[at])
        ctx.save_for_backward(gates, c, h, tokens, low)
        ctx.plain = sizes, compiled, len(table)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, c, h, tokens, low), (sizes, compiled, table_rows) = ctx.saved_tensors, ctx.plain
        step, d_gates = pointwise(lstm_step_back, compiled), torch.empty_like(gates)
        start, d_cell = (torch.zeros_like(c[: sizes[0]]) for _ in range(2))
        d_h = torch.zeros_like(h[: sizes[0]])
        for t, n, at, earlier in reversed(walk(sizes)):
            c_before = c[earlier] if t else start
            step(gates[at], c[at], c_before, d_out[at], d_h[:n], d_cell[:n], d_gates[at])
            if t:
                torch.mm(d_gates[at], low, out=d_h[:n])
        d_weight = (d_gates[sizes[0] :].T @ one_step_earlier(h, sizes)).to(c.dtype)
        return *input_gradients(d_gates, tokens, sizes, table_rows, c.dtype), None, None, None, d_weight


class GRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight, bias):
        table, clock, weight, bias = (x.detach() for x in (table, clock, weight, bias))
        step, H, low = pointwise(gru_step, compiled), weight.shape[1], weight.to(table.dtype)
        gates, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H))
        state, product = weight.new_zeros(sizes[0], H), table.new_zeros(sizes[0], 3 * H)
        for t, n, at, earlier in walk(sizes):
            if t:
                torch.mm(h[earlier], low.T, out=product[:n])
            read = tokens[at] if at.start < len(tokens) else None
            step(product[:n], bias, clock[t], table, read, state[:n], gates[at], h[at])
        ctx.save_for_backward(gates, h, tokens, low)
        ctx.plain = sizes, compiled, len(table), bias.dtype
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, h, tokens, low), (sizes, compiled, table_rows, dtype) = ctx.saved_tensors, ctx.plain
        step, H, d_gates = pointwise(gru_step_back, compiled), h.shape[1], torch.empty_like(gates)
        start, d_h = (torch.zeros_like(h[: sizes[0]]) for _ in range(2))
        d_state, low = torch.zeros_like(start, dtype=dtype), low.roll(H, 0)  # candidate first, as in d_gates
        for t, n, at, earlier in reversed(walk(sizes)):
            h_before = h[earlier] if t else start
            step(gates[at], h_before, d_out[at], d_h[:n], d_state[:n], d_gates[at])
            if t:
                torch.mm(d_gates[at, : 3 * H], low, out=d_h[:n])
        d_weight = d_gates[sizes[0] :, : 3 * H].T @ one_step_earlier(h, sizes)
        d_inputs = input_gradients(d_gates[:, H:], tokens, sizes, table_rows, dtype)
        return *d_inputs, None, None, None, d_weight.roll(-H, 0).to(dtype), d_gates[:, :H].sum(0).to(dtype)


lstm, gru = LSTM.apply, GRU.apply

# ------------------------------------------------------------------------------------------------------------
# What a device can do
# ------------------------------------------------------------------------------------------------------------


@functools.cache
def pointwise(function, compiled):
    """Compiled for all sizes, if wanted; equal sizes, a size of one and another dtype are compiled apart."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=True) if compiled else function


@functools.cache
def can_compile(device):
    """Whether torch.compile works here (it needs a C++ compiler, on CUDA Triton), by trying."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception:  # noqa: BLE001 - whatever is missing, the same functions run without
        return False
    return True


@functools.cache
def onednn_is_exact():
    """Whether products of float32 keep their precision in oneDNN, to which "bf16" sends them on a CPU.

    They do on CPUs without units for bf16, and on some of AMD's it is twice as fast as the default, MKL.
    """
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    product = (a @ b).double()
    torch.backends.mkldnn.matmul.fp32_precision = before
    exact = a.double() @ b.double()
    return bool((product - exact).norm() < 1e-6 * exact.norm())
