"""From markers back to text: for citations, and for an LLM that knows no markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from llama_index.core.schema import BaseNode, NodeWithScore

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import expand, try_expand
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, own_text


class HasSources(Protocol):
    """Any response of a query or chat engine."""

    source_nodes: list[NodeWithScore]


def restore_sources(
    source: HasSources | Sequence[NodeWithScore], store: SoftContextStore | None = None, scope: str | None = None
) -> list[NodeWithScore]:
    """The nodes that a response is based on, as the retriever found them: text, metadata, ids and scores.

    Nodes without a marker are returned unchanged, so restoring twice is the same as once.

    Args:
        source: a response of a query or chat engine, or nodes.
        store: where the texts are; needed only for nodes whose text was replaced (`replace_text=True`).
        scope: the scope that the postprocessor was given.

    Raises:
        ConfigError: `source` has something other than scored nodes.
        MissingPassageError: a replaced text's passage was deleted from the store, or its text changed.
    """
    nodes = _checked(source if isinstance(source, Sequence) else getattr(source, "source_nodes", [source]))
    return [_restored(each, lambda text: text if store is None else expand(store, text, scope)) for each in nodes]


def restored(
    nodes: Sequence[NodeWithScore], store: SoftContextStore, scope: str | None, on_unreadable: OnUnreadable
) -> list[NodeWithScore]:
    """As `restore_sources`; a node whose marker cannot be read stays unchanged, or raises with "error"."""
    return [_restored(each, lambda text: try_expand(store, text, scope, on_unreadable)) for each in _checked(nodes)]


def _checked(nodes: Sequence[NodeWithScore]) -> Sequence[NodeWithScore]:
    wrong = [node for node in nodes if not isinstance(node, NodeWithScore)]
    if wrong:
        raise ConfigError(
            f"a response or a list of NodeWithScore is needed, got {type(wrong[0]).__name__}: give what a retriever "
            "or an engine returned"
        )
    return nodes


def expand_prompt(text: str, store: SoftContextStore, scope: str | None = None) -> str:
    """A prompt with each marker replaced by its passage's text, for an LLM that knows no markers.

    Markers of another key or scope stay as they are.

    Args:
        text: a prompt, perhaps with markers.
        store: where the passages are.
        scope: tenant or user; by default that of `ctx_compress_rag.store.marker.scope`, or the store's.

    Raises:
        MissingPassageError: a passage was deleted from the store, or its text changed.
    """
    return expand(store, text, scope)


def _restored(scored: NodeWithScore, expanded: Callable[[str], str | None]) -> NodeWithScore:
    """The original node if this one holds it, else this one with its text expanded if that is possible."""
    node: BaseNode = scored.node
    if isinstance(node, CompressedTextNode):
        node = node.original
    elif (text := expanded(own_text(node))) is not None and text != own_text(node):
        node = node.model_copy(update={"metadata": dict(node.metadata)})
        node.set_content(text)
    return NodeWithScore(node=node, score=scored.score)
