"""API keys: who may use the server. They are read from a file, and read again while the server runs."""

import base64
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.errors import UnauthenticatedError
from triforce_core.errors import InvalidValueError, require

FIELD = "server.api_keys"
LINE = re.compile(r"(?:(?P<name>[\w.-]+):[ \t]+)?(?P<key>[!-~]+)", re.ASCII)
MOST_AGE_S = 1.0  # a key that is removed from the file is refused this much later
log = logging.getLogger("ray.serve")


def read_keys(path: Path) -> dict[str, str]:
    """The keys in a file with the names of their owners.

    A line holds a key, or a name, a colon, blanks and a key. Empty lines and lines that begin with # are comments.
    Several keys may have one name, so that an owner can change keys without a gap. A key without a name is called after
    its hash, so that it keeps its name when other lines change. Raises `InvalidValueError`, which never quotes a line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(FIELD, str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValueError(FIELD, str(path), "must be a text file in UTF-8") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = LINE.fullmatch(line.strip())
        rule = f"line {number} must be `key` or `name: key`, the key of printable ASCII characters without blanks"
        require(found is not None, FIELD, str(path), rule)
        assert found is not None
        require(found["key"] not in keys, FIELD, str(path), f"line {number} must not repeat the key of another line")
        keys[found["key"]] = found["name"] or f"key-{hashed(found['key']).hex()[:8]}"
    return keys


class ApiKeys:
    """The keys in the file at `path`; None: no key is needed.

    While it cannot be read or has a line that is wrong, the keys that it held before stay valid, and an error is
    logged. A file without any key is refused at start; later it means that nobody may use the server.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.owners: dict[bytes, str] = {}  # by the hash of the key
        self.read_at = -MOST_AGE_S
        self.complaint = ""  # the last one, which is not logged again
        if path is not None:
            keys = read_keys(path)
            require(len(keys) > 0, FIELD, str(path), "must hold at least one key, each on a line of its own")
            self._hold(keys)

    def owner(self, authorization: str | None, api_key: str | None = None) -> str:
        """The name of the key in the value of an `authorization` header or metadata; "" where no key is needed.

        The key is a bearer token or, as browsers send it for the page, the password of basic authentication. Where
        there is neither, it is `api_key`, the value of the header that Anthropic's clients send. Raises
        `UnauthenticatedError`.
        """
        if self.path is None:
            return ""
        self._renew(self.path)
        key = key_in(authorization or "") or api_key
        if not key:
            raise UnauthenticatedError("no API key was given: send `Authorization: Bearer <key>`")
        given = hashed(key)
        # All hashes are compared, each in constant time, so that the time tells nothing about the keys.
        owners = [owner for known, owner in self.owners.items() if hmac.compare_digest(known, given)]
        if not owners:
            raise UnauthenticatedError("the API key is not valid")
        return owners[0]

    def single(self, name: str, values: Iterable[Any]) -> str | None:
        """The value of a header or metadata that may hold a key; None if there is none, or none that is text. Raises
        `UnauthenticatedError` for several: a proxy before the server might have checked another one.
        """
        given = [*values]
        if len(given) > 1 and self.path is not None:
            raise UnauthenticatedError(f"{name} was given {len(given)} times: send it once")
        return given[0] if given and isinstance(given[0], str) else None

    def _renew(self, path: Path) -> None:
        """Read the file again if that was long ago: its content, because two changes may have the same time."""
        if time.monotonic() - self.read_at < MOST_AGE_S:
            return
        try:
            self._hold(read_keys(path))
        except InvalidValueError as error:
            self.read_at = time.monotonic()
            if str(error) != self.complaint:
                log.error("%s; the keys that it held before stay valid", error)
            self.complaint = str(error)

    def _hold(self, keys: dict[str, str]) -> None:
        self.owners = {hashed(key): owner for key, owner in keys.items()}
        self.read_at, self.complaint = time.monotonic(), ""


def key_in(authorization: str) -> str:
    """The key that the header's value gives; "" if it gives none. The name in basic authentication is ignored."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):  # not base64, or not UTF-8
            return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    return ""


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def keys_of(path: str | None) -> ApiKeys:
    """The keys that the setting `server.api_keys` names. Raises `InvalidValueError`."""
    return ApiKeys(None if path is None else Path(path))


def own_headers(path: str | None) -> dict[str, str]:
    """The headers with which the server calls itself: those of the first key."""
    return {} if path is None else {"authorization": f"Bearer {next(iter(read_keys(Path(path))))}"}
