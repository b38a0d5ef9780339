"""Data tokenised once and cached: from the names a user gives to a TokenStore.

Documents go through the tokenizer in batches large enough for all cores. The end-of-text token follows every document
of plain text; a conversation ends as its template ends it. Every id is checked against the model's vocabulary while it
is written and again when a cached store is used with another model: an id too large would read past the embedding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.train.data.chats import read_chats
from tightfit.train.data.shard_writer import ShardWriter
from tightfit.train.data.sources import Source, find_sources
from tightfit.train.data.texts import Piece, read_texts
from tightfit.train.data.token_cache import cached_store
from tightfit.train.data.token_store import Recipe, TokenStore

BATCH_BYTES = 4 * 2**20
"""Bytes of text tokenized together. A tokenizer was measured to hold about 250 bytes per token while it works: 0.3 GiB
a batch of English, and 1 GiB where every byte is a token of its own."""
BATCH_PIECES = 4096
Advance = Callable[[float], None]


def prepare_text(
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    cache_dir: Path,
    vocab_size: int,
    field: str = "text",
    progress: bool = False,
) -> TokenStore:
    """The tokens of all documents in `names`, for a model with `vocab_size` embeddings."""
    sources = find_sources(names)

    def fill(writer: ShardWriter) -> None:
        with _meter(sources, writer, progress) as advance:
            for piece, ids in _encoded(read_texts(sources, field), tokenizer, advance):
                writer.add(ids, piece.where)
                if piece.is_last:
                    writer.end_document(piece.where, tokenizer.eos_id)
                _check_ids(writer.largest_id, writer.largest_id_where, tokenizer, vocab_size)

    recipe = _recipe("text", field, sources, tokenizer, vocab_size)
    return _prepared(names, recipe, fill, tokenizer, cache_dir, vocab_size)


def prepare_chats(
    names: Sequence[str], tokenizer: Tokenizer, *, cache_dir: Path, vocab_size: int, progress: bool = False
) -> TokenStore:
    """The tokens of all conversations in `names`, with masks of the assistant's tokens."""
    sources = find_sources(names, rows_only=True)

    def fill(writer: ShardWriter) -> None:
        with _meter(sources, writer, progress) as advance:
            for chat in read_chats(sources):
                try:
                    ids, mask = tokenizer.encode_chat(chat.messages)
                except UserError as error:
                    raise UserError(f"{chat.where} cannot be tokenized: {error}") from error
                if not any(mask[1:]):  # nothing predicts the first token
                    raise UserError(f"{chat.where} has no answer after the chat template; check the template")
                writer.add(ids, chat.where, mask)
                writer.end_document()
                _check_ids(writer.largest_id, writer.largest_id_where, tokenizer, vocab_size)
                advance(chat.source_bytes)

    recipe = _recipe("chats", None, sources, tokenizer, vocab_size)
    return _prepared(names, recipe, fill, tokenizer, cache_dir, vocab_size)


def _prepared(
    names: Sequence[str],
    recipe: Recipe,
    fill: Callable[[ShardWriter], None],
    tokenizer: Tokenizer,
    cache_dir: Path,
    vocab_size: int,
) -> TokenStore:
    def fill_something(writer: ShardWriter) -> None:
        fill(writer)
        if writer.tokens_total == 0:
            raise UserError(f"there are no tokens in {', '.join(names)}; give data that contains text")

    store = cached_store(cache_dir, recipe, fill_something)
    _check_ids(store.manifest.largest_id, store.manifest.largest_id_where, tokenizer, vocab_size)
    return store


def _recipe(
    kind: Literal["text", "chats"],
    field: str | None,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> Recipe:
    return Recipe(
        kind=kind,
        field=field,
        tokenizer=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        dtype="uint16" if vocab_size <= 2**16 else "uint32",
        sources=tuple(stamp for source in sources for stamp in source.stamps()),
    )


def _check_ids(largest: int, where: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise UserError(
            f"{where} contains token {largest}, but the model has a vocabulary of {vocab_size} and the tokenizer "
            f"one of {tokenizer.vocab_size}; use the model's own tokenizer or a model with a larger vocabulary"
        )


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, advance: Advance) -> Iterator[tuple[Piece, list[int]]]:
    for batch in _batches(pieces):
        yield from zip(batch, tokenizer.encode_many([piece.text for piece in batch]), strict=True)
        advance(sum(piece.source_bytes for piece in batch))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece.text) if piece.text.isascii() else 3 * len(piece.text)
        if held >= BATCH_BYTES or len(batch) == BATCH_PIECES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@contextmanager
def _meter(sources: Sequence[Source], writer: ShardWriter, shown: bool) -> Iterator[Advance]:
    """A progress bar over the bytes of `sources`; yields the function that advances it."""
    total = sum(size for source in sources for _, size, _ in source.stamps())
    columns = (TextColumn("tokenizing"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=total)

        def advance(source_bytes: float) -> None:
            bar.update(
                task,
                advance=source_bytes,
                description=f"{counted(writer.documents, 'document')}, {counted(writer.tokens_total, 'token')}",
            )

        yield advance
        bar.update(task, completed=total)
