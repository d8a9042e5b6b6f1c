"""Change which layers' KV is swapped to the host, by a job that copies KV and computes nothing.

Used by `reside`, by the dispatcher through `DeviceState.begin_swap`, and by
`jobs` at the job's end. Layers that begin to rotate are stored to the host, then their pages are
freed; layers that stop rotating get pages, then are loaded. All running requests of the model are
in this job, so that cancellations, preemptions and evictions wait for its end, as for any job.
"""

from __future__ import annotations

from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.engine.model import ModelState
from ballast.kv.layered import MORE_SLABS


def refusal(m: ModelState, wanted: Rotation) -> str | None:
    """Return the reason why the KV of these layers cannot rotate now; None if it can."""
    n, now = m.spec.n_layers, m.kv.rotation
    if m.kv_stream is None:
        return "its KV does not lie layer by layer"
    if m.life.swap_failed is not None:
        return f"its KV could not be moved before: {m.life.swap_failed}"
    if m.life.swap_to is not None:
        return "its layers are changing already"
    if wanted == now:
        return "they do already"
    if (why := wanted.refusal(range(n))) is not None:
        return why
    if (n - wanted.n_freed) * MORE_SLABS < n:
        return f"at least one layer in {MORE_SLABS} keeps its pages"
    before, layers = set(now.layers), set(wanted.layers)
    grows = layers >= before and wanted.n_freed > now.n_freed
    shrinks = layers <= before and wanted.n_freed < now.n_freed
    if not grows and not shrinks:
        return "some rotate more, or some less, not both at once"
    return None


def change(m: ModelState, wanted: Rotation) -> None:
    """Order the change to `wanted`, which `refusal` must allow; done at once if nothing runs."""
    m.life.order_swap(wanted)
    if m.job is None and not m.running:
        _at_once(m, wanted)


def begin(m: ModelState) -> list[SequenceWork]:
    """Return the work of the job that copies KV for an ordered change; empty if none is needed."""
    wanted = m.life.swap_to
    if wanted is None:
        return []
    assert m.kv_stream is not None, "it would have been refused"
    if not m.running:
        _at_once(m, wanted)
        return []
    slabs, before, after = m.kv.slabs, set(m.kv.rotation.layers), set(wanted.layers)
    if before < after:
        m.kv_stream.carry_kv(sorted(after - before), slabs, Direction.TO_HOST)
    elif m.kv.turn(wanted):
        m.kv_stream.carry_kv(sorted(before - after), slabs, Direction.TO_DEVICE)
    else:
        m.life.end_swap()  # its pages are not free any more: the policy may ask again
        return []
    m.life.begin_move()
    m.kv.fixed = True
    return [SequenceWork(r.id, (), r.computed, r.blocks, None) for r in m.running]


def end(m: ModelState) -> None:
    """End the copying job: pages of layers that have been stored are freed."""
    wanted = m.life.swap_to
    assert wanted is not None, "it has begun"
    assert m.kv_stream is not None, "it would have been refused"
    m.kv.fixed = False
    m.kv.turn(wanted)
    m.kv_stream.turn_kv(wanted)
    m.life.end_swap()


def lose(m: ModelState, why: str) -> None:
    """Record that the copying job has failed: the KV that it was to move is lost, and the model's
    KV is not swapped again."""
    m.kv.fixed = False
    m.life.lose_kv(why)


def forget(m: ModelState) -> None:
    """Reset the stream after the model's KV has been cleared: no layer rotates."""
    if m.kv_stream is not None:
        m.kv_stream.turn_kv(WHOLE)


def _at_once(m: ModelState, wanted: Rotation) -> None:
    """Change layers without a job, as no request uses the KV: cached prefixes are dropped."""
    assert m.kv_stream is not None, "it would have been refused"
    m.kv.clear()
    m.kv.turn(wanted)
    m.kv_stream.turn_kv(wanted)
    m.life.end_swap()
