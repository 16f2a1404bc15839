"""The checks of `triforce doctor`: each looks at one part of the machine, for the settings. None of them starts Ray.

To add a check, write a function from settings to a finding and add it to `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deploy.doctor.finding import Check, Finding, Status, problem
from deploy.doctor.machine import cores, cpu, disk, gpu, open_files, shared_memory
from deploy.doctor.room import memory
from deploy.doctor.serving import models, placement, weights
from deploy.doctor.software import packages, ports, ray
from triforce_core.config import Settings
from triforce_core.errors import TriForceError, reason_of

CHECKS: dict[str, Check] = {
    "cpu": cpu,
    "cores": cores,
    "gpu": gpu,
    "packages": packages,
    "ray": ray,
    "ports": ports,
    "models": models,
    "weights": weights,
    "memory": memory,
    "placement": placement,
    "/dev/shm": shared_memory,
    "disk": disk,
    "open files": open_files,
}


def examine(settings: Settings, checks: Mapping[str, Check] = CHECKS) -> Iterator[tuple[str, Finding]]:
    """Each check's name and what it found; a check that raises an error has found a problem."""
    for name, check in checks.items():
        try:
            yield name, check(settings)
        except TriForceError as error:  # a setting that cannot work here, with the rule that it breaks
            yield name, problem(str(error), "change the setting or the option that the message names")
        except Exception as error:
            found = f"this could not be checked: {type(error).__name__}: {reason_of(error)}"
            yield name, problem(found, "remove the cause; if the server works all the same, report this message")


__all__ = ["CHECKS", "Check", "Finding", "Status", "examine"]
