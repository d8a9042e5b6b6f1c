"""Define the colours of plots and pages; they are distinct for people with any colour vision."""

from __future__ import annotations

INK = "#1b2430"
MUTED = "#5b6675"
EMPTY = "#f3f5f8"
"""Free memory: the ground on which the rest is drawn."""
BEST = "#00685a"
"""The number of the run that did best."""

USES = {
    "weights": "#2f74b5",
    "kv": "#e07b00",
    "cached": "#f8d39b",
    "activations": "#98a2b1",
    "lent": "#8a4fa3",
    "reclaiming": "#5b6675",
    "free": EMPTY,
}
"""By use of memory; `reclaiming` and `lent` appear only where there are any."""
USE_NAMES = {
    "weights": "weights",
    "kv": "KV of open requests",
    "cached": "cached prefixes",
    "activations": "activations",
    "lent": "lent to other devices",
    "reclaiming": "being reclaimed",
    "free": "free",
}

MARKS = {
    "activations": "#2f74b5",
    "evictions": "#b3261e",
    "preemptions": "#7b3294",
    "refused requests": "#1b2430",
}
"""By kind of mark on the time line; each kind has a row of its own, so colour is no information."""

MODELS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
"""Ten of one picture (Petroff, "Accessible color sequences for data visualization", 2021); after
ten they repeat, and names must do."""


def colour_of(place: int) -> str:
    """The colour of the `place`-th model, or run, of a picture."""
    return MODELS[place % len(MODELS)]


def tint(colour: str, share: float) -> str:
    """`colour` mixed with white: 0 leaves it, 1 is white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * share):02x}" for p in parts)
