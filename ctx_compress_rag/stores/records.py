"""One passage as one Chroma record: what its metadata holds.

The text is deflated: Chroma keeps a metadata string twice, and a `document` about nine times over because
of its full-text index (measured: 11 kB for 1.2 kB of text), which nobody searches here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from ctx_compress_rag.errors import PayloadError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import codecs
from ctx_compress_rag.stores.passages import Passage, StoredPassage

Record = dict[str, str | int]


def text_hash(fingerprint: str, key: str, passage: Passage) -> str:
    """Equal when record id, text and bundle are: the record needs no new compression."""
    return _hash(fingerprint, key, passage.text)


def full_hash(fingerprint: str, key: str, passage: Passage) -> str:
    """Equal when the metadata are as well: the record needs no write."""
    return _hash(fingerprint, key, passage.text, _json(passage.metadata))


def labels(fingerprint: str, key: str, passage: Passage) -> Record:
    """The part of a record that changes with the metadata alone."""
    return {"full_hash": full_hash(fingerprint, key, passage), "metadata": _json(passage.metadata)}


def record(key: str, passage: Passage, soft: SoftContext, *, fingerprint: str, marker: str, codec: str) -> Record:
    """The whole metadata of a passage's Chroma record, whose id is `key`.

    Raises:
        PayloadError: the soft context cannot be encoded; the message names the passage.
    """
    try:
        payload = codecs.encode(soft, codec)
    except PayloadError as error:
        raise PayloadError(f"passage {passage.id!r} was compressed to something unusable: {error}") from error
    return {
        "payload": payload,
        "text": base64.b64encode(zlib.compress(passage.text.encode())).decode("ascii"),
        "text_hash": text_hash(fingerprint, key, passage),
        "marker": marker,
        "slots": soft.n_slots,
        "tokens": soft.n_tokens,
        **labels(fingerprint, key, passage),
    }


def read_soft(id: str, stored: Mapping[str, Any]) -> SoftContext:
    """The soft context of a record; PayloadError, naming the passage, if it is damaged."""
    try:
        return codecs.decode(stored["payload"])
    except (PayloadError, KeyError) as error:
        raise _damaged(id, error) from error


def read_passage(id: str, stored: Mapping[str, Any]) -> StoredPassage:
    """Everything but the vectors of a record; PayloadError, naming the passage, if it is damaged."""
    try:
        text = zlib.decompress(base64.b64decode(stored["text"], validate=True)).decode()
        return StoredPassage(id, text, json.loads(stored["metadata"]), stored["slots"], stored["tokens"])
    except (KeyError, binascii.Error, zlib.error, ValueError) as error:
        raise _damaged(id, error) from error


def _damaged(id: str, error: Exception) -> PayloadError:
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return PayloadError(f"the record of passage {id!r} is damaged ({reason}): delete the passage and add it again")


def _json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(dict(metadata), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _hash(*fields: str) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]
