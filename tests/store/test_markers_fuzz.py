"""Hostile prompts, more than ten thousand of them: a marker resolves if it was issued to this scope, and only then.

What must resolve is found without the codec: by looking for the issued strings themselves. Six kinds of attack,
each placed in user text, in a document, in the history or in a tool's output, and rendered by a chat template.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.chat import chat_text
from helpers.attacks import ATTACKS, CODEC, ISSUED, own

PROMPTS = 430  # of each of the six kinds, with an attack in each of four places: 10,320 attacks
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

    attack()
    assert len(seen) >= PROMPTS


def _without(text: str, markers: Sequence[str]) -> str:
    """The text without the markers that are in it, all taken out at once."""
    return "".join(re.split("|".join(map(re.escape, markers)), text))
