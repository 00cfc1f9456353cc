"""The evaluation harness, against answers made and scored one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.answering import BUDGETED, FULL, NONE, SOFT, TRUNCATED, answer
from ctx_compress_rag.evaluation.harness import evaluate
from ctx_compress_rag.evaluation.questions import questions_of
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.models.sentence_embedding import load_minilm
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import token_f1
from ctx_compress_rag.text.templates import TEMPLATES, messages
from helpers.ram import plain_ids

QUESTIONS = questions_of(world_examples("test", 0, 3, max_turns=2, passages=(2,)))


@pytest.fixture(scope="module")
def scores(tiny_bundle: Any) -> Any:
    return evaluate(tiny_bundle, QUESTIONS, (4, 16), max_tokens=6, batch_size=2, progress=False)


def test_questions_take_the_first_of_each_example_first() -> None:
    examples = world_examples("test", 0, 3, max_turns=2)
    questions = questions_of(examples, limit=4)
    assert [q.question for q in questions] == [e.turns[0].question for e in examples] + [examples[0].turns[1].question]


def test_every_system_is_scored_at_equal_budgets(tiny_bundle: Any, scores: Any) -> None:
    assert [(s.system, s.ratio) for s in scores] == [
        (FULL, None),
        (NONE, None),
        (SOFT, 4),
        (TRUNCATED, 4),
        (SOFT, 16),
        (TRUNCATED, 16),
    ]
    by = {(s.system, s.ratio): s for s in scores}
    for ratio in (4, 16):
        slots = [sum(-(-len(plain_ids(tiny_bundle, p)) // ratio) for p in q.passages) for q in QUESTIONS]
        soft = by[SOFT, ratio].prompt_tokens - by[NONE, None].prompt_tokens
        # Beside the slots a prompt with context has the separator between its two passages.
        assert np.mean(slots) <= soft <= np.mean(slots) + 8
        assert by[TRUNCATED, ratio].prompt_tokens <= by[SOFT, ratio].prompt_tokens + 4


def test_full_text_scores_are_those_of_single_answers(tiny_bundle: Any, scores: Any) -> None:
    decoder = Decoder(tiny_bundle)
    f1 = []
    for q in QUESTIONS:
        chat = messages(TEMPLATES[0], "\n\n".join(q.passages), q.question)
        f1.append(token_f1(decoder.generate([chat], Sampling(max_tokens=6))[0].text, q.answers))
    assert scores[0].f1 == pytest.approx(np.mean(f1))


def test_a_token_budget_is_scored_with_as_many_tokens_and_the_cosines_of_passages(
    tiny_bundle: Any, tmp_path: Path
) -> None:
    encoder = load_minilm()
    options: dict[str, Any] = {"encoder": encoder, "max_tokens": 6, "progress": False}
    answers = answer(tiny_bundle, QUESTIONS, (16,), [NONE, SOFT, BUDGETED], **options)
    assert answers[BUDGETED, 16].prompt_tokens <= answers[SOFT, 16].prompt_tokens
    store = SoftContextStore(tmp_path, tiny_bundle)
    decoder = Decoder(tiny_bundle, store)
    for q, given in zip(QUESTIONS, answers[BUDGETED, 16].texts, strict=True):
        asked = encoder.encode(q.question)
        cosines = [float(encoder.similarity(asked, encoder.encode(passage))) for passage in q.passages]
        budget = sum(-(-len(plain_ids(tiny_bundle, passage)) // 16) for passage in q.passages)
        texts = mark(store, q.passages, token_budget=budget, scores=cosines)
        chat = messages(TEMPLATES[0], "\n\n".join(texts), q.question)
        assert given == decoder.generate([chat], Sampling(max_tokens=6))[0].text.strip()
    with pytest.raises(ConfigError, match=f"{BUDGETED} needs a sentence encoder"):
        answer(tiny_bundle, QUESTIONS, (16,), [BUDGETED])
    one = questions_of(world_examples("test", 0, 2, max_turns=1, passages=(1,)))
    for questions, there in ((QUESTIONS, True), (one, False)):
        assert (BUDGETED in {s.system for s in evaluate(tiny_bundle, questions, (16,), **options)}) is there
