"""The README's commands and code, run as they are written there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chromadb.api.shared_system_client import SharedSystemClient

from ctx_compress_rag.cli import main
from ctx_compress_rag.data.examples import world_examples, write_jsonl

README = Path(__file__).parents[1] / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def _commands(name: str) -> list[list[str]]:
    lines = "\n".join(_blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"ctx-compress {name} ")]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder. Chroma keeps one engine per spelling of a path: `./chroma` was another folder before."""
    monkeypatch.chdir(tmp_path)
    SharedSystemClient.clear_system_cache()
    yield tmp_path
    SharedSystemClient.clear_system_cache()


def test_the_two_make_commands_are_targets() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    made = [line.split()[1] for block in _blocks("bash") for line in block.splitlines() if line.startswith("make ")]
    assert made[:2] == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in made)


def test_index_ask_and_info(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = workplace / "my_docs"
    docs.mkdir()
    for number, passage in enumerate(world_examples("test", 0, 1)[0].passages):
        (docs / f"{number}.txt").write_text(passage, encoding="utf-8")
    for name in ("index", "ask", "info"):
        (command,) = _commands(name)
        assert main(command) == 0
        assert capsys.readouterr().out.strip()


def test_train_and_eval(workplace: Path, make_tiny_bundle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the README's recipes, shrunk to a tiny decoder, a few steps and few data."""
    from ctx_compress_rag.training.recipes import SHIPPED

    make_tiny_bundle().save_pretrained(workplace / "bundle")
    write_jsonl(workplace / "train.jsonl", world_examples("train", 9, 8, max_turns=1))
    write_jsonl(workplace / "held_out.jsonl", world_examples("test", 9, 2, max_turns=1))
    (train,), (evaluate,) = _commands("train"), _commands("eval")
    for recipe in train[1:]:
        settings = yaml.safe_load((SHIPPED / recipe).read_text(encoding="utf-8"))
        settings["decoder"] = "bundle/decoder"
        settings["optim"] |= {"steps": 2, "batch_size": 2, "micro_batch_size": 1, "log_every": 1}
        Path(recipe).parent.mkdir(exist_ok=True)
        Path(recipe).write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert main(train) == 0
    assert main([*evaluate, "--ratios", "4", "--no-extraction"]) == 0
    assert "teacher-normalised" in capsys.readouterr().out


def test_compare(workplace: Path, make_tiny_bundle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With one entry of the shipped comparison, a tiny decoder and a few steps."""
    make_tiny_bundle().save_pretrained(workplace / "bundle")
    (compare,) = _commands("compare")
    few = [
        "--entries",
        "mean_pooling",
        "--budget",
        "8",
        "--questions",
        "2",
        "--jobs",
        "1",
        "--decoder",
        "bundle/decoder",
    ]
    assert main([*compare, *few]) == 0
    assert "| mean_pooling |" in capsys.readouterr().out


def _run(block: str, given: dict[str, Any]) -> Any:
    """Run a code block; its last line is an expression, whose value is returned."""
    *lines, last = block.strip().splitlines()
    exec("\n".join(lines), given)
    return eval(last, given)


def test_langchain_code(workplace: Path) -> None:
    from langchain_chroma import Chroma
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.prompts import ChatPromptTemplate

    (block,) = (b for b in _blocks("python") if "langchain_ctx_compress" in b)
    documents = [Document(p) for p in world_examples("test", 0, 1)[0].passages]
    given = {
        "documents": documents,
        "vectorstore": Chroma.from_documents(documents, DeterministicFakeEmbedding(size=8)),
        "prompt": ChatPromptTemplate.from_messages([("user", "{context}\n\nQuestion: {input}")]),
        "ContextualCompressionRetriever": ContextualCompressionRetriever,
        "create_retrieval_chain": create_retrieval_chain,
        "create_stuff_documents_chain": create_stuff_documents_chain,
    }
    result = _run(block, given)
    assert result["answer"].strip()
    assert all(document.page_content.startswith("[[ctx:") for document in result["context"])


def test_llama_index_code(workplace: Path) -> None:
    from llama_index.core import Document, MockEmbedding, VectorStoreIndex

    (block,) = (b for b in _blocks("python") if "llama_index" in b)
    documents = [Document(text=p) for p in world_examples("test", 0, 1)[0].passages]
    response = _run(block, {"index": VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))})
    assert str(response).strip()
    assert {node.text for node in response.source_nodes} <= {document.text for document in documents}


def test_adaptation_code(workplace: Path, app: Any) -> None:
    import torch

    from ctx_compress_rag.adaptation import AdaptiveDecoder, PredictedUpdate
    from ctx_compress_rag.adaptation.methods import PredictorConfig
    from helpers.adaptation import random_adapter

    (block,) = (b for b in _blocks("python") if "Demonstration" in b)
    config = PredictorConfig(inner_steps=2, inner_learning_rate=0.01, demonstrations=3, hidden=16, code=8)
    made = PredictedUpdate.build(
        random_adapter(app.bundle.backbone.model, 4, seed=8), AdaptiveDecoder(app.bundle), config
    )
    with torch.no_grad():
        for parameter in made.predictor.parameters():
            parameter.normal_(std=0.5)
    made.save_pretrained(workplace / "runs/rag_gd/demo/rag_gd_k5")
    llm, question = app.llm(), "Who is the mayor of Nimbridge?"
    before = llm.invoke(question).content
    given = {"llm": llm, "passage": world_examples("test", 0, 1)[0].passages[0]}
    _run(block, given)
    assert given["shouting"].invoke(question).content == llm.with_adapter("./shouting").invoke(question).content
    assert llm.invoke(question).content == before
