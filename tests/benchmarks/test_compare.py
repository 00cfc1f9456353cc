"""The comparison command on a tiny random decoder, and the numbers that its report is made of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.__main__ import main
from benchmarks.compare import run as compare_module
from benchmarks.compare.config import (
    Budget,
    Comparison,
    chosen,
    load_comparison,
    merged,
    stage_recipes,
)
from benchmarks.compare.report import read_report, table
from benchmarks.compare.run import EntryJob, Plan, source_tokens
from benchmarks.world.world import World, world_examples
from ctx_compress_rag import __version__
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.questions import Question, questions_of, with_other_passages
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import token_f1
from ctx_compress_rag.text.templates import TEMPLATES, messages
from ctx_compress_rag.training.examples import load_examples
from helpers import architectures
from helpers.decoding import wait_for
from helpers.training import killed

STEPS = 4
QUESTIONS = 4
TINY: dict[str, Any] = {
    "ratios": [4, 8],
    "batch_size": 2,
    "first_world": 500,
    "settings": {
        "window": 64,
        "data": {"max_turns": 2, "max_context_tokens": 64},
        "optim": {"learning_rate": 1.0e-3, "log_every": 1},
    },
    "entries": {
        "pooled": {
            "note": "two stages",
            "method": {"name": "mean_pooling"},
            "stages": [
                {"share": 0.5, "stage": "distillation", "curriculum": [{"share": 0, "ratios": [2]}]},
                {
                    "share": 0.5,
                    "stage": "answer",
                    "curriculum": [{"share": 0, "ratios": [4]}, {"share": 0.5, "ratios": [4, 8], "sample": 1}],
                },
            ],
        },
        "coarse": {
            "note": "one stage and ratio",
            "like": "pooled",
            "ratios": [8],
            "stages": [{"share": 1, "stage": "answer"}],
        },
        "tokens": {
            "note": "not nestable",
            "method": {"name": "compression_tokens"},
            "stages": [{"share": 1, "stage": "answer"}],
        },
    },
    "orderings": [
        {"claim": "the first claim", "better": "pooled", "worse": "coarse"},
        {"claim": "the second claim", "better": "pooled", "worse": "tokens"},
    ],
}


def comparison(**changes: Any) -> Comparison:
    return Comparison.model_validate(merged(TINY, changes))


# The file


@pytest.mark.parametrize("name", ["demo", "natural"])
def test_the_shipped_comparisons_are_valid_for_every_entry(tmp_path: Path, name: str) -> None:
    shipped = load_comparison(name)
    for name in shipped.entries:
        recipes = stage_recipes(shipped, name, Budget(1000, 1), "decoder", tmp_path)
        assert sum(recipe.optim.steps for recipe in recipes) == 1000
        assert {recipe.optim.batch_size for recipe in recipes} == {shipped.batch_size}
        assert recipes[0].decoder == "decoder"
        assert all(recipe.ratios == shipped.ratios_of(name) for recipe in recipes)


@pytest.mark.parametrize(
    ("name", "claim", "setting"),
    [
        ("demo", "(ArcAligner, table 3)", "gate"),
        ("natural", "(ArcAligner, table 3)", "gate"),
        ("demo", "(Read As Human, table 4)", "skimming"),
        ("natural", "(Read As Human, table 4)", "skimming"),
        ("natural", "the linear map helps (Simple Context Compression, table 3)", "linear"),
    ],
)
def test_an_ablation_differs_in_one_setting(tmp_path: Path, name: str, claim: str, setting: str) -> None:
    shipped = load_comparison(name)
    [ordering] = [each for each in shipped.orderings if each.claim.endswith(claim)]
    stages, values = [], []
    for entry in (ordering.better, ordering.worse):
        recipes = stage_recipes(shipped, entry, Budget(1000, 1), "decoder", tmp_path)
        stages.append([recipe.model_dump(exclude={"name", "output"}) for recipe in recipes])
        values.append([stage["method"].pop(setting) for stage in stages[-1]])
    assert stages[0] == stages[1]
    assert values[0][-1] != values[1][-1]


def test_the_ablation_without_a_linear_map_has_none_anywhere() -> None:
    """A map of hidden states before they are pooled would do its work."""
    method = load_comparison("natural").resolved("mean_pooling_no_map").method
    config = BundleConfig.model_validate(
        {"name": "t", "method": method, "base_ratio": 4, "ratios": [4], "max_tokens": 64}
    )
    bundle = Bundle.build(config, Backbone(architectures.model("Qwen3"), architectures.tokenizer("Qwen3")))
    assert not [*bundle.compressor.state_dict(), *bundle.reader.state_dict()]  # LoRA is the decoder's


def test_every_entry_reads_the_same_passages(tmp_path: Path) -> None:
    """Stages continue where the one before ended: together they read the worlds that one stage alone would."""
    small = comparison(batch_size=4)
    one, two = (stage_recipes(small, name, Budget(3, 1), "decoder", tmp_path) for name in ("coarse", "pooled"))
    assert [recipe.optim.steps for recipe in two] in ([1, 2], [2, 1])
    together = [example for recipe in two for example in load_examples(recipe)]
    assert together == load_examples(one[0])
    assert len(together) == 3 * 4


def test_a_stage_starts_from_the_one_before(tmp_path: Path) -> None:
    first, second = stage_recipes(comparison(), "pooled", Budget(4, 1), "decoder", tmp_path)
    assert first.bundle is None and second.decoder is None
    assert second.bundle == first.output / "bundle"
    assert second.ratios_at(0) == [4] and second.ratios_at(1) in ([4], [8])


def test_an_entry_takes_over_what_it_does_not_say() -> None:
    like = {
        "a": {"note": "a", "method": {"name": "ram", "segment_tokens": 4}, "stages": [{"share": 1, "stage": "ram"}]},
        "b": {"note": "b", "like": "a", "method": {"skimming": "none"}, "settings": {"seed": 3}},
        "c": {"note": "c", "like": "b", "ratios": [8]},
    }
    whole = Comparison.model_validate(TINY | {"entries": like, "orderings": []})
    assert whole.resolved("c").method == {"name": "ram", "segment_tokens": 4, "skimming": "none"}
    assert whole.resolved("c").settings == {"seed": 3}
    assert (whole.ratios_of("b"), whole.ratios_of("c"), whole.resolved("b").note) == ([4, 8], [8], "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": {"coarse": {"stages": [{"share": 0.4, "stage": "answer"}]}}}, "coarse's stages sum to 0.4"),
        ({"entries": {"coarse": {"like": "nothing"}}}, "like 'nothing', which is not an entry"),
        ({"entries": {"pooled": {"like": "coarse"}}}, "in a circle"),
        ({"orderings": [{"claim": "x", "better": "pooled", "worse": "nobody"}]}, "'nobody', which is not an entry"),
        ({"entries": {"new": {"note": "", "method": {"name": "ram"}}}}, "new needs a method and stages"),
        ({"entries": {"pooled": {"methods": {}}}}, "methods"),
    ],
)
def test_faults_of_the_file_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(merged(TINY, changes)))
    with pytest.raises(ConfigError, match=message):
        load_comparison(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [
        ({}, 1, "a budget of 1 steps leaves none for stage [12] of pooled"),
        ({"settings": {"optim": {"batch_size": 3}}}, 4, "stage 1 of pooled may not set optim.batch_size"),
        ({"entries": {"pooled": {"settings": {"decoder": "x"}}}}, 4, "stage 1 of pooled may not set decoder"),
        ({"settings": {"steppes": 3}}, 4, "stage 1 of pooled: .*steppes"),
        ({"entries": {"pooled": {"method": {"pool": "max"}}}}, 4, "stage 1 of pooled: .*pool"),
    ],
)
def test_faults_of_an_entry_are_named(tmp_path: Path, changes: dict[str, Any], steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_recipes(comparison(**changes), "pooled", Budget(steps, 1), "decoder", tmp_path)


def test_unknown_names_are_refused() -> None:
    assert chosen(comparison(), ["tokens", "pooled"]) == ["pooled", "tokens"]
    with pytest.raises(ConfigError, match="no entry 'poled': choose from pooled, coarse, tokens"):
        chosen(comparison(), ["poled"])
    with pytest.raises(ConfigError, match="no comparison 'dmeo'"):
        load_comparison("dmeo")


# The command


@pytest.fixture(scope="module")
def decoder(make_tiny_bundle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    make_tiny_bundle().save_pretrained(folder)
    return folder / "decoder"


@pytest.fixture(scope="module")
def command(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("comparison") / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY, sort_keys=False))
    return ["compare", str(file), "--decoder", str(decoder), "--budget", str(STEPS), "--questions", str(QUESTIONS)]


@pytest.fixture(scope="module")
def finished(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two entries of three."""
    folder = tmp_path_factory.mktemp("compared")
    assert main([*command, "--output", str(folder), "--entries", "pooled", "coarse"]) == 0
    return folder


def results(folder: Path, name: str) -> Any:
    return json.loads((folder / "results" / f"{name}.json").read_text())


def test_results_say_how_they_were_made(finished: Path, decoder: Path) -> None:
    run = json.loads((finished / "run.json").read_text())
    assert (run["steps"], run["questions"], run["passages"]) == (STEPS, QUESTIONS, 1)
    pooled = results(finished, "pooled")
    bundle = Bundle.from_pretrained(finished / "entries" / "pooled" / "2" / "bundle")
    assert (pooled["version"], pooled["fingerprint"]) == (__version__, bundle.fingerprint)
    assert [(s["stage"], s["steps"], s["seed"], s["world_seed"]) for s in pooled["stages"]] == [
        ("distillation", 2, 0, 500),
        ("answer", 2, 0, 501),
    ]
    trained = sum(p.numel() for p in bundle.compressor.trained_parameters() + bundle.reader.trained_parameters())
    assert pooled["trained_parameters"] == trained
    assert pooled["training_seconds"] > 0 and pooled["compress_seconds"] > 0 and not pooled["interrupted"]


def test_training_tokens_are_those_of_the_examples(finished: Path, tiny_tokenizer: Any) -> None:
    """Counted passage by passage, and the same for entries of one stage and of two."""
    total = 0
    for seed in (500, 501):
        world = World("train", seed)
        texts = [world.example(1, 2).passages[0] for _ in range(4)]
        total += sum(min(64, len(tiny_tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts)
    assert results(finished, "coarse")["training_tokens"] == results(finished, "pooled")["training_tokens"] == total


def test_scores_are_those_of_the_bundle_alone(finished: Path) -> None:
    """Answers of the trained bundle, one by one, through a store of its own."""
    bundle = Bundle.from_pretrained(finished / "entries" / "coarse" / "1" / "bundle")
    [score] = results(finished, "coarse")["scores"]
    questions = questions_of(world_examples("test", 0, QUESTIONS, max_turns=1, passages=(1,)))
    f1, elsewhere = [], []
    with SoftContextStore(finished / "store", bundle) as store:
        decoder = TransformersDecoder(bundle, store)

        def score_of(q: Question, passages: tuple[str, ...]) -> float:
            [marker] = mark(store, passages, ratio=8)
            chat = messages(TEMPLATES[0], marker, q.question)
            return token_f1(decoder.generate([chat], Sampling(max_new_tokens=32))[0].text, q.answers)

        for q, other in zip(questions, with_other_passages(questions), strict=True):
            f1.append(score_of(q, q.passages))
            elsewhere.append(score_of(q, other.passages))
        info = store.info()
    assert score["f1"] == pytest.approx(f1)
    assert results(finished, "coarse")["another_passage"] == {"ratio": 8, "f1": pytest.approx(elsewhere)}
    assert score["stored_bytes"] == pytest.approx(info.payload_bytes / info.passages)
    assert (score["system"], score["ratio"]) == ("soft context", 8)


def test_the_report_holds_a_line_for_each_entry(finished: Path) -> None:
    report = (finished / "compare.md").read_text()
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in report.splitlines() if line.startswith("| ")}
    assert list(lines) == ["context", "extraction", "truncation", "pooled", "coarse"]
    for entry in ("pooled", "coarse"):
        result = results(finished, entry)
        assert f"{result['trained_parameters']:,}" in lines[entry]
        assert f"{result['training_tokens']:,} tokens" in lines[entry]
        for score in result["scores"]:
            f1, em = np.mean(score["f1"]), np.mean(score["exact_match"])
            error = np.std(score["f1"], ddof=1) / math.sqrt(QUESTIONS)
            assert f"{f1:.3f} ± {error:.3f}" in lines[entry]
            assert f"EM {em:.3f}" in lines[entry]
    assert report.startswith(f"# {QUESTIONS} test questions, {2 * STEPS} examples of training\n")
    assert "full text " in report and "no context " in report
    assert "Without a result yet: tokens." in report
    assert (finished / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_entry_is_not_trained_again(
    finished: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_module, "run_recipe", lambda path: pytest.fail(f"{path} is trained again"))
    before = (finished / "results" / "pooled.json").stat().st_mtime_ns
    again = [*command, "--output", str(finished), "--entries", "pooled", "coarse"]
    assert main(again) == 0
    assert main([*again, "--table-only"]) == 0
    assert (finished / "results" / "pooled.json").stat().st_mtime_ns == before
    capsys.readouterr()
    # Another budget or decoder would not be the same comparison.
    assert main([*again, "--budget", "6"]) == 2
    assert "holds a comparison with steps 4, not 6" in capsys.readouterr().err


def test_a_failed_entry_leaves_a_report_of_the_finished(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "diverging.yaml"
    diverges = {"entries": {"tokens": {"settings": {"optim": {"learning_rate": 1e30, "clip_norm": 1e30}}}}}
    file.write_text(yaml.safe_dump(merged(TINY, diverges), sort_keys=False))
    there = ["compare", str(file), *command[2:], "--output", str(tmp_path), "--entries", "coarse", "tokens"]
    assert main(there) == 2
    assert "without that folder and the rest of" in (error := capsys.readouterr().err) and "no-resume" not in error
    said = (tmp_path / "compare.md").read_text()
    assert f"{results(tmp_path, 'coarse')['training_tokens']:,} tokens" in said
    assert "Without a result yet: pooled, tokens." in said


@pytest.mark.slow
def test_an_interrupted_entry_goes_on(command: list[str], tmp_path: Path) -> None:
    """Cut off in the second stage: the first is kept, the second resumes, and the bundle is the uninterrupted one's."""

    def run(folder: Path) -> int:
        return main([*command, "--output", str(folder), "--entries", "pooled", "--budget", "6"])

    assert run(tmp_path / "whole") == 0
    with killed(after=1, training=2):
        run(tmp_path / "cut")
    first = tmp_path / "cut" / "entries" / "pooled" / "1" / "training_report.json"
    before = first.stat().st_mtime_ns
    assert not (tmp_path / "cut" / "results" / "pooled.json").exists()
    assert run(tmp_path / "cut") == 0
    assert first.stat().st_mtime_ns == before
    cut, whole = results(tmp_path / "cut", "pooled"), results(tmp_path / "whole", "pooled")
    assert (cut["interrupted"], whole["interrupted"]) == (True, False)
    assert [s["f1"] for s in cut["scores"]] == [s["f1"] for s in whole["scores"]]
    assert "over " in table(read_report(comparison(), tmp_path / "cut")).splitlines()[-1]


@pytest.mark.slow
def test_entries_train_in_processes(finished: Path, command: list[str], tmp_path: Path) -> None:
    assert main([*command, "--output", str(tmp_path), "--entries", "pooled", "coarse", "--jobs", "2"]) == 0
    for name in ("pooled", "coarse"):
        apart, alone = results(tmp_path, name), results(finished, name)
        assert apart["fingerprint"] == alone["fingerprint"]
        assert [s["f1"] for s in apart["scores"]] == [s["f1"] for s in alone["scores"]]
        assert (tmp_path / "entries" / name / "log.txt").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="tells processes by /proc")
def test_workers_end_with_the_command(command: list[str], tmp_path: Path) -> None:
    """Killed, it leaves no worker behind that would write where the next run trains."""
    long = [*command, "--output", str(tmp_path), "--entries", "coarse", "--jobs", "2", "--budget", "4000"]
    started = subprocess.Popen([sys.executable, "-m", "benchmarks", *long], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: any(tmp_path.glob("entries/coarse/1/checkpoints/checkpoint-*")), seconds=300)
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert children
    finally:
        started.kill()
        started.wait()
    wait_for(lambda: not any(_alive(pid) for pid in children))


def _alive(pid: str) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--jobs", "0"], "jobs is 0"),
        (["--questions", "1"], "1 questions have no standard error"),
        (["--passages", "9"], "9 passages"),
        (["--budget", "0"], "a budget of 0 steps"),
        (["--entries", "nobody"], "no entry 'nobody'"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], message: str
) -> None:
    assert main([*command, "--output", str(tmp_path / "new"), *option]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_nothing_to_show_yet(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--output", str(tmp_path / "new"), "--table-only"]) == 2
    assert "run the comparison first" in capsys.readouterr().err


def test_tokens_of_a_stage_that_reads_its_passages_again(make_tiny_bundle: Callable[..., Any], tmp_path: Path) -> None:
    """Reconstruction has fewer rows than examples, since passages are distinct: it starts again."""
    entry = {"note": "", "method": {"name": "mean_pooling"}, "stages": [{"share": 1, "stage": "reconstruction"}]}
    whole = Comparison.model_validate(TINY | {"entries": {"again": entry}, "orderings": []})
    [recipe] = stage_recipes(whole, "again", Budget(8, 1), "decoder", tmp_path)
    tokenizer = make_tiny_bundle().tokenizer
    passages = list(dict.fromkeys(p for e in load_examples(recipe) for p in e.passages))
    lengths = [min(64, len(tokenizer(p, add_special_tokens=False)["input_ids"])) for p in passages]
    assert len(passages) < 16
    assert source_tokens(recipe, tokenizer) == sum(lengths) + sum(lengths[: 16 - len(passages)])


def test_the_baselines_are_a_job_without_training(tmp_path: Path) -> None:
    plan = Plan(tmp_path, "decoder", None, Budget(3, 2), 5, [4], None)
    assert EntryJob(plan, "baselines").steps == 0
    questions = plan.test_questions()
    assert len(questions) == 5 and all(len(q.passages) == 2 for q in questions)
