"""A server of the page without models: what it says of its fleet is made up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from ballast.core.settings import Slo
from ballast.server.observe.latency import Quantiles
from ballast.server.observe.memory_history import MemoryHistory
from ballast.server.observe.recent_requests import RequestNow
from ballast.server.observe.server_state import DeviceNow, ModelNow, NameNow, ServerNow
from ballast.server.routes.live import LiveNow
from ballast.server.routes.page import HEADERS, page_files
from tests.sim.test_simulate import COSTS

PAGES = 10_000
EVIL = "<img src=x onerror=document.title=1>"


def model(name: str, i: int) -> ModelNow:
    """Every third one is evicted."""
    away = i % 3 == 2
    report: Any = {
        "name": name,
        "residency": "absent" if away else "resident",
        "costs": COSTS,
        "weight_pages": 0 if away else 60,
        "whole_pages": 60,
        "kv_pages": 0 if away else 20,
        "cached_pages": 0,
        "waiting": i % 2,
        "running": i % 4,
        "set_aside": {},
    }
    named = NameNow(name, Slo(ttft=1.0), 100 * i, Quantiles(9, 0.2, 1.5), Quantiles(9, 0.01, 0.02))
    return ModelNow("evicted" if away else "loaded", report, [named], False, ["cpu:0"])


def request(i: int, state: Any) -> RequestNow:
    return RequestNow(
        request_id=f"r{i}{EVIL}",
        key="",
        model="m0",
        path="/v1/completions",
        state=state,
        age=2.0,
        seconds=1.5 if state == "ended" else None,
        queued=None if state == "waiting" else 0.5,
        activating=None if state == "waiting" else 0.2,
        ttft=None if state == "waiting" else 0.7,
        tpot=0.01,
        prompt_tokens=10,
        output_tokens=5,
        cached_tokens=4,
        cached_tokens_by_tier={"device": 1, "host": 3},
        choices=1,
        status=200,
        error=None,
        finish=["stop"],
        gone=False,
    )


class Fleet:
    """What the stub says of its models; `result`: of a simulation."""

    def __init__(self, names: list[str], result: dict[str, Any] | None = None) -> None:
        self.names, self.result = names, result or {}
        self.orders: list[str] = []
        """Paths of what was posted."""
        self.requests = [request(0, "waiting"), *(request(i, "ended") for i in range(1, 50))]
        self.history = MemoryHistory()
        for seconds in range(300, 0, -2):
            self.history.add(time.time() - seconds, [self._report(seconds)], 0)

    def live(self) -> LiveNow:
        """The first event of a stream."""
        models = [model(name, i) for i, name in enumerate(self.names)]
        now = self._report(0)
        device: Any = DeviceNow(
            device="cpu:0",
            status="ok",
            reason=None,
            restarts=0,
            open=1,
            page_bytes=1 << 20,
            total=PAGES,
            free=now.free,
            reclaiming=0,
            owners=now.owners,
            jobs=5,
            models=[],
            failed={},
        )
        state = ServerNow(
            version="0",
            time=time.time(),
            uptime=time.monotonic(),
            preset="balloon",
            status="ok",
            reason=None,
            restarts=0,
            open=1,
            device="cpu:0",
            page_bytes=1 << 20,
            total=PAGES,
            free=now.free,
            reclaiming=0,
            owners=now.owners,
            jobs=5,
            models=[],
            failed={"bad": EVIL},
            decisions=[],
            devices=[device],
        )
        decision = {"time": time.time(), "action": "Evict", "model": EVIL, "why": "r; price; best"}
        encoded = {m.report["name"]: msgspec.Raw(msgspec.json.encode(m)) for m in models}  # type: ignore[index]
        opened, ended = self.requests[:1], self.requests[1:]
        return LiveNow(state, encoded, opened, list(encoded), ended, [decision] * 60)

    def _report(self, i: int) -> Any:
        """Read as a `DeviceReport`."""
        owners = {f"weights:{name}": 60 for name in self.names[i % 2 :: 2]}
        free = PAGES - sum(owners.values())
        return _Report(owners, free)


class _Report:
    device, page_bytes, total, reclaiming = "cpu:0", 1 << 20, PAGES, 0

    def __init__(self, owners: dict[str, int], free: int) -> None:
        self.owners, self.free = owners, free


class Stub(ThreadingHTTPServer):
    """Serves the page and a `Fleet`, until it is closed."""

    daemon_threads = allow_reuse_port = True

    def __init__(self, fleet: Fleet, port: int = 0) -> None:
        self.fleet, self.closing = fleet, threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def end(self) -> None:
        """As when a server is killed: streams break off, and nobody answers."""
        self.closing.set()
        self.shutdown()
        self.server_close()


@contextmanager
def stub(fleet: Fleet, port: int = 0) -> Iterator[Stub]:
    found = Stub(fleet, port)
    try:
        yield found
    finally:
        found.end()


class _Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        files, name = page_files(), self.path.removeprefix("/page/")
        fleet = self.server.fleet
        if self.path == "/" or name in files:
            name = "page.html" if self.path == "/" else name
            kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
            self._answer(files[name], kind.get(name.rpartition(".")[2], "text/html"), HEADERS)
        elif self.path == "/admin/live":
            self._head("text/event-stream", {})
            now = fleet.live()
            while not self.server.closing.is_set():
                try:
                    self.wfile.write(b"data: " + msgspec.json.encode(now) + b"\n\n")
                except OSError:
                    return
                same = {"order": msgspec.UNSET, "ended": msgspec.UNSET, "decisions": msgspec.UNSET}
                now = msgspec.structs.replace(fleet.live(), models={}, **same)
                self.server.closing.wait(0.3)
        elif self.path.startswith("/admin/history"):
            seconds = float(self.path.rpartition("=")[2])
            self._answer(msgspec.json.encode(fleet.history.last(seconds, time.time())))
        elif self.path.startswith("/admin/story"):
            self._answer(msgspec.json.encode({"decisions": fleet.live().decisions}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.fleet.orders.append(self.path)
        if self.path in ("/admin/simulate", "/admin/story/play"):
            self._head("text/event-stream", {})
            for event in (
                {"event": "progress", "what": "balloon", "done": 1, "of": 2},
                {"event": "result", "result": self.server.fleet.result},
            ):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        elif self.path == "/admin/plan":
            self.send_error(409)
        else:
            self._answer(b"{}")

    def _head(self, kind: str, headers: dict[str, str]) -> None:
        self.send_response(200)
        for header, value in {"content-type": kind, **headers}.items():
            self.send_header(header, value)
        self.end_headers()

    def _answer(
        self, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self._head(kind, headers or {})
        self.wfile.write(body)
