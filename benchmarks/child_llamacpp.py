"""llama.cpp as a contestant, by llama-cpp-python in its own environment: imports nothing else.

One context with a place for each stream; a step decodes one token of all streams in one batch.
Greedy, as ours: the largest logit.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.child import Prompts, Run, serve

STREAMS, CONTEXT = 16, 512
BATCH = 2048


def load(path: str, threads: int) -> tuple[Run, Mapping[str, Any]]:
    import llama_cpp as c

    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = STREAMS * CONTEXT, STREAMS
    settings.n_batch = settings.n_ubatch = BATCH
    settings.n_threads = settings.n_threads_batch = threads
    settings.no_perf = True
    context = c.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp makes no context")
    vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(BATCH, 0, 1)

    def put(token: int, position: int, stream: int, *, wanted: bool) -> int:
        i = batch.n_tokens
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        batch.logits[i] = wanted
        batch.n_tokens = i + 1
        return int(i)

    def decode() -> None:
        if c.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def best(i: int) -> int:
        import numpy as np

        logits = ctypes.cast(
            c.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float * vocab)
        )
        return int(np.frombuffer(logits.contents, np.float32).argmax())

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        times: list[list[float]] = [[] for _ in prompts]
        tokens = [0] * len(prompts)
        batch.n_tokens = 0
        ends: dict[int, int] = {}

        def finish() -> None:
            decode()
            for stream, i in ends.items():
                tokens[stream] = best(i)
                times[stream].append(time.perf_counter())
            ends.clear()
            batch.n_tokens = 0

        for stream, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                last = position + 1 == len(prompt)
                i = put(token, position, stream, wanted=last)
                if last:
                    ends[stream] = i
                if batch.n_tokens == BATCH:
                    finish()
        if batch.n_tokens:
            finish()
        for step in range(new_tokens - 1):
            for stream, prompt in enumerate(prompts):
                ends[stream] = put(tokens[stream], len(prompt) + step, stream, wanted=True)
            finish()
        return times

    return run, {"llama_cpp_python": c.__version__, "threads": threads}


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], int(sys.argv[2])))
