"""Run the state machine of a model's life on one device; `life_rules.RULES` are its transitions.

Part of `ModelState`; the engine calls its transitions as activations, jobs, remaps and
evictions begin and end. Data of a state (the transfer of the weights, the job in flight, the layers
that will rotate) is set and cleared with the state, here only. A transition that no rule allows
raises `BrokenPromise` and changes nothing.
"""

from __future__ import annotations

from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.job import Job
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.view import Residency
from ballast.engine.life_rules import (
    MOVES,
    NEWS,
    PARTS,
    EarlyStart,
    Membership,
    RemapPhase,
    Step,
    Transition,
    Work,
)


class Life:
    """State of one model's life. Each method under "what happens to it" is one transition.

    An illegal transition raises BrokenPromise and changes nothing.
    """

    __slots__ = (
        "_broken",
        "_early_start",
        "_job",
        "_layers",
        "_remap",
        "_residency",
        "_stay",
        "_transfer",
        "_work",
        "early",
        "job_began",
        "model",
        "news",
        "resident_since",
        "unused",
        "version",
    )

    def __init__(self, model: str) -> None:
        self.model = model
        self.version = ChangeCounter()
        """Counts all transitions."""
        self.news = ChangeCounter()
        """Counts the transitions in `NEWS`."""
        self.job_began = 0.0
        """Start time of the job in flight, or of the last one, on the device's clock."""
        self.early = False
        """Whether the job in flight, or the last one, began while weights still arrived."""
        self.resident_since = float("-inf")
        """Time at which the model last became resident, on the device's clock."""
        self.unused = False
        """Whether no job has begun since the last activation was ordered."""
        self._residency, self._work, self._stay = Residency.ABSENT, Work.IDLE, Membership.SERVED
        self._early_start, self._layers = EarlyStart.NONE, RemapPhase.STILL
        self._transfer: int | None = None
        self._broken: str | None = None
        self._job: Job | None = None
        self._remap: ResidencyPlan | None = None

    # -- what it is -------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        return self._residency

    @property
    def early_start(self) -> EarlyStart:
        return self._early_start

    @property
    def work(self) -> Work:
        return self._work

    @property
    def layers(self) -> RemapPhase:
        return self._layers

    @property
    def stay(self) -> Membership:
        return self._stay

    @property
    def transfer_id(self) -> int | None:
        """Number of the transfer of the weights in flight; None: there is none."""
        return self._transfer

    @property
    def load_failed(self) -> str | None:
        """Reason why the load of its weights failed, until `fail`; else None."""
        return self._broken

    @property
    def job(self) -> Job | None:
        """The job in flight; None: there is none."""
        return self._job

    @property
    def remap_to(self) -> ResidencyPlan | None:
        """Plan of weights ordered by a remap that has not been carried out yet."""
        return self._remap

    @property
    def settling(self) -> bool:
        """Whether it waits for the end of loads of layers: a `RotationSettledEvent` will come."""
        return self._layers is RemapPhase.SETTLING or self._layers is RemapPhase.DRAINING_LOADS

    @property
    def awaited(self) -> bool:
        """Whether an event for it, other than the end of a job, will come."""
        layers = self._layers
        waits = layers is RemapPhase.SETTLING or layers is RemapPhase.DRAINING_LOADS
        return waits or self._transfer is not None

    @property
    def stopping(self) -> bool:
        """Whether a load that nobody waits for has been stopped, and its end will come."""
        return self._residency is Residency.EVICTING and self._transfer is not None

    @property
    def ready(self) -> bool:
        """Whether a job may begin: the weights are resident, or jobs can wait for missing layers,
        no job is in flight, and no change of layers is pending."""
        return (
            (self._residency is Residency.RESIDENT or self._early_start is EarlyStart.ALLOWED)
            and self._work is Work.IDLE
            and self._layers is RemapPhase.STILL
        )

    def due(self, *, stirred: bool) -> Step | None:
        """Return the step to be taken now; None: none is wanted, or none is possible yet.

        `stirred`: whether loads of layers may be in flight.
        """
        if self._work is Work.BUSY or self.stopping:
            return None
        if self._early_start is EarlyStart.BROKEN:
            return Step.FAIL
        if self._residency is Residency.EVICTING and not stirred:
            return Step.EVICT
        wanted = self._residency is Residency.EVICTING or self._layers is RemapPhase.ORDERED
        return Step.SETTLE if wanted and not self.settling else None

    # -- what happens to it -----------------------------------------------------------------------

    def activate(self, transfer: int) -> None:
        """Begin an activation whose weights `transfer` brings."""
        self._go(Transition.ACTIVATE)
        self._transfer, self.unused = transfer, True

    def activate_shared(self, now: float) -> None:
        """Become resident without a transfer: other models have loaded all of its weights."""
        self._go(Transition.ACTIVATE_SHARED)
        self.resident_since, self.unused = now, True

    def refill(self, transfer: int) -> None:
        """Continue the activation by one more transfer, for segments that another model was to
        load and did not."""
        self._go(Transition.REFILL)
        self._transfer = transfer

    def open(self) -> None:
        """Allow jobs to begin while weights are still loading."""
        self._go(Transition.OPEN)

    def land(self, now: float) -> None:
        """End the activation: all weights are on the device."""
        self._go(Transition.LAND)
        self._transfer, self.resident_since = None, now

    def break_off(self, why: str) -> None:
        """Record that the load has failed while a job is in flight; `fail` follows its end."""
        self._go(Transition.BREAK)
        self._transfer, self._broken = None, why

    def fail(self) -> None:
        """End in failure: the weights could not be loaded."""
        self._go(Transition.FAIL)
        self._transfer = self._broken = None

    def stop_load(self) -> None:
        """Order an eviction for when the load of the weights has ended, which is stopped."""
        self._go(Transition.STOP_LOAD)

    def load_stopped(self) -> None:
        """Record the end of the load that was stopped."""
        self._go(Transition.LOAD_STOPPED)
        self._transfer = None

    def order_eviction(self) -> None:
        """Order an eviction, for when no job and no load is in flight; cancels an ordered remap."""
        self._go(Transition.ORDER_EVICTION)
        self._remap = None

    def evict(self) -> None:
        """Become absent: the weights have been evicted."""
        self._go(Transition.EVICT)

    def begin_job(self, job: Job, now: float) -> None:
        """Begin a job."""
        self._go(Transition.BEGIN_JOB)
        self._job, self.job_began, self.early, self.unused = job, now, False, False

    def begin_early_job(self, job: Job, now: float) -> None:
        """Begin a job that waits for layers which are still loading."""
        self._go(Transition.BEGIN_EARLY_JOB)
        self._job, self.job_began, self.early, self.unused = job, now, True, False

    def end_job(self) -> None:
        """End the job in flight."""
        self._go(Transition.END_JOB)
        self._job = None

    def order_remap(self, wanted: ResidencyPlan) -> None:
        """Order a remap to `wanted` (layers that rotate, segments read in place), for when no job
        and no load is in flight."""
        self._go(Transition.ORDER_REMAP)
        self._remap = wanted

    def settle(self) -> None:
        """Begin to wait for the end of loads of layers."""
        self._go(Transition.SETTLE)

    def settled(self) -> ResidencyPlan | None:
        """End the wait for loads; return the plan to be put in force, None: no change."""
        self._go(Transition.SETTLED)
        wanted, self._remap = self._remap, None
        return wanted

    def leave(self) -> None:
        """Mark the model to leave the device when its requests have ended."""
        self._go(Transition.LEAVE)

    def remove(self) -> None:
        """Remove the model from the device."""
        self._go(Transition.REMOVE)

    # -- checks -----------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raises BrokenPromise unless the parts are consistent. To be called between events."""
        residency, work, layers = self._residency, self._work, self._layers
        early_start, activating = self._early_start, residency is Residency.ACTIVATING
        there = residency in (Residency.RESIDENT, Residency.EVICTING)
        for wrong, what in (
            (
                work is Work.BUSY and not there and early_start is EarlyStart.NONE,
                "a job without weights",
            ),
            (
                early_start is not EarlyStart.NONE and not activating,
                "an early start without a load",
            ),
            (
                early_start is EarlyStart.BROKEN and work is Work.IDLE,
                "a failure that nothing is in the way of",
            ),
            (work is Work.BUSY and self.settling, "a job while loads are being waited for"),
            (
                residency is Residency.EVICTING
                and work is Work.IDLE
                and not (self.settling or self.stopping),
                "an eviction that nothing is in the way of",
            ),
            (
                layers is RemapPhase.ORDERED and work is Work.IDLE,
                "a remap that nothing is in the way of",
            ),
            (
                layers in (RemapPhase.ORDERED, RemapPhase.SETTLING)
                and residency is not Residency.RESIDENT,
                "a remap without weights",
            ),
            (
                self._stay is Membership.GONE and (there or work is Work.BUSY or self.awaited),
                "something happens to it though it is gone",
            ),
            (
                (self._transfer is not None)
                != (self.stopping or (activating and early_start is not EarlyStart.BROKEN)),
                "a transfer",
            ),
            ((self._broken is not None) != (early_start is EarlyStart.BROKEN), "a broken load"),
            ((self._job is not None) != (work is Work.BUSY), "a job"),
            (
                (self._remap is not None) != (layers in (RemapPhase.ORDERED, RemapPhase.SETTLING)),
                "a remap",
            ),
        ):
            if wrong:
                raise BrokenPromise(f"{self}: {what}")

    def __str__(self) -> str:
        parts = (f"{p} {getattr(self, p).value}" for p in PARTS)
        return f"{self.model} ({', '.join(parts)})"

    def _go(self, transition: Transition) -> None:
        moves = MOVES[transition]
        for part, of in moves:
            now = getattr(self, f"_{part}")
            if now not in of:
                legal = ", ".join(f"{a.value} -> {b.value}" for a, b in of.items())
                raise BrokenPromise(
                    f"{self.model}: {transition.value}: its {part} is {now.value}; legal: {legal}"
                )
        for part, of in moves:
            setattr(self, f"_{part}", of[getattr(self, f"_{part}")])
        self.version.n += 1
        self.news.n += transition in NEWS
