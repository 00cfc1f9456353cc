"""RAG-GD: updates that are predicted from demonstrations (section 5.2), saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from ctx_compress_rag.adaptation.adapt import Adaptation, rows_of
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import PredictorSettings
from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.adaptation.predictor import UpdatePredictor, pooled_states
from ctx_compress_rag.adaptation.updates import GradientUpdate, sgd
from ctx_compress_rag.bundle.files import read_tensors
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.strict import explain

BASE_FOLDER = "base"

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"


class PredictorConfig(PredictorSettings):
    """The contents of a predictor's config.json.

    Attributes:
        format: the version of the format.
        fingerprint: the `weights_digest` of the decoder that the predictor was made for, filled in by `build`. A
            decoder has another digest if it is fine-tuned or has a teacher, or if a bundle holds it in half precision.
    """

    format: Literal[1] = 1
    fingerprint: str = ""


@dataclass(frozen=True, eq=False)
class PredictedUpdate(Adaptation):
    """A way to adapt that predicts an update from the demonstrations in one forward pass (algorithm 1, phase 2)."""

    base: Adapter
    predictor: UpdatePredictor
    config: PredictorConfig

    @classmethod
    def build(cls, base: Adapter, decoder: PlainDecoder, config: PredictorConfig) -> PredictedUpdate:
        """Make a `PredictedUpdate` with an untrained predictor, for this decoder and its base retrieval adapter."""
        dim = int(decoder.backbone.model.config.get_text_config().hidden_size)
        predictor = UpdatePredictor(dim, base.shapes, base.rank, config.hidden, config.code)
        made_for = config.model_copy(update={"fingerprint": decoder.weights_digest})
        return cls(base, predictor.to(next(iter(base.a.values())).device), made_for)

    def adapt(self, decoder: Decoder, demonstrations: Sequence[Demonstration]) -> Adapter:
        """Return the base adapter with the update; raise a ConfigError for another number than in training."""
        if len(demonstrations) != self.config.demonstrations:
            raise ConfigError(
                f"this predictor was trained with {self.config.demonstrations} demonstrations and was given "
                f"{len(demonstrations)}: give as many as in training"
            )
        with torch.no_grad():
            return self.base.plus(self.predict(decoder.bundle, [rows_of(decoder, demonstrations)])).row(0)

    def predict(self, decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]]) -> Adapter:
        """Return the updates for support contexts (lists of prompts), as an adapter with a row for each context."""
        update: Adapter = self.predictor(self.pooled(decoder, contexts))
        return update

    def pooled(self, decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]]) -> Tensor:
        """Return the vectors that the predictor reads of support contexts: (contexts, dim)."""
        return pooled_states(decoder, contexts, self.base, self.config.layer)

    def target(self, decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]]) -> GradientUpdate:
        """Return what `predict` is trained to give, the update that gradient descent makes for each context (eq. 8)."""
        return sgd(decoder, contexts, self.base, self.config.inner_steps, self.config.inner_learning_rate)

    def save_pretrained(self, folder: str | Path, decoder: str | None = None) -> None:
        """Write the predictor into `folder`, and the base adapter into its folder `base/` as a peft adapter."""
        folder = Path(folder)
        self.base.save_pretrained(folder / BASE_FOLDER, decoder)
        save_file(
            {n: t.detach().cpu().contiguous() for n, t in self.predictor.state_dict().items()}, folder / _WEIGHTS_FILE
        )
        (folder / _CONFIG_FILE).write_text(self.config.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path, decoder: Decoder) -> PredictedUpdate:
        """Read what `save_pretrained` wrote, for `decoder` (for an LLM, `llm.decoder`).

        Raises:
            BundleError: the predictor is missing, damaged, or made for another decoder.
        """
        folder = Path(folder)
        try:
            text = (folder / _CONFIG_FILE).read_text(encoding="utf-8")
            config = PredictorConfig.model_validate_json(text)
        except OSError as error:
            raise BundleError(f"{str(folder)!r} holds no update predictor: {_CONFIG_FILE} is missing") from error
        except ValidationError as error:
            raise BundleError(f"{folder / _CONFIG_FILE}: {explain(error)}") from None
        bundle = decoder.bundle
        if config.fingerprint != bundle.weights_digest:
            raise BundleError(
                f"the predictor in {folder} was made for another decoder: train one for this decoder with recipes that "
                "name this bundle (bundle: in place of decoder:)"
            )
        base = Adapter.from_pretrained(folder / BASE_FOLDER, bundle.backbone.model)
        made = cls.build(base, bundle, config)
        try:
            made.predictor.load_state_dict(read_tensors(folder / _WEIGHTS_FILE))
        except RuntimeError as error:
            raise BundleError(f"the predictor in {folder} does not fit this decoder and its config: {error}") from error
        made.predictor.requires_grad_(False)
        return made
