"""Draw one frame of `ballast top`, and the output of `ballast ps`, from readings of the server.

Pure functions: nothing here reads from the server or keeps state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from ballast.core.units import format_bytes
from ballast.dashboard.columns import rows, table
from ballast.dashboard.formatting import counted, decided, rate_of, span_of, sparkline
from ballast.dashboard.memory import legend, pool_bar
from ballast.dashboard.reader import Rates
from ballast.server.observe.server_state import DeviceNow, ServerNow

_STATUS = {
    "ok": ("● serving", "green"),
    "draining": ("◐ draining", "yellow"),
    "standby": ("○ on standby", "dim"),
    "restarting": ("◐ the worker restarts", "yellow"),
    "lost": ("✗ no worker", "bold red"),
}
_FAINT = "bright_black"
_INDENT = 10
"""Width in cells of the labels before the pool's bar, and of the indent below it."""
_GAP = "   "
_SPARK = 60
"""Most cells of the sparkline of tokens per second."""
LEAST_DECISIONS = 4
"""Lines kept for decisions where models would fill the screen."""
MOST_FAILURES = 3
MOST_LEASES = 4
MOST_DECISIONS = 12
"""Most decisions where no screen bounds them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Contents of one frame, and how to show them."""

    url: str
    now: ServerNow | None
    """Last reading of the server; None if there was none."""
    rates: Rates
    trouble: str = ""
    """Reason why there is no newer reading, if one is due."""
    age: float = 0.0
    """Seconds since the last reading."""
    pages: bool = False
    """Whether to show models' memory in pages instead of bytes."""


def draw(frame: Frame, width: int, height: int | None) -> RenderableType:
    """Draw a frame in `width` cells and `height` lines; None: in any number of lines, and without
    the line of keys."""
    now = frame.now
    lines: list[RenderableType] = [*_head(frame)]
    if now is None:
        return Group(*lines)
    lines += [*_numbers(now, frame.rates, width), Text()]
    failures = _failures(now)
    if height is None:
        room, most_rows = MOST_DECISIONS, None
    else:
        room = height - len(lines) - len(failures) - len(("titles of models", "", "keys"))
        most_rows = max(1, room - min(LEAST_DECISIONS, room // 3))
    shown, left_out = rows(now, most_rows)
    lines.append(table(now, frame.rates, shown, width, frame.pages))
    if left_out:
        lines.append(_left_out(left_out))
    lines += failures
    if height is not None:
        room -= len(shown) + bool(left_out)
    if room > 1:
        lines += [Text(), *_decisions(now, room)]
    if height is not None:
        lines.append(Text("q quit   u pages or bytes", _FAINT, no_wrap=True))
    return Group(*lines)


def listed(now: ServerNow, url: str, width: int) -> RenderableType:
    """Draw one reading, for `ballast ps`: the server in a line, its models, and why some do not
    serve.

    There are no rates, which need two readings.
    """
    rates = Rates()
    shown, _ = rows(now, None)
    models = table(now, rates, shown, width, False)
    return Group(*_head(Frame(url, now, rates)), models, *_failures(now))


def _head(frame: Frame) -> list[Text]:
    now = frame.now
    first = _line(("ballast ", "bold"), (frame.url, "cyan"))
    if now is not None and not frame.trouble:
        mark, style = _STATUS[now.status]
        first.append(f"  {mark}", style)
    if now is not None:
        facts = [now.device, now.preset, f"up {span_of(now.uptime)}", f"v{now.version}"]
        first.append("  " + " · ".join(facts), _FAINT)
        if now.restarts:
            first.append(f" · {counted(now.restarts, 'worker restart')}", "yellow")
    if frame.trouble:
        old = "" if now is None else f"; what follows is {span_of(frame.age)} old"
        return [first, _line((f"✗ {frame.trouble}{old}", "bold red"))]
    if now is not None and now.reason is not None:
        return [first, _line((f"{now.reason}; {counted(now.open, 'open request')}", "yellow"))]
    missing = [] if now is None else [d for d in now.devices if d.reason is not None]
    return [first, *(_line((f"{d.device}: {d.reason}", "yellow")) for d in missing)]


def _numbers(now: ServerNow, rates: Rates, width: int) -> list[Text]:
    """Draw the pools and the number of requests."""
    pools = [_pool("pool", now, width)]
    if len(now.devices) > 1:
        pools = [_pool(device.device, device, width) for device in now.devices]
    running = sum(m.report.running for m in now.models)
    waiting = sum(m.report.waiting for m in now.models)
    requests = _line(("requests", _FAINT), ("  ", ""), (f"{running} running, ", ""))
    requests.append(f"{waiting} waiting", "yellow" if waiting else "")
    if rates.total is not None:
        line = f"   {rate_of(rates.total)} tokens/s"
        requests.append(line)
        if len(rates.totals) > 1:
            room = max(0, min(_SPARK, width - requests.cell_len - 2))
            requests.append("  ").append(sparkline(rates.totals, room), "green")
    return [*pools, *_side_by_side(legend(now), width), *_leases(now), *_kept(now), requests]


def _leases(now: ServerNow) -> list[Text]:
    """List what devices lend each other, most pages first, with the reason."""
    lines = []
    for lease in sorted(now.leases, key=lambda v: (-v.pages, v.lender, v.borrower))[:MOST_LEASES]:
        line = _line((f"{'lent':{_INDENT}}", _FAINT))
        line.append(f"{lease.lender} to {lease.borrower}: {counted(lease.pages, 'page')}")
        if lease.recalled:
            line.append(f", {lease.recalled} recalled", "yellow")
        lines.append(line.append(f"{_GAP}{lease.why}", _FAINT))
    return lines


def _kept(now: ServerNow) -> list[Text]:
    """Draw the KV that is not on the devices, if there is any: in tiers below them, and staged."""
    staged = sum(m.report.staged_bytes for m in now.models)
    parts = [f"staged {format_bytes(staged)}"] if staged else []
    if now.kv is None:
        return [_line((f"{'kept KV':{_INDENT}}", _FAINT), (_GAP.join(parts), ""))] if parts else []
    fetched = sum((Counter(device.fetched_tokens) for device in now.devices), Counter[str]())
    tiers = [
        f"{t.tier} {format_bytes(t.used_bytes)} of {format_bytes(t.capacity_bytes)}, "
        f"{fetched[t.tier]} tokens fetched"
        for t in now.kv.tiers
    ]
    line = _line((f"{'kept KV':{_INDENT}}", _FAINT), (_GAP.join([*tiers, *parts]), ""))
    if now.kv.disk_fault:
        line.append(f"{_GAP}disk: {now.kv.disk_fault}", "red")
    return [line]


def _pool(name: str, of: ServerNow | DeviceNow, width: int) -> Text:
    size = f" {format_bytes(of.total * of.page_bytes)}, {of.total} pages"
    if isinstance(of, DeviceNow):
        size += "".join(f" + {n} of {lender}" for lender, n in of.borrowed.items())
        size += f" on {of.host}" if of.host else ""
    cells = max(10, width - _INDENT - len(size))
    line = _line((f"{name[: _INDENT - 1]:{_INDENT}}", _FAINT))
    return line.append_text(pool_bar(of, cells)).append(size, _FAINT)


def _side_by_side(texts: Sequence[Text], width: int) -> list[Text]:
    """Arrange texts below the bar, in as many lines as they need."""
    lines: list[Text] = []
    for text in texts:
        if lines and lines[-1].cell_len + len(_GAP) + text.cell_len <= width:
            lines[-1].append(_GAP).append_text(text)
        else:
            lines.append(_line((" " * _INDENT, "")).append_text(text))
    return lines


def _left_out(states: Sequence[str]) -> Text:
    counts = ", ".join(f"{n} {state}" for state, n in Counter(states).most_common())
    return _line((f"and {len(states)} more ({counts})", _FAINT))


def _failures(now: ServerNow) -> list[Text]:
    """List models that are not served, with the reason."""
    lines = [
        _line(("✗ ", "red"), (f"{name} ", "bold"), (f"is not served: {why}", "red"))
        for name, why in list(now.failed.items())[:MOST_FAILURES]
    ]
    more = len(now.failed) - len(lines)
    return [*lines, _line((f"✗ and {more} more", "red"))] if more else lines


def _decisions(now: ServerNow, room: int) -> list[Text]:
    """List decisions below a title, newest first."""
    found = decided(now.decisions, room - 1)
    if not found:
        return [_line(("no decisions yet", _FAINT))]
    verbs = max(len(one.verb) for one in found)
    models = max(len(one.model) for one in found)
    lines = [_line(("decisions", _FAINT))]
    for one in found:
        ago = span_of(now.time - one.time)
        line = _line((f"{ago:>6} ago  ", _FAINT), (f"{one.verb:{verbs}}  ", "bold"))
        line.append(f"{one.model:{models}}  ")
        if one.times > 1:
            line.append(f"{one.times} times; ", _FAINT)
        line.append(one.detail)
        if one.refused:
            line.append(", " if one.detail else "").append(f"refused: {one.refused}", "red")
        lines.append(line)
    return lines


def _line(*parts: tuple[str, str]) -> Text:
    """Build one line, cut off where the screen ends."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
