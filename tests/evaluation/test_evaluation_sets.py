"""Scoring several sets of questions, and those that have no answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn, spread, write_jsonl
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.evaluation import harness
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, Answers, Key
from ctx_compress_rag.evaluation.harness import normalized_curves, table
from ctx_compress_rag.evaluation.questions import Question, questions_of
from ctx_compress_rag.evaluation.sets import evaluate_sets, fitting, macro_table, question_sets
from ctx_compress_rag.text.answers import NO_ANSWER, declined, exact_match, token_f1


def test_a_card_has_the_scores_and_limits(bundle_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_folder, tmp_path / "bundle")
    bundle = Bundle.from_pretrained(tmp_path / "bundle")
    bundle.report["recipe"] = {"limits": ["short texts"], "decoder_license": "MIT"}
    before = bundle.fingerprint
    examples = world_examples("test", 0, 3, max_turns=1, passages=(1,))
    evaluate_sets(bundle, {"mine": questions_of(examples, 3)}, (4, 8), tmp_path / "out", card=True)
    scores = {
        (s["system"], s["ratio"]): s for s in json.loads((tmp_path / "out" / "scores.json").read_text())["scores"]
    }
    card = (tmp_path / "bundle" / "README.md").read_text()
    [row] = [line for line in card.splitlines() if line.startswith("| soft context")]
    for ratio in (4, 8):
        one = scores["soft context", ratio]
        assert f"{one['f1']:.3f} ± {one['f1_error']:.3f}" in row
    assert "mine, 3 questions" in card and "- short texts\n" in card and "(MIT)" in card
    again = Bundle.from_pretrained(tmp_path / "bundle")
    assert again.fingerprint == before and "mine" in again.report["scores"]


def test_unanswerable_questions_are_scored_by_who_declines_them() -> None:
    rng = np.random.default_rng(0)
    questions = [Question(("p",), f"q{i}", ("red fox",) if i % 3 else ()) for i in range(30)]
    said = ["red fox", "fox", "a dog", NO_ANSWER, ""]
    answers = {
        key: Answers([said[i] for i in rng.integers(5, size=30)], 9.0, None)
        for key in ((FULL, None), (NONE, None), (SOFT, 4))
    }
    for score in harness.scores_of(questions, answers):
        texts = answers[score.system, score.ratio].texts
        asked = [(t, q.answers) for t, q in zip(texts, questions, strict=True) if q.answers]
        rest = [t for t, q in zip(texts, questions, strict=True) if not q.answers]
        exact = np.array([exact_match(t, a) for t, a in asked])
        assert score.f1 == pytest.approx(np.mean([token_f1(t, a) for t, a in asked]))
        assert score.exact_match == pytest.approx(exact.mean())
        assert score.exact_match_error == pytest.approx(exact.std(ddof=1) / len(exact) ** 0.5)
        assert score.declined == pytest.approx(np.mean([t in ("", NO_ANSWER) for t in rest]))
        assert score.wrongly_declined == pytest.approx(np.mean([t in ("", NO_ANSWER) for t, _ in asked]))
        assert f"{score.declined:.3f} ±" in table([score])


def test_means_over_sets_count_each_once_and_cases_say_what_the_context_did() -> None:
    def scores(right: dict[str, str], count: int) -> list[harness.Score]:
        """`right`, for each system: which questions it answers, as a string of y and n."""
        questions = [Question(("p",), f"q{i}", ("yes",)) for i in range(count)]
        keys = {"none": (NONE, None), "full": (FULL, None), "soft": (SOFT, 4)}
        made = {keys[k]: Answers(["oh yes" if c == "y" else "no" for c in v], 9.0, None) for k, v in right.items()}
        return harness.scores_of(questions, made)

    one = scores({"none": "yynn", "full": "ynyn", "soft": "yyyn"}, 4)
    two = scores({"none": "nn", "full": "yy", "soft": "nn"}, 2)
    assert one[2].cases == {"TT": (1.0, 1), "TF": (1.0, 1), "FT": (1.0, 1), "FF": (0.0, 1)}
    assert two[2].cases == {"FT": (0.0, 2)}
    head, _, *_, soft = macro_table({"one": one, "two": two}, ["two"]).splitlines()
    in_domain = "EM in domain | F1 in domain | EM out of it | F1 out of it"
    assert head == f"| context | ratio | EM | F1 | contains | {in_domain} |"
    # Two words, one of them right, are F1 of 2/3: 3/4 of one set's questions, none of the other's.
    assert soft == "| soft context | 4x | 0.000 | 0.250 | 0.375 | 0.000 | 0.000 | 0.000 | 0.500 |"
    helped = scores({"none": "nnnn", "full": "yyyy", "soft": "yyyn"}, 4)
    head, _, _, full, soft = macro_table({"one": helped, "two": two}, ["two"]).splitlines()
    assert head.endswith(f"| {in_domain} | teacher-normalized F1 | teacher-normalized gap |")
    # 3/4 of the gain kept in one set, none in the other; full text has no share.
    assert soft.endswith("| 0.375 | -0.750 |") and full.endswith("|  |  |")


def test_cases_go_by_the_judge_where_there_is_one() -> None:
    """No answer holds an accepted one; of four questions, one has a verdict that could not be read."""
    questions = [Question(("p",), f"q{i}", ("yes",)) for i in range(4)]
    verdicts: dict[Key, list[bool | None]] = {
        (NONE, None): [False, False, True, True],
        (FULL, None): [True, True, True, True],
        (SOFT, 4): [True, False, True, None],
    }
    answers = {key: Answers(["no"] * 4, 9.0, None) for key in verdicts}
    soft = harness.scores_of(questions, answers, verdicts)[2]
    assert soft.cases == {"FT": (0.5, 2), "TT": (1.0, 1)}
    assert harness.scores_of(questions, answers)[2].cases == {"FF": (0.0, 4)}


def test_what_counts_as_declining() -> None:
    assert declined(" the TEXT does not say") == declined("") == 1.0
    assert declined("The text does not say so.") == declined("no") == 0.0


def test_several_files_are_scored_apart(tiny_bundle: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        write_jsonl(tmp_path / f"set{number}.jsonl", world_examples("test", number, 3, max_turns=1, passages=(1,)))
    with (tmp_path / "set2.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Why?", "answers": [], "context": "Nobody knows."}) + "\n")
        file.write(json.dumps({"question": "Why?", "answers": ["so"], "context": "word " * 2000}) + "\n")
    files = [str(tmp_path / f"set{n}.jsonl") for n in (1, 2)]
    sets = question_sets(files, 9)
    assert {name: len(questions) for name, questions in sets.items()} == {"set1": 3, "set2": 5}
    assert len(fitting(tiny_bundle, sets["set2"])) == 4
    text = evaluate_sets(tiny_bundle, sets, (4,), tmp_path / "out", in_domain=["set2"])
    assert "3 questions from set1" in text and "4 questions from set2 (1 are longer than the window)" in text
    saved = json.loads((tmp_path / "out" / "set2" / "scores.json").read_text())
    assert (saved["questions"], saved["too_long"]) == (4, 1)
    assert all(row["declined"] is not None for row in saved["scores"])
    assert (tmp_path / "out" / "scores.md").read_text().count("### set") == 2
    assert "Means of the 2 sets" in text and "out of it" in text
    with pytest.raises(ConfigError, match="in_domain names 'set3', which is not one of the sets: set1, set2"):
        evaluate_sets(tiny_bundle, sets, (4,), tmp_path / "out", in_domain=["set3"])
    with pytest.raises(ConfigError, match=r"set2/answers.jsonl is of one set.*give another folder"):
        evaluate_sets(tiny_bundle, sets, (4,), tmp_path / "out" / "set2")
    assert not (tmp_path / "out" / "set2" / "set1").exists()
    with pytest.raises(DataError, match="two files are named 'set1'"):
        question_sets([files[0], files[0]], 9)


def test_a_question_s_passage_stands_among_others_of_its_file(tmp_path: Path) -> None:
    alone = [Example((f"Passage {n}.",), (Turn(f"q{n}", (f"a{n}",)),)) for n in range(200)]
    alone.append(Example(tuple(f"own {n}" for n in range(6)), (Turn("q200", ("a",)),)))
    write_jsonl(tmp_path / "set.jsonl", alone)
    [asked] = question_sets([str(tmp_path / "set.jsonl")], 1000, passages=4).values()
    assert [q.question for q in asked] == [f"q{n}" for n in range(201)]
    assert asked[-1].passages == alone[-1].passages
    written = {passage for example in alone for passage in example.passages}
    places = [0] * 4
    for question, example in zip(asked[:-1], alone, strict=False):
        assert len(set(question.passages)) == 4 and set(question.passages) <= written
        places[question.passages.index(example.passages[0])] += 1
    assert min(places) > 25, places  # of 50 on average, with a standard deviation of 6
    assert question_sets([str(tmp_path / "set.jsonl")], 1000, passages=4)["set"] == asked


def test_questions_of_the_world_may_be_among_passages_of_one_kind(tmp_path: Path) -> None:
    """The demo's decoder, as the command scores it: the same as the library's functions on those questions."""
    options = ["--questions", "2", "--passages", "2", "--ratios", "4", "--no-extraction", "--output", str(tmp_path)]
    assert main(["eval", "--alike", *options]) == 0
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert saved["data"] == "the invented world, 2 passages of one kind"
    questions = questions_of(world_examples("test", 0, 2, max_turns=1, passages=(2,), alike=1.0))
    scores = harness.evaluate(Bundle.from_pretrained("demo"), questions, (4,))
    assert [row["f1"] for row in saved["scores"]] == pytest.approx([score.f1 for score in scores])
    assert [row["prompt_tokens"] for row in saved["scores"]] == pytest.approx([s.prompt_tokens for s in scores])


def test_a_limit_spreads_over_the_file() -> None:
    questions = [Question((), str(i), ()) for i in range(100)]
    assert [int(q.question) for q in spread(questions, 5)] == [0, 20, 40, 60, 80]
    assert spread(questions, 200) == questions


def test_curves_are_of_what_is_kept_of_the_full_text() -> None:
    questions = [Question(("p",), f"q{i}", ("yes",)) for i in range(40)]
    answers = {
        (FULL, None): Answers(["yes"] * 40, 9.0, None),
        (NONE, None): Answers(["no"] * 40, 9.0, None),
        (SOFT, 4): Answers(["yes"] * 30 + ["no"] * 10, 9.0, None),
        (SOFT, 8): Answers(["yes"] * 10 + ["no"] * 30, 9.0, None),
    }
    [curve] = normalized_curves(harness.scores_of(questions, answers))
    assert (curve.label, list(curve.ratios), list(curve.scores)) == (SOFT, [4, 8], [0.75, 0.25])


def test_a_codec_is_checked_before_anything_is_scored(bundle_folder: Path, tmp_path: Path) -> None:
    examples = world_examples("test", 0, 3, max_turns=1, passages=(1,))
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ConfigError, match="unknown codec 'int5'"):
        patched.setattr("ctx_compress_rag.evaluation.sets.reconstruction_perplexity", lambda *_: asked.append("scored"))
        bundle = Bundle.from_pretrained(bundle_folder)
        evaluate_sets(bundle, {"mine": questions_of(examples, 3)}, (4,), tmp_path, codec="int5", perplexity=True)
    assert not asked
