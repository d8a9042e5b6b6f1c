"""Define and validate requests that generate no text: tokenize, detokenize and embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt

from ballast.core.errors import InvalidRequest
from ballast.server.conversation import Conversation
from ballast.server.http.fields import Body, CacheSalt, Inputs, Text, TokenId, one_by_one


class TokenizeRequest(Conversation):
    """`POST /tokenize`: of a text, or of a conversation."""

    prompt: Text | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless there is either a prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: give either it or messages", "prompt")


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class EmbeddingRequest(Body):
    """`POST /v1/embeddings`."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: CacheSalt | None = None
    user: Text | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """The inputs as a list, each a text or a list of token ids."""
        return one_by_one(self.input)
