"""Clients that leave, workers that die, and servers that are told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ballast.core.errors import ConfigError
from ballast.server.http.address import bound
from tests.cluster.fake_device import DIE, HOLD, PAUSE
from tests.server.process import DEADLINE, ServerProcess, server, until
from tests.server.test_api import MODEL, sample


def body(stream: bool, seed: int = HOLD) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 6, "seed": seed, "stream": stream}


def running(server: ServerProcess) -> float:
    return sample(server, "vllm_num_requests_running", model_name=MODEL)


class Background:
    """A request in a thread: what came, or how it failed."""

    def __init__(self, server: ServerProcess, stream: bool, seed: int = HOLD) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.error: httpx.HTTPError | None = None
        self._server, self._body = server, body(stream, seed)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._server.base, timeout=DEADLINE) as client,
                client.stream("POST", "/v1/completions", json=self._body) as response,
            ):
                self.status = response.status_code
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the request hangs"

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture(scope="module")
def own(echo_file: Path) -> Iterator[ServerProcess]:
    """A server that tests may break; whichever ends it is the last."""
    with server(echo_file, "--echo") as running_server:
        yield running_server


# -- clients that leave -------------------------------------------------------------------------


def test_a_client_that_leaves_a_stream_frees_its_request(echo: ServerProcess) -> None:
    with echo.http.stream("POST", "/v1/completions", json=body(True)) as response:
        lines = response.iter_lines()  # kept: without its iterator, the stream is closed
        next(lines)
        until(lambda: running(echo) == 1)
    until(lambda: running(echo) == 0)


def test_a_client_that_does_not_wait_for_its_answer_frees_its_request(
    echo: ServerProcess,
) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=echo.base, timeout=DEADLINE) as client:
            post = asyncio.ensure_future(client.post("/v1/completions", json=body(False)))
            await asyncio.to_thread(until, lambda: running(echo) == 1)
            post.cancel()
            await asyncio.wait({post})
        await asyncio.to_thread(until, lambda: running(echo) == 0)

    asyncio.run(scenario())


# -- workers that die ---------------------------------------------------------------------------


def test_streams_go_on_when_the_worker_is_killed(own: ServerProcess) -> None:
    whole, stream = (Background(own, stream=kind, seed=PAUSE) for kind in (False, True))
    until(lambda: running(own) == 2)
    own.kill_worker()
    until(lambda: stream.text.count('"text":') >= 4)
    until(lambda: own.http.get("/health").status_code == 200)
    until(lambda: running(own) == 2)
    own.kill_worker()
    whole.join()
    stream.join()
    assert (whole.status, stream.status) == (200, 200)
    undisturbed = own.http.post("/v1/completions", json=body(False, seed=0)).json()
    assert json.loads(whole.text)["choices"] == undisturbed["choices"]
    events = [json.loads(line.removeprefix("data: ")) for line in stream.lines if "{" in line]
    result = "".join(choice["text"] for e in events for choice in e["choices"])
    assert result == undisturbed["choices"][0]["text"]
    assert stream.lines[-2:] == ["data: [DONE]", ""]


def test_a_request_that_kills_workers_fails(own: ServerProcess) -> None:
    held = Background(own, stream=True)
    until(lambda: bool(held.lines))
    poison = own.http.post("/v1/completions", json=body(False, seed=DIE))
    assert poison.status_code == 500
    assert poison.json()["error"]["code"] == "poison"
    assert own.http.post("/v1/completions", json=body(False, seed=0)).status_code == 200
    whole = Background(own, stream=False)
    until(lambda: running(own) == 2)
    stop_while_it_is_to_restart(own)
    held.join()
    assert "error" not in held.lines[0]
    whole.join()
    assert whole.status == 503


def stop_while_it_is_to_restart(own: ServerProcess) -> None:
    own.signal(signal.SIGUSR2)
    until(lambda: any("draining: 2 requests" in line for line in own.lines))
    own.signal()
    assert own.wait() == 0


# -- servers told to stop -----------------------------------------------------------------------


def test_a_server_restarts_in_its_process_and_stops_in_bounded_time(echo_file: Path) -> None:
    with server(echo_file, "--echo", "--drain", "4") as own:
        restart_idle(own)
        restart_busy(own)
        worker = own.worker_pid
        held = Background(own, stream=True)
        until(lambda: bool(held.lines))
        own.signal(signal.SIGINT)
        held.join()
        assert "stopped before this was finished" in held.text
        assert own.wait() == 0
        assert not Path(f"/proc/{worker}").exists()
        assert "Traceback" not in own.output


def restart_idle(own: ServerProcess) -> None:
    """It has taken any port, and keeps it."""
    assert own.http.get("/health").json()["status"] == "ok"
    worker = own.worker_pid
    own.signal(signal.SIGUSR2)
    until(lambda: sum(f" at {own.url}" in line for line in own.lines) == 2)
    assert not Path(f"/proc/{worker}").exists()
    assert httpx.get(f"{own.base}/health", timeout=DEADLINE).json()["status"] == "ok"


def restart_busy(own: ServerProcess) -> None:
    """Requests wait for the restart from the signal on, also while open ones are waited for, and by
    an old connection."""
    assert own.http.get("/health").status_code == 200
    held = Background(own, stream=True)
    until(lambda: bool(held.lines))
    own.signal(signal.SIGUSR2)
    follows = "draining: 1 requests are open; a restart follows"
    until(lambda: any(follows in line for line in own.lines))
    later = Background(own, stream=True, seed=0)
    assert own.http.post("/v1/completions", json=body(False, 0)).status_code == 200
    later.join()
    assert later.status == 200
    assert later.lines[-2:] == ["data: [DONE]", ""]
    held.join()
    assert "stopped before this was finished" in held.text


def test_nothing_outlives_a_server_that_is_killed(echo_file: Path) -> None:
    with server(echo_file, "--echo", "--spare") as killed:
        grammar = {"response_format": {"type": "json_object"}}  # a process checks it
        killed.http.post("/v1/completions", json=body(False, seed=0) | grammar)
        until(lambda: len(killed.children) == 4)
        children = killed.children
        killed.signal(signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_draining_refuses_what_is_new_and_a_second_signal_does_not_wait(echo_file: Path) -> None:
    with server(echo_file, "--echo", "--drain", str(DEADLINE)) as draining:
        held = Background(draining, stream=False)
        until(lambda: running(draining) == 1)
        draining.signal()
        until(lambda: draining.http.get("/health").status_code == 503)
        assert draining.http.get("/health").json()["status"] == "draining"
        refused = draining.http.post("/v1/completions", json=body(False, seed=0))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        draining.signal()
        held.join()
        assert held.status == 503
        assert draining.wait() == 0


# -- addresses ----------------------------------------------------------------------------------


def test_an_address_that_cannot_be_bound_is_a_configuration_error() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with (
            pytest.raises(ConfigError, match=r"port: .*: .*in use"),
            bound("127.0.0.1", taken.getsockname()[1]),
        ):
            pass
    with pytest.raises(ConfigError, match=r"^host"), bound("no.such.host.invalid", 0):
        pass


def test_a_bound_port_does_not_answer_before_it_should() -> None:
    with (
        bound("127.0.0.1", 0) as waiting,
        socket.socket() as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(waiting.getsockname())
