"""The systems of a comparison: those that a folder of recipes trains, and the baselines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch
import yaml

from benchmarks.adaptation.hypertuning import HyperTuningRecipe
from benchmarks.adaptation.prompt_tuning import PromptTuningRecipe, with_prefix
from benchmarks.world import RECIPES
from ctx_compress_rag.adaptation.adapt import Adaptation, Demonstration, adapted_decoder, demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.config import AdaptationRecipe
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.adaptation.stages import Episode, RetrievalAdapterRecipe, UpdatePredictorRecipe
from ctx_compress_rag.adaptation.updates import sgd_update
from ctx_compress_rag.bundle.files import REPORT_FILE
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.training.run import find_recipe, load_recipe, run_recipe

ALONE, BASE = "decoder alone", "base adapter"
AT_TEST_TIME, PREDICTED = "TT-SGD, K=", "RAG-GD, K="  # and the number of steps
_AVERAGED = 16  # contexts


@dataclass(frozen=True, eq=False)
class BaseAdapter(Adaptation):
    """The base retrieval adapter, whatever the demonstrations. None is the decoder alone."""

    base: Adapter | None

    def adapt(self, decoder: Decoder, demonstrations: Sequence[Demonstration]) -> Adapter | None:
        return self.base


@dataclass(frozen=True, eq=False)
class TestTimeSGD(Adaptation):
    """TT-SGD: K steps of gradient descent on the demonstrations, at question time (eq. 8)."""

    __test__ = False  # despite its name, not a test

    base: Adapter
    steps: int
    learning_rate: float

    def adapt(self, decoder: Decoder, demonstrations: Sequence[Demonstration]) -> Adapter:
        update = sgd_update(
            decoder.bundle, [demonstration_prompts(decoder, demonstrations)], self.base, self.steps, self.learning_rate
        )
        return update.adapted().row(0)


@dataclass(frozen=True)
class System:
    """A way to follow demonstrations, by name.

    Attributes:
        name: its name.
        adaptation: how it uses the demonstrations.
        given: makes the episodes that it gets from the comparison's, one from each.
        chat: makes the messages that ask an episode's question.
        finish: makes the final answer from the decoder's.
        prefix: the folder of a soft prefix that is read first; None reads none.
    """

    name: str
    adaptation: Adaptation
    given: Callable[[Sequence[Episode]], Sequence[Episode]] = tuple
    chat: Callable[[Episode], list[dict[str, str]]] = lambda episode: episode.query.chat()
    finish: Callable[[str, Episode], str] = lambda answer, episode: answer
    prefix: Path | None = None

    def adapt(self, decoder: Decoder, episode: Episode) -> Decoder:
        """The decoder, adapted to an episode's demonstrations."""
        if self.prefix is not None:
            return with_prefix(decoder, self.prefix)
        return adapted_decoder(decoder, self.adaptation.adapt(decoder, episode.support))


@dataclass(frozen=True)
class Recipes:
    """The recipes that a comparison trains.

    Attributes:
        base: the retrieval adapter's recipe.
        others: soft prefixes and predictors on the same decoder.
        files: each recipe's file, in the order to run them, the base's first.
    """

    base: RetrievalAdapterRecipe
    others: tuple[AdaptationRecipe, ...]
    files: tuple[Path, ...]

    @classmethod
    def find(cls, where: str | Path) -> Recipes:
        """The recipes in a folder, or in one of this project by name (`rag_gd`, `rag_gd/demo`).

        Raises:
            ConfigError: it does not have exactly one retrieval adapter, or its recipes do not belong together.
        """
        named = [place for place in (RECIPES / where, find_recipe(str(where))) if place is not None]
        files = [
            file for folder in ([Path(where)] if Path(where).is_dir() else named) for file in folder.glob("*.yaml")
        ]
        loaded = {file: load_recipe(file) for file in sorted(files, key=lambda file: file.name)}
        found = {file: recipe for file, recipe in loaded.items() if isinstance(recipe, AdaptationRecipe)}
        bases = {file: recipe for file, recipe in found.items() if isinstance(recipe, RetrievalAdapterRecipe)}
        if len(bases) != 1:
            raise ConfigError(f"{str(where)!r} has {len(bases)} retrieval_adapter recipes: give exactly one")
        [(base_file, base)] = bases.items()
        others = {file: recipe for file, recipe in found.items() if file != base_file}
        for file, recipe in others.items():
            for key in ("bundle", "decoder", "revision"):
                if getattr(recipe, key) != getattr(base, key):
                    raise ConfigError(
                        f"{file}: {key} is {getattr(recipe, key)}, not {getattr(base, key)} as in {base_file}"
                    )
            if isinstance(recipe, UpdatePredictorRecipe) and recipe.base != base.output:
                raise ConfigError(f"{file}: base is {recipe.base}: set it to {base.output}, the output of {base_file}")
        return cls(base, tuple(others.values()), (base_file, *others))

    def shortened(self, steps: int, folder: Path) -> Recipes:
        """The same recipes with at most `steps` steps each, for a quick test; files and outputs are in `folder`."""
        (folder / "recipes").mkdir(parents=True, exist_ok=True)
        base = str(folder / "trained" / self.files[0].stem)
        for file, recipe in zip(self.files, (self.base, *self.others), strict=True):
            settings = recipe.model_dump(mode="json", exclude_unset=True)
            settings["output"] = str(folder / "trained" / file.stem)
            shorter = min(steps, recipe.optim.steps)
            settings["optim"] = settings.get("optim", {}) | {"steps": shorter}
            if isinstance(recipe, UpdatePredictorRecipe):
                settings["base"] = base
                if recipe.contexts is not None:
                    settings["contexts"] = min(recipe.contexts, shorter * recipe.optim.batch_size)
            text = yaml.safe_dump(settings, sort_keys=False)
            (folder / "recipes" / file.name).write_text(text, encoding="utf-8")
        return self.find(folder / "recipes")

    def train_missing(self, decoder: Decoder) -> None:
        """Run the recipes that are not finished; an interrupted one resumes from its last checkpoint.

        Raises:
            ConfigError: an output was made for another decoder, or by a recipe that has changed since.
        """
        for file in self.files:
            output = run_recipe(file)
            if json.loads((output / REPORT_FILE).read_text("utf-8"))["fingerprint"] != decoder.bundle.fingerprint:
                raise ConfigError(f"{output} was made for another decoder: remove it to train it again")

    def systems(self, decoder: Decoder) -> list[System]:
        """The trained systems and the baselines, in the order of a table.

        If several recipes are of one kind and K, the systems' names include the recipes' file names.
        """
        base = Adapter.from_pretrained(self.base.output, decoder.bundle.backbone.model)
        systems = [
            System("query only", BaseAdapter(None), given=_without_passages),
            System(ALONE, BaseAdapter(None)),
            System(f"{ALONE}, few-shot", BaseAdapter(None), chat=_with_shots),
            System(BASE, BaseAdapter(base)),
            System(f"{BASE}, few-shot", BaseAdapter(base), chat=_with_shots),
        ]
        kinds = [_kind(recipe) for recipe in self.others]
        hypertuned: list[System] = []
        matching: list[tuple[str, PredictedUpdate]] = []
        for kind, file, recipe in zip(kinds, self.files[1:], self.others, strict=True):
            name = kind if kinds.count(kind) == 1 else f"{kind} ({file.stem})"
            if isinstance(recipe, PromptTuningRecipe):
                systems.append(System(name, BaseAdapter(None), prefix=recipe.output))
            else:
                update = PredictedUpdate.from_pretrained(recipe.output, decoder)
                if isinstance(recipe, HyperTuningRecipe):
                    hypertuned.append(System(name, update))
                else:
                    matching.append((name, update))
        systems += hypertuned
        matching.sort(key=lambda one: one[1].config.inner_steps)
        for name, each in matching:
            own = TestTimeSGD(base, each.config.inner_steps, each.config.inner_learning_rate)
            systems.append(System(f"{AT_TEST_TIME}{name.removeprefix(PREDICTED)}", own))
        systems += [System(name, each) for name, each in matching]
        return systems


def _kind(recipe: AdaptationRecipe) -> str:
    """The name of the system that a recipe trains, if it is the only one of its kind."""
    if not isinstance(recipe, UpdatePredictorRecipe):
        return "prompt tuning"
    return "HyperTuning" if isinstance(recipe, HyperTuningRecipe) else f"{PREDICTED}{recipe.inner_steps}"


def controls(systems: Sequence[System], decoder: Decoder, episodes: Sequence[Episode]) -> list[System]:
    """Controls for a predicted update: one update for all contexts, and the update predicted from another task."""
    predicted = [system for system in systems if system.name.startswith(PREDICTED)]
    if not predicted:
        return []
    update, steps = predicted[-1].adaptation, predicted[-1].name.removeprefix(PREDICTED)
    assert isinstance(update, PredictedUpdate)
    mean = mean_over(update, decoder, [episode.support for episode in episodes[:_AVERAGED]])
    made = [System(f"mean of the predicted updates, K={steps}", mean)]
    if len({episode.task for episode in episodes}) > 1:
        made.append(System(f"predicted from another task, K={steps}", update, given=_of_other_tasks))
    return made


def mean_over(update: PredictedUpdate, decoder: Decoder, contexts: Sequence[Sequence[Demonstration]]) -> BaseAdapter:
    """The mean of the updates predicted for these contexts, whatever the demonstrations."""
    rows = [demonstration_prompts(decoder, context) for context in contexts]
    with torch.no_grad():
        each = update.predict(decoder.bundle, rows)
    # A sum of products is the product of the factors side by side.
    a = {n: t.flatten(0, 1) for n, t in each.a.items()}
    b = {n: t.transpose(0, 1).flatten(1) / len(rows) for n, t in each.b.items()}
    return BaseAdapter(update.base.plus(Adapter(a, b, each.scale)))


def copy_rule() -> System:
    """The decoder alone, with the words that all demonstrations' answers end with put after its answer."""
    return System("copied ending", BaseAdapter(None), finish=_with_ending)


def _with_ending(answer: str, episode: Episode) -> str:
    reversed_words = [demonstration.answer.split()[::-1] for demonstration in episode.support]
    shared = [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*reversed_words, strict=False))]
    return " ".join([answer, *shared[::-1]])


def _with_shots(episode: Episode) -> list[dict[str, str]]:
    """The demonstrations as earlier turns of the chat, questions with answers."""
    chat = []
    for shown in episode.support:
        chat += [*shown.chat(), {"role": "assistant", "content": shown.answer}]
    return [*chat, *episode.query.chat()]


def _without_passages(episodes: Sequence[Episode]) -> list[Episode]:
    return [replace(episode, query=replace(episode.query, passages=())) for episode in episodes]


def _of_other_tasks(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes, each with the support of the next episode of another task, from the start again after the last."""
    given = []
    for number, episode in enumerate(episodes):
        others = (*episodes[number + 1 :], *episodes[:number])
        given.append(replace(episode, support=next(e.support for e in others if e.task != episode.task)))
    return given
