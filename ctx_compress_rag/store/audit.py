"""Check the seal of every record; reseal records that have no seal or another key's."""

from __future__ import annotations

from contextlib import suppress

from ctx_compress_rag.errors import PayloadError
from ctx_compress_rag.store import record as records
from ctx_compress_rag.store.collection import Companion
from ctx_compress_rag.store.marker import MarkerCodec
from ctx_compress_rag.store.pages import pages


def unreadable(companion: Companion, signer: MarkerCodec) -> dict[str, bool]:
    """The ids of unreadable records, in all scopes, and whether each lacks nothing but this key's seal."""
    found: dict[str, bool] = {}
    for ids in pages(companion.ids()):
        for key, row in companion.read(ids).items():
            sealed = whole = False
            with suppress(PayloadError):
                records.read_soft(key, row)
                records.read_passage(key, row, companion.fingerprint)
                whole = True
                records.check_seal(key, row, signer)
                sealed = True
            if not sealed:
                found[key] = whole
    return found


def reseal(companion: Companion, signer: MarkerCodec) -> int:
    """Seal records that this key has not sealed, if text, payload and counts agree; return how many.

    Anyone who could write to the folder may have put records there: only its owner can know whether to trust them.
    """
    sealed = 0
    for ids in pages(companion.ids()):
        fresh: dict[str, records.Record] = {}
        for key, row in companion.read(ids).items():
            try:
                records.check_seal(key, row, signer)
                continue
            except PayloadError:
                pass
            with suppress(PayloadError):
                fresh[key] = records.sealed_anew(key, row, companion.fingerprint, signer)
        companion.update(fresh)
        sealed += len(fresh)
    return sealed
