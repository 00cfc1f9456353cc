"""Compressed documents and nodes after somebody's serializer: the same prompt, the same sources."""

import json
import pickle
import re
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc
from llama_index.core.workflow import JsonSerializer

from ctx_compress_rag.store import SoftContextStore
from helpers.frameworks import LangChain, LlamaIndex
from helpers.langchain import QUESTION, TEXTS, App
from helpers.ram import KEY, PASSAGES, close_bundle, close_store
from helpers.ram import QUESTION as RAM_QUESTION
from llama_index.postprocessor.ctx_compress import CompressedTextNode, restore_sources

RESTRICTION = "allowed_msgpack_modules"  # which langgraph-checkpoint 2 does not have
restricted: Any = {RESTRICTION: None} if RESTRICTION in signature(JsonPlusSerializer).parameters else {}
STRICT = JsonPlusSerializer(**restricted)
DOCUMENTS = {
    "langgraph": lambda each: STRICT.loads_typed(STRICT.dumps_typed(each)),
    "load": lambda each: loads(dumps(each), allowed_objects=[Document]),
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "deepcopy": deepcopy,
    "model_dump": lambda each: Document(**json.loads(json.dumps(each.model_dump()))),
}
NODES = {
    "workflow": lambda each: JsonSerializer().deserialize(JsonSerializer().serialize(each)),
    "pickle": DOCUMENTS["pickle"],
    "deepcopy": deepcopy,
    "model_dump": lambda each: type(each)(**json.loads(json.dumps(each.model_dump()))),
}
SHOWN = [{"ratio": 8}, {"token_budget": 30, "text_share": 0.5}, {"token_budget": 10_000}]


@pytest.mark.parametrize("options", SHOWN)
def test_documents(app: App, options: Any) -> None:
    found = [Document(text, id=id, metadata={"page": 3}) for id, text in TEXTS.items()]
    marked = LangChain.mark(found, QUESTION, store=app.store, **options)
    sources = [each for each in found if each.id in {m.id for m in marked}]
    anew = LangChain.mark(sources, QUESTION, store=app.store, ratio=8)
    for name, saved in DOCUMENTS.items():
        again = [saved(each) for each in marked]
        assert again == marked and {type(each) for each in again} == {Document}, name
        assert LangChain.restore(again, app.store) == sources, name
        assert LangChain.mark(again, QUESTION, store=app.store, ratio=8) == anew, name


@pytest.mark.parametrize("options", SHOWN)
@pytest.mark.parametrize("replace", [False, True])
def test_nodes(app: App, replace: bool, options: Any) -> None:
    found = [LlamaIndex.found(text, id, page=3) for id, text in TEXTS.items()]
    marked = LlamaIndex.mark(found, QUESTION, store=app.store, replace_text=replace, **options)
    for name, saved in NODES.items():
        again = [NodeWithScore(node=saved(each.node), score=each.score) for each in marked]
        assert [*map(LlamaIndex.shown, again)] == [*map(LlamaIndex.shown, marked)], name
        texts = [each.node.get_content() for each in restore_sources(again, app.store)]
        assert texts == [TEXTS[each.node.node_id] for each in marked], name


def test_a_docstore_keeps_a_nodes_text(app: App) -> None:
    found = LlamaIndex.found(TEXTS["tower"], "tower", page=3)
    [marked] = LlamaIndex.mark([found], store=app.store, ratio=8)
    assert json_to_doc(json.loads(json.dumps(doc_to_json(marked.node)))) == found.node
    changed = CompressedTextNode(**{**marked.node.model_dump(), "text": "Another."})
    assert changed.get_content(MetadataMode.LLM) == "Another."


def test_kept_text_of_a_method_ends_with_a_marker(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """It gives back the passage even in another process, which has no slots that were made for the question."""
    bundle = close_bundle(tiny_tokenizer)
    with close_store(tmp_path, bundle) as store, SoftContextStore(tmp_path, bundle, key=KEY) as other:
        marked = LangChain.mark([Document(text) for text in PASSAGES], RAM_QUESTION, store=store, ratio=2)
        kept = [place for place, each in enumerate(marked) if re.search(r"\.0t\d+\.\w+\]\]$", each.page_content)]
        sources = LangChain.restore([marked[place] for place in kept], other)
        assert kept and [each.page_content for each in sources] == [PASSAGES[place] for place in kept]
