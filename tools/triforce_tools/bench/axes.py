"""What `triforce bench sweep` varies: axes and their values, the points that they span, and the modes at a point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from triforce_core.config import MAX_LOOKAHEAD, TIER_SETS, Settings, load_settings
from triforce_core.errors import InvalidValueError, require
from triforce_core.messages import Drafting
from triforce_core.plans import PLAIN, Plan

DTYPES = ("float32", "bfloat16", "float16")  # not `auto`, which stands for one of them
DRAFTERS = tuple(drafting.name.lower() for drafting in Drafting)
Axes = dict[str, tuple[Any, ...]]  # values by name, in the order given
Engine = tuple[str, int, int]  # dtype, budget, chunk: what a running engine cannot change


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values. It states them all, so that points of several sweeps may lie in one file."""

    context: int  # prompt tokens of each request
    budget: int
    chunk: int
    dtype: str
    temperature: float
    concurrency: int | None = None  # requests decoded together in tier actors; None: one, in this process

    @property
    def requests(self) -> int:
        return self.concurrency or 1

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all requests together."""
        return self.context * self.requests

    @property
    def engine(self) -> Engine:
        return self.dtype, self.budget, self.chunk


# -- axes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that can be swept: its default values, used if only its name is given, and how a value is parsed."""

    defaults: str
    parse: Callable[[str, str], Any]  # of the field's name and the text; raises `InvalidValueError`


def parse_whole(field: str, text: str) -> int:
    require(text.isascii() and text.isdigit() and int(text) >= 1, field, text, "must be a whole number of at least 1")
    return int(text)


def parse_temperature(field: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    require(0 <= number <= 100, field, text, "must be a number between 0 and 100")
    return number


def one_of(*names: str) -> Callable[[str, str], str]:
    def parse(field: str, text: str) -> str:
        require(text in names, field, text, f"must be one of {', '.join(names)}")
        return text

    return parse


AXES = {
    "context": Axis("256,1024,4096,16128", parse_whole),
    "budget": Axis("256,512,1024,2048", parse_whole),
    "chunk": Axis("4,8,16", parse_whole),
    "temperature": Axis("0,0.8,1", parse_temperature),
    "dtype": Axis("float32,bfloat16", one_of(*DTYPES)),
    "concurrency": Axis("1,2,4", parse_whole),
}


def parse_axes(texts: Sequence[str]) -> Axes:
    """The axes from texts such as `context=256,1024`, or a name alone for its default values.

    Raises `InvalidValueError`.
    """
    axes: Axes = {}
    for text in texts:
        name, given, listed = text.partition("=")
        require(name in AXES, "axis", name, f"must be one of {', '.join(AXES)}")
        require(name not in axes, "axis", name, "must be named once")
        axis = AXES[name]
        parts = (listed if given else axis.defaults).split(",")
        values = tuple(axis.parse(f"axis {name}", part.strip()) for part in parts)
        require(len(set(values)) == len(values), f"axis {name}", listed, "must name each value once")
        axes[name] = values
    return axes


# -- points ------------------------------------------------------------------------------------------------------------


def points_of(axes: Axes, base: Point) -> list[Point]:
    """All combinations of the axes' values, the last axis varying fastest; `base` gives what no axis varies."""
    return [replace(base, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def by_engine(points: Sequence[Point]) -> list[list[Point]]:
    """The points that one engine can measure together, in their order; engines in the order of their first points."""
    groups: dict[Engine, list[Point]] = {}
    for point in points:
        groups.setdefault(point.engine, []).append(point)
    return list(groups.values())


def name_of(point: Point, axes: Axes) -> str:
    """The values that are swept, such as `context 256, temperature 0.8`."""
    return ", ".join(f"{name} {shown(coordinates(point)[name])}" for name in axes)


def shown(value: Any) -> str:
    """A value of an axis, for people."""
    return format(value, "g") if isinstance(value, float) else str(value)


def coordinates(point: Point) -> dict[str, Any]:
    """The point's values by name, all of which JSON can hold."""
    return {field.name: getattr(point, field.name) for field in fields(point)}


def settings_at(settings: Settings, point: Point) -> Settings:
    """The settings of the point's engine. Raises `InvalidValueError` where its values do not fit each other."""
    retrieval = {"budget": point.budget, "chunk": point.chunk}
    return changed(settings.cold, dtype=point.dtype, retrieval=retrieval)


def changed(settings: Settings, **changes: Any) -> Settings:
    """The settings with other values, section by section, and checked again. Raises `InvalidValueError`."""
    data = settings.model_dump()
    merged = {name: data[name] | value if isinstance(value, dict) else value for name, value in changes.items()}
    return load_settings(None, **data | merged)


# -- modes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mode:
    """One of the ways to decode that are compared at a point."""

    name: str
    plan: Plan | None  # None: the controller decides


def modes_with(plans: Sequence[Mode]) -> list[Mode]:
    """Plain decoding first, then the controller and the fixed plans."""
    return [Mode("plain", PLAIN), Mode("auto", None), *plans]


def parse_plans(text: str | None) -> tuple[Mode, ...]:
    """Fixed plans from a text such as `8,3/4,2/0,3:lookup`. Raises `InvalidValueError`."""
    plans: list[Mode] = []
    for part in [] if text is None else text.replace(" ", "").split("/"):
        lookaheads, named, drafter = part.partition(":")
        numbers = [int(number) if number.isdecimal() else -1 for number in lookaheads.split(",")]
        rule = f"must be two whole numbers of at most {MAX_LOOKAHEAD}: retrieval,draft"
        require(len(numbers) == 2 and min(numbers) >= 0 and max(numbers) <= MAX_LOOKAHEAD, "plans", part, rule)
        require(any(numbers), "plans", part, "is plain decoding, which is measured at every point")
        require(not named or drafter in DRAFTERS, "plans", drafter, f"must be one of {', '.join(DRAFTERS)}")
        plans.append(Mode(part, Plan(numbers[0], numbers[1], Drafting[(drafter or "model").upper()])))
    require(len(set(plans)) == len(plans), "plans", text, "must name each plan once")
    return tuple(plans)


def check_modes(plans: Sequence[Mode], settings: Settings) -> None:
    """Raise `InvalidValueError` for plans of tiers that take no part, and where the controller is off: another way to
    decode would be measured under its name.
    """
    retrieval, draft = TIER_SETS[settings.speculation.tiers]
    for plan in (mode.plan for mode in plans if mode.plan):
        takes_part = (retrieval or not plan.retrieval) and (draft or not plan.draft)
        require(takes_part, "plans", str(plan), "asks a tier to draft that --tiers leaves out")
    if settings.controlled:
        return
    because, speculation = "the controller is one of the modes that are compared", settings.speculation
    require(not settings.deterministic, "deterministic", settings.deterministic, f"must be false: {because}")
    require(speculation.controller, "speculation.controller", speculation.controller, f"must be true: {because}")
    drafting = {"tiers": speculation.tiers, "lookaheads": speculation.lookaheads}
    raise InvalidValueError("speculation", drafting, f"must let a tier draft: {because}")
