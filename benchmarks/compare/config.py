"""The YAML file for `python -m benchmarks compare`: entries to train, each a list of training stages.

An entry's stages are ordinary recipes (see `training.recipes`) without a few keys, which the command fills in so that
they are the same for all entries: the decoder, the steps and the examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ctx_compress_rag.data.mixing import MixData
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.strict import Strict, explain_validation_error
from ctx_compress_rag.training.engine.layers import bfloat16_pays
from ctx_compress_rag.training.run import parse_recipe
from ctx_compress_rag.training.stages.compression import CompressionRecipe

SHIPPED = Path(__file__).parent / "comparisons"

BASELINES = "baselines"
"""The baselines' place among the entries' results."""

# Keys that would make entries unequal, or that follow from others.
_FILLED_IN = ("name", "output", "decoder", "bundle", "ratios")
_FILLED_IN_OF_DATA = ("files", "texts", "mix", "part", "held_out", "most_words")
_FILLED_IN_OF_OPTIM = ("steps", "batch_size", "save_every")


class CurriculumShare(Strict):
    """From this share of the stage's steps on, train these ratios, or `sample` of them, drawn as `RatioStep` says."""

    share: float = Field(ge=0, lt=1)
    ratios: list[int] = Field(min_length=1)
    sample: int | None = Field(default=None, gt=0)
    each: Literal["step", "example"] = "step"


class EntryStage(BaseModel):
    """A stage: its share of the entry's operations, its curriculum, and any key of a recipe.

    The keys of a `method` given here replace those of the entry's in this stage only.
    """

    model_config = ConfigDict(extra="allow")

    share: float = Field(gt=0, le=1)
    curriculum: list[CurriculumShare] = []


class Entry(Strict):
    """A system to train, with its own line in the table.

    Attributes:
        note: what it is, and how its training differs from the others' and why.
        like: another entry, which supplies the method, settings, ratios and stages that this one lacks;
            keys of a method or settings given here replace single keys of that entry's.
        method: a method's configuration, see `methods`.
        ratios: the ratios it is trained and scored at; by default all of the comparison's.
        settings: keys of a recipe for all its stages.
        stages: in order; their shares sum to 1.
    """

    note: str
    like: str | None = None
    method: dict[str, Any] = {}
    ratios: list[int] | None = Field(default=None, min_length=1)
    settings: dict[str, Any] = {}
    stages: list[EntryStage] = []


class Ordering(Strict):
    """A paper's claim that one entry scores better than another, tested on the mean of all ratios that both have."""

    claim: str
    better: str
    worse: str


class QuestionFiles(Strict):
    """Questions about texts: JSONL files as recipes take them.

    Training examples that share a question or passage with the test file are left out.

    Attributes:
        files: the files to train on.
        test: the file to score with; questions without an answer are left out.
        most_words: leave out, in all files, examples that have a passage of more words.
        mix: how examples become prompts; the budget says how many passages a prompt has.
        seed: of the examples' order.
    """

    files: list[Path] = Field(min_length=1)
    test: Path
    most_words: int | None = Field(default=None, gt=0)
    mix: MixData = MixData()
    seed: int = 0

    @model_validator(mode="after")
    def _passages_are_the_budget_s(self) -> QuestionFiles:
        if "passages" in self.mix.model_fields_set:
            raise ValueError("mix.passages is set by --passages: leave it out")
        return self

    def of_stage(self, start: int, examples: int, passages: int) -> dict[str, Any]:
        """The `data` of a recipe that reads `examples` examples after the first `start`."""
        return {
            "files": [str(file) for file in self.files],
            "held_out": [str(self.test)],
            "most_words": self.most_words,
            "mix": {**self.mix.model_dump(mode="json"), "passages": [passages]},
            "part": {"start": start, "examples": examples, "seed": self.seed},
        }


class Comparison(Strict):
    """A whole comparison.

    Attributes:
        ratios: the ratios that entries are trained and scored at.
        batch_size: examples in a step.
        data: files of questions.
        decoder: the decoder that all entries start from, as in recipes.
        teacher: a LoRA adapter of that decoder: a peft folder, or a shipped bundle's name for its teacher. It is merged
            into the decoder first, so that all entries, frozen or not, full text and no context have the same decoder,
            which gives short answers.
        settings: keys of a recipe for every stage of every entry.
        entries: by name.
        orderings: the papers' claims about the entries.
    """

    ratios: list[int] = Field(min_length=1)
    batch_size: int = Field(gt=0)
    data: QuestionFiles
    decoder: str | GgufDecoder
    teacher: str | None = None
    settings: dict[str, Any]
    entries: dict[str, Entry] = Field(min_length=1)
    orderings: list[Ordering] = []

    @model_validator(mode="after")
    def _complete(self) -> Comparison:
        for name, entry in self.entries.items():
            if name == BASELINES or Path(name).name != name:
                raise ValueError(f"an entry cannot be named {name!r}: results are kept in files of these names")
            if entry.like is not None and entry.like not in self.entries:
                raise ValueError(f"entry {name} is like {entry.like!r}, which is not an entry")
            whole = self.resolved(name)
            if not whole.method or not whole.stages:
                raise ValueError(f"entry {name} needs a method and stages: give both, or a `like` entry that has them")
            total = sum(stage.share for stage in whole.stages)
            if abs(total - 1) > 1e-6:
                raise ValueError(f"the shares of entry {name}'s stages sum to {total:g}, not to 1")
        for ordering in self.orderings:
            for name in (ordering.better, ordering.worse):
                if name not in self.entries:
                    raise ValueError(f"the ordering {ordering.claim!r} is about {name!r}, which is not an entry")
        return self

    def resolved(self, name: str) -> Entry:
        """An entry, completed from the one that it is like.

        Raises:
            ConfigError: entries are like each other in a circle.
        """
        chain = [name]
        while (like := self.entries[chain[-1]].like) is not None:
            if like in chain:
                raise ConfigError(f"entries are like each other in a circle: {' -> '.join([*chain, like])}")
            chain.append(like)
        whole = self.entries[chain.pop()]
        for own in (self.entries[name] for name in reversed(chain)):
            whole = Entry(
                note=own.note,
                method=merged(whole.method, own.method),
                ratios=own.ratios or whole.ratios,
                settings=merged(whole.settings, own.settings),
                stages=own.stages or whole.stages,
            )
        return whole

    @property
    def dtype(self) -> str | None:
        """Dtype of the decoder when it answers: bfloat16 if entries are trained in it; None is the device's default."""
        return "bfloat16" if self.settings.get("optim", {}).get("bf16") and bfloat16_pays() else None

    def ratios_of(self, name: str) -> list[int]:
        """The ratios that an entry is trained and scored at, the finest first."""
        return sorted(self.resolved(name).ratios or self.ratios)


def load_comparison(path: str | Path) -> Comparison:
    """Read a comparison from a YAML file, or a shipped one by name (`natural`).

    Raises:
        ConfigError: there is no such file, or it has an unknown key or impossible value.
    """
    file = Path(path)
    if not file.is_file():
        file = SHIPPED / f"{path}.yaml"
    if not file.is_file():
        shipped = ", ".join(sorted(f.stem for f in SHIPPED.glob("*.yaml")))
        raise ConfigError(f"no comparison {str(path)!r}: give a YAML file or one of {shipped}")
    try:
        return Comparison.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain_validation_error(error)}") from None


def stage_recipes(
    comparison: Comparison,
    name: str,
    steps: Sequence[int],
    passages: int,
    decoder: str | GgufDecoder,
    folder: Path,
    apart: bool = False,
) -> list[CompressionRecipe]:
    """An entry's stages as recipes: stage i is written to `folder`/i, and starts from the bundle of stage i - 1.

    All entries read the same examples in the same order: each stage continues where the one before it stopped.

    Args:
        comparison, name: the comparison, and the entry.
        steps: optimizer steps of each stage.
        passages: passages in each example's prompt.
        decoder: what the first stage starts from.
        folder: the entry's.
        apart: every stage starts from the decoder, untrained, to count what it costs.

    Raises:
        ConfigError: a stage has an unknown or impossible value.
    """
    entry = comparison.resolved(name)
    ratios = comparison.ratios_of(name)
    start: dict[str, Any] = {
        "decoder": decoder.model_dump(exclude_none=True) if isinstance(decoder, GgufDecoder) else decoder,
        # All entries share the decoder; outside a bundle, its weights are trained in the precision that they answer in.
        "copy_decoder": False,
    }
    recipes: list[CompressionRecipe] = []
    done = 0
    for number, (stage, count) in enumerate(zip(entry.stages, steps, strict=True), 1):
        recipe = merged(comparison.settings, entry.settings, stage.model_extra or {})
        _check_free(recipe, f"stage {number} of {name}")
        recipe = merged(
            recipe,
            start if number == 1 or apart else {"bundle": str(folder / str(number - 1) / "bundle")},
            {
                "name": name,
                "output": str(folder / str(number)),
                "method": merged(entry.method, recipe.get("method", {})),
                "base_ratio": recipe.get("base_ratio", ratios[0]),
                "ratios": ratios,
                "curriculum": [
                    {"step": round(part.share * count), **part.model_dump(exclude={"share"})}
                    for part in stage.curriculum
                ],
                "data": comparison.data.of_stage(done * comparison.batch_size, count * comparison.batch_size, passages),
                "optim": {
                    "steps": count,
                    "batch_size": comparison.batch_size,
                    "save_every": max(1, min(100, count // 4)),
                },
            },
        )
        parsed = parse_recipe(recipe, f"stage {number} of {name}")
        if not isinstance(parsed, CompressionRecipe):
            raise ConfigError(f"stage {number} of {name} is of kind {parsed.stage!r}, which trains no compressor")
        recipes.append(parsed)
        done += count
    return recipes


def _check_free(recipe: Mapping[str, Any], where: str) -> None:
    filled = [key for key in _FILLED_IN if key in recipe]
    filled += [f"data.{key}" for key in _FILLED_IN_OF_DATA if key in recipe.get("data", {})]
    filled += [f"optim.{key}" for key in _FILLED_IN_OF_OPTIM if key in recipe.get("optim", {})]
    if filled:
        raise ConfigError(f"{where} may not set {', '.join(filled)}: the comparison sets this for all entries")


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key at every depth; later ones override earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def chosen(comparison: Comparison, names: Sequence[str] | None) -> list[str]:
    """The named entries in the file's order; all if none is named.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names or []:
        if name not in comparison.entries:
            raise ConfigError(f"no entry {name!r}: choose from {', '.join(comparison.entries)}")
    return [name for name in comparison.entries if not names or name in names]
