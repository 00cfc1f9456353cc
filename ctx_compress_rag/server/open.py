"""Open what `ctx-compress serve` serves: an index, or the soft contexts beside an app's own collection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.indexing.index import open_index
from ctx_compress_rag.store import SoftContextStore


@contextmanager
def open_store(
    folder: str | Path,
    bundle: str | None,
    collection: str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> Iterator[tuple[Bundle, SoftContextStore]]:
    """The bundle and the store to serve.

    Args:
        folder: a Chroma folder.
        bundle: a bundle's folder, shipped name or hub id; None takes the index's own.
        collection: the app's own collection, whose soft contexts are served; None for an index.
        device: see `Bundle.from_pretrained`.
        dtype: see `Bundle.from_pretrained`.

    Raises:
        ConfigError: a collection is given without a bundle.
        StoreError: there is no store, or it cannot be opened.
        BundleError, FingerprintMismatchError: see `Bundle.from_pretrained` and `SoftContextStore`.
    """
    if collection is None:
        with open_index(folder, bundle, device=device, dtype=dtype) as index:
            yield index.bundle, index.store
        return
    if bundle is None:
        raise ConfigError(f"--collection {collection} needs the bundle of its soft contexts: give --bundle")
    loaded = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
    with SoftContextStore(folder, loaded, collection=collection) as store:
        yield loaded, store
