"""The harness, against answers made and scored one by one; several sets; answers kept while they are given."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import Example, Turn, spread_examples, write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.evaluation import answering, harness
from ctx_compress_rag.evaluation.answering import (
    BEST,
    DEFAULT,
    EXTRACTED,
    FULL,
    MIXED,
    NONE,
    SOFT,
    TRUNCATED,
    AnswerLog,
    Answers,
    SystemAnswers,
    answer_questions,
    answer_with_systems,
    evaluation_stores,
    truncate_passages,
)
from ctx_compress_rag.evaluation.harness import (
    compared_systems,
    evaluate,
    evaluate_sets,
    fitting_questions,
    question_sets,
    score_table,
)
from ctx_compress_rag.evaluation.questions import Question, questions_of
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.text.answers import NO_ANSWER, contains_answer, exact_match, mentions_answer, token_f1
from ctx_compress_rag.text.templates import TEMPLATES, question_messages
from helpers.methods import minilm

QUESTIONS = questions_of(world_examples("test", 0, 3, max_turns=1, passages=(2,)))


def test_questions_take_the_first_of_each_example_first() -> None:
    examples = world_examples("test", 0, 3, max_turns=2)
    questions = questions_of(examples, limit=4)
    assert [q.question for q in questions] == [e.turns[0].question for e in examples] + [examples[0].turns[1].question]


def test_each_way_to_spend_the_budget_gets_as_many_tokens(tiny_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is that which is built here, from MiniLM's cosines of passages and sentences."""
    encoder = minilm()
    monkeypatch.setattr(tiny_bundle, "config", tiny_bundle.config.model_copy(update={"text_share": 0.3}))
    systems = compared_systems(tiny_bundle, QUESTIONS)
    assert systems == [FULL, NONE, SOFT, TRUNCATED, EXTRACTED, BEST, MIXED, DEFAULT]
    (_, prompts) = next(stores := evaluation_stores(tiny_bundle, QUESTIONS, (8,)))
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
            BEST: mark_texts(store, [best], token_budget=budget),
            MIXED: mark_texts(store, q.passages, text_share=0.5, scores=cosines, **options),
            # Without the markers without slots, which say whose sentences they are.
            EXTRACTED: [re.sub(r" \[\[.*\]\]", "", t) for t in mark_texts(store, q.passages, text_share=1, **options)],
            TRUNCATED: truncate_passages(q.passages, tiny_bundle.tokenizer, budget - len(preparer.token_ids("\n\n"))),
            DEFAULT: mark_texts(store, q.passages, ratio=8, question=q.question, scores=cosines),
        }
        for system, texts in chosen.items():
            assert made[system] == question_messages(TEMPLATES[0], "\n\n".join(filter(None, texts)), q.question)
    assert next(stores, None) is None
    one = questions_of(world_examples("test", 0, 2, max_turns=1, passages=(1,)))
    assert compared_systems(tiny_bundle, one) == [FULL, NONE, SOFT, TRUNCATED, EXTRACTED]
    assert compared_systems(tiny_bundle, QUESTIONS, sentences=False) == [FULL, NONE, SOFT, TRUNCATED]


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


def test_the_engine_is_the_one_asked_for_and_the_ratios_those_trained_for(tiny_bundle: Any) -> None:
    with pytest.raises(ConfigError, match="'nowhere'"):
        evaluate(tiny_bundle, QUESTIONS, (4,), engine="nowhere", sentences=False)
    scored = evaluate(tiny_bundle, QUESTIONS[:2], sentences=False, max_tokens=1)
    assert [s.ratio for s in scored if s.system == SOFT] == tiny_bundle.config.ratios


def test_unanswerable_questions_are_scored_by_who_declines_them() -> None:
    rng = np.random.default_rng(0)
    questions = [Question(("p",), f"q{i}", ("red fox",) if i % 3 else ()) for i in range(30)]
    said = ["red fox", "fox", "a dog", NO_ANSWER, ""]
    answers = {key: Answers([said[i] for i in rng.integers(5, size=30)], [9] * 30) for key in ((NONE, None), (SOFT, 4))}
    answers[FULL, None] = Answers(["red fox"] * 30, [9] * 30)
    for score in harness.score_answers(questions, answers):
        texts = answers[score.system, score.ratio].texts
        asked = [(t, q.answers) for t, q in zip(texts, questions, strict=True) if q.answers]
        rest = [t for t, q in zip(texts, questions, strict=True) if not q.answers]
        exact = np.array([exact_match(t, a) for t, a in asked])
        assert (score.normalized is None) == (score.system in (FULL, NONE))
        assert score.contains == pytest.approx(np.mean([contains_answer(t, a) for t, a in asked]))
        assert score.f1 == pytest.approx(np.mean([token_f1(t, a) for t, a in asked]))
        assert score.exact_match == pytest.approx(exact.mean())
        assert score.exact_match_error == pytest.approx(exact.std(ddof=1) / len(exact) ** 0.5)
        assert score.declined == pytest.approx(np.mean([t in ("", NO_ANSWER) for t in rest]))
        assert score.wrongly_declined == pytest.approx(np.mean([t in ("", NO_ANSWER) for t, _ in asked]))
        assert f"{score.declined:.3f} ±" in score_table([score])


def test_several_files_are_scored_apart(tiny_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        write_jsonl(tmp_path / f"set{number}.jsonl", world_examples("test", number, 3, max_turns=1, passages=(1,)))
    with (tmp_path / "set2.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Why?", "answers": [], "context": "Nobody knows."}) + "\n")
        file.write(json.dumps({"question": "Why?", "answers": ["so"], "context": "word " * 2000}) + "\n")
    files = [str(tmp_path / f"set{n}.jsonl") for n in (1, 2)]
    sets = question_sets(files, 9)
    assert {name: len(questions) for name, questions in sets.items()} == {"set1": 3, "set2": 5}
    assert len(fitting_questions(tiny_bundle, sets["set2"])) == 4
    scored = evaluate_sets(tiny_bundle, sets, (4, 32), tmp_path / "out", sentences=False, max_tokens=4)
    assert "3 questions from set1" in scored["set1"].text and scored["set1"].scores[0].declined is None
    assert "4 questions from set2 (1 are longer than the window); not trained for 32x" in scored["set2"].text
    saved = json.loads((tmp_path / "out" / "set2" / "scores.json").read_text())
    assert (saved["questions"], saved["too_long"], saved["fingerprint"]) == (4, 1, tiny_bundle.fingerprint)
    assert all(row["declined"] is not None for row in saved["scores"])
    monkeypatch.setattr(type(tiny_bundle.backbone), "window", None)  # as Mamba's, without a limit
    assert fitting_questions(tiny_bundle, sets["set2"]) == sets["set2"]
    with pytest.raises(DataError, match="one: 1 questions"):
        evaluate_sets(tiny_bundle, {"one": sets["set2"][-2:]}, (4,), tmp_path)
    with pytest.raises(DataError, match="'set1'"):
        question_sets([files[0], files[0]], 9)


def test_a_question_s_passage_stands_among_its_nearest_neighbors(tmp_path: Path) -> None:
    examples = world_examples("test", 0, 12, max_turns=1, passages=(1,))
    [first] = examples[0].passages
    examples.append(Example((first, f"{first} It is so."), (Turn("so?", ("yes",)),)))  # the second has another's answer
    examples.append(Example(tuple(f"own {n}" for n in range(6)), (Turn("own?", ("a",)),)))
    write_jsonl(tmp_path / "set.jsonl", examples)
    [asked] = question_sets([str(tmp_path / "set.jsonl")], 1000, passages=4).values()
    assert [q.question for q in asked] == [e.turns[0].question for e in examples]
    assert asked[-1].passages == examples[-1].passages
    written = list(dict.fromkeys(passage for e in examples for passage in e.passages))
    vectors = dict(zip(written, embed_passages(written), strict=True))
    places = set()
    for q, example in zip(asked[:-1], examples, strict=False):
        own = example.passages
        others = [p for p in written if p not in own and not mentions_answer(p, q.answers)]
        nearest = sorted(others, key=lambda other: -float(vectors[own[0]] @ vectors[other]))[: 4 - len(own)]
        assert sorted(q.passages) == sorted([*own, *nearest])
        places.add(q.passages.index(own[0]))
    assert places == {0, 1, 2, 3}
    assert question_sets([str(tmp_path / "set.jsonl")], 1000, passages=4)["set"] == asked


def test_a_limit_spreads_over_the_file() -> None:
    questions = [Question((), str(i), ()) for i in range(100)]
    assert [int(q.question) for q in spread_examples(questions, 5)] == [0, 20, 40, 60, 80]
    assert spread_examples(questions, 200) == questions


LOGGED = questions_of(world_examples("test", 0, 3, max_turns=1, passages=(1,)))
RATIOS, AT_ONCE = (4, 8), 2
CALLS = 6 * 2  # full text, nothing, and two systems at two ratios; 3 questions, 2 at once


class Asked:
    """Counts calls of the decoder, and interrupts one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.last = 0, CALLS + 1
        real = Decoder.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            if self.calls == self.last:
                raise KeyboardInterrupt
            self.calls += 1
            return real(*args, **kwargs)

        patch.setattr(Decoder, "generate", generate)
        patch.setattr(answering, "_AT_ONCE", AT_ONCE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def scored(bundle: Any, questions: list[Question], log: Path | None, **options: Any) -> SystemAnswers:
    return answer_questions(bundle, questions, RATIOS, (FULL, NONE, SOFT, TRUNCATED), max_tokens=2, log=log, **options)


@pytest.fixture(scope="module")
def plain(tiny_bundle: Any) -> SystemAnswers:
    """Without a log, and in one go."""
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch)
        made = scored(tiny_bundle, LOGGED, None)
    assert asked.calls == CALLS
    return made


def test_an_interrupted_run_continues_from_its_answers(
    tiny_bundle: Any, plain: SystemAnswers, asked: Asked, tmp_path: Path
) -> None:
    asked.last = 7
    log = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        scored(tiny_bundle, LOGGED, log)
    with log.open("ab") as file:
        file.write(b'{"system": "full te\xc3')  # the line that a kill cut off
    asked.last = CALLS + 1
    assert scored(tiny_bundle, LOGGED, log) == plain
    assert asked.calls == CALLS


def test_answers_of_another_run_are_not_taken(tiny_bundle: Any, asked: Asked, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    scored(tiny_bundle, LOGGED, log)
    for others, options in ((LOGGED[:2], {}), (LOGGED, {"extractive": True}), (LOGGED, {})):
        asked.calls = 0
        scored(tiny_bundle, others, log, **options)
        assert asked.calls == 6 * -(-len(others) // AT_ONCE)


def test_any_text_is_read_back(tmp_path: Path) -> None:
    odd = ["two\nlines", "\u2028\x85\x0b\x1c", "", "{}", "🦀 \r"]
    asked = [Question((), "\u2029?", tuple(odd))] * len(odd)
    log = AnswerLog(tmp_path / "log", {"run": 1}, asked)
    log.add((FULL, None), asked, [(text, 7) for text in odd])
    assert AnswerLog(tmp_path / "log", {"run": 1}, asked).given((FULL, None)) == [(text, 7) for text in odd]
    assert AnswerLog(tmp_path / "log", {"run": 2}, asked).given((FULL, None)) == []


@pytest.mark.parametrize("change", ["a line is deleted", "lines are there twice", "a line is damaged"])
def test_answers_stay_with_their_questions(
    tiny_bundle: Any, plain: SystemAnswers, asked: Asked, tmp_path: Path, change: str
) -> None:
    """Also in a file that a person edited, or that two processes wrote."""
    log = tmp_path / "answers.jsonl"
    scored(tiny_bundle, LOGGED, log)
    lines = log.read_bytes().splitlines(keepends=True)
    changed = {
        "a line is deleted": lines[:2] + lines[3:],
        "lines are there twice": lines[:6] + lines[1:],
        "a line is damaged": [*lines[:2], b"{}\n", b"[]\n", *lines[2:]],
    }
    log.write_bytes(b"".join(changed[change]))
    asked.calls = 0
    assert scored(tiny_bundle, LOGGED, log) == plain
    assert len(log.read_bytes().splitlines()) == len(lines)
    _, *rows = map(json.loads, log.read_text().splitlines())
    assert [row["answer"] for row in rows if row["system"] == FULL] == plain[FULL, None].texts
