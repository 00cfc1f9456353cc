"""The ids of records, which depend on the scope, so that no tenant overwrites or reads another tenant's passage.

A passage is stored under its id prefixed with the scope's digest. A scope can read and overwrite its own passages, and
read those of the default scope.
"""

from __future__ import annotations

import hashlib

from ctx_compress_rag.store.marker import DEFAULT_SCOPE

_DIGEST = 32


def record_id(id: str, scope: str) -> str:
    """Return the id of the record of a scope's passage, which differs for each pair of scope and passage id."""
    return f"{_digest(scope)}/{id}"


def passage_id(record: str) -> str:
    return record[_DIGEST + 1 :]


def owned(record: str, scope: str) -> bool:
    return record.startswith(f"{_digest(scope)}/")


def readable(scope: str) -> list[str]:
    """Return the scopes whose passages a scope may read, itself first."""
    return list(dict.fromkeys((scope, DEFAULT_SCOPE)))


def scoped_marker_id(marker_id: str, scope: str) -> str:
    """Return a marker id with the scope's digest, as a record holds it, so that a marker finds its scope's record."""
    return f"{marker_id}@{_digest(scope)}"


def plain_marker_id(scoped: str) -> str:
    """Return the marker id without the scope's digest, the inverse of `scoped_marker_id`."""
    return scoped.partition("@")[0]


def _digest(scope: str) -> str:
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
