"""Parts of a check, each in a process of its own: what hangs or poisons a GPU costs only itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TAIL = 2000
"""Characters of a traceback or a log that go into results."""
LEAST_SECONDS = 10.0
"""That must be left of all time for a part to begin."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    seconds: float
    """That it may take; then it is killed, with all that it has started."""


class Findings(dict[str, Any]):
    """What a part found so far: in the file as soon as it is set, so that a kill loses nothing."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(self, indent=2) + "\n")
        beside.replace(self._file)


def inside(run: Callable[[Findings], object], file: Path) -> int:
    """The part's own process: runs it, and keeps in `file` what it found or why it broke off."""
    found = Findings(file)
    try:
        run(found)
    except BaseException as error:  # noqa: BLE001 - told, and the process ends
        traceback.print_exc()
        found["broke_off"] = f"{type(error).__name__}: {error}"[:TAIL]
        found["where"] = traceback.format_exc()[-TAIL:]
        return 1
    return 0


def attempted(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What it found, or why it broke off: what comes after it in a part may work all the same."""
    try:
        return dict(work())
    except Exception as error:  # noqa: BLE001 - told, and the next one is tried
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"[:TAIL]
        return {"broke_off": result, "where": traceback.format_exc()[-TAIL:]}


def apart(
    parts: Sequence[Part],
    command: Callable[[str, Path], Sequence[str]],
    seconds: float,
    folder: Path,
    log: IO[str],
    save: Callable[[Mapping[str, Any]], object],
) -> dict[str, Any]:
    """What each part found, in their order; `save` is told after each.

    `command(name, file)`: runs a part by `inside`; what it prints goes to `log`. `seconds`: of all.
    """
    ends = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for part in parts:
        begun = time.monotonic()
        limit = min(part.seconds, ends - begun)
        if limit < LEAST_SECONDS and limit < part.seconds:
            found[part.name] = {"not_run": f"{max(0.0, limit):.0f} seconds were left"}
        else:
            file = folder / f"{part.name}.json"
            log.write(f"== {part.name}\n")
            log.flush()
            ended = _run(command(part.name, file), limit, log)
            found[part.name] = result = json.loads(file.read_text()) if file.exists() else {}
            if ended is None:
                result["broke_off"] = f"killed after {limit:.0f} seconds"
            elif ended != 0 and "broke_off" not in result:
                result["broke_off"] = f"its process ended with {ended}"
            result["took_seconds"] = time.monotonic() - begun
        save(found)
    return found


def _run(command: Sequence[str], limit: float, log: IO[str]) -> int | None:
    """Its exit status, negative for a signal; None: it was killed as it took too long."""
    with _group(command, log) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def _group(command: Sequence[str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
