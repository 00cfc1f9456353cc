"""Which scope owns a record: ids are per scope, so that no tenant overwrites or reads another's passage.

A passage of the default scope is stored under its own id, as before scopes existed, and can be read in every scope. A
passage of any other scope is stored under its id prefixed with the scope's digest, and can be read and overwritten
only in that scope.
"""

from __future__ import annotations

import hashlib

from ctx_compress_rag.store.marker import DEFAULT_SCOPE

_PREFIX = "ctx-scope/"
_DIGEST = 32
_NAME_END = "@"


def record_id(id: str, scope: str) -> str:
    """The id of the record of a scope's passage: different for each pair of scope and id."""
    # An id of the default scope that looks like another scope's record must not become one.
    return id if scope == DEFAULT_SCOPE and not id.startswith(_PREFIX) else f"{_PREFIX}{_digest(scope)}/{id}"


def own_id(record: str) -> str:
    """The passage's id in a record id."""
    return record[len(_PREFIX) + _DIGEST + 1 :] if record.startswith(_PREFIX) else record


def owned(record: str, scope: str) -> bool:
    """Whether the record belongs to this scope."""
    return record == record_id(own_id(record), scope)


def readable(scope: str) -> list[str]:
    """The scopes whose passages this one may read, its own first."""
    return list(dict.fromkeys((scope, DEFAULT_SCOPE)))


def scoped_name(name: str, scope: str) -> str:
    """A passage's name in markers as its record holds it, with the scope: a marker finds its scope's record."""
    return name if scope == DEFAULT_SCOPE else f"{name}{_NAME_END}{_digest(scope)}"


def name_in_record(name: str, record: str) -> str:
    """Like `scoped_name`, for the scope that owns the record."""
    digest = record[len(_PREFIX) : len(_PREFIX) + _DIGEST] if record.startswith(_PREFIX) else _digest(DEFAULT_SCOPE)
    return name if digest == _digest(DEFAULT_SCOPE) else f"{name}{_NAME_END}{digest}"


def plain_name(scoped: str) -> str:
    """The inverse of `scoped_name`: the name without the scope."""
    return scoped.partition(_NAME_END)[0]


def _digest(scope: str) -> str:
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
