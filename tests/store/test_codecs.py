"""Payload codecs: what goes in comes out, within the error the codec promises; damage is noticed."""

import base64
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ctx_compress_rag.errors import ConfigError, PayloadError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.codec import CODECS, decode_soft_context, encode_soft_context

shapes = st.tuples(st.integers(1, 20), st.integers(1, 12))


def matrices(limit: float) -> st.SearchStrategy[np.ndarray]:
    values = st.floats(-limit, limit, width=32, allow_nan=False)
    return shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=values))


def to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def context(slots: np.ndarray, counts: list[int] | None = None) -> SoftContext:
    return SoftContext(slots, np.array(counts or [4] * len(slots)))


@given(matrices(float(np.float32(3e38))))
def test_int8_is_within_its_step_in_every_column(slots: np.ndarray) -> None:
    """Its own: channels with outliers do not drown the others."""
    back = decode_soft_context(encode_soft_context(context(slots), "int8")).slots.astype(np.float64)
    column = np.abs(slots.astype(np.float64)).max(axis=0)
    # Half a step of a scale at most 2**(1/8) above max/127; nothing is promised 2**31 below the largest column.
    step = np.maximum(column, column.max() * 2.0**-31) / 127 * 2**0.125
    assert (np.abs(back - slots) <= step * 0.501 + 1e-40).all()


@given(matrices(65504.0))
def test_fp16_equals_numpy_half(slots: np.ndarray) -> None:
    back = decode_soft_context(encode_soft_context(context(slots), "fp16")).slots
    np.testing.assert_array_equal(back, slots.astype(np.float16).astype(np.float32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.sampled_from(sorted(CODECS)))
def test_token_counts_are_exact(counts: list[int], codec: str) -> None:
    back = decode_soft_context(encode_soft_context(context(np.ones((len(counts), 2), np.float32), counts), codec))
    assert back.token_counts.tolist() == counts
    assert back.token_counts.dtype == np.int64


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    slots = np.ones((3, 4), np.float32)
    slots[1, 2] = value
    with pytest.raises(PayloadError, match="1 of 12"):
        encode_soft_context(context(slots))


def test_fp16_overflow_is_refused_and_int8_takes_it() -> None:
    slots = np.full((2, 3), 65505.0, np.float32)
    with pytest.raises(PayloadError, match=r"65504.*int8"):
        encode_soft_context(context(slots), "fp16")
    assert np.abs(decode_soft_context(encode_soft_context(context(slots), "int8")).slots / slots - 1).max() < 0.01


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("shape", [(3, 4), (2, 4)])
def test_every_cut_and_every_changed_byte_is_noticed(codec: str, shape: tuple[int, int]) -> None:
    """Also its codec's number: 2 x 4 values take as many bytes in int8 as in fp16."""
    payload = encode_soft_context(context(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)), codec)
    raw = base64.b64decode(payload)
    changed = (
        raw[:at] + bytes([raw[at] ^ bits]) + raw[at + 1 :] for at in range(len(raw)) for bits in (1, 16, 128, 255)
    )
    for damaged in (*(payload[:end] for end in range(len(payload))), *map(to_text, changed)):
        with pytest.raises(PayloadError):
            decode_soft_context(damaged)


@given(st.text() | st.binary().map(to_text))
def test_rubbish_is_a_payload_error(rubbish: str) -> None:
    with pytest.raises(PayloadError):
        decode_soft_context(rubbish)


@pytest.mark.parametrize(
    ("dim", "second", "value", "named"), [(2, 1, np.nan, "NaN"), (2, 2**31, 2, "cover"), (3, 1, 2, "need 14")]
)
def test_what_another_program_wrote_is_checked(dim: int, second: int, value: float, named: str) -> None:
    """Numbers that are none, counts of tokens that do not cover the slots, and too few values, with a checksum."""
    body = struct.pack("<II", 4, second) + np.array([1, value], "<f2").tobytes()
    data = struct.pack("<BBIII", 1, CODECS["fp16"].code, 1, dim, 1) + body
    with pytest.raises(PayloadError, match=named):
        decode_soft_context(to_text(data + struct.pack("<I", zlib.crc32(data))))


@pytest.mark.parametrize("count", [-1, 2**32])
def test_a_count_of_tokens_that_no_slot_has_is_refused(count: int) -> None:
    with pytest.raises(PayloadError, match=f"{count} tokens"):
        encode_soft_context(SoftContext(np.ones((2, 3), np.float32), np.array([4, count])))


def test_unknown_codec_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'int2'.*fp16"):
        encode_soft_context(context(np.ones((1, 1), np.float32)), "int2")
