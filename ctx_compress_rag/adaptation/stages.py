"""Stages that train the base retrieval adapter or an update predictor; the decoder stays frozen."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chromadb
import torch
from torch import nn
from tqdm.auto import tqdm

from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import (
    AdaptationRecipe,
    RetrievalAdapterRecipe,
    TaskData,
    UpdatePredictorRecipe,
)
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.episodes import Episode, Episodes, Tasks, with_slots
from ctx_compress_rag.adaptation.objectives.retrieval_adapter import RetrievalAdapterLoss
from ctx_compress_rag.adaptation.objectives.update_predictor import (
    MatchingObjective,
    SolvedContexts,
    SolvedMatchingObjective,
)
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig
from ctx_compress_rag.adaptation.updates import norms
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.data.examples import read_jsonl
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.training.engine.loop import Collate, Job
from ctx_compress_rag.training.engine.processes import training_device
from ctx_compress_rag.training.prompts import PromptBuilder
from ctx_compress_rag.training.recipe import register

logger = logging.getLogger(__name__)

Objective = Callable[[AdaptiveDecoder, PredictedUpdate], nn.Module]

# Contexts to measure a predictor's scales on: kept ones, which cost nothing, or else ones solved for this.
_KEPT, _SOLVED_NOW = 64, 16
_AT_ONCE = 16  # contexts to solve


def open_decoder(recipe: AdaptationRecipe, device: str | torch.device | None = None) -> AdaptiveDecoder:
    """Load the recipe's decoder, with a store in memory if passages become slots."""
    device = device or training_device()
    if recipe.decoder is not None:
        return AdaptiveDecoder(PlainDecoder.load(recipe.decoder, recipe.revision, device))
    assert recipe.bundle is not None
    bundle = Bundle.from_pretrained(recipe.bundle, device=device, revision=recipe.revision)
    if recipe.ratio is None:
        return AdaptiveDecoder(bundle)
    base = None if bundle.compressor.nestable else recipe.ratio
    # Chroma's stores in memory share one engine: a unique name keeps this one separate.
    collection = f"adaptation-{secrets.token_hex(8)}"
    store = SoftContextStore(
        chromadb.EphemeralClient(), bundle, collection=collection, ratio=base, key=secrets.token_bytes(32)
    )
    return AdaptiveDecoder(bundle, store)


def load_tasks(recipe: AdaptationRecipe, decoder: AdaptiveDecoder) -> Tasks:
    """The recipe's training tasks, without the questions of its held-out files."""
    tasks = file_tasks(recipe.data.files, recipe.data, decoder)
    held_out = HeldOut(example for file in recipe.data.held_out for example in read_jsonl(file))
    tasks.examples = {name: held_out.without(rows, name, passages=False) for name, rows in tasks.examples.items()}
    return tasks


def file_tasks(files: Sequence[Path], data: TaskData, decoder: AdaptiveDecoder) -> Tasks:
    """Files as tasks, with passages and answers cut as `data` says."""
    builder = PromptBuilder(decoder.bundle.tokenizer)
    return Tasks(files, builder, data.max_context_tokens, data.max_answer_tokens, data.passages)


@dataclass
class Batches:
    """Makes the objectives' batches: episodes as rows that the decoder reads."""

    recipe: AdaptationRecipe
    decoder: AdaptiveDecoder

    def slots(self, batch: Sequence[Any]) -> list[Episode]:
        """The episodes, with soft contexts for passages if the recipe says so."""
        return [with_slots(episode, self.decoder.store, self.recipe.ratio) for episode in batch]

    def queries(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Questions with their answers."""
        return {"rows": self.decoder.rows([episode.query for episode in self.slots(batch)])}

    def contexts(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Demonstrations, and a question of the same task."""
        whole = self.slots(batch)
        return {
            "contexts": [self.decoder.rows(episode.support) for episode in whole],
            "queries": [self.decoder.rows([episode.query]) for episode in whole],
        }


def episodes_of(recipe: AdaptationRecipe, decoder: AdaptiveDecoder, demonstrations: int = 0) -> Episodes:
    """The episodes that a recipe's training reads."""
    return Episodes(load_tasks(recipe, decoder), recipe.optim.items, demonstrations, recipe.seed)


def job(
    decoder: AdaptiveDecoder,
    objective: nn.Module,
    examples: Sequence[Any],
    collate: Collate,
    save: Callable[[str | None], None],
) -> Job:
    """A job whose report identifies the decoder; `save` is called with the decoder's hub id or path."""
    bundle = decoder.bundle
    about = {"fingerprint": bundle.fingerprint}
    return Job(objective, examples, collate, lambda report: save(bundle.decoder_name), about)


def start_retrieval_adapter(recipe: RetrievalAdapterRecipe) -> Job:
    """The job that trains the base retrieval adapter."""
    decoder = open_decoder(recipe)
    trained = RetrievalAdapterLoss(decoder, recipe.rank, recipe.alpha)
    return job(
        decoder,
        trained,
        episodes_of(recipe, decoder),
        Batches(recipe, decoder).queries,
        lambda name: trained.adapter().save_pretrained(recipe.output, name),
    )


def start_update_predictor(recipe: UpdatePredictorRecipe, objective: Objective | None = None) -> Job:
    """The job that trains an update predictor.

    Args:
        recipe: its settings.
        objective: what learns from contexts drawn anew; None takes `MatchingObjective`.
    """
    decoder = open_decoder(recipe)
    episodes, batches = episodes_of(recipe, decoder, recipe.demonstrations), Batches(recipe, decoder)
    base = Adapter.from_pretrained(recipe.base, decoder.bundle.backbone.model)
    # The settings that a predictor keeps have the same names in its recipe.
    settings = recipe.model_dump(include=set(PredictorConfig.model_fields))
    torch.manual_seed(recipe.seed)
    update = PredictedUpdate.build(base, decoder, PredictorConfig(**settings))
    save = partial(update.save_pretrained, recipe.output)
    if recipe.contexts is not None:
        drawn = Episodes(episodes.tasks, recipe.contexts, recipe.demonstrations, recipe.seed)
        starts = tqdm(range(0, len(drawn), _AT_ONCE), desc="solving contexts", unit="batch", disable=None)
        parts = (batches.contexts(drawn[start : start + _AT_ONCE])["contexts"] for start in starts)
        solved = SolvedContexts.of(decoder, update, parts)
        pooled, change = solved.rows(torch.arange(min(recipe.contexts, _KEPT)))
        update.predictor.calibrate(pooled, norms(change))
        numbers = passes(recipe.contexts, len(episodes), recipe.seed)
        return job(
            decoder, SolvedMatchingObjective(update, solved, recipe.magnitude_weight), numbers, _collate_numbers, save
        )
    first = [batches.contexts([episode])["contexts"] for episode in episodes[:_SOLVED_NOW]]
    pooled = torch.cat([update.pooled(decoder, contexts) for contexts in first])
    each = [norms(update.target(decoder, contexts).change()) for contexts in first]
    update.predictor.calibrate(pooled, {name: torch.cat([sizes[name] for sizes in each]) for name in each[0]})
    objective = objective or partial(MatchingObjective, magnitude_weight=recipe.magnitude_weight)
    return job(decoder, objective(decoder, update), episodes, batches.contexts, save)


def passes(size: int, count: int, seed: int) -> list[int]:
    """`count` numbers below `size`: all of them repeatedly, each time in another random order."""
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += random.Random(f"{seed}:{len(numbers)}").sample(range(size), size)
    return numbers[:count]


def _collate_numbers(batch: Sequence[Any]) -> dict[str, Any]:
    return {"indices": torch.tensor(batch)}


register(RetrievalAdapterRecipe, start_retrieval_adapter)
register(UpdatePredictorRecipe, start_update_predictor)
