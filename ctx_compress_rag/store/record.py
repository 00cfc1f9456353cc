"""A passage as a Chroma record: the fields of its metadata.

The text is a deflated metadata string: Chroma keeps such a string twice, and a `document` about nine times because
of its full-text index (measured: 11 kB for 1.2 kB of text), which is not needed here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import zlib
from collections.abc import Mapping
from typing import Any

from ctx_compress_rag.errors import PayloadError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import codec as codecs
from ctx_compress_rag.store.marker import MarkerCodec
from ctx_compress_rag.store.passage import Passage, StoredPassage
from ctx_compress_rag.store.scope import name_in_record, own_id

Record = dict[str, str | int]

SEAL = "seal"
_METADATA_SEAL = "metadata_seal"
_WITH_METADATA = "with metadata"  # in the seal of a record whose metadata have a seal of their own

MAX_UNPACKED_BYTES = 16 << 20
"""A stored text that unpacks to more is not read: a few megabytes of zlib can hold gigabytes."""
_LARGEST = 1e16  # the squares of a slot's values and their sum must stay finite in float32
_PAYLOAD_HASH = "payload_hash"  # sealed instead of the payload: if that is damaged, the text can still be verified
_FIELDS = {"text": str, "text_hash": str, "marker": str, "metadata": str, "slots": int, "tokens": int}
_DAMAGED = "the record of passage"


def text_hash(fingerprint: str, key: str, passage: Passage) -> str:
    """A hash of record id, text and bundle: if it is unchanged, the passage need not be compressed again."""
    return _hash(fingerprint, key, passage.text)


def full_hash(fingerprint: str, key: str, passage: Passage) -> str:
    """A hash that also covers the metadata: if it is unchanged, the record need not be written."""
    return _hash(fingerprint, key, passage.text, _json(passage.metadata))


def labels(fingerprint: str, key: str, passage: Passage, signer: MarkerCodec) -> Record:
    """The fields of a record that depend on the metadata."""
    metadata = _json(passage.metadata)
    return {
        "full_hash": full_hash(fingerprint, key, passage),
        "metadata": metadata,
        _METADATA_SEAL: signer.seal("metadata", key, metadata),
    }


def payload_of(passage: Passage, soft: SoftContext, codec: str) -> str:
    """A soft context encoded for a record; PayloadError, naming the passage, if that is impossible."""
    try:
        return codecs.encode(soft, codec)
    except PayloadError as error:
        raise PayloadError(f"passage {passage.id!r} was compressed to something unusable: {error}") from error


def record(key: str, passage: Passage, payload: str, *, fingerprint: str, marker: str, signer: MarkerCodec) -> Record:
    """The whole metadata of a passage's Chroma record, whose id is `key`.

    Raises:
        PayloadError: the payload cannot be decoded; the message names the passage.
    """
    try:
        soft = codecs.decode(payload)  # a worker may have made it: decode it once before it is stored
    except PayloadError as error:
        raise PayloadError(f"passage {passage.id!r} came with an unusable payload: {error}") from error
    row: Record = {
        "payload": payload,
        "text": base64.b64encode(zlib.compress(passage.text.encode())).decode("ascii"),
        "text_hash": text_hash(fingerprint, key, passage),
        "marker": marker,
        "slots": soft.n_slots,
        "tokens": soft.n_tokens,
        **labels(fingerprint, key, passage, signer),
    }
    row[_PAYLOAD_HASH] = _hash(payload)
    return row | {SEAL: signer.seal(*sealed_fields(key, row), _WITH_METADATA)}


def sealed_anew(key: str, row: Mapping[str, Any], fingerprint: str, signer: MarkerCodec) -> Record:
    """The fields of a record that change when this key seals it; PayloadError if its parts disagree."""
    text = read_passage(key, row, fingerprint).text
    read_soft(key, row)
    fresh: Record = {"marker": name_in_record(signer.passage(text), key), _PAYLOAD_HASH: _hash(row["payload"])}
    fresh[_METADATA_SEAL] = signer.seal("metadata", key, row["metadata"])
    return fresh | {SEAL: signer.seal(*sealed_fields(key, {**row, **fresh}), _WITH_METADATA)}


def sealed_fields(key: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a record's seal covers: its id and scope, a hash of its text, its marker name, its counts, its payload.

    Text and payload are covered by their hashes. The metadata, which can change alone, have a seal of their own.

    Raises:
        PayloadError: a field is missing or of another type.
    """
    for name, kind in _FIELDS.items():
        if type(row.get(name)) is not kind:
            raise _damaged(own_id(key), f"{name} is {row.get(name)!r:.40}, not {kind.__name__}")
    return (key, *(str(row.get(name)) for name in ("text_hash", "marker", "slots", "tokens", _PAYLOAD_HASH)))


def check_seal(key: str, stored: Mapping[str, Any], signer: MarkerCodec) -> None:
    """Raise PayloadError unless this key sealed the record as it is now."""
    fields = sealed_fields(key, stored)
    seal = stored.get(SEAL)
    if seal is None:
        raise _damaged(
            own_id(key),
            "it has no seal: an early version wrote it, or somebody else did; if nobody else could, "
            "`ctx-compress repair --reseal` seals it",
        )

    def seals(given: object, *sealed: str) -> bool:
        return isinstance(given, str) and hmac.compare_digest(given.encode(), signer.seal(*sealed).encode())

    whole = seals(seal, *fields, _WITH_METADATA) and seals(
        stored.get(_METADATA_SEAL), "metadata", key, stored["metadata"]
    )
    if not whole and not seals(seal, *fields):  # earlier versions did not seal the metadata
        raise _damaged(
            own_id(key),
            "it was changed after sealing, or sealed with another key: set CTX_COMPRESS_KEY to that key; if it "
            "is lost, `ctx-compress repair --reseal` seals it with the key in use",
        )


def read_soft(key: str, stored: Mapping[str, Any]) -> SoftContext:
    """The soft context of a record; PayloadError, naming the passage, if it is damaged."""
    try:
        sealed_fields(key, stored)
        soft = codecs.decode(_checked_payload(stored))
        if (soft.n_slots, soft.n_tokens) != (stored["slots"], stored["tokens"]):
            raise PayloadError(
                f"it holds {soft.n_slots} slots for {soft.n_tokens} tokens, but says {stored['slots']} for "
                f"{stored['tokens']}"
            )
        if float(soft.slots.abs().max()) > _LARGEST:
            raise PayloadError(f"a slot has a value beyond {_LARGEST:.0e}")
        return soft
    except PayloadError as error:
        raise _damaged(own_id(key), error) from error


def check_payload(key: str, stored: Mapping[str, Any]) -> None:
    """Raise PayloadError, naming the passage, unless the payload is the sealed one; its vectors are not decoded."""
    try:
        _checked_payload(stored)
    except PayloadError as error:
        raise _damaged(own_id(key), error) from error


def read_passage(key: str, stored: Mapping[str, Any], fingerprint: str) -> StoredPassage:
    """Everything but the vectors of a record; PayloadError, naming the passage, if it is damaged."""
    try:
        sealed_fields(key, stored)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(stored["text"], validate=True), MAX_UNPACKED_BYTES)
        if not unpacker.eof:
            raise ValueError(f"its text is truncated, or unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
        text = data.decode()
        if _hash(fingerprint, key, text) != stored["text_hash"]:
            raise ValueError("its text was changed after it was stored")
        metadata = json.loads(stored["metadata"])
        if not isinstance(metadata, dict):
            raise ValueError(f"its metadata are a {type(metadata).__name__}")
        return StoredPassage(own_id(key), text, metadata, stored["slots"], stored["tokens"])
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise _damaged(own_id(key), error) from error


def _checked_payload(stored: Mapping[str, Any]) -> str:
    payload = stored.get("payload")
    if not isinstance(payload, str):
        raise PayloadError(f"payload is {payload!r:.40}, not str")
    if stored.get(_PAYLOAD_HASH, _hash(payload)) != _hash(payload):
        raise PayloadError("its payload was changed after it was sealed")
    return payload


def _damaged(id: str, reason: object) -> PayloadError:
    if isinstance(reason, PayloadError) and str(reason).startswith(_DAMAGED):
        return reason
    return PayloadError(
        f"{_DAMAGED} {id!r} is damaged ({reason}): delete the passage and add it again (`ctx-compress index` does)"
    )


def _json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(dict(metadata), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _hash(*fields: str) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]
