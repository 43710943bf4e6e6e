"""Language model (Appendix E: Fig. 15, Table 1): read a paragraph of WikiText-103, predict every next piece.

    python lm_wikitext.py --download --prepare                     # the text (190 MB) and its tokens, once
    python lm_wikitext.py --pe sin --seed 0                        # one trial of Table 1
    python lm_wikitext.py --scale quick --prepare --data DIR       # the tokens of a smaller text
    python lm_wikitext.py --scale quick --all --data DIR           # reduced, on that text
    python lm_wikitext.py --report                                 # Table 1, Fig. 15 and claims so far

    paragraph  the cat sat      read  the cat        predict  cat sat

Here K (--vocab) counts pieces, L (--length) the predicted tokens of a paragraph, from its first on, --batch
paragraphs. This is the paper's negative result: expect no gain in test perplexity from the encoding. At
quick scale, on WikiText-2, it ends near 60, where a unigram model has 224.

Text: one paragraph per line; blank lines and headings, which begin with " =", are dropped. Pieces: those that
SentencePiece learns from the training split (unigram model, its defaults but for the longest line), without a
begin or end token, so that a paragraph of one piece has nothing to predict and is left out. Rare characters
(0.05% of the text) become the unknown piece 0, which is read but not scored; so do the < and > of a "<unk>"
in the text, since SentencePiece learns nothing from it.

A batch is packed: the first pieces of all its paragraphs, then the second ones of those that have one, and so
on, so that padding is never computed. On CUDA, where launches cost more, it is padded to one of a few sizes,
each of which has a graph of the iteration, captured when it first comes.
Fig. 15's training perplexity is exp of the loss in curve.csv.
Departures: there is no command, so the embedding has K rows; only gru and lstm read packed batches.
"""

from suite import cli, fast, files, tables
from suite.claims import NONE, SIN, Claim, Figure, metric, name_of
from suite.flags import SEEDS, SMOKE, cross
from suite.progress import say
from suite.task import Task

import functools
import hashlib
import http.client
import io
import json
import math
import os
import shlex
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import common
from common import Refused

SPLITS = ("train", "valid", "test")
UNKNOWN = 0  # SentencePiece's default
FORMAT = 1  # of the token files; part of their folder's name

# ------------------------------------------------------------------------------------------------------------
# The text, from the network or from a folder; lm_shakespeare.py uses `fetch` too
# ------------------------------------------------------------------------------------------------------------

ARCHIVE = "wikitext-103-raw-v1.zip"
ADDRESSES = [
    f"https://wikitext.smerity.com/{ARCHIVE}",
    f"https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/{ARCHIVE}",
]


def put(path, content):
    """Of several processes that make the same file, each writes its own and renames it."""
    own = path.with_name(f".{path.name}.{os.getpid()}")
    files.write(own, content)
    own.rename(path)


def fetch(addresses, path, sha256=None):
    """Download the file `path`, unless it is there, from the first address that gives it whole."""
    if path.exists():
        return
    faults, browser = [], {"User-Agent": "Mozilla/5.0"}  # one host refuses Python
    for address in addresses:
        say(f"fetching {address}")
        request = urllib.request.Request(address, headers=browser)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content = answer.read()  # it fails where less comes than was announced
        except (OSError, http.client.HTTPException) as error:
            faults.append(f"{address}: {error}")
            continue
        found = hashlib.sha256(content).hexdigest()
        if sha256 in (None, found):
            path.parent.mkdir(parents=True, exist_ok=True)
            put(path, content)
            return
        faults.append(f"{address}: another file, of SHA-256 {found}")
    raise Refused(f"no download: {'; '.join(faults)} (or bring the file to {path} in another way)")


def download(files):
    """Those of the files that are missing, out of the archive."""
    archive = files["train"].with_name(ARCHIVE)
    fetch(ADDRESSES, archive)
    try:
        with zipfile.ZipFile(archive) as content:
            members = {Path(name).name: name for name in content.namelist()}
            for path in files.values():
                if not path.exists():
                    put(path, content.read(members[path.name]))  # compares its checksum
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        archive.unlink(missing_ok=True)
        raise Refused(f"{archive}, now removed, was not whole, or of other files: {error}") from None


def find_text(folder, may_download):
    """-> {split: its file}"""
    files = {split: folder / f"wiki.{split}.raw" for split in SPLITS}
    if may_download and not all(path.exists() for path in files.values()):
        download(files)
    if missing := ", ".join(path.name for path in files.values() if not path.exists()):
        where = f"--download gets WikiText-103 raw from {ADDRESSES[0]}"
        raise Refused(f"--data {folder} has no {missing} ({where})")
    return files


def paragraphs(path):
    """Those of a file, as strings."""
    try:
        with open(path, "rb") as file:  # lines end at \n alone, as in no text mode of Python
            lines = [line for line in file if line.strip() and not line.startswith(b" =")]
        found = [line.rstrip(b"\r\n").decode() for line in lines]
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 in the line that begins {error.object[:40]}") from None
    if not found:
        raise Refused(f"{path} has no paragraph: all its lines are blank or headings")
    return found


# ------------------------------------------------------------------------------------------------------------
# Its tokens: for every split a flat uint16 array, and the places where its paragraphs begin and end
# ------------------------------------------------------------------------------------------------------------


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def learn_pieces(sentencepiece, lines, vocab):
    """-> the SentencePiece model of a training split, as bytes; every time the same ones."""
    say(f"learning {vocab} pieces from {len(lines):,} paragraphs (Ctrl-C is heeded only afterwards)")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab,
            max_sentence_length=2**30,  # by default, lines of more than 4,192 bytes are silently left out
            minloglevel=1,
        )
    except RuntimeError as error:  # it says how many there can be
        why = " ".join(str(error).rpartition("] ")[2].split())
        raise Refused(f"--vocab {vocab} does not suit the text: {why}") from None
    return model.getvalue()


def prepare(files, vocab, folder):
    """Write the tokens of a text; about.json, written last, says that they are whole."""
    try:
        import sentencepiece
    except ImportError:
        raise Refused("tokenising needs SentencePiece: pip install sentencepiece") from None
    texts = {split: paragraphs(path) for split, path in files.items()}
    model = learn_pieces(sentencepiece, texts["train"], vocab)
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "pieces.model", model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for split, lines in texts.items():
        found = []
        for start in range(0, len(lines), 2000):  # as lists, all tokens together would take gigabytes
            found += [np.array(x, "<u2") for x in processor.encode(lines[start : start + 2000])]
        ends = np.cumsum([0, *map(len, found)])
        put(folder / f"{split}.tokens", np.concatenate(found).tobytes())
        put(folder / f"{split}.ends", ends.astype("<i8").tobytes())
        say(f"{split}: {len(lines):,} paragraphs, {ends[-1]:,} tokens")
    put(folder / "about.json", json.dumps({"sentencepiece": sentencepiece.__version__}))


class Split(NamedTuple):
    """The tokens of a split, and of its paragraphs those that have something to predict."""

    tokens: np.ndarray  # in a memory-mapped file
    paragraphs: int  # all of them
    starts: np.ndarray  # (P,) where each paragraph begins
    counts: np.ndarray  # (P,) its predicted tokens, --length at most


def read_tokens(folder, split, length):
    try:
        ends = np.fromfile(folder / f"{split}.ends", "<i8")
        tokens = np.memmap(folder / f"{split}.tokens", "<u2", "r")
        if len(tokens) != ends[-1]:
            raise ValueError(f"{split} has {len(tokens)} tokens and not {ends[-1]}")
    except (OSError, ValueError, IndexError) as error:
        raise Refused(f"{folder} is damaged, remove it: {error}") from None
    counts = np.minimum(np.diff(ends) - 1, length)
    if not (counts > 0).any():
        raise Refused(f"no paragraph of {split} has two pieces: nothing to predict")
    return Split(tokens, len(counts), ends[:-1][counts > 0], counts[counts > 0])


# ------------------------------------------------------------------------------------------------------------
# Batches, and the model that reads them
# ------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """N pairs of a piece and the next one, packed: those of time step 0, then those of step 1, ..."""

    inputs: torch.Tensor  # (N,)
    targets: torch.Tensor  # (N,)
    times: torch.Tensor  # (N,) the step of each
    known: torch.Tensor  # (N,) 1 where the target is a known piece, 0 where it is unknown
    sizes: torch.Tensor  # (T,) on the CPU: the paragraphs that have a step t, never more than have t - 1
    answered: torch.Tensor | None = None  # (M,) the places of those that targets and known are of; None: all

    def to(self, device):
        if device.type != "cuda":
            return self
        here = {name: x for name, x in self._asdict().items() if name != "sizes" and x is not None}
        there = {name: x.pin_memory().to(device, non_blocking=True) for name, x in here.items()}
        return self._replace(**there)  # the host did not wait for the copies


def pack(split, rows):
    """The batch of some paragraphs of a split: the longest first."""
    rows = rows[np.argsort(-split.counts[rows], kind="stable")]
    starts, counts = split.starts[rows], split.counts[rows]
    steps = np.arange(counts[0])
    sizes = np.searchsorted(-counts, -steps)  # (T,) paragraphs with more than t targets
    times = np.repeat(steps, sizes)  # (N,)
    row = np.arange(len(times)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    at = starts[row] + times
    inputs, targets = (torch.from_numpy(split.tokens[places].astype(np.int64)) for places in (at, at + 1))
    known = (targets != UNKNOWN).double()
    return Batch(inputs, targets, torch.from_numpy(times), known, torch.from_numpy(sizes))


STEPS, PARTS = 64, 16


def even(batch, most, vocab):
    """The same batch in one of few sizes, each of which a CUDA graph can serve.

    All paragraphs have the same number of steps, a multiple of STEPS or `most`, and the targets are so many
    PARTS of all steps: what is added comes after a paragraph's end, or counts as not known. It is of all
    pieces alike, since a card adds the gradients of one piece in turn, be they zero.
    """
    rows, found = int(batch.sizes[0]), len(batch.targets)
    time = min(most, math.ceil(len(batch.sizes) / STEPS) * STEPS)
    sizes = F.pad(batch.sizes, (0, time - len(batch.sizes)))
    there = (torch.arange(rows) < sizes[:, None]).flatten()  # (T B,)
    places = torch.cat([there.nonzero()[:, 0], (~there).nonzero()[:, 0]])
    count = math.ceil(found * PARTS / len(places)) * len(places) // PARTS
    inputs = (torch.arange(len(places)) % vocab).index_copy_(0, places[:found], batch.inputs)
    targets, known = (F.pad(x, (0, count - found)) for x in (batch.targets, batch.known))
    times = torch.arange(time).repeat_interleave(rows)
    return Batch(inputs, targets, times, known, torch.full_like(sizes, rows), places[:count])


@functools.lru_cache(maxsize=2)
def shuffled(seed, epoch, count):
    """The order of an epoch: every paragraph once, every order as likely."""
    return common.random_bits(common.key(seed, common.TRAINING, epoch), (count,)).argsort(stable=True).numpy()


def unigram_perplexity(splits, vocab):
    """Of the test split's known predicted tokens, by counts of the training tokens, one added to each."""
    frequency = np.bincount(splits["train"].tokens, minlength=vocab) + 1
    test = splits["test"]
    targets = pack(test, np.arange(len(test.starts))).targets.numpy()
    log_share = np.log(frequency / frequency.sum())[targets[targets != UNKNOWN]]
    return common.perplexity(-log_share.mean())


class LanguageModel(common.Model):
    """Reads packed paragraphs, and answers at every step; there is no command."""

    def __init__(self, layer, encoding, vocab, embed, *sizes, **how):
        super().__init__(layer, encoding, vocab, embed, *sizes, **how)
        self.embedding = nn.Embedding(vocab, embed)

    def join(self, batch):
        """(N, E or 2E), what the layer reads: as Encoding.join, but every row has a step of its own."""
        tokens, vectors = self.embedding(batch.inputs), self.encoding.vectors(len(batch.sizes))
        if vectors is None:
            return self.encoding.join(tokens)
        vectors = vectors[batch.times].to(tokens.dtype)
        return tokens + vectors if self.encoding.combine == "add" else torch.cat([tokens, vectors], dim=-1)

    def features(self, batch, engine):
        """(N, H), or of the answered ones, what is read out; the logits of all would take gigabytes."""
        found = self.states(batch, engine)
        return found if batch.answered is None else found.index_select(0, batch.answered)

    def states(self, batch, engine):
        if engine.name == "torch":
            layer = super(type(self.layer), self.layer)  # torch's own, which answers at every step
            return layer.forward(PackedSequence(self.join(batch), batch.sizes))[0].data
        embedded, pieces = fast.occurring(self, batch.inputs)
        table, clock = fast.input_products(self, embedded, len(batch.sizes))
        sweep, sizes = fast.SWEEPS[type(self.layer)], batch.sizes.tolist()
        return sweep(self.layer, table, clock, pieces, sizes, engine.compiled)

    def losses(self, batch, engine):
        """(N,) cross-entropies, in chunks of rows."""
        rows = fast.chunk_rows(self.readout.weight)
        parts = zip(self.features(batch, engine).split(rows), batch.targets.split(rows))
        return torch.cat([F.cross_entropy(self.readout(x), t, reduction="none") for x, t in parts])


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

perplexity = metric("test_perplexity")


def training_perplexity(first, last):
    """A trial's, over a part of its iterations: first and last are shares of them."""

    def part(outcome):
        losses = outcome.curve["loss"]
        return float(np.exp(np.mean(losses[math.floor(first * len(losses)) : math.ceil(last * len(losses))])))

    return part


def curve(outcome):
    losses = zip(outcome.curve["iteration"], outcome.curve["loss"])
    points = {i: float(np.exp(loss)) for i, loss in losses}
    yield name_of(outcome.flags["model"]), outcome.flags["pe"], points


def bars(outcome):
    yield name_of(outcome.flags["model"]), outcome.flags["pe"], {outcome.flags["pe"]: perplexity(outcome)}


def over_seeds(name, of):
    """Minimum, mean and maximum, as in the paper; `of`: an Outcome's number."""
    return {
        "min": lambda trials: f"{min(trials.values(of)):.4f}",
        "mean": tables.mean(of),
        "max": lambda trials: f"{max(trials.values(of)):.4f}",
        "n": tables.count,
        f"{name} of each seed": tables.of_each(of),
    }


def table1(outcomes, scale):
    return [over_seeds(*row) for row in TABLE.items()]


def published(outcomes, scale):
    """The paper's Table 1, which says nothing beside trials of other sizes."""
    if scale != "paper":
        return []
    return [
        "  The paper's test perplexity, five seeds each (min, mean, max):",
        "  none  36.8257  37.7731  38.9166",
        "  sin   38.0685  38.5384  38.8937",
    ]


def grid(vocab, seeds):
    """Table 1 and Fig. 15 are of the same trials."""
    trials = cross(model="lstm", pe=["none", "sin"], vocab=vocab, seed=seeds)
    return {"table1": trials, "fig15": trials}


QUICK = dict(vocab=2048, hidden=128, embed=64, batch=32, lr=5e-3, iterations=200, save_every=50, log_every=10)
SCALES = {
    "paper": dict(vocab=32768, length=1024, iterations=30_000),
    "quick": QUICK,
    "smoke": SMOKE | dict(vocab=40, length=32),
}
GRIDS = {"paper": grid(32768, SEEDS), "quick": grid(2048, range(3)), "smoke": grid(40, range(1))}
EARLY, LATE = training_perplexity(0, 1 / 3), training_perplexity(0.9, 1)
TABLE = {
    "test perplexity": perplexity,
    "test perplexity with unknown targets": metric("test_perplexity_with_unknown"),
    "validation perplexity": metric("valid_perplexity"),
    "unigram model's test perplexity": metric("unigram_test_perplexity"),
}
TRAINING = {
    "training perplexity, first third of the iterations": EARLY,
    "training perplexity, last tenth": LATE,
}
DRAWN = dict(y="training perplexity", curve=True, log_y=True, zero=False)
SIDE_BY_SIDE = dict(y="test perplexity", zero=False, tables=table1, note=published)
FIGURES = {
    "table1": Figure("Language model", TABLE, "pe", bars, **SIDE_BY_SIDE),
    "fig15": Figure("Language model, training", TRAINING, "iteration", curve, **DRAWN),
}
NO_LOWER = "the encoding does not lower the language model's test perplexity"
CLAIMS = [
    Claim("table1", NO_LOWER, perplexity, NONE, SIN, margin="1%", primary=True),
    Claim("fig15", "the encoding lowers the training perplexity at first", EARLY, NONE, SIN),
]

# ------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------


class WikiText(Task):
    name, scales, grids, figures, claims = "lm_wikitext", SCALES, GRIDS, FIGURES, CLAIMS
    without = ("--held-out", "--encode", "--no-conv")
    graph = False  # batches come from the text, in several sizes
    what_to_lower = f"{Task.what_to_lower}, or use --no-graph on a card"
    fast_at_every_size = True  # on a CPU, the backward pass of torch's touches all rows at every step

    @staticmethod
    def add_flags(science, plumbing):
        plumbing("--data", "data/wikitext-103-raw", "folder of wiki.{train,valid,test}.raw")
        plumbing("--download", False, "first get WikiText-103 raw if --data lacks it", action="store_true")
        plumbing("--prepare", False, "tokenise, and end", action="store_true")

    def check(self):
        a = self.args
        if common.LAYERS[a.model] not in fast.SWEEPS:
            raise Refused(f"--model {a.model} does not read packed paragraphs (use gru or lstm)")
        if self.vocab > 2**16:
            raise Refused(f"--vocab {self.vocab}: tokens are stored in 16 bits, so 65536 is the limit")
        super().check()

    def positions(self):
        return self.length

    def model(self):
        a = self.args
        sizes = a.vocab, a.embed, a.hidden, self.positions()
        return LanguageModel(a.model, a.pe, *sizes, **self.for_encoding())

    def memory(self):
        """Paragraphs may be short: of every row, the gates of one step."""
        with torch.device("meta"):
            parameters = sum(p.numel() for p in self.model().parameters())
        return 16 * parameters + 16 * self.batch * self.args.hidden

    def begin(self):
        """Find the text, which --download gets, and its tokens, which --prepare makes."""
        a = self.args
        files = find_text(Path(a.data), a.download)
        text = hashlib.sha256("".join(map(file_sha256, files.values())).encode()).hexdigest()
        folder = self.tokens_folder(f"tokens-K{a.vocab}-{text[:16]}-{FORMAT}")
        whole = (folder / "about.json").exists()
        if a.prepare:
            if not whole:
                prepare(files, self.vocab, folder)
            say(f"tokens in {folder}")
            return 0
        if not whole:
            words = shlex.join(["--data", a.data, "--vocab", str(a.vocab), "--out", a.out])
            raise Refused(f"no tokens yet: python {self.name}.py --prepare {words} makes them")
        self.splits = {split: read_tokens(folder, split, self.length) for split in SPLITS}
        self.config |= {"text_sha256": text, "pieces_sha256": file_sha256(folder / "pieces.model")}
        return None

    def tokens_folder(self, name):
        """Beside the text; under --out where they are not there and cannot be."""
        beside = Path(self.args.data) / name
        if (beside / "about.json").exists() or os.access(beside.parent, os.W_OK):
            return beside
        return Path(self.args.out) / self.name / name

    def build(self, device):
        self.device = device

    def training_rows(self, i):
        """Batches are cut from the epochs' orders, one after another; no epoch's rest is lost."""
        count = len(self.splits["train"].starts)
        places = range((i - 1) * self.batch, i * self.batch)
        return np.array([shuffled(self.seed, n // count, count)[n % count] for n in places])

    def training_episode(self, i, in_graph=False):
        batch = pack(self.splits["train"], self.training_rows(i))
        return (even(batch, self.length, self.vocab) if in_graph else batch).to(self.device)

    def loss_and_accuracy(self, model, batch, engine):
        """Of the known targets; with either engine in chunks of logits."""
        features, share = model.features(batch, engine), batch.known / batch.known.sum().clamp(min=1)
        return fast.cross_entropy(features, model.readout, batch.targets, share, engine.compiled)

    @torch.no_grad()
    def perplexities(self, model, split, engine):
        """Of the known targets of a split, and of all."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        order = np.argsort(split.counts, kind="stable")  # of like lengths, a batch has fewer steps
        for start in range(0, len(order), self.batch):
            part = pack(split, order[start : start + self.batch]).to(self.device)
            losses, known = model.losses(part, engine).double(), part.known
            sums += torch.stack([losses @ known, known.sum(), losses.sum(), known.new_tensor(len(losses))])
        known, known_count, everything, count = sums.tolist()
        return common.perplexity(known / known_count), common.perplexity(everything / count)

    def evaluate(self, model, engine):
        metrics = {}
        for name in ("valid", "test"):
            known, everything = self.perplexities(model, self.splits[name], engine)
            metrics |= {f"{name}_perplexity": known, f"{name}_perplexity_with_unknown": everything}
        splits = self.splits.items()
        return metrics | {
            "unigram_test_perplexity": unigram_perplexity(self.splits, self.vocab),
            "paragraphs": {name: split.paragraphs for name, split in splits},
            "tokens": {name: len(split.tokens) for name, split in splits},
            "unknown_tokens": {name: int((split.tokens == UNKNOWN).sum()) for name, split in splits},
        }


if __name__ == "__main__":
    raise SystemExit(cli.main(WikiText))
