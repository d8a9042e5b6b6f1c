"""LiteLLM as its users write it. Run as a script: what it was told, as JSON on the last line.

Arguments: the address of a server with real models, that of one that repeats prompts, a model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rom", "Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    real, echo, name = sys.argv[1:]
    to: dict[str, Any] = {"api_base": real, "api_key": "none", "num_retries": 0, "seed": 3}
    chat = {"model": f"openai/{name}", "max_tokens": 9, **to}
    text = {"model": f"text-completion-openai/{name}", "prompt": "A ship", "max_tokens": 9, **to}
    said = [{"role": "user", "content": "What floats?"}]

    whole = litellm.completion(messages=said, **chat)
    parts = list(
        litellm.completion(
            messages=said, stream=True, stream_options={"include_usage": True}, **chat
        )
    )
    written = litellm.text_completion(**text)
    pieces = list(litellm.text_completion(stream=True, **text))

    calling = {**chat, "tools": [TOOL], "tool_choice": "required", "max_tokens": 300}
    calling["parallel_tool_calls"] = False
    called = litellm.completion(messages=said, **calling).choices[0]
    streamed = list(litellm.completion(messages=said, stream=True, **calling))
    rebuilt = litellm.stream_chunk_builder(streamed).choices[0].message.tool_calls[0]
    [call] = called.message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    then = litellm.completion(
        messages=[*said, called.message.model_dump(exclude_none=True), answer],
        **{**chat, "tools": [TOOL], "tool_choice": "none"},
    )

    vectors = litellm.embedding(
        model=f"openai/{name}", input=["a", "a b"], api_base=echo, api_key="none"
    )
    try:
        litellm.completion(messages=said, **{**chat, "model": "openai/nobody"})
        refused = ""
    except litellm.NotFoundError as error:
        refused = str(error)
    told = {
        "chat": whole.choices[0].message.content,
        "end": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(p.choices[0].delta.content or "" for p in parts if p.choices),
        "parts": len(parts),
        "streamed_tokens": [p.usage.completion_tokens for p in parts if getattr(p, "usage", None)],
        "text": written.choices[0].text,
        "text_streamed": "".join(p.choices[0].text or "" for p in pieces if p.choices),
        "call": [call.function.name, json.loads(call.function.arguments)],
        "call_streamed": [rebuilt.function.name, json.loads(rebuilt.function.arguments)],
        "call_end": called.finish_reason,
        "then_tokens": then.usage.completion_tokens,
        "vectors": [len(v["embedding"]) for v in vectors.data],
        "refused": refused,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
