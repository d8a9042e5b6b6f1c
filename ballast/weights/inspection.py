"""Derive a model's architecture from its `transformers` module, and refuse unsupported models.

Names, shapes and dtypes come from the module itself, built without memory; its requirements of
attention from running it without its weights (`ballast.weights.probe`). So sizes are those that the
model really uses. A model is refused when it is loaded if it does not call our attention, requires
more of it than it can do, or would compute something else in our batches
(`ballast.weights.agreement`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from ballast.core.errors import BallastError, UnsupportedModel, brief
from ballast.core.model import LayerKv
from ballast.weights.agreement import disagreement, layers_to_run
from ballast.weights.architecture import Architecture, ModelTensor
from ballast.weights.carried_state import carry, state_modules
from ballast.weights.decoder_recipe import DecoderRecipe
from ballast.weights.kv_groups import grouped
from ballast.weights.latent import UP, latent_paths
from ballast.weights.meta_module import build_module, rotary_of
from ballast.weights.module_segments import find_layers, tensors_by_segment
from ballast.weights.probe import ProbeResult, probe
from ballast.weights.recipe_agreement import follows
from ballast.weights.recipe_search import LayerSizes, candidates
from ballast.weights.row_call import first_position, has_alibi
from ballast.weights.support_checks import (
    check_attention,
    check_config,
    check_module,
    kv_sizes,
)
from ballast.weights.weightless import (
    expert_matrices,
    is_light,
    is_plain_linear,
    make_weightless,
    replace_linears,
)

log = logging.getLogger(__name__)

_MOST_POSITIONS = 2**31 - 1
_CONTEXT = ("max_position_embeddings", "seq_length", "max_seq_len")
"""What configurations call the most positions of a sequence."""


def inspect_model(config: Any, length: int | None = None) -> Architecture:
    """Build and run a model's module, without weights, and return its architecture.

    `length`: most tokens of a sequence that will be served; None: the model's own context. Raises
    UnsupportedModel with the reason.
    """
    kind = config.model_type
    try:
        return _inspect(config, kind, length)
    except BallastError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise UnsupportedModel(f"{kind}: {brief(error)}") from error


def _inspect(config: Any, kind: str, length: int | None) -> Architecture:
    check_config(config, kind)
    try:
        module: Any = build_module(config, torch.bfloat16)
    except Exception as error:
        reason = f"transformers cannot build it: {brief(error)}"
        raise UnsupportedModel(f"{kind}: {reason}") from error
    check_module(module, kind)
    carry(module, state_modules(module))
    text = config.get_text_config()
    positions = max(0, (_context(text) or length or 0) - first_position(module))
    if not 0 <= positions <= _MOST_POSITIONS:
        raise UnsupportedModel(f"{kind}: it cannot have a context of {positions} tokens")
    prefix, n_layers = find_layers(module, kind)
    segments = tensors_by_segment(module, prefix, n_layers, kind)
    conversions = tuple(get_model_conversion_mapping(module))
    replace_linears(module)
    seen = _run(module, positions, kind)
    check_attention(seen.calls, n_layers, positions, kind, bool(seen.states))
    if not positions:
        raise UnsupportedModel(f"{kind}: its configuration bounds no context; set max_model_len")
    if seen.logits[1] != 1:
        raise UnsupportedModel(f"{kind}: it computes logits at every position")
    vocab, hidden = _vocabulary(module)
    fixed_positions = _fixed_rotary_positions(text, positions)
    linears, experts = _replaceable(module, segments, positions)
    served = min(fixed_positions, length or fixed_positions)
    latent = _check_agreement(module, segments, seen, prefix, served, kind)
    sizes = _sizes(seen, hidden, _intermediate(text, segments))
    layer_kv, kv_windows = _kv(seen, sizes, served, latent)
    return Architecture(
        config=config,
        n_layers=n_layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        experts_per_token=seen.experts_per_token,
        expert_intermediate=seen.expert_intermediate,
        vocab=vocab,
        positions=positions,
        fixed_rotary_positions=fixed_positions,
        windows=_windows(seen, n_layers),
        attention_layers=_attention_layers(seen, n_layers),
        layer_kv=layer_kv,
        kv_windows=kv_windows,
        states=seen.states,
        alibi=has_alibi(module),
        softcap=seen.calls[0].softcap,
        segments=segments,
        prefix=prefix,
        linears=linears,
        experts=experts,
        recipe=_recipe(module, segments, seen, prefix, sizes, served),
        conversions=conversions,
        base_prefix=str(module.base_model_prefix),
    )


def _run(module: nn.Module, positions: int, kind: str) -> ProbeResult:
    """Probe the module's requirements; leaves it on the CPU, without weights, or on the meta
    device.

    Most modules are quicker on the CPU. Only some that would multiply large matrices there are not,
    and of these only those that never read elements can be run on the meta device.
    """
    if not is_light(module):
        try:
            return probe(module, positions or 2)
        except Exception:  # noqa: BLE001 - it may be possible with elements
            pass
    _without_weights(module, kind)
    try:
        return probe(module, positions or 2)
    except Exception as error:
        reason = f"it cannot be run with our attention: {brief(error)}"
        raise UnsupportedModel(f"{kind}: {reason}") from error


def _without_weights(module: nn.Module, kind: str) -> None:
    """Move the module to the CPU, in float32, without its weights."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.dtype = torch.float32
    make_weightless(module, kind)


def _replaceable(
    module: nn.Module, segments: Sequence[tuple[str, Sequence[ModelTensor]]], positions: int
) -> tuple[frozenset[str], dict[str, bool]]:
    """Return `Architecture.linears` and `experts`, found by running the module once more without
    these weights."""
    alone = {w.names[0] for _, wanted in segments for w in wanted if len(w.names) == 1}
    alone -= {f"{path}.{UP}.weight" for path in latent_paths(module)}
    served = {w.names[0] for _, wanted in segments for w in wanted if w.dtype is None}
    linears: dict[str, nn.Module] = {}
    experts: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if is_plain_linear(part) and f"{path}.weight" in alone:
            linears[f"{path}.weight"] = part
        names = {f"{path}.{leaf}" for leaf in expert_matrices(part)}
        if names <= alone & served:
            experts |= dict.fromkeys(sorted(names), part)
    if experts and _runs_without({**linears, **experts}, module, positions):
        turned = {name: bool(part.is_transposed) for name, part in experts.items()}
        return frozenset(linears), turned
    if _runs_without(linears, module, positions):
        return frozenset(linears), {}
    return frozenset(), {}


def _runs_without(found: Mapping[str, nn.Module], module: nn.Module, positions: int) -> bool:
    """Return whether a module can be run without parameters, by their names with their owners: some
    code looks at weights by itself."""
    leaves = {name: name.rpartition(".")[2] for name in found}
    weights = {name: owner._parameters.pop(leaves[name]) for name, owner in found.items()}
    try:
        probe(module, positions)
    except Exception:  # noqa: BLE001 - whatever it is
        return False
    finally:
        for name, owner in found.items():
            owner._parameters[leaves[name]] = weights[name]
    return True


def _vocabulary(module: Any) -> tuple[int, int]:
    """Return how many tokens are known and may be chosen, and the size of their embeddings."""
    rows, hidden = module.get_input_embeddings().weight.shape
    head = module.get_output_embeddings()
    # Tokens beyond the head stand for images.
    return (rows if head is None else min(rows, len(head.weight))), hidden


def _check_agreement(
    module: Any,
    segments: Sequence[tuple[str, Sequence[ModelTensor]]],
    seen: ProbeResult,
    prefix: str,
    positions: int,
    kind: str,
) -> bool:
    """Refuse a module whose logits are different in our batches; return whether they are the same
    by its latents alone.

    Shortens `module` to the layers that are run: one of each kind that occurs.
    """
    path = prefix.removesuffix(".")
    layers: Any = module.get_submodule(path)
    text = module.config.get_text_config()
    lists = [v for v in vars(text).values() if isinstance(v, list) and len(v) == len(layers)]
    masks = {call.layer: call.mask for call in seen.calls}
    kinds = [
        (
            masks.get(i),
            tuple((w.names[0].removeprefix(f"{prefix}{i}."), w.shape) for w in wanted),
            repr([values[i] for values in lists]),
        )
        for i, (_, wanted) in enumerate(segments[1 : 1 + len(layers)])
    ]
    parent, _, leaf = path.rpartition(".")
    shortened = nn.ModuleList(list(layers)[: layers_to_run(kinds)])
    setattr(module.get_submodule(parent), leaf, shortened)
    vocab = len(module.get_input_embeddings().weight)
    if module.device.type == "meta":
        _without_weights(module, kind)
    if latent_paths(module):
        try:
            if disagreement(module, positions, vocab, latent=True) is None:
                return True
        except Exception:
            log.debug("%s: keys and values are kept in place of latents", kind, exc_info=True)
    try:
        found = disagreement(module, positions, vocab)
    except Exception as error:
        reason = f"it cannot be run in batches of ours: {brief(error)}"
        raise UnsupportedModel(f"{kind}: {reason}") from error
    if found is not None:
        raise UnsupportedModel(f"{kind}: {found}")
    return False


def _kv(
    seen: ProbeResult, sizes: LayerSizes, served: int, latent: bool
) -> tuple[tuple[LayerKv, ...], tuple[int | None, ...]]:
    """Return `Architecture.layer_kv` and `kv_windows`."""
    found: list[LayerKv] = []
    windows: dict[int, int | None] = {}
    for c in seen.calls:
        assert c.layer is not None  # else `check_attention` has refused it
        kv = LayerKv(c.layer, c.key[1], max(c.key[3], c.value[3]), source=c.source)
        if latent and c.latent is not None:
            kv = LayerKv(c.layer, 1, c.latent, latent=True, source=c.source)
        found.append(kv)
        window = None if c.mask is None else c.mask.window
        windows[c.layer] = None if window is None or window >= served else window
    if not seen.states and (groups := grouped(found, windows)) is not None:
        return groups
    whole = {LayerKv(kv.layer, sizes.kv_heads, sizes.head_dim) for kv in found}
    return (() if whole == {*found} else tuple(found)), ()


def _sizes(seen: ProbeResult, hidden: int, intermediate: int) -> LayerSizes:
    kv_heads, head_dim = kv_sizes(seen.calls)
    return LayerSizes(
        heads=seen.calls[0].query[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=intermediate,
    )


def _windows(seen: ProbeResult, n_layers: int) -> tuple[int | None, ...]:
    found = {c.layer: c.mask.window for c in seen.calls if c.mask is not None}
    return tuple(found.get(i) for i in range(n_layers))


def _attention_layers(seen: ProbeResult, n_layers: int) -> tuple[int, ...]:
    found = tuple(c.layer for c in seen.calls if c.layer is not None)
    return () if len(found) == n_layers else found


def _recipe(
    module: Any,
    segments: Sequence[tuple[str, Sequence[ModelTensor]]],
    seen: ProbeResult,
    prefix: str,
    sizes: LayerSizes,
    positions: int,
) -> DecoderRecipe | None:
    """Find the recipe that a weightless, shortened module follows within `positions`, if any."""
    shape = (1, sizes.kv_heads, seen.calls[0].key[2], sizes.head_dim)
    if seen.states or any(c.sinks is not None or c.source is not None for c in seen.calls):
        return None
    if any((c.key, c.value) != (shape, shape) for c in seen.calls):
        return None
    layers = [
        {w.names[0].removeprefix(f"{prefix}{i}."): w.shape for w in wanted}
        for i, (_, wanted) in enumerate(segments[1 : 1 + len(seen.calls)])
    ]
    path, windows = prefix.removesuffix("."), _windows(seen, len(seen.calls))
    scales = [call.scale for call in seen.calls]
    try:
        for recipe in candidates(module, layers, path, scales, seen.calls[0].softcap, sizes):
            rotary = rotary_of(module.config)
            if follows(module, recipe, path, rotary, windows, sizes, positions):
                return recipe
    except Exception:  # noqa: BLE001 - whatever is odd about it, it is served in the general way
        return None
    return None


def _context(text: Any) -> int:
    """Return the most positions of a sequence; 0: the configuration bounds none.

    Rotary embeddings that are scaled by YaRN or linearly reach as far as the original context times
    the factor, whether or not `max_position_embeddings` says so. If they are scaled in some layers
    alone, that counts as it is.
    """
    said = (getattr(text, name, None) for name in _CONTEXT)
    positions = int(next((n for n in said if n), 0))
    ropes = [p for p in _ropes(text) if "rope_type" in p]
    reached = []
    for rope in ropes:
        factor = rope.get("factor")
        if rope["rope_type"] not in ("yarn", "linear") or not isinstance(factor, int | float):
            return positions
        original = rope.get("original_max_position_embeddings") or positions
        reached.append(int(original * factor) if factor >= 1 else positions)
    return min(reached, default=positions)


def _fixed_rotary_positions(text: Any, positions: int) -> int:
    """Return the length up to which rotary frequencies do not depend on a sequence's length.

    LongRoPE has other frequencies for all of a sequence once it is longer than that. Those of type
    `dynamic` change, too, but not within `max_position_embeddings`, which is `positions`.
    """
    ropes = [p for p in _ropes(text) if p.get("rope_type") == "longrope"]
    return min([positions, *(int(p["original_max_position_embeddings"]) for p in ropes)])


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings: one, or one per kind of layer."""
    parameters = getattr(text, "rope_parameters", None)
    if isinstance(parameters, dict):
        yield parameters
        yield from (p for p in parameters.values() if isinstance(p, dict))


def _intermediate(text: Any, segments: Sequence[tuple[str, Sequence[ModelTensor]]]) -> int:
    """Return the width of the widest layer's MLP, or the largest dimension if the configuration has
    none."""
    largest = max(n for _, wanted in segments[1:] for w in wanted for n in w.shape)
    found = getattr(text, "intermediate_size", None)
    sizes = found if isinstance(found, list) else [found]
    if sizes and all(type(size) is int and 0 < size <= largest for size in sizes):
        return int(max(sizes))
    return largest
