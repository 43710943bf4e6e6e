"""Tiny Shakespeare: a Transformer with five positional encodings and three tokenizers (section 9).

    python lm_shakespeare.py --pe rotary --seed 0 --download     # one cell of Table 1, one seed
    python lm_shakespeare.py --list table1                       # the commands of all its trials
    python lm_shakespeare.py --scale quick --all table1          # a reduced Table 1 on a CPU
    python lm_shakespeare.py --search                            # heads, then layers, then context
    python lm_shakespeare.py --sample "ROMEO:"                   # some lines from the trained trial
    python lm_shakespeare.py --report                            # tables, figures and claims so far

    in   F i r s t _ C i t i z e
    out  i r s t _ C i t i z e n        every token is answered by the next one

Tables 1 and 2 and Figs. 1-3 of "Positional Encoding, Tokenization, and Architecture Hyperparameters for
Transformers" by Charles and Lau, here "the document". What it leaves open is ours: queries, keys and values
without bias (as its Eq. 3), a last LayerNorm, a constant rate without warm-up or clipping; byte pairs start
from the characters, and may hold spaces and line ends. A perplexity is that of consecutive windows of
--context tokens: all of the validation text (but a short last one), and as many, evenly spread, of the
training text. Attention scores are those of the first 16,384 tokens of the validation text.
At full size a trial is for a GPU; at quick scale it takes about a minute on one core of an AMD EPYC.
"""

import functools
import hashlib
import math
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
import report
import trial
from common import Refused, bootstrap_interval
from download import Stopped, fetch
from report import Claim, Figure, higher, not_higher
from trial import COUNT, cross, say

ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
DATA = "data/tinyshakespeare.txt"
SIZE, SHA256 = 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# ------------------------------------------------------------------------------------------------------------
# The text and its tokens
# ------------------------------------------------------------------------------------------------------------

WORDS = re.compile(r"\w+|[^\w\s]")
BYTE_PAIR_TYPES = 159  # the document's; characters and merged pairs together


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def read(path):
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Refused(
            f"no text at --data {path} ({error.strerror}); --download fetches tiny Shakespeare"
        ) from None


def obtain(args, stop):
    """Tiny Shakespeare, whole and unaltered; another text at a path of the user's own is left alone."""
    path = Path(args.data)
    fetch([ADDRESS], path, stop, SHA256)
    found = sha256(read(path))
    if found == SHA256:
        say(f"{path}: {SIZE:,} bytes, SHA-256 as expected")
        return
    other = f"{path} holds another text than tiny Shakespeare: its SHA-256 is {found}"
    if args.data == DATA:
        raise Refused(f"{other} (remove it, or name a text with --data)")
    say(other)


def join_pair(ids, pair, new):
    """Every `pair` of neighbours, from the left and without overlap, becomes the one integer `new`."""
    at = np.flatnonzero((ids[:-1] == pair[0]) & (ids[1:] == pair[1]))
    if pair[0] == pair[1] and len(at):  # in a run such as a a a only every other place counts
        begins = np.r_[True, np.diff(at) > 1]
        run = np.maximum.accumulate(np.where(begins, np.arange(len(at)), 0))
        at = at[(np.arange(len(at)) - run) % 2 == 0]
    ids = ids.copy()
    ids[at] = new
    return np.delete(ids, at + 1)


def learn_pairs(ids, types, wanted):
    """Byte-pair encoding: the most frequent pair of neighbours becomes a type, until there are `wanted`.

    Of equally frequent pairs the one of the lowest integers is taken; a pair that occurs once is left alone.
    """
    pairs = []
    for new in range(types, wanted):
        counts = np.bincount(ids[:-1] * wanted + ids[1:])
        if counts.size == 0 or counts.max() < 2:
            break
        pairs.append(divmod(int(counts.argmax()), wanted))
        ids = join_pair(ids, pairs[-1], new)
    return pairs


class Tokenizer:
    """char: the text's characters. word: words and marks, spaces lost. bpe: characters, then merged pairs."""

    def __init__(self, name, text):
        self.name, self.pairs = name, []
        self.types = sorted(set(self.pieces(text)))
        self.base = {piece: n for n, piece in enumerate(self.types)}

    def pieces(self, text):
        return WORDS.findall(text) if self.name == "word" else text

    def learn(self, text):
        if len(self.types) > BYTE_PAIR_TYPES:
            raise Refused(
                f"the text has {len(self.types)} characters, --tokenizer bpe {BYTE_PAIR_TYPES} types"
            )
        self.pairs = learn_pairs(self.encode(text), len(self.types), BYTE_PAIR_TYPES)
        for a, b in self.pairs:
            self.types.append(self.types[a] + self.types[b])

    def encode(self, text):
        pieces = self.pieces(text)
        try:
            ids = np.array([self.base[piece] for piece in pieces], dtype=np.int64)
        except KeyError as error:
            raise Refused(f"{error} is not among the text's {len(self.base)} pieces") from None
        for new, pair in enumerate(self.pairs, len(self.base)):
            ids = join_pair(ids, pair, new)
        return ids

    def decode(self, ids):
        return (" " if self.name == "word" else "").join(self.types[n] for n in ids)


@functools.lru_cache(maxsize=1)
def tokenized(content, name):
    """The text -> (tokenizer, training tokens, validation tokens): the first 90% and the rest.

    Byte pairs are learned from the first 90% of the characters; words are split after tokenizing.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise Refused("--data is not a text in UTF-8") from None
    tokenizer = Tokenizer(name, text)
    if name == "bpe":
        training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
        tokenizer.learn(training)
        return tokenizer, tokenizer.encode(training), tokenizer.encode(validation)
    ids = tokenizer.encode(text)
    return tokenizer, *np.split(ids, [len(ids) * 9 // 10])


def tokens_of(args):
    return tokenized(read(args.data), args.tokenizer)


# ------------------------------------------------------------------------------------------------------------
# The model: pre-norm blocks of causal attention and a ReLU network, all weights N(0, 0.02) at first
# ------------------------------------------------------------------------------------------------------------

ENCODINGS = ("none", "learned", "sin", "rotary", "layernorm-learned")


class Attention(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.read = nn.Linear(width, 3 * width, bias=False)
        self.write = nn.Linear(width, width)

    def queries_keys_values(self, x):
        """(B, T, D) -> three (B, heads, T, d)."""
        q, k, v = self.read(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return (self.rotary(q), self.rotary(k), v) if self.rotary else (q, k, v)

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.queries_keys_values(x), is_causal=True)
        return self.write(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, rotary)
        self.norm2 = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, pe, vocab, width, heads, layers, positions):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = common.AddedEncoding(pe, positions, width)
        rotary = common.Rotary(positions, width // heads) if pe == "rotary" else None
        self.blocks = nn.ModuleList(Block(width, heads, rotary) for _ in range(layers))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def features(self, inputs):
        """(B, T) integers -> (B, T, D)."""
        x = self.position(self.embedding(inputs))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, inputs):
        """(B, T) integers -> (B, T, K) logits of the next token."""
        return self.readout(self.features(inputs))

    def loss_and_accuracy(self, episode):
        features, targets = self.features(episode.inputs).flatten(0, 1), episode.targets.flatten()
        return common.cross_entropy(features, self.readout.weight, self.readout.bias, targets)


def make_model(task, args):
    vocab = len(tokens_of(args)[0].types)
    return Transformer(args.pe, vocab, args.width, args.heads, args.layers, task.positions(args))


# ------------------------------------------------------------------------------------------------------------
# A trial's data, and what is measured
# ------------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    inputs: torch.Tensor  # (B, T) integers
    targets: torch.Tensor  # (B, T), the same a token later


class Shakespeare:
    def __init__(self, args, device):
        self.tokenizer, train, valid = tokens_of(args)
        if args.context >= (shorter := min(len(train), len(valid))):
            raise Refused(f"--context {args.context} needs a longer text: one part has {shorter} tokens")
        self.args, self.train, self.valid = args, *(torch.from_numpy(x).to(device) for x in (train, valid))
        self.within = torch.arange(args.context + 1, device=device)

    def windows(self, tokens, starts):
        cut = tokens[starts[:, None] + self.within]  # (B, T+1)
        return Windows(cut[:, :-1], cut[:, 1:])

    def training_episode(self, i):
        k = common.key(self.args.seed, common.TRAINING, i, device=self.train.device)
        starts = len(self.train) - self.args.context
        return self.windows(self.train, common.uniform_integers(k, (self.args.batch,), starts))

    def parts(self, tokens):
        """Consecutive windows over a part of the text, as many as the validation part has, some at a time."""
        count, end = (len(self.valid) - 1) // self.args.context, len(tokens) - self.args.context - 1
        starts = torch.arange(count, device=tokens.device) * self.args.context
        if tokens is self.train:
            starts = torch.arange(count, device=tokens.device) * end // max(1, count - 1)
        # Some 16,384 tokens at a time, not --batch windows: the last bits would depend on that
        return [self.windows(tokens, some) for some in starts.split(max(1, 2**14 // self.args.context))]

    @torch.no_grad()
    def perplexity(self, model, tokens):
        parts = self.parts(tokens)
        total = sum(model.loss_and_accuracy(part)[0].double() * len(part.inputs) for part in parts)
        return common.perplexity(total / sum(len(part.inputs) for part in parts))

    def evaluate(self, model):
        characters = sum(len(self.tokenizer.types[n]) for n in self.valid.tolist())
        return {
            "train_perplexity": self.perplexity(model, self.train),
            "valid_perplexity": self.perplexity(model, self.valid),
            "types": len(self.tokenizer.types),
            "train_tokens": len(self.train),
            "valid_tokens": len(self.valid),
            "valid_characters": characters,  # in the tokens; for words without the spaces between them
            "encoding_parameters": sum(p.numel() for p in model.position.parameters()),
            "score_by_distance": score_by_distance(model, self.parts(self.valid)[0].inputs),
        }


@torch.no_grad()
def score_by_distance(model, inputs):
    """Mean attention score of a token with the one `distance` before it, for distance = 0..T-1.

    The score is that before the softmax, q.k / sqrt(d), over all layers, heads, windows and pairs of tokens.
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
# The life of a trial, a text drawn from it, and the search of the document's section 3.2
# ------------------------------------------------------------------------------------------------------------


# Flags of the recurrent models. The document has no warm-up, and its rate is constant.
RECURRENT = ("--model", "--combine", "--hidden", "--embed", "--vocab", "--length", "--held-out", "--warmup")
AT_LEAST_2 = trial.number(int, "a whole number of at least 2", lambda x: x >= 2)


def add_flags(group):
    group.title = "model and data (the defaults are the document's)"
    flag = group.add_argument
    flag("--pe", choices=ENCODINGS, default="rotary", help="encoding of the position (rotary)")
    flag("--tokenizer", choices=["char", "word", "bpe"], default="char", help="what a token is (char)")
    flag("--layers", type=COUNT, default=6, help="blocks of attention and network, L (%(default)s)")
    flag("--heads", type=COUNT, default=6, help="attention heads of each block, H (%(default)s)")
    flag("--context", type=AT_LEAST_2, default=256, help="tokens that are read at once, T (%(default)s)")
    flag("--width", type=COUNT, default=384, help="size of a token's vector, D (%(default)s)")
    flag("--positions", type=COUNT, help="of a learned table: its maximum length (--context)")
    flag("--data", default=DATA, metavar="FILE", help="a plain text (%(default)s)")
    flag("--download", action="store_true", help="first fetch tiny Shakespeare if --data is missing")
    flag("--search", action="store_true", help="try heads, then layers, then context; keep the best of each")
    flag("--sample", metavar="TEXT", help="draw what follows TEXT from the trained trial")


def check(args):
    if args.width % args.heads:
        raise Refused(f"--heads {args.heads} does not divide --width {args.width}")
    if args.pe == "rotary" and (size := args.width // args.heads) % 2:
        raise Refused(f"--pe rotary turns pairs: --width / --heads must be even, got {size}")
    if args.pe == "sin" and args.width % 2:
        raise Refused(f"--pe sin needs an even --width (sine and cosine pairs), got {args.width}")
    if args.positions and args.pe not in ("learned", "layernorm-learned"):
        raise Refused(f"--positions is the length of a learned table; --pe {args.pe} has none")
    if args.positions and args.context > args.positions:
        raise Refused(f"the learned encoding has --positions {args.positions}, --context is {args.context}")
    if args.search and (args.overwrite or (args.list, args.all, args.report, args.sample) != (None,) * 4):
        raise Refused("--search goes its own way: without --list, --all, --report, --sample, --overwrite")


def run(task, args, words, stop):
    try:
        if args.download:
            obtain(args, stop)
    except Stopped:
        return trial.STOPPED
    args.text_sha256 = sha256(read(args.data))
    if args.search:
        return search(task, args, words, stop)
    if args.sample is not None:
        return sample(task, args)
    return trial.run(task, args, words, stop)


def sample(task, args, count=400):
    """Print TEXT and what a trained trial makes of it."""
    folder = trial.trial_folder(task, args)
    trial.refuse_other_flags(folder, args)
    device = trial.choose_device(args)
    if not (folder / "last.pt").exists():
        raise Refused(f"no trained trial in {folder} (the same command without --sample trains it)")
    tokenizer = tokens_of(args)[0]
    prompt = torch.from_numpy(tokenizer.encode(args.sample)).to(device)
    if not len(prompt):
        raise Refused("--sample needs a text to begin with")
    state = trial.resume(task, args, device, folder, sys.stderr)
    if state.iteration == 0:
        raise Refused(f"no checkpoint in {folder} can be used")
    print(tokenizer.decode(continuation(state.model, prompt, args.context, count, args.seed)))
    return 0


@torch.no_grad()
def continuation(model, tokens, context, count, seed):
    """`tokens` and `count` more, each drawn as the model predicts it from the last `context` ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens.tolist()
    for _ in range(count):
        inputs = torch.tensor([tokens[-context:]], device=model.readout.bias.device)
        chances = model(inputs)[0, -1].double().softmax(0).cpu()
        tokens.append(torch.multinomial(chances, 1, generator=generator).item())
    return tokens


def search(task, args, words, stop):
    """One trial at a time, each in its usual folder: an interrupted search goes on where it was."""
    words = [word for word in words if word != "--search"]
    best, lowest = {flag: getattr(args, flag) for flag in SEARCH[args.scale]}, math.inf
    rows = [[*best, "validation perplexity"]]
    for flag, values in SEARCH[args.scale].items():  # refuse what cannot be run now rather than after hours
        for value in values:
            trial.complete(task, Namespace(**(vars(args) | {flag: value, "search": False})))
    for flag, values in SEARCH[args.scale].items():
        for tried in [best | {flag: value} for value in values]:
            chosen = Namespace(**(vars(args) | tried | {"search": False}))
            trial.complete(task, chosen)
            command = words + [word for k, v in tried.items() for word in trial.as_flag(k, v)]
            print(f"[{flag}] python {task.name}.py {shlex.join(command)}", flush=True)
            code = trial.run(task, chosen, command, stop)
            if code == trial.NOT_FINITE:  # no candidate, but no reason to stop either
                continue
            if code:
                return code
            metrics = trial.finished(trial.trial_folder(task, chosen))["metrics"]
            rows.append([*map(str, tried.values()), f"{metrics['valid_perplexity']:.4f}"])
            if metrics["valid_perplexity"] < lowest:
                best, lowest = tried, metrics["valid_perplexity"]
    if lowest == math.inf:
        return trial.NOT_FINITE
    report.print_columns(rows, "  ")
    print("best:", *(word for k, v in best.items() for word in trial.as_flag(k, v)))
    return 0


# ------------------------------------------------------------------------------------------------------------
# The trials of each table and figure, what to report, and what the document claims
# ------------------------------------------------------------------------------------------------------------

SCALES = {
    "paper": dict(iterations=1000, batch=32, lr=1e-4, clip=0.0, save_every=100, log_every=10),
    "quick": dict(layers=4, heads=4, width=128, context=64, batch=8, lr=1e-3, iterations=400),
    "smoke": dict(layers=2, heads=2, width=16, context=8, batch=4, iterations=20, save_every=10, log_every=5),
}
SEARCH = {
    "paper": dict(heads=[2, 4, 6, 8, 16, 32, 64], layers=[2, 4, 6, 16, 32], context=[128, 256, 512]),
    "quick": dict(heads=[2, 4, 8], layers=[2, 4], context=[32, 64]),
    "smoke": dict(heads=[2, 4], layers=[1, 2], context=[4, 8]),
}
TOKENIZERS = ["char", "word", "bpe"]


def grids(scale, seeds, heads, layers):
    """Each sweep starts from the best of the one before it, heads and layers: at full size the document's."""
    sizes, encodings = SEARCH[scale], cross(pe=list(ENCODINGS), seed=seeds)
    return {
        "table1": encodings,
        "heads": cross(pe="rotary", heads=sizes["heads"], seed=seeds),
        "layers": cross(pe="rotary", heads=heads, layers=sizes["layers"], seed=seeds),
        "context": cross(pe="rotary", heads=heads, layers=layers, context=sizes["context"], seed=seeds),
        "table2": cross(pe="rotary", tokenizer=TOKENIZERS, heads=heads, layers=layers, seed=seeds),
        "decay": encodings,
    }


GRIDS = {
    "paper": grids("paper", range(3), heads=2, layers=16),
    "quick": grids("quick", range(3), heads=2, layers=4),
    "smoke": grids("smoke", range(1), heads=2, layers=2),
}


def train_perplexity(metrics):
    return metrics["train_perplexity"]


def valid_perplexity(metrics):
    return metrics["valid_perplexity"]


def seconds(metrics):
    return metrics["seconds"]


def nats_per_character(metrics):
    return math.log(metrics["valid_perplexity"]) * metrics["valid_tokens"] / metrics["valid_characters"]


def near(metrics):
    """The mean score at distances 1..T/8."""
    scores = metrics["score_by_distance"]
    return float(np.mean(scores[1 : 1 + max(1, len(scores) // 8)]))


def far(metrics):
    """The mean score at distances T/2..T-1."""
    scores = metrics["score_by_distance"]
    return float(np.mean(scores[len(scores) // 2 :]))


DOCUMENT = {  # train perplexity, validation perplexity, seconds
    "learned": "5.24 6.13 102.39",
    "sin": "8.37 8.62 101.22",
    "rotary": "3.86 4.80 114.64",
    "layernorm-learned": "6.77 7.57 101.35",
    "char": "3.86 4.80 114.64 (6 layers, 6 heads)",
    "word": "31.80 310.27 321.22 (16 layers, 2 heads)",
    "bpe": "6.84 14.64 303.09 (16 layers, 2 heads)",
}
BASIC = {"train perplexity": train_perplexity, "validation perplexity": valid_perplexity, "seconds": seconds}
COUNTS = {
    "types": lambda metrics: metrics["types"],
    "training tokens": lambda metrics: metrics["train_tokens"],
    "tokens per type": lambda metrics: metrics["train_tokens"] / metrics["types"],
    "validation nats per character": nats_per_character,
}


def mean(values):
    """Two digits; a count, which is the same for every seed, as it is."""
    count = isinstance(values[0], int) and len(set(values)) == 1
    return f"{values[0]:,}" if count else f"{np.mean(values):,.2f}"


def table(cells, scale, row="pe", more=None, note=""):
    """A line per cell, means over seeds; at full size the document's for the flag `row` beside them."""
    columns, rows = BASIC | (more or {}), []
    for cell, trials in cells.groups().items():
        if not (values := trials.values(valid_perplexity)):
            continue
        flags, interval = dict(cell), bootstrap_interval(values)
        entries = {k: str(v) for k, v in cell} | {"n": str(len(values))}
        entries |= {k: mean(trials.values(metric)) for k, metric in columns.items()}
        entries["95% interval of validation"] = "[{:.4f}, {:.4f}]".format(*interval) if interval else "-"
        entries["validation of each seed"] = " ".join(f"{v:.4f}" for v in values)
        if scale == "paper" and row:
            entries["document: train, validation, seconds"] = DOCUMENT.get(flags[row], "-")
        rows += ([] if rows else [list(entries)]) + [list(entries.values())]
    print()
    report.print_columns(rows, "  ")
    if note:
        print(f"  {note}")
    found = next(metrics["text"]["text_sha256"] for _, metrics in cells.trials if metrics)
    if scale == "paper" and found not in (None, SHA256):
        print(f"  Not the document's text: its SHA-256 is {found}, tiny Shakespeare's {SHA256}.")


def curve(flag):
    """The training curve of a trial, a line for each value of the flag."""

    def lines(flags, metrics):
        rows = metrics["curve"]
        yield "training", flags[flag], dict(zip(rows["iteration"], rows["loss"]))

    return lines


def scores(flags, metrics):
    yield "validation text", flags["pe"], dict(enumerate(metrics["score_by_distance"]))


BEST = (
    "The document's best are 2 heads, then 16 layers, then a context of 256; its Fig. 2 is without numbers."
)
ALIKE = """Perplexities are per token; compare tokenizers per character (of words, spaces do not count).
  Here the three share one model. The document's characters are its run of 6 layers and 6 heads, the others of
  16 and 2: that they take 2.8 and 2.6 times as long is not the tokenizer's doing alone."""
SWEPT = {"validation perplexity": valid_perplexity, "seconds": seconds}
NEAR_AND_FAR = {"score at distances 1..T/8": near, "score at distances T/2..T-1": far}
sweep = functools.partial(table, row=None, note=BEST)
tokenizers = functools.partial(table, row="tokenizer", more=COUNTS, note=ALIKE)
curves = dict(x="iteration", y="loss", curve=True)
FIGURES = {
    "table1": Figure("Positional encodings", BASIC, curves=curve("pe"), table=table, **curves),
    "heads": Figure("Attention heads", SWEPT, "heads", table=sweep),
    "layers": Figure("Layers", SWEPT, "layers", table=sweep),
    "context": Figure("Context", SWEPT, "context", table=sweep),
    "table2": Figure("Tokenizers", BASIC, curves=curve("tokenizer"), table=tokenizers, **curves),
    "decay": Figure("Attention score by distance", NEAR_AND_FAR, "distance", scores, "mean q.k / sqrt(d)"),
}


def worse(figure, text, a, b, metric=valid_perplexity, **more):
    """Claim: the trials with the flags `a` have the higher perplexity."""
    return Claim(figure, text, higher(metric, a, b), **more)


ROTARY, LEARNED, SIN, NORMED = (dict(pe=pe) for pe in ("rotary", "learned", "sin", "layernorm-learned"))
CHAR, WORD, BPE = (dict(tokenizer=name) for name in TOKENIZERS)
PAPER = dict(scales=("paper",))
CLAIMS = [
    worse("table1", "learned is worse than rotary", LEARNED, ROTARY),
    worse("table1", "layernorm-learned is worse than learned", NORMED, LEARNED),
    worse("table1", "sin is worse than layernorm-learned", SIN, NORMED),
    worse("heads", "the most heads are worse than the fewest", dict(heads=max), dict(heads=min)),
    worse("layers", "the fewest layers are worse than 16", dict(layers=min), dict(layers=16), **PAPER),
    worse("layers", "the most layers are worse than 16", dict(layers=max), dict(layers=16), **PAPER),
    worse("context", "128 tokens are worse than 256", dict(context=128), dict(context=256), **PAPER),
    worse("context", "512 tokens are worse than 256", dict(context=512), dict(context=256), **PAPER),
    worse("table2", "words are worse than characters, per token", WORD, CHAR),
    worse("table2", "byte pairs are worse than characters, per token", BPE, CHAR),
    worse("table2", "byte pairs are worse than characters, per character", BPE, CHAR, nats_per_character),
    Claim("decay", "scores fall with distance under rotary", higher(near, ROTARY, ROTARY, far)),
]
for pe in (LEARNED, SIN, NORMED):
    text = f"scores do not fall with distance under {pe['pe']}"
    CLAIMS.append(Claim("decay", text, not_higher(near, pe, pe, far)))

TASK = trial.Task(
    name="lm_shakespeare",
    build=Shakespeare,
    scales=SCALES,
    grids=GRIDS,
    figures=FIGURES,
    claims=CLAIMS,
    positions=lambda args: args.positions or args.context,
    derive=lambda args: {},
    check=check,
    add_flags=add_flags,
    model=make_model,
    rate=lambda args, i: args.lr,
    named={"pe": "transformer-", "tokenizer": "", "context": "T"},
    without=("--pe", "--engine", *RECURRENT),
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(trial.main(TASK, report.show))
