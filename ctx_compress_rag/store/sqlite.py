"""Read Chroma's records from its SQLite file, when its engine cannot or must not be opened.

This is so for a folder that this process cannot write to or that a server has open: Chroma's engine writes even
when it reads. `info` uses this, too, for sums over all records. Nothing is ever written here. Do not use it in a
process where the app has its own engine open: two SQLite libraries in one process drop each other's locks.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chromadb.errors import NotFoundError

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.store.pages import pages

DATABASE = "chroma.sqlite3"
JOURNAL = f"{DATABASE}-journal"
_VALUE = "coalesce(m.string_value, m.int_value, m.float_value, m.bool_value)"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_IDS = 500  # older SQLite takes 999 values in one statement


class SqliteClient:
    """The part of a Chroma client that reading needs."""

    def __init__(self, folder: Path, tenant: str, database: str) -> None:
        self._file = folder / DATABASE
        self._owner = (database, tenant)

    def get_collection(self, name: str, embedding_function: None = None) -> SqliteCollection:
        """The collection; NotFoundError if there is none."""
        with self._reading() as rows:
            found = rows(
                "select c.id, s.id, v.id from collections c join databases d on d.id = c.database_id "
                "join segments s on s.collection = c.id and s.scope = 'METADATA' "
                "join segments v on v.collection = c.id and v.scope = 'VECTOR' "
                "where c.name = ? and d.name = ? and d.tenant_id = ?",
                (name, *self._owner),
            )
            if not found:
                raise NotFoundError(f"Collection [{name}] does not exist")
            [(id, segment, index)] = found
            if not _UUID.fullmatch(index):  # a path: `repair` deletes the folder of this name
                raise StoreError(
                    f"the index of the collection {name!r} in {self._file} has the name {index!r}, which Chroma never "
                    "gives: the database was changed; restore a backup"
                )
            values = rows(
                "select key, coalesce(str_value, int_value, float_value, bool_value) from collection_metadata "
                "where collection_id = ?",
                (id,),
            )
        return SqliteCollection(self, segment, index, name, dict(values))

    def collections(self) -> list[SqliteCollection]:
        """All collections, by name."""
        with self._reading() as rows:
            names = rows(
                "select c.name from collections c join databases d on d.id = c.database_id "
                "where d.name = ? and d.tenant_id = ? order by c.name",
                self._owner,
            )
        return [self.get_collection(name) for (name,) in names]

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """A function that runs a statement with its values and returns the rows."""
        try:
            with closing(sqlite3.connect(f"file:{quote(str(self._file))}?mode=ro", uri=True, timeout=30)) as database:
                yield lambda statement, values=(): database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK:
                raise StoreError(
                    f"cannot read {self._file}: a writer was stopped in the middle, and {JOURNAL} must be undone "
                    "first: open the store once as a user who may write to the folder"
                ) from error
            raise StoreError(
                f"cannot read {self._file} ({error}): check that this user may read it, and that a supported version "
                "of Chroma made it"
            ) from error


class SqliteCollection:
    """The part of a Chroma collection that reading needs."""

    def __init__(self, client: SqliteClient, segment: str, index: str, name: str, metadata: dict[str, Any]) -> None:
        self._client, self._segment, self.name, self.metadata = client, segment, name, metadata
        self.index_folder = index  # inside the store's folder; created after the first 100 or 1000 records

    def count(self) -> int:
        """How many records there are."""
        with self._client._reading() as rows:
            [(count,)] = rows("select count(*) from embeddings where segment_id = ?", (self._segment,))
            return int(count)

    def get(
        self, ids: Sequence[str] | None = None, where: dict[str, Any] | None = None, include: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Like Chroma's `get`; `where` is one field with `$in`."""
        found: dict[str, dict[str, Any]] = {}
        with self._client._reading() as rows:
            keys: dict[str, int] = {}
            if ids is not None:
                for part in pages(list(ids), _IDS):
                    keys |= dict(rows(f"{_ROWS} and e.embedding_id in ({_marks(part)})", (self._segment, *part)))
            elif where is None:
                keys = dict(rows(_ROWS, (self._segment,)))
            if where is not None:
                [(field, wanted)] = where.items()
                matching: dict[str, int] = {}
                for part in pages(wanted["$in"], _IDS):
                    matching |= dict(
                        rows(
                            f"{_ROWS} and e.id in (select id from embedding_metadata where key = ? "
                            f"and string_value in ({_marks(part)}))",
                            (self._segment, field, *part),
                        )
                    )
                keys = {id: row for id, row in matching.items() if ids is None or id in keys}
            if "metadatas" in include:
                by_row = {row: found.setdefault(id, {}) for id, row in keys.items()}
                for some in pages(list(by_row), _IDS):
                    statement = f"select m.id, m.key, {_VALUE} from embedding_metadata m where m.id in ({_marks(some)})"
                    for row, key, value in rows(statement, some):
                        by_row[row][key] = value
        return {"ids": list(keys), "metadatas": list(found.values()) if "metadatas" in include else None}

    def sums(self, fields: Sequence[str]) -> list[int]:
        """The sum of each whole-number field over all records."""
        with self._client._reading() as rows:
            totals = [
                rows(
                    "select coalesce(sum(m.int_value), 0) from embedding_metadata m join embeddings e on e.id = m.id "
                    "where e.segment_id = ? and m.key = ?",
                    (self._segment, field),
                )
                for field in fields
            ]
        return [int(total) for [(total,)] in totals]

    def column_tails(self, field: str) -> list[tuple[int, str]]:
        """Length and last two characters of a string field in every record."""
        with self._client._reading() as rows:
            return list(
                rows(
                    "select length(m.string_value), substr(m.string_value, -2) from embedding_metadata m "
                    "join embeddings e on e.id = m.id where e.segment_id = ? and m.key = ?",
                    (self._segment, field),
                )
            )

    def column(self, field: str, ids: Sequence[str] | None = None) -> dict[str, Any]:
        """One field of all records that have it, or of those with these ids, by id."""
        statement = (
            f"select e.embedding_id, {_VALUE} from embeddings e join embedding_metadata m on m.id = e.id "
            "where e.segment_id = ? and m.key = ?"
        )
        with self._client._reading() as rows:
            if ids is None:
                return dict(rows(statement, (self._segment, field)))
            found: dict[str, Any] = {}
            for part in pages(list(ids), _IDS):
                of_part = f"{statement} and e.embedding_id in ({_marks(part)})"
                found |= dict(rows(of_part, (self._segment, field, *part)))
            return found


_ROWS = "select e.embedding_id, e.id from embeddings e where e.segment_id = ?"


def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))
