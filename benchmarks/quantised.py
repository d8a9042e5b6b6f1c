"""Quantised models: wrong tokens, memory, and speed against bfloat16 and against llama.cpp.

Exactness: a small GGUF file of each type with random blocks, and a small checkpoint of each format
of quantised safetensors (`benchmarks.quantised_files`; of MXFP4 a GPT-OSS), served in float32 with
its matrices packed, token by token against `transformers` on the weights as dequantised.

Speed: GGUF files of each type and checkpoints of some formats (`FORMATS`) in the shape of a Llama
of 110M, and the files of `--gguf`, against the same weights in bfloat16, and GGUF files against
llama.cpp on the same file and threads (`--peer-python`: the interpreter of an environment with
llama-cpp-python). All run in child processes, in turns (`benchmarks.turns`).

- `wrong`: wrong tokens, all types and formats together; ties, where the reference's margin is below
  1e-4, are not wrong.
- `memory_over_bf16`: bytes of the weights in pages, over those in bfloat16; the greatest of files.
- `vs_bf16.decode_1`, `.decode_16`, `.prefill`: tokens a second of decode steps and of prompts, over
  bfloat16; the least of files (of prompts: of 1 and 16 streams as well).
- `vs_llamacpp.decode_1`, `.decode_16`, `.prefill`: the same over llama.cpp.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from ballast.bench.inprocess import InProcess
from ballast.core.units import MiB
from ballast.fleet.gguf_entry import gguf_directory
from benchmarks import exactness, gguf_files, quantised_files
from benchmarks.common import finish, options
from benchmarks.families import VOCAB
from benchmarks.gguf_files import GgufSizes
from benchmarks.turns import Broken, Contestant, Run, contest

FORMATS = ("awq", "gptq-order", "ct-int8", "fp8-block", "bnb-nf4")
"""Formats whose speed is measured: each reads weights in a way of its own."""
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16")
SMALL = GgufSizes(hidden=256, inner=512, layers=3, vocab=VOCAB, context=512)
LARGE = GgufSizes(
    hidden=768, heads=12, kv_heads=12, inner=2048, layers=12, vocab=32000, context=2048
)
PROMPT, OUTPUT = 128, 64
STREAMS = (1, 16)
RUNS = {1: 3, 16: 1}
TURN_SECONDS = 2.0
OURS, BF16, LLAMACPP = "ballast", "bf16", "llamacpp"


def check(kind: str, scratch: Path) -> exactness.Verdict:
    """Serve a small file of one type, or a checkpoint of one format, and compare all tokens."""
    if kind == quantised_files.MXFP4:
        directory = scratch / kind
        reference = make_experts(directory, SMALL)
    elif kind in quantised_files.FORMATS:
        directory = scratch / kind
        reference = make(directory, kind, SMALL)
    else:
        path = scratch / f"{kind}.gguf"
        wanted = gguf_files.tensors(kind, sizes=SMALL)
        gguf_files.write(path, gguf_files.values(sizes=SMALL), wanted)
        directory = Path(gguf_directory(path, "path", path.name))
        reference = gguf_files.reference(directory, path)
    verdict = exactness.Verdict()
    submissions = exactness.asked([kind], 4, 1, new_tokens=16)
    submissions = [s for s in submissions if len(s.prompt) + 16 <= SMALL.context]
    with InProcess(exactness.fleet({kind: directory}, 64 * MiB)) as server:
        answers = server.generate(submissions)
    for s in submissions:
        exactness.compare(reference, s.prompt, answers[s.id], verdict)
    return verdict


def make(directory: Path, name: str, sizes: GgufSizes) -> Any:
    """Write a checkpoint in a format; returns the model of `transformers`, float32, with its
    weights as dequantised."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.context,
        initializer_range=1 / math.sqrt(sizes.hidden) * 2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    quantised_files.quantise(model, directory, name)
    return model


def make_experts(directory: Path, sizes: GgufSizes) -> Any:
    """Write a GPT-OSS with its experts in MXFP4; returns as `make`."""
    torch.manual_seed(1)
    config = GptOssConfig(
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.context,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=1 / math.sqrt(sizes.hidden) * 2,
        attn_implementation="eager",
    )
    model = GptOssForCausalLM(config).eval()
    quantised_files.quantise_experts(model, directory)
    return model


class Phase:
    """Runs of all contestants on one file with some streams."""

    def __init__(self, streams: int, runs: Mapping[str, Sequence[Run]]) -> None:
        self.streams, self.runs = streams, runs

    def decode(self, name: str) -> float:
        """Tokens a second of decode steps, by their median."""
        steps = [s.seconds for run in self.runs[name] for s in run.steps]
        return self.streams / statistics.median(steps)

    def prefill(self, name: str) -> float:
        """Prompt tokens a second, until the last stream's first token."""
        runs = self.runs[name]
        return sum(r.prompt_tokens for r in runs) / sum(r.prefill for r in runs)

    def over(self, name: str) -> dict[str, float]:
        return {
            f"decode_{self.streams}": self.decode(OURS) / self.decode(name),
            f"prefill_{self.streams}": self.prefill(OURS) / self.prefill(name),
        }


def measure_format(name: str, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a checkpoint of one format against its copy in bfloat16."""
    ours, plain = scratch / f"{name}-110M", scratch / f"{name}-bf16"
    make(ours, name, LARGE).bfloat16().save_pretrained(plain)
    return measure({OURS: str(ours), BF16: str(plain)}, None, scratch, args)


def measure_file(path: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one GGUF file against its copy in bfloat16, and llama.cpp if it is there."""
    plain = scratch / "bf16" / path.name
    plain.parent.mkdir(exist_ok=True)
    gguf_files.write_bfloat16(path, plain)
    directories = {n: gguf_directory(p, "path", p.name) for n, p in ((OURS, path), (BF16, plain))}
    return measure(directories, path, scratch, args)


def measure(
    directories: Mapping[str, str], path: Path | None, scratch: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure checkpoints against each other, and llama.cpp on the GGUF file at `path`."""
    modules = {
        name: (
            "benchmarks.child_ballast",
            [directory, args.linear if name == OURS else "auto"],
            sys.executable,
        )
        for name, directory in directories.items()
    }
    if args.peer_python is not None and path is not None:
        threads = str(torch.get_num_threads())
        arguments = [str(path.resolve()), threads]
        modules[LLAMACPP] = ("benchmarks.child_llamacpp", arguments, args.peer_python)
    log = scratch / "children.log"
    contestants: list[Contestant] = []
    try:
        for name, (module, arguments, python) in modules.items():
            contestants.append(Contestant(name, module, arguments, log, python))
        phases = [run_phase(contestants, streams, quick=args.quick) for streams in STREAMS]
    except Broken as error:
        Console().print(log.read_text(errors="replace")[-2000:], highlight=False)
        raise SystemExit(str(error)) from error
    finally:
        for c in contestants:
            c.close()
    weights = {c.name: c.facts["weight_bytes"] for c in contestants if c.name != LLAMACPP}
    return {
        "bytes": weights[OURS],
        "memory_over_bf16": weights[OURS] / weights[BF16],
        **{
            f"vs_{name}": {k: v for phase in phases for k, v in phase.over(name).items()}
            for name in modules
            if name != OURS
        },
        "tokens_per_second": {
            name: {
                **{f"decode_{p.streams}": p.decode(name) for p in phases},
                **{f"prefill_{p.streams}": p.prefill(name) for p in phases},
            }
            for name in modules
        },
    }


def run_phase(contestants: Sequence[Contestant], streams: int, *, quick: bool) -> Phase:
    """Run all in turns, after a short run of each by itself."""
    output = OUTPUT // 4 if quick else OUTPUT
    rng = np.random.default_rng(streams)
    prompts = [[int(t) for t in row] for row in rng.integers(1, 250, (streams, PROMPT))]
    for c in contestants:
        c.ask(prompts, 4)
        while c.turn(60.0) is None:
            pass
    slices = dict.fromkeys([c.name for c in contestants], TURN_SECONDS)
    runs = 1 if quick else RUNS[streams]
    return Phase(streams, contest(contestants, prompts, output, slices, lambda: None, runs))


def least(found: Mapping[str, Mapping[str, Any]], over: str) -> dict[str, float]:
    """The least ratios of all files."""
    ratios = [document[over] for document in found.values()]
    keys = {"decode_1": ["decode_1"], "decode_16": ["decode_16"]}
    keys["prefill"] = ["prefill_1", "prefill_16"]
    return {key: min(r[name] for r in ratios for name in names) for key, names in keys.items()}


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--types", default=",".join(TYPES), help="GGUF's types (comma)")
    known = ",".join([*quantised_files.FORMATS, quantised_files.MXFP4])
    parser.add_argument("--formats", default=known, help="formats of safetensors (comma)")
    parser.add_argument(
        "--linear", default="auto", help="of the quantised models whose speed is measured: int8"
    )
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="measure these files")
    parser.add_argument("--without-shapes", action="store_true", help="measure no others")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter with llama-cpp-python")


def main() -> None:
    args = options(__doc__, extra=more_options)
    kinds, formats = ([k for k in given.split(",") if k] for given in (args.types, args.formats))
    verdicts: dict[str, exactness.Verdict] = {}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        for kind in [*kinds, *formats]:
            verdicts[kind] = check(kind, here)
        for path in args.gguf:
            found[path.stem] = measure_file(path, here, args)
        for kind in [] if args.without_shapes else [f for f in FORMATS if f in formats]:
            found[kind] = measure_format(kind, here, args)
        for kind in [] if args.without_shapes else kinds:
            path = here / f"{kind}-110M.gguf"
            wanted = gguf_files.tensors(kind, sizes=LARGE)
            gguf_files.write(path, gguf_files.values(sizes=LARGE), wanted)
            found[kind] = measure_file(path, here, args)
            path.unlink()
    result: dict[str, Any] = {
        "wrong": sum(v.wrong for v in verdicts.values()),
        "types": {kind: v.to_json() for kind, v in verdicts.items()},
        "files": found,
    }
    if found:
        result["memory_over_bf16"] = max(d["memory_over_bf16"] for d in found.values())
        for over in (f"vs_{BF16}", f"vs_{LLAMACPP}"):
            if ratios := {name: d for name, d in found.items() if over in d}:
                result[over] = least(ratios, over)
    finish(args, "quantised", result)


if __name__ == "__main__":
    main()
