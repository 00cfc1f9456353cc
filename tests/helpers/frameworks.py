"""LangChain and LlamaIndex in one form, for what has to hold in both."""

from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

import langchain_ctx_compress
from langchain_ctx_compress import ChatCompressedContext
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, restore_sources

Answer = tuple[str, int]
"""An answer's text, and how many slots were read for it."""


class LangChain:
    llm = ChatCompressedContext
    postprocessor = langchain_ctx_compress.CompressedContextPostprocessor
    restore = staticmethod(langchain_ctx_compress.restore_sources)

    @staticmethod
    def found(text: str, id: str | None = None, **metadata: Any) -> Document:
        return Document(text, id=id, metadata=metadata)

    @staticmethod
    def mark(found: list[Document], query: str = "", **options: Any) -> list[Document]:
        return list(LangChain.postprocessor(**options).compress_documents(found, query))

    @staticmethod
    def shown(document: Document) -> str:
        """What the LLM reads of it."""
        return document.page_content

    @staticmethod
    def ask(llm: Any, prompt: Any, **options: Any) -> Answer:
        message = llm.invoke(prompt, **options)
        return message.text, message.response_metadata["slots"]

    @staticmethod
    def stream(llm: Any, prompt: Any, **options: Any) -> Answer:
        chunks = list(llm.stream(prompt, **options))
        return "".join(chunk.text for chunk in chunks), chunks[-1].response_metadata["slots"]

    chat = ask

    @staticmethod
    async def in_loop(llm: Any, prompt: str) -> list[Answer]:
        """The answers of a call and a stream in an event loop."""
        chunks = [[await llm.ainvoke(prompt)], [chunk async for chunk in llm.astream(prompt)]]
        return [("".join(c.text for c in each), each[-1].response_metadata["slots"]) for each in chunks]


class LlamaIndex:
    llm = CompressedContextLLM
    postprocessor = CompressedContextPostprocessor
    restore = staticmethod(restore_sources)

    @staticmethod
    def found(text: str, id: str | None = None, **metadata: Any) -> NodeWithScore:
        named = {} if id is None else {"id_": id}
        node = TextNode(text=text, metadata=metadata, excluded_llm_metadata_keys=list(metadata), **named)
        return NodeWithScore(node=node)

    @staticmethod
    def mark(found: list[NodeWithScore], query: str | None = None, **options: Any) -> list[NodeWithScore]:
        return CompressedContextPostprocessor(**options).postprocess_nodes(found, query_str=query)

    @staticmethod
    def shown(scored: NodeWithScore) -> str:
        return scored.node.get_content(MetadataMode.LLM)

    @staticmethod
    def ask(llm: Any, prompt: str, **options: Any) -> Answer:
        response = llm.complete(prompt, **options)
        return response.text, response.raw["slots"]

    @staticmethod
    def stream(llm: Any, prompt: str, **options: Any) -> Answer:
        *_, response = llm.stream_complete(prompt, **options)
        return response.text, response.raw["slots"]

    @staticmethod
    def chat(llm: Any, messages: list[tuple[str, str]]) -> Answer:
        response = llm.chat([ChatMessage(role=role, content=text) for role, text in messages])
        return response.message.content, response.raw["slots"]

    @staticmethod
    async def in_loop(llm: Any, prompt: str) -> list[Answer]:
        *_, streamed = [response async for response in await llm.astream_complete(prompt)]
        return [(response.text, response.raw["slots"]) for response in (await llm.acomplete(prompt), streamed)]


async def every_way(framework: Any, llm: Any, prompt: str) -> set[Answer]:
    """The answers of a call, a stream, and both in an event loop."""
    return {framework.ask(llm, prompt), framework.stream(llm, prompt), *await framework.in_loop(llm, prompt)}


FRAMEWORKS = pytest.mark.parametrize("framework", [LangChain, LlamaIndex])
