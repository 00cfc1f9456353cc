"""The teacher's distributions kept on disk: what they amount to, and that nothing depends on when they were made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import add_teacher
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.text.templates import PromptBuilder
from ctx_compress_rag.training.objectives.base import SlotObjective
from ctx_compress_rag.training.objectives.distillation import DistillationCollator, DistillationLoss
from ctx_compress_rag.training.objectives.likelihood import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.objectives.teacher_targets import FOLDER, KeptTargets, grouped, teacher_digest
from ctx_compress_rag.training.recipe import load_recipe
from ctx_compress_rag.training.run import run_recipe
from helpers.adaptation import random_adapter
from helpers.models import draw_lora
from helpers.processes import run_by
from helpers.training import UNLIKE, killed, losses, report, write_recipe

VOCABULARY = 40


def _plain(teacher: Sequence[float], student: Sequence[float], top: int) -> float:
    """KL over the teacher's `top` likeliest tokens and the sum of the others, one number at a time."""
    order = sorted(range(len(teacher)), key=lambda token: -teacher[token])
    pairs = [(teacher[token], student[token]) for token in order[:top]]
    if top < len(teacher):
        pairs.append((math.fsum(teacher[t] for t in order[top:]), math.fsum(student[t] for t in order[top:])))
    return math.fsum(p * math.log(p / q) for p, q in pairs)


def _distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a teacher and a student, flat and peaked."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.5, 2.0, 5.0, 15.0], dtype=torch.float64)[:, None]
    draws = [torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2)]
    teacher, student = ((scales * draw).log_softmax(1) for draw in draws)
    return teacher, student


def test_grouping_bounds_the_divergence_and_is_it_where_all_tokens_are_kept() -> None:
    teacher, student = _distributions()
    probabilities = [each.exp().tolist() for each in (teacher, student)]
    before = [0.0] * 4
    for top in (1, 2, 7, 39, VOCABULARY):
        tokens = teacher.topk(top).indices
        found = F.kl_div(grouped(student, tokens), grouped(teacher, tokens), reduction="none", log_target=True).sum(1)
        assert found.tolist() == pytest.approx([_plain(p, q, top) for p, q in zip(*probabilities, strict=True)])
        assert all(more >= less - 1e-12 for more, less in zip(found.tolist(), before, strict=True))
        before = found.tolist()
    full = (teacher.exp() * (teacher - student)).sum(1)
    assert before == pytest.approx(full.tolist(), rel=1e-12)


@pytest.mark.parametrize("top", [1, 7, VOCABULARY])
def test_what_is_read_back_has_the_same_divergence_and_gradient(tmp_path: Path, tiny_bundle: Any, top: int) -> None:
    """Up to what 2 bytes round: of four answer tokens that belong to two prompts."""
    teacher, student = _distributions()
    prompts = [Prompt.of(torch.tensor([n])).then(torch.tensor([5, 6])) for n in range(2)]
    objective = DistillationLoss(tiny_bundle)
    for read in (lambda _: list(teacher.float().split(2)), lambda _: []):  # the second time there is nothing to read
        targets = KeptTargets(tmp_path, top, "teacher").of(prompts, read)
        logits = student.float().requires_grad_()
        loss = objective.divergence(logits, targets, [1, 0])
        rows = [2, 3, 0, 1]
        expected = sum(_plain(teacher[r].exp().tolist(), student[i].exp().tolist(), top) for i, r in enumerate(rows))
        assert float(loss.detach()) == pytest.approx(expected, rel=2e-3)
        loss.backward()
        if top == VOCABULARY:
            assert logits.grad is not None
            assert torch.allclose(logits.grad, (student.exp() - teacher[rows].exp()).float(), atol=2e-3)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 1000 + 4 * (6 * top + 2)


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts the teacher reads, pass after pass."""
    passes: list[int] = []
    real = SlotObjective.teacher_log_probs

    def noted(self: SlotObjective, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        passes.append(len(prompts))
        return real(self, prompts)

    monkeypatch.setattr(SlotObjective, "teacher_log_probs", noted)
    return passes


@pytest.mark.parametrize("stage", ["distillation", "answer"])
def test_the_teacher_reads_what_is_not_kept(
    make_tiny_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The loss of a batch is the same whichever of its examples were kept; with all tokens it is the exact one."""
    bundle = make_tiny_bundle(seed=3)
    draw_lora(bundle.backbone.model, adapter="reader")
    of_answers: Any = (DistillationLoss(bundle), DistillationCollator)
    if stage == "answer":
        of_answers = (LikelihoodLoss(bundle, self_distillation=2.0), AnswerCollator)
    objective, collator = of_answers
    collate = collator(PromptBuilder(bundle.tokenizer), ["{context}\n\n{question}"], 512, seed=0, with_text=True)
    passes = _noted(monkeypatch)

    def loss(*numbers: int) -> float:
        with torch.no_grad():
            return float(objective(**collate([UNLIKE[n] for n in numbers]))["loss"])

    exact = loss(0, 1, 2)
    for top in (8, len(bundle.tokenizer)):
        objective.kept = KeptTargets(tmp_path / str(top), top, "teacher")
        passes.clear()
        alone = loss(1)
        mixed = loss(0, 1, 2, 0)
        again = loss(0, 1, 2, 0)
        assert passes == [1, 2]
        objective.kept = KeptTargets(tmp_path / f"{top} anew", top, "teacher")
        assert (loss(0, 1, 2, 0), loss(1)) == pytest.approx((mixed, alone), rel=1e-5)
        assert again == mixed
        three = loss(0, 1, 2)
        assert three < exact if top == 8 else three == pytest.approx(exact, rel=1e-3)


def test_half_a_file_is_made_again(tmp_path: Path) -> None:
    prompt = Prompt.of(torch.tensor([1, 2])).then(torch.tensor([3]))
    kept, passes = KeptTargets(tmp_path, 2, "teacher"), []

    def read(prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        passes.append(len(prompts))
        return [torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()]

    [whole] = kept.of([prompt], read)
    [file] = tmp_path.rglob("*.safetensors")
    content = file.read_bytes()
    for damaged in (b"", content[:5], content[:-1], bytes(len(content))):
        file.write_bytes(damaged)
        passes.clear()
        for _ in range(2):
            [found] = kept.of([prompt], read)
            assert torch.equal(found.log_probs, whole.log_probs) and found.tokens.tolist() == [[3, 2]]
        assert passes == [1] and file.read_bytes() == content
    assert list(tmp_path.rglob("*.part")) == []
    # Another teacher, another number of tokens, an answer that begins elsewhere: nothing of these is kept.
    other = Prompt.of(torch.tensor([1])).then(torch.tensor([2, 3]))
    for changed, asked in ((KeptTargets(tmp_path, 2, "b"), prompt), (KeptTargets(tmp_path, 3, "teacher"), prompt)):
        changed.of([asked], read)
    kept.of([other], read)
    assert passes == [1, 1, 1, 1]


def test_a_teacher_is_known_by_its_weights(make_tiny_bundle: Any, tmp_path: Path) -> None:
    def taught(seed: int, alpha: int) -> Any:
        """A bundle with a teacher's adapter."""
        bundle = make_tiny_bundle(seed=3)
        folder = tmp_path / f"{seed} {alpha}"
        random_adapter(bundle.backbone.copy_model(), 2, seed=seed).save_pretrained(folder)
        config = LoraConfig.from_pretrained(str(folder))
        config.lora_alpha = alpha
        config.save_pretrained(str(folder))
        add_teacher(bundle.backbone, folder)
        return bundle

    one = make_tiny_bundle(seed=3)
    digest = teacher_digest(one)
    with torch.no_grad():
        for parameter in one.compressor.trained_parameters() + one.reader.trained_parameters():
            parameter.add_(1.0)
    assert teacher_digest(one) == digest == teacher_digest(make_tiny_bundle(seed=3, embedding_skip=True))
    assert teacher_digest(taught(0, 4)) == teacher_digest(taught(0, 4))
    assert len({digest, *(teacher_digest(taught(*each)) for each in ((0, 4), (1, 4), (0, 8)))}) == 4
    with torch.no_grad():
        one.backbone.model.lm_head.weight[0, 0] += 1e-6  # less than half precision sees
    assert teacher_digest(one) != digest


CUT: dict[str, Any] = {"steps": 6, "save_every": 2, "batch_size": 2, "learning_rate": 1e-2}


def _three(decoder: Path) -> dict[str, Any]:
    """Data that are no multiple of a batch: batches and processes meet an example in other company in each epoch."""
    write_jsonl(decoder / "three.jsonl", UNLIKE[:3])
    return {"files": [str(decoder / "three.jsonl")], "max_turns": 2}


@pytest.mark.parametrize("stage", ["distillation", "answer"])
def test_an_interrupted_training_ends_as_one_that_was_not(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Each example is read once, by whichever of the runs comes to it first."""
    changes: dict[str, Any] = {"teacher_top": 8, "teacher": str(decoder / "base"), "data": _three(decoder)}
    if stage == "answer":
        changes["self_distillation"] = 2.0
    passes = _noted(monkeypatch)
    whole = run_recipe(write_recipe(decoder, stage, tmp_path / "whole", CUT, **changes))
    assert sum(passes) == len(list((whole / FOLDER).rglob("*.safetensors"))) == 3
    cut = write_recipe(decoder, stage, tmp_path / "cut", CUT, **changes)
    with killed(after=3):
        run_recipe(cut)
    passes.clear()
    run_recipe(cut)
    assert passes == [] and report(tmp_path / "cut")["resumed"] is True
    assert len(losses(whole)) == 6 and losses(tmp_path / "cut") == pytest.approx(losses(whole), rel=1e-4)
    exact = run_recipe(write_recipe(decoder, stage, tmp_path / "exact", CUT, **changes | {"teacher_top": None}))
    assert sum(passes) == 12 and not (exact / FOLDER).exists()
    everything = write_recipe(decoder, stage, tmp_path / "all", CUT, **changes | {"teacher_top": 100_000})
    assert losses(run_recipe(everything)) == pytest.approx(losses(exact), rel=1e-2)
    with killed(after=3):
        run_recipe(cut, resume=False)
    with pytest.raises(ConfigError, match="teacher_top 8 there, 9 in the recipe"):
        run_recipe(write_recipe(decoder, stage, tmp_path / "cut", CUT, **changes | {"teacher_top": 9}))


def test_a_changed_teacher_is_not_mixed_with_the_one_before(decoder: Path, tmp_path: Path) -> None:
    """Trained anew in its folder while the student was interrupted: the student begins anew, and reads it anew."""
    data = _three(decoder)

    def teach(seed: int) -> Path:
        recipe = write_recipe(decoder, "adapter", tmp_path / "lora", {"steps": 2, "learning_rate": 0.5}, seed=seed)
        return run_recipe(recipe, resume=False)

    def student(name: str) -> Path:
        changes = {"teacher": str(tmp_path / "lora"), "teacher_top": 8, "data": data}
        return write_recipe(decoder, "distillation", tmp_path / name, CUT, **changes)

    teach(0)
    former = run_recipe(student("former"))
    with killed(after=3):
        run_recipe(student("cut"))
    teach(1)
    with pytest.raises(ConfigError, match="lora with other contents"):
        run_recipe(student("cut"))
    cut, fresh = losses(run_recipe(student("cut"), resume=False)), losses(run_recipe(student("fresh")))
    assert cut == pytest.approx(fresh, rel=1e-5)
    assert cut != pytest.approx(losses(former), rel=0.01)
    assert len(list((tmp_path / "cut" / FOLDER).rglob("*.safetensors"))) == 6


@pytest.mark.slow
def test_processes_share_what_is_kept(decoder: Path, tmp_path: Path) -> None:
    """An example that another process read in an epoch before is not read again."""
    changes = {"teacher_top": 8, "teacher": str(decoder / "base"), "data": _three(decoder)}
    alone = run_recipe(write_recipe(decoder, "distillation", tmp_path / "alone", CUT, **changes))
    shared = write_recipe(decoder, "distillation", tmp_path / "shared", CUT, **changes)
    run_by(2, tmp_path / "told", ("kill", shared, 3), ("train", shared))
    assert losses(tmp_path / "shared") == pytest.approx(losses(alone), rel=1e-3)
    kept = [{file.name: load_file(file) for file in (f / FOLDER).rglob("*.*")} for f in (alone, tmp_path / "shared")]
    assert len(kept[0]) == 3 and kept[0].keys() == kept[1].keys()


@pytest.mark.parametrize(
    ("stage", "optim", "named"),
    [("distillation", {"shard": "frozen"}, "teacher_top one of them"), ("answer", {}, "needs self_distillation")],
)
def test_what_needs_every_pass_of_a_teacher_or_has_none_is_refused(
    decoder: Path, tmp_path: Path, stage: str, optim: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_recipe(write_recipe(decoder, stage, tmp_path / "run", optim, teacher_top=8))
