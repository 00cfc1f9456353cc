"""The secret that markers are signed with. It is never written into Chroma."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.stores.markers import MIN_KEY_BYTES

KEY_VARIABLE = "CTX_COMPRESS_KEY"
KEY_FILE = "ctx-compress.key"
_process_key = secrets.token_bytes(32)


def find_key(folder: Path | None, *, remote: bool) -> bytes:
    """The key of a store that was given none.

    The environment variable CTX_COMPRESS_KEY where it is set. Otherwise a file that is made at first
    use, readable by its owner alone: `ctx-compress.key` in the store's folder. A store on a server has no default:
    machines that share it must share the key. A store in memory has a key that ends with the process.

    Args:
        folder: the store's folder, None where it has none.
        remote: whether the store is on a server.

    Raises:
        StoreError: the variable is short or blank, the store is on a server and has no key, or the file cannot be used.
    """
    value = os.environ.get(KEY_VARIABLE)
    if value is not None:
        key = value.encode("utf-8", "surrogateescape")
        if len(key) < MIN_KEY_BYTES or not value.strip():
            raise StoreError(
                f"{KEY_VARIABLE} has {len(key)} bytes{'' if value.strip() else ', all blank'}: a marker key needs at "
                f"least {MIN_KEY_BYTES}, which nobody can guess (openssl rand -hex 32), or unset the variable"
            )
        return key
    if folder is not None:
        return key_from_file(folder / KEY_FILE)
    if not remote:
        return _process_key
    raise StoreError(
        f"a store on a server needs a key that all its users share: set {KEY_VARIABLE} (openssl rand -hex 32), or give "
        "key=. Before, each machine made one of its own, whose markers no other could read; it is in hexadecimal in "
        "~/.config/ctx-compress/ctx-compress.key"
    )


def key_from_file(path: Path) -> bytes:
    """The key in a file, made where there is none; two processes that make it at once get the same.

    Raises:
        StoreError: others can read the file, it is damaged, or it cannot be made.
    """
    try:
        if not path.exists():
            _create(path)
        if os.name == "posix" and path.stat().st_uid != os.geteuid():
            raise StoreError(
                f"the marker key {path} belongs to user {path.stat().st_uid}, not to this process's ({os.geteuid()}): "
                f"run as that user, `chown` it, or set {KEY_VARIABLE}"
            )
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise StoreError(f"others can read the marker key {path}: run `chmod 600 {path}`")
        key = bytes.fromhex(path.read_text("ascii"))
    except OSError as error:
        raise StoreError(f"cannot use the marker key {path} ({error}): set {KEY_VARIABLE} instead") from error
    except ValueError as error:
        raise StoreError(f"the marker key {path} is damaged: delete it, a new one is made") from error
    if len(key) < MIN_KEY_BYTES:
        raise StoreError(f"the marker key {path} is damaged: delete it, a new one is made")
    return key


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{KEY_FILE}-")  # mkstemp's mode is 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whole or not at all, and never over another process's key
    finally:
        os.unlink(draft)
