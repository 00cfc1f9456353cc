"""Scores of what is being trained, for a curve of score against training tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.config import ValidationConfig
from ctx_compress_rag.data.examples import Example, read_jsonl, spread
from ctx_compress_rag.decoding.batches import generate, in_batches
from ctx_compress_rag.decoding.generation import Generation, Sampling
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation.statistics import standard_error
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.text.answers import exact_match, token_f1
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR
from ctx_compress_rag.training.engine.loop import Validate
from ctx_compress_rag.training.prompts import PromptBuilder

_AT_ONCE = 32

Reading = Callable[[Tensor], AbstractContextManager[Any]]
"""From where slots are (batch, length) to the decoder that reads them."""


def validate_text(
    decoder: Any, tokenizer: Any, config: ValidationConfig, template: str, answer_tokens: int
) -> Validate:
    """EM and F1 of a decoder that reads full text, and with no context; `answer_tokens` is the longest answer."""
    questions, builder = _questions(config), PromptBuilder(tokenizer)
    given = {
        "full text": [
            builder.text_question(template, PASSAGE_SEPARATOR.join(q.passages), _asked(q)) for q in questions
        ],
        "no context": [builder.text_question(template, "", _asked(q)) for q in questions],
    }

    def validate() -> dict[str, Any]:
        embed = decoder.get_input_embeddings()
        return {
            name: _score(_answers(prompts, embed, tokenizer, lambda _: nullcontext(decoder), answer_tokens), questions)
            for name, prompts in given.items()
        }

    return validate


def validate_slots(bundle: Bundle, config: ValidationConfig) -> Validate:
    """EM and F1 of a bundle's decoder that reads soft contexts, at each ratio."""
    for ratio in config.ratios:
        bundle.check_ratio(ratio)  # now, not after the steps before the first validation
    questions, asking = _questions(config), bundle.config
    builder = PromptBuilder(bundle.tokenizer, separator=asking.separator, answer_prefix=asking.answer_prefix)
    asked = [builder.question(bundle.config.template, builder.holes(len(q.passages)), _asked(q)) for q in questions]

    def at(ratio: int) -> list[str]:
        softs = [bundle.compress(q.passages, ratio) for q in questions]
        prompts = [p.filled([bundle.embed(soft) for soft in own]) for p, own in zip(asked, softs, strict=True)]
        longest = bundle.config.answer_tokens
        return _answers(prompts, bundle.backbone.embeddings, bundle.tokenizer, bundle.soft_decoder, longest)

    def validate() -> dict[str, Any]:
        return {f"soft context {ratio}x": _score(at(ratio), questions) for ratio in config.ratios}

    return validate


def _asked(example: Example) -> str:
    return example.turns[0].question


def _questions(config: ValidationConfig) -> list[Example]:
    """Questions with an answer, evenly spread over the file."""
    examples = [e for e in read_jsonl(config.file, unanswerable=True) if e.turns[0].answers]
    if not examples:
        raise DataError(f"no question of the validation's {config.file} has an answer: give it some that have")
    return spread(examples, config.questions)


def _answers(prompts: Sequence[Prompt], embed: Any, tokenizer: Any, reading: Reading, longest: int) -> list[str]:
    """Greedy answers."""

    def run(numbers: Sequence[int]) -> list[Generation]:
        own = [prompts[i] for i in numbers]
        batch = splice(embed, own)
        with torch.no_grad(), reading(batch.slot_mask) as model:
            return generate(model, batch, own, tokenizer, Sampling(longest), None)

    return [generation.text.strip() for generation in in_batches(prompts, _AT_ONCE, run)]


def _score(answers: Sequence[str], questions: Sequence[Example]) -> dict[str, float]:
    wanted = [question.turns[0].answers for question in questions]
    f1 = [token_f1(answer, right) for answer, right in zip(answers, wanted, strict=True)]
    exact = [exact_match(answer, right) for answer, right in zip(answers, wanted, strict=True)]
    return {
        "exact_match": round(sum(exact) / len(exact), 4),
        "f1": round(sum(f1) / len(f1), 4),
        "f1_error": round(standard_error(f1), 4),
    }
