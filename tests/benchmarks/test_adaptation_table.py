"""What adapt-eval trains, scores and keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.adaptation.episodes import drawn_apart
from benchmarks.adaptation.run import evaluate
from benchmarks.adaptation.systems import BaseAdapter, Recipes, TestTimeSGD, mean_over
from ctx_compress_rag.adaptation.adapt import adapted_decoder
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import TaskData
from ctx_compress_rag.adaptation.episodes import AdaptationTasks, Episode
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.text.answers import exact_match, token_f1
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from helpers.training import small_recipes


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
    assert all(episode.accepted[1] == episode.query.question.rstrip("?") for episode in asked)
    assert not {e.query.question for e in tuning} & set(questions) and len(tuning) == 12
    assert all(e.query.question not in {d.question for d in e.support} for e in tuning)
    assert [len(part) for part in drawn_apart(tasks, 4, 3, 2)] == [4, 3]
    with pytest.raises(DataError, match="more has 25 questions: 12 demonstrations need 26"):
        drawn_apart(tasks, 4, 4, 12)


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
    files = small_recipes(tmp_path, bundle_folder, steps=50, data=data)
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
