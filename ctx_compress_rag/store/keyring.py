"""The key of an open store, which signs markers and seals records."""

from __future__ import annotations

from ctx_compress_rag.store import record as records
from ctx_compress_rag.store.collection import Companion, Found
from ctx_compress_rag.store.key import find_key
from ctx_compress_rag.store.marker import MarkerCodec


class Keyring:
    """The store's key, looked up when first needed: opening a store must not create a key file.

    Args:
        companion: where the records are.
        key: the secret; by default what `keys.find_key` finds.

    Raises:
        StoreError: the store is on a server and has no key; raised here, not at the first marker.
    """

    def __init__(self, companion: Companion, key: bytes | None) -> None:
        self._companion = companion
        self._signer = None if key is None else MarkerCodec(key, companion.fingerprint)
        if companion.connection.remote:
            self.signer()

    def signer(self) -> MarkerCodec:
        """The codec that signs markers and seals records."""
        if self._signer is None:
            connection = self._companion.connection
            self._signer = MarkerCodec(find_key(connection.path, remote=connection.remote), self._companion.fingerprint)
        return self._signer

    def check(self, found: Found) -> None:
        """Check the seal of each record.

        Raises:
            PayloadError: a record was changed after sealing, or has another key's seal; the message names the passage.
        """
        for key, row in found.items():
            records.check_seal(key, row, self.signer())
