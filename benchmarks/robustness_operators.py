"""What operators and their machines do: settings that change, signals, limits, files.

Each attack is (name, what is expected, what does it, whether a witness must not notice).
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ballast.bench.server_process import serving
from benchmarks.robustness_target import (
    ADMIN_KEY,
    FEW,
    PATIENCE_SECONDS,
    Target,
    make_target_fleet,
    statuses,
)

REQUESTS = 16
BALLAST = (sys.executable, "-m", "ballast.cli")
STOP_SECONDS = 60.0
"""For a server to end after SIGTERM: its `drain_seconds` are 5."""


def more_running(target: Target) -> str:
    """PATCH a model from 2 to 8 running requests while 16 are open."""

    def patch(running: int) -> None:
        body = {"limits": {"running": running}}
        status, answer = target.ask("PATCH", f"/admin/models/{FEW}", body, ADMIN_KEY)
        assert status == 200, f"PATCH {status}: {answer}"

    found: list[tuple[int, Any]] = []

    def ask() -> None:
        found.extend(target.many(REQUESTS, model=FEW, max_tokens=200, ignore_eos=True))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    try:
        patch(8)
    finally:
        asking.join()
        patch(2)
    assert all(status == 200 for status, _ in found), statuses(found)
    return statuses(found)


def few_files(files: int) -> Callable[[Target], str]:
    """Start a server that may open so many files."""

    def run(target: Target) -> str:
        try:
            ended = subprocess.run(
                (*BALLAST, "serve", str(target.fleet_file), "--port", "0", "--no-changes"),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs for {PATIENCE_SECONDS:g} s") from None
        seen = f"exit code {ended.returncode}: {ended.stderr.strip():.120}"
        assert ended.returncode == 2, seen
        progress = ended.stderr.strip().splitlines()[:-1]
        assert all(": starting " in p or re.fullmatch(r".+, \d+ s", p) for p in progress), seen
        return seen

    return run


def open_to_all(target: Target) -> str:
    """Start a server without keys on all addresses, as the image would."""
    plain = target.fleet_file.read_text().partition("\nserver:")[0]
    file = target.fleet_file.with_name("open.yaml")
    file.write_text(plain)
    ended = subprocess.run(
        (*BALLAST, "serve", str(file), "--host", "0.0.0.0", "--port", "0", "--no-changes"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    seen = f"exit code {ended.returncode}: {ended.stderr.strip():.120}"
    assert ended.returncode == 2, seen
    return seen


def short_keys(target: Target) -> str:
    """Start servers whose keys can be guessed."""
    seen = []
    plain = target.fleet_file.read_text().partition("\nserver:")[0]
    file = target.fleet_file.with_name("short.yaml")
    for section in ("keys: [{name: a, key: sk-hunter2}]", "admin_key: admin"):
        file.write_text(f"{plain}\nserver: {{{section}}}\n")
        ended = subprocess.run(
            (*BALLAST, "serve", str(file), "--port", "0", "--no-changes"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        seen.append(f"exit code {ended.returncode}: {ended.stderr.strip():.120}")
        assert ended.returncode == 2, seen
        assert "hunter2" not in ended.stderr, seen
    return "; ".join(seen)


def sigterm_while_a_template_never_ends(target: Target) -> str:
    """SIGTERM while requests for a model with such a template are open."""
    with _second(target) as (second, process):
        body = {"model": "endless", "messages": [{"role": "user", "content": "a"}]}
        for _ in range(4):
            threading.Thread(
                target=_ignoring, args=(second, "/v1/chat/completions", body), daemon=True
            ).start()
        time.sleep(1.0)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs {STOP_SECONDS:g} s after SIGTERM") from None
        seen = f"exit code {code} after {time.monotonic() - began:.1f} s"
        assert code == 0, seen
        return seen


def story_file(target: Target) -> str:
    """Who may read what a server tells of its requests."""
    file = target.fleet_file.with_name("story.jsonl")
    with serving(target.fleet_file, "--no-changes", "--story", str(file), "--log-level", "error"):
        mode = stat.S_IMODE(file.stat().st_mode)
    assert mode == 0o600, f"mode {mode:o}"
    return f"mode {mode:o}"


def two_servers_one_file(target: Target) -> str:
    """Two servers record operators' changes in one file: one must be refused, none may be lost."""
    changes = target.fleet_file.with_name("shared.changes.json")
    options = ("--changes", str(changes), "--log-level", "error")
    with serving(target.fleet_file, *options) as one, serving(target.fleet_file, *options) as two:
        answers = []
        for running, model in ((one, FEW), (two, "endless")):
            other = Target(running.url, running.pid, target.fleet_file, target.log)
            answers.append(other.ask("POST", f"/admin/models/{model}/pin", key=ADMIN_KEY))
    seen = statuses(answers)
    kept = changes.read_text()
    assert [status for status, _ in answers] == [200, 507], seen
    assert (FEW in kept, "endless" in kept) == (True, False), f"{seen}; kept: {kept:.200}"
    return seen


def _ignoring(target: Target, path: str, body: Any) -> None:
    with contextlib.suppress(OSError):  # the server ends
        target.post(path, body)


class _second:
    """A server of its own, which an attack may end: it, and its process."""

    def __init__(self, target: Target) -> None:
        directory = target.fleet_file.parent / f"second-{time.monotonic_ns()}"
        self._file, self._log = make_target_fleet(directory), target.log

    def __enter__(self) -> tuple[Target, subprocess.Popen[str]]:
        self._process = subprocess.Popen(
            (*BALLAST, "serve", str(self._file), "--port", "0", "--log-level", "error"),
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        line = next((x for x in self._process.stdout if "http://" in x), "")
        assert line, f"it did not start: exit code {self._process.wait()}"
        url = line.split(" at ")[1].strip().removesuffix("/v1")
        return Target(url, self._process.pid, self._file, self._log), self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


OPERATOR_ATTACKS: tuple[tuple[str, str, Callable[[Target], str], bool], ...] = (
    ("more running requests", "16 x 200", more_running, True),
    ("64 open files", "one line, exit code 2", few_files(64), False),
    ("80 open files", "one line, exit code 2", few_files(80), False),
    ("100 open files", "one line, exit code 2", few_files(100), False),
    ("all addresses, no keys", "exit code 2", open_to_all, False),
    ("keys that can be guessed", "exit code 2", short_keys, False),
    ("SIGTERM within a template", "exit code 0", sigterm_while_a_template_never_ends, False),
    ("the story's file", "mode 600", story_file, False),
    ("two servers, one file of changes", "one is refused", two_servers_one_file, False),
)
