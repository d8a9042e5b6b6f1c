"""Every architecture that `transformers` generates text with: served exactly, or refused.

For each `model_type` of `AutoModelForCausalLM`, and for models that take images as well, a small
random checkpoint is made (`benchmarks/tiny.py`), and served in float32; then its features are
varied: tied heads and more layers, biases and flags the other way round, scaled rotary embeddings.
Greedy output of several requests at once is compared with `transformers`, token by token, as in
`benchmarks/exactness.py`. Each runs in a process of its own, limited in memory and time.

- `exact`: every token is the reference's, log-probabilities are within 1e-4.
- `refused`: it is not served, and a sentence says why.
- `wrong`: some token is another one, or a log-probability differs by more.
- `crashed`: anything else happened.
- `unmade`: `transformers` itself cannot make or run a checkpoint so small.

`--table FILE` writes the table of `docs/models.md` into that file.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ballast.bench.inprocess import InProcess
from ballast.core.errors import BallastError, BrokenPromise, LimitExceeded, brief
from ballast.core.units import GiB, MiB
from ballast.isolation.limits import Limits
from ballast.isolation.zygote import Zygote
from ballast.kernels import linear, sampling
from ballast.kernels.paged_attention import warm_up
from ballast.weights.manifest import ManifestRequest, fork_zygote, read_manifest
from benchmarks.common import finish, options, result_table
from benchmarks.exactness import MARGIN, Verdict, asked, compare, fleet
from benchmarks.families import FAMILIES, make
from benchmarks.tiny import fields_of, tiny

LIMITS = Limits(memory_bytes=3 * GiB, cpu_seconds=240, seconds=900.0)
TOKENS = 16
"""For each of three requests of a case."""
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint to be tried: `variant` of a `kind`, made of `changes` of its configuration."""

    kind: str
    variant: str
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case. `tokens` were compared; `reason` is for all but `exact`."""

    result: str
    reason: str = ""
    tokens: int = 0
    ties: int = 0
    logprob_error: float = 0.0
    most_repeated: float = 0.0
    load_ms: float = 0.0
    """Processor time of reading configuration and headers, and of trying the module."""


FLAGS = (
    *("add_bias_linear", "attention_bias", "bias", "mlp_bias", "norm_topk_prob", "qk_layernorm"),
    *("qkv_bias", "use_bias", "use_mlp_bias", "use_parallel_residual", "use_qk_norm"),
    *("use_qkv_bias", "use_sliding_window"),
)
"""Fields that are turned round, where they are known."""

_ATTENTION_ALONE = {"layer_types": ["full_attention"] * 3}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
SPECIAL: dict[str, dict[str, dict[str, Any]]] = {
    "bamba": {"attention alone": {"attn_layer_indices": [0, 1, 2]}},
    "falcon": {"alibi": {"alibi": True}, "groups": {"new_decoder_architecture": True}},
    "gemma3n_text": {
        "shared keys": {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0, 0.0],
        }
    },
    "granitemoehybrid": {
        "attention alone": {"layer_types": ["attention"] * 3},
        "dense": {"layer_types": ["attention"] * 3, "num_local_experts": 0},
    },
    "hunyuan_v1_dense": {"alpha": {"rope_parameters": _DYNAMIC}},
    "hunyuan_v1_moe": {"alpha": {"rope_parameters": _DYNAMIC}},
    "jamba": {"attention alone": {"attn_layer_period": 1, "attn_layer_offset": 0}},
    "kimi_linear": {"attention alone": _ATTENTION_ALONE},
    "lfm2": {"attention alone": _ATTENTION_ALONE},
    "lfm2_moe": {"attention alone": _ATTENTION_ALONE},
    "llama4_text": {
        "chunks": {"attention_chunk_size": 16},
        "temperature": {"no_rope_layers": [0, 1, 0], "floor_scale": 100},
    },
    "minimax": {"attention alone": _ATTENTION_ALONE},
    "olmo_hybrid": {"attention alone": _ATTENTION_ALONE},
    "opt": {"projected": {"word_embed_proj_dim": 32}, "after": {"do_layer_norm_before": False}},
    "qwen3_next": {"attention alone": _ATTENTION_ALONE},
    "qwen3_5_text": {"attention alone": _ATTENTION_ALONE},
    "roberta": {"no padding": {"pad_token_id": None}},
}
"""Variants of single kinds."""


def kinds() -> list[str]:
    """Every `model_type` that can be asked for text: language models, then those with images."""
    found = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    return [kind for kind in dict.fromkeys(found) if kind in CONFIG_MAPPING]


def cases(kind: str) -> list[Case]:
    """The first is the one that the others vary."""
    made = CONFIG_MAPPING[kind]
    base = FAMILIES.get(kind, {})
    found = [("as it is", base)]
    known = fields_of(made)
    flipped = {f: not getattr(made, f, False) for f in FLAGS if f in known}
    for variant, fields in (
        ("deep and tied", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
        ("flags", flipped),
        ("rope yarn", {"rope_parameters": _rope("yarn")}),
        ("rope linear", {"rope_parameters": _rope("linear")}),
        ("router logits", {"output_router_logits": True}),
        ("no window", {"sliding_window": None}),
    ):
        varied = {name: value for name, value in fields.items() if name in known}
        if varied and len(varied) == len(fields):
            found.append((variant, {**({} if "deep" in variant else base), **varied}))
    found += SPECIAL.get(kind, {}).items()
    return [Case(kind, variant, dict(changes)) for variant, changes in found]


def _rope(kind: str) -> dict[str, Any]:
    return {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


# -- one case, in a process of its own ------------------------------------------------------------


def attempt(case: Case) -> Outcome:
    """Make the checkpoint, serve it, compare."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        try:
            config = tiny(case.kind, **case.changes)
            model: Any = make(path, config, auto=auto_of(config))
            with torch.inference_mode():
                model(input_ids=torch.arange(5, 15)[None], use_cache=False)
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            return Outcome("unmade", brief(error))
        try:
            return _serve(path, model)
        except BallastError as error:
            result = "crashed" if isinstance(error, BrokenPromise) else "refused"
            return Outcome(result, str(error).replace(f"{path}", "the checkpoint"))
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            return Outcome("crashed", brief(error))


def _serve(path: Path, model: torch.nn.Module) -> Outcome:
    settings = fleet({"model": path}, 256 * MiB)
    began = time.process_time()
    read_manifest(ManifestRequest(settings.models[0]))
    load_ms = 1000 * (time.process_time() - began)
    requests = asked(["model"], 3, seed=1, new_tokens=TOKENS)
    with InProcess(settings) as server:
        if server.device.failed:
            return Outcome("crashed", server.device.failed["model"], load_ms=load_ms)
        answers = server.generate(requests)
    verdict = Verdict()
    for request in requests:
        compare(model, request.prompt, answers[request.id], verdict)
    exact = verdict.wrong == 0 and verdict.logprob_error <= MARGIN
    difference = (
        f"{verdict.wrong} tokens of {verdict.tokens} differ, "
        f"log-probabilities by up to {verdict.logprob_error:.2g}"
    )
    return Outcome(
        "exact" if exact else "wrong",
        "" if exact else difference,
        verdict.tokens,
        verdict.ties,
        verdict.logprob_error,
        verdict.most_repeated,
        load_ms,
    )


def auto_of(config: Any) -> Any:
    """What makes a model of this configuration: of a model for images as well, all of it."""
    whole = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


# -- all of them ----------------------------------------------------------------------------------


def run(chosen: Sequence[str], quick: bool) -> dict[str, dict[str, Outcome]]:
    """By kind and variant. Variants only of what is served as it is, or has special ones."""
    torch.set_num_threads(1)
    for ready in (
        sampling.warm_up,
        partial(warm_up, torch.float32),
        partial(linear.kernel, torch.float32),
    ):
        ready()  # once, before processes are forked
    found: dict[str, dict[str, Outcome]] = {}
    with fork_zygote(LIMITS, confined=False) as zygote:  # they write checkpoints of their own
        for kind in chosen:
            found[kind] = {}
            for case in cases(kind)[: 1 if quick else None]:
                first = next(iter(found[kind].values()), None)
                special = case.variant in SPECIAL.get(kind, {})
                if first is not None and first.result != "exact" and not special:
                    continue
                found[kind][case.variant] = _isolated(zygote, case)
                _show(case, found[kind][case.variant])
    return found


def _isolated(zygote: Zygote, case: Case) -> Outcome:
    try:
        return zygote.call(attempt, case, Outcome)
    except LimitExceeded as error:
        return Outcome("crashed", str(error))


def _show(case: Case, outcome: Outcome) -> None:
    text = f"{case.kind}, {case.variant}: {outcome.result} {outcome.reason}"
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def summary(found: Mapping[str, Mapping[str, Outcome]]) -> dict[str, Any]:
    everything = [o for variants in found.values() for o in variants.values()]
    counted = Counter(kind_result(variants) for variants in found.values())
    served = [o for o in everything if o.result == "exact"]
    return {
        "transformers": transformers.__version__,
        "kinds": len(found),
        "cases": len(everything),
        **{result: counted[result] for result in ("exact", "refused", "wrong", "crashed")},
        "unmade": counted["unmade"],
        "exact_cases": len(served),
        "exact_in_variants": len(in_variants(found)),
        "tokens": sum(o.tokens for o in everything),
        "ties": sum(o.ties for o in everything),
        "worst_logprob_error": max((o.logprob_error for o in served), default=0.0),
        "mean_load_ms": sum(o.load_ms for o in served) / max(1, len(served)),
    }


def kind_result(variants: Mapping[str, Outcome]) -> str:
    """A kind counts as its published layout, the first case, does; a fault of any case counts."""
    results = [o.result for o in variants.values()]
    return next((fault for fault in ("wrong", "crashed") if fault in results), results[0])


def in_variants(found: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Kinds that are served exactly in some variant, and not as they are published."""
    return [
        kind
        for kind, variants in found.items()
        if kind_result(variants) in ("refused", "unmade")
        and any(o.result == "exact" for o in variants.values())
    ]


# -- the table of docs/models.md ------------------------------------------------------------------


def documented(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Architectures that are served; the others by the reason; those that could not be tried."""
    by_result: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for kind, variants in found.items():
        result = kind_result(variants)
        by_result.setdefault(result, []).append(kind)
        if result == "refused":
            reason = next(iter(variants.values())).reason
            refused.setdefault(_cell(reason.removeprefix(f"{kind}: ")), []).append(kind)
    served = by_result.get("exact", [])
    lines = [
        f"Tried with transformers {transformers.__version__}: {len(found)} architectures, of which "
        f"{len(served)} are served exactly in their published layout:",
        "",
        _names(served),
        "",
        "| refused because | architectures | exact in a variant |",
        "|---|---|---|",
        *(
            f"| {reason} | {_names(kinds)} | {_names({*kinds} & {*in_variants(found)})} |"
            for reason, kinds in sorted(refused.items(), key=lambda item: (-len(item[1]), item[0]))
        ),
    ]
    for result, what in (
        ("wrong", "Served wrongly"),
        ("crashed", "Failed without a reason"),
        ("unmade", "Not tried, since transformers makes or runs no such small checkpoint of them"),
    ):
        if result in by_result:
            lines += ["", f"{what}: {_names(by_result[result])}."]
    return "\n".join(lines)


def _names(kinds: Collection[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in sorted(kinds))


def _cell(reason: str) -> str:
    """A reason without the numbers that differ from kind to kind, for a cell of a table."""
    return re.sub(r"\b\d+(\.\d+)?\b", "n", reason).replace("|", "\\|")


def write_table(file: Path, text: str) -> None:
    """Put `text` between the two marks in `file`. Raises ValueError where they are not."""
    before, begin, rest = file.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{file} has no {BEGIN} and {END}")
    file.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these, and no others")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table into it")


def main() -> None:
    args = options(__doc__, extra=_options)
    found = run(args.only or kinds(), args.quick)
    result = summary(found)
    result["results"] = {
        kind: {variant: asdict(outcome) for variant, outcome in variants.items()}
        for kind, variants in found.items()
    }
    finish(args, "architectures", result, result_table("architectures", summary(found)))
    if args.table is not None:
        write_table(args.table, documented(found))


if __name__ == "__main__":
    main()
