"""Define nodes that show their marker to the LLM and their text to everything else, and restore their originals."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, ImageNode, MetadataMode, Node, NodeWithScore, TextNode

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import escaped_markers
from ctx_compress_rag.text.answers import quoted_from

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import BaseContentBlock


class CompressedTextNode(TextNode):
    """A text node that reads as its marker in `MetadataMode.LLM` and as its own text in every other mode.

    `source_nodes`, rerankers, evaluators and citations therefore see the text. Metadata that LlamaIndex puts before a
    node's text for the LLM also precede the marker. If the text was changed after compression, the LLM gets the text,
    because the marker no longer stands for it.

    A saved node (a workflow's context, a pickle, JSON) is loaded with its marker, or as a plain text node by what knows
    LlamaIndex's own classes alone, such as docstores.

    Attributes:
        marker: what stands for the text in the prompt: a marker, or kept text that ends with one.
        marked: the SHA-256 of the text that the marker stands for.
        original: the node that this node was made from, unchanged; None if it was loaded.
    """

    marker: str = ""
    marked: str = Field("", repr=False)
    original: BaseNode | None = Field(None, exclude=True, repr=False)

    @classmethod
    def of(cls, node: BaseNode, marker: str) -> CompressedTextNode:
        """Return a node with this marker and everything else from `node`."""
        shared = {name: getattr(node, name) for name in TextNode.model_fields if hasattr(node, name)}
        text = own_text(node)
        return cls(**{**shared, "text": text, "marker": marker, "marked": _digest(text), "original": node})

    @classmethod
    def class_name(cls) -> str:
        """Return the plain node's name, so that a saved node is loaded as a plain one."""
        return TextNode.class_name()

    def plain(self) -> BaseNode | None:
        """Return the node before compression; None if it was loaded and its text is another."""
        if self.original is not None or self.marked != _digest(self.text):
            return self.original
        return TextNode(**{name: getattr(self, name) for name in TextNode.model_fields})

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        """Return the text with the metadata of `metadata_mode`; for the LLM, the marker in place of the text."""
        shown = self._for_llm() if metadata_mode == MetadataMode.LLM else None
        return super().get_content(metadata_mode) if shown is None else shown.get_content(metadata_mode)

    def get_content_blocks(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> list[BaseContentBlock]:
        """Return what `get_content` returns, in blocks."""
        shown = self._for_llm() if metadata_mode == MetadataMode.LLM else None
        return super().get_content_blocks(metadata_mode) if shown is None else shown.get_content_blocks(metadata_mode)

    def _for_llm(self) -> TextNode | None:
        if self.marked != _digest(self.text):
            return None
        fields = {name: getattr(self, name) for name in TextNode.model_fields}
        # Metadata come from the document's author: the LLM must not fail on a marker in them.
        shown = [each for each in self.metadata.items() if each[0] not in self.excluded_llm_metadata_keys]
        metadata = {escaped_markers(name): escaped_markers(str(value)) for name, value in shown}
        return TextNode(**{**fields, "text": self.marker, "metadata": metadata})


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def own_text(node: BaseNode) -> str:
    """Return a node's text without metadata."""
    return node.get_content(metadata_mode=MetadataMode.NONE)


def with_text(node: BaseNode, text: str) -> BaseNode:
    """Return a copy of the node with another text."""
    copied = node.model_copy(update={"metadata": dict(node.metadata)})
    copied.set_content(text)
    return copied


def is_text(node: BaseNode) -> bool:
    """Whether a node is only text, because a marker cannot stand for an image, sound or video."""
    if isinstance(node, Node):
        return not (node.image_resource or node.audio_resource or node.video_resource)
    return isinstance(node, TextNode) and not isinstance(node, ImageNode)


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
