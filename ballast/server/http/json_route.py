"""Decode JSON bodies: large ones off the event loop, and others one in each turn of it.

A body of 64 KiB can hold 1,900 messages, which take 5 ms to decode, validate and convert, so that
some hundred of them at once would stop the event loop for a second. `app` uses `json_route` for all
routes.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute

from ballast.server.http.bodies import LARGE, SMALL_BYTES
from ballast.server.http.fair_turns import FairTurns
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import context_of

TINY_BYTES = 4 << 10
"""Longest body, in bytes, that is decoded without waiting for a turn: it holds values for a
fraction of a millisecond."""


class BodyDecoder:
    """Decodes bodies of one application in turn, API key by API key."""

    def __init__(self) -> None:
        self._small, self._large = FairTurns(), FairTurns()

    async def decode(self, body: bytes, key: str) -> Any:
        """Decode a body of the API key named `key`. Raises JSONDecodeError."""
        loop = asyncio.get_running_loop()
        if len(body) <= TINY_BYTES:
            return _decoded_small(body)
        if len(body) <= SMALL_BYTES:
            await self._small.acquire(key)
            # What the route does with the body until it first waits is part of this turn.
            loop.call_soon(self._small.release)
            return _decoded_small(body)
        async with self._large.turn(key):
            return await loop.run_in_executor(LARGE, _decoded_large, body)


def json_route() -> type[APIRoute]:
    """Create the class of one application's routes, whose bodies are decoded in turn."""
    decoder = BodyDecoder()

    class JsonRequest(Request):
        async def json(self) -> Any:
            return await decoder.decode(await self.body(), context_of(self.scope).caller.name)

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Any:
            handle = super().get_route_handler()

            async def handled(request: Request) -> Any:
                decoded = JsonRequest(request.scope, request.receive)
                if self.body_field is not None and await decoded.body():
                    check_json(request.headers.get("content-type"))
                return await handle(decoded)

            return handled

    return JsonRoute


def check_json(content_type: str | None) -> None:
    """Raise Fault (400) for a body of another type than JSON: web pages can send such bodies to
    other origins without asking them."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        header = f"Content-Type {content_type[:80]!r}" if content_type else "no Content-Type"
        why = f"the request has {header}: send JSON, with `Content-Type: application/json`"
        raise Fault(400, why, "invalid_request")


def _decoded_small(body: bytes) -> Any:
    # Unlike msgspec it reads NaN and half surrogate pairs: validation names the field with one.
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, too deep
        raise json.JSONDecodeError(str(error), "", 0) from error


def _decoded_large(body: bytes) -> Any:
    # A tenth of `json.loads`' time for numbers, during which nothing else runs.
    try:
        return msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
