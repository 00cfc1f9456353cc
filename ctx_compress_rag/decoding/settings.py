"""A decoder's own generation settings, which publishers put into its `generation_config`.

Those that change scores, and `stop_strings`, act in every answer, as in transformers' `generate`. Those that choose
tokens (`do_sample`, `temperature`, `top_p`, ...) do not: `Sampling` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import (
    LogitsProcessor,
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
}
_APPLIED = (
    "sequence_bias",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "stop_strings",
)
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


def own_settings(config: Any) -> dict[str, Any]:
    """The settings of a model's `generation_config` that change scores, and its `stop_strings`.

    Raises:
        ConfigError: it asks for something that cannot be done here.
    """
    for name in _REFUSED:
        if (value := _given(config, name)) is not None:
            raise ConfigError(
                f"the decoder's generation_config has {name}={value!r}, which is not supported: give "
                "decoder_settings=False to leave its settings out"
            )
    return {name: value for name in _APPLIED if (value := _given(config, name)) is not None}


def own_processors(own: Mapping[str, Any], ends: Collection[int], device: Any) -> list[LogitsProcessor]:
    """The logits processors of a decoder's own settings, in the order of transformers.

    Args:
        own: what `own_settings` found, without stop strings.
        ends: tokens that end an answer.
        device: the scores' device.
    """
    made: dict[str, Callable[[Any], LogitsProcessor]] = {
        "sequence_bias": SequenceBiasLogitsProcessor,
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: NoBadWordsLogitsProcessor(words, sorted(ends) or None),
        "min_new_tokens": lambda count: MinNewTokensLengthLogitsProcessor(0, count, sorted(ends), device=str(device)),
        "suppress_tokens": lambda ids: SuppressTokensLogitsProcessor(ids, device=str(device)),
        "begin_suppress_tokens": lambda ids: SuppressTokensAtBeginLogitsProcessor(ids, 0, device=str(device)),
    }
    return [made[name](value) for name, value in own.items()]


def _given(config: Any, name: str) -> Any:
    """A setting's value; None if it is absent or changes nothing."""
    value = getattr(config, name, None)
    return None if value is None or value == _NEUTRAL.get(name) or value == [] else value
