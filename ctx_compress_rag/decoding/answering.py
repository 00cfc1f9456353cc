"""Choose an answer's tokens one by one from a model's scores, and find where the answer's text ends."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ctx_compress_rag.decoding.filters import (
    Filter,
    JsonFilter,
    QuoteFilter,
    Scores,
    generation_filters,
    generation_settings,
)
from ctx_compress_rag.decoding.sampling import FinishReason, Generation, LogprobRecorder, Sampling
from ctx_compress_rag.prompt import Prompt

_COLDEST = 1e-6
"""Below this temperature the likeliest token is always taken, because differences of float32 scores are larger.

Scores that are divided by a much smaller number would all become infinite.
"""


class GrowingAnswer:
    """The answer to one prompt, which grows by one token at a time; an engine makes one for each prompt.

    `settings` is the decoder's `generation_config`. `window` is the most positions of prompt and answer together, or
    None for no limit. `on_text` is called with each new piece of text as soon as no later token can change that piece.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        tokenizer: Any,
        settings: Any,
        window: int | None,
        on_text: Callable[[str], object] | None = None,
    ) -> None:
        self.ids: list[int] = []  # end token included
        self.limit = sampling.max_tokens if window is None else min(sampling.max_tokens, window - prompt.length)
        own = generation_settings(settings) if sampling.decoder_settings else {}
        stop = own.pop("stop_strings", ())
        self._stop = (*sampling.stop, *([stop] if isinstance(stop, str) else stop))
        special, ends = tokenizer.get_added_vocab(), settings.eos_token_id
        ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        # A stop string that is a special token ends it as a token, since no text has it.
        self.end_ids = ends - {None} | {special[each] for each in self._stop if each in special}
        self._prompt = prompt
        self._text = _Text(tokenizer)
        self._recorder = LogprobRecorder(tokenizer, sampling.top_logprobs) if sampling.logprobs else None
        self._filters = generation_filters(own, self.end_ids)
        if sampling.json_schema is not None:
            self._filters.append(JsonFilter(sampling.json_schema, tokenizer, self.end_ids))
        if prompt.quotable is not None:
            self._filters.append(QuoteFilter(prompt.quotable, self.end_ids, self.limit))
        if sampling.temperature >= _COLDEST:
            self._filters += _sampling_filters(sampling)
        self._on_text = on_text
        self._sent = 0

    def take(self, scores: Any, likeliest: int | None = None) -> Generation | None:
        """Choose a token by scores (vocabulary,), perhaps of known argmax; return the Generation if that ends it."""
        token = likeliest
        if token is None or self._filters:
            changed = _array(scores)
            for change in self._filters:
                changed = change(self.ids, changed)
            token = int(changed.argmax())
        self.ids.append(token)
        if self._recorder is not None:
            self._recorder.take(token, _array(scores))
        ended, full = token in self.end_ids, len(self.ids) >= self.limit
        read = self.ids[:-1] if ended else self.ids
        if not (ended or full):
            if not (self._stop or self._on_text):
                return None
            begun = len(self._text.certain)
            text = self._text.so_far(read)
            if all(text.find(stop, max(0, begun - len(stop))) < 0 for stop in self._stop):
                self._send(text[: self._certain(text)])
                return None
        text = self._text.decode(read)
        cut = min((at for at in map(text.find, self._stop) if at >= 0), default=None)
        if cut is not None:
            text, ended = text[:cut], True
        if not (ended or full):
            return None
        self._send(text)
        logprobs = None if self._recorder is None else self._recorder.of_text(self.ids, text)
        reason: FinishReason = "stop" if ended else "length"
        return Generation(text, self._prompt.length, self._prompt.slots, len(self.ids), reason, logprobs)

    def _send(self, certain: str) -> None:
        if self._on_text is not None and len(certain) > self._sent:
            self._on_text(certain[self._sent :])
            self._sent = len(certain)

    def _certain(self, text: str) -> int:
        """Return the length of the beginning of `text` that no later token can change."""
        text = text.rstrip("\ufffd")  # bytes of a character whose other bytes are still to come
        held = (n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        return len(text) - max(held, default=0)


class _Text:
    """The text of a growing list of token ids, of which each call decodes only the newest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.certain = ""  # the text of all ids before `_end`, which no later token can change
        self._start = self._end = 0  # ids between these give the next ones their context, such as a space

    def so_far(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, which must begin with the ids of the last call."""
        before = self.decode(ids[self._start : self._end])
        text = self.certain + self.decode(ids[self._start :])[len(before) :]
        if not text.endswith("\ufffd"):  # else bytes of a character whose other bytes are still to come
            if len(text) > len(self.certain):  # else they show nothing, and are no context
                self._start = self._end
            self.certain, self._end = text, len(ids)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _array(scores: Any) -> Scores:
    return scores if isinstance(scores, np.ndarray) else scores.float().cpu().numpy()


def _sampling_filters(sampling: Sampling) -> list[Filter]:
    """Return the filters after which the likeliest token is a random sample, as `sampling` says."""
    temperature, most = np.float32(sampling.temperature), sampling.top_k
    # With a generator of the answer's own, a seed gives the same answer on any device and in any batch.
    random = np.random.default_rng(None if sampling.seed is None else sampling.seed % 2**64)

    def noisy(ids: Sequence[int], scores: Scores) -> Scores:
        # -log of an exponential variable is Gumbel noise, with which argmax samples from softmax; the limit keeps -inf
        # (excluded tokens) from becoming NaN.
        noise = random.standard_exponential(len(scores), np.float32)
        return scores - np.log(np.maximum(noise, np.finfo(np.float32).tiny))

    filters: list[Filter] = [lambda ids, scores: scores / temperature]
    if most > 0:
        filters.append(lambda ids, scores: np.where(scores < np.sort(scores)[-min(most, len(scores))], -np.inf, scores))
    if sampling.top_p < 1:
        filters.append(partial(_likeliest, sampling.top_p))
    return [*filters, noisy]


def _likeliest(share: float, ids: Sequence[int], scores: Scores) -> Scores:
    """Keep the likeliest tokens, one at least, that together have a share of the probability."""
    order = np.argsort(scores, kind="stable")
    shares = np.exp(scores[order] - scores.max())
    unlikely = np.cumsum(shares / shares.sum()) <= 1 - share
    unlikely[-1] = False
    changed = scores.copy()
    changed[order[unlikely]] = -np.inf
    return changed
