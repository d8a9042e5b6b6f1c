"""Build a model's `transformers` module on the meta device, which allocates no memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from ballast.core.model import SCORE
from ballast.weights.decoder_recipe import DecoderRecipe, RotarySet
from ballast.weights.default_dtype import DefaultDtype
from ballast.weights.recipe_search import find_rotary, frequencies, scaling
from ballast.weights.spelt_attention import prepare

_REPORTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings for outputs of a forward besides logits, for training; switched off, since computing
them may fail in our batches."""

_left_out: ContextVar[bool] = ContextVar("ballast_left_out", default=False)
_from_config = AutoModel.from_config


@contextmanager
def left_out() -> Iterator[None]:
    """Within it, and in this thread, parts for images and sounds whose library is not installed
    (Gemma 3n's timm) are built as identities: text does not go through them."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def _from_config_or_identity(config: Any, **more: Any) -> Any:
    try:
        return _from_config(config, **more)
    except ImportError:
        if not _left_out.get() or type(config) in AutoModelForCausalLM._model_mapping:
            raise
        return nn.Identity()


setattr(AutoModel, "from_config", staticmethod(_from_config_or_identity))  # noqa: B010


def build_module(config: Any, dtype: torch.dtype = torch.float32, pooling: str = "") -> nn.Module:
    """Build the module of `config` for evaluation on the meta device, without memory or weights.
    `pooling`: as of `ModelSpec`, of an encoder.

    A multimodal model is built without the parts that text does not go through, for which libraries
    may be missing. Experts are
    computed by `transformers`' grouped matrix multiplication, the default. The module has its own
    copy of the configuration, which states its attention and experts.
    """
    own = copy.deepcopy(config)
    for part in (own, own.get_text_config()):
        for report in _REPORTS:
            if getattr(part, report, False):
                setattr(part, report, False)
    auto = AutoModelForCausalLM
    if pooling:
        auto = AutoModelForSequenceClassification if pooling == SCORE else AutoModel
    elif type(own) not in auto._model_mapping and is_wrapper(own):
        auto = AutoModelForImageTextToText
    with DefaultDtype(dtype), torch.device("meta"), left_out():
        # Stated here, so that an attention that the configuration names is not downloaded; a dtype
        # would become the default of all threads.
        module = auto.from_config(own, dtype=None, attn_implementation="eager").eval()
    for part in module.modules():
        if isinstance(getattr(part, "config", None), PreTrainedConfig):
            part.config.dtype = dtype
    if is_wrapper(own):
        _keep_text(module)
    else:
        _drop_senses(module)
    if pooling and pooling != SCORE and getattr(module, "pooler", None) is not None:
        module.pooler = None  # of next sentences; embeddings have no use for it
    if not pooling:
        prepare(module)
    return module  # type: ignore[no-any-return]


def is_wrapper(config: Any) -> bool:
    """Whether the configuration is of a multimodal model, around that of its text decoder."""
    return config.get_text_config() is not config


def _keep_text(module: Any) -> None:
    """Replace by identities the parts of a multimodal model that text does not go through."""
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
            tokens = hasattr(child, "vocab_offset")  # Gemma 3n embeds some by a part for images
            if not tokens and not any(child is other for other in above):
                setattr(part, name, nn.Identity())


def _drop_senses(module: Any) -> None:
    """Replace by identities the parts of a decoder that embed images and sounds, around models of
    configurations of their own."""
    parts = dict(module.named_modules())
    for path, part in parts.items():
        around = path.rpartition(".")[0]
        owner, _, name = around.rpartition(".")
        other = isinstance(part, PreTrainedModel) and type(part.config) is not type(module.config)
        if other and name and not isinstance(parts[around], PreTrainedModel):
            setattr(parts[owner], name, nn.Identity())


def linear_modules(config: Any) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of modules that LoRA can adapt, by path, in the model's order."""
    found: dict[str, tuple[int, int]] = {}
    for path, module in build_module(config).named_modules():
        if isinstance(module, nn.Linear):
            found[path] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            found[path] = inputs, outputs
    return found


def rotary_of(config: Any) -> Any:
    """Build the module that computes rotary angles, on the CPU."""
    return type(find_rotary(build_module(config)))(config.get_text_config())


def rotary_sets(config: Any, recipe: DecoderRecipe) -> dict[str, RotarySet]:
    """Return the rotary embeddings of a model that computes by `recipe`, by the names of its
    sets."""
    rotary = rotary_of(config)
    return {
        name: RotarySet(
            tuple(getattr(rotary, frequencies(name)).float().tolist()),
            float(getattr(rotary, scaling(name))),
        )
        for name in recipe.rotary_sets
    }
