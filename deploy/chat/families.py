"""Families of models: how their outputs mark reasoning and tool calls, as far as their chat templates tell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.chat.forms import CallForm, ChannelCalls, NamedCalls, ObjectCalls, ParameterCalls, Written, escaped
from deploy.chat.parsing import FindsCalls, FindsChannels, Parser, PlainText, ReasoningForm, SplitsReasoning

HERMES = ObjectCalls("<tool_call>", "", "", "</tool_call>", newline="\n")
MISTRAL = ObjectCalls("[TOOL_CALLS]", "[", ",", "]")
LLAMA3 = ObjectCalls("", "", ";", "", arguments="parameters")
NAMED_MISTRAL = NamedCalls("[TOOL_CALLS]", (), ("[ARGS]",), (), note="[CALL_ID]")
DEEPSEEK_R1 = NamedCalls(
    "<｜tool▁call▁begin｜>",
    ("function", "<｜tool▁sep｜>"),
    ("\n```json\n",),
    ("\n```", "<｜tool▁call▁end｜>"),
    first="<｜tool▁calls▁begin｜>",
    last="<｜tool▁calls▁end｜>",
    next="\n",
)
DEEPSEEK_V3 = NamedCalls(
    "<｜tool▁call▁begin｜>",
    (),
    ("<｜tool▁sep｜>",),
    ("<｜tool▁call▁end｜>",),
    first="<｜tool▁calls▁begin｜>",
    last="<｜tool▁calls▁end｜>",
)
KIMI = NamedCalls(
    "<|tool_call_begin|>",
    ("functions.",),
    ("<|tool_call_argument_begin|>",),
    ("<|tool_call_end|>",),
    number=":",
    first="<|tool_calls_section_begin|>",
    last="<|tool_calls_section_end|>",
)
QWEN_CODER = ParameterCalls(
    "<function=",
    ">\n",
    "<parameter=",
    ">\n",
    "",
    "\n</parameter>\n",
    "</function>",
    first="<tool_call>\n",
    last="\n</tool_call>",
    next="\n</tool_call>\n<tool_call>\n",
)
SEED = ParameterCalls(
    "<function=",
    ">\n",
    "<parameter=",
    ">",
    "",
    "</parameter>\n",
    "</function>",
    first="<seed:tool_call>\n",
    last="\n</seed:tool_call>",
    next="\n</seed:tool_call>\n<seed:tool_call>\n",
)
MINIMAX = ParameterCalls(
    '<invoke name="',
    '">\n',
    '<parameter name="',
    '">',
    "",
    "</parameter>\n",
    "</invoke>\n",
    first="<minimax:tool_call>\n",
    last="</minimax:tool_call>",
)
GLM = ParameterCalls(
    "<tool_call>",
    "\n",
    "<arg_key>",
    "</arg_key>\n",
    "<arg_value>",
    "</arg_value>\n",
    "</tool_call>",
    next="\n",
)
FLAT_GLM = ParameterCalls("<tool_call>", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
CHANNELS = ChannelCalls()
THINK = ReasoningForm("<think>", "</think>")
BRACKETED_THINK = ReasoningForm("[THINK]", "[/THINK]")
SEED_THINK = ReasoningForm("<seed:think>", "</seed:think>")
ANALYSIS = ReasoningForm("<|channel|>analysis<|message|>", "<|end|>")
# By what a template shows, the first that fits.
TOOL_FORMS: dict[tuple[str, ...], CallForm | ChannelCalls] = {
    ("<|channel|>", "<|message|>", "functions."): CHANNELS,
    ("[TOOL_CALLS]", "[ARGS]"): NAMED_MISTRAL,
    ("[TOOL_CALLS]",): MISTRAL,
    ("<｜tool▁call▁begin｜>", "```json"): DEEPSEEK_R1,
    ("<｜tool▁call▁begin｜>",): DEEPSEEK_V3,
    ("<|tool_call_argument_begin|>",): KIMI,
    ("<minimax:tool_call>", "<invoke name="): MINIMAX,
    ("<seed:tool_call>", "<function="): SEED,
    ("<tool_call>", "<function=", "<parameter="): QWEN_CODER,
    ("<tool_call>", "</arg_key><arg_value>"): FLAT_GLM,
    ("<tool_call>", "<arg_key>"): GLM,
    ("<tool_call>",): HERMES,
    ('"parameters"', "ipython"): LLAMA3,
}


@dataclass(frozen=True, slots=True)
class Family:
    """What the outputs of a model may hold; None where its template does not tell."""

    tools: CallForm | ChannelCalls | None
    reasoning: ReasoningForm | None

    @classmethod
    def of(cls, template: str) -> Family:
        return cls(tool_form(template), reasoning_form(template))

    @property
    def reasoning_markers(self) -> tuple[str, ...]:
        """The texts around reasoning. Special tokens among them have no text unless the request's `shown` has them."""
        if isinstance(self.tools, ChannelCalls):
            return self.tools.markers
        return (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The same, with those around tool calls."""
        return (*self.reasoning_markers, *(self.tools.markers if self.tools else ()))

    def parser(self, tools: Mapping[str, Any], *, reasoning_begun: bool) -> Parser:
        """The parser of an output whose request allows these tools: the arguments' schema of each, by its name."""
        if isinstance(self.tools, ChannelCalls):
            return FindsChannels(tools, begun=reasoning_begun)
        inner: Parser = FindsCalls(self.tools, tools) if self.tools and tools else PlainText()
        return SplitsReasoning(self.reasoning, inner, begun=reasoning_begun) if self.reasoning else inner


def tool_form(template: str) -> CallForm | ChannelCalls | None:
    """The form of tool calls that the template shows; None if there is none that this server can read."""
    return next((form for signs, form in TOOL_FORMS.items() if all(sign in template for sign in signs)), None)


def reasoning_form(template: str) -> ReasoningForm | None:
    if tool_form(template) is CHANNELS:
        return ANALYSIS
    return next((form for form in (THINK, BRACKETED_THINK, SEED_THINK) if form.end in template), None)


def grammar(
    family: Family,
    tools: Sequence[Mapping[str, Any]],
    added_ids: dict[str, int],
    *,
    reasoning_begun: bool,
    several: bool,
    answer: str | None = None,
) -> str:
    """The grammar of outputs that call one of the functions (`several`: one or more), after reasoning if the family has
    it. `answer`, a grammar: outputs of that form are allowed, too. Without tools, only these.

    `added_ids`: the tokens that were added to the vocabulary. A grammar does not treat them as text: it names them by
    their ids, and the texts that it allows never contain them.
    """
    written = Written({text: added_ids[text] for text in family.markers if text in added_ids})
    channels = isinstance(family.tools, ChannelCalls)
    rules, bodies = [], []
    if family.reasoning:
        begin, end = written(family.reasoning.begin), family.reasoning.end
        rest = written("<|start|>assistant") if channels else "/\\s{0,8}/"
        rules += [
            f"thought: /(?s:.*)/ {written(end)}" if end in added_ids else f"thought[lazy]: /(?s:.*){escaped(end)}/",
            f"reasoning: {'' if reasoning_begun else begin} thought {rest}",
        ]
    if tools:
        assert family.tools is not None
        bodies.append("calls")
        rules += family.tools.rules(tools, written, several)
    grammars: list[dict[str, Any]] = []
    if answer is not None:
        bodies.append("answer")
        rules.append(f"answer: {written('<|channel|>final<|message|>') if channels else ''} @asked")
        grammars = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
        grammars[0]["name"] = "asked"
    before = "" if family.reasoning is None else "reasoning" if reasoning_begun else "reasoning?"
    text = "\n".join([f"start: {before} ({' | '.join(bodies)})", *rules])
    return json.dumps({"grammars": [{"lark_grammar": text}, *grammars]}, ensure_ascii=False)
