"""Building the request message from a call's arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import grpc
from google.protobuf.message import Message

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.errors import InvalidRequestError

MAX_MESSAGE_BYTES = 64 << 20  # the server's limit; prompts of millions of tokens fit


class CallArguments(TypedDict, total=False):
    """The arguments of a call besides its prompt. For those that are left out or None, the server uses its defaults.

    Except for `timeout_s`, each name is that of a field in generation.proto, in `Sampling` or in `GenerateRequest`, so
    a new argument needs one line here.
    """

    max_tokens: int | None  # of the output, `resume_token_ids` included
    temperature: float | None  # 0 is greedy
    top_p: float | None  # keep the most probable tokens up to this probability
    top_k: int | None  # keep the k most probable tokens; 0 keeps all
    min_p: float | None  # keep tokens at least this probable relative to the most probable one
    seed: int | None  # the same seed gives the same tokens
    stop: str | Sequence[str]  # the output ends before the first of these strings
    model: str  # a name from `models`; empty: the default model
    lookaheads: Sequence[int] | None  # tokens to draft at the level below the target, then at each below that
    resume_token_ids: Sequence[int]  # output tokens of a call that broke off
    timeout_s: float | None  # by default the client's own


def build_request(prompt: str | Sequence[int], arguments: CallArguments) -> pb.GenerateRequest:
    """The request for these arguments; None leaves a field unset. The server checks all rules beyond the types.

    Raises `InvalidRequestError` for a value of the wrong type or a request over 64 MiB, and `TypeError` for an unknown
    argument.
    """
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt, argument="prompt")
    else:
        request.token_ids.SetInParent()  # marks the field as present, even when empty
        _set(request.token_ids, "values", prompt, argument="prompt")
    for name, value in arguments.items():
        if name not in CallArguments.__optional_keys__:  # Python itself does not check TypedDict names
            raise TypeError(f"a call has no argument {name!r}")
        if value is None:
            continue
        if name == "lookaheads":
            request.lookaheads.SetInParent()
            _set(request.lookaheads, "values", value, argument=name)
        elif name in pb.Sampling.DESCRIPTOR.fields_by_name:
            _set(request.sampling, name, value)
        elif name == "seed":
            _set(request, name, _unsigned(value))
        else:
            _set(request, name, [value] if name == "stop" and isinstance(value, str) else value)
    if request.ByteSize() > MAX_MESSAGE_BYTES:  # the server would refuse it without naming the reason
        raise _refusal("prompt", f"a request of {request.ByteSize()} bytes", "must be at most 64 MiB")
    return request


def _unsigned(seed: Any) -> int:
    """The seed, a signed 64-bit integer, as an unsigned one in two's complement."""
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
    """Set a field. If protobuf refuses the value, raises `InvalidRequestError` naming the argument."""
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (TypeError, ValueError) as error:
        raise _refusal(argument or field, repr(value), f"is of the wrong type or out of range ({error})") from error
