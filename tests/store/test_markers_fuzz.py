"""Hostile prompts, thousands of them: a marker resolves if it was issued to this scope, and only then.

What must resolve is found without the signer: by looking for the issued strings themselves. Attacks are placed in the
context, in user text, in the history and in a tool's output, and rendered by a chat template.
"""

import logging
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctx_compress_rag.store.marker import Marker, Signer
from ctx_compress_rag.text.chat import chat_text

FINGERPRINT = "f" * 64
SIGNER = Signer(b"k" * 32, FINGERPRINT)
PASSAGES = [SIGNER.passage(f"passage {number}") for number in range(4)]
ISSUED = {
    who: [SIGNER.write(name, factor, slots, who) for name in PASSAGES for factor, slots in ((1, 24), (4, 6))]
    + [SIGNER.write(SIGNER.transient("a question", name), 1, slots, who) for name in PASSAGES for slots in (0, 3)]
    for who in ("anna", "ben")
}
OTHERS = [
    signer.write(signer.passage("passage 0"), 1, 24, "anna")
    for signer in (Signer(b"x" * 32, FINGERPRINT), Signer(b"K" * 32, FINGERPRINT))
]

own = st.sampled_from(ISSUED["anna"])
issued = own | st.sampled_from(ISSUED["ben"] + OTHERS)
noise = st.text("[]ctx:.abp0169 \n{}<|>$%\\\"'", max_size=12) | st.text(max_size=8)
counts = st.integers(0, 10**8).map(str) | st.sampled_from(["", "-1", "٣", "1e3", "007"])
letters = st.text("abcdefghijklmnop", min_size=16, max_size=20)
forged = st.builds("[[ctx:{}.{}.{}]]".format, letters, counts, letters)
exchanged = st.builds(
    lambda one, other: one[:26] + other[26:], issued, own
)  # the head of one marker, the rest of another


@st.composite
def edited(draw: st.DrawFn) -> str:
    """A marker with some of it replaced: by nothing, a character, noise, or another marker, maybe one that resolves."""
    text = draw(issued)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.sampled_from([0, 0, 1, 1, len(text)]))
        text = text[:start] + draw(st.just("") | st.characters() | noise | issued | forged) + text[end:]
    return text


attacks = st.lists(issued | forged | exchanged | edited() | noise | issued.map(str.upper), max_size=4).map("".join)
CHAT = (
    ("system", "Answer from the context.\n\nA first document.\n\n{}\n\nA last one."),
    ("user", 'search returned [{{"text": "{}", "score": 0.5}}]'),
    ("assistant", "I said: {}"),
    ("user", "{} What is this?"),
)


def resolved(parts: list[str | Marker]) -> Counter[tuple[str, int]]:
    return Counter((part.id, part.slots) for part in parts if isinstance(part, Marker))


def test_only_what_was_issued_to_the_scope_resolves(tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected_of = {marker: marker.removeprefix("[[ctx:").split(".") for marker in ISSUED["anna"]}

    @settings(max_examples=1500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*[attacks] * len(CHAT)))
    def attack(drawn: tuple[str, ...]) -> None:
        chat = [{"role": role, "content": frame.format(each)} for (role, frame), each in zip(CHAT, drawn, strict=True)]
        text = chat_text(tiny_tokenizer, chat)
        parts = SIGNER.split(text, "anna")
        # Issued strings cannot overlap, as each begins with [[ and ends with ]].
        expected = Counter({(id, int(slots)): text.count(marker) for marker, (id, slots, _) in expected_of.items()})
        assert resolved(parts) == +expected
        # What does not resolve is all still there, in order; what is around a marker does not close up.
        literal = [part for part in parts if isinstance(part, str)]
        assert "".join(literal) == "".join(re.split("|".join(map(re.escape, expected_of)), text))
        assert not any(resolved(SIGNER.split(part, "anna")) for part in literal)

    with caplog.at_level(logging.ERROR):  # each refused marker is a warning
        attack()
