"""A worker's token that its model does not have ends its request, and reaches no client."""

from __future__ import annotations

import asyncio

import pytest

from ballast.cluster.loop_timers import LoopTimers
from ballast.cluster.output_stream import OutputStream
from ballast.control.open_request import OpenRequest
from ballast.control.open_requests import OpenRequests
from ballast.control.suspicion import Suspicions
from ballast.core.event import FailedOutput, Output, TokenOutput
from ballast.core.request import Submission
from tests.cluster.fake_device import spec

VOCAB = 10


@pytest.mark.parametrize(
    "wrong",
    [
        TokenOutput("r", -1, 1),
        TokenOutput("r", VOCAB, 1),
        TokenOutput("r", 2, 1, -0.5, ((2, -0.5), (-1, -0.7))),
    ],
)
def test_it_ends_the_request_alone(wrong: TokenOutput) -> None:
    asyncio.run(ends_alone(wrong))


async def ends_alone(wrong: TokenOutput) -> None:
    model = spec("a", vocab=VOCAB)
    requests = OpenRequests(Suspicions(), LoopTimers(), lambda name: (model, model))
    streams = {id: OutputStream([id], requests.withdraw, requests.set_paused) for id in ("r", "s")}
    sent: list[object] = []
    requests.worker_ready(sent.append)
    requests.add(
        OpenRequest(Submission(id=id, model="a", prompt=(1,), max_tokens=9), stream)
        for id, stream in streams.items()
    )
    for output in (TokenOutput("r", VOCAB - 1, 0), wrong, TokenOutput("s", 0, 0)):
        requests.deliver(output)
    kinds: list[tuple[str, type[Output]]] = [
        (o.request_id, type(o)) for stream in streams.values() for o in await stream.take()
    ]
    assert kinds == [("r", TokenOutput), ("r", FailedOutput), ("s", TokenOutput)]
    assert list(requests) == ["s"]
