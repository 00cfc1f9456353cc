"""What every engine does, and the options of all. None is built on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pydantic import BaseModel, Field, SecretStr

from ctx_compress_rag.decoding.sampling import Put, Sampling
from ctx_compress_rag.prompt import Prompt


class EngineOptions(BaseModel):
    """Options of the engines, which the frameworks' LLM classes have, too; each engine takes its own.

    Attributes:
        batch_size: transformers: most prompts in a forward pass; llama.cpp: most answers at a time.
        merge: transformers: keep a second copy of the weights that the reader's LoRA changes, with the LoRA merged
            into them: faster, and the last bits of scores may differ.
        weights: llama.cpp: "BF16", "F32", "Q8_0" or "Q4_0", or the folder of `ctx-compress export`.
        context_size: llama.cpp: most positions that all prompts and answers have together.
        api_key: a server's key.
        timeout: most seconds to wait for a server's first token, and from one token to the next.
        max_retries: how often a request is sent again if a server cannot be reached, is busy or fails, but never after
            the first piece of an answer.
    """

    # Frozen: what a decoder is made with, which a later assignment would not change.
    batch_size: int = Field(default=8, ge=1, frozen=True)
    merge: bool = Field(default=False, frozen=True)
    weights: str = Field(default="BF16", frozen=True)
    context_size: int = Field(default=8192, ge=1, frozen=True)
    api_key: SecretStr | None = Field(default=None, exclude=True, frozen=True)
    timeout: float = Field(default=120.0, gt=0, frozen=True)
    max_retries: int = Field(default=2, ge=0, frozen=True)


class Engine(Protocol):
    """Turns prompts into answers, for any number of threads at a time.

    `identity` is what answers depend on besides bundle, prompt and sampling, for caches of answers.
    """

    @property
    def identity(self) -> Mapping[str, str]: ...

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True
    ) -> Callable[[], None]:
        """Answer prompts in the background.

        Each prompt's `put` is called with each piece of its answer's text (if `stream`), then with the Generation or
        the error that ended it: from another thread, which it must not block.

        Returns: a function that cancels what has not ended, after the token in progress; no `put` is called then.

        Raises:
            ConfigError: a prompt is too long for the engine, or `sampling` asks for what it cannot do; none was begun.
        """

    def close(self) -> None:
        """Free what the engine holds; it cannot be used afterwards."""
