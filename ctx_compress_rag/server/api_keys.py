"""Read API keys, each of which opens a scope; a request may read and write only markers of its key's scope."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ctx_compress_rag.errors import ConfigError

KEYS_VARIABLE = "CTX_COMPRESS_API_KEYS"
_MIN_LENGTH = 16


class ApiKeys:
    """A table of the scope (tenant or user) that each API key opens. A key shorter than 16 characters: ConfigError."""

    def __init__(self, scopes: Mapping[str, str]) -> None:
        for key, scope in scopes.items():
            if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"the API key of scope {scope!r} needs {_MIN_LENGTH} or more ASCII characters: make one with "
                    '`python -c "import secrets; print(secrets.token_urlsafe(32))"`'
                )
            if not scope:
                raise ConfigError("an API key has no scope: give the tenant's or user's id after it")
        # Looked up by digest: how long a look-up takes says nothing about the keys.
        self._scopes = {_digest(key): scope for key, scope in scopes.items()}

    def scope_of(self, authorization: str | None) -> str | None:
        """Return the scope that an `Authorization` header (`Bearer KEY`) opens; None for an unknown or missing key."""
        kind, _, key = (authorization or "").partition(" ")
        return self._scopes.get(_digest(key.strip())) if kind.lower() == "bearer" else None


def find_api_keys(file: str | Path | None = None) -> ApiKeys | None:
    """Return the keys in a file, else in the environment variable `CTX_COMPRESS_API_KEYS`; None if neither is given.

    Each line holds a key and its scope with a space between; a line that begins with # is a comment. In the variable,
    commas may also separate lines. Raises ConfigError for a file that cannot be read and for a malformed line.
    """
    if file is not None:
        try:
            return _parse(Path(file).read_text(encoding="utf-8-sig"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys {str(file)!r}: {error}") from error
    given = os.environ.get(KEYS_VARIABLE)
    return None if given is None else _parse(given.replace(",", "\n"), KEYS_VARIABLE)


def _parse(text: str, where: str) -> ApiKeys:
    scopes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2:  # not shown, since the line may be a key
            raise ConfigError(f"{where}, line {number}: write a key and its scope, with a space between")
        key, scope = fields
        if key in scopes:
            raise ConfigError(f"{where}, line {number}: repeats the key of scope {scopes[key]!r}: give each key once")
        scopes[key] = scope
    if not scopes:
        raise ConfigError(f"{where} holds no API key: write a key and its scope on each line")
    return ApiKeys(scopes)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
