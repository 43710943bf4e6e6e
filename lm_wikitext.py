"""Language model (Appendix E: Fig. 15, Table 1): next-token prediction within paragraphs.

    python lm_wikitext.py --prepare          # train the tokenizer, tokenize the text
    python lm_wikitext.py --pe sin --seed 0  # one trial of Table 1

For a small corpus, add `--scale desk --data DIR` to both commands.

    in   the cat        of the paragraph "the cat sat"
    out  cat sat        every target is the next token

The paper reports a negative result: positional encoding (PE) does not improve test perplexity.

The text has one paragraph per line; blank lines and headings, which begin with " =", are
dropped. WikiText-103 raw is at https://wikitext.smerity.com/wikitext-103-raw-v1.zip: unpack
it in data/. SentencePiece's unigram model learns K subword tokens from the training split, with
default settings but no limit on line length. There is no BOS or EOS token: a paragraph of one
token has no target and is left out. Characters that the tokenizer does not know become the
unknown token, which is kept as input but excluded from the loss and the main perplexity.
"""

from suite import cli, files  # isort: skip # before PyTorch

import functools
import hashlib
import io
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import common
from common import Batch, UsageError, select_steps
from suite.figures import NONE_AND_PE, Figure, grid
from suite.task import SMOKE, Flag, Task

SPLITS = ("train", "valid", "test")
TEXT_FILES = "wiki.{train,valid,test}.raw"
UNK_ID = 0  # SentencePiece's unk_id, also for the < and > of the text's own "<unk>"
PAD_STEPS, TARGET_BUCKETS = 64, 16  # see pad_to_bucket


class PackedModel(common.Model):
    """Model for packed batches."""

    def features(self, batch):
        """Return the layer's outputs at the targets, (N, H)."""
        packed = rnn.PackedSequence(self.embedding(batch.inputs), batch.batch_sizes)
        embedded, lengths = rnn.pad_packed_sequence(packed)  # (T, B, E)
        h = self.layer(self.encoding(embedded), slice(None))
        return select_steps(rnn.pack_padded_sequence(h, lengths).data, batch.target_steps)


class WikiText(Task):
    name = "lm_wikitext"
    scales = {
        # --engine torch pads packed batches
        "paper": dict(iterations=30_000, engine="fast"),
        "desk": dict(
            vocab=2048, hidden=128, embed=64, batch=32, lr=5e-3, iterations=200, log_every=10
        ),
        "smoke": SMOKE | dict(vocab=40, length=32),
    }
    extra_flags = (
        Flag("model", "lstm", "recurrent layer", choices=("gru", "lstm")),
        Flag("vocab", 32768, "vocabulary size, K (subwords)", at_least=2, below=2**16 + 1),
        Flag(
            "length",
            1024,
            "maximum number of predicted tokens; longer paragraphs are truncated",
            at_least=1,
        ),
        Flag(
            "data", "data/wikitext-103-raw", f"folder of {TEXT_FILES}", identifies_trial=False
        ),
        Flag(
            "prepare",
            False,
            "train the tokenizer on the text in --data, tokenize the text, and exit",
            identifies_trial=False,
        ),
    )
    unused_flags = ("held_out", "encode")
    batch_in_graph = False  # batches vary in size
    model_class = PackedModel

    def load_inputs(self):
        """Add hashes of the text and its tokens to the config; with --prepare, make tokens."""
        data = Path(self.args.data)
        text_hash = text_sha256(data)
        self.token_folder = data / f"tokens-K{self.vocab}-{text_hash[:16]}"
        if not (self.token_folder / "pieces.model").exists():
            if not self.args.prepare:
                raise UsageError("no tokens yet: first run this command with --prepare")
            prepare_tokens(data, self.vocab, self.token_folder)
        if self.args.prepare:
            raise files.Exit(0, f"tokens in {self.token_folder}")
        token_files = tuple(sorted(self.token_folder.glob("[a-z]*")))  # without temporary files
        self.config |= {"text_sha256": text_hash, "tokens_sha256": digest(token_files)}

    def prepare_data(self, device):
        self.device = device
        self.splits = {split: Split(self.token_folder, split, self.length) for split in SPLITS}

    def n_steps(self):
        return self.length

    def make_model(self):
        model = super().make_model()
        model.embedding = nn.Embedding(self.vocab, self.args.embed)  # no command token
        return model

    def paragraphs_of_batch(self, i):
        """Return the indices of batch i's paragraphs (B,); a batch may span epochs."""
        count = len(self.splits["train"].starts)
        samples = range((i - 1) * self.batch_size, i * self.batch_size)
        places = [divmod(sample, count) for sample in samples]  # (epoch, position in it)
        return np.array([permutation(self.seed, epoch, count)[n] for epoch, n in places])

    def training_batch(self, i):
        batch = pack(self.splits["train"], self.paragraphs_of_batch(i))
        if self.device.type == "cuda":  # a CUDA graph for each shape
            batch = pad_to_bucket(batch, self.length, self.vocab)
        return to_device(batch, self.device)

    @torch.no_grad()
    def perplexities(self, model, split, engine):
        """Return a split's perplexity on known targets and on all targets."""
        chunk_size = common.rows_per_chunk(model.readout.weight)
        known_loss, known_count, total_loss = 0, 0, 0
        by_length = np.argsort(split.target_counts, kind="stable")  # groups similar lengths
        for start in range(0, len(by_length), self.batch_size):
            batch = to_device(
                pack(split, by_length[start : start + self.batch_size]), self.device
            )
            h, losses = engine.features(model, batch), []
            for x, targets in zip(h.split(chunk_size), batch.targets[0].split(chunk_size)):
                losses.append(F.cross_entropy(model.readout(x), targets, reduction="none"))
            losses = torch.cat(losses).double()
            known = batch.mask[0].double()
            known_loss += losses @ known
            known_count += known.sum()
            total_loss += losses.sum()
        count = split.target_counts.sum()
        known_perplexity = common.perplexity(known_loss / known_count)
        return known_perplexity, common.perplexity(total_loss / count)

    def unigram_perplexity(self):
        """Return test perplexity (known targets) of a unigram model with add-one smoothing."""
        counts = np.bincount(self.splits["train"].tokens, minlength=self.vocab) + 1
        test = self.splits["test"]
        targets = pack(test, np.arange(len(test.starts))).targets.numpy()
        log_prob = np.log(counts / counts.sum())[targets[targets != UNK_ID]]
        return common.perplexity(-log_prob.mean())

    def examples(self, model, engine):
        return []

    def evaluate(self, model, engine):
        metrics = {}
        for name in ("test", "valid"):
            of_known, of_all = self.perplexities(model, self.splits[name], engine)
            metrics[f"{name}_perplexity"] = of_known
            metrics[f"{name}_perplexity_with_unknown"] = of_all
        return metrics | {"unigram_test_perplexity": self.unigram_perplexity()}


@functools.lru_cache(1)
def permutation(seed, epoch, count):
    """Return a uniformly random permutation of an epoch's paragraphs."""
    bits = common.random_bits(common.derive_key(seed, common.TRAIN_STREAM, epoch), (count,))
    return bits.argsort(stable=True).numpy()


GRIDS = {  # of Table 1 and Fig. 15
    "paper": grid(model="lstm", pe=NONE_AND_PE, vocab=32768),
    "desk": grid(model="lstm", pe=NONE_AND_PE, vocab=2048, seed=range(3)),
}


def early_perplexity(result):
    """Return training perplexity over the first third of iterations."""
    losses = result.training_curve["loss"]
    return math.exp(np.mean(losses[: max(1, len(losses) // 3)]))


def perplexity_curve(result):
    curve = result.training_curve
    yield "", dict(zip(curve["iteration"], np.exp(curve["loss"])))


WikiText.figures["table1"] = Figure(
    "Language model: test perplexity",
    GRIDS,
    metrics={
        "test perplexity": "test_perplexity",
        "test perplexity with unknown targets": "test_perplexity_with_unknown",
    },
    plot=False,
    note="Paper, full size (minimum, mean, maximum): "
    "no PE 36.83, 37.77, 38.92; PE 38.07, 38.54, 38.89.",
)
WikiText.figures["fig15"] = Figure(
    "Language model: training curves",
    GRIDS,
    metrics={"training perplexity, first third": early_perplexity},
    curves=perplexity_curve,
    x="iteration",
    y="training perplexity",
)


# -- Batches
def pack(split, paragraphs):
    """Pack paragraphs of a split, given by index, into a batch of N (token, next token) pairs.

    As in torch's PackedSequence, the longest paragraph comes first. inputs (N,) are those of
    step 0, then those of step 1, ...; targets (1, N); batch_sizes (T,), on the CPU, count
    the paragraphs at each step. Unknown targets are masked.
    """
    paragraphs = paragraphs[np.argsort(-split.target_counts[paragraphs], kind="stable")]
    starts, counts = split.starts[paragraphs], split.target_counts[paragraphs]
    steps = np.arange(counts[0])
    sizes = np.searchsorted(-counts, -steps)  # number of paragraphs longer than each step
    indices = np.repeat(steps, sizes) + np.concatenate([starts[:size] for size in sizes])
    inputs, targets = (
        torch.from_numpy(split.tokens[i].astype(np.int64)) for i in (indices, indices + 1)
    )
    known = targets != UNK_ID
    return Batch(
        inputs, targets[None], slice(None), known[None], batch_sizes=torch.from_numpy(sizes)
    )


def pad_to_bucket(batch, max_steps, vocab):
    """Pad a batch to one of a few shapes, since each is captured as its own CUDA graph.

    All paragraphs get the same number of steps, a multiple of PAD_STEPS or `max_steps`. The
    number of targets is rounded up to a multiple of T B / TARGET_BUCKETS. Padding follows a
    paragraph's end or has an unknown target, so results do not change. It cycles through the
    vocabulary, since adding the gradients of many copies of one token is slow.
    """
    paragraphs, pairs = batch.batch_sizes[0], len(batch.inputs)
    n_steps = min(max_steps, math.ceil(len(batch.batch_sizes) / PAD_STEPS) * PAD_STEPS)
    sizes = F.pad(batch.batch_sizes, (0, n_steps - len(batch.batch_sizes)))
    real = (torch.arange(paragraphs) < sizes[:, None]).flatten()  # (T B,)
    inputs = torch.arange(len(real)) % vocab
    inputs[real] = batch.inputs
    count = math.ceil(pairs * TARGET_BUCKETS / len(real)) * len(real) // TARGET_BUCKETS
    target_steps = torch.cat([real.nonzero(), (~real).nonzero()])[:count, 0]  # real ones first
    targets = F.pad(batch.targets, (0, count - pairs), value=UNK_ID)
    sizes = torch.full_like(sizes, paragraphs)
    return Batch(inputs, targets, target_steps, targets != UNK_ID, batch_sizes=sizes)


def to_device(batch, device):
    """Copy a batch to the device without host synchronisation."""
    if device.type != "cuda":
        return batch
    moved = {
        name: x.pin_memory().to(device, non_blocking=True)
        for name, x in batch._asdict().items()
        if isinstance(x, torch.Tensor) and name != "batch_sizes"
    }
    return batch._replace(**moved)


# -- Text and tokens: a split has two files, its uint16 tokens and its paragraphs' ends
def text_sha256(data):
    raw = tuple(data / f"wiki.{split}.raw" for split in SPLITS)
    if not all(path.is_file() for path in raw):
        raise UsageError(f"--data {data} lacks {TEXT_FILES}; see --help for the download")
    return digest(raw)


@functools.cache  # once for all trials of --all
def digest(paths):
    """Return the SHA-256 of the files' concatenated SHA-256 digests."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def read_paragraphs(path):
    """Read all but blank lines and headings."""
    lines = path.read_bytes().split(b"\n")  # text mode would also split at a lone CR
    return [x.rstrip(b"\r").decode() for x in lines if x.strip() and not x.startswith(b" =")]


def prepare_tokens(data, vocab, folder):
    """Train the tokenizer and tokenize the text; pieces.model, written last, marks success."""
    import sentencepiece

    texts = {split: read_paragraphs(data / f"wiki.{split}.raw") for split in SPLITS}
    print(f"training the tokenizer, K = {vocab} (minutes; Ctrl-C takes effect afterwards)")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts["train"]),
            model_writer=model,
            vocab_size=vocab,
            max_sentence_length=2**30,  # the default drops lines over 4,192 bytes
            minloglevel=1,
        )
    except RuntimeError as error:
        why = str(error).rpartition("] ")[2]
        raise UsageError(f"--vocab {vocab} is not possible with this text: {why}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    folder.mkdir(exist_ok=True)
    for split, paragraphs in texts.items():
        tokens = [np.array(processor.encode(x), "<u2") for x in paragraphs]
        ends = np.cumsum([0, *map(len, tokens)])
        files.write(folder / f"{split}.tokens", np.concatenate(tokens).tobytes())
        files.write(folder / f"{split}.ends", ends.tobytes())
    files.write(folder / "pieces.model", model.getvalue())


class Split:
    """A split's tokens, and where each paragraph starts and how many targets it has."""

    def __init__(self, folder, name, length):
        ends = np.fromfile(folder / f"{name}.ends", "<i8")
        counts = np.minimum(np.diff(ends) - 1, length)
        self.tokens = np.memmap(folder / f"{name}.tokens", "<u2", "r")
        # (P,) paragraphs with targets
        self.starts = ends[:-1][counts > 0]
        self.target_counts = counts[counts > 0]


if __name__ == "__main__":
    raise SystemExit(cli.main(WikiText))
