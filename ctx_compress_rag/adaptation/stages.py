"""The stages that train the base retrieval adapter and the update predictor. The decoder stays frozen."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapt import demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter, qkv_projections
from ctx_compress_rag.adaptation.config import AdaptationRecipe, RetrievalAdapterRecipe, UpdatePredictorRecipe
from ctx_compress_rag.adaptation.episodes import AdaptationTasks, Episode
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig
from ctx_compress_rag.adaptation.updates import GradientUpdate, answer_losses, matching_loss, update_norms
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.engine.loop import BatchMeanLoss, TrainingJob, training_processes
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.recipe import register_stage

_CALIBRATED = 16  # contexts to measure a predictor's scales on

Objective = Callable[[PlainDecoder, PredictedUpdate], nn.Module]
Contexts = list[list[Prompt]]
"""The demonstrations of each support context."""


class AnswersMeanLoss(BatchMeanLoss, nn.Module):
    """The base class of losses that are the mean cross-entropy of the whole batch's answer tokens."""

    def __init__(self, decoder: PlainDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def items(self, rows: list[Prompt]) -> Tensor:  # type: ignore[override]
        return torch.tensor([float(sum(int(row.answers.sum()) for row in rows))])

    def share(self, items: Tensor, rows: list[Prompt], adapter: Adapter | None) -> Tensor:
        """Return the loss's part that the prompts `rows` have; `items`, (1,), counts the batch's answer tokens."""
        loss = answer_losses(self.decoder, [rows], adapter)[0]
        return loss * self.items(rows).squeeze(0).to(loss.device) / items.squeeze(0)


class RetrievalAdapterLoss(AnswersMeanLoss):
    """The loss that trains Q/K/V LoRA factors, on the answers' tokens (In-Context Optimization, appendix G)."""

    def __init__(self, decoder: PlainDecoder, rank: int, alpha: int) -> None:
        super().__init__(decoder)
        self.scale = alpha / rank
        shapes = qkv_projections(decoder.backbone.model)
        self.names = list(shapes)
        # LoRA's initial values: `a` random, `b` zero.
        self.a = nn.ParameterList(nn.Parameter(torch.empty(rank, d_in)) for d_in, _ in shapes.values())
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(d_out, rank)) for _, d_out in shapes.values())
        for a in self.a:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))

    def adapter(self) -> Adapter:
        return Adapter(
            dict(zip(self.names, self.a, strict=True)), dict(zip(self.names, self.b, strict=True)), self.scale
        )

    def loss(self, items: Tensor, rows: list[Prompt]) -> Tensor:  # type: ignore[override]
        return self.share(items, rows, self.adapter())


class MatchingLoss(nn.Module):
    """The loss of eq. 9 against the update of K SGD steps (eq. 8), a mean over contexts; no answer loss (appendix G).

    `keep` keeps each context's update, by the context's number, to learn from it again, because solving a context takes
    K backward passes. Updates are kept in bfloat16, whose rounding is far below the predictor's error.
    """

    def __init__(
        self, decoder: PlainDecoder, update: PredictedUpdate, magnitude_weight: float, keep: bool = False
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.update = update
        self.predictor = update.predictor
        self.magnitude_weight = magnitude_weight
        self.keep = keep
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def forward(self, numbers: Sequence[int], contexts: Contexts, queries: Contexts) -> dict[str, Tensor]:
        if not self.keep:
            pooled = self.update.pooled(self.decoder, contexts)
            target = self.update.target(self.decoder, contexts)
        else:
            pooled, target = self._known(numbers, contexts)
        loss = matching_loss(self.predictor(pooled), target.change(), self.magnitude_weight)
        return {"loss": loss.mean()}

    def _known(self, numbers: Sequence[int], contexts: Contexts) -> tuple[Tensor, GradientUpdate]:
        """Return pooled states and updates of contexts; solve those that are new."""
        new = {number: context for number, context in zip(numbers, contexts, strict=True) if number not in self._kept}
        if new:
            pooled = self.update.pooled(self.decoder, list(new.values()))
            solved = self.update.target(self.decoder, list(new.values()))
            moved = [t.bfloat16() for t in (*solved.a.values(), *solved.b.values())]
            self._kept |= zip(new, zip(pooled, *moved, strict=True), strict=True)
        pooled, *factors = (torch.stack(each) for each in zip(*(self._kept[n] for n in numbers), strict=True))
        names, half = self.update.base.a, len(factors) // 2
        a, b = (dict(zip(names, (t.float() for t in part), strict=True)) for part in (factors[:half], factors[half:]))
        return pooled, GradientUpdate(self.update.base, a, b)


def open_recipe_decoder(recipe: AdaptationRecipe) -> Decoder:
    """Return the recipe's decoder, loaded, from the hub if need be, to this training process's device."""
    device = training_processes().device
    if recipe.decoder is not None:
        return Decoder(PlainDecoder.load(recipe.decoder, recipe.revision, device))
    assert recipe.bundle is not None
    return Decoder(Bundle.from_pretrained(recipe.bundle, device=device, revision=recipe.revision))


class EpisodeBatches:
    """A maker of batches for a recipe's loss, which turns numbers (indices) of episodes into the episodes' prompts."""

    def __init__(self, recipe: AdaptationRecipe, decoder: Decoder, demonstrations: int = 0) -> None:
        self.decoder, self.demonstrations, self.seed = decoder, demonstrations, recipe.seed
        self.tasks = AdaptationTasks(recipe.data, TrainingPromptBuilder(decoder.bundle.tokenizer))

    def _episodes(self, numbers: Sequence[int]) -> list[Episode]:
        return [self.tasks.draw(number, self.demonstrations, self.seed) for number in numbers]

    def queries(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of `RetrievalAdapterLoss` for the queries of these episodes."""
        return {"rows": demonstration_prompts(self.decoder, [episode.query for episode in self._episodes(numbers)])}

    def contexts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of `MatchingLoss` for the support contexts of these episodes."""
        whole = self._episodes(numbers)
        return {
            "numbers": numbers,
            "contexts": [demonstration_prompts(self.decoder, episode.support) for episode in whole],
            "queries": [demonstration_prompts(self.decoder, [episode.query]) for episode in whole],
        }


def make_retrieval_adapter_job(recipe: RetrievalAdapterRecipe) -> TrainingJob:
    """Return a job that will train the base retrieval adapter, and save it."""
    decoder = open_recipe_decoder(recipe)
    bundle = decoder.bundle
    trained = RetrievalAdapterLoss(bundle, recipe.rank, recipe.alpha)

    def save(report: dict[str, Any]) -> None:
        trained.adapter().save_pretrained(recipe.output, bundle.decoder_name)

    about = {"fingerprint": bundle.fingerprint}
    return TrainingJob(trained, range(recipe.optim.items), EpisodeBatches(recipe, decoder).queries, save, about)


def make_update_predictor_job(recipe: UpdatePredictorRecipe, objective: Objective | None = None) -> TrainingJob:
    """Return a job that will train an `UpdatePredictor`; `objective` makes the loss, by default a `MatchingLoss`."""
    decoder = open_recipe_decoder(recipe)
    bundle, batches = decoder.bundle, EpisodeBatches(recipe, decoder, recipe.demonstrations)
    base = Adapter.from_pretrained(recipe.base, bundle.backbone.model)
    # The settings that a predictor keeps have the same names in its recipe.
    settings = recipe.model_dump(include=set(PredictorConfig.model_fields))
    torch.manual_seed(recipe.seed)
    update = PredictedUpdate.build(base, bundle, PredictorConfig(**settings))
    first = batches.contexts(range(min(_CALIBRATED, recipe.optim.items)))["contexts"]
    update.predictor.calibrate(update.pooled(bundle, first), update_norms(update.target(bundle, first).change()))
    numbers: Sequence[int] = range(recipe.optim.items)
    if recipe.contexts is not None:
        numbers = shuffled_passes(min(recipe.contexts, recipe.optim.items), recipe.optim.items, recipe.seed)
    objective = objective or partial(
        MatchingLoss, magnitude_weight=recipe.magnitude_weight, keep=recipe.contexts is not None
    )

    def save(report: dict[str, Any]) -> None:
        update.save_pretrained(recipe.output, bundle.decoder_name)

    about = {"fingerprint": bundle.fingerprint}
    return TrainingJob(objective(bundle, update), numbers, batches.contexts, save, about)


def shuffled_passes(size: int, count: int, seed: int) -> list[int]:
    """Return `count` numbers below `size`: all of them again and again, each time in another random order."""
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += random.Random(f"{seed}:{len(numbers)}").sample(range(size), size)
    return numbers[:count]


register_stage(RetrievalAdapterRecipe, make_retrieval_adapter_job)
register_stage(UpdatePredictorRecipe, make_update_predictor_job)
