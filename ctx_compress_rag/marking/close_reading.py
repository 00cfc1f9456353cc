"""Close reading and skimming of retrieved passages, when the question is known (Read As Human, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError
from ctx_compress_rag.methods.ram.compressor import RamCompressor
from ctx_compress_rag.methods.ram.segments import Segments, layout, shown, slots_of_runs
from ctx_compress_rag.store.skimmed import Skimmed
from ctx_compress_rag.text.tokenizing import check_characters, text_ids

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.store import SoftContextStore

_TOKENS_PER_BATCH = 8192


def close_read(
    store: SoftContextStore,
    texts: Sequence[str],
    ids: Sequence[str],
    *,
    reduction: int,
    question: str,
    scope: str | None,
) -> list[str]:
    """Render stored passages for the decoder: the segments that the question needs as text, the rest as markers.

    Segments are chosen over all passages together (eq. 3), by their stored representations, which are as exact as
    the store's codec: only the question and the skimmed segments are encoded. A passage's parts keep their order
    (eq. 6), neighbouring skimmed segments share a marker, and kept segments are the passage's own text,
    character for character. The decoder tokenises that text with the prompt around it: if it begins or
    ends within a word, the tokens at its edges may differ from those that were counted.

    Args:
        store: the store of all the passages, with a RAM bundle.
        texts: the passages.
        ids: their ids in the store.
        reduction: how many times shorter all passages together become: the paper's alpha.
        question: what is asked.
        scope: as in `SoftContextStore.markers`.

    Raises:
        ConfigError: the question has no tokens or is longer than the model's window, or more segments are skimmed
            than the store keeps slots for.
        FingerprintMismatchError: the tokenizer does not cut a passage as it did when the passage was stored.
    """
    bundle = cast("Bundle", store.bundle)
    ram = cast(RamCompressor, bundle.compressor)
    window = bundle.backbone.window
    check_characters("the question", len(question), window)
    asked_ids = text_ids(bundle.tokenizer, question)
    if not asked_ids:
        raise ConfigError(f"the question {question!r} has no tokens: ask something")
    if window is not None and len(asked_ids) >= window:  # BOS takes a place, too
        raise ConfigError(f"the question has {len(asked_ids)} tokens, too many for a window of {window}: shorten it")
    passages = [Segments.of(bundle.tokenizer, text, ram.config.segment_tokens) for text in texts]
    represented = _representations(store, ids, passages, scope)
    asked = ram.question(asked_ids)
    counts = torch.tensor([count for passage in passages for count in passage.token_counts])
    kept = ram.choose(asked.cpu(), represented, counts, reduction)
    layouts = layout(passages, kept)
    skimmed = [(passage, run) for passage, runs in zip(passages, layouts, strict=True) for run in runs if not run.kept]
    segments = [segment for passage, run in skimmed for segment in passage.ids[run.start : run.end]]
    vectors = ram.skim(segments, asked, _TOKENS_PER_BATCH)
    softs = slots_of_runs(vectors, torch.tensor([len(segment) for segment in segments]), layouts)
    parts = [
        Skimmed(question, reduction, passage.text, *passage.span(run), soft)
        for (passage, run), soft in zip(skimmed, softs, strict=True)
    ]
    return shown(passages, layouts, iter(store.skimmed_markers(parts, scope)))


def _representations(
    store: SoftContextStore, ids: Sequence[str], passages: Sequence[Segments], scope: str | None
) -> torch.Tensor:
    """The stored r_i of all segments: (segments, dim)."""
    stored = store.get(ids, scope, [passage.text for passage in passages])
    for id, soft, passage in zip(ids, stored, passages, strict=True):
        if soft is None or soft.token_counts.tolist() != passage.token_counts:
            raise FingerprintMismatchError(
                f"passage {id!r} is now cut into {len(passage.ids)} segments, unlike when it was stored: its text or "
                "the decoder's tokenizer changed since; delete the passage from the store and add it again"
            )
    return torch.cat([soft.slots for soft in stored if soft is not None])
