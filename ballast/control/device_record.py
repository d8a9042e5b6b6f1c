"""Record the server's state of one device: its models, open requests, last report, cached prefixes.

Base class of `RemoteDevice`. Read by the router to choose among the devices of a model, without a
message to the worker.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from ballast.control.open_requests import OpenRequests
from ballast.control.routed_prefixes import RoutedPrefixes
from ballast.control.suspicion import Suspicions
from ballast.control.timers import Timers
from ballast.core.capability import GpuReach
from ballast.core.command import Remove
from ballast.core.cost import StepCosts
from ballast.core.fleet_state import Command, CommandOutcome, FleetDevice
from ballast.core.link_budget import link_demand
from ballast.core.migration import Piece
from ballast.core.model import ModelSpec
from ballast.core.pass_traffic import decode_bytes
from ballast.core.report import DeviceReport
from ballast.core.request import Request, Submission
from ballast.core.units import ceil_div
from ballast.core.view import Residency
from ballast.policy.fleet.replica_choice import LinkUse
from ballast.policy.presets import preset_of
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lifecycle_messages import ReadyMsg

log = logging.getLogger(__name__)


class DeviceRecord(FleetDevice):
    """One device's open requests, models, last report, and whether it serves."""

    def __init__(self, name: str, suspicions: Suspicions, timers: Timers) -> None:
        super().__init__(name)
        self.requests = OpenRequests(
            suspicions, timers, self._queue_of, self._began, self._residency_of
        )
        self.failed: Mapping[str, str] = {}
        """Models of its fleet that it could not load, with the reason."""
        self.report: DeviceReport | None = None
        self.pages = ""
        """Address at which other workers get descriptors of its memory; empty: it lends none."""
        self.epoch = 0
        """Last epoch in which its present worker knew another device, under an earlier server."""
        self.reach: GpuReach | None = None
        """Other GPUs that it can reach, as its last worker reported; None: no GPU."""
        self._prefixes: dict[str, RoutedPrefixes] = {}
        """By model, prefixes of the prompts that the router sent to the present worker."""
        self.restarts = 0
        """Workers that were started in place of one that died."""
        self.moved_in = 0
        """Number of requests that have come from other devices with their KV."""

    @property
    def host(self) -> str:
        """Name of its host; empty: the server's, or none now."""
        return ""

    @abstractmethod
    def tell(self, message: ToWorker) -> None:
        """Send a message to the present worker."""

    @abstractmethod
    def kill(self, why: str) -> None:
        """End the worker that serves; another takes its place."""

    def offer(self, reader: str, pieces: Sequence[Piece]) -> str | None:
        """Have another device read these pieces of its memory; as of `migration_events.Devices`."""
        return self.pages

    @abstractmethod
    def _began(self, request_id: str) -> None:
        """Called when a request has its first token."""

    # -- its workers ------------------------------------------------------------------------------

    def worker_serves(self, ready: ReadyMsg) -> None:
        """A worker serves now: it gets the open requests that it can continue."""
        before = self.specs
        self.specs, self.failed, self.report = ready.specs, ready.failed, ready.report
        for spec in before.values():
            self._end_streams(spec, ready)
        self.reach, self.pages, self.epoch = ready.reach, ready.pages, ready.epoch
        self.down = self.lost = None
        self.requests.worker_ready(self.tell)

    def worker_gone(self, why: str, recorded: Collection[str] | None) -> list[str]:
        """The worker has died: its requests wait for the next one. `recorded`, and what is
        returned: as of `OpenRequests.worker_died`."""
        self.down = why
        self._prefixes.clear()
        return self.requests.worker_died(recorded)

    def _end_streams(self, before: ModelSpec, ready: ReadyMsg) -> None:
        """End the requests of a model that the new worker cannot continue: it does not serve it, or
        serves other weights than those that clients have tokens of."""
        now = ready.specs.get(before.name)
        if now is None:
            why = ready.failed.get(before.name, "it is not served any more")
            reason = f"the worker died, and {before.name!r} could not be loaded again: {why}"
            self.requests.fail_model(before, "model_failed", reason)
        elif now.fingerprint != before.fingerprint:
            reason = f"the worker died, and {before.name!r} is another model now: its files changed"
            log.error("%s: %s; its streams end", self.name, reason)
            self.requests.fail_model(before, "model_changed", reason, begun=True)

    # -- its models -------------------------------------------------------------------------------

    def carried_out(self, command: Command, outcome: CommandOutcome) -> bool:
        """Note how the worker has ended a command: later ones start with its result. Returns
        whether it was done."""
        if outcome.code is not None:
            return False
        self.specs = outcome.specs
        left = self.fleet.own_names
        self.fleet = command.applied(self.fleet)
        left -= self.fleet.own_names
        if isinstance(command, Remove):
            left.add(command.model)  # one that has never been loaded is not in the settings
        self.leaving -= left
        self._prefixes = {n: p for n, p in self._prefixes.items() if n not in left}
        served = {s.name for base in self.specs.values() for s in base.served}
        failed = {**self.failed, **outcome.failed}
        self.failed = {n: why for n, why in failed.items() if n not in left | served}
        return True

    def last_report(self) -> DeviceReport | None:
        return self.report

    def count_open(self, base: ModelSpec) -> int:
        return self.requests.count(base)

    def takes(self, name: str) -> bool:
        return super().takes(name) and name not in self.set_aside

    @property
    def set_aside(self) -> dict[str, str]:
        """Models and adapters that refuse requests since their last ones failed, with the reason,
        by its last report."""
        models = () if self.report is None else self.report.models
        return {name: why for m in models for name, why in m.set_aside.items()}

    def full(self, base: ModelSpec) -> bool:
        """Return whether the device would refuse another request of a model, by its last report.

        The server then refuses the request itself, which keeps load off the device. The report may
        be a tenth of a second old, so the queue may have moved meanwhile.
        """
        silent = self.requests.count_silent(base)
        if self.down is not None or not 0 < base.max_waiting <= silent:
            return False
        if silent >= base.max_waiting + base.max_running:
            return True
        models = () if self.report is None else self.report.models
        return any(m.name == base.name and m.waiting >= base.max_waiting for m in models)

    def has_weights(self, name: str) -> bool:
        """Return whether the last report shows the weights of a model, or of an adapter's base, as
        resident."""
        base = self.base_of(name)
        return base is not None and self._residency_of(base.name) == Residency.RESIDENT.value

    def _residency_of(self, base: str) -> str | None:
        """Return the state of a model's weights by the last report; None: unknown."""
        models = () if self.report is None else self.report.models
        return next((m.residency for m in models if m.name == base), None)

    def held_tokens(self, submission: Submission) -> int:
        """Estimate how many tokens of a prompt are in the device's prefix cache: those that were
        routed to it before; 0 if it holds no KV of the model."""
        found = self._given(submission)
        if found is None or self.report is None:
            return 0
        base, prefixes, salt = found
        here = (m for m in self.report.models if m.name == base.name)
        holds = any(m.kv_pages or m.borrowed_pages for m in here)
        return prefixes.tokens(submission.prompt, salt) if holds else 0

    def link_use(self, submission: Submission) -> LinkUse | None:
        """Return what a request's model, and those with open requests here, read over the link of
        the device; None where it has no known bandwidth, or weights are not read in place."""
        pace, base = self.fleet.link.pace, self.base_of(submission.model)
        if pace is None or base is None or not self.reads_in_place:
            return None
        opened = (self.requests.get(i) for i in self.requests)
        bases = map(self.base_of, {r.submission.model for r in opened if r is not None})
        active = {m.name: _link_demand(m) for m in bases if m is not None}
        n_bytes, prompt = decode_bytes(base), len(submission.prompt)
        passes = ceil_div(prompt, self.fleet.device.step_tokens)
        costs = self._costs_of(base.name)
        seconds = 0.0 if costs is None else costs.prefill_seconds(prompt)
        return LinkUse(
            host="" if self.fleet.link.shared else self.name,
            capacity=pace.to_device,
            model=base.name,
            demand=_link_demand(base),
            active=active,
            prefill_seconds=max(seconds, passes * n_bytes / pace.to_device),
            ttft=base.slo.ttft,
        )

    @cached_property
    def reads_in_place(self) -> bool:
        """Whether the preset leaves all weights in host memory, which never changes."""
        return preset_of(self.fleet).requires.in_place

    def _costs_of(self, base: str) -> StepCosts | None:
        """Return the costs of a model's jobs by the last report; None: unknown."""
        models = () if self.report is None else self.report.models
        return next((m.costs for m in models if m.name == base), None)

    def remember(self, submission: Submission) -> None:
        """Note that a prompt is routed to this device, for `held_tokens`."""
        found = self._given(submission)
        if found is not None:
            _, prefixes, salt = found
            prefixes.add(submission.prompt, salt)

    def _given(self, submission: Submission) -> tuple[ModelSpec, RoutedPrefixes, str] | None:
        """Return the base of a request's model, the prefixes routed for it, and the request's
        salt."""
        base = self.base_of(submission.model)
        if base is None:
            return None
        prefixes = self._prefixes.get(base.name)
        if prefixes is None:
            room = self.fleet.device.budget_bytes // base.block_bytes
            prefixes = RoutedPrefixes(base.fingerprint, base.block_tokens, room)
            self._prefixes[base.name] = prefixes
        at = _names(base).index(submission.model)
        salt = Request.salt_of(submission, base, at - 1 if at else None)
        return base, prefixes, salt

    def _queue_of(self, name: str) -> tuple[ModelSpec, ModelSpec] | None:
        """Return a model or adapter as clients see it, and the base in whose queue its requests
        wait; None: unknown."""
        return self._queues.get(name)


def _link_demand(base: ModelSpec) -> float:
    """Return the bytes per second of the link by which a lone stream keeps its TPOT level."""
    return link_demand(decode_bytes(base), base.slo.tpot)


def _names(base: ModelSpec) -> list[str]:
    """Return the names of a model and its adapters, in order."""
    return [base.name, *(a.name for a in base.adapters)]
