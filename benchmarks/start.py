"""Seconds from `ballast serve` to its first answers: 8 and 64 tiny models, first time and again.

Random models (`ballast fleet make --size tiny --steps 0`). `first`: nothing is kept of earlier
starts: no findings about checkpoints, no choices and no compiled kernels. `again`: the start after
that. Of each start: when `/live` answers, when a model that is asked for at once (the last of the
file) has sent its first token, and when all models serve; beside that the processor seconds that
the server and its children took until then, which say more than the clock on a busy machine.

`live.N.WHEN`, `token.N.WHEN`, `all.N.WHEN`, `processor.N.WHEN`: seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ballast.bench.server_process import children_of
from ballast.fleet.make import make_fleet
from benchmarks.common import finish, options, verdict

SIZES = (8, 64)
GOALS = {"token.8.first": 10.0, "token.8.again": 3.0}
"""Seconds at most, on two quiet cores."""
POLL_SECONDS, MOST_SECONDS = 0.05, 900.0
_NAMED = ("BALLAST_CHOICES", "BALLAST_FINDINGS")
"""Variables that name what is kept."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the command was given; `processor`: of all processes together."""

    live: float
    token: float
    all: float
    processor: float


def main() -> None:
    args = options(__doc__, extra=_sizes)
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for n in args.models:
            made = make_fleet(Path(directory, f"fleet{n}"), n_models=n, steps=0, size="tiny")
            kept = _nothing_kept(Path(directory, f"kept{n}"))
            for when in ("first", "again"):
                found = start(made.file, made.models[-1].name, kept)
                for name in Start.__slots__:
                    values[f"{name}.{n}.{when}"] = round(getattr(found, name), 2)
    verdicts = {k: verdict(values.get(k), at_most=most) for k, most in GOALS.items()}
    finish(args, "start", {**values, "verdicts": verdicts})


def _sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=int, nargs="+", default=SIZES, help="sizes of fleets")


def _nothing_kept(directory: Path) -> Mapping[str, str]:
    """Return an environment in which nothing is kept yet."""
    caches = {"NUMBA_CACHE_DIR": "kernels", "XDG_CACHE_HOME": "caches"}
    own = {name: value for name, value in os.environ.items() if name not in _NAMED}
    return {**own, **{name: str(directory / below) for name, below in caches.items()}}


def start(file: Path, model: str, environment: Mapping[str, str]) -> Start:
    """Start a server, ask `model` for a token at once, and wait until all models serve."""
    port = _free_port()
    began = time.monotonic()
    command = (sys.executable, "-m", "ballast.cli", "serve", str(file), "--port", str(port))
    with _running([*command, "--log-level", "error"], environment) as server:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=MOST_SECONDS, trust_env=False) as client:
            _until(client, "/live")
            live = time.monotonic() - began
            _first_token(client, model)
            token = time.monotonic() - began
            _until(client, "/health")
            ready = time.monotonic() - began
        return Start(live, token, ready, _processor_seconds(server.pid))


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _until(client: httpx.Client, path: str) -> None:
    """Wait until a path answers with 200."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        try:
            if client.get(path).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{path} has not answered with 200 within {MOST_SECONDS:g} s")


def _first_token(client: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": "Hello", "max_tokens": 2, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        if not any(line.startswith("data:") for line in answer.iter_lines()):
            raise RuntimeError("the stream had no token")


def _processor_seconds(server: int) -> float:
    """Processor time of a process and its children so far, ended ones included."""
    total = 0
    for pid in (server, *children_of(server)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / _TICKS


if __name__ == "__main__":
    main()
