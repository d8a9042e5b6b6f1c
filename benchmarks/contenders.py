"""What a benchmark compares: presets on equal terms, and one preset with an option changed.

Every table of presets is a `Comparison`. Its `terms` hold for all contenders, as far as their
presets have the options. What a contender has of its own is an option of its preset alone; a
contender that changes one that others have, too, is an ablation, compared with one row only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ballast.policy.presets import resolve, shared_options


@dataclass(frozen=True)
class Contender:
    """A preset in a comparison."""

    preset: str
    own: Mapping[str, float] = field(default_factory=dict)
    """Options beside the terms."""
    ablates: str | None = None
    """The row that this one changes; it is compared with no other."""


@dataclass(frozen=True)
class Comparison:
    """Presets that are measured against each other, by the names of their rows.

    Raises ValueError for options that are not alike in two rows that are compared.
    """

    terms: Mapping[str, float]
    rows: Mapping[str, Contender]

    def __post_init__(self) -> None:
        for of, over in self.pairs():
            if unlike := self.unlike(of, over):
                raise ValueError(f"{of} and {over} differ in {', '.join(unlike)}")

    def options(self, row: str) -> dict[str, float]:
        """Options of a row's preset."""
        contender = self.rows[row]
        return {**shared_options(contender.preset, self.terms), **contender.own}

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Rows that may be compared: an ablation with its row, others with each other."""
        for of, contender in self.rows.items():
            if contender.ablates is not None:
                yield of, contender.ablates
                continue
            for over, other in self.rows.items():
                if over != of and other.ablates is None:
                    yield of, over

    def unlike(self, of: str, over: str) -> list[str]:
        """Options that two rows both have with different values, and that neither ablates."""
        if self.rows[of].ablates == over:
            return []
        a, b = (resolve(self.rows[r].preset, self.options(r)).values for r in (of, over))
        both = [o for o in a if o in b]
        if self.rows[of].preset == self.rows[over].preset:
            both = [o for o in both if o in self.terms]
        return [o for o in both if a[o] != b[o]]

    def on(self, **terms: float) -> Comparison:
        """The same on further terms."""
        return Comparison({**self.terms, **terms}, self.rows)


def defaults(*presets: str) -> Comparison:
    """Presets as they are, which have one default for each option."""
    return Comparison({}, {name: Contender(name) for name in presets})


TURNS_AND_DEADLINES = ("round-robin", "deadline")
"""Orders of compute of models that do not run beside each other."""
LAYERS = {row: Contender(row) for row in ("recompute", "kvswap", "mirage")}
"""Layers that lend their memory, and what they are compared with."""
_FIRST_COME = {"late_last": 0.0, "fair_shares": 0.0}
"""Requests are admitted as they come, whoever's memory it is: as in the systems compared."""
SHARINGS = {
    "pool": Comparison({"pooled": 1, **_FIRST_COME}, LAYERS),
    "shares": Comparison({"pooled": 0, **_FIRST_COME}, LAYERS),
    "paper": Comparison({"pooled": 0, "separate": 1, **_FIRST_COME}, LAYERS),
}
"""By where KV comes from: one pool for all models, or a fixed share of each; `paper`: the latter,
and decodes wait for whole prompts, as in vLLM 0.7.3, with which MIRAGE was built and compared."""
