"""Take the pictures of the page in docs/page.md, from a server that runs.

    (cat fleets/demo/fleet.yaml; echo "server: {admin_key: $KEY}") > fleets/demo/admin.yaml
    BALLAST_BUDGET=600MiB ballast serve fleets/demo/admin.yaml &
    .venv/bin/python scripts/page_picture.py --model atlas-chat --admin-key "$KEY"

Needs Chromium. Asks models one question in turn, so that memory moves, and then two side by side;
with the admin key it then simulates the fleet under three presets.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.browser import CHROMIUM, Browser, browser

ASK = "What is a ship's ballast?"
WIDTH, HEIGHT = 1280, 900
SIMULATED = {"presets": "ballast,lru,swap", "seconds": "120"}
TOKENS = 48


def ask(page: Browser, model: str, beside: str = "") -> None:
    """Ask one model, or two, and wait for the whole answer."""
    for name, value in (
        *(("model", model), ("beside", beside), ("most", TOKENS)),
        ("temperature", 0),
    ):
        page.value(f"document.querySelector('#{name}').value = {json.dumps(str(value))}")
    page.value("document.querySelector('#prompt').focus()")
    page.type(ASK)
    page.press("Enter")
    page.until("document.querySelector('#send').disabled")
    page.until("!document.querySelector('#send').disabled")


def use_key(page: Browser, key: str) -> None:
    """Enter the admin key."""
    page.until("document.querySelectorAll('#models tbody tr').length > 1")
    page.value(f"document.querySelector('#admin-key').value = {json.dumps(key)}")
    page.value("document.querySelector('#keys-form').requestSubmit()")
    page.until("!document.querySelector('#simulate-go').disabled")


def simulate(page: Browser) -> None:
    """Simulate the fleet, and show half of what happened."""
    page.value("document.querySelector('#tab-simulate').click()")
    for name, value in SIMULATED.items():
        page.value(f"document.querySelector('#{name}').value = {json.dumps(value)}")
    page.value("document.querySelector('#simulate-go').click()")
    page.until("document.querySelector('#simulate-go').disabled")
    page.until("!document.querySelector('#simulate-go').disabled")
    failed = page.value("document.querySelector('#simulated-error').textContent")
    if failed:
        sys.exit(f"page_picture: nothing was simulated: {failed}")
    page.value("document.querySelector('#moment').value = 500")
    page.value("document.querySelector('#moment').dispatchEvent(new Event('input'))")


def save(page: Browser, path: Path) -> None:
    path.write_bytes(base64.b64decode(page.screenshot()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="atlas-chat")
    parser.add_argument("--beside", help="the model beside it; default: the first of the others")
    parser.add_argument("--admin-key", help="of the server; without it, nothing is simulated")
    parser.add_argument("--to", type=Path, default=Path("docs"), help="folder of the pictures")
    asked = parser.parse_args()
    if CHROMIUM is None:
        print("page_picture: there is no Chromium", file=sys.stderr)
        return 1
    with browser() as page:
        page.resize(WIDTH, HEIGHT)
        page.open(f"{asked.url}/")
        if asked.admin_key is not None:
            use_key(page, asked.admin_key)
        page.until("document.querySelector('#model')?.options.length > 1")
        names = page.value("[...document.querySelector('#model').options].map(o => o.value)")
        others = [name for name in names if name != asked.model]
        beside = asked.beside or others[0]
        for other in others:
            if other != beside:
                ask(page, other)
        page.value("document.querySelector('#clear').click()")
        ask(page, asked.model, beside)
        time.sleep(2)  # until the last state has been read
        save(page, asked.to / "page.png")
        if asked.admin_key is not None:
            simulate(page)
            save(page, asked.to / "page-simulate.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
