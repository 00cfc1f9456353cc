"""Open a bundle for llama.cpp: what was exported for it before, so that no torch is imported, or else export it."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ctx_compress_rag import __version__
from ctx_compress_rag.bundle import SHIPPED
from ctx_compress_rag.bundle.exported import EXPORTED_FILE, ExportedBundle

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle

logger = logging.getLogger(__name__)


def open_for_llama_cpp(name: str, weights: str = "BF16") -> ExportedBundle | Bundle:
    """Return the exported bundle in folder `weights`, or of a bundle's folder or name, exported if its files changed.

    The bundle itself is returned if answering needs its compressor (RAM), and for a bundle on the hub. Errors: see
    `Bundle.from_pretrained` and `gguf_weights`.
    """
    if Path(weights, EXPORTED_FILE).is_file():
        return ExportedBundle(weights)
    note = _note(name, weights)
    if note is not None and note.is_file() and Path(note.read_text(encoding="utf-8"), EXPORTED_FILE).is_file():
        return ExportedBundle(note.read_text(encoding="utf-8"))
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding.engines.gguf_weights import gguf_weights

    bundle = Bundle.from_pretrained(name)
    folder = gguf_weights(bundle, weights)
    if note is None or not (folder / EXPORTED_FILE).is_file():
        return bundle
    note.write_text(str(folder.resolve()), encoding="utf-8")
    return ExportedBundle(folder)


def _note(name: str, weights: str) -> Path | None:
    """Return the file that names the folder of a bundle's export; None for a bundle on the hub."""
    from huggingface_hub import cached_assets_path

    folder = SHIPPED.get(name, Path(name)).resolve()
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    stamps = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    key = hashlib.sha256("\n".join([__version__, weights, *stamps]).encode()).hexdigest()
    return Path(cached_assets_path("ctx_compress_rag", "llama.cpp"), f"{key}.folder")
