"""`index --collection`: the options that it takes, and those that it refuses."""

import os
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch

from ctx_compress_rag import Bundle, SoftContextStore

TEXT = "Orla kept bees in Pellmouth, by the old mill on the river, until the flood of the year 1911."


@pytest.fixture
def command(tmp_path: Path, bundle_folder: Path) -> list[object]:
    """Compresses an app's collection of one text."""
    client = chromadb.PersistentClient(str(tmp_path / "chroma"))
    made = client.create_collection("docs", embedding_function=None)
    made.add(ids=["orla"], embeddings=[[1.0, 0.0]], documents=[TEXT])
    client.close()
    return ["index", "--collection", "docs", "--store", tmp_path / "chroma", "--bundle", bundle_folder]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passages_are_compressed_in_the_dtype_and_on_the_device(
    run: Any, command: list[object], bundle_folder: Path, tmp_path: Path, dtype: str
) -> None:
    assert run(*command, "--dtype", dtype, "--device", "cpu", "--codec", "fp16") == 0
    assert f"1 passages compressed, 0 unchanged, with {bundle_folder}\n" in run.out
    collection = chromadb.PersistentClient(str(tmp_path / "chroma")).get_collection("docs", embedding_function=None)
    with SoftContextStore(collection, Bundle.from_pretrained(bundle_folder)) as store:
        [stored] = store.get(["orla"])
    assert stored is not None
    for other in ("float32", "bfloat16"):
        [made] = Bundle.from_pretrained(bundle_folder, dtype=other).compress([TEXT])
        assert torch.equal(stored.slots.half(), made.slots.half()) is (other == dtype)


def test_names_that_are_not_utf_8_are_told(run: Any, command: list[object], docs: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    at = command.index("docs")
    said = run.fails(*command[:at], name, *command[at + 1 :])
    assert "no collection 'caf\\udce9' in" in said and said.endswith("there are docs")
    (tmp_path / "chroma").rename(tmp_path / name)
    at = command.index("--store") + 1
    for there in ([*command[:at], tmp_path / name], ["index", docs, "--store", tmp_path / f"new {name}"]):
        assert "caf\\udce9', whose name is not UTF-8: rename it" in run.fails(*there)
    assert not (tmp_path / f"new {name}").exists()
