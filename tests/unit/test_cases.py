"""The table of cases names tests that exist, and every case has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = {"C": 8, "T": 4, "O": 5, "L": 8, "I": 12, "M": 1}
ROW = re.compile(r"^\| ([A-Z]\d+) \|.*\| (.*) \|$", re.MULTILINE)


def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_case_has_its_test():
    """Each id of the list stands in docs/cases.md once, with tests that exist under that name."""
    rows = ROW.findall((ROOT / "docs" / "cases.md").read_text())
    assert [name for name, _ in rows] == [f"{kind}{number}" for kind in SIZES for number in range(1, SIZES[kind] + 1)]
    for name, cell in rows:
        tests = re.findall(r"`([^`]+\.py)::([^`]+)`", cell)
        assert tests, name
        for path, function in tests:
            assert function in _functions(ROOT / path), f"{name}: {path}::{function}"


def test_every_test_of_a_case_is_in_the_table():
    """A file of tests/cases holds nothing that the table does not name."""
    text = (ROOT / "docs" / "cases.md").read_text()
    for path in (ROOT / "tests" / "cases").glob("test_*.py"):
        for function in _functions(path):
            if function.startswith("test_"):
                assert f"{path.relative_to(ROOT)}::{function}" in text
