"""Apply a decoder's own generation settings, which publishers put into its `generation_config`.

Settings that change scores, and `stop_strings`, act in every answer, as in transformers' `generate`. Settings that
choose tokens (`do_sample`, `temperature`, `top_p`, ...) do not act, because `Sampling` has them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import ConfigError

Scores = NDArray[np.float32]
Filter = Callable[[Sequence[int], Scores], Scores]
"""A function of an answer's ids so far and the scores (vocabulary,) of its next token, which returns new scores."""

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
            f"the decoder's generation_config has {name}={value!r}, not supported here: give decoder_settings=False"
        )
    return _given(config, _APPLIED)


def _given(config: Any, neutral: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in neutral}
    return {name: value for name, value in values.items() if value is not None and value != neutral[name]}


def generation_filters(own: Mapping[str, Any], ends: Collection[int]) -> list[Filter]:
    """Return the filters of a decoder's own settings in transformers' order; they see an answer without its prompt."""
    endings = sorted(ends)
    made: dict[str, Callable[[Any], Filter]] = {
        "sequence_bias": lambda biases: _biased(biases.items() if isinstance(biases, Mapping) else biases),
        "repetition_penalty": lambda penalty: partial(_repeated_less, penalty),
        "no_repeat_ngram_size": lambda size: partial(_without_repeats, size),
        "bad_words_ids": lambda words: _biased((ids, -np.inf) for ids in words if list(ids) not in [[e] for e in ends]),
        "min_new_tokens": lambda count: lambda ids, scores: _without(scores, endings if len(ids) < count else []),
        "suppress_tokens": lambda tokens: lambda ids, scores: _without(scores, tokens),
        "begin_suppress_tokens": lambda tokens: lambda ids, scores: _without(scores, [] if ids else tokens),
    }
    return [made[name](value) for name, value in own.items()]


def _without(scores: Scores, tokens: Collection[int]) -> Scores:
    changed = scores.copy()
    changed[[token for token in tokens if token < len(scores)]] = -np.inf  # GLM 4's config names some beyond
    return changed


def _repeated_less(penalty: float, ids: Sequence[int], scores: Scores) -> Scores:
    changed, said = scores.copy(), list(set(ids))
    changed[said] = np.where(scores[said] < 0, scores[said] * np.float32(penalty), scores[said] / np.float32(penalty))
    return changed


def _without_repeats(size: int, ids: Sequence[int], scores: Scores) -> Scores:
    """Forbid each token that would end a sequence of `size` tokens which the answer has already."""
    last, starts = list(ids[len(ids) - size + 1 :]), range(len(ids) - size + 1)
    return _without(scores, [ids[at + size - 1] for at in starts if list(ids[at : at + size - 1]) == last])


def _biased(biases: Iterable[tuple[Sequence[int], float]]) -> Filter:
    """Add each bias to the score of its sequence's last token, where the answer ends with the tokens before it."""
    wanted = [(list(ids), bias) for ids, bias in biases]

    def biased(ids: Sequence[int], scores: Scores) -> Scores:
        changed = scores.copy()
        for (*before, last), bias in wanted:
            if not before or (len(ids) > len(before) and list(ids[-len(before) :]) == before):
                changed[last] += np.float32(bias)
        return changed

    return biased
