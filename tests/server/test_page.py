"""The page at `/`: what is sent, to whom, and that it inserts no markup."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ballast.bench.served_fleet import answer
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.access.keys import ApiKeys
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import STRANGER
from ballast.server.routes.page import page_files
from tests.bench.test_served_fleet import job
from tests.ports import kept_port
from tests.server.browser import CHROMIUM, Browser, browser
from tests.server.page_stub import EVIL, Fleet, stub
from tests.server.process import ServerProcess, until
from tests.server.test_api import MODEL
from tests.test_docs_site import ROOT

FILES = page_files()
HTML = FILES["page.html"].decode()
SCRIPTS = {name: text.decode() for name, text in FILES.items() if name.endswith(".js")}
VISIBLE_ORDERS = (
    "[...document.querySelectorAll('td button, .device button')].filter(b => !b.hidden)"
)
CUT = """[...document.querySelectorAll('.wide')].filter(
  (box) => box.scrollWidth > box.clientWidth).map((box) => box.firstElementChild.id)"""
"""Tables of which a part is out of sight, to be scrolled to."""
A_DAY = """(async () => {
  const { MemoryPanels } = await import('/page/memory.js');
  const panels = new MemoryPanels(() => {});
  const device = { device: 'x', page_bytes: 1, total: 9, free: 1, reclaiming: 0, cached_pages: 0,
    owners: { 'kv:a': 8 }, models: [], cordoned: false, reason: null };
  for (let time = 0; time < 86400; time += 30) {
    panels.show({ state: { time, devices: [device], models: [] } });
  }
  return [panels._panels.get('x').samples.length, panels._seconds];
})()"""
"""What a page keeps that has followed a server for a day, and how many seconds it shows."""
MARKUP = '<img src="x" onerror="document.title=1"> **b** & <b>bold</b>'


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    """One browser for all tests here: it takes seconds to start."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with browser() as found:
        yield found


@pytest.fixture
def shown(window: Browser) -> Browser:
    """The browser without a page, which has not complained yet."""
    window.open("about:blank")
    window.complaints.clear()
    return window


def policy(response: httpx.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return dict(part.split(" ", 1) for part in parts)


def test_everything_that_the_page_refers_to_is_sent_and_nothing_else(echo: ServerProcess) -> None:
    page = echo.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    found = {
        path.removeprefix("page/") for path in re.findall(r'(?:href|src)="([^"]+)"', page.text)
    }
    for text in SCRIPTS.values():
        found |= set(re.findall(r'from "\./([^"]+)"', text))
    assert found == FILES.keys() - {"page.html"}
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for name in found:
        sent = echo.http.get(f"/page/{name}")
        assert sent.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        assert sent.content == FILES[name]
    for path in ("/page/__init__.py", "/page/..%2fapp.py", "/page/../app.py", "/page/", "/page"):
        assert echo.http.get(path).status_code == 404
    assert echo.http.head("/").status_code == 200
    assert echo.http.post("/").status_code == 405


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/page/icon.svg"])
def test_each_file_is_sent_with_what_confines_it(echo: ServerProcess, path: str) -> None:
    response = echo.http.get(path)
    allowed = policy(response)
    assert allowed["default-src"] == "'self'"
    assert allowed["frame-ancestors"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
    assert allowed["require-trusted-types-for"] == "'script'"
    assert allowed["trusted-types"] == "'none'"
    assert not {"script-src", "style-src", "img-src", "connect-src"} & allowed.keys()
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-store"
    assert "set-cookie" not in response.headers


def test_nothing_comes_from_elsewhere_and_keys_are_kept_nowhere() -> None:
    assert not re.search(
        r"""(href|src)="(?!page/)|<script(?![^>]* src=)|<style|\son\w+=|\sstyle=""", HTML
    )
    assert "name=" not in re.sub(r'<meta name="[^"]*"', "", HTML)  # no input reaches an address
    forbidden = (
        r"https?:|//[a-z]|[iI]nnerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\("
        r"|localStorage|sessionStorage|indexedDB|cookie|location|pushState|replaceState|URLSearchParams|import\("
    )
    for name, text in SCRIPTS.items():
        code = re.sub(r"(^|\s)//.*", "", text)
        assert not re.search(forbidden, code), (name, re.search(forbidden, code))
    assert "url(" not in FILES["page.css"].decode()


def test_the_package_brings_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "server/page/*" in project["tool"]["setuptools"]["package-data"]["ballast"]


def test_the_files_are_open_to_all_and_what_they_ask_for_is_not() -> None:
    keys = (KeySettings(name="a", key="sk-a-of-the-tests"),)
    guard = ApiKeys(ServerSettings(keys=keys, admin_key="sk-admin-of-the-tests"))
    for path in ("/", "/page/{name}"):
        guard.check(STRANGER, "GET", path)
    for path in ("/v1/models", "/admin/state", "/v1/chat/completions", "/pages", "/page"):
        with pytest.raises(Fault) as refused:
            guard.check(STRANGER, "GET", path)
        assert refused.value.status == 401


def test_a_page_elsewhere_neither_reaches_it_nor_speaks_for_it(echo: ServerProcess) -> None:
    assert echo.http.get("/", headers={"host": "evil.example"}).status_code == 421
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    own = {"origin": echo.base}
    assert echo.http.post("/v1/chat/completions", json=asked, headers=own).status_code == 200
    framed = {"origin": "null"}
    assert echo.http.post("/v1/chat/completions", json=asked, headers=framed).status_code == 403


def test_in_a_browser(echo: ServerProcess, shown: Browser) -> None:
    """A conversation by keyboard alone, whose texts are markup; on a phone, in the dark."""
    shown.resize(390, 800, dark=True)
    shown.open(echo.base + "/")
    shown.until(f"document.querySelector('#model')?.value === '{MODEL}'")
    shown.until("document.querySelectorAll('#models tbody tr').length === 4")
    shown.until("document.querySelector('.device canvas')?.width > 100")
    rows: Any = shown.value(
        "[...document.querySelectorAll('#models tbody tr')].map(r => r.innerText)"
    )
    assert any("failed: it is broken" in row for row in rows)
    shown.value("document.querySelector('#prompt').focus()")
    shown.type(MARKUP)
    shown.press("Enter")
    shown.until("document.querySelector('.answer .small')?.textContent.includes('tokens cached')")
    assert shown.value("document.querySelector('.asked').textContent") == MARKUP
    assert MARKUP in shown.value("document.querySelector('.answer > .text').textContent")
    shown.until("document.querySelector('#requests tr.ended')?.innerText.includes('stop')")
    assert MARKUP not in shown.value("document.querySelector('#requests').innerText")
    assert shown.value("document.querySelectorAll('main img, main b').length") == 0
    assert shown.value("document.title") == "Ballast"
    assert shown.value("document.documentElement.scrollWidth") <= 390
    assert shown.value("location.href") == echo.base + "/"
    assert shown.complaints == []


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as kept:
        yield kept


def test_a_hundred_models_an_operator_and_a_server_that_restarts(shown: Browser, port: int) -> None:
    fleet = Fleet([f"m{i}" for i in range(100)])
    shown.resize(1280, 800)
    with stub(fleet, port):
        shown.open(f"http://127.0.0.1:{port}/")
        shown.until("document.querySelectorAll('#models tbody tr').length === 101")
        text = shown.value("document.querySelector('.device').innerText")
        assert "of 33 evicted would fit now: m2, m5, m8, m11, m14, m17 and 27 more" in text
        assert not any(shown.value(VISIBLE_ORDERS))  # without the admin key it only reads
        shown.value("document.querySelector('#keys').open = true")
        shown.value("document.querySelector('#admin-key').focus()")
        shown.type("sk-admin")
        shown.press("Enter")
        shown.until(f"{VISIBLE_ORDERS}.length === 201")
        shown.value("document.querySelector('#search').focus()")
        shown.type("M77")
        shown.until("document.querySelectorAll('#models tbody tr').length === 1")
        shown.press("Tab")
        shown.until("document.activeElement?.textContent === 'Load'")
        shown.press("Enter")
        until(lambda: fleet.orders == ["/admin/models/m77/activate"])
    shown.until("document.querySelector('#status.bad')?.textContent.includes('not answer')")
    fleet.names = ["other", EVIL]
    with stub(fleet, port):
        shown.value("document.querySelector('#search').value = ''")
        shown.until("document.querySelectorAll('#models tbody tr').length === 3")
        shown.until("!document.querySelector('#status.bad')")
        assert shown.value("document.title") == "Ballast"
        assert shown.value("document.querySelectorAll('main img').length") == 0
        assert shown.value("document.querySelectorAll('#requests tbody tr').length") == 40
        assert shown.value("document.querySelectorAll('#decisions tbody tr').length") == 30
        assert shown.value("document.documentElement.scrollWidth") <= 1280
        assert shown.value(CUT) == []


def test_a_simulation_and_the_past_are_played_and_a_day_is_bounded(shown: Browser) -> None:
    result = answer(job(workload="recorded", presets="balloon,swap"))
    with stub(Fleet(["m0", "m1"], result)) as running:
        shown.resize(390, 800, dark=True)
        shown.open(f"http://127.0.0.1:{running.port}/")
        shown.until("document.querySelectorAll('#models tbody tr').length === 3")
        shown.value("document.querySelector('#tab-live').focus()")
        shown.press("ArrowRight")
        shown.until("document.activeElement?.id === 'tab-simulate'")
        assert shown.value("document.querySelector('#simulate-go').disabled")
        shown.value("document.querySelector('#admin-key').value = 'k'")
        shown.value("document.querySelector('#keys-form').requestSubmit()")
        shown.until("!document.querySelector('#simulate-go').disabled")
        shown.value("document.querySelector('#simulate-go').click()")
        shown.until("document.querySelectorAll('#simulated tbody tr').length === 2")
        shown.until("document.querySelector('#film-devices canvas')?.width > 100")
        assert shown.value("document.querySelector('#film').options.length") == 2
        end = shown.value("document.querySelectorAll('#film-decisions tr').length")
        shown.value("document.querySelector('#moment').value = 0")
        shown.value("document.querySelector('#moment').dispatchEvent(new Event('input'))")
        assert shown.value("document.querySelectorAll('#film-decisions tr').length") < end
        shown.value("document.querySelector('#play').click()")
        shown.until("Number(document.querySelector('#moment').value) > 2")
        shown.value("document.querySelector('[data-history]').click()")
        shown.until("document.querySelector('#film')?.options.length === 1")
        shown.value("document.querySelector('[data-history=\"3600\"]').click()")
        shown.until("document.querySelector('#film')?.options[0].text === 'Last hour'")
        assert shown.value("document.documentElement.scrollWidth") <= 390
        shown.value("document.querySelector('#simulated-models').open = true")
        shown.resize(1280, 800)
        assert shown.value(CUT) == []
        assert shown.value(A_DAY) == [600, 240]
        assert shown.complaints == []
