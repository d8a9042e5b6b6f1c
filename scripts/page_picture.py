"""Take the picture of the page in docs/page.md, from a server that runs.

    BALLAST_BUDGET=160MiB ballast serve fleets/demo/fleet.yaml &
    .venv/bin/python scripts/page_picture.py --url http://127.0.0.1:8000 --model smollm2

Needs Chromium. Asks two models one question, side by side, and then others in turn, so that memory
moves.
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
WIDTH, HEIGHT = 1280, 760
TOKENS = 48


def ask(page: Browser, model: str, beside: str = "") -> None:
    """Ask one model, or two, and wait for the whole answer."""
    for name, value in (("model", model), ("beside", beside), ("most", TOKENS)):
        page.value(f"document.querySelector('#{name}').value = {json.dumps(str(value))}")
    page.value("document.querySelector('#prompt').focus()")
    page.type(ASK)
    page.press("Enter")
    page.until("document.querySelector('#send').disabled")
    page.until("!document.querySelector('#send').disabled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--png", type=Path, default=Path("docs/page.png"))
    asked = parser.parse_args()
    if CHROMIUM is None:
        print("page_picture: there is no Chromium", file=sys.stderr)
        return 1
    with browser() as page:
        page.resize(WIDTH, HEIGHT)
        page.open(f"{asked.url}/")
        page.until("document.querySelector('#model')?.options.length > 1")
        names = page.value("[...document.querySelector('#model').options].map(o => o.value)")
        others = [name for name in names if name != asked.model]
        for other in others[1:]:
            ask(page, other)
        page.value("document.querySelector('#clear').click()")
        ask(page, asked.model, others[0])
        time.sleep(2)  # until the last state has been read
        asked.png.write_bytes(base64.b64decode(page.screenshot()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
