"""Ask for other residency plans of a model: activation, eviction in part or whole, remapped layers.

Used by all parts of `policy` that move weights. Each changes the present plan (`ModelView.plan`);
how many pages a change takes, the two plans say (`ResidencyPlan.to`).
"""

from __future__ import annotations

from collections.abc import Iterable

from ballast.core.actions import Action, Reside, Why
from ballast.core.rotation import Rotation
from ballast.core.view import DeviceView, ModelView


def activation(view: DeviceView, m: ModelView, why: str, *, in_place: bool = False) -> Reside:
    """Bring all that a model lacks; `in_place`: read it in host memory, as is always done where the
    preset leaves all weights there."""
    direct = in_place or view.weights_in_place
    return Reside(m.name, m.plan.completed(in_place=direct), why)


def eviction(m: ModelView, why: str, pages: int | None = None) -> Reside:
    """Give up at least `pages` of a model's weights, in whole segments, the last layers first;
    None: all of them."""
    return Reside(m.name, m.plan.without(pages), why)


def remap(m: ModelView, rotation: Rotation, why: Why) -> Reside:
    """Have these layers of a resident model rotate, and no others."""
    return Reside(m.name, m.plan.turned(rotation), why)


def is_activation(view: DeviceView, action: Action) -> bool:
    """Whether an action brings all of a model that does not run now."""
    if not isinstance(action, Reside):
        return False
    return action.plan.runnable and not view.model(action.model).plan.runnable


def is_eviction(action: Action) -> bool:
    """Whether an action takes weights of a model off the device."""
    return isinstance(action, Reside) and not action.plan.runnable


def evicted_pages(m: ModelView, plan: Reside) -> int:
    """Return the pages that an eviction frees, KV included where no weights stay."""
    return m.evictable_pages if plan.plan.empty else -m.plan.to(plan.plan).pages


def last_plans(actions: Iterable[Action]) -> list[Action]:
    """Keep only the last eviction of each model in one decision, which gives up the most, and its
    last other plan; and all other actions."""
    actions = list(actions)
    last = {_model_and_kind(a): a for a in actions if isinstance(a, Reside)}
    if not last:
        return actions
    return [a for a in actions if not isinstance(a, Reside) or a is last[_model_and_kind(a)]]


def _model_and_kind(action: Reside) -> tuple[str, bool]:
    return action.model, action.plan.runnable
