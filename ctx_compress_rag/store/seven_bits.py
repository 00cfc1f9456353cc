"""Bytes as text, seven bits per character: the densest form that Chroma's metadata can hold.

Chroma keeps a metadata string twice, so base64's overhead would count twice. An ASCII character takes one byte in
SQLite's UTF-8, and all are safe but NUL, for which U+0080 stands. A text ends with `~`, which base64 does not use:
stores of earlier versions hold payloads in base64.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np

END = "~"
_SHIFTS = np.arange(49, -1, -7, dtype=np.uint64)  # seven bytes become eight characters


def to_text(data: bytes) -> str:
    """Bytes as ceil(8 / 7 n) characters and `END`."""
    padded = np.zeros((-(-len(data) // 7), 8), np.uint8)
    padded[:, 1:].flat[: len(data)] = np.frombuffer(data, np.uint8)
    characters = (padded.view(">u8").astype(np.uint64) >> _SHIFTS & np.uint64(127)).astype(np.uint8).reshape(-1)
    characters[characters == 0] = 128
    return characters[: -(-8 * len(data) // 7)].tobytes().decode("latin-1") + END


def to_bytes(text: str) -> bytes:
    """The bytes of what `to_text` made, or of base64; ValueError if the text is neither."""
    if not text.endswith(END):
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"neither seven-bit text nor base64 ({error})") from error
    given = np.frombuffer(text[:-1].encode("latin-1"), np.uint8)
    if ((given == 0) | (given > 128)).any():
        raise ValueError("a character of more than seven bits")
    characters = np.zeros((-(-len(given) // 8), 8), np.uint64)
    characters.flat[: len(given)] = given & 127
    sevens = (characters << _SHIFTS).sum(axis=1, dtype=np.uint64).astype(">u8").view(np.uint8).reshape(-1, 8)[:, 1:]
    return bytes(sevens.tobytes()[: n_bytes(len(text), END)])


def n_bytes(length: int, end: str) -> int:
    """How many bytes a text of this length and with these last two characters stands for."""
    return (length - 1) * 7 // 8 if end.endswith(END) else length // 4 * 3 - end.count("=")
