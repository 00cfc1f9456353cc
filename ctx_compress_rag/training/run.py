"""Run a recipe: what `ctx-compress train` calls."""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.adaptation.training import run_adaptation
from ctx_compress_rag.backbone import Backbone, load_decoder, lora_config
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.config import BundleConfig
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.data import Example, check_held_out, read_jsonl, world_examples
from ctx_compress_rag.training.loop import Collate, is_main_process, train
from ctx_compress_rag.training.objectives.base import SlotObjective
from ctx_compress_rag.training.objectives.distillation import DistillationCollator, DistillationLoss
from ctx_compress_rag.training.objectives.likelihood import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.objectives.next_token import NextTokenCollator
from ctx_compress_rag.training.objectives.ram import RamCollator, RamLoss
from ctx_compress_rag.training.objectives.reconstruction import ReconstructionCollator, passages_of
from ctx_compress_rag.training.prompts import PromptBuilder
from ctx_compress_rag.training.recipes import (
    AdaptationRecipe,
    CompressionRecipe,
    DistillationRecipe,
    NextTokenRecipe,
    RamRecipe,
    Recipe,
    ReconstructionRecipe,
    TeacherRecipe,
    load_recipe,
)

logger = logging.getLogger(__name__)


def run_recipe(path: str | Path, resume: bool = True) -> Path:
    """Run one recipe to its end and return its output folder.

    Under torchrun each process trains its share of every batch.
    """
    recipe = load_recipe(path)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(recipe.seed)
    # Softmax tails and Adam's moments reach subnormal numbers, on which a CPU is slow. Threads inherit
    # this when they start, so it comes before any work.
    torch.set_flush_denormal(True)
    recipe.output.mkdir(parents=True, exist_ok=True)
    logger.info("%s: %d steps, seed %d, into %s", path, recipe.optim.steps, recipe.seed, recipe.output)
    if isinstance(recipe, TeacherRecipe):
        report = _teacher(recipe, resume)
    elif isinstance(recipe, AdaptationRecipe):
        report = run_adaptation(recipe, resume)
    else:
        report = _compression(recipe, resume)
    report["recipe"] = recipe.model_dump(mode="json")
    if is_main_process():
        (recipe.output / "training_report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the next recipe may need what this one's first process has written
    return recipe.output


def _device() -> str:
    """Where training runs: not on an Apple GPU, which the loop does not use."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_examples(recipe: Recipe) -> list[Example]:
    """The recipe's training examples, checked against its held-out files."""
    data = recipe.data
    if data.world:
        examples = [
            example
            for part in data.world
            for example in world_examples(
                part.split, part.seed, part.examples, data.max_turns, part.passages, part.named
            )
        ]
        held_out = world_examples("test", 0, 400) + world_examples("dev", 0, 400)
    else:
        examples = [e for file in data.files for e in read_jsonl(file, data.max_turns)]
        random.Random(recipe.seed).shuffle(examples)  # files are mixed, as the paper mixes its datasets
        held_out = []
    held_out += [e for file in data.held_out for e in read_jsonl(file)]
    check_held_out(examples, held_out)
    if not examples:
        raise DataError("the recipe's data holds no examples")
    return examples


def _teacher(recipe: TeacherRecipe, resume: bool) -> dict[str, Any]:
    from peft import get_peft_model

    from ctx_compress_rag.training.teacher import AnswerLoss, TextCollator, new_decoder, save_decoder
    from ctx_compress_rag.training.tokenizer import train_tokenizer

    examples = load_examples(recipe)
    if recipe.scratch:
        tokenizer = train_tokenizer(
            _tokenizer_texts(recipe, examples), recipe.scratch.vocab_size, recipe.data.max_context_tokens
        )
        decoder = new_decoder(recipe.scratch.config, tokenizer)
    else:
        decoder, tokenizer = load_decoder(recipe.decoder or "", recipe.revision, _device())
        if recipe.tune.mode == "lora":
            decoder = get_peft_model(decoder, lora_config(recipe.tune))
        else:
            decoder.requires_grad_(recipe.tune.mode == "full")
    builder = PromptBuilder(tokenizer, recipe.data.max_answer_tokens)
    collate = TextCollator(builder, recipe.data.templates, recipe.data.max_context_tokens, recipe.seed)
    model = AnswerLoss(decoder, recipe.context_loss_weight)
    report = train(model, examples, collate, recipe.optim, recipe.output, recipe.seed, resume=resume)
    if not is_main_process():
        return report
    if recipe.tune.mode == "lora":
        decoder.save_pretrained(recipe.output)  # a peft adapter folder: the `teacher` of a distillation recipe
    else:
        save_decoder(decoder, tokenizer, recipe.output)
    return report


def _tokenizer_texts(recipe: TeacherRecipe, examples: list[Example]) -> Any:
    if recipe.data.world:
        from ctx_compress_rag.demo.world import tokenizer_texts

        yield from tokenizer_texts()
    else:
        yield from (passage for example in examples for passage in example.passages)
    yield from recipe.data.templates * 200


def _compression(recipe: CompressionRecipe, resume: bool) -> dict[str, Any]:
    examples = load_examples(recipe)
    if isinstance(recipe, ReconstructionRecipe):
        examples = passages_of(examples)
    bundle = _start(recipe, examples)
    objective, collate = _objective(recipe, bundle)

    def choose_ratios(step: int) -> None:
        objective.ratios = recipe.ratios_at(step)

    report = train(objective, examples, collate, recipe.optim, recipe.output, recipe.seed, choose_ratios, resume)
    report["recipe"] = recipe.model_dump(mode="json")
    bundle.report = report
    if is_main_process():
        bundle.save_pretrained(recipe.output / "bundle")
    return report


def _start(recipe: CompressionRecipe, examples: list[Example]) -> Bundle:
    """The bundle that training starts from."""
    settings: dict[str, Any] = {
        "name": recipe.name,
        "base_ratio": recipe.base_ratio,
        "ratios": recipe.ratios,
        "max_tokens": recipe.window,
        "reads": recipe.reads,
    }
    if recipe.method is not None:
        settings["method"] = recipe.method
    if recipe.bundle is not None:
        return Bundle.from_pretrained(recipe.bundle, device=_device(), changes=settings)
    assert recipe.decoder is not None
    model, tokenizer = load_decoder(recipe.decoder, recipe.revision, _device())
    shipped = Path(recipe.decoder).is_dir()
    decoder = None if shipped else recipe.decoder
    config = BundleConfig(decoder=decoder, revision=None if shipped else recipe.revision, **settings)
    bundle = Bundle.build(config, Backbone(model, tokenizer), teacher=recipe.teacher)
    bundle.reader.initialise(_slot_rms(bundle, examples))
    return bundle


def _objective(recipe: CompressionRecipe, bundle: Bundle) -> tuple[SlotObjective, Collate]:
    """What the recipe's stage minimises, and what feeds it."""
    data = recipe.data
    builder = PromptBuilder(bundle.tokenizer, data.max_answer_tokens)
    if isinstance(recipe, DistillationRecipe):
        repeat = recipe.repeat_per_batch if recipe.reconstruction_weight else 0
        return (
            DistillationLoss(bundle, recipe.reconstruction_weight),
            DistillationCollator(builder, data.templates, data.max_context_tokens, repeat, recipe.seed),
        )
    if isinstance(recipe, NextTokenRecipe):
        return (
            LikelihoodLoss(bundle),
            NextTokenCollator(bundle.tokenizer, data.max_context_tokens, data.max_answer_tokens),
        )
    if isinstance(recipe, ReconstructionRecipe):
        whole = PromptBuilder(bundle.tokenizer, data.max_context_tokens + 1)  # and the end token
        return (
            LikelihoodLoss(bundle),
            ReconstructionCollator(whole, recipe.paraphrases, data.max_context_tokens, recipe.seed),
        )
    if isinstance(recipe, RamRecipe):
        return (
            RamLoss(bundle, builder, recipe.temperature, recipe.contrastive),
            RamCollator(builder, bundle.config.base_ratio, data.templates, data.max_context_tokens, recipe.seed),
        )
    return LikelihoodLoss(bundle), AnswerCollator(builder, data.templates, data.max_context_tokens, recipe.seed)


def _slot_rms(bundle: Bundle, examples: list[Example]) -> float:
    """Root mean square of slot entries at the base ratio, over a few passages."""
    slots = [soft.slots for soft in bundle.compress([p for e in examples[:8] for p in e.passages])]
    return float(torch.cat(slots).pow(2).mean().sqrt())
