"""Language model (Appendix E: Fig. 15, Table 1): predict every next piece of a paragraph.

    python lm_wikitext.py --prepare                      # tokens of the text in --data, once
    python lm_wikitext.py --pe sin --seed 0              # one trial of Table 1
    python lm_wikitext.py --scale desk --all --data DIR  # a small text, after --prepare

    paragraph  the cat sat      read  the cat        predict  cat sat

The paper's negative result: expect no gain in test perplexity from PE.

The text has a paragraph per line; blank lines and headings, which begin with " =", are
dropped. WikiText-103 raw is at https://wikitext.smerity.com/wikitext-103-raw-v1.zip:
unpack it in data/. SentencePiece learns K pieces from the training split: its unigram
model, with its defaults except for the longest line. There is no begin or end token: a
paragraph of one piece has nothing to predict and is left out. Rare characters, and the
< and > of a "<unk>", become the unknown piece, which is read but not scored.
"""

from suite import cli, fast, files  # isort: skip # before PyTorch

import functools
import hashlib
import io
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import common
from common import Batch, UsageError
from suite.figures import BOTH, Figure, cross, name_of
from suite.rnn_kernels import scan
from suite.task import SMOKE, Flag, Task

SPLITS = ("train", "valid", "test")
NAMES = "wiki.{train,valid,test}.raw"
UNKNOWN = 0  # the unknown piece, as SentencePiece numbers it
STEPS, PARTS = 64, 16  # sizes of a padded batch, see `pad_to_few_sizes`


class WikiText(Task):
    name = "lm_wikitext"
    scales = {
        # torch.nn is slow with packed rows, at every size
        "paper": dict(iterations=30_000, engine="fast"),
        "desk": dict(
            vocab=2048, hidden=128, embed=64, batch=32, lr=5e-3, iterations=200, log_every=10
        ),
        "smoke": SMOKE | dict(vocab=40, length=32),
    }
    flags = (
        Flag("model", "lstm", "the layer", choices=("gru", "lstm")),
        Flag("vocab", 32768, "number of pieces, K", int, least=2, below=2**16 + 1),
        Flag("length", 1024, "most tokens that are predicted of a paragraph", int, least=1),
        Flag("data", "data/wikitext-103-raw", f"folder of {NAMES}", affects_result=False),
        Flag("prepare", False, "make the tokens, and end", bool, affects_result=False),
    )
    without = ("held_out", "encode")
    one_graph = False  # batches come from the text, in several sizes

    def setup(self):
        """Find the text and its tokens, or make them; fingerprints belong to the flags."""
        data = Path(self.args.data)
        text = text_sha256(data)
        self.tokens = data / f"tokens-K{self.vocab}-{text[:16]}"
        pieces = self.tokens / "pieces.model"
        if self.args.prepare:
            if not pieces.exists():
                make_tokens(data, self.vocab, self.tokens)
            raise files.End(0, f"tokens in {self.tokens}")
        if not pieces.exists():
            raise UsageError("no tokens yet: the same flags with --prepare make them")
        tokens = tuple(sorted(self.tokens.glob("[a-z]*")))  # all that make_tokens wrote
        self.config |= {"text_sha256": text, "tokens_sha256": digest(tokens)}

    def build(self, device):
        self.device = device
        self.splits = {split: Split(self.tokens, split, self.length) for split in SPLITS}

    def positions(self):
        return self.length

    def model(self):
        model = super().model()
        model.embedding = nn.Embedding(self.vocab, self.args.embed)  # there is no command
        return model

    def paragraphs_of_batch(self, i):
        """(B,) the paragraphs of batch i: the epochs' orders, end to end, cut into batches."""
        count = len(self.splits["train"].starts)
        places = (divmod(n, count) for n in range((i - 1) * self.batch, i * self.batch))
        return np.array([order(self.seed, epoch, count)[place] for epoch, place in places])

    def training_batch(self, i, few_sizes=False):
        batch = pack(self.splits["train"], self.paragraphs_of_batch(i))
        if few_sizes:
            batch = pad_to_few_sizes(batch, self.length, self.vocab)
        return move(batch, self.device)

    def features(self, model, batch, engine):
        return features(model, batch, engine)

    @torch.no_grad()
    def perplexities(self, model, split, engine):
        """The perplexity of a split's known targets, and of all its targets."""
        at_once = common.rows_per_chunk(model.readout.weight)
        known_loss, known_count, total_loss = 0, 0, 0
        by_length = np.argsort(split.counts, kind="stable")  # so that batches have few steps
        for start in range(0, len(by_length), self.batch):
            part = move(pack(split, by_length[start : start + self.batch]), self.device)
            h, losses = features(model, part, engine), []
            for x, targets in zip(h.split(at_once), part.targets[0].split(at_once)):
                losses.append(F.cross_entropy(model.readout(x), targets, reduction="none"))
            losses = torch.cat(losses).double()
            known = part.weight[0].double()
            known_loss += losses @ known
            known_count += known.sum()
            total_loss += losses.sum()
        count = split.counts.sum()
        of_known = common.perplexity(known_loss / known_count)
        return of_known, common.perplexity(total_loss / count)

    def unigram_perplexity(self):
        """That of the test's known targets, by counts of the training tokens, each plus one."""
        frequency = np.bincount(self.splits["train"].tokens, minlength=self.vocab) + 1
        test = self.splits["test"]
        targets = pack(test, np.arange(len(test.starts))).targets.numpy()
        log_share = np.log(frequency / frequency.sum())[targets[targets != UNKNOWN]]
        return common.perplexity(-log_share.mean())

    def examples(self, model, engine):
        return []

    def evaluate(self, model, engine):
        metrics = {}
        for name in ("test", "valid"):
            known, every = self.perplexities(model, self.splits[name], engine)
            metrics[f"{name}_perplexity"] = known
            metrics[f"{name}_perplexity_with_unknown"] = every
        splits = self.splits.items()
        unknown = {name: int((split.tokens == UNKNOWN).sum()) for name, split in splits}
        return metrics | {
            "unigram_test_perplexity": self.unigram_perplexity(),
            "paragraphs": {name: split.paragraphs for name, split in splits},
            "tokens": {name: len(split.tokens) for name, split in splits},
            "unknown_tokens": unknown,
        }


@functools.lru_cache(1)
def order(seed, epoch, count):
    """The paragraphs of an epoch: each of them once, every order as likely."""
    bits = common.random_bits(common.key(seed, common.TRAINING, epoch), (count,))
    return bits.argsort(stable=True).numpy()


GRIDS = {  # of Table 1 and Fig. 15
    "paper": cross(model="lstm", pe=BOTH, vocab=32768),
    "desk": cross(model="lstm", pe=BOTH, vocab=2048, seed=range(3)),
}


def early(result):
    """The training perplexity in the first third of a trial's iterations."""
    losses = result.curve["loss"]
    return math.exp(np.mean(losses[: max(1, len(losses) // 3)]))


def curve(result):
    perplexity = np.exp(result.curve["loss"])
    points = dict(zip(result.curve["iteration"], perplexity))
    yield name_of(result.flags["model"]), result.flags["pe"], points


WikiText.figures["table1"] = Figure(
    "Language model",
    GRIDS,
    metrics={
        "test perplexity": "test_perplexity",
        "test perplexity with unknown targets": "test_perplexity_with_unknown",
    },
    picture=False,
    note="The paper, at its size (minimum, mean, maximum): "
    "no PE 36.83 37.77 38.92, PE 38.07 38.54 38.89.",
)
WikiText.figures["fig15"] = Figure(
    "Language model, training",
    GRIDS,
    metrics={"training perplexity, first third": early},
    curves=curve,
    x="iteration",
    y="training perplexity",
)


# -- Batches, and the model that reads them
def pack(split, chosen):
    """The batch of the chosen paragraphs of a split: N pairs of a piece and the next, packed as
    in torch's PackedSequence, the longest paragraph first.

    inputs (N,) are those of step 0, then those of step 1, ...; targets (1, N); sizes (T,), on
    the CPU, says how many paragraphs have a step t. Unknown pieces are not scored.
    """
    chosen = chosen[np.argsort(-split.counts[chosen], kind="stable")]
    starts, counts = split.starts[chosen], split.counts[chosen]
    steps = np.arange(counts[0])
    sizes = np.searchsorted(-counts, -steps)
    places = np.repeat(steps, sizes) + np.concatenate([starts[:size] for size in sizes])
    inputs, targets = (
        torch.from_numpy(split.tokens[at].astype(np.int64)) for at in (places, places + 1)
    )
    known = targets != UNKNOWN
    return Batch(inputs, targets[None], slice(None), known[None], sizes=torch.from_numpy(sizes))


def pad_to_few_sizes(batch, most, vocab):
    """The same batch, padded to one of a few sizes, each of which a CUDA graph can serve.

    All paragraphs get the same number of steps: a multiple of STEPS, or `most`. The
    number of targets is rounded up to a multiple of a PARTS-th of all pairs. What is
    added comes after a paragraph's end, or has an unknown target, and so changes no
    number. It is of many pieces: a GPU adds up the gradients of a single one slowly.
    """
    paragraphs, pairs = int(batch.sizes[0]), len(batch.inputs)
    time = min(most, math.ceil(len(batch.sizes) / STEPS) * STEPS)
    sizes = F.pad(batch.sizes, (0, time - len(batch.sizes)))
    real = (torch.arange(paragraphs) < sizes[:, None]).flatten()  # (T B,)
    places = torch.cat([real.nonzero()[:, 0], (~real).nonzero()[:, 0]])
    count = math.ceil(pairs * PARTS / len(places)) * len(places) // PARTS
    inputs = (torch.arange(len(places)) % vocab).index_copy_(0, places[:pairs], batch.inputs)
    targets = F.pad(batch.targets, (0, count - pairs), value=UNKNOWN)
    sizes = torch.full_like(sizes, paragraphs)
    return Batch(inputs, targets, places[:count], targets != UNKNOWN, sizes=sizes)


def move(batch, device):
    """The batch on a device; the host does not wait for the copies."""
    if device.type != "cuda":
        return batch
    moved = [
        x.pin_memory().to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x
        for x in batch
    ]
    return Batch(*moved)._replace(sizes=batch.sizes)


def features(model, batch, engine):
    """(N, H), what is read out, or (M, H) where some are answered."""
    if engine.name == "torch":
        packed = PackedSequence(model.embedding(batch.inputs), batch.sizes)
        tokens, lengths = pad_packed_sequence(packed)  # (T, B, E)
        h = model.layer(model.encoding.join(tokens), slice(None))
        h = pack_padded_sequence(h, lengths).data
    else:
        embedded, pieces = fast.used_embeddings(model, batch.inputs)
        table, by_step = fast.input_products(model, embedded, len(batch.sizes))
        h = scan(model.layer, table, by_step, pieces, batch.sizes.tolist(), engine.compiled)
    return h if isinstance(batch.steps, slice) else h.index_select(0, batch.steps)


# -- The text, and its tokens: of every split a flat uint16 array, and where its paragraphs end
def text_sha256(data):
    raw = tuple(data / f"wiki.{split}.raw" for split in SPLITS)
    if not all(path.is_file() for path in raw):
        raise UsageError(f"--data {data} is no folder of {NAMES}; see --help")
    return digest(raw)


@functools.cache  # once for all trials of --all
def digest(paths):
    """One SHA-256 of all these files: that of theirs, one after the other."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def read_paragraphs(path):
    """-> [str], without blank lines and headings."""
    lines = path.read_bytes().split(b"\n")  # Python's text mode knows other ends of a line
    return [x.rstrip(b"\r").decode() for x in lines if x.strip() and not x.startswith(b" =")]


def make_tokens(data, vocab, folder):
    """Write the tokens of a text. The pieces come last: then all is there."""
    import sentencepiece

    texts = {split: read_paragraphs(data / f"wiki.{split}.raw") for split in SPLITS}
    wait = "this can take minutes, and Ctrl-C waits for its end"
    print(f"learning {vocab} pieces: {wait}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts["train"]),
            model_writer=model,
            vocab_size=vocab,
            max_sentence_length=2**30,  # or lines above 4,192 bytes are silently left out
            minloglevel=1,
        )
    except RuntimeError as error:
        why = str(error).rpartition("] ")[2]
        raise UsageError(f"--vocab {vocab} does not suit the text: {why}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    folder.mkdir(exist_ok=True)
    for split, paragraphs in texts.items():
        tokens = [np.array(processor.encode(x), "<u2") for x in paragraphs]
        ends = np.cumsum([0, *map(len, tokens)]).astype("<i8")
        files.write(folder / f"{split}.tokens", np.concatenate(tokens).tobytes())
        files.write(folder / f"{split}.ends", ends.tobytes())
    files.write(folder / "pieces.model", model.getvalue())


class Split:
    """The tokens of a split, and of its paragraphs those that have something to predict."""

    def __init__(self, folder, name, length):
        ends = np.fromfile(folder / f"{name}.ends", "<i8")
        counts = np.minimum(np.diff(ends) - 1, length)
        self.tokens = np.memmap(folder / f"{name}.tokens", "<u2", "r")
        self.paragraphs = len(ends) - 1
        # (P,) of what is predicted
        self.starts = ends[:-1][counts > 0]
        self.counts = counts[counts > 0]


if __name__ == "__main__":
    raise SystemExit(cli.main(WikiText))
