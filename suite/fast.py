"""The same numbers sooner: what common.py's models compute, rewritten exactly; held equal to them by tests.

    loss_and_accuracy(model, episode)   with gradients, as of common.loss_and_accuracy
    logits(model, inputs, steps)        as model(inputs, steps)

What is saved. The input weights meet every integer and every step once, not every row: a layer's input is
table[token] + clock[t]. GRU and LSTM are swept by hand: a step is one product with the state and one
pointwise function, which torch.compile makes one loop of (on a CPU a few operators, not compiled); the
gradients of the weights are one product each, after the backward sweep. S4D convolves answered steps alone,
and what all rows share only once. The readout's logits exist in chunks, and their gradients are computed
with them.

Rows are flat and packed as in torch's PackedSequence: those of step 0, then those of step 1, ...; `sizes`
says how many each step has, never more than the one before; N is their sum. `tokens` may end early, after
any step: later steps read the clock alone. Gates are in torch's order, the state starts at zero. Products are
in the precision of the table (bfloat16, say), the carried state is in the weights'.
"""

from suite import scan
from suite.compiling import pointwise

import functools
import itertools
import math

import torch
import torch.nn.functional as F

import common

# ------------------------------------------------------------------------------------------------------------
# One step, pointwise: what torch.compile makes one loop of
# ------------------------------------------------------------------------------------------------------------


def tanh(x):
    """On a CPU several times as fast as torch's."""
    return 2 * (2 * x).sigmoid() - 1


def read(clock, table, tokens):
    return clock if tokens is None else clock + table[tokens]


def columns(gates):
    """A step's gates (n, 4H), to write to: on CUDA apart, so that a compiled step is one kernel of (n, H)."""
    return gates.chunk(4, dim=1) if gates.is_cuda else gates


def write(gates, *parts):
    if isinstance(gates, torch.Tensor):
        gates.copy_(torch.cat(parts, dim=1))
    else:
        for column, part in zip(gates, parts, strict=True):
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
    d_read = d_x[: len(tokens)].to(dtype)
    if d_x.is_cuda:  # sorts the tokens, where atomic additions to the same rows would wait for one another
        d_table = torch.ops.aten.embedding_dense_backward(d_read, tokens, table_rows, -1, False)
    else:
        d_table = d_read.new_zeros(table_rows, d_x.shape[1]).index_add_(0, tokens, d_read)
    if sizes[0] == sizes[-1]:
        return d_table, d_x.unflatten(0, (len(sizes), -1)).sum(1)
    return d_table, torch.stack([d.sum(0) for d in d_x.split(sizes)])


class LSTM(torch.autograd.Function):
    """table (R, 4H), clock (T, 4H), tokens (n,), sizes (T,), compiled, weight (4H, H) -> h (N, H)."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight):
        table, clock, weight = table.detach(), clock.detach(), weight.detach()  # one kind for the compiler
        step = pointwise(lstm_step, compiled)
        H, low = weight.shape[1], weight.to(table.dtype)
        gates, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H))
        c, cell = weight.new_empty(len(h), H), weight.new_zeros(sizes[0], H)
        product = table.new_zeros(sizes[0], 4 * H)
        for t, n, at, earlier in walk(sizes):
            if t:
                torch.mm(h[earlier], low.T, out=product[:n])
            read = tokens[at] if at.start < len(tokens) else None
            step(product[:n], clock[t], table, read, cell[:n], columns(gates[at]), c[at], h[at])
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
            step(gates[at], c[at], c_before, d_out[at], d_h[:n], d_cell[:n], columns(d_gates[at]))
            if t:
                torch.mm(d_gates[at], low, out=d_h[:n])
        d_weight = (d_gates[sizes[0] :].T @ one_step_earlier(h, sizes)).to(c.dtype)
        return *input_gradients(d_gates, tokens, sizes, table_rows, c.dtype), None, None, None, d_weight


class GRU(torch.autograd.Function):
    """As LSTM, with three gates; `bias` (H,) is the candidate state's, inside its reset gate."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, compiled, weight, bias):
        table, clock, weight, bias = (x.detach() for x in (table, clock, weight, bias))
        step = pointwise(gru_step, compiled)
        H, low = weight.shape[1], weight.to(table.dtype)
        gates, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H))
        state, product = weight.new_zeros(sizes[0], H), table.new_zeros(sizes[0], 3 * H)
        for t, n, at, earlier in walk(sizes):
            if t:
                torch.mm(h[earlier], low.T, out=product[:n])
            read = tokens[at] if at.start < len(tokens) else None
            step(product[:n], bias, clock[t], table, read, state[:n], columns(gates[at]), h[at])
        ctx.save_for_backward(gates, h, tokens, low)
        ctx.plain = sizes, compiled, len(table), bias.dtype
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, h, tokens, low), (sizes, compiled, table_rows, dtype) = ctx.saved_tensors, ctx.plain
        h = h.detach()  # as `start`: one kind for the compiler
        step, H, d_gates = pointwise(gru_step_back, compiled), h.shape[1], torch.empty_like(gates)
        start, d_h = (torch.zeros_like(h[: sizes[0]]) for _ in range(2))
        d_state, low = torch.zeros_like(start, dtype=dtype), low.roll(H, 0)  # candidate first, as in d_gates
        for t, n, at, earlier in reversed(walk(sizes)):
            h_before = h[earlier] if t else start
            step(gates[at], h_before, d_out[at], d_h[:n], d_state[:n], columns(d_gates[at]))
            if t:
                torch.mm(d_gates[at, : 3 * H], low, out=d_h[:n])
        d_weight = d_gates[sizes[0] :, : 3 * H].T @ one_step_earlier(h, sizes)
        d_inputs = input_gradients(d_gates[:, H:], tokens, sizes, table_rows, dtype)
        return *d_inputs, None, None, None, d_weight.roll(-H, 0).to(dtype), d_gates[:, :H].sum(0).to(dtype)


# ------------------------------------------------------------------------------------------------------------
# The sweeps on a CPU: few operators, in place
# ------------------------------------------------------------------------------------------------------------

# Against compiled steps an iteration takes 0.8 to 1.0 times as long (hidden 128 and 512, one thread), and no
# trial waits for a compiler; the cross-entropy alone loses by it, a tenth of an iteration at K = 16384. What
# sigmoids a step has are one operator where they can be; tanh(x) = 1 - 2 sigmoid(-2x) is part of the sums.

sigmoid_back, tanh_back = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


def steps_of(sizes, *tensors):
    """For every step its rows of each."""
    return list(zip(*(x.split(sizes) for x in tensors), strict=True))


def tokens_of(tokens, sizes):
    """For every step its tokens; None where they have ended."""
    ends = itertools.accumulate(sizes)
    return [tokens[end - n : end] if end <= len(tokens) else None for n, end in zip(sizes, ends)]


def read_into(rows, clock, table, tokens):
    if tokens is None:
        rows.copy_(clock)
    else:
        torch.index_select(table, 0, tokens, out=rows).add_(clock)


class LSTMByOperators(torch.autograd.Function):
    """As LSTM. The third gate, g = tanh(x), is kept as s = sigmoid(-2x): g = 1 - 2s, g' = 4s(1 - s)."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, weight):
        H, scale = weight.shape[1], third_gate(weight, -2)
        table, clock, low = table * scale, clock * scale, (weight * scale[:, None]).T.contiguous()
        gates, c, h = (table.new_empty(sum(sizes), size) for size in (4 * H, H, H))
        product, before = table.new_empty(sizes[0], 4 * H), (table.new_zeros(sizes[0], H),) * 2
        each = zip(steps_of(sizes, gates, *gates.chunk(4, dim=1), c, h), clock, tokens_of(tokens, sizes))
        for t, ((rows, i, f, s, o, *now), at, read) in enumerate(each):
            n, ((c_before, h_before), (c_now, h_now)) = len(i), (before, now)
            read_into(rows, at, table, read)
            if t:
                rows.add_(torch.mm(h_before[:n], low, out=product[:n]))
            rows.sigmoid_()
            torch.mul(f, c_before[:n], out=c_now).add_(i).addcmul_(i, s, value=-2)
            torch.addcmul(o, o, (-2 * c_now).sigmoid_(), value=-2, out=h_now)
            before = now
        ctx.save_for_backward(gates, c, h, tokens, weight)
        ctx.plain = sizes, len(table)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        (gates, c, h, tokens, weight), (sizes, table_rows) = ctx.saved_tensors, ctx.plain
        scale, d_gates = third_gate(weight, 4), torch.empty_like(gates)
        start, d_h, d_c = (torch.zeros_like(c[: sizes[0]]) for _ in range(3))
        low, columns = weight * scale[:, None], (*gates.chunk(4, dim=1), *d_gates.chunk(4, dim=1))
        each = steps_of(sizes, gates, d_gates, *columns, c, d_out)
        before = [start, *(c for *_, c, _ in each[:-1])]
        for (rows, d_rows, i, f, s, o, d_i, d_f, d_s, d_o, c, d), c_before in reversed(
            list(zip(each, before))
        ):
            n, u = len(i), (-2 * c).sigmoid_()
            d, d_cell = d_h[:n].add_(d), d_c[:n]
            d_cell.add_(sigmoid_back(d * o, u), alpha=4)
            torch.addcmul(d_cell, d_cell, s, value=-2, out=d_i)
            torch.mul(d_cell, c_before[:n], out=d_f)
            torch.mul(d_cell, i, out=d_s)
            torch.addcmul(d, d, u, value=-2, out=d_o)
            sigmoid_back.grad_input(d_rows, rows, grad_input=d_rows)
            d_cell.mul_(f)
            if c_before is not start:
                torch.mm(d_rows, low, out=d)
        d_weight = (d_gates[sizes[0] :].T @ one_step_earlier(h, sizes)) * scale[:, None]
        d_table, d_clock = input_gradients(d_gates, tokens, sizes, table_rows, gates.dtype)
        return d_table * scale, d_clock * scale, None, None, d_weight


def third_gate(weight, factor):
    """(4H,): 1, and `factor` for the third gate's columns."""
    return weight.new_tensor([1, 1, factor, 1]).repeat_interleave(weight.shape[1])


class GRUByOperators(torch.autograd.Function):
    """As GRU."""

    @staticmethod
    def forward(ctx, table, clock, tokens, sizes, weight, bias):
        H, low = weight.shape[1], weight.T.contiguous()
        gates, q, h = (table.new_empty(sum(sizes), size) for size in (3 * H, H, H))
        product, h_before = table.new_zeros(sizes[0], 3 * H), table.new_zeros(sizes[0], H)
        columns = gates[:, : 2 * H], *gates.chunk(3, dim=1)
        each = zip(steps_of(sizes, gates, *columns, q, h), clock, tokens_of(tokens, sizes))
        for t, ((rows, both, r, z, new, q_now, h_now), at, read) in enumerate(each):
            n, p = len(r), product[: len(r)]
            read_into(rows, at, table, read)
            if t:
                torch.mm(h_before[:n], low, out=p)
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
        H, low = weight.shape[1], weight.roll(weight.shape[1], 0)  # q's, then r's and z's
        start, d_h, d_gates = *(torch.zeros_like(h[: sizes[0]]) for _ in range(2)), h.new_empty(len(h), 4 * H)
        columns = gates[:, : 2 * H], *gates.chunk(3, dim=1), d_gates[:, H : 3 * H], *d_gates.chunk(4, dim=1)
        each = steps_of(sizes, *columns, d_gates[:, : 3 * H], q, h, d_out)
        before = [start, *(h for *_, h, _ in each[:-1])]
        for step, h_before in reversed(list(zip(each, before))):
            both, r, z, new, d_both, d_q, d_r, d_z, d_new, d_rows, q_now, _, d = step
            n = len(r)
            d = d_h[:n].add_(d)
            kept = d * z
            tanh_back.grad_input(d - kept, new, grad_input=d_new)
            torch.mul(d_new, r, out=d_q)
            torch.mul(d_new, q_now, out=d_r)
            torch.mul(d, h_before[:n] - new, out=d_z)
            sigmoid_back.grad_input(d_both, both, grad_input=d_both)
            if h_before is not start:
                torch.mm(d_rows, low, out=d).add_(kept)
        d_weight = d_gates[sizes[0] :, : 3 * H].T @ one_step_earlier(h, sizes)
        d_inputs = input_gradients(d_gates[:, H:], tokens, sizes, table_rows, gates.dtype)
        return *d_inputs, None, None, d_weight.roll(-H, 0), d_gates[:, :H].sum(0)


def by_operators(table, weight, compiled):
    """Whether a layer is swept by the two above."""
    return table.device.type == "cpu" and table.dtype == weight.dtype and not compiled


# ------------------------------------------------------------------------------------------------------------
# The layers: their input's weight and bias, and what they make of its table and clock
# ------------------------------------------------------------------------------------------------------------


def gru_input(layer):
    """The input's weight (G, E or 2E) and the bias (G,) of the same sum."""
    H = layer.hidden_size
    return layer.weight_ih_l0, layer.bias_ih_l0 + F.pad(layer.bias_hh_l0[:-H], (0, H))


def gru_sweep(layer, table, clock, tokens, sizes, compiled):
    weight, bias = layer.weight_hh_l0, layer.bias_hh_l0[-layer.hidden_size :]
    if by_operators(table, weight, compiled):
        return GRUByOperators.apply(table, clock, tokens, sizes, weight, bias)
    return GRU.apply(table, clock, tokens, sizes, compiled, weight, bias)


def lstm_input(layer):
    return layer.weight_ih_l0, layer.bias_ih_l0 + layer.bias_hh_l0


def lstm_sweep(layer, table, clock, tokens, sizes, compiled):
    weight = layer.weight_hh_l0
    if by_operators(table, weight, compiled):
        return LSTMByOperators.apply(table, clock, tokens, sizes, weight)
    return LSTM.apply(table, clock, tokens, sizes, compiled, weight)


def swept(sweep, layer, table, clock, tokens, steps, compiled):
    """Rows of one length; tokens (T or fewer, B) -> (M, B, H)."""
    time, rows = len(clock), tokens.shape[1]
    h = sweep(layer, table, clock, tokens.flatten(), [rows] * time, compiled)
    return common.select(h.view(time, rows, -1), steps)


def powers(decay, turn, steps):
    """Real and imaginary parts of exp((decay + i turn) steps)."""
    size, angle = (decay[..., None] * steps).exp(), turn[..., None] * steps
    return size * angle.cos(), size * angle.sin()


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
    (x, y), columns = powers(decay, turn, stride * i), powers(decay, turn, j)
    rows = w_real[..., None] * x - w_imag[..., None] * y, -w_real[..., None] * y - w_imag[..., None] * x
    return torch.cat(rows, 1), torch.cat(columns, 1)


def kernel(layer, compiled, time):
    """(H, time), as layer.kernel(time)."""
    tables = pointwise(kernel_tables, compiled)
    rows, columns = tables(layer.log_dt, layer.C, layer.log_A_real, layer.A_imag, time)
    if rows.is_cuda:  # where products may be in tf32 or bf16: too coarse for what is summed here
        rows, columns = rows.double(), columns.double()
    return 2 * (rows.mT @ columns).flatten(1)[:, :time].to(layer.D.dtype)


def convolved(layer, table, clock, tokens, steps, compiled):
    """S4D; what is read after the tokens is the same in all rows."""
    own = F.embedding(tokens, table) + clock[: len(tokens), None]  # (R, B, H)
    own, shared = own.permute(2, 0, 1), clock[len(tokens) :].T  # (H, R, B), (H, T - R)
    start, outputs, response = layer.answered(steps, len(clock), functools.partial(kernel, layer, compiled))
    stop = start + outputs
    read = min(stop, own.shape[1])
    both = stop - read
    toeplitz = response.unfold(1, read, 1)[:, :outputs].contiguous()  # (H, M, R)
    y = toeplitz @ own[:, :read].contiguous()
    direct = own[:, start:stop]
    if both:
        toeplitz = response[:, read:].unfold(1, both, 1).contiguous()
        y = y + toeplitz @ shared[:, :both, None]
        repeated = shared[:, max(0, start - read) : both, None].expand(-1, -1, own.shape[2])
        direct = torch.cat([direct, repeated], 1)
    return layer.emit(y.flip(1) + layer.D[:, None, None] * direct, steps)


SWEEPS = {common.GRU: gru_sweep, common.LSTM: lstm_sweep}
INPUTS = {
    common.GRU: gru_input,
    common.LSTM: lstm_input,
    common.S4D: lambda layer: (layer.project.weight, layer.project.bias),
    common.Mamba: lambda layer: (layer.project.weight, layer.D.new_zeros(2 * len(layer.D))),
}
FACTORED = {layer: functools.partial(swept, sweep) for layer, sweep in SWEEPS.items()}
FACTORED[common.S4D] = convolved
FACTORED[common.Mamba] = scan.mamba
JOINS = common.Encoding.join, common.Vanilla.join, common.Duplicate.join


def knows(layer, encoding):
    """Whether models of these classes can be computed here.

    A layer's input must be a sum over token and step, which an encoding with a `join` of its own may not be.
    """
    return layer in FACTORED and encoding.join in JOINS


# ------------------------------------------------------------------------------------------------------------
# The models
# ------------------------------------------------------------------------------------------------------------


def occurring(model, tokens):
    """Embeddings of the integers that occur and, last, the command's; tokens as their places there."""
    if tokens.device.type != "cpu":  # a GPU would be waited for: of all integers
        return model.embedding.weight, tokens
    used, places = tokens.unique(return_inverse=True)
    return model.embedding(F.pad(used, (0, 1), value=model.embedding.num_embeddings - 1)), places


def input_products(model, embedded, time):
    """The input weights' products with embeddings (R, E) and with the steps -> (R, G), (time, G)."""
    (weight, bias), vectors = INPUTS[type(model.layer)](model.layer), model.encoding.vectors(time)
    E = embedded.shape[1]
    if vectors is None:  # every column meets the embedding, once or, of dup, twice
        return F.linear(embedded, weight.unflatten(1, (-1, E)).sum(1)), bias.expand(time, -1)
    return F.linear(embedded, weight[:, :E]), F.linear(vectors.to(bias.dtype), weight[:, -E:], bias)


def features(model, inputs, steps, commands=0, compiled=False):
    """(B, T) integers -> (M, B, H), what is read out; all rows end with so many `commands`."""
    time = inputs.shape[1]
    embedded, tokens = occurring(model, inputs[:, : time - commands].T)
    table, clock = input_products(model, embedded, time)
    if commands:
        clock = torch.cat([clock[:-commands], clock[-commands:] + table[-1]])
    return FACTORED[type(model.layer)](model.layer, table, clock, tokens, steps, compiled)


def logits(model, inputs, steps, compiled=False):
    """(B, T) integers -> (M, B, K) at the answered steps."""
    return model.readout(features(model, inputs, steps, compiled=compiled))


def loss_and_accuracy(model, episode, compiled=False):
    """Mean cross-entropy and share of right answers over an episode's answers."""
    found = features(model, episode.inputs, episode.steps, episode.commands, compiled).flatten(0, 1)
    return cross_entropy(found, model.readout, episode.targets.T.flatten(), episode.share(), compiled)


# ------------------------------------------------------------------------------------------------------------
# Cross-entropy of a linear readout, in chunks of rows: the N x K logits never exist together
# ------------------------------------------------------------------------------------------------------------

CHUNK, CUDA_CHUNK = 2**25, 2**23  # logits that exist at a time; on CUDA they stay in the card's cache


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
    logits.mul_(share / total).scatter_add_(1, target, -share)
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
    """Mean cross-entropy of features (N, H) read out against targets (N,), and the share of right answers.

    `share` (N,) weighs the rows and sums to one (None: all alike).
    """
    weight, bias = readout.weight, readout.bias
    if share is None:
        share = weight.new_full((1,), 1 / len(features)).expand(len(features))
    gradients = torch.is_grad_enabled()  # inside the function it never is
    return CrossEntropy.apply(features, weight, bias, targets, share, compiled, gradients)
