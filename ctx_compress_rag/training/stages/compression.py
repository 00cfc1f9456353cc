"""Stages that train a compressor and its reader: where they start, what they minimise, and what they save."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.text.templates import PromptBuilder
from ctx_compress_rag.text.tokenizing import text_ids
from ctx_compress_rag.training.compression_config import (
    AnswerRecipe,
    CompressionRecipe,
    DistillationRecipe,
    NextTokenRecipe,
    RamRecipe,
    ReconstructionRecipe,
    TaughtRecipe,
)
from ctx_compress_rag.training.engine.checkpointing import layers_of
from ctx_compress_rag.training.engine.loop import Collate, Examples, Job, StepHook, training_device
from ctx_compress_rag.training.engine.speedups import make_fast
from ctx_compress_rag.training.examples import load_examples
from ctx_compress_rag.training.objectives.base import SlotObjective
from ctx_compress_rag.training.objectives.distillation import DistillationCollator, DistillationLoss, with_repeats
from ctx_compress_rag.training.objectives.likelihood import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.objectives.next_token import NextTokenCollator
from ctx_compress_rag.training.objectives.ram import RamCollator, RamLoss
from ctx_compress_rag.training.objectives.reconstruction import ReconstructionCollator, passages_of
from ctx_compress_rag.training.objectives.teacher_targets import FOLDER, KeptTargets, teacher_digest
from ctx_compress_rag.training.probe import soft_probe
from ctx_compress_rag.training.stage import Stage, register

logger = logging.getLogger(__name__)

Objective = Callable[[Any, Bundle], tuple[SlotObjective, Collate]]
"""Makes the loss and the collator from a recipe and the bundle to train."""

Arrange = Callable[[Any, list[Example]], Examples]
"""Prepares a recipe's examples for the collator: as many, in the same order."""

OBJECTIVES: dict[str, Objective] = {}
"""The objectives by stage."""


def register_objective(recipe: type[CompressionRecipe], objective: Objective, arrange: Arrange | None = None) -> None:
    """Register a stage that trains a bundle under its recipe's literal `stage`.

    Args:
        recipe: the class of its recipes.
        objective: what it minimises.
        arrange: prepares the examples before they are divided into micro-batches; None: not needed.
    """
    OBJECTIVES[register(Stage(recipe, partial(start, arrange=arrange)))] = objective


def start(recipe: CompressionRecipe, resume: bool, arrange: Arrange | None = None) -> Job:
    """Make the job that trains a bundle on the recipe's examples."""
    examples = load_examples(recipe)
    if recipe.recites:
        examples = passages_of(examples)
    bundle = start_bundle(recipe, examples)
    objective, collate = OBJECTIVES[recipe.stage](recipe, bundle)
    objective.seed = recipe.seed
    if isinstance(recipe, TaughtRecipe) and recipe.teacher_top:
        objective.kept = KeptTargets(recipe.output / FOLDER, recipe.teacher_top, teacher_digest(bundle))
    make_fast(bundle.backbone.model, recipe.optim, dynamic=True, saved=bundle.config.decoder is None)

    def choose_ratios(step: int) -> None:
        part = recipe.curriculum_at(step)
        objective.step, objective.ratios = step, recipe.ratios_at(step)
        objective.sample = part.sample if part.each == "example" else None

    arranged = arrange(recipe, examples) if arrange else examples
    return bundle_job(recipe, bundle, objective, arranged, collate, choose_ratios)


def bundle_job(
    recipe: CompressionRecipe,
    bundle: Bundle,
    objective: SlotObjective,
    examples: Examples,
    collate: Collate,
    on_step: StepHook | None = None,
) -> Job:
    """Make a job that trains a bundle and saves it; its report includes those of earlier stages."""
    earlier = {"earlier": bundle.report} if bundle.report else {}

    def save(report: dict[str, Any]) -> None:
        bundle.report = report
        bundle.save_pretrained(recipe.output / "bundle", int8=recipe.int8)

    return Job(
        objective,
        examples,
        collate,
        save,
        about=earlier,
        on_step=on_step,
        probe=soft_probe(bundle, recipe.probe) if recipe.probe else None,
        probe_every=recipe.probe.every if recipe.probe else 1,
        layers=layers_of(bundle),
    )


def start_bundle(recipe: CompressionRecipe, examples: list[Example]) -> Bundle:
    """The bundle that training starts from."""
    settings: dict[str, Any] = {
        "name": recipe.name,
        "base_ratio": recipe.base_ratio,
        "ratios": recipe.ratios,
        "max_tokens": recipe.window,
        "reads": recipe.reads,
    }
    if recipe.asks:
        settings |= {"template": recipe.data.templates[0], "answer_tokens": recipe.data.max_answer_tokens}
    if recipe.method is not None:
        settings["method"] = recipe.method
    if recipe.bundle is not None:
        return Bundle.from_pretrained(recipe.bundle, device=training_device(), changes=settings)
    assert recipe.decoder is not None
    if recipe.teacher is not None and isinstance(recipe.decoder, str):
        _compare_decoders(recipe.teacher, recipe.decoder)
    model, tokenizer = load_decoder(recipe.decoder, recipe.revision, training_device())
    decoder: str | GgufDecoder | None = recipe.decoder
    revision = recipe.revision
    if isinstance(decoder, str) and Path(decoder).is_dir():
        decoder, revision = None if recipe.copy_decoder else str(Path(decoder).resolve()), None
    config = BundleConfig(decoder=decoder, revision=revision, **settings)
    backbone = Backbone(model, tokenizer)
    if backbone.window is not None and recipe.window > backbone.window:
        raise ConfigError(f"window {recipe.window} is longer than the decoder's {backbone.window} positions: lower it")
    bundle = Bundle.build(config, backbone, teacher=recipe.teacher)
    if recipe.reader_from_teacher:
        bundle.reader_from_teacher()
    if recipe.fit_passages:
        _fit_reader(bundle, examples, recipe.fit_passages)
    else:
        slots = [soft.slots for soft in bundle.compress([p for e in examples[:8] for p in e.passages])]
        bundle.reader.initialise(float(torch.cat(slots).pow(2).mean().sqrt()))
    return bundle


def _compare_decoders(teacher: Path, decoder: str) -> None:
    """Warn of a teacher for another decoder. Not an error: a decoder's folder may have been moved."""
    file = teacher / "adapter_config.json"
    own = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") if file.exists() else None
    if own and Path(own).resolve() != Path(decoder).resolve():
        logger.warning(
            "teacher %s was trained on the decoder %r, not %r: if these differ, train it on yours",
            teacher,
            own,
            decoder,
        )


def _fit_reader(bundle: Bundle, examples: list[Example], passages: int) -> None:
    """Fit the reader to map a slot of one token to that token's embedding.

    If the method's slots are larger, the target is the mean embedding of a slot's tokens.
    """
    texts = [text for e in passages_of(examples)[:passages] for text in e.passages]
    softs = bundle.compress(texts, ratio=1)
    embed = bundle.backbone.embeddings
    targets: list[torch.Tensor] = []
    with torch.no_grad():
        for text, soft in zip(texts, softs, strict=True):
            ids = torch.tensor(text_ids(bundle.tokenizer, text), device=bundle.backbone.device)
            tokens = embed(ids).float()
            targets += [part.mean(0) for part in tokens.split(soft.token_counts.tolist())]
    slots = torch.cat([soft.slots for soft in softs]).to(bundle.backbone.device)
    bundle.reader.fit(slots, torch.stack(targets))


def _builder(recipe: CompressionRecipe, bundle: Bundle) -> PromptBuilder:
    config = bundle.config
    return PromptBuilder(bundle.tokenizer, recipe.data.max_answer_tokens, config.separator, config.answer_prefix)


def _distillation(recipe: DistillationRecipe, bundle: Bundle) -> tuple[SlotObjective, Collate]:
    data, builder = recipe.data, _builder(recipe, bundle)
    same_passes = bool(recipe.reconstruction_weight and recipe.optim.shard)
    return (
        DistillationLoss(bundle, recipe.reconstruction_weight),
        DistillationCollator(builder, data.templates, data.max_context_tokens, recipe.seed, same_passes=same_passes),
    )


def _repeating(recipe: DistillationRecipe, examples: list[Example]) -> Examples:
    if not recipe.reconstruction_weight:
        return examples
    return with_repeats(examples, recipe.optim.batch_size, recipe.repeat_per_batch, recipe.seed)


def _next_token(recipe: NextTokenRecipe, bundle: Bundle) -> tuple[SlotObjective, Collate]:
    data = recipe.data
    return LikelihoodLoss(bundle), NextTokenCollator(bundle.tokenizer, data.max_context_tokens, data.max_answer_tokens)


def _reconstruction(recipe: ReconstructionRecipe, bundle: Bundle) -> tuple[SlotObjective, Collate]:
    longest = recipe.data.max_context_tokens
    whole = PromptBuilder(bundle.tokenizer, longest + 1)  # and the end token
    return LikelihoodLoss(bundle), ReconstructionCollator(whole, recipe.paraphrases, longest, recipe.seed)


def _answer(recipe: AnswerRecipe, bundle: Bundle) -> tuple[SlotObjective, Collate]:
    data, distil = recipe.data, recipe.self_distillation
    return LikelihoodLoss(bundle, distil), AnswerCollator(
        _builder(recipe, bundle), data.templates, data.max_context_tokens, recipe.seed, with_text=distil > 0
    )


def _ram(recipe: RamRecipe, bundle: Bundle) -> tuple[SlotObjective, Collate]:
    data, builder = recipe.data, _builder(recipe, bundle)
    return (
        RamLoss(bundle, builder, recipe.temperature, recipe.contrastive),
        RamCollator(builder, data.templates, data.max_context_tokens, recipe.seed, bundle.config.base_ratio),
    )


register_objective(DistillationRecipe, _distillation, _repeating)
register_objective(NextTokenRecipe, _next_token)
register_objective(ReconstructionRecipe, _reconstruction)
register_objective(AnswerRecipe, _answer)
register_objective(RamRecipe, _ram)
