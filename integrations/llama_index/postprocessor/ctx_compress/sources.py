"""From markers back to text: for citations, and for an LLM that knows no markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llama_index.core.schema import BaseNode, NodeWithScore

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.stores import SoftContextStore
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, own_text


class HasSources(Protocol):
    """Any response of a query or chat engine."""

    source_nodes: list[NodeWithScore]


def restore_sources(
    source: HasSources | Sequence[NodeWithScore], store: SoftContextStore | None = None, scope: str | None = None
) -> list[NodeWithScore]:
    """The nodes that a response rests on as the retriever found them: text, metadata, ids and scores.

    What holds no marker is returned as it is, so restoring twice changes nothing.

    Args:
        source: a response of a query or chat engine, or nodes.
        store: where the texts are; needed only for nodes whose text was replaced (`replace_text=True`).
        scope: the scope that the postprocessor was given.

    Raises:
        ConfigError: there is something other than scored nodes.
        MissingPassageError: a replaced text's passage was deleted from the store, or its text changed.
    """
    nodes = source if isinstance(source, Sequence) else getattr(source, "source_nodes", [source])
    wrong = [node for node in nodes if not isinstance(node, NodeWithScore)]
    if wrong:
        raise ConfigError(
            f"a response or a list of NodeWithScore is needed, got {type(wrong[0]).__name__}: give what a retriever "
            "or an engine returned"
        )
    return [NodeWithScore(node=_restored(scored.node, store, scope), score=scored.score) for scored in nodes]


def expand_prompt(text: str, store: SoftContextStore, scope: str | None = None) -> str:
    """A prompt with each marker replaced by its passage's text, for an LLM that knows no markers.

    Markers of another key or scope stay as they are.

    Args:
        text: a prompt, perhaps with markers.
        store: where the passages are.
        scope: tenant or user; by default the one of `ctx_compress_rag.stores.markers.scope`, or else the store's.

    Raises:
        MissingPassageError: a passage was deleted from the store, or its text changed.
    """
    return expand(store, text, scope)


def _restored(node: BaseNode, store: SoftContextStore | None, scope: str | None) -> BaseNode:
    if isinstance(node, CompressedTextNode):
        return node.original
    if store is None or (expanded := expand(store, own_text(node), scope)) == own_text(node):
        return node
    copied = node.model_copy(update={"metadata": dict(node.metadata)})
    copied.set_content(expanded)
    return copied
