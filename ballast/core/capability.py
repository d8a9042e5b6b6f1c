"""Which devices can lend pages to which, and by what means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.units import format_bytes

CPU, GROUP, CUDA = "cpu", "tensor-parallel", "cuda"
MAP = "map"
"""The borrower maps the lender's memfd."""
IMPORT = "import"
"""The borrower imports each page of a lease, and uses it where it is."""

_MEANS = {(CPU, CPU): MAP, (CUDA, CUDA): IMPORT}
"""By the kinds of lender and borrower."""


@dataclass(frozen=True, slots=True)
class GpuReach:
    """What a process that has a GPU says of it, by names that are the same in all processes:
    ordinals are not."""

    gpu: str
    """Its UUID, or that of the MIG slice."""
    peers: tuple[str, ...]
    """GPUs whose memory it can use in place, of those that the process may use; no MIG slice can,
    nor can its memory be used."""


@dataclass(frozen=True, slots=True)
class Lendable:
    """What decides whether a device can lend or borrow."""

    device: str
    page_bytes: int
    kind: str = CPU
    host: str = ""
    """The same for all devices of one host."""
    reach: GpuReach | None = None
    """Of a GPU; None: nobody has said so far."""
    layered: bool = False
    """Its KV lies layer by layer: only slabs of whole blocks can lie on borrowed pages."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Of one pair, in one direction."""

    lender: str
    borrower: str
    means: str | None
    """None: it cannot lend to the other."""
    why: str = ""
    """Why it cannot, if so."""


def capabilities(devices: Sequence[Lendable]) -> tuple[Capability, ...]:
    """Of every device to every other, in their order."""
    return tuple(_capability(a, b) for a in devices for b in devices if a is not b)


def _capability(lender: Lendable, borrower: Lendable) -> Capability:
    means, why = _MEANS.get((lender.kind, borrower.kind)), ""
    if lender.host != borrower.host:
        means, why = None, "they are on different hosts"
    elif means is None:
        why = f"a {borrower.kind} device cannot use the memory of a {lender.kind} device"
    elif lender.page_bytes != borrower.page_bytes:
        means, sizes = None, (format_bytes(d.page_bytes) for d in (lender, borrower))
        why = f"their pages differ: {' and '.join(sizes)}"
    elif borrower.layered:
        means, why = None, "its KV lies layer by layer, and so never on borrowed pages"
    elif means == IMPORT and (why := _beyond(lender, borrower)):
        means = None
    return Capability(lender.device, borrower.device, means, why)


def _beyond(lender: Lendable, borrower: Lendable) -> str:
    """Why one GPU cannot use the memory of the other; empty where it can."""
    source, target = lender.reach, borrower.reach
    if source is None or target is None:
        silent = [d.device for d in (lender, borrower) if d.reach is None]
        return f"it is not known which GPUs {' and '.join(silent)} can reach"
    # Two devices may have parts of one GPU's memory.
    if source.gpu == target.gpu or source.gpu in target.peers:
        return ""
    return f"its driver says that it cannot use the memory of {source.gpu} in place"
