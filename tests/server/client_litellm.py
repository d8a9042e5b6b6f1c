"""LiteLLM as its users write it. Run as a script: what it was told, as JSON on the last line.

Arguments: the address of a server with real models, that of one that repeats prompts, a model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

TOOL: dict[str, Any] = {
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


def by_messages(address: str, name: str) -> dict[str, Any]:
    """The same questions by Anthropic's Messages API."""
    asked: dict[str, Any] = {
        "model": f"anthropic/{name}",
        "api_base": address.removesuffix("/v1"),
        "api_key": "none",
        "num_retries": 0,
        "temperature": 0,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "What floats?"}],
    }
    whole = litellm.completion(**asked)
    parts = list(litellm.completion(stream=True, **asked))
    calling = {**asked, "tools": [TOOL], "tool_choice": "required", "max_tokens": 300}
    calling["parallel_tool_calls"] = False
    called = litellm.completion(**calling).choices[0]
    [call] = called.message.tool_calls
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **calling)))
    [streamed] = rebuilt.choices[0].message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    history = [*asked["messages"], called.message.model_dump(exclude_none=True), answer]
    then = litellm.completion(**{**asked, "tools": [TOOL], "messages": history})
    try:
        litellm.completion(**{**asked, "model": "anthropic/nobody"})
        refused = ""
    except litellm.NotFoundError as error:
        refused = str(error)
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(p.choices[0].delta.content or "" for p in parts),
        "end": whole.choices[0].finish_reason,
        "tokens": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "call": [call.function.name, json.loads(call.function.arguments)],
        "call_streamed": [streamed.function.name, json.loads(streamed.function.arguments)],
        "call_end": called.finish_reason,
        "then_tokens": then.usage.completion_tokens,
        "refused": refused,
    }


def by_responses(address: str, name: str) -> dict[str, Any]:
    """The same questions by OpenAI's Responses API. LiteLLM asks for 16 tokens at least, and makes
    streams of whole answers where it does not know a model."""
    asked: dict[str, Any] = {
        "model": f"openai/{name}",
        "api_base": address,
        "api_key": "none",
        "num_retries": 0,
        "temperature": 0,
        "max_output_tokens": 18,
        "input": "What floats?",
    }
    tool = {"type": "function", **TOOL["function"]}
    whole = litellm.responses(**asked)
    parts = list(litellm.responses(stream=True, **asked))
    calling = {**asked, "tools": [tool], "tool_choice": "required", "max_output_tokens": 300}
    calling["parallel_tool_calls"] = False
    [call] = litellm.responses(**calling).output
    events = list(litellm.responses(stream=True, **calling))
    streamed = "".join(e.delta for e in events if "arguments.delta" in e.type)
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    history = [{"role": "user", "content": "What floats?"}, call.model_dump(), answer]
    then = litellm.responses(**{**asked, "tools": [tool], "input": history})
    try:
        litellm.responses(**{**asked, "model": "openai/nobody"})
        refused = ""
    except litellm.NotFoundError as error:
        refused = str(error)
    return {
        "text": whole.output[0].content[0].text,
        "streamed": "".join(p.delta for p in parts if "text.delta" in p.type),
        "end": "length" if whole.status == "incomplete" else "stop",
        "tokens": [whole.usage.input_tokens, whole.usage.output_tokens],
        "call": [call.name, json.loads(call.arguments)],
        "call_streamed": [call.name, json.loads(streamed)],
        "call_end": "tool_calls" if call.type == "function_call" else call.type,
        "then_tokens": then.usage.output_tokens,
        "refused": refused,
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
    result = {
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
        "messages": by_messages(real, name),
        "responses": by_responses(real, name),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
