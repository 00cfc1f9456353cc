"""The command `accelerator`: all that needs one, part after part, resumable; results are written as it goes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.accelerator.speed import SHAPES
from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import Output, command

_TESTS = [f"tests/training/test_{name}.py" for name in ("packing", "batch_mean", "resuming")]
_SETS = ("data/qa_dev_xquad.jsonl.gz", "data/qa_dev_nq.jsonl.gz")
Part = tuple[str, float, list[str]]
"""Its name, the minutes that it may take, and the arguments of `python -m`."""


Minutes = Annotated[float, typer.Option(metavar="N", min=0, help="Begin no part, and stop the last, after so many.")]
Recipe = Annotated[str, typer.Option(metavar="FILE", help="The bundle's recipe.")]
Questions = Annotated[int, typer.Option(metavar="N", min=2, help="Questions of each set to score with.")]


@command("--minutes 25", lab)
def accelerator(
    minutes: Minutes = 25,
    recipe: Recipe = "benchmarks/several/recipe.yaml",
    questions: Questions = 300,
    tiny: Annotated[bool, typer.Option("--tiny", help="RECIPE and a tiny decoder's speed alone, to try it.")] = False,
    output: Output = "ctx-compress-accelerator",
) -> None:
    """Run the tests of training, train the bundle and one for Gemma 3, score them, and time larger decoders.

    Run it again to go on: parts that are done are not run again. `results.json` says of each part whether it is done.
    """
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    end = time.monotonic() + 60 * minutes
    for name, most, arguments in parts(recipe, questions, tiny, folder):
        left = min(60 * most, end - time.monotonic())
        if results.get(name, {}).get("state") != "done":
            results[name] = _run(arguments, left) if left > 0 else {"state": "not run"}
        print(f"{name}: {results[name]['state']}", flush=True)
        file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("vLLM: not run (start a server as docs/serving.md says, then time-first-token with its engine)")


def parts(recipe: str, questions: int, tiny: bool, folder: Path) -> list[Part]:
    """The parts in their order."""
    train = ["ctx_compress_rag.cli", "train"]
    bundle: Part = ("bundle", 9, [*train, recipe, "--minutes", "8.5"])
    speeds: list[Part] = [(f"speed {shape}", 4, ["benchmarks.accelerator.speed", shape]) for shape in SHAPES]
    if tiny:
        return [bundle, speeds[0]]
    found: list[Part] = [
        ("tests", 3, ["pytest", "-q", "-m", "not slow", *_TESTS]),
        bundle,
        ("gemma3", 7, [*train, "gemma3", "--minutes", "6.5"]),
    ]
    for name in ("smollm2-135m", "runs/several/bundle", "runs/gemma3/mean_pooling/bundle"):
        for data in _SETS:
            scored = f"{name.replace('/', '-')} {Path(data).name.partition('.')[0]}"
            wanted = ["--bundle", name, "--data", data, "--questions", str(questions), "--ratios", "4", "16"]
            evaluate = ["ctx_compress_rag.cli", "eval", *wanted, "--output", str(folder / scored.replace(" ", "_"))]
            found.append((f"scores {scored}", 2, evaluate))
    return found + speeds[1:]


def _run(arguments: list[str], seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    try:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        said, state = done.stdout[-4000:] + done.stderr[-2000:], "failed" if done.returncode else "done"
    except subprocess.TimeoutExpired:
        said, state = "", "out of time"
    return {"state": state, "seconds": round(time.monotonic() - began, 1), "output": said}
