"""Apply a decoder's own generation settings, which publishers put into its `generation_config`.

Settings that change scores, and `stop_strings`, act in every answer, as in transformers' `generate`. Settings that
choose tokens (`do_sample`, `temperature`, `top_p`, ...) do not act, because `Sampling` has them.
"""

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

# With the value of each that changes nothing, besides None.
_APPLIED: dict[str, Any] = {
    "sequence_bias": [],
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "stop_strings": [],
}
_REFUSED: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "num_beams": 1,
}


def generation_settings(config: Any) -> dict[str, Any]:
    """Return the settings in a `generation_config` that act in answers; raise ConfigError for those not supported."""
    for name, value in _given(config, _REFUSED).items():
        raise ConfigError(
            f"the decoder's generation_config has {name}={value!r}, which is not supported: give "
            "decoder_settings=False to leave its settings out"
        )
    return _given(config, _APPLIED)


def _given(config: Any, neutral: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in neutral}
    return {name: value for name, value in values.items() if value is not None and value != neutral[name]}


def generation_processors(own: Mapping[str, Any], ends: Collection[int], device: Any) -> list[LogitsProcessor]:
    """Return the logits processors of a decoder's own settings (no stop strings), in the order of transformers."""
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
