"""Refuse request fields that are not implemented and must not be ignored.

Any other unknown field is ignored (`fields.Body`). These, of vLLM, SGLang, llama.cpp, Mistral,
OpenAI and Anthropic, say who shares a cache, what is kept, what an output may hold, or what else a
server runs: a client that sends one relies on it.
"""

from __future__ import annotations

from ballast.core.errors import InvalidRequest
from ballast.server.http.fields import Body

_SALT = "cached prefixes are kept apart by cache_salt"
_OUTPUT = "outputs are constrained by structured_outputs and response_format, tokens by logit_bias"
_CODE = "no code of clients is run here"
_FILTER = "there is no such filter here"

REFUSED = {
    "extra_key": _SALT,
    "cache_prompt": _SALT,
    "kv_transfer_params": "KV is moved by the server alone",
    "session_params": "no sessions are kept here; send the whole conversation",
    "lora_path": "an adapter is a model of its own: name it as model",
    "inference_geo": "where the server runs is its operator's choice",
    "store": "nothing is kept here; leave it out, or set it to false",
    "chat_template": "templates come with the models",
    "custom_logit_processor": _CODE,
    "logits_processors": _CODE,
    "mcp_servers": "no tools are run here; the client runs them",
    "bad_words": _OUTPUT,
    "allowed_token_ids": _OUTPUT,
    "guided_json": _OUTPUT,
    "guided_regex": _OUTPUT,
    "guided_choice": _OUTPUT,
    "guided_grammar": _OUTPUT,
    "ebnf": _OUTPUT,
    "regex": _OUTPUT,
    "json_schema": _OUTPUT,
    "grammar": _OUTPUT,
    "safe_prompt": _FILTER,
    "safety_settings": _FILTER,
    "guardrails": _FILTER,
    "moderation": _FILTER,
}
"""Reason, by field."""
_ASKS_WHEN_FALSE = ("cache_prompt",)
"""Fields that ask for nothing unless they are false."""


def refuse_fields(request: Body) -> None:
    """Raise InvalidRequest for the first field of `REFUSED` that asks for something."""
    for name, value in (request.model_extra or {}).items():
        why = REFUSED.get(name)
        if why is None:
            continue
        asks = (
            value is False if name in _ASKS_WHEN_FALSE else value not in (None, False, "", [], {})
        )
        if asks:
            raise InvalidRequest(f"{name}: {why}", name)
