"""The tables of ``docs/metrics.md``, made from the catalogue.

``python -m triton_lifecycle.metrics.reference docs/metrics.md`` writes them anew between their two marks; a test sees
to it that this was done.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from triton_lifecycle.metrics.catalogue import GROUPS

BEGIN: Final = "<!-- tables: begin -->"
END: Final = "<!-- tables: end -->"


def tables() -> str:
    """Return the tables of ``docs/metrics.md``."""
    lines = []
    for title, families in GROUPS.items():
        lines += [f"### {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for family in families:
            own = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{family.name}` | {family.kind} | {own} | {family.about} |")
        lines.append("")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """Return the page with its tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
