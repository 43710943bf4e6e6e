"""Models, loss, training step, schedule, encodings, layers, data and metrics.

The reference implementation of the models of Morita (TMLR 2024), whose sections and equations
are cited. suite/fast.py, the default for most models, replaces only Model.features; it is
faster, and equal up to rounding.

Shapes: B batch size, T time steps, L input length, M target steps, K vocabulary size,
E embedding (and encoding) size, H hidden size, W integers in a drawn sequence (usually L),
R candidates per training sequence. N is S4D's state size or, for data, the number of sequences
or packed tokens. Batches are (B, T); inside a model time comes first, (T, B, ...), as in
torch.nn.GRU.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class UsageError(ValueError):
    """Invalid user input, explained in one line."""


# -- Model (section 3.2), loss, training step, learning-rate schedule
class Model(nn.Module):
    """Embedding combined with the positional encoding, one layer, linear readout."""

    def __init__(
        self,
        layer_class,  # a value of LAYERS, called as layer_class(input_size, hidden)
        encoding,  # a name in ENCODINGS
        vocab,
        embed,
        hidden,
        n_steps,  # rows in the encoding's table
        **encoding_options,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab + 1, embed)  # the last row is the command token
        self.encoding = ENCODINGS[encoding](n_steps, embed, **encoding_options)
        self.layer = layer_class(self.encoding.output_size, hidden)
        self.readout = nn.Linear(hidden, vocab)

    def features(self, batch):
        """Return the layer's outputs at the target steps (M, B, H)."""
        embedded = self.embedding(batch.inputs.T)  # (T, B, E)
        x = self.encoding(embedded)  # (T, B, E or 2E)
        return self.layer(x, batch.target_steps)

    def forward(self, batch):
        """Return the logits at the target steps (M, B, K); training uses `features`."""
        return self.readout(self.features(batch))


class Batch(NamedTuple):
    """Input tokens, targets, and the time steps of the targets."""

    inputs: torch.Tensor  # (B, T) integers; K, the command token, prompts an output
    targets: torch.Tensor  # (B, M)
    # A slice for all sequences, (B, M) for each of them, or indices of packed outputs
    target_steps: slice | torch.Tensor
    mask: torch.Tensor | None = None  # (B, M), True for targets, False for padding
    n_commands: int = 0  # number of final steps at which all sequences read the command
    batch_sizes: torch.Tensor | None = None  # if packed: sequences per step, see lm_wikitext.py

    def select(self, subset):
        """Return the batch of a subset of its sequences; not for packed batches."""
        return Batch(*(x[subset] if isinstance(x, torch.Tensor) else x for x in self))


def loss_and_grad_(logits, target, weights):
    """Overwrite logits (n, K) with the loss gradient, weights * (softmax - one-hot).

    Return the weighted sums of cross-entropy and of accuracy. These are means if the weights of
    the whole batch add up to 1. `target` and `weights` are (n, 1).
    """
    max_logit, predicted = logits.max(1, keepdim=True)
    target_logit = logits.gather(1, target)
    sum_exp = logits.sub_(max_logit).exp_().sum(1, keepdim=True)
    loss = ((max_logit - target_logit + sum_exp.log()) * weights).sum()
    accuracy = ((predicted == target) * weights).sum()
    logits.mul_(weights / sum_exp)
    logits.scatter_(1, target, logits.gather(1, target) - weights)
    return loss, accuracy


def rows_per_chunk(weight):
    """Return how many rows of logits to hold at once: at most 2^25 logits (CUDA: 2^27)."""
    return max(1, 2 ** (27 if weight.is_cuda else 25) // len(weight))


class ChunkedCrossEntropy(torch.autograd.Function):
    """F.cross_entropy(readout(features), targets) and accuracy, computed in chunks of rows.

    The forward pass also computes the gradients, so the logits of all rows are never in memory.
    """

    @staticmethod
    def forward(ctx, features, weight, bias, targets, loss_weights, loss_and_grad_):
        weight_cast, bias_cast = weight.to(features.dtype), bias.to(features.dtype)
        loss, accuracy = 0, 0
        d_features, d_weight, d_bias = map(torch.zeros_like, (features, weight, bias))
        chunk_rows = rows_per_chunk(weight)
        ones = weight.new_ones(min(chunk_rows, len(features)))
        for start in range(0, len(features), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            logits = F.linear(features[chunk], weight_cast, bias_cast).to(weight.dtype)
            # Overwrites `logits` with their gradient
            chunk_loss, chunk_accuracy = loss_and_grad_(
                logits, targets[chunk], loss_weights[chunk]
            )
            loss += chunk_loss
            accuracy += chunk_accuracy
            if not ctx.needs_input_grad[0]:  # evaluation
                continue
            d_logits = logits.to(weight_cast.dtype)
            torch.mm(d_logits, weight_cast, out=d_features[chunk])
            # On CPUs, addmm_ would round differently and change existing results
            if weight.is_cuda and d_logits.dtype == d_weight.dtype:
                d_weight.addmm_(d_logits.T, features[chunk])
            else:
                d_weight += d_logits.T @ features[chunk]
            if weight.is_cuda:
                d_bias.addmv_(logits.T, ones[: len(d_logits)])
            else:
                d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_features, d_weight, d_bias)
        ctx.mark_non_differentiable(accuracy)
        return loss, accuracy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        return *(gradient * d_loss for gradient in ctx.saved_tensors), None, None, None


def loss_and_accuracy(features, readout, batch, loss_and_grad_=loss_and_grad_):
    """Return mean cross-entropy and accuracy; features are (M, B, H) or packed (N, H)."""
    readout_weight = readout.weight
    targets = batch.targets.T.reshape(-1, 1)  # (M * B, 1), in the order of the features
    if batch.mask is None:
        loss_weights = torch.full_like(targets, 1 / len(targets), dtype=readout_weight.dtype)
    else:
        loss_weights = batch.mask.T.reshape(-1, 1).to(readout_weight.dtype)
        loss_weights = loss_weights / loss_weights.sum().clamp(min=1)
    return ChunkedCrossEntropy.apply(
        features.flatten(0, -2),
        readout_weight,
        readout.bias,
        targets,
        loss_weights,
        loss_and_grad_,
    )


def train_step(model, compute_features, batch, optimizer, clip, loss_and_grad_):
    """Take an optimizer step; return loss and accuracy, without host-device synchronisation.

    `compute_features(model, batch)` is Engine.features, which calls Model.features or
    fast.features; `loss_and_grad_` may be compiled.
    """
    h = compute_features(model, batch)
    loss, accuracy = loss_and_accuracy(h, model.readout, batch, loss_and_grad_)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), accuracy


def learning_rate(i, peak, warmup, iterations):
    """Return the learning rate of iteration i >= 1: linear warm-up, then cosine decay to 0."""
    if i <= warmup:
        return peak * i / warmup
    return peak / 2 * (1 + math.cos(math.pi * (i - warmup) / (iterations - warmup)))


# -- Positional encodings (section 3.2, Appendices C and D)
class Encoding(nn.Module):
    """One vector per time step, concatenated with the token embedding or added to it.

    Subclasses, listed in ENCODINGS, define make_table(n_steps, size). Its vectors have norm
    `table_norm`, and are multiplied by amplitude / table_norm if an amplitude is given. They
    are set to zero at `zeroed_steps` (see --encode).
    """

    save_table = True  # in checkpoints; False where the table can be recomputed
    # False if forward() does more than add or concatenate vectors()
    supports_fast_engine = True
    unused_flags = ("bands",)  # flags that have no effect and are rejected

    def __init__(
        self, n_steps, size, combine="concat", zeroed_steps=None, amplitude=None, bands=(0, 1)
    ):
        super().__init__()
        self.size, self.combine = size, combine
        self.zeroed_steps, self.bands = zeroed_steps, bands
        self.output_size = size if combine == "add" else 2 * size  # width of the result
        norm = self.table_norm(size)
        self.scale = 1.0 if None in (amplitude, norm) else amplitude / norm
        table = self.make_table(n_steps, size)
        if isinstance(table, nn.Parameter):
            self.table = table
        else:
            self.register_buffer("table", table, persistent=self.save_table)

    @staticmethod
    def table_norm(size):
        """Return the vectors' unscaled norm, or None if there are no vectors.

        If norms differ, this is the largest (Ramp) or their root mean square (Learned).
        """
        return 1.0

    def make_table(self, n_steps, size):
        """Return the table, (n_steps, size), or (1, size) if all steps share one vector."""
        raise NotImplementedError

    def vectors(self, n_steps):
        """Return the vectors of the first steps, (n_steps, E); NoEncoding has none."""
        vectors = self.scale * self.table[:n_steps].expand(n_steps, -1)
        if self.zeroed_steps is not None:
            vectors[self.zeroed_steps] = 0
        return vectors

    def forward(self, embedded):
        """Add or concatenate each step's vector: embeddings (T, B, E) -> (T, B, E or 2E)."""
        vectors = self.vectors(len(embedded))[:, None].to(embedded.dtype)  # (T, 1, E)
        if self.combine == "add":
            return embedded + vectors
        return torch.cat([embedded, vectors.expand_as(embedded)], dim=-1)


class Sinusoid(Encoding):
    """The paper's encoding: sines and cosines of the time step (Eqs. 1-2).

    `bands` = (start, end) keeps a range of frequencies, from the highest (0) to the lowest (1),
    and zeroes all others. Before scaling to `amplitude`, vectors have unit norm.
    """

    save_table = False
    unused_flags = ()

    def make_table(self, n_steps, size):
        if size % 2:
            raise UsageError(
                f"--embed {size} must be even: sinusoidal PE has sine-cosine pairs"
            )
        start, end = self.bands
        exponent = torch.arange(0, size, 2, dtype=torch.float64) / size  # in [0, 1)
        kept = (start <= exponent) & (exponent < end)
        if not kept.any():
            raise UsageError(f"--bands {start:g}:{end:g} keeps none of {size // 2} frequencies")
        angle = torch.arange(n_steps)[:, None] * 10000**-exponent
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1)  # (n_steps, size/2, 2)
        waves[:, ~kept] = 0
        return waves.flatten(1) / math.sqrt(kept.sum())


class Random(Encoding):
    """A fixed random unit vector for each time step, uniform on the sphere."""

    def make_table(self, n_steps, size):
        return F.normalize(torch.randn(n_steps, size), dim=1)


class Constant(Random):
    """A control: one fixed random unit vector at every step; no positional information."""

    def make_table(self, n_steps, size):
        return super().make_table(1, size)


class Learned(Encoding):
    """Learned vectors, initialised like nn.Embedding; --amplitude: their initial RMS norm."""

    @staticmethod
    def table_norm(size):
        return math.sqrt(size)

    def make_table(self, n_steps, size):
        table = nn.Parameter(self.scale * torch.randn(n_steps, size))
        self.scale = 1.0  # scale the initial vectors, not Adam's updates
        return table


class Ramp(Constant):
    """A fixed random unit vector, scaled by t / T at time step t of T (not periodic)."""

    def make_table(self, n_steps, size):
        steps = torch.arange(1, n_steps + 1)[:, None]
        return steps / n_steps * super().make_table(n_steps, size)


class Counter(Encoding):
    """The bits of the time step as 1 and -1, repeated to fill --embed and scaled to norm 1."""

    save_table = False

    def make_table(self, n_steps, size):
        bits = max(1, (n_steps - 1).bit_length())
        if size < bits:
            raise UsageError(f"--pe counter needs --embed {bits} or more for {n_steps} steps")
        column = torch.arange(size) % bits
        bit = (torch.arange(n_steps)[:, None] >> column) & 1  # (n_steps, size)
        return (2 * bit - 1) / math.sqrt(size)


class Shuffled(Sinusoid):
    """The sinusoidal vectors in a fixed random order (not continuous in time)."""

    save_table = True

    def make_table(self, n_steps, size):
        return super().make_table(n_steps, size)[torch.randperm(n_steps)]


class NoEncoding(Encoding):
    """No positional encoding: the layer reads the embedding alone."""

    copies = 1
    unused_flags = ("amplitude", "bands", "combine", "encode")

    @staticmethod
    def table_norm(size):
        return None

    def make_table(self, n_steps, size):
        self.output_size = self.copies * size  # instead of a table

    def vectors(self, n_steps):
        return None

    def forward(self, embedded):
        return torch.cat([embedded] * self.copies, dim=-1)


class DuplicatedEmbedding(NoEncoding):
    """A control: the embedding concatenated with itself; no positional information (App. C)."""

    copies = 2


ENCODINGS = {
    "none": NoEncoding,
    "sin": Sinusoid,
    "random": Random,
    "learned": Learned,
    "dup": DuplicatedEmbedding,
    # not in the paper
    "constant": Constant,
    "ramp": Ramp,
    "counter": Counter,
    "shuffled": Shuffled,
}


# -- Layers: layer(x, steps) maps x (T, B, input_size) to outputs at target steps (M, B, H)
def select_steps(h, steps):
    """Select outputs at target steps: h (T, B, H) -> (M, B, H), or rows of packed h (N, H)."""
    if isinstance(steps, slice):
        return h[steps]
    if h.dim() == 2:
        return h.index_select(0, steps)
    return h[steps.T, torch.arange(len(steps), device=h.device)]


def required_range(steps, n_steps):
    """Return the range [start, stop) of steps whose outputs have to be computed."""
    return steps.indices(n_steps)[:2] if isinstance(steps, slice) else (0, n_steps)


class GRU(nn.GRU):
    """torch.nn.GRU, but returns its outputs at target steps only; likewise LSTM."""

    def forward(self, x, steps):
        return select_steps(super().forward(x)[0], steps)


class LSTM(nn.LSTM):
    def forward(self, x, steps):
        return select_steps(super().forward(x)[0], steps)


class S4D(nn.Module):
    """Linear -> diagonal SSM (S4D-Lin; Gu et al., 2022) -> GELU -> linear -> GLU."""

    def __init__(self, input_size, hidden, state_size=64):
        super().__init__()
        pairs = state_size // 2  # conjugate pairs; one state of each is stored
        self.project = nn.Linear(input_size, hidden)
        log_dt = torch.empty(hidden).uniform_(math.log(1e-3), math.log(1e-1))
        self.log_dt = nn.Parameter(log_dt)
        self.C = nn.Parameter(math.sqrt(0.5) * torch.randn(hidden, pairs, 2))  # complex
        self.log_A_real = nn.Parameter(torch.full((hidden, pairs), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(pairs).repeat(hidden, 1))
        self.D = nn.Parameter(torch.randn(hidden))
        self.mix = nn.Linear(hidden, 2 * hidden)

    def discretise(self):
        """Return dt A and the zero-order-hold weights C (exp(dt A) - 1) / A: (H, N/2)."""
        A = torch.complex(-self.log_A_real.exp(), self.A_imag)
        dtA = A * self.log_dt.exp()[:, None]
        return dtA, torch.view_as_complex(self.C) * (dtA.exp() - 1) / A

    def kernel(self, n_steps):
        """Return the convolution kernel k[l] = 2 Re sum_n w_n exp(l dt A_n), (H, n_steps).

        The weights w are those of `discretise`. A lag l is S i + j, where S is the stride and
        j < S. Therefore, exp(l dt A) is exp(S i dt A) exp(j dt A), and the kernel is a matrix
        product of a coarse table (over i) and a fine one (over j). Both need few exponentials.
        """
        dtA, weights = (x[..., None] for x in self.discretise())
        stride = math.isqrt(n_steps - 1) + 1
        lags = torch.arange(n_steps, device=dtA.device)
        coarse = weights * (dtA * lags[::stride]).exp()  # (H, N/2, n_steps/S)
        fine = (dtA * lags[:stride]).exp()  # (H, N/2, S)
        coarse = torch.cat([coarse.real, -coarse.imag], 1)  # (H, N, n_steps/S)
        fine = torch.cat([fine.real, fine.imag], 1)
        return self.kernel_from_tables(coarse, fine, n_steps)

    def kernel_from_tables(self, coarse, fine, n_steps):
        """Multiply the two tables, in double precision on CUDA: (H, n_steps)."""
        if coarse.is_cuda:  # tf32 and autocast are too imprecise
            coarse, fine = coarse.double(), fine.double()
        return 2 * (coarse.mT @ fine).flatten(1)[:, :n_steps].to(self.D.dtype)

    def forward(self, x, steps):
        start, stop = required_range(steps, len(x))
        u = self.project(x).permute(2, 0, 1)  # (H, T, B)
        flipped_kernel = F.pad(self.kernel(stop).flip(1), (0, stop - start - 1))
        # Row m yields the output at step stop - 1 - m. hankel[:, m, j] is
        # kernel[:, stop - 1 - m - j], or 0 where that index is negative
        hankel = flipped_kernel.unfold(1, stop, 1).contiguous()  # (H, M, stop)
        y = (hankel @ u[:, :stop].contiguous()).flip(1)  # (H, M, B)
        return self.output(y + self.D[:, None, None] * u[:, start:stop], steps)

    def output(self, y, steps):
        """Map the convolved inputs (H, M, B) to the layer's outputs (M, B, H)."""
        h = F.glu(self.mix(F.gelu(y.permute(1, 2, 0))))
        return h if isinstance(steps, slice) else select_steps(h, steps)


# -- Data: pure functions of (seed, stream, iteration), identical on every device
TRAIN_STREAM, HELD_OUT_STREAM, PAIR_STREAM = 1, 2, 3  # pairs: see stability.py
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment as int64


def splitmix64_mix(x):
    """Mix int64 counters into random bits: the output function of splitmix64.

    Multiplication wraps around; the masks make >> a logical shift.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & (1 << 33) - 1)


def derive_key(*parts, device="cpu"):
    """Hash integers (or 0-dimensional tensors), such as seed and iteration, to a random key."""
    k = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        k = splitmix64_mix(k + GOLDEN + part)
    return k


def random_bits(rng_key, shape):
    """Return a tensor of 64-bit random integers, from splitmix64 seeded with rng_key."""
    n = torch.arange(1, 1 + math.prod(shape), device=rng_key.device)
    # torch.compile assumes that products of a plain arange do not wrap around. Adding this
    # zero makes n depend on data, which prevents that assumption
    n = n + (rng_key - rng_key)
    return splitmix64_mix(rng_key + n * GOLDEN).view(shape)


def scale_bits(bits, high):
    """Scale the low 32 bits to an integer in [0, high); the bias is below high / 2^32."""
    return (bits & 0xFFFFFFFF) * high >> 32


def uniform_integers(rng_key, shape, high):
    """Draw integers in [0, high), as a function of rng_key alone."""
    return scale_bits(random_bits(rng_key, shape), high)


def hash_sequences(sequences):
    """Hash each sequence, (..., W) -> (...), to 64 bits, as a sum over its positions."""
    position = torch.arange(1, 1 + sequences.shape[-1], device=sequences.device)
    return splitmix64_mix(sequences * GOLDEN + position).sum(-1)


def distinct_sequences(draw, count, *key_parts, device):
    """Return a stream's first `count` distinct sequences, drawn by draw(rng_key, shape)."""
    sequences = draw(derive_key(*key_parts, 0, device=device), (0,))  # (0, W), no sequences yet
    for attempt in range(1000):
        more = draw(derive_key(*key_parts, attempt, device=device), (count,))
        sequences = torch.cat([sequences, more])
        _, first = np.unique(hash_sequences(sequences).cpu().numpy(), return_index=True)
        sequences = sequences[torch.from_numpy(np.sort(first))]
        if len(sequences) >= count:
            return sequences[:count]
    raise UsageError(
        f"--held-out {count} exceeds the {len(sequences)} distinct sequences found: "
        "raise --vocab or --length, or lower --held-out"
    )


class HeldOutSet:
    """Test sequences (N, W), excluded from training by rejection sampling.

    `probability` is the chance that a random sequence is held out. For each training sequence,
    `n_candidates` candidates are drawn, and the first that is not held out is used. The number
    of candidates is fixed to avoid host-device synchronisation. If all are held out, a fixed
    fallback sequence is used. The probability of this is at most 1e-18.
    """

    def __init__(self, sequences, probability):
        if probability > 0.5:
            raise UsageError(
                f"--held-out: {probability:.0%} of random sequences would be held out (limit: "
                "50%): raise --vocab or --length, or lower --held-out"
            )
        self.sequences, self.hashes = sequences, hash_sequences(sequences).sort().values
        self.n_candidates = 1 if probability == 0 else math.ceil(18 / -math.log10(probability))

    def contains(self, sequences):
        """Return whether each sequence is held out: (..., W) -> (...)."""
        hashes = hash_sequences(sequences)
        index = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        return self.hashes[index] == hashes

    def first_allowed(self, candidates, fallback_sequence):
        """Return, for each sequence, its first candidate not held out: (R, B, W) -> (B, W)."""
        candidates = torch.cat([candidates, fallback_sequence.expand_as(candidates[:1])])
        first = (~self.contains(candidates)).byte().argmax(0)  # (B,)
        return candidates[first, torch.arange(len(first), device=first.device)]


# -- Metrics (section 4.1, Fig. 2)
@torch.no_grad()
def predict(compute_features, model, batch, batch_size):
    """Return predictions and cross-entropies, (N, M) each; `batch_size` sequences at a time.

    `compute_features(model, batch)` is as in `train_step`.
    """
    predictions, losses = [], []
    for start in range(0, len(batch.inputs), batch_size):
        chunk = batch.select(slice(start, start + batch_size))
        logits = model.readout(compute_features(model, chunk))  # (M, chunk, K)
        predictions.append(logits.argmax(-1).T)
        targets = chunk.targets.T.flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        losses.append(loss.view(len(logits), -1).T)
    return torch.cat(predictions), torch.cat(losses)


def sequence_metrics(batch, predictions, losses):
    """Return token and sequence accuracy, cross-entropy and mean edit distance.

    Padding, at the ends of sequences, is not scored.
    """
    target, predicted, losses = (x.cpu().numpy() for x in (batch.targets, predictions, losses))
    scored = np.ones(target.shape, bool)
    if batch.mask is not None:
        scored = batch.mask.cpu().numpy()
        predicted, target = np.where(scored, (predicted, target), -1)
    correct = predicted == target  # True at padding
    return {
        "token_accuracy": correct[scored].mean(),
        "sequence_accuracy": correct.all(1).mean(),
        "cross_entropy": losses[scored].mean(dtype=np.float64),
        "damerau_levenshtein": damerau_levenshtein(predicted, target).mean(),
    }


def perplexity(loss):
    """Return exp(loss), or infinity where that overflows."""
    return math.inf if loss > 709 else math.exp(loss)


def damerau_levenshtein(a, b):
    """Return unrestricted Damerau-Levenshtein distances of a (N, La) and b (N, Lb): (N,).

    This is Lowrance and Wagner's algorithm, vectorised over pairs. At row i and column j, a
    transposition uses an earlier row and an earlier column. The row is the last k < i with
    a_k = b_j, and the column is the last l < j with b_l = a_i (`last_column`).
    """
    a, b = a.T, b.T  # (La, N), (Lb, N)
    pairs = np.arange(a.shape[1])
    # Without an earlier match, k - 1 or last_column - 1 is -1. It then selects the extra last
    # row or column, which keeps its initial value, larger than any distance
    shape = len(a) + 2, len(b) + 2, len(pairs)
    table = np.full(shape, len(a) + len(b), dtype=np.int32)
    table[:-1, 0] = np.arange(len(a) + 1)[:, None]
    table[0, :-1] = np.arange(len(b) + 1)[:, None]
    last_row = np.zeros(b.shape, dtype=int)
    for i, token in enumerate(a, 1):
        last_column = np.zeros_like(pairs)
        for j, (other, k) in enumerate(zip(b, last_row), 1):
            match = token == other
            replaced = table[i - 1, j - 1] + ~match
            deleted, inserted = table[i - 1, j] + 1, table[i, j - 1] + 1
            before = table[k - 1, last_column - 1, pairs]
            transposed = before + (i - k) + (j - last_column) - 1
            options = replaced, deleted, inserted, transposed
            table[i, j] = np.minimum.reduce(options)
            last_column[match] = j
            k[match] = i  # k is a view of last_row
    return table[-2, -2]


# -- A layer that is not in the paper, and the table of all layers
class MinGRU(nn.Linear):
    """minGRU (Feng et al., 2024): h_t = (1 - z_t) * h_{t-1} + z_t * c_t.

    The gate is z = sigmoid(logit), and c is the candidate state. Both logit and c are linear
    maps of the input, and do not depend on h_{t-1}.
    """

    def __init__(self, input_size, hidden):
        super().__init__(input_size, 2 * hidden)

    def forward(self, x, steps):
        logit, c = super().forward(x).chunk(2, -1)  # (T, B, H)
        h, states = torch.zeros_like(c[0]), []
        for keep, update in zip((-logit).sigmoid(), logit.sigmoid() * c):  # 1 - z, z * c
            h = keep * h + update
            states.append(h)
        return select_steps(torch.stack(states), steps)


LAYERS = {
    "gru": GRU,
    "lstm": LSTM,
    "s4d": S4D,
    # not in the paper
    "mingru": MinGRU,
}
