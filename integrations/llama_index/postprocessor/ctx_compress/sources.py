"""Turn markers back into text, for citations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llama_index.core.schema import NodeWithScore

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.store import SoftContextStore
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, own_text, with_text


class HasSources(Protocol):
    """A response of a query or chat engine."""

    source_nodes: list[NodeWithScore]


def restore_sources(
    source: HasSources | Sequence[NodeWithScore], store: SoftContextStore | None = None, scope: str | None = None
) -> list[NodeWithScore]:
    """Return the nodes that a response is based on, as the retriever found them, with text, metadata, ids and scores.

    Nodes without a marker are returned unchanged, so restoring twice is the same as once.

    Args:
        source: a response of a query or chat engine, or nodes.
        store: the store of the texts; needed only for nodes whose text was replaced (`replace_text=True`).
        scope: the scope that the postprocessor was given.

    Raises:
        ConfigError: `source` has something other than scored nodes.
        MissingPassageError: a replaced text's passage was deleted from the store, or its text changed.
    """
    done = restored(source if isinstance(source, Sequence) else getattr(source, "source_nodes", [source]))
    if store is not None:
        for place, scored in enumerate(done):
            if (text := expand(store, own_text(scored.node), scope)) != own_text(scored.node):
                done[place] = NodeWithScore(node=with_text(scored.node, text), score=scored.score)
    return done


def restored(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return the nodes, with the original of each CompressedTextNode; raise ConfigError for what is no scored node."""
    wrong = [node for node in nodes if not isinstance(node, NodeWithScore)]
    if wrong:
        raise ConfigError(
            f"a response or a list of NodeWithScore is needed, got {type(wrong[0]).__name__}: give what a retriever "
            "or an engine returned"
        )
    return [
        NodeWithScore(node=each.node.original, score=each.score) if isinstance(each.node, CompressedTextNode) else each
        for each in nodes
    ]
