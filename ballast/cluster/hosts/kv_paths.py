"""Introduce agents of hosts to each other, which exchange KV of requests that move between them.

Pure: `HostedWorkers` passes on what agents report, and sends agents what this returns.
"""

from __future__ import annotations

import itertools

from ballast.transport.host_messages import (
    HostListensMsg,
    KvOrder,
    KvReport,
    ListenKvMsg,
    ReachHostMsg,
)


class KvPaths:
    """The hosts that can send KV, and those that wait for one to listen."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}
        """Address of each."""
        self._waiting: dict[int, tuple[str, str]] = {}
        """Receiver and sender, by the number of the order to listen."""
        self._numbers = itertools.count(1)

    def join(self, node: str, ip: str) -> None:
        """Note a host, and the address at which others reach it."""
        self._hosts[node] = ip

    def leave(self, node: str) -> list[tuple[str, KvOrder]]:
        """Note that a host is gone; returns what others are to do, by node."""
        self._hosts.pop(node, None)
        gone = [n for n, pair in self._waiting.items() if node in pair]
        pairs = [self._waiting.pop(n) for n in gone]
        return [(to, ReachHostMsg(node, "", "")) for to, sender in pairs if sender == node]

    def handle(self, node: str, report: KvReport) -> list[tuple[str, KvOrder]]:
        """Note what a host reports; returns what hosts are to do."""
        if isinstance(report, HostListensMsg):
            to, sender = self._waiting.get(report.id, ("", ""))
            if sender != node:
                return []
            del self._waiting[report.id]
            return [(to, ReachHostMsg(node, report.address, report.key))]
        ip = self._hosts.get(report.node)
        if ip is None or report.node == node:
            return [(node, ReachHostMsg(report.node, "", ""))]
        number = next(self._numbers)
        self._waiting[number] = node, report.node
        return [(report.node, ListenKvMsg(number, node, ip, report.key))]
