"""The tokenizer and the rows of a job: loaded, or made and kept in the token cache.

Nothing here touches the run's directory. Conversations longer than a row are counted and reported; a data set that
would lose most of its answers is refused.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from tightfit.durable import durable_directory
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.loading import load_source_tokenizer
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tightfit.printable import Say
from tightfit.train.data.chats import read_chats
from tightfit.train.data.dataset import PackedChats, PackedText
from tightfit.train.data.held_out import StorePart, split
from tightfit.train.data.mixture import Mixture, Stores
from tightfit.train.data.shards import prepare_chats, prepare_text
from tightfit.train.data.sources import Source, find_sources
from tightfit.train.data.texts import read_texts
from tightfit.train.data.token_store import TokenStore

Rows = Dataset[dict[str, Tensor]]
PackedRows = PackedText | PackedChats
MOST_LOST = 0.5
"""The largest share of the answers' tokens that may be lost to rows that are too short."""


@dataclass(frozen=True)
class RunData:
    """The tokenized data, the rows to train on, and the held-out rows."""

    store: TokenStore | Stores
    train: PackedRows | Mixture
    held_out: PackedRows | ConcatDataset[dict[str, Tensor]] | None

    def evaluated_rows(self, count: int) -> Rows | None:
        """About `count` held-out rows, evenly spaced, so that even a few cover the variety of the data."""
        if self.held_out is None:
            return None
        rows = len(self.held_out)
        return Subset(self.held_out, range(0, rows, math.ceil(rows / count)))


def find_tokenizer(job: Job, say: Say, show_bars: bool) -> Tokenizer:
    """The tokenizer that `job` names, or one trained on its data."""
    match job.tokenizer.source:
        case "model":
            return load_source_tokenizer(job.model.source)
        case "train":
            return _trained_tokenizer(job, say, show_bars)
        case source:
            return load_source_tokenizer(source)


def _trained_tokenizer(job: Job, say: Say, show_bars: bool) -> Tokenizer:
    """Trained once per data, vocabulary and size, then kept beside the tokenized shards."""
    sources = find_sources(job.data.train, rows_only=job.objective == "sft")
    stamps = [list(stamp) for source in sources for stamp in source.stamps()]
    recipe = json.dumps([job.tokenizer.model_dump(), job.objective, job.data.field, stamps])
    kept = job.data.cache.expanduser() / "tokenizers" / hashlib.sha256(recipe.encode()).hexdigest()[:32]
    if (kept / "tokenizer.json").is_file():
        return load_tokenizer(kept)
    say(f"training a tokenizer of {job.tokenizer.vocab_size:,} tokens on the data")

    texts = _first_texts(job, sources)
    trained = train_tokenizer(texts, job.tokenizer.vocab_size, progress=show_bars and sys.stderr.isatty())
    try:
        with durable_directory(kept) as folder:
            trained.save(folder)
    except OSError as error:
        if not kept.is_dir():  # else another process was first
            raise UserError(
                f"cannot write data.cache {job.data.cache}: {error.strerror}; choose another place"
            ) from error
    return load_tokenizer(kept)


def _first_texts(job: Job, sources: list[Source]) -> Iterator[str]:
    """The beginning of the data, up to `tokenizer.train_bytes`: documents, or messages of conversations."""
    said = (message["content"] for chat in read_chats(sources) for message in chat.messages)
    texts = said if job.objective == "sft" else (piece.text for piece in read_texts(sources, job.data.field))
    seen = 0
    for text in texts:
        yield text
        seen += len(text.encode("utf-8", "surrogatepass"))
        if seen >= job.tokenizer.train_bytes:
            return


def find_data(job: Job, spec: ModelSpec, tokenizer: Tokenizer, show_bars: bool) -> RunData:
    """The tokenized data that `job` trains and evaluates on."""
    data = job.data

    def store_of(names: list[str]) -> TokenStore:
        common = {"cache_dir": data.cache, "vocab_size": spec.vocab_size, "progress": show_bars}
        if job.objective == "sft":
            return prepare_chats(names, tokenizer, **common)  # type: ignore[arg-type]
        return prepare_text(names, tokenizer, field=data.field, **common)  # type: ignore[arg-type]

    def rows(store: TokenStore, part: StorePart | None = None) -> PackedRows:
        if job.objective == "sft":
            return PackedChats(store, data.sequence_length, seed=job.seed, part=part, pack=data.pack)
        return PackedText(store, data.sequence_length, part=part, separate_documents=data.separate_documents)

    def parted(store: TokenStore) -> tuple[PackedRows, PackedRows | None]:
        if isinstance(data.held_out, list):
            return rows(store), None
        kept, aside = split(store, data.held_out, seed=job.seed, sequence_length=data.sequence_length)
        return rows(store, kept), None if aside is None else rows(store, aside)

    names = [data.train] if data.weights is None else [[name] for name in data.train]
    stores = tuple(store_of(each) for each in names)
    train, asides = zip(*(parted(store) for store in stores), strict=True)
    held_out: list[PackedRows] = (
        [rows(store_of(data.held_out))] if isinstance(data.held_out, list) and data.held_out else []
    )
    held_out += [aside for aside in asides if aside is not None]
    return RunData(
        store=stores[0] if data.weights is None else Stores(stores, tuple(data.weights)),
        train=train[0] if data.weights is None else Mixture(train, data.weights),
        held_out=ConcatDataset(held_out) if len(held_out) > 1 else held_out[0] if held_out else None,
    )


def warn_of_lost_answers(rows: PackedRows | Mixture, say: Say) -> None:
    """Warn of conversations that do not fit into rows; refuse the data where more than MOST_LOST is lost."""
    if isinstance(rows, Mixture):
        for part in rows.parts:
            warn_of_lost_answers(part, say)
        return
    if not isinstance(rows, PackedChats) or not rows.truncated + rows.dropped:
        return
    length, share = rows.sequence_length, rows.lost_answer_tokens / max(rows.answer_tokens, 1)
    what = (
        f"{rows.truncated + rows.dropped:,} of {rows.conversations:,} conversations are longer than "
        f"data.sequence_length {length}: {rows.truncated:,} are cut and {rows.dropped:,} left out, which loses "
        f"{share:.1%} of the answers' tokens"
    )
    if share > MOST_LOST:
        raise UserError(f"{what}; raise data.sequence_length")
    say(f"warning: {what}; raise data.sequence_length to keep them")
