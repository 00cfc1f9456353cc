"""Judges, cases, thresholds and prompts of several passages, counted by hand; the commands that write tables."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.adaptation.episodes import drawn_apart
from benchmarks.adaptation.run import evaluate
from benchmarks.adaptation.systems import BaseAdapter, Recipes, TestTimeSGD, mean_over
from benchmarks.scoring.judge import JudgeTable, verdict
from benchmarks.scoring.perplexity import reconstruction_perplexity
from benchmarks.scoring.tables import case_table
from benchmarks.several.neighbors import NEAREST, among_neighbors
from benchmarks.world.world import world_examples
from ctx_compress_rag.adaptation.adapt import adapted_decoder
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import TaskData
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.adaptation.stages import AdaptationTasks, Episode
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, Answers, SystemAnswers
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.text.answers import contains_answer, exact_match, mentions_answer, token_f1
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, recitation_example
from helpers.training import small_recipes


class Rule:
    """Right is what holds an accepted answer; of the question "d" it cannot decide."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def invoke(self, prompt: str) -> str:
        self.prompts.append(prompt)
        fields = re.search(r"Question: (.*)\nGolden answers: (.*)\nAI-generated answer: ((?s:.*))", prompt)
        assert fields is not None
        if fields[1] == "d":
            return "Hard to say."
        return "Yes." if contains_answer(fields[3], fields[2].split(" / ")) else "No, it is not."


def test_the_share_judged_right_is_that_of_the_verdicts(tiny_bundle: Any, tmp_path: Path) -> None:
    """Each answer is judged once; questions without an answer are not."""
    questions = [Question(("p",), name, (name,) if name != "none" else ()) for name in ("a", "b", "c", "d", "none")]
    answers = {
        (FULL, None): Answers(["a", "b", "x", "d", "none"], [1] * 5),
        (NONE, None): Answers(["x", "x", "x", "x", "x"], [1] * 5),
    }
    judge = Rule()
    text, numbers = JudgeTable(judge)(tiny_bundle, questions, answers, tmp_path)
    assert [row["right"] for row in numbers] == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert "| full text |  | 0.667 ± 0.333 | 1 |" in text
    assert len(judge.prompts) == len(set(judge.prompts)) == 7
    assert len((tmp_path / "judged.jsonl").read_text().splitlines()) == 7


def test_what_a_reply_says() -> None:
    replies = {"Yes": True, "**No**.": False, " yes, the golden answers name it.": True}
    unclear = ("Yes and no.", "No doubt it is right.", "No. Or rather yes.", "The answer is correct: Yes", "")
    for reply, found in (replies | dict.fromkeys(unclear)).items():
        assert verdict(reply) is found, reply


def made(none: str, full: str, soft: str) -> tuple[list[Question], SystemAnswers]:
    """Questions, and which of them each system answers, as strings of y and n."""
    given = {(NONE, None): none, (FULL, None): full, (SOFT, 4): soft}
    questions = [Question(("p",), f"q{i}", ("yes",)) for i in range(len(none))]
    said = {k: Answers(["oh yes" if c == "y" else "no" for c in v], [9] * len(v)) for k, v in given.items()}
    return questions, said


def test_cases_say_what_the_context_did(tiny_bundle: Any, tmp_path: Path) -> None:
    text, _ = case_table(tiny_bundle, *made("yynn", "ynyn", "yyyn"), tmp_path)
    head, *_, soft = text.splitlines()
    assert head == (
        "| context | ratio | right always (1) | right only without context (1) | right only from full text (1) "
        "| right never (1) |"
    )
    assert soft == "| soft context | 4x | 1.000 | 1.000 | 1.000 | 0.000 |"


@pytest.mark.slow
def test_the_command_writes_every_table(
    bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "no_judge.py").write_text("class Judge:\n    def invoke(self, prompt):\n        return 'No.'\n")
    for name in ("one", "two"):
        write_jsonl(tmp_path / f"{name}.jsonl", world_examples("test", 3, 2, max_turns=1, passages=(1,)))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    folder = shutil.copytree(bundle_folder, tmp_path / "bundle")
    command = ["eval", "--bundle", str(folder), "--ratios", "4", "--output", str(tmp_path / "out"), "--data"]
    tables = ["--cost", "--perplexity", "--cases", "--judge", "no_judge:Judge", "--card"]
    assert main([*command, *files, *tables, "--in-domain", "one"]) == 0
    shown = capsys.readouterr().out
    for column in ("ms to first token", "reconstruction perplexity", "right always"):
        assert shown.count(column) == 2
    assert "F1 out of it" in shown
    assert shown.startswith((tmp_path / "out" / "scores.md").read_text().strip())
    kept = json.loads((tmp_path / "out" / "one" / "scores.json").read_text())
    assert {"costs", "reconstruction_perplexity", "cases", "judged"} <= kept.keys()
    [soft] = [score for score in kept["scores"] if score["system"] == SOFT]
    card = (folder / "README.md").read_text()
    assert "one, 2 questions" in card and f"{soft['f1']:.3f} ± {soft['f1_error']:.3f}" in card
    assert main([*command, *files, "--in-domain", "three"]) == 2
    assert "three" in capsys.readouterr().err


def test_repeated_tokens_are_scored_by_their_place(tiny_bundle: Any) -> None:
    """As the decoder itself predicts them, prompt by prompt and without padding."""
    passages = [example.passages[0] for example in world_examples("test", 5, 6, max_turns=1, passages=(1,))][:3]
    full, none, _ = reconstruction_perplexity(tiny_bundle, passages, [4], progress=False)
    builder, right = TrainingPromptBuilder(tiny_bundle.tokenizer, 513), []
    for passage in passages:
        prompt = builder.text_prompt(recitation_example(passage), PARAPHRASES[0])
        ids = torch.from_numpy(prompt.ids())
        with torch.inference_mode(), tiny_bundle.text_decoder() as model:
            said = model(input_ids=ids[None]).logits[0].argmax(-1)
        right.append((said[:-1] == ids[1:])[torch.from_numpy(prompt.answers[1:])].float())
    assert full.right["1 to 8"] == pytest.approx(float(torch.stack([each[:8] for each in right]).mean()))
    assert full.right["9 to 32"] == pytest.approx(float(torch.cat([each[8:32] for each in right]).mean()))
    assert full.right.keys() == none.right.keys()


@pytest.mark.slow
def test_distractors_are_near_without_the_answer_and_the_evidence_stays() -> None:
    examples = world_examples("test", 0, 24, 1, (1,))
    passages = list(dict.fromkeys(e.passages[0] for e in examples))
    vectors = embed_passages(passages)
    cosines = vectors @ vectors.T
    several = 0
    for before, after in zip(examples, among_neighbors(examples, [1, 3]), strict=True):
        own = before.passages[0]
        others = [passage for passage in after.passages if passage != own]
        assert len(others) == len(after.passages) - 1
        allowed = [not mentions_answer(passage, before.turns[0].answers) for passage in passages]
        near = [place for place in (-cosines[passages.index(own)]).argsort() if allowed[place]]
        assert {*others} <= {passages[place] for place in near[:NEAREST]}
        assert all(part in own and before.turns[0].answers[0] in part for part in after.turns[0].evidence)
        several += len(others) == 2
    assert 4 < several < 20


@pytest.mark.parametrize("where", ["rag_gd", "rag_gd/demo", "rag_gd/smollm2"])
def test_shipped_recipes_belong_together(where: str) -> None:
    recipes = Recipes.find(where)  # refuses those that do not
    assert sorted(recipes.files, key=lambda file: file.name) == list(recipes.files)  # `train` takes the base first
    assert len({recipe.output for recipe in (recipes.base, *recipes.others)}) == len(recipes.files) > 1


def test_each_question_that_demonstrates_nothing_is_scored_once(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [Example((f"Passage {i}.",), (Turn(f"{i}?", (f"answer {i} " * 9, f"{i}")),)) for i in range(25)]
    write_jsonl(tmp_path / "more.jsonl", rows)
    tasks = AdaptationTasks(
        TaskData(files=[tmp_path / "more.jsonl"], max_answer_tokens=6), TrainingPromptBuilder(tiny_tokenizer)
    )
    asked, tuning = drawn_apart(tasks, 100, 100, 2)
    questions = [episode.query.question for episode in asked]
    shown = {d.question for episode in asked for d in episode.support}
    assert len(questions) == len(set(questions)) == 25 - 12 and not shown & set(questions)
    assert all(episode.answers[1] == episode.query.question.rstrip("?") for episode in asked)
    assert not {e.query.question for e in tuning} & set(questions) and len(tuning) == 12
    assert all(e.query.question not in {d.question for d in e.support} for e in tuning)
    assert [len(part) for part in drawn_apart(tasks, 4, 3, 2)] == [4, 3]
    with pytest.raises(DataError, match="more has 25 questions: 12 demonstrations need 26"):
        drawn_apart(tasks, 4, 4, 12)


@pytest.mark.slow
def test_the_command_trains_and_scores(
    tmp_path: Path, bundle_folder: Path, adaptive: Decoder, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each answer again by the plainest way, and the scores from the answers."""
    monkeypatch.setitem(evaluate.__kwdefaults__, "tuning", 2)
    for task in ("one", "two"):
        rows = [Example((f"{task} has {i}.", "More."), (Turn(f"What has {task}, {i}?", (str(i),)),)) for i in range(8)]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)
    data = {"files": [str(tmp_path / "one.jsonl")], "passages": 1}
    files = small_recipes(tmp_path, bundle_folder, steps=4, data=data)
    for name in ("k2", "task"):
        files[name].unlink()
    out, test = tmp_path / "scores", tmp_path / "two.jsonl"
    command = ["adapt-eval", "--recipes", str(tmp_path / "recipes"), "--data", str(test), "--budget", "1"]
    command += ["--questions", "9", "--timed", "1", "--max-tokens", "3", "--output", str(out)]
    assert main(command) == 0
    said, record = capsys.readouterr().out, json.loads((out / "scores.json").read_text())
    assert (out / "scores.md").read_text().strip() in said and "\n4 questions, each with demonstrations" in said
    assert (out / "scores.png").read_bytes().startswith(b"\x89PNG")
    scores = {score["system"]: score for score in record["scores"]}
    mixed = "mean of the predicted updates, K=1"
    assert [*scores][-4:] == ["TT-SGD, K=1", "RAG-GD, K=1", "TT-SGD, K=1, tuned", mixed]
    assert not (tmp_path / "out").exists()  # the recipes' own outputs are not of a quick test

    tasks = AdaptationTasks(TaskData(files=[test], passages=1), TrainingPromptBuilder(adaptive.bundle.tokenizer))
    episodes, _ = drawn_apart(tasks, 9, 2, 2)
    base = Adapter.from_pretrained(out / "trained" / "base", adaptive.bundle.backbone.model)
    update = PredictedUpdate.from_pretrained(out / "trained" / "k1", adaptive)

    def asked(episode: Episode, adaptation: Any, shots: bool = False, **changes: Any) -> str:
        changed = adapted_decoder(adaptive, adaptation.adapt(adaptive, episode.support))
        shown = [m for d in episode.support for m in (*d.chat(), {"role": "assistant", "content": d.answer})]
        chat = [*(shown if shots else ()), *replace(episode.query, **changes).chat()]
        return changed.generate([chat], Sampling(max_tokens=3))[0].text.strip()

    mean = mean_over(update, adaptive, [episode.support for episode in episodes])
    sgd = TestTimeSGD(base, 1, update.config.inner_learning_rate)
    ways = {"base adapter": BaseAdapter(base), "RAG-GD, K=1": update, "TT-SGD, K=1": sgd, mixed: mean}
    kept = {name: said_by(out, name) for name in ways}
    assert said_by(out, "query only") == [asked(e, BaseAdapter(None), passages=()) for e in episodes]
    assert said_by(out, "base adapter, few-shot") == [asked(e, BaseAdapter(base), shots=True) for e in episodes]
    for name, adaptation in ways.items():
        assert kept[name] == [asked(episode, adaptation) for episode in episodes]
        for metric, key in ((token_f1, "f1"), (exact_match, "exact_match")):
            each = [metric(a, [e.query.answer]) for a, e in zip(kept[name], episodes, strict=True)]
            score = scores[name][key]
            assert score["low"] <= score["value"] == pytest.approx(sum(each) / len(episodes))


def said_by(folder: Path, system: str) -> list[str]:
    file = folder / "answers" / f"{system.replace(' ', '_').replace(',', '')}.json"
    return list(json.loads(file.read_text())["answers"])
