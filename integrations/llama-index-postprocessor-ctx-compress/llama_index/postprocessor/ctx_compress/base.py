"""Define the postprocessor class."""

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from ctx_compress_rag.frameworks import MarkingPostprocessor
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, is_text, own_text, restored, with_text


class CompressedContextPostprocessor(MarkingPostprocessor, BaseNodePostprocessor):
    """A step that replaces retrieved texts, for the LLM, by markers, sentences, or both, within a budget.

    Goes after the retriever, last among the postprocessors. The given nodes are never changed. The new nodes keep ids,
    scores, metadata, relationships and order, and by default show their markers and sentences only to the LLM (see
    `CompressedTextNode`). Nodes with no share of the budget are left out, as by a reranker. Nodes with images, sound or
    video are returned unchanged. Works in threads and in an event loop.

    The options and errors are those of `ctx_compress_rag.frameworks.MarkingPostprocessor`. A
    `token_budget` counts as `marker_tokenizer` does.

    Args:
        replace_text: make the marker the node's text, for readers that do not ask for `MetadataMode.LLM`, such as a
            `CitationQueryEngine`. `restore_sources` then needs the store.
    """

    replace_text: bool = False

    @classmethod
    def class_name(cls) -> str:
        return "CompressedContextPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """Return the nodes with markers. The async form of the base class runs this in a thread."""
        done = restored(nodes)
        texts = {place: own_text(scored.node) for place, scored in enumerate(done) if is_text(scored.node)}
        left_out: set[int] = set()
        marked = self.marking.mark(
            list(texts.values()),
            [done[place].node.node_id for place in texts],
            [done[place].score for place in texts],
            query_bundle.query_str if query_bundle else None,
        )
        for place, (text, shown) in zip(texts, marked, strict=True):
            if text and not shown:
                left_out.add(place)
                continue
            scored = done[place]
            node = scored.node if text == texts[place] else with_text(scored.node, text)
            if shown != text:
                compressed = CompressedTextNode.of(node, shown)
                node = with_text(compressed, shown) if self.replace_text else compressed
            done[place] = scored if node is scored.node else NodeWithScore(node=node, score=scored.score)
        return [scored for place, scored in enumerate(done) if place not in left_out]
