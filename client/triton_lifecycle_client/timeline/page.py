"""One HTML page that needs nothing else: the data, the style and the script are inside, and nothing may be fetched.

Nothing of a recording becomes markup: it travels as JSON, and the script writes it as text. A content security policy
that names the script by its hash keeps everything else from running.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triton_lifecycle.story import PHASES, Story
from triton_lifecycle_client.terminal import UsageFault

from .view import STATUSES, View

if TYPE_CHECKING:
    from pathlib import Path

_UNSAFE: Final[dict[str, str | int | None]] = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}
"""What could end the element that holds the JSON, and how JSON can say it otherwise."""


def write(path: Path, view: View) -> None:
    """Write the page; raises ``UsageFault`` when the file cannot be written."""
    try:
        path.write_text(render(view), encoding="utf-8")
    except OSError as error:
        raise UsageFault(f"--html {path}: {error.strerror or error}") from None


def render(view: View) -> str:
    """Return the page."""
    parts = files(__package__)
    script = (parts / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((parts / "page.html").read_text(encoding="utf-8")).substitute(
        style=(parts / "page.css").read_text(encoding="utf-8"), script=script, hash=digest, data=_embedded(data(view))
    )


def data(view: View) -> dict[str, Any]:
    """Return what the script draws; times are microseconds from the first arrival, within a request from its own."""
    begin = view.begin
    return {
        "source": view.source,
        "events": view.events,
        "notes": view.notes,
        "wall": view.wall,
        "phases": PHASES,
        "statuses": STATUSES,
        "requests": [_request(story, begin) for story in view.stories],
    }


def _request(story: Story, begin: float) -> dict[str, Any]:
    def us(at: float) -> int:
        return round((at - story.begin) * 1e6)

    found: dict[str, Any] = {
        "id": story.id,
        "b": round((story.begin - begin) * 1e6),
        "e": round((story.end - begin) * 1e6),
        "st": STATUSES.index(story.status),
        "seg": [[PHASES.index(part.phase), us(part.begin), us(part.end)] for part in story.segments()],
        "out": story.output_tokens,
    }
    optional: dict[str, Any] = {
        "c": story.caller_id,
        "m": story.model,
        "slug": story.slug,
        "msg": story.message,
        "tok": [[us(at), count] for at, count in story.tokens],
        "dl": [[us(at), us(due), limit] for at, due, limit in story.deadlines],
        "re": [[us(retry.at), retry.attempt, retry.slug] for retry in story.retries],
        "ft": None if story.first_token is None else us(story.first_token),
        "adm": None if story.admitted is None else us(story.admitted.at),
        "sch": None if story.scheduled is None else us(story.scheduled.at),
        "fin": getattr(story.ending, "finish_reason", None),
        "lim": {} if story.admitted is None else story.admitted.limits,
        "cut": story.received is None,
    }
    if story.prepared is not None:
        optional["asked"] = {
            name: value
            for name, value in msgspec.structs.asdict(story.prepared).items()
            if name not in {"request_id", "seq", "at"}
        }
    if story.scheduled is not None:
        optional["pt"] = story.scheduled.prompt_tokens
        optional["ct"] = story.scheduled.cached_tokens
    return found | {name: value for name, value in optional.items() if value or (value == 0 and value is not False)}


def _embedded(document: dict[str, Any]) -> str:
    text = msgspec.json.encode(document).decode()
    return text.translate(str.maketrans(_UNSAFE))
