"""Train every entry of a comparison at equal compute from the same decoder, and score it.

In the output folder, `run.json` says what is compared, `decoder/` is the decoder if a teacher was merged into it,
`entries/` holds recipes, checkpoints and bundles, and `results/` one JSON file for each finished entry. An entry
with a result is not trained again; an interrupted one resumes from its last checkpoint.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm

from benchmarks.compare.config import BASELINES, Comparison, QuestionFiles, stage_recipes
from benchmarks.compare.control import with_other_passages
from benchmarks.compare.decoder import decoder_sha256, merge_teacher, teacher_sha256
from benchmarks.compare.operations import PETA, operations_per_step
from benchmarks.timing.speed import seconds_of
from ctx_compress_rag import __version__
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import REPORT_FILE
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.data.examples import read_jsonl, without_long_passages
from ctx_compress_rag.data.mixing import MixData, mix_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, TrainingError
from ctx_compress_rag.evaluation.answering import (
    EXTRACTED,
    FULL,
    NONE,
    SOFT,
    TRUNCATED,
    Answers,
    Key,
    SystemAnswers,
    answer_questions,
    count_tokens,
    extract_sentences,
    question_chat,
    truncate_passages,
)
from ctx_compress_rag.evaluation.harness import score_each_answer
from ctx_compress_rag.evaluation.questions import Question, questions_digest, questions_of
from ctx_compress_rag.marking.budget import nearest_sentences
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.identity import file_sha256
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.store.codec import encode_soft_context, payload_bytes
from ctx_compress_rag.text.answers import exact_match, token_f1
from ctx_compress_rag.text.templates import TEMPLATES
from ctx_compress_rag.training.engine.saved_states import write_json
from ctx_compress_rag.training.run import run_recipe
from ctx_compress_rag.training.stages.compression import CompressionRecipe

RUN_FILE = "run.json"
_RECIPE_FILE = "recipe.yaml"
_OPERATIONS_FILE = "operations.json"
_COUNTED_STEPS = 8

_SHOWN_AT = 4
_TIMED_PASSAGES = 50
_ANSWER_TOKENS = 32
_DELETE = "delete it, and run the comparison again"


@dataclass(frozen=True)
class Plan:
    """What is compared, and where; a folder that holds a run of another plan is refused.

    Attributes:
        output: the folder.
        decoder: folder, hub id or GGUF file of the decoder that entries start from.
        teacher: merged into the decoder first (`compare.decoder.teacher_folder`); None merges nothing.
        budget: every entry's operations of training, in 10^15.
        passages: passages in each prompt.
        questions: number of test questions.
        ratios: the comparison's ratios, which the baselines are scored at.
        data: files of questions.
        dtype: of the decoder's weights when questions are answered; None takes the device's default.
    """

    output: Path
    decoder: str | GgufDecoder
    teacher: str | None
    budget: float
    passages: int
    questions: int
    ratios: list[int]
    data: QuestionFiles
    dtype: str | None = None

    @property
    def start(self) -> str | GgufDecoder:
        """The decoder that entries start from and that reads the baselines."""
        return self.decoder if self.teacher is None else str(self.output / "decoder")

    def test_questions(self) -> list[Question]:
        """The test questions, in a random order.

        Raises:
            ConfigError: the test file has fewer.
        """
        answered = [e for e in read_jsonl(self.data.test, unanswerable=True) if e.turns[0].answers]
        short = without_long_passages(answered, self.data.most_words)
        examples = mix_examples([short], MixData(passages=[self.passages]), self.data.seed, block=1)
        if len(examples) < self.questions:
            raise ConfigError(
                f"{self.data.test} has {len(examples)} questions to score with, not {self.questions}: ask for fewer"
            )
        return questions_of(examples, self.questions)

    def result(self, name: str) -> Path:
        """Where an entry's result goes."""
        return result_file(self.output, name)


@dataclass(frozen=True)
class EntryJob:
    """An entry to train and score, or the baselines, which are not trained."""

    comparison: Comparison
    plan: Plan
    name: str

    @property
    def folder(self) -> Path:
        """Where the entry's stages and log are."""
        return self.plan.output / "entries" / self.name

    def recipes(self) -> list[CompressionRecipe]:
        """The stages, written as recipe files, which `ctx-compress train` also takes.

        The first call counts what a step of each stage costs, and keeps it.

        Raises:
            ConfigError: the budget is too small for a stage.
        """
        file = self.folder / _OPERATIONS_FILE
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            apart = self._staged([_COUNTED_STEPS] * len(self.comparison.resolved(self.name).stages), apart=True)
            write_json(file, {"per_step": [operations_per_step(recipe) for recipe in apart]})
        recipes = self._staged(_steps(self.comparison, self.name, self.folder, self.plan.budget))
        for recipe in recipes:
            text = yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False)
            recipe.output.mkdir(parents=True, exist_ok=True)
            _recipe_file(recipe).write_text(text, encoding="utf-8")
        return recipes

    def _staged(self, steps: Sequence[int], apart: bool = False) -> list[CompressionRecipe]:
        plan = self.plan
        return stage_recipes(self.comparison, self.name, steps, plan.passages, plan.start, self.folder, apart)

    def check(self) -> None:
        """Refuse an unknown or impossible value of a stage before anything is trained."""
        self._staged([1] * len(self.comparison.resolved(self.name).stages))


def _steps(comparison: Comparison, name: str, folder: Path, budget: float) -> list[int]:
    """How many steps of each stage of an entry the budget pays for, by what one costs."""
    costs = _read_json(folder / _OPERATIONS_FILE, _DELETE)["per_step"]
    shares = [stage.share for stage in comparison.resolved(name).stages]
    steps = [round(share * budget * PETA / cost) for share, cost in zip(shares, costs, strict=True)]
    if not all(steps):
        raise ConfigError(f"a budget of {budget:g} leaves no step for stage {steps.index(0) + 1} of {name}: raise it")
    return steps


def prepare(comparison: Comparison, names: Sequence[str], plan: Plan) -> list[EntryJob]:
    """Write the output folder's decoder, and return what has no result yet, the baselines first."""
    if plan.questions < 2:
        raise ConfigError(f"{plan.questions} questions have no standard error: give 2 or more")
    if plan.passages < 1:
        raise ConfigError(f"{plan.passages} passages in a prompt: give 1 or more")
    entries = [EntryJob(comparison, plan, name) for name in names]
    for job in entries:
        job.check()
    questions = plan.test_questions()
    with_other_passages(questions)  # refused before anything is trained
    _claim(plan, questions)
    check_recipes(comparison, plan.output)
    if plan.teacher is not None:
        merge_teacher(plan.decoder, plan.teacher, plan.output / "decoder")
    return [job for job in (EntryJob(comparison, plan, BASELINES), *entries) if not plan.result(job.name).exists()]


def _claim(plan: Plan, questions: Sequence[Question]) -> None:
    """Record this run in its folder, or refuse a folder that holds another run."""
    weights = decoder_sha256(plan.decoder)
    about = {
        "decoder": str(plan.decoder),
        "decoder_sha256": weights,
        "teacher": plan.teacher,
        "teacher_sha256": teacher_sha256(plan.teacher),
        "data_sha256": [file_sha256(file) for file in plan.data.files],
        "test": plan.data.test.name,
        "test_sha256": questions_digest(questions),
        "budget": plan.budget,
        "passages": plan.passages,
        "questions": plan.questions,
        "ratios": plan.ratios,
        "dtype": plan.dtype,
    }
    # Not compared, because hashes are: the same files may have moved.
    named = {"teacher", "test"} if weights is None else {"decoder", "teacher", "test"}
    file = plan.output / RUN_FILE
    if file.exists():
        before = read_run(plan.output)
        for key, value in about.items():
            if before.get(key) != value and key not in named:
                raise ConfigError(
                    f"{plan.output} holds a comparison with {key} {before.get(key)!r}, not {value!r}: "
                    "give another --output, or delete the folder"
                )
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, about)


def read_run(folder: Path) -> dict[str, Any]:
    """What a folder's comparison compares.

    Raises:
        ConfigError: the file is damaged.
        FileNotFoundError: there is none.
    """
    return _read_json(folder / RUN_FILE, "give another --output, or delete the folder")


def result_file(folder: Path, name: str) -> Path:
    """Where an entry's result is in a comparison's folder."""
    return folder / "results" / f"{name}.json"


def read_result(folder: Path, name: str) -> dict[str, Any]:
    """An entry's result in a comparison's folder; raises as `read_run`."""
    return _read_json(result_file(folder, name), _DELETE)


def check_recipes(comparison: Comparison, folder: Path) -> None:
    """Refuse a comparison that describes entries otherwise than they were trained in a folder.

    Entries that are not trained now count, too: the report shows their results. The folder and files may have moved.
    """
    run = read_run(folder)
    for name in comparison.entries:
        place = folder / "entries" / name
        if not (place / "1" / _RECIPE_FILE).exists():
            continue
        steps = _steps(comparison, name, place, run["budget"])
        for recipe in stage_recipes(comparison, name, steps, run["passages"], run["decoder"], place):
            file = _recipe_file(recipe)
            if not file.exists():
                continue
            before = yaml.safe_load(file.read_text(encoding="utf-8"))
            if _without_places(before) != _without_places(recipe.model_dump(mode="json", exclude_unset=True)):
                raise ConfigError(f"the recipe of {name} has changed since {file}: delete {place} and its result")


def _without_places(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what says where things are, and what a bundle fills in once an earlier stage has made it.

    run.json has the hashes of the decoder and the files.
    """
    filled = ("templates", "max_answer_tokens") if "bundle" in recipe else ()
    data = {key: value for key, value in recipe["data"].items() if key not in ("files", "held_out", *filled)}
    places = ("output", "bundle", "decoder", "reads")
    return {key: value for key, value in recipe.items() if key not in places} | {"data": data}


def _recipe_file(recipe: CompressionRecipe) -> Path:
    return recipe.output / _RECIPE_FILE


def run_job(job: EntryJob) -> None:
    """Train an entry, score it and write its result; or score the baselines and write theirs."""
    questions = job.plan.test_questions()
    if job.name == BASELINES:
        result = _baselines(job.plan, questions)
    else:
        recipes = job.recipes()
        try:
            reports = [_train_stage(recipe) for recipe in recipes]
        except TrainingError as error:  # a changed recipe is refused beside what its former one has made
            raise TrainingError(f"{error} and the rest of {job.folder}") from error
        bundle = Bundle.from_pretrained(recipes[-1].output / "bundle", dtype=job.plan.dtype)
        result = _entry_result(recipes, bundle, reports, questions)
    result["version"] = __version__
    file = job.plan.result(job.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, result)


def _train_stage(recipe: CompressionRecipe) -> dict[str, Any]:
    """Run a stage unless it is finished, and return its report."""
    report = recipe.output / REPORT_FILE
    if not report.exists():
        run_recipe(_recipe_file(recipe))
    return _read_json(report, _DELETE)


def _entry_result(
    recipes: Sequence[CompressionRecipe],
    bundle: Bundle,
    reports: Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
) -> dict[str, Any]:
    compress_seconds = _compress_seconds(bundle, questions)  # before the store is filled: encoders may cache
    ratios = recipes[-1].ratios
    stored_bytes = _stored_bytes(bundle, questions, ratios)
    answers = answer_questions(bundle, questions, ratios, (SOFT,), max_tokens=_ANSWER_TOKENS)
    return {
        "method": bundle.config.method.model_dump(mode="json"),
        "fingerprint": bundle.fingerprint,
        "stages": [
            {"stage": r.stage, "steps": r.optim.steps, "seed": r.seed, "first_example": r.data.part.start}
            for r in recipes
            if r.data.part
        ],
        "examples": sum(recipe.optim.items for recipe in recipes),
        "trained_parameters": max(int(report["trained_parameters"]) for report in reports),
        "training_seconds": sum(float(report["seconds"]) for report in reports),
        "interrupted": any(report["resumed"] for report in reports),
        "training_tokens": sum(int(report["tokens"]) for report in reports),
        "compress_seconds": compress_seconds,
        "threads": torch.get_num_threads(),
        "device": str(bundle.backbone.device),
        "scores": [score | {"stored_bytes": stored_bytes[score["ratio"]]} for score in _scores(answers, questions)],
        "another_passage": _another_passage(bundle, questions, shown_at(ratios)),
    }


def shown_at(ratios: Collection[int]) -> int:
    """The ratio at which to test whether an entry reads its slots: 4, or its finest."""
    return _SHOWN_AT if _SHOWN_AT in ratios else min(ratios)


def _another_passage(bundle: Bundle, questions: Sequence[Question], ratio: int) -> dict[str, Any]:
    """The control: scores with the slots of passages that do not answer the questions.

    A decoder that declines without context, but guesses with any slots, scores higher with slots although it reads
    nothing from them.
    """
    answers = answer_questions(bundle, with_other_passages(questions), [ratio], (SOFT,), max_tokens=_ANSWER_TOKENS)
    return {"ratio": ratio, "f1": score_each_answer(token_f1, answers[SOFT, ratio].texts, questions)}


def _baselines(plan: Plan, questions: Sequence[Question]) -> dict[str, Any]:
    """The decoder with full text, without context, and with passages shortened to ceil(tokens / ratio) tokens."""
    decoder = Decoder(PlainDecoder(Backbone(*load_decoder(plan.start, dtype=plan.dtype))), batch_size=16)
    tokenizer = decoder.bundle.tokenizer
    near = [nearest_sentences(q.passages, q.question) for q in questions]
    texts: dict[Key, list[Sequence[str]]] = {
        (FULL, None): [q.passages for q in questions],
        (NONE, None): [() for _ in questions],
    }
    for ratio in plan.ratios:
        budgets = [sum(-(-count_tokens(passage, tokenizer) // ratio) for passage in q.passages) for q in questions]
        texts[TRUNCATED, ratio] = [
            truncate_passages(q.passages, tokenizer, b) for q, b in zip(questions, budgets, strict=True)
        ]
        texts[EXTRACTED, ratio] = [
            extract_sentences(own, decoder.preparer.token_ids, budget)
            for own, budget in zip(near, budgets, strict=True)
        ]
    answers: SystemAnswers = {}
    for key, given in tqdm(texts.items(), desc="answering", unit="system"):
        chats = [question_chat(TEMPLATES[0], own, q.question) for own, q in zip(given, questions, strict=True)]
        made = decoder.generate(chats, Sampling(max_tokens=_ANSWER_TOKENS))
        answers[key] = Answers([one.text.strip() for one in made], [one.prompt_tokens for one in made])
    return {"name": BASELINES, "decoder": str(plan.decoder), "scores": _scores(answers, questions)}


def _scores(answers: SystemAnswers, questions: Sequence[Question]) -> list[dict[str, Any]]:
    return [
        {
            "system": system,
            "ratio": ratio,
            "prompt_tokens": mean(given.prompt_tokens),
            "exact_match": score_each_answer(exact_match, given.texts, questions),
            "f1": score_each_answer(token_f1, given.texts, questions),
        }
        for (system, ratio), given in answers.items()
    ]


def _compress_seconds(bundle: Bundle, questions: Sequence[Question]) -> float:
    """Median seconds to compress one passage alone at the base ratio."""
    passages = list(dict.fromkeys(p for q in questions for p in q.passages))[:_TIMED_PASSAGES]
    return median(seconds_of(partial(bundle.compress, [passage])) for passage in passages)


def _stored_bytes(bundle: Bundle, questions: Sequence[Question], ratios: Sequence[int]) -> dict[int, float]:
    """Mean size of a passage's payload, by ratio: that of the base ratio, if the store makes this one of it."""
    passages = list(dict.fromkeys(p for q in questions for p in q.passages))
    stored_at = {ratio: None if bundle.can_read(ratio) else ratio for ratio in ratios}
    sizes = {
        own: mean(payload_bytes(encode_soft_context(soft)) for soft in bundle.compress(passages, own))
        for own in set(stored_at.values())
    }
    return {ratio: sizes[own] for ratio, own in stored_at.items()}


def _read_json(file: Path, instead: str) -> dict[str, Any]:
    """A JSON file's object; raises ConfigError, which says what to do `instead`, if it is damaged."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(f"{file} is damaged: {instead}") from None
