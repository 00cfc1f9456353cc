"""Define the interface of engines and their options; no engine uses another."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pydantic import BaseModel, Field, SecretStr

from ctx_compress_rag.decoding.sampling import Put, Sampling
from ctx_compress_rag.prompt import Prompt

Halt = Callable[[], None]  # ends answers after the token in progress


class EngineOptions(BaseModel):
    """Options of the engines, which the frameworks' LLM classes have, too; each engine uses only its own.

    Attributes:
        batch_size: most prompts in a forward pass (transformers), or most answers at a time (llama.cpp).
        merge: keep a second copy of the weights that the reader's LoRA changes, with the LoRA merged into them, which
            is faster and may change the last bits of scores (transformers).
        weights: "BF16", "F32", "Q8_0" or "Q4_0", or a folder that `ctx-compress export` wrote (llama.cpp).
        context_size: most positions that all prompts and answers have together (llama.cpp).
        api_key: a server's API key.
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
    """An object that turns prompts into answers, for any number of threads at a time."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Return what answers depend on besides bundle, prompt and sampling, for caches of answers."""

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True) -> Halt:
        """Start to answer prompts, each with its function of `puts`, and return before the answers end.

        A prompt's function gets each piece of its answer's text (if `stream`), then the Generation or the error that
        ended the answer. Another thread calls the function, which must not block.

        Returns: a function that cancels all answers after the token in progress; no function of `puts` is called then.

        Raises ConfigError, before any answer, if a prompt is too long, or the engine cannot do as `sampling` says.
        """

    def close(self) -> None:
        """Free what the engine holds; the engine cannot be used afterwards."""
