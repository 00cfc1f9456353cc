"""The postprocessor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from ctx_compress_rag.frameworks.postprocessor import MarkingPostprocessor, relevance
from ctx_compress_rag.marking.mark import OnMissing
from ctx_compress_rag.store import SoftContextStore
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, is_text, own_text, with_text
from llama_index.postprocessor.ctx_compress.sources import restored

_for_citations: ContextVar[bool] = ContextVar("ctx_compress_for_citations", default=False)


class CompressedContextPostprocessor(MarkingPostprocessor, BaseNodePostprocessor):
    """Replaces retrieved texts by the markers of their stored soft contexts, for `CompressedContextLLM`.

    Goes after the retriever, last among the postprocessors. A passage is looked up in the store by its node's
    id, then by its text. The given nodes are never changed; the new ones keep ids, scores, metadata and
    relationships, and by default show the marker only to the LLM (see `CompressedTextNode`). Nodes with images,
    sound or video, and blank ones, are returned unchanged. Works in threads and in an event loop.

    For a `CitationQueryEngine`, which makes its sources from plain text, markers become the nodes' text.

    With a RAM bundle a node keeps the segments that the question needs as text, and markers stand for the rest. The LLM
    must have the same store object.

    Args:
        store: where the soft contexts are.
        ratio: source tokens per slot, a multiple of the store's ratio, which is the default. With a RAM bundle, how
            many times shorter all passages together become, 2 or more; by default the smallest it was trained for.
        token_budget: in place of a ratio, the maximum number of tokens for all passages of a question together;
            slots and text count alike, as in `marker_tokenizer`. Nodes with a higher score get finer ratios, and
            the best stay text if there is room; at least 90% of the budget is used if the passages allow it (see
            `ctx_compress_rag.marking.budget.allot`). Nodes without a score come last; if no node has one, they
            count as sorted, best first. Metadata, template and question are not counted.
        on_missing: what to do with a passage that the store cannot stand in for, each alone: "compress" and store it,
            or send its text, with a warning, if that is impossible; raise an "error"; or send its "text". See
            `ctx_compress_rag.marking.mark.OnMissing`.
        scope: tenant or user that the markers belong to; by default that of
            `ctx_compress_rag.store.marker.scope`, or the store's.
        replace_text: make the marker the node's text, for readers that do not ask for `MetadataMode.LLM`, such as
            a subclass of `CitationQueryEngine`. `restore_sources` then needs the store.
        callback_manager: LlamaIndex's own.

    Raises:
        ConfigError: an argument has an impossible value, or both a ratio and a budget are given; or, with nodes, a RAM
            bundle gets no query.
        RatioError: the ratio cannot be made from the store's base ratio; or, with nodes, the passages do not fit
            into the budget at any ratio.
        MissingPassageError: with nodes and on_missing="error", a passage is not stored with this text.
        StoreError: with nodes, the store cannot be reached.
    """

    replace_text: bool = False

    def __init__(
        self,
        store: SoftContextStore,
        *,
        ratio: int | None = None,
        token_budget: int | None = None,
        on_missing: OnMissing = "compress",
        scope: str | None = None,
        replace_text: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(
            store=store,
            ratio=ratio,
            token_budget=token_budget,
            on_missing=on_missing,
            scope=scope,
            replace_text=replace_text,
            callback_manager=callback_manager or CallbackManager([]),
        )

    @classmethod
    def class_name(cls) -> str:
        """The class's name, for serialization."""
        return "CompressedContextPostprocessor"

    def postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None, query_str: str | None = None
    ) -> list[NodeWithScore]:
        """The nodes with markers."""
        with _asker_known():
            return super().postprocess_nodes(nodes, query_bundle, query_str)

    async def apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None, query_str: str | None = None
    ) -> list[NodeWithScore]:
        """The nodes with markers."""
        with _asker_known():
            return await super().apostprocess_nodes(nodes, query_bundle, query_str)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """The nodes with markers. The async form of the base class runs this in a thread."""
        done = restored(nodes)
        texts = {place: own_text(scored.node) for place, scored in enumerate(done) if is_text(scored.node)}
        marked = self._mark(
            list(texts.values()),
            [done[place].node.node_id for place in texts],
            [relevance(done[place].score) for place in texts],
            query_bundle.query_str if query_bundle else None,
        )
        for place, (text, shown) in zip(texts, marked, strict=True):
            scored = done[place]
            node = scored.node if text == texts[place] else with_text(scored.node, text)
            if shown != text:
                replaced = self.replace_text or _for_citations.get()
                node = with_text(node, shown) if replaced else CompressedTextNode.of(node, shown)
            done[place] = scored if node is scored.node else NodeWithScore(node=node, score=scored.score)
        return done


@contextmanager
def _asker_known() -> Iterator[None]:
    """Inside the block, `_for_citations` says whether a CitationQueryEngine asks for nodes.

    A postprocessor learns its caller only from the name of LlamaIndex's active span, which begins with the engine's
    class; inside `_postprocess_nodes` the span is the postprocessor's own.
    """
    token = _for_citations.set((active_span_id.get() or "").startswith("CitationQueryEngine."))
    try:
        yield
    finally:
        _for_citations.reset(token)
