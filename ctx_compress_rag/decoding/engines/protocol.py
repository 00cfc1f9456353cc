"""What every engine does. None is built on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ctx_compress_rag.decoding.sampling import Put, Sampling
from ctx_compress_rag.prompt import Prompt


class Engine(Protocol):
    """Turns prompts into answers, for any number of threads at a time.

    `identity` is what answers depend on besides bundle, prompt and sampling, for caches of answers.
    """

    @property
    def identity(self) -> Mapping[str, str]: ...

    def check(self, sampling: Sampling) -> None:
        """Raise ConfigError for what the engine cannot do."""

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True
    ) -> Callable[[], None]:
        """Answer prompts in the background.

        Each prompt's `put` is called with each piece of its answer's text (if `stream`), then with the Generation or
        the error that ended it: from another thread, which it must not block.

        Returns: a function that cancels what has not ended, after the token in progress; no `put` is called then.

        Raises:
            ConfigError: a prompt is too long for the engine; none was begun.
        """

    def close(self) -> None:
        """Free what the engine holds; it cannot be used afterwards."""
