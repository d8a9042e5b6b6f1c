"""Measure by how much jobs are slower while bytes move over the link of a CPU device.

Used by `sim.calibrate`, beside the loop of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Flag

from ballast.core.event import TransferDoneEvent
from ballast.live.device import LiveDevice
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.sim.measure_link import landing

STREAM = "beside"
"""Stream of these copies on the link."""


@contextmanager
def copying(device: LiveDevice) -> Iterator[bool]:
    """Copy a model's weights over the link again and again, to memory that no model uses.

    Yields whether bytes move: not on GPUs, where copies were never measured beside jobs.
    """
    link = device.machine.link
    if not isinstance(link, HostLink):
        yield False
        return
    weights = max(device.state.models.values(), key=lambda m: m.spec.weight_bytes).weights
    there = [segment.copy for segment in weights.segments]
    with landing(device.machine, sum(copy.n_bytes for copy in there)) as at:
        copies = []
        for copy in there:
            copies.append(Copy(at, copy.src, copy.n_bytes))
            at += copy.n_bytes
        ended, over = Flag(), Flag()

        def again(done: TransferDoneEvent) -> None:
            if over.is_set() or done.error is not None:
                ended.set()
            else:
                link.start(-1, copies, STREAM, on_done=again)

        link.start(-1, copies, STREAM, on_done=again)
        try:
            yield True
        finally:
            over.set()
            ended.wait()
