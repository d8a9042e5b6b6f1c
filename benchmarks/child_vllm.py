"""vLLM as a contestant, in its own environment: imports nothing but vLLM and the protocol.

The engine runs in this process, compiled, without prefix cache, on all cores. Intel's OpenMP is
preloaded where the environment has it, as vLLM's own installation guide asks for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import Prompts, Run, serve

STREAMS = 16
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def with_environment() -> None:
    """Begin again with what has to be set before the interpreter starts."""
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return
    wanted = {**ENVIRONMENT, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        wanted["LD_PRELOAD"] = str(openmp)
    os.environ.update(wanted)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.child_vllm", *sys.argv[1:]])


def load(path: str) -> tuple[Run, Mapping[str, Any]]:
    import vllm

    engine = vllm.LLM(
        path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=STREAMS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).llm_engine

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        sampling = vllm.SamplingParams(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        times: list[list[float]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                stream = times[int(output.request_id)]
                stream += [now] * (len(output.outputs[0].token_ids) - len(stream))
        return times

    return run, {"vllm": vllm.__version__, "openmp": "LD_PRELOAD" in os.environ}


if __name__ == "__main__":
    with_environment()
    serve(lambda: load(sys.argv[1]))
