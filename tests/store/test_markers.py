"""Markers: read back exactly, refused when forged, found in linear time, kept apart by scope."""

import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.errors import RatioError, UnreadableMarkerError
from ctx_compress_rag.store.marker import MAX_FACTOR, Marker, MarkerCodec, escaped_markers

KEY = b"k" * 32
CODEC = MarkerCodec(KEY, "f" * 64)
LETTERS = "abcdefghijklmnop"
names = st.text(LETTERS, min_size=17, max_size=17)
factors = st.integers(1, MAX_FACTOR)
slot_counts = st.integers(1, 9_999_999)
scopes = st.text(min_size=1, max_size=20)
plain = st.text(max_size=60) | st.text("[]ctx:.abp0123", max_size=60)


@settings(deadline=None)
@given(st.lists(st.tuples(plain, names, factors, slot_counts), max_size=5), plain, scopes)
def test_what_is_written_is_read(rows: list[tuple[str, str, int, int]], tail: str, who: str) -> None:
    text, expected = "", []
    for before, name, factor, slots in rows:
        text += before + CODEC.write(name, factor, slots, who)
        expected += [before, (name, factor, slots)]
    parts = CODEC.split(text + tail, who)
    read = [part if isinstance(part, str) else (part.passage, part.factor, part.slots) for part in parts]
    assert read == [part for part in [*expected, tail] if part]


def test_the_form_is_the_documented_one() -> None:
    written = CODEC.write(CODEC.passage("some text"), 4, 16, "default")
    assert len(written) == len("[[ctx:]]") + 20 + 1 + 2 + 1 + 16
    head, slots, tag = written.removeprefix("[[ctx:").removesuffix("]]").split(".")
    assert (len(head), slots, len(tag)) == (20, "16", 16)
    assert set(head + tag) <= set(LETTERS)


def test_the_same_text_has_the_same_marker_and_nothing_else_has() -> None:
    other_key, other_bundle = MarkerCodec(b"x" * 32, "f" * 64), MarkerCodec(KEY, "e" * 64)
    name = CODEC.passage("text")
    assert name == MarkerCodec(KEY, "f" * 64).passage("text")
    assert len({name, CODEC.passage("text "), other_key.passage("text"), other_bundle.passage("text")}) == 4


def test_the_fields_cannot_run_into_each_other() -> None:
    # Joined without lengths, scope "ab" with id "c..." would sign the same bytes as scope "a" with "bc...".
    first = CODEC.write("c" * 17, 1, 2, "ab")
    assert CODEC.split(first, "a" + "b") != [first]
    assert CODEC.split(first, "a") == [first]
    assert CODEC.split(first.replace("[[ctx:", "[[ctx:b", 1), "a") == [first.replace("[[ctx:", "[[ctx:b", 1)]


def test_a_forged_marker_is_logged_once_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    forged = f"[[ctx:{'a' * 20}.16.{'b' * 16}]]"
    good = CODEC.write("p" * 17, 1, 3, "t")
    with caplog.at_level(logging.WARNING):
        parts = CODEC.split(f"{forged} and {forged}{good}", "t")
    assert parts[0] == f"{forged} and {forged}"
    assert isinstance(parts[1], Marker)
    [record] = caplog.records
    assert "2 marker(s)" in record.message and "'t'" in record.message


def test_a_marker_of_another_scope_is_refused_with_the_remedy() -> None:
    """The app's likeliest mistake is a postprocessor without the LLM's scope."""
    with pytest.raises(
        UnreadableMarkerError, match="for scope 'alice'.*give the postprocessor and the LLM the same scope"
    ):
        CODEC.split(CODEC.write("p" * 17, 1, 3, "default"), "alice", "error")


@pytest.mark.parametrize("before", ["", "[", "[[", "a[[[[["])
@pytest.mark.parametrize("after", ["", "]", "]]"])
def test_what_is_escaped_is_no_marker_however_many_brackets_stand_around_it(before: str, after: str) -> None:
    good = CODEC.write("p" * 17, 1, 3, "t")
    left = escaped_markers(f"{before}{good}{good}{after} [[words]]")
    assert CODEC.split(left, "t", "error") == [left]
    assert CODEC.split(f"[{left}]", "t", "error") == [f"[{left}]"]
    assert left.replace("ctx", "ctx:") == f"{before}{good}{good}{after} [[words]]"


@pytest.mark.parametrize(
    "unit",
    [
        "[[ctx:",
        "[",
        "[[ctx:" + "a" * 20,
        "[[ctx:" + "a" * 20 + ".1",
        "[[ctx:" + "a" * 20 + ".16." + "b" * 16 + "]",
        "[[ctx:" + "a" * 20 + ".16." + "b" * 16 + "]]",
    ],
)
def test_hostile_text_takes_linear_time(unit: str) -> None:
    text = unit * (2_000_000 // len(unit))

    def seconds() -> float:
        began = time.process_time()
        assert CODEC.split(text, "t") == [text]
        return time.process_time() - began

    assert any(seconds() < 1.0 for _ in range(3))  # 0.02 to 0.2 s when measured; quadratic time would be minutes


@pytest.mark.parametrize("factor", [0, -1, MAX_FACTOR + 1])
def test_a_factor_that_cannot_be_written_is_refused(factor: int) -> None:
    with pytest.raises(RatioError, match=str(factor)):
        CODEC.write("a" * 17, factor, 1, "t")
