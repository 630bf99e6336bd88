"""Errors of the API, in the form of OpenAI's: a status, and an object of JSON that names the field."""

from typing import Any

from starlette.responses import JSONResponse, Response

_MOST_CHARACTERS = 1000  # of a message, which may have a value of the body
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people: what is wrong, and the rule. Its middle is left out if it is long, and halves of surrogate
            pairs, which UTF-8 cannot hold, are written as escapes.
        field: of the body, or None.
        headers: of the answer.
    """

    def __init__(self, status: int, message: str, field: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[: _MOST_CHARACTERS // 2]}...{message[-_MOST_CHARACTERS // 2 :]}"
        self.status, self.message, self.field, self.headers = status, _encodable(message), field, headers

    def body(self) -> dict[str, Any]:
        """The object of JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        field = None if self.field is None else _encodable(self.field)
        return {"error": {"message": self.message, "type": kind, "param": field, "code": None}}

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def overloaded(waiting: int) -> ApiError:
    """The 429 of a queue that is full."""
    message = f"{waiting} requests wait already; try again later"
    return ApiError(429, message, headers={"Retry-After": "1"})


def unavailable(status: str) -> ApiError:
    """The 503 of an engine that is not ready."""
    reasons = {
        "loading": "the model is not ready yet: its weights are read, or its programs are compiled",
        "draining": "the server is ending and takes no more requests",
        "failed": "the engine stopped",
    }
    return ApiError(503, reasons.get(status, status), headers={"Retry-After": "5"})
