"""Documents that show what the prompt gets, and remember their text for citations."""

from __future__ import annotations

from langchain_core.documents import Document
from pydantic import PrivateAttr


class CompressedDocument(Document):
    """A document whose `page_content` is what a prompt shows of it: sentences, a marker, or both.

    `restore_sources` gives back its text. Saved, it becomes a plain document with this `page_content`.
    """

    _text: str = PrivateAttr("")

    @classmethod
    def of(cls, document: Document, shown: str) -> CompressedDocument:
        """A document that shows this and has everything else from `document`; values of metadata are shared."""
        made = cls(id=document.id, page_content=shown, metadata=dict(document.metadata))
        made._text = document.page_content
        return made

    @classmethod
    def lc_id(cls) -> list[str]:
        """The plain document's name: what a saved document is loaded as."""
        return Document.lc_id()

    @property
    def text(self) -> str:
        """The whole text."""
        return self._text


def original(document: Document) -> Document:
    """The document as it was before it was compressed, as far as it knows."""
    return with_text(document, document.text) if isinstance(document, CompressedDocument) else document


def with_text(document: Document, text: str) -> Document:
    """A copy with another text; the values of its metadata are shared: some cannot be copied."""
    if isinstance(document, CompressedDocument):
        return Document(id=document.id, page_content=text, metadata=dict(document.metadata))
    return document.model_copy(update={"page_content": text, "metadata": dict(document.metadata)})
