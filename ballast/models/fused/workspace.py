"""Lay out the activations of a fused model in its lane's workspace, and its matrices' operands
there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.kernels import linear, linear_code
from ballast.kernels.workspace import Workspace
from ballast.models.fused.experts import experts_bytes
from ballast.weights.decoder_recipe import LLAMA, DecoderRecipe
from ballast.weights.sharding import Shard

_ALIGNMENT = 64


class MatrixPlace(NamedTuple):
    """Operands of a matrix of n outputs and k inputs: addresses that it reads and writes;
    `target_row`: elements from a row of the target to the next."""

    n: int
    k: int
    source: int
    target: int
    target_row: int
    mode: int = linear.STORE


@dataclass(frozen=True, slots=True)
class ActivationBuffers:
    """Addresses in the workspace: float32, except for `tokens`, `sampled` and `places`: int64.

    `gate_up`: gates and ups stored before gating, and earlier the bfloat16 inputs of a library's
    matrix. `part` and the three after it are for ranks: this rank's part of a sum, all ranks'
    parts, and the same of logits. `experts` is divided by `experts.py`.
    """

    hidden: int
    normed: int
    qkv: int
    attended: int
    gated: int
    gate_up: int
    logits: int
    cosine: int
    sine: int
    tokens: int
    sampled: int
    places: int
    part: int
    parts: int
    head_part: int
    head_parts: int
    experts: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        workspace: Workspace,
        rows: int,
        sampled: int,
        recipe: DecoderRecipe,
    ) -> ActivationBuffers:
        """Raises BrokenPromise if the workspace is too small."""
        addresses = []
        at = workspace.address
        for n_bytes in _sizes(spec, rows, sampled, recipe):
            addresses.append(at)
            at += ceil_div(n_bytes, _ALIGNMENT) * _ALIGNMENT
        if at > workspace.address + workspace.n_bytes:
            raise BrokenPromise(f"{spec.name}: the workspace has {workspace.n_bytes} bytes")
        return cls(*addresses)


def workspace_bytes(
    spec: ModelSpec, rows: int, sampled: int, recipe: DecoderRecipe | None = None
) -> int:
    """Return the bytes of workspace for jobs of up to `rows` tokens, of which `sampled` are
    sampled.

    `recipe`: the model's; by default Llama's.
    """
    sizes = _sizes(spec, rows, sampled, recipe or LLAMA)
    return sum(ceil_div(n, _ALIGNMENT) * _ALIGNMENT for n in sizes)


def angle_bytes(spec: ModelSpec, rows: int) -> int:
    """Return the bytes of cosines, or sines, of `rows` positions by one set of frequencies; whole
    cache lines."""
    return ceil_div(2 * rows * spec.head_dim, _ALIGNMENT) * _ALIGNMENT


def _sizes(spec: ModelSpec, rows: int, sampled: int, recipe: DecoderRecipe) -> tuple[int, ...]:
    """Return the bytes of each buffer, in the order of `ActivationBuffers`."""
    hidden, attended = 4 * rows * spec.hidden, 4 * rows * spec.n_heads * spec.head_dim
    angles = len(recipe.rotary_sets) * angle_bytes(spec, rows)
    narrowed = 2 * rows * max(spec.hidden, spec.n_heads * spec.head_dim, spec.intermediate)
    part = head_part = 0
    if spec.ranks > 1:
        part, head_part = hidden, 4 * sampled * len(Shard(0, spec.ranks).tokens(spec.vocab))
    return (
        hidden,
        hidden,
        4 * rows * qkv_width(spec),
        attended,
        4 * rows * spec.intermediate,
        max(4 * rows * gate_up_width(spec), narrowed),
        4 * sampled * spec.vocab,
        angles,
        angles,
        8 * rows,
        8 * rows,
        8 * rows * spec.kv_groups,
        part,
        spec.ranks * part,
        head_part,
        spec.ranks * head_part,
        experts_bytes(spec, rows),
    )


def gate_up_width(spec: ModelSpec) -> int:
    """Return the gates and ups of one token, in elements, rounded up to whole panels."""
    return ceil_div(2 * spec.intermediate, linear_code.PANEL) * linear_code.PANEL


def qkv_width(spec: ModelSpec) -> int:
    """Return the queries, keys and values of one token, in elements."""
    return (spec.n_heads + 2 * spec.kv_heads) * spec.head_dim
