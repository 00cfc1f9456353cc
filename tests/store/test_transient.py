"""Slots made for one question: their markers, and the memory behind them."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError, MissingPassageError
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.methods.base.reading import TransientContext
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.transient import TransientContexts
from helpers.ram import KEY, PASSAGES, QUESTION, ask, close_bundle, close_store, read


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return close_bundle(tiny_tokenizer)


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), bundle)


def part(n: int, slots: int) -> TransientContext:
    return TransientContext(("q", str(n)), f"passage {n}", SoftContext(torch.zeros(slots, 2), torch.ones(slots).long()))


@given(
    limit=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5)), max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_the_least_recently_used_go(limit: int, steps: list[tuple[bool, int, int]]) -> None:
    """Against a plain list of what is kept, oldest first; another scope's questions evict nothing."""
    kept, plain = TransientContexts(limit), OrderedDict[str, int]()
    kept.put("another", {"0": part(0, 1)})
    for put, n, slots in steps:
        name = str(n)
        if put and slots > limit:
            with pytest.raises(ConfigError, match=f"needs {slots} slots"):
                kept.put("s", {name: part(n, slots)})
        elif put:
            kept.put("s", {name: part(n, slots)})
            plain.pop(name, None)
            plain[name] = max(1, slots)
            while sum(plain.values()) > limit:
                plain.popitem(last=False)
        else:
            found = kept.get("s", name)
            assert (found is not None) == (name in plain)
            if found is not None:
                assert found.text == f"passage {n}"
                plain.move_to_end(name)
    assert kept.get("another", "0") is not None


def test_slots_that_went_are_a_clear_error(bundle: Bundle, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16", key=KEY) as store:
        marked = ask(store)
    with SoftContextStore(tmp_path, bundle, key=KEY) as elsewhere:
        _, found = read(elsewhere, marked)
        decoder = TransformersDecoder(bundle, elsewhere)
        chat = [{"role": "user", "content": marked[0]}]
        for call in (
            lambda: elsewhere.fetch(found),
            lambda: elsewhere.text_of(found),
            lambda: decoder.generate([chat], Sampling(max_new_tokens=1)),
        ):
            with pytest.raises(MissingPassageError, match="another store object.*retrieve again"):
                call()


def test_a_question_writes_nothing(bundle: Bundle, store: SoftContextStore) -> None:
    before = store.info()
    ask(store, question="Is anything written?")
    assert store.info() == before


def test_threads_ask_at_once(store: SoftContextStore) -> None:
    questions = [QUESTION, "Who keeps bees?", "What was Oda Brink?"]
    alone = {question: ask(store, question=question) for question in questions}

    def work(n: int) -> bool:
        question = questions[n % 3]
        marked = ask(store, question=question)
        return marked == alone[question] and [expand(store, text) for text in marked] == PASSAGES

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(9), timeout=60))
