"""From a call's arguments to the message that asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from google.protobuf.message import Message

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.errors import InvalidRequestError


def build_request(
    prompt: str | Sequence[int],
    *,
    sampling: Mapping[str, float | None],
    max_tokens: int | None,
    seed: int | None,
    stop: str | Sequence[str],
    model: str,
    lookaheads: Sequence[int] | None,
    timeout_s: float | None,
) -> pb.GenerateRequest:
    """The request for these arguments; None leaves a field unset. Rules beyond the type are the server's to judge."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt, argument="prompt")
    else:
        request.token_ids.SetInParent()  # present, even when empty
        _set(request.token_ids, "values", prompt, argument="prompt")
    if lookaheads is not None:
        request.lookaheads.SetInParent()
        _set(request.lookaheads, "values", lookaheads, argument="lookaheads")
    for field, value in sampling.items():
        _set(request.sampling, field, value)
    _set(request, "max_tokens", max_tokens)
    _set(request, "seed", seed)
    _set(request, "stop", [stop] if isinstance(stop, str) else stop)
    _set(request, "model", model)
    _set(request, "timeout_s", timeout_s)
    return request


def _set(message: Message, field: str, value: object, argument: str = "") -> None:
    """Set a field unless its value is None; what protobuf refuses becomes an error that names the argument."""
    if value is None:
        return
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (TypeError, ValueError) as error:
        shown = f"{argument or field}: {value!r:.80} is of the wrong type or out of range ({error})"
        raise InvalidRequestError(shown, grpc.StatusCode.INVALID_ARGUMENT) from error
