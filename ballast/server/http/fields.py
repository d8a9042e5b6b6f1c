"""Define the types that request schemas use for their fields, with the bounds of each type, and the
base class of all request bodies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

MOST_FIELDS = 256
"""Most fields of one request, known or not."""
MOST_PROMPTS = 256
"""Most prompts of one request."""
MOST_INPUTS = 2048
"""Most texts to embed in one request, as OpenAI's API has it."""
MOST_BIASED = 1024
MOST_STOPS, LONGEST_STOP = 64, 1024
"""Most stop strings of one request, and most characters of each: what may begin one is compared
with all of them at each token."""
MOST_TOP = 20
"""Most alternatives returned with a token's log-probability."""
_ID = 2**31

FINITE = Field(allow_inf_nan=False)


def at_most(n: int) -> BeforeValidator:
    """Bound the length of a list or dictionary before any of its values is validated."""

    def checked(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > n:
            raise ValueError(f"at most {n}, not {len(value)}")
        return value

    return BeforeValidator(checked)


def _listed(value: object) -> object:
    """Convert a single stop string to a list of one."""
    return [value] if isinstance(value, str) else value


def _unicode(text: str) -> str:
    """Refuse a text with half a surrogate pair, which JSON can spell, but which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text


def _one_reason(most: int) -> WrapValidator:
    """Describe what texts may be, instead of why each form of them did not fit."""

    def validated(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            why = f"must be a text, a list of token ids, or a list of at most {most} of either"
            raise ValueError(why) from None

    return WrapValidator(validated)


Text = Annotated[str, AfterValidator(_unicode)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Count = Annotated[StrictInt, Field(ge=0, lt=_ID)]
Stop = Annotated[
    Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]],
        Field(max_length=MOST_STOPS, fail_fast=True),
    ]
    | None,
    BeforeValidator(_listed),
]
CacheSalt = Annotated[Text, Field(min_length=1, max_length=256)]
"""Salt that keeps cached prefixes apart from those of requests with another one, as in vLLM."""
Penalty = Annotated[float, FINITE, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, FINITE, Field(ge=-100, le=100)],
    ],
    Field(max_length=MOST_BIASED),
    at_most(MOST_BIASED),
]
"""Bias by token id, written in decimal: JSON has no other keys."""
Prompts = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)],
    _one_reason(MOST_PROMPTS),
]
Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)],
    _one_reason(MOST_INPUTS),
]


def one_by_one(prompts: Prompts | Inputs) -> list[str | list[int]]:
    """Return the prompts as a list, each a text or a list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


class Body(BaseModel):
    """A request. Fields that are not known are kept apart, so that a warning can name them:
    a client written for another server works, and its author finds out what had no effect."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: Text

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > MOST_FIELDS:
            raise ValueError(f"the body has {len(values)} fields; at most {MOST_FIELDS}")
        return values

    @property
    def ignored(self) -> list[str]:
        """Fields that the client sent and that have no effect."""
        return sorted(self.model_extra or {})
