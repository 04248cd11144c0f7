"""The error tree and its form on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_lifecycle import errors

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.mark.parametrize("kind", sorted(errors.BY_SLUG.values(), key=lambda kind: kind.slug))
@pytest.mark.parametrize("retry_after", [None, 1.8])
def test_every_error_survives_the_wire(kind, retry_after):
    """Class, message and retry hint come back from the text, also with a front end's words around it."""
    error = kind("64 requests are waiting: see (a; b)\nsecond line", retry_after=retry_after)
    for prefix in ("", "[StatusCode.UNAVAILABLE] ", "in ensemble 'e', message: "):
        back = errors.from_wire(prefix + error.wire())
        assert type(back) is kind
        assert (back.message, back.retry_after) == (error.message, retry_after)


def test_slugs_are_unique():
    """No two classes share a slug, so the way back is unambiguous."""
    assert len(set(errors.BY_SLUG)) == len(set(errors.BY_SLUG.values()))


@pytest.mark.parametrize("text", ["", "no slug here", "unheard_of: message", "error: x"])
def test_foreign_texts_are_not_ours(text):
    """A text that another program made is not taken for one of our errors."""
    assert errors.from_wire(text) is None


def test_a_refusal_reads_well():
    """The slug comes first, the hint last."""
    assert errors.QueueFull("64 requests are waiting", retry_after=1.84).wire() == (
        "queue_full: 64 requests are waiting; retry after 1.8 s"
    )


@pytest.mark.parametrize("slug", errors.BY_SLUG)
def test_operators_find_every_slug(slug):
    """docs/operations.md has its cause and what to do."""
    rows = [line for line in OPERATIONS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert any(f"`{slug}`" in row.split("|")[1] for row in rows)
