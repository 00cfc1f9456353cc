"""Training the base retrieval adapter, a soft prefix or an update predictor by recipe."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import chromadb
import torch
from torch import nn

from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder, text_bundle
from ctx_compress_rag.adaptation.episodes import Episode, Episodes, FamilyTasks, FileTasks, Tasks, with_slots
from ctx_compress_rag.adaptation.methods import PredictedUpdate, PredictorConfig, PromptTuning
from ctx_compress_rag.adaptation.objectives.retrieval_adapter import PromptTuningLoss, RetrievalAdapterLoss
from ctx_compress_rag.adaptation.objectives.update_predictor import (
    MatchingObjective,
    SolvedMatchingObjective,
    TaskObjective,
)
from ctx_compress_rag.adaptation.predictor import pooled_states
from ctx_compress_rag.adaptation.solved import SolvedContexts, load_solved, solve
from ctx_compress_rag.adaptation.task_families import check_families, families
from ctx_compress_rag.adaptation.updates import norms, sgd
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.data.examples import check_held_out, read_jsonl
from ctx_compress_rag.data.held_out import held_out as never_train_on
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.text.prompts import PromptBuilder
from ctx_compress_rag.training.loop import Collate, is_main_process, train
from ctx_compress_rag.training.recipes import (
    AdaptationRecipe,
    PromptTuningRecipe,
    RetrievalAdapterRecipe,
    SolvedConfig,
    UpdatePredictorRecipe,
)

logger = logging.getLogger(__name__)

# Contexts that a predictor's scales are measured on: kept ones, which cost nothing, and ones solved for it.
_KEPT, _SOLVED_NOW = 64, 16


@dataclass(frozen=True)
class _Stage:
    """What a recipe minimises, the examples it does it on, and what writes its result."""

    objective: nn.Module
    examples: Sequence[Any]
    collate: Collate
    save: Callable[[], None]


def run_adaptation(recipe: AdaptationRecipe, resume: bool) -> dict[str, Any]:
    """Train what the recipe says, and write it to `recipe.output`; returns the report.

    The decoder's weights stay as they are.
    """
    decoder = open_decoder(recipe)
    stage = _stage(recipe, decoder)
    report = train(
        stage.objective, stage.examples, stage.collate, recipe.optim, recipe.output, recipe.seed, resume=resume
    )
    if is_main_process():
        stage.save()
    return report | {"fingerprint": decoder.bundle.fingerprint}


def open_decoder(recipe: AdaptationRecipe, device: str | torch.device | None = None) -> AdaptiveDecoder:
    """The recipe's decoder; where passages become slots, with a store for them in memory."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.decoder is not None:
        return AdaptiveDecoder(text_bundle(recipe.decoder, recipe.revision, device))
    assert recipe.bundle is not None
    bundle = Bundle.from_pretrained(recipe.bundle, device=device, revision=recipe.revision)
    if recipe.ratio is None:
        return AdaptiveDecoder(bundle)
    base = None if bundle.compressor.nestable else recipe.ratio
    # Chroma's stores in memory share one engine: a name of its own keeps this one apart.
    collection = f"adaptation-{secrets.token_hex(8)}"
    store = SoftContextStore(
        chromadb.EphemeralClient(), bundle, collection=collection, ratio=base, key=secrets.token_bytes(32)
    )
    return AdaptiveDecoder(bundle, store)


def load_tasks(recipe: AdaptationRecipe, decoder: AdaptiveDecoder) -> Tasks:
    """The recipe's training tasks, checked against what is held out.

    Raises:
        DataError: a family, passage or question is held out.
    """
    data = recipe.data
    if data.families is not None:
        check_families(families(data.families), families("test"))
        return FamilyTasks(data.families)
    builder = PromptBuilder(decoder.bundle.tokenizer)
    tasks = FileTasks(data.files, builder, data.max_context_tokens, data.max_answer_tokens)
    held_out = [example for file in data.held_out for example in read_jsonl(file)]
    for examples in tasks.examples.values():
        never_train_on().check(examples)
        check_held_out(examples, held_out)
    return tasks


def _stage(recipe: AdaptationRecipe, decoder: AdaptiveDecoder) -> _Stage:
    name = decoder.bundle.config.decoder_name
    count = recipe.optim.steps * recipe.optim.batch_size
    demonstrations = recipe.demonstrations if isinstance(recipe, UpdatePredictorRecipe) else 0
    episodes = Episodes(load_tasks(recipe, decoder), count, demonstrations, recipe.seed)

    def slots(batch: Sequence[Any]) -> list[Episode]:
        return [with_slots(episode, decoder.store, recipe.ratio) for episode in batch]

    def collate_examples(batch: Sequence[Any]) -> dict[str, Any]:
        return {"rows": decoder.rows([episode.query for episode in slots(batch)])}

    def collate_contexts(batch: Sequence[Any]) -> dict[str, Any]:
        whole = slots(batch)
        return {
            "contexts": [decoder.rows(episode.support) for episode in whole],
            "queries": [decoder.rows([episode.query]) for episode in whole],
        }

    if isinstance(recipe, RetrievalAdapterRecipe):
        trained = RetrievalAdapterLoss(decoder, recipe.rank, recipe.alpha)
        return _Stage(
            trained, episodes, collate_examples, lambda: trained.adapter().save_pretrained(recipe.output, name)
        )
    if isinstance(recipe, PromptTuningRecipe):
        prefixed = PromptTuningLoss(decoder, recipe.virtual_tokens, recipe.seed)
        return _Stage(
            prefixed,
            episodes,
            collate_examples,
            lambda: PromptTuning(prefixed.prefix).save_pretrained(recipe.output, name),
        )
    assert isinstance(recipe, UpdatePredictorRecipe)
    update = _untrained(recipe, decoder)

    def save() -> None:
        update.save_pretrained(recipe.output, name)

    if recipe.solved is not None:
        solved = _solved(recipe, recipe.solved, decoder, update.base, slots)
        pooled, change = solved.rows(torch.arange(min(len(solved), _KEPT)))
        update.predictor.calibrate(pooled, norms(change))
        objective = SolvedMatchingObjective(update, solved, recipe.magnitude_weight)
        return _Stage(objective, _passes(len(solved), count, recipe.seed), _collate_numbers, save)
    first = [collate_contexts([episode])["contexts"] for episode in episodes[:_SOLVED_NOW]]
    pooled = torch.cat([pooled_states(decoder, contexts, update.base, recipe.layer) for contexts in first])
    each = [
        norms(sgd(decoder, contexts, update.base, recipe.inner_steps, recipe.inner_learning_rate).change())
        for contexts in first
    ]
    update.predictor.calibrate(pooled, {name: torch.cat([sizes[name] for sizes in each]) for name in each[0]})
    if recipe.loss == "matching":
        return _Stage(MatchingObjective(decoder, update, recipe.magnitude_weight), episodes, collate_contexts, save)
    return _Stage(TaskObjective(decoder, update), episodes, collate_contexts, save)


def _untrained(recipe: UpdatePredictorRecipe, decoder: AdaptiveDecoder) -> PredictedUpdate:
    """A new predictor on the recipe's base adapter."""
    base = Adapter.from_pretrained(recipe.base, decoder.bundle.backbone.model)
    config = PredictorConfig(
        loss=recipe.loss,
        inner_steps=recipe.inner_steps,
        inner_learning_rate=recipe.inner_learning_rate,
        demonstrations=recipe.demonstrations,
        hidden=recipe.hidden,
        code=recipe.code,
        layer=recipe.layer,
    )
    torch.manual_seed(recipe.seed)
    return PredictedUpdate.build(base, decoder, config)


def _solved(
    recipe: UpdatePredictorRecipe,
    config: SolvedConfig,
    decoder: AdaptiveDecoder,
    base: Adapter,
    slots: Callable[[Sequence[Any]], list[Episode]],
) -> SolvedContexts:
    """The recipe's contexts with their updates, solved now where they are not yet."""
    episodes = Episodes(load_tasks(recipe, decoder), config.contexts, recipe.demonstrations, recipe.seed)
    about = {
        "data": recipe.data.model_dump(mode="json"),
        "ratio": recipe.ratio,
        "demonstrations": recipe.demonstrations,
        "seed": recipe.seed,
    }
    rate, steps = recipe.inner_learning_rate, config.steps
    solve(decoder, base, slots(episodes), steps, rate, config.folder, about, recipe.layer)
    return load_solved(config.folder, base, config.contexts, recipe.inner_steps)


def _passes(size: int, count: int, seed: int) -> list[int]:
    """`count` numbers below `size`: all of them again and again, each time in another order."""
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += random.Random(f"{seed}:{len(numbers)}").sample(range(size), size)
    return numbers[:count]


def _collate_numbers(batch: Sequence[Any]) -> dict[str, Any]:
    return {"indices": torch.tensor(batch)}
