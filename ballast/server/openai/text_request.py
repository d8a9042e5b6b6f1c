"""Define and validate requests that generate no text: tokenize, detokenize, embeddings, scores."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictInt

from ballast.core.errors import InvalidRequest
from ballast.server.conversation import Conversation
from ballast.server.http.fields import (
    MOST_INPUTS,
    Body,
    CacheSalt,
    Inputs,
    Text,
    TokenId,
    one_by_one,
)


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


class EmbeddedTexts(Body):
    """A request whose texts are embedded."""

    field: ClassVar[str]
    """The field of the texts, for refusals."""
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: CacheSalt | None = None
    user: Text | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """The texts, each as it is or as a list of token ids."""
        raise NotImplementedError

    def check(self, model: str, dimensions: int) -> None:
        """Raise InvalidRequest unless the model's embeddings, of so many dimensions, will do."""


class EmbeddingRequest(EmbeddedTexts):
    """`POST /v1/embeddings`."""

    field: ClassVar[str] = "input"
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        return one_by_one(self.input)

    def check(self, model: str, dimensions: int) -> None:
        if self.dimensions not in (None, dimensions):
            why = f"dimensions: embeddings of {model!r} have {dimensions}"
            raise InvalidRequest(why, "dimensions")


_Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS - 1, fail_fast=True)]


class RerankRequest(EmbeddedTexts):
    """`POST /v1/rerank`."""

    field: ClassVar[str] = "documents"
    query: Text
    documents: _Texts
    top_n: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """The query, and then the documents."""
        return [self.query, *self.documents]


class ScoreRequest(EmbeddedTexts):
    """`POST /v1/score`: of pairs of texts, or of one text with each of several."""

    field: ClassVar[str] = "text_2"
    text_1: Text | _Texts
    text_2: Text | _Texts

    @property
    def texts(self) -> list[str | list[int]]:
        """The first texts, and then the second."""
        return [*self._first, *self._second]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs to be scored, by their places in `texts`."""
        first, second = len(self._first), len(self._second)
        return [(i if first > 1 else 0, first + i) for i in range(second)]

    def check(self, model: str, dimensions: int) -> None:
        first, second = len(self._first), len(self._second)
        if first not in (1, second):
            why = f"text_1: it has {first} texts; give one, or as many as text_2, {second}"
            raise InvalidRequest(why, "text_1")
        if first + second > MOST_INPUTS:
            raise InvalidRequest(f"text_2: at most {MOST_INPUTS} texts with text_1's", "text_2")

    @property
    def _first(self) -> list[str]:
        return [self.text_1] if isinstance(self.text_1, str) else self.text_1

    @property
    def _second(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2
