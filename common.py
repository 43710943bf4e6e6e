"""The science: integers and held-out sets, encodings, models, schedule, metrics. No files, flags or printing.

Letters: B batch, T time steps, L input length, K vocabulary, M answered steps, E embedding (and encoding)
size, H hidden size, N state order of S4D. Inside a model time comes first, (T, B, ...), as in torch.nn.GRU.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recurrence import gru, lstm, pointwise


class Refused(ValueError):
    """The user's mistake, said in one line."""


# ------------------------------------------------------------------------------------------------------------
# Drawing integers: pure functions of (seed, stream, iteration), alike on every device; no generator to save
# ------------------------------------------------------------------------------------------------------------

TRAINING, HELD_OUT, ANALYSIS = 1, 2, 3  # streams: what is drawn in one never depends on another
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as the int64 of the same bits


def mix(x):
    """Scramble int64 counters into random bits, as splitmix64 ends: products wrap, masks make >> logical."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & (1 << 33) - 1)


def key(*counters, device="cpu"):
    """One random int64 for a tuple of counters; each is a Python integer or a 0-dimensional tensor."""
    k = torch.zeros((), dtype=torch.int64, device=device)
    for counter in counters:
        k = mix(k + GOLDEN + counter)
    return k


def random_bits(k, shape):
    """64 random bits for every element of `shape`: splitmix64 started at the key."""
    n = torch.arange(1, 1 + math.prod(shape), dtype=torch.int64, device=k.device)
    return mix(k + n * GOLDEN).view(shape)


def scale_bits(bits, vocab):
    """The low 32 random bits as an integer in 0..vocab-1 (bias below vocab / 2^32)."""
    return (bits & 0xFFFFFFFF) * vocab >> 32


def uniform_integers(k, shape, vocab):
    return scale_bits(random_bits(k, shape), vocab)


def hash_rows(rows):
    """(..., W) integers -> (...) 64-bit hashes; the sum over positions of a scrambled (position, integer)."""
    position = mix(torch.arange(1, 1 + rows.shape[-1], dtype=torch.int64, device=rows.device) * GOLDEN)
    return mix(rows + position).sum(-1)


def distinct_rows(draw, count, *counters, device="cpu"):
    """The first `count` different rows of a stream; `draw(key, shape)` returns (*shape, W) integers."""
    rows, attempt = None, 0
    while rows is None or len(rows) < count:
        more = draw(key(*counters, attempt, device=device), (count,))
        rows = more if rows is None else torch.cat([rows, more])
        _, first = np.unique(hash_rows(rows).cpu().numpy(), return_index=True)
        rows = rows[torch.from_numpy(np.sort(first)).to(device)]
        attempt += 1
    return rows[:count]


class HeldOut:
    """Sequences that training must never show, and the training draws that avoid them.

    `rows` (N, W) are held out, `mass` is their share of the distribution that `draw(key, shape)` samples. A
    training row that is held out is redrawn: all rounds of candidates are drawn together and the first
    allowed one is taken, so that no step waits for the device. There are enough rounds that less than one
    row in 1e18 needs the last resort, one fixed allowed row.
    """

    def __init__(self, draw, rows, mass, seed):
        if mass > 0.5:
            raise Refused(
                f"{len(rows)} held-out sequences are {mass:.0%} of the training data; half is the limit"
            )
        self.draw, self.rows, self.seed = draw, rows, seed
        self.hashes = hash_rows(rows).sort().values
        self.rounds = 1 if mass == 0 else max(1, math.ceil(18 / -math.log10(mass)))
        k = key(seed, TRAINING, 0, device=rows.device)  # training starts at iteration 1
        candidates = draw(k, (1024,))
        while self.contains(candidates).all():
            candidates = draw(hash_rows(candidates)[0], (1024,))
        self.allowed_row = candidates[~self.contains(candidates)][0]

    def contains(self, rows):
        hashes = hash_rows(rows)
        nearest = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        return self.hashes[nearest] == hashes

    def training_rows(self, i, batch):
        """(batch, W) allowed rows of iteration `i` (an integer or a 0-dimensional tensor on the device)."""
        k = key(self.seed, TRAINING, i, device=self.rows.device)
        candidates = self.draw(k, (self.rounds, batch))  # (R, B, W)
        candidates = torch.cat([candidates, self.allowed_row.expand(1, batch, -1)])
        first = self.contains(candidates).logical_not().byte().argmax(0)  # (B,) the first allowed round
        return candidates.gather(0, first[None, :, None].expand(1, -1, candidates.shape[-1]))[0]


class Episode(NamedTuple):
    """What a model reads and what it has to answer."""

    inputs: torch.Tensor  # (B, T) integers; K is the command
    targets: torch.Tensor  # (B, M)
    steps: slice | torch.Tensor  # the answered steps: a slice of 0..T-1 shared by all rows, or (B, M)
    weight: torch.Tensor | None = None  # (B, M) 1 where there is an answer, 0 where a short row has none
    commands: int = 0  # so many last steps read the command in every row

    def rows(self, part):
        """The episode of some of its rows."""
        return Episode(*(x[part] if isinstance(x, torch.Tensor) else x for x in self))

    def share(self):
        """(M B,) what every answer counts for in a mean, step by step; None where all count alike."""
        if self.weight is None:
            return None
        weight = self.weight.T.flatten().double()
        return weight / weight.sum()


# ------------------------------------------------------------------------------------------------------------
# Encodings of the time step (section 3.2, Appendices C and D)
# ------------------------------------------------------------------------------------------------------------


def sinusoid(positions, size):
    """(positions, size): sin and cos of t / 10000^(2i/size), interleaved, divided to unit norm (Eqs. 1-2)."""
    t = torch.arange(positions, dtype=torch.float64)[:, None]
    frequency = 10000 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    waves = torch.stack([(t * frequency).sin(), (t * frequency).cos()], dim=-1)  # (positions, size/2, 2)
    return waves.flatten(1) / math.sqrt(size / 2)


class Encoding(nn.Module):
    """The vector of every time step: none, sin, random (fixed), learned, or dup (the embedding again).

    random and learned are tables with a last position; sin has none. At the steps in the slice
    `unencoded` the vector is zero.
    """

    def __init__(self, name, positions, size, unencoded=None):
        super().__init__()
        self.name, self.size, self.unencoded = name, size, unencoded
        if name == "sin":
            if size % 2:
                raise Refused(f"a sinusoidal encoding needs an even embedding size, not {size}")
            self.register_buffer("table", sinusoid(positions, size), persistent=False)  # in double precision
        elif name == "random":
            self.register_buffer("table", F.normalize(torch.randn(positions, size), dim=1))
        elif name == "learned":
            self.table = nn.Parameter(torch.randn(positions, size))

    def forward(self, time):
        """(time, E) vectors of the steps 0..time-1, or None for none and dup."""
        if self.name in ("none", "dup"):
            return None
        if time <= len(self.table):
            vectors = self.table[:time]
        elif self.name == "sin":
            vectors = sinusoid(time, self.size).to(self.table.device)
        else:
            raise Refused(f"the {self.name} encoding has {len(self.table)} positions, the input {time} steps")
        if self.unencoded is not None:
            vectors = vectors.clone()
            vectors[self.unencoded] = 0
        return vectors


class AddedEncoding(nn.Module):
    """Token vectors X (B, T, D) with their positions, as a Transformer's first layer reads them (section 9).

    learned: X + P; sin: X + waves of amplitude one; layernorm-learned: LayerNorm(X) + P (Eq. 9); none and
    rotary: X. P is a table with a last position.
    """

    def __init__(self, name, positions, size):
        super().__init__()
        self.norm = nn.LayerNorm(size) if name == "layernorm-learned" else nn.Identity()
        table = name.removeprefix("layernorm-") if name != "rotary" else "none"
        self.encoding = Encoding(table, positions, size)
        self.amplitude = math.sqrt(size / 2) if name == "sin" else 1  # undoes the unit norm of section 3.2

    def forward(self, x):
        vectors = self.encoding(x.shape[1])
        return self.norm(x) if vectors is None else self.norm(x) + (self.amplitude * vectors).to(x.dtype)


class Rotary(nn.Module):
    """Turns the pairs (2i, 2i+1) of queries or keys (..., T, d) by angles t / 10000^(2i/d) (Su et al., 2021).

    The product of a query and a key then depends on their distance alone. No position is the last.
    """

    def __init__(self, positions, size):
        super().__init__()
        self.encoding = Encoding("sin", positions, size)  # sin and cos of these very angles
        self.amplitude = math.sqrt(size / 2)

    def forward(self, x):
        waves = (self.amplitude * self.encoding(x.shape[-2])).to(x.dtype)
        sin, cos, a, b = waves[:, 0::2], waves[:, 1::2], x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


# ------------------------------------------------------------------------------------------------------------
# Models (section 3.2): embedding -> concatenated with the encoding -> one layer -> linear readout
# ------------------------------------------------------------------------------------------------------------


class GRU(nn.GRU):
    def forward(self, x, steps):
        return select(super().forward(x)[0], steps)

    def input_map(self):
        """The input's weight (G, E or 2E) and the bias (G,) of the same sum."""
        H = self.hidden_size
        return self.weight_ih_l0, self.bias_ih_l0 + F.pad(self.bias_hh_l0[:-H], (0, H))

    def sweep(self, table, clock, tokens, sizes, compiled):
        bias = self.bias_hh_l0[-self.hidden_size :]
        return gru(table, clock, tokens, sizes, compiled, self.weight_hh_l0, bias)

    def factored(self, table, clock, tokens, steps, compiled):
        return swept(self, table, clock, tokens, steps, compiled)


class LSTM(nn.LSTM):
    def forward(self, x, steps):
        return select(super().forward(x)[0], steps)

    def input_map(self):
        return self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0

    def sweep(self, table, clock, tokens, sizes, compiled):
        return lstm(table, clock, tokens, sizes, compiled, self.weight_hh_l0)

    def factored(self, table, clock, tokens, steps, compiled):
        return swept(self, table, clock, tokens, steps, compiled)


class S4D(nn.Module):
    """A linear map of the input, a diagonal state-space layer (Gu et al., 2022), GELU, a gated linear map."""

    def __init__(self, inputs, hidden, order=64):
        super().__init__()
        shape = (hidden, order // 2)  # conjugate pairs: half of them is enough
        self.project = nn.Linear(inputs, hidden)
        self.log_dt = nn.Parameter(torch.empty(hidden).uniform_(math.log(1e-3), math.log(1e-1)))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(shape, dtype=torch.cfloat)).clone())
        self.log_A_real = nn.Parameter(torch.full(shape, math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(order // 2).float().repeat(hidden, 1))
        self.D = nn.Parameter(torch.randn(hidden))
        self.mix = nn.Linear(hidden, 2 * hidden)

    def discretised(self):
        """dt A and the zero-order-hold weights C (exp(dt A) - 1) / A, both (H, N/2) and complex."""
        A = torch.complex(-self.log_A_real.exp(), self.A_imag)
        dtA = A * self.log_dt.exp()[:, None]
        return dtA, torch.view_as_complex(self.C) * (dtA.exp() - 1) / A

    def kernel(self, time):
        """(H, time): the layer's response to an impulse, 2 Re sum_n w_n exp(l dt A_n), with l = S i + j."""
        dtA, weights = self.discretised()
        stride = math.isqrt(time - 1) + 1
        i, j = (torch.arange(n, device=dtA.device) for n in (-(-time // stride), stride))
        rows = weights[..., None] * (dtA[..., None] * (stride * i)).exp()  # (H, N/2, time/S)
        columns = (dtA[..., None] * j).exp()  # (H, N/2, S)
        products = torch.cat([rows.real, -rows.imag], 1).mT @ torch.cat([columns.real, columns.imag], 1)
        return 2 * products.flatten(1)[:, :time]

    def respond(self, own, shared, steps):
        """What inputs (H, R, B) and, later, (H, T - R) that all rows share are answered with -> (M, B, H)."""
        time, rows = own.shape[1] + shared.shape[1], own.shape[2]
        start, stop, _ = steps.indices(time) if isinstance(steps, slice) else (0, time, 1)
        outputs, read = stop - start, min(stop, own.shape[1])
        both = stop - read
        kernel = F.pad(self.kernel(stop).flip(1), (0, outputs - 1))  # k[stop-1] .. k[0] 0 .. 0
        toeplitz = kernel.unfold(1, read, 1)[:, :outputs].contiguous()  # (H, M, R), last output first
        y = toeplitz @ own[:, :read].contiguous()
        direct = own[:, start:stop]
        if both:
            toeplitz = kernel[:, read:].unfold(1, both, 1).contiguous()
            y = y + toeplitz @ shared[:, :both, None]
            repeated = shared[:, max(0, start - read) : both, None].expand(-1, -1, rows)
            direct = torch.cat([direct, repeated], 1)
        y = y.flip(1) + self.D[:, None, None] * direct  # (H, M, B)
        h = F.glu(self.mix(F.gelu(y.permute(1, 2, 0))))  # (M, B, H)
        return h if isinstance(steps, slice) else select(h, steps)

    def forward(self, x, steps):
        u = self.project(x).permute(2, 0, 1)  # (H, T, B)
        return self.respond(u, u[:, :0, 0], steps)

    def input_map(self):
        return self.project.weight, self.project.bias

    def factored(self, table, clock, tokens, steps, compiled):
        own = F.embedding(tokens, table) + clock[: len(tokens), None]  # (R, B, H)
        return self.respond(own.permute(2, 0, 1), clock[len(tokens) :].T, steps)


def swept(layer, table, clock, tokens, steps, compiled):
    """`layer.sweep` over rows of one length; tokens (T or fewer, B) -> (M, B, H)."""
    time, rows = len(clock), tokens.shape[1]
    h = layer.sweep(table, clock, tokens.flatten(), [rows] * time, compiled)
    return select(h.view(time, rows, -1), steps)


def select(h, steps):
    """(T, B, H) -> the answered steps, (M, B, H)."""
    return h[steps] if isinstance(steps, slice) else h[steps.T, torch.arange(len(steps), device=h.device)]


LAYERS = {"gru": GRU, "lstm": LSTM, "s4d": S4D}
ENCODINGS = ("none", "sin", "random", "learned", "dup")


class Model(nn.Module):
    """The whole network; `positions` is the length of the tables of random and learned encodings.

    At the steps in the slice `unencoded` the encoding is zero.
    """

    def __init__(
        self, layer, encoding, vocab, embed=512, hidden=512, positions=128, combine="concat", unencoded=None
    ):
        super().__init__()
        if combine == "add" and encoding in ("none", "dup"):
            raise Refused(f"combining by addition needs an encoding: {encoding} has none to add")
        self.combine = combine
        self.fast = self.compiled = False  # what recurrence.py computes, and whether with compiled steps
        self.embedding = nn.Embedding(vocab + 1, embed)  # the last row is the command
        self.encoding = Encoding(encoding, positions, embed, unencoded)
        self.layer = LAYERS[layer](embed if encoding == "none" or combine == "add" else 2 * embed, hidden)
        self.readout = nn.Linear(hidden, vocab)

    def represent(self, inputs):
        """(B, T) integers -> (T, B, E or 2E), what the layer reads."""
        tokens = self.embedding(inputs.T)
        if self.encoding.name == "dup":
            return torch.cat([tokens, tokens], dim=-1)
        times = self.encoding(inputs.shape[1])
        if times is None:
            return tokens
        times = times[:, None].to(tokens.dtype)
        if self.combine == "add":
            return tokens + times
        return torch.cat([tokens, times.expand_as(tokens)], dim=-1)

    def forward(self, inputs, steps):
        """(B, T) integers -> (M, B, K) logits at the answered steps alone."""
        return self.readout(self.features(inputs, steps))

    def occurring(self, tokens):
        """Embeddings of the integers that occur and, last, the command's; tokens as their places there."""
        if tokens.device.type != "cpu":  # a GPU would be waited for: of all integers
            return self.embedding.weight, tokens
        used, places = tokens.unique(return_inverse=True)
        return self.embedding(F.pad(used, (0, 1), value=self.embedding.num_embeddings - 1)), places

    def input_products(self, embedded, time):
        """The input weights' products with embeddings (R, E) and with the steps -> (R, G), (time, G)."""
        (weight, bias), vectors, E = self.layer.input_map(), self.encoding(time), embedded.shape[1]
        if self.encoding.name == "dup":
            weight = weight[:, :E] + weight[:, E:]
        if vectors is None:
            return F.linear(embedded, weight), bias.expand(time, -1)
        return F.linear(embedded, weight[:, :E]), F.linear(vectors.to(bias.dtype), weight[:, -E:], bias)

    def features(self, inputs, steps, commands=0):
        """(B, T) integers -> (M, B, H), what is read out; all rows end with so many `commands`."""
        if not self.fast or not hasattr(self.layer, "factored"):
            return self.layer(self.represent(inputs), steps)
        time = inputs.shape[1]
        embedded, tokens = self.occurring(inputs[:, : time - commands].T)
        table, clock = self.input_products(embedded, time)
        if commands:
            clock = torch.cat([clock[:-commands], clock[-commands:] + table[-1]])
        return self.layer.factored(table, clock, tokens, steps, self.compiled)

    def loss_and_accuracy(self, episode):
        if not self.fast:
            return loss_and_accuracy(self(episode.inputs, episode.steps), episode)
        features = self.features(episode.inputs, episode.steps, episode.commands).flatten(0, 1)
        targets = episode.targets.T.flatten()
        weight, bias = self.readout.weight, self.readout.bias
        return cross_entropy(features, weight, bias, targets, episode.share(), self.compiled)


def loss_and_accuracy(logits, episode):
    """Mean cross-entropy and share of right answers over an episode's answers; logits (M, B, K)."""
    targets = episode.targets.T.flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    right = (logits.detach().argmax(-1).flatten() == targets).to(losses.dtype)
    share = episode.share()
    if share is None:
        return losses.mean(), right.mean()
    share = share.to(losses.dtype)
    return losses @ share, right @ share


def score(logits, target, share):
    """Loss and share of right answers of (n, K) logits, which become its gradient; target, share (n, 1)."""
    top = logits.amax(1, keepdim=True)
    total, own = (logits - top).exp().sum(1, keepdim=True), logits.gather(1, target)
    columns = torch.arange(logits.shape[1], device=logits.device)
    answer = torch.where(logits == top, columns, len(columns)).amin(1, keepdim=True)  # the first, as argmax
    loss, right = ((top - own + total.log()) * share).sum(), ((answer == target) * share).sum()
    logits.copy_(((logits - top).exp() / total - (columns == target).to(logits.dtype)) * share)
    return loss, right


class CrossEntropy(torch.autograd.Function):
    """`cross_entropy` below; the gradients are computed with the loss, while a chunk's logits exist."""

    @staticmethod
    def forward(ctx, features, weight, bias, targets, share, compiled, gradients):
        rows, low, step = max(1, CHUNK // len(weight)), weight.to(features.dtype), pointwise(score, compiled)
        loss, right = weight.new_zeros(()), weight.new_zeros(())
        d_features, d_weight, d_bias = (torch.zeros_like(x) for x in (features, weight, bias))
        for part in (slice(n, n + rows) for n in range(0, len(features), rows)):
            logits = torch.addmm(bias.to(low.dtype), features[part], low.T).to(weight.dtype)  # (n, K)
            part_loss, part_right = step(logits, targets[part, None], share[part, None].to(weight.dtype))
            loss += part_loss
            right += part_right
            if gradients:
                d = logits.to(low.dtype)
                torch.mm(d, low, out=d_features[part])
                d_weight += d.T @ features[part]
                d_bias += d.sum(0)
        ctx.save_for_backward(d_features, d_weight, d_bias)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        return *(d * d_loss.to(d.dtype) for d in ctx.saved_tensors), None, None, None, None


CHUNK = 2**25  # logits that exist at a time


def cross_entropy(features, weight, bias, targets, share=None, compiled=False):
    """Mean cross-entropy of a linear readout, and the share of right answers, in chunks of rows.

    features (N, H), weight (K, H), bias (K,), targets (N,); `share` (N,) weighs the rows and sums to one
    (None: all alike). The N x K logits never exist together.
    """
    if share is None:
        share = weight.new_full((1,), 1 / len(features)).expand(len(features))
    gradients = torch.is_grad_enabled()  # inside the function it never is
    return CrossEntropy.apply(features, weight, bias, targets, share, compiled, gradients)


@torch.no_grad()
def answers(model, episode, batch):
    """Predictions (N, M) and cross-entropies (N, M) of an episode of many rows, `batch` rows at a time."""
    predictions, losses = [], []
    for start in range(0, len(episode.inputs), batch):
        part = episode.rows(slice(start, start + batch))
        logits = model(part.inputs, part.steps)  # (M, b, K)
        predictions.append(logits.argmax(-1).T)
        loss = F.cross_entropy(logits.flatten(0, 1), part.targets.T.flatten(), reduction="none")
        losses.append(loss.view(logits.shape[:2]).T)
    return torch.cat(predictions), torch.cat(losses)


class Data:
    """A trial's data: a task sets `held_out` and `batch`, and its `episode(rows)` says what to answer."""

    def training_episode(self, i):
        return self.episode(self.held_out.training_rows(i, self.batch))

    def evaluate(self, model):
        """The metrics of the held-out test."""
        episode = self.episode(self.held_out.rows)
        return sequence_metrics(episode, *answers(model, episode, self.batch))


def learning_rate(i, peak, warmup, iterations):
    """The rate of iteration i = 1..N: linear warm-up, then half a cosine that ends at 0."""
    if i <= warmup:
        return peak * i / warmup
    return peak / 2 * (1 + math.cos(math.pi * (i - warmup) / (iterations - warmup)))


# ------------------------------------------------------------------------------------------------------------
# Metrics (section 5 of the specification)
# ------------------------------------------------------------------------------------------------------------


def sequence_metrics(episode, predictions, losses):
    """Accuracy of tokens and of whole sequences, cross-entropy, mean edit distance; padding never counts."""
    targets, predictions, losses = (x.cpu().numpy() for x in (episode.targets, predictions, losses))
    answered = (
        np.ones(targets.shape, bool) if episode.weight is None else episode.weight.cpu().numpy().astype(bool)
    )
    right, lengths = predictions == targets, answered.sum(1)
    distance = 0
    for n in np.unique(lengths):
        rows = lengths == n
        distance += damerau_levenshtein(predictions[rows, :n], targets[rows, :n]).sum()
    return {
        "token_accuracy": float(right[answered].mean()),
        "sequence_accuracy": float((right | ~answered).all(1).mean()),
        "cross_entropy": float(losses[answered].mean(dtype=np.float64)),
        "damerau_levenshtein": float(distance / len(targets)),
    }


def perplexity(loss):
    """exp of a mean cross-entropy; infinite where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def running(extreme, x):
    """np.minimum or np.maximum accumulated along the first axis of x, in place, by doubling strides."""
    stride = 1
    while stride < len(x):
        extreme(x[stride:], x[:-stride], out=x[stride:])
        stride *= 2
    return x


def damerau_levenshtein(a, b):
    """Unrestricted Damerau-Levenshtein distances of N pairs: a (N, La), b (N, Lb) -> (N,).

    The algorithm of Lowrance and Wagner, a row of the table at a time for all pairs together: a transposition
    joins the last row k < i with a_k = b_j and the last column l < j with b_l = a_i; insertions along a row
    are a running minimum.
    """
    a, b = np.ascontiguousarray(np.transpose(a)), np.ascontiguousarray(np.transpose(b))  # (La, N), (Lb, N)
    (rows, pairs), columns = a.shape, np.arange(len(b) + 1, dtype=np.int32)[:, None]
    table = np.empty((rows + 1, *columns.shape[:1], pairs), dtype=np.int32)
    table[0] = columns
    width, pair = columns.size * pairs, np.arange(pairs, dtype=np.int32)
    last_row = np.zeros(b.shape, dtype=np.int32)  # 0: no such row yet
    last_column = np.zeros(b.shape, dtype=np.int32)
    for i in range(1, rows + 1):
        match = a[i - 1] == b  # (Lb, N)
        last_column[1:] = running(np.maximum, match[:-1] * columns[1:-1])
        before = table.reshape(-1).take(
            (last_row - 1) * width + (last_column - 1) * pairs + pair, mode="clip"
        )
        transposed = before + (i - last_row) + (columns[1:] - last_column) - 1
        transposed[(last_row == 0) | (last_column == 0)] = rows + len(b)
        changed = np.minimum(table[i - 1, :-1] + ~match, table[i - 1, 1:] + 1)
        table[i, 0] = i
        table[i, 1:] = np.minimum(changed, transposed)
        table[i] = running(np.minimum, table[i] - columns) + columns
        last_row[match] = i
    return table[-1, -1]


def bootstrap_resamples(values, seed=0, resamples=10_000):
    """Means of `resamples` draws with replacement from the values."""
    values = np.asarray(values, dtype=np.float64)
    return np.random.default_rng(seed).choice(values, (resamples, len(values))).mean(axis=1)


def bootstrap_interval(values):
    """95% percentile interval of the mean; None with fewer than two values."""
    return (
        tuple(np.percentile(bootstrap_resamples(values), [2.5, 97.5]).tolist()) if len(values) > 1 else None
    )
