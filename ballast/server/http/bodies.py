"""Estimate the cost of JSON bodies before decoding them.

A body costs memory and time by the number of its values, not by its bytes: a million `{}` are 3 MB,
but ten seconds of validation and a gigabyte of objects. `weight` is counted on the undecoded bytes,
at the speed of `memchr`; `access.gate` refuses bodies that weigh too much.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.types import Receive

SMALL_BYTES = 64 << 10
"""Longest body, in bytes, that is weighed and decoded on the event loop: it takes a millisecond."""
MOST_WEIGHT = 1 << 18
"""Most weight of one body, where no model's context needs more. Decoding and validating it holds
the interpreter lock for some ten milliseconds at a time."""
WEIGHT_BYTES = 40
"""Bytes of memory that a decoded body takes for each unit of its weight, beside its texts."""
_LIST_WEIGHT = 4
"""Weight of a list or an object; a text or a key weighs 2 (its quotes), and any value 1 (its
comma)."""
_WINDOW = 1 << 18
"""Bytes that are weighed in one piece: the interpreter lock can change hands in between."""

LARGE = ThreadPoolExecutor(1, "bodies")
"""One thread, so that of several large bodies one is decoded at a time; the others wait as
bytes."""


def weight(body: bytes, most: int) -> int:
    """Weigh a JSON text by the cost of its values.

    The result is an upper bound if that is within `most`; else it is exact, or any number above
    `most` once the weight exceeds it.
    """
    bound = _weight(body)
    if bound <= most:
        return bound
    total, start, quoted = 0, 0, False
    while start < len(body) and total <= most:
        window = body[start : start + _WINDOW]
        if start + len(window) < len(body) and _ends_within_escape(window):
            window = window[:-1]
        start += len(window)
        parts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        total += _weight(b"".join(parts[quoted::2])) + len(parts) - 1
        quoted ^= len(parts) % 2 == 0
    return total


def _weight(text: bytes) -> int:
    lists = text.count(b"[") + text.count(b"{")
    return text.count(b",") + text.count(b'"') + _LIST_WEIGHT * lists


def _ends_within_escape(text: bytes) -> bool:
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


async def weigh(body: bytes, most: int) -> int:
    """Call `weight`, on a thread if the body is large."""
    if len(body) <= SMALL_BYTES:
        return weight(body, most)
    return await asyncio.get_running_loop().run_in_executor(LARGE, weight, body, most)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Wrap `receive` so that it first returns the whole body, which has been read already."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying() -> Any:
        return pending.pop() if pending else await receive()

    return replaying
