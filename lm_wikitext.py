"""Language model (Appendix E: Fig. 15, Table 1): read a paragraph of WikiText-103, predict every next piece.

    python lm_wikitext.py --download --prepare                     # the text (190 MB) and its tokens, once
    python lm_wikitext.py --pe sin --seed 0                        # one trial of Table 1
    python lm_wikitext.py --scale quick --prepare --data DIR       # the tokens of a smaller text
    python lm_wikitext.py --scale quick --all --data DIR           # reduced, on that text
    python lm_wikitext.py --report                                 # Table 1, Fig. 15 and claims so far

    paragraph  the cat sat      read  the cat        predict  cat sat

Here --vocab (K) counts pieces. --length (L) is the most tokens that are predicted of a paragraph, from its
first on. --batch counts paragraphs. This is the paper's negative result: expect no gain in test perplexity
from the encoding. At quick scale, trained on WikiText-2's validation text, the test perplexity ends near 60,
where a unigram model has 224.

The text has one paragraph per line. Blank lines are dropped, and so are headings, which begin with " =".
SentencePiece learns the pieces from the training split: its unigram model, with its defaults but for the
longest line. There is no begin or end token, so a paragraph of one piece has nothing to predict and is left
out. Rare characters (0.05% of the text) become piece 0, the unknown one, which is read but not scored. The
< and > of a "<unk>" in the text are unknown too, since SentencePiece learns nothing from it. A trial reads
no tokens but those that --prepare wrote: their hashes are kept beside them.

A batch is packed: the first pieces of all its paragraphs, then the second pieces of those that have one,
and so on. So padding is never computed. On CUDA, where starting a kernel costs more, a batch is padded to
one of a few sizes; the first batch of each size captures a graph of the iteration.
Fig. 15's training perplexity is exp of the loss in curve.csv.
Departures: there is no command, so the embedding has K rows; only gru and lstm read packed batches.
"""

from suite import cli, fast, tables
from suite.claims import NONE, SIN, Claim, Figure, metric, name_of
from suite.fetch import fetch
from suite.files import put, read_usable_json
from suite.flags import SEEDS, SMOKE, cross, place
from suite.progress import say, say_once
from suite.task import Task
from suite.trial import refuse_another_text

import hashlib
import io
import json
import math
import os
import shlex
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
UNKNOWN = 0  # the unknown piece, as SentencePiece numbers it
FORMAT = 1  # of the token files; part of their folder's name
ARCHIVE = "wikitext-103-raw-v1.zip"
ADDRESSES = [
    f"https://wikitext.smerity.com/{ARCHIVE}",
    f"https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/{ARCHIVE}",
]
RESULTS = Path(__file__).resolve().parent / "results" / "lm_wikitext"  # this suite's own

# ------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------


class WikiText(Task):
    name = "lm_wikitext"
    without = ("--held-out", "--encode", "--no-conv", "--rotate", "--slow")
    only_alone = ("prepare",)
    graph = False  # batches come from the text, in several sizes
    what_to_lower = f"{Task.what_to_lower}, or use --no-graph on a card"
    fast_at_every_size = True  # torch.nn's backward pass touches all rows at every step on a CPU

    @staticmethod
    def add_flags(science, plumbing):
        plumbing("--data", "data/wikitext-103-raw", "folder of wiki.{train,valid,test}.raw", type=place)
        plumbing("--download", False, "first get WikiText-103 raw if --data lacks it", action="store_true")
        plumbing("--prepare", False, "make the tokens, and end", action="store_true")

    def __init__(self, args, config, folder):
        super().__init__(args, config, folder)
        self.splits, self.device = {}, None  # set by begin and build
        self.epoch, self.order = None, None  # the latest epoch, and the order of its paragraphs

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
        """A lower bound: paragraphs may be so short that each keeps the gates of one step."""
        with torch.device("meta"):
            parameters = sum(p.numel() for p in self.model().parameters())
        return 16 * parameters + 16 * self.batch * self.args.hidden

    def begin(self):
        """Find the text, which --download gets, and its tokens, which --prepare makes."""
        a = self.args
        files = find_text(Path(a.data), a.download)
        text = text_sha256(files)
        if (known := committed_texts(a.vocab)) and text not in known:
            others = " or ".join(sorted(known))
            say_once(f"{a.data} is not the text of this suite's results: SHA-256 {text}, theirs {others}")
        folder = self.tokens_folder(f"tokens-K{a.vocab}-{text[:16]}-{FORMAT}")
        if not (folder / "about.json").exists():
            if not a.prepare:
                words = shlex.join(["--data", a.data, "--vocab", str(a.vocab), "--out", a.out])
                raise Refused(f"no tokens yet: python {self.name}.py --prepare {words} makes them")
            make_tokens(files, text, self.vocab, folder)
        self.splits, pieces = read_tokens(folder, self.vocab, self.length)
        train = self.splits["train"]
        if (predicted := train.counts.sum()) < len(train.tokens) / 2:
            of = f"of {len(train.tokens):,} training tokens only {predicted:,} are predicted"
            say_once(f"{of}: at most --length {self.length} of a paragraph, which is a line of the text")
        if a.prepare:
            say(f"tokens in {folder}")
            return 0
        self.config |= {"text_sha256": text, "pieces_sha256": pieces}
        return None

    @classmethod
    def check_all(cls, tasks):
        files = files_of_text(Path(tasks[0].args.data))
        if all(path.exists() for path in files.values()):
            refuse_another_text(tasks, text_sha256(files))

    def tokens_folder(self, name):
        """Beside the text; or under --out, where there is none beside the text and none can be made."""
        beside = Path(self.args.data) / name
        if (beside / "about.json").exists() or os.access(beside.parent, os.W_OK):
            return beside
        return Path(self.args.out) / self.name / name

    def build(self, device):
        self.device = device

    def chosen(self, i):
        """(B,) the paragraphs of batch i. The epochs' orders, end to end, are cut into batches."""
        count = len(self.splits["train"].starts)
        places = (divmod(n, count) for n in range((i - 1) * self.batch, i * self.batch))
        return np.array([self.order_of(epoch)[n] for epoch, n in places])

    def order_of(self, epoch):
        """The order of an epoch: every paragraph once, every order as likely. The latest one is kept."""
        if self.epoch != epoch:
            count = len(self.splits["train"].starts)
            self.epoch, self.order = epoch, shuffled(self.seed, epoch, count)
        return self.order

    def training_episode(self, i, in_graph=False):
        batch = pack(self.splits["train"], self.chosen(i))
        return (even(batch, self.length, self.vocab) if in_graph else batch).to(self.device)

    def loss_and_accuracy(self, model, batch, engine):
        """Of the known targets. Both engines compute the logits in chunks."""
        features, share = model.features(batch, engine), batch.known / batch.known.sum().clamp(min=1)
        return fast.cross_entropy(features, model.readout, batch.targets, share, engine.compiled)

    @torch.no_grad()
    def perplexities(self, model, split, engine):
        """The perplexity of a split's known targets, and that of all its targets."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        order = np.argsort(split.counts, kind="stable")  # paragraphs of like length: fewer steps in a batch
        for start in range(0, len(order), self.batch):
            part = pack(split, order[start : start + self.batch]).to(self.device)
            losses, known = model.losses(part, engine).double(), part.known
            sums += torch.stack([losses @ known, known.sum(), losses.sum(), known.new_tensor(len(losses))])
        known_loss, known_count, loss, count = sums.tolist()
        return common.perplexity(known_loss / known_count), common.perplexity(loss / count)

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


def shuffled(seed, epoch, count):
    return common.random_bits(common.key(seed, common.TRAINING, epoch), (count,)).argsort(stable=True).numpy()


def unigram_perplexity(splits, vocab):
    """That of the test split's known targets, by counts of the training tokens, one added to each count."""
    frequency = np.bincount(splits["train"].tokens, minlength=vocab) + 1
    test = splits["test"]
    targets = pack(test, np.arange(len(test.starts))).targets.numpy()
    log_share = np.log(frequency / frequency.sum())[targets[targets != UNKNOWN]]
    return common.perplexity(-log_share.mean())


# ------------------------------------------------------------------------------------------------------------
# Batches, and the model that reads them
# ------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """N pairs of a piece and the next one, packed: those of time step 0, then those of step 1, ..."""

    inputs: torch.Tensor  # (N,)
    targets: torch.Tensor  # (N,), or (M,) where `answered` is given
    times: torch.Tensor  # (N,) the time step of each pair
    known: torch.Tensor  # as targets: 1 where the target is a known piece, 0 where it is the unknown one
    sizes: torch.Tensor  # (T,) on the CPU: how many paragraphs have a step t; it never grows
    answered: torch.Tensor | None = None  # (M,) which of the N pairs have a target; None: all

    def to(self, device):
        if device.type != "cuda":
            return self
        here = {name: x for name, x in self._asdict().items() if name != "sizes" and x is not None}
        there = {name: x.pin_memory().to(device, non_blocking=True) for name, x in here.items()}
        return self._replace(**there)  # the host did not wait for the copies


def pack(split, chosen):
    """The batch of the chosen paragraphs of a split, the longest one first."""
    chosen = chosen[np.argsort(-split.counts[chosen], kind="stable")]
    starts, counts = split.starts[chosen], split.counts[chosen]
    steps = np.arange(counts[0])
    sizes = np.searchsorted(-counts, -steps)  # (T,) paragraphs with more than t targets
    times = np.repeat(steps, sizes)  # (N,)
    paragraph = np.arange(len(times)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # (N,)
    at = starts[paragraph] + times
    inputs, targets = (torch.from_numpy(split.tokens[places].astype(np.int64)) for places in (at, at + 1))
    known = (targets != UNKNOWN).double()
    return Batch(inputs, targets, torch.from_numpy(times), known, torch.from_numpy(sizes))


STEPS, PARTS = 64, 16


def even(batch, most, vocab):
    """The same batch, padded to one of a few sizes, each of which a CUDA graph can serve.

    All paragraphs get the same number of steps: a multiple of STEPS, or `most`. The number of targets is
    rounded up to a multiple of a PARTS-th of all pairs. What is added comes after a paragraph's end, or
    counts as not known, and so changes no number. It goes through all pieces in turn: a card adds the
    gradients of one piece one after another, and would be slow if they were all of the same piece.
    """
    paragraphs, found = int(batch.sizes[0]), len(batch.targets)
    time = min(most, math.ceil(len(batch.sizes) / STEPS) * STEPS)
    sizes = F.pad(batch.sizes, (0, time - len(batch.sizes)))
    there = (torch.arange(paragraphs) < sizes[:, None]).flatten()  # (T B,)
    places = torch.cat([there.nonzero()[:, 0], (~there).nonzero()[:, 0]])
    count = math.ceil(found * PARTS / len(places)) * len(places) // PARTS
    inputs = (torch.arange(len(places)) % vocab).index_copy_(0, places[:found], batch.inputs)
    targets, known = (F.pad(x, (0, count - found)) for x in (batch.targets, batch.known))
    times = torch.arange(time).repeat_interleave(paragraphs)
    return Batch(inputs, targets, times, known, torch.full_like(sizes, paragraphs), places[:count])


class LanguageModel(common.Model):
    """It reads packed paragraphs and answers at every step; there is no command."""

    def __init__(self, layer, encoding, vocab, embed, *sizes, **encoded):
        super().__init__(layer, encoding, vocab, embed, *sizes, **encoded)
        self.embedding = nn.Embedding(vocab, embed)

    def join(self, batch):
        """(N, E or 2E), what the layer reads: as Encoding.join, but every pair has a time step of its own."""
        tokens, vectors = self.embedding(batch.inputs), self.encoding.vectors(len(batch.sizes))
        if vectors is None:
            return self.encoding.join(tokens)
        vectors = vectors[batch.times].to(tokens.dtype)
        return tokens + vectors if self.encoding.combine == "add" else torch.cat([tokens, vectors], dim=-1)

    def features(self, batch, engine):
        """What is read out: (N, H), or (M, H) of the answered pairs. All logits would take gigabytes."""
        found = self.states(batch, engine)
        return found if batch.answered is None else found.index_select(0, batch.answered)

    def states(self, batch, engine):
        if engine.name == "torch":
            return self.layer.every_step(PackedSequence(self.join(batch), batch.sizes)).data
        embedded, pieces = fast.occurring(self, batch.inputs)
        table, clock = fast.input_products(self, embedded, len(batch.sizes))
        sweep, sizes = fast.SWEEPS[type(self.layer)], batch.sizes.tolist()
        return sweep(self.layer, table, clock, pieces, sizes, engine.compiled)

    def losses(self, batch, engine):
        """(N,) cross-entropies, computed in chunks."""
        at_once = fast.chunk_rows(self.readout.weight)
        parts = zip(self.features(batch, engine).split(at_once), batch.targets.split(at_once))
        return torch.cat([F.cross_entropy(self.readout(x), t, reduction="none") for x, t in parts])


# ------------------------------------------------------------------------------------------------------------
# The tokens: for every split a flat uint16 array, and the places where its paragraphs begin and end
# ------------------------------------------------------------------------------------------------------------

FILES = ["pieces.model", *(f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "ends"))]


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def learn_pieces(sentencepiece, paragraphs, vocab):
    """-> the SentencePiece model of a training split, as bytes; every time the same ones."""
    size = f"{len(paragraphs):,} paragraphs, the longest of {max(map(len, paragraphs)):,} characters"
    say(f"learning {vocab} pieces from {size}: this can take minutes, and Ctrl-C waits for its end")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(paragraphs),
            model_writer=model,
            vocab_size=vocab,
            max_sentence_length=2**30,  # by default, lines of more than 4,192 bytes are silently left out
            minloglevel=1,
        )
    except RuntimeError as error:  # it says how many there can be
        why = " ".join(str(error).rpartition("] ")[2].split()).partition(" Increase vocab_size")[0]
        usual = SCALES["quick"]["vocab"]
        advice = "lower it" if "too high" in why else "raise it"
        if advice == "lower it" and vocab > usual:
            advice += f", or use --scale quick, where it is {usual}"
        raise Refused(f"--vocab {vocab} does not suit the text ({advice}): {why}") from None
    return model.getvalue()


def make_tokens(files, text, vocab, folder):
    """Write the tokens of a text. about.json, with the hashes of all files, comes last: then all is whole."""
    try:
        import sentencepiece
    except ImportError as error:
        raise Refused(f"tokenising needs SentencePiece: pip install sentencepiece ({error})") from None
    texts = {split: read_paragraphs(path) for split, path in files.items()}
    model = learn_pieces(sentencepiece, texts["train"], vocab)
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {}

    def keep(name, content):
        put(folder / name, content)
        hashes[name] = hashlib.sha256(content).hexdigest()

    keep("pieces.model", model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for split, paragraphs in texts.items():
        say(f"cutting {split}, {len(paragraphs):,} paragraphs, into pieces")
        found = []
        for start in range(0, len(paragraphs), 2000):  # as lists, all tokens together would take gigabytes
            found += [np.array(x, "<u2") for x in processor.encode(paragraphs[start : start + 2000])]
        ends = np.cumsum([0, *map(len, found)])
        keep(f"{split}.tokens", np.concatenate(found).tobytes())
        keep(f"{split}.ends", ends.astype("<i8").tobytes())
        say(f"{split}: {ends[-1]:,} tokens")
    about = {"sentencepiece": sentencepiece.__version__, "text_sha256": text, "sha256": hashes}
    put(folder / "about.json", json.dumps(about, indent=1) + "\n")


class Split(NamedTuple):
    """The tokens of a split, and of its paragraphs those that have something to predict."""

    tokens: np.ndarray  # in a memory-mapped file
    paragraphs: int  # all of them
    starts: np.ndarray  # (P,) where each paragraph begins
    counts: np.ndarray  # (P,) its predicted tokens, --length at most


def read_tokens(folder, vocab, length):
    """-> {split: Split}, and the hash of the pieces. Whatever is not as --prepare left it is refused."""
    try:
        hashes = json.loads((folder / "about.json").read_text())["sha256"]
        for name in FILES:
            if hashes[name] != file_sha256(folder / name):
                raise ValueError(f"{name} is not what --prepare wrote")
        splits = {split: read_split(folder, split, vocab, length) for split in SPLITS}
    except Refused:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"about.json lacks {error}" if isinstance(error, KeyError) else error
        raise Refused(f"{folder} is damaged: remove it, and --prepare makes it anew ({why})") from None
    return splits, hashes["pieces.model"]


def read_split(folder, split, vocab, length):
    tokens, path = np.memmap(folder / f"{split}.tokens", "<u2", "r"), folder / f"{split}.ends"
    ends = np.fromfile(path, "<i8")
    whole = len(ends) > 1 and ends.nbytes == path.stat().st_size
    if not whole or ends[0] != 0 or ends[-1] != len(tokens) or (ends[1:] < ends[:-1]).any():
        raise ValueError(f"{path.name} does not cut {len(tokens)} tokens into paragraphs")
    if (largest := tokens.max()) >= vocab:
        raise ValueError(f"{split}.tokens has piece {largest}, where the last one is {vocab - 1}")
    counts = np.minimum(np.diff(ends) - 1, length)
    starts, counts = ends[:-1][counts > 0], counts[counts > 0]
    if not len(starts):
        raise Refused(f"no paragraph of {split} has two pieces: nothing to predict")
    if not any((tokens[s + 1 : s + 1 + n] != UNKNOWN).any() for s, n in zip(starts, counts)):
        raise Refused(f"all pieces of {split} to be predicted are unknown")
    return Split(tokens, len(ends) - 1, starts, counts)


# ------------------------------------------------------------------------------------------------------------
# The text, from the network or from a folder
# ------------------------------------------------------------------------------------------------------------


def download(files):
    """Get the archive, and from it those of the files that are missing."""
    archive = files["train"].with_name(ARCHIVE)
    fetch(ADDRESSES, archive, lambda content: zipfile.is_zipfile(io.BytesIO(content)))
    try:
        with zipfile.ZipFile(archive) as content:
            members = {Path(name).name: name for name in content.namelist()}
            for path in files.values():
                if not path.exists():
                    put(path, content.read(members[path.name]))  # it compares the checksum
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        archive.unlink(missing_ok=True)
        raise Refused(f"{archive}, now removed, was not whole, or of other files: {error}") from None


def files_of_text(folder):
    """-> {split: its file}"""
    return {split: folder / f"wiki.{split}.raw" for split in SPLITS}


def text_sha256(files):
    return hashlib.sha256("".join(map(file_sha256, files.values())).encode()).hexdigest()


def find_text(folder, may_download):
    """-> {split: its file}, all of which are there"""
    files = files_of_text(folder)
    if may_download and not all(path.exists() for path in files.values()):
        download(files)
    if missing := ", ".join(path.name for path in files.values() if not path.exists()):
        where = f"--download gets WikiText-103 raw from {ADDRESSES[0]}"
        raise Refused(f"--data {folder} has no {missing} ({where})")
    return files


def committed_texts(vocab):
    """The hashes of the texts of this suite's own results of --vocab: another text gives other numbers."""
    results = (read_usable_json(path, "config") for path in RESULTS.glob(f"*-K{vocab}-*/seed*/result.json"))
    return {one["config"]["text_sha256"] for one in results if one and "text_sha256" in one["config"]}


def read_paragraphs(path):
    """-> [str], without blank lines and headings."""
    try:
        with open(path, "rb") as file:  # a line ends at \n alone; Python's text mode knows other ends
            lines = [line for line in file if line.strip() and not line.startswith(b" =")]
        found = [line.rstrip(b"\r\n").decode() for line in lines]
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 in the line that begins {error.object[:40]}") from None
    if not found:
        raise Refused(f"{path} has no paragraph: all its lines are blank or headings")
    return found


# ------------------------------------------------------------------------------------------------------------
# The trials of each figure, what to report, and what the paper claims
# ------------------------------------------------------------------------------------------------------------

test_perplexity = metric("test_perplexity")


def training_perplexity(first, last):
    """-> a metric: the mean over a part of a trial's iterations; first and last are shares of them."""

    def part(outcome):
        losses = outcome.curve["loss"]
        rows = slice(int(first * len(losses)), max(1, int(last * len(losses))))
        return float(np.exp(np.mean(losses[rows])))

    return part


def curve(outcome):
    losses = zip(outcome.curve["iteration"], outcome.curve["loss"])
    points = {i: float(np.exp(loss)) for i, loss in losses}
    yield name_of(outcome.flags["model"]), outcome.flags["pe"], points


def bars(outcome):
    pe = outcome.flags["pe"]
    yield name_of(outcome.flags["model"]), pe, {pe: test_perplexity(outcome)}


def over_seeds(name, number):
    """Minimum, mean and maximum, as in the paper; `number`: of an Outcome."""
    return {
        "min": lambda trials: f"{min(trials.values(number)):.4f}",
        "mean": tables.mean(number),
        "max": lambda trials: f"{max(trials.values(number)):.4f}",
        "n": tables.count,
        f"{name} of each seed": tables.of_each(number),
    }


def table1(outcomes, scale):
    return [over_seeds(*row) for row in TABLE.items()]


def published(scale):
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
    "test perplexity": test_perplexity,
    "test perplexity with unknown targets": metric("test_perplexity_with_unknown"),
    "validation perplexity": metric("valid_perplexity"),
    "unigram model's test perplexity": metric("unigram_test_perplexity"),
}
TRAINING = {
    "training perplexity, first third of the iterations": EARLY,
    "training perplexity, last tenth": LATE,
}
DRAWN = dict(y="training perplexity", needs_curve=True, log_y=True, zero=False)
SIDE_BY_SIDE = dict(y="test perplexity", zero=False, tables=table1, note=published)
FIGURES = {
    "table1": Figure("Language model", TABLE, "pe", bars, **SIDE_BY_SIDE),
    "fig15": Figure("Language model, training", TRAINING, "iteration", curve, each=True, **DRAWN),
}
SHRINKS = "the encoding's lead in training perplexity is larger at first than at the end"
NO_LOWER = "the encoding does not lower the language model's test perplexity"
CLAIMS = [
    Claim("table1", NO_LOWER, test_perplexity, NONE, SIN, margin="1%", primary=True),
    Claim("fig15", "the encoding lowers the training perplexity at first", EARLY, NONE, SIN),
    Claim("fig15", SHRINKS, lambda outcome: EARLY(outcome) - LATE(outcome), NONE, SIN),
]
WikiText.scales, WikiText.grids = SCALES, GRIDS
WikiText.figures, WikiText.claims = FIGURES, CLAIMS


if __name__ == "__main__":
    raise SystemExit(cli.main(WikiText))
