"""Downloads from a hub: how far they are, what is downloaded of a repository, and their bound."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from ballast.cli_fleet import pull
from ballast.core.errors import ConfigError
from ballast.fleet.hub import fetch

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(300_000),
    "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"read me",
}


class FakeHub(BaseHTTPRequestHandler):
    """The few routes of the hub that a download asks for; one repository, `org/tiny`."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in FILES.items()
            ]
            return self._answer(json.dumps(entries).encode())
        if path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            return self._answer(json.dumps(info).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/org/tiny/resolve/") and name in FILES:
            if self.command == "GET":
                self.asked.append(name)
            return self._answer(FILES[name], ETag=f'"{_digest(FILES[name])}"')
        return self._answer(b"{}", 404)

    def _answer(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a fake hub, to which this process's downloads go; its cache is empty."""
    FakeHub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_says_how_far_it_is_and_brings_no_code(hub: str) -> None:
    steps: list[tuple[int, int]] = []
    found = Path(fetch("org/tiny", "path", report=lambda done, of: steps.append((done, of))))
    wanted = {"config.json", "model.safetensors"}
    assert {path.name for path in found.iterdir()} == wanted == set(FakeHub.asked)
    assert (found / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    n_bytes = sum(len(FILES[name]) for name in wanted)
    assert steps[-1] == (n_bytes, n_bytes)
    assert all(a <= b for (a, _), (b, _) in pairwise(steps))


def test_nothing_is_downloaded_of_what_is_too_large(hub: str) -> None:
    with pytest.raises(ConfigError, match="its files take") as fault:
        fetch("org/tiny", "path", most_bytes=200_000)
    assert (fault.value.key, fault.value.value) == ("path", "org/tiny")
    assert FakeHub.asked == []
    assert fetch("org/tiny", "path", most_bytes=400_000)


def test_pull_prints_what_a_server_reads_of_it(
    hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ballast.server.admin.pulls` runs the command."""
    pull(["org/tiny"], most="1MiB", as_json=True)
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    n_bytes = len(FILES["config.json"]) + len(FILES["model.safetensors"])
    assert steps[-1] == {"completed": n_bytes, "total": n_bytes}
    with pytest.raises(ConfigError, match="20B may be pulled"):
        pull(["org/tiny"], most="20", as_json=True)
    with pytest.raises(ConfigError) as fault:
        pull(["org/tiny"], most="much")
    assert fault.value.key == "--most"
