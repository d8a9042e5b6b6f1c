"""What a client has is not told again, whatever a new worker repeats."""

from __future__ import annotations

import asyncio

import pytest

from ballast.cluster.outlet import OpenRequest, Outlet
from ballast.core.errors import BrokenPromise
from ballast.core.event import Embedded, Finished, Output, PromptScores, TokenOut
from ballast.core.request import Submission


@pytest.fixture
def request_() -> OpenRequest:
    submission = Submission(id="r", model="m", prompt=(1, 2, 3, 4, 5, 6), max_tokens=4)
    return OpenRequest(submission, Outlet(["r"], lambda ids: None))


def scores(start: int, *logprobs: float) -> PromptScores:
    return PromptScores("r", start, logprobs, tuple(((7, x),) for x in logprobs))


def test_a_token_is_told_once(request_: OpenRequest) -> None:
    one, two = TokenOut("r", 11, 0), TokenOut("r", 12, 1)
    assert [request_.news(o) for o in (one, two, one, two)] == [one, two, None, None]
    assert request_.told == [11, 12]


def test_a_gap_is_a_broken_promise(request_: OpenRequest) -> None:
    request_.news(TokenOut("r", 11, 0))
    with pytest.raises(BrokenPromise, match="token 2 of r came after 1"):
        request_.news(TokenOut("r", 13, 2))


def test_the_next_worker_goes_on_after_what_was_told(request_: OpenRequest) -> None:
    assert request_.to_send() == request_.submission
    request_.news(TokenOut("r", 11, 0))
    again = request_.to_send()
    assert again.resumed == (11,)


def test_scores_and_embeddings_are_told_once(request_: OpenRequest) -> None:
    first = scores(1, -1.0, -2.0)
    assert request_.news(first) == first
    assert request_.news(first) is None
    assert request_.news(scores(1, -1.0, -2.0, -3.0)) == scores(3, -3.0)
    assert request_.news(scores(4, -4.0, -5.0)) == scores(4, -4.0, -5.0)
    embedded = Embedded("r", b"\0\0\0\0")
    assert [request_.news(embedded), request_.news(embedded)] == [embedded, None]
    end: Output = Finished("r", "stop", 6, 0, 0, 0)
    assert request_.news(end) == end


def test_a_reader_waits_for_news_but_not_for_ever() -> None:
    async def main() -> list[list[Output]]:
        outlet = Outlet(["r"], lambda ids: None)
        nothing = await outlet.take(0.0)
        waiting = asyncio.ensure_future(outlet.take(60.0))
        await asyncio.sleep(0)
        outlet.put(TokenOut("r", 1, 0))
        outlet.put(TokenOut("r", 2, 1))
        together = await waiting
        outlet.put(TokenOut("r", 3, 2))
        return [nothing, together, await outlet.take()]

    one, two, three = (TokenOut("r", i + 1, i) for i in range(3))
    assert asyncio.run(main()) == [[], [one, two], [three]]


def test_news_outlast_a_reader_that_left() -> None:
    async def main() -> list[Output]:
        outlet = Outlet(["r"], lambda ids: None)
        waiting = asyncio.ensure_future(outlet.take())
        await asyncio.sleep(0)
        outlet.put(TokenOut("r", 1, 0))
        waiting.cancel()
        await asyncio.wait({waiting})
        return await outlet.take()

    assert asyncio.run(main()) == [TokenOut("r", 1, 0)]
