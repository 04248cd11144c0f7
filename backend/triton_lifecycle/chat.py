"""Chat requests: ``messages`` and ``tools``, checked once, for the model's own chat template to write out.

The form is OpenAI's, which the templates of nearly all models expect.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.sampling import as_type

MAX_MESSAGES: Final = 10_000

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of a message's content."""

    text: str


class ImageURL(msgspec.Struct, frozen=True):
    """Where an image is: only data URLs are taken, since nothing is fetched."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image within a message's content."""

    image_url: ImageURL


class ImagePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """The place of an image that comes in the input ``image``."""


class Function(msgspec.Struct, frozen=True):
    """What a tool call calls; ``arguments`` is JSON text or already an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that the assistant made."""

    function: Function
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn."""

    role: Role
    content: str | list[TextPart | ImagePart | ImagePlace] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Conversation(msgspec.Struct, frozen=True):
    """What a chat template gets: plain JSON values."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    images: tuple[str, ...] = ()
    """The data URLs in the messages, in the order in which they stand there."""
    places: int = 0
    """How many images of the input ``image`` the messages have a place for."""


def conversation(messages: Any, tools: Any) -> Conversation:  # noqa: ANN401 - as the caller wrote them
    """Check a chat request.

    Args:
        messages: a list of messages, or its JSON text.
        tools: a list of tool descriptions, its JSON text, or ``None``.

    Raises:
        InvalidInput: the message names the place, what was expected there and what was found.

    """
    turns = as_type("messages", _parsed("messages", messages), list[Message])
    if not turns:
        raise InvalidInput("messages: the list is empty; at least one message is needed")
    if len(turns) > MAX_MESSAGES:
        raise InvalidInput(f"messages: at most {MAX_MESSAGES} are taken, found {len(turns)}")
    described = None if tools is None else as_type("tools", _parsed("tools", tools), list[dict[str, Any]])
    parts = [part for turn in turns if isinstance(turn.content, list) for part in turn.content]
    inside = tuple(part.image_url.url for part in parts if isinstance(part, ImagePart))
    places = sum(isinstance(part, ImagePlace) for part in parts)
    if inside and places:
        raise InvalidInput("messages: either image_url parts, or image parts and the input 'image'; not both")
    return Conversation([_plain(turn) for turn in turns], described or None, inside, places)


def _parsed(field: str, value: Any) -> Any:  # noqa: ANN401
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"{field}: not valid JSON: {error}") from None


def _plain(turn: Message) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(turn)
    if isinstance(turn.content, list):
        texts = [part.text for part in turn.content if isinstance(part, TextPart)]
        if len(texts) == len(turn.content):
            plain["content"] = "".join(texts)
        else:
            plain["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in turn.content
            ]
    # Templates test for the key, and some for its value.
    plain.setdefault("content", "" if turn.content is None else turn.content)
    return plain
