"""The library's errors. Each message names the wrong value and says what to do."""

import reprlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE


def short_repr(value: object) -> str:
    """A value as messages show it: at most about 80 characters, however long or deep it is."""
    # YAML of a few lines can hold a value whose whole text takes hours to write.
    return repr(value[:80]) if isinstance(value, str) else reprlib.repr(value)[:80]


class CtxCompressError(Exception):
    """Base class of all errors that this library defines."""


class ConfigError(CtxCompressError, ValueError):
    """A configuration, recipe or argument has an unknown or impossible value."""


class BundleError(CtxCompressError):
    """A bundle is missing, damaged or of an unsupported format."""


class FingerprintMismatchError(CtxCompressError):
    """The stored soft contexts were not made by the bundle in use."""


class TimeUpError(CtxCompressError):
    """Training stopped at its time limit, and a checkpoint is saved: the same command resumes."""


class TrainingError(CtxCompressError):
    """Training failed: its loss or its weights are NaN or infinite, and further steps cannot change that."""


class StoreError(CtxCompressError):
    """The store cannot be opened, read or written as asked."""


class StoreWriteError(StoreError):
    """The store cannot be written to now: it is read-only, its disk is full, or Chroma refuses. Reading may work."""


class StoreLockedError(StoreWriteError):
    """Another process has been writing to the same store path for longer than this one waits."""


class PayloadError(StoreError, ValueError):
    """A soft context cannot be encoded or decoded: non-finite, truncated or of the wrong shape."""


class MissingPassageError(CtxCompressError, KeyError):
    """A requested passage is not in the store."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class UnreadableMarkerError(CtxCompressError, ValueError):
    """Text in a marker's form cannot be read: it was written with another key or scope, or changed since."""


class DecoderMemoryError(CtxCompressError, MemoryError):
    """The decoder ran out of memory while reading or answering a prompt."""


class ServerError(CtxCompressError):
    """The server that runs the decoder cannot be reached, refuses a request, or ends in the middle of an answer."""


class MissingExtraError(CtxCompressError, ImportError):
    """An optional package is needed but not installed."""


class RatioError(ConfigError):
    """The requested ratio cannot be made from the stored slots."""


class DataError(CtxCompressError, ValueError):
    """Training or evaluation data is malformed, or held-out questions would reach training."""


def conversion(error: UnicodeDecodeError) -> str:
    """The command that converts what could not be read to UTF-8, for messages."""
    coding = "UTF-16" if error.object[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "LATIN1"
    return f"iconv -f {coding} -t UTF-8"
