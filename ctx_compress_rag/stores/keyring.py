"""The keys of an open store: the one it signs with, and those that its records may be sealed with."""

from __future__ import annotations

from contextlib import suppress

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.stores import records
from ctx_compress_rag.stores.companion import Companion, Found
from ctx_compress_rag.stores.keys import KEY_FILE, find_key, key_from_file
from ctx_compress_rag.stores.markers import MarkerCodec


class Keyring:
    """Keys, each read when it is first needed: reading records alone must not make a key file.

    Args:
        companion: where the records are.
        key: the secret; by default what `keys.find_key` finds.

    Raises:
        StoreError: the store is on a server and has no key: refused here and not at the first marker.
    """

    def __init__(self, companion: Companion, key: bytes | None) -> None:
        self._companion = companion
        self._signer = None if key is None else MarkerCodec(key, companion.fingerprint)
        self._of_folder: list[MarkerCodec] | None = None
        if companion.connection.remote:
            self.signer()

    def signer(self) -> MarkerCodec:
        """What markers are signed and records are sealed with."""
        if self._signer is None:
            connection = self._companion.connection
            self._signer = MarkerCodec(find_key(connection.path, remote=connection.remote), self._companion.fingerprint)
        return self._signer

    def sealers(self) -> list[MarkerCodec]:
        """The keys that records may be sealed with: the store's, and one left in the folder from before that."""
        if self._of_folder is None:
            path, codecs = self._companion.connection.path, list[MarkerCodec]()
            if path is not None and (path / KEY_FILE).exists():
                with suppress(StoreError):  # unusable, another user's perhaps: if it is the only one, `signer` says so
                    codecs.append(MarkerCodec(key_from_file(path / KEY_FILE), self._companion.fingerprint))
            self._of_folder = codecs  # whole or not at all: other threads read it
        return [self.signer(), *self._of_folder]

    def check(self, found: Found) -> None:
        """Check the seal of each record.

        Raises:
            PayloadError: one was changed after it was sealed, or is of another key; the message names the passage.
        """
        signers = self.sealers() if found else []
        for key, row in found.items():
            records.check_seal(key, row, signers, self._companion.sealed)
