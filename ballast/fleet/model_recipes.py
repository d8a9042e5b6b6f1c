"""Define the small models of a made fleet: architecture, size, and training data of each.

Used by `fleet.make`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Literal

from ballast.core.errors import ConfigError

Size = Literal["tiny", "small"]


class Diet(enum.Enum):
    """Training data of a model. The value is the share of documents among conversations."""

    CONVERSATION = 0.03
    DOCUMENTS = 0.9
    STORIES = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """One Llama-shaped model to make."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    diet: Diet | None = None
    """None: weights stay random."""
    parent: str | None = None
    """Start from this model's weights."""
    effort: float = 1.0
    """Share of the fleet's training steps that this model gets."""
    priority: int = 0
    seed: int = 0

    @property
    def trained(self) -> bool:
        return self.diet is not None

    def own_steps(self, steps: int) -> int:
        """Training steps of this model, of `steps` of the fleet."""
        return math.ceil(self.effort * steps) if self.trained else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Parameters that all models of one fleet share."""

    vocab: int
    context: int
    """Most tokens of a request."""
    page_bytes: int
    step_tokens: int
    step_logits: int
    models: tuple[ModelRecipe, ...]


def _atlas(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int
) -> list[ModelRecipe]:
    base = ModelRecipe(
        name="atlas-chat",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        diet=Diet.CONVERSATION,
        priority=1,
    )
    tuned = replace(base, parent=base.name, priority=0)
    return [
        base,
        replace(tuned, name="atlas-docs", diet=Diet.DOCUMENTS, effort=0.1, seed=1),
        replace(tuned, name="atlas-tales", diet=Diet.STORIES, effort=0.2, seed=2),
    ]


def _plan(
    name: str, layers: int, hidden: int, heads: int, kv: int, inter: int, seed: int
) -> ModelRecipe:
    return ModelRecipe(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        intermediate=inter,
        seed=seed,
    )


_SMALL = _atlas(6, 256, 4, 2, 704)
_TINY = _atlas(3, 64, 4, 2, 176)

SCALES: dict[str, Scale] = {
    "small": Scale(
        vocab=2048,
        context=2048,
        page_bytes=256 * 1024,
        step_tokens=512,
        step_logits=64,
        models=(
            _SMALL[0],
            replace(
                _plan("wren-mini", 4, 192, 3, 1, 512, 3),
                diet=Diet.CONVERSATION,
                effort=0.4,
            ),
            _SMALL[1],
            _SMALL[2],
            _plan("cedar-base", 8, 384, 6, 6, 1024, 4),
            _plan("delta-wide", 4, 512, 8, 2, 1408, 5),
            _plan("ember-deep", 12, 256, 4, 4, 704, 6),
            _plan("flint-large", 10, 512, 8, 4, 1408, 7),
        ),
    ),
    "tiny": Scale(
        vocab=512,
        context=512,
        page_bytes=64 * 1024,
        step_tokens=128,
        step_logits=32,
        models=(
            _TINY[0],
            replace(_plan("wren-mini", 2, 48, 3, 1, 128, 3), diet=Diet.CONVERSATION),
            _TINY[1],
            _TINY[2],
            _plan("cedar-base", 3, 64, 4, 4, 176, 4),
            _plan("delta-wide", 2, 96, 6, 2, 256, 5),
            _plan("ember-deep", 5, 64, 4, 4, 176, 6),
            _plan("flint-large", 4, 96, 6, 3, 256, 7),
        ),
    ),
}


def plans(size: str, n_models: int) -> tuple[ModelRecipe, ...]:
    """The first `n_models` of a size; beyond eight, the untrained ones again with other seeds.

    Raises ConfigError for a size or number that is not offered.
    """
    if size not in SCALES:
        raise ConfigError("size", size, f"one of {', '.join(SCALES)}")
    if not 1 <= n_models <= 64:
        raise ConfigError("n_models", n_models, "a number from 1 to 64")
    named = SCALES[size].models
    untrained = [plan for plan in named if not plan.trained]
    result = list(named[:n_models])
    for i in range(n_models - len(result)):
        copy, of = divmod(i, len(untrained))
        plan = untrained[of]
        number = copy + 2
        result.append(replace(plan, name=f"{plan.name}-{number}", seed=plan.seed + 100 * number))
    return tuple(result)
