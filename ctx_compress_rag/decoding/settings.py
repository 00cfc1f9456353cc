"""A decoder's own generation settings, which publishers put into its `generation_config`.

Those that change scores act in every answer, as in transformers' `generate`. Those that choose tokens (`do_sample`,
`temperature`, `top_p`, ...) do not: `Sampling` has them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from ctx_compress_rag.errors import ConfigError

_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
}
_REFUSED = (
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "guidance_scale",
    "min_length",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "constraints",
    "watermarking_config",
    "penalty_alpha",
    "num_beams",
)


def of_decoder(settings: Any, ends: Collection[int], device: Any) -> LogitsProcessorList:
    """Logits processors that a decoder's generation config asks for.

    Args:
        settings: the model's `generation_config`.
        ends: tokens that end an answer.
        device: the scores' device.

    Raises:
        ConfigError: it asks for something that cannot be done here.
    """
    given = {name: _given(settings, name) for name in _REFUSED}
    if refused := sorted(name for name, value in given.items() if value is not None):
        raise ConfigError(
            f"the decoder's generation_config has {refused[0]}={given[refused[0]]!r}, which is not supported: give "
            "decoder_settings=False to leave its settings out"
        )
    processors = LogitsProcessorList()
    if (bias := _given(settings, "sequence_bias")) is not None:
        processors.append(SequenceBiasLogitsProcessor(bias))
    if (penalty := _given(settings, "repetition_penalty")) is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if (size := _given(settings, "no_repeat_ngram_size")) is not None:
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if (words := _given(settings, "bad_words_ids")) is not None:
        processors.append(NoBadWordsLogitsProcessor(words, sorted(ends) or None))
    if (tokens := _given(settings, "min_new_tokens")) is not None:
        processors.append(MinNewTokensLengthLogitsProcessor(0, tokens, sorted(ends), device=str(device)))
    if (tokens := _given(settings, "suppress_tokens")) is not None:
        processors.append(SuppressTokensLogitsProcessor(tokens, device=str(device)))
    if (tokens := _given(settings, "begin_suppress_tokens")) is not None:
        processors.append(SuppressTokensAtBeginLogitsProcessor(tokens, 0, device=str(device)))
    return processors


def _given(settings: Any, name: str) -> Any:
    """A setting's value; None if it is absent or changes nothing."""
    value = getattr(settings, name, None)
    return None if value is None or value == _NEUTRAL.get(name) or value == [] else value
