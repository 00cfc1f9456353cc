"""What one answer costs from a cold start, beside a script without this library; and what a question reads."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from huggingface_hub import cached_assets_path

from ctx_compress_rag.evaluation import report
from ctx_compress_rag.store import SoftContextStore


class Cost(NamedTuple):
    """What a process took: seconds of wall clock and of the processor, and its largest memory in MB."""

    wall: float
    cpu: float
    memory: float


# Between the two, because a process starts with the largest memory of the one that starts it.
_LAUNCHER = """
import resource, subprocess, sys, time
began = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
sys.exit(code)
"""


def process_cost(command: Sequence[str]) -> Cost:
    """Run a command to its end; raise CalledProcessError if it fails."""
    launched = [sys.executable, "-c", _LAUNCHER, *command]
    said = subprocess.run(launched, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Cost(*map(float, said.split()))


def cold_commands(index: str, question: str, digest: str, engines: Sequence[str]) -> dict[str, list[str]]:
    """Return the script with a GGUF decoder's weights in safetensors, `ask` with each engine, help, and the import.

    `digest` is the file's SHA-256, under which the library keeps the unpacked weights after their first use.
    """
    kept = Path(cached_assets_path("ctx_compress_rag", "gguf")).glob(f"{digest}-*")
    decoder = max(kept, key=lambda folder: folder.stat().st_mtime)  # other versions have the same weights
    command = [sys.executable, "-m", "ctx_compress_rag.cli"]
    ask = [*command, "ask", question, "--index", index]
    commands = {
        "script": [sys.executable, str(Path(__file__).with_name("full_text.py")), str(decoder), index, question]
    }
    commands |= {f"ask, {engine}": [*ask, "--engine", engine] for engine in engines}
    return commands | {"--help": [*command, "--help"], "import": [sys.executable, "-c", "import ctx_compress_rag"]}


def cold_table(commands: Mapping[str, Sequence[str]], rounds: int) -> tuple[str, dict[str, list[Cost]]]:
    """Run all in turn, after a round that does not count; return medians with those over the first, and all costs."""
    runs = [{name: process_cost(command) for name, command in commands.items()} for _ in range(rounds + 1)][1:]
    costs = {name: [run[name] for run in runs] for name in commands}
    [first, *_] = costs.values()
    rows = []
    for name, own in costs.items():
        row = {"": name}
        for place, unit in enumerate(("wall s", "CPU s", "peak MB")):
            over = median(a[place] / b[place] for a, b in zip(own, first, strict=True))
            row[unit] = f"{median(each[place] for each in own):.1f} ({over:.2f})"
        rows.append(row)
    return report.markdown_table(rows), costs


def chroma_reads(store: SoftContextStore, ask: Callable[[], object]) -> list[int]:
    """Return the characters of ids, documents and metadata in each answer of Chroma's `get` to a store during `ask`."""
    read: list[int] = []
    records: Any = store._records
    asked = records._ask

    def counted(method: Callable[..., Any], **arguments: Any) -> Any:
        answer = asked(method, **arguments)
        if isinstance(answer, dict) and method.__name__ == "get":
            read.append(sum(len(str(answer[name] or "")) for name in ("ids", "documents", "metadatas")))
        return answer

    records._ask = counted
    try:
        ask()
    finally:
        del records._ask
    return read
