"""Bodies of requests: bytes, counted while they arrive, that must be one object of JSON."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from starlette.requests import Request

from jmx.serving.api.errors import ApiError

MOST_BYTES = 8 << 20
# Reading more takes so long that other requests are answered meanwhile: one body at a time, as Python's lock is held.
_LARGE = 1 << 18
_reader = ThreadPoolExecutor(1, "jmx-body")


async def read_object(request: Request) -> dict[str, Any]:
    """The object in a body.

    Raises:
        ApiError: 413 for a body of more than `MOST_BYTES`, of which no more is read; 400 for one that is not an object
            of JSON in UTF-8, or that has a key twice, NaN or an infinity, which JSON lacks.
    """
    size, chunks = 0, []
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > MOST_BYTES:
        raise _too_large()
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST_BYTES:
            raise _too_large()
        chunks.append(chunk)
    data = b"".join(chunks)
    if size <= _LARGE:
        return parse(data)
    return await asyncio.get_running_loop().run_in_executor(_reader, parse, data)


def parse(data: bytes) -> dict[str, Any]:
    """The object in the bytes of a body. ApiError 400 as `read_object`."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body must be UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ApiError(400, "the body must be JSON of fewer levels") from error
    except ValueError as error:
        raise ApiError(400, f"the body must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be an object of JSON, and is a {type(value).__name__}")
    return value


def _too_large() -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(413, f"the body must have at most {MOST_BYTES} bytes", headers={"Connection": "close"})


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:50]!r} is there twice")
        found[key] = value
    return found
