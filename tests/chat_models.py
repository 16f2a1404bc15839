"""Small tokenizers with chat templates in the manner of three families of models."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You have tools.
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Write <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' or not tools %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and thinking %}<think>
{% endif %}{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'ipython' or message.role == 'tool' %}{{ message.content | tojson }}
{%- elif message.tool_calls %}{% set call = message.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}
{%- if loop.first and tools %}Answer with {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 characters long') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "none": None}
SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "none": ["<s>", "</s>"],
}
ADDED = {"qwen": ["<think>", "</think>", "<tool_call>", "</tool_call>"]}  # which are not special
ENDS = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>", "none": "</s>"}
BEGINS = {"llama": "<|begin|>", "mistral": "<s>", "none": "<s>"}


@cache
def tokenizer(family: str) -> Any:
    """A tokenizer whose tokens are bytes, the family's special tokens and its added ones."""
    fast = of_bytes(SPECIAL[family], ADDED.get(family, []), BEGINS.get(family), ENDS[family])
    fast.chat_template = TEMPLATES[family]
    return fast


def of_bytes(special: list[str], added: list[str], begin: str | None, end: str) -> Any:
    made = Tokenizer(BPE({character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    if begin is not None:
        made.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=begin, eos_token=end)
