"""The turns of a chat, made of what other APIs send, in an order that the model's template takes."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from deploy.chat.template import ChatTemplate
from deploy.openai_api.chat_requests import Message


def written(role: Any, texts: Sequence[str], **fields: Any) -> Message:
    """A message of these texts. One without any has no content if its other fields say something."""
    content: Any = [{"type": "text", "text": text} for text in texts]
    if len(texts) < 2:
        content = texts[0] if texts else None if any(fields.values()) else ""
    return Message.model_construct(role=role, content=content, **fields)


def as_templates_take(turns: Iterable[Message], template: ChatTemplate) -> list[Message]:
    """The turns, where those of one role that follow each other are one message, except a tool's. The system's come
    first; later ones are the user's where the template cannot have them. So is what the user says after a tool's
    result the end of this result.
    """
    roles: list[tuple[str, Message]] = []
    leads = True
    for turn in turns:
        system = turn.role in ("system", "developer")
        leads = leads and system
        late = "system" if template.system_anywhere else "user"
        roles.append(("system" if leads else late if system else turn.role, turn))
    found: list[Message] = []
    for role, group in groupby(roles, key=lambda pair: pair[0]):
        several = [turn for _, turn in group]
        if role == "user" and found and found[-1].role == "tool" and not template.user_after_result:
            said = [text for each in (found[-1], *several) for text in texts_of(each)]
            found[-1] = written("tool", said, tool_call_id=found[-1].tool_call_id)
        else:
            found += several if role == "tool" else [together(role, several)]
    return found


def together(role: str, turns: Sequence[Message]) -> Message:
    """One message that says what all say."""
    thoughts = [each.reasoning_content for each in turns if each.reasoning_content]
    return written(
        role,
        [text for each in turns for text in texts_of(each)],
        tool_calls=[call for each in turns for call in each.tool_calls or ()] or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def texts_of(message: Message) -> list[str]:
    if message.content is None:
        return []
    return [message.content] if isinstance(message.content, str) else [str(each["text"]) for each in message.content]
