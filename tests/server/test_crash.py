"""A worker of real models killed amid its work: in float32 no client can tell from the tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from openai import AsyncOpenAI

from tests.server.process import ServerProcess

MODELS = ("atlas-chat", "wren-mini")
TOKENS = 120
"""Of each stream, in a context of 512."""
KINDS = ((1, 0.0), (2, 1.0))
"""Seed and temperature of each model's streams."""


class Stream:
    """One request and the tokens told so far."""

    def __init__(self, model: str, seed: int, temperature: float) -> None:
        self._asked: dict[str, Any] = {
            "model": model,
            "prompt": f"Ship {seed}",
            "max_tokens": TOKENS,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,
            "extra_body": {"ignore_eos": True},
        }
        self.tokens: list[str] = []
        self.begun = asyncio.Event()

    async def run(self, client: AsyncOpenAI) -> None:
        async for chunk in await client.completions.create(**self._asked, stream=True):
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    self.tokens += choice.logprobs.tokens or []
            if len(self.tokens) > 5:
                self.begun.set()


async def streamed_amid(
    running: ServerProcess,
    streams: Sequence[Stream],
    amid: Callable[[], None] | None = None,
    then: Callable[[], None] = lambda: None,
) -> list[list[str]]:
    """The tokens of all streams. `amid` is done once one of them has begun and before any ends;
    others may wait for memory. `then` is done when they may go on."""
    async with running.async_client() as client, asyncio.TaskGroup() as group:
        with contextlib.nullcontext() if amid is None else running.holding():
            for stream in streams:
                group.create_task(stream.run(client))
            if amid is not None:
                begun = [asyncio.create_task(stream.begun.wait()) for stream in streams]
                await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
                for task in begun:
                    task.cancel()
                assert all(len(stream.tokens) < TOKENS for stream in streams)
                await asyncio.to_thread(amid)
        await asyncio.to_thread(then)
    return [stream.tokens for stream in streams]


def test_no_token_changes_when_the_worker_is_killed(real: ServerProcess) -> None:
    async def all_of(kill: bool) -> list[list[str]]:
        streams = [Stream(model, *kind) for model in MODELS for kind in KINDS]
        return await streamed_amid(real, streams, real.kill_worker if kill else None)

    undisturbed = asyncio.run(all_of(kill=False))
    worker = real.worker_pid
    assert asyncio.run(all_of(kill=True)) == undisturbed
    assert real.worker_pid != worker
    assert all(len(tokens) == TOKENS for tokens in undisturbed)
    assert len({tuple(tokens) for tokens in undisturbed}) == len(undisturbed)
