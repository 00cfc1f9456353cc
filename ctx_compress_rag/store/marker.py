"""Write, sign and read markers, the texts that stand for stored passages in a prompt.

    [[ctx:<20 letters a-p>.<slots>.<16 letters a-p>]]
          passage, factor          signature
    [[ctx:<20 letters a-p>.<slots>t<characters>.<16 letters a-p>]]

The first 17 letters name the passage: HMAC(key, fingerprint, text), so the same text has the same
marker in every process. The next 3 say how many base slots are merged into one, because a number of
slots alone does not determine where the windows begin. A "t" says that the prompt shows text beside slots, which
the decoder may then read with other weights, and how many characters before the marker and a space are its passage's.
So this text is told from a template's words, and the whole passage is found again. The signature is
HMAC(key, scope, id, counts), so that a marker that a user or a document wrote, that was altered, or that belongs to
another tenant's scope is not accepted and stays literal text. The form is lower-case ASCII without characters that
templates, JSON or HTML treat specially.

A marker of the same form may stand for slots that are only in memory, or for no slots (`Signer.transient`). Its letters
are never those of a stored passage.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ctx_compress_rag.errors import ConfigError, RatioError, UnreadableMarkerError

logger = logging.getLogger(__name__)

MIN_KEY_BYTES = 16
DEFAULT_SCOPE = "default"
_PASSAGE_LETTERS, _FACTOR_LETTERS, _SIGNATURE_LETTERS = 17, 3, 16
_RECORD_SIGNATURE_LETTERS = 32
MAX_FACTOR = 16**_FACTOR_LETTERS
_MARKER = re.compile(r"\[\[ctx:([a-p]{20})\.((?:0|[1-9][0-9]{0,6})(?:t(?:0|[1-9][0-9]{0,7}))?)\.([a-p]{16})\]\]")
_OPENING = "[[ctx:"
_HEX_TO_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_LETTERS_TO_HEX = str.maketrans("abcdefghijklmnop", "0123456789abcdef")

OnUnreadable = Literal["error", "text"]
"""What to do with an unreadable marker: raise an error, or keep it as text, with a warning."""

_scope: ContextVar[str | None] = ContextVar("ctx_compress_scope", default=None)


def check_scope(name: str) -> str:
    """Return the scope (a tenant's or user's id) as it is. Raise ConfigError if it is blank or not a str."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"scope={name!r}: give the tenant's or user's id as a str that is not blank")
    return name


def escaped_markers(text: str) -> str:
    """Return the text with the colon of each marker removed, so that nothing in it can be read as a marker.

    Removing a bracket is not enough, because the text or the prompt's template may have another one before the marker.
    """
    return _MARKER.sub(lambda match: match[0].replace(":", ""), text)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Let markers that are written and read inside the `with` block belong to the tenant or user `name`.

    The scope is in a context variable, which asyncio tasks and `asyncio.to_thread` inherit, but plain threads do not.
    Raises ConfigError if the block ends in another context than it began in.
    """
    token = _scope.set(check_scope(name))
    try:
        yield
    finally:
        try:
            _scope.reset(token)
        except ValueError as error:  # raised in a context other than that of the beginning
            raise ConfigError(
                f"scope({name!r}) ended in another thread or context than it began in, as in a generator or dependency "
                "that a web server runs in threads, so the block may have run without it: write `async def`, or give "
                "`scope=` to the classes"
            ) from error


def current_scope() -> str | None:
    """Return the scope of the innermost `with scope(...)` block, or None outside of such blocks."""
    return _scope.get()


@dataclass(frozen=True)
class Marker:
    """A marker with a valid signature, as `Signer.split` finds it in a text."""

    id: str  # the 20 letters
    slots: int  # number of slots that the prompt shows
    shown: int | None = None  # characters of the passage's text before the marker; None if only slots are shown
    scope: str = field(default=DEFAULT_SCOPE, compare=False)
    text: str = field(default="", compare=False)  # the whole marker, as found

    @property
    def passage(self) -> str:
        """The letters that name the marker's passage, the same at every ratio."""
        return self.id[:_PASSAGE_LETTERS]

    @property
    def factor(self) -> int:
        """Number of neighboring slots, at the store's base ratio, that are merged into one."""
        return int(self.id[_PASSAGE_LETTERS:].translate(_LETTERS_TO_HEX), 16) + 1


class MarkedPassage(NamedTuple):
    """A marker, and the parts before it that show its passage's text, with the space between."""

    shown: list[str | Marker]
    marker: Marker


def marked_passages(parts: Sequence[str | Marker]) -> list[str | MarkedPassage]:
    """Return the parts of a text, as `Signer.split` finds them, with each marker's passage together."""
    found: list[str | MarkedPassage] = []
    for part in parts:
        if isinstance(part, str):
            found.append(part)
            continue
        shown: list[str | Marker] = []
        left = part.shown + 1 if part.shown else 0
        while left > 0 and found:
            last = found[-1] if isinstance(found[-1], str) else found[-1].marker
            size = len(last if isinstance(last, str) else last.text)
            if isinstance(last, Marker) and (last.shown or size > left):  # another passage's: the text was altered
                break
            found.pop()
            if isinstance(last, str) and size > left:
                found.append(last[:-left])
                last = last[-left:]
            shown.insert(0, last)
            left -= size
        found.append(MarkedPassage(shown, part))
    return found


def read_parts(found: Sequence[str | MarkedPassage]) -> list[str | Marker]:
    """Return the parts that a decoder reads, without markers that only say whose text is before them."""
    parts: list[str | Marker] = []
    for part in found:
        if isinstance(part, str):
            parts.append(part)
        elif part.marker.slots or part.marker.shown is None:
            parts += [*part.shown, part.marker]
        elif part.shown:
            *shown, last = part.shown
            parts += [*shown, last.removesuffix(" ") if isinstance(last, str) else last]
    return parts


class Signer:
    """Writes and reads markers, and signs records, with one secret key.

    Args:
        key: at least 16 bytes that only the application knows; ConfigError for anything else.
        fingerprint: the bundle's fingerprint, on which the letters that name a passage depend.
    """

    def __init__(self, key: bytes, fingerprint: str) -> None:
        if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
            given = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ConfigError(
                f"a marker key is {MIN_KEY_BYTES} bytes or more, got {given}: give secrets.token_bytes(32); keep it"
            )
        self._key = key
        self.fingerprint = fingerprint

    def passage(self, text: str) -> str:
        """Return the 17 letters that name a passage with this text."""
        return self._letters(_PASSAGE_LETTERS, "passage", self.fingerprint, text)

    def transient(self, *fields: str) -> str:
        """Return the 17 letters that name slots that are not stored. `fields` tell these slots from others."""
        return self._letters(_PASSAGE_LETTERS, "transient", self.fingerprint, *fields)

    def write(self, passage: str, factor: int, slots: int, scope: str, shown: int | None = None) -> str:
        """Return the marker of a passage (its 17 letters) with `slots` slots, each merged from `factor` stored ones.

        `shown` is how many characters of the passage's text the prompt shows before the marker and a space, or None if
        it shows no text beside slots.

        Raises RatioError for a factor below 1 or above 4096.
        """
        if not 1 <= factor <= MAX_FACTOR:
            raise RatioError(f"cannot merge {factor} slots into one: a marker holds factors of 1 to {MAX_FACTOR}")
        id = passage + f"{factor - 1:0{_FACTOR_LETTERS}x}".translate(_HEX_TO_LETTERS)
        counts = f"{slots}" if shown is None else f"{slots}t{shown}"
        return f"[[ctx:{id}.{counts}.{self._signature(scope, id, counts)}]]"

    def sign(self, *fields: str) -> str:
        """Return 32 letters that nobody without the key can make for these fields, such as those of a stored record."""
        return self._letters(_RECORD_SIGNATURE_LETTERS, "record", self.fingerprint, *fields)

    def split(self, text: str, scope: str, on_unreadable: OnUnreadable = "text") -> list[str | Marker]:
        """Return text parts and this scope's markers, in order. Joined, they are the text, and no part is empty.

        A marker with a bad signature stays text or, if `on_unreadable` is "error", raises UnreadableMarkerError. A
        truncated marker (some tools shorten prompts) stays text. One warning is logged for all that stay text.
        """
        parts: list[str | Marker] = []
        start = 0
        for match in _MARKER.finditer(text):
            id, counts, signature = match.groups()
            signed = hmac.compare_digest(signature, self._signature(scope, id, counts))
            if not signed and on_unreadable == "error":
                raise UnreadableMarkerError(
                    f"{match[0]} was not made with this key for scope {scope!r}, or was changed: give the "
                    "postprocessor and the LLM the same scope and key (CTX_COMPRESS_KEY), retrieve again, or choose "
                    "on_unreadable='text' to keep such markers as text"
                )
            if not signed:
                continue
            if match.start() > start:
                parts.append(text[start : match.start()])
            slots, beside, shown = counts.partition("t")
            parts.append(Marker(id, int(slots), int(shown) if beside else None, scope, match[0]))
            start = match.end()
        if start < len(text):
            parts.append(text[start:])
        refused = text.count(_OPENING) - sum(isinstance(part, Marker) for part in parts)
        if refused:
            logger.warning(
                "%d marker(s) in the text were not made with this key for scope %r, or were cut: left as literal text",
                refused,
                scope,
            )
        return parts

    def _signature(self, scope: str, id: str, counts: str) -> str:
        return self._letters(_SIGNATURE_LETTERS, "marker", scope, id, counts)

    def _letters(self, length: int, *fields: str) -> str:
        # Each field is preceded by its length, so that no two lists of fields give the same message.
        encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
        message = b"".join(len(field).to_bytes(8, "big") + field for field in encoded)
        return hmac.digest(self._key, message, hashlib.sha256).hex()[:length].translate(_HEX_TO_LETTERS)
