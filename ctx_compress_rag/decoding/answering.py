"""What happens to a batch at each token: the choice of the token, and whether a text ends there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ctx_compress_rag.decoding.generation import FinishReason, Generation, Sampling
from ctx_compress_rag.decoding.logprobs import Recorder
from ctx_compress_rag.decoding.quoting import QuoteProcessor
from ctx_compress_rag.decoding.settings import own_processors, own_settings
from ctx_compress_rag.decoding.structured import JsonProcessor
from ctx_compress_rag.prompt import Prompt

_COLDEST = 1e-6
"""Below this temperature the likeliest token is always taken: float32 logits that differ do so by more than this.

Divided by a much smaller number, they would all become infinite.
"""


class Answering(StoppingCriteria):
    """A batch that is being answered: ends its rows, and passes on the text of row 0 as soon as it is final.

    Args:
        model: a transformers causal LM.
        tokenizer: the model's.
        sampling: how tokens are chosen and when to end.
        prompts: what each row answers.
        window: positions that the model can read; None means any number.
        on_text: called with each new piece of row 0; never part of a stop string or of a character.
        canceled: called at every token; True ends all rows.

    Raises:
        ConfigError: the JSON schema cannot be enforced, or a setting of the decoder is not supported.

    Attributes:
        processors: after these logits processors the likeliest token is the one to take, also when sampling.
        limits: most new tokens of each row.
        end_ids: tokens that end a row: the tokenizer's, the model's, and special stop strings, which no text has.
        done: the answer of each row that has ended.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        window: int | None,
        on_text: Callable[[str], object] | None = None,
        canceled: Callable[[], bool] = lambda: False,
    ) -> None:
        own = own_settings(model.generation_config) if sampling.decoder_settings else {}
        stop = own.pop("stop_strings", ())
        self._stop = (*sampling.stop, *([stop] if isinstance(stop, str) else stop))
        special, ends = tokenizer.get_added_vocab(), model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        self.end_ids = ends - {None} | {special[each] for each in self._stop if each in special}
        self.limits = [
            sampling.max_new_tokens if window is None else min(sampling.max_new_tokens, window - prompt.length)
            for prompt in prompts
        ]
        self._recorder = Recorder(tokenizer, sampling.top_logprobs, len(prompts)) if sampling.logprobs else None
        self.processors = LogitsProcessorList([] if self._recorder is None else [self._recorder])
        self.processors += own_processors(own, self.end_ids, model.device)
        if sampling.json_schema is not None:
            self.processors.append(JsonProcessor(sampling.json_schema, tokenizer, self.end_ids, len(prompts)))
        if sampling.extractive:
            quotables = [prompt.quotable for prompt in prompts if prompt.quotable is not None]
            self.processors.append(QuoteProcessor(quotables, self.end_ids, self.limits))
        if sampling.temperature >= _COLDEST:
            self.processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self.processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self.processors.append(TopPLogitsWarper(sampling.top_p))
            self.processors.append(_GumbelNoise(sampling.seed, len(prompts)))
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._on_text = on_text
        self._canceled = canceled
        self._sent = 0
        self.done: list[Generation | None] = [None for _ in prompts]

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Which rows end. `input_ids` (rows, new tokens) holds no prompt, because prompts come as embeddings."""
        generated: Tensor = input_ids
        if self._canceled():
            return torch.ones(generated.shape[0], dtype=torch.bool, device=generated.device)
        for row, ids in enumerate(generated.tolist()):
            if self.done[row] is None:
                self.look(row, ids)
        return torch.tensor([row is not None for row in self.done], device=generated.device)

    def look(self, row: int, ids: Sequence[int]) -> None:
        """Follow one row by all its new tokens so far."""
        if self._recorder is not None:
            self._recorder.take(row, ids[-1])
        ended, full = ids[-1] in self.end_ids, len(ids) >= self.limits[row]
        if not (ended or full or self._stop or self._on_text):
            return
        read = ids[:-1] if ended else ids
        text = str(self._tokenizer.decode(read, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        cut = min((at for at in map(text.find, self._stop) if at >= 0), default=None)
        if cut is not None:
            text, ended = text[:cut], True
        if ended or full:
            logprobs = None if self._recorder is None else self._recorder.of_text(row, ids, text)
            prompt = self._prompts[row]
            reason: FinishReason = "stop" if ended else "length"
            self.done[row] = Generation(text, prompt.length, prompt.slots, len(ids), reason, logprobs)
        if self._on_text is not None and row == 0:
            safe = len(text) if self.done[row] else self._certain(text)
            if safe > self._sent:
                self._on_text(text[self._sent : safe])
                self._sent = safe

    def _certain(self, text: str) -> int:
        """Length of the beginning of `text` that no later token can change."""
        text = text.rstrip("\ufffd")  # bytes of a character whose other bytes are still to come
        held = (n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        return len(text) - max(held, default=0)


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, so that argmax samples from softmax.

    transformers samples with torch's global random state, which other threads (such as a stream's) also
    use, so that none is reproducible. Here each row has its own generator, on the CPU, so that a seed
    gives the same result on any device and in any batch.
    """

    def __init__(self, seed: int | None, rows: int) -> None:
        self._generators = [torch.Generator() for _ in range(rows)]
        for generator in self._generators:
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        noise = torch.stack([torch.empty(scores.shape[-1]).exponential_(generator=g) for g in self._generators])
        # -log of an exponential variable is Gumbel; the clamp keeps -inf (excluded tokens) from becoming NaN.
        return scores - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().to(scores.device)
