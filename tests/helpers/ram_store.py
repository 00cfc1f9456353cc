"""Passages in a store of a tiny RAM bundle, and questions that are read closely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker
from helpers.ram import FROZEN, ram_bundle

KEY = b"k" * 32
PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees on the roof of the town hall; the honey is sold under the name of Old Gold.",
    "Oda Brink was a mason.",
]
QUESTION = "Who built the harbour of Velmora?"


def close_bundle(tokenizer: Any) -> Bundle:
    """A RAM bundle with a frozen encoder and LoRA on the decoder."""
    return ram_bundle(tokenizer, seed=2, encoder=FROZEN, decoder={"mode": "lora"})


def close_store(folder: Path, bundle: Bundle) -> SoftContextStore:
    """A store of the passages, for tests that do not mind what else is in it."""
    made = SoftContextStore(folder, bundle, codec="fp16", key=KEY)
    made.add(PASSAGES, progress=False)
    return made


def ask(store: SoftContextStore, texts: list[str] = PASSAGES, question: str = QUESTION, ratio: int = 2) -> list[str]:
    """Texts as the decoder is to read them for a question."""
    return mark(store, texts, ratio=ratio, question=question)


def read(store: SoftContextStore, texts: list[str]) -> tuple[list[str], list[Marker]]:
    """The kept texts and the markers of marked passages, in order."""
    parts = [part for text in texts for part in store.split(text)]
    return [p for p in parts if isinstance(p, str)], [p for p in parts if isinstance(p, Marker)]
