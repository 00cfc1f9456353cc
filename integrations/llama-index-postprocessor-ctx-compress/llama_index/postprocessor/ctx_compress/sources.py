"""Turn markers back into text, for citations."""

from collections.abc import Sequence
from typing import Protocol

from llama_index.core.schema import NodeWithScore

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import quoted_from
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, own_text, with_text


class HasSources(Protocol):
    """A response of a query or chat engine."""

    source_nodes: list[NodeWithScore]


def restore_sources(
    source: HasSources | Sequence[NodeWithScore],
    store: SoftContextStore | None = None,
    scope: str | None = None,
    *,
    answer: str | None = None,
) -> list[NodeWithScore]:
    """Return the nodes that a response is based on, as the retriever found them, with text, metadata, ids and scores.

    Nodes without a marker are returned unchanged, so restoring twice is the same as once.

    Args:
        source: a response of a query or chat engine, or nodes.
        store: the store of the texts; needed only for nodes whose text was replaced (`replace_text=True`).
        scope: the scope that the postprocessor was given.
        answer: the answer's text; then `metadata["quoted"]` says whether a node has it, word for word.

    Raises:
        ConfigError: `source` has something other than scored nodes.
        UnreadableMarkerError: a saved and loaded node has a marker of another store's key, or of another scope.
        MissingPassageError: a replaced text's passage was deleted from the store, or its text changed.
    """
    given = source if isinstance(source, Sequence) else getattr(source, "source_nodes", [source])
    done = restored(given)
    for place, scored in enumerate(done):
        node, text = scored.node, own_text(scored.node)
        if store is not None and scored is given[place]:  # else it knew its text, in which all are the author's words
            text = expand(store, text, scope, "error")
            node = node if text == own_text(node) else with_text(node, text)
        if answer is not None:
            node = node.model_copy(update={"metadata": {**node.metadata, "quoted": quoted_from(answer, text)}})
        done[place] = NodeWithScore(node=node, score=scored.score)
    return done


def restored(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return the nodes, with the original of each CompressedTextNode; raise ConfigError for anything else."""
    wrong = [node for node in nodes if not isinstance(node, NodeWithScore)]
    if wrong:
        raise ConfigError(
            f"a response or a list of NodeWithScore is needed, got {type(wrong[0]).__name__}: give what a retriever "
            "or an engine returned"
        )
    plain = [each.node.plain() if isinstance(each.node, CompressedTextNode) else None for each in nodes]
    pairs = zip(nodes, plain, strict=True)
    return [each if node is None else NodeWithScore(node=node, score=each.score) for each, node in pairs]
