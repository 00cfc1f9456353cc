"""Support contexts solved once: their hidden states and gradient descent's updates, for predictors to learn from.

Solving a context takes K backward passes; learning from it takes almost no time. If a decoder is small enough for
the updates to be kept, each context is solved once, for every wanted K up to the largest, and learned from many times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.episodes import Episode
from ctx_compress_rag.adaptation.predictor import pooled_states
from ctx_compress_rag.adaptation.updates import GradientUpdate, sgd_path
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.json_files import write_json

_ABOUT_FILE = "about.json"
_BLOCK = 16  # contexts per file


@dataclass(frozen=True, eq=False)
class SolvedContexts:
    """Contexts with the update after K steps on each; all in memory.

    Attributes:
        pooled: (contexts, dim), see `pooled_states`.
        update: a row for each context, in bfloat16, whose rounding is far below the predictor's error.
    """

    pooled: Tensor
    update: GradientUpdate

    def __len__(self) -> int:
        return len(self.pooled)

    def rows(self, indices: Tensor) -> tuple[Tensor, Adapter]:
        """Some contexts' pooled states, and the change of the weights (eq. 8) for each."""
        a, b = ({n: t[indices].float() for n, t in part.items()} for part in (self.update.a, self.update.b))
        return self.pooled[indices], GradientUpdate(self.update.base, a, b).change()


def solve(
    decoder: AdaptiveDecoder,
    base: Adapter,
    episodes: Sequence[Episode],
    steps: Sequence[int],
    learning_rate: float,
    folder: Path,
    about: dict[str, Any],
    layer: int | None = None,
) -> None:
    """Solve the episodes' support contexts that are not in `folder` yet.

    Args:
        decoder: the frozen decoder.
        base: the base retrieval adapter.
        episodes: their support contexts are solved; all have the same number of demonstrations.
        steps: each K that is wanted.
        learning_rate: eta.
        folder: the output folder.
        about: identifies the episodes.
        layer: see `pooled_states`.

    Raises:
        ConfigError: the folder's contexts were solved with other settings.
    """
    about = about | {
        "fingerprint": decoder.bundle.fingerprint,
        "base": _digest(base),
        "contexts": len(episodes),
        "steps": list(steps),
        "learning_rate": learning_rate,
        "layer": layer,
    }
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _ABOUT_FILE
    if note.exists() and json.loads(note.read_text(encoding="utf-8")) != about:
        raise ConfigError(f"the contexts in {folder} have other settings: remove this folder to solve them again")
    write_json(note, about)
    for start in tqdm(range(0, len(episodes), _BLOCK), desc="solving contexts", unit="block", disable=None):
        file = _block(folder, start)
        if file.exists():
            continue
        contexts = [decoder.rows(episode.support) for episode in episodes[start : start + _BLOCK]]
        tensors = {"pooled": pooled_states(decoder, contexts, base, layer).cpu()}
        for step, update in sgd_path(decoder, contexts, base, steps, learning_rate).items():
            for kind, part in (("a", update.a), ("b", update.b)):
                tensors |= {f"{step}/{kind}/{n}": t.to("cpu", torch.bfloat16) for n, t in part.items()}
        unfinished = file.with_suffix(f".{os.getpid()}.part")
        save_file(tensors, unfinished)
        unfinished.replace(file)  # a block appears only when it is complete


def load_solved(folder: Path, base: Adapter, count: int, steps: int) -> SolvedContexts:
    """The first `count` contexts that `solve` stored in a folder, solved from this base adapter in `steps` steps."""
    device = str(next(iter(base.a.values())).device)
    blocks: list[Any] = [safe_open(_block(folder, start), "pt", device) for start in range(0, count, _BLOCK)]

    def joined(key: str) -> Tensor:
        return torch.cat([block.get_tensor(key) for block in blocks])[:count]

    a, b = ({n: joined(f"{steps}/{kind}/{n}") for n in base.a} for kind in ("a", "b"))
    return SolvedContexts(joined("pooled"), GradientUpdate(base, a, b))


def _block(folder: Path, start: int) -> Path:
    return folder / f"{start:06d}.safetensors"


def _digest(adapter: Adapter) -> str:
    digest = hashlib.sha256()
    for tensor in (*adapter.a.values(), *adapter.b.values()):
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
