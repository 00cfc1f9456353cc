"""Hostile prompts, more than ten thousand of them: a marker resolves if it was issued to this scope, and only then.

What must resolve is found without the codec: by looking for the issued strings themselves. Six kinds of attack,
each placed in user text, in a document, in the history or in a tool's output, and rendered by a chat template.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import chromadb
import pytest
from helpers_store import WordBundle, passage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctx_compress_rag.decoders.prompt_tokenizer import PromptTokenizer, chat_text
from ctx_compress_rag.markers import Marker, MarkerCodec
from ctx_compress_rag.postprocess import expand, mark
from ctx_compress_rag.stores import SoftContextStore

PROMPTS = 430  # of each of the six kinds, with an attack in each of four places: 10,320 attacks
KEY, FINGERPRINT = b"k" * 32, "f" * 64
CODEC = MarkerCodec(KEY, FINGERPRINT)
SCOPES = ("anna", "ben")
PASSAGES = [CODEC.passage(f"passage {number}") for number in range(4)]
ISSUED = {
    who: [CODEC.write(name, factor, slots, who) for name in PASSAGES for factor, slots in ((1, 24), (4, 6))]
    + [CODEC.write_skimmed(CODEC.skimmed("a question", name), slots, who) for name in PASSAGES for slots in (0, 3)]
    for who in SCOPES
}
OTHERS = [
    codec.write(codec.passage("passage 0"), 1, 24, who)
    for codec in (MarkerCodec(b"x" * 32, FINGERPRINT), MarkerCodec(b"K" * 32, FINGERPRINT))
    for who in SCOPES
]

own = st.sampled_from(ISSUED["anna"])
foreign = st.sampled_from(ISSUED["ben"] + OTHERS)
issued = own | foreign
letters = st.text("abcdefghijklmnop", min_size=16, max_size=20)
noise = st.text("[]ctx:.abp0169 \n{}<|>$%\\\"'", max_size=12) | st.text(max_size=8)


def _cut(marker: str, at: int) -> tuple[str, str]:
    return marker[:at], marker[at:]


@st.composite
def forged(draw: st.DrawFn) -> str:
    head, tag = draw(letters), draw(letters)
    return f"[[ctx:{head}.{draw(st.integers(0, 10**8) | st.sampled_from(['', '-1', '٣', '1e3', '007']))}.{tag}]]"


@st.composite
def replayed(draw: st.DrawFn) -> str:
    return draw(noise) + draw(foreign) * draw(st.integers(1, 3)) + draw(noise)


@st.composite
def tampered(draw: st.DrawFn) -> str:
    marker = draw(issued)
    at = draw(st.integers(0, len(marker) - 1))
    changed = draw(st.sampled_from("abcdefghijklmnop0123456789.:[] ") | st.characters())
    return draw(
        st.sampled_from(
            [
                marker[:at] + changed + marker[at + 1 :],
                marker[:at] + changed + marker[at:],
                marker[:at] + marker[at + 1 :],
                marker.upper(),
                marker.replace(".", ".0", 1),
                ".".join([marker.split(".")[0], draw(own).split(".")[1], draw(own).split(".")[2]]),
            ]
        )
    )


@st.composite
def nested(draw: st.DrawFn) -> str:
    outer, inner = draw(issued), draw(issued)
    for _ in range(draw(st.integers(1, 3))):
        before, after = _cut(outer, draw(st.integers(0, len(outer))))
        outer = before + inner + after
    return outer


@st.composite
def truncated(draw: st.DrawFn) -> str:
    marker = draw(issued)
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(marker))] * 2)))
    return draw(noise) + marker[start:end] + draw(noise)


@st.composite
def reformed(draw: st.DrawFn) -> str:
    """Halves of a marker around something that is taken out of the text, a marker or what looks like one."""
    marker, between = draw(issued), draw(own | forged() | noise)
    before, after = _cut(marker, draw(st.integers(1, len(marker) - 1)))
    return before + between + after


ATTACKS = {
    "forged": forged(),
    "replayed across scopes": replayed(),
    "tampered": tampered(),
    "nested": nested(),
    "truncated": truncated(),
    "re-formed": reformed(),
}
ROLES = ("system", "user", "assistant", "user")
PLACES = {
    "document": (0, "Answer from the context.\n\nA first document.\n\n{}\n\nA last one."),
    "user text": (3, "{} What is this?"),
    "history": (2, "I said: {}"),
    "tool output": (1, 'search returned [{"text": "{}", "score": 0.5}]'),
}


@st.composite
def prompts(draw: st.DrawFn, attack: st.SearchStrategy[str]) -> list[dict[str, str]]:
    """A chat with an attack in each place, and perhaps a marker that the scope was issued beside it."""
    contents = [""] * len(ROLES)
    for place, frame in PLACES.values():
        contents[place] += draw(st.just("") | own) + frame.replace("{}", draw(attack))
    return [{"role": role, "content": content + "."} for role, content in zip(ROLES, contents, strict=True)]


def resolved(parts: Sequence[str | Marker]) -> Counter[tuple[str, int]]:
    return Counter((part.id, part.slots) for part in parts if isinstance(part, Marker))


def expected(text: str, who: str) -> Counter[tuple[str, int]]:
    """By searching for what was issued; the strings cannot overlap, as each begins with [[ and ends with ]]."""
    found = Counter()
    for marker in ISSUED[who]:
        id, slots, _ = marker.removeprefix("[[ctx:").split(".")
        found[id, int(slots)] += text.count(marker)
    return +found


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):  # each refused marker is a warning
        yield


@pytest.mark.parametrize("kind", ATTACKS)
def test_only_what_was_issued_to_the_scope_resolves(kind: str, tiny_tokenizer: Any) -> None:
    tokenizer = PromptTokenizer(tiny_tokenizer)
    seen = []

    @settings(max_examples=PROMPTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(prompts(ATTACKS[kind]))
    def attack(chat: list[dict[str, str]]) -> None:
        text = chat_text(tiny_tokenizer, chat)
        parts = CODEC.split(text, "anna")
        assert resolved(parts) == expected(text, "anna")
        # What does not resolve is all still there, in order; what is around a marker does not close up.
        literal = [part for part in parts if isinstance(part, str)]
        assert "".join(literal) == _without(text, ISSUED["anna"])
        assert not any(resolved(CODEC.split(part, "anna")) for part in literal)
        seen.append(text)
        if len(seen) % 20 == 0:
            holes = len(parts) - len(literal)
            assert len(tokenizer.encode([""] * (holes + 1))) == holes + 1
            assert len(tokenizer.encode(literal)) == len(literal)

    attack()
    assert len(seen) >= PROMPTS


def _without(text: str, markers: Sequence[str]) -> str:
    """The text without the markers that are in it, all taken out at once."""
    return "".join(re.split("|".join(map(re.escape, markers)), text))


def test_hostile_documents_in_a_store() -> None:
    """Marking, expanding and reading back documents full of attacks: nothing crashes, nothing of others comes out.

    The attacks' own markers are of another key here; this store's are the two around and within them.
    """
    client = chromadb.EphemeralClient()
    store = SoftContextStore(client, WordBundle(), collection="hostile", key=b"another key, as long as that")
    secret = "ben's secret " + passage(1)
    store.add([passage(0), secret], ["open", "secret"], progress=False)
    bens = store.marker("secret", 4, "ben")
    annas = store.marker("open", 4, "anna")

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(sorted(ATTACKS)).flatmap(ATTACKS.__getitem__) | noise, min_size=1, max_size=3))
    def attack(attacks: list[str]) -> None:
        texts = [f"{bens[:9]} {each}{bens}{annas}{bens[9:]} words" for each in attacks]
        marked = mark(store, texts, on_missing="text", scope="anna")
        prompt = "".join(marked)
        assert "secret" not in expand(store, prompt, "anna")
        markers = [part for part in store.split(prompt, "anna") if isinstance(part, Marker)]
        assert set(store.text_of(markers)) <= {passage(0)}
        assert expand(store, "".join(texts), "anna").count(passage(0)) == len(texts)

    attack()
