"""Bodies are decoded a few at a time, API keys in turn, and the same whatever their length."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ballast.server.http.bodies import SMALL_BYTES
from ballast.server.http.json_route import TINY_BYTES, BodyDecoder

DEADLINE = 240.0


def body(size: int) -> bytes:
    return json.dumps("x" * (size - 2)).encode()


def decoded(text: bytes) -> Any:
    return asyncio.run(BodyDecoder().decode(text, ""))


def test_one_body_is_decoded_in_a_turn_of_the_loop_and_keys_alternate() -> None:
    turn = 0
    at: list[tuple[str, int]] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        decoder = BodyDecoder()

        async def receive(key: str) -> None:
            await decoder.decode(body(SMALL_BYTES), key)
            at.append((key, turn))

        counting = asyncio.ensure_future(count_turns())
        await asyncio.gather(*(receive(key) for key in "xxxxy"))
        counting.cancel()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
    assert [key for key, _ in at] == ["x", "x", "y", "x", "x"]
    assert len({turn for _, turn in at}) == len(at)


def test_tiny_bodies_wait_for_nobody() -> None:
    async def scenario() -> None:
        decoder = BodyDecoder()
        await decoder.decode(body(SMALL_BYTES), "x")
        waiting = asyncio.ensure_future(decoder.decode(body(TINY_BYTES + 1), "x"))
        decode = decoder.decode(body(TINY_BYTES), "x")
        with pytest.raises(StopIteration):  # it ends without giving way to the loop
            decode.send(None)
        assert not waiting.done()
        await waiting

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_a_client_that_leaves_gives_its_turn_to_the_next() -> None:
    async def scenario() -> None:
        decoder = BodyDecoder()
        tasks = [asyncio.ensure_future(decoder.decode(body(SMALL_BYTES), "x")) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert len(await tasks[2]) == SMALL_BYTES - 2

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


@pytest.mark.parametrize("size", [100, SMALL_BYTES, SMALL_BYTES + 1])
def test_a_byte_order_mark_is_skipped(size: int) -> None:
    assert len(decoded(b"\xef\xbb\xbf" + body(size - 3))) == size - 5


@pytest.mark.parametrize("size", [100, SMALL_BYTES + 100])
@pytest.mark.parametrize("text", [b"nan", b"\xff", b"1" * 5_000])
def test_what_is_no_json_is_refused_whatever_its_length(text: bytes, size: int) -> None:
    with pytest.raises(json.JSONDecodeError):
        decoded(b'{"a": ' + text + b"}" + b" " * size)
