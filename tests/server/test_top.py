"""`ballast top` as a process: before a running server, in a terminal, and without either."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from ballast.cli import app
from ballast.dashboard.reader import Reader
from ballast.server.observe.server_state import ServerNow
from tests.server.process import DEADLINE, ServerProcess, until

COMMAND = (sys.executable, "-m", "ballast.cli", "top", "--interval", "0.05")


def top(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    command = (*COMMAND, *options)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE
    )


def test_a_reading_of_a_running_server(echo: ServerProcess) -> None:
    async def ask() -> ServerNow:
        async with Reader(echo.url, None) as reader:
            return await reader.read()

    until(lambda: bool(asyncio.run(ask()).decisions))  # they come after the first report
    now = asyncio.run(ask())
    assert now.status == "ok"
    assert sum(now.owners.values()) + now.free + now.reclaiming == now.total
    assert [m.names[0].name for m in now.models] == [m.report.name for m in now.models]
    assert "broken" in now.failed
    assert now.decisions[0]["why"] == "a test"


def test_one_frame_of_a_running_server(echo: ServerProcess) -> None:
    body = {"model": "atlas-chat", "prompt": "abc", "max_tokens": 6}
    assert echo.http.post("/v1/completions", json=body).status_code == 200
    result = top("--url", echo.url, "--once")
    assert (result.returncode, result.stderr) == (0, "")
    assert "● serving" in result.stdout
    assert "0 tokens/s" in result.stdout
    assert "✗ failed" in result.stdout
    assert "a test" in result.stdout


def test_a_list_of_what_a_server_serves(echo: ServerProcess) -> None:
    result = CliRunner().invoke(app, ["ps", "--url", echo.base])
    assert result.exit_code == 0
    assert "● serving" in result.stdout
    for name in ("atlas-chat", "wren-mini", "✗ mute is not served"):
        assert name in result.stdout
    result = CliRunner().invoke(app, ["ps", "--url", echo.base, "--json"])
    assert json.loads(result.stdout)["preset"] == "ballast"
    gone = CliRunner().invoke(app, ["ps", "--url", "http://127.0.0.1:9"])
    assert gone.exit_code == 1
    assert gone.stderr.startswith("ballast: http://127.0.0.1:9: the server cannot be reached")


def test_one_reading_as_json(echo: ServerProcess) -> None:
    result = top("--url", echo.base, "--once", "--json")
    assert json.loads(result.stdout)["preset"] == "ballast"
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_without_a_server_it_says_so(form: list[str]) -> None:
    result = top("--url", "http://127.0.0.1:9", "--once", *form)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("ballast: http://127.0.0.1:9: the server cannot be reached")


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *options: str) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, (*COMMAND, *options))
        self.seen = ""

    def until(self, text: str) -> None:
        """Returns when `text` was shown since the last call."""
        end = time.monotonic() + DEADLINE
        while text not in self.seen:
            ready, _, _ = select.select([self._descriptor], [], [], end - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self._descriptor, 65536).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def end(self) -> int:
        """The exit code."""
        self.until("\x1b[?1049l")  # the screen that was there before
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._descriptor)
        return code


def test_it_waits_for_a_server_and_leaves_at_q(echo: ServerProcess) -> None:
    terminal = Terminal("--url", echo.url)
    terminal.until("serving")
    terminal.until("decisions")
    terminal.type(b"uq")
    assert terminal.end() == 0
    terminal = Terminal("--url", "http://127.0.0.1:9")
    terminal.until("trying again")
    terminal.type(b"\x03")
    assert terminal.end() == 0
