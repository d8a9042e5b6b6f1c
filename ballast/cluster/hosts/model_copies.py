"""Decide which host sends a model to which, so that its files are read once.

::

    host 1  has the model ──> host 2 ──> host 3     each passes segments on as soon as it has them
                    └───────> host 4                the next one, once host 2 has all of it

A host that is about to load a model asks. If its files are the same as those that another host has
loaded, as on a path that all see, it reads them; else a host sends it that has the model or is
receiving it. So N hosts that ask at once are a chain, which takes hardly longer than one copy: each
host sends to one other at a time.

Pure: `HostedWorkers` passes on what agents report, and sends agents what this returns.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field

from ballast.transport.host_messages import (
    ModelDroppedMsg,
    ModelFailedMsg,
    ModelKeptMsg,
    ModelOrder,
    ModelReport,
    ReadFilesMsg,
    ReceiveModelMsg,
    SenderReadyMsg,
    SendModelMsg,
    WantModelMsg,
)

log = logging.getLogger(__name__)

SEGMENTS = 16
"""Segments of a typical model: one more host in a chain delays its end by the time of a segment,
one more receiver of a host by that of a model."""

Kept = tuple[str, str]
"""Digest of a model's name, and its kind."""
Orders = list[tuple[str, ModelOrder]]
"""Messages to agents, by node."""


@dataclass(frozen=True, slots=True)
class _Host:
    ip: str
    machine: str


@dataclass(slots=True)
class _Transfer:
    """A model that a host receives, or waits to be told from where."""

    kept: Kept
    to: str
    wanted: WantModelMsg
    id: int = 0
    """Number of the present attempt."""
    sender: str = ""
    ready: bool = False
    """Whether the receiver knows where the sender listens."""
    tried: set[str] = field(default_factory=set)


class ModelCopies:
    """Which hosts have which models, and which are receiving them."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._copies: dict[Kept, dict[str, str]] = {}
        """Listing of the files, by node."""
        self._transfers: dict[tuple[Kept, str], _Transfer] = {}
        """By receiver."""
        self._numbers = itertools.count(1)

    def join(self, node: str, ip: str, machine: str) -> None:
        """Note a host. `machine`: hosts of equal ones have equal layouts of weights."""
        self._hosts[node] = _Host(ip, machine)

    def leave(self, node: str) -> Orders:
        """Note that a host is gone. What it was sending comes from others."""
        self._hosts.pop(node, None)
        for nodes in self._copies.values():
            nodes.pop(node, None)
        self._transfers = {key: t for key, t in self._transfers.items() if t.to != node}
        # A receiver that is connected with it reports that itself.
        waiting = [t for t in self._transfers.values() if t.sender == node and not t.ready]
        return [order for transfer in waiting for order in self._choose(transfer)]

    def handle(self, node: str, report: ModelReport) -> Orders:
        """Note what a host reports; returns what hosts are to do."""
        if node not in self._hosts:
            return []
        match report:
            case ModelKeptMsg():
                kept = report.model, report.kind
                self._copies.setdefault(kept, {})[node] = report.listing
                self._transfers.pop((kept, node), None)
                return []
            case ModelDroppedMsg():
                self._copies.get((report.model, report.kind), {}).pop(node, None)
                return []
            case WantModelMsg():
                kept = report.model, report.kind
                transfer = self._transfers[kept, node] = _Transfer(kept, node, report)
                return self._choose(transfer)
            case SenderReadyMsg():
                return self._ready(report)
            case ModelFailedMsg():
                failed = self._transfers.get(((report.model, report.kind), node))
                return [] if failed is None else self._choose(failed)

    def _ready(self, report: SenderReadyMsg) -> Orders:
        for transfer in self._transfers.values():
            if transfer.id == report.id:
                transfer.ready = True
                order = ReceiveModelMsg(*transfer.kept, report.address, report.key)
                return [(transfer.to, order)]
        return []

    def _choose(self, transfer: _Transfer) -> Orders:
        """Have another host send the model than those that were tried, or its files be read."""
        transfer.tried.add(transfer.sender)
        transfer.sender, transfer.ready = "", False
        kept, to, wanted = transfer.kept, transfer.to, transfer.wanted
        copies = self._copies.get(kept, {})
        able = [node for node in self._hosts if self._may_send(node, transfer)]
        if not able or (wanted.listing and wanted.listing in copies.values()):
            del self._transfers[kept, to]
            return [(to, ReadFilesMsg(*kept))]
        transfer.sender = min(able, key=lambda node: self._rank(kept, node))
        transfer.id = next(self._numbers)
        ip = self._hosts[transfer.sender].ip
        return [(transfer.sender, SendModelMsg(transfer.id, *kept, ip, wanted.key))]

    def _may_send(self, node: str, transfer: _Transfer) -> bool:
        """Whether a host has the model or is receiving it, not from the one that wants it."""
        if node in transfer.tried or self._hosts[node].machine != self._hosts[transfer.to].machine:
            return False
        chain = self._chain(transfer.kept, node)
        return transfer.to not in chain and chain[-1] in self._copies.get(transfer.kept, {})

    def _chain(self, kept: Kept, node: str) -> list[str]:
        """Return a host, that which sends to it, and so on."""
        chain = [node]
        while (transfer := self._transfers.get((kept, chain[-1]))) is not None and transfer.sender:
            chain.append(transfer.sender)
        return chain

    def _rank(self, kept: Kept, node: str) -> tuple[int, str]:
        """Return how long a copy from a host takes, in segments, beside that of an idle one."""
        receivers = sum(t.sender == node and t.kept == kept for t in self._transfers.values())
        return receivers * SEGMENTS + len(self._chain(kept, node)), node
