"""Documents that show their marker to prompts and their text to rerankers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import PrivateAttr

from ctx_compress_rag.frameworks.postprocessor import MarkingPostprocessor


class CompressedDocument(Document):
    """A document that reads as a marker, and as its own text to LangChain's document compressors.

    LangChain has one attribute for both: a reranker after the postprocessor would rank markers, all alike. So the call
    stack decides, for want of a public way. A plain function that reranks is not noticed: the postprocessor goes last.

    Saved, it becomes a plain document with the marker.
    """

    _text: str = PrivateAttr("")

    @classmethod
    def of(cls, document: Document, marker: str) -> CompressedDocument:
        """A document with this marker and everything else from `document`; values of metadata are shared."""
        made = cls(id=document.id, page_content=marker, metadata=dict(document.metadata))
        made._text = document.page_content
        return made

    @classmethod
    def lc_id(cls) -> list[str]:
        """The plain document's name: what a saved document is loaded as."""
        return Document.lc_id()

    def __getattribute__(self, name: str) -> Any:
        if name == "page_content" and _read_by_a_compressor():
            return self._text
        return super().__getattribute__(name)


def with_text(document: Document, text: str) -> Document:
    """A copy with another text; the values of its metadata are shared: some cannot be copied."""
    if isinstance(document, CompressedDocument):
        return Document(id=document.id, page_content=text, metadata=dict(document.metadata))
    return document.model_copy(update={"page_content": text, "metadata": dict(document.metadata)})


def _read_by_a_compressor() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            reader = frame.f_locals.get("self")
            if isinstance(reader, BaseDocumentCompressor):
                return not isinstance(reader, MarkingPostprocessor)
        frame = frame.f_back
    return False
