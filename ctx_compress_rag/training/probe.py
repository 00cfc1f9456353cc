"""Scores of what is being trained, for a curve of score against training tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.data.config import ProbeConfig
from ctx_compress_rag.data.examples import Example, read_jsonl
from ctx_compress_rag.decoding.splice import Piece, splice
from ctx_compress_rag.metrics import exact_match, standard_error, token_f1
from ctx_compress_rag.text.prompt_tokenizer import PromptTokenizer, chat_text
from ctx_compress_rag.text.prompts import PASSAGE_SEPARATOR, PromptBuilder, messages
from ctx_compress_rag.training.loop import Probe

_ANSWER_TOKENS = 24
_AT_ONCE = 32

Reading = Callable[[Tensor], AbstractContextManager[Any]]
"""From where slots are (batch, length) to the decoder that reads them."""


def text_probe(decoder: Any, tokenizer: Any, config: ProbeConfig, template: str) -> Probe:
    """EM and F1 of a decoder that reads full text, and with no context."""
    questions = _questions(config)
    prompts = PromptTokenizer(tokenizer)

    def asked(context: str, example: Example) -> list[Piece]:
        chat = messages(template, prompts.as_text(context), prompts.as_text(example.turns[0].question))
        return prompts.encode([chat_text(tokenizer, chat)])

    def probe() -> dict[str, Any]:
        embed = decoder.get_input_embeddings()
        given = {
            "full text": [asked(PASSAGE_SEPARATOR.join(q.passages), q) for q in questions],
            "no context": [asked("", q) for q in questions],
        }
        return {
            name: _score(_answers(rows, embed, tokenizer, lambda _: nullcontext(decoder)), questions)
            for name, rows in given.items()
        }

    return probe


def soft_probe(bundle: Bundle, config: ProbeConfig) -> Probe:
    """EM and F1 of a bundle's decoder that reads soft contexts, at each ratio."""
    questions = _questions(config)
    prompts = PromptTokenizer(bundle.tokenizer)

    def row(example: Example, ratio: int) -> list[Piece]:
        context = PASSAGE_SEPARATOR.join(PromptBuilder.HOLE for _ in example.passages)
        chat = messages(bundle.config.asked_by, context, prompts.as_text(example.turns[0].question))
        first, *texts = prompts.encode(chat_text(bundle.tokenizer, chat).split(PromptBuilder.HOLE))
        slots = [bundle.embed(soft) for soft in bundle.compress(example.passages, ratio)]
        dtype = bundle.backbone.embeddings.weight.dtype
        return [first, *(piece for pair in zip((s.to(dtype) for s in slots), texts, strict=True) for piece in pair)]

    def probe() -> dict[str, Any]:
        return {
            f"soft context {ratio}x": _score(
                _answers(
                    [row(q, ratio) for q in questions],
                    bundle.backbone.embeddings,
                    bundle.tokenizer,
                    bundle.soft_decoder,
                ),
                questions,
            )
            for ratio in config.ratios
        }

    return probe


def _questions(config: ProbeConfig) -> list[Example]:
    """Questions with an answer, evenly spread over the file."""
    examples = [e for e in read_jsonl(config.file, unanswerable=True) if e.turns[0].answers]
    step = max(1, len(examples) // config.questions)
    return examples[::step][: config.questions]


def _answers(rows: Sequence[list[Piece]], embed: Any, tokenizer: Any, reading: Reading) -> list[str]:
    """Greedy answers to prompts given as pieces."""
    lengths = [sum(len(piece) for piece in row) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    answers: dict[int, str] = {}
    settings = GenerationConfig(
        max_new_tokens=_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for start in range(0, len(order), _AT_ONCE):
        batch = order[start : start + _AT_ONCE]
        spliced = splice(embed, [rows[i] for i in batch])
        with torch.no_grad(), reading(spliced.slot_mask) as model:
            ids = model.generate(
                inputs_embeds=spliced.inputs_embeds,
                attention_mask=spliced.attention_mask,
                generation_config=settings,
            )
        answers |= dict(zip(batch, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True))
    return [answers[i].strip() for i in range(len(rows))]


def _score(answers: Sequence[str], questions: Sequence[Example]) -> dict[str, float]:
    wanted = [question.turns[0].answers for question in questions]
    f1 = [token_f1(answer, right) for answer, right in zip(answers, wanted, strict=True)]
    exact = [exact_match(answer, right) for answer, right in zip(answers, wanted, strict=True)]
    return {
        "exact_match": round(sum(exact) / len(exact), 4),
        "f1": round(sum(f1) / len(f1), 4),
        "f1_error": round(standard_error(f1), 4),
    }
