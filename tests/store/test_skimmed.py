"""Markers of skimmed parts, and the memory behind them."""

from __future__ import annotations

import re
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
from ctx_compress_rag.marking.mark import expand, mark
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store import marker as markers
from ctx_compress_rag.store.marker import Marker, MarkerCodec
from ctx_compress_rag.store.skimmed import Skimmed, SkimmedSlots
from helpers.close_reading import KEY, PASSAGES, QUESTION, ask, close_bundle, close_store, read


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return close_bundle(tiny_tokenizer)


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), bundle)


def test_forged_and_other_scopes_markers_stay_text(store: SoftContextStore) -> None:
    theirs = mark(store, PASSAGES, question=QUESTION, scope="theirs")
    assert read(store, theirs) == (theirs, [])
    assert store.fetch([p for t in theirs for p in store.split(t, "theirs") if isinstance(p, Marker)])
    _, [marker, *_] = read(store, ask(store))
    [text] = re.findall(r"\[\[ctx:.*?\]\]", next(t for t in ask(store) if "[[ctx:" in t))[:1]
    for forged in (
        text.replace(f".{marker.slots}.", f".{marker.slots + 1}."),
        text.replace("ctx:", "ctx:a", 1),
        text[:-3] + "]]",
    ):
        assert store.split(forged) == [forged]
    with markers.scope("theirs"):
        assert store.split(text) == [text]


@given(
    st.text("abcdefghijklmnop", min_size=17, max_size=17), st.integers(0, 9_999_999), st.text(min_size=1, max_size=9)
)
@settings(deadline=None)
def test_a_skimmed_marker_passes_for_no_other(name: str, slots: int, who: str) -> None:
    codec = MarkerCodec(KEY, "f" * 64)
    skimmed, stored = codec.write_skimmed(name, slots, who), codec.write(name, 1, max(1, slots), who)
    assert codec.split(skimmed + stored, who) == [
        Marker(name + "aaa", slots, skimmed=True),
        Marker(name + "aaa", max(1, slots)),
    ]
    assert skimmed[-18:] != stored[-18:]


def part(n: int, slots: int) -> Skimmed:
    return Skimmed("q", 2, f"passage {n}", 0, 4, SoftContext(torch.zeros(slots, 2), torch.ones(slots).long()))


@given(
    limit=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5)), max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_the_least_recently_used_go(limit: int, steps: list[tuple[bool, int, int]]) -> None:
    """Against a plain list of what is kept, oldest first."""
    kept, plain = SkimmedSlots(limit), OrderedDict[str, int]()
    for put, n, slots in steps:
        name = str(n) * 17
        if put and slots > limit:
            with pytest.raises(ConfigError, match=f"needs {slots} skimmed slots and the store keeps {limit}"):
                kept.put("s", {name: part(n, slots)})
        elif put:
            kept.put("s", {name: part(n, slots)})
            plain.pop(name, None)
            plain[name] = max(1, slots)
            while sum(plain.values()) > limit:
                plain.popitem(last=False)
        elif name in plain:
            marker = Marker(name + "aaa", slots, skimmed=True, scope="s")
            assert kept.find([marker])[marker].passage == f"passage {n}"
            plain.move_to_end(name)
        else:
            with pytest.raises(MissingPassageError):
                kept.find([Marker(name + "aaa", slots, skimmed=True, scope="s")])


def test_slots_that_went_are_a_clear_error(bundle: Bundle, tmp_path: Path) -> None:
    needed = sum(m.slots for m in _found(bundle, tmp_path / "a", 10_000))
    with SoftContextStore(tmp_path / "a", bundle, codec="fp16", key=KEY, skimmed_slots=needed) as store:
        first = ask(store)
        chat = [{"role": "user", "content": first[0]}]
        decoder = TransformersDecoder(bundle, store, on_missing="text")
        decoder.generate([chat], Sampling(max_new_tokens=1))
        ask(store, question="Who keeps bees?")
        _, found = read(store, first)
        for call in (lambda: store.fetch(found), lambda: store.text_of(found), lambda: decoder.generate([chat])):
            with pytest.raises(MissingPassageError, match=f"skimmed part.* are gone.*last {needed}.*retrieve again"):
                call()
        assert store.fetch(read(store, ask(store))[1])
    with (
        SoftContextStore(tmp_path / "a", bundle, key=KEY) as elsewhere,
        pytest.raises(MissingPassageError, match="same store"),
    ):
        elsewhere.fetch(found)
    with (
        SoftContextStore(tmp_path / "a", bundle, key=KEY, skimmed_slots=needed - 1) as small,
        pytest.raises(ConfigError, match=f"needs {needed} skimmed slots.*skimmed_slots={needed}"),
    ):
        ask(small)


def _found(bundle: Bundle, folder: Path, limit: int) -> list[Marker]:
    with SoftContextStore(folder, bundle, codec="fp16", key=KEY, skimmed_slots=limit) as store:
        return read(store, ask(store))[1]


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


def test_one_scope_s_questions_evict_no_other_scope_s_slots(bundle: Bundle, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, key=KEY, skimmed_slots=4) as store:
        [theirs] = store.skimmed_markers([part(0, 3)], "anna")
        mine = [store.skimmed_markers([part(n, 3)], "ben")[0] for n in range(1, 4)]
        [kept] = store.split(theirs, "anna")
        assert store.text_of([kept]) == ["pass"]  # type: ignore[list-item]
        *evicted, last = (store.split(each, "ben")[0] for each in mine)
        assert store.fetch([last])[0].n_slots == 3  # type: ignore[list-item]
        for each in evicted:
            with pytest.raises(MissingPassageError, match="last 4 of a scope"):
                store.fetch([each])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="skimmed_slots="):
            SoftContextStore(tmp_path, bundle, key=KEY, skimmed_slots="many")  # type: ignore[arg-type]
