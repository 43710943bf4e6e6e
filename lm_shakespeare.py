"""Tiny Shakespeare: a Transformer, without and with four encodings, and three tokenizers.

    python lm_shakespeare.py --pe rotary --seed 0
    python lm_shakespeare.py --scale desk --all table1

    in   F i r s t _ C i t i z e
    out  i r s t _ C i t i z e n        every target is the next token

Reproduces the tables of Charles and Lau, "Positional Encoding, Tokenization, and
Architecture Hyperparameters for Transformers", not those of Morita. Where their paper does not
say, we use no bias for queries, keys and values, a final LayerNorm, a constant learning rate,
no clipping, and BPE from characters. The text, for --data, is data/tinyshakespeare/input.txt of
karpathy/char-rnn:
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
"""

from suite import cli  # isort: skip # first: handles Ctrl-C during PyTorch's slow import

import hashlib
import itertools
import math
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import Batch, UsageError
from suite.figures import Contrast, Figure, grid
from suite.task import SMOKE, Flag, Task

ENCODINGS = {  # what is added to the embeddings
    "none": common.NoEncoding,
    "learned": common.Learned,
    "sin": common.Sinusoid,
    "rotary": common.NoEncoding,
    "layernorm-learned": common.Learned,
}
TOKENIZERS = ["char", "word", "bpe"]
BPE_VOCAB = 159  # vocabulary size (Charles and Lau)


class Shakespeare(Task):
    name = "lm_shakespeare"
    folder_prefixes = {"pe": "transformer-", "tokenizer": "", "context": "T"}
    scales = {
        "paper": dict(
            iterations=1000,
            batch=32,
            lr=1e-4,
            clip=0.0,
            save_every=100,
            log_every=10,
            engine="torch",
        ),
        "desk": dict(
            layers=4, heads=4, width=128, context=64, batch=8, lr=1e-3, iterations=400
        ),
        "smoke": SMOKE | dict(layers=2, heads=2, width=16, context=8, batch=4),
    }
    extra_flags = (
        Flag("pe", "rotary", "positional encoding", choices=ENCODINGS),
        Flag("tokenizer", "char", "tokenization", choices=TOKENIZERS),
        Flag("layers", 6, "Transformer blocks, L", at_least=1, below=100),
        Flag("heads", 6, "attention heads per block, H", at_least=1, below=1000),
        Flag("context", 256, "context length in tokens, T", at_least=2, below=20_000),
        Flag("width", 384, "embedding size, D", at_least=1, below=20_000),
        Flag("data", "data/tinyshakespeare.txt", "a text file", identifies_trial=False),
    )
    unused_flags = (
        "model",
        "engine",
        "vocab",
        "length",
        "hidden",
        "embed",
        "held_out",
        "warmup",
        "combine",
        "encode",
        "amplitude",
        "bands",
    )

    @classmethod
    def defaults(cls, args):
        return {}  # no default depends on other flags

    def check(self):
        a = self.args
        if a.width % (2 * a.heads):  # rotary needs pairs
            raise UsageError(f"--width {a.width} is not a multiple of twice --heads {a.heads}")

    def load_inputs(self):
        """Read the text and add its SHA-256 to the config."""
        path = Path(self.args.data)
        if not path.is_file():
            raise UsageError(f"no text at --data {path}; see --help for the download")
        text = path.read_bytes()
        self.text = text.decode()
        self.config["text_sha256"] = hashlib.sha256(text).hexdigest()

    def learning_rate(self, i):
        return self.args.lr

    def prepare_data(self, device):
        context = self.args.context
        self.vocabulary, self.splits = tokenize(self.text, self.args.tokenizer)
        limit = min(map(len, self.splits))
        if context >= limit:
            raise UsageError(
                f"--context {context} must be below {limit}, the smaller split's tokens"
            )
        self.eval_batch_size = max(1, 2**14 // context)  # windows per evaluation batch
        self.windows = [tokens.to(device).unfold(0, context + 1, 1) for tokens in self.splits]

    def make_model(self):
        a = self.args
        return Transformer(a.pe, len(self.vocabulary), a.width, a.heads, a.layers, a.context)

    def make_batch(self, windows):
        """Shift (B, T+1) tokens into inputs and targets."""
        return Batch(windows[:, :-1], windows[:, 1:], slice(None))

    def training_batch(self, i):
        train, _ = self.windows
        rng_key = common.derive_key(self.seed, common.TRAIN_STREAM, i, device=train.device)
        return self.make_batch(
            train[common.uniform_integers(rng_key, (self.batch_size,), len(train))]
        )

    @torch.no_grad()
    def perplexity_of(self, model, windows):
        total = 0
        for part in windows.split(self.eval_batch_size):
            batch = self.make_batch(part)
            loss, _ = common.loss_and_accuracy(model.features(batch), model.readout, batch)
            total += loss.double() * len(part)
        return common.perplexity(total / len(windows))

    def examples(self, model, engine):
        return []

    def evaluate(self, model, engine):
        """Evaluate non-overlapping validation windows, and as many training windows."""
        train, valid = self.windows
        valid = valid[:: self.args.context]
        n = torch.arange(len(valid))
        train = train[n * (len(train) - 1) // max(1, len(valid) - 1)]  # spread evenly
        return {
            "valid_perplexity": self.perplexity_of(model, valid),
            "train_perplexity": self.perplexity_of(model, train),
            "types": len(self.vocabulary),
            "train_tokens": len(self.splits[0]),
            "valid_tokens": len(self.splits[1]),
            "valid_characters": sum(len(self.vocabulary[n]) for n in self.splits[1].tolist()),
            "encoding_parameters": sum(p.numel() for p in model.position.parameters()),
            "score_by_distance": score_by_distance(model, valid[: self.eval_batch_size, :-1]),
        }


ROTARY = dict(pe="rotary", seed=range(3))
BEST_SIZES = {"paper": dict(heads=2, layers=16), "desk": dict(heads=2, layers=4)}
WORST_TO_BEST = ["sin", "layernorm-learned", "learned", "rotary"]  # in their Table 1
PERPLEXITY = {"validation perplexity": "valid_perplexity"}


def score_decay(result):
    """Return the mean score at distances 1 to T/8 minus that at T/2 and beyond."""
    scores = result.metrics["score_by_distance"]
    near, far = max(1, len(scores) // 8), len(scores) // 2
    return np.mean(scores[1 : 1 + near]) - np.mean(scores[far:])


def attention_scores(result):
    yield "validation text", dict(enumerate(result.metrics["score_by_distance"]))


Shakespeare.figures["table1"] = Figure(
    "Transformer: encodings",
    {scale: grid(pe=[*ENCODINGS], seed=range(3)) for scale in ("paper", "desk")},
    metrics=PERPLEXITY | {"fall of attention scores with distance": score_decay},
    contrasts=[
        Contrast(f"{worse} - {better}", dict(pe=worse), dict(pe=better))
        for worse, better in itertools.pairwise(WORST_TO_BEST)
    ],
    curves=attention_scores,
    x="distance",
    y="mean q.k / sqrt(d)",
    note="Charles & Lau: learned 6.13, sin 8.62, rotary 4.80, layernorm-learned 7.57.",
)
Shakespeare.figures["sizes"] = Figure(
    "Transformer: sizes",
    {  # each sweep uses the best values of the sweeps before
        "paper": grid(**ROTARY, heads=[2, 4, 6, 8, 16, 32, 64])
        + grid(**ROTARY, heads=2, layers=[2, 4, 6, 16, 32])
        + grid(**ROTARY, **BEST_SIZES["paper"], context=[128, 256, 512]),
    },
    metrics=PERPLEXITY,
    plot=False,
)


def nats_per_character(result):
    """Return validation loss per character (word tokens omit spaces)."""
    metrics = result.metrics
    loss = math.log(metrics["valid_perplexity"])
    return loss * metrics["valid_tokens"] / metrics["valid_characters"]


Shakespeare.figures["table2"] = Figure(
    "Transformer: tokenizers",
    {
        scale: grid(**ROTARY, tokenizer=TOKENIZERS, **sizes)
        for scale, sizes in BEST_SIZES.items()
    },
    metrics=PERPLEXITY
    | {"nats per character": nats_per_character, "training tokens": "train_tokens"},
    contrasts=[
        Contrast(
            f"bpe - char, {metric}",
            dict(tokenizer="bpe"),
            dict(tokenizer="char"),
            metric=metric,
        )
        for metric in ("validation perplexity", "nats per character")
    ],
    plot=False,
    note="Charles & Lau (sizes differ): characters 4.80, words 310.27, byte pairs 14.64.",
)


def tokenize(text, name):
    """Return the vocabulary, and the tokens of the first 90% of the text and of the rest."""
    pieces = re.findall(r"\w+|[^\w\s]", text) if name == "word" else list(text)
    vocabulary, tokens = np.unique(pieces, return_inverse=True)
    vocabulary, splits = vocabulary.tolist(), np.split(tokens, [len(tokens) * 9 // 10])
    if name == "bpe":
        if len(vocabulary) > BPE_VOCAB:
            raise UsageError(f"--tokenizer bpe: the text has over {BPE_VOCAB} characters")
        vocabulary, splits = byte_pair_encode(vocabulary, splits)
    return vocabulary, [torch.tensor(split) for split in splits]


def byte_pair_encode(vocabulary, splits):
    """Learn BPE merges on splits[0], the most frequent pair first; apply them to all splits."""
    splits = [bytes(split.tolist()) for split in splits]  # one byte per token: fast merges
    for new in range(len(vocabulary), BPE_VOCAB):
        tokens = np.frombuffer(splits[0], np.uint8).astype(int)
        pairs = 256 * tokens[:-1] + tokens[1:]
        a, b = divmod(np.bincount(pairs).argmax(), 256)  # ties: the lowest tokens
        vocabulary = [*vocabulary, vocabulary[a] + vocabulary[b]]
        splits = [x.replace(bytes([a, b]), bytes([new])) for x in splits]  # from the left
    return vocabulary, [list(split) for split in splits]


# -- The model: pre-norm blocks of causal attention and a ReLU MLP; N(0, 0.02^2) init
class Rotary(common.Sinusoid):
    """Rotate pairs (2i, 2i+1) of queries or keys (..., T, d) by the angle t / 10000^(2i/d)."""

    def forward(self, x):
        # Undo the scaling to norm 1
        waves = (math.sqrt(self.size / 2) * self.vectors(x.shape[-2])).to(x.dtype)  # (T, d)
        sin, cos, a, b = waves[:, ::2], waves[:, 1::2], x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class AddPosition(nn.Module):
    """Map embeddings X (B, T, D) to X + P, LayerNorm(X) + P (Eq. 9) or, without P, X."""

    def __init__(self, pe, n_steps, width):
        super().__init__()
        self.norm = nn.LayerNorm(width) if pe == "layernorm-learned" else nn.Identity()
        amplitude = math.sqrt(width / 2)  # unit-amplitude waves (Eq. 5) have this norm
        self.encoding = ENCODINGS[pe](n_steps, width, amplitude=amplitude)

    def forward(self, x):
        vectors = self.encoding.vectors(x.shape[1])  # (T, D)
        return x if vectors is None else self.norm(x) + vectors.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width, heads, rotate):
        super().__init__()
        self.heads, self.rotate = heads, rotate
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def queries_keys_values(self, x):
        """(B, T, D) -> three (B, H, T, D / H)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.rotate(q), self.rotate(k), v

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.queries_keys_values(x), is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, rotate):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, rotate)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, pe, vocab, width, heads, layers, n_steps):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = AddPosition(pe, n_steps, width)
        rotate = Rotary(n_steps, width // heads) if pe == "rotary" else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, rotate) for _ in range(layers))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def features(self, batch):
        """Return features (T, B, D)."""
        x = self.position(self.embedding(batch.inputs))  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).transpose(0, 1)


@torch.no_grad()
def score_by_distance(model, inputs):
    """Average q.k / sqrt(d) over layers, heads and windows, at distances 0 to T-1."""
    x, means = model.position(model.embedding(inputs)), []
    for block in model.blocks:
        q, k, _ = block.attention.queries_keys_values(block.norm1(x))  # (B, heads, T, d)
        total = torch.einsum("bhqd,bhkd->qk", q, k).double()
        means.append(total / (len(q) * q.shape[1] * math.sqrt(q.shape[-1])))
        x = block(x)
    mean = torch.stack(means).mean(0)
    return [round(mean.diagonal(-distance).mean().item(), 5) for distance in range(len(mean))]


if __name__ == "__main__":
    raise SystemExit(cli.main(Shakespeare))
