"""Which scope owns a record: ids are per scope, so that no tenant overwrites or reads another's passage.

A passage is stored under its id prefixed with its scope's digest. It can be read and overwritten only in its scope;
passages of the default scope can be read in every scope.
"""

from __future__ import annotations

import hashlib

from ctx_compress_rag.store.marker import DEFAULT_SCOPE

_DIGEST = 32


def record_id(id: str, scope: str) -> str:
    """The id of the record of a scope's passage: different for each pair of scope and id."""
    return f"{_digest(scope)}/{id}"


def passage_id(record: str) -> str:
    return record[_DIGEST + 1 :]


def owned(record: str, scope: str) -> bool:
    return record.startswith(f"{_digest(scope)}/")


def readable(scope: str) -> list[str]:
    """The scopes whose passages this one may read, its own first."""
    return list(dict.fromkeys((scope, DEFAULT_SCOPE)))


def scoped_marker_id(marker_id: str, scope: str) -> str:
    """A passage's marker id as its record holds it, with the scope: a marker finds its scope's record."""
    return f"{marker_id}@{_digest(scope)}"


def plain_marker_id(scoped: str) -> str:
    """The inverse of `scoped_marker_id`."""
    return scoped.partition("@")[0]


def _digest(scope: str) -> str:
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
