"""Fields that clients send by default and that this server has no use for: in any object of a request they are accepted
with a value that asks for nothing, and otherwise refused by name.
"""

import json
from collections.abc import Collection
from typing import Any

# Whatever their value is, they only name, annotate or advise on caching.
IGNORED = frozenset(
    {
        "annotations",
        "cache_control",
        "client_metadata",
        "eager_input_streaming",
        "id",
        "index",
        "metadata",
        "parsed",
        "parsed_arguments",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "provider_specific_fields",
        "request_id",
        "safety_identifier",
        "status",
        "user",
    }
)
USE_TOOLS = "use tools and tool_choice"
USE_VARIABLES = "use chat_template_kwargs if the model's template has such a variable"
NO_ADAPTERS = "merge the adapter into the model that is served"
ONE_MODEL = "one model is served; name it in model"
TEXT_ONLY = "only text is read and written"
WHOLE_CHAT = "nothing is stored: send the whole chat as input"
# By field: the values that have no effect, and what to do instead of sending others. Null has none in any field.
NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "adapter_id": ((), NO_ADAPTERS),
    "adapters": (([],), NO_ADAPTERS),
    "allowed_callers": ((["direct"],), ""),
    "allowed_token_ids": (([],), "use structured_outputs"),
    "audio": ((), TEXT_ONLY),
    "background": ((False,), ""),
    "best_of": ((1,), "use n"),
    "cache_prompt": ((True,), "use cache_salt to share no KV"),
    "caller": (({"type": "direct"},), ""),
    "chat_template": ((), "set target.chat_template in the server's settings"),
    "citations": (([], {"enabled": False}), ""),
    "container": ((), ""),
    "conversation": ((), WHOLE_CHAT),
    "defer_loading": ((False,), ""),
    "detokenize": ((True,), "use return_token_ids"),
    "documents": (([],), "put them into messages"),
    "early_stopping": ((False,), ""),
    "echo": ((False,), "use /v1/completions"),
    "fallbacks": (([],), ONE_MODEL),
    "function_call": (("none", "auto"), USE_TOOLS),
    "functions": (([],), USE_TOOLS),
    "guided_decoding_backend": (("auto",), ""),
    "images": (([],), TEXT_ONLY),
    "include_obfuscation": ((False,), ""),
    "include_reasoning": ((True,), ""),
    "input_examples": (([],), ""),
    "length_penalty": ((1,), ""),
    "logits_processors": (([],), ""),
    "logprobs": ((False,), ""),
    "lora": (([],), NO_ADAPTERS),
    "lora_path": ((), NO_ADAPTERS),
    "lora_request": ((), NO_ADAPTERS),
    "max_tool_calls": ((), ""),
    "mcp_servers": (([],), USE_TOOLS),
    "modalities": ((["text"],), TEXT_ONLY),
    "models": (([],), ONE_MODEL),
    "partial": ((False,), "use continue_final_message"),
    "prediction": ((), ""),
    "prefix": ((False,), "use continue_final_message"),
    "previous_response_id": ((), WHOLE_CHAT),
    "prompt_logprobs": ((), "use /v1/completions"),
    "reasoning_effort": ((), "use /v1/chat/completions, which renders the model's chat template"),
    "refusal": ((), ""),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "separate_reasoning": ((True,), ""),
    "service_tier": (("default", "auto", "standard_only"), ""),
    "skip_special_tokens": ((True,), "use return_token_ids"),
    "spaces_between_special_tokens": ((True,), "use return_token_ids"),
    "speed": (("standard",), ""),
    "store": ((False,), "nothing is stored: send the whole chat each time"),
    "suffix": (("",), ""),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
    "truncate_prompt_tokens": ((), "use /v1/completions"),
    "truncation": (("disabled",), ""),
    "typical_p": ((1,), ""),
    "use_beam_search": ((False,), "use n"),
    "verbosity": (("medium",), USE_VARIABLES),
    "web_search_options": ((), ""),
}


def without_effect(name: str, value: Any, used: Collection[str] = ()) -> bool:
    """Whether this field asks for nothing. `used`: the fields that its object has a use for."""
    if name in NO_EFFECT and is_one_of(NO_EFFECT[name][0], value):
        return True
    return name not in used and (name in IGNORED or value is None)


def is_one_of(values: tuple[Any, ...], value: Any) -> bool:
    """Whether it is one of them; a truth value is no number."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def refusal(name: str) -> str:
    """The rule that another value, or an unknown field, breaks."""
    if name not in NO_EFFECT:
        return "is not a field of this request"
    values, instead = NO_EFFECT[name]
    accepted = f"leave it out or set it to {json.dumps([None, *values][-1])}"
    return f"is not supported: {accepted}" + (f"; {instead}" if instead else "")
