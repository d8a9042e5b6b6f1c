"""What a client has is not told again, whatever a new worker repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ballast.cluster.output_stream import (
    MOST_UNREAD,
    MOST_UNREAD_EACH,
    UNITS_PER_TAKE,
    OutputStream,
    size,
)
from ballast.control.open_request import OpenRequest
from ballast.core.errors import BrokenPromise
from ballast.core.event import (
    EmbeddingOutput,
    FinishedOutput,
    Output,
    PromptScoresOutput,
    TokenOutput,
)
from ballast.core.request import Submission


@pytest.fixture
def request_() -> OpenRequest:
    submission = Submission(id="r", model="m", prompt=(1, 2, 3, 4, 5, 6), max_tokens=4)
    stream = OutputStream(["r"], lambda ids: None, lambda ids, paused: None)
    return OpenRequest(submission, stream, arrived=0.0)


def scores(start: int, *logprobs: float) -> PromptScoresOutput:
    return PromptScoresOutput("r", start, logprobs, tuple(((7, x),) for x in logprobs))


def test_a_token_is_told_once(request_: OpenRequest) -> None:
    one, two = TokenOutput("r", 11, 0), TokenOutput("r", 12, 1)
    assert [request_.undelivered_part(o, 0.0) for o in (one, two, one, two)] == [
        one,
        two,
        None,
        None,
    ]
    assert request_.output_tokens == [11, 12]


def test_a_gap_is_a_broken_promise(request_: OpenRequest) -> None:
    request_.undelivered_part(TokenOutput("r", 11, 0), 0.0)
    with pytest.raises(BrokenPromise, match="token 2 of r came after 1"):
        request_.undelivered_part(TokenOutput("r", 13, 2), 0.0)


def test_the_next_worker_goes_on_after_what_was_told(request_: OpenRequest) -> None:
    assert request_.next_submission(0.0) == request_.submission
    request_.undelivered_part(TokenOutput("r", 11, 0), 0.0)
    again = request_.next_submission(0.0)
    assert again.resumed == (11,)


def test_scores_and_embeddings_are_told_once(request_: OpenRequest) -> None:
    first = scores(1, -1.0, -2.0)
    assert request_.undelivered_part(first, 0.0) == first
    assert request_.undelivered_part(first, 0.0) is None
    assert request_.undelivered_part(scores(1, -1.0, -2.0, -3.0), 0.0) == scores(3, -3.0)
    assert request_.undelivered_part(scores(4, -4.0, -5.0), 0.0) == scores(4, -4.0, -5.0)
    embedded = EmbeddingOutput("r", b"\0\0\0\0")
    assert [request_.undelivered_part(embedded, 0.0), request_.undelivered_part(embedded, 0.0)] == [
        embedded,
        None,
    ]
    end: Output = FinishedOutput("r", "stop", 6, 0, 0, 0)
    assert request_.undelivered_part(end, 0.0) == end


def test_a_reader_waits_for_news_but_not_for_ever() -> None:
    async def main() -> list[list[Output]]:
        stream = OutputStream(["r"], lambda ids: None, lambda ids, paused: None)
        nothing = await stream.take(0.0)
        waiting = asyncio.ensure_future(stream.take(60.0))
        await asyncio.sleep(0)
        stream.put(TokenOutput("r", 1, 0))
        stream.put(TokenOutput("r", 2, 1))
        together = await waiting
        stream.put(TokenOutput("r", 3, 2))
        return [nothing, together, await stream.take()]

    one, two, three = (TokenOutput("r", i + 1, i) for i in range(3))
    assert asyncio.run(main()) == [[], [one, two], [three]]


def test_news_outlast_a_reader_that_left() -> None:
    async def main() -> list[Output]:
        stream = OutputStream(["r"], lambda ids: None, lambda ids, paused: None)
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        stream.put(TokenOutput("r", 1, 0))
        waiting.cancel()
        await asyncio.wait({waiting})
        return await stream.take()

    assert asyncio.run(main()) == [TokenOutput("r", 1, 0)]


class Paced:
    """An stream of `n` requests, and how it has them paced."""

    def __init__(self, n: int = 1) -> None:
        self.calls: list[tuple[set[str], bool]] = []
        ids = [f"r{i}" for i in range(n)]
        self.stream = OutputStream(ids, lambda ids: None, self.pace)

    def pace(self, ids: Sequence[str], paused: bool) -> None:
        self.calls.append((set(ids), paused))

    def fill(self, units: int, top: int = 0) -> list[Output]:
        """So many units of tokens with `top` alternatives each."""
        alternatives = tuple((k, -1.0) for k in range(top))
        put: list[Output] = [
            TokenOutput("r0", 5, i, -1.0, alternatives) for i in range(units // (1 + top))
        ]
        for output in put:
            self.stream.put(output)
        return put

    def read(self) -> list[Output]:
        """What a reader gets without waiting."""

        async def read() -> list[Output]:
            return await self.stream.take(0.0)

        return asyncio.run(read())


@pytest.mark.parametrize(("n", "top"), [(1, 0), (1, 20), (16, 0), (128, 5)])
def test_what_nobody_reads_is_bounded_and_read_in_parts(n: int, top: int) -> None:
    paced = Paced(n)
    stream = paced.stream
    assert stream.most == MOST_UNREAD + n * MOST_UNREAD_EACH
    put = paced.fill(stream.most, top)
    assert paced.calls == []
    put += paced.fill(3 * (1 + top), top)  # what was under way
    everyone = {f"r{i}" for i in range(n)}
    assert paced.calls == [(everyone, True)]
    found: list[Output] = []
    while stream.unread >= stream.most / 4:
        part = paced.read()
        assert sum(map(size, part)) <= UNITS_PER_TAKE + top
        found += part
        assert len(paced.calls) == 1 + (stream.unread < stream.most / 4)
    assert paced.calls[1:] == [(everyone, False)]
    while len(found) < len(put):
        found += paced.read()
    assert found == put
    assert (stream.unread, stream.paused) == (0, False)


def test_units_are_those_of_all_that_clients_are_told() -> None:
    assert size(TokenOutput("r", 1, 0)) == 1
    assert size(TokenOutput("r", 1, 0, -1.0, ((1, -1.0), (2, -2.0)))) == 3
    assert size(PromptScoresOutput("r", 1, (-1.0, -2.0), (((1, -1.0),), ()))) == 3
    assert size(EmbeddingOutput("r", bytes(4 * 4096))) == 129
    assert size(FinishedOutput("r", "stop", 6, 0, 0, 0)) == 1
