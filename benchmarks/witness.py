"""A client that an attack must not hurt: probes `/live` and reads streams, in a process of its own.

Reads lines on standard input: `begin` starts a period anew, `end` prints what was seen in it, as a
line of JSON. Seconds throughout; gaps are those between two tokens of one stream. A probe or a gap
that has not ended when the period does counts with its length so far.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PROBE_SECONDS = 0.01
"""Between two probes."""
PATIENCE_SECONDS = 120.0


@dataclass
class Seen:
    """The longest of a period."""

    live: float = 0.0
    gap: float = 0.0
    probes: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


class Witness:
    """What one client sees. Each instance is used by the threads of `start` alone."""

    def __init__(
        self, url: str, key: str, model: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._key, self._model, self._clock = key, model, clock
        self._seen = Seen()
        self._probe_began: float | None = None
        """None: no probe waits for its answer."""
        self._token_came: float | None = None
        """The last one of the stream that is being read; None: it has none yet."""

    def start(self) -> None:
        """Probe and read streams, in two threads that never stop."""
        for work in (self._probe, self._stream):
            threading.Thread(target=self._always, args=(work,), daemon=True).start()

    def begin(self) -> None:
        """Forget what was seen, but for what has not ended."""
        self._seen = Seen()

    def end(self) -> Seen:
        """What was seen since `begin`."""
        now, seen = self._clock(), self._seen
        probe_began, token_came = self._probe_began, self._token_came
        if probe_began is not None:
            seen.live = max(seen.live, now - probe_began)
        if token_came is not None:
            seen.gap = max(seen.gap, now - token_came)
        return seen

    def _always(self, work: Any) -> None:
        while True:
            connection = http.client.HTTPConnection(
                self._host, self._port, timeout=PATIENCE_SECONDS
            )
            try:
                work(connection)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._seen.errors.append(f"{work.__name__}: {error!r:.200}")
                time.sleep(0.1)
            finally:
                connection.close()

    def _probe(self, connection: http.client.HTTPConnection) -> None:
        while True:
            self.probed(connection)
            time.sleep(PROBE_SECONDS)

    def probed(self, connection: http.client.HTTPConnection) -> None:
        """Ask `/live` once. Raises ValueError, OSError or HTTPException where that fails."""
        self._probe_began = began = self._clock()
        try:
            connection.request("GET", "/live")
            response = connection.getresponse()
            response.read()
        finally:
            self._probe_began = None
            self._seen.live = max(self._seen.live, self._clock() - began)
        if response.status != 200:
            raise ValueError(f"/live: {response.status}")
        self._seen.probes += 1

    def _stream(self, connection: http.client.HTTPConnection) -> None:
        body = {
            "model": self._model,
            "prompt": [40, 41, 42],
            "max_tokens": 480,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        while True:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"a stream: {response.status} {response.read(300)!r}")
            self.read(response)

    def read(self, lines: Iterable[bytes]) -> None:
        """Read one stream to its end. Raises ValueError where that is an error."""
        try:
            for line in lines:
                if line.startswith(b"data: {"):
                    if b'"error"' in line[:20]:
                        raise ValueError(f"a stream: {line[:300]!r}")
                    now, last = self._clock(), self._token_came
                    self._token_came = now
                    self._seen.gap = max(self._seen.gap, 0.0 if last is None else now - last)
                    self._seen.tokens += 1
        finally:
            self._token_came = None


class WitnessProcess:
    """A witness in a process of its own, seen from the one that started it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self) -> None:
        self._write("begin")

    def end(self) -> Seen:
        """What was seen since the last `begin`."""
        self._write("end")
        assert self._process.stdout is not None
        return Seen(**json.loads(self._process.stdout.readline()))

    def _write(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()


@contextmanager
def witness(url: str, key: str, model: str) -> Iterator[WitnessProcess]:
    """A witness that is gone at the end."""
    command = (sys.executable, "-m", "benchmarks.witness", url, key, model)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield WitnessProcess(process)
        finally:
            process.kill()


def main() -> None:
    url, key, model = sys.argv[1:]
    client = Witness(url, key, model)
    client.start()
    for line in sys.stdin:
        if line.strip() == "begin":
            client.begin()
        else:
            print(json.dumps(vars(client.end())), flush=True)


if __name__ == "__main__":
    main()
