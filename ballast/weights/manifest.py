"""Describe and check a checkpoint's contents before its weights are read, as plain data.

Making a manifest runs code of `transformers` on a configuration that anybody may have written, so
it runs in a limited process where there is one (`ballast.isolation`). The manifest can be sent
between processes, and loading (`ballast.weights.checkpoint`) relies on it alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ballast.core.errors import BallastError, CheckpointError, ConfigError, UnsupportedModel, brief
from ballast.core.model import LayerKv, StateTensor
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.settings import ModelSettings
from ballast.isolation.limits import Limits
from ballast.kernels.panel_forms import rounded
from ballast.weights import packing
from ballast.weights.architecture import Architecture
from ballast.weights.assemble import READABLE, Recipe, parameters_by_type, recipes
from ballast.weights.config import (
    check_layers,
    config_of,
    end_tokens,
    read_config,
    tied,
)
from ballast.weights.decoder_recipe import LLAMA, DecoderRecipe, RotarySet
from ballast.weights.generation_config import sampling_defaults
from ballast.weights.pooling import is_base_model, pooling_of
from ballast.weights.segment import PackedTensor, Segment, pack
from ballast.weights.sharding import WHOLE, Shard, divided, narrowed
from ballast.weights.stored import find_tensors, form_of, plain_dtype
from ballast.weights.stored_tensor import ITEM_BYTES, StoredTensor

if TYPE_CHECKING:  # it needs packages that reading weights does not
    from ballast.isolation.zygote import Zygote


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """A checkpoint to read, or one rank's part of it."""

    settings: ModelSettings
    shard: Shard = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Sizes, layout and sources of a model, or of one rank's part."""

    config: str
    """Values of config.json, as JSON, for `ballast.weights.config.config_of`."""
    untied: bool
    """Whether the head has weights of its own, whatever config.json says."""
    n_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    experts_per_token: int
    expert_intermediate: int
    vocab: int
    windows: tuple[int | None, ...]
    attention_layers: tuple[int, ...]
    layer_kv: tuple[LayerKv, ...]
    kv_windows: tuple[int | None, ...]
    states: tuple[StateTensor, ...]
    alibi: bool
    dtype: str
    max_model_len: int
    eos: tuple[int, ...]
    sampling: SamplingDefaults
    embeds: bool
    generates: bool
    pooling: str
    plan: dict[str, Recipe]
    """How to read each tensor of the architecture, by its first name."""
    stored: dict[str, int]
    """Parameters of the whole model by the type that they are stored in, by its name."""
    segments: tuple[Segment, ...]
    fused: bool
    recipe: DecoderRecipe | None
    """How the fast path computes a layer, if `fused`."""
    fingerprint: str
    """Hex digest of configuration, dtype, names, shapes and layouts, without the weights'
    elements."""
    modules: dict[str, tuple[int, int]]
    """(inputs, outputs) of the linear modules, by path; empty if no adapters are configured."""
    rotary: dict[str, RotarySet]
    """Frequencies by set, as `DecoderRecipe.rotary_sets`; empty unless `fused`."""
    norm_epsilon: float | None
    """Of the norms; None unless `fused`."""


def read_manifest(reading: ManifestRequest) -> Manifest:
    """Read a checkpoint's configuration and headers, and check them against each other.

    Raises CheckpointError (file, tensor, reason), UnsupportedModel, and ConfigError for settings
    that do not fit the model.
    """
    directory = Path(reading.settings.path)
    try:
        return _read(reading.settings, directory, reading.shard)
    except BallastError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or directory), None, reason) from error
    except Exception as error:  # unforeseen contents of the files
        raise CheckpointError(str(directory), None, brief(error)) from error


def _read(settings: ModelSettings, directory: Path, shard: Shard) -> Manifest:
    from ballast.weights.encoder import encoder_pooling  # its imports take seconds

    config = config_of(values := read_config(directory))
    stored = find_tensors(directory)
    check_layers(config, directory, len(stored))
    pooling = encoder_pooling(directory, config, values)
    architecture = _inspected(settings, config, settings.max_model_len, pooling)
    length = _max_model_len(settings, architecture)
    found = recipes(architecture, stored, directory)
    embeds = bool(pooling) or pooling_of(directory) == "last"
    headless = _is_headless(architecture, found)
    if headless and (embeds or is_base_model(directory, values)):
        embeds, values = True, tied(values)  # no request for an embedding computes the head
        architecture = _inspected(settings, config := config_of(values), length)
    if untied := not pooling and architecture.tied and _heads_differ(architecture, found):
        architecture = _inspected(settings, config_of(values, untied=True), length)
    plan = _match(architecture, found, directory)
    dtype, stored_in = _choose_dtype(settings, plan), parameters_by_type(plan)
    if shard == WHOLE:
        segments, fused = _layout(settings, architecture, dtype, plan)
    else:
        architecture, segments = _shard(settings, architecture, dtype, shard)
        plan, fused = narrowed(plan, architecture, shard), True
    return Manifest(
        config=json.dumps(values),
        untied=untied,
        n_layers=architecture.n_layers,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        hidden=architecture.hidden,
        intermediate=architecture.intermediate,
        experts_per_token=architecture.experts_per_token,
        expert_intermediate=architecture.expert_intermediate,
        vocab=architecture.vocab,
        windows=architecture.windows,
        attention_layers=architecture.attention_layers,
        layer_kv=architecture.layer_kv,
        kv_windows=architecture.kv_windows,
        states=architecture.states,
        alibi=architecture.alibi,
        dtype=dtype,
        max_model_len=length,
        eos=end_tokens(directory, config, architecture.vocab),
        sampling=sampling_defaults(directory),
        embeds=embeds,
        generates=not (pooling or (headless and embeds)),
        pooling=pooling,
        plan=plan,
        stored=stored_in,
        segments=segments,
        fused=fused,
        recipe=architecture.recipe if fused else None,
        fingerprint=_fingerprint(architecture, segments),
        modules=_adaptable(config) if settings.adapters else {},
        rotary=_rotary(architecture) if fused else {},
        norm_epsilon=config.get_text_config().rms_norm_eps if fused else None,
    )


def _inspected(
    settings: ModelSettings, config: Any, length: int | None, pooling: str = ""
) -> Architecture:
    from ballast.weights.encoder import inspect_encoder
    from ballast.weights.inspection import inspect_model

    if not pooling:
        return inspect_model(config, length)
    if settings.adapters:
        raise UnsupportedModel(f"{config.model_type}: adapters of encoders are not served")
    return inspect_encoder(config, pooling)


def _adaptable(config: Any) -> dict[str, tuple[int, int]]:
    from ballast.weights.meta_module import linear_modules

    return linear_modules(config)


def _rotary(architecture: Architecture) -> dict[str, RotarySet]:
    from ballast.weights.meta_module import rotary_sets

    return rotary_sets(architecture.config, architecture.recipe or LLAMA)


def _layout(
    settings: ModelSettings, architecture: Architecture, dtype: str, plan: Mapping[str, Recipe]
) -> tuple[tuple[Segment, ...], bool]:
    """Return the segments, and whether they are those of the fast path."""
    packed = settings.linear != "plain"
    forms = _forms(plan, dtype) if packed else packing.NO_FORMS
    if settings.linear == "int8":
        forms = {name: rounded(form, plan[name].shape[-1]) for name, form in forms.items()}
    layout = None
    if settings.model_impl != "generic" and not _adapts_in_halves(settings, architecture):
        layout = packing.fused(architecture, dtype, packed=packed, forms=forms)
    if layout is None and settings.model_impl == "fused":
        kind = architecture.config.model_type
        raise UnsupportedModel(f"{kind}: the fused path does not know its layers")
    fused = layout is not None
    if layout is None:
        linears = architecture.linears if packed else frozenset()
        layout = packing.as_stored(architecture, dtype, linears, forms)
    return tuple(pack(*s) for s in layout), fused


def _forms(plan: Mapping[str, Recipe], dtype: str) -> packing.Forms:
    """Return the forms of the matrices that stay quantised, and of experts that are stored one by
    one."""
    found: dict[str, str] = {}
    for name, recipe in plan.items():
        source = recipe.plain
        whole = all(run.n == math.prod(run.source.shape) for run in recipe.runs)
        forms = {form_of(run.source, dtype) for run in recipe.runs}
        is_one = source is not None and source.shape == recipe.shape
        if whole and len(forms) == 1 and (is_one or len(recipe.shape) == 3):
            found[name] = forms.pop()
    return {name: form for name, form in found.items() if form}


def _adapts_in_halves(settings: ModelSettings, architecture: Architecture) -> bool:
    """Whether adapters may change a matrix that is stored with gates before ups, while the fast
    path interleaves them: the kernels cannot add to it there."""
    recipe = architecture.recipe
    return bool(settings.adapters) and recipe is not None and recipe.gate_up_stored_whole


def _shard(
    settings: ModelSettings, architecture: Architecture, dtype: str, shard: Shard
) -> tuple[Architecture, tuple[Segment, ...]]:
    """Return one rank's part. Raises ConfigError for models that cannot be divided."""
    if architecture.experts_per_token:
        allowed = f"{settings.name} has experts, which are not divided so far"
        raise ConfigError("tensor_parallel", shard.ranks, allowed)
    packed = settings.linear != "plain"
    divisible = architecture.recipe == LLAMA and settings.model_impl != "generic"
    if not divisible or packing.fused(architecture, dtype) is None:
        allowed = f"{settings.name} is not served by the fused path of Llama's kind"
        raise ConfigError("tensor_parallel", shard.ranks, allowed)
    if settings.adapters:
        allowed = f"{settings.name} has adapters, which are not divided so far"
        raise ConfigError("tensor_parallel", shard.ranks, allowed)

    def laid_out(part: Architecture) -> list[Segment]:
        return [pack(*s) for s in packing.fused(part, dtype, packed=packed) or ()]

    part = divided(architecture, settings.name, shard)
    first = divided(architecture, settings.name, Shard(0, shard.ranks))
    sizes = [s.n_bytes for s in laid_out(first)]
    even = tuple(replace(s, n_bytes=n) for s, n in zip(laid_out(part), sizes, strict=True))
    return part, even


def _is_headless(architecture: Architecture, found: Mapping[str, Recipe]) -> bool:
    """Whether the files hold a model without its output head."""
    if architecture.tied:
        return False
    base = f"{architecture.base_prefix}."
    names = [n for tensor in architecture.segments[-1][1] for n in tensor.names]
    head = [n for n in names if not n.startswith(base)]
    return bool(head) and not any(n in found for n in head)


def _heads_differ(architecture: Architecture, found: Mapping[str, Recipe]) -> bool:
    """Whether parameters that should be tied are in the files under several names with different
    values.

    `transformers` does not tie them then, whatever the configuration says.
    """
    for _, wanted in architecture.segments:
        for tensor in wanted:
            stored = [found[n].runs[0].source for n in tensor.names if n in found]
            if any(not _same(stored[0], other) for other in stored[1:]):
                return True
    return False


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = 1 << 24
    with open(a.path, "rb") as left, open(b.path, "rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        return all(
            left.read(n) == right.read(n)
            for n in (min(step, a.n_bytes - at) for at in range(0, a.n_bytes, step))
        )


def _match(
    architecture: Architecture, found: Mapping[str, Recipe], directory: Path
) -> dict[str, Recipe]:
    """Return how to read each tensor of the architecture, by its first name."""
    plan = {}
    for _, wanted in architecture.segments:
        for tensor in wanted:
            recipe = next((found[n] for n in tensor.names if n in found), None)
            if recipe is None:
                raise CheckpointError(str(directory), tensor.names[0], "it is missing")
            if recipe.shape != tensor.shape:
                reason = f"has shape {recipe.shape}, the model needs {tensor.shape}"
                if recipe.plain is not None:
                    raise recipe.plain.error(reason)
                reason = f"put together from {len(recipe.runs)} it {reason}"
                raise CheckpointError(str(directory), tensor.names[0], reason)
            for run in recipe.runs:
                if run.source.dtype not in READABLE and not run.source.is_quantised:
                    raise run.source.error(
                        f"dtype {run.source.dtype} is not one of {', '.join(READABLE)}"
                    )
            plan[tensor.names[0]] = recipe
    return plan


def _choose_dtype(settings: ModelSettings, plan: Mapping[str, Recipe]) -> str:
    if settings.dtype in packing.DTYPES:
        return settings.dtype
    if settings.dtype != "auto":
        raise ConfigError("dtype", settings.dtype, f"allowed: auto, {', '.join(packing.DTYPES)}")
    n_bytes: Counter[str] = Counter()
    for recipe in plan.values():
        for run in recipe.runs:
            dtype = plain_dtype(run.source)
            n_bytes[dtype] += run.n * ITEM_BYTES[dtype]
    return "bfloat16" if n_bytes.most_common(1)[0][0] == "BF16" else "float32"


def _max_model_len(settings: ModelSettings, architecture: Architecture) -> int:
    length = min(settings.max_model_len or architecture.positions, architecture.positions)
    if length > architecture.fixed_rotary_positions:
        raise UnsupportedModel(
            f"{architecture.config.model_type}: its rotary embeddings (longrope) are others for "
            f"all of a sequence once it exceeds {architecture.fixed_rotary_positions} tokens, and "
            "keys that were kept would not fit; set max_model_len to at most that"
        )
    return length


def _fingerprint(architecture: Architecture, segments: Sequence[Segment]) -> str:
    """Hex SHA-256 over the configuration, dtype, names, shapes, and what layers keep."""
    values, kept = architecture.config.to_dict(), architecture.layer_kv
    for incidental in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        values.pop(incidental, None)

    def tensor(t: PackedTensor) -> list[Any]:
        return [t.names, t.shape, t.dtype, t.layout, *([t.form] if t.form else [])]

    layout = [[s.name, [tensor(t) for t in s.tensors]] for s in segments]
    text = json.dumps([values, layout, *([kept] if kept else [])], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def fork_zygote(limits: Limits | None = None, *, confined: bool = True) -> Zygote:
    """Fork the process whose children read manifests, as `Zygote.fork` does.

    What each of them would import and compute anew, the process does before the first of them.
    """
    from ballast.isolation.zygote import Zygote

    return Zygote.fork(_one_thread, limits, confined=confined, warm_up=_warm_up)


def _warm_up() -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import ballast.weights.inspection  # noqa: F401

    get_checkpoint_conversion_mapping("llama")  # builds the rules of all models, and keeps them


def _one_thread() -> None:
    torch.set_num_threads(1)
