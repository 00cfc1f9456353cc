"""The stages that train the base retrieval adapter and the update predictor. The decoder stays frozen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ctx_compress_rag.adaptation.adapt import rows_of
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import AdaptationRecipe, RetrievalAdapterRecipe, UpdatePredictorRecipe
from ctx_compress_rag.adaptation.episodes import Episode, Tasks
from ctx_compress_rag.adaptation.objectives import MatchingLoss, RetrievalAdapterLoss
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig
from ctx_compress_rag.adaptation.updates import norms
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.training.engine.loop import Collate, Job
from ctx_compress_rag.training.engine.processes import processes
from ctx_compress_rag.training.prompts import PromptBuilder
from ctx_compress_rag.training.recipe import register

Objective = Callable[[PlainDecoder, PredictedUpdate], nn.Module]

_CALIBRATED = 16  # contexts to measure a predictor's scales on


def open_decoder(recipe: AdaptationRecipe, device: str | torch.device | None = None) -> Decoder:
    """Load the recipe's decoder; None as `device` means this training process's device."""
    device = device or processes().device
    if recipe.decoder is not None:
        return Decoder(PlainDecoder.load(recipe.decoder, recipe.revision, device))
    assert recipe.bundle is not None
    return Decoder(Bundle.from_pretrained(recipe.bundle, device=device, revision=recipe.revision))


class Batches:
    """A maker of batches for a recipe's loss: numbers of episodes become those episodes' prompts."""

    def __init__(self, recipe: AdaptationRecipe, decoder: Decoder, demonstrations: int = 0) -> None:
        self.decoder, self.demonstrations, self.seed = decoder, demonstrations, recipe.seed
        self.tasks = Tasks(recipe.data, PromptBuilder(decoder.bundle.tokenizer))

    def _episodes(self, numbers: Sequence[int]) -> list[Episode]:
        return [self.tasks.draw(number, self.demonstrations, self.seed) for number in numbers]

    def queries(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of `RetrievalAdapterLoss` for the queries of these episodes."""
        return {"rows": rows_of(self.decoder, [episode.query for episode in self._episodes(numbers)])}

    def contexts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of `MatchingLoss` for the support contexts of these episodes."""
        whole = self._episodes(numbers)
        return {
            "numbers": numbers,
            "contexts": [rows_of(self.decoder, episode.support) for episode in whole],
            "queries": [rows_of(self.decoder, [episode.query]) for episode in whole],
        }


def job(
    decoder: PlainDecoder,
    objective: nn.Module,
    numbers: Sequence[int],
    collate: Collate,
    save: Callable[[str | None], None],
) -> Job:
    """Return a job whose report identifies the decoder; `save` is called with the decoder's hub id or path."""
    about = {"fingerprint": decoder.fingerprint}
    return Job(objective, numbers, collate, lambda report: save(decoder.decoder_name), about)


def start_retrieval_adapter(recipe: RetrievalAdapterRecipe) -> Job:
    """Make the job that trains the base retrieval adapter."""
    decoder = open_decoder(recipe)
    trained = RetrievalAdapterLoss(decoder.bundle, recipe.rank, recipe.alpha)
    batches = Batches(recipe, decoder)
    return job(
        decoder.bundle,
        trained,
        range(recipe.optim.items),
        batches.queries,
        lambda name: trained.adapter().save_pretrained(recipe.output, name),
    )


def start_update_predictor(recipe: UpdatePredictorRecipe, objective: Objective | None = None) -> Job:
    """Make the job that trains an update predictor; `objective` makes the loss, by default a `MatchingLoss`."""
    decoder = open_decoder(recipe)
    bundle, batches = decoder.bundle, Batches(recipe, decoder, recipe.demonstrations)
    base = Adapter.from_pretrained(recipe.base, bundle.backbone.model)
    # The settings that a predictor keeps have the same names in its recipe.
    settings = recipe.model_dump(include=set(PredictorConfig.model_fields))
    torch.manual_seed(recipe.seed)
    update = PredictedUpdate.build(base, bundle, PredictorConfig(**settings))
    first = batches.contexts(range(min(_CALIBRATED, recipe.optim.items)))["contexts"]
    update.predictor.calibrate(update.pooled(bundle, first), norms(update.target(bundle, first).change()))
    numbers: Sequence[int] = range(recipe.optim.items)
    if recipe.contexts is not None:
        numbers = passes(min(recipe.contexts, recipe.optim.items), recipe.optim.items, recipe.seed)
    objective = objective or partial(
        MatchingLoss, magnitude_weight=recipe.magnitude_weight, keep=recipe.contexts is not None
    )
    save = partial(update.save_pretrained, recipe.output)
    return job(bundle, objective(bundle, update), numbers, batches.contexts, save)


def passes(size: int, count: int, seed: int) -> list[int]:
    """Return `count` numbers below `size`: all of them again and again, each time in another random order."""
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += random.Random(f"{seed}:{len(numbers)}").sample(range(size), size)
    return numbers[:count]


register(RetrievalAdapterRecipe, start_retrieval_adapter)
register(UpdatePredictorRecipe, start_update_predictor)
