"""The record of a passage, as the metadata of a Chroma record.

The text is a deflated metadata string, because Chroma keeps such a string twice, but a `document` about nine times
for its full-text index (measured: 11 kB for 1.2 kB of text), which is not needed here.

A record is signed, so that nobody without the key can change it unnoticed. The signature covers hashes of text and
payload, so that the text can still be read if the payload is damaged.

A passage is stored under its id prefixed with the scope's digest, so that no tenant overwrites or reads another
tenant's passage. A scope can read and overwrite its own passages, and read those of the default scope.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import PayloadError, short_repr
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.codec import decode_soft_context, encode_soft_context
from ctx_compress_rag.store.marker import DEFAULT_SCOPE, Signer
from ctx_compress_rag.store.passage import Passage, StoredPassage
from ctx_compress_rag.text.sentences import split_passage

_SCOPE_DIGITS = 32
MAX_UNPACKED_BYTES = 16 << 20
"""A stored text that unpacks to more is not read, because a few megabytes of zlib can hold gigabytes."""


@dataclass(frozen=True)
class Record:
    """The fields of a stored passage, as Chroma keeps them."""

    payload: str  # the encoded soft context, see `codec`
    text: str  # deflated, in base64
    metadata: str  # as JSON
    text_hash: str
    full_hash: str
    marker: str  # the marker id with its scope, see `scoped_marker_id`
    slots: int
    tokens: int  # number of source tokens that the slots stand for
    payload_hash: str
    sentences: str  # vectors of the passage's sentences, see `pack_sentence_vectors`, or ""
    signature: str = ""  # covers collection's name, id (and so the scope), hashes, marker id, counts and metadata

    @classmethod
    def of(
        cls, id: str, passage: Passage, soft: SoftContext, sentences: str, codec: str, marker: str, fingerprint: str
    ) -> Record:
        """Return the unsigned record of a passage. Raise PayloadError, with the id, if the codec cannot hold `soft`."""
        try:
            payload = encode_soft_context(soft, codec)
        except PayloadError as error:
            raise PayloadError(f"passage {passage.id!r} was compressed to something unusable: {error}") from error
        return cls(
            payload=payload,
            text=base64.b64encode(zlib.compress(passage.text.encode())).decode("ascii"),
            metadata=_json(passage.metadata),
            text_hash=record_text_hash(fingerprint, id, passage),
            full_hash=record_full_hash(fingerprint, id, passage),
            marker=marker,
            slots=soft.n_slots,
            tokens=soft.n_tokens,
            payload_hash=_hash(payload),
            sentences=sentences,
        )

    def relabeled(self, id: str, passage: Passage, fingerprint: str) -> Record:
        """Return a copy of the record with the passage's metadata, which must be signed again."""
        return replace(self, metadata=_json(passage.metadata), full_hash=record_full_hash(fingerprint, id, passage))

    def signed(self, id: str, signer: Signer, collection: str) -> Record:
        return replace(self, signature=signer.sign(*self._signed(id, collection)))

    @classmethod
    def read(cls, id: str, row: Mapping[str, Any]) -> Self:
        """Return the record in `row`, Chroma's metadata under an id. Raise PayloadError if a field is missing."""
        values: dict[str, Any] = {field.name: row.get(field.name) for field in fields(cls)}
        for field in fields(cls):
            if type(values[field.name]).__name__ != field.type:  # an annotation is a string here
                raise damaged_record(id, f"{field.name} is {short_repr(values[field.name])}, not {field.type}")
        return cls(**values)

    def check_signature(self, id: str, signer: Signer, collection: str) -> None:
        """Raise PayloadError if the record, as it is now, was not signed with this key for this collection."""
        right = signer.sign(*self._signed(id, collection))
        if not hmac.compare_digest(self.signature.encode("utf-8", "replace"), right.encode()):
            raise damaged_record(
                id,
                "it was changed, signed with another key (set CTX_COMPRESS_KEY to that key), or made for a collection "
                "of another name (give it its name again)",
            )

    def soft_context(self, id: str) -> SoftContext:
        """Return the decoded soft context. Raise PayloadError, with the passage's id, if the payload was changed."""
        if _hash(self.payload) != self.payload_hash:
            raise damaged_record(id, "its payload was changed after it was signed")
        return decode_soft_context(self.payload)

    def passage(self, id: str, fingerprint: str) -> StoredPassage:
        """Return the passage without its slots. Raise PayloadError, with the passage's id, if the record is damaged."""
        try:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(base64.b64decode(self.text, validate=True), MAX_UNPACKED_BYTES)
            if not unpacker.eof:
                raise ValueError(f"its text is truncated, or unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
            text = data.decode()
            if _hash(fingerprint, id, text) != self.text_hash:
                raise ValueError("its text was changed after it was stored")
            metadata = json.loads(self.metadata)
            marker = self.marker.partition("@")[0] if _hash(self.payload) == self.payload_hash else ""
            return StoredPassage(passage_id(id), text, metadata, self.slots, self.tokens, self.sentences, marker)
        except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
            raise damaged_record(id, error) from error

    def _signed(self, id: str, collection: str) -> tuple[str, ...]:
        hashes, counts = (self.text_hash, self.payload_hash), (str(self.slots), str(self.tokens))
        return (collection, id, *hashes, self.marker, *counts, self.sentences, self.metadata)


@dataclass(frozen=True)
class FoundRecord:
    """A record under its id, with the number of its slots that are merged into one; decoded when asked for."""

    id: str
    record: Record
    fingerprint: str
    factor: int = 1

    @property
    def soft(self) -> SoftContext:
        return self.record.soft_context(self.id).merge(self.factor)

    @property
    def passage(self) -> StoredPassage:
        return self.record.passage(self.id, self.fingerprint)

    @property
    def text(self) -> str:
        return self.passage.text


def record_id(id: str, scope: str) -> str:
    """Return the id of the record of a scope's passage, which differs for each pair of scope and passage id."""
    return f"{_digest(scope)}/{id}"


def passage_id(record: str) -> str:
    return record[_SCOPE_DIGITS + 1 :]


def owned_by_scope(record: str, scope: str) -> bool:
    return record.startswith(f"{_digest(scope)}/")


def readable_scopes(scope: str) -> list[str]:
    """Return the scopes whose passages a scope may read, itself first."""
    return list(dict.fromkeys((scope, DEFAULT_SCOPE)))


def scoped_marker_id(marker_id: str, scope: str) -> str:
    """Return a marker id with the scope's digest, as a record holds it, so that a marker finds its scope's record."""
    return f"{marker_id}@{_digest(scope)}"


def _digest(scope: str) -> str:
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:_SCOPE_DIGITS]


def record_text_hash(fingerprint: str, id: str, passage: Passage) -> str:
    """Return a hash of bundle, record id and text. If it is unchanged, the passage need not be compressed again."""
    return _hash(fingerprint, id, passage.text)


def record_full_hash(fingerprint: str, id: str, passage: Passage) -> str:
    """Return a hash of bundle, record id, text and metadata. If it is unchanged, the record need not be written."""
    return _hash(fingerprint, id, passage.text, _json(passage.metadata))


def damaged_record(id: str, reason: object) -> PayloadError:
    return PayloadError(
        f"the record of passage {passage_id(id)!r} is damaged ({reason}): delete the passage and add it again "
        "(`ctx-compress index --repair` does)"
    )


def _json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(dict(metadata), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _hash(*fields: str) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]


Vectors = NDArray[np.float32]
_DIM = 384


def sentence_vectors(texts: Sequence[str]) -> list[Vectors]:
    """Return unit vectors (units, 384) of each text's units with their heads; MissingExtraError without `sentences`."""
    parts = [["\n".join(unit.path) for unit in split_passage(text)] for text in texts]
    flat = [part for own in parts for part in own]
    if not flat:
        return [np.zeros((0, _DIM), np.float32)] * len(parts)
    return np.split(embed_passages(flat), np.cumsum([len(own) for own in parts])[:-1])


def pack_sentence_vectors(vectors: Vectors) -> str:
    """Return vectors (units, 384) as text for a record, in 8 bits, "" for none. A cosine's error is below 0.01."""
    return encode_soft_context(SoftContext(vectors, np.ones(len(vectors), np.int64))) if len(vectors) else ""


def unpack_sentence_vectors(packed: str, count: int) -> Vectors | None:
    """Return vectors (count, 384), or None if `packed` is "" or has another number; PayloadError if it is damaged."""
    if not packed:
        return None
    vectors = decode_soft_context(packed).slots
    return vectors if len(vectors) == count else None
