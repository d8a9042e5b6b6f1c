"""What a configuration asks for, learned from its module on the meta device.

Names and shapes come from the module itself, and what its attention does from *running* it there
(`ballast.weights.probe`). So sizes are those the model really uses, and a model that would not go
through our attention, or would ask more of it than it can do, is refused when it is loaded.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from ballast.core.errors import UnsupportedModel
from ballast.weights.probe import Call, probe


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the architecture; tied parameters are several `names` of one."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


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
    conversions: tuple[Any, ...]
    """`transformers`' rules from a checkpoint's names and tensors to these."""
    base_prefix: str
    """What names begin with that belong to the model without its head."""

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.segments[-1][0] != "head"

    def untied(self) -> Architecture:
        """The same with a head of its own."""
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = False
        return learn(config)


def build(config: Any) -> nn.Module:
    """The module of `config` on the meta device: no memory, no weights, for evaluation.

    Its experts go through `transformers`' grouped matrix multiplication, the default. It has its
    own copy of the configuration, which says by what its attention and experts are computed.
    """
    own = copy.deepcopy(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(own, dtype=torch.float32).eval()  # type: ignore[no-any-return]


def learn(config: Any) -> Architecture:
    """Build and probe. Raises UnsupportedModel with the reason."""
    kind = config.model_type
    _check_config(config)
    try:
        module = build(config)
    except Exception as error:
        raise UnsupportedModel(f"{kind}: transformers cannot build it: {error}") from error
    _check_module(module, kind)
    text = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", None) or 0)
    prefix, n_layers = _layers(module, kind)
    try:
        seen = probe(module, positions or 2)
    except Exception as error:
        raise UnsupportedModel(f"{kind}: it cannot be run with our attention: {error}") from error
    _check_calls(seen.calls, n_layers, positions, kind)
    if not positions:
        raise UnsupportedModel(f"{kind}: its configuration bounds no context length")
    if seen.logits[1] != 1:
        raise UnsupportedModel(f"{kind}: it computes logits at every position")
    query, key = seen.calls[0].query, seen.calls[0].key
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    vocab, hidden = embedding.weight.shape
    segments = _segments(module, prefix, n_layers)
    layer = [t.shape for t in segments[1][1]]
    return Architecture(
        config=config,
        n_layers=n_layers,
        heads=query[1],
        kv_heads=key[1],
        head_dim=query[3],
        hidden=hidden,
        intermediate=getattr(text, "intermediate_size", None) or max(max(s) for s in layer),
        experts_per_token=seen.experts_per_token,
        expert_intermediate=seen.expert_intermediate,
        vocab=vocab,
        positions=positions,
        alike=_alike(text, positions),
        windows=tuple(c.mask.window if c.mask is not None else None for c in seen.calls),
        softcap=seen.calls[0].softcap,
        segments=segments,
        conversions=tuple(get_model_conversion_mapping(module)),
        base_prefix=str(module.base_model_prefix),
    )


def packable(architecture: Architecture) -> frozenset[str]:
    """Weights of linear modules that are used by calling these modules and in no other way.

    Found by running the module once more with such modules replaced, and without their weights.
    """
    module = build(architecture.config)
    tied = {n for _, wanted in architecture.segments for w in wanted for n in w.names[1:]}
    tied |= {w.names[0] for _, ws in architecture.segments for w in ws if len(w.names) > 1}
    found = set()
    for path, linear in module.named_modules():
        if type(linear) is nn.Linear and f"{path}.weight" not in tied:
            linear.forward = _stand_in(linear.out_features)  # type: ignore[method-assign,assignment]
            del linear._parameters["weight"]
            found.add(f"{path}.weight")
    try:
        probe(module, architecture.positions)
    except Exception:  # noqa: BLE001 - whatever it is: some code looks at weights by itself
        return frozenset()
    return frozenset(found)


def _stand_in(outputs: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.new_empty(*x.shape[:-1], outputs)


def _check_config(config: Any) -> None:
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{kind}: quantised weights are not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: it is not a decoder")
    for parameters in _ropes(config.get_text_config()):
        if "dynamic" in str(parameters.get("rope_type")):
            raise UnsupportedModel(
                f"{kind}: its rotary embeddings depend on the longest sequence of a batch"
            )


def _alike(text: Any, positions: int) -> int:
    """LongRoPE takes other frequencies for all of a sequence once it is longer than this."""
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
    if not outer:
        raise UnsupportedModel(f"{kind}: no list of layers was found")
    name = max(outer, key=lambda n: len(lists[n]))
    return f"{name}.", len(lists[name])


def _check_module(module: nn.Module, kind: str) -> None:
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        raise UnsupportedModel(f"{kind}: it keeps more of the past than keys and values")
    taken = inspect.signature(module.forward).parameters
    if "position_ids" not in taken or "logits_to_keep" not in taken:
        raise UnsupportedModel(f"{kind}: it cannot be told positions, or where to compute logits")


def _check_calls(calls: Sequence[Call], n_layers: int, positions: int, kind: str) -> None:
    """All layers attend alike, through us, and ask for no more than we do."""
    if [c.layer for c in calls] != list(range(n_layers)):
        raise UnsupportedModel(
            f"{kind}: {len(calls)} of its {n_layers} layers attend in a way we can replace"
        )
    first = calls[0]
    for c in calls:
        if c.sinks not in (None, (c.query[1],)):
            raise UnsupportedModel(f"{kind}: its sinks are {c.sinks}, not one for each head")
        if c.more or c.scale is None:
            raise UnsupportedModel(
                f"{kind}: its attention asks for {', '.join(c.more) or 'no known scale'}"
            )
        if c.mask is None or not c.mask.causal or not c.causal:
            raise UnsupportedModel(
                f"{kind}: layer {c.layer} does not see just the past, or a window of it"
            )
        told = None if c.window is None or c.window >= positions else c.window
        if told != c.mask.window:
            raise UnsupportedModel(
                f"{kind}: layer {c.layer} is told a window of {told}, its mask is {c.mask.window}"
            )
        if (c.query, c.key, c.value, c.softcap) != (
            first.query,
            first.key,
            first.value,
            first.softcap,
        ):
            raise UnsupportedModel(f"{kind}: its layers differ in the shapes of their attention")
    if first.key != first.value or first.query[3] != first.key[3]:
        raise UnsupportedModel(f"{kind}: keys, values and queries differ in size")


def _segments(
    module: nn.Module, prefix: str, n_layers: int
) -> tuple[tuple[str, tuple[Wanted, ...]], ...]:
    """Tensors by segment. What is beside the layers goes with the embeddings or with the head.

    A tied head has no segment of its own; the final norm then goes with the embeddings, as a
    segment costs a page at least.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    head = module.get_output_embeddings()  # type: ignore[operator]
    own_head = head is not None and len(names[id(head.weight)]) == 1
    parts: list[list[Wanted]] = [[] for _ in range(n_layers + 2)]
    seen_layers = False
    for key, aliases in names.items():
        wanted = Wanted(tuple(aliases), tuple(tensors[key].shape))
        if aliases[0].startswith(prefix):
            seen_layers = True
            parts[1 + int(aliases[0][len(prefix) :].split(".", 1)[0])].append(wanted)
        else:
            parts[-1 if seen_layers and own_head else 0].append(wanted)
    titles = ["embeddings", *(f"layer {i}" for i in range(n_layers)), "head"]
    found = [(title, tuple(part)) for title, part in zip(titles, parts, strict=True)]
    return tuple(found if own_head else found[:-1])
