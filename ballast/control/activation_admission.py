"""Hold back requests for absent models until it is their keys' turn to have these activated.

Used by `OpenRequests.dispatch`; `activation_turns` chooses. A request that its client has not read
is paused at the worker and holds no memory: when it is read again, the model may be absent, and is
activated again like for a new request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from ballast.control.activation_turns import ActivationTurns, ModelWish
from ballast.control.open_request import OpenRequest
from ballast.control.timers import Timer, Timers
from ballast.core.view import Residency

_ABSENT = (Residency.ABSENT.value, Residency.EVICTING.value)
"""States of a model that a request has activated."""


class ActivationAdmission:
    """The turns of one device's keys, and the timer for the next one that a budget allows."""

    def __init__(
        self,
        timers: Timers,
        base_of: Callable[[str], str],
        residency_of: Callable[[str], str | None],
        retry: Callable[[], None],
    ) -> None:
        """`base_of`: returns the name of a model's or adapter's base, empty if it is unknown;
        `residency_of`: state of a base's weights, as last reported; `retry`: called when a budget
        may allow another activation."""
        self._timers = timers
        self._base_of, self._residency_of, self._retry = base_of, residency_of, retry
        self._turns = ActivationTurns()
        self._timer: Timer | None = None
        self.turned_away = False
        """Whether requests wait for their key's turn, or budget."""

    def is_absent(self, model: str) -> bool:
        """Whether a request for a model or adapter has its weights activated."""
        base = self._base_of(model)
        return bool(base) and self._residency_of(base) in _ABSENT

    def worker_died(self) -> None:
        """Forget the models that were coming."""
        self._turns.keep(())

    def held_models(
        self, wanting: Sequence[OpenRequest], active_models: Callable[[], Set[str]]
    ) -> set[str]:
        """Return the models that are absent and not coming, and that none of the requests in
        `wanting` may have activated now; charges the keys of those that may.

        `active_models`: returns the models for which the worker has requests that are not paused.
        """
        bases = {model: self._base_of(model) for model in {r.submission.model for r in wanting}}
        absent = {base for model, base in bases.items() if self.is_absent(model)}
        self.turned_away = False
        if not absent:
            return absent
        active, resident = active_models(), Residency.RESIDENT.value
        coming = self._turns.coming.keys() & active
        self._turns.keep([name for name in coming if self._residency_of(name) != resident])
        absent -= active
        absent -= {bases[r.submission.model] for r in wanting if r.activations_per_minute is None}
        wishes = {
            ModelWish(r.submission.tenant, base, r.activations_per_minute): None
            for r in wanting
            if r.activations_per_minute and (base := bases[r.submission.model]) in absent
        }
        turns = self._turns.choose([*wishes], self._timers.now())
        absent -= turns.models
        self.turned_away = bool(absent)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if turns.seconds is not None:
            self._timer = self._timers.call_later(turns.seconds, self._retry)
        return absent
