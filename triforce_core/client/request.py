"""From a call's arguments to the message that asks for them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import grpc
from google.protobuf.message import Message

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.errors import InvalidRequestError

MAX_MESSAGE_BYTES = 64 << 20  # what a server takes; prompts of millions of tokens are within it


def build_request(
    prompt: str | Sequence[int],
    *,
    sampling: Mapping[str, float | None],
    max_tokens: int | None,
    seed: int | None,
    stop: str | Sequence[str],
    model: str,
    lookaheads: Sequence[int] | None,
    resume_token_ids: Sequence[int],
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
    _set(request, "seed", None if seed is None else _unsigned(seed))
    _set(request, "stop", [stop] if isinstance(stop, str) else stop)
    _set(request, "model", model)
    _set(request, "resume_token_ids", resume_token_ids)
    _set(request, "timeout_s", timeout_s)
    if request.ByteSize() > MAX_MESSAGE_BYTES:  # the server could not say why it does not take it
        raise _refusal("prompt", f"a request of {request.ByteSize()} bytes", "must be at most 64 MiB")
    return request


def _unsigned(seed: int) -> int:
    """A signed 64-bit seed in two's complement."""
    try:
        value = operator.index(seed)
    except TypeError as error:
        raise _refusal("seed", repr(seed), f"is of the wrong type ({error})") from None
    if not -(2**63) <= value < 2**63:
        raise _refusal("seed", repr(seed), "must be at least -2**63 and below 2**63")
    return value % 2**64


def _refusal(argument: str, shown: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{argument}: {shown:.80} {rule}", grpc.StatusCode.INVALID_ARGUMENT)


def _set(message: Message, field: str, value: object, argument: str = "") -> None:
    """Set a field unless its value is None; what protobuf refuses becomes an error that names the argument."""
    if value is None:
        return
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (TypeError, ValueError) as error:
        raise _refusal(argument or field, repr(value), f"is of the wrong type or out of range ({error})") from error
