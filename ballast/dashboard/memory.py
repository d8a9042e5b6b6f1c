"""Draw the pages of devices by owner, as a bar and in numbers."""

from __future__ import annotations

from rich.text import Text

from ballast.core.report import ModelReport
from ballast.core.units import format_bytes
from ballast.dashboard.formatting import bar
from ballast.server.observe.server_state import DeviceNow, ServerNow

# Each part has a mark of its own, for terminals without colours.
WEIGHTS, SLOTS, SHARED, KV, CACHED, ACTIVATIONS, LENT, RECLAIMING, FREE = "█▌▇▓▒#>~·"
_STYLES = {
    WEIGHTS: "blue",
    SLOTS: "bright_blue",
    SHARED: "cyan",
    KV: "green",
    CACHED: "green dim",
    ACTIVATIONS: "yellow",
    LENT: "red",
    RECLAIMING: "magenta",
    FREE: "bright_black",
}


_SELDOM = ("slots of layers", "shared weights", "cached prefixes", "lent", "reclaiming")
"""Parts that the legend leaves out where they have no pages."""


def pool(now: ServerNow | DeviceNow) -> list[tuple[str, int, str]]:
    """Divide the pages of all devices, or of one, by use: (name, pages, mark), which add up to the
    total."""
    held = dict.fromkeys(("weights", "slots", "shared", "kv", "arena", "lent"), 0)
    for owner, pages in now.owners.items():
        kind = owner.partition(":")[0]
        held[kind] = held.get(kind, 0) + pages
    reports = [m if isinstance(m, ModelReport) else m.report for m in now.models]
    cached = min(held["kv"], sum(m.cached_pages for m in reports))
    return [
        ("weights", held["weights"], WEIGHTS),
        ("slots of layers", held["slots"], SLOTS),
        ("shared weights", held["shared"], SHARED),
        ("KV", held["kv"] - cached, KV),
        ("cached prefixes", cached, CACHED),
        ("activations", held["arena"], ACTIVATIONS),
        ("lent", held["lent"], LENT),
        ("reclaiming", now.reclaiming, RECLAIMING),
        ("free", now.free, FREE),
    ]


def pool_bar(now: ServerNow | DeviceNow, width: int) -> Text:
    """Draw the whole pool as a bar."""
    return _drawn(bar([(pages, mark) for _, pages, mark in pool(now)], now.total, width))


def model_bar(report: ModelReport, total: int, width: int) -> Text:
    """Draw one model's share of the pool as a bar, shared weights included."""
    parts = [
        (report.weight_pages, WEIGHTS),
        (report.kv_pages - report.cached_pages, KV),
        (report.cached_pages, CACHED),
    ]
    return _drawn(bar(parts, total, width))


def legend(now: ServerNow) -> list[Text]:
    """Return one text for each part of the pool, with its pages and share."""
    parts = []
    for name, pages, mark in pool(now):
        if not pages and name in _SELDOM:
            continue
        share = pages / now.total if now.total else 0.0
        text = Text(no_wrap=True)
        text.append(mark, _STYLES[mark]).append(f" {name} ", "bright_black")
        text.append(f"{pages}").append(f" {format_bytes(pages * now.page_bytes)}", "bright_black")
        text.append(f" {share:.0%}", "bright_black")
        parts.append(text)
    return parts


def _drawn(runs: list[tuple[str, str]]) -> Text:
    text = Text(no_wrap=True)
    for mark, cells in runs:
        text.append(cells, _STYLES[mark])
    return text
