"""Streams are never continued by other weights than those that they began with."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ballast.cluster.device import RemoteDevice
from ballast.cluster.output_stream import OutputStream
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.control.open_request import OpenRequest
from ballast.control.suspicion import Suspicions
from ballast.core.event import FailedOutput, TokenOutput
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.transport.worker_messages.lifecycle_messages import ReadyMsg
from ballast.transport.worker_messages.request_messages import SubmitMsg
from tests.cluster.fake_device import spec

REPORT = DeviceReport(
    device="cpu:0",
    now=0.0,
    page_bytes=1,
    total=1,
    free=1,
    reclaiming=0,
    owners={},
    models=(),
    jobs=0,
    draining=False,
)


class Link:
    """A worker that is sent requests."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, message: object) -> None:
        if isinstance(message, SubmitMsg):
            self.sent += [s.id for s in message.unwrap()]

    def in_flight(self) -> frozenset[str]:
        return frozenset()


@pytest.mark.parametrize(
    ("change", "ended", "code", "goes_on"),
    [
        ({}, [], "", ["begun", "new", "other"]),
        ({"fingerprint": "another"}, ["begun"], "model_changed", ["new", "other"]),
        (None, ["begun", "new"], "model_failed", ["other"]),
    ],
    ids=["the same", "changed", "gone"],
)
def test_what_a_new_worker_cannot_continue_ends_with_the_reason(
    change: dict[str, Any] | None, ended: list[str], code: str, goes_on: list[str]
) -> None:
    asyncio.run(replaced(change, ended, code, goes_on))


async def replaced(
    change: dict[str, Any] | None, ended: list[str], code: str, goes_on: list[str]
) -> None:
    links: list[Link] = []

    def make_worker() -> Any:
        links.append(Link())
        return links[-1]

    device = RemoteDevice("cpu:0", LocalWorkers(make_worker), Suspicions(), ())
    device.fleet = FleetSettings(models=(), device=DeviceSettings(budget_bytes=1))
    a, b = spec("a"), spec("b")
    device._serve(ReadyMsg({"a": a, "b": b}, {}, REPORT))
    streams = {}
    for id, model in (("begun", "a"), ("new", "a"), ("other", "b")):
        requests = device.requests
        streams[id] = OutputStream([id], requests.withdraw, requests.set_paused)
        submission = Submission(id=id, model=model, prompt=(1,), max_tokens=9)
        requests.add([OpenRequest(submission, streams[id])])
    for id in ("begun", "other"):
        device.requests.deliver(TokenOutput(id, 1, 0))
    device._mourn("killed")
    device.worker = make_worker()
    now = {"b": b} if change is None else {"a": replace(a, **change), "b": b}
    failed = {} if "a" in now else {"a": "its files have changed"}
    device._serve(ReadyMsg(now, failed, REPORT))
    assert sorted(links[-1].sent) == sorted(goes_on)
    for id, stream in streams.items():
        outputs = await stream.take() if stream.unread else []
        ends = [o for o in outputs if isinstance(o, FailedOutput)]
        assert [o.code for o in ends] == ([code] if id in ended else []), id
        assert all("'a'" in o.reason and "changed" in o.reason for o in ends)
