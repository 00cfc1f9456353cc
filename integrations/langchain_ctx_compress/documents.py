"""Define documents that show what the prompt gets, and keep their text for citations."""

from __future__ import annotations

from langchain_core.documents import Document
from pydantic import PrivateAttr


class CompressedDocument(Document):
    """A document whose `page_content` is what a prompt shows of it, which is sentences, a marker, or both.

    `restore_sources` gives back the text. A saved document becomes a plain one with this `page_content`.
    """

    _text: str = PrivateAttr("")

    @classmethod
    def of(cls, document: Document, shown: str) -> CompressedDocument:
        """Return a document with `shown` as content and all else of `document`; values of metadata are shared."""
        made = cls(id=document.id, page_content=shown, metadata=dict(document.metadata))
        made._text = document.page_content
        return made

    @classmethod
    def lc_id(cls) -> list[str]:
        """Return the plain document's id, so that a saved document is loaded as a plain one."""
        return Document.lc_id()

    @property
    def text(self) -> str:
        """Return the whole text."""
        return self._text


def original(document: Document) -> Document:
    """Return the document as it was before compression, if the document still knows its text."""
    return with_text(document, document.text) if isinstance(document, CompressedDocument) else document


def with_text(document: Document, text: str) -> Document:
    """Return a copy with another text; values of its metadata are shared, because some cannot be copied."""
    if isinstance(document, CompressedDocument):
        return Document(id=document.id, page_content=text, metadata=dict(document.metadata))
    return document.model_copy(update={"page_content": text, "metadata": dict(document.metadata)})
