"""GRU and LSTM, faster: swept by hand, through time and back, equal to torch.nn's but for rounding.

A step is one product with the state and one pointwise function, which torch.compile makes one loop of. On a
CPU it is a few operators, not compiled. The gradients of the weights are one product each, after the sweep.

Rows are flat and packed as in torch's PackedSequence: those of step 0, then those of step 1, ...; `sizes`
says how many each step has, never more than the one before; N is their sum. The state starts at zero.

    table (R, 4H)  what each token adds to the sums inside the gates (of a GRU 3H), and
    clock (T, 4H)  what each step adds, with the bias
    tokens (n,)    rows of the table; they may end early, after any step: later steps read the clock alone
    gates (N, 4H)  after sigmoid and tanh, in torch's order, kept for the way back; of a GRU q, r, z, n
    c, h (N, H)    cell and output; what is carried from step to step is in the precision of the weights
"""

import torch

from suite.graphs import pointwise


# -- One step, pointwise: what torch.compile makes one loop of -----------------------------------------------
def tanh(x):
    """By exp, as a sigmoid: torch's own is slow on some CPUs."""
    return 2 * (2 * x).sigmoid() - 1


def read(clock, table, tokens):
    return clock if tokens is None else clock + table[tokens]


def write(columns, *parts):
    """Gate by gate, so that a compiled step is one kernel of (n, H)."""
    for column, part in zip(columns, parts, strict=True):
        column.copy_(part)


def lstm_step(product, clock, table, tokens, cell, gates, c, h):
    """From the last h's product with the weights; writes the gates, c and h and carries `cell` on."""
    i, f, g, o = (product + read(clock, table, tokens)).to(cell.dtype).chunk(4, dim=1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), tanh(g), o.sigmoid()
    new = f * cell + i * g
    write(gates, i, f, g, o)
    cell.copy_(new)
    c.copy_(new)
    h.copy_(o * tanh(new))


def lstm_step_back(gates, c, c_before, d_out, d_h, d_cell, d_gates):
    """From the gradients of the step's output and of the next step's state; carries `d_cell` back."""
    i, f, g, o = gates.to(d_cell.dtype).chunk(4, dim=1)
    d_h, t = d_out + d_h, tanh(c)
    d_c = d_cell + d_h * o * (1 - t * t)
    d_i, d_f, d_g = d_c * g * i * (1 - i), d_c * c_before * f * (1 - f), d_c * i * (1 - g * g)
    write(d_gates, d_i, d_f, d_g, d_h * t * o * (1 - o))
    d_cell.copy_(d_c * f)


def gru_step(product, bias, clock, table, tokens, state, gates, h):
    """As lstm_step; q is what the reset gate multiplies."""
    x_r, x_z, x_n = read(clock, table, tokens).to(state.dtype).chunk(3, dim=-1)
    p_r, p_z, p_n = product.to(state.dtype).chunk(3, dim=1)
    r, z, q = (x_r + p_r).sigmoid(), (x_z + p_z).sigmoid(), p_n + bias
    n = tanh(x_n + r * q)
    new = n + z * (state - n)
    write(gates, q, r, z, n)
    state.copy_(new)
    h.copy_(new)


def gru_step_back(gates, h_before, d_out, d_h, d_state, d_gates):
    """As lstm_step_back; d_gates are q's, and those of the sums inside r, z and n."""
    q, r, z, n = gates.to(d_state.dtype).chunk(4, dim=1)
    d = d_out + d_h + d_state
    d_n = d * (1 - z) * (1 - n * n)
    d_r, d_z = d_n * q * r * (1 - r), d * (h_before - n) * z * (1 - z)
    write(d_gates, d_n * r, d_r, d_z, d_n)
    d_state.copy_(d * z)


# -- The sweeps ----------------------------------------------------------------------------------------------
def walk(sizes, tokens=()):
    """For every step (t, rows, their slice, the slice of the same rows a step earlier, tokens or None)."""
    steps, start, last = [], 0, 0
    for t, n in enumerate(sizes):
        at = slice(start, start + n)
        steps.append((t, n, at, slice(last, last + n), tokens[at] if start < len(tokens) else None))
        start, last = start + n, start
    return steps


def one_step_earlier(x, sizes):
    """x at the step before, for every row from step 1 on."""
    if sizes[0] == sizes[-1]:
        return x[: len(x) - sizes[0]]
    return torch.cat([x[earlier] for *_, earlier, _ in walk(sizes)[1:]])


def input_gradients(d_x, tokens, sizes, table_rows, dtype):
    """Gradients of the table, summed in `dtype`, and of the clock, from those of their sums, (N, G)."""
    d_read = d_x[: len(tokens)].to(dtype)
    if d_x.is_cuda:  # sorts tokens, unless few: atomic additions to the same rows would wait for one another
        d_table = torch.ops.aten.embedding_dense_backward(d_read, tokens, table_rows, -1, False)
    else:
        d_table = d_read.new_zeros(table_rows, d_x.shape[1]).index_add_(0, tokens, d_read)
    if sizes[0] == sizes[-1]:
        return d_table, d_x.unflatten(0, (len(sizes), -1)).sum(1)
    return d_table, torch.stack([d.sum(0) for d in d_x.split(sizes)])


class LSTMPointwise(torch.autograd.Function):
    """table (R, 4H), clock (T, 4H), tokens (n,), sizes (T,), compiled, weight (4H, H) -> h (N, H)."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight):
        table, clock, weight = table.detach(), clock.detach(), weight.detach()  # else it compiles twice
        step = pointwise(lstm_step, compiled)
        H, low = weight.shape[1], weight.to(table.dtype)
        gates, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H))
        c, cell = weight.new_empty(len(h), H), weight.new_zeros(sizes[0], H)
        product = table.new_zeros(sizes[0], 4 * H)
        for t, n, at, earlier, now in walk(sizes, tokens):
            if t:
                torch.mm(h[earlier], low.T, out=product[:n])
            step(product[:n], clock[t], table, now, cell[:n], gates[at].chunk(4, 1), c[at], h[at])
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
        for t, n, at, earlier, _ in reversed(walk(sizes)):
            c_before = c[earlier] if t else start
            step(gates[at], c[at], c_before, d_out[at], d_h[:n], d_cell[:n], d_gates[at].chunk(4, 1))
            if t:
                torch.mm(d_gates[at], low, out=d_h[:n])
        d_weight = (d_gates[sizes[0] :].T @ one_step_earlier(h, sizes)).to(c.dtype)
        return *input_gradients(d_gates, tokens, sizes, table_rows, c.dtype), None, None, None, d_weight


class GRUPointwise(torch.autograd.Function):
    """As LSTMPointwise, with three gates; `bias` (H,) is the candidate state's, inside its reset gate."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight, bias):
        table, clock, weight, bias = (x.detach() for x in (table, clock, weight, bias))
        step = pointwise(gru_step, compiled)
        H, low = weight.shape[1], weight.to(table.dtype)
        gates, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H))
        state, product = weight.new_zeros(sizes[0], H), table.new_zeros(sizes[0], 3 * H)
        for t, n, at, earlier, now in walk(sizes, tokens):
            if t:
                torch.mm(h[earlier], low.T, out=product[:n])
            step(product[:n], bias, clock[t], table, now, state[:n], gates[at].chunk(4, 1), h[at])
        ctx.save_for_backward(gates, h, tokens, low)
        ctx.plain = sizes, compiled, len(table), bias.dtype
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, h, tokens, low), (sizes, compiled, table_rows, dtype) = ctx.saved_tensors, ctx.plain
        h = h.detach()  # as `start`: else it compiles twice
        step, H, d_gates = pointwise(gru_step_back, compiled), h.shape[1], torch.empty_like(gates)
        start, d_h = (torch.zeros_like(h[: sizes[0]]) for _ in range(2))
        d_state, low = torch.zeros_like(start, dtype=dtype), low.roll(H, 0)  # candidate first, as in d_gates
        for t, n, at, earlier, _ in reversed(walk(sizes)):
            h_before = h[earlier] if t else start
            step(gates[at], h_before, d_out[at], d_h[:n], d_state[:n], d_gates[at].chunk(4, 1))
            if t:
                torch.mm(d_gates[at, : 3 * H], low, out=d_h[:n])
        d_weight = d_gates[sizes[0] :, : 3 * H].T @ one_step_earlier(h, sizes)
        d_inputs = input_gradients(d_gates[:, H:], tokens, sizes, table_rows, dtype)
        return *d_inputs, None, None, None, d_weight.roll(-H, 0).to(dtype), d_gates[:, :H].sum(0).to(dtype)


# -- The sweeps on a CPU: few operators, in place ------------------------------------------------------------
# They take 0.8 to 1.0 times as long as compiled steps, and no trial waits for a compiler. Gates that are
# sigmoids and lie side by side are one operator; tanh(x) = 1 - 2 sigmoid(-2x) is part of the sums.
sigmoid_back, tanh_back = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


def steps_of(sizes, *tensors):
    """For every step its rows of each."""
    return list(zip(*(x.split(sizes) for x in tensors), strict=True))


def read_into(rows, clock, table, tokens):
    if tokens is None:
        rows.copy_(clock)
    else:
        torch.index_select(table, 0, tokens, out=rows).add_(clock)


class LSTMByOperators(torch.autograd.Function):
    """As LSTMPointwise. The gate g = tanh(x) is kept as s = sigmoid(-2x): g = 1 - 2s, g' = 4s(1 - s)."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight):
        H = weight.shape[1]
        scale = weight.new_tensor([1, 1, -2, 1]).repeat_interleave(H)  # (4H,)
        table, clock, recurrent = table * scale, clock * scale, (weight * scale[:, None]).T.contiguous()
        gates, c, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H, H))
        product = table.new_empty(sizes[0], 4 * H)
        c_before = h_before = table.new_zeros(sizes[0], H)
        each = zip(walk(sizes, tokens), clock, steps_of(sizes, gates, *gates.chunk(4, dim=1), c, h))
        for (t, n, *_, now), clock_now, (rows, i, f, s, o, c_now, h_now) in each:
            read_into(rows, clock_now, table, now)
            if t:
                rows.add_(torch.mm(h_before[:n], recurrent, out=product[:n]))
            rows.sigmoid_()
            torch.mul(f, c_before[:n], out=c_now).add_(i).addcmul_(i, s, value=-2)
            torch.addcmul(o, o, (-2 * c_now).sigmoid_(), value=-2, out=h_now)
            c_before, h_before = c_now, h_now
        ctx.save_for_backward(gates, c, h, tokens, weight)
        ctx.plain = sizes, len(table)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, c, h, tokens, weight), (sizes, table_rows) = ctx.saved_tensors, ctx.plain
        d_gates = torch.empty_like(gates)
        scale = weight.new_tensor([1, 1, 4, 1]).repeat_interleave(weight.shape[1])  # (4H,)
        start, d_h, d_c = (torch.zeros_like(c[: sizes[0]]) for _ in range(3))
        recurrent, parts = weight * scale[:, None], (*gates.chunk(4, dim=1), *d_gates.chunk(4, dim=1))
        each = steps_of(sizes, gates, d_gates, *parts, c, d_out)
        before = [start, *c.split(sizes)[:-1]]
        for step, c_before in reversed(list(zip(each, before))):
            rows, d_rows, i, f, s, o, d_i, d_f, d_s, d_o, c_now, d = step
            n, u = len(i), (-2 * c_now).sigmoid_()
            d, d_cell = d_h[:n].add_(d), d_c[:n]
            d_cell.add_(sigmoid_back(d * o, u), alpha=4)
            torch.addcmul(d_cell, d_cell, s, value=-2, out=d_i)
            torch.mul(d_cell, c_before[:n], out=d_f)
            torch.mul(d_cell, i, out=d_s)
            torch.addcmul(d, d, u, value=-2, out=d_o)
            sigmoid_back.grad_input(d_rows, rows, grad_input=d_rows)
            d_cell.mul_(f)
            if c_before is not start:
                torch.mm(d_rows, recurrent, out=d)
        d_weight = (d_gates[sizes[0] :].T @ one_step_earlier(h, sizes)) * scale[:, None]
        d_table, d_clock = input_gradients(d_gates, tokens, sizes, table_rows, gates.dtype)
        return d_table * scale, d_clock * scale, None, None, None, d_weight


class GRUByOperators(torch.autograd.Function):
    """As GRUPointwise."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight, bias):
        H, recurrent = weight.shape[1], weight.T.contiguous()
        gates, q, h = (table.new_empty(sum(sizes), size) for size in (3 * H, H, H))
        product, h_before = table.new_zeros(sizes[0], 3 * H), table.new_zeros(sizes[0], H)
        parts = gates, gates[:, : 2 * H], *gates.chunk(3, dim=1), q, h
        each = zip(walk(sizes, tokens), clock, steps_of(sizes, *parts))
        for (t, n, *_, now), clock_now, (rows, both, r, z, new, q_now, h_now) in each:
            read_into(rows, clock_now, table, now)
            p = product[:n]
            if t:
                torch.mm(h_before[:n], recurrent, out=p)
            both.add_(p[:, : 2 * H]).sigmoid_()
            torch.add(p[:, 2 * H :], bias, out=q_now)
            new.addcmul_(r, q_now).mul_(-2).sigmoid_().mul_(-2).add_(1)
            h_before = torch.lerp(new, h_before[:n], z, out=h_now)
        ctx.save_for_backward(gates, q, h, tokens, weight)
        ctx.plain = sizes, len(table)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, q, h, tokens, weight), (sizes, table_rows) = ctx.saved_tensors, ctx.plain
        H, recurrent = weight.shape[1], weight.roll(weight.shape[1], 0)  # q's, then r's and z's
        start, d_h, d_gates = *(torch.zeros_like(h[: sizes[0]]) for _ in range(2)), h.new_empty(len(h), 4 * H)
        parts = gates[:, : 2 * H], *gates.chunk(3, dim=1), d_gates[:, H : 3 * H], *d_gates.chunk(4, dim=1)
        each = steps_of(sizes, *parts, d_gates[:, : 3 * H], q, d_out)
        before = [start, *h.split(sizes)[:-1]]
        for step, h_before in reversed(list(zip(each, before))):
            both, r, z, new, d_both, d_q, d_r, d_z, d_new, d_rows, q_now, d = step
            n = len(r)
            d = d_h[:n].add_(d)
            kept = d * z
            tanh_back.grad_input(d - kept, new, grad_input=d_new)
            torch.mul(d_new, r, out=d_q)
            torch.mul(d_new, q_now, out=d_r)
            torch.mul(d, h_before[:n] - new, out=d_z)
            sigmoid_back.grad_input(d_both, both, grad_input=d_both)
            if h_before is not start:
                torch.mm(d_rows, recurrent, out=d).add_(kept)
        d_weight = d_gates[sizes[0] :, : 3 * H].T @ one_step_earlier(h, sizes)
        d_inputs = input_gradients(d_gates[:, H:], tokens, sizes, table_rows, gates.dtype)
        return *d_inputs, None, None, None, d_weight.roll(-H, 0), d_gates[:, :H].sum(0)


def by_operators(table, weight, compiled):
    """Whether a layer is swept by a few operators."""
    return table.device.type == "cpu" and table.dtype == weight.dtype and not compiled


def gru_sweep(layer, table, clock, tokens, sizes, compiled):
    weights = layer.weight_hh_l0, layer.bias_hh_l0[-layer.hidden_size :]
    sweep = GRUByOperators if by_operators(table, weights[0], compiled) else GRUPointwise
    return sweep.apply(table, clock, tokens, sizes, compiled, *weights)


def lstm_sweep(layer, table, clock, tokens, sizes, compiled):
    weight = layer.weight_hh_l0
    sweep = LSTMByOperators if by_operators(table, weight, compiled) else LSTMPointwise
    return sweep.apply(table, clock, tokens, sizes, compiled, weight)
