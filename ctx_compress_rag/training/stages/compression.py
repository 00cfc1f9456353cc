"""What all stages that train a compressor and its reader share: settings, the bundle to start from, and the job."""

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ctx_compress_rag.bundle import SHIPPED
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.bundle.files import CONFIG_FILE, read_bundle_config
from ctx_compress_rag.data.examples import Example, distinct_passages
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.reader import TwoLayerMap
from ctx_compress_rag.methods.registry import AnyMethodConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.layers import adapted_share
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.soft_context import check_ratio_divides_window
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.templates import TEMPLATES
from ctx_compress_rag.text.tokenizing import text_ids
from ctx_compress_rag.training.config import Recipe, SourceConfig
from ctx_compress_rag.training.engine.layers import bundle_decoder_layers, speed_up_training
from ctx_compress_rag.training.engine.loop import Collate, TrainingJob, training_processes
from ctx_compress_rag.training.objective import SlotObjective
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, load_training_examples

logger = logging.getLogger(__name__)


Objective = tuple[SlotObjective, Collate, Any]
"""A loss, the collator that feeds it, and the examples for the collator."""


class RatioStep(Strict):
    """A part of a curriculum: from `step` on, train all `ratios`, or `sample` of them, drawn for each step or example.

    One ratio drawn for each example is the ablation of "Simple Context Compression" (table 3).
    """

    step: int = Field(ge=0)
    ratios: list[int] = Field(min_length=1)
    sample: int | None = Field(default=None, gt=0)
    each: Literal["step", "example"] = "step"


class CompressionRecipe(Recipe):
    """The settings of every recipe that trains a compressor and its reader.

    Training starts from untrained weights for `decoder`, or from a `bundle`, which an earlier stage made or which is
    shipped under this name. What a recipe with a bundle leaves out (`name`, `reads`, `base_ratio`, `ratios`, `window`,
    the prompt) is the bundle's. A `method` given with a bundle replaces the bundle's settings and must fit its weights.

    `window` is `BundleConfig.window`, and `teacher` a peft adapter's folder (None: the decoder itself teaches).
    With `copy_decoder: false` the new bundle names the folder given as `decoder` and holds no copy of it. `int8` saves
    the bundle's matrices in 8 bits. `sources`, `decoder_license` and `limits` go into its model card.

    Without a `curriculum` (ours: decoders as small as the demo's cannot start at coarse ratios), all `ratios` train.
    With `fit_passages` (ours) a map of two layers starts as the least-squares map, on this many of the data's passages,
    from slots at 1x to their tokens' embeddings: it helps decoders that are frozen.
    """

    packed: ClassVar[bool] = False
    """Whether the stage's examples are whole batches of packed rows, all of one shape."""

    name: str = ""
    reads: str = "general text"
    bundle: Path | None = None
    decoder: str | GgufDecoder | None = None
    copy_decoder: bool = True
    revision: str | None = None
    teacher: Path | None = None
    method: AnyMethodConfig | None = None
    base_ratio: int = Field(default=4, gt=0)
    ratios: list[int] = Field(default=[4, 8, 16, 32, 64, 128], min_length=1)
    window: int = Field(default=1024, gt=0)
    curriculum: list[RatioStep] = Field(default=[])
    fit_passages: int = Field(default=0, ge=0)
    int8: bool = False
    sources: list[SourceConfig] = Field(default=[])
    decoder_license: str | None = None
    limits: list[str] = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _of_the_bundle(cls, settings: Any) -> Any:
        """Fill in what the bundle says, unless it does not exist yet because an earlier stage makes it."""
        bundle = settings.get("bundle") if isinstance(settings, dict) else None
        if not isinstance(bundle, str | Path):  # none, or refused for its type
            return settings
        folder = SHIPPED.get(str(bundle)) or Path(bundle)
        settings = settings | {"bundle": folder}
        if not (folder / CONFIG_FILE).exists():
            return settings
        config = read_bundle_config(folder / CONFIG_FILE)
        own = {key: getattr(config, key) for key in ("name", "reads", "base_ratio", "ratios", "window")} | settings
        if cls.asks and isinstance(own.get("data"), dict):
            # A bundle with one of the usual prompts was trained with all of them.
            others = [template for template in TEMPLATES if template != config.template]
            asked = [config.template, *(others if config.template in TEMPLATES else ())]
            own["data"] = {"templates": asked, "max_answer_tokens": config.answer_tokens} | own["data"]
        return own

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.bundle is None) == (self.decoder is None):
            raise ValueError("give either decoder (a folder, hub id or GGUF file) or bundle (made by an earlier stage)")
        if self.decoder and (self.method is None or not self.name):
            raise ValueError("a new bundle needs a name and a method: give both")
        if self.bundle and (self.revision or self.teacher or self.fit_passages):
            raise ValueError("a bundle has its own: leave revision, teacher and fit_passages out")
        if self.method is not None:  # otherwise it is the bundle's, which may not exist until an earlier stage has run
            self.method.check_ratios(self.base_ratio, self.ratios)
        # Training pools each of a passage's windows separately; a store merges slots across windows.
        for ratio in self.slot_ratios():
            check_ratio_divides_window(ratio, self.window)
        return self

    def slot_ratios(self) -> list[int]:
        return [self.base_ratio, *self.ratios, *(ratio for part in self.curriculum for ratio in part.ratios)]

    def curriculum_at(self, step: int) -> RatioStep:
        begun = [part for part in sorted(self.curriculum, key=lambda part: part.step) if part.step <= step]
        return begun[-1] if begun else RatioStep(step=0, ratios=self.ratios)

    def ratios_at(self, step: int) -> list[int]:
        """Return the ratios to train at a step; they are the same at every call."""
        current = self.curriculum_at(step)
        if current.sample is None or current.sample >= len(current.ratios) or current.each == "example":
            return current.ratios
        return sorted(random.Random(f"{self.seed}:{step}").sample(current.ratios, current.sample))

    def builder(self, bundle: Bundle) -> TrainingPromptBuilder:
        config = bundle.config
        return TrainingPromptBuilder(
            bundle.tokenizer, self.data.max_answer_tokens, config.separator, config.answer_prefix
        )

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        """Return the loss that the stage minimizes, its collator and its examples; each stage has its own."""
        raise NotImplementedError

    def make_job(self) -> TrainingJob:
        """Return a job that will train a bundle and save it. Its report includes the reports of earlier stages."""
        examples = load_training_examples(self)
        bundle = bundle_to_train(self, examples)
        objective, collate, arranged = self.objective(bundle, examples)
        objective.seed = self.seed
        about = decoder_report(bundle.backbone, objective)
        if (ahead := bundle.compressor.looks_ahead()) is not None:
            causal = f"causal, as layers of {type(bundle.backbone.model).__name__} are whatever the mask"
            about["encoder"] = "looks ahead" if ahead else causal
        saved = bundle.config.decoder is None
        speed_up_training(bundle.backbone.model, self.optim, dynamic=not self.packed, saved=saved)

        def choose_ratios(step: int) -> None:
            part = self.curriculum_at(step)
            objective.step, objective.ratios = step, self.ratios_at(step)
            objective.sample = part.sample if part.each == "example" else None

        if bundle.report:
            about["earlier"] = bundle.report

        def save(report: dict[str, Any]) -> None:
            bundle.report = report
            bundle.save_pretrained(self.output / "bundle", int8=self.int8)

        return TrainingJob(
            objective,
            arranged,
            collate,
            save,
            about=about,
            on_step=choose_ratios,
            measure=getattr(objective, "measure", None),
            layers=bundle_decoder_layers(bundle),
            micro_batch_size=1 if self.packed else None,
        )


def decoder_report(backbone: Backbone, objective: nn.Module) -> dict[str, Any]:
    """Return, and log, what share of the decoder's layers each adapter made here changes, and which it leaves out.

    Also returned is why an objective in packed rows does not pack.
    """
    report: dict[str, Any] = {}
    for adapter, left_out in backbone.left_out.items():
        share, reasons = round(adapted_share(backbone.model, adapter), 3), dict[str, list[str]]()
        for layer, reason in left_out.items():
            reasons.setdefault(reason, []).append(layer)
        said = "".join(f"; left out, since {why}: {len(names)}, such as {names[0]}" for why, names in reasons.items())
        logger.info("LoRA %r changes %.0f %% of the layers' weights%s", adapter, 100 * share, said)
        report[adapter] = {"share_of_layers": share, "left_out": reasons}
    unpacked = f"{type(backbone.model).__name__} does not keep sequences in one row apart"
    return {"adapters": report} | ({} if getattr(objective, "packs", True) else {"unpacked": unpacked})


def bundle_to_train(recipe: CompressionRecipe, examples: list[Example]) -> Bundle:
    """Load the recipe's `bundle` with its settings, or make one. Raise ConfigError if its window is too long."""
    settings: dict[str, Any] = {
        "name": recipe.name,
        "base_ratio": recipe.base_ratio,
        "ratios": recipe.ratios,
        "window": recipe.window,
        "reads": recipe.reads,
    }
    if recipe.asks:
        settings |= {"template": recipe.data.templates[0], "answer_tokens": recipe.data.max_answer_tokens}
    if recipe.method is not None:
        settings["method"] = recipe.method
    if recipe.bundle is not None:
        return Bundle.from_pretrained(recipe.bundle, device=training_processes().device, changes=settings)
    assert recipe.decoder is not None
    if recipe.teacher is not None and isinstance(recipe.decoder, str):
        _compare_decoders(recipe.teacher, recipe.decoder)
    model, tokenizer = load_decoder(recipe.decoder, recipe.revision, training_processes().device)
    decoder: str | GgufDecoder | None = recipe.decoder
    revision = recipe.revision
    if isinstance(decoder, str) and Path(decoder).is_dir():
        decoder, revision = None if recipe.copy_decoder else str(Path(decoder).resolve()), None
    config = BundleConfig(decoder=decoder, revision=revision, **settings)
    backbone = Backbone(model, tokenizer)
    if backbone.window is not None and recipe.window > backbone.window:
        raise ConfigError(f"window {recipe.window} is longer than the decoder's {backbone.window} positions: lower it")
    bundle = Bundle.build(config, backbone, teacher=recipe.teacher)
    if recipe.fit_passages:
        fit_reader(bundle, distinct_passages(examples)[: recipe.fit_passages])
    else:
        softs = bundle.compress([p for e in examples[:8] for p in e.passages])
        slots = torch.cat([torch.from_numpy(soft.slots) for soft in softs])
        bundle.reader.initialize(float(slots.pow(2).mean().sqrt()))
    return bundle


def fit_reader(bundle: Bundle, texts: Sequence[str]) -> None:
    """Fit a bundle's reader to map the slots of texts at 1x to the mean embeddings of their tokens.

    Raises ConfigError if its map has not two layers.
    """
    if not isinstance(bundle.reader.projection, TwoLayerMap):
        raise ConfigError(
            f"fit_passages needs a map of two layers, which {bundle.config.method.name} lacks: leave it out"
        )
    softs = bundle.compress(texts, ratio=1)
    targets: list[Tensor] = []
    with torch.no_grad():
        for text, soft in zip(texts, softs, strict=True):
            ids = torch.tensor(text_ids(bundle.tokenizer, text), device=bundle.backbone.device)
            embedded = bundle.backbone.inputs.embed(ids).float()
            targets += [part.mean(0) for part in embedded.split(soft.token_counts.tolist())]
    slots = torch.cat([torch.from_numpy(soft.slots) for soft in softs]).to(bundle.backbone.device)
    bundle.reader.projection.fit(slots, torch.stack(targets))


def _compare_decoders(teacher: Path, decoder: str) -> None:
    """Warn if the teacher was trained on another decoder. It is no error, because the folder may have been moved."""
    file = teacher / "adapter_config.json"
    own = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") if file.exists() else None
    if own and Path(own).resolve() != Path(decoder).resolve():
        logger.warning(
            "teacher %s was trained on the decoder %r, not %r: if these differ, train it on yours",
            teacher,
            own,
            decoder,
        )
