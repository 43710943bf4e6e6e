"""Language model (Appendix E: Fig. 15, Table 1): read a paragraph of WikiText-103, predict every next piece.

    python lm_wikitext.py --download --prepare                  # the text (190 MB) and its tokens, once
    python lm_wikitext.py --pe sin --seed 0                     # one trial of Table 1
    python lm_wikitext.py --scale quick --all --data DIR        # reduced, on a smaller text
    python lm_wikitext.py --report                              # Table 1, Fig. 15 and claims so far

    paragraph  the cat sat      read  the cat        predict  cat sat

Here K (--vocab) counts pieces, L (--length) the predicted tokens of a paragraph, from its first on, --batch
paragraphs. This is the paper's negative result: expect no gain in test perplexity from the encoding. At
quick scale, on WikiText-2, it ends near 60, where a unigram model has 224.

Text: one paragraph per line; blank lines and headings, which begin with " =", are dropped. --data holds
wiki.{train,valid,test}.raw, or .tokens or .txt. Pieces: a SentencePiece unigram model of the training split,
all options at their defaults but for the longest line (4,192 bytes, above which lines are silently left out;
here 2^30). So there is no byte fallback: rare characters (0.05% of the text) become the unknown piece 0,
which is read but not scored. <s> and </s> are in the vocabulary and never occur: no begin or end token. A
paragraph of one piece has nothing to predict and is left out. "<unk>" written in a text is text, but
SentencePiece learns no piece from it, so that its < and > are unknown.

A batch is packed: the first pieces of all its paragraphs, then the second ones of those that have one, and so
on, so that padding is never computed. Fig. 15's training perplexity is exp of the loss in curve.csv.
Departures: there is no command, so the embedding has K rows; s4d, which reads no packed batch, is refused.
"""

import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import common
import report
import trial
from common import Refused
from download import Stopped, alone, fetch, file_sha256, shown
from report import NONE, SIN, Claim, Figure, higher, not_higher
from trial import SEEDS, SMOKE, cross, say

SPLITS = ("train", "valid", "test")
UNKNOWN = 0  # SentencePiece's default
FORMAT = 1  # of the token files; part of their folder's name


# ------------------------------------------------------------------------------------------------------------
# The text
# ------------------------------------------------------------------------------------------------------------

ARCHIVE = "wikitext-103-raw-v1.zip"
ADDRESSES = [
    f"https://wikitext.smerity.com/{ARCHIVE}",
    f"https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/{ARCHIVE}",
]


NAMES = [[f"wiki.{split}.{ending}" for split in SPLITS] for ending in ("raw", "tokens", "txt")]


def text_files(folder):
    """-> {split: its file}, or None where one is missing"""
    for kind in NAMES:
        if all((folder / name).is_file() for name in kind):
            return {split: folder / name for split, name in zip(SPLITS, kind)}
    return None


def find_text(folder):
    if files := text_files(folder):
        return files
    nearest = max(NAMES, key=lambda kind: sum((folder / name).is_file() for name in kind))
    missing = ", ".join(name for name in nearest if not (folder / name).is_file())
    raise Refused(f"--data {folder} has no {missing} (--download gets WikiText-103 raw from {ADDRESSES[0]})")


def text_sha256(files):
    """One hash of the hashes of all splits."""
    return hashlib.sha256("".join(map(file_sha256, files.values())).encode()).hexdigest()


def paragraphs(path, counts):
    """Each paragraph of a file as a string; `counts` takes what was seen so far."""
    with open(path, "rb") as file:  # lines end at \n alone, as in no text mode of Python
        for line in file:
            counts["bytes"] += len(line)
            counts["lines"] += 1
            if not line.strip():
                counts["blank lines"] += 1
            elif line.startswith(b" ="):
                counts["headings"] += 1
            else:
                counts["paragraphs"] += 1
                try:
                    yield line.rstrip(b"\r\n").decode()
                except UnicodeDecodeError as error:
                    at = f"line {counts['lines']}, byte {error.start + 1}"
                    raise Refused(f"{path} is not UTF-8: {at}") from None


def check_text(path, stop):
    """Refuse a fault now: no exception passes through SentencePiece, and learning takes minutes."""
    counts = Counter()
    for _ in shown(paragraphs(path, counts), counts, path.stat().st_size, f"checking {path}", stop):
        pass
    if not counts["paragraphs"]:
        raise Refused(f"{path} has no paragraph: {counts['lines']} lines, all blank or headings")


# ------------------------------------------------------------------------------------------------------------
# Its tokens: for every split a flat uint16 array, and the places where its paragraphs begin and end
# ------------------------------------------------------------------------------------------------------------


def sentencepiece():
    try:
        import sentencepiece
    except ImportError:
        raise Refused("tokenising needs SentencePiece: pip install sentencepiece") from None
    return sentencepiece


def learn_pieces(path, vocab):
    """-> the SentencePiece model of a training split, as bytes; every time the same ones."""
    size = path.stat().st_size / 1e6
    say(f"learning {vocab} pieces from {path}, {size:.1f} MB (a signal is heeded only afterwards)")
    model = io.BytesIO()
    try:
        sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=paragraphs(path, Counter()),
            model_writer=model,
            vocab_size=vocab,
            max_sentence_length=2**30,  # by default, lines of more than 4,192 bytes are silently left out
            minloglevel=1,
        )
    except RuntimeError as error:
        if most := re.search(r"size too high.*<= (\d+)", str(error)):
            raise Refused(f"--vocab {vocab}: {path} supports {most[1]} pieces at most") from None
        if least := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
            raise Refused(f"--vocab {vocab}: {path} needs {least[1]} pieces at least") from None
        raise Refused(f"SentencePiece cannot learn {vocab} pieces from {path}: {error}") from None
    return model.getvalue()


def write_tokens(path, split, processor, folder, stop):
    """Write the arrays of a split -> its counts."""
    counts, ends = Counter(), [0]
    lines = shown(paragraphs(path, counts), counts, path.stat().st_size, f"tokenising {path}", stop)
    with open(folder / f"{split}.tokens", "wb") as file:
        while chunk := list(itertools.islice(lines, 2000)):
            for pieces in processor.encode(chunk, num_threads=len(os.sched_getaffinity(0))):
                file.write(np.array(pieces, "<u2").tobytes())
                ends.append(ends[-1] + len(pieces))
                counts["unknown tokens"] += pieces.count(UNKNOWN)
                counts["paragraphs without a target"] += len(pieces) < 2
        file.flush()
        os.fsync(file.fileno())
    trial.write(folder / f"{split}.ends", np.array(ends, "<i8").tobytes())
    counts["tokens"] = ends[-1]
    say(f"{split}: " + ", ".join(f"{counts[name]:,} {name}" for name in COUNTED))
    return dict(counts)


COUNTED = ["paragraphs", "tokens", "unknown tokens", "paragraphs without a target", "headings", "blank lines"]


def tokenise(files, args, folder, stop):
    """Write a token folder, under a temporary name until it is whole -> the folder."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    pieces = temporary / "pieces.model"  # kept when tokenising stops: the name fixes text and vocabulary
    if not pieces.exists():
        model = learn_pieces(files["train"], args.vocab)
        temporary.mkdir(exist_ok=True)
        trial.write(pieces, model)
    model = pieces.read_bytes()
    processor = sentencepiece().SentencePieceProcessor(model_proto=model)
    about = {s: write_tokens(path, s, processor, temporary, stop) for s, path in files.items()}
    about |= {"text_sha256": text_sha256(files), "pieces_sha256": hashlib.sha256(model).hexdigest()}
    about |= {"sentencepiece": sentencepiece().__version__}
    trial.write_json(temporary / "about.json", about)
    temporary.rename(folder)
    return folder


def token_folders(files, args):
    """Where tokens may lie: beside the text, or under --out. The name holds all that decides them."""
    name = f"tokens-K{args.vocab}-{text_sha256(files)[:16]}-{FORMAT}"
    return [Path(args.data) / name, Path(args.out) / TASK.name / name]


def find_tokens(files, args):
    return next((f for f in token_folders(files, args) if (f / "about.json").exists()), None)


def prepare(args, stop):
    """-> the folder with the tokens of the text, made now where there is none."""
    files = find_text(Path(args.data))
    if found := find_tokens(files, args):
        return found
    sentencepiece()
    for path in files.values():
        check_text(path, stop)
    for folder in token_folders(files, args):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.with_name(f".{folder.name}.lock")
            os.close(os.open(lock, os.O_RDWR | os.O_CREAT))
        except OSError:
            continue  # read-only
        with alone(lock, stop):
            found = find_tokens(files, args)  # another process made it while we waited
            return found or tokenise(files, args, folder, stop)
    raise Refused(f"neither --data {args.data} nor --out {args.out} can be written to")


# ------------------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """The paragraphs of a split that have something to predict."""

    tokens: np.ndarray  # all pieces of the split, in a memory-mapped file
    starts: np.ndarray  # (P,) where each paragraph begins
    counts: np.ndarray  # (P,) its predicted tokens, --length at most


def read_tokens(folder, length):
    """-> (what about.json says, {split: Split})"""
    try:
        about = json.loads((folder / "about.json").read_text())
        if file_sha256(folder / "pieces.model") != about["pieces_sha256"]:
            raise ValueError("pieces.model is another one")
        splits = {split: read_split(folder, split, length, about[split]["tokens"]) for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{folder} is damaged, remove it: {error}") from None
    if empty := [split for split in SPLITS if not len(splits[split].starts)]:
        raise Refused(f"no paragraph of {', '.join(empty)} has two pieces: nothing to predict")
    return about, splits


def read_split(folder, split, length, size):
    ends = np.fromfile(folder / f"{split}.ends", "<i8")
    tokens = np.memmap(folder / f"{split}.tokens", "<u2", "r")
    if not size == len(tokens) == ends[-1]:
        raise ValueError(f"{split} has {len(tokens)} tokens and not {size}")
    counts = np.minimum(np.diff(ends) - 1, length)
    return Split(tokens, ends[:-1][counts > 0], counts[counts > 0])


class Batch(NamedTuple):
    """N pairs of a piece and the next one, packed: those of time step 0, then those of step 1, ..."""

    inputs: torch.Tensor  # (N,)
    targets: torch.Tensor  # (N,)
    times: torch.Tensor  # (N,) the step of each
    sizes: torch.Tensor  # (T,) on the CPU: the paragraphs that have a step t, never more than have t - 1
    known: torch.Tensor  # (N,) 1 where the target is a known piece, 0 where it is unknown

    def share(self):
        """(N,) what each target counts for in the mean over the known ones."""
        return self.known / self.known.sum().clamp(min=1)


def pack(split, rows, device):
    """The batch of some paragraphs of a split: the longest first."""
    rows = rows[np.argsort(-split.counts[rows], kind="stable")]
    starts, counts = split.starts[rows], split.counts[rows]
    steps = np.arange(counts[0])
    sizes = np.searchsorted(-counts, -steps)  # (T,) paragraphs with more than t targets
    times = np.repeat(steps, sizes)  # (N,)
    row = np.arange(len(times)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    at = starts[row] + times
    pairs = [torch.from_numpy(split.tokens[places].astype(np.int64)) for places in (at, at + 1)]
    parts = [*pairs, torch.from_numpy(times), (pairs[1] != UNKNOWN).double()]
    if device.type == "cuda":  # so that the host need not wait for the copies
        parts = [x.pin_memory().to(device, non_blocking=True) for x in parts]
    inputs, targets, times, known = parts
    return Batch(inputs, targets, times, torch.from_numpy(sizes), known)


@functools.lru_cache(maxsize=2)
def shuffled(seed, epoch, count):
    """The order of an epoch: every paragraph once, every order as likely."""
    return common.random_bits(common.key(seed, common.TRAINING, epoch), (count,)).argsort(stable=True).numpy()


class WikiText:
    """The data of one trial: training batches by iteration, and the validation and test text."""

    def __init__(self, args, device):
        self.vocab, self.batch, self.seed, self.device = args.vocab, args.batch, args.seed, device
        folder = find_tokens(find_text(Path(args.data)), args)
        self.about, self.splits = read_tokens(folder, args.length)

    def training_rows(self, i):
        """Batches are cut from the epochs' orders, one after another; no epoch's rest is lost."""
        count = len(self.splits["train"].starts)
        start, stop = (i - 1) * self.batch, i * self.batch
        epochs = range(start // count, (stop - 1) // count + 1)
        orders = [shuffled(self.seed, e, count)[max(0, start - e * count) : stop - e * count] for e in epochs]
        return np.concatenate(orders)

    def training_episode(self, i):
        return pack(self.splits["train"], self.training_rows(i), self.device)

    def evaluate(self, model):
        metrics = {}
        for name in ("valid", "test"):
            known, everything = perplexities(model, self.splits[name], self.batch, self.device)
            metrics |= {f"{name}_perplexity": known, f"{name}_perplexity_with_unknown": everything}
        metrics["unigram_test_perplexity"] = unigram_perplexity(self.splits, self.vocab)
        for count in ("paragraphs", "tokens", "unknown tokens"):
            metrics[count.replace(" ", "_")] = {s: self.about[s].get(count, 0) for s in SPLITS}
        return metrics


@torch.no_grad()
def perplexities(model, split, batch, device):
    """Over every predicted token of a split -> (of the known ones, of all)."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    order = np.argsort(split.counts, kind="stable")  # of like lengths, a batch has fewer steps
    for start in range(0, len(order), batch):
        part = pack(split, order[start : start + batch], device)
        losses = model.losses(part).double()
        sums += torch.stack(
            [losses @ part.known, part.known.sum(), losses.sum(), part.known.new_tensor(len(losses))]
        )
    known, known_count, everything, count = sums.tolist()
    return common.perplexity(known / max(known_count, 1)), common.perplexity(everything / count)


def unigram_perplexity(splits, vocab):
    """Of the test split's known predicted tokens, by counts of the training tokens, one added to each."""
    frequency = np.bincount(splits["train"].tokens, minlength=vocab) + 1
    test = splits["test"]
    targets = pack(test, np.arange(len(test.starts)), torch.device("cpu")).targets.numpy()
    log_share = np.log(frequency / frequency.sum())[targets[targets != UNKNOWN]]
    return common.perplexity(-log_share.mean())


# ------------------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------------------


class LanguageModel(common.Model):
    """Reads packed paragraphs, and answers at every step."""

    def __init__(self, task, args):
        sizes = args.vocab, args.embed, args.hidden, task.positions(args)
        super().__init__(args.model, args.pe, *sizes, args.combine)
        self.embedding = nn.Embedding(args.vocab, args.embed)  # there is no command

    def represent(self, batch):
        """(N, E or 2E), what the layer reads."""
        x = self.embedding(batch.inputs)
        if self.encoding.name == "dup":
            return torch.cat([x, x], dim=1)
        if self.encoding.name == "none":
            return x
        times = self.encoding(len(batch.sizes)).to(x.dtype)[batch.times]
        return x + times if self.combine == "add" else torch.cat([x, times], dim=1)

    def features(self, batch):
        """(N, H), what is read out."""
        if not self.fast:
            plain = {common.GRU: nn.GRU, common.LSTM: nn.LSTM}[type(self.layer)]
            return plain.forward(self.layer, PackedSequence(self.represent(batch), batch.sizes))[0].data
        embedded, pieces = self.occurring(batch.inputs)
        table, clock = self.input_products(embedded, len(batch.sizes))
        return self.layer.sweep(table, clock, pieces, batch.sizes.tolist(), self.compiled)

    def loss_and_accuracy(self, batch):
        weight, bias = self.readout.weight, self.readout.bias
        features, share = self.features(batch), batch.share()
        return common.cross_entropy(features, weight, bias, batch.targets, share, self.compiled)

    def losses(self, batch):
        """(N,) cross-entropies, in chunks of rows."""
        rows = max(1, common.CHUNK // self.readout.out_features)
        parts = zip(self.features(batch).split(rows), batch.targets.split(rows))
        return torch.cat([F.cross_entropy(self.readout(x), t, reduction="none") for x, t in parts])


# ------------------------------------------------------------------------------------------------------------
# Download
# ------------------------------------------------------------------------------------------------------------


def download(folder, stop):
    """The archive, its hash beside it, and the three files in it."""
    folder.mkdir(parents=True, exist_ok=True)
    archive, noted = folder / ARCHIVE, folder / f"{ARCHIVE}.sha256"
    with alone(folder / ".download.lock", stop):
        fetch(ADDRESSES, archive, stop)
        found = file_sha256(archive)
        say(f"{archive}: {archive.stat().st_size} bytes, SHA-256 {found}")
        if noted.exists() and noted.read_text().split()[0] != found:
            raise Refused(f"{archive} is not what was downloaded (see {noted}): remove both")
        unpack(archive, folder)
        trial.write(noted, f"{found}  {ARCHIVE}\n")


def unpack(archive, folder):
    try:
        with zipfile.ZipFile(archive) as content:
            for split in (s for s in SPLITS if not (folder / f"wiki.{s}.raw").exists()):
                (member,) = [n for n in content.namelist() if n.endswith(f"/wiki.{split}.raw")]
                temporary = folder / f".wiki.{split}.raw.tmp"
                with content.open(member) as packed, open(temporary, "wb") as file:
                    shutil.copyfileobj(packed, file)  # compares its checksum
                temporary.rename(folder / f"wiki.{split}.raw")
    except (zipfile.BadZipFile, ValueError, EOFError, zlib.error) as error:
        archive.unlink()
        raise Refused(
            f"{archive} was not a whole archive of wiki.*.raw ({error}): removed, try again"
        ) from None


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------


def run(task, args, words, stop):
    """One trial, or with --prepare the steps before it alone."""
    try:
        if args.download and text_files(Path(args.data)) is None:
            download(Path(args.data), stop)
        folder = prepare(args, stop)
    except Stopped:
        return trial.STOPPED
    if args.prepare:
        say(f"tokens in {folder}")
        return 0
    about, _ = read_tokens(folder, args.length)
    for name in trial.FINGERPRINTS:
        setattr(args, name, about[name])
    return trial.run(task, args, words, stop)


def add_flags(group):
    flag = group.add_argument
    flag(
        "--data", default="data/wikitext-103-raw", help="folder of wiki.{train,valid,test}.raw (%(default)s)"
    )
    flag("--download", action="store_true", help="first get WikiText-103 raw if --data lacks a text")
    flag("--prepare", action="store_true", help="tokenise, and end")


def check(args):
    if args.model == "s4d":
        raise Refused("--model s4d does not read packed paragraphs (use gru or lstm)")
    if args.vocab > 2**16:
        raise Refused(f"--vocab {args.vocab}: tokens are stored in 16 bits, so 65536 is the limit")


def perplexity(metrics):
    return metrics["test_perplexity"]


def training_perplexity(first, last):
    """A trial's, over a part of its iterations: first and last are shares of them."""

    def metric(metrics):
        losses = metrics["curve"]["loss"]
        return float(np.exp(np.mean(losses[math.floor(first * len(losses)) : math.ceil(last * len(losses))])))

    return metric


EARLY = training_perplexity(0, 1 / 3)


def curve(flags, metrics):
    points = {
        i: float(np.exp(loss)) for i, loss in zip(metrics["curve"]["iteration"], metrics["curve"]["loss"])
    }
    return [(flags["model"].upper(), flags["pe"], points)]


PAPER = {"none": ["36.8257", "37.7731", "38.9166"], "sin": ["38.0685", "38.5384", "38.8937"]}


def table1(cells, scale):
    """Minimum, mean and maximum over seeds, at paper scale beside the paper's own."""
    for name, metric in FIGURES["table1"].metrics.items():
        rows = [["model", "pe", "vocab", "min", "mean", "max", "n", f"{name} of each seed"]]
        paper = scale == "paper" and metric is perplexity
        rows[0] += ["paper's min", "mean", "max"] if paper else []
        for cell, trials in cells.groups().items():
            flags, values = dict(cell), trials.values(metric)
            if values:
                found = [f"{x:.4f}" for x in (min(values), np.mean(values), max(values))]
                seeds = " ".join(f"{v:.4f}" for v in values)
                first = [flags["model"], flags["pe"], str(flags["vocab"])]
                rows.append([*first, *found, str(len(values)), seeds, *(PAPER[flags["pe"]] if paper else [])])
        print()
        report.print_columns(rows, "  ")


SCALES = {
    "paper": dict(vocab=32768, length=1024, iterations=30_000),
    "quick": dict(
        vocab=2048, hidden=128, embed=64, batch=32, lr=5e-3, iterations=200, save_every=50, log_every=10
    ),
    "smoke": SMOKE | dict(vocab=40, length=32),
}

LSTM = dict(model="lstm", pe=["none", "sin"])
GRIDS = {
    scale: dict.fromkeys(["table1", "fig15"], cross(**LSTM, vocab=vocab, seed=seeds))
    for scale, vocab, seeds in [("paper", 32768, SEEDS), ("quick", 2048, range(3)), ("smoke", 40, range(1))]
}

FIGURES = {
    "table1": Figure(
        "Language model",
        {
            "test perplexity": perplexity,
            "test perplexity with unknown targets": lambda m: m["test_perplexity_with_unknown"],
            "validation perplexity": lambda m: m["valid_perplexity"],
            "unigram model's test perplexity": lambda m: m["unigram_test_perplexity"],
        },
        "pe",
        curves=lambda flags, metrics: [
            (flags["model"].upper(), flags["pe"], {flags["pe"]: perplexity(metrics)})
        ],
        y="test perplexity",
        table=table1,
    ),
    "fig15": Figure(
        "Language model, training",
        {
            "training perplexity, first third of the iterations": EARLY,
            "training perplexity, last tenth": training_perplexity(0.9, 1),
        },
        "iteration",
        curves=curve,
        y="training perplexity",
        curve=True,
        log_y=True,
    ),
}

CLAIMS = [
    Claim("table1", "the encoding does not lower the test perplexity", not_higher(perplexity, NONE, SIN)),
    Claim("fig15", "the encoding lowers the training perplexity at first", higher(EARLY, NONE, SIN)),
]

TASK = trial.Task(
    name="lm_wikitext",
    build=WikiText,
    scales=SCALES,
    grids=GRIDS,
    figures=FIGURES,
    claims=CLAIMS,
    positions=lambda args: args.length,
    derive=lambda args: {},
    check=check,
    add_flags=add_flags,
    model=LanguageModel,
    run=run,
    without=("--held-out",),
    graph=False,  # the number of steps differs between batches
    fast=True,  # on a CPU, the backward pass of torch's touches all rows at every step
)

if __name__ == "__main__":
    raise SystemExit(trial.main(TASK, report.show))
