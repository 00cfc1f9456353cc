"""The base class of settings, checks of arguments, and descriptions of wrong values for error messages."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ctx_compress_rag.errors import ConfigError, CtxCompressError, short_repr

T = TypeVar("T")
LARGEST = 2**16
Size = Annotated[int, Field(gt=0, le=LARGEST)]
"""A dimension of weights: a bundle's number must not fill the memory before its weights are found to have another."""
_WHOLE = TypeAdapter(int)
_POSITIVE = TypeAdapter(Annotated[int, Field(ge=1)])


class Strict(BaseModel):
    """Base class of immutable settings. An unknown key raises pydantic's ValidationError, which names the key."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@cache
def any_of(classes: tuple[type[Strict], ...], key: str) -> TypeAdapter[Any]:
    """Return a pydantic adapter that reads settings of these classes, distinguished by their literal field `key`."""
    union: Any = Annotated[reduce(or_, classes), Field(discriminator=key)]
    return TypeAdapter(union)


def validate_argument(name: str, value: object, rule: TypeAdapter[T]) -> T:
    """Return an argument as a pydantic rule converts it (16, 16.0 and "16" alike), or raise ConfigError."""
    try:
        return rule.validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}={short_repr(value)}: {said}") from None


def as_int(name: str, value: object) -> int:
    if isinstance(value, bool):  # pydantic takes True for 1
        raise ConfigError(f"{name}={value!r} is not a number: give one")
    return validate_argument(name, value, _WHOLE)


def as_positive_int(name: str, value: object) -> int:
    return validate_argument(name, value, _POSITIVE)


def as_list(name: str, value: Iterable[T]) -> list[T]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={short_repr(value)} is a {type(value).__name__}, not a list: give one")
    return list(value)


def as_seconds(name: str, value: object, least: float = 0) -> float:
    return validate_argument(name, value, TypeAdapter(Annotated[float, Field(ge=least)]))


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ConfigError if a value is not one of a Literal's."""
    if value not in (known := get_args(choices)):
        raise ConfigError(f"{name}={short_repr(value)}: choose one of {', '.join(known)}")


@contextmanager
def faults_raised_as(kind: type[CtxCompressError], where: str = "") -> Iterator[None]:
    """Turn pydantic's ValidationError in the block into an error of this kind, with `where` before what is wrong."""
    try:
        yield
    except ValidationError as error:
        raise kind(f"{where}{explain_validation_error(error)}") from None


def explain_validation_error(error: ValidationError) -> str:
    """Describe all faults that pydantic found in one line, each with its field, the problem and the value given."""
    return "; ".join(explain_fault(fault) for fault in error.errors())


def explain_fault(fault: Mapping[str, Any]) -> str:
    """Describe one fault that pydantic found, with its field, the problem and the value given."""
    where = ".".join(str(place) for place in fault["loc"])
    match fault["type"]:
        case "missing":
            return f"{where} is missing: give it"
        case "extra_forbidden":
            return f"{where}={short_repr(fault['input'])} is unknown here: leave it out, or correct its name"
        case "union_tag_invalid":
            known = fault["ctx"]
            named = ".".join(filter(None, (where, known["discriminator"].strip("'"))))
            return f"{named}: {known['tag']!r} is unknown: give one of {known['expected_tags']}"
    said = f"{where or 'config'}: {fault['msg'].removeprefix('Value error, ')}"
    # A rule about several values has all of them as its input.
    return said if isinstance(fault["input"], dict) else f"{said} (got {short_repr(fault['input'])})"


def check_known_options(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError if one of the options given to `what` is unknown. The message names a similar known option."""
    names = list(known)
    for name in given:
        if name not in names:
            nearest = get_close_matches(name, names, 1)
            there = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
            raise ConfigError(f"{what} has no option {name!r}: {there}")
