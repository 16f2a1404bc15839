"""JSON of clients, within bounds. It is not parsed if it has so many objects, lists and fields that to make them would
stop the process for seconds: Python's collector of garbage goes through them again and again while more are made.
"""

import json
from typing import Any

from triforce_core.errors import InvalidValueError, require

MOST = 1 << 17  # objects, lists and fields of objects


def bounded_loads(content: bytes, field: str) -> Any:
    """What the JSON holds. Raises `InvalidValueError` for more than `MOST` of them, and what `json.loads` raises."""
    count = marks(content)
    if count > MOST:  # some may be in texts, which are left out only here
        outside = content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        count = marks(b"".join(outside))
    require(count <= MOST, field, f"{count} objects, lists and fields", f"must be at most {MOST}")
    return json.loads(content)


def bounded_dumps(value: Any, field: str, **options: Any) -> str:
    """The value as JSON. Raises `InvalidValueError` for one that is nested deeper than the process can go, or has a
    number beyond floats.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except RecursionError:
        raise InvalidValueError(field, "its value", "is nested too deeply") from None
    except ValueError:
        raise InvalidValueError(field, "its value", "must hold no number that is infinite or none") from None


def marks(content: bytes) -> int:
    return sum(map(content.count, (b"[", b"{", b":")))
