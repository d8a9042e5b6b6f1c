"""Make a fleet for demos and tests: small checkpoints of real architectures, some trained here.

Writes the checkpoints and a fleet file into a directory. Used by `ballast fleet`, `ballast demo`
and benchmarks.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from ballast.core.errors import ConfigError
from ballast.core.settings import PRESET
from ballast.core.units import MiB, ceil_div, format_bytes, parse_bytes
from ballast.fleet.model_recipes import SCALES, Diet, ModelRecipe, Scale, plans
from ballast.fleet.text import conversations, documents, stories
from ballast.fleet.tokenizer import END, chat_text, train_tokenizer
from ballast.fleet.train import TrainingLoss, batches, train

DEFAULT_STEPS = 40
FULL_REQUESTS = 8
"""Full-length requests that a fixed share has room for, where shares are compared."""
BUDGET_FRACTION = 0.4
"""Budget over (all weights + peak KV)."""
_HELD_OUT = 10
"""One document in this many is held out of training, for the loss that is reported."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Progress = Callable[[str, int, int, float], None]
"""(model, step, of steps, loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeModel:
    """One checkpoint as written."""

    name: str
    path: Path
    parameters: int
    weight_bytes: int
    """Bytes on the device: each segment rounded up to pages."""
    kv_bytes_per_token: int
    made: str
    """`trained`, `tuned from NAME` or `random`."""
    training: TrainingLoss | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFleet:
    """A fleet as written."""

    file: Path
    models: tuple[MadeModel, ...]
    budget_bytes: int
    fixed_bytes: int
    """Bytes that fixed shares need: all weights, and `FULL_REQUESTS` full-length KVs per model."""


def make_fleet(
    directory: str | Path,
    *,
    n_models: int = 8,
    seed: int = 0,
    dtype: str = "bfloat16",
    size: str = "small",
    steps: int = DEFAULT_STEPS,
    budget: str | int | None = None,
    preset: str = PRESET,
    force: bool = False,
    progress: Progress | None = None,
) -> MadeFleet:
    """Write `n_models` checkpoints and `fleet.yaml` into `directory`.

    Up to four models are trained for `steps` steps (fine-tunes: a part of them); with 0 steps,
    or where the plan has no text for it, a model keeps random weights, large enough, and with a
    head of its own, for its greedy output not to repeat one token. `budget` (bytes or ``"512MiB"``)
    is by default 40 % of what fixed shares would need. The same arguments give the same files on
    the same machine.

    Raises ConfigError: a bad argument, or a fleet is there already and `force` is not set.
    """
    directory = Path(directory)
    chosen = plans(size, n_models)
    scale = SCALES[size]
    _check(dtype, steps)
    check_directory(directory, force)
    directory.mkdir(parents=True, exist_ok=True)

    docs = documents()
    tokenizer = _tokenizer(docs, scale, seed)
    made: list[MadeModel] = []
    weights: dict[str, dict[str, Tensor]] = {}
    parents = {plan.parent for plan in chosen}
    for plan in chosen:
        model = _build(plan, scale, len(tokenizer), seed, tied=plan.trained and steps > 0)
        training = None
        if plan.diet is not None and steps > 0:
            if plan.parent is not None:
                model.load_state_dict(weights[plan.parent])
            training = _train(model, plan, tokenizer, docs, seed, steps, progress)
        if plan.name in parents:
            weights[plan.name] = {k: v.clone() for k, v in model.state_dict().items()}
        path = directory / plan.name
        _save(model.to(_DTYPES[dtype]), tokenizer, path)
        made.append(_describe(plan, scale, path, model, training))

    fixed = sum(m.weight_bytes + _full_kv(m, scale) for m in made)
    floor = max(m.weight_bytes + m.kv_bytes_per_token * scale.context for m in made)
    chosen_budget = _budget(budget, fixed, floor)
    fleet = MadeFleet(
        file=directory / "fleet.yaml",
        models=tuple(made),
        budget_bytes=chosen_budget,
        fixed_bytes=fixed,
    )
    fleet.file.write_text(_yaml(fleet, chosen, scale, preset), encoding="utf-8")
    return fleet


def _check(dtype: str, steps: int) -> None:
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, f"one of {', '.join(_DTYPES)}")
    if steps < 0:
        raise ConfigError("steps", steps, "0 or more")


def check_directory(directory: Path, force: bool) -> None:
    """Raise ConfigError unless a fleet can be made in `directory`: there is none, or `force`."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError("directory", str(directory), "it is a file; name a directory")
    if (directory / "fleet.yaml").exists() and not force:
        raise ConfigError("directory", str(directory), "it holds a fleet already; --force remakes")


def _budget(budget: str | int | None, fixed: int, floor: int) -> int:
    """Return the budget in bytes, at least `floor`: the largest model with one full-length request.

    Raises ConfigError.
    """
    if budget is None:
        return ceil_div(max(int(BUDGET_FRACTION * fixed), floor + 8 * MiB), MiB) * MiB
    try:
        n_bytes = parse_bytes(budget)
    except ValueError as error:
        raise ConfigError("budget", budget, str(error)) from None
    if n_bytes < floor:
        allowed = f"the largest model with one full-length request needs {format_bytes(floor)}"
        raise ConfigError("budget", budget, allowed)
    return n_bytes


def _tokenizer(docs: Sequence[str], scale: Scale, seed: int) -> Any:
    talk = itertools.islice(conversations(seed), 1000)
    return train_tokenizer([*docs, *map(chat_text, talk)], scale.vocab, scale.context)


def _build(plan: ModelRecipe, scale: Scale, vocab: int, seed: int, *, tied: bool) -> Any:
    """Build a float32 model.

    Models that stay random get a wide initialization: with the usual 0.02, greedy output repeats
    one token.
    """
    config = LlamaConfig(
        hidden_size=plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        intermediate_size=plan.intermediate,
        vocab_size=vocab,
        max_position_embeddings=scale.context,
        tie_word_embeddings=tied,
        initializer_range=0.02 if tied else 1.6 / math.sqrt(plan.hidden),
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1000 + plan.seed)
        return LlamaForCausalLM(config)


def _tokens(tokenizer: Any, docs: Sequence[str], diet: Diet, seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    talk = stories(seed) if diet is Diet.STORIES else conversations(seed)
    while True:
        document = rng.random() < diet.value
        text = rng.choice(docs) + END if document else chat_text(next(talk))
        yield from tokenizer.backend_tokenizer.encode(text).ids


def _train(
    model: Any,
    plan: ModelRecipe,
    tokenizer: Any,
    docs: Sequence[str],
    seed: int,
    steps: int,
    progress: Progress | None,
) -> TrainingLoss:
    assert plan.diet is not None
    own = plan.own_steps(steps)
    learnt = [doc for i, doc in enumerate(docs) if i % _HELD_OUT]
    first = 1000 * seed + 2 * plan.seed
    stream = batches(_tokens(tokenizer, learnt, plan.diet, first))
    held_out = next(batches(_tokens(tokenizer, docs[::_HELD_OUT], plan.diet, first + 1), size=16))
    tell = None if progress is None else lambda i, loss: progress(plan.name, i, own, loss)
    return train(model, stream, held_out, own, progress=tell)


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _describe(
    plan: ModelRecipe, scale: Scale, path: Path, model: Any, training: TrainingLoss | None
) -> MadeModel:
    segments: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else name
        part = "head" if name in ("model.norm.weight", "lm_head.weight") else part
        segments[part] = segments.get(part, 0) + parameter.numel() * parameter.element_size()
    pages = sum(ceil_div(n, scale.page_bytes) for n in segments.values())
    element = next(model.parameters()).element_size()
    made = "trained" if plan.parent is None else f"tuned from {plan.parent}"
    if training is None:
        made = "random"
    return MadeModel(
        name=plan.name,
        path=path,
        parameters=sum(p.numel() for p in model.parameters()),
        weight_bytes=pages * scale.page_bytes,
        kv_bytes_per_token=plan.layers * 2 * plan.kv_heads * (plan.hidden // plan.heads) * element,
        made=made,
        training=training,
    )


def _full_kv(model: MadeModel, scale: Scale) -> int:
    return FULL_REQUESTS * scale.context * model.kv_bytes_per_token


def _yaml(fleet: MadeFleet, chosen: tuple[ModelRecipe, ...], scale: Scale, preset: str) -> str:
    weights = sum(m.weight_bytes for m in fleet.models)
    ratio = fleet.budget_bytes / fleet.fixed_bytes
    verdict = "too little for that" if ratio < 1 else "enough for that"
    lines = [
        f"# Fixed shares, each with room for its model's weights and {FULL_REQUESTS} full-length",
        f"# requests ({scale.context} tokens), would take {format_bytes(fleet.fixed_bytes)}, of it",
        f"# {format_bytes(weights)} for weights.",
        f"# The budget is {format_bytes(fleet.budget_bytes)}, {ratio:.0%} of it: {verdict}.",
        f"preset: {preset}",
        "devices:",
        f"  - budget: ${{BALLAST_BUDGET:-{fleet.budget_bytes}}}  # bytes; or 512MiB, 2GB",
        f"    page: {scale.page_bytes // 1024}KiB",
        f"    step_tokens: {scale.step_tokens}",
        f"    step_logits: {scale.step_logits}",
        "defaults:",
        "  slo: {ttft: 2.0, tpot: 0.2}  # seconds",
        "models:",
    ]
    for model, plan in zip(fleet.models, chosen, strict=True):
        note = f"{model.parameters / 1e6:.2g}M parameters, {model.made}"
        note += f", {format_bytes(model.weight_bytes)}"
        note += f", KV {format_bytes(model.kv_bytes_per_token)} a token"
        lines += [f"  - name: {model.name}  # {note}", f"    path: {model.name}"]
        if plan.priority:
            lines.append(f"    priority: {plan.priority}")
    return "\n".join(lines) + "\n"
