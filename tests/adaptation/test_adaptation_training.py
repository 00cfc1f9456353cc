"""The stages that train adapters and predictors: what they change, that they resume, and the table they end in."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from ctx_compress_rag.adaptation import (
    Adapter,
    AdaptiveDecoder,
    BaseAdapter,
    PredictedUpdate,
    PromptTuning,
    TestTimeSGD,
    evaluation,
)
from ctx_compress_rag.adaptation.config import RetrievalAdapterRecipe, UpdatePredictorRecipe
from ctx_compress_rag.adaptation.cost import AdaptationCost, phases
from ctx_compress_rag.adaptation.episodes import Episode, Episodes, FamilyTasks, with_slots
from ctx_compress_rag.adaptation.evaluation import SystemScore, evaluate, table, verdict
from ctx_compress_rag.adaptation.methods import PredictorConfig
from ctx_compress_rag.adaptation.objectives.retrieval_adapter import PromptTuningLoss, RetrievalAdapterLoss
from ctx_compress_rag.adaptation.objectives.update_predictor import MatchingObjective, TaskObjective
from ctx_compress_rag.adaptation.predictor import pooled_states
from ctx_compress_rag.adaptation.stages import load_tasks, open_decoder
from ctx_compress_rag.adaptation.systems import Recipes, System
from ctx_compress_rag.adaptation.updates import matching_loss, norms, sgd
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.cli import main
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.decoding.generation import Sampling
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.evaluation.phases import count_flops
from ctx_compress_rag.metrics import Interval, exact_match, token_f1
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.training.recipes import find, load_recipe
from ctx_compress_rag.training.run import made_by, run_recipe
from helpers.adaptation import DEMONSTRATIONS, random_adapter
from helpers.training import report


@pytest.fixture(scope="module")
def decoder(bundle_folder: Path) -> AdaptiveDecoder:
    return AdaptiveDecoder(Bundle.from_pretrained(bundle_folder, device="cpu"))


def _recipes(folder: Path, bundle: Path, steps: int = 2, **settings: Any) -> dict[str, Path]:
    """One recipe of each kind, small; `settings` replace keys of all of them."""
    optim = {
        "steps": steps, "batch_size": 2, "micro_batch_size": 1, "learning_rate": 0.01, "save_every": 2, "log_every": 1,
    }  # fmt: skip
    common = {"bundle": str(bundle), "data": {"families": "train"}, "optim": optim} | settings
    predictor = {"stage": "update_predictor", "base": str(folder / "out" / "base"), "hidden": 8, "code": 4}
    predictor |= {"demonstrations": 2, "inner_learning_rate": 0.5}
    solved = {"folder": str(folder / "out" / "solved"), "contexts": 3, "steps": [1]}
    each = {
        "base": {"stage": "retrieval_adapter", "rank": 2, "alpha": 4},
        "prefix": {"stage": "prompt_tuning", "virtual_tokens": 3},
        "k1": predictor | {"inner_steps": 1, "solved": solved},
        "k2": predictor | {"inner_steps": 2},
        "task": predictor | {"inner_steps": 1, "loss": "task"},
    }
    (folder / "recipes").mkdir(parents=True)
    files = {}
    for name, recipe in each.items():
        files[name] = folder / "recipes" / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(common | recipe | {"output": str(folder / "out" / name)}))
    return files


@pytest.fixture(scope="module")
def trained(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage has been run."""
    folder = tmp_path_factory.mktemp("trained")
    for file in _recipes(folder, bundle_folder).values():
        run_recipe(file)
    return folder


def test_each_stage_leaves_what_can_be_loaded(trained: Path, decoder: AdaptiveDecoder) -> None:
    model = decoder.bundle.backbone.model
    base = Adapter.from_pretrained(trained / "out" / "base", model)
    assert (base.rank, base.scale) == (2, 2.0)
    assert all(b.abs().sum() > 0 for b in base.b.values())
    assert PromptTuning.from_pretrained(trained / "out" / "prefix", decoder).prefix.shape == (3, 32)
    for name, loss, steps in (("k1", "matching", 1), ("k2", "matching", 2), ("task", "task", 1)):
        update = PredictedUpdate.from_pretrained(trained / "out" / name, decoder)
        assert (update.config.loss, update.config.inner_steps, update.config.demonstrations) == (loss, steps, 2)
        assert all(torch.equal(update.base.b[n], base.b[n]) for n in base.b)
        told = report(trained / "out" / name)
        assert told["steps"] == 2 and told["fingerprint"] == decoder.bundle.fingerprint
        assert told["tokens"] > 0 or loss == "matching"  # which reads stored states, no tokens


@pytest.mark.parametrize("ratio", [None, 8])
def test_one_step_moves_what_is_trained_and_nothing_else(decoder: AdaptiveDecoder, ratio: int | None) -> None:
    """Every objective, with passages as text and as slots: the decoder's parameters keep every bit."""
    reading, bundle = decoder, decoder.bundle
    drawn = Episode("task", tuple(DEMONSTRATIONS[:2]), DEMONSTRATIONS[2])
    if ratio is not None:
        name = f"test-{ratio}-{random.random()}"
        store = SoftContextStore(chromadb.EphemeralClient(), bundle, collection=name, key=b"k" * 32)
        reading = AdaptiveDecoder(bundle, store)
        drawn = with_slots(drawn, store, ratio)
    rows, queries = [reading.rows(drawn.support)], [reading.rows([drawn.query])]
    assert all(row.soft == (ratio is not None) for row in rows[0])
    base = random_adapter(bundle.backbone.model, 2, seed=1)
    config = PredictorConfig(inner_steps=2, inner_learning_rate=0.1, demonstrations=2, hidden=8, code=4)
    adapter_loss = RetrievalAdapterLoss(reading, 2, 4)
    for b in adapter_loss.b:
        torch.nn.init.normal_(b, std=0.1)  # zero leaves `a` without a gradient in the first step
    objectives = [
        (adapter_loss, {"rows": rows[0]}),
        (PromptTuningLoss(reading, 3, seed=0), {"rows": rows[0]}),
        (
            MatchingObjective(reading, PredictedUpdate.build(base, reading, config), 0.1),
            {"contexts": rows, "queries": queries},
        ),
        (TaskObjective(reading, PredictedUpdate.build(base, reading, config)), {"contexts": rows, "queries": queries}),
    ]
    frozen = {n: p.detach().clone() for n, p in bundle.backbone.model.named_parameters()}
    frozen |= {f"reader {n}": p.detach().clone() for n, p in bundle.reader.named_parameters()}
    for objective, batch in objectives:
        trained = dict(objective.named_parameters())
        before = {n: p.detach().clone() for n, p in trained.items()}
        optimiser = torch.optim.SGD(trained.values(), lr=1.0)
        objective(**batch)["loss"].backward()
        optimiser.step()
        still = [n for n, p in trained.items() if torch.equal(p, before[n])]
        assert trained and not still, type(objective)
    now = dict(bundle.backbone.model.named_parameters())
    now |= {f"reader {n}": p for n, p in bundle.reader.named_parameters()}
    assert all(torch.equal(now[n], value) and now[n].grad is None for n, value in frozen.items())


def test_training_brings_the_prediction_to_its_target(decoder: AdaptiveDecoder) -> None:
    """On one context, again and again, the loss of eq. 9 falls far, and the direction is nearly the gradient's."""
    base = random_adapter(decoder.bundle.backbone.model, 4, seed=2, size=0.1)
    config = PredictorConfig(inner_steps=2, inner_learning_rate=0.1, demonstrations=2, hidden=16, code=8)
    torch.manual_seed(0)
    update = PredictedUpdate.build(base, decoder, config)
    rows = [decoder.rows(DEMONSTRATIONS)]
    target = sgd(decoder, rows, base, 2, 0.1).change()
    pooled = pooled_states(decoder, rows, base)
    update.predictor.calibrate(pooled, norms(target))
    optimiser = torch.optim.AdamW(update.predictor.parameters(), lr=5e-3)
    first = float(matching_loss(update.predictor(pooled), target).detach())
    for _ in range(300):
        loss = matching_loss(update.predictor(pooled), target).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert first > 0.9 * len(base.a)  # no better than at random
    assert float(loss.detach()) < 0.25 * len(base.a)


def test_held_out_data_never_reaches_training(tmp_path: Path, bundle_folder: Path) -> None:
    rows = [Example(("A text.", f"Text {i}."), (Turn(f"Question {i}?", ("yes",)),)) for i in range(4)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", [Example(("Another.",), rows[2].turns)])
    data = {"files": [str(tmp_path / "train.jsonl")], "held_out": [str(tmp_path / "test.jsonl")]}
    data |= {"passages": 1}
    files = _recipes(tmp_path / "run", bundle_folder, data=data)
    with pytest.raises(DataError, match=r"held-out question: 'Question 2\?'"):
        run_recipe(files["base"])
    # One corpus: the same passage is retrieved for a question of training and for one that is held out.
    write_jsonl(tmp_path / "test.jsonl", [Example(rows[2].passages, (Turn("Another question?", ("no",)),))])
    recipe = load_recipe(files["base"])
    assert isinstance(recipe, RetrievalAdapterRecipe)
    [episode] = Episodes(load_tasks(recipe, open_decoder(recipe)), 1, 0, seed=0)
    assert episode.query.passages == ("A text.",)
    settings = yaml.safe_load(files["base"].read_text()) | {"data": {"families": "test"}}
    files["base"].write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="families"):
        load_recipe(files["base"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder": "x"}, "either decoder"),
        ({"bundle": None}, "either decoder"),
        ({"bundle": None, "decoder": "x", "ratio": 8}, "ratio needs a bundle"),
        ({"data": {}}, "files or families"),
        ({"rank": 0}, "rank"),
        ({"loss": "matching"}, "loss"),
    ],
)
def test_impossible_recipes_are_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    [file, *_] = _recipes(tmp_path, Path("demo")).values()
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | change))
    with pytest.raises(ConfigError, match=named):
        load_recipe(file)


def test_shipped_recipes_belong_together() -> None:
    for where in ("rag_gd", "rag_gd/demo"):
        recipes = Recipes.find(where)
        assert len(recipes.files) == 6
        assert recipes.files[0].parent == find(where)
        assert len({recipe.output for recipe in (recipes.base, *recipes.others)}) == 6
        kinds = sorted((r.stage, getattr(r, "loss", ""), getattr(r, "inner_steps", 0)) for r in recipes.others)  # type: ignore[attr-defined]
        assert all(r.data.passages == (5 if r.data.files else None) for r in (recipes.base, *recipes.others))
        matching = [("update_predictor", "matching", k) for k in (1, 5, 10)]
        assert kinds == [("prompt_tuning", "", 0), *matching, ("update_predictor", "task", 5)]


def test_recipes_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    files = _recipes(tmp_path, Path("demo"))
    recipe = yaml.safe_load(files["k1"].read_text())
    for change, named in (({"base": "elsewhere"}, "base is elsewhere"), ({"ratio": 8}, "ratio is 8")):
        files["k1"].write_text(yaml.safe_dump(recipe | change))
        with pytest.raises(ConfigError, match=named):
            Recipes.find(tmp_path / "recipes")
    files["base"].unlink()
    with pytest.raises(ConfigError, match="0 retrieval_adapter"):
        Recipes.find(tmp_path / "recipes")


def test_recipes_of_one_kind_have_rows_of_their_own(trained: Path, tmp_path: Path, decoder: AdaptiveDecoder) -> None:
    for name in ("base", "prefix", "k1", "k2", "task"):
        text = (trained / "recipes" / f"{name}.yaml").read_text()
        for copy in (name, f"{name}_again") if name in ("prefix", "k2", "task") else (name,):
            (tmp_path / f"{copy}.yaml").write_text(text)
    names = [system.name for system in Recipes.find(tmp_path).systems(decoder)]
    assert names[5:] == [
        "prompt tuning (prefix)", "prompt tuning (prefix_again)", "HyperTuning (task)", "HyperTuning (task_again)",
        "TT-SGD, K=1", "TT-SGD, K=2 (k2)", "TT-SGD, K=2 (k2_again)",
        "RAG-GD, K=1", "RAG-GD, K=2 (k2)", "RAG-GD, K=2 (k2_again)",
    ]  # fmt: skip
    scores = [_score(name, 0.5, 0.1, 1.0) for name in names]
    assert [line.split(": ")[0] for line in verdict(scores).splitlines()] == [f"- {name}" for name in names[-3:]]


def test_a_report_from_before_a_key_is_of_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(_recipes(tmp_path, Path("demo"))["k1"])
    reported = recipe.model_dump(mode="json")
    assert made_by(recipe, reported)
    assert not made_by(recipe, reported | {"code": 5})
    assert not made_by(recipe, reported | {"unknown": 1}) and not made_by(recipe, None)
    del reported["data"]["passages"]
    assert made_by(recipe, reported)


# Costs


def test_flops_are_those_of_the_matrix_products(decoder: AdaptiveDecoder) -> None:
    """Counted by hand for one demonstration: weights twice per token, attention, factors, the predictor."""
    model = decoder.bundle.backbone.model
    base = random_adapter(model, 4, seed=3)
    episode = Episode("task", (DEMONSTRATIONS[1],), DEMONSTRATIONS[2])
    one = Sampling(max_new_tokens=1)

    def flops(adaptation: Any) -> tuple[int, int]:
        return count_flops(phases(decoder, System("it", adaptation), episode, one))

    [row] = decoder.rows(episode.support)
    tokens, width, layers = len(row.answers), 32, 2
    linear = sum(m.weight.numel() for n, m in model.model.named_modules() if n.endswith("_proj"))
    attention = layers * 2 * 2 * tokens * tokens * width
    factors = 2 * tokens * sum(t.numel() for t in (*base.a.values(), *base.b.values()))
    forward = 2 * tokens * linear + attention + factors
    config = PredictorConfig(inner_steps=1, inner_learning_rate=0.1, demonstrations=1, hidden=8, code=4)
    update = PredictedUpdate.build(base, decoder, config)
    predictor = 2 * sum(p.numel() for p in update.predictor.parameters() if p.ndim == 2)
    assert flops(BaseAdapter(base))[0] == 0
    assert flops(update)[0] == pytest.approx(forward + predictor, rel=0.02)
    steps = {k: flops(TestTimeSGD(base, k, 0.1))[0] for k in (1, 2, 5)}
    assert steps[2] == 2 * steps[1] and steps[5] == 5 * steps[1]
    assert 1.8 * forward < steps[1] < 3.5 * forward
    answered, plain = flops(BaseAdapter(base))[1], flops(BaseAdapter(None))[1]
    prompt = len(decoder.rows([episode.query])[0].answers) - int(decoder.rows([episode.query])[0].answers.sum())
    assert answered - plain == factors // tokens * prompt


# The table


def test_answers_of_other_weights_are_not_kept(tmp_path: Path, bundle_folder: Path, decoder: AdaptiveDecoder) -> None:
    """As when an output is removed and trained again on edited files, by the same recipe."""
    for name, file in _recipes(tmp_path, bundle_folder, steps=1).items():
        if name != "base":
            file.unlink()
    command = ["adapt-eval", "--recipes", str(tmp_path / "recipes"), "--questions", "3", "--timed", "1"]
    command += ["--max-tokens", "4", "--output", str(tmp_path / "scores")]
    assert main(command) == 0
    weights = tmp_path / "out" / "base" / "adapter_model.safetensors"
    torch.manual_seed(0)
    save_file({name: torch.randn_like(value) for name, value in load_file(weights).items()}, weights)
    assert main(command) == 0
    adapter = BaseAdapter(Adapter.from_pretrained(weights.parent, decoder.bundle.backbone.model))
    answers = json.loads((tmp_path / "scores" / "answers" / "base_adapter.json").read_text())["answers"]
    for answer, episode in zip(answers, Episodes(FamilyTasks("test"), 3, 3, seed=0), strict=True):
        adapted = decoder.adapt(episode.support, adapter)
        assert answer == adapted.generate([episode.query.chat()], Sampling(max_new_tokens=4))[0].text.strip()


@pytest.mark.slow
def test_the_command_trains_scores_and_goes_on(
    tmp_path: Path, bundle_folder: Path, decoder: AdaptiveDecoder, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(evaluate.__kwdefaults__, "tuning", 2)
    files = _recipes(tmp_path, bundle_folder, steps=1)
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
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[1:]] == systems
    assert (tmp_path / "scores" / "scores.md").read_text().strip() in out
    assert (tmp_path / "scores" / "scores.png").read_bytes().startswith(b"\x89PNG")

    # Each answer again by the plainest way, and the scores from the answers.
    episodes = list(Episodes(FamilyTasks("test"), 6, 2, seed=0))
    base = Adapter.from_pretrained(tmp_path / "out" / "base", decoder.bundle.backbone.model)
    update = PredictedUpdate.from_pretrained(tmp_path / "out" / "k2", decoder)
    for name, adaptation in (
        ("base adapter", BaseAdapter(base)),
        ("RAG-GD, K=2", update),
        ("TT-SGD, K=2", TestTimeSGD(base, 2, 0.5)),
    ):
        file = tmp_path / "scores" / "answers" / f"{name.replace(' ', '_').replace(',', '')}.json"
        answers = json.loads(file.read_text())["answers"]
        for answer, episode in zip(answers, episodes, strict=True):
            adapted = decoder.adapt(episode.support, adaptation)
            assert answer == adapted.generate([episode.query.chat()], Sampling(max_new_tokens=4))[0].text.strip()
        [score] = [s for s in record["scores"] if s["system"] == name]
        wanted = [e.query.answer for e in episodes]
        f1 = [token_f1(a, [w]) for a, w in zip(answers, wanted, strict=True)]
        em = [exact_match(a, [w]) for a, w in zip(answers, wanted, strict=True)]
        assert score["f1"]["value"] == pytest.approx(sum(f1) / 6)
        assert score["exact_match"]["value"] == pytest.approx(sum(em) / 6)
        assert score["f1"]["low"] <= score["f1"]["value"] <= score["f1"]["high"]
        assert set(score["by_task"]) == {e.task for e in episodes}

    # Controls: no passages; the mean update; another task's demonstrations; the demonstrations' ending.
    kept = {name: json.loads((tmp_path / "scores" / "answers" / f"{name}.json").read_text())["answers"] for name in (
        "query_only", "decoder_alone", "copied_ending", "predicted_from_another_task_K=2",
        "mean_of_the_predicted_updates_K=2",
    )}  # fmt: skip
    each = [update.adapt(decoder, episode.support).adapter for episode in episodes]
    changes = {n: sum(a.b[n] @ a.a[n] for a in each) / 6 for n in base.a}  # of weights, the base's among them
    mean = update.mean_over(decoder, [episode.support for episode in episodes]).base
    for name, change in changes.items():
        torch.testing.assert_close(mean.b[name] @ mean.a[name], change, atol=1e-5, rtol=1e-4)
    for number, episode in enumerate(episodes):
        ending = " ".join(episode.query.answer.split()[-3:])
        assert kept["copied_ending"][number] == f"{kept['decoder_alone'][number]} {ending}"
        bare = replace(episode.query, passages=())
        given = decoder.generate([bare.chat()], Sampling(max_new_tokens=4))[0].text.strip()
        assert kept["query_only"][number] == given
        others = [e for e in episodes[number + 1 :] + episodes[:number] if e.task != episode.task]
        adapted = decoder.adapt(others[0].support, update)
        given = adapted.generate([episode.query.chat()], Sampling(max_new_tokens=4))[0].text.strip()
        assert kept["predicted_from_another_task_K=2"][number] == given

    # What is there is not made again; what was made otherwise is refused.
    monkeypatch.setattr("ctx_compress_rag.training.run.run_recipe", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(
        "ctx_compress_rag.adaptation.evaluation.generate_together", lambda *_: pytest.fail("answered again")
    )
    scores = evaluate(tmp_path / "recipes", tmp_path / "scores", questions=6, timed=1, max_new_tokens=4, progress=False)
    assert table(scores).splitlines()[3].split(" | ")[1] == lines[2].split(" | ")[1]
    files["k1"].write_text(files["k1"].read_text().replace("code: 4", "code: 5"))
    assert main(command) == 2
    assert "before" in (error := capsys.readouterr().err) and "k1.yaml was changed" in error


def test_a_budget_shortens_every_recipe_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    files = _recipes(tmp_path, Path("demo"), steps=50)
    solved = {"folder": str(tmp_path / "kept"), "contexts": 90, "steps": [1, 2]}
    files["k1"].write_text(yaml.safe_dump(yaml.safe_load(files["k1"].read_text()) | {"solved": solved}))
    texts = {file: file.read_text() for file in files.values()}
    whole = Recipes.find(tmp_path / "recipes")
    short = whole.shortened(7, tmp_path / "quick")
    assert Recipes.find(tmp_path / "quick" / "recipes") == short
    for before, after in zip((whole.base, *whole.others), (short.base, *short.others), strict=True):
        assert after.optim.steps == 7 and after.output.is_relative_to(tmp_path / "quick")
        own = {"output": before.output, "optim": before.optim}
        if isinstance(before, UpdatePredictorRecipe):
            assert isinstance(after, UpdatePredictorRecipe)
            assert after.base == short.base.output
            own |= {"base": before.base, "solved": before.solved}
            if after.solved is not None:
                assert after.solved.contexts == 14 and after.solved.folder.is_relative_to(tmp_path / "quick")
        assert after.model_copy(update=own) == before
    assert whole.shortened(80, tmp_path / "quick").base.optim.steps == 50
    assert {file: file.read_text() for file in files.values()} == texts
    with pytest.raises(ConfigError, match="steps"):
        whole.shortened(0, tmp_path / "none")


def _score(system: str, f1: float, low: float, adapt_ms: float) -> SystemScore:
    interval = Interval(f1, f1 - 0.05, f1 + 0.05)
    return SystemScore(
        system, interval, interval, Interval(f1 - 0.3, low, f1), {}, AdaptationCost(adapt_ms, 1.0, 1.0, 1.0), 6
    )


@pytest.mark.parametrize(
    ("f1", "low", "adapt_ms", "met"),
    [(0.5, 0.1, 5.0, [1, 1, 1]), (0.49, 0.0, 9.9, [0, 1, 1]), (0.47, 0.1, 9.9, [1, 0, 1]), (0.6, 0.1, 10.0, [1, 1, 0])],
)
def test_the_verdict_says_what_is_met(f1: float, low: float, adapt_ms: float, met: list[int]) -> None:
    scores = [_score("base adapter", 0.3, 0.0, 0.0), _score("TT-SGD, K=1", 0.9, 0.1, 1.0)]
    scores += [_score("TT-SGD, K=5", 0.5, 0.1, 100.0), _score("RAG-GD, K=5", f1, low, adapt_ms)]
    [line] = verdict(scores).splitlines()
    assert line.startswith("- RAG-GD, K=5: ")
    assert [int(said == "is") for said in re.findall(r"\*\*(is|is not)\*\*", line)] == met


def test_the_command_reads_files_and_slots(
    tmp_path: Path, bundle_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks from files, passages as slots from the store, one predictor; a file asks as many as it has."""
    monkeypatch.setitem(evaluate.__kwdefaults__, "tuning", 2)
    for task in ("one", "two"):
        rows = [Example((f"{task} has {i}.", "More."), (Turn(f"What has {task}, {i}?", (str(i),)),)) for i in range(8)]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)
    data = {"files": [str(tmp_path / "one.jsonl")], "passages": 1}
    files = _recipes(tmp_path, bundle_folder, steps=1, ratio=4, data=data)
    for name in ("prefix", "k2", "task"):
        files[name].unlink()
    command = ["adapt-eval", "--recipes", str(tmp_path / "recipes"), "--data", str(tmp_path / "two.jsonl")]
    command += ["--questions", "9", "--timed", "1", "--max-tokens", "3", "--output", str(tmp_path / "scores")]
    assert main(command) == 0
    assert "\n4 questions, each with demonstrations" in capsys.readouterr().out
    kept = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert [s["system"] for s in kept["scores"]][-4:] == [
        "TT-SGD, K=1", "RAG-GD, K=1", "TT-SGD, K=1, tuned", "mean of the predicted updates, K=1",
    ]  # fmt: skip
    assert all(set(s["by_task"]) == {"two"} for s in kept["scores"])
    assert kept["questions"] == 4
    assert kept["data"] == ["two.jsonl"]

    # Other questions under the same name: answers are made anew, of one passage each.
    asked: list[str] = []
    answer = evaluation.generate_together

    def watched(decoders: Any, chats: Any, sampling: Any) -> Any:
        asked.extend(chat[0]["content"] for chat in chats)
        return answer(decoders, chats, sampling)

    monkeypatch.setattr(evaluation, "generate_together", watched)

    def edit(task: str) -> None:
        rows = [Example((f"{task} had {i}.", "More."), (Turn(f"Which had {task}, {i}?", ("no",)),)) for i in range(8)]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)

    edit("two")
    assert main(command) == 0
    assert asked and all(re.fullmatch(r"(\[\[\S+\]\])?\n\nQuestion: Which had two, \d\?", text) for text in asked)

    # Training data with other contents are refused, as are contexts solved for the former ones.
    edit("one")
    capsys.readouterr()
    assert main(command) == 2
    assert f"base was made before {tmp_path / 'one.jsonl'} was changed: remove it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="other settings: remove this folder"):
        run_recipe(files["k1"], resume=False)


@pytest.mark.parametrize(("rows", "named"), [(0, "no data file at"), (3, "the task asked has 3 questions")])
def test_files_to_score_with_are_read_before_anything_is_trained(
    rows: int, named: str, tmp_path: Path, bundle_folder: Path
) -> None:
    _recipes(tmp_path, bundle_folder, steps=1)
    if rows:
        asked = [Example(("A passage.",), (Turn(f"Which is it, {i}?", (str(i),)),)) for i in range(rows)]
        write_jsonl(tmp_path / "asked.jsonl", asked)
    with pytest.raises(DataError, match=named):
        evaluate(tmp_path / "recipes", tmp_path / "scores", files=[str(tmp_path / "asked.jsonl")])
    assert not list(tmp_path.rglob("training_report.json"))
