"""The paper, plainly: integers and held-out sets, encodings, models, schedule, metrics; no files.

Letters: B batch, N rows of a whole set, W integers of a stored row, R rounds of candidates, T time steps, L
input length, M answered steps, K vocabulary, E embedding and encoding size, H hidden size; in S4D and Mamba N
is the number of states, and in Mamba's shapes D is its 2 H channels. Inside a model time comes first, (T, B,
...), as in torch.nn.GRU. suite/fast.py computes the same numbers faster.
"""

import bisect
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Refused(ValueError):
    """The user's mistake, said in one line."""


# ------------------------------------------------------------------------------------------------------------
# Drawing integers: pure functions of (seed, stream, iteration), alike on every device; no generator to save
# ------------------------------------------------------------------------------------------------------------

TRAINING, HELD_OUT, ANALYSIS = 1, 2, 3  # independent streams: batches, the held-out set, stability.py's pairs
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


def not_an_index(n, k):
    """n. To torch.compile an arange is an index, which never overflows as n * GOLDEN does: this hides it."""
    return n + (k - k)


def random_bits(k, shape):
    """64 random bits for every element of `shape`: splitmix64 started at the key."""
    n = torch.arange(1, 1 + math.prod(shape), dtype=torch.int64, device=k.device)
    return mix(k + not_an_index(n, k) * GOLDEN).view(shape)


def scale_bits(bits, vocab):
    """The low 32 random bits as an integer in 0..vocab-1 (bias below vocab / 2^32)."""
    return (bits & 0xFFFFFFFF) * vocab >> 32


def uniform_integers(k, shape, vocab):
    return scale_bits(random_bits(k, shape), vocab)


def hash_rows(rows):
    """(..., W) integers -> (...) a 64-bit hash of each row, the sum of scrambled (position, integer)."""
    position = torch.arange(1, 1 + rows.shape[-1], dtype=torch.int64, device=rows.device)
    return mix(rows * GOLDEN + position).sum(-1)


def distinct_rows(draw, count, *counters, device="cpu"):
    """The first `count` different rows of a stream; `draw(key, shape)` returns (*shape, W) integers."""
    rows, attempt, in_vain = None, 0, 0
    while rows is None or len(rows) < count:
        known = 0 if rows is None else len(rows)
        more = draw(key(*counters, attempt, device=device), (count,))
        rows = more if rows is None else torch.cat([rows, more])
        _, first = np.unique(hash_rows(rows).cpu().numpy(), return_index=True)
        rows = rows[torch.from_numpy(np.sort(first)).to(device)]
        attempt += 1
        in_vain = in_vain + 1 if len(rows) == known else 0
        if in_vain == 64:  # with one left among `count` equally likely rows, this has a chance of e^-64
            raise Refused(f"{count} held-out sequences are wanted, but only {known} different ones exist")
    return rows[:count]


def count_sequences(base, exponent):
    """base ** exponent, or infinity beyond a float."""
    return base**exponent if exponent * math.log2(base) < 1000 else math.inf


class HeldOut:
    """Sequences that training must never show.

    `rows` (N, W) are held out, `mass` is the chance that a training draw is one of them. Every training row
    is drawn `rounds` times, all at once so that the host never waits for the device, and the first candidate
    that is not held out is used. Where none is, for less than one row in 1e18, a fixed allowed row takes its
    place, the spare. With 1,024 of 8^4 = 4,096 rows held out the mass is .25, which takes 30 rounds.
    """

    def __init__(self, rows, mass):
        if mass > 0.5:
            raise Refused(
                f"{len(rows)} held-out sequences are {mass:.0%} of the training data; half is the limit"
            )
        self.rows = rows
        self.hashes = hash_rows(rows).sort().values
        self.rounds = 1 if mass == 0 else math.ceil(18 / -math.log10(mass))

    def contains(self, rows):
        hashes = hash_rows(rows)
        nearest = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        return self.hashes[nearest] == hashes

    def first_allowed(self, candidates, spare):
        """(R, B, W) candidates, of a round each -> (B, W), for each the first that is not held out."""
        candidates = torch.cat([candidates, spare.expand_as(candidates[:1])])
        first = self.contains(candidates).logical_not().byte().argmax(0)  # (B,) the first allowed round
        return candidates[first, torch.arange(len(first), device=first.device)]


class Episode(NamedTuple):
    """What a model reads and what it has to answer."""

    inputs: torch.Tensor  # (B, T) integers; K is the command
    targets: torch.Tensor  # (B, M)
    steps: slice | torch.Tensor  # the answered steps: a slice of 0..T-1 shared by all rows, or (B, M)
    weight: torch.Tensor | None = None  # (B, M) 1 where there is an answer, 0 where there is padding
    commands: int = 0  # so many last steps read the command in every row; suite/fast.py relies on it

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
    """A vector for every time step, concatenated with the token's embedding (the paper) or added to it.

    To add one, subclass it, register `table`, (positions, size), as a buffer or a parameter, and add a line
    to ENCODINGS. Row t is the vector of step t; a longer input is refused. `usual(size)` is the length of the
    table's vectors, which --amplitude rescales. At the steps in the slice `unencoded` the vector is zero.
    """

    accepts = ("combine", "encode", "amplitude")  # the flags about encodings that have an effect on this one

    @staticmethod
    def usual(size):
        """The length of its vectors without --amplitude."""
        return 1.0

    def __init__(self, positions, size, combine="concat", unencoded=None, amplitude=None, bands=(0, 1)):
        super().__init__()
        self.size, self.combine, self.unencoded, self.bands = size, combine, unencoded, bands
        self.scale = 1.0 if amplitude is None else amplitude / self.usual(size)
        self.inputs = size if combine == "add" else 2 * size  # what the layer reads at a step

    def unscaled(self, time):
        if time > len(self.table):
            name = type(self).__name__.lower()
            raise Refused(f"the {name} encoding has {len(self.table)} positions, the input {time} steps")
        return self.table[:time]

    def vectors(self, time):
        """(time, E) of the steps 0..time-1; None where there is nothing but the tokens."""
        vectors = self.scale * self.unscaled(time)
        if self.unencoded is not None:
            vectors[self.unencoded] = 0
        return vectors

    def join(self, tokens):
        """(T, B, E) embeddings -> (T, B, E or 2E), what the layer reads."""
        times = self.vectors(len(tokens))[:, None].to(tokens.dtype)
        if self.combine == "add":
            return tokens + times
        return torch.cat([tokens, times.expand_as(tokens)], dim=-1)


class Sinusoid(Encoding):
    """The paper's. `bands` = (low, high) keeps that part of the frequencies, from 0, the fastest, to 1, the
    slowest; the others are zero, and the rest is scaled up so that every vector still has length 1."""

    accepts = (*Encoding.accepts, "bands")

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        if size % 2:
            raise Refused(f"a sinusoid is pairs of sine and cosine: --embed must be even, not {size}")
        n = size // 2  # of these frequencies, the first that is kept and one past the last
        self.kept = [bisect.bisect_left(range(n), x, key=lambda i: i / n) for x in self.bands]
        if self.kept[0] == self.kept[1]:
            low, high = self.bands
            raise Refused(f"--bands {low:g}:{high:g} keeps none of the {n} frequencies")
        self.register_buffer("table", self.waves(positions), persistent=False)  # in double precision

    def waves(self, positions):
        table, (first, stop) = sinusoid(positions, self.size), self.kept
        table[:, : 2 * first] = table[:, 2 * stop :] = 0
        return table * math.sqrt(self.size / 2 / (stop - first))

    def unscaled(self, time):  # there is no last position
        return self.table[:time] if time <= len(self.table) else self.waves(time).to(self.table)


class Random(Encoding):
    """Fixed unit vectors, uniform on the sphere."""

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        self.register_buffer("table", F.normalize(torch.randn(positions, size), dim=1))


class Constant(Encoding):
    """One fixed random unit vector at every step: as many inputs and parameters as a clock, and no time."""

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        self.register_buffer("table", F.normalize(torch.randn(1, size), dim=1))

    def unscaled(self, time):  # there is no last position
        return self.table.expand(time, -1)


class Learned(Encoding):
    """A learned vector per step, drawn as nn.Embedding draws its own; --amplitude is its length at first."""

    @staticmethod
    def usual(size):
        return math.sqrt(size)

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        self.table = nn.Parameter(self.scale * torch.randn(positions, size))
        self.scale = 1.0


class Ramp(Encoding):
    """A fixed random unit vector times t / positions: no period. --amplitude: the length at the last step."""

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        share = torch.arange(1, positions + 1)[:, None] / positions
        self.register_buffer("table", share * F.normalize(torch.randn(size), dim=0))


class Counter(Encoding):
    """The step in binary, -1 for 0 and 1 for 1, lowest digit first, repeated to fill the columns."""

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        digits = max(1, (positions - 1).bit_length())
        if size < digits:
            raise Refused(f"{positions} steps are counted in {digits} binary digits: --embed {size} is less")
        digit = (torch.arange(positions)[:, None] >> (torch.arange(size) % digits)) & 1
        self.register_buffer("table", (2 * digit - 1) / math.sqrt(size), persistent=False)


class Shuffled(Encoding):
    """The sinusoid's vectors in a fixed random order: the same ones, but neighbours are unlike."""

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        self.register_buffer("table", Sinusoid(positions, size).table[torch.randperm(positions)])


class Vanilla(Encoding):
    """No encoding: the layer reads the embedding alone."""

    accepts = ()

    @staticmethod
    def usual(size):
        return None

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        self.inputs = size

    def vectors(self, time):
        return None

    def join(self, tokens):
        return tokens


class Duplicate(Vanilla):
    """The embedding twice: as many parameters as with an encoding, and no clock (Appendix C)."""

    def __init__(self, positions, size, **options):
        super().__init__(positions, size, **options)
        self.inputs = 2 * size

    def join(self, tokens):
        return torch.cat([tokens, tokens], dim=-1)


ENCODINGS = {"none": Vanilla, "sin": Sinusoid, "random": Random, "learned": Learned, "dup": Duplicate}
ENCODINGS |= {"constant": Constant}  # a control that is not in the paper
ENCODINGS |= {"ramp": Ramp, "counter": Counter, "shuffled": Shuffled}  # clocks that are not in the paper


# ------------------------------------------------------------------------------------------------------------
# Models (section 3.2): embedding -> joined with the encoding -> one layer -> linear readout
# ------------------------------------------------------------------------------------------------------------


def select(h, steps):
    """(T, B, H) -> the answered steps, (M, B, H)."""
    return h[steps] if isinstance(steps, slice) else h[steps.T, torch.arange(len(steps), device=h.device)]


def span(steps, time):
    """The first step that has to be computed to answer these, and one past the last."""
    return steps.indices(time)[:2] if isinstance(steps, slice) else (0, time)


# A layer is made by Layer(inputs, hidden) and called as layer(x, steps): what it reads, (T, B, inputs), and
# the answered steps -> its outputs there, (M, B, H).


class GRU(nn.GRU):
    def forward(self, x, steps):
        return select(self.every_step(x), steps)

    def every_step(self, x):
        """The outputs of all steps, of x as nn.GRU takes it."""
        return super().forward(x)[0]


class LSTM(nn.LSTM):
    def forward(self, x, steps):
        return select(self.every_step(x), steps)

    def every_step(self, x):
        return super().forward(x)[0]


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
        """(H, time): the layer's response to an impulse, 2 Re sum_n w_n exp(l dt A_n).

        With l = S i + j, exp(l dt A) = exp(S i dt A) exp(j dt A): two small tables for one of (H, N/2, time).
        """
        dtA, weights = self.discretised()
        stride = math.isqrt(time - 1) + 1
        i, j = (torch.arange(n, device=dtA.device) for n in (-(-time // stride), stride))
        rows = weights[..., None] * (dtA[..., None] * (stride * i)).exp()  # (H, N/2, time/S)
        columns = (dtA[..., None] * j).exp()  # (H, N/2, S)
        rows, columns = torch.cat([rows.real, -rows.imag], 1), torch.cat([columns.real, columns.imag], 1)
        return self.kernel_of_tables(rows, columns, time)

    def kernel_of_tables(self, rows, columns, time):
        if rows.is_cuda:  # where products may be in tf32 or bf16: too coarse for what is summed here
            rows, columns = rows.double(), columns.double()
        return 2 * (rows.mT @ columns).flatten(1)[:, :time].to(self.D.dtype)

    def flipped_kernel(self, steps, time, kernel=None):
        """-> the first answered step, how many there are, and the convolution's kernel for them.

        The kernel, (H, stop + outputs - 1), runs backwards: its columns from n on weigh the inputs of the
        n-th answer from the end. `kernel(stop)` may be another function than self.kernel.
        """
        start, stop = span(steps, time)
        response = (kernel or self.kernel)(stop)
        return start, stop - start, F.pad(response.flip(1), (0, stop - start - 1))

    def emit(self, y, steps):
        """(H, M, B) convolved inputs -> (M, B, H)."""
        h = F.glu(self.mix(F.gelu(y.permute(1, 2, 0))))
        return h if isinstance(steps, slice) else select(h, steps)

    def forward(self, x, steps):
        u = self.project(x).permute(2, 0, 1)  # (H, T, B)
        start, outputs, kernel = self.flipped_kernel(steps, u.shape[1])
        stop = start + outputs
        toeplitz = kernel.unfold(1, stop, 1).contiguous()  # (H, M, stop)
        y = (toeplitz @ u[:, :stop].contiguous()).flip(1) + self.D[:, None, None] * u[:, start:stop]
        return self.emit(y, steps)


class MinGRU(nn.Linear):
    """h_t = (1 - z_t) h_t-1 + z_t h~_t; unlike a GRU's, z and h~ see the input alone (Feng et al., 2024)."""

    def __init__(self, inputs, hidden):
        super().__init__(inputs, 2 * hidden)

    def forward(self, x, steps):
        gate, candidate = super().forward(x).chunk(2, -1)  # (T, B, H)
        h, states = torch.zeros_like(gate[0]), []
        for kept, added in zip((-gate).sigmoid(), gate.sigmoid() * candidate):
            h = kept * h + added
            states.append(h)
        return select(torch.stack(states), steps)


class Mamba(nn.Module):
    """The selective state-space block of Gu and Dao (2023), without norm and residual path, since what it
    reads and what it answers differ in size. It has 2 H channels (their expansion), each with N states.

    As there, the step size Delta comes through a product of rank H / 16. `conv` False leaves the convolution
    out. `rotate` makes the states complex, and half as many: they turn while they decay, and begin as S4D's
    do. `slow` lets real states begin with the decay of those, which is below that of all others.
    """

    def __init__(self, inputs, hidden, conv=True, rotate=False, slow=False, order=16, width=4):
        super().__init__()
        channels, rank = 2 * hidden, math.ceil(hidden / 16)
        self.widths = rank, order, order
        self.project = nn.Linear(inputs, 2 * channels, bias=False)
        self.conv = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1) if conv else None
        self.choose = nn.Linear(channels, sum(self.widths), bias=False)
        self.delta = nn.Linear(rank, channels)
        usual = torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.delta.bias = nn.Parameter(usual.expm1().log())  # the inverse of softplus
        states = order // 2 if rotate else order
        decay = torch.full((states,), 0.5) if rotate or slow else torch.arange(1.0, states + 1)
        turn = math.pi * torch.arange(states).float()
        self.log_A = nn.Parameter(decay.log().repeat(channels, 1))
        self.turn = nn.Parameter(turn.repeat(channels, 1)) if rotate else None
        self.D = nn.Parameter(torch.ones(channels))
        self.answer = nn.Linear(channels, hidden, bias=False)

    def as_states(self, x):
        """(..., 2N) real parts, then imaginary ones -> (..., N) where states are complex."""
        return x if self.turn is None else torch.complex(*x.to(self.D.dtype).chunk(2, -1))

    def forward(self, x, steps):
        u, gate = self.project(x).chunk(2, -1)  # (T, B, D)
        if self.conv is not None:  # its last outputs are of the padding
            u = self.conv(u.permute(1, 2, 0))[..., : len(x)].permute(2, 0, 1)
        u = F.silu(u)
        delta, B, C = self.choose(u).split(self.widths, -1)
        delta, B, C = F.softplus(self.delta(delta)), self.as_states(B), self.as_states(C)  # (T, B, D or N)
        A = -self.log_A.exp().T  # (N, D)
        if self.turn is not None:
            A = torch.complex(A, self.turn.T)
        h, outputs = 0.0, []
        # Step by step: (T, B, N, D) for all steps at once leaves the cache and is four times as slow
        for d, added, b, c in zip(delta[:, :, None], (delta * u)[:, :, None], B[..., None], C[:, :, None]):
            h = (d * A).exp() * h + added * b  # (B, N, D)
            outputs.append(c @ h)
        y = torch.cat(outputs, 1).transpose(0, 1)
        y = y if self.turn is None else 2 * y.real  # the other half is its conjugate
        return self.answer(select((y + self.D * u) * F.silu(gate), steps))


LAYERS = {"gru": GRU, "lstm": LSTM, "s4d": S4D, "mingru": MinGRU, "mamba": Mamba}


class Model(nn.Module):
    """The whole network; `positions` is how many steps the encoding's table covers.

    `for_layer` and `for_encoding` are further arguments of the layer and of the encoding.
    """

    def __init__(
        self, layer, encoding, vocab, embed=512, hidden=512, positions=128, for_layer=None, **for_encoding
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab + 1, embed)  # the last row is the command
        self.encoding = ENCODINGS[encoding](positions, embed, **for_encoding)
        self.layer = LAYERS[layer](self.encoding.inputs, hidden, **(for_layer or {}))
        self.readout = nn.Linear(hidden, vocab)

    def forward(self, inputs, steps):
        """(B, T) integers -> (M, B, K) logits at the answered steps."""
        x = self.encoding.join(self.embedding(inputs.T))  # (T, B, E or 2E)
        return self.readout(self.layer(x, steps))


def loss_and_accuracy(model, episode):
    """Mean cross-entropy and share of right answers over an episode's answers."""
    found, targets = model(episode.inputs, episode.steps), episode.targets.T.flatten()
    losses = F.cross_entropy(found.flatten(0, 1), targets, reduction="none")
    right = (found.detach().argmax(-1).flatten() == targets).to(losses.dtype)
    share = episode.share()
    if share is None:
        return losses.mean(), right.mean()
    share = share.to(losses.dtype)
    return (losses * share).sum(), (right * share).sum()  # not @, which autocast would round to bf16


@torch.no_grad()
def answers(logits, episode, batch):
    """Predictions (N, M) and cross-entropies (N, M) of an episode of many rows, `batch` rows at a time.

    `logits(inputs, steps)` is a model, or suite/fast.py's of it.
    """
    predictions, losses = [], []
    for start in range(0, len(episode.inputs), batch):
        part = episode.rows(slice(start, start + batch))
        found = logits(part.inputs, part.steps)  # (M, b, K)
        predictions.append(found.argmax(-1).T)
        loss = F.cross_entropy(found.flatten(0, 1), part.targets.T.flatten(), reduction="none")
        losses.append(loss.view(found.shape[:2]).T)
    return torch.cat(predictions), torch.cat(losses)


def learning_rate(i, peak, warmup, iterations):
    """The rate of iteration i = 1..N: linear warm-up, then half a cosine that ends at 0."""
    if i <= warmup:
        return peak * i / warmup
    return peak / 2 * (1 + math.cos(math.pi * (i - warmup) / (iterations - warmup)))


# ------------------------------------------------------------------------------------------------------------
# Metrics (section 4.1, Fig. 2)
# ------------------------------------------------------------------------------------------------------------


def sequence_metrics(episode, predictions, losses):
    """Accuracy of tokens and of whole sequences, cross-entropy, mean edit distance, all without padding."""
    targets, predictions, losses = (x.cpu().numpy() for x in (episode.targets, predictions, losses))
    answered = (
        np.ones(targets.shape, bool) if episode.weight is None else episode.weight.cpu().numpy().astype(bool)
    )
    right, lengths = predictions == targets, answered.sum(1)
    order = np.argsort(~answered, axis=1, kind="stable")  # the answers of a row, and then its padding
    said, wanted = (np.take_along_axis(x, order, axis=1) for x in (predictions, targets))
    distance = 0
    for n in np.unique(lengths):
        rows = lengths == n
        distance += damerau_levenshtein(said[rows, :n], wanted[rows, :n]).sum()
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


CELLS = 2**26  # of tables of edit distances at a time: 256 MB, and an int32 counts them


def damerau_levenshtein(a, b):
    """Unrestricted Damerau-Levenshtein distances of N pairs: a (N, La), b (N, Lb) -> (N,)."""
    at_once = max(1, CELLS // ((len(a[0]) + 1) * (len(b[0]) + 1)))
    parts = [edit_distances(a[n : n + at_once], b[n : n + at_once]) for n in range(0, len(a), at_once)]
    return np.concatenate(parts)


def edit_distances(a, b):
    """As damerau_levenshtein, of not too many pairs.

    The algorithm of Lowrance and Wagner, a row of the table at a time for all pairs together: a transposition
    joins the last row k < i with a_k = b_j and the last column l < j with b_l = a_i; insertions along a row
    are a running minimum.
    """
    a, b = np.ascontiguousarray(np.transpose(a)), np.ascontiguousarray(np.transpose(b))  # (La, N), (Lb, N)
    (rows, pairs), columns = a.shape, np.arange(len(b) + 1, dtype=np.int32)[:, None]
    table = np.empty((rows + 1, len(columns), pairs), dtype=np.int32)
    table[0] = columns
    width, pair = columns.size * pairs, np.arange(pairs, dtype=np.int32)
    last_row = np.zeros(b.shape, dtype=np.int32)  # 0: no such row yet
    last_column = np.zeros(b.shape, dtype=np.int32)
    for i in range(1, rows + 1):
        match = a[i - 1] == b  # (Lb, N)
        last_column[1:] = np.maximum.accumulate(match[:-1] * columns[1:-1])  # 0: none before j
        before = table.reshape(-1).take(
            (last_row - 1) * width + (last_column - 1) * pairs + pair, mode="clip"
        )
        transposed = before + (i - last_row) + (columns[1:] - last_column) - 1
        transposed[(last_row == 0) | (last_column == 0)] = rows + len(b)
        changed = np.minimum(table[i - 1, :-1] + (a[i - 1] != b), table[i - 1, 1:] + 1)  # replace, delete
        table[i, 0] = i
        table[i, 1:] = np.minimum(changed, transposed)
        table[i] = np.minimum.accumulate(table[i] - columns) + columns
        last_row[match] = i
    return table[-1, -1]
