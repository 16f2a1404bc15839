"""Objects of several kinds, told apart by their `type`, such as the parts of a message."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from deploy.openai_api.requests import Body
from triforce_core.errors import InvalidValueError, require

B = TypeVar("B", bound=Body)


def item(kinds: Mapping[str, type[B]], given: dict[str, Any], *place: str | int, default: str | None = None) -> B:
    """The object, checked as its kind demands. `default`: the kind of one without a type.

    Raises `InvalidValueError` for an unknown kind, and `RequestValidationError`, both naming the place.
    """
    name = given.get("type", default)
    rule = f"is not supported: must be one of {', '.join(kinds)}"
    require(isinstance(name, str) and name in kinds, ".".join(map(str, [*place, "type"])), name, rule)
    try:
        return kinds[str(name)].model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestValidationError([first | {"loc": ("body", *place, *first["loc"])}]) from None


def renamed(error: InvalidValueError, names: Mapping[str, str]) -> InvalidValueError:
    """The same error about the field as the client calls it. `names`: patterns, and what stands in their place."""
    field = error.field
    for pattern, name in names.items():
        field = re.sub(pattern, name, field)
    return type(error)(field, error.value, error.rule)
