"""A bundle in a folder, files to index, and what an index holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chromadb
import torch

from ctx_compress_rag.data.world import World
from ctx_compress_rag.stores import codecs


def save_bundle(bundle: Any, folder: Path, seed: int = 1) -> Path:
    """Save a tiny bundle, its random weights made so large that answers are more than a repeated end token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in bundle.backbone.model.model.layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    bundle.save_pretrained(folder)
    return folder


def paragraphs(seed: int) -> list[str]:
    """Eight paragraphs of text."""
    return World("dev", seed).passages()


def write_docs(folder: Path, files: int = 3) -> Path:
    """A folder of `files` text files in two folders."""
    (folder / "more").mkdir(parents=True)
    for number in range(files):
        path = folder / ("more" if number % 2 else ".") / f"file{number}.txt"
        path.write_text("\n\n".join(paragraphs(number)), encoding="utf-8")
    return folder


def contents(store: Path) -> dict[str, tuple[Any, ...]]:
    """Everything an index holds, by id, straight from Chroma."""
    client = chromadb.PersistentClient(str(store))
    try:
        rag = client.get_collection("passages").get(include=["documents", "metadatas", "embeddings"])
        soft = client.get_collection("passages-ctx").get(include=["metadatas"])
    finally:
        client.close()
    assert sorted(rag["ids"]) == sorted(soft["ids"])
    records = {id: dict(record) for id, record in zip(soft["ids"], soft["metadatas"], strict=True)}
    return {
        id: (text, metadata, torch.tensor(vector), codecs.decode(records[id].pop("payload")), records[id])
        for id, text, metadata, vector in zip(
            rag["ids"], rag["documents"], rag["metadatas"], rag["embeddings"], strict=True
        )
    }


def assert_same_contents(actual: Path, expected: Path) -> None:
    """Equal but for the last bits that depend on what else was in a batch."""
    first, second = contents(actual), contents(expected)
    assert first.keys() == second.keys()
    for id, (text, metadata, vector, soft, record) in second.items():
        got = first[id]
        assert (got[0], got[1], got[4]) == (text, metadata, record)
        torch.testing.assert_close(got[2], vector, atol=1e-5, rtol=1e-5)
        assert got[3].token_counts.tolist() == soft.token_counts.tolist()
        assert torch.linalg.norm(got[3].slots - soft.slots) <= 1e-3 * torch.linalg.norm(soft.slots)
