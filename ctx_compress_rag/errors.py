"""The library's errors. Each message names the value at fault and the remedy."""


class CtxCompressError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(CtxCompressError, ValueError):
    """A configuration, recipe or argument has an unknown or impossible value."""


class BundleError(CtxCompressError):
    """A bundle is missing, damaged or of an unsupported format."""


class FingerprintMismatchError(CtxCompressError):
    """Stored soft contexts were made by another bundle than the one in use."""


class TimeUpError(CtxCompressError):
    """Training stopped at its time limit, and a checkpoint is saved: the same command resumes."""


class StoreError(CtxCompressError):
    """The store cannot be opened, read or written as asked."""


class StoreWriteError(StoreError):
    """The store cannot be written to now: it is read-only, its disk is full, or Chroma refuses. Reading may work."""


class StoreLockedError(StoreWriteError):
    """Another process is writing to the same store path, for longer than this one waits."""


class PayloadError(StoreError, ValueError):
    """A soft context cannot be encoded or decoded: non-finite, truncated or of the wrong shape."""


class MissingPassageError(CtxCompressError, KeyError):
    """A passage that was asked for is not in the store."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class UnreadableMarkerError(CtxCompressError, ValueError):
    """A text has a marker's form and cannot be read: of another key or scope, or changed since it was written."""


class DecoderMemoryError(CtxCompressError, MemoryError):
    """The decoder ran out of memory while it read a prompt or answered it."""


class ServerError(CtxCompressError):
    """The server that runs the decoder cannot be reached, refuses a request, or ends in the middle of an answer."""


class JudgeError(CtxCompressError):
    """The language model that judges answers failed. Answers that a command wrote are kept: run it again."""


class WorkerError(CtxCompressError):
    """Workers of a Ray cluster did not give back all passages. What came back is stored: call again to resume."""


class RatioError(ConfigError):
    """The ratio asked for cannot be made from what is stored."""


class DataError(CtxCompressError, ValueError):
    """Training or evaluation data is malformed, or held-out questions would reach training."""
