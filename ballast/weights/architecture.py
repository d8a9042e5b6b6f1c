"""What a configuration asks for, learned from its module.

Names, shapes and dtypes come from the module itself, built without memory, and what it asks of its
attention from *running* it without its weights (`ballast.weights.probe`). So sizes are those that
the model really uses, and a model that would not go through our attention, would ask more of it
than it can do, or would compute something else in our batches (`ballast.weights.agreement`) is
refused when it is loaded.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from ballast.core.errors import BallastError, UnsupportedModel, brief
from ballast.weights.agreement import disagreement, layers_to_run
from ballast.weights.config import text_config
from ballast.weights.decoder_recipe import DecoderRecipe
from ballast.weights.default_dtype import DefaultDtype
from ballast.weights.probe import Call, Seen, probe
from ballast.weights.recipe_agreement import follows
from ballast.weights.recipe_search import LayerSizes, candidates, find_rotary
from ballast.weights.weightless import is_light, is_plain_linear, make_weightless, replace_linears


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the architecture; tied parameters are several `names` of one."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str | None = None
    """In which `transformers` keeps it, whatever the model is served in; None: in that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and tensors of a decoder."""

    config: Any
    n_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    experts_per_token: int
    """How many experts a token goes through in a layer; 0: there are none."""
    expert_intermediate: int
    vocab: int
    positions: int
    """Most tokens of one sequence."""
    alike: int
    """Up to so many tokens, rotary embeddings do not depend on a sequence's length."""
    windows: tuple[int | None, ...]
    """Of each layer: how many positions, its own included, a query sees; None: all."""
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    segments: tuple[tuple[str, tuple[Wanted, ...]], ...]
    """(name, tensors), in load order: embeddings, layer 0 .. n-1, head if it is not tied."""
    prefix: str
    """What the names of layers' tensors begin with, up to the layer's number."""
    linears: frozenset[str]
    """Weights of linear modules that are used by calling these modules and in no other way."""
    recipe: DecoderRecipe | None
    """What the fast path goes by; None: the layers are of a kind that it does not know."""
    conversions: tuple[Any, ...]
    """`transformers`' rules from a checkpoint's names and tensors to these."""
    base_prefix: str
    """What names begin with that belong to the model without its head."""

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.segments[-1][0] != "head"


def build(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module of `config` on the meta device: no memory, no weights, for evaluation.

    Of a model that also takes images or sounds, the part that text goes through; the rest is not
    there. Its experts go through `transformers`' grouped matrix multiplication, the default. It has
    its own copy of the configuration, which says by what its attention and experts are computed.
    """
    own = copy.deepcopy(config)
    for part in (own, own.get_text_config()):
        for report in _REPORTS:
            if getattr(part, report, False):
                setattr(part, report, False)
    auto = AutoModelForCausalLM
    if type(own) not in auto._model_mapping and _is_wrapper(own):
        auto = AutoModelForImageTextToText
    with DefaultDtype(dtype), torch.device("meta"):
        # Named here, an attention that the configuration names is not fetched from anywhere; and a
        # dtype would be made the default of all threads.
        module = auto.from_config(own, dtype=None, attn_implementation="eager").eval()
    for part in module.modules():
        if isinstance(getattr(part, "config", None), PreTrainedConfig):
            part.config.dtype = dtype
    if _is_wrapper(own):
        _keep_text(module)
    return module  # type: ignore[no-any-return]


_MOST_POSITIONS = 2**31 - 1
_REPORTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""What a forward returns besides logits, for training; computing it may fail in our batches."""


def _is_wrapper(config: Any) -> bool:
    """Whether text is one of several things that the model takes."""
    return config.get_text_config() is not config


def _keep_text(module: Any) -> None:
    """Leave out of a model for several things what text does not go through."""
    kept = {id(part) for part in module.get_decoder().modules()}
    for head in (module.get_output_embeddings(), module.get_input_embeddings()):
        kept |= {id(part) for part in head.modules()} if head is not None else set()
    above = [
        part for part in module.modules() if any(id(inner) in kept for inner in part.modules())
    ]
    for part in above:
        if id(part) in kept:
            continue
        for name, child in part.named_children():
            if not any(child is other for other in above):
                setattr(part, name, nn.Identity())


def _intermediate(text: Any, segments: Sequence[tuple[str, Sequence[Wanted]]]) -> int:
    """Width of the widest layer's MLP; the largest dimension where the configuration has none."""
    largest = max(n for _, wanted in segments[1:] for w in wanted for n in w.shape)
    found = getattr(text, "intermediate_size", None)
    sizes = found if isinstance(found, list) else [found]
    if sizes and all(type(size) is int and 0 < size <= largest for size in sizes):
        return int(max(sizes))
    return largest


def linear_modules(config: Any) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the modules that can be adapted, by path, in the model's order."""
    found: dict[str, tuple[int, int]] = {}
    for path, module in build(config).named_modules():
        if isinstance(module, nn.Linear):
            found[path] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            found[path] = inputs, outputs
    return found


def rotary_of(config: Any) -> Any:
    """The module that computes rotary angles, on the CPU."""
    return type(find_rotary(build(config)))(config.get_text_config())


def learn(config: Any, length: int | None = None) -> Architecture:
    """Build and run it, to serve sequences of up to `length` tokens, or all it is made for.

    Raises UnsupportedModel with the reason.
    """
    kind = config.model_type
    try:
        return _learn(config, kind, length)
    except BallastError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise UnsupportedModel(f"{kind}: {brief(error)}") from error


def _learn(config: Any, kind: str, length: int | None) -> Architecture:
    _check_config(config, kind)
    try:
        module: Any = build(config, torch.bfloat16)
    except Exception as error:
        reason = f"transformers cannot build it: {brief(error)}"
        raise UnsupportedModel(f"{kind}: {reason}") from error
    _check_module(module, kind)
    text = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", None) or 0)
    if not 0 <= positions <= _MOST_POSITIONS:
        raise UnsupportedModel(f"{kind}: it cannot have a context of {positions} tokens")
    prefix, n_layers = _layers(module, kind)
    segments = _segments(module, prefix, n_layers, kind)
    conversions = tuple(get_model_conversion_mapping(module))
    replace_linears(module)
    seen = _run(module, positions, kind)
    _check_calls(seen.calls, n_layers, positions, kind)
    if not positions:
        raise UnsupportedModel(f"{kind}: its configuration bounds no context length")
    if seen.logits[1] != 1:
        raise UnsupportedModel(f"{kind}: it computes logits at every position")
    query, key = seen.calls[0].query, seen.calls[0].key
    vocab, hidden = module.get_input_embeddings().weight.shape
    alike = _alike(text, positions)
    linears = _linears(module, segments, positions)
    served = min(alike, length or alike)
    _check_agreement(module, segments, seen, prefix, served, kind)
    sizes = LayerSizes(
        heads=query[1],
        kv_heads=key[1],
        head_dim=query[3],
        hidden=hidden,
        intermediate=_intermediate(text, segments),
    )
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
        alike=alike,
        windows=_windows(seen),
        softcap=seen.calls[0].softcap,
        segments=segments,
        prefix=prefix,
        linears=linears,
        recipe=_recipe(module, segments, seen, prefix, sizes, served),
        conversions=conversions,
        base_prefix=str(module.base_model_prefix),
    )


def _run(module: nn.Module, positions: int, kind: str) -> Seen:
    """What it asks for. Leaves it on the CPU, without weights, or on the meta device.

    Most are quicker on the CPU. Only some that would multiply large matrices there are not, and of
    these only those that never look at elements can be run on the meta device.
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
    """On the CPU, in float32."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.dtype = torch.float32
    make_weightless(module, kind)


def _linears(
    module: nn.Module, segments: Sequence[tuple[str, Sequence[Wanted]]], positions: int
) -> frozenset[str]:
    """Found by running the module once more without the weights of such modules."""
    alone = {w.names[0] for _, wanted in segments for w in wanted if len(w.names) == 1}
    found: dict[str, nn.Module] = {}
    for path, linear in module.named_modules():
        if is_plain_linear(linear) and f"{path}.weight" in alone:
            found[f"{path}.weight"] = linear
    weights = {name: linear._parameters.pop("weight") for name, linear in found.items()}
    try:
        probe(module, positions)
    except Exception:  # noqa: BLE001 - whatever it is: some code looks at weights by itself
        return frozenset()
    finally:
        for name, linear in found.items():
            linear._parameters["weight"] = weights[name]
    return frozenset(found)


def _check_agreement(
    module: Any,
    segments: Sequence[tuple[str, Sequence[Wanted]]],
    seen: Seen,
    prefix: str,
    positions: int,
    kind: str,
) -> None:
    """Shortens `module` to the layers that are run."""
    path = prefix.removesuffix(".")
    layers: Any = module.get_submodule(path)
    text = module.config.get_text_config()
    lists = [v for v in vars(text).values() if isinstance(v, list) and len(v) == len(layers)]
    kinds = [
        (
            call.mask,
            tuple((w.names[0].removeprefix(f"{prefix}{i}."), w.shape) for w in wanted),
            repr([values[i] for values in lists]),
        )
        for i, (call, (_, wanted)) in enumerate(zip(seen.calls, segments[1:], strict=False))
    ]
    parent, _, leaf = path.rpartition(".")
    shortened = nn.ModuleList(list(layers)[: layers_to_run(kinds)])
    setattr(module.get_submodule(parent), leaf, shortened)
    vocab = len(module.get_input_embeddings().weight)
    if module.device.type == "meta":
        _without_weights(module, kind)
    try:
        found = disagreement(module, positions, vocab)
    except Exception as error:
        reason = f"it cannot be run in batches of ours: {brief(error)}"
        raise UnsupportedModel(f"{kind}: {reason}") from error
    if found is not None:
        raise UnsupportedModel(f"{kind}: {found}")


def _windows(seen: Seen) -> tuple[int | None, ...]:
    return tuple(c.mask.window if c.mask is not None else None for c in seen.calls)


def _recipe(
    module: Any,
    segments: Sequence[tuple[str, Sequence[Wanted]]],
    seen: Seen,
    prefix: str,
    sizes: LayerSizes,
    positions: int,
) -> DecoderRecipe | None:
    """The recipe that a weightless, shortened module follows within `positions`, if any."""
    if any(call.sinks is not None for call in seen.calls):
        return None
    layers = [
        {w.names[0].removeprefix(f"{prefix}{i}."): w.shape for w in wanted}
        for i, (_, wanted) in enumerate(segments[1 : 1 + len(seen.calls)])
    ]
    path, windows = prefix.removesuffix("."), _windows(seen)
    scales = [call.scale for call in seen.calls]
    try:
        for recipe in candidates(module, layers, path, scales, seen.calls[0].softcap, sizes):
            rotary = rotary_of(module.config)
            if follows(module, recipe, path, rotary, windows, sizes, positions):
                return recipe
    except Exception:  # noqa: BLE001 - whatever is odd about it, it is served in the general way
        return None
    return None


def _check_config(config: Any, kind: str) -> None:
    text = text_config(config)
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            method = getattr(part, key, None)
            if method is not None:
                raise UnsupportedModel(
                    f"{kind}: its weights are quantised ({_method(method)}), which is not supported"
                )
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: it has an encoder, whose output its decoder attends to")
    if type(config) not in AutoModelForCausalLM._model_mapping and not (
        _is_wrapper(config) and type(config) in AutoModelForImageTextToText._model_mapping
    ):
        raise UnsupportedModel(f"{kind}: transformers generates no text with it")


def _method(quantization: Any) -> str:
    """Its name, where the configuration of a quantisation says it."""
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    name = values.get("quant_method") or values.get("quant_algo") or "by an unnamed method"
    return str(getattr(name, "value", name))


def _alike(text: Any, positions: int) -> int:
    """LongRoPE takes other frequencies for all of a sequence once it is longer than this.

    Those of type `dynamic` change, too, but not within `max_position_embeddings`: `positions`.
    """
    ropes = [p for p in _ropes(text) if p.get("rope_type") == "longrope"]
    return min([positions, *(int(p["original_max_position_embeddings"]) for p in ropes)])


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """The rotary settings: one, or one per kind of layer."""
    parameters = getattr(text, "rope_parameters", None)
    if isinstance(parameters, dict):
        yield parameters
        yield from (p for p in parameters.values() if isinstance(p, dict))


def _layers(module: nn.Module, kind: str) -> tuple[str, int]:
    """(path and dot, number) of the decoder layers: the longest list of modules in no other."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    name = max(outer, key=lambda n: len(lists[n]), default=None)
    if name is None or not len(lists[name]):
        raise UnsupportedModel(f"{kind}: it has no layers")
    return f"{name}.", len(lists[name])


def _check_module(module: nn.Module, kind: str) -> None:
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        raise UnsupportedModel(
            f"{kind}: it has convolutions, over sounds or over tokens: the latter keep more of the "
            "past than keys and values"
        )
    taken = inspect.signature(module.forward).parameters
    for needed, what in (
        ("position_ids", "the positions of tokens"),
        ("logits_to_keep", "at which tokens logits are wanted"),
    ):
        if needed not in taken:
            raise UnsupportedModel(f"{kind}: transformers' code for it cannot be given {what}")


def _check_calls(calls: Sequence[Call], n_layers: int, positions: int, kind: str) -> None:
    """All layers attend alike, through us, and ask for no more than we do."""
    if [c.layer for c in calls] != list(range(n_layers)):
        raise UnsupportedModel(
            f"{kind}: its attention cannot be replaced: its {n_layers} layers call transformers' "
            f"interface for that {len(calls)} times"
        )
    first = calls[0]
    for c in calls:
        if c.sinks not in (None, (c.query[1],)):
            raise UnsupportedModel(f"{kind}: its sinks are {c.sinks}, not one for each head")
        if c.more or c.scale is None:
            what = ", ".join(c.more) or "a scale of its own"
            raise UnsupportedModel(f"{kind}: its attention needs {what}, unknown to Ballast's")
        if c.mask is None or not c.mask.causal or not c.causal:
            raise UnsupportedModel(
                f"{kind}: layer {c.layer} does not see just the past, or just a window of it"
            )
        window = None if c.window is None or c.window >= positions else c.window
        if window != c.mask.window:
            raise UnsupportedModel(
                f"{kind}: layer {c.layer} passes on a window of {window} tokens, its mask has one "
                f"of {c.mask.window}"
            )
        if (c.query, c.key, c.value, c.softcap) != (
            first.query,
            first.key,
            first.value,
            first.softcap,
        ):
            raise UnsupportedModel(f"{kind}: its layers differ in the shapes of their attention")
    sizes = {"queries": first.query[3], "keys": first.key[3], "values": first.value[3]}
    if len(set(sizes.values())) > 1 or first.key != first.value:
        found = ", ".join(f"{what} {size}" for what, size in sizes.items())
        raise UnsupportedModel(f"{kind}: heads of its attention differ in size ({found})")


def _kept_in_float32(module: Any) -> Callable[[str], bool]:
    """Whether `transformers` keeps a tensor in float32 where it loads the model in bfloat16."""
    patterns = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    found = [re.compile(str(pattern).replace("*", ".*")) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in found)


def _segments(
    module: nn.Module, prefix: str, n_layers: int, kind: str
) -> tuple[tuple[str, tuple[Wanted, ...]], ...]:
    """Tensors by segment, of a module that was built in bfloat16.

    What is beside the layers goes with the embeddings or with the head.

    A tied head has no segment of its own; the final norm then goes with the embeddings, as a
    segment costs a page at least.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{kind}: its weights include integers, in {name}")
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    kept = _kept_in_float32(module)
    head = module.get_output_embeddings()  # type: ignore[operator]
    own_head = head is not None and len(names[id(head.weight)]) == 1
    parts: list[list[Wanted]] = [[] for _ in range(n_layers + 2)]
    seen_layers = False
    for key, aliases in names.items():
        own = tensors[key].dtype == torch.float32 or any(kept(name) for name in aliases)
        dtype = "float32" if own else None
        wanted = Wanted(tuple(aliases), tuple(tensors[key].shape), dtype)
        if aliases[0].startswith(prefix):
            seen_layers = True
            parts[1 + int(aliases[0][len(prefix) :].split(".", 1)[0])].append(wanted)
        else:
            parts[-1 if seen_layers and own_head else 0].append(wanted)
    titles = ["embeddings", *(f"layer {i}" for i in range(n_layers)), "head"]
    found = [(title, tuple(part)) for title, part in zip(titles, parts, strict=True)]
    return tuple(found if own_head else found[:-1])
