"""Pictures and numbers of what a bundle does with texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures.arcaligner import refinement
from benchmarks.pictures.compression_tokens import attention
from benchmarks.pictures.comprexit import transmission
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.plots import save
from ctx_compress_rag.soft_context import check_window

PICTURES: dict[str, Callable[[Bundle, Sequence[str], int], Mapping[str, Any]]] = {
    "arcaligner": refinement,
    "comprexit": transmission,
    "compression_tokens": attention,
}
"""By method: (bundle, texts, ratio) -> from file names to numbers (for JSON) or a matplotlib figure (for PNG)."""


def inspect(bundle: Bundle, texts: Sequence[str], folder: str | Path, ratio: int | None = None) -> list[Path]:
    """Plot what the bundle's method does with a text, and write the numbers, too; for several texts, their means.

    Args:
        bundle: a bundle whose method has pictures.
        texts: one or more texts, each cut to the bundle's window of `config.max_tokens` tokens.
        folder: the folder for the files; created if needed.
        ratio: source tokens per slot; None takes the bundle's base ratio.

    Returns:
        The files.

    Raises:
        ConfigError: the method has no pictures, there is no text, or a text is blank.
        RatioError: the ratio does not divide the window.
        MissingExtraError: matplotlib is not installed.
    """
    name = bundle.config.method.name
    if name not in PICTURES:
        raise ConfigError(f"method {name!r} has no pictures: give a bundle of {' or '.join(PICTURES)}")
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError("there is no text to inspect, or a blank one: give one or more texts with words")
    ratio = bundle.config.base_ratio if ratio is None else ratio
    check_window(ratio, bundle.config.max_tokens)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"bundle": bundle.config.name, "fingerprint": bundle.fingerprint}
    made = PICTURES[name](bundle, texts, ratio)
    for file, content in made.items():
        if file.endswith(".json"):
            (folder / file).write_text(json.dumps(about | content, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            save(content, folder / file)
    return [folder / file for file in made]
