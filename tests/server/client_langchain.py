"""LangChain as its users write it. Run as a script: what it was told, as JSON on the last line.

Arguments: the address of a server with real models, that of one that repeats prompts, a model.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Rom", "Ulm"]


def main() -> None:
    real, echo, name = sys.argv[1:]
    to: dict[str, Any] = {"base_url": real, "api_key": "none", "max_retries": 0, "seed": 3}
    chat = ChatOpenAI(model=name, stream_usage=True, max_tokens=9, **to)
    text = OpenAI(model=name, max_tokens=9, temperature=1, **to)

    whole = chat.invoke("What floats?")
    parts = list(chat.stream("What floats?"))
    total = reduce(add, parts)

    long = ChatOpenAI(model=name, max_tokens=300, **to)
    caller = long.bind_tools([Forecast], tool_choice="any", parallel_tool_calls=False)
    called = caller.invoke("What floats?")
    [call] = called.tool_calls
    [streamed] = reduce(add, caller.stream("What floats?")).tool_calls
    answer = ToolMessage("It rains.", tool_call_id=call["id"])
    then = chat.bind_tools([Forecast]).invoke([HumanMessage("What floats?"), called, answer])

    shaped = {
        method: long.with_structured_output(Forecast, method=method).invoke("What floats?").city
        for method in ("json_schema", "function_calling")
    }
    vectors = OpenAIEmbeddings(
        model=name, base_url=echo, api_key="none", check_embedding_ctx_length=False
    ).embed_documents(["a", "a b"])
    try:
        ChatOpenAI(model="nobody", **to).invoke("What floats?")
        refused = ""
    except openai.NotFoundError as error:
        refused = str(error)
    result = {
        "chat": whole.content,
        "end": whole.response_metadata["finish_reason"],
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": total.content,
        "parts": len(parts),
        "streamed_tokens": [total.usage_metadata["output_tokens"]],
        "text": text.invoke("A ship"),
        "text_streamed": "".join(text.stream("A ship")),
        "call": [call["name"], call["args"]],
        "call_streamed": [streamed["name"], streamed["args"]],
        "call_end": called.response_metadata["finish_reason"],
        "then_tokens": then.usage_metadata["output_tokens"],
        "shaped": shaped,
        "vectors": [len(v) for v in vectors],
        "refused": refused,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
