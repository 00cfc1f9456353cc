"""RAG-GD: a predictor maps demonstrations to an update in one pass (In-Context Optimization, section 5.2)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapt import Adaptation, Demonstration, demonstration_prompts, open_adapted_model
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import PredictorSettings
from ctx_compress_rag.adaptation.updates import GradientUpdate, sgd_update, update_norms
from ctx_compress_rag.bundle.files import CONFIG_FILE, WEIGHTS_FILE, read_bundle_tensors
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.layers import decoder_layers, decoder_trunk
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.strict import faults_raised_as

BASE_FOLDER = "base"


class UpdatePredictor(nn.Module):
    """The model g_phi, which predicts from demonstrations' hidden states the adapter (U V^T) that they call for.

    It has a two-layer MLP encoder, and a head for each layer and projection that returns U and V. The paper gives no
    activation (GELU here) and no scales. The states of end tokens are much alike, so contexts differ little compared
    with the mean. The encoder therefore reads states minus their mean, divided by their spread. Updates are small
    compared with weights. If heads had to learn their scale from torch's initial one, AdamW's steps of 5e-4 would be
    coarse, so each head's output has a gain. `calibrate` measures mean, spread and gains once.
    """

    center: Tensor
    spread: Tensor
    gain: Tensor

    def __init__(
        self, dim: int, shapes: Mapping[str, tuple[int, int]], rank: int, hidden: int = 256, code: int = 64
    ) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.rank = rank
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.heads = nn.ModuleList(nn.Linear(code, rank * (d_in + d_out)) for d_in, d_out in self.shapes.values())
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(dim))
        self.register_buffer("gain", torch.ones(len(self.shapes)))

    def forward(self, pooled: Tensor) -> Adapter:
        """Map pooled hidden states (contexts, dim) to U V^T, a row for each context; `b` is U and `a` is V^T."""
        code = self.encoder((pooled.to(self.gain.dtype) - self.center) / self.spread)
        a, b = {}, {}
        for (name, (d_in, d_out)), head, gain in zip(self.shapes.items(), self.heads, self.gain, strict=True):
            u, v = head(code).split([self.rank * d_out, self.rank * d_in], dim=-1)
            a[name] = v.unflatten(-1, (self.rank, d_in))
            b[name] = gain * u.unflatten(-1, (d_out, self.rank))
        return Adapter(a, b)

    @torch.no_grad()
    def calibrate(self, pooled: Tensor, wanted: Mapping[str, Tensor]) -> None:
        """Set mean, spread and gains, measured on some contexts, so that first updates have about their targets' norms.

        The norms are equal in the geometric mean. `wanted` holds the targets' norms by projection, (contexts,).
        """
        self.center.copy_(pooled.mean(dim=0))
        spread = pooled.std(dim=0, correction=0)
        self.spread.copy_(torch.where(spread > 0, spread, 1.0))
        self.gain.fill_(1.0)
        own = update_norms(self(pooled))
        self.gain.copy_(torch.stack([(wanted[n].log() - own[n].log()).mean().exp() for n in self.shapes]))


@torch.no_grad()
def pool_demonstrations(
    decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]], base: Adapter, layer: int | None = None
) -> Tensor:
    """Return hidden states at the end tokens of demonstrations, averaged over each context: (contexts, dim).

    The frozen decoder reads the demonstrations with the base adapter. As in all prompts here, passages come first, then
    question and answer; the paper has the question first (appendix G). States are taken after `layer`, and later layers
    are not run. None takes the last layer, after the final norm. The paper does not name the layer.
    """
    rows = [row for context in contexts for row in context]
    batch = splice_prompts(decoder.backbone.inputs, rows)
    with open_adapted_model(decoder.text_decoder(), base) as model:
        states = _hidden_states(model, batch.model_inputs(), layer)
    last = states[torch.arange(len(rows)), batch.position_ids.argmax(1)].float()
    return torch.stack([part.mean(dim=0) for part in last.split([len(context) for context in contexts])])


class _Reached(Exception):
    pass


def _hidden_states(model: Any, inputs: dict[str, Tensor], layer: int | None) -> Tensor:
    """Return the states of every position: (rows, length, dim)."""
    if layer is None:
        states: Tensor = decoder_trunk(model)(**inputs, use_cache=False).last_hidden_state
        return states
    count = int(model.config.get_text_config().num_hidden_layers)
    if layer > count:
        raise ConfigError(f"layer is {layer}, and the decoder has {count} layers: give 1 to {count}, or leave it out")
    made: list[Tensor] = []

    def stop(module: Any, inputs: Any, output: Any) -> None:
        made.append(output[0] if isinstance(output, tuple) else output)
        raise _Reached

    last = decoder_layers(model)[layer - 1]
    with suppress(_Reached), last.register_forward_hook(stop):
        decoder_trunk(model)(**inputs, use_cache=False)
    return made[0]


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
    def build(cls, base: Adapter, decoder: PlainDecoder, config: PredictorConfig) -> Self:
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
            return self.base.plus(self.predict(decoder.bundle, [demonstration_prompts(decoder, demonstrations)])).row(0)

    def predict(self, decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]]) -> Adapter:
        """Return an `Adapter` whose row i is the update for context i, a list of demonstrations as prompts."""
        update: Adapter = self.predictor(self.pooled(decoder, contexts))
        return update

    def pooled(self, decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]]) -> Tensor:
        """Return what the predictor reads: `pool_demonstrations` of support contexts (`predict`), (contexts, dim)."""
        return pool_demonstrations(decoder, contexts, self.base, self.config.layer)

    def target(self, decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]]) -> GradientUpdate:
        """Return what `predict` is trained to give, the update that gradient descent makes for each context (eq. 8)."""
        return sgd_update(decoder, contexts, self.base, self.config.inner_steps, self.config.inner_learning_rate)

    def save_pretrained(self, folder: str | Path, decoder: str | None = None) -> None:
        """Write the predictor into `folder`, and the base adapter into its folder `base/` as a peft adapter."""
        folder = Path(folder)
        self.base.save_pretrained(folder / BASE_FOLDER, decoder)
        save_file(
            {n: t.detach().cpu().contiguous() for n, t in self.predictor.state_dict().items()}, folder / WEIGHTS_FILE
        )
        (folder / CONFIG_FILE).write_text(self.config.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path, decoder: Decoder) -> Self:
        """Read what `save_pretrained` wrote, for `decoder` (for an LLM, `llm.decoder`).

        Raises BundleError if the predictor is missing, damaged, or made for another decoder.
        """
        folder = Path(folder)
        try:
            with faults_raised_as(BundleError, f"{folder / CONFIG_FILE}: "):
                config = PredictorConfig.model_validate_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise BundleError(f"{str(folder)!r} holds no update predictor: {CONFIG_FILE} is missing") from error
        bundle = decoder.bundle
        if config.fingerprint != bundle.weights_digest:
            raise BundleError(
                f"the predictor in {folder} was made for another decoder: train one for this decoder with recipes that "
                "name this bundle (bundle: in place of decoder:)"
            )
        base = Adapter.from_pretrained(folder / BASE_FOLDER, bundle.backbone.model)
        made = cls.build(base, bundle, config)
        try:
            made.predictor.load_state_dict(read_bundle_tensors(folder / WEIGHTS_FILE))
        except RuntimeError as error:
            raise BundleError(f"the predictor in {folder} does not fit this decoder and its config: {error}") from error
        made.predictor.requires_grad_(False)
        return made
