"""The secret that signs markers and records. It is never written to Chroma."""

import os
import secrets
import stat
from pathlib import Path

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.store.marker import MIN_KEY_BYTES, Signer
from ctx_compress_rag.store.place import DRAFT, LOCK_FILE, StorePlace, lock_store_folder

KEY_VARIABLE = "CTX_COMPRESS_KEY"
KEY_FILE = "ctx-compress.key"
_process_key = secrets.token_bytes(32)


class StoreKey:
    """A store's key: `key`, else CTX_COMPRESS_KEY, else the folder's key file or, in memory, this process's own key.

    It is looked up when first needed, because opening must not create a key file. On a server, none is a StoreError.
    """

    def __init__(self, key: bytes | None, place: StorePlace) -> None:
        self._key, self._place = key, place
        self._file: Path | None = None
        if place.remote or key is not None:
            self.signer("")

    def signer(self, fingerprint: str) -> Signer:
        if self._key is None:
            self._key = self._found()
        return Signer(self._key, fingerprint)

    def keep(self) -> None:
        """Put back a missing key file before a write, as readers need it. Raise StoreError if the key changed."""
        if self._file is not None and self._key is not None and key_from_file(self._file, self._key) != self._key:
            raise StoreError(f"the marker key {self._file} changed after the store was opened: open the store again")

    def _found(self) -> bytes:
        value = os.environ.get(KEY_VARIABLE)
        if value is not None:
            key = value.encode("utf-8", "surrogateescape")
            if len(key) < MIN_KEY_BYTES:
                wanted = f"a secret of at least {MIN_KEY_BYTES} (openssl rand -hex 32)"
                raise StoreError(f"{KEY_VARIABLE} has {len(key)} bytes: set {wanted}, or unset it")
            return key
        if self._place.folder is not None:
            self._file = self._place.folder / KEY_FILE
            return key_from_file(self._file)
        if not self._place.remote:
            return _process_key
        raise StoreError(f"a server's store needs a key that its users share: set {KEY_VARIABLE}, or give key=")


def key_from_file(path: Path, new: bytes | None = None) -> bytes:
    """Return the key in a file. Raise StoreError if it is damaged, not this user's, or readable for others.

    A missing file is made, with `new` or (None) a random key. Processes that make it at the same time get one key.
    """
    try:
        if not path.exists():
            _create(path, new or secrets.token_bytes(32))
        if os.name == "posix" and path.stat().st_uid != os.geteuid():
            raise StoreError(
                f"the marker key {path} belongs to user {path.stat().st_uid}, and this process runs as user "
                f"{os.geteuid()}: run as the owner, `chown` the file, or set {KEY_VARIABLE}"
            )
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise StoreError(f"others can read the marker key {path}: run `chmod 600 {path}`")
        key = bytes.fromhex(path.read_text("ascii"))
        if len(key) < MIN_KEY_BYTES:
            raise ValueError
    except OSError as error:
        raise StoreError(f"cannot use the marker key {path} ({error}): set {KEY_VARIABLE} instead") from error
    except ValueError as error:
        raise StoreError(f"the marker key {path} is damaged: delete it to get a new one") from error
    return key


def _create(path: Path, key: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + DRAFT)
    with lock_store_folder(path.parent / LOCK_FILE):
        if path.exists():  # another process's
            return
        draft.unlink(missing_ok=True)  # of a process that was killed here
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key.hex())
        draft.rename(path)
