"""Scoring several sets of questions, and those that have no answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import Example, Turn, spread_examples, write_jsonl
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation import harness
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, Answers
from ctx_compress_rag.evaluation.harness import score_table
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.evaluation.sets import evaluate_sets, fitting_questions, question_sets
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.text.answers import NO_ANSWER, exact_match, mentions_answer, token_f1


def test_unanswerable_questions_are_scored_by_who_declines_them() -> None:
    rng = np.random.default_rng(0)
    questions = [Question(("p",), f"q{i}", ("red fox",) if i % 3 else ()) for i in range(30)]
    said = ["red fox", "fox", "a dog", NO_ANSWER, ""]
    answers = {
        key: Answers([said[i] for i in rng.integers(5, size=30)], [9] * 30, None)
        for key in ((FULL, None), (NONE, None), (SOFT, 4))
    }
    for score in harness.score_answers(questions, answers):
        texts = answers[score.system, score.ratio].texts
        asked = [(t, q.answers) for t, q in zip(texts, questions, strict=True) if q.answers]
        rest = [t for t, q in zip(texts, questions, strict=True) if not q.answers]
        exact = np.array([exact_match(t, a) for t, a in asked])
        assert score.f1 == pytest.approx(np.mean([token_f1(t, a) for t, a in asked]))
        assert score.exact_match == pytest.approx(exact.mean())
        assert score.exact_match_error == pytest.approx(exact.std(ddof=1) / len(exact) ** 0.5)
        assert score.declined == pytest.approx(np.mean([t in ("", NO_ANSWER) for t in rest]))
        assert score.wrongly_declined == pytest.approx(np.mean([t in ("", NO_ANSWER) for t, _ in asked]))
        assert f"{score.declined:.3f} ±" in score_table([score])


def test_several_files_are_scored_apart(tiny_bundle: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        write_jsonl(tmp_path / f"set{number}.jsonl", world_examples("test", number, 3, max_turns=1, passages=(1,)))
    with (tmp_path / "set2.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Why?", "answers": [], "context": "Nobody knows."}) + "\n")
        file.write(json.dumps({"question": "Why?", "answers": ["so"], "context": "word " * 2000}) + "\n")
    files = [str(tmp_path / f"set{n}.jsonl") for n in (1, 2)]
    sets = question_sets(files, 9)
    assert {name: len(questions) for name, questions in sets.items()} == {"set1": 3, "set2": 5}
    assert len(fitting_questions(tiny_bundle, sets["set2"])) == 4
    scored = evaluate_sets(tiny_bundle, sets, (4, 32), tmp_path / "out", sentences=False)
    assert "3 questions from set1" in scored["set1"].text
    assert "4 questions from set2 (1 are longer than the window); not trained for 32x" in scored["set2"].text
    saved = json.loads((tmp_path / "out" / "set2" / "scores.json").read_text())
    assert (saved["questions"], saved["too_long"]) == (4, 1)
    assert all(row["declined"] is not None for row in saved["scores"])
    with pytest.raises(DataError, match="'set1'"):
        question_sets([files[0], files[0]], 9)


def test_a_question_s_passage_stands_among_its_nearest_neighbors(tmp_path: Path) -> None:
    examples = world_examples("test", 0, 40, max_turns=1, passages=(1,))
    examples.append(Example(tuple(f"own {n}" for n in range(6)), (Turn("own?", ("a",)),)))
    write_jsonl(tmp_path / "set.jsonl", examples)
    [asked] = question_sets([str(tmp_path / "set.jsonl")], 1000, passages=4).values()
    assert [q.question for q in asked] == [e.turns[0].question for e in examples]
    assert asked[-1].passages == examples[-1].passages
    written = list(dict.fromkeys(passage for e in examples for passage in e.passages))
    vectors = dict(zip(written, embed_passages(written), strict=True))
    places = set()
    for q, example in zip(asked[:-1], examples, strict=False):
        [own] = example.passages
        others = [p for p in written if p != own and not mentions_answer(p, q.answers)]
        nearest = sorted(others, key=lambda other: -float(vectors[own] @ vectors[other]))[:3]
        assert sorted(q.passages) == sorted([own, *nearest])
        places.add(q.passages.index(own))
    assert places == {0, 1, 2, 3}
    assert question_sets([str(tmp_path / "set.jsonl")], 1000, passages=4)["set"] == asked


def test_a_limit_spreads_over_the_file() -> None:
    questions = [Question((), str(i), ()) for i in range(100)]
    assert [int(q.question) for q in spread_examples(questions, 5)] == [0, 20, 40, 60, 80]
    assert spread_examples(questions, 200) == questions
