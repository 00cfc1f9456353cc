"""Published checkpoints in miniature, and bundles imported from them."""

import json
import shutil
from pathlib import Path
from typing import Any

from ctx_compress_rag import Bundle
from ctx_compress_rag.published.importing import import_published

CHECKPOINTS = Path(__file__).parents[1] / "published" / "checkpoints"
TEXTS: dict[str, Any] = json.loads((CHECKPOINTS / "texts.json").read_text(encoding="utf-8"))
_MISTRAL = {"decoder": str(CHECKPOINTS / "mistral")}
CASES: dict[str, dict[str, Any]] = {
    "lclm-4x": {},
    "lclm-16x": {},
    "pisco": _MISTRAL,
    "clara-instruct": _MISTRAL,
    "clara-e2e-128": _MISTRAL,
    "xrag": {"encoder": str(CHECKPOINTS / "sfr")},
    "icae": _MISTRAL,
}
"""Checkpoints, and the options with which they are imported here."""
FIRST = ["pisco-first", "xrag-first", "icae-first"]
"""Some of them, with tokenizers that put a space only before a prompt's first text."""


def imported(name: str, folder: Path) -> Bundle:
    """The bundle of a checkpoint of `CASES` or `FIRST`, in float32 on the CPU."""
    name, _, kind = name.partition("-first") if name in FIRST else (name, "", None)

    def tokenized(source: Path) -> Path:
        own = CHECKPOINTS / "first" / source.name
        if kind is None or not own.exists():
            return source
        made = folder.parent / f"{folder.name}-parts" / source.name
        shutil.copytree(source, made)
        return Path(shutil.copytree(own, made, dirs_exist_ok=True))

    options: dict[str, Any] = {part: str(tokenized(Path(place))) for part, place in CASES[name].items()}
    return import_published(tokenized(CHECKPOINTS / name), folder, **options, device="cpu", dtype="float32")


def copied(name: str, folder: Path) -> Path:
    """A copy of a checkpoint, to damage it."""
    return Path(shutil.copytree(CHECKPOINTS / name, folder / name))
