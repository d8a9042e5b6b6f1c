"""Write a fine-tune as a delta over its base: differences of its matrices, in low rank or few bits.

A fine-tune differs from its base by little in every matrix. Of each difference those singular
values are kept that exceed what rounding makes by itself (`_edge`). If these are many, the whole
difference is rounded to 4 bits, or to 8 (`few_bits`). What is left off is at most `tolerance` of
the matrix, in the Frobenius norm; by default that is what rounding to bfloat16 may change. The
result is a LoRA adapter in PEFT's format, or one of a kind of its own if a matrix is in few bits;
it is served on the base, in its batches. Used by `ballast fleet delta`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ballast.bench.few_bits import FewBits, few_bits
from ballast.bench.progress import Progress, quiet
from ballast.core.errors import CheckpointError, ConfigError, UnsupportedModel
from ballast.core.settings import AdapterSettings, DeviceSettings, ModelSettings
from ballast.core.units import GiB
from ballast.models.divergence import Divergence, TextReader, compare
from ballast.models.on_cpu import on_cpu
from ballast.weights.adapter import MAX_RANK
from ballast.weights.assemble import Recipe, Sources
from ballast.weights.checkpoint import load_host_model
from ballast.weights.config import config_of, read_config
from ballast.weights.host import HostTier
from ballast.weights.meta_module import build_module
from ballast.weights.packed_delta import GROUP, KIND, PREFIX
from ballast.weights.source_files import ADAPTER_CONFIG, ADAPTER_TENSORS
from ballast.weights.stored import find_tensors
from ballast.weights.stored_tensor import StoredTensor
from ballast.weights.tokenizer_files import FILES

TOLERANCE = 2.0**-8
"""Most of a matrix that bfloat16's rounding of both of them changes."""
RANK = 128
FIRST_RANK = 16
"""Rank that is tried first; then twice as much, as far as a difference needs it."""
FLOAT = torch.float32
SUMMARY = "delta.json"
_MORE = 8
"""Singular values computed beyond those wanted: the last ones found are less exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDelta:
    """A delta as written."""

    path: Path
    ranks: Mapping[str, int]
    """Rank of each changed linear module of low rank, by path."""
    bits: Mapping[str, int]
    """Bits of each of the others."""
    errors: Mapping[str, float]
    """What is left off of each stored tensor that differs, as a part of it (Frobenius norm)."""
    n_bytes: int
    """Bytes of the delta's matrices."""
    whole_bytes: int
    """Bytes of the fine-tune's tensors as stored."""
    other_text: bool
    """Whether the fine-tune has another tokenizer or chat template; the base's are served."""

    @property
    def worst(self) -> float:
        return max(self.errors.values())


@dataclass(slots=True)
class _Comparison:
    """Comparison of the tensors of both, one after the other."""

    transposed: Mapping[str, bool]
    """Whether the weight of a linear module is stored as (inputs, outputs), by path."""
    tolerance: float
    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Matrices of each changed module, by their names in the adapter's file."""
    ranks: dict[str, int] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, tolerance: float, rank: int) -> _Comparison:
        modules = build_module(config).named_modules()
        linear = {p: isinstance(m, Conv1D) for p, m in modules if isinstance(m, nn.Linear | Conv1D)}
        return cls(linear, tolerance, rank)

    def add(self, name: str, before: Tensor, after: Tensor) -> None:
        """Compare a tensor. Raises UnsupportedModel, with its name, if a delta cannot have it."""
        delta = after - before
        if not delta.any():
            return
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self.transposed:
            matrix = delta.T if self.transposed[module] else delta
            kept = _kept(name, matrix, float(after.norm()), self.tolerance, self.rank)
            if isinstance(kept, FewBits):
                self.bits[module] = kept.bits
                for part, tensor in kept.tensors.items():
                    self.tensors[f"{PREFIX}{module}.weight_{part}"] = tensor
                matrix -= kept.rounded  # and `delta` with it
            elif kept is not None:
                a, b = kept
                self.ranks[module] = len(a)
                self.tensors[f"{PREFIX}{module}.lora_A.weight"] = a
                self.tensors[f"{PREFIX}{module}.lora_B.weight"] = b
                matrix -= b.float() @ a.float()
        error = self.errors[name] = float(delta.norm() / after.norm())
        if not error <= self.tolerance:
            what = f"a delta would leave off {error:.2%} of it, which it cannot hold"
            raise UnsupportedModel(f"{name}: {what}: raise --tolerance to accept that")


def make_delta(
    base: Path,
    tune: Path,
    target: Path,
    *,
    tolerance: float = TOLERANCE,
    rank: int = RANK,
    progress: Progress = quiet,
) -> MadeDelta:
    """Write the fine-tune in the directory `tune` as an adapter of `base` into `target`.

    `rank`: most that a matrix may have. Raises ConfigError for bad arguments, UnsupportedModel
    where the two differ in more than that, with the tensor's name, and the errors of reading.
    """
    if not 0.0 < tolerance < 1.0:
        raise ConfigError("--tolerance", tolerance, "a part of a tensor: above 0, below 1")
    if not 1 <= rank <= MAX_RANK:
        raise ConfigError("--rank", rank, f"1 to {MAX_RANK}")
    if (target / ADAPTER_CONFIG).exists():
        raise ConfigError("OUT", str(target), "an adapter is there already; name another directory")
    config = config_of(read_config(base))
    pairs = _pairs(base, tune, tied=bool(config.get_text_config().tie_word_embeddings))
    found = _Comparison.of(config, tolerance, rank)
    old = Sources(Recipe.of(before) for before, _ in pairs.values())
    new = Sources(Recipe.of(after) for _, after in pairs.values())
    with old, new:
        for i, (name, (before, after)) in enumerate(pairs.items()):
            progress("comparing tensors", i, len(pairs), name)
            both = (old.read(Recipe.of(before), FLOAT), new.read(Recipe.of(after), FLOAT))
            found.add(name, *both)
    progress("comparing tensors", len(pairs), len(pairs))
    if not found.tensors:
        what = f"no tensor differs from {base} by more than {tolerance:.2%}"
        raise UnsupportedModel(f"{tune}: {what}: there is nothing to keep")
    made = MadeDelta(
        path=target,
        ranks=found.ranks,
        bits=found.bits,
        errors=found.errors,
        n_bytes=sum(t.nbytes for t in found.tensors.values()),
        whole_bytes=sum(after.n_bytes for _, after in pairs.values()),
        other_text=_texts(base) != _texts(tune),
    )
    if 2 * made.n_bytes > made.whole_bytes:
        what = f"a delta takes {made.n_bytes / made.whole_bytes:.0%} of its bytes, more than half"
        raise UnsupportedModel(f"{tune}: {what}: serve it as it is, or raise --tolerance")
    _write(made, found.tensors, base, tune, tolerance)
    return made


def delta_divergence(base: Path, tune: Path, delta: Path) -> tuple[Divergence, Divergence]:
    """Compare, as CPUs serve them, the base with the delta, and the base alone, with the
    fine-tune."""
    device = DeviceSettings(budget_bytes=GiB, step_tokens=16, step_logits=1)
    adapter = AdapterSettings(name="delta", path=str(delta))
    tier = HostTier()
    whole = load_host_model(ModelSettings(name="tune", path=str(tune)), tier)
    try:
        settings = ModelSettings(name="base", path=str(base), adapters=(adapter,))
        host = load_host_model(settings, tier)
        try:
            for why in host.failed.values():
                raise UnsupportedModel(why)
            own = [TextReader(whole, on_cpu, device) for _ in range(2)]
            served = [TextReader(host, on_cpu, device, adapter) for adapter in (0, None)]
            with_delta, without = (compare(o, s) for o, s in zip(own, served, strict=True))
            return with_delta, without
        finally:
            host.close()
    finally:
        whole.close()


def _pairs(base: Path, tune: Path, *, tied: bool) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Return the tensors of both, by name. Raises UnsupportedModel if they are not the same."""
    before, after = find_tensors(base), find_tensors(tune)
    if tied:
        before.pop("lm_head.weight", None)
        after.pop("lm_head.weight", None)
    for names, there, other in ((before, tune, after), (after, base, before)):
        for name in names:
            if name not in other:
                raise UnsupportedModel(f"{there} has no tensor {name}: they are not siblings")
    for name, stored in after.items():
        if stored.shape != before[name].shape:
            shapes = f"{stored.shape}, and {before[name].shape} in its base"
            raise CheckpointError(str(tune), name, f"has shape {shapes}: they are not siblings")
    return {name: (before[name], after[name]) for name in after}


def _kept(
    name: str, delta: Tensor, whole: float, tolerance: float, most: int
) -> tuple[Tensor, Tensor] | FewBits | None:
    """Return what is kept of a difference: A and B of `_low_rank`, or few bits if these take less;
    None: nothing. `whole`: norm of the matrix.

    Raises UnsupportedModel if its rank is above `most` and 8 bits leave off too much.
    """
    n, k = delta.shape
    rank, factors = _low_rank(delta, _edge(delta.shape, whole, tolerance), most)
    if rank == 0:
        return None
    for bits in (4, 8):
        if factors is not None and 2 * rank * (n + k) <= n * k * (bits / 8 + 2 / GROUP):
            return factors
        found = few_bits(delta, bits)
        if float((delta - found.rounded).norm()) <= tolerance * whole:
            return found
    if factors is None:
        what = f"its difference from the base has a rank above {most}, and needs more than 8 bits"
        raise UnsupportedModel(f"{name}: {what}: raise --rank or --tolerance")
    return factors


def _edge(shape: torch.Size, whole: float, tolerance: float) -> float:
    """Return the largest singular value that is left off.

    If elements are changed at random by `tolerance / 2` of their root mean square, that is about
    the largest singular value of all changes together. Leaving off all values up to it leaves off
    at most `tolerance` of the matrix: it has no more values than its smaller dimension.
    """
    n, k = shape
    return float(tolerance / 2 * whole * (n**-0.5 + k**-0.5))


def _low_rank(delta: Tensor, edge: float, most: int) -> tuple[int, tuple[Tensor, Tensor] | None]:
    """Return the rank r of the part of `delta` above `edge`, and A (r, inputs) and B (outputs, r)
    with B A that part, in bfloat16; without these if the rank is 0 or above `most`."""
    tried = FIRST_RANK
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(delta, min(tried + _MORE, *delta.shape), niter=4)
        r = int((s > edge).sum())
        if r <= min(tried, most) or tried >= min(most, *delta.shape):
            break
        tried *= 2
    if not 0 < r <= most:
        return r, None
    root = s[:r].sqrt()
    a, b = (v[:, :r] * root).T.bfloat16(), (u[:, :r] * root).bfloat16()
    return r, (a.contiguous(), b.contiguous())


def _texts(directory: Path) -> Sequence[bytes]:
    """Return the files that make up tokenizer and chat template."""
    names = [*(name for name in FILES if name != "config.json"), "chat_template.jinja"]
    paths = (directory / name for name in names)
    return [path.read_bytes() for path in paths if path.is_file()]


def _write(
    made: MadeDelta, tensors: Mapping[str, Tensor], base: Path, tune: Path, tolerance: float
) -> None:
    ranks = dict(made.ranks)
    most = max(ranks.values(), default=1)
    config: dict[str, Any] = {
        "peft_type": KIND if made.bits else "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": most,
        "lora_alpha": most,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in (*ranks, *made.bits)}),
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
    }
    summary = {
        "base": str(base),
        "fine_tune": str(tune),
        "tolerance": tolerance,
        "worst": made.worst,
        "errors": dict(made.errors),
        "ranks": ranks,
        "bits": dict(made.bits),
    }
    made.path.mkdir(parents=True, exist_ok=True)
    (made.path / SUMMARY).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    save_file(dict(tensors), made.path / ADAPTER_TENSORS, metadata={"format": "pt"})
    (made.path / ADAPTER_TENSORS).chmod(0o644)  # as the other files: a container may serve it
    (made.path / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
