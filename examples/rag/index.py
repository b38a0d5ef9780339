"""A vector index in one SQLite file: passages in a table, their vectors in sqlite-vec beside them.

Through apsw, as Python's own sqlite3 is often built without loadable extensions.
"""

import struct
from collections.abc import Sequence

import apsw
import sqlite_vec

from examples.rag.passages import Passage


class Index:
    """Passages by their vectors."""

    def __init__(self, path: str, dimensions: int) -> None:
        self._connection = apsw.Connection(path)
        self._connection.enable_load_extension(True)
        self._connection.load_extension(sqlite_vec.loadable_path())
        self._connection.enable_load_extension(False)
        vectors = f"create virtual table vectors using vec0(embedding float[{dimensions}] distance_metric=cosine)"
        for statement in ("create table passages (id integer primary key, topic text, text text)", vectors):
            self._connection.execute(statement)

    def add(self, passages: Sequence[Passage], vectors: Sequence[Sequence[float]]) -> None:
        """Take all of them, or none."""
        with self._connection:
            for number, (passage, vector) in enumerate(zip(passages, vectors, strict=True), 1):
                row = (number, passage.topic, passage.text)
                self._connection.execute("insert into passages values (?, ?, ?)", row)
                self._connection.execute(
                    "insert into vectors (rowid, embedding) values (?, ?)", (number, _packed(vector))
                )

    def nearest(self, vector: Sequence[float], count: int) -> list[Passage]:
        """The passages whose vectors are most alike, best first."""
        query = (
            "select topic, text from (select rowid, distance from vectors where embedding match ? and k = ?) "
            "join passages on id = rowid order by distance"
        )
        return [Passage(topic, text) for topic, text in self._connection.execute(query, (_packed(vector), count))]


def _packed(vector: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(vector)}f", *vector)
