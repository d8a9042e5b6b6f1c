"""Ollama's Python client as its users write it. Run as a script: what it was told, as JSON on the
last line.

Arguments: the address of a server with real models, that of one that repeats prompts, a model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ollama

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def main() -> None:
    real, echo, name = sys.argv[1:]
    client = ollama.Client(host=real.removesuffix("/v1"))
    said = [{"role": "user", "content": "What floats?"}]
    options: dict[str, Any] = {"num_predict": 9, "seed": 3, "temperature": 0}
    chat: dict[str, Any] = {"model": name, "messages": said, "options": options}
    whole = client.chat(keep_alive="5m", **chat)
    parts = list(client.chat(stream=True, **chat))
    tagged = client.chat(**{**chat, "model": f"{name}:latest"})
    text: dict[str, Any] = {"model": name, "prompt": "What floats?", "options": options}
    generated = client.generate(**text)
    pieces = list(client.generate(stream=True, **text))
    raw = client.generate(raw=True, **{**text, "prompt": "A ship"})
    more = {**chat, "options": {**options, "num_predict": 60}}
    shaped = client.chat(format=SCHEMA, **more)
    history = [
        *said,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "forecast", "arguments": {"city": "Rom"}}}],
        },
        {"role": "tool", "tool_name": "forecast", "content": "It rains."},
    ]
    then = client.chat(**{**chat, "messages": history})
    loaded = client.generate(model=name, prompt="")
    shown = client.show(name)
    vectors = ollama.Client(host=echo.removesuffix("/v1")).embed(model=WREN, input=["a", "a b"])
    refused = {}
    for what, asking in {
        "model": lambda: client.chat(model="nobody", messages=said),
        "pull": lambda: client.pull("nobody"),
        "delete": lambda: client.delete(name),
    }.items():
        try:
            asking()
        except ollama.ResponseError as error:
            refused[what] = [error.status_code, error.error]
    result = {
        "chat": whole.message.content,
        "streamed": "".join(p.message.content or "" for p in parts),
        "parts": len(parts),
        "tagged": [tagged.model, tagged.message.content],
        "end": [whole.done, whole.done_reason, parts[-1].done_reason],
        "tokens": [whole.prompt_eval_count, whole.eval_count],
        "durations": [whole.total_duration, whole.prompt_eval_duration, whole.eval_duration],
        "generated": generated.response,
        "generated_streamed": "".join(p.response or "" for p in pieces),
        "raw": raw.response,
        "shaped": json.loads(shaped.message.content or ""),
        "then_tokens": then.eval_count,
        "loaded": [loaded.done, loaded.done_reason],
        "models": [m.model for m in client.list().models],
        "running": [m.model for m in client.ps().models],
        "capabilities": shown.capabilities,
        "context": [v for k, v in (shown.modelinfo or {}).items() if "context_length" in k],
        "pulled": client.pull(name).status,
        "vectors": [len(v) for v in vectors.embeddings],
        "refused": refused,
    }
    print(json.dumps(result))


WREN = "wren-mini"

if __name__ == "__main__":
    main()
