"""Prompt tuning (Lester et al., 2021), a baseline of section 5.3: a soft prefix, whatever the demonstrations."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ctx_compress_rag.adaptation.config import AdaptationRecipe
from ctx_compress_rag.adaptation.stages import AnswersMeanLoss, EpisodeBatches, open_recipe_decoder
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.preparer import PromptPreparer
from ctx_compress_rag.prompt import Prompt, PromptLike
from ctx_compress_rag.training.engine.loop import TrainingJob

_FILE, _KEY = "prefix.safetensors", "prefix"


class PromptTuningRecipe(AdaptationRecipe):
    """Train a soft prefix on the base adapter's examples. The paper does not say how long it is."""

    stage: Literal["prompt_tuning"]
    virtual_tokens: int = Field(default=20, gt=0)

    def make_job(self) -> TrainingJob:
        decoder = open_recipe_decoder(self)
        trained = PromptTuningLoss(decoder.bundle, self.virtual_tokens, self.seed)

        def save(report: dict[str, Any]) -> None:
            save_file({_KEY: trained.prefix.detach().float().cpu()}, self.output / _FILE)

        about = {"fingerprint": decoder.bundle.fingerprint}
        return TrainingJob(trained, range(self.optim.items), EpisodeBatches(self, decoder).queries, save, about)


class PrefixedPreparer(PromptPreparer):
    """Puts a soft prefix (tokens, dim) before every prompt; counts of slots include it."""

    prefix: Tensor

    def prepare(self, prompts: Sequence[PromptLike], *, extractive: bool = False) -> list[Prompt]:
        return [behind(prompt, self.prefix) for prompt in super().prepare(prompts, extractive=extractive)]


def with_prefix(decoder: Decoder, folder: Path) -> Decoder:
    """The decoder with a trained prefix; both share the model."""
    weight = decoder.bundle.backbone.embeddings.weight
    made = Decoder(decoder.bundle, decoder.store)
    made.preparer = preparer = PrefixedPreparer(decoder.bundle, decoder.store)
    preparer.prefix = load_file(folder / _FILE)[_KEY].to(weight.device, weight.dtype)
    return made


def behind(prompt: Prompt, prefix: Tensor) -> Prompt:
    """The prompt after vectors (tokens, dim)."""
    flags = np.zeros(len(prefix), bool)
    return replace(prompt, pieces=(prefix, *prompt.pieces), answers=np.concatenate((flags, prompt.answers)))


class PromptTuningLoss(AnswersMeanLoss):
    """Trains a soft prefix, starting from embeddings of random tokens."""

    def __init__(self, decoder: PlainDecoder, virtual_tokens: int, seed: int) -> None:
        super().__init__(decoder)
        embeddings = decoder.backbone.embeddings
        device = embeddings.weight.device
        ids = torch.randint(embeddings.num_embeddings, (virtual_tokens,), generator=torch.Generator().manual_seed(seed))
        # Through the layer, since Gemma's scales the embeddings.
        self.prefix = nn.Parameter(embeddings(ids.to(device)).detach().float().clone())

    def loss(self, items: Tensor, rows: list[Prompt]) -> Tensor:  # type: ignore[override]
        """The loss of these rows, as part of the mean over `items`, the whole batch's answer tokens."""
        return self.share(items, [behind(row, self.prefix) for row in rows], None)
