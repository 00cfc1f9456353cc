"""The stage repeat_and_answer: answers and repeated passages in packed rows, which two CPU cores can train.

It is from no paper. A decoder that has never seen slots learns to read them many times faster if it also repeats
passages from them, because every token of a passage is then a target, and not only the few tokens of an answer.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, distinct_passages
from ctx_compress_rag.decoding.splice import answer_token_logits, splice_prompts
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.inputs import NO_TOKEN
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.tokenizing import bos_token_id
from ctx_compress_rag.training.config import PackingConfig
from ctx_compress_rag.training.engine.packing import PackedSlots, RowPacker, collate_packed, keeps_apart, packed_loss
from ctx_compress_rag.training.objective import SlotObjective
from ctx_compress_rag.training.prompts import (
    TrainingPromptBuilder,
    draw_prompt_template,
    load_training_texts,
    recitation_example,
)
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective

ANSWER, REPEAT = 0, 1

REPEAT_TEMPLATES = (
    "{context}\n\nRepeat the text.",
    "Repeat the text word for word.\n\n{context}",
    "{context}\n\nWrite the text above again.",
)

_MISSES = 10  # sequences without room before a batch counts as full
SHORTEST = 24  # tokens of a passage to repeat
LONGEST = 192
_MEASURED = 4  # passages for `PackedSlotLoss.measure`, and the tokens of each
_MEASURED_TOKENS = 64
_AGAIN = 0.6  # share of repeated passages that are taken from those already encoded for a question


class RepeatStep(Strict):
    """A part of the training, from `step` on: `share` of a batch's sequences repeat passages, the others answer."""

    step: int = Field(ge=0)
    share: float = Field(ge=0, le=1)


class RepeatAndAnswerRecipe(CompressionRecipe):
    """The recipe that trains on answers and repeated passages, read from slots, in packed rows; see the module.

    `data.files` hold the questions. Their passages and those of `data.texts` are repeated. Each sequence draws one of
    the step's ratios; a ratio that is listed twice is drawn twice as often.

    Attributes:
        packing: the size of a packed batch; `window` must be its `length`.
        repeat: the share of a batch's sequences that repeat a passage, for each part of the training.
    """

    repeats_texts = packed = True
    stage: Literal["repeat_and_answer"]
    window: int = Field(default=384, gt=0)
    packing: PackingConfig = PackingConfig()
    repeat: list[RepeatStep] = Field([RepeatStep(step=0, share=0.5)], min_length=1)

    @model_validator(mode="after")
    def _trains_what_it_serves(self) -> Self:
        if not self.data.files and any(part.share < 1 for part in self.repeat):
            raise ValueError("data.files is empty: give questions, or texts alone with repeat: [{step: 0, share: 1}]")
        if self.window != self.packing.length:
            raise ValueError(f"window {self.window} must be packing.length, {self.packing.length}")
        return self

    def repeat_share_at(self, step: int) -> float:
        return max((r for r in self.repeat if r.step <= step), key=lambda r: r.step, default=self.repeat[0]).share

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        texts = distinct_passages(examples)
        texts += [row.passages[0] for row in load_training_texts(self)]
        random.Random(self.seed).shuffle(texts)
        builder = TrainingPromptBuilder(bundle.tokenizer, max(self.data.max_answer_tokens, LONGEST + 1))
        return PackedSlotLoss(bundle, texts[:_MEASURED]), collate_packed, PackedSlotData(builder, examples, texts, self)


class PackedSlotLoss(SlotObjective):
    """The cross-entropy of answers and of repeated passages, each averaged, with half of the weight.

    `measured` are passages for `measure`. Raises ConfigError if the bundle's compressor has no `token_vectors`, whose
    means under any attention mask are its slots.
    """

    def __init__(self, bundle: Bundle, measured: Sequence[str] = ()) -> None:
        super().__init__(bundle)
        self.measured = measured
        if not hasattr(bundle.compressor, "token_vectors"):
            raise ConfigError(
                f"stage repeat_and_answer is for methods that pool tokens, not for {bundle.config.method.name}: use "
                "another stage"
            )
        self.packs = keeps_apart(bundle.backbone.model)

    def forward(self, batch: PackedSlots) -> dict[str, Tensor]:  # type: ignore[override]
        batch = (batch if self.packs else batch.apart()).to(self.bundle.backbone.device)
        passages, prompts = batch.passages, batch.prompts
        read, dtype = self.bundle.backbone.inputs, self.bundle.backbone.dtype
        pooled: Any = self.compressor
        vectors = pooled.token_vectors(passages.input_ids, passages.full_attention_mask(dtype), passages.positions)
        slots, counts = _means(vectors.flatten(0, 1)[batch.sources], batch.slots, len(batch.places))
        embedded = self.reader(slots, counts).to(dtype)
        vectors = read.embed(prompts.input_ids)
        vectors = vectors.flatten(0, 1).index_copy(0, batch.places, embedded).view_as(vectors)
        slot_mask = torch.zeros_like(prompts.targets).view(-1).index_fill(0, batch.places, True)
        slot_mask = slot_mask.view_as(prompts.targets)
        inputs = read.of(vectors, prompts.input_ids.masked_fill(slot_mask, NO_TOKEN))
        with self.reader.decoder(slot_mask) as model:
            return {"loss": packed_loss(model, prompts, **inputs)}

    def measure(self) -> dict[str, float]:
        """Return `reading_losses` of the measured passages, for the log."""
        with torch.compiler.set_stance("force_eager"):
            return reading_losses(self.bundle, self.measured, self.bundle.config.base_ratio)


@torch.no_grad()
def reading_losses(bundle: Bundle, passages: Sequence[str], ratio: int) -> dict[str, float]:
    """Return the cross-entropy (nats a token) of the first 64 tokens of passages, repeated from three kinds of slots.

    Returns: "right", from the passage's own slots; "wrong", from the next passage's; "none", without slots.
    """
    builder = TrainingPromptBuilder(bundle.tokenizer)
    texts = [bundle.tokenizer.decode(builder.passage_ids(passage)[:_MEASURED_TOKENS]) for passage in passages]
    own = [[bundle.embed(soft)] for soft in bundle.compress(texts, ratio)]
    found = {}
    for name, slots in (("right", own), ("wrong", own[1:] + own[:1]), ("none", [[]] * len(own))):
        prompts = [
            builder.holed_prompt(recitation_example(text), REPEAT_TEMPLATES[0], builder.HOLE if given else "").fill(
                given
            )
            for text, given in zip(texts, slots, strict=True)
        ]
        batch = splice_prompts(bundle.backbone.inputs, prompts)
        with bundle.soft_decoder(batch.slot_mask) as model:
            found[name] = float(F.cross_entropy(*answer_token_logits(model, batch, prompts)))
    return found


def _means(vectors: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return mean and number of each slot's token vectors: (tokens, dim), (tokens,) -> (count, dim), (count,)."""
    vectors = vectors.float()
    sums = vectors.new_zeros(count, vectors.shape[1]).index_add(0, slots, vectors)
    counts = torch.bincount(slots, minlength=count)
    return sums / counts.unsqueeze(1), counts


@dataclass
class PackedSlotData:
    """The batches of a training, each made when it is asked for; the same number gives the same batch.

    Each batch takes the next examples, again and again. `texts` are further passages to repeat.
    """

    builder: TrainingPromptBuilder
    examples: Sequence[Example]
    texts: Sequence[str]
    recipe: RepeatAndAnswerRecipe

    def __len__(self) -> int:
        return self.recipe.optim.items

    def __getitem__(self, number: int) -> PackedSlots:
        return _Filling(self, number).batch()


class _Filling:
    def __init__(self, data: PackedSlotData, number: int) -> None:
        recipe = data.recipe
        self.data = data
        self.rng = random.Random(f"{recipe.seed}:{number}")
        step = number // recipe.optim.batch_size
        self.ratios = recipe.ratios_at(step)
        self.repeat_share = recipe.repeat_share_at(step)
        first = number * recipe.packing.examples
        self.waiting = [data.examples[i % len(data.examples)] for i in range(first, first + recipe.packing.examples)]
        bos = bos_token_id(data.builder.tokenizer)  # before each passage, as the compressor reads it, and in no slot
        self.before = torch.tensor([] if bos is None else [bos], dtype=torch.long)
        self.passages = RowPacker(recipe.packing.passage_rows, recipe.packing.length)
        self.prompts = RowPacker(recipe.packing.rows, recipe.packing.length)
        self.encoded: list[tuple[int, Tensor]] = []
        self.sources: list[Tensor] = []
        self.slots: list[Tensor] = []
        self.places: list[Tensor] = []
        self.slot_count = 0

    def batch(self) -> PackedSlots:
        misses = 0
        while misses < _MISSES:
            placed = self._repeat() if self.rng.random() < self.repeat_share else self._answer()
            misses += not placed
        tokens = torch.cat(self.sources), torch.cat(self.slots)
        return PackedSlots(self.passages.packed, self.prompts.packed, *tokens, torch.cat(self.places))

    def _answer(self) -> bool:
        if not self.waiting:
            return False
        example = self.waiting.pop()
        template = draw_prompt_template(self.data.recipe.data.templates, example, self.data.recipe.seed)
        ids = [self.data.builder.passage_ids(passage) for passage in example.passages]
        ratio = self.rng.choice(self.ratios)
        turns = example.turns
        while turns:  # as many of its questions as fit into a row
            prompt = self._prompt(Example(example.passages, turns), template, ids, ratio)
            if self._place(prompt, ids, ratio, ANSWER):
                return True
            turns = turns[:-1] if prompt.length > self.prompts.length else ()
        return False

    def _repeat(self) -> bool:
        ratio = self.rng.choice(self.ratios)
        start: int | None = None
        if self.encoded and self.rng.random() < _AGAIN:
            start, ids = self.encoded.pop(self.rng.randrange(len(self.encoded)))
        else:
            ids = self.data.builder.passage_ids(self.rng.choice(self.data.texts))
        length = min(len(ids), self.rng.randint(SHORTEST, LONGEST))
        cut = self.rng.randint(0, len(ids) - length) // ratio * ratio
        ids = ids[cut : cut + length]
        text = self.data.builder.tokenizer.decode(ids)
        template = self.rng.choice(REPEAT_TEMPLATES)
        prompt = self._prompt(recitation_example(text), template, [ids], ratio)
        return self._place(prompt, [ids], ratio, REPEAT, None if start is None else start + cut)

    def _prompt(self, example: Example, template: str, passages: Sequence[Tensor], ratio: int) -> Prompt:
        """Return the prompt with positions for its slots, which the loss makes."""
        slots = [torch.empty(-(-len(ids) // ratio), 0) for ids in passages]
        return self.data.builder.holed_prompt(example, template).fill(slots)

    def _place(
        self, prompt: Prompt, passages: Sequence[Tensor], ratio: int, kind: int, encoded_at: int | None = None
    ) -> bool:
        """Place a prompt and its passages, except one already encoded; return whether there was room."""
        room = encoded_at is not None or self.passages.fits(*(len(self.before) + len(ids) for ids in passages))
        if not room or not self.prompts.fits(prompt.length):
            return False
        start = self.prompts.add(torch.from_numpy(prompt.ids()), torch.from_numpy(prompt.answers), kind)
        self.places.append(start + torch.from_numpy(np.flatnonzero(prompt.vector_mask())))
        for passage in passages:
            first = encoded_at
            if first is None:
                first = self.passages.add(torch.cat((self.before, passage))) + len(self.before)
            if kind == ANSWER:
                self.encoded.append((first, passage))
            tokens = torch.arange(len(passage))
            self.sources.append(first + tokens)
            self.slots.append(self.slot_count + tokens // ratio)
            self.slot_count += -(-len(passage) // ratio)
        return True
