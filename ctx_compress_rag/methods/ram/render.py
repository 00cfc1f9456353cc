"""Close reading and skimming of stored passages, when the question is known (Read As Human, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError
from ctx_compress_rag.methods.base.reading import PassageStore, TransientContext
from ctx_compress_rag.methods.ram.segments import Segments, layout, render, slots_of_runs
from ctx_compress_rag.text.tokenizing import check_characters, text_ids

if TYPE_CHECKING:
    from ctx_compress_rag.methods.ram.compressor import RamCompressor

_TOKENS_PER_BATCH = 8192


def close_read(
    ram: RamCompressor,
    store: PassageStore,
    texts: Sequence[str],
    ids: Sequence[str],
    *,
    ratio: int | None = None,
    question: str | None = None,
    scope: str | None = None,
) -> list[str]:
    """Render stored passages for the decoder: the segments that the question needs as text, the rest as markers.

    Segments are chosen over all passages together (eq. 3), by their stored representations, which are as exact as
    the store's codec: only the question and the skimmed segments are encoded. A passage's parts keep their order
    (eq. 6), neighboring skimmed segments share a marker, and kept segments are the passage's own text,
    character for character. The decoder tokenizes that text with the prompt around it: if it begins or
    ends within a word, the tokens at its edges may differ from those that were counted. The markers are for this
    question and this store object: only its memory has their slots.

    Args:
        ram: the compressor that stored them.
        store: has the passages.
        texts: the passages.
        ids: their ids in the store.
        ratio: the paper's alpha, how many times shorter all passages together become; by default the smallest that
            the bundle was trained for.
        question: what is asked.
        scope: as in `SoftContextStore.markers`.

    Raises:
        ConfigError: there is no question, or it is longer than the model's window; or more segments are skimmed
            than the store keeps slots for.
        FingerprintMismatchError: the tokenizer does not cut a passage as it did when the passage was stored.
    """
    tokenizer, window = ram.backbone.tokenizer, ram.backbone.window
    if not (question and question.strip()):
        raise ConfigError(
            "a ram bundle needs the question: give it to compress_documents (LangChain; a "
            "ContextualCompressionRetriever does), as query_bundle or query_str (LlamaIndex), or as question= of mark"
        )
    check_characters("the question", len(question), window)
    question_ids = text_ids(tokenizer, question)
    if not question_ids:
        raise ConfigError(f"the question {question!r} has no tokens: ask something")
    if window is not None and len(question_ids) >= window:  # BOS takes a place, too
        raise ConfigError(f"the question has {len(question_ids)} tokens, too many for a window of {window}: shorten it")
    if not texts:
        return []
    passages = [Segments.of(tokenizer, text, ram.config.segment_tokens) for text in texts]
    represented = _representations(store, ids, passages, scope)
    asked = ram.question(question_ids)
    reduction = min(store.bundle.config.ratios) if ratio is None else ratio
    counts = torch.tensor([count for passage in passages for count in passage.token_counts])
    kept = ram.choose(asked.cpu(), represented, counts, reduction)
    layouts = layout(passages, kept)
    skimmed = [(passage, run) for passage, runs in zip(passages, layouts, strict=True) for run in runs if not run.kept]
    segments = [segment for passage, run in skimmed for segment in passage.ids[run.start : run.end]]
    vectors = ram.skim(segments, asked, _TOKENS_PER_BATCH)
    softs = slots_of_runs(vectors, torch.tensor([len(segment) for segment in segments]), layouts)
    parts = []
    for (passage, run), soft in zip(skimmed, softs, strict=True):
        start, end = passage.span(run)
        key = (question, str(reduction), passage.text, str(start), str(end))
        parts.append(TransientContext(key, passage.text[start:end], soft))
    return render(passages, layouts, iter(store.transient_markers(parts, scope)))


def _representations(
    store: PassageStore, ids: Sequence[str], passages: Sequence[Segments], scope: str | None
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
