"""Tiny Shakespeare: a Transformer with five positional encodings and three tokenizers.

    python lm_shakespeare.py --pe rotary --seed 0 --download     # one cell of Table 1, one seed
    python lm_shakespeare.py --list table1                       # the commands of all its trials
    python lm_shakespeare.py --scale quick --all table1          # a reduced Table 1 on a CPU
    python lm_shakespeare.py --sample "ROMEO:"                   # some lines from that trial: give its flags
    python lm_shakespeare.py --report                            # tables, figures and claims so far

    in   F i r s t _ C i t i z e
    out  i r s t _ C i t i z e n        every token is answered by the next one

These are Tables 1 and 2 and Figs. 1-3 of "Positional Encoding, Tokenization, and Architecture Hyperparameters
for Transformers" by Charles and Lau, here "the document". Its search for the best sizes is --all heads, then
--all layers, then --all context. What it leaves open is our choice: queries, keys and values without bias (as
in its Eq. 3), a last LayerNorm, a constant rate without warm-up or clipping. Byte pairs start from the
characters, and may hold spaces and line ends.

A perplexity is measured on consecutive windows of --context tokens: on all of the validation text but a last
window that would be too short, and on as many windows of the training text, evenly spread. Attention scores
are measured on the first 16,384 tokens of the validation text.
At full size a trial is for a GPU; at quick scale it takes about a minute on one core of an AMD EPYC.
"""

from suite import cli, fast, files, machine, tables
from suite.claims import Claim, Figure, metric
from suite.fetch import fetch
from suite.flags import AT_LEAST_2, COUNT, as_words, cross, declare, place
from suite.progress import say
from suite.task import Task
from suite.trial import load_weights, refuse_another_text, refuse_other_flags

import functools
import hashlib
import math
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import Episode, Refused

ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
DATA = "data/tinyshakespeare.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# ------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------

NAMED = {"pe": "transformer-", "tokenizer": "", "context": "T"}
RECURRENT = ("--model", "--engine", "--hidden", "--embed", "--vocab", "--length", "--held-out")
RECURRENT += ("--no-conv", "--rotate", "--slow", "--combine", "--encode", "--amplitude", "--bands")


class Shakespeare(Task):
    name = "lm_shakespeare"
    named, what_to_lower = NAMED, "--batch, --context, --width or --layers"
    without = ("--pe", "--warmup", *RECURRENT)  # --pe has other choices here, and the rate is constant
    only_alone = ("sample",)

    @staticmethod
    def add_flags(science, plumbing):
        science("--pe", "rotary", "encoding of the position", choices=list(ENCODINGS))
        science("--tokenizer", "char", "what a token is", choices=TOKENIZERS)
        science("--layers", 6, "blocks of attention and network, L", type=COUNT)
        science("--heads", 6, "attention heads of each block, H", type=COUNT)
        science("--context", 256, "tokens that are read at once, T", type=AT_LEAST_2)
        science("--width", 384, "size of a token's vector, D", type=COUNT)
        science("--positions", None, "of a learned table: its maximum length (--context)", type=COUNT)
        plumbing("--data", DATA, "a plain text", type=place, metavar="FILE")
        plumbing("--download", False, "fetch tiny Shakespeare if --data is missing", action="store_true")
        plumbing("--sample", None, "draw what follows TEXT from the trained trial", metavar="TEXT")

    def __init__(self, args, config, folder):
        super().__init__(args, config, folder)
        self.tokenizer = self.train = self.valid = None  # build makes them

    @classmethod
    def defaults(cls, args):
        return {}

    def check(self):
        a = self.args
        if a.width % a.heads:
            raise Refused(f"--heads {a.heads} does not divide --width {a.width}")
        size = a.width // a.heads if a.pe == "rotary" else a.width
        if a.pe in ("sin", "rotary") and size % 2:
            what = "--width, of rotary --width / --heads,"
            raise Refused(f"--pe {a.pe} is pairs of sine and cosine: {what} must be even, got {size}")
        if a.positions and (ENCODINGS[a.pe] is not common.Learned or a.context > a.positions):
            got = f"got --pe {a.pe} and --context {a.context}"
            raise Refused(f"--positions {a.positions} needs a learned --pe and no larger --context: {got}")

    def positions(self):
        return self.args.positions or self.args.context

    def rate(self, i):
        return self.args.lr

    def is_small(self):
        return self.args.width < 256

    def memory(self):
        """Bytes: weights of blocks and positions, their gradients, Adam's two moments; and half of what the
        blocks keep for the backward pass, since bf16 needs no more. The layers are not built for this: a
        million of them would take too long."""
        a = self.args
        weights = 12 * a.layers * a.width**2 + self.positions() * a.width
        return 4 * (4 * weights + 6 * a.layers * a.batch * a.context * a.width)

    def begin(self):
        """Find the text, which --download gets. With --sample, draw from the trial, and end."""
        if self.args.download:
            fetch([ADDRESS], Path(self.args.data), lambda text: hashlib.sha256(text).hexdigest() == SHA256)
        self.config["text_sha256"] = text_sha256(self.args.data)
        return None if self.args.sample is None else self.sample()

    @classmethod
    def check_all(cls, tasks):
        if Path(data := tasks[0].args.data).exists():
            refuse_another_text(tasks, text_sha256(data))

    def build(self, device):
        context = self.args.context
        self.tokenizer, train, valid = tokenized(read_text(self.args.data), self.args.tokenizer)
        if context >= (shorter := min(len(train), len(valid))):
            raise Refused(f"--context {context} needs a longer text: one part has {shorter} tokens")
        self.train, self.valid = train.to(device), valid.to(device)

    def model(self):
        a, vocab = self.args, len(self.tokenizer.types)
        return Transformer(a.pe, vocab, a.width, a.heads, a.layers, self.positions())

    def windows(self, tokens, starts):
        cut = tokens.unfold(0, self.args.context + 1, 1)[starts]  # (B, T+1)
        return Episode(cut[:, :-1], cut[:, 1:], slice(None))

    def training_episode(self, i):
        k = common.key(self.seed, common.TRAINING, i, device=self.train.device)
        starts = len(self.train) - self.args.context
        return self.windows(self.train, common.uniform_integers(k, (self.batch,), starts))

    def loss_and_accuracy(self, model, episode, engine):
        features = model.features(episode.inputs).flatten(0, 1)
        return fast.cross_entropy(features, model.readout, episode.targets.flatten())

    def parts(self, tokens):
        """Consecutive windows of the validation part, or as many spread over the training part.

        They come about 16,384 tokens at a time, whatever --batch is: the last bits of a sum depend on how it
        is cut.
        """
        context, at_once = self.args.context, max(1, 2**14 // self.args.context)
        count, end = (len(self.valid) - 1) // context, len(tokens) - context - 1
        n = torch.arange(count, device=tokens.device)
        starts = n * context if tokens is self.valid else n * end // max(1, count - 1)
        return [self.windows(tokens, some) for some in starts.split(at_once)]

    @torch.no_grad()
    def perplexity_of(self, model, tokens, engine):
        parts = self.parts(tokens)
        counts = [len(part.inputs) for part in parts]
        means = [self.loss_and_accuracy(model, part, engine)[0].double() for part in parts]
        return common.perplexity(sum(mean * n for mean, n in zip(means, counts)) / sum(counts))

    def evaluate(self, model, engine):
        return {
            "train_perplexity": self.perplexity_of(model, self.train, engine),
            "valid_perplexity": self.perplexity_of(model, self.valid, engine),
            "types": len(self.tokenizer.types),
            "train_tokens": len(self.train),
            "valid_tokens": len(self.valid),
            # Of words, without the spaces between them
            "valid_characters": sum(len(self.tokenizer.types[n]) for n in self.valid.tolist()),
            "encoding_parameters": sum(p.numel() for p in model.position.parameters()),
            "score_by_distance": score_by_distance(model, self.parts(self.valid)[0].inputs),
        }

    def hint(self):
        """The command that samples from this trial: all flags that are off the paper scale's defaults."""
        text = read_text(self.args.data)
        words = as_words("sample", text.split(maxsplit=1)[0][:20] if text.strip() else text[:1])
        for flag, usual in declare(type(self)).defaults.items():
            value = getattr(self.args, flag)
            if flag in {*self.config, "data", "out"} and value not in (None, usual):
                words += as_words(flag, value)
        return f"to sample from it: python {self.name}.py {shlex.join(words)}"

    @torch.no_grad()
    def sample(self):
        """Print TEXT and 400 tokens more, each drawn as the trained trial predicts it."""
        path, device = self.folder / "last.pt", machine.choose_device(self.args.device)
        if not path.exists():
            how = "give all flags that it was trained with, or train it without --sample"
            raise Refused(f"no trained trial in {self.folder}: {how}")
        refuse_other_flags(self.folder, self.config)
        self.build(device)
        pieces = self.tokenizer.pieces(self.args.sample)
        if not pieces or not set(pieces) <= self.tokenizer.base.keys():
            raise Refused(f"--sample {self.args.sample!r} is empty, or has what does not occur in --data")
        model, tokens = self.model().to(device), self.tokenizer.encode(pieces).tolist()
        load_weights(model, path, device, "model")
        if not files.finished_metrics(self.folder):
            say(f"{self.folder} is not finished: sampled as its last checkpoint would", file=sys.stderr)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(400):
            inputs = torch.tensor([tokens[-self.args.context :]], device=device)
            chances = model(inputs)[0, -1].double().softmax(0).cpu()
            tokens.append(torch.multinomial(chances, 1, generator=generator).item())
        print(self.tokenizer.decode(tokens))
        return 0


# ------------------------------------------------------------------------------------------------------------
# The text and its tokens
# ------------------------------------------------------------------------------------------------------------

TOKENIZERS = ["char", "word", "bpe"]
BYTE_PAIR_TYPES = 159  # the document's; characters and merged pairs together


def text_sha256(path):
    return hashlib.sha256(read_text(path).encode()).hexdigest()


def read_text(path):
    try:
        return Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = f"({error}); --download fetches tiny Shakespeare"
        raise Refused(f"no text in UTF-8 at --data {path} {why}") from None


class Tokenizer:
    """A text's pieces as integers. The pieces are, by name:

    char: the characters; word: words and punctuation marks, without the spaces between them;
    bpe: the characters, and pairs of pieces that occur often side by side.
    """

    def __init__(self, name, text):
        self.name, self.pairs = name, []
        self.types = sorted(set(self.pieces(text)))
        self.base = {piece: n for n, piece in enumerate(self.types)}

    def pieces(self, text):
        return re.findall(r"\w+|[^\w\s]", text) if self.name == "word" else text

    def learn_pairs(self, text):
        """Byte-pair encoding: the text's most frequent pair of neighbours becomes a type, again and again.

        Of equally frequent pairs, the one of the lowest integers is taken. A pair that occurs once is left
        alone. The integers are kept as bytes: `replace` then goes from the left and without overlap, as it
        should.
        """
        if len(self.types) > BYTE_PAIR_TYPES:
            many = f"{len(self.types)} characters"
            raise Refused(f"--tokenizer bpe has {BYTE_PAIR_TYPES} types, the text {many}")
        ids = bytes(self.encode(text).tolist())
        for new in range(len(self.types), BYTE_PAIR_TYPES):
            n = np.frombuffer(ids, np.uint8).astype(int)
            counts = np.bincount(256 * n[:-1] + n[1:], minlength=1)
            if counts.max() < 2:
                break
            a, b = divmod(int(counts.argmax()), 256)
            self.types.append(self.types[a] + self.types[b])
            self.pairs.append(bytes([a, b]))
            ids = ids.replace(self.pairs[-1], bytes([new]))

    def encode(self, pieces):
        ids = [self.base[piece] for piece in pieces]
        for new, pair in enumerate(self.pairs, len(self.base)):
            ids = bytes(ids).replace(pair, bytes([new]))
        return torch.tensor(list(ids), dtype=torch.int64)

    def decode(self, ids):
        return (" " if self.name == "word" else "").join(self.types[n] for n in ids)


@functools.lru_cache(maxsize=1)  # seeds that share a GPU share the tokens
def tokenized(text, name):
    """-> (tokenizer, training tokens, validation tokens): split after 90% of the pieces."""
    tokenizer = Tokenizer(name, text)
    pieces = tokenizer.pieces(text)
    cut = len(pieces) * 9 // 10  # of words, where words are the tokens: as in the document
    if name == "bpe":
        tokenizer.learn_pairs(pieces[:cut])
    return tokenizer, tokenizer.encode(pieces[:cut]), tokenizer.encode(pieces[cut:])


# ------------------------------------------------------------------------------------------------------------
# The model: pre-norm blocks of causal attention and a ReLU network, all weights N(0, 0.02) at first
# ------------------------------------------------------------------------------------------------------------


class Waves(common.Sinusoid):
    """Sines and cosines with an amplitude of one (the document's Eq. 5), in double precision."""

    def unscaled(self, time):
        return math.sqrt(self.size / 2) * super().unscaled(time)  # undoes the unit norm


class Rotary(Waves):
    """It turns the pairs (2i, 2i+1) of queries or keys (..., T, d) by the angles t / 10000^(2i/d).

    The product of a query and a key then depends on their distance alone (Su et al., 2021). No position is
    the last.
    """

    def forward(self, x):
        waves = self.vectors(x.shape[-2]).to(x.dtype)  # (T, d), sines and cosines of these angles
        sin, cos, a, b = waves[:, 0::2], waves[:, 1::2], x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


ENCODINGS = {  # --pe -> the vectors P that are added to the tokens'; rotary turns queries and keys instead
    "none": common.Vanilla,
    "learned": common.Learned,
    "sin": Waves,
    "rotary": common.Vanilla,
    "layernorm-learned": common.Learned,
}


class Position(nn.Module):
    """Token vectors X (B, T, D) -> X + P, or LayerNorm(X) + P (Eq. 9), or X itself where there is no P."""

    def __init__(self, pe, positions, width):
        super().__init__()
        self.norm = nn.LayerNorm(width) if pe == "layernorm-learned" else nn.Identity()
        self.encoding = ENCODINGS[pe](positions, width)

    def forward(self, x):
        vectors = self.encoding.vectors(x.shape[1])  # (T, D)
        return x if vectors is None else self.norm(x) + vectors.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width, heads, turn):
        super().__init__()
        self.heads, self.turn = heads, turn
        self.read = nn.Linear(width, 3 * width, bias=False)
        self.write = nn.Linear(width, width)

    def queries_keys_values(self, x):
        """(B, T, D) -> three (B, heads, T, d)."""
        q, k, v = self.read(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.turn(q), self.turn(k), v

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.queries_keys_values(x), is_causal=True)
        return self.write(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, turn):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, turn)
        self.norm2 = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, pe, vocab, width, heads, layers, positions):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = Position(pe, positions, width)
        turn = Rotary(positions, width // heads) if pe == "rotary" else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, turn) for _ in range(layers))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def features(self, inputs):
        """(B, T) integers -> (B, T, D), what is read out."""
        x = self.position(self.embedding(inputs))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, inputs):
        """(B, T) integers -> (B, T, K) logits of the next token."""
        return self.readout(self.features(inputs))


@torch.no_grad()
def score_by_distance(model, inputs):
    """The mean attention score of a token and the one `distance` before it, for distance = 0..T-1.

    A score is q.k / sqrt(d), before the softmax. The mean is over layers, heads, windows and pairs of tokens.
    """
    x, means = model.position(model.embedding(inputs)), []
    for block in model.blocks:
        q, k, _ = block.attention.queries_keys_values(block.norm1(x))  # (B, heads, T, d)
        total = torch.einsum("bhqd,bhkd->qk", q, k).double()
        means.append(total / (q.shape[0] * q.shape[1] * math.sqrt(q.shape[-1])))
        x = block(x)
    mean = torch.stack(means).mean(0)
    return [round(mean.diagonal(-distance).mean().item(), 5) for distance in range(len(mean))]


# ------------------------------------------------------------------------------------------------------------
# The trials of each table and figure, what to report, and what the document claims
# ------------------------------------------------------------------------------------------------------------

SCALES = {
    "paper": dict(iterations=1000, batch=32, lr=1e-4, clip=0.0, save_every=100, log_every=10),
    "quick": dict(layers=4, heads=4, width=128, context=64, batch=8, lr=1e-3, iterations=400),
    "smoke": dict(layers=2, heads=2, width=16, context=8, batch=4)
    | dict(iterations=20, save_every=10, log_every=5, device="cpu"),
}


def grids(seeds, best, heads, layers, context):
    """Later sweeps keep heads and layers of `best`: the document's at full size, else chosen before them."""
    return {
        "table1": cross(pe=list(ENCODINGS), seed=seeds),
        "heads": cross(pe="rotary", heads=heads, seed=seeds),
        "layers": cross(pe="rotary", heads=best["heads"], layers=layers, seed=seeds),
        "context": cross(pe="rotary", **best, context=context, seed=seeds),
        "table2": cross(pe="rotary", tokenizer=TOKENIZERS, **best, seed=seeds),
        "decay": cross(pe=list(ENCODINGS), seed=seeds),
    }


SIZES = dict(heads=[2, 4, 6, 8, 16, 32, 64], layers=[2, 4, 6, 16, 32], context=[128, 256, 512])
GRIDS = {
    "paper": grids(range(3), dict(heads=2, layers=16), **SIZES),
    "quick": grids(range(3), dict(heads=2, layers=4), [2, 4, 8], [2, 4], [32, 64]),
    "smoke": grids(range(1), dict(heads=2, layers=2), [2, 4], [1, 2], [4, 8]),
}

perplexity, train_perplexity = metric("valid_perplexity"), metric("train_perplexity")


def nats_per_character(outcome):
    found = outcome.metrics
    return math.log(found["valid_perplexity"]) * found["valid_tokens"] / found["valid_characters"]


def near(outcome):
    scores = outcome.metrics["score_by_distance"]
    return float(np.mean(scores[1 : 1 + max(1, len(scores) // 8)]))


def far(outcome):
    scores = outcome.metrics["score_by_distance"]
    return float(np.mean(scores[len(scores) // 2 :]))


def tokens_per_type(outcome):
    return outcome.metrics["train_tokens"] / outcome.metrics["types"]


SWEPT = {"validation perplexity": perplexity, "seconds": lambda outcome: outcome.seconds}
BASIC = {"train perplexity": train_perplexity} | SWEPT
COUNTED = {"types": metric("types"), "training tokens": metric("train_tokens")}
PER_TEXT = {"tokens per type": tokens_per_type, "validation nats per character": nats_per_character}
NEAR_AND_FAR = {"score at distances 1..T/8": near, "score at distances T/2..T-1": far}
DOCUMENT = {  # train perplexity, validation perplexity, seconds
    "learned": "5.24 6.13 102.39",
    "sin": "8.37 8.62 101.22",
    "rotary": "3.86 4.80 114.64",
    "layernorm-learned": "6.77 7.57 101.35",
    "char": "3.86 4.80 114.64 (6 layers, 6 heads)",
    "word": "31.80 310.27 321.22 (16 layers, 2 heads)",
    "bpe": "6.84 14.64 303.09 (16 layers, 2 heads)",
}


def compared(flags):
    """What a row of Table 1 or Table 2 stands for."""
    return flags.get("tokenizer", flags["pe"])


def columns(outcomes, scale, document=None, counted=(), per_text=()):
    """Means over seeds, and beside them the document's where size and text are the same."""
    found = {"n": tables.count}
    found |= {name: tables.mean(BASIC[name], 2) for name in BASIC}
    found |= {name: tables.mean(COUNTED[name], 0) for name in counted}
    found |= {name: tables.mean(PER_TEXT[name], 2) for name in per_text}
    found["95% bootstrap interval of validation"] = tables.interval(perplexity)
    found["validation of each seed"] = tables.of_each(perplexity)
    texts = {one.config.get("text_sha256") for one in outcomes.finished()}
    if document and scale == "paper" and texts == {SHA256}:
        there = lambda trials: document.get(compared(trials.trials[0][0]), "-")
        found["document: train, validation, seconds"] = there
    return [found]


def losses(outcome):
    yield "training", compared(outcome.flags), dict(zip(outcome.curve["iteration"], outcome.curve["loss"]))


def scores(outcome):
    yield "validation text", outcome.flags["pe"], dict(enumerate(outcome.metrics["score_by_distance"]))


NOTE_OF_SWEEPS = [
    "  The document's best are 2 heads, then 16 layers, then a context of 256; its Fig. 2 is without numbers."
]
NOTE_OF_TOKENIZERS = [
    "  Perplexities are per token; compare tokenizers per character (of words, spaces do not count).",
    "  Here the three share one model. The document's characters are its run of 6 layers and 6 heads, the",
    "  others of 16 and 2: that they take 2.8 and 2.6 times as long is not the tokenizer's doing alone.",
]
NAMES = {  # of the legend
    "none": "none: no encoding",
    "learned": "learned: a table, added",
    "sin": "sin: sinusoid, added",
    "rotary": "rotary: turns queries, keys",
    "layernorm-learned": "layernorm-learned",
    "char": "characters",
    "word": "words",
    "bpe": "byte pairs",
}
LOSS = dict(x="iteration", curves=losses, y="loss", needs_curve=True, zero=False, names=NAMES)
TABLE1 = functools.partial(columns, document=DOCUMENT)
TABLE2 = functools.partial(columns, document=DOCUMENT, counted=COUNTED, per_text=PER_TEXT)
TOKENS = BASIC | COUNTED | PER_TEXT
SWEEP = dict(tables=columns, note=lambda scale: NOTE_OF_SWEEPS, zero=False)
DECAY = dict(x="distance", curves=scores, y="mean q.k / sqrt(d)", zero=False, names=NAMES)
FIGURES = {
    "table1": Figure("Positional encodings", BASIC, tables=TABLE1, **LOSS),
    "heads": Figure("Attention heads", SWEPT, "heads", **SWEEP),
    "layers": Figure("Layers", SWEPT, "layers", **SWEEP),
    "context": Figure("Context", SWEPT, "context", **SWEEP),
    "table2": Figure("Tokenizers", TOKENS, tables=TABLE2, note=lambda scale: NOTE_OF_TOKENIZERS, **LOSS),
    "decay": Figure("Attention score by distance", NEAR_AND_FAR, **DECAY),
}

ROTARY, LEARNED, SIN, NORMED = (dict(pe=pe) for pe in ("rotary", "learned", "sin", "layernorm-learned"))
CHAR, WORD, BPE = (dict(tokenizer=name) for name in TOKENIZERS)
LAYERS_16, CONTEXT_256, PAPER = dict(layers=16), dict(context=256), dict(scales=("paper",))
FLAT = "scores do not fall with distance under {pe}"
CLAIMS = [  # what is worse has the higher perplexity
    Claim("table1", "learned is worse than rotary", perplexity, LEARNED, ROTARY),
    Claim("table1", "layernorm-learned is worse than learned", perplexity, NORMED, LEARNED),
    Claim("table1", "sin is worse than layernorm-learned", perplexity, SIN, NORMED),
    Claim("heads", "the most heads are worse than the fewest", perplexity, dict(heads=max), dict(heads=min)),
    Claim("layers", "the fewest layers are worse than 16", perplexity, dict(layers=min), LAYERS_16, **PAPER),
    Claim("layers", "the most layers are worse than 16", perplexity, dict(layers=max), LAYERS_16, **PAPER),
    Claim("context", "128 tokens are worse than 256", perplexity, dict(context=128), CONTEXT_256, **PAPER),
    Claim("context", "512 tokens are worse than 256", perplexity, dict(context=512), CONTEXT_256, **PAPER),
    Claim("table2", "words are worse than characters, per token", perplexity, WORD, CHAR),
    Claim("table2", "byte pairs are worse than characters, per token", perplexity, BPE, CHAR),
    Claim("table2", "byte pairs are worse than characters, per character", nats_per_character, BPE, CHAR),
    Claim("decay", "scores fall with distance under rotary", near, ROTARY, ROTARY, than=far),
    *(Claim("decay", FLAT, near, pe, pe, than=far, where=pe, margin="0.1") for pe in (LEARNED, SIN, NORMED)),
]
Shakespeare.scales, Shakespeare.grids = SCALES, GRIDS
Shakespeare.figures, Shakespeare.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(Shakespeare))
