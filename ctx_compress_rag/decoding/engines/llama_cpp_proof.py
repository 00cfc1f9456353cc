"""Prove that llama.cpp computes with vectors what it computes with the tokens that they are, before it answers.

Some architectures scale vectors, read tokens beside them, or end the process: the proof runs in a process of its own.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ctx_compress_rag.errors import BundleError, ConfigError, CtxCompressError
from ctx_compress_rag.models.passed import unless_passed

TOKENS = 12
_TOLERANCE = 0.02  # of the largest score
REMEDY = "use the engine 'transformers', or vLLM"
_UNREADABLE = 3  # the exit code for a file that cannot be opened

Array = np.ndarray[Any, Any]


def prove(file: Path, digest: str, dim: int, vocabulary: int, size: int) -> None:
    """Raise ConfigError if llama.cpp reads vectors otherwise than tokens, or dies; `LlamaCppContext` has arguments."""
    if not file.is_file():
        return  # opening it says so
    status = file.stat()
    said = f"{digest} {status.st_size} {status.st_mtime_ns} {size} {version('llama-cpp-python')}"
    proof = partial(scores_of, file, digest, dim, vocabulary, size)
    unless_passed("llama.cpp-proved", hashlib.sha256(said.encode()).hexdigest(), proof)


def spread(vocabulary: int, count: int = TOKENS) -> list[int]:
    """Return numbers of tokens from all over a vocabulary."""
    return [(7 + at * 7919) % vocabulary for at in range(count)]


def scores_of(
    file: Path, digest: str, dim: int, vocabulary: int, size: int, lengths: Sequence[int] = (TOKENS,)
) -> list[Array]:
    """Return llama.cpp's scores (12, vocabulary) after the last tokens of each text of `spread`.

    Raises BundleError for a file that cannot be opened, ConfigError if vectors have other scores than their tokens.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder, "scores.npz")
        task = json.dumps([str(file), digest, dim, vocabulary, size, list(lengths), str(out)])
        child = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True)
        said = child.stderr.strip().splitlines() or ["nothing"]
        if child.returncode == _UNREADABLE:
            raise BundleError(said[0])
        if child.returncode or not out.is_file():
            failed = next((line for line in said if "GGML_ASSERT" in line), said[-1])
            raise ConfigError(
                f"llama.cpp ends the process (exit code {child.returncode}; it said {failed!r}) when {file} reads "
                f"vectors in place of tokens: {REMEDY}"
            )
        with np.load(out) as found:
            pairs = [found[f"arr_{at}"] for at in range(len(lengths))]
    for tokens, vectors in pairs:
        if (off := distance(vectors, tokens)) > _TOLERANCE:
            raise ConfigError(
                f"llama.cpp reads the vectors of tokens otherwise than the tokens: with {file}, scores differ by "
                f"{off:.2g} of the largest: {REMEDY}"
            )
    return [vectors for _, vectors in pairs]


def distance(found: Array, expected: Array) -> float:
    """Return the largest difference as a share of the largest expected value, infinite where a score is no number."""
    off = float(np.abs(found - expected).max() / np.abs(expected).max())
    return off if np.isfinite(off) else float("inf")


def _compare(task: str) -> None:
    from ctx_compress_rag.decoding.engines.llama_cpp_context import LlamaCppContext

    file, digest, dim, vocabulary, size, lengths, out = json.loads(task)
    try:
        context = LlamaCppContext(Path(file), digest, dim, vocabulary, size, 1)
    except CtxCompressError as error:
        sys.stderr.write(f"{error}\n")  # below what llama.cpp said, if it did
        sys.exit(_UNREADABLE)
    texts = [np.array(spread(vocabulary, length)) for length in lengths]
    np.savez(out, *([context.score(ids, vectors)[-TOKENS:] for vectors in (False, True)] for ids in texts))


if __name__ == "__main__":
    _compare(sys.argv[1])
