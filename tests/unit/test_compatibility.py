"""The page that says how we compare with the official backend: every row has its tests, every item its row."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from triton_lifecycle.schema import INPUTS, OUTPUTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

CONTRACT = {
    "Inputs": [
        *[f"`{name}`" for name in ("text_input", "image", "stream", "sampling_parameters", "exclude_input_in_output")],
        *[f"`return_{name}`" for name in ("finish_reason", "cumulative_logprob", "logprobs")],
        *[f"`return_num_{name}_tokens`" for name in ("input", "output")],
        *[f"`{name}`" for name in ("embedding_request", "lora_name", "structured_outputs", "guided_decoding")],
        "numbers as texts",
        "request `parameters`",
    ],
    "Outputs": [
        *[f"`{name}`" for name in ("text_output", "finish_reason", "cumulative_logprob", "logprobs")],
        *[f"`num_{name}_tokens`" for name in ("input", "output")],
        "streaming gives deltas",
        "FINAL",
    ],
    "Files and configuration": [
        "`config.pbtxt`",
        '`backend: "vllm"`',
        '`backend: "python"`',
        "`1/model.py`",
        "`1/model.json`",
        "`1/multi_lora.json`",
        "decoupled policy",
        "`max_batch_size: 0`",
        "auto-completion",
        "`REPORT_CUSTOM_METRICS`",
        "`ENABLE_VLLM_HEALTH_CHECK`",
        "KIND_GPU",
        "KIND_MODEL",
        "ensembles",
        "BLS",
        "several models",
    ],
    "Metrics": [
        f"`vllm:{name}`"
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "time_to_first_token_seconds",
            "time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_n",
        )
    ],
    "Messages that clients match on": [
        "When streaming",
        "LoRA X is not supported, we currently support",
        "LoRA feature is not enabled.",
        "does not support 'embed' request",
        "does not support 'generate' request",
        "Request was cancelled",
        "KIND_GPU is currently for single-GPU models",
        "unhealthy vLLM engine",
    ],
    "Faults of the official backend, numbered as they were collected": [f"{number}. " for number in range(1, 14)],
    "Request parameters of ours": [
        f"`{name}`"
        for name in ("timeout_ms", "priority", "request_priority", "tenant", "traceparent", "control", "control_id")
    ],
}
"""By section of the page: what a first cell must hold, from the official contract and the schema."""

IN_FOUR_WAYS = ("Inputs", "Outputs")
"""Sections in which each row must have a test that asks over HTTP and gRPC, streaming and not."""

STATES = {"same", "added", "fixed", "changed"}


def rows(page: str) -> list[tuple[str, list[str]]]:
    """Return section and cells of each row of each table."""
    found, section, inside = [], "", False
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        if not line.startswith("|"):
            inside = False
        elif set(line) <= set("|-: "):
            inside = True
        elif inside:
            found.append((section, [cell.strip() for cell in line.strip("|").split("|")]))
    return found


@functools.cache
def functions(path: str) -> dict[str, str]:
    """Return the source of each test function of a file, its decorators included, by name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    return {
        node.name: "\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def problems(page: str) -> list[str]:
    """Return what is wrong with the page."""
    wrong = []
    for section, cells in rows(page):
        what = f"{section}: {cells[0]}"
        if len(cells) != 4:
            wrong.append(f"{what}: {len(cells)} cells")
            continue
        states = set(cells[1].split(", "))
        if not states <= STATES:
            wrong.append(f"{what}: unknown state {cells[1]!r}")
        tests = TEST.findall(cells[3])
        if not tests:
            wrong.append(f"{what}: names no test")
        if (leftover := TEST.sub("", cells[3]).replace("<br>", "").strip()) != "":
            wrong.append(f"{what}: {leftover!r} is no test")
        sources = []
        for path, name in tests:
            if not (ROOT / path).exists() or name not in functions(path):
                wrong.append(f"{what}: there is no {path}::{name}")
            else:
                sources.append(functions(path)[name])
        if section in IN_FOUR_WAYS and not any("WAYS" in source for source in sources):
            wrong.append(f"{what}: no test asks in all four ways")
    first_cells: dict[str, list[str]] = {}
    for section, cells in rows(page):
        first_cells.setdefault(section, []).append(cells[0])
    for section, items in CONTRACT.items():
        wrong += [
            f"{section}: no row for {i}" for i in items if not any(i in cell for cell in first_cells.get(section, []))
        ]
    for path, name in TEST.findall(page):
        if not (ROOT / path).exists() or name not in functions(path):
            wrong.append(f"there is no {path}::{name}")
    return wrong


def test_every_row_is_shown_by_tests_and_every_item_has_a_row():
    """On the page as it is."""
    page = PAGE.read_text(encoding="utf-8")
    assert problems(page) == []
    assert len(rows(page)) >= 70


def test_every_tensor_has_a_row():
    """Those of the official contract, and ours."""
    cells = [cells[0] for section, cells in rows(PAGE.read_text(encoding="utf-8")) if section in IN_FOUR_WAYS]
    assert [
        tensor.name for tensor in (*INPUTS, *OUTPUTS) if not any(f"`{tensor.name}`" in cell for cell in cells)
    ] == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("`tests/e2e/test_parity.py::test_exactly_one_end`", "", "13. Exactly one FINAL in every end: "),
        (
            "test_exactly_one_end`",
            "test_exactly_two_ends`",
            "there is no tests/e2e/test_parity.py::test_exactly_two_ends",
        ),
        ("| `vllm:request_params_n` |", "| `vllm:request_params` |", "Metrics: no row for `vllm:request_params_n`"),
        ("| same |", "| later |", "unknown state 'later'"),
        (
            "test_parity.py::test_text`",
            "test_generate.py::test_the_model_knows_paris`",
            "no test asks in all four ways",
        ),
    ],
)
def test_a_page_with_a_fault_is_found_out(old: str, new: str, says: str):
    """A row without a test, a test that is gone, an item without a row, a state of our own making."""
    page = PAGE.read_text(encoding="utf-8")
    assert old in page
    changed = page.replace(old, new)
    if new == "":
        changed = re.sub(r"(\| 13\. .*? \| )[^|]*\|$", r"\1|", changed, flags=re.MULTILINE)
    assert any(says in problem for problem in problems(changed)), problems(changed)
