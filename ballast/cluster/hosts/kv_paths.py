"""Introduce agents of hosts to each other, which exchange models, and KV of requests that move.

Pure: `HostedWorkers` passes on what agents report, and sends agents what this returns.
"""

from __future__ import annotations

import itertools

from ballast.cluster.hosts.model_copies import ModelCopies
from ballast.transport.host_messages import (
    HostListensMsg,
    KvOrder,
    KvReport,
    ListenKvMsg,
    ModelOrder,
    ModelReport,
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


class HostExchanges:
    """What the hosts of a server send to each other."""

    def __init__(self) -> None:
        self._models, self._kv = ModelCopies(), KvPaths()

    def join(self, node: str, ip: str, machine: str) -> None:
        """Note a host; as `ModelCopies.join`."""
        self._models.join(node, ip, machine)
        self._kv.join(node, ip)

    def handle(
        self, node: str, report: ModelReport | KvReport | None
    ) -> list[tuple[str, ModelOrder | KvOrder]]:
        """Note what a host reports; None: it is gone. Returns what hosts are to do, by node."""
        if report is None:
            return [*self._models.leave(node), *self._kv.leave(node)]
        if isinstance(report, KvReport):
            return [*self._kv.handle(node, report)]
        return [*self._models.handle(node, report)]
