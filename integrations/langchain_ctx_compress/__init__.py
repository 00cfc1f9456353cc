"""LangChain classes for soft contexts, a postprocessor after the retriever and a chat model that replaces yours."""

from ctx_compress_rag.errors import needs

with needs("langchain"):
    import langchain_core  # noqa: F401 - names the extra before anything else fails

from langchain_ctx_compress.chat_model import ChatCompressedContext
from langchain_ctx_compress.postprocessor import CompressedContextPostprocessor
from langchain_ctx_compress.sources import expand_prompt, restore_sources

__all__ = ["ChatCompressedContext", "CompressedContextPostprocessor", "expand_prompt", "restore_sources"]
