"""Record the log-probabilities of an answer's tokens, and convert them from and to OpenAI's formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ctx_compress_rag.decoding.filters import Scores


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and the natural logarithm of its probability.

    The probability is the model's own, before temperature, schemas, quotations and the decoder's settings change it.
    `top` holds the likeliest tokens at the same place with their logarithms, likeliest first, as many as asked for.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class LogprobRecorder:
    """A record of the log-probabilities of an answer's tokens, and of the `top` likeliest tokens at each place."""

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._top = top
        self._noted: list[TokenLogprob] = []

    def take(self, token: int, scores: Scores) -> None:
        """Record the token that was chosen, with the model's own scores (vocabulary,)."""
        logprobs = scores - scores.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argpartition(-logprobs, self._top - 1)[: self._top] if self._top else np.zeros(0, int)
        top = sorted(((self._text(id), float(logprobs[id])) for id in best.tolist()), key=lambda each: -each[1])
        self._noted.append(TokenLogprob(self._text(token), float(logprobs[token]), tuple(top)))

    def of_text(self, ids: Sequence[int], text: str) -> tuple[TokenLogprob, ...]:
        """Return the records of those of `ids` that make up `text`, without end tokens and tokens of a stop string."""
        length = len(ids)
        while length and len(self._decode(ids[: length - 1])) >= len(text):
            length -= 1
        return tuple(self._noted[:length])

    def _text(self, token: int) -> str:
        """Return a token's text, with the space that some tokenizers leave out at the beginning of a text."""
        return self._decode([*self._before, token], special=True).removeprefix(self._decode(self._before))

    def _decode(self, ids: Sequence[int], special: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def logprobs_from_openai(logprobs: Any, top: int) -> list[TokenLogprob]:
    """Return a TokenLogprob per token, with its `top` likeliest, from OpenAI's completions format, or [] from None."""
    if logprobs is None:
        return []
    likeliest = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return [
        TokenLogprob(token, logprob, tuple(sorted((others or {}).items(), key=lambda each: -each[1])[:top]))
        for token, logprob, others in zip(logprobs.tokens, logprobs.token_logprobs, likeliest, strict=True)
    ]


def openai_completion_logprobs(logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    ends = list(accumulate((len(each.token) for each in logprobs), initial=0))
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [dict(each.top) for each in logprobs] if any(each.top for each in logprobs) else None,
        "text_offset": ends[:-1],
    }


def openai_chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    return {
        "content": [
            _entry(each.token, each.logprob) | {"top_logprobs": [_entry(*one) for one in each.top]} for each in logprobs
        ]
    }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}
