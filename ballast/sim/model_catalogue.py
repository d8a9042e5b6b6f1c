"""Look up sizes of public models by name, and build the `ModelSpec` to serve each under.

Reads `profiles/models.toml`; no checkpoint is needed. Used by `sim.profile` and `sim.roofline`.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.fleet.faults import unknown
from ballast.fleet.field_types import Name
from ballast.fleet.schema import Keys
from ballast.sim.toml_file import Size, Whole, read_keys


class ModelFacts(Keys):
    """One architecture. Matrices' sizes are counts of elements."""

    name: Name
    parameters: Size
    active_parameters: Size
    """Parameters that a token passes through; fewer than all where there are experts."""
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    intermediate: Size
    """Intermediate size; of one expert, where there are any."""
    vocab: Size
    experts: Whole = 0
    experts_per_token: Whole = 0
    shared_intermediate: Whole = 0
    """Intermediate size of the shared expert, which every token passes through."""
    tied: bool = False
    """Embeddings and head are one matrix."""

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers together."""
        return self.parameters - self.embedding * (1 if self.tied else 2)

    def spec(self, **served: Any) -> ModelSpec:
        """Build the spec as served in bfloat16; `served` holds `max_model_len` and other fields of
        the spec.

        All layers are of equal size; norms count among them.
        """
        embedding = 2 * self.embedding
        layer = 2 * self.layer_parameters // self.layers
        head = () if self.tied else (embedding,)
        fields: dict[str, Any] = {
            "name": self.name,
            "n_layers": self.layers,
            "n_heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden": self.hidden,
            "intermediate": self.shared_intermediate if self.experts else self.intermediate,
            "vocab": self.vocab,
            "dtype": "bfloat16",
            "block_tokens": 16,
            "segment_bytes": (embedding, *(layer,) * self.layers, *head),
            "fingerprint": self.name,
            "experts_per_token": self.experts_per_token,
            "expert_intermediate": self.intermediate if self.experts else 0,
        }
        return ModelSpec(**{**fields, **served})

    @property
    def shape(self) -> tuple[int, ...]:
        """Models of equal shapes run equal jobs."""
        return (
            self.layers,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.intermediate,
            self.vocab,
            self.experts_per_token,
        )


def shape_of(spec: ModelSpec) -> tuple[int, ...]:
    """Return a spec's `ModelFacts.shape`."""
    return (
        spec.n_layers,
        spec.hidden,
        spec.n_heads,
        spec.kv_heads,
        spec.head_dim,
        spec.expert_intermediate if spec.experts_per_token else spec.intermediate,
        spec.vocab,
        spec.experts_per_token,
    )


class CatalogueKeys(Keys):
    source: str
    models: list[ModelFacts]


@functools.cache
def catalogue() -> dict[str, ModelFacts]:
    """Return all models of the catalogue, by name."""
    file = resources.files("ballast.sim") / "profiles" / "models.toml"
    return {m.name: m for m in read_keys(file, CatalogueKeys).models}


def facts(name: str) -> ModelFacts:
    """Return a model's facts by name. Raises ConfigError, which lists the known names."""
    known = catalogue()
    found = {n.lower(): m for n, m in known.items()}.get(name.lower())
    if found is None:
        raise ConfigError("model", name, unknown(name, known))
    return found
