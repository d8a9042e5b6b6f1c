"""Keep one model's weights on one device: map pages, load, evict and rotate layers.

All segments lie in one range of addresses, each beginning at a page, in load order::

    segment     |    0: embeddings    |  1: layer 0   |  2: layer 1   | ...
    pages       |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  | ...

Used by the engine's models. Parameters are views on these addresses for as long as the model
exists; only the pages beneath are mapped and unmapped. Weights are read only: eviction copies
nothing. Pages of a segment that several models contain are owned by the segment
(`weights/shared.py`) and aliased here, as are those of the slots that rotating layers share
(`weights/slots.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import ceil_div
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.transfer import Link
from ballast.memory.vm import Vm
from ballast.weights.rotor import ArrivalPlan, MakeRotor
from ballast.weights.segment_table import PlacedSegment, own_stretches, place_segments
from ballast.weights.shared import SharedSegment
from ballast.weights.slots import LayerPages, Slots


class WeightsOnDevice:
    """All segments of a model, present or absent together, except layers that rotate.

    Owners in the ledger: ``weights:NAME`` and, while layers rotate, ``slots:NAME``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: Pool,
        vm: Vm,
        link: Link,
        host_addresses: Sequence[int],
        shared: Mapping[str, SharedSegment] | None = None,
        make_rotor: MakeRotor | None = None,
    ) -> None:
        """`host_addresses`: address of each segment, in the order of `spec.segment_bytes`.

        `shared`: by digest, the segments whose pages are not the model's own (`find_shared`).
        `make_rotor`: makes the rotor that loads rotating layers; None: no layer can rotate.
        """
        if len(host_addresses) != len(spec.segment_bytes):
            raise BrokenPromise(
                f"{spec.name}: {len(spec.segment_bytes)} segments at {len(host_addresses)} "
                "host addresses"
            )
        self.spec = spec
        self.version = ChangeCounter()
        """Grows with every change of what is present, and of other holders of shared segments."""
        self.shared: tuple[SharedSegment, ...] = ()
        self._link = link
        self._pool = pool
        n_pages = sum(ceil_div(n, vm.page_bytes) for n in spec.segment_bytes)
        self._range = BackedRange(pool, vm, f"weights:{spec.name}", n_pages * vm.page_bytes)
        self.slots = Slots(spec.name, pool, self._range)
        self._rotates = make_rotor is not None
        self._tabulate(place_segments(spec, self._range, host_addresses, shared or {}))
        layers = self.segments[1 : 1 + spec.n_layers]
        self.rotor = make_rotor(spec, [s.copy for s in layers]) if make_rotor else None
        self.may_be_loading = False
        """Whether loads of layers may be in flight: layers rotate, or did and no job has ended
        since."""
        self._backed = False
        self._filled = False
        self._going = False
        """Whether its eviction waits for a job or a load."""

    @property
    def owner(self) -> str:
        return self._range.owner

    @property
    def range(self) -> BackedRange:
        return self._range

    @property
    def backed(self) -> bool:
        """Whether pages are mapped; their contents are valid once `filled`."""
        return self._backed

    @property
    def filled(self) -> bool:
        """Whether all bytes are present."""
        return self._backed and self._filled and all(s.filled for s in self.shared)

    def segment_address(self, i: int) -> int:
        """Device address of segment `i`; never changes."""
        return self.segments[i].address

    def activate(self, transfer_id: int, ahead: int = 0) -> Short | None:
        """Map pages for all segments and start the transfer that fills them; or do nothing.

        `ahead`: most bytes that may still be in flight when the first job begins
        (`FirstJobReadyEvent`), if its rotor can make jobs wait for the layers in these bytes.

        Segments that another model has loaded are mapped, not copied; if all are, `filled` holds at
        once and no transfer starts. `Short.pages`: pages that the pool lacks. If a mapping or the
        link fails, the pages are freed and the error is raised.
        """
        if self._backed:
            raise BrokenPromise(f"{self.spec.name}: its weights are on the device already")
        missing = [s for s in self.shared if not s.pages]
        wanted = self.own_pages + sum(s.n_pages for s in missing)
        short = wanted - self._pool.available(self.owner)
        if short > 0:
            return Short(short)
        with ExitStack() as undo:
            for segment in missing:
                lacking = segment.allocate(self.owner)
                if lacking is not None:
                    return lacking
                undo.callback(segment.free)
            lacking = self._range.back_many(self._own)
            if lacking is not None:
                return lacking
            undo.callback(self._drop_own)
            for s in self.segments:
                if s.shared is not None:
                    self._range.alias(s.at, s.shared.pages, s.shared.owner)
                    undo.callback(self._range.unalias, s.at, s.n_pages, s.shared.owner)
            self._backed, self._filled = True, not self._own
            self.version.n += 1
            for segment in self.shared:
                segment.add_holder(self.spec.name)
            undo.callback(self._forget)
            if not self.filled:
                self.fill(transfer_id, ahead)
            undo.pop_all()
        return None

    def fill(self, transfer_id: int, ahead: int = 0) -> None:
        """Start a transfer of all bytes that are neither present nor in flight; `ahead`: as for
        `activate`.

        Whole models are loaded in one stream of the link, in order: when this transfer has ended,
        so have earlier ones that load shared segments. Its end is posted as `TransferDoneEvent`,
        upon which `transfer_landed` is to be called.
        """
        wanted: list[int] = []
        brought: list[SharedSegment] = []
        for i, s in enumerate(self.segments):
            if s.shared is None:
                here = self._filled
            else:
                here = s.shared.filled or s.shared.filler is not None or s.shared in brought
                if not here:
                    brought.append(s.shared)
            if not here:
                wanted.append(i)
        if not self._fill_ahead(transfer_id, wanted, brought, ahead):
            self._link.start(transfer_id, [self.segments[i].copy for i in wanted])
        for segment in brought:
            segment.filler = self.spec.name

    def _fill_ahead(
        self,
        transfer_id: int,
        wanted: Sequence[int],
        brought: Collection[SharedSegment],
        ahead: int,
    ) -> bool:
        """Start the transfer of the segments `wanted`, layers last, so that the first job can begin
        before its end; False, with nothing started, if that is impossible or useless.

        No shared segment may be in flight from another model: only that model's transfer shows when
        it has landed.
        """
        if self.rotor is None or ahead <= 0 or self.may_be_loading:
            return False
        if not all(s.filled or s in brought for s in self.shared):
            return False
        layers = range(1, 1 + self.spec.n_layers)
        order = sorted(wanted, key=lambda i: i in layers)  # stable: each kind stays in order
        there: dict[int, int] = {}
        n_bytes = 0
        for i in order:
            n_bytes += self.segments[i].n_bytes
            if i in layers:
                there[i - 1] = n_bytes
        if not there:
            return False
        opens = max(min(there.values()), n_bytes - ahead)
        copies = [self.segments[i].copy for i in order]
        return self.rotor.start_load(transfer_id, copies, ArrivalPlan(there, opens))

    def transfer_landed(self) -> bool:
        """Handle the success of the transfer; returns whether all bytes are present.

        They are not if another model was to load a shared segment and failed: call `fill` again
        then.
        """
        self._filled = True
        for segment in self.shared:
            if segment.filler == self.spec.name:
                segment.filled, segment.filler = True, None
        return self.filled

    @property
    def present_pages(self) -> int:
        """Pages, while present, of segments that no other model contains, less those that slots
        save."""
        return self.own_pages - self.slots.saved_pages

    def remap(self, wanted: Rotation) -> Short | None:
        """Change which layers rotate; or change nothing, if the pool is short.

        No job of the model is in flight, and its rotor is settled. Raises BrokenPromise for layers
        that cannot rotate (`Slots.refusal`).
        """
        if self.rotor is None or not self._backed:
            raise BrokenPromise(f"{self.spec.name}: its layers cannot rotate now")
        contents = self.slots.remap(wanted, self.rotor.held)
        if isinstance(contents, Short):
            return contents
        self.may_be_loading = True
        self.version.n += 1
        self.rotor.remap(wanted, contents.held, contents.missing)
        return None

    def transfer_failed(self) -> None:
        """Handle the failure of the transfer while a job that waits for its layers still keeps the
        pages: other models may load the shared segments themselves."""
        for segment in self.shared:
            if segment.filler == self.spec.name:
                segment.filler = None

    def transfer_stopped(self) -> None:
        """Handle the end of a transfer that was stopped: other models may load the shared segments,
        and no job will wait for layers."""
        self.transfer_failed()
        if self.rotor is not None:
            self.rotor.forget()

    def evict(self) -> None:
        """Free the model's pages, and those of shared segments that no other model uses now. No job
        or transfer of this model may use them, and its rotor is settled."""
        if not self._backed:
            raise BrokenPromise(f"{self.spec.name}: its weights are not on the device")
        for s in self.segments:
            if s.shared is not None:
                self._range.unalias(s.at, s.n_pages, s.shared.owner)
        self._forget()
        for segment in self.shared:
            if not segment.holders:
                segment.free()
        self._drop_own()

    def announce_eviction(self) -> None:
        """Mark this model as a leaving holder of its shared segments, before its eviction."""
        self._going = True
        for segment in self.shared:
            segment.mark_leaving(self.spec.name)

    def job_passed(self) -> None:
        """Handle the end of a job that has run all layers: if none rotates, all are present."""
        if self.may_be_loading and self.slots.rotation == WHOLE:
            self.may_be_loading = False

    def may_rotate(self, digests: Iterable[str]) -> bool:
        """Whether any layer that may rotate has one of these digests; as a shared segment it could
        not."""
        of_layers = self.spec.segment_digests[1 : 1 + self.spec.n_layers]
        mine = {of_layers[i] for i in self.slots.rotatable} if of_layers else set()
        return not mine.isdisjoint(digests)

    def share(self, shared: Mapping[str, SharedSegment]) -> None:
        """Turn the segments of `shared`, by digest, from the model's own into shared ones, since
        another model contains them too. Present pages stay mapped and change their owner. None of
        these layers may be rotating."""
        table = list(self.segments)
        for i, (s, digest) in enumerate(zip(table, self.spec.segment_digests, strict=False)):
            whose = shared.get(digest)
            if whose is None or s.shared is not None:
                continue
            if self._backed:
                whose.pages = self._range.cede(s.at, s.n_pages, whose.owner)
                whose.add_holder(self.spec.name)
                if self._going:
                    whose.mark_leaving(self.spec.name)
                whose.filled, whose.filler = (
                    (True, None) if self._filled else (False, self.spec.name)
                )
            table[i] = replace(s, shared=whose)
        self._tabulate(table)

    def close(self) -> None:
        """Evict the weights, if present, and release the addresses, for good."""
        if self._backed:
            self.evict()
        for segment in self.shared:
            segment.parts_of = tuple(w for w in segment.parts_of if w is not self)
        self._range.close()

    def validate(self) -> None:
        """Raise BrokenPromise unless range, segments and the pool's ledger agree."""
        self._range.validate()
        own = self.present_pages - self.slots.pages if self._backed else 0
        if own != self._pool.ledger.owned(self.owner):
            raise BrokenPromise(
                f"{self.owner}: owns {self._pool.ledger.owned(self.owner)}, not {own}"
            )
        self.slots.validate()
        for segment in self.shared:
            if (self.spec.name in segment.holders) != self._backed:
                raise BrokenPromise(f"{self.owner}: holds {segment.owner} against its word")
            if bool(segment.holders) != bool(segment.pages):
                raise BrokenPromise(f"{segment.owner}: {len(segment.pages)} pages for nobody")
            if self not in segment.parts_of:
                raise BrokenPromise(f"{segment.owner}: is no part of {self.owner}")
            if self._pool.ledger.owned(segment.owner) != len(segment.pages):
                raise BrokenPromise(f"{segment.owner}: the pool says otherwise")
        for s in self.segments:
            here = self._range.pages(s.at, s.n_pages) if self._backed else ()
            if s.shared is not None and self._backed and here != s.shared.pages:
                raise BrokenPromise(f"{self.owner}: other pages than {s.shared.owner}'s")

    def _tabulate(self, table: Sequence[PlacedSegment]) -> None:
        self.segments = tuple(table)
        self.own_pages = sum(s.n_pages for s in table if s.shared is None)
        """Pages of segments that no other model contains, present or not."""
        shared = tuple(dict.fromkeys(s.shared for s in table if s.shared is not None))
        for segment in shared:
            if segment not in self.shared:
                segment.parts_of = (*segment.parts_of, self)
        self.shared = shared
        """Shared segments, each once."""
        self.version.n += 1
        self.pages = self.own_pages + sum(s.n_pages for s in self.shared)
        """Pages of all segments, present or not."""
        self._own = own_stretches(self.segments)
        if self._rotates:
            layers = self.segments[1 : 1 + self.spec.n_layers]
            self.slots.tabulate(
                [LayerPages(s.at, s.n_pages, s.n_bytes, s.shared is None) for s in layers]
            )

    def _forget(self) -> None:
        """Mark the weights as absent, and this model as no holder of shared segments."""
        self._backed = self._filled = self._going = False
        self.version.n += 1
        for segment in self.shared:
            segment.remove_holder(self.spec.name)
            if segment.filler == self.spec.name:
                segment.filler = None

    def _drop_own(self) -> None:
        rotating = frozenset(self.slots.rotation.layers)
        if rotating:
            self.slots.dissolve()
        for at, n in own_stretches(self.segments, rotating) if rotating else self._own:
            self._range.release(at, n)
        if self.may_be_loading and self.rotor is not None:
            self.rotor.forget()
        self.may_be_loading = False
