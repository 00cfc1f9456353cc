"""Slots that RAM makes for one question: their markers, and the memory behind them."""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, MissingPassageError
from ctx_compress_rag.marking.mark import expand, mark
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.store.transient import TransientParts
from helpers.ram import KEY, PASSAGES, QUESTION, ask, close_bundle, close_store


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return close_bundle(tiny_tokenizer)


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), bundle)


def part(n: int, slots: int) -> TransientPart:
    return TransientPart(f"passage {n}", SoftContext(torch.zeros(slots, 2), torch.ones(slots).long()), (str(n),))


@given(
    most=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5)), max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_the_least_recently_used_go(most: int, steps: list[tuple[bool, int, int]]) -> None:
    """Against a plain list of what is kept, oldest first."""
    kept, plain = TransientParts(most), OrderedDict[str, int]()
    for put, n, slots in steps:
        name = str(n)
        if put and slots > most:
            with pytest.raises(ConfigError, match=f"{slots} slots"):
                kept.keep({name: part(n, slots)})
        elif put:
            kept.keep({name: part(n, slots)})
            plain.pop(name, None)
            plain[name] = max(1, slots)
            while sum(plain.values()) > most:
                plain.popitem(last=False)
        else:
            marker = Marker(name, 1, text=name)
            found, gone = kept.split([marker])
            assert (found != {}) == (gone == []) == (name in plain)
            if found:
                assert found[marker].text == f"passage {n}"
                plain.move_to_end(name)


def test_all_tenants_together_keep_so_many_slots(store: SoftContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_transient", TransientParts(40))
    marked = {who: mark(store, PASSAGES, ratio=2, question=QUESTION, scope=who) for who in ("ann", "bob", "cy", "di")}
    with pytest.raises(MissingPassageError):
        [expand(store, text, "ann") for text in marked["ann"]]
    assert [expand(store, text, "di") for text in marked["di"]] == PASSAGES


def test_slots_that_went_are_a_clear_error(bundle: Bundle, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16", key=KEY) as store:
        marked = ask(store)
    same = close_bundle(tiny_tokenizer)
    with SoftContextStore(tmp_path, same, key=KEY) as elsewhere:
        decoder = Decoder(same, elsewhere)
        chat = [{"role": "user", "content": marked[0]}]
        for call in (
            lambda: expand(elsewhere, marked[0]),
            lambda: decoder.generate([chat], Sampling(max_tokens=1)),
        ):
            with pytest.raises(MissingPassageError, match="retrieve again"):
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
