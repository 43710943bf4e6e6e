"""GRU and LSTM, faster: scanned by hand, forward and backward; torch.nn's up to rounding.

On CUDA a time step is a matmul and a pointwise function, which torch.compile fuses into one
kernel. On a CPU, where no trial waits for a compiler, it is a matmul and a few operators in
place.

Rows are packed as in torch's PackedSequence: those of step 0, then those of step 1, ...
`sizes` holds the number of rows of each step, B at step 0 and never more than at the step
before; N is their sum. The initial state is zero.

    table (R, G)   what each token adds to the gates' inputs (G is 4H; GRU: 3H)
    by_step (T, G) what each time step adds: its positional encoding, and the bias
    tokens (n,)    rows of the table, for the first n rows; the others read by_step alone
    gates (N, 4H)  kept for the backward pass. LSTM: i, f, g, o. GRU: q, r, z, n
    c, h (N, H)    cell and output; the state is carried in the precision of the weights

LSTM: c = f c_before + i g, h = o tanh(c). GRU: q = W h_before + bias, n = tanh(x + r q),
h = n + z (h_before - n).
"""

from itertools import accumulate

import torch

from suite.graphs import pointwise


def on_cpu(x):
    return x.is_cpu


# -- One step on CUDA: what torch.compile fuses into one kernel
def tanh(x):
    return 2 * (2 * x).sigmoid() - 1


def store_gates(columns, *gates):
    """Gate by gate, so that a compiled step is one kernel of (n, H)."""
    for column, gate in zip(columns, gates):
        column.copy_(gate)


def lstm_step(product, by_step, table, tokens, c_before, h, c, *columns):
    """From the last h's product with the weights; writes the gates, c and h."""
    x = by_step + table[tokens] if len(tokens) else by_step
    i, f, g, o = (product + x).to(c.dtype).chunk(4, dim=1)
    i, f, o = i.sigmoid(), f.sigmoid(), o.sigmoid()
    g = tanh(g)
    new = f * c_before + i * g
    store_gates(columns, i, f, g, o)
    c.copy_(new)
    h.copy_(o * tanh(new))


def lstm_step_back(c_before, d_h, d_cell, d_out, rows, c, *d_columns):
    """From the gradients of its output and of the next step's state; carries `d_cell` back."""
    i, f, g, o = rows.to(d_cell.dtype).chunk(4, dim=1)
    d_h = d_out + d_h
    t = tanh(c)
    d_c = d_cell + d_h * o * (1 - t * t)
    d_i = d_c * g * i * (1 - i)
    d_f = d_c * c_before * f * (1 - f)
    d_g = d_c * i * (1 - g * g)
    d_o = d_h * t * o * (1 - o)
    store_gates(d_columns, d_i, d_f, d_g, d_o)
    d_cell.copy_(d_c * f)


def gru_step(product, by_step, table, tokens, bias, state, h, *columns):
    """As lstm_step; `state` is carried on."""
    x = by_step + table[tokens] if len(tokens) else by_step
    x_r, x_z, x_n = x.to(state.dtype).chunk(3, dim=-1)
    q, p_r, p_z = product.to(state.dtype).chunk(3, dim=1)
    r = (x_r + p_r).sigmoid()
    z = (x_z + p_z).sigmoid()
    q = q + bias
    n = tanh(x_n + r * q)
    new = n + z * (state - n)
    store_gates(columns, q, r, z, n)
    state.copy_(new)
    h.copy_(new)


def gru_step_back(h_before, d_h, d_state, d_out, rows, h, *d_columns):
    """As lstm_step_back."""
    q, r, z, n = rows.to(d_state.dtype).chunk(4, dim=1)
    d = d_out + d_h + d_state
    d_n = d * (1 - z) * (1 - n * n)
    d_r = d_n * q * r * (1 - r)
    d_z = d * (h_before - n) * z * (1 - z)
    store_gates(d_columns, d_n * r, d_r, d_z, d_n)
    d_state.copy_(d * z)


# -- One step on a CPU, in place. `rows` are all gates, whose inputs are complete
# torch's tanh is slow on some CPUs: tanh(x) = 1 - 2 sigmoid(-2x). What is summed to x is
# multiplied by -2 before the scan, which is exact.
ZERO = torch.zeros(())
ONE = torch.ones(())
sigmoid_back = torch.ops.aten.sigmoid_backward.grad_input
tanh_back = torch.ops.aten.tanh_backward.grad_input


def lstm_step_in_place(rows, c_before, h, c, u, i, f, s, o):
    """Instead of g it keeps s, and for tanh(c) it keeps u: g = 1 - 2s, tanh(c) = 1 - 2u."""
    rows.sigmoid_()
    torch.mul(f, c_before, out=c)
    c.add_(i).addcmul_(i, s, value=-2)
    torch.mul(c, -2, out=u).sigmoid_()
    torch.addcmul(o, o, u, value=-2, out=h)


def lstm_step_back_in_place(
    c_before, d_h, d_cell, d_rows, d_i, d_f, d_s, d_o, d_out, rows, u, i, f, s, o
):
    """Replaces the gates by the gradients of their inputs, warm memory. As tanh' = 4s(1 - s),
    sigmoid_back has all of the slope but the 4."""
    d_h.add_(d_out)
    torch.mul(d_h, o, out=d_o)
    d_cell.add_(sigmoid_back(d_o, u, grad_input=d_o), alpha=4)
    torch.addcmul(d_cell, d_cell, s, value=-2, out=d_i)
    torch.mul(d_cell, c_before, out=d_f)
    torch.addcmul(ZERO, d_cell, i, value=4, out=d_s)
    torch.addcmul(d_h, d_h, u, value=-2, out=d_o)
    d_cell.mul_(f)
    sigmoid_back(d_rows, rows, grad_input=rows)


def gru_step_in_place(rows, h_before, h, q, r, z, n):
    """The state is h itself."""
    r.sigmoid_()
    z.sigmoid_()
    n.addcmul_(r, q, value=-2).sigmoid_()
    torch.add(ONE, n, alpha=-2, out=n)
    torch.lerp(n, h_before, z, out=h)


def gru_step_back_in_place(
    h_before, d_h, d_state, d_rows, d_q, d_r, d_z, d_n, d_out, rows, q, r, z, n
):
    """As lstm_step_back_in_place."""
    d = d_h.add_(d_state).add_(d_out)
    torch.sub(h_before, n, out=d_z).mul_(d)
    torch.mul(d, z, out=d_state)
    torch.sub(d, d_state, out=d_n)
    tanh_back(d_n, n, grad_input=n)
    torch.mul(n, q, out=d_r)
    torch.mul(n, r, out=q)
    sigmoid_back(d_r, r, grad_input=r)
    sigmoid_back(d_z, z, grad_input=z)


# -- The scans; x_of[t] is step t's part of x
def split(tensors, sizes):
    return [x.split(sizes) for x in tensors]


def first_rows(x, sizes):
    """x[:n] for every step's n, one view for each n: a view costs as much as an operator."""
    views = {n: x[:n] for n in set(sizes)}
    return [views[n] for n in sizes]


def one_step_earlier(x, start, sizes):
    """For every step, its rows of x at the step before; for the first step, `start`."""
    earlier = start, *x.split(sizes)
    return [rows if len(rows) == n else rows[:n] for rows, n in zip(earlier, sizes)]


def fill_gates(table, by_step, tokens, sizes, weight, bias):
    """-> gates (N, 4H), which hold what is added to W h_before, and W (H, G)"""
    G, H = weight.shape
    scale = weight.new_ones(G)
    scale[2 * H : 3 * H] = -2  # what tanh reads, see above
    by_step = (by_step * scale)[:, None]
    if sizes[0] != sizes[-1]:
        by_step = by_step.repeat_interleave(torch.tensor(sizes), 0)
    rows = sum(sizes) // len(by_step)
    gates = weight.new_empty(len(by_step), rows, 4 * H)  # (T, B, 4H), or packed (N, 1, 4H)
    inputs = gates[:, :, -G:]
    read = (table * scale).index_select(0, tokens).view(-1, rows, G)
    n = len(read)
    torch.add(read, by_step[:n], out=inputs[:n])
    inputs[n:] = by_step[n:]
    recurrent = weight.T.contiguous()
    if G == 4 * H:
        recurrent = recurrent * scale  # not in place: it may be the parameter
    else:
        gates[:, :, :H] = bias
    return gates.flatten(0, 1), recurrent


class RecurrentScan(torch.autograd.Function):
    """table (R, G), by_step (T, G), tokens (n,), ..., weight (G, H), bias (H,) -> h (N, H).

    The bias is that of a GRU's q; an LSTM's, which is in the by_step, is not read.
    """

    @staticmethod
    def forward(ctx, table, by_step, tokens, sizes, compiled, weight, bias):
        # Detached, or it compiles twice
        table, by_step, weight, bias = (x.detach() for x in (table, by_step, weight, bias))
        N, T = sum(sizes), len(sizes)
        G, H = weight.shape
        cpu = on_cpu(weight)
        lstm = G == 4 * H
        low = weight.to(table.dtype)
        h = table.new_empty(N, H)
        cells = weight.new_empty(lstm * (1 + cpu), N, H)  # an LSTM's c, and on a CPU u
        start = weight.new_zeros(sizes[0], H)
        h_before_of = before_of = one_step_earlier(h, start, sizes)
        if lstm:
            before_of = one_step_earlier(cells[0], start, sizes)
        if cpu:
            step = lstm_step_in_place if lstm else gru_step_in_place
            gates, recurrent = fill_gates(table, by_step, tokens, sizes, weight, bias)
            product_of = gates[:, :G].split(sizes)
            inputs = [gates.split(sizes)]
        else:
            step = pointwise(lstm_step if lstm else gru_step, compiled)
            gates = table.new_empty(N, 4 * H)
            recurrent = low.T
            product_of = first_rows(table.new_zeros(sizes[0], G), sizes)
            tokens_of = tokens.tensor_split(list(accumulate(sizes[:-1])))
            inputs = [product_of, by_step, [table] * T, tokens_of]
            if not lstm:
                inputs.append([bias] * T)
                before_of = first_rows(start, sizes)  # the step replaces its state

        outputs = split([h, *cells, *gates.chunk(4, 1)], sizes)
        for t, args in enumerate(zip(*inputs, before_of, *outputs)):
            if t:
                product_of[t].addmm_(h_before_of[t], recurrent, beta=int(cpu))
            step(*args)
        ctx.save_for_backward(gates, cells, h, tokens, low)
        ctx.plain = sizes, compiled, len(table), weight.dtype
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        gates, cells, h, tokens, low = ctx.saved_tensors
        sizes, compiled, table_rows, dtype = ctx.plain
        h = h.detach()  # or a step compiles twice
        B, (G, H) = sizes[0], low.shape
        cpu, lstm = on_cpu(h), G == 4 * H
        state = cells[0] if lstm else h
        d_h, start = torch.zeros_like(h[:B]), torch.zeros_like(state[:B])
        d_carried = [d_h, torch.zeros_like(d_h, dtype=dtype)]
        if cpu:
            step = lstm_step_back_in_place if lstm else gru_step_back_in_place
            d_gates, room = gates, torch.empty_like(gates[:B])
            d_carried += room, *room.chunk(4, 1)
            parts = *cells[1:], *gates.chunk(4, 1)
        else:
            step = pointwise(lstm_step_back if lstm else gru_step_back, compiled)
            d_gates = torch.empty_like(gates)  # a compiled step's arguments share no memory
            parts = state, *d_gates.chunk(4, 1)

        d_of = [first_rows(x, sizes) for x in d_carried]
        before_of = one_step_earlier(state, start, sizes)
        steps = list(zip(before_of, *d_of, *split([d_out, gates, *parts], sizes)))
        d_product_of = d_gates[:, :G].split(sizes)
        for t in reversed(range(len(sizes))):
            step(*steps[t])
            if t:
                torch.mm(d_product_of[t], low, out=d_of[0][t])

        d_x = d_gates[:, -G:]  # the gradients of table[tokens] + by_step
        if sizes[-1] == B:
            h_before, d_clock = h[:-B], d_x.unflatten(0, (-1, B)).sum(1)
        else:
            h_before = torch.cat(one_step_earlier(h, start, sizes)[1:])
            d_clock = torch.stack([d.sum(0) for d in d_x.split(sizes)])
        # Faster than index_add_: on CUDA additions to the same rows would wait for one another
        add_rows = torch.ops.aten.embedding_dense_backward
        d_table = add_rows(d_x[: len(tokens)].to(dtype), tokens, table_rows, -1, False)
        d_weight = d_gates[B:, :G].T @ h_before
        d_bias = None if lstm else d_gates[:, :H].sum(0).to(dtype)
        return d_table, d_clock, None, None, None, d_weight.to(dtype), d_bias


def scan(layer, table, by_step, tokens, sizes, compiled):
    """table (R, G), by_step (T, G), tokens (n,) -> the layer's h (N, H)"""
    weight = layer.weight_hh_l0
    bias = layer.bias_hh_l0[-layer.hidden_size :]
    if isinstance(layer, torch.nn.GRU):  # q, r, z: as in the gates
        r, z, n = weight.chunk(3)
        weight = torch.cat([n, r, z])
    return RecurrentScan.apply(table, by_step, tokens, sizes, compiled, weight, bias)
