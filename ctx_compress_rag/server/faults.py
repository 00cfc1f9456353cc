"""Turn errors into replies: clients learn what they can fix, and the log says the rest."""

import logging
from typing import Any

from ctx_compress_rag import errors

logger = logging.getLogger(__name__)


class RequestError(Exception):
    """A request refused with an HTTP status; `code` (OpenAI's) and `param` (the field at fault) are null if None."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, "invalid_request_error", param=param, code=code)


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return an error's HTTP status and body, without paths and names of other tenants."""
    match error:
        case RequestError():
            return error.status, error.body
        case errors.MissingPassageError():
            message = "a marker's passage was deleted or its text changed: retrieve or compress again"
            return 404, error_body(message, "invalid_request_error", code="passage_not_found")
        case errors.UnreadableMarkerError():
            # The error's own advice is for the operator: a client has neither the key nor on_unreadable.
            what = str(error).partition(": give")[0]
            return 400, error_body(
                f"{what}: send its text to POST /v1/compress with this API key", "invalid_request_error"
            )
        case errors.ConfigError():
            return 400, error_body(str(error), "invalid_request_error")
        case errors.DecoderMemoryError():
            return 503, error_body(str(error), "server_error", code="out_of_memory")
        case errors.ServerError():
            logger.error("the decoder's server: %s", error)
            return 502, error_body("the server that runs the decoder failed to answer: try again", "server_error")
        case errors.StoreWriteError():
            logger.error("the store cannot be written: %s", error)
            return 503, error_body("the store cannot be written to now: try again later", "server_error")
    logger.error("a request failed", exc_info=error)
    return 500, error_body("the server failed to answer: its log says why", "server_error")
