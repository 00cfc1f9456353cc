"""Count the tokens of prompts with markers."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from llama_index.core.memory import Memory

from ctx_compress_rag.decoding.preparer import PromptPreparer
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import scope as in_scope
from llama_index.llms.ctx_compress.base import CompressedContextLLM

_RESERVED = 500  # tokens that LlamaIndex keeps free for an answer that it refines


def chat_memory(llm: CompressedContextLLM, token_limit: int | None = None, **options: Any) -> Memory:
    """Return a memory for LlamaIndex's chat engines, which counts a marker as its slots.

    A chat engine fails with "Chunk size ... is not positive" if its history leaves no room for passages, as by
    default it may. Here, a history takes at most half of the tokens that are not reserved for the answer, or
    `token_limit`. `options` go to `Memory.from_defaults`.

    Raises ConfigError if nothing of the window is left.
    """
    window, answer = llm.metadata.context_window, llm.metadata.num_output
    if token_limit is None:
        token_limit = (window - answer - _RESERVED) // 2
    if token_limit <= 0:
        raise ConfigError(
            f"max_tokens={answer} and the {_RESERVED} tokens that LlamaIndex reserves leave nothing of "
            f"the window of {window} for a history: give a smaller max_tokens"
        )
    return Memory.from_defaults(token_limit=token_limit, tokenizer_fn=marker_tokenizer(llm.store, llm.scope), **options)


def marker_tokenizer(store: SoftContextStore, scope: str | None = None) -> Callable[[str], list[int]]:
    """Return the decoder's tokenizer with one id for each slot of a marker, for `Settings.tokenizer`.

    With another tokenizer, LlamaIndex counts a marker's letters when it packs a prompt. Keep a passage's slots below
    the chunk size (also that of a `CitationQueryEngine`): a longer one is cut, and half a marker is only text.

    Args:
        store: the store of the soft contexts.
        scope: tenant or user of the markers; None takes the scope of `ctx_compress_rag.scope`, else the store's.
    """
    preparer = PromptPreparer(store.bundle, store)

    def tokenize(text: str) -> list[int]:
        with nullcontext() if scope is None else in_scope(scope):
            return preparer.token_ids(text)

    return tokenize
