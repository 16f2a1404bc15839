"""The turns of a chat, made of what other APIs send, in an order that the model's template takes."""

from collections.abc import Iterable, Sequence
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
    """The turns with one system message at the beginning, and one message of the user or the assistant wherever several
    follow each other. Later messages of the system are the user's where the template cannot have them.
    """
    found: list[Message] = []
    for turn in turns:
        system, leads = turn.role in ("system", "developer"), all(each.role == "system" for each in found[:2])
        role = "system" if system and (leads or template.system_anywhere) else "user" if system else turn.role
        if found and found[-1].role == role and (role in ("user", "assistant") or (system and leads)):
            found[-1] = together(found[-1], turn)
        else:
            found.append(turn if role == turn.role else written(role, texts_of(turn)))
    return found


def together(one: Message, other: Message) -> Message:
    """One message that says what both say, in the role of the first."""
    thoughts = [each.reasoning_content for each in (one, other) if each.reasoning_content]
    return written(
        one.role,
        [*texts_of(one), *texts_of(other)],
        tool_calls=[*(one.tool_calls or ()), *(other.tool_calls or ())] or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def texts_of(message: Message) -> list[str]:
    if message.content is None:
        return []
    return [message.content] if isinstance(message.content, str) else [str(each["text"]) for each in message.content]
