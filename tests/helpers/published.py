"""Published checkpoints in miniature, and bundles imported from them."""

from __future__ import annotations

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


def imported(name: str, folder: Path) -> Bundle:
    """The bundle of a checkpoint, in float32 on the CPU."""
    return import_published(CHECKPOINTS / name, folder, **CASES[name], device="cpu", dtype="float32")


def copied(name: str, folder: Path) -> Path:
    """A copy of a checkpoint, to damage it."""
    return Path(shutil.copytree(CHECKPOINTS / name, folder / name))
