"""HttpTarget against a small server on loopback that can also behave badly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ballast.bench.http import HttpTarget
from ballast.bench.record import RequestRecord, RequestRecorder, prompts_of, submission_for
from ballast.bench.replay import WorkloadReplay, replay
from ballast.core.clock import Clock
from ballast.live.inbox import MonotonicClock
from ballast.server.observe.server_state import DeviceNow, ServerNow
from ballast.workload.workload import Workload, WorkloadRequest
from tests.bench.test_bench_sample import model

seen: list[dict[str, Any]] = []
arrived = threading.Event()
disconnected = threading.Event()

DECIDED = [
    {"time": 999.0, "action": "Activate", "model": "a"},
    {"time": 1e9, "action": "Evict", "model": "a", "why": "idle", "refused": "it is busy"},
]
STATE = ServerNow(
    version="x", time=1000.0, uptime=5.0, preset="balloon", status="ok", reason=None, restarts=0,
    open=0, device="cpu:0", page_bytes=1024, total=6, free=2, reclaiming=0, owners={}, jobs=0,
    models=[], failed={}, decisions=DECIDED,
    devices=[
        DeviceNow(
            "cpu:0", "ok", None, 0, 0, 1024, 6, 2, 0, {"kv:a": 3, "arena:lanes": 1}, 0,
            [model("a", cached_pages=1, waiting=4)], {},
        )
    ],
)  # fmt: skip


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def chunk(text: str, finish: str | None = None) -> str:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}], usage=None)


async def stream(model: str, n: int) -> AsyncIterator[str]:
    if model == "hang":
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            disconnected.set()
    yield ": a comment\n\n"
    if model == "bytes":
        yield event(choices=3)
        return
    for _ in range(n - 1):
        yield chunk("x")
    if model == "broken":
        yield event(error={"message": "the worker died", "type": "server_error"})
        return
    if model == "cut":
        return
    if model == "held":
        yield chunk("")
        yield chunk("xx", "length")
    else:
        yield chunk("x", "length")
    usage = {"prompt_tokens": 5, "completion_tokens": n, "total_tokens": n + 5}
    if model == "cached":
        usage["prompt_tokens_details"] = {"cached_tokens": 4}  # type: ignore[assignment]
    if model != "unmeasured":
        yield event(choices=[], usage=usage)
    yield "data: [DONE]\n\n"


async def completions(request: Request) -> Response:
    body = await request.json()
    seen.append({**body, "authorization": request.headers.get("authorization")})
    if body["model"] == "absent":
        error = {"message": "no such model", "type": "invalid_request_error", "code": "x"}
        return JSONResponse({"error": error}, 404)
    if body["model"] == "proxy":
        return PlainTextResponse("bad gateway", 502)
    return StreamingResponse(
        stream(body["model"], body["max_tokens"]), media_type="text/event-stream"
    )


async def state(request: Request) -> Response:
    return Response(msgspec.json.encode(STATE))


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/admin/state", state),
        ]
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # now, so that the first request need not wait for the thread
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


def send(base_url: str, model: str, n: int = 3, count: int = 1, **more: Any) -> WorkloadReplay:
    requests = [
        WorkloadRequest(id=i, at=0.0, model=model, prompt_tokens=5, output_tokens=n)
        for i in range(count)
    ]

    async def go() -> WorkloadReplay:
        clock: Clock = MonotonicClock()
        async with HttpTarget(base_url, clock, more.pop("api_key", None)) as target:
            workload = Workload.of("w", requests)
            return await replay(workload, target, prompts_of({model: 99}), **more)

    return asyncio.run(go())


def one(base_url: str, model: str, n: int = 3, **more: Any) -> RequestRecord:
    return send(base_url, model, n, **more).records[0]


def test_a_streamed_answer(base_url: str) -> None:
    seen.clear()
    record = one(f"{base_url}/v1/", "fine", api_key="secret")
    assert record.answered, record.error
    assert (record.prompt_tokens, record.output_tokens, len(record.token_times)) == (5, 3, 3)
    assert record.ttft is not None
    assert record.e2e is not None
    assert 0 <= record.ttft <= record.e2e
    assert list(record.token_times) == sorted(record.token_times)
    (body,) = seen
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "fine",
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "authorization": "Bearer secret",
    }


def test_text_held_back_to_the_end_is_no_token_more(base_url: str) -> None:
    record = one(base_url, "held")
    assert (record.output_tokens, len(record.token_times)) == (3, 3)


def test_many_at_once(base_url: str) -> None:
    result = send(base_url, "fine", n=4, count=40)
    assert [r.output_tokens for r in result.records] == [4] * 40


def test_usage_is_optional_and_may_tell_of_cached_tokens(base_url: str) -> None:
    record = one(base_url, "unmeasured")
    assert (record.prompt_tokens, record.output_tokens) == (5, 3)
    assert one(base_url, "cached").cached_tokens == 4


@pytest.mark.parametrize(
    ("model", "reason", "tokens"),
    [
        ("absent", "HTTP 404: no such model", 0),
        ("proxy", "HTTP 502: bad gateway", 0),
        ("broken", "the worker died", 2),
        ("cut", "the stream ended before [DONE]", 2),
    ],
)
def test_failures_say_why(base_url: str, model: str, reason: str, tokens: int) -> None:
    record = one(base_url, model)
    assert (record.error, record.output_tokens) == (reason, tokens)


def test_a_stream_of_something_else(base_url: str) -> None:
    assert "something else than chunks" in (one(base_url, "bytes").error or "")


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        record = one(f"http://127.0.0.1:{taken.getsockname()[1]}", "fine")
    assert record.error is not None
    assert record.error.startswith("ConnectError")


def test_giving_up_closes_the_connection(base_url: str) -> None:
    request = WorkloadRequest(id=0, at=0.0, model="hang", prompt_tokens=1, output_tokens=1)

    async def go() -> None:
        async with HttpTarget(base_url, MonotonicClock()) as target:
            run = asyncio.create_task(target.run(submission_for(request, (1,)), RequestRecorder()))
            assert await asyncio.to_thread(arrived.wait, 30)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert await asyncio.to_thread(disconnected.wait, 30)

    asyncio.run(go())


def test_memory_and_decisions_are_the_servers(base_url: str) -> None:
    result = send(base_url, "fine")
    (device,) = result.memory[0].devices.items()
    assert device[0] == "cpu:0"
    assert device[1].owners == {
        "kv:a": 2048, "cached:a": 1024, "arena:lanes": 1024, "free": 2048, "reclaiming": 0,
    }  # fmt: skip
    assert device[1].waiting == {"a": 4}
    (decision,) = result.decisions  # the one of before the workload is none of the run's
    assert (decision.device, decision.action, decision.model) == ("cpu:0", "Evict", "a")
    assert (decision.why, decision.refused) == ("idle", "it is busy")
    assert 0 <= decision.at - (1e9 - 1000) < 60, "the server was at 1000 when it showed its state"


def test_no_memory_where_there_is_no_server() -> None:
    async def ask() -> object:
        async with HttpTarget("http://127.0.0.1:9", MonotonicClock()) as target:
            return await target.memory(), await target.decisions(0.0)

    assert asyncio.run(ask()) == ({}, ())
