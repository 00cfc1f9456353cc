"""Tasks and episodes from files; the stages that train adapters and predictors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.adaptation.hypertuning import TaskObjective
from benchmarks.adaptation.prompt_tuning import PromptTuningLoss, with_prefix
from ctx_compress_rag.adaptation.adapt import demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import TaskData
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig
from ctx_compress_rag.adaptation.stages import AdaptationTasks, MatchingLoss, RetrievalAdapterLoss, shuffled_passes
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.run import parse_recipe, run_recipe
from helpers.adaptation import DEMONSTRATIONS, QUESTIONS, random_adapter
from helpers.training import report, settings_of, small_recipes


def test_each_stage_leaves_what_can_be_loaded(bundle_folder: Path, adaptive: Decoder, tmp_path: Path) -> None:
    for recipe in small_recipes(tmp_path, bundle_folder).values():
        run_recipe(recipe)
    model = adaptive.bundle.backbone.model
    base = Adapter.from_pretrained(tmp_path / "out" / "base", model)
    assert (base.rank, base.scale) == (2, 2.0)
    assert all(b.abs().sum() > 0 for b in base.b.values())
    assert with_prefix(adaptive, tmp_path / "out" / "prefix").preparer.prepare(["x"])[0].slots == 3
    for name, steps in (("k1", 1), ("k2", 2), ("task", 1)):
        update = PredictedUpdate.from_pretrained(tmp_path / "out" / name, adaptive)
        assert (update.config.inner_steps, update.config.demonstrations) == (steps, 2)
        assert all(torch.equal(update.base.b[n], base.b[n]) for n in base.b)
        told = report(tmp_path / "out" / name)
        assert told["steps"] == 2 and told["fingerprint"] == adaptive.bundle.fingerprint
        assert told["tokens"] > 0


def test_one_step_moves_what_is_trained_and_nothing_else(adaptive: Decoder) -> None:
    """Every objective: the decoder's parameters keep every bit."""
    bundle = adaptive.bundle
    rows, queries = (demonstration_prompts(adaptive, shown) for shown in (DEMONSTRATIONS[:2], DEMONSTRATIONS[2:3]))
    base = random_adapter(bundle.backbone.model, 2, seed=1)
    config = PredictorConfig(inner_steps=2, inner_learning_rate=0.1, demonstrations=2, hidden=8, code=4)
    adapter_loss = RetrievalAdapterLoss(bundle, 2, 4)
    for b in adapter_loss.b:
        torch.nn.init.normal_(b, std=0.1)  # zero leaves `a` without a gradient in the first step
    contexts = {"numbers": [0], "contexts": [rows]}
    objectives = [
        (adapter_loss, {"rows": rows}),
        (PromptTuningLoss(bundle, 3, seed=0), {"rows": rows}),
        (MatchingLoss(bundle, PredictedUpdate.build(base, bundle, config), 0.1), contexts),
        (TaskObjective(bundle, PredictedUpdate.build(base, bundle, config), lambda numbers: queries), contexts),
    ]
    frozen = {n: p.detach().clone() for n, p in bundle.backbone.model.named_parameters()}
    frozen |= {f"reader {n}": p.detach().clone() for n, p in bundle.reader.named_parameters()}
    for objective, batch in objectives:
        trained = dict(objective.named_parameters())
        before = {n: p.detach().clone() for n, p in trained.items()}
        optimizer = torch.optim.SGD(trained.values(), lr=1.0)
        objective(**batch)["loss"].backward()
        optimizer.step()
        still = [n for n, p in trained.items() if torch.equal(p, before[n])]
        assert trained and not still, type(objective)
    now = dict(bundle.backbone.model.named_parameters())
    now |= {f"reader {n}": p for n, p in bundle.reader.named_parameters()}
    assert all(torch.equal(now[n], value) and now[n].grad is None for n, value in frozen.items())


def test_kept_contexts_give_the_loss_of_those_solved_now(adaptive: Decoder) -> None:
    """To bfloat16's rounding; and a context that was solved once is not read again."""
    bundle = adaptive.bundle
    base = random_adapter(bundle.backbone.model, 2, seed=1)
    config = PredictorConfig(inner_steps=3, inner_learning_rate=0.1, demonstrations=1, hidden=8, code=4)
    update = PredictedUpdate.build(base, bundle, config)
    contexts = [demonstration_prompts(adaptive, [each]) for each in (*DEMONSTRATIONS, *QUESTIONS)]
    keeping = MatchingLoss(bundle, update, 0.1, keep=True)
    keeping([0, 5, 3], [contexts[0], contexts[5], contexts[3]])
    kept = keeping([5, 2], [contexts[0], contexts[2]])["loss"]  # of number 5, another context now
    now = MatchingLoss(bundle, update, 0.1)([5, 2], [contexts[5], contexts[2]])["loss"]
    assert float(kept.detach()) == pytest.approx(float(now.detach()), rel=1e-3)
    kept.backward()
    assert all(p.grad is not None for p in update.predictor.parameters())


def test_every_context_is_met_equally_often() -> None:
    numbers = shuffled_passes(5, 13, seed=0)
    assert [sorted(numbers[i : i + 5]) for i in (0, 5)] == [list(range(5))] * 2
    assert numbers[:5] != numbers[5:10] and len(set(numbers[10:])) == 3
    assert shuffled_passes(5, 13, seed=0) == numbers != shuffled_passes(5, 13, seed=1)


def test_held_out_questions_never_reach_training(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [Example(("A text.", f"Text {i}."), (Turn(f"Question {i}?", ("yes",)),)) for i in range(4)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", [Example(("Another.",), rows[2].turns)])
    data = TaskData(files=[tmp_path / "train.jsonl"], held_out=[tmp_path / "test.jsonl"], passages=1)
    builder = TrainingPromptBuilder(tiny_tokenizer)
    [kept] = AdaptationTasks(data, builder).examples.values()
    assert [e.turns[0].question for e in kept] == ["Question 0?", "Question 1?", "Question 3?"]
    # One corpus: the same passage is retrieved for a question of training and for one that is held out.
    write_jsonl(tmp_path / "test.jsonl", [Example(rows[2].passages, (Turn("Another question?", ("no",)),))])
    tasks = AdaptationTasks(data, builder)
    assert [len(examples) for examples in tasks.examples.values()] == [4]
    assert tasks.draw(0, 0, seed=0).query.passages == ("A text.",)


@pytest.mark.parametrize("change", [{"bundle": "x"}, {"decoder": None}])
def test_a_recipe_names_a_decoder_or_a_bundle(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either decoder"):
        parse_recipe(settings_of(Path("x"), "retrieval_adapter", Path("out"), **change), "test")


def test_files_are_tasks(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Support and question are of one file, never the same row, and cut to the tokens allowed."""
    for task in ("one", "two"):
        rows = [
            Example(
                (f"Passage {i} of {task}. " * 30, "Short."), (Turn(f"Question {i} of {task}?", (f"answer {i} " * 9,)),)
            )
            for i in range(5)
        ]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)

    def tasks_of(*names: str) -> AdaptationTasks:
        files = [tmp_path / f"{name}.jsonl" for name in names]
        return AdaptationTasks(
            TaskData(files=files, max_context_tokens=40, max_answer_tokens=6), TrainingPromptBuilder(tiny_tokenizer)
        )

    tasks = tasks_of("one", "two")
    episodes = [tasks.draw(number, 3, seed=0) for number in range(30)]
    assert episodes[7] == tasks.draw(7, 3, seed=0) != tasks.draw(7, 3, seed=2)
    seen = set()
    for episode in episodes:
        seen.add(episode.task)
        whole = (*episode.support, episode.query)
        assert len({d.question for d in whole}) == 4
        for d in whole:
            assert episode.task in d.question and episode.task in d.passages[0]
            assert sum(len(tiny_tokenizer(p, add_special_tokens=False)["input_ids"]) for p in d.passages) <= 41
            assert len(tiny_tokenizer(d.answer, add_special_tokens=False)["input_ids"]) <= 7
    assert seen == {"one", "two"}
    rows = [Example((f"Passage {i}.",), (Turn(f"{i}?", (f"answer {i}",)),)) for i in range(25)]
    with pytest.raises(DataError, match="5 questions: 5 demonstrations"):
        tasks.draw(0, 5, seed=0)
    # A row given twice is one question: otherwise it could be asked when a demonstration has shown its answer.
    write_jsonl(tmp_path / "twice.jsonl", [*rows, *rows])
    assert tasks_of("twice").examples["twice"] == rows
    write_jsonl(tmp_path / "blank.jsonl", [*rows, Example(("A.",), (Turn("What is blank?", (" ",)),))])
    with pytest.raises(DataError, match=r"task blank: the first answer to 'What is blank\?' is blank"):
        tasks_of("blank")
    write_jsonl(tmp_path / "lonely.jsonl", rows[:1])
    with pytest.raises(DataError, match="lonely has one question"):
        tasks_of("lonely")
    with pytest.raises(DataError, match="one name"):
        tasks_of("one", "one")
