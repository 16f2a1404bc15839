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
    lookaheads: str | None = None  # of the mode `pinned`, such as "8,3"; None: there is no such mode
    drafter: str = "model"  # the drafter of fixed plans that name none
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
    separator: str = ","


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


def parse_lookaheads(field: str, text: str) -> str:
    """The text again, without blanks."""
    parts = [part.strip() for part in text.split(",")]
    whole = len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts)
    numbers = [int(part) for part in parts] if whole else []
    rule = f"must be two whole numbers of at most {MAX_LOOKAHEAD}: retrieval,draft"
    require(bool(numbers) and max(numbers) <= MAX_LOOKAHEAD, field, text, rule)
    require(any(numbers), field, text, "is plain decoding, which is measured at every point")
    return ",".join(map(str, numbers))


def one_of(*names: str) -> Callable[[str, str], str]:
    def parse(field: str, text: str) -> str:
        require(text in names, field, text, f"must be one of {', '.join(names)}")
        return text

    return parse


AXES = {
    "context": Axis("256,1024,4096,16128", parse_whole),
    "budget": Axis("256,512,1024,2048", parse_whole),
    "chunk": Axis("4,8,16", parse_whole),
    "lookaheads": Axis("0,3/4,2/8,3", parse_lookaheads, separator="/"),
    "temperature": Axis("0,0.8,1", parse_temperature),
    "drafter": Axis(",".join(DRAFTERS), one_of(*DRAFTERS)),
    "dtype": Axis("float32,bfloat16", one_of(*DTYPES)),
    "concurrency": Axis("1,2,4", parse_whole),
}


def parse_axes(texts: Sequence[str]) -> Axes:
    """The axes from texts such as `context=256,1024`, `lookaheads=8,3/4,2`, or a name alone for its default values.

    Raises `InvalidValueError`.
    """
    axes: Axes = {}
    for text in texts:
        name, given, listed = text.partition("=")
        require(name in AXES, "axis", name, f"must be one of {', '.join(AXES)}")
        require(name not in axes, "axis", name, "must be named once")
        axis = AXES[name]
        parts = (listed if given else axis.defaults).split(axis.separator)
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
class FixedPlan:
    """A plan that is measured at every point, as the user named it."""

    lookaheads: str
    drafter: str | None  # None: the point's

    @property
    def name(self) -> str:
        return self.lookaheads if self.drafter is None else f"{self.lookaheads}:{self.drafter}"

    def at(self, point: Point) -> Plan:
        retrieval, draft = map(int, self.lookaheads.split(","))
        return Plan(retrieval, draft, Drafting[(self.drafter or point.drafter).upper()])


@dataclass(frozen=True, slots=True)
class Mode:
    """One of the ways to decode that are compared at a point."""

    name: str
    plan: Plan | None  # None: the controller decides


def parse_plans(text: str | None) -> tuple[FixedPlan, ...]:
    """The plans from a text such as `8,3/4,2/0,3:lookup`. Raises `InvalidValueError`."""
    plans: list[FixedPlan] = []
    for part in [] if text is None else text.split("/"):
        lookaheads, named, drafter = (each.strip() for each in part.partition(":"))
        numbers = parse_lookaheads("plans", lookaheads)
        plans.append(FixedPlan(numbers, one_of(*DRAFTERS)("plans", drafter) if named else None))
    require(len(set(plans)) == len(plans), "plans", text, "must name each plan once")
    return tuple(plans)


def modes_at(point: Point, plans: Sequence[FixedPlan]) -> list[Mode]:
    """Plain decoding first, then the controller, the fixed plans, and the plan of the axis of lookaheads."""
    fixed = [Mode(plan.name, plan.at(point)) for plan in plans]
    if point.lookaheads is not None:
        fixed.append(Mode("pinned", FixedPlan(point.lookaheads, None).at(point)))
    return [Mode("plain", PLAIN), Mode("auto", None), *fixed]


def check_modes(points: Sequence[Point], axes: Axes, plans: Sequence[FixedPlan], settings: Settings) -> None:
    """Raise `InvalidValueError` for plans of tiers that take no part, for an axis that would change nothing, and where
    the controller is off.
    """
    pinned = plans or "lookaheads" in axes
    rule = "varies who drafts under fixed plans: give --plans or --axis lookaheads"
    require("drafter" not in axes or bool(pinned), "axis", "drafter", rule)
    retrieval, draft = TIER_SETS[settings.speculation.tiers]
    for name, plan in {(mode.name, mode.plan) for point in points for mode in modes_at(point, plans) if mode.plan}:
        takes_part = (retrieval or not plan.retrieval) and (draft or not plan.draft)
        field = "lookaheads" if name == "pinned" else "plans"
        require(takes_part, field, str(plan), "asks a tier to draft that --tiers leaves out")
    check_controlled(settings)


def check_controlled(settings: Settings) -> None:
    """Raise `InvalidValueError` where the controller is off: another way to decode would be measured under its name."""
    if settings.controlled:
        return
    because, speculation = "the controller is one of the modes that are compared", settings.speculation
    require(not settings.deterministic, "deterministic", settings.deterministic, f"must be false: {because}")
    require(speculation.controller, "speculation.controller", speculation.controller, f"must be true: {because}")
    drafting = {"tiers": speculation.tiers, "lookaheads": speculation.lookaheads}
    raise InvalidValueError("speculation", drafting, f"must let a tier draft: {because}")
