"""Define the postprocessor, which gives retrieved documents a marker as text, and turn markers back into text."""

from collections.abc import Sequence
from typing import Any, TypeVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableConfig, RunnableSerializable

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.frameworks import MarkingPostprocessor
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import quoted_from


class CompressedContextPostprocessor(
    MarkingPostprocessor, BaseDocumentCompressor, RunnableSerializable[Sequence[Document], list[Document]]
):
    """A step that replaces retrieved documents' text with markers, sentences, or both, within a budget.

    Works wherever a document compressor is expected (`ContextualCompressionRetriever`, `DocumentCompressorPipeline`),
    and as a step of an LCEL chain, which has no question and therefore gets markers alone. Returns copies, which keep
    class, ids, metadata and order; documents with no share of the budget are left out, as by a reranker. Put rerankers
    and filters before this step: after it, they would read markers.

    The options and errors are those of `ctx_compress_rag.frameworks.MarkingPostprocessor`. The question
    is the `query` of `compress_documents`, which a `ContextualCompressionRetriever` passes. `llm.get_num_tokens` of the
    documents' contents, joined by blank lines, never exceeds a `token_budget`.

    Args:
        score_key: the metadata key of a document's relevance, a number, higher for the more relevant.
    """

    score_key: str = "relevance_score"

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return the documents as a prompt should show them for the question `query`."""
        documents = checked(documents)
        texts = [document.page_content for document in documents]
        scores = [document.metadata.get(self.score_key) for document in documents]
        marked = self.marking.mark(texts, [document.id for document in documents], scores, query)
        each = zip(documents, marked, strict=True)
        return [with_text(document, shown) for document, (text, shown) in each if shown or not text]

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Run `compress_documents` as a step of a chain; `ainvoke` runs it in a thread."""
        return self._call_with_config(self.compress_documents, input, config)


Prompt = TypeVar("Prompt", str, PromptValue, list[BaseMessage])


def with_text(document: Document, text: str) -> Document:
    """Return a copy with another text; values of its metadata are shared, because some cannot be copied."""
    return document.model_copy(update={"page_content": text, "metadata": dict(document.metadata)})


def restore_sources(
    documents: Sequence[Document], store: SoftContextStore, scope: str | None = None, *, answer: str | None = None
) -> list[Document]:
    """Return copies of an answer's documents, as the retriever found them, with texts, ids, and metadata with scores.

    Restoring twice is the same as once, and documents may have been saved and loaded before.

    Args:
        documents: what the postprocessor returned, such as `result["context"]` of a retrieval chain.
        store: the store of the texts.
        scope: the scope that the postprocessor was given.
        answer: the answer's text; then `metadata["quoted"]` says whether a document has it, word for word.

    Raises:
        ConfigError: `documents` is not a list of documents, or a document's markers stand for too much text.
        UnreadableMarkerError: a document has a marker of another store's key, or of another scope.
        MissingPassageError: a passage was deleted, or, with a RAM bundle, this question's slots were dropped from
            memory to keep those of others.
    """
    restored = []
    for each in checked(documents):
        text = expand(store, each.page_content, scope, "error")
        restored.append(with_text(each, text))
        if answer is not None:
            restored[-1].metadata["quoted"] = quoted_from(answer, text)
    return restored


def checked(documents: Sequence[Document]) -> Sequence[Document]:
    """Return the documents; raise ConfigError if they are something else."""
    several = isinstance(documents, Sequence) and not isinstance(documents, str)
    wrong = [each for each in documents if not isinstance(each, Document)] if several else [documents]
    if wrong:
        raise ConfigError(
            f"a list of Documents is needed, got {type(wrong[0]).__name__}: the postprocessor goes after a retriever "
            "(`retriever | postprocessor`), and `restore_sources` takes the documents that it returned"
        )
    return documents


def expand_prompt(prompt: Prompt, store: SoftContextStore, scope: str | None = None) -> Prompt:
    """Return a prompt with each marker replaced by its passage's text, for an LLM that knows no markers.

    As a step of a chain, write `prompt | partial(expand_prompt, store=store) | other_llm`. To fall back on another LLM,
    write `llm.with_fallbacks([RunnableLambda(partial(expand_prompt, store=store)) | other_llm])`.

    Args:
        prompt: a string, a prompt value (what a template makes) or messages; the result is of the same kind.
        store: the store of the texts.
        scope: tenant or user; None takes the scope of `ctx_compress_rag.scope`, or else the store's.

    Raises MissingPassageError if a passage was deleted from the store, or its text changed.
    """
    if isinstance(prompt, str):
        return expand(store, prompt, scope)
    if isinstance(prompt, StringPromptValue):
        return StringPromptValue(text=expand(store, prompt.text, scope))
    if isinstance(prompt, PromptValue):
        return ChatPromptValue(messages=expand_prompt(prompt.to_messages(), store, scope))
    return [_expanded(message, store, scope) for message in prompt]


def _expanded(message: BaseMessage, store: SoftContextStore, scope: str | None) -> BaseMessage:
    if isinstance(message.content, str):
        return message.model_copy(update={"content": expand(store, message.content, scope)})

    def block(part: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(part, str):
            return expand(store, part, scope)
        return {**part, "text": expand(store, part["text"], scope)} if part.get("type") == "text" else part

    return message.model_copy(update={"content": [block(part) for part in message.content]})
