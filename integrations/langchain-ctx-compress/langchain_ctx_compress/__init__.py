"""LangChain classes for soft contexts, a postprocessor after the retriever and a chat model that replaces yours."""

from langchain_ctx_compress.chat_model import ChatCompressedContext
from langchain_ctx_compress.postprocessor import CompressedContextPostprocessor, expand_prompt, restore_sources

__all__ = ["ChatCompressedContext", "CompressedContextPostprocessor", "expand_prompt", "restore_sources"]
