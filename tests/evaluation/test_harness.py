"""The evaluation harness, against answers made and scored one by one."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.answering import (
    BEST,
    DEFAULT,
    EXTRACTED,
    FULL,
    MIXED,
    NONE,
    SOFT,
    TRUNCATED,
    answer_with_systems,
    evaluation_stores,
)
from ctx_compress_rag.evaluation.baselines import truncate_passages
from ctx_compress_rag.evaluation.harness import compared_systems, evaluate
from ctx_compress_rag.evaluation.questions import questions_of
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.models.sentence_embedding import load_embedder
from ctx_compress_rag.text.templates import TEMPLATES, question_messages

QUESTIONS = questions_of(world_examples("test", 0, 3, max_turns=2, passages=(2,)))


def test_questions_take_the_first_of_each_example_first() -> None:
    examples = world_examples("test", 0, 3, max_turns=2)
    questions = questions_of(examples, limit=4)
    assert [q.question for q in questions] == [e.turns[0].question for e in examples] + [examples[0].turns[1].question]


def test_each_way_to_spend_the_budget_gets_as_many_tokens(tiny_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is that which is built here, from MiniLM's cosines of passages and sentences."""
    encoder = load_embedder()

    def shouted(passages: Sequence[str], tokenizer: Any, budget: int) -> list[str]:
        return truncate_passages([passage.upper() for passage in passages], tokenizer, budget)

    added: Any = {"shorteners": {"shouted": shouted}}
    monkeypatch.setattr(tiny_bundle, "config", tiny_bundle.config.model_copy(update={"text_share": 0.3}))
    systems = compared_systems(tiny_bundle, QUESTIONS, **added)
    assert systems == [FULL, NONE, SOFT, TRUNCATED, EXTRACTED, BEST, MIXED, DEFAULT, "shouted"]
    (_, prompts) = next(stores := evaluation_stores(tiny_bundle, QUESTIONS, (8,), **added))
    store, preparer = prompts.store, prompts.decoder.preparer
    for q in QUESTIONS:
        made = {system: prompts.make((system, 8), q) for system in systems[2:]}
        size = {system: preparer.count_chat_tokens(chat) for system, chat in made.items()}
        assert max(size.values()) <= size[SOFT] + 1 and size[EXTRACTED] > size[SOFT] - 6
        asked = encoder.encode(q.question)
        cosines = [float(encoder.similarity(asked, encoder.encode(passage))) for passage in q.passages]
        best = q.passages[cosines.index(max(cosines))]
        budget = len(preparer.token_ids("\n\n".join(mark_texts(store, q.passages, ratio=8))))
        options: dict[str, Any] = {"token_budget": budget, "question": q.question}
        chosen = {
            BEST: [best] if len(preparer.token_ids(best)) <= budget else mark_texts(store, [best], token_budget=budget),
            MIXED: mark_texts(store, q.passages, text_share=0.5, scores=cosines, **options),
            EXTRACTED: mark_texts(store, q.passages, text_share=1, **options),
            "shouted": shouted(q.passages, tiny_bundle.tokenizer, budget - len(preparer.token_ids("\n\n"))),
            DEFAULT: mark_texts(store, q.passages, ratio=8, question=q.question, scores=cosines),
        }
        for system, texts in chosen.items():
            assert made[system] == question_messages(TEMPLATES[0], "\n\n".join(filter(None, texts)), q.question)
    assert next(stores, None) is None
    one = questions_of(world_examples("test", 0, 2, max_turns=1, passages=(1,)))
    assert compared_systems(tiny_bundle, one) == [FULL, NONE, SOFT, TRUNCATED, EXTRACTED]


def test_a_prompt_of_two_systems_is_answered_once(tiny_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    generate = Decoder.generate

    def noted(decoder: Decoder, chats: Any, sampling: Sampling) -> Any:
        asked.extend(map(str, chats))
        return generate(decoder, chats, sampling)

    monkeypatch.setattr(Decoder, "generate", noted)
    for _, prompts in evaluation_stores(tiny_bundle, QUESTIONS, (8,)):
        keys = [(SOFT, 8), (BEST, 8), (DEFAULT, 8)]
        together = answer_with_systems(prompts, QUESTIONS, keys, Sampling(max_tokens=4))
        assert len(asked) == len(set(asked)) < 3 * len(QUESTIONS)
        for key in keys:
            assert together[key] == answer_with_systems(prompts, QUESTIONS, [key], Sampling(max_tokens=4))[key]


def test_the_engine_is_the_one_that_is_asked_for(tiny_bundle: Any) -> None:
    with pytest.raises(ConfigError, match="'nowhere'"):
        evaluate(tiny_bundle, QUESTIONS, (4,), engine="nowhere", sentences=False)


def test_by_default_the_ratios_that_the_bundle_was_trained_for(tiny_bundle: Any) -> None:
    scored = evaluate(tiny_bundle, QUESTIONS[:2], sentences=False, max_tokens=1)
    assert [s.ratio for s in scored if s.system == SOFT] == tiny_bundle.config.ratios
