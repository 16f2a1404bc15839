"""Families of models: how their outputs mark reasoning and tool calls, as far as their chat templates tell."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.chat.parsing import FindsCalls, Parser, PlainText, ReasoningForm, SplitsReasoning, ToolForm
from triforce_core.sampling.guides import JSON_STYLE
from triforce_core.sampling.schemas import kept

HERMES = ToolForm("hermes", "<tool_call>", "", "", "</tool_call>", "arguments")
MISTRAL = ToolForm("mistral", "[TOOL_CALLS]", "[", ",", "]", "arguments")
LLAMA3 = ToolForm("llama3", "", "", ";", "", "parameters")
THINK = ReasoningForm("<think>", "</think>")
BRACKETED_THINK = ReasoningForm("[THINK]", "[/THINK]")


@dataclass(frozen=True, slots=True)
class Family:
    """What the outputs of a model may hold; None where its template does not tell."""

    tools: ToolForm | None
    reasoning: ReasoningForm | None

    @classmethod
    def of(cls, template: str) -> Family:
        return cls(tool_form(template), reasoning_form(template))

    @property
    def reasoning_markers(self) -> tuple[str, ...]:
        """The texts around reasoning. Special tokens among them have no text unless the request's `shown` has them."""
        return (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The same, with those around tool calls."""
        return (*self.reasoning_markers, *((self.tools.begin, self.tools.end) if self.tools else ()))

    def parser(self, names: Collection[str], *, reasoning_begun: bool) -> Parser:
        """The parser of an output whose request allows these tools."""
        inner: Parser = FindsCalls(self.tools, names) if self.tools and names else PlainText()
        return SplitsReasoning(self.reasoning, inner, begun=reasoning_begun) if self.reasoning else inner


def tool_form(template: str) -> ToolForm | None:
    """The form of tool calls that the template shows; None if there is none that this module understands. Forms that
    resemble these but are not JSON, such as <function=…>, are not understood.
    """
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if '"parameters"' in template and "ipython" in template:
        return LLAMA3
    return None


def reasoning_form(template: str) -> ReasoningForm | None:
    return next((form for form in (THINK, BRACKETED_THINK) if form.end in template), None)


def grammar(
    family: Family,
    tools: Sequence[dict[str, Any]],
    added_ids: dict[str, int],
    *,
    reasoning_begun: bool,
    several: bool,
    answer: Any = None,
) -> str:
    """The grammar, as llguidance writes them, of outputs that call one of the tools (`several`: one or more), after
    reasoning if the family has it. `answer`, a JSON schema: outputs of that form are allowed, too. Without tools, only
    these.

    `added_ids`: the tokens that were added to the vocabulary. A grammar does not treat them as text: it names them by
    their ids, and the texts that it allows never contain them.
    """

    def literal(text: str) -> str:
        return f"<[{added_ids[text]}]>" if text in added_ids else json.dumps(text, ensure_ascii=False)

    rules, bodies = [], []
    if family.reasoning:
        begin, end = family.reasoning.begin, family.reasoning.end
        rules += [
            f"thought: /(?s:.*)/ {literal(end)}" if end in added_ids else f"thought[lazy]: /(?s:.*){escaped(end)}/",
            f"reasoning: {'' if reasoning_begun else literal(begin)} thought /\\s{{0,8}}/",
        ]
    if tools:
        assert family.tools is not None
        bodies.append("calls")
        rules += calls(family.tools, tools, literal, several)
    if answer is not None:
        bodies.append("answer")
        rules.append(f"answer: %json {styled(answer)}")
    before = "" if family.reasoning is None else "reasoning" if reasoning_begun else "reasoning?"
    return "\n".join([f"start: {before} ({' | '.join(bodies)})", *rules])


def calls(form: ToolForm, tools: Sequence[dict[str, Any]], literal: Any, several: bool) -> list[str]:
    """The rules of one or more calls."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    rules += [f"call_{index}: %json {styled(call_schema(form, tool['function']))}" for index, tool in enumerate(tools)]
    if form is HERMES:
        one = f'{literal(form.begin)} "\\n" call "\\n" {literal(form.end)}'
        return [*rules, f"one: {one}", 'calls: one ("\\n" one)*' if several else "calls: one"]
    more = f' ("{form.separator} " call)*' if several else ""
    begin = literal(form.begin) if form.begin else ""
    return [*rules, f'calls: {begin} "[" call{more} "]"' if form.opening else f"calls: call{more}"]


def call_schema(form: ToolForm, function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("parameters") or {"type": "object"}
    definitions = {name: arguments[name] for name in ("$defs", "definitions") if name in arguments}
    return definitions | {  # references such as #/$defs/… are resolved from the top
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def styled(schema: Any) -> str:
    return json.dumps({**kept(schema), "x-guidance": JSON_STYLE} if isinstance(schema, dict) else schema)


def escaped(text: str) -> str:
    """The text in a regular expression between slashes."""
    return re.sub(r"([][/\\(){}.*+?|^$])", r"\\\1", text)


def thinking_variables(template: str, effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if "enable_thinking" in template else {}
