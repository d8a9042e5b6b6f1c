#!/usr/bin/env python3
"""Go a newcomer's way: clone, `make serve`, and a question to the page, with seconds of each.

    python scripts/try_newcomer.py [--port 8000]

In a fresh clone of this checkout's last commit, with an environment and caches of its own; packages
come from the machine's package index, and PyTorch from BALLAST_TORCH_INDEX, if that is set. Needs
Chromium. Prints the commands, how long each step took, and the answer that the page shows; status 1
if it does not name Paris, asked for the capital of France.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.server.browser import CHROMIUM, Browser, browser  # noqa: E402 - it is beside scripts

MODEL, ASK = "atlas-chat", "What is the capital of France?"
CITY = "Paris"
"""Stands in a sensible answer."""
MOST_SECONDS = 1800.0
POLL_SECONDS = 0.2
_CACHES = {"XDG_CACHE_HOME": "caches", "NUMBA_CACHE_DIR": "kernels", "PIP_CACHE_DIR": "pip"}
_NAMED = ("PYTHONPATH", "VIRTUAL_ENV", "BALLAST_CHOICES", "BALLAST_FINDINGS", "HF_HOME")
"""Variables by which a newcomer's commands would find what is here already."""


def environment(at: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in _NAMED}
    return own | {name: str(at / below) for name, below in _CACHES.items()}


@contextmanager
def served(clone: Path, port: int, own: dict[str, str]) -> Iterator[None]:
    """`make serve` in a clone, once it answers; stopped on leaving, with what it has started."""
    command = ("make", "serve", f"PORT={port}")
    print("$", *command, flush=True)
    server = subprocess.Popen(command, cwd=clone, env=own, start_new_session=True)
    try:
        end = time.monotonic() + MOST_SECONDS
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > end:
                sys.exit("try_newcomer: the server did not start")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(page: Browser, url: str) -> str:
    """Ask the model in the page as it opens; returns the answer that it shows."""
    page.open(url)
    page.until("document.querySelector('#model')?.options.length > 1")
    page.value(f"document.querySelector('#model').value = '{MODEL}'")
    page.value("document.querySelector('#prompt').focus()")
    page.type(ASK)
    page.press("Enter")
    page.until("document.querySelector('#send').disabled")
    page.until("!document.querySelector('#send').disabled")
    found = page.value("document.querySelector('.answer > .text').textContent")
    return " ".join(str(found).split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("try_newcomer: there is no Chromium")
    with tempfile.TemporaryDirectory() as scratch:
        clone, own = Path(scratch, "ballast"), environment(Path(scratch))
        began = time.monotonic()
        command = ("git", "clone", "--quiet", str(ROOT), str(clone))
        print("$ git clone, cd ballast", flush=True)
        subprocess.run(command, check=True)
        with served(clone, asked.port, own), browser() as page:
            answering = time.monotonic()
            answer = ask(page, f"http://127.0.0.1:{asked.port}/")
            ended = time.monotonic()
    print(f"clone, environment and models, until the server answers: {answering - began:.0f} s")
    print(f"the page, until its answer is whole: {ended - answering:.0f} s")
    print(f"together: {(ended - began) / 60:.1f} minutes, 3 commands and a question")
    print(f"{ASK} {answer}")
    return CITY not in answer


if __name__ == "__main__":
    sys.exit(main())
