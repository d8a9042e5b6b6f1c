"""Keep one model's weights on one device: map pages, load, evict and rotate layers.

All segments lie in one range of addresses, in load order, each beginning at a page; at the first
page of a page table where these move::

    segment     |    0: embeddings    |  1: layer 0   |  2: layer 1   | ...
    pages       |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  | ...

Used by the engine's models. Parameters are views on these addresses for as long as the model
exists; only the pages beneath are mapped and unmapped. Weights are read only: eviction copies
nothing. A model can give up part of its segments, the last layers first; an activation brings those
that are missing. Pages of a segment that several models contain are owned by the segment
(`weights/shared.py`) and aliased here, as are those of the slots that rotating layers share
(`weights/slots.py`). A segment that is read *in place* has no pages: the host tier's sealed memory
is mapped beneath its addresses, read only (C2CServe, 5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.transfer import Link
from ballast.memory.vm import Vm
from ballast.weights.load_order import load_order, segments_to_bring
from ballast.weights.promotion import Promotion
from ballast.weights.segment_mapping import SegmentMapping
from ballast.weights.segment_table import PlacedSegment, place_segments, range_pages
from ballast.weights.shared import SharedSegment
from ballast.weights.slots import LayerPages, Slots
from ballast.weights.weight_stream import WeightStream


class WeightsOnDevice:
    """All segments of a model, each present, read in place or absent; layers can rotate while all
    are present.

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
        stream: WeightStream | None = None,
    ) -> None:
        """`host_addresses`: address of each segment, in the order of `spec.segment_bytes`.

        `shared`: by digest, the segments whose pages are not the model's own (`find_shared`).
        `stream`: loads rotating and arriving layers behind jobs; None: no layer can rotate.
        """
        if len(host_addresses) != len(spec.segment_bytes):
            raise BrokenPromise(f"{spec.name}: {len(host_addresses)} host addresses of segments")
        self.spec = spec
        self._absent = frozenset(range(len(spec.segment_bytes)))
        """Segments that are on the host alone, and not read there."""
        self._in_place: frozenset[int] = frozenset()
        """Segments that passes read in host memory."""
        self._unfilled: frozenset[int] = frozenset()
        """Own segments with pages whose bytes are to come."""
        self._going: frozenset[int] | None = None
        """Segments whose eviction waits for a job or a load; None: none is ordered."""
        self._plan: ResidencyPlan | None = None
        self.version = ChangeCounter()
        """Grows with every change of what is present, and of other holders of shared segments."""
        self.shared: tuple[SharedSegment, ...] = ()
        self._link = link
        self._pool = pool
        n_pages = range_pages(spec, vm.page_bytes, vm.table_pages)
        self._range = BackedRange(pool, vm, f"weights:{spec.name}", n_pages * vm.page_bytes)
        self._mapping = SegmentMapping(pool, self._range)
        self.slots = Slots(spec.name, pool, self._range)
        self.promotion = Promotion(spec.name, pool, self._range, link)
        """Brings segments that passes read in place to pages."""
        self.stream = stream
        where = (host_addresses, shared or {}, vm.table_pages)
        self._tabulate(place_segments(spec, self._range.range, *where))
        layers = self.segments[1 : 1 + spec.n_layers]
        if stream is not None:
            stream.add_weights([s.copy for s in layers])
        self.may_be_loading = False
        """Whether loads of layers may be in flight: layers rotate, or did and no job has ended
        since."""

    @property
    def owner(self) -> str:
        return self._range.owner

    @property
    def range(self) -> BackedRange:
        return self._range

    @property
    def backed(self) -> bool:
        """Whether all segments have pages, or are read in place; the contents of pages are valid
        once `filled`."""
        return not self._absent

    @property
    def plan(self) -> ResidencyPlan:
        """Where each segment is."""
        if self._plan is None:
            units = (Unit(s.n_pages, s.n_bytes, s.shared is not None) for s in self.segments)
            places = (self.slots.rotation, self._absent, self._in_place)
            self._plan = ResidencyPlan(tuple(units), self.spec.n_layers, *places)
        return self._plan

    @property
    def filled(self) -> bool:
        """Whether all bytes are present."""
        return not (self._absent or self._unfilled) and all(s.filled for s in self._held)

    def segment_address(self, i: int) -> int:
        """Device address of segment `i`; never changes."""
        return self.segments[i].address

    def activate(
        self, transfer_id: int, ahead: int = 0, in_place: Collection[int] = ()
    ) -> Short | None:
        """Map pages for all absent segments and start the transfer that fills them; or do nothing.

        `ahead`: most bytes that may still be in flight when the first job begins
        (`FirstJobReadyEvent`), if its stream can make jobs wait for the layers in these bytes.
        `in_place`: absent segments that are read in place instead, without pages or copies.

        Segments that another model has loaded are mapped, not copied; if all are, `filled` holds at
        once and no transfer starts. If a mapping or the link fails, the pages are freed and the
        error is raised.
        """
        absent = self._absent
        if not absent:
            raise BrokenPromise(f"{self.spec.name}: its weights are on the device already")
        direct, paged = absent.intersection(in_place), absent.difference(in_place)
        if (lacking := self._mapping.map(self.segments, paged, direct)) is not None:
            return lacking
        before = self._in_place
        self._unfilled = frozenset(i for i in paged if self.segments[i].shared is None)
        self._set_places(frozenset(), before | direct)
        try:
            if not self.filled:
                self.fill(transfer_id, ahead)
        except BaseException:
            self._set_places(absent, before)
            self._mapping.unmap(self.segments, paged, direct)
            self._free_unused()
            raise
        return None

    def fill(self, transfer_id: int, ahead: int = 0) -> None:
        """Start a transfer of all bytes that are neither present nor in flight (`activate`).

        Whole models are loaded in one stream of the link, in order: when this transfer has ended,
        so have earlier ones that load shared segments. Its end is posted as `TransferDoneEvent`,
        upon which `transfer_landed` is to be called.
        """
        wanted, brought = segments_to_bring(self.segments, self._unfilled, self._in_place)
        if not self._fill_ahead(transfer_id, wanted, brought, ahead):
            self._link.start(transfer_id, [self.segments[i].copy for i in wanted])
        for segment in brought:
            segment.filler = self.spec.name

    def _fill_ahead(
        self, transfer_id: int, wanted: list[int], brought: list[SharedSegment], ahead: int
    ) -> bool:
        """Start the transfer of the segments `wanted`, layers last, so that the first job can begin
        before its end; False, with nothing started, if that is impossible or useless.

        No shared segment may be in flight from another model: only that model's transfer shows when
        it has landed.
        """
        here = all(s.filled or s in brought for s in self._held)
        if self.stream is None or ahead <= 0 or self.may_be_loading or not here:
            return False
        order, arrivals = load_order(self.segments, self.spec.n_layers, wanted, ahead)
        if arrivals is None:
            return False
        copies = [self.segments[i].copy for i in order]
        return self.stream.start_load(transfer_id, copies, arrivals)

    def transfer_landed(self) -> bool:
        """Handle the success of the transfer; returns whether all bytes are present.

        They are not if another model was to load a shared segment and failed: call `fill` again
        then.
        """
        self._unfilled = frozenset()
        for segment in self.shared:
            if segment.filler == self.spec.name:
                segment.filled, segment.filler = True, None
        return self.filled

    @property
    def present_pages(self) -> int:
        """Pages of slots and of present segments that no other model contains."""
        return self.plan.device_pages

    @property
    def leaving_pages(self) -> int:
        """Part of `present_pages` that the ordered eviction frees."""
        after = replace(self.plan, rotation=WHOLE, absent=self._after)
        return 0 if self._going is None else self.present_pages - after.device_pages

    @property
    def leaves_whole(self) -> bool:
        """Whether nothing stays after the ordered eviction, or where none is ordered."""
        return self._going is None or replace(self.plan, absent=self._after).empty

    def remap(self, wanted: Rotation) -> Short | None:
        """Change which layers rotate; or change nothing, if the pool is short. No job of the model
        is in flight, and its stream is settled. Raises BrokenPromise for layers that cannot rotate
        (`Slots.refusal`)."""
        if self.stream is None or self._absent or self._in_place:
            raise BrokenPromise(f"{self.spec.name}: its layers cannot rotate now")
        contents = self.slots.remap(wanted, self.stream.held)
        if isinstance(contents, Short):
            return contents
        self.may_be_loading, self._plan = True, None
        self.version.n += 1
        self.stream.remap(wanted, contents.held, contents.missing)
        return None

    def read_in_place(self, wanted: Collection[int]) -> None:
        """Have passes read present segments in place that are in `wanted`, and others in pages to
        which they were brought (`promotion`). Raises DeviceError. No job of the model is in flight,
        no layer rotates, and its stream is settled."""
        laid = frozenset(wanted) - self._in_place - self._absent
        self._mapping.lay(self.segments, laid)
        placed = self.promotion.place(self.segments, self._in_place.difference(wanted))
        self._set_places(self._absent, (self._in_place | laid) - placed)
        self._free_unused()

    def transfer_failed(self) -> None:
        """Handle the failure of the transfer while a job that waits for its layers still keeps the
        pages: other models may load the shared segments themselves."""
        for segment in self.shared:
            if segment.filler == self.spec.name:
                segment.filler = None

    def transfer_stopped(self) -> None:
        """Handle the end of a stopped transfer as its failure; no job will wait for layers."""
        self.transfer_failed()
        if self.stream is not None:
            self.stream.forget()

    def announce_eviction(self, after: ResidencyPlan | None = None) -> None:
        """Order an eviction: of the segments that are absent in the plan `after`, rotating layers
        among them, or of all. Shared segments then have this model as a leaving holder."""
        self.promotion.cancel()
        self._going = (after or self.plan.without(None)).absent - self._absent
        self.version.n += 1
        if self.leaves_whole:
            for segment in self.shared:
                segment.mark_leaving(self.spec.name)

    def evict(self) -> None:
        """Free the pages of segments whose eviction is ordered, or of all if none is, and of layers
        that rotate. No job or transfer may use them, and the stream is settled."""
        if self.plan.empty:
            raise BrokenPromise(f"{self.spec.name}: its weights are not on the device")
        everything = self.plan.without(None).absent - self._absent
        going = everything if self._going is None else self._going
        rotating = frozenset(1 + layer for layer in self.slots.rotation.layers)
        if rotating:
            self.slots.dissolve()
        direct = going & self._in_place
        self._mapping.unmap(self.segments, going - rotating - direct, direct)
        self._set_places(self._absent | going | rotating, self._in_place - direct)
        self._free_unused()
        if self.may_be_loading and self.stream is not None:
            self.stream.forget()
        self.may_be_loading = False

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
        """Turn the model's own segments of `shared`, by digest, into shared ones. Present pages
        stay mapped and change their owner. None of these layers may be rotating."""
        table = list(self.segments)
        for i, (s, digest) in enumerate(zip(table, self.spec.segment_digests, strict=False)):
            whose = shared.get(digest)
            if whose is None or s.shared is not None:
                continue
            if i not in self._without_pages:
                whose.pages = self._range.cede(s.at, s.n_pages, whose.owner)
                whose.add_holder(self.spec.name)
                if self._going is not None and self.leaves_whole:
                    whose.mark_leaving(self.spec.name)
                elif self._going is not None:
                    self._going -= {i}
                coming = i in self._unfilled
                whose.filled, whose.filler = not coming, self.spec.name if coming else None
                self._unfilled -= {i}
            table[i] = replace(s, shared=whose)
        self._tabulate(table)

    def close(self) -> None:
        """Evict the weights, if present, and release the addresses, for good."""
        if not self.plan.empty:
            self._going = None
            self.evict()
        for segment in self.shared:
            segment.parts_of = tuple(w for w in segment.parts_of if w is not self)
        self._range.close()

    def validate(self) -> None:
        """Raise BrokenPromise unless range, segments and the pool's ledger agree."""
        self._range.validate()
        own = self.present_pages - self.slots.pages
        owned = self._pool.ledger.owned(self.owner)
        if own != owned:
            raise BrokenPromise(f"{self.owner}: owns {owned}, not {own}")
        self.slots.validate()
        for segment in self.shared:
            if (self.spec.name in segment.holders) != self._uses(segment):
                raise BrokenPromise(f"{self.owner}: holds {segment.owner} against its word")
            segment.validate(self)
        self._mapping.validate(self.segments, self._absent, self._in_place)
        self.promotion.validate()

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
        self._plan = None
        if self.stream is not None:
            layers = self.segments[1 : 1 + self.spec.n_layers]
            pages = (LayerPages(s.at, s.n_pages, s.n_bytes, s.shared is None) for s in layers)
            self.slots.tabulate(list(pages))

    @property
    def _after(self) -> frozenset[int]:
        """Segments that are absent after the ordered eviction."""
        rotating = frozenset(1 + layer for layer in self.slots.rotation.layers)
        return self._absent | (self._going or frozenset()) | rotating

    def _uses(self, segment: SharedSegment) -> bool:
        """Whether a shared segment is mapped here."""
        parts = enumerate(self.segments)
        return any(s.shared is segment for i, s in parts if i not in self._without_pages)

    @property
    def _held(self) -> tuple[SharedSegment, ...]:
        """Shared segments that are mapped here."""
        return tuple(s for s in self.shared if self.spec.name in s.holders)

    @property
    def _without_pages(self) -> frozenset[int]:
        return self._absent | self._in_place

    def _set_places(self, absent: frozenset[int], in_place: frozenset[int]) -> None:
        """Record which segments are absent or read in place, and so which shared ones this model
        uses; no eviction is ordered any more."""
        self._absent, self._in_place = absent, in_place
        self._going, self._plan = None, None
        self._unfilled -= absent
        self.version.n += 1
        for segment in self.shared:
            if not self._uses(segment):
                segment.remove_holder(self.spec.name)
                if segment.filler == self.spec.name:
                    segment.filler = None
            elif self.spec.name not in segment.holders:
                segment.add_holder(self.spec.name)

    def _free_unused(self) -> None:
        """Free shared segments that no model uses any more."""
        for segment in self.shared:
            if segment.pages and not segment.holders:
                segment.free()
