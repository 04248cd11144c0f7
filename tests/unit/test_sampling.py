"""Sampling parameters: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import time

import pytest

from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.sampling import check_plain, parse_object, type_values

FIELDS = {
    "max_tokens": int | None,
    "temperature": float,
    "ignore_eos": bool,
    "stop": str | list[str] | None,
    "stop_token_ids": list[int] | None,
    "logit_bias": dict[int, float] | None,
}


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"max_tokens": "16"}, 16),
        ({"max_tokens": None}, None),
        ({"max_tokens": 16.0}, 16),
        ({"temperature": "0.7"}, 0.7),
        ({"temperature": 1}, 1.0),
        ({"ignore_eos": "false"}, False),
        ({"ignore_eos": "true"}, True),
        ({"stop": "x"}, "x"),
        ({"stop": ["x"]}, ["x"]),
        ({"stop_token_ids": [1, "2"]}, [1, 2]),
        ({"logit_bias": {"5": 1}}, {5: 1.0}),
    ],
)
def test_values_take_their_declared_type(given, typed):
    """Numbers and booleans may be texts; keys of mappings always are."""
    [value] = type_values(given, FIELDS).values()
    assert value == typed
    assert type(value) is type(typed)


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": "abc"},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"max_tokens": [1]},
        {"temperature": "hot"},
        {"ignore_eos": "maybe"},
        {"stop_token_ids": [None]},
        {"stop_token_ids": ["a"]},
        {"logit_bias": {"a": 1}},
        {"temperature": float("inf")},
    ],
)
def test_a_wrong_type_names_the_field_and_the_value(given):
    """The message says which parameter, what was expected, and what was found."""
    [name] = given
    with pytest.raises(InvalidInput, match=rf"sampling_parameters\.{name}: "):
        type_values(given, FIELDS)


def test_an_unknown_key_names_the_nearest():
    """A slip of the pen is answered with the right name; a foreign key with the list."""
    with pytest.raises(InvalidInput, match="did you mean 'max_tokens'"):
        type_values({"max_tokenz": 1}, FIELDS)
    with pytest.raises(InvalidInput, match="known are ignore_eos, logit_bias"):
        type_values({"zzz": 1}, FIELDS)


@pytest.mark.parametrize("text", ["{", "[]", "null", "5", "", '{"a": NaN}', '{"a": Infinity}', "[" * 100_000])
def test_what_is_no_json_object_is_refused(text):
    """Malformed JSON, other JSON values, non-finite numbers and deep nesting are the caller's fault."""
    with pytest.raises(InvalidInput, match="sampling_parameters: "):
        parse_object("sampling_parameters", text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"\\ud800": 1}', "surrogate"),
        ('{"stop": ["ok", "\\udfff"]}', r"stop\[1\].*surrogate"),
        ('{"max_tokens": 100000000000000000000}', "max_tokens: must fit into 64 bits"),
        ('{"logit_bias": {"5": 1e999}}', "logit_bias.5: must be finite"),
        ('{"stop": ' + "[" * 200 + "]" * 200 + "}", "nested deeper than 64"),
    ],
)
def test_what_nothing_behind_json_can_carry_is_refused(text, part):
    """Half surrogate pairs, numbers beyond 64 bits and deep nesting end here, in a message that can be sent."""
    with pytest.raises(InvalidInput, match=part) as caught:
        parse_object("sampling_parameters", text)
    caught.value.wire().encode()
    assert len(caught.value.wire()) < 500


@pytest.mark.parametrize(
    ("declared", "value"), [(int, "1" + "0" * 30), (int | None, "9" * 19), (float, "1e999"), (float, "1" + "0" * 400)]
)
def test_a_text_becomes_no_number_that_cannot_be_carried(declared, value):
    """Numbers given as texts keep to the same bounds."""
    with pytest.raises(InvalidInput, match=r"sampling_parameters\.x"):
        type_values({"x": value}, {"x": declared})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"k" * 1_000_000: [0] * 150_000}, None),
        ({"k" * 1_000_000: [0] * 250_000}, "more than 200000 values"),
        ({"a": [[0] * 1000] * 1000}, "field: more than 200000 values"),
        ({"a": {"b": ["x", "\ud800"]}}, "field.a.b[1]: not valid Unicode"),
        ({"a": {"\ud800": 1}}, "field.a, a key: not valid Unicode"),
    ],
)
def test_checking_costs_no_more_than_its_values(value, says):
    """Paths are written only in a refusal: a long key around many values is no work, and their number has a limit."""
    began = time.perf_counter()
    if says is None:
        check_plain("field", value)
    else:
        with pytest.raises(InvalidInput) as caught:
            check_plain("field", value)
        assert says in caught.value.message
        assert len(caught.value.message) < 300
    assert time.perf_counter() - began < 5, "it took half a minute"


def test_names_of_ours_are_known_too():
    """A misspelt request parameter is named; one in the wrong place is told its place."""
    for given, near in (("timout_ms", "timeout_ms"), ("tenent", "tenant"), ("partail", "partial")):
        with pytest.raises(InvalidInput, match=f"unknown key \"{given}\"; did you mean '{near}'"):
            type_values({given: 1}, FIELDS)
    with pytest.raises(InvalidInput, match=r"timeout_ms.*request parameter: send it beside sampling_parameters"):
        type_values({"timeout_ms": 5}, FIELDS)
    with pytest.raises(InvalidInput, match="known are ignore_eos, logit_bias"):
        type_values({"xyzzy": 1}, FIELDS)
