"""Which devices can lend pages to which, and by what means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.units import format_bytes

CPU, GROUP, CUDA = "cpu", "tensor-parallel", "cuda"
MAP = "map"
"""The borrower maps the lender's memfd."""

_MEANS = {(CPU, CPU): MAP}
"""By the kinds of lender and borrower."""


@dataclass(frozen=True, slots=True)
class Lendable:
    """What decides whether a device can lend or borrow."""

    device: str
    page_bytes: int
    kind: str = CPU
    host: str = ""
    """The same for all devices of one host."""


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
    return Capability(lender.device, borrower.device, means, why)
