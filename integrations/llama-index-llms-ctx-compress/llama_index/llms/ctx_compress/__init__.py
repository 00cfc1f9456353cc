"""LlamaIndex LLM that reads soft contexts with a local decoder."""

from llama_index.llms.ctx_compress.base import CompressedContextLLM, chat_memory, marker_tokenizer

__all__ = ["CompressedContextLLM", "chat_memory", "marker_tokenizer"]
