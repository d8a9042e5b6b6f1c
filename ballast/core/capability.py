"""Decide which devices can lend pages to which, and by what means.

Pure rules on settings and on what workers report of their GPUs. Used by `FleetSettings.lending` for
the controller, and by the doctor; nothing is lent or mapped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.units import format_bytes

CPU, GROUP, CUDA = "cpu", "tensor-parallel", "cuda"
MAP = "map"
"""Means: the borrower maps the lender's memfd."""
IMPORT = "import"
"""Means: the borrower imports each page of a lease, and accesses it in the lender's memory."""

_MEANS = {(CPU, CPU): MAP, (CUDA, CUDA): IMPORT}
"""Means of lending, by (kind of lender, kind of borrower)."""


@dataclass(frozen=True, slots=True)
class GpuReach:
    """A process's report on its GPU, by UUIDs: these are the same in all processes, ordinals are
    not."""

    gpu: str
    """UUID of the GPU, or of the MIG slice."""
    peers: tuple[str, ...]
    """GPUs visible to the process whose memory this GPU can access in place; MIG slices neither
    have such peers nor are ones."""


@dataclass(frozen=True, slots=True)
class Lendable:
    """The facts of a device that decide whether it can lend or borrow."""

    device: str
    page_bytes: int
    kind: str = CPU
    host: str = ""
    """Name of its host; equal for all devices of one host."""
    reach: GpuReach | None = None
    """Report of a GPU's process; None: not reported yet."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether and how one device can lend to another."""

    lender: str
    borrower: str
    means: str | None
    """`MAP` or `IMPORT`; None: it cannot lend to the other."""
    why: str = ""
    """Reason if it cannot; else empty."""


def capabilities(devices: Sequence[Lendable]) -> tuple[Capability, ...]:
    """Return the capability of every device to lend to every other, in the devices' order."""
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
    elif means == IMPORT and (why := _beyond(lender, borrower)):
        means = None
    return Capability(lender.device, borrower.device, means, why)


def _beyond(lender: Lendable, borrower: Lendable) -> str:
    """Return why the borrower's GPU cannot access the lender's memory; empty if it can."""
    source, target = lender.reach, borrower.reach
    if source is None or target is None:
        silent = [d.device for d in (lender, borrower) if d.reach is None]
        return f"it is not known which GPUs {' and '.join(silent)} can reach"
    # Two devices may have parts of one GPU's memory.
    if source.gpu == target.gpu or source.gpu in target.peers:
        return ""
    return f"its driver says that it cannot use the memory of {source.gpu} in place"
