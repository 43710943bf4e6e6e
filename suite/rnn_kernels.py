"""GRU and LSTM, faster: scanned by hand, through time and back; torch.nn's but for rounding.

A step is one product with the state and one pointwise function. The function is written
twice: for CUDA, where torch.compile makes one loop of it, and for a CPU as a few
operators in place.

Rows are packed as in torch's PackedSequence: those of step 0, then those of step 1, ...
`sizes` says how many each step has, never more than the one before; N is their sum. The
state starts at zero.

    table (R, G)   what each token adds to the sums inside the gates (G is 4H, of a GRU 3H)
    clock (T, G)   what each step adds, with the bias
    tokens (n,)    rows of the table; after their end, at any step, the clock alone is read
    gates (N, 4H)  after sigmoid and tanh, kept for the way back. LSTM: i, f, g, o (on a CPU
                   s for g, see lstm_step_in_place). GRU: q, r, z, n. A step gets its rows,
                   and as views each gate's column, (n, H)
    c, h (N, H)    cell and output; the state is carried in the precision of the weights
"""

import torch

from suite.graphs import pointwise


# -- One step for CUDA: what torch.compile makes one loop of
def tanh(x):
    return 2 * (2 * x).sigmoid() - 1


def gate_inputs(clock, table, tokens):
    return clock if tokens is None else clock + table[tokens]


def store_gates(columns, *gates):
    """Gate by gate, so that a compiled step is one kernel of (n, H)."""
    for column, gate in zip(columns, gates):
        column.copy_(gate)


def lstm_step(product, clock, table, tokens, c_before, rows, columns, h, c):
    """From the last h's product with the weights; writes the gates, c and h."""
    sums = product + gate_inputs(clock, table, tokens)
    i, f, g, o = sums.to(c.dtype).chunk(4, dim=1)
    i, f, o = i.sigmoid(), f.sigmoid(), o.sigmoid()
    g = tanh(g)
    new = f * c_before + i * g
    store_gates(columns, i, f, g, o)
    c.copy_(new)
    h.copy_(o * tanh(new))


def lstm_step_back(rows, columns, c, c_before, d_out, d_h, d_cell, d_rows, d_columns):
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


def gru_step(product, clock, table, tokens, state, rows, columns, h, bias):
    """As lstm_step; q is what the reset gate multiplies, and `state` is carried on."""
    x_r, x_z, x_n = gate_inputs(clock, table, tokens).to(state.dtype).chunk(3, dim=-1)
    p_r, p_z, p_n = product.to(state.dtype).chunk(3, dim=1)
    r = (x_r + p_r).sigmoid()
    z = (x_z + p_z).sigmoid()
    q = p_n + bias
    n = tanh(x_n + r * q)
    new = n + z * (state - n)
    store_gates(columns, q, r, z, n)
    state.copy_(new)
    h.copy_(new)


def gru_step_back(rows, columns, h, h_before, d_out, d_h, d_state, d_rows, d_columns):
    """As lstm_step_back; d_rows are q's gradients, and those of the sums inside r, z, n."""
    q, r, z, n = rows.to(d_state.dtype).chunk(4, dim=1)
    d = d_out + d_h + d_state
    d_n = d * (1 - z) * (1 - n * n)
    d_r = d_n * q * r * (1 - r)
    d_z = d * (h_before - n) * z * (1 - z)
    store_gates(d_columns, d_n * r, d_r, d_z, d_n)
    d_state.copy_(d * z)


# -- The same on a CPU, where no trial waits for a compiler: few operators, in place
sigmoid_back = torch.ops.aten.sigmoid_backward
tanh_back = torch.ops.aten.tanh_backward


def store_gate_inputs(rows, clock, table, tokens):
    if tokens is None:
        rows.copy_(clock)
    else:
        torch.add(table.index_select(0, tokens), clock, out=rows)


def lstm_step_in_place(product, clock, table, tokens, c_before, rows, columns, h, c):
    """The gate g = tanh(x) is kept as s = sigmoid(-2x): g = 1 - 2s, g' = 4s(1 - s).

    So is tanh(c) made of a sigmoid: torch's own is slow on some CPUs.
    """
    i, f, s, o = columns
    store_gate_inputs(rows, clock, table, tokens)
    rows.add_(product)
    s.mul_(-2)
    rows.sigmoid_()
    torch.mul(f, c_before, out=c)
    c.add_(i).addcmul_(i, s, value=-2)
    u = (-2 * c).sigmoid_()  # tanh(c) = 1 - 2u
    torch.addcmul(o, o, u, value=-2, out=h)


def lstm_step_back_in_place(rows, columns, c, c_before, d_out, d_h, d_cell, d_rows, d_columns):
    """Slopes of tanh are 4 u (1 - u) and 4 s (1 - s), of which sigmoid_back has all but 4."""
    i, f, s, o = columns
    d_i, d_f, d_s, d_o = d_columns
    u = (-2 * c).sigmoid_()
    d = d_h.add_(d_out)
    d_cell.add_(sigmoid_back(d * o, u), alpha=4)
    torch.addcmul(d_cell, d_cell, s, value=-2, out=d_i)
    torch.mul(d_cell, c_before, out=d_f)
    torch.mul(d_cell, i, out=d_s).mul_(4)
    torch.addcmul(d, d, u, value=-2, out=d_o)
    sigmoid_back.grad_input(d_rows, rows, grad_input=d_rows)
    d_cell.mul_(f)


def gru_step_in_place(product, clock, table, tokens, state, rows, columns, h, bias):
    H = len(bias)
    q, r, z, n = columns
    store_gate_inputs(rows[:, H:], clock, table, tokens)
    rows[:, H : 3 * H].add_(product[:, : 2 * H]).sigmoid_()  # r and z
    torch.add(product[:, 2 * H :], bias, out=q)
    n.addcmul_(r, q)
    n.mul_(-2).sigmoid_().mul_(-2).add_(1)  # tanh
    torch.lerp(n, state, z, out=h)
    state.copy_(h)


def gru_step_back_in_place(rows, columns, h, h_before, d_out, d_h, d_state, d_rows, d_columns):
    H = h_before.shape[1]
    q, r, z, n = columns
    d_q, d_r, d_z, d_n = d_columns
    d = d_h.add_(d_state).add_(d_out)
    torch.mul(d, z, out=d_state)
    tanh_back.grad_input(d - d_state, n, grad_input=d_n)
    torch.mul(d_n, r, out=d_q)
    torch.mul(d_n, q, out=d_r)
    torch.mul(d, h_before - n, out=d_z)
    r_and_z = rows[:, H : 3 * H]
    d_r_and_z = d_rows[:, H : 3 * H]
    sigmoid_back.grad_input(d_r_and_z, r_and_z, grad_input=d_r_and_z)


def choose_step(step, in_place, device, compiled):
    """The step in place on a CPU, else the other, compiled if wanted."""
    return in_place if device.type == "cpu" else pointwise(step, compiled)


# -- The scans; x_of[t] is what step t has of x
def split_tokens(tokens, sizes):
    """Those of every step; None after their end."""
    tokens_of, start = [], 0
    for n in sizes:
        tokens_of.append(tokens[start : start + n] if start < len(tokens) else None)
        start += n
    return tokens_of


def split_gates(gates, sizes):
    """Every step's rows, and its four columns."""
    columns = [gate.split(sizes) for gate in gates.chunk(4, 1)]
    return gates.split(sizes), list(zip(*columns))


def one_step_earlier(x, sizes):
    """x at the step before, for every row from step 1 on."""
    if sizes[0] == sizes[-1]:  # all steps have as many rows
        return x[: -sizes[0]]
    return torch.cat([rows[:n] for rows, n in zip(x.split(sizes), sizes[1:])])


def input_gradients(d_x, tokens, sizes, table_rows, dtype):
    """d_x (N, G), the gradients of the sums -> those of the table, in `dtype`, and clock."""
    d_read = d_x[: len(tokens)].to(dtype)
    # Faster than index_add_: on CUDA additions to the same rows would wait for one another
    d_table = torch.ops.aten.embedding_dense_backward(d_read, tokens, table_rows, -1, False)
    if sizes[0] == sizes[-1]:
        return d_table, d_x.unflatten(0, (len(sizes), -1)).sum(1)
    return d_table, torch.stack([d.sum(0) for d in d_x.split(sizes)])


class RecurrentScan(torch.autograd.Function):
    """table (R, G), clock (T, G), tokens (n,), ..., weight (G, H), bias (H,) -> h (N, H).

    The bias is a GRU's, of its candidate state, inside the reset gate; an LSTM has None.
    """

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight, bias):
        # Detached, or it compiles twice
        table, clock, weight = table.detach(), clock.detach(), weight.detach()
        low = weight.to(table.dtype)
        recurrent = low.T if low.is_cuda else low.T.contiguous()  # a CPU is faster with it
        N, B, (G, H) = sum(sizes), sizes[0], weight.shape

        memory = table.new_empty(N + B, 4 * H)  # a step's rows more, see `backward`
        rows_of, columns_of = split_gates(memory[:N], sizes)
        h = table.new_empty(N, H)
        tokens_of = split_tokens(tokens, sizes)
        h_of = h.split(sizes)
        c = None
        if bias is None:
            step = choose_step(lstm_step, lstm_step_in_place, weight.device, compiled)
            c = weight.new_empty(N, H)
            c_of = c.split(sizes)
        else:
            step = choose_step(gru_step, gru_step_in_place, weight.device, compiled)
            bias = bias.detach()

        product = table.new_zeros(B, G)
        state = weight.new_zeros(B, H)
        for t, n in enumerate(sizes):
            if t:
                torch.mm(h_of[t - 1][:n], recurrent, out=product[:n])
            inputs = product[:n], clock[t], table, tokens_of[t], state[:n]
            outputs = rows_of[t], columns_of[t], h_of[t]
            if bias is None:
                step(*inputs, *outputs, c_of[t])
                state = c_of[t]
            else:
                step(*inputs, *outputs, bias)  # which changes the state in place
        ctx.save_for_backward(memory, c, h, tokens, low)
        ctx.plain = sizes, compiled, len(table), weight.dtype
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        memory, c, h, tokens, low = ctx.saved_tensors
        sizes, compiled, table_rows, dtype = ctx.plain
        h = h.detach()  # or a step compiles twice: `start` needs no gradient
        B, (G, H) = sizes[0], low.shape

        rows_of, columns_of = split_gates(memory[: len(h)], sizes)
        # A step's gradients go where the gates of later steps were, which have been read:
        # this memory is warm, and new memory is not
        d_gates = memory[B:]
        if compiled:  # such a step must not share memory
            d_gates = torch.empty_like(d_gates)
        d_rows_of, d_columns_of = split_gates(d_gates, sizes)
        # Of a GRU's q, r, z, n the product has the first three, the inputs the last three
        d_product = d_gates[:, :G]
        d_product_of = d_product.split(sizes)
        d_out_of = d_out.split(sizes)

        d_h = torch.zeros_like(h[:B])
        d_state = torch.zeros_like(d_h, dtype=dtype)
        if c is None:
            step = choose_step(gru_step_back, gru_step_back_in_place, low.device, compiled)
            state_of = h.split(sizes)
            low = low.roll(H, 0)  # rows of n, r, z, as in d_product
        else:
            step = choose_step(lstm_step_back, lstm_step_back_in_place, low.device, compiled)
            state_of = c.split(sizes)
        start = torch.zeros_like(state_of[0])
        for t in reversed(range(len(sizes))):
            n = sizes[t]
            before = state_of[t - 1] if t else start
            gradients = d_out_of[t], d_h[:n], d_state[:n], d_rows_of[t], d_columns_of[t]
            step(rows_of[t], columns_of[t], state_of[t], before[:n], *gradients)
            if t:
                torch.mm(d_product_of[t], low, out=d_h[:n])
        d_weight = d_product[B:].T @ one_step_earlier(h, sizes)
        d_bias = None
        if c is None:
            d_weight = d_weight.roll(-H, 0)
            d_bias = d_gates[:, :H].sum(0).to(dtype)
        d_table, d_clock = input_gradients(d_gates[:, -G:], tokens, sizes, table_rows, dtype)
        return d_table, d_clock, None, None, None, d_weight.to(dtype), d_bias


def scan(layer, table, clock, tokens, sizes, compiled):
    bias = None
    if isinstance(layer, torch.nn.GRU):
        bias = layer.bias_hh_l0[-layer.hidden_size :]
    return RecurrentScan.apply(table, clock, tokens, sizes, compiled, layer.weight_hh_l0, bias)
