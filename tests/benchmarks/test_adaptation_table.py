"""What adapt-eval trains, counts, scores and keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.__main__ import main
from benchmarks.adaptation.cost import phases
from benchmarks.adaptation.episodes import drawn_apart
from benchmarks.adaptation.run import evaluate
from benchmarks.adaptation.systems import BaseAdapter, Recipes, System, TestTimeSGD, mean_over
from benchmarks.timing.phases import count_flops
from ctx_compress_rag.adaptation.adapt import adapted, rows_of
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import TaskData
from ctx_compress_rag.adaptation.episodes import Episode, Tasks
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig
from ctx_compress_rag.adaptation.stages import file_tasks
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.text.answers import exact_match, token_f1
from ctx_compress_rag.training.prompts import PromptBuilder
from helpers.adaptation import DEMONSTRATIONS, QUESTIONS, random_adapter, small_recipes, train_all


@pytest.fixture(scope="module")
def trained(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_all(tmp_path_factory.mktemp("trained"), bundle_folder)


@pytest.mark.parametrize("where", ["rag_gd", "rag_gd/demo", "rag_gd/smollm2"])
def test_shipped_recipes_belong_together(where: str) -> None:
    recipes = Recipes.find(where)
    assert sorted(recipes.files, key=lambda file: file.name) == list(recipes.files)  # `train` takes the base first
    assert len({recipe.output for recipe in (recipes.base, *recipes.others)}) == len(recipes.files)


def test_baselines_read_what_the_paper_says(trained: Path, adaptive: Decoder) -> None:
    """Few-shot: the demonstrations as earlier turns. Prompt tuning: the trained vectors before the prompt."""
    systems = {system.name: system for system in Recipes.find(trained / "recipes").systems(adaptive)}
    episode = Episode("task", tuple(DEMONSTRATIONS), QUESTIONS[0])
    turns = [m for d in DEMONSTRATIONS for m in (*d.chat(), {"role": "assistant", "content": d.answer})]
    assert systems["base adapter, few-shot"].chat(episode) == [*turns, *QUESTIONS[0].chat()]
    tuned, chat = systems["prompt tuning"], QUESTIONS[0].chat()
    [prefix] = load_file(trained / "out" / "prefix" / "prefix.safetensors").values()
    answer = tuned.adapt(adaptive, episode).generate([tuned.chat(episode)], Sampling(max_tokens=8))[0].text
    ids = adaptive.bundle.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    with adaptive.bundle.text_decoder() as model:
        embeds = torch.cat([prefix, model.get_input_embeddings()(torch.tensor(ids))])[None]
        out = model.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)
    assert prefix.shape == (3, 32)
    assert answer == adaptive.bundle.tokenizer.decode(out[0], skip_special_tokens=True)


def test_flops_are_those_of_the_matrix_products(adaptive: Decoder) -> None:
    """Counted by hand for one demonstration: weights twice per token, attention, factors, the predictor."""
    model = adaptive.bundle.backbone.model
    base = random_adapter(model, 4, seed=3)
    episode = Episode("task", (DEMONSTRATIONS[1],), DEMONSTRATIONS[2])
    one = Sampling(max_tokens=1)

    def flops(adaptation: Any) -> tuple[int, int]:
        return count_flops(phases(adaptive, System("it", adaptation), episode, one))

    [row] = rows_of(adaptive, episode.support)
    tokens, width, layers = len(row.answers), 32, 2
    linear = sum(m.weight.numel() for n, m in model.model.named_modules() if n.endswith("_proj"))
    attention = layers * 2 * 2 * tokens * tokens * width
    factors = 2 * tokens * sum(t.numel() for t in (*base.a.values(), *base.b.values()))
    forward = 2 * tokens * linear + attention + factors
    config = PredictorConfig(inner_steps=1, inner_learning_rate=0.1, demonstrations=1, hidden=8, code=4)
    update = PredictedUpdate.build(base, adaptive.bundle, config)
    predictor = 2 * sum(p.numel() for p in update.predictor.parameters() if p.ndim == 2)
    assert flops(BaseAdapter(base))[0] == 0
    assert flops(update)[0] == pytest.approx(forward + predictor, rel=0.02)
    steps = {k: flops(TestTimeSGD(base, k, 0.1))[0] for k in (1, 2, 5)}
    assert steps[2] == 2 * steps[1] and steps[5] == 5 * steps[1]
    assert 1.8 * forward < steps[1] < 3.5 * forward
    answered, plain = flops(BaseAdapter(base))[1], flops(BaseAdapter(None))[1]
    prompt = len(rows_of(adaptive, [episode.query])[0].answers) - int(
        rows_of(adaptive, [episode.query])[0].answers.sum()
    )
    assert answered - plain == factors // tokens * prompt


def test_each_question_that_demonstrates_nothing_is_scored_once(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [Example((f"Passage {i}.",), (Turn(f"{i}?", (f"answer {i} " * 9, f"{i}")),)) for i in range(25)]
    write_jsonl(tmp_path / "more.jsonl", rows)
    tasks = Tasks([tmp_path / "more.jsonl"], PromptBuilder(tiny_tokenizer), 40, 6)
    asked, tuning = drawn_apart(tasks, 100, 100, 2)
    questions = [episode.query.question for episode in asked]
    shown = {d.question for episode in asked for d in episode.support}
    assert len(questions) == len(set(questions)) == 25 - 12 and not shown & set(questions)
    answers = {e.turns[0].question: e.turns[0].answers for e in rows}
    assert all(episode.accepted == answers[episode.query.question] for episode in asked)
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
    monkeypatch.setitem(evaluate.__kwdefaults__, "tuning", 2)
    small_recipes(tmp_path, bundle_folder, steps=1)
    command = ["adapt-eval", "--recipes", str(tmp_path / "recipes"), "--questions", "6", "--timed", "1"]
    command += ["--max-tokens", "4", "--output", str(tmp_path / "scores")]
    assert main(command) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "scores" / "scores.json").read_text())
    systems = [score["system"] for score in record["scores"]]
    assert systems == [
        "query only", "decoder alone", "decoder alone, few-shot", "base adapter", "base adapter, few-shot",
        "prompt tuning", "HyperTuning", "TT-SGD, K=1", "TT-SGD, K=2", "RAG-GD, K=1", "RAG-GD, K=2",
        "TT-SGD, K=1, tuned", "TT-SGD, K=2, tuned", "mean of the predicted updates, K=2",
        "predicted from another task, K=2", "copied ending",
    ]  # fmt: skip
    assert (tmp_path / "scores" / "scores.md").read_text().strip() in out
    assert (tmp_path / "scores" / "scores.png").read_bytes().startswith(b"\x89PNG")

    # Each answer again by the plainest way, and the scores from the answers.
    data = TaskData(files=[tmp_path / "scores" / "families"])
    episodes, _ = drawn_apart(file_tasks(data.files, data, adaptive), 6, 0, 2)
    base = Adapter.from_pretrained(tmp_path / "out" / "base", adaptive.bundle.backbone.model)
    update = PredictedUpdate.from_pretrained(tmp_path / "out" / "k2", adaptive)

    def kept(name: str) -> list[str]:
        file = tmp_path / "scores" / "answers" / f"{name.replace(' ', '_').replace(',', '')}.json"
        return list(json.loads(file.read_text())["answers"])

    def asked(episode: Episode, adaptation: Any, **changes: Any) -> str:
        changed = adapted(adaptive, adaptation.adapt(adaptive, episode.support))
        chat = replace(episode.query, **changes).chat()
        return changed.generate([chat], Sampling(max_tokens=4))[0].text.strip()

    ways = {"base adapter": BaseAdapter(base), "RAG-GD, K=2": update, "TT-SGD, K=2": TestTimeSGD(base, 2, 0.5)}
    for name, adaptation in ways.items():
        answers = kept(name)
        assert answers == [asked(episode, adaptation) for episode in episodes]
        [score] = [s for s in record["scores"] if s["system"] == name]
        for metric, key in ((token_f1, "f1"), (exact_match, "exact_match")):
            each = [metric(a, [e.query.answer]) for a, e in zip(answers, episodes, strict=True)]
            assert score[key]["low"] <= score[key]["value"] == pytest.approx(sum(each) / 6)
        assert set(score["by_task"]) == {e.task for e in episodes}

    # Controls: no passages; the mean update; another task's demonstrations; the demonstrations' ending.
    updates = [update.adapt(adaptive, episode.support) for episode in episodes]
    mean = mean_over(update, adaptive, [episode.support for episode in episodes]).base
    for name in base.a:  # changes of weights, the base's among them
        change = sum(a.b[name] @ a.a[name] for a in updates) / 6
        torch.testing.assert_close(mean.b[name] @ mean.a[name], change, atol=1e-5, rtol=1e-4)
    endings = [" ".join(episode.query.answer.split()[-3:]) for episode in episodes]
    alone = kept("decoder alone")
    assert kept("copied ending") == [f"{answer} {ending}" for answer, ending in zip(alone, endings, strict=True)]
    assert kept("query only") == [asked(episode, BaseAdapter(None), passages=()) for episode in episodes]
    others = [next(e for e in episodes[n:] + episodes[:n] if e.task != episodes[n].task) for n in range(6)]
    swapped = [replace(episode, support=other.support) for episode, other in zip(episodes, others, strict=True)]
    assert kept("predicted from another task, K=2") == [asked(episode, update) for episode in swapped]


def test_the_command_reads_files_and_takes_a_budget(
    tmp_path: Path, bundle_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks from files, one predictor; a file asks as many as it has."""
    monkeypatch.setitem(evaluate.__kwdefaults__, "tuning", 2)
    for task in ("one", "two"):
        rows = [Example((f"{task} has {i}.", "More."), (Turn(f"What has {task}, {i}?", (str(i),)),)) for i in range(8)]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)
    data = {"files": [str(tmp_path / "one.jsonl")], "passages": 1}
    files = small_recipes(tmp_path, bundle_folder, steps=50, data=data)
    for name in ("prefix", "k2", "task"):
        files[name].unlink()
    command = ["adapt-eval", "--recipes", str(tmp_path / "recipes"), "--data", str(tmp_path / "two.jsonl")]
    command += ["--budget", "1", "--questions", "9", "--timed", "1", "--max-tokens", "3"]
    command += ["--output", str(tmp_path / "scores")]
    assert main(command) == 0
    assert "\n4 questions, each with demonstrations" in capsys.readouterr().out
    kept = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert [s["system"] for s in kept["scores"]][-4:] == [
        "TT-SGD, K=1", "RAG-GD, K=1", "TT-SGD, K=1, tuned", "mean of the predicted updates, K=1",
    ]  # fmt: skip
    assert all(set(s["by_task"]) == {"two"} for s in kept["scores"])
    assert not (tmp_path / "out").exists()  # the recipes' own outputs are not of a quick test
