"""Find the record for a reader: its own scope's before the default scope's, with the given text and a valid seal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ctx_compress_rag.errors import ConfigError, MissingPassageError
from ctx_compress_rag.store import record as records
from ctx_compress_rag.store.collection import Companion
from ctx_compress_rag.store.keyring import Keyring
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.store.names import Names, Record
from ctx_compress_rag.store.passage import Passage, to_passages
from ctx_compress_rag.store.scope import own_id, readable, record_id, scoped_name


class Lookup:
    """Finds records by passage, by id and by marker. Thread-safe."""

    def __init__(self, companion: Companion, keyring: Keyring) -> None:
        self._companion = companion
        self._keyring = keyring
        self.names = Names(companion)

    def matching(
        self, field: str, digest: Callable[[str, str, Passage], str], passages: Mapping[str, Passage]
    ) -> set[str]:
        """Record ids whose stored hash equals the passage's. The hash covers the id, so no other record can match."""
        fingerprint = self._companion.fingerprint
        return self._companion.matching(field, {key: digest(fingerprint, key, each) for key, each in passages.items()})

    def holding(self, passages: Mapping[str, Passage], scope: str) -> set[str]:
        """Ids of the passages that are stored with their text in a record that the scope may read."""
        held: set[str] = set()
        for place in readable(scope):
            rest = {record_id(id, place): passage for id, passage in passages.items() if id not in held}
            held.update(own_id(key) for key in self.matching("text_hash", records.text_hash, rest))
        return held

    def by_id(self, ids: Sequence[str], scope: str, texts: Sequence[str] | None) -> dict[str, Record]:
        """By passage id, the scope's own record or the default scope's; with `texts`, only records with those texts.

        Raises:
            PayloadError: a record was changed after sealing, or has another key's seal; the message names the passage.
        """
        expected = None if texts is None else to_passages(texts, checked_ids(ids), repeats=True)
        places = readable(scope)
        stored = self._companion.read([record_id(id, place) for id in checked_ids(ids) for place in places])
        found: dict[str, Record] = {}
        for id in ids:
            for key in (record_id(id, place) for place in places):
                if key in stored and (
                    expected is None
                    or stored[key].get("text_hash") == records.text_hash(self._companion.fingerprint, key, expected[id])
                ):
                    found.setdefault(id, (key, stored[key]))
        self._keyring.check(dict(found.values()))
        return found

    def by_marker(self, markers: Sequence[Marker]) -> dict[Marker, Record]:
        """The records that markers of stored passages stand for.

        Raises:
            MissingPassageError: a record is missing.
            PayloadError: a record was changed after sealing, or has another key's seal.
        """
        names = {each: [scoped_name(each.passage, place) for place in readable(each.scope)] for each in markers}
        found: dict[Marker, Record] = self.names.find(names)
        missing = [marker for marker in names if marker not in found]
        if missing:
            raise MissingPassageError(
                f"no passage in {self._companion.connection.where} for {len(missing)} marker(s) (first: "
                f"{missing[0].id!r}): it was deleted or its text changed after the prompt was made, or it was made "
                "for one question by another store object; retrieve again"
            )
        self._keyring.check(dict(found.values()))
        return found


def checked_ids(ids: Sequence[str]) -> Sequence[str]:
    """The ids as a list.

    Raises:
        ConfigError: ids is a single str or not iterable, or an id is not a str.
    """
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ConfigError(f"ids must be a list, got the {type(ids).__name__} {ids!r}")
    ids = list(ids)
    if other := [id for id in ids if not isinstance(id, str)]:
        raise ConfigError(f"ids must be str, got the {type(other[0]).__name__} {other[0]!r}")
    return ids
