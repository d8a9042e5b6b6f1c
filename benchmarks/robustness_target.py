"""The server that is attacked, its fleet, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ballast.bench.server_process import children_of

MODEL, VICTIM, FEW = "atlas-chat", "wren-mini", "few"
"""The model that is attacked, the one that a witness reads, and one of which two requests run."""
ATTACKER_KEY, VICTIM_KEY = "sk-attacker-attacker", "sk-victim-victim"
OTHER_KEY, ADMIN_KEY = "sk-other-other-other", "sk-admin-admin-admin"
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
"""A chat template that does not come to an end."""
SECTION = f"""
server:
  keys:
    - {{name: attacker, key: {ATTACKER_KEY}}}
    - {{name: victim, key: {VICTIM_KEY}}}
    - {{name: other, key: {OTHER_KEY}}}
  admin_key: {ADMIN_KEY}
  drain_seconds: 5
"""
PATIENCE_SECONDS = 120.0


def make_target_fleet(directory: Path) -> Path:
    """Write tiny random models and a fleet file with keys; its path."""
    from ballast.fleet.make import make_fleet  # children that attack it need no PyTorch

    made = make_fleet(
        directory, n_models=2, steps=0, size="tiny", dtype="float32", budget="64MiB", seed=1
    )
    shutil.copytree(directory / MODEL, directory / FEW)
    text = made.file.read_text().rstrip() + "\n    tool_parser: pythonic\n"
    text += f"  - {{name: {FEW}, path: {FEW}, limits: {{running: 2}}}}\n"
    made.file.write_text(text + SECTION)
    return made.file


class Target:
    """The server."""

    def __init__(self, url: str, pid: int, fleet_file: Path) -> None:
        address = urlsplit(url)
        self.host, self.port = address.hostname or "", address.port or 80
        self.url, self.pid, self.fleet_file = url, pid, fleet_file

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str = ATTACKER_KEY,
        patience: float = PATIENCE_SECONDS,
    ) -> tuple[int, Any]:
        """Status and body, decoded if it is JSON. `body`: bytes are sent as they are. Raises
        TimeoutError where nothing comes for `patience` seconds."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=patience)
        try:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            if key:
                headers["authorization"] = f"Bearer {key}"
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, data.decode(errors="replace")

    def post(self, path: str, body: Any, key: str = ATTACKER_KEY) -> tuple[int, Any]:
        return self.ask("POST", path, body, key)

    def complete(self, key: str = ATTACKER_KEY, **fields: Any) -> tuple[int, Any]:
        """A short completion."""
        body = {"model": MODEL, "prompt": [40, 41], "max_tokens": 4, **fields}
        return self.post("/v1/completions", body, key)

    def many(self, n: int, **fields: Any) -> list[tuple[int, Any]]:
        """So many completions at a time."""
        with ThreadPoolExecutor(n) as threads:
            asked = [threads.submit(self.complete, **fields) for _ in range(n)]
            return [a.result() for a in asked]

    def connect(self, data: bytes) -> socket.socket:
        """A connection on which this was sent."""
        made = socket.create_connection((self.host, self.port), timeout=PATIENCE_SECONDS)
        made.sendall(data)
        return made

    @property
    def processes(self) -> dict[str, int]:
        """The server's process and those it has started, by name."""
        found = {"server": self.pid}
        for pid in children_of(self.pid):
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                found[f"{name} {pid}"] = pid
        return found


def statuses(answers: Sequence[tuple[int, Any]]) -> str:
    """How many of each: `16 x 200`."""
    found = sorted({status for status, _ in answers})
    return ", ".join(f"{sum(s == f for s, _ in answers)} x {f}" for f in found)
