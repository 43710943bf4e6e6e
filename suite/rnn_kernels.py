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
    gates (N, 4H)  inputs of an LSTM's i, f, g, o; of a GRU's r, z, n, and first q, see gru_cell
    state (N, H)   an LSTM's c or a GRU's h, in the precision of the weights
    h (N, H)       the output
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from suite.graphs import pointwise


def on_cpu(x):
    return x.is_cpu


# -- A step as in torch.nn, between matmuls; stability.py takes its slopes, too
def lstm_cell(i, f, g, o, c):
    """The inputs of the gates, and the old state -> the new state and the output."""
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return c, o.sigmoid() * c.tanh()


def gru_cell(q, r, z, n, h):
    """q is what the reset gate r lets through to the candidate n."""
    n = (n + r.sigmoid() * q).tanh()
    h = n + z.sigmoid() * (h - n)
    return h, h


def lstm_gates(x, product, bias):
    """The inputs of the gates: x from table and by_step, product = W h_before."""
    return (x + product).chunk(4, -1)


def gru_gates(x, product, bias):
    x_r, x_z, x_n = x.chunk(3, -1)
    q, r, z = product.chunk(3, -1)
    return q + bias, r + x_r, z + x_z, x_n.expand_as(q)


# -- On CUDA: what torch.compile fuses into one kernel
def store(columns, gates):
    """Gate by gate, so that a compiled step is one kernel of (n, H)."""
    for column, gate in zip(columns, gates):
        column.copy_(gate)


def compute_step(cell, table, bias, product, by_step, tokens, before, state, h, columns):
    """Write the gates' inputs, the state and h."""
    x = by_step + table[tokens] if len(tokens) else by_step
    gates = cell.gates(x.to(state.dtype), product.to(state.dtype), bias)
    store(columns, gates)
    new, output = cell.compute(*gates, before)
    state.copy_(new)
    h.copy_(output)


def compute_step_back(cell, before, columns, d_h, d_state, d_out, d_columns):
    """Write the gradients of the gates' inputs; carry d_state to the step before."""
    gates = [column.to(before.dtype) for column in columns]
    _, vjp = torch.func.vjp(cell.compute, *gates, before)
    *d_gates, d_before = vjp((d_state, (d_out + d_h).to(before.dtype)))
    store(d_columns, d_gates)
    d_state.copy_(d_before)


# -- On a CPU: in place. `columns` are the four gates: at first they hold their inputs, then
# their values, after the backward step the gradients of their inputs.
# torch's tanh is slow on some CPUs: tanh(x) = 1 - 2 sigmoid(-2x). What is summed to x is
# multiplied by -2 before the scan, which is exact.
ZERO = torch.zeros(())
ONE = torch.ones(())
sigmoid_back = torch.ops.aten.sigmoid_backward.grad_input
tanh_back = torch.ops.aten.tanh_backward.grad_input


def lstm_step_in_place(gates, columns, before, state, h, u):
    """Instead of g it keeps s, and for tanh(c) it keeps u: g = 1 - 2s, tanh(c) = 1 - 2u."""
    gates.sigmoid_()
    i, f, s, o = columns
    torch.mul(f, before, out=state)
    state.add_(i).addcmul_(i, s, value=-2)  # c = f c_before + i g
    torch.mul(state, -2, out=u).sigmoid_()
    torch.addcmul(o, o, u, value=-2, out=h)  # h = o tanh(c)


def lstm_step_back_in_place(gates, columns, before, u, d_h, d_state, d_out, room, d_columns):
    """Replace the gates by the gradients of their inputs, in warm memory.

    tanh(x) = 1 - 2s has the slope 4s(1 - s): sigmoid_back is all of it but the 4.
    """
    i, f, s, o = columns
    d_i, d_f, d_s, d_o = d_columns
    d_h.add_(d_out)
    torch.mul(d_h, o, out=d_o)  # of tanh(c)
    d_state.add_(sigmoid_back(d_o, u, grad_input=d_o), alpha=4)
    torch.addcmul(d_state, d_state, s, value=-2, out=d_i)  # d_c g
    torch.mul(d_state, before, out=d_f)
    torch.addcmul(ZERO, d_state, i, value=4, out=d_s)  # d_c i, and the 4
    torch.addcmul(d_h, d_h, u, value=-2, out=d_o)  # d_h tanh(c)
    d_state.mul_(f)  # of c_before
    sigmoid_back(room, gates, grad_input=gates)  # of all four sigmoids' inputs


def gru_step_in_place(columns, before, state):
    """The output is the state."""
    q, r, z, n = columns
    r.sigmoid_()
    z.sigmoid_()
    n.addcmul_(r, q, value=-2).sigmoid_()
    torch.add(ONE, n, alpha=-2, out=n)  # n = tanh(x + r q)
    torch.lerp(n, before, z, out=state)  # h = n + z (h_before - n)


def gru_step_back_in_place(columns, before, d_h, d_state, d_out, d_columns):
    """As lstm_step_back_in_place."""
    q, r, z, n = columns
    _, d_r, d_z, d_n = d_columns
    d = d_h.add_(d_state).add_(d_out)
    torch.sub(before, n, out=d_z).mul_(d)
    torch.mul(d, z, out=d_state)  # of h_before
    torch.sub(d, d_state, out=d_n)  # d (1 - z)
    tanh_back(d_n, n, grad_input=n)  # from here on n is its input's gradient
    torch.mul(n, q, out=d_r)
    torch.mul(n, r, out=q)  # and so is q
    sigmoid_back(d_r, r, grad_input=r)
    sigmoid_back(d_z, z, grad_input=z)


class Cell(NamedTuple):
    """What the scans need of an LSTM or a GRU."""

    gates: Callable
    compute: Callable
    step_in_place: Callable
    step_back_in_place: Callable


LSTM = Cell(lstm_gates, lstm_cell, lstm_step_in_place, lstm_step_back_in_place)
GRU = Cell(gru_gates, gru_cell, gru_step_in_place, gru_step_back_in_place)


# -- The scans; x_of[t] is step t's part of x
def first_rows(x, sizes):
    """x[:n] for every step's n, one view for each n: a view costs as much as an operator."""
    views = {n: x[:n] for n in set(sizes)}
    return [views[n] for n in sizes]


def columns_of(gates, sizes):
    """For every step, its four columns of the gates."""
    return [*zip(*(column.split(sizes) for column in gates.chunk(4, 1)))]


def one_step_earlier(x, sizes):
    """For every step but the first, its rows of x at the step before."""
    return [rows if len(rows) == n else rows[:n] for rows, n in zip(x.split(sizes), sizes[1:])]


def state_before(state, sizes):
    """For every step, its rows of the state at the step before, which begins with zeros."""
    return [torch.zeros_like(state[: sizes[0]]), *one_step_earlier(state, sizes)]


def fill_gates(table, by_step, tokens, sizes, weight, bias):
    """-> gates (N, 4H), which hold what is added to W h_before, and W (H, G)"""
    G, H = weight.shape
    scale = weight.new_ones(G)
    scale[2 * H : 3 * H] = -2  # what tanh reads
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

    The bias is that of a GRU's q; an LSTM's, which is in by_step, is not read.
    """

    @staticmethod
    def forward(ctx, cell, table, by_step, tokens, sizes, compiled, weight, bias):
        # Detached, or it compiles twice
        table, by_step, weight, bias = (x.detach() for x in (table, by_step, weight, bias))
        (G, H), N = weight.shape, sum(sizes)
        cpu = on_cpu(weight)
        state = weight.new_empty(N, H)
        h = state if cpu and cell is GRU else table.new_empty(N, H)
        u = torch.empty_like(h) if cpu and cell is LSTM else h
        low = weight.to(table.dtype)
        if cpu:
            gates, recurrent = fill_gates(table, by_step, tokens, sizes, weight, bias)
            product_of = gates[:, :G].split(sizes)
            step, views = cell.step_in_place, {}
            if cell is LSTM:
                views = dict(gates=gates.split(sizes), u=u.split(sizes), h=h.split(sizes))
        else:
            gates, recurrent = table.new_empty(N, 4 * H), low.T
            product_of = first_rows(table.new_zeros(sizes[0], G), sizes)
            step = partial(pointwise(compute_step, compiled), cell, table, bias)
            tokens_of = tokens.tensor_split(list(accumulate(sizes[:-1])))
            views = dict(
                product=product_of, by_step=by_step, tokens=tokens_of, h=h.split(sizes)
            )
        views |= dict(
            columns=columns_of(gates, sizes),
            before=state_before(state, sizes),
            state=state.split(sizes),
        )
        h_before_of = one_step_earlier(h, sizes)
        for t, of_step in enumerate(zip(*views.values())):
            if t:
                product_of[t].addmm_(h_before_of[t - 1], recurrent, beta=int(cpu))
            step(**dict(zip(views, of_step)))
        ctx.save_for_backward(gates, state, h, u, tokens, low)
        ctx.plain = cell, sizes, compiled, len(table)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        gates, state, h, u, tokens, low = ctx.saved_tensors
        cell, sizes, compiled, table_rows = ctx.plain
        h, state = h.detach(), state.detach()  # or a step compiles twice
        B, (G, H) = sizes[0], low.shape
        d_h_of = first_rows(torch.zeros_like(h[:B]), sizes)
        views = dict(
            columns=columns_of(gates, sizes),
            before=state_before(state, sizes),
            d_h=d_h_of,
            d_state=first_rows(torch.zeros_like(state[:B]), sizes),
            d_out=d_out.split(sizes),
        )
        if on_cpu(h):
            step, d_gates = cell.step_back_in_place, gates
            room = torch.empty_like(gates[:B])  # for one step's gradients
            views["d_columns"] = zip(*(first_rows(x, sizes) for x in room.chunk(4, 1)))
            if cell is LSTM:
                views["gates"] = gates.split(sizes)
                views["u"] = u.split(sizes)
                views["room"] = first_rows(room, sizes)
        else:
            d_gates = torch.empty_like(gates)  # a compiled step's arguments share no memory
            step = partial(pointwise(compute_step_back, compiled), cell)
            views["d_columns"] = columns_of(d_gates, sizes)
        d_product_of = d_gates[:, :G].split(sizes)
        steps = [dict(zip(views, of_step)) for of_step in zip(*views.values())]
        for t in reversed(range(len(sizes))):
            step(**steps[t])
            if t:
                torch.mm(d_product_of[t], low, out=d_h_of[t])

        of_inputs = input_gradients(d_gates[:, -G:], tokens, sizes, table_rows, state.dtype)
        h_before = h[:-B] if sizes[-1] == B else torch.cat(one_step_earlier(h, sizes))
        d_weight = (d_gates[B:, :G].T @ h_before).to(state.dtype)
        d_bias = None if cell is LSTM else d_gates[:, :H].sum(0).to(state.dtype)
        return None, *of_inputs, None, None, None, d_weight, d_bias


def input_gradients(d_x, tokens, sizes, table_rows, dtype):
    """The gradients of table and by_step, from that of table[tokens] + by_step."""
    if sizes[-1] == sizes[0]:
        d_by_step = d_x.unflatten(0, (-1, sizes[0])).sum(1)
    else:
        d_by_step = torch.stack([d.sum(0) for d in d_x.split(sizes)])
    # Faster than index_add_: on CUDA additions to the same rows would wait for one another
    add_rows = torch.ops.aten.embedding_dense_backward
    d_table = add_rows(d_x[: len(tokens)].to(dtype), tokens, table_rows, -1, False)
    return d_table, d_by_step


def recurrence(layer):
    """-> Cell, weight (G, H) and bias (H,); of a GRU as its gates are here: q, r, z."""
    weight, bias = layer.weight_hh_l0, layer.bias_hh_l0[-layer.hidden_size :]
    if isinstance(layer, torch.nn.LSTM):
        return LSTM, weight, bias
    r, z, q = weight.chunk(3)
    return GRU, torch.cat([q, r, z]), bias


def scan(layer, table, by_step, tokens, sizes, compiled):
    """table (R, G), by_step (T, G), tokens (n,) -> the layer's h (N, H)"""
    cell, weight, bias = recurrence(layer)
    return RecurrentScan.apply(cell, table, by_step, tokens, sizes, compiled, weight, bias)
