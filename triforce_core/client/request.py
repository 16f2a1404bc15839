"""Building the request message from a call's arguments."""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import grpc
from google.protobuf import message as protobuf

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.errors import InvalidRequestError

LISTS = ("lookaheads", "choice")  # fields whose message holds `values`
GUIDES = {field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["guide"].fields}
MAX_MESSAGE_BYTES = 64 << 20  # the server's limit; prompts of millions of tokens fit

MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name")
Message = Mapping[str, Any]  # one message of a conversation, with MESSAGE_FIELDS as in OpenAI's API


class CallArguments(TypedDict, total=False):
    """The arguments of a call besides its prompt. For those that are left out or None, the server uses its defaults.

    Except for `timeout_s`, each name is that of a field in generation.proto, in `Sampling` or in `GenerateRequest`, so
    a new argument needs one line here.
    """

    max_tokens: int | None  #: of the output, `resume_token_ids` included
    temperature: float | None  #: 0 is greedy
    top_p: float | None  #: keep the most probable tokens up to this probability
    top_k: int | None  #: keep the k most probable tokens; 0 keeps all
    min_p: float | None  #: keep tokens at least this probable relative to the most probable one
    repetition_penalty: float | None  #: for tokens in prompt or output: divides positive logits; 1 is off
    presence_penalty: float | None  #: subtracted from the logit of each token in the output
    frequency_penalty: float | None  #: the same, times the number of its occurrences
    logit_bias: Mapping[int, float] | None  #: by token id, what to add to its logit
    bad_words: Sequence[str]  #: texts that never occur in the output
    bad_word_ids: Sequence[Sequence[int]]  #: the same in tokens
    min_tokens: int | None  #: nothing ends the output before it has this many tokens
    seed: int | None  #: the same seed gives the same tokens; None: the client draws one
    n: int | None  #: independent completions, with seeds derived from `seed`
    stop: str | Sequence[str]  #: the output ends before the first of these strings
    stop_token_ids: Sequence[int]  #: these tokens end the output, besides the model's own stop tokens
    ignore_eos: bool  #: the model's own stop tokens do not end the output
    #: At most one of the next five: a form that the output has.
    json_schema: str | Mapping[str, Any] | None  #: JSON that is valid under this schema
    json_object: bool | None  #: any JSON object
    regex: str | None  #: a text that matches this regular expression as a whole
    choice: Sequence[str] | None  #: one of these texts
    grammar: str | None  #: a text of this grammar in EBNF
    logprobs: int | None  #: give each output token's logprob, and this many alternatives
    prompt_logprobs: int | None  #: the same for the prompt's tokens
    echo: bool  #: the text begins with the prompt's
    model: str  #: a name from `models`; empty: the default model
    lookaheads: Sequence[int] | None  #: tokens to draft at the level below the target, then at each below that
    drafter: str | None  #: at the lowest tier: model, lookup or both; without `lookaheads`, the server's are used
    selector: str | None  #: of chunks for the retrieval tier: mean_key, snapkv, …; by default the server's setting
    cache_salt: str | None  #: KV of equal prefixes is shared with calls of the same salt only; at most 128 characters
    resume_token_ids: Sequence[int]  #: output tokens of a call that broke off
    fingerprint: str  #: of that call's first chunk: a server with another model or other settings then refuses
    priority: int | None  #: -100 to 100: waiting requests with a lower number are served earlier; 0 by default
    timeout_s: float | None  #: by default the client's own


Prompt = str | Sequence[int] | pb.ChatMessages


def build_request(prompt: Prompt, arguments: CallArguments) -> pb.GenerateRequest:
    """The request for these arguments; None leaves a field unset. The server checks all rules beyond the types.

    Raises `InvalidRequestError` for a value of the wrong type or a request over 64 MiB, and `TypeError` for an unknown
    argument.
    """
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt, argument="prompt")
    elif isinstance(prompt, pb.ChatMessages):
        request.messages.CopyFrom(prompt)
    else:
        request.token_ids.SetInParent()  # marks the field as present, even when empty
        _set(request.token_ids, "values", prompt, argument="prompt")
    for name, value in arguments.items():
        if name not in CallArguments.__optional_keys__:  # Python itself does not check TypedDict names
            raise TypeError(f"a call has no argument {name!r}")
        if value is None:
            continue
        if name in GUIDES and request.WhichOneof("guide"):
            raise _refusal(name, "", f"contradicts {request.WhichOneof('guide')}: the output has one form")
        if name in LISTS:
            values = getattr(request, name)
            values.SetInParent()  # marks the field as present, even when empty
            _set(values, "values", [value] if isinstance(value, str) else value, argument=name)
        else:
            message = request.sampling if name in pb.Sampling.DESCRIPTOR.fields_by_name else request
            _set(message, name, CONVERSIONS[name](value) if name in CONVERSIONS else value)
    if request.ByteSize() > MAX_MESSAGE_BYTES:  # the server would refuse it without naming the reason
        raise _refusal("prompt", f"a request of {request.ByteSize()} bytes", "must be at most 64 MiB")
    return request


def chat_messages(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> pb.ChatMessages:
    """The conversation as a prompt. Raises `InvalidRequestError` for a value of the wrong type."""
    conversation = pb.ChatMessages(tools_json=_as_json("tools", tools) if tools else "")
    for index, message in enumerate(messages):
        where, sent = f"messages[{index}]", conversation.messages.add()
        if not isinstance(message, Mapping):
            raise _refusal(where, repr(message), "must be a mapping with role and content")
        for name, value in message.items():
            if name not in MESSAGE_FIELDS:
                raise _refusal(where, repr(name), f"must be one of {', '.join(MESSAGE_FIELDS)}")
            if value is not None:
                json_value = name == "tool_calls"
                field = "tool_calls_json" if json_value else name
                _set(sent, field, _as_json(where, value) if json_value else value, argument=f"{where}.{name}")
    return conversation


def _as_json(argument: str, value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _refusal(argument, repr(value), f"is not JSON ({error})") from None


def _listed(texts: object) -> object:
    """A single text is a list of one, not of its letters."""
    return [texts] if isinstance(texts, str) else texts


def _token_lists(words: Any) -> list[pb.TokenIds]:
    try:
        return [pb.TokenIds(values=word) for word in words]
    except (TypeError, ValueError) as error:
        raise _refusal("bad_word_ids", repr(words), f"must be lists of token ids ({error})") from None


def _seconds(timeout_s: Any) -> Any:
    """Checked here, because gRPC ends the call at once for all other numbers, before the server can refuse them."""
    if isinstance(timeout_s, int | float) and not 0 < timeout_s < 1e9:
        raise _refusal("timeout_s", repr(timeout_s), "must be above 0 and below 1e9")
    return timeout_s


def _unsigned(seed: Any) -> int:
    """The seed, a signed 64-bit integer, as an unsigned one in two's complement."""
    try:
        value = operator.index(seed)
    except TypeError as error:
        raise _refusal("seed", repr(seed), f"is of the wrong type ({error})") from None
    if not -(2**63) <= value < 2**63:
        raise _refusal("seed", repr(seed), "must be at least -2**63 and below 2**63")
    return value % 2**64


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "seed": _unsigned,
    "timeout_s": _seconds,
    "stop": _listed,
    "bad_words": _listed,
    "json_schema": partial(_as_json, "json_schema"),
    "bad_word_ids": _token_lists,
}


def _refusal(argument: str, shown: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{argument}: {shown:.80} {rule}", grpc.StatusCode.INVALID_ARGUMENT)


def _set(message: protobuf.Message, field: str, value: object, argument: str = "") -> None:
    """Set a field. If protobuf refuses the value, raises `InvalidRequestError` naming the argument."""
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (TypeError, ValueError) as error:
        raise _refusal(argument or field, repr(value), f"is of the wrong type or out of range ({error})") from error
