"""Published checkpoints in miniature, what their own code made of some texts, and bundles imported from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ctx_compress_rag import Bundle, SoftContextStore, TransformersDecoder
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.evaluation.answering import prompt_of
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.prompt import Prompt
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


def imported(name: str, folder: Path, **options: Any) -> Bundle:
    """The bundle of a checkpoint, in float32 on the CPU."""
    given: dict[str, Any] = CASES[name] | options
    return import_published(CHECKPOINTS / name, folder, **given, device="cpu", dtype="float32")


def reference(name: str) -> dict[str, Tensor]:
    """What the project's own code made, see published/make_references.py."""
    return load_file(CHECKPOINTS / name / "reference.safetensors")


def copied(name: str, folder: Path) -> Path:
    """A copy of a checkpoint, to damage it."""
    return Path(shutil.copytree(CHECKPOINTS / name, folder / name))


def asked(bundle: Bundle, folder: Path, texts: list[str]) -> Prompt:
    """The prompt that asks about texts through a store, with slots that no codec has rounded."""
    with SoftContextStore(folder, bundle) as store:
        decoder = TransformersDecoder(bundle, store)
        chat = prompt_of(bundle.config.template, mark(store, texts), TEXTS["question"])
        [prompt] = decoder.prepare([chat])
    exact = iter([bundle.embed(soft) for soft in bundle.compress(texts)])
    pieces = tuple(next(exact) if piece.is_floating_point() else piece for piece in prompt.pieces)
    return replace(prompt, pieces=pieces)


def answered(bundle: Bundle, prompt: Prompt, vocabulary: int, tokens: int) -> tuple[Tensor, list[int]]:
    """The logits after a prompt, and the likeliest tokens, one by one, of the first `vocabulary`."""
    batch = splice(bundle.backbone.embeddings, [prompt])
    inputs, ids = batch.inputs_embeds, []
    first: Tensor | None = None
    with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
        for _ in range(tokens):
            logits = model(inputs_embeds=inputs, use_cache=False).logits[0, -1, :vocabulary]
            first = logits if first is None else first
            ids.append(int(logits.argmax()))
            inputs = torch.cat([inputs, bundle.backbone.embeddings(logits.argmax().view(1, 1))], dim=1)
    assert first is not None
    return first, ids
