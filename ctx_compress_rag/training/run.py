"""Run a recipe: what `ctx-compress train` calls."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ctx_compress_rag.backbone import Backbone, load_decoder
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.config import BundleConfig
from ctx_compress_rag.data.config import ProbeConfig
from ctx_compress_rag.data.examples import Example, check_held_out, read_jsonl, world_examples
from ctx_compress_rag.data.held_out import held_out as never_train_on
from ctx_compress_rag.data.mixing import mix
from ctx_compress_rag.data.texts import text_examples
from ctx_compress_rag.errors import DataError, TimeUpError
from ctx_compress_rag.methods.base.config import lora_config
from ctx_compress_rag.text.prompts import PromptBuilder
from ctx_compress_rag.training.loop import Collate, Probe, is_main_process, train
from ctx_compress_rag.training.objectives.base import SlotObjective
from ctx_compress_rag.training.objectives.distillation import DistillationCollator, DistillationLoss
from ctx_compress_rag.training.objectives.likelihood import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.objectives.next_token import NextTokenCollator
from ctx_compress_rag.training.objectives.ram import RamCollator, RamLoss
from ctx_compress_rag.training.objectives.reconstruction import ReconstructionCollator, passages_of
from ctx_compress_rag.training.probe import soft_probe, text_probe
from ctx_compress_rag.training.recipes import (
    AdaptationRecipe,
    AnyRecipe,
    CompressionRecipe,
    DataConfig,
    DistillationRecipe,
    NextTokenRecipe,
    PretrainRecipe,
    RamRecipe,
    Recipe,
    ReconstructionRecipe,
    TeacherRecipe,
    load_recipe,
)

_REPORT_FILE = "training_report.json"

logger = logging.getLogger(__name__)


def run_recipe(path: str | Path, resume: bool = True, deadline: float | None = None) -> Path:
    """Run one recipe to its end and return its output folder; one that has been is not run again.

    Under torchrun each process trains its share of every batch.

    Args:
        path: a YAML file, or a shipped recipe's name.
        resume: go on from the last checkpoint, or skip a recipe that is finished; else begin anew.
        deadline: when to stop, in seconds of `time.monotonic`; stages of adaptation run to their end.

    Raises:
        TimeUpError: the deadline came first; a checkpoint is saved.
    """
    recipe = load_recipe(path)
    if resume and _is_finished(recipe):
        logger.info("%s: finished before, in %s", path, recipe.output)
        return recipe.output
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeUpError(f"{path}: not begun; the same command goes on there")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(recipe.seed)
    # Softmax tails and Adam's moments reach subnormal numbers, on which a CPU is slow. Threads inherit
    # this when they start, so it comes before any work.
    torch.set_flush_denormal(True)
    recipe.output.mkdir(parents=True, exist_ok=True)
    logger.info("%s: %d steps, seed %d, into %s", path, recipe.optim.steps, recipe.seed, recipe.output)
    if isinstance(recipe, PretrainRecipe):
        report = _pretrain(recipe, resume, deadline)
    elif isinstance(recipe, TeacherRecipe):
        report = _teacher(recipe, resume, deadline)
    elif isinstance(recipe, AdaptationRecipe):
        from ctx_compress_rag.adaptation.training import run_adaptation  # brings Chroma, which no other stage needs

        report = run_adaptation(recipe, resume)
    else:
        report = _compression(recipe, resume, deadline)
    report["recipe"] = recipe.model_dump(mode="json")
    if is_main_process():
        (recipe.output / _REPORT_FILE).write_text(json.dumps(report, indent=1), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the next recipe may need what this one's first process has written
    return recipe.output


def _is_finished(recipe: AnyRecipe) -> bool:
    """Whether this very recipe has been run to its end."""
    file = recipe.output / _REPORT_FILE
    if not file.exists():
        return False
    done = json.loads(file.read_text(encoding="utf-8")).get("recipe")
    return bool(done == recipe.model_dump(mode="json"))


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
                part.split, part.seed, part.examples, data.max_turns, part.passages, part.named, part.alike
            )
        ]
        held_out = world_examples("test", 0, 400) + world_examples("dev", 0, 400)
    else:
        files = [_without_held_out(read_jsonl(file, data.max_turns), data) for file in data.files]
        files += [text_examples(text.file, text.words) * text.weight for text in data.texts]
        for each in files:
            never_train_on().check(each)
        if data.mix:
            examples = mix(files, data.mix, recipe.seed, recipe.optim.batch_size)
        else:
            examples = [example for file in files for example in file]
            random.Random(recipe.seed).shuffle(examples)  # files are mixed, as the paper mixes its datasets
        held_out = []
    held_out += [e for file in data.held_out for e in read_jsonl(file, unanswerable=True)]
    check_held_out(examples, held_out)
    if not examples:
        raise DataError("the recipe's data holds no examples")
    return examples


def _without_held_out(examples: list[Example], data: DataConfig) -> list[Example]:
    if not data.leave_out_held_out:
        return examples
    kept = [example for example in examples if not never_train_on().shares(example)]
    logger.info("%d of %d examples left out: they share with held-out data", len(examples) - len(kept), len(examples))
    return kept


def _pretrain(recipe: PretrainRecipe, resume: bool, deadline: float | None) -> dict[str, Any]:
    from ctx_compress_rag.training.minilm_decoder import minilm_decoder
    from ctx_compress_rag.training.stages.pretrain import PackedText, collate_windows, token_ids, tokenizer_sample
    from ctx_compress_rag.training.stages.teacher import AnswerLoss, new_decoder, save_decoder
    from ctx_compress_rag.training.tokenizer import train_tokenizer

    data, leave_out = recipe.data, recipe.data.leave_out_held_out
    work = recipe.output / "tokens"  # what is learned and made of the texts before training, kept for a resumed run
    if recipe.scratch:
        if resume and (work / "tokenizer.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(work, trust_remote_code=False)
        else:
            sample = tokenizer_sample(data.texts, leave_out)
            tokenizer = train_tokenizer(
                sample, recipe.scratch.vocab_size, recipe.scratch.config["max_position_embeddings"]
            )
            tokenizer.save_pretrained(work)
        decoder = new_decoder(recipe.scratch.config, tokenizer)
    elif recipe.minilm:
        decoder, tokenizer = minilm_decoder(recipe.minilm)
    else:
        decoder, tokenizer = load_decoder(recipe.decoder or "", recipe.revision, _device())
    decoder = decoder.float().requires_grad_(True)
    work.mkdir(exist_ok=True)
    rows = [
        token_ids(text, leave_out, tokenizer, work / f"{number}.npy", resume) for number, text in enumerate(data.texts)
    ]
    windows = PackedText(
        rows,
        [text.weight for text in data.texts],
        recipe.window,
        recipe.optim.steps * recipe.optim.batch_size,
        recipe.seed,
    )
    model = AnswerLoss(decoder, 1.0)
    report = train(
        model, windows, collate_windows, recipe.optim, recipe.output, recipe.seed, resume=resume, deadline=deadline
    )
    report["text_tokens"] = {str(text.file): len(row) for text, row in zip(data.texts, rows, strict=True)}
    report["rounds"] = round(len(windows) / windows.per_round, 4)
    if is_main_process():
        save_decoder(decoder, tokenizer, recipe.output)
    return report


def _teacher(recipe: TeacherRecipe, resume: bool, deadline: float | None) -> dict[str, Any]:
    from peft import get_peft_model

    from ctx_compress_rag.training.stages.pointers import PointingHeads
    from ctx_compress_rag.training.stages.teacher import AnswerLoss, TextCollator, new_decoder, save_decoder
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
        elif recipe.tune.mode == "full":
            decoder = decoder.float().requires_grad_(True)  # on a GPU it came in bfloat16, which loses small steps
    builder = PromptBuilder(tokenizer, recipe.data.max_answer_tokens)
    data, point = recipe.data, recipe.pointing
    collate = TextCollator(builder, data.templates, data.max_context_tokens, recipe.seed, point is not None)
    heads = (PointingHeads(decoder, (point.name_layer, point.copy_layer)), point.weight) if point else None
    model = AnswerLoss(decoder, recipe.context_loss_weight, heads)
    report = train(
        model,
        examples,
        collate,
        recipe.optim,
        recipe.output,
        recipe.seed,
        resume=resume,
        deadline=deadline,
        **_probing(recipe, lambda config: text_probe(decoder, tokenizer, config)),
    )
    if not is_main_process():
        return report
    if recipe.tune.mode == "lora":
        decoder.save_pretrained(recipe.output)  # a peft adapter folder: the `teacher` of a distillation recipe
    else:
        save_decoder(decoder, tokenizer, recipe.output)
    return report


def _tokenizer_texts(recipe: TeacherRecipe, examples: list[Example]) -> Any:
    if recipe.data.world:
        from ctx_compress_rag.data.world import tokenizer_texts

        yield from tokenizer_texts()
    else:
        yield from (passage for example in examples for passage in example.passages)
    yield from recipe.data.templates * 200


def _probing(recipe: Recipe, make: Callable[[ProbeConfig], Probe]) -> dict[str, Any]:
    """The arguments of `train` for a recipe's probe, if it has one."""
    return {"probe": make(recipe.probe), "probe_every": recipe.probe.every} if recipe.probe else {}


def _compression(recipe: CompressionRecipe, resume: bool, deadline: float | None) -> dict[str, Any]:
    examples = load_examples(recipe)
    if isinstance(recipe, ReconstructionRecipe):
        examples = passages_of(examples)
    bundle = _start(recipe, examples)
    earlier = bundle.report
    objective, collate = _objective(recipe, bundle)

    def choose_ratios(step: int) -> None:
        objective.ratios = recipe.ratios_at(step)

    report = train(
        objective,
        examples,
        collate,
        recipe.optim,
        recipe.output,
        recipe.seed,
        choose_ratios,
        resume,
        deadline=deadline,
        **_probing(recipe, lambda config: soft_probe(bundle, config)),
    )
    report["recipe"] = recipe.model_dump(mode="json")
    if earlier:
        report["earlier"] = earlier
    bundle.report = report
    if is_main_process():
        bundle.save_pretrained(recipe.output / "bundle", int8=recipe.int8)
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
    if recipe.fit_passages:
        _fit_reader(bundle, examples, recipe.fit_passages)
    else:
        bundle.reader.initialise(_slot_rms(bundle, examples))
    return bundle


def _fit_reader(bundle: Bundle, examples: list[Example], passages: int) -> None:
    """Start the reader so that it reads a slot for one token as that token's embedding.

    Where a method makes no slots so small, the target is the mean embedding of a slot's tokens.
    """
    texts = [text for e in passages_of(examples)[:passages] for text in e.passages]
    softs = bundle.compress(texts, ratio=1)
    embed = bundle.backbone.embeddings
    targets: list[torch.Tensor] = []
    with torch.no_grad():
        for text, soft in zip(texts, softs, strict=True):
            ids = bundle.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = embed(torch.tensor(ids, device=bundle.backbone.device)).float()
            targets += [part.mean(0) for part in tokens.split(soft.token_counts.tolist())]
    slots = torch.cat([soft.slots for soft in softs]).to(bundle.backbone.device)
    bundle.reader.fit(slots, torch.stack(targets))


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
