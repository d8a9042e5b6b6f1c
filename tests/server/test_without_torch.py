"""The server's own process has no PyTorch, and its worker does."""

from __future__ import annotations

from pathlib import Path

from tests.server.process import ServerProcess

LIBRARY = "libtorch"


def mapped(pid: int) -> bool:
    return LIBRARY in Path(f"/proc/{pid}/maps").read_text()


def test_only_workers_load_pytorch(real: ServerProcess) -> None:
    answer = real.http.post(
        "/v1/chat/completions",
        json={
            "model": real.client.models.list().data[0].id,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 3,
        },
    )
    assert answer.status_code == 200, answer.text
    assert mapped(real.worker_pid)
    assert not mapped(real.pid)
