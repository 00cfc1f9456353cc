"""A SoftContextStore beside the frameworks' own stores, with their ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import SoftContextStore
from helpers.langchain import WordEmbeddings
from helpers.store import WordBundle, assert_same, passage


@pytest.mark.parametrize("absolute", [True, False])
def test_beside_langchain_chroma(
    tmp_path: Path, bundle: WordBundle, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "chroma") if absolute else "./relative-chroma"
    vectors = Chroma(collection_name="docs", embedding_function=WordEmbeddings(), persist_directory=folder)
    documents = [Document(page_content=passage(i), metadata={"source": f"{i}.txt"}) for i in range(6)]
    ids = vectors.add_documents(documents)
    with SoftContextStore(folder, bundle, collection="docs") as store:
        store.add(documents, ids, progress=False)
        for hit in vectors.similarity_search(passage(5), k=3):
            assert hit.metadata.keys() == {"source"}  # no payload travels with the app's hits
            assert_same(store.get([hit.id])[0], bundle.at(hit.page_content, 4))
            assert store.has([hit.page_content], [hit.id]) == [True]
        vectors.add_documents([Document(page_content=passage(9))], ids=[ids[0]])
        (changed,) = vectors.get_by_ids([ids[0]])
        assert store.has([changed.page_content], [changed.id]) == [False]
        [beside] = store.ensure([changed.page_content], [changed.id])
        assert_same(store.get([beside])[0], bundle.at(passage(9), 4))
        store.add([changed], progress=False)
        assert_same(store.get([changed.id])[0], bundle.at(passage(9), 4))
        vectors.delete([ids[1]])
        assert store.delete([ids[1]]) == 1
        # Both are called Chroma: the message says which one it is, and which is needed.
        with pytest.raises(ConfigError, match=r"langchain_chroma\S*Chroma is not a chromadb.Collection: give client"):
            store.sync(vectors)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"got Chroma: .* give its chromadb collection"):
            store.add(vectors)  # type: ignore[arg-type]
    assert len(vectors.similarity_search(passage(2), k=10)) == 5
