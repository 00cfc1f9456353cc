"""The postprocessor."""

from __future__ import annotations

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from ctx_compress_rag.frameworks.postprocessor import MarkingPostprocessor
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, is_text, own_text, with_text
from llama_index.postprocessor.ctx_compress.sources import restored


class CompressedContextPostprocessor(MarkingPostprocessor, BaseNodePostprocessor):
    """Replaces retrieved texts by the markers of their stored soft contexts, for `CompressedContextLLM`.

    Goes after the retriever, last among the postprocessors. A passage is looked up in the store by its node's
    id, then by its text. The given nodes are never changed; the new ones keep ids, scores, metadata and
    relationships, and by default show the marker only to the LLM (see `CompressedTextNode`). Nodes with images,
    sound or video, and blank ones, are returned unchanged. Works in threads and in an event loop.

    A `CitationQueryEngine` makes its sources from plain text, unless it is given `metadata_mode=MetadataMode.LLM`; or
    give this postprocessor `replace_text=True`.

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
        replace_text: make the marker the node's text, for readers that do not ask for `MetadataMode.LLM`.
            `restore_sources` then needs the store.
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

    @classmethod
    def class_name(cls) -> str:
        """The class's name, for serialization."""
        return "CompressedContextPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """The nodes with markers. The async form of the base class runs this in a thread."""
        done = restored(nodes)
        texts = {place: own_text(scored.node) for place, scored in enumerate(done) if is_text(scored.node)}
        marked = self._mark(
            list(texts.values()),
            [done[place].node.node_id for place in texts],
            [done[place].score for place in texts],
            query_bundle.query_str if query_bundle else None,
        )
        for place, (text, shown) in zip(texts, marked, strict=True):
            scored = done[place]
            node = scored.node if text == texts[place] else with_text(scored.node, text)
            if shown != text:
                node = with_text(node, shown) if self.replace_text else CompressedTextNode.of(node, shown)
            done[place] = scored if node is scored.node else NodeWithScore(node=node, score=scored.score)
        return done
