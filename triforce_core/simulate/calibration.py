"""Reading measured times and acceptance from the JSON that `triforce bench pipeline --json` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from triforce_core.config import invalid_value
from triforce_core.errors import InvalidValueError
from triforce_core.simulate.scenario import AssumedAcceptance, Hops, Stages, Strict


class Calibration(Strict):
    """The section of the benchmark's figures that is meant for the simulator."""

    stages: Stages
    hop_ms: Hops = Hops()


class BenchFigures(BaseModel):
    """The benchmark's figures that a simulation needs; all others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    calibration: Calibration
    acceptance: AssumedAcceptance


def read_calibration(path: Path) -> dict[str, Any]:
    """The sections `stages`, `hop_ms` and `acceptance` of a scenario, from the file. Raises `InvalidValueError`."""
    try:
        figures = BenchFigures.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidValueError("calibrate", str(path), f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise invalid_value(error) from None
    except ValueError as error:  # JSON and UTF-8 errors
        raise InvalidValueError("calibrate", str(path), f"is not valid JSON: {error}") from None
    return figures.calibration.model_dump() | {"acceptance": figures.acceptance.model_dump()}
