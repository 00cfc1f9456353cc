"""Encode soft contexts as strings (payloads), which Chroma's metadata can hold, and decode them.

A payload is a header, the token counts as runs, the slots as a codec packs them, and a checksum:

    <BBIII>   format, codec, slots S, dim D, runs R
    R x <II>  token count, how many slots in a row have it
    rest      the codec's bytes
    <I>       CRC-32 of all that precedes

All slots of a window but the last stand for the same number of tokens, so the counts take about 16 bytes.
The CRC turns a truncated or altered payload into an error instead of a wrong answer. The bytes become text in base64.
Denser texts were measured: base85 saves 6 % and takes 30 times as long to decode, seven bits a character 14 % and ten
times as long.
"""

import base64
import binascii
import struct
import zlib
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import ConfigError, PayloadError
from ctx_compress_rag.soft_context import SoftContext

Floats = NDArray[np.float32]

FORMAT = 1
_HEADER = struct.Struct("<BBIII")
_RUN = struct.Struct("<II")
_CRC = struct.Struct("<I")
_FP16_MAX = float(np.finfo(np.float16).max)
_FP32_MAX = float(np.finfo(np.float32).max)
_STEPS = 8  # column scales are powers of 2**(1/8): within 9 % of the best scale, for one byte per column


class Codec(Protocol):
    """A way to pack a finite float32 matrix (slots, dim) into `size(slots, dim)` bytes and back, finite again.

    `code` is the codec's number in the payload's header, which never changes once released.
    """

    code: int

    def pack(self, slots: Floats) -> bytes: ...
    def size(self, n_slots: int, dim: int) -> int: ...
    def unpack(self, data: bytes, n_slots: int, dim: int) -> Floats: ...


class Fp16Codec:
    """IEEE half precision, with a relative error of 2e-4 and two bytes for each value."""

    code = 1

    def pack(self, slots: Floats) -> bytes:
        if np.abs(slots).max() > _FP16_MAX:
            raise PayloadError(f"a slot has a value beyond {_FP16_MAX:.0f}, which fp16 cannot hold: use the int8 codec")
        return slots.astype("<f2").tobytes()

    def size(self, n_slots: int, dim: int) -> int:
        return 2 * n_slots * dim

    def unpack(self, data: bytes, n_slots: int, dim: int) -> Floats:
        return np.frombuffer(data, "<f2").reshape(n_slots, dim).astype(np.float32)


class Int8Codec:
    """8-bit integers with a scale for each column, which take a byte for each value and a byte for each scale.

    Scales are per column because decoders' hidden states have outlier channels. The relative L2 error, measured
    per column and per slot, is 0.004 and 0.0075 for pooled MiniLM slots, 0.0035 and 0.060 for a Llama with
    outlier channels. A float32 scale per column would make a one-slot passage larger than fp16, so a column
    stores how many eighths of an octave its scale lies below the largest one (a float32). That is at worst 9 %
    coarser than the exact scale, down to columns 2**31 times smaller than the largest.
    """

    code = 2

    def pack(self, slots: Floats) -> bytes:
        scales = np.abs(slots).max(axis=0).astype(np.float64) / 127
        largest = np.float32(scales.max())
        below = np.full(scales.shape, 255.0)
        used = (scales > 0) & (largest > 0)
        below[used] = np.clip(np.floor(_STEPS * np.log2(np.float64(largest) / scales[used])), 0, 255)
        steps = below.astype(np.uint8)
        divisor = self._scales(largest, steps)
        divisor[divisor == 0] = 1
        values = np.clip(np.rint(slots / divisor), -127, 127).astype(np.int8)
        return b"".join((largest.astype("<f4").tobytes(), steps.tobytes(), values.tobytes()))

    def size(self, n_slots: int, dim: int) -> int:
        return 4 + dim + n_slots * dim

    def unpack(self, data: bytes, n_slots: int, dim: int) -> Floats:
        largest = np.frombuffer(data, "<f4", count=1)[0]
        steps = np.frombuffer(data, np.uint8, count=dim, offset=4)
        values = np.frombuffer(data, np.int8, offset=4 + dim).reshape(n_slots, dim)
        slots = values * self._scales(largest, steps)
        return slots.clip(-_FP32_MAX, _FP32_MAX).astype(np.float32)  # rounding must not make an infinity

    @staticmethod
    def _scales(largest: np.float32, steps: NDArray[np.uint8]) -> NDArray[np.float64]:
        return np.float64(largest) * np.exp2(-steps.astype(np.float64) / _STEPS)


CODECS: dict[str, Codec] = {"int8": Int8Codec(), "fp16": Fp16Codec()}
# On benchmarks/world/bundle `ctx-compress eval --codec ...` gives the same F1 with int8 and fp16, at 4x and 16x.
DEFAULT_CODEC = "int8"
_BY_CODE = {codec.code: codec for codec in CODECS.values()}


def check_codec(name: str) -> str:
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: choose one of {', '.join(CODECS)}")
    return name


def encode_soft_context(soft: SoftContext, codec: str = DEFAULT_CODEC) -> str:
    """Return a SoftContext as text, by a codec of `CODECS`; raise PayloadError if empty, NaN or too large."""
    packer = CODECS[check_codec(codec)]
    slots = soft.slots
    if not slots.size:
        raise PayloadError(f"a soft context of shape {slots.shape} has nothing to store")
    if not np.isfinite(slots).all():
        raise PayloadError(f"{int((~np.isfinite(slots)).sum())} of {slots.size} slot values are NaN or infinite")
    counts = soft.token_counts.tolist()
    if odd := [count for count in counts if not 0 <= count < 2**32]:
        raise PayloadError(f"a slot cannot stand for {odd[0]} tokens")
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    header = _HEADER.pack(FORMAT, packer.code, *slots.shape, len(runs))
    data = b"".join((header, *(_RUN.pack(*run) for run in runs), packer.pack(slots)))
    return base64.b64encode(data + _CRC.pack(zlib.crc32(data))).decode("ascii")


def decode_soft_context(payload: str) -> SoftContext:
    """Return the SoftContext (float32) that `encode_soft_context` wrote. Raise PayloadError if the text was changed."""
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PayloadError(f"the payload is not base64 ({error})") from error
    if len(data) < _HEADER.size + _CRC.size:
        raise PayloadError(f"the payload is truncated: {len(data)} bytes, shorter than its header")
    version, code, n_slots, dim, n_runs = _HEADER.unpack_from(data)
    if version != FORMAT or code not in _BY_CODE:
        raise PayloadError(f"unknown payload format {version} or codec {code}: it is corrupt or from a newer version")
    codec, body, runs_end = _BY_CODE[code], data[_HEADER.size : -_CRC.size], n_runs * _RUN.size
    expected = runs_end + codec.size(n_slots, dim)
    if not n_slots * dim or len(body) != expected:
        raise PayloadError(f"the payload has {len(body)} bytes, but ({n_slots}, {dim}) slots need {expected}")
    if _CRC.pack(zlib.crc32(data[: -_CRC.size])) != data[-_CRC.size :]:
        raise PayloadError("the payload is corrupt: its checksum does not match")
    runs = list(_RUN.iter_unpack(body[:runs_end]))
    if sum(length for _, length in runs) != n_slots:
        raise PayloadError(f"the payload's token counts do not cover its {n_slots} slots")
    slots = codec.unpack(body[runs_end:], n_slots, dim)
    if not np.isfinite(slots).all():
        raise PayloadError("the payload holds NaN or infinite values")
    counts = np.repeat(*(np.array(column, np.int64) for column in zip(*runs, strict=True)))
    return SoftContext(slots, counts)


def payload_bytes(payload: str) -> int:
    return len(payload) // 4 * 3 - payload[-2:].count("=")
