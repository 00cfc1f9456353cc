"""The library's errors. Each message names the wrong value and says what to do."""

import reprlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager


def short_repr(value: object) -> str:
    """Return a value as error messages show it, in at most about 80 characters, however long or nested the value is."""
    # YAML of a few lines can hold a value whose whole text takes hours to write.
    return repr(value[:80]) if isinstance(value, str) else reprlib.repr(value)[:80]


class CtxCompressError(Exception):
    """Base class of all errors that this library defines."""


class ConfigError(CtxCompressError, ValueError):
    """Raised for a configuration, recipe or argument with an unknown or impossible value."""


class BundleError(CtxCompressError):
    """Raised if a bundle is missing, damaged or of an unsupported format."""


class FingerprintMismatchError(CtxCompressError):
    """Raised if a store's soft contexts were made with another bundle than the one in use."""


class TimeUpError(CtxCompressError):
    """Raised when training reached its time limit and saved a checkpoint, from which the same command resumes."""


class TrainingError(CtxCompressError):
    """Raised if the loss or the weights are NaN or infinite, which further training steps cannot change."""


class StoreError(CtxCompressError):
    """Raised if the store cannot be opened, read or written to."""


class StoreWriteError(StoreError):
    """Raised if a store is read-only, its disk is full, or Chroma refuses a write. Reading may still work."""


class StoreLockedError(StoreWriteError):
    """Raised if another process or thread has held the locks of the store's folder for longer than the timeout."""


class PayloadError(StoreError, ValueError):
    """Raised if a soft context or its record is unusable (not finite, truncated, changed or of the wrong shape)."""


class MissingPassageError(CtxCompressError, KeyError):
    """Raised if a requested passage is not in the store."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class UnreadableMarkerError(CtxCompressError, ValueError):
    """Raised for text in the form of a marker that was written with another key or scope, or changed afterwards."""


class DecoderMemoryError(CtxCompressError, MemoryError):
    """Raised if the decoder runs out of memory while it reads or answers a prompt."""


class ServerError(CtxCompressError):
    """Raised if the decoder's server cannot be reached, refuses a request, or stops in the middle of an answer."""


class MissingExtraError(CtxCompressError, ImportError):
    """Raised if an optional package is needed but not installed."""


class RatioError(ConfigError):
    """Raised if the requested ratio cannot be made by the compressor, or from the stored slots."""


class DataError(CtxCompressError, ValueError):
    """Raised if training or evaluation data is malformed, or held-out questions are among the training data."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raise a MissingExtraError that says how to install the extra if an import in the `with` block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: run pip install 'ctx-compress-rag[{extra}]'", name=error.name
        ) from error


def conversion_command(error: UnicodeDecodeError) -> str:
    """Return the shell command that converts a file to UTF-8, for the message about bytes that are not UTF-8."""
    coding = "UTF-16" if error.object[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "LATIN1"
    return f"iconv -f {coding} -t UTF-8"
