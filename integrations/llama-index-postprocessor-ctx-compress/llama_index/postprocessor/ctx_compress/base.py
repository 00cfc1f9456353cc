"""Define the postprocessor class, and the step that compresses documents while they are ingested."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TransformComponent

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.frameworks import MarkingPostprocessor, StoreComponent
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, is_text, own_text, restored, with_text


class CompressedContextPostprocessor(MarkingPostprocessor, BaseNodePostprocessor):
    """A step that shows the LLM markers, sentences, or both in place of retrieved texts, within a budget.

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


class CompressSoftContext(StoreComponent, TransformComponent):
    """A step of ingestion that compresses nodes into a store, so that no question has to wait for compression.

    Put it into an `IngestionPipeline` or an index's `transformations`, after the steps that change texts or ids. Nodes
    pass through unchanged; those with images, sound or video, and blank ones, are skipped. If you delete nodes from the
    index, call `SoftContextStore.delete`, too, because a pipeline does not tell its steps.

    A pipeline's cache never skips this step, because a new or emptied store would get no slots. A cache on disk grows
    with each run; `disable_cache=True` prevents that.

    Args:
        store: the store that gets the soft contexts.
        show_progress: show a progress bar.

    Raises:
        ConfigError: an argument is unknown or has an impossible value; in a call, an id is given with two texts, or the
            pipeline has `num_workers`, whose processes cannot share the store's model and database.
        PayloadError, StoreLockedError: in a call, as `SoftContextStore.add`.
    """

    show_progress: bool = False

    @classmethod
    def class_name(cls) -> str:
        return "CompressSoftContext"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Store the nodes' soft contexts; return the nodes unchanged."""
        unique = {(node.node_id, own_text(node)): node for node in nodes if is_text(node) and own_text(node).strip()}
        self.store.add(list(unique.values()), progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Call this object in a thread, so that the event loop runs on."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields and a random value, because of which LlamaIndex's cache never skips this step."""
        return {**super().to_dict(**kwargs), "run": secrets.token_hex(8)}

    def __getstate__(self) -> NoReturn:
        """Raise ConfigError, because LlamaIndex would send this step to another process without its store."""
        raise ConfigError("CompressSoftContext works only in its own process: run the pipeline without num_workers")
