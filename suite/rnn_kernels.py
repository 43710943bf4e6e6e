"""Fast GRU and LSTM with a custom backward pass; equal to torch.nn up to rounding.

On CUDA a time step is a matmul and one pointwise kernel, fused by torch.compile. On a CPU it
is a matmul and a few in-place operators, which need no compilation.

Rows are packed as in torch's PackedSequence: those of step 0, then those of step 1, ...
`sizes`, which torch calls batch_sizes, has the number of rows of each step. The first size is
B, and sizes never increase from step to step. Their sum is N. The initial state is zero.

    x_token (U, G)   input projection of each of U tokens (G = 4H; GRU: 3H)
    x_step (T, G)    input projection of each time step: positional encoding, bias, command
    tokens (m,)      indices into x_token for the first m rows; later rows have x_step alone
    gates (N, 4H)    LSTM: i f g o; W h_prev and the input projection are added to all columns.
                     GRU: q r z n; W h_prev is added to q r z, the input projection to r z n
                     (GRUCell.update defines q)
    state (N, H)     c of the LSTM or h of the GRU, in the weights' precision
    prev (n, H)      the previous state of the rows at a step
    h (N, H)         the output

In a backward pass, d_out comes from the readout, and d_h and d_state come from the next step.
In an LSTM, dL/dh is d_out + d_h, and d_state is the next step's contribution to dL/dc. A GRU's
state is h, so dL/dh is d_out + d_h + d_state. In that case, d_h is the next step's contribution
through W, and d_state is the rest of its contribution.
"""

from functools import partial
from itertools import accumulate

import torch

from suite.graphs import maybe_compile


def on_cpu(x):  # replaced in tests
    return x.is_cpu


# -- One step without its matmul. CUDA and stability.py use `preactivations` and `update`,
# which follow torch.nn.
#
# On a CPU, steps are in place. `gate_views` are views of the four gates in one step. They hold
# pre-activations, then activations, and after the backward step the gradients of the
# pre-activations. torch's tanh is slow on some CPUs, so we compute it from the sigmoid, as
# tanh(a) = 1 - 2 sigmoid(-2a). To get -2a, input projections and the LSTM's W are multiplied by
# -2 before the scan, and r q and c in each step. Multiplication by 2 is exact.
ZERO = torch.zeros(())
ONE = torch.ones(())
sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input


class LSTMCell:
    @staticmethod
    def preactivations(x, product, bias):
        """Combine x (x_token + x_step) and product (W h_prev) into gate pre-activations."""
        return (x + product).chunk(4, -1)

    @staticmethod
    def update(i, f, g, o, c):
        """Return the new state and the output, given pre-activations and the previous state."""
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return c, o.sigmoid() * c.tanh()

    @staticmethod
    def step_in_place(gate_views, prev, state, gates, h, s_c):
        """Run a step; s = sigmoid(-2a) stands for g = tanh(a), s_c for tanh(c)."""
        gates.sigmoid_()
        i, f, s, o = gate_views
        torch.mul(f, prev, out=state)
        state.add_(i).addcmul_(i, s, value=-2)  # c = f c_prev + i g
        torch.mul(state, -2, out=s_c).sigmoid_()
        torch.addcmul(o, o, s_c, value=-2, out=h)  # h = o tanh(c)

    @staticmethod
    def backward_in_place(
        gate_views, prev, d_h, d_state, d_out, d_gate_views, gates, s_c, scratch
    ):
        """Overwrite the gates with their pre-activation gradients.

        The derivative of tanh(a) = 1 - 2s is 4s(1 - s). Since sigmoid_backward provides only
        s(1 - s), the factor 4 is applied here. `d_gate_views` are views of `scratch`.
        """
        i, f, s, o = gate_views
        d_i, d_f, d_s, d_o = d_gate_views
        d_h.add_(d_out)
        torch.mul(d_h, o, out=d_o)  # d_tanh(c)
        d_state.add_(sigmoid_backward(d_o, s_c, grad_input=d_o), alpha=4)
        torch.addcmul(d_state, d_state, s, value=-2, out=d_i)  # d_c g
        torch.mul(d_state, prev, out=d_f)
        torch.addcmul(ZERO, d_state, i, value=4, out=d_s)  # 4 d_c i
        torch.addcmul(d_h, d_h, s_c, value=-2, out=d_o)  # d_h tanh(c)
        d_state.mul_(f)  # d_c_prev
        sigmoid_backward(scratch, gates, grad_input=gates)  # through all four sigmoids


class GRUCell:
    @staticmethod
    def preactivations(x, product, bias):
        x_r, x_z, x_n = x.chunk(3, -1)
        q, r, z = product.chunk(3, -1)
        return q + bias, r + x_r, z + x_z, x_n.expand_as(q)

    @staticmethod
    def update(q, r, z, n, h):
        """Return the new state twice, as the output is the state; q = W_hn h + b_hn."""
        n = (n + r.sigmoid() * q).tanh()
        h = n + z.sigmoid() * (h - n)
        return h, h

    @staticmethod
    def step_in_place(gate_views, prev, state):
        """Write h into the state."""
        q, r, z, n = gate_views
        r.sigmoid_()
        z.sigmoid_()
        n.addcmul_(r, q, value=-2).sigmoid_()
        torch.add(ONE, n, alpha=-2, out=n)  # n = tanh(x + r q)
        torch.lerp(n, prev, z, out=state)  # h = n + z (h_prev - n)

    @staticmethod
    def backward_in_place(gate_views, prev, d_h, d_state, d_out, d_gate_views):
        """Overwrite gates with gradients, and d_state with the gradient to h_prev past W."""
        q, r, z, n = gate_views
        _, d_r, d_z, d_n = d_gate_views
        d = d_h.add_(d_state).add_(d_out)
        torch.sub(prev, n, out=d_z).mul_(d)
        torch.mul(d, z, out=d_state)  # d_h_prev, without the part through W
        torch.sub(d, d_state, out=d_n)  # d (1 - z)
        tanh_backward(d_n, n, grad_input=n)  # n now holds d(pre-activation)
        torch.mul(n, q, out=d_r)
        torch.mul(n, r, out=q)  # q holds d_q
        sigmoid_backward(d_r, r, grad_input=r)
        sigmoid_backward(d_z, z, grad_input=z)


# -- On CUDA: what torch.compile fuses into one kernel
def copy_gates(gate_views, gates):
    """Copy gate by gate, which compiles to one kernel over (n, H)."""
    for view, gate in zip(gate_views, gates):
        view.copy_(gate)


def forward_step(cell, x_token, bias, gate_views, prev, state, product, x_step, tokens, h):
    """Write pre-activations, state and h."""
    x = x_step + x_token[tokens] if len(tokens) else x_step
    gates = cell.preactivations(x.to(state.dtype), product.to(state.dtype), bias)
    copy_gates(gate_views, gates)
    new_state, output = cell.update(*gates, prev)
    state.copy_(new_state)
    h.copy_(output)


def backward_step(cell, gate_views, prev, d_h, d_state, d_out, d_gate_views):
    """Write pre-activation gradients; replace d_state by its value for the previous step."""
    gates = [view.to(prev.dtype) for view in gate_views]
    _, vjp = torch.func.vjp(cell.update, *gates, prev)
    *d_gates, d_prev = vjp((d_state, (d_out + d_h).to(prev.dtype)))
    copy_gates(d_gate_views, d_gates)
    d_state.copy_(d_prev)


# -- The scan: lists of views, one for each step, and the loop over steps
def first_rows(x, sizes):
    """Return x[:n] for each n in sizes; views are shared, since creating one takes time."""
    views = {n: x[:n] for n in set(sizes)}
    return [views[n] for n in sizes]


def split_gates(gates, sizes):
    """Return views of the four gates for each step."""
    return [*zip(*(column.split(sizes) for column in gates.chunk(4, 1)))]


def previous_rows(x, sizes):
    """Return x at the previous step, for each step but the first."""
    return [rows if len(rows) == n else rows[:n] for rows, n in zip(x.split(sizes), sizes[1:])]


def previous_states(state, sizes):
    """Return each step's previous state; the initial state is zero."""
    return [torch.zeros_like(state[: sizes[0]]), *previous_rows(state, sizes)]


def init_gates(x_token, x_step, tokens, sizes, weight, bias):
    """Return, for CPUs, gates (N, 4H) that hold the input projections, and W.T.

    The GRU's q has no input projection and holds its bias. The input projection of g or n is
    multiplied by -2, and so are the columns of W.T for the LSTM's g.
    """
    G, H = weight.shape
    scale = weight.new_ones(G)
    scale[2 * H : 3 * H] = -2  # inputs of tanh
    x_step = (x_step * scale)[:, None]
    if sizes[0] != sizes[-1]:
        x_step = x_step.repeat_interleave(torch.tensor(sizes), 0)
    batch = sum(sizes) // len(x_step)  # B, or 1 if step sizes differ
    gates = weight.new_empty(len(x_step), batch, 4 * H)  # (T, B, 4H) or (N, 1, 4H)
    inputs = gates[:, :, -G:]
    token_part = (x_token * scale).index_select(0, tokens).view(-1, batch, G)
    n = len(token_part)
    torch.add(token_part, x_step[:n], out=inputs[:n])
    inputs[n:] = x_step[n:]
    weight_T = weight.T.contiguous()
    if G == 4 * H:
        weight_T = weight_T * scale  # not in place: it may alias the parameter
    else:
        gates[:, :, :H] = bias
    return gates.flatten(0, 1), weight_T


class RecurrentScan(torch.autograd.Function):
    """Run a GRU or LSTM: weight (G, H), bias (H,), x_token (U, G), ... -> h (N, H).

    Only the GRU reads `bias`, in q; the LSTM's bias is part of x_step.
    """

    @staticmethod
    def forward(ctx, cell, weight, bias, x_token, x_step, tokens, sizes, compiled):
        # Detach to avoid recompilation
        inputs = weight, bias, x_token, x_step
        weight, bias, x_token, x_step = (x.detach() for x in inputs)
        (G, H), N = weight.shape, sum(sizes)
        cpu = on_cpu(weight)
        state = weight.new_empty(N, H)
        h = state if cpu and cell is GRUCell else x_token.new_empty(N, H)
        s_c = torch.empty_like(h) if cpu and cell is LSTMCell else h  # else unused
        weight_cast = weight.to(x_token.dtype)
        extra = []  # further arguments of `step`, for each step
        if cpu:
            gates, weight_T = init_gates(x_token, x_step, tokens, sizes, weight, bias)
            products, step = gates[:, :G].split(sizes), cell.step_in_place
            if cell is LSTMCell:
                extra = [x.split(sizes) for x in (gates, h, s_c)]
        else:
            gates, weight_T = x_token.new_empty(N, 4 * H), weight_cast.T
            products = first_rows(x_token.new_zeros(sizes[0], G), sizes)
            step = partial(maybe_compile(forward_step, compiled), cell, x_token, bias)
            step_tokens = tokens.tensor_split([*accumulate(sizes[:-1])])
            extra = [products, x_step, step_tokens, h.split(sizes)]
        gate_views, prev = split_gates(gates, sizes), previous_states(state, sizes)
        h_prev = previous_rows(h, sizes)
        for t, arguments in enumerate(zip(gate_views, prev, state.split(sizes), *extra)):
            if t:
                # CPU: add to the prefilled gates; CUDA: overwrite the buffer
                products[t].addmm_(h_prev[t - 1], weight_T, beta=int(cpu))
            step(*arguments)
        ctx.save_for_backward(gates, state, h, s_c, tokens, weight_cast)
        ctx.settings = cell, sizes, compiled, len(x_token)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        gates, state, h, s_c, tokens, weight_cast = ctx.saved_tensors
        cell, sizes, compiled, U = ctx.settings
        h, state = h.detach(), state.detach()  # to avoid recompilation
        B, (G, H) = sizes[0], weight_cast.shape
        gate_views, prev = split_gates(gates, sizes), previous_states(state, sizes)
        d_h, d_state = (first_rows(torch.zeros_like(x[:B]), sizes) for x in (h, state))
        extra = []
        if on_cpu(h):
            step, d_gates = cell.backward_in_place, gates
            scratch = torch.empty_like(gates[:B])  # one step's gradients
            d_gate_views = zip(*(first_rows(x, sizes) for x in scratch.chunk(4, 1)))
            if cell is LSTMCell:
                extra = [gates.split(sizes), s_c.split(sizes), first_rows(scratch, sizes)]
        else:
            d_gates = torch.empty_like(gates)  # a compiled step's arguments must not alias
            step = partial(maybe_compile(backward_step, compiled), cell)
            d_gate_views = split_gates(d_gates, sizes)
        d_products = d_gates[:, :G].split(sizes)
        steps = zip(gate_views, prev, d_h, d_state, d_out.split(sizes), d_gate_views, *extra)
        for t, arguments in reversed([*enumerate(steps)]):
            step(*arguments)
            if t:
                torch.mm(d_products[t], weight_cast, out=d_h[t])

        d_inputs = input_gradients(d_gates[:, -G:], tokens, sizes, U, state.dtype)
        h_prev = h[:-B] if sizes[-1] == B else torch.cat(previous_rows(h, sizes))
        d_weight = (d_gates[B:, :G].T @ h_prev).to(state.dtype)
        d_bias = None if cell is LSTMCell else d_gates[:, :H].sum(0).to(state.dtype)
        return None, d_weight, d_bias, *d_inputs, None, None, None


def input_gradients(d_x, tokens, sizes, U, dtype):
    """Return the gradients of x_token and x_step from that of their sum."""
    if sizes[-1] == sizes[0]:
        d_x_step = d_x.unflatten(0, (-1, sizes[0])).sum(1)
    else:
        d_x_step = torch.stack([d.sum(0) for d in d_x.split(sizes)])
    # Faster than index_add_, whose CUDA additions to repeated rows are serialised
    d_x_token = torch.ops.aten.embedding_dense_backward(
        d_x[: len(tokens)].to(dtype), tokens, U, -1, False
    )
    return d_x_token, d_x_step


def recurrent_parameters(layer):
    """Return the cell, weight (G, H; GRU: q, r, z) and the GRU's b_hn (H,); LSTMs ignore it."""
    weight, bias = layer.weight_hh_l0, layer.bias_hh_l0[-layer.hidden_size :]
    if isinstance(layer, torch.nn.LSTM):
        return LSTMCell, weight, bias
    r, z, q = weight.chunk(3)
    return GRUCell, torch.cat([q, r, z]), bias
