#!/usr/bin/env python3
"""Build the wheel, install it into a fresh environment as a user would, and serve with it.

    make wheel                         # or: python3 scripts/try_wheel.py [--dist dist]

Nothing of the clone is in reach of what is installed. Models are made and served, a chat is
answered, the page and its scripts are there, and profiles of GPUs are found. Then the wheel lies in
`dist`. Needs a package index; PyTorch comes from BALLAST_TORCH_INDEX, if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
START_SECONDS = 600.0
"""Time for a first start, which compiles kernels."""


def run(*command: str | Path, at: Path) -> str:
    """Run a command to its end; returns what it printed. Ends the script if it fails."""
    print("$", *command, flush=True)
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=at, env=own, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"try_wheel: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(pip: Path, to: Path) -> Path:
    """Build the wheel from a copy of what git knows, so that nothing of the clone is changed, and
    nothing that lies about in it gets in."""
    with tempfile.TemporaryDirectory() as scratch:
        names = run("git", "ls-files", "-z", at=ROOT).split("\0")
        for name in filter(None, names):
            copy = Path(scratch, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)
        run(pip, "wheel", ".", "--no-deps", "--wheel-dir", to, at=Path(scratch))
    [wheel] = to.glob("*.whl")
    return wheel


def install(environment: Path, wheel: Path) -> Path:
    """Install the wheel and what it needs; returns the command `ballast`."""
    pip = environment / "bin" / "pip"
    [torch] = re.findall(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
    index = os.environ.get("BALLAST_TORCH_INDEX")
    named = ("--index-url", index) if index else ()
    run(pip, "install", "--quiet", torch, *named, at=environment)
    run(pip, "install", "--quiet", "--constraint", CONSTRAINTS, wheel, at=environment)
    run(pip, "check", at=environment)
    return environment / "bin" / "ballast"


def ask(url: str, body: dict[str, Any] | None = None, seconds: float = 120.0) -> bytes:
    """Return the body of an answer; raises OSError for a status from 400 on."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        found: bytes = answer.read()
        return found


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            ask(f"{url}/health", seconds=5.0)
            return
        except OSError:
            time.sleep(0.5)
    sys.exit("try_wheel: the server was never ready")


def try_server(ballast: Path, fleet: Path) -> None:
    """Serve a fleet, chat, load the page with its scripts, and stop the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = (ballast, "serve", fleet, "--port", str(port), "--log-level", "warning")
    print("$", *command, flush=True)
    server = subprocess.Popen(list(map(str, command)), cwd=fleet.parent)
    try:
        wait_until_ready(server, url)
        page = ask(f"{url}/").decode()
        files = re.findall(r"(?:src|href)=\"(page/[^\"]+)\"", page)
        assert len(files) >= 3, page
        for name in files:
            assert ask(f"{url}/{name}"), name
        models = json.loads(ask(f"{url}/v1/models"))["data"]
        asked = [{"role": "user", "content": "Hello"}]
        for model in models[:2]:
            body = {"model": model["id"], "messages": asked, "max_tokens": 4}
            answer = json.loads(ask(f"{url}/v1/chat/completions", body))
            print(f"  {model['id']}: {answer['choices'][0]['message']['content']!r}")
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=120)
    if code:
        sys.exit(f"try_wheel: the server ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheel is put")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-wheel-") as directory:
        scratch = Path(directory)
        environment = scratch / "environment"
        run(os.environ.get("BALLAST_PYTHON", sys.executable), "-m", "venv", environment, at=scratch)
        wheel = build(environment / "bin" / "pip", scratch / "wheel")
        ballast = install(environment, wheel)
        print(run(ballast, "version", at=scratch).strip())
        fleet = scratch / "fleet" / "fleet.yaml"
        made = ("--size", "tiny", "--steps", "0", "--models", "2")
        run(ballast, "fleet", "make", fleet.parent, *made, at=scratch)
        run(ballast, "doctor", fleet, at=scratch)
        simulated = ("--devices", "H100-80G", "--preset", "ballast", "--seconds", "5")
        run(ballast, "simulate", fleet, *simulated, at=scratch)
        try_server(ballast, fleet)
        asked.dist.mkdir(parents=True, exist_ok=True)
        shutil.copy2(wheel, asked.dist)
        size = wheel.stat().st_size / 1e6
        print(f"try_wheel: ok; {asked.dist / wheel.name}, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
