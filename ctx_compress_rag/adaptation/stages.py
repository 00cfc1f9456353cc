"""The stages that train the base retrieval adapter and the update predictor. The decoder stays frozen.

They draw episodes of tasks: demonstrations of a task, and a question of the same task.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapt import Demonstration, demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter, qkv_projections
from ctx_compress_rag.adaptation.config import AdaptationRecipe, PredictorSettings, TaskData
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig
from ctx_compress_rag.adaptation.updates import GradientUpdate, answer_losses, matching_loss, update_norms
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.data.examples import Example, read_jsonl
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.engine.loop import BatchMeanLoss, TrainingJob, training_processes
from ctx_compress_rag.training.prompts import TrainingPromptBuilder


@dataclass(frozen=True)
class Episode:
    """Demonstrations of a task (the support context C), and the query, a question of the same task with its answer."""

    task: str
    support: tuple[Demonstration, ...]
    query: Demonstration
    answers: tuple[str, ...]  # all accepted answers to the query


class AdaptationTasks:
    """JSONL files (see `data.examples.read_jsonl`), each of which is a task named after its file.

    Passages and answers are cut as `data` says, but not the accepted answers. `builder` has the decoder's tokenizer.
    `examples` has each task's examples by its name, without those that share a question with held-out files.
    """

    def __init__(self, data: TaskData, builder: TrainingPromptBuilder) -> None:
        self.data, self.builder = data, builder
        self.examples = {file.stem: _distinct(read_jsonl(file)) for file in data.files}
        if len(self.examples) < len(data.files):
            raise DataError(f"two of the files {sorted(map(str, data.files))} have one name, endings aside: rename one")
        for name, examples in self.examples.items():
            if len(examples) < 2:
                raise DataError(f"the task {name} has one question: give it more, to demonstrate with")
            for turn in (example.turns[0] for example in examples):
                if not turn.answers[0].strip():
                    raise DataError(f"the task {name}: the first answer to {turn.question!r} is blank: give one")
        held_out = HeldOut(example for file in data.held_out for example in read_jsonl(file))
        self.examples = {name: held_out.without(rows, name, passages=False) for name, rows in self.examples.items()}

    def draw(self, number: int, demonstrations: int, seed: int) -> Episode:
        """Return the episode of this number (its index), of a random task; the same number and seed give the same."""
        rng = random.Random(f"{seed}:{number}")
        name = rng.choice(list(self.examples))
        examples = self.examples[name]
        if len(examples) <= demonstrations:
            raise DataError(f"the task {name} has {len(examples)} questions: {demonstrations} demonstrations need more")
        *support, query = rng.sample(examples, demonstrations + 1)
        return self.episode(name, support, query)

    def episode(self, name: str, support: Sequence[Example], query: Example) -> Episode:
        """Return an episode of these examples of a task, with passages and answers cut."""
        shown = tuple(self._cut(example) for example in support)
        return Episode(name, shown, self._cut(query), query.turns[0].answers)

    def _cut(self, example: Example) -> Demonstration:
        turn, data = example.turns[0], self.data
        read = example.passages[: data.passages]
        passages = tuple(text for text, _ in self.builder.shortened(read, data.max_context_tokens))
        [(answer, _)] = self.builder.shortened([turn.answers[0]], data.max_answer_tokens)
        return Demonstration(turn.question, passages, answer)


def _distinct(examples: Sequence[Example]) -> list[Example]:
    """Return the examples without repeated rows, so that no demonstration gives the answer to the query."""
    first: dict[tuple[tuple[str, ...], str], Example] = {}
    for example in examples:
        first.setdefault((example.passages, example.turns[0].question), example)
    return list(first.values())


_CALIBRATED = 16  # contexts to measure a predictor's scales on

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

    def forward(self, numbers: Sequence[int], contexts: Contexts) -> dict[str, Tensor]:
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
        support = [episode.support for episode in self._episodes(numbers)]
        return {"numbers": numbers, "contexts": [demonstration_prompts(self.decoder, shown) for shown in support]}


def shuffled_passes(size: int, count: int, seed: int) -> list[int]:
    """Return `count` numbers below `size`: all of them again and again, each time in another random order."""
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += random.Random(f"{seed}:{len(numbers)}").sample(range(size), size)
    return numbers[:count]


class RetrievalAdapterRecipe(AdaptationRecipe):
    """The recipe of the base retrieval adapter: Q/K/V LoRA, trained on questions with passages (appendix G)."""

    stage: Literal["retrieval_adapter"]
    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=32, gt=0)

    def make_job(self) -> TrainingJob:
        """Return a job that will train the base retrieval adapter, and save it."""
        decoder = open_recipe_decoder(self)
        bundle = decoder.bundle
        trained = RetrievalAdapterLoss(bundle, self.rank, self.alpha)

        def save(report: dict[str, Any]) -> None:
            trained.adapter().save_pretrained(self.output, bundle.decoder_name)

        about = {"fingerprint": bundle.fingerprint}
        return TrainingJob(trained, range(self.optim.items), EpisodeBatches(self, decoder).queries, save, about)


class UpdatePredictorRecipe(PredictorSettings, AdaptationRecipe):
    """The recipe of the update predictor, which predicts what gradient descent on demonstrations would change (eq. 9).

    Attributes:
        base: the folder of the base retrieval adapter.
        magnitude_weight: lambda of eq. 9.
        contexts: the number of support contexts. Each is solved by gradient descent when it first comes, and learned
            from many times. None draws and solves a new context each time, as the paper does. The updates stay in
            memory: contexts x rank x input and output widths of Q/K/V, in bfloat16. Resuming solves contexts again.
    """

    stage: Literal["update_predictor"]
    base: Path
    magnitude_weight: float = Field(default=0.1, ge=0)
    contexts: int | None = Field(default=None, gt=0)

    def objective(self, batches: EpisodeBatches, update: PredictedUpdate) -> nn.Module:
        """Return the loss that the predictor is trained with, on the contexts of `batches`."""
        keep = self.contexts is not None
        return MatchingLoss(batches.decoder.bundle, update, self.magnitude_weight, keep=keep)

    def make_job(self) -> TrainingJob:
        """Return a job that will train an `UpdatePredictor`."""
        decoder = open_recipe_decoder(self)
        bundle, batches = decoder.bundle, EpisodeBatches(self, decoder, self.demonstrations)
        base = Adapter.from_pretrained(self.base, bundle.backbone.model)
        # The settings that a predictor keeps have the same names in its recipe.
        settings = self.model_dump(include=set(PredictorConfig.model_fields))
        torch.manual_seed(self.seed)
        update = PredictedUpdate.build(base, bundle, PredictorConfig(**settings))
        first = batches.contexts(range(min(_CALIBRATED, self.optim.items)))["contexts"]
        update.predictor.calibrate(update.pooled(bundle, first), update_norms(update.target(bundle, first).change()))
        numbers: Sequence[int] = range(self.optim.items)
        if self.contexts is not None:
            numbers = shuffled_passes(min(self.contexts, self.optim.items), self.optim.items, self.seed)

        def save(report: dict[str, Any]) -> None:
            update.save_pretrained(self.output, bundle.decoder_name)

        about = {"fingerprint": bundle.fingerprint}
        return TrainingJob(self.objective(batches, update), numbers, batches.contexts, save, about)
