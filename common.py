"""The paper: model, loss, training step, schedule; then encodings, layers, data, metrics.

suite/fast.py computes the same numbers faster. Letters: B batch, T time steps, L input
length, M answered steps, K vocabulary, E size of embedding and encoding, H hidden size,
N states of S4D; also N rows of a set, W integers of a row, R max_redraws of candidates. Batches
are (B, T); inside a model time comes first, (T, B, ...), as in torch.nn.GRU.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class UsageError(ValueError):
    """The user's mistake, said in one line."""


# -- The model (section 3.2), its loss, its training step and the schedule
class Model(nn.Module):
    """Embedding -> joined with the encoding -> one layer -> linear readout."""

    def __init__(
        self,
        layer,  # a value of LAYERS: layer(inputs, hidden)
        encoding,  # a name in ENCODINGS
        vocab,
        embed=512,
        hidden=512,
        positions=128,  # steps that the encoding's table covers
        **encoding_options,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab + 1, embed)  # the last row is the command
        self.encoding = ENCODINGS[encoding](positions, embed, **encoding_options)
        self.layer = layer(self.encoding.inputs, hidden)
        self.readout = nn.Linear(hidden, vocab)

    def features(self, batch):
        """(M, B, H): the layer's outputs at the answered steps."""
        tokens = self.embedding(batch.inputs.T)  # (T, B, E)
        x = self.encoding.join(tokens)  # (T, B, E or 2E)
        return self.layer(x, batch.steps)

    def forward(self, batch):
        """(M, B, K): the logits at the answered steps."""
        return self.readout(self.features(batch))


class Batch(NamedTuple):
    """What a model reads and what it has to answer."""

    inputs: torch.Tensor  # (B, T) integers; K is the command
    targets: torch.Tensor  # (B, M)
    steps: slice | torch.Tensor  # the answered ones: a slice for all rows, or (B, M)
    weight: torch.Tensor | None = None  # (B, M) 1 where there is an answer, 0: padding
    commands: int = 0  # so many last steps read the command in every row
    sizes: torch.Tensor | None = None  # of packed rows, see lm_wikitext.py

    def rows(self, part):
        """The batch of some of its rows."""
        return Batch(*(x[part] if isinstance(x, torch.Tensor) else x for x in self))

    def answers(self):
        """Targets (M B,) in the order of the features, and their weights in a mean."""
        targets = self.targets.T.flatten()
        if self.weight is None:
            return targets, torch.full_like(targets, 1 / len(targets), dtype=torch.double)
        weight = self.weight.T.flatten().double()
        return targets, weight / weight.sum().clamp(min=1)


def score(logits, target, weights):
    """-> the loss and the accuracy, weighted sums over rows; target and weights are (n, 1).

    The logits (n, K) are overwritten by the gradient of the loss, softmax - one-hot.
    """
    top, predicted = logits.max(1, keepdim=True)
    target_logit = logits.gather(1, target)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    loss = ((top - target_logit + total.log()) * weights).sum()
    accuracy = ((predicted == target) * weights).sum()
    logits.mul_(weights / total)
    logits.scatter_(1, target, logits.gather(1, target) - weights)
    return loss, accuracy


def chunk_rows(matrix):
    """How many rows of features are read out at a time: 2^25 logits, on CUDA 2^27."""
    return max(1, 2 ** (27 if matrix.is_cuda else 25) // len(matrix))


class CrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of a linear readout, and the accuracy.

    It works on chunks of rows, and computes gradients with the loss: all N x K logits never
    exist together.
    """

    @staticmethod
    def forward(ctx, features, matrix, bias, targets, weights, score):
        low, low_bias = matrix.to(features.dtype), bias.to(features.dtype)
        loss, accuracy = 0, 0
        gradients = [torch.zeros_like(x) for x in (features, matrix, bias)]
        d_features, d_matrix, d_bias = gradients
        rows = chunk_rows(matrix)
        ones = matrix.new_ones(min(rows, len(features)))
        for start in range(0, len(features), rows):
            part = slice(start, start + rows)
            logits = torch.addmm(low_bias, features[part], low.T).to(matrix.dtype)  # (n, K)
            part_weights = weights[part, None].to(matrix.dtype)
            part_loss, part_accuracy = score(logits, targets[part, None], part_weights)
            loss += part_loss
            accuracy += part_accuracy
            if not ctx.needs_input_grad[0]:  # an evaluation
                continue
            d = logits.to(low.dtype)
            torch.mm(d, low, out=d_features[part])
            if matrix.is_cuda and d.dtype == d_matrix.dtype:  # a CPU would round otherwise
                d_matrix.addmm_(d.T, features[part])
            else:
                d_matrix += d.T @ features[part]
            if matrix.is_cuda:
                d_bias.addmv_(logits.T, ones[: len(d)])
            else:
                d_bias += d.sum(0)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(accuracy)
        return loss, accuracy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        d_inputs = [d * d_loss.to(d.dtype) for d in ctx.saved_tensors]
        return *d_inputs, None, None, None


def loss_and_accuracy(features, readout, batch, score=score):
    """Mean cross-entropy and fraction correct; features are (M, B, H) or packed, (N, H)."""
    features, (targets, weights) = features.flatten(0, -2), batch.answers()
    parameters = readout.weight, readout.bias
    return CrossEntropy.apply(features, *parameters, targets, weights, score)


def train_step(model, features, batch, optimizer, clip, score=score):
    """A step of Adam -> loss and accuracy, without host-device synchronisation.

    features(model, batch) is what an engine computes; `score` may be compiled.
    """
    h = features(model, batch)
    loss, accuracy = loss_and_accuracy(h, model.readout, batch, score)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), accuracy


def learning_rate(i, peak, warmup, iterations):
    """The rate of iteration i, from 1 on: linear warm-up, then half a cosine down to 0."""
    if i <= warmup:
        return peak * i / warmup
    return peak / 2 * (1 + math.cos(math.pi * (i - warmup) / (iterations - warmup)))


# -- Encodings of the time step (section 3.2, Appendices C and D)
def sinusoid(positions, size):
    """(positions, size): sin, cos of t / 10000^(2i/size) in turn; unit norm (Eqs. 1-2)."""
    t = torch.arange(positions, dtype=torch.float64)[:, None]
    frequency = 10000 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = t * frequency
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1)  # (positions, size/2, 2)
    return waves.flatten(1) / math.sqrt(size / 2)


class Encoding(nn.Module):
    """A vector for every time step, concatenated with the token's embedding or added.

    Vectors have norm `amplitude`, by default the encoding's own; steps in `unencoded`
    get zeros. A subclass defines make(positions, size), the table of these vectors.
    """

    drawn = True  # at random, so the table is kept with the weights
    fast = True  # suite/fast.py reads `vectors` alone; False: `join` does something else

    def __init__(
        self, positions, size, combine="concat", unencoded=None, amplitude=None, bands=(0, 1)
    ):
        super().__init__()
        self.size, self.combine, self.unencoded, self.bands = size, combine, unencoded, bands
        self.inputs = size if combine == "add" else 2 * size  # of the layer
        norm = self.default_norm(size)
        self.scale = 1.0 if None in (amplitude, norm) else amplitude / norm
        table = self.make(positions, size)
        if isinstance(table, nn.Parameter):
            self.table = table
        else:
            self.register_buffer("table", table, persistent=self.drawn)

    @staticmethod
    def default_norm(size):
        """The norm of the table's vectors; None: there is no table."""
        return 1.0

    def make(self, positions, size):
        """(positions, size), or (1, size) of a vector for all steps."""
        raise NotImplementedError

    def vectors(self, time):
        """(time, E) of the steps 0..time-1; None: there is nothing but the tokens."""
        vectors = self.scale * self.table[:time].expand(time, -1)
        if self.unencoded is not None:
            vectors[self.unencoded] = 0
        return vectors

    def join(self, tokens):
        """(T, B, E) embeddings, each with the vector of its step -> (T, B, E or 2E)."""
        vectors = self.vectors(len(tokens))[:, None].to(tokens.dtype)  # (T, 1, E)
        if self.combine == "add":
            return tokens + vectors
        return torch.cat([tokens, vectors.expand_as(tokens)], dim=-1)


class Sinusoid(Encoding):
    """The paper's encoding: sine and cosine of the step at many frequencies (Eqs. 1-2).

    `bands` = (low, high) keeps that part of the frequencies, from 0, the fastest, to 1, the
    slowest. The others are zero; the vectors are scaled to norm 1.
    """

    drawn = False

    def make(self, positions, size):
        if size % 2:
            raise UsageError(f"--embed {size} is odd: a sinusoid is pairs of sine and cosine")
        n = size // 2
        low, high = self.bands
        # Frequencies `first` to `stop` - 1 are kept
        first, stop = (sum(i / n < end for i in range(n)) for end in self.bands)
        if first == stop:
            raise UsageError(f"--bands {low:g}:{high:g} keeps none of the {n} frequencies")
        table = sinusoid(positions, size)  # in double precision
        table[:, : 2 * first] = 0
        table[:, 2 * stop :] = 0
        return table * math.sqrt(n / (stop - first))


class Random(Encoding):
    """Fixed unit vectors, uniform on the sphere."""

    def make(self, positions, size):
        return F.normalize(torch.randn(positions, size), dim=1)


class Constant(Encoding):
    """The control: one fixed random unit vector at every step, so no position."""

    def make(self, positions, size):
        return F.normalize(torch.randn(1, size), dim=1)


class Learned(Encoding):
    """A learned vector per step, initialised as nn.Embedding; `amplitude`: its initial norm."""

    @staticmethod
    def default_norm(size):
        return math.sqrt(size)

    def make(self, positions, size):
        table = nn.Parameter(self.scale * torch.randn(positions, size))
        self.scale = 1.0  # what is learned is not scaled again
        return table


class Ramp(Encoding):
    """A fixed random unit vector times t / positions: no period. The last has norm 1."""

    def make(self, positions, size):
        time = torch.arange(1, positions + 1)[:, None] / positions
        return time * F.normalize(torch.randn(size), dim=0)


class Counter(Encoding):
    """The step in binary, as -1 and 1, lowest digit first, repeated to fill the row."""

    drawn = False

    def make(self, positions, size):
        digits = max(1, (positions - 1).bit_length())
        if size < digits:
            raise UsageError(f"--embed {size}: {positions} steps have {digits} binary digits")
        column = torch.arange(size) % digits
        digit = (torch.arange(positions)[:, None] >> column) & 1  # (positions, size)
        return (2 * digit - 1) / math.sqrt(size)


class Shuffled(Encoding):
    """The sinusoid's vectors in a fixed random order: neighbours are unlike."""

    def make(self, positions, size):
        return Sinusoid.make(self, positions, size)[torch.randperm(positions)]


class NoEncoding(Encoding):
    """No encoding: the layer reads the embedding alone."""

    copies = 1

    @staticmethod
    def default_norm(size):
        return None

    def make(self, positions, size):
        self.inputs = self.copies * size

    def vectors(self, time):
        return None

    def join(self, tokens):
        return torch.cat([tokens] * self.copies, dim=-1)


class DuplicatedEmbedding(NoEncoding):
    """The embedding twice: as many parameters as with PE, no position (Appendix C)."""

    copies = 2


ENCODINGS = {
    "none": NoEncoding,
    "sin": Sinusoid,
    "random": Random,
    "learned": Learned,
    "dup": DuplicatedEmbedding,
    # our controls
    "constant": Constant,
    "ramp": Ramp,
    "counter": Counter,
    "shuffled": Shuffled,
}


# -- Layers: layer(x, steps) maps (T, B, inputs) to outputs at the answered steps, (M, B, H)
def select(h, steps):
    """(T, B, H) -> the answered steps, (M, B, H)."""
    if isinstance(steps, slice):
        return h[steps]
    return h[steps.T, torch.arange(len(steps), device=h.device)]


def span(steps, time):
    """The first step that has to be computed to answer these, and one past the last."""
    return steps.indices(time)[:2] if isinstance(steps, slice) else (0, time)


class GRU(nn.GRU):
    def forward(self, x, steps):
        return select(super().forward(x)[0], steps)


class LSTM(nn.LSTM):
    def forward(self, x, steps):
        return select(super().forward(x)[0], steps)


class S4D(nn.Module):
    """A linear map of the input, a diagonal state-space layer (Gu et al., 2022), GELU, a
    gated linear map."""

    def __init__(self, inputs, hidden, order=64):
        super().__init__()
        pairs = order // 2  # of conjugate poles: half of them is enough
        self.project = nn.Linear(inputs, hidden)
        log_dt = torch.empty(hidden).uniform_(math.log(1e-3), math.log(1e-1))
        self.log_dt = nn.Parameter(log_dt)
        C = torch.randn(hidden, pairs, dtype=torch.cfloat)
        self.C = nn.Parameter(torch.view_as_real(C).clone())
        A_imag = math.pi * torch.arange(pairs).float()
        self.log_A_real = nn.Parameter(torch.full((hidden, pairs), math.log(0.5)))
        self.A_imag = nn.Parameter(A_imag.repeat(hidden, 1))
        self.D = nn.Parameter(torch.randn(hidden))
        self.mix = nn.Linear(hidden, 2 * hidden)

    def discretise(self):
        """dt A, and the zero-order-hold weights C (exp(dt A) - 1) / A; (H, N/2), complex."""
        A = torch.complex(-self.log_A_real.exp(), self.A_imag)
        dtA = A * self.log_dt.exp()[:, None]
        return dtA, torch.view_as_complex(self.C) * (dtA.exp() - 1) / A

    def kernel(self, time):
        """(H, time): the response to an impulse, 2 Re sum_n w_n exp(l dt A_n), l = 0, 1, ...

        It is a product of two tables: exp(l dt A) = exp(S i dt A) exp(j dt A) with
        l = S i + j, where S is the stride.
        """
        dtA, weights = self.discretise()
        stride = math.isqrt(time - 1) + 1
        i = torch.arange(-(-time // stride), device=dtA.device)
        j = torch.arange(stride, device=dtA.device)
        rows = weights[..., None] * (dtA[..., None] * (stride * i)).exp()  # (H, N/2, time/S)
        columns = (dtA[..., None] * j).exp()  # (H, N/2, S)
        rows = torch.cat([rows.real, -rows.imag], 1)
        columns = torch.cat([columns.real, columns.imag], 1)
        return self.kernel_of_tables(rows, columns, time)

    def kernel_of_tables(self, rows, columns, time):
        if rows.is_cuda:  # where products may be in tf32 or bf16: too coarse for this sum
            rows, columns = rows.double(), columns.double()
        return 2 * (rows.mT @ columns).flatten(1)[:, :time].to(self.D.dtype)

    def forward(self, x, steps):
        start, stop = span(steps, len(x))
        u = self.project(x).permute(2, 0, 1)  # (H, T, B)
        kernel = F.pad(self.kernel(stop).flip(1), (0, stop - start - 1))
        toeplitz = kernel.unfold(1, stop, 1).contiguous()  # (H, M, stop), last answer first
        y = (toeplitz @ u[:, :stop].contiguous()).flip(1)  # (H, M, B)
        return self.emit(y + self.D[:, None, None] * u[:, start:stop], steps)

    def emit(self, y, steps):
        """(H, M, B) convolved inputs -> (M, B, H)"""
        h = F.glu(self.mix(F.gelu(y.permute(1, 2, 0))))
        return h if isinstance(steps, slice) else select(h, steps)


# -- Data: integers are pure functions of (seed, stream, iteration), alike on every device
TRAINING, HELD_OUT, ANALYSIS = 1, 2, 3  # streams; the last: stability.py's pairs
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as an int64


def splitmix64_mix(x):
    """Turn int64 counters into random bits, as splitmix64 ends.

    Products wrap, and the masks make >> logical.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & (1 << 33) - 1)


def key(*counters, device="cpu"):
    """One random int64 of counters, each a Python integer or a 0-dimensional tensor."""
    k = torch.zeros((), dtype=torch.int64, device=device)
    for counter in counters:
        k = splitmix64_mix(k + GOLDEN + counter)
    return k


def random_bits(k, shape):
    """64 random bits for every element of `shape`: splitmix64 started at the key."""
    n = torch.arange(1, 1 + math.prod(shape), dtype=torch.int64, device=k.device)
    n = n + (k - k)  # or torch.compile takes n for an index; n * GOLDEN has to overflow
    return splitmix64_mix(k + n * GOLDEN).view(shape)


def scale_bits(bits, vocab):
    """The low 32 random bits as an integer in 0..vocab-1 (bias below vocab / 2^32)."""
    return (bits & 0xFFFFFFFF) * vocab >> 32


def uniform_integers(k, shape, vocab):
    return scale_bits(random_bits(k, shape), vocab)


def hash_rows(rows):
    """(..., W) integers -> (...) a 64-bit hash of each row: a sum over its positions."""
    position = torch.arange(1, 1 + rows.shape[-1], dtype=torch.int64, device=rows.device)
    return splitmix64_mix(rows * GOLDEN + position).sum(-1)


def distinct_rows(draw, count, *counters, device="cpu"):
    """The first `count` different rows of a stream; draw(key, shape): (*shape, W)."""
    rows = draw(key(*counters, 0, device=device), (0,))  # (0, W): none yet
    for attempt in range(1000):
        more = draw(key(*counters, attempt, device=device), (count,))
        rows = torch.cat([rows, more])
        _, first = np.unique(hash_rows(rows).cpu().numpy(), return_index=True)
        rows = rows[torch.from_numpy(np.sort(first)).to(device)]
        if len(rows) >= count:
            return rows[:count]
    found = f"only {len(rows)} sequences exist, --held-out is {count}"
    raise UsageError(f"{found}: raise --vocab or --length, or lower --held-out")


class HeldOut:
    """Rows (N, W) that training must never show; `probability`: of drawing one of them.

    A training row is drawn `max_redraws` times at once, without host-device synchronisation.
    The first candidate that is not held out is used or, one time in 1e18, a fixed fallback
    row.
    """

    def __init__(self, rows, probability):
        if probability > 0.5:
            part = f"--held-out {len(rows)} is {probability:.0%} of all sequences, above half"
            raise UsageError(f"{part}: raise --vocab or --length, or lower --held-out")
        self.rows, self.hashes = rows, hash_rows(rows).sort().values
        self.max_redraws = 1 if probability == 0 else math.ceil(18 / -math.log10(probability))

    def contains(self, rows):
        hashes = hash_rows(rows)
        nearest = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        return self.hashes[nearest] == hashes

    def first_allowed(self, candidates, fallback_row):
        """(R, B, W) candidates, a round each -> (B, W), of each row the first allowed."""
        candidates = torch.cat([candidates, fallback_row.expand_as(candidates[:1])])
        first = (~self.contains(candidates)).byte().argmax(0)  # (B,) an allowed round
        return candidates[first, torch.arange(len(first), device=first.device)]


# -- Metrics (section 4.1, Fig. 2)
@torch.no_grad()
def predict(features, readout, batch, batch_size):
    """Predictions and cross-entropies, (N, M) each, of `batch_size` rows at a time."""
    predictions, losses = [], []
    for start in range(0, len(batch.inputs), batch_size):
        part = batch.rows(slice(start, start + batch_size))
        logits = readout(features(part))  # (M, b, K)
        predictions.append(logits.argmax(-1).T)
        targets = part.targets.T  # (M, b)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view(targets.shape).T)
    return torch.cat(predictions), torch.cat(losses)


def sequence_metrics(batch, predictions, losses):
    """Accuracy of tokens and of whole sequences, cross-entropy, mean edit distance; all
    without padding, which comes last."""
    targets, predictions = batch.targets.cpu().numpy(), predictions.cpu().numpy()
    losses = losses.cpu().numpy()
    answered = np.ones(targets.shape, bool)
    if batch.weight is not None:
        answered = batch.weight.cpu().numpy() > 0
    predicted = np.where(answered, predictions, -1)
    target = np.where(answered, targets, -1)
    correct = predicted == target  # padding too
    return {
        "token_accuracy": float(correct[answered].mean()),
        "sequence_accuracy": float(correct.all(1).mean()),
        "cross_entropy": float(losses[answered].mean(dtype=np.float64)),
        "damerau_levenshtein": float(damerau_levenshtein(predicted, target).mean()),
    }


def perplexity(loss):
    """exp of a mean cross-entropy; infinite where that is too large for a float."""
    return math.inf if loss > 709 else math.exp(loss)


def damerau_levenshtein(a, b):
    """Unrestricted Damerau-Levenshtein distances of pairs: a (N, La), b (N, Lb) -> (N,).

    Lowrance and Wagner's algorithm, a row of the table at a time for all pairs. A
    transposition joins the last row k < i with a_k = b_j and the last column l < j with
    b_l = a_i. Insertions are a running minimum.
    """
    a, b = np.transpose(a), np.transpose(b)  # (La, N), (Lb, N)
    rows, pairs = a.shape
    columns = np.arange(len(b) + 1)[:, None]
    table = np.empty((rows + 1, len(columns), pairs), dtype=np.int32)
    table[0] = columns
    last_row = np.zeros(b.shape, dtype=int)  # 0: none so far
    last_column = np.zeros(b.shape, dtype=int)
    for i in range(1, rows + 1):
        match = a[i - 1] == b  # (Lb, N)
        last_column[1:] = np.maximum.accumulate(match[:-1] * columns[1:-1])
        before = table[last_row - 1, last_column - 1, np.arange(pairs)]
        transposed = before + (i - last_row) + (columns[1:] - last_column) - 1
        transposed[(last_row == 0) | (last_column == 0)] = rows + len(b)
        replaced = table[i - 1, :-1] + ~match
        deleted = table[i - 1, 1:] + 1
        table[i, 0] = i
        table[i, 1:] = np.minimum(np.minimum(replaced, deleted), transposed)
        table[i] = np.minimum.accumulate(table[i] - columns) + columns
        last_row[match] = i
    return table[-1, -1]


# -- Not the paper's: a recent layer, and the table of all
class MinGRU(nn.Linear):
    """h_t = (1 - z_t) h_t-1 + z_t h~_t; z and h~ see the input alone (Feng et al., 2024)."""

    def __init__(self, inputs, hidden):
        super().__init__(inputs, 2 * hidden)

    def forward(self, x, steps):
        gate, candidate = super().forward(x).chunk(2, -1)  # (T, B, H)
        keep, add = (-gate).sigmoid(), gate.sigmoid() * candidate
        h, states = torch.zeros_like(gate[0]), []
        for kept, added in zip(keep, add):
            h = kept * h + added
            states.append(h)
        return select(torch.stack(states), steps)


LAYERS = {
    "gru": GRU,
    "lstm": LSTM,
    "s4d": S4D,
    # not the paper's
    "mingru": MinGRU,
}
