"""Who may use a route is decided by the route, however its path is written."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.process import ServerProcess, server

SECTION = """
server:
  keys:
    - {name: whole, key: sk-whole-whole-whole}
    - {name: part, key: sk-part-part-part, models: [wren-mini]}
  admin_key: sk-admin-admin-admin
"""
PART, WHOLE, STRANGER = b"sk-part-part-part", b"sk-whole-whole-whole", b"sk-wrong-wrong-wrong"
SUFFIXES = (
    b"%s", b"%s%%0A", b"%s%%0D", b"%s%%00", b"%s%%09", b"%s%%7f", b"%s%%C2%%85", b"%s%%E2%%80%%A8",
    b"%s/", b"%s//", b"/%s", b"%s;x", b"%s;", b"%s/.", b"%s/..", b"%s..%%2f", b"%s%%2f", b"%s%%3f",
    b"%s%%23", b"%s%%20", b"%s.", b"%s?x=%%0A", b"%s%%2500", b"%s%%ff", b"/live/..%s",
    b"/live/..%%2f..%s", b"/live%%0A%s", b"/health;%s", b"http://localhost%s",
)  # fmt: skip
PARTS = 3
"""A route is tried with one part of the spellings, a spelling with one part of the routes;"""
WITH_ALL = (b"/metrics", b"/admin/models")
"""these with all spellings."""


@pytest.fixture(scope="module")
def guarded(echo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("routes")
    shutil.copytree(echo_file.parent, directory, dirs_exist_ok=True)
    file = directory / "fleet.yaml"
    file.write_text(file.read_text().rstrip() + "\n" + SECTION)
    with server(file, "--echo") as running:
        yield running


def ask(to: ServerProcess, method: bytes, path: bytes, key: bytes) -> tuple[int, bytes]:
    """Status and body of a request whose path is sent as it is."""
    address = urlsplit(to.base)
    with socket.create_connection((address.hostname or "", address.port or 0), 60) as client:
        head = b"host: localhost\r\nconnection: close\r\nauthorization: Bearer " + key
        body = b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        client.sendall(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, path, head, body))
        said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def routes(to: ServerProcess) -> list[tuple[bytes, bytes]]:
    """Every route of the document, with its method."""
    document = to.http.get("/openapi.json", headers={"authorization": f"Bearer {WHOLE.decode()}"})
    return [
        (method.upper().encode(), re.sub(r"\{.*?\}", "atlas-chat", path).encode())
        for path, methods in document.json()["paths"].items()
        for method in methods
    ]


def test_no_spelling_of_a_path_opens_it(guarded: ServerProcess) -> None:
    found = routes(guarded)
    assert len(found) > 25
    assert {b"/metrics", b"/admin/state", b"/admin/models"} <= {path for _, path in found}
    for i, (method, path) in enumerate(found):
        spellings = [suffix % path for suffix in SUFFIXES[1:]]
        spellings += [path.upper(), path.title(), path.replace(b"m", b"%6d"), path[1:]]
        part = slice(None) if path in WITH_ALL else slice(i % PARTS, None, PARTS)
        for spelled in (path, *spellings[part]):
            status, body = ask(guarded, method, spelled, STRANGER)
            probe = path in (b"/live", b"/health") and status == 200
            assert status in (400, 401, 404) or probe, (method, spelled, status)
            assert probe or b"wren-mini" not in body
            if method == b"GET" and not path.startswith(b"/v1"):
                status, body = ask(guarded, method, spelled, PART)
                assert b"atlas-chat" not in body.replace(path, b"").replace(spelled, b""), spelled
                assert b"ballast_" not in body, spelled


@pytest.mark.parametrize("path", [b"/metrics", b"/admin/state", b"/v1/models", b"/live", b"/x"])
@pytest.mark.parametrize("code", [b"%0A", b"%0d%0a", b"%00", b"%1b", b"%7F", b"%C2%85"])
def test_control_characters_are_refused(guarded: ServerProcess, path: bytes, code: bytes) -> None:
    for key in (PART, WHOLE, STRANGER, b"sk-admin-admin-admin"):
        for spelled in (path + code, path[:2] + code + path[2:]):
            status, body = ask(guarded, b"GET", spelled, key)
            assert (status, b"control characters" in body) == (400, True)


def test_a_route_is_found_by_its_path_as_decoded(guarded: ServerProcess) -> None:
    assert ask(guarded, b"GET", b"/%6detrics", PART)[0] == 403
    assert ask(guarded, b"GET", b"/%6detrics", WHOLE)[0] == 200
    assert ask(guarded, b"HEAD", b"/metrics", PART)[0] == 403
    assert ask(guarded, b"GET", b"/admin%2Fmodels", WHOLE)[0] == 403
