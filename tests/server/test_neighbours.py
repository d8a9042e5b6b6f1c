"""Servers of one fleet on one machine, one of them where nothing can be written."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from ballast.bench.server_process import ENDED
from tests.server.process import DEADLINE, ServerProcess, error_line, until
from tests.server.test_api import MODEL

BALLAST = (sys.executable, "-c", "from ballast.cli import main; main()")
ASKED: dict[str, Any] = {"model": MODEL, "prompt": "A ship", "max_tokens": 400, "seed": 4}


def port_of(pid: int) -> int | None:
    """The port at which a process listens: one that can write nothing does not say it."""
    files = set[str]()
    with contextlib.suppress(*ENDED):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(*ENDED):
                files.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and f"socket:[{rest[5]}]" in files:
            return int(local.rpartition(":")[2], 16)
    return None


def whole(client: httpx.Client) -> Any:
    answer = client.post("/v1/completions", json={**ASKED, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_a_server_that_can_write_nothing_serves_beside_another(
    real: ServerProcess, fleet_file: Path
) -> None:
    """Standard output, error, log and story on a full disk: as good as one with room.

    It shares the machine with a server of the same fleet; killed, it takes nothing with it.
    """
    options = ("--port", "0", "--story", "/dev/full", "--log-level", "debug")
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            (*BALLAST, "serve", str(fleet_file), *options), stdout=full, stderr=full
        )
    try:
        until(lambda: port_of(process.pid) is not None or process.poll() is not None)
        assert process.poll() is None, f"it ended with {process.returncode}"
        base = f"http://127.0.0.1:{port_of(process.pid)}"
        with httpx.Client(base_url=base, timeout=DEADLINE) as client:
            until(lambda: client.get("/health").status_code == 200)
            alone = whole(client)
            for _ in range(20):  # enough lines to fill every buffer
                assert client.post("/v1/completions", json={"model": "no"}).status_code == 400
            assert whole(real.http) == alone == whole(client)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(DEADLINE)
    assert code == 0
    assert whole(real.http) == alone


def test_a_port_that_another_server_has_is_said_in_a_line(
    real: ServerProcess, fleet_file: Path
) -> None:
    port = str(httpx.URL(real.base).port)
    refused = subprocess.run(
        (*BALLAST, "serve", str(fleet_file), "--port", port),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert refused.returncode == 2
    assert refused.stdout == ""
    line = error_line(refused.stderr)
    assert line.startswith(f"ballast: port: {port}")
    assert real.http.get("/health").status_code == 200
