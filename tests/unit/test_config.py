"""The configuration loads as promised and reports every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from triton_lifecycle import config
from triton_lifecycle.config import keys, reference, show
from triton_lifecycle.config.problems import problems_of
from triton_lifecycle.config.urls import masked
from triton_lifecycle.errors import ConfigError

SAMPLE = Path(__file__).parents[2] / "model_repository" / "smollm2" / "request_lifecycle.yaml"


def test_the_promised_file_loads_as_it_is():
    """Every key of the promised file is known and takes the promised value."""
    loaded = config.load(SAMPLE).model_dump()
    for section, values in yaml.safe_load(SAMPLE.read_text())["request_lifecycle"].items():
        for key, value in values.items():
            assert loaded[section][key] == value


def test_without_a_file_there_are_no_limits_of_ours(tmp_path):
    """No file means the official contract: no time limits."""
    assert config.load(tmp_path / "none.yaml") is config.OFFICIAL
    assert not config.OFFICIAL.timeout_handling.enabled


def test_all_problems_are_reported_at_once(tmp_path):
    """Unknown keys, wrong types and wrong ranges come in one message with their paths."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(
        "request_lifecycle:\n  event_driven: {enabled: 'yes', event_queue_size: 0}\n"
        "  timeout_handling: {min_timeout: 50.0}\n  monitoring: {log_levle: info}\n  nonsense: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    for part in (
        ": 5 problems",
        "event_driven.enabled",
        "event_driven.event_queue_size",
        "timeout_handling",
        "min_timeout ≤ default_timeout",
        "monitoring.log_levle",
        "nonsense",
    ):
        assert part in caught.value.message


@pytest.mark.parametrize("text", ["{", "a: b", "- 1", "request_lifecycle: {}\nother: {}"])
def test_another_document_is_refused(tmp_path, text):
    """What is not YAML or has other top-level keys is a ConfigError that names the file."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"request_lifecycle\.yaml"):
        config.load(path)


# ---- places and advice


def problems(text, tmp_path, environ=None):
    """Return the problems of a file as (line, column, path, the rest), without its name."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(text)
    with pytest.raises(config.InvalidConfig) as caught:
        config.load(path, environ or {})
    return caught.value.problems


def only(text, tmp_path, environ=None):
    [problem] = problems(text, tmp_path, environ)
    return problem


@pytest.mark.parametrize(
    ("section", "line", "place", "parts"),
    [
        ("monitoring", "log_levle: info", (3, 5), ["unknown key", "did you mean log_level?"]),
        ("monitoring", "default_timeout: 3", (3, 5), ["did you mean timeout_handling.default_timeout?"]),
        ("monitoring", "xyzzy: 3", (3, 5), ["known here: enabled, metrics_enabled"]),
        (
            "monitoring",
            "log_level: off",
            (3, 16),
            ["must be one of debug, info", "YAML reads off as false", "choose one of these"],
        ),
        ("monitoring", "log_level: infos", (3, 16), ["found infos", "did you mean info?"]),
        ("monitoring", 'enabled: "yes"', (3, 14), ["must be true or false", "write true without quotes"]),
        ("monitoring", "enabled: 1", (3, 14), ["must be true or false", "found 1"]),
        ("event_driven", 'event_queue_size: "10"', (3, 23), ["whole number", "write 10 without quotes"]),
        ("event_driven", "event_queue_size: 10.0", (3, 23), ["whole number", "write 10"]),
        ("event_driven", "event_queue_size: 0", (3, 23), ["must be at least 1", "found 0"]),
        ("event_driven", "event_queue_size: 010", (3, 23), ["octal", "here 8"]),
        ("event_driven", "event_processing_timeout: 1e3", (3, 31), ["YAML reads 1e3 as text", "write 1000"]),
        ("event_driven", "event_processing_timeout: 1:30", (3, 31), ["base 60"]),
        ("event_driven", "event_processing_timeout: 10s", (3, 31), ["write the number alone"]),
        ("event_driven", "event_processing_timeout: .inf", (3, 31), ["must be a finite number"]),
        ("event_driven", "event_processing_timeout:", (3, 30), ["found nothing", "remove the key"]),
        ("event_driven", "event_processing_timeout: [1]", (3, 31), ["must be a number", "found a list [1]"]),
        (
            "event_driven",
            "recorder: {path: a, max_files: 0}",
            (3, 36),
            ["event_driven.recorder.max_files", "at least 1"],
        ),
        ("event_driven", "handlers: [{use: 3}]", (3, 22), ["event_driven.handlers.0.use", 'quote it: "3"']),
        ("event_driven", "recorder: {}", (3, 15), ["event_driven.recorder.path", "must be given"]),
        ("event_driven", "event_queue_size: !!python/name:os.system x", (3, 23), ["tag", "leave it out"]),
        ("context_management", "layer_timeouts: {outputs: 5}", (3, 22), ["the key must be one of metadata, input"]),
        ("context_management", "keep_prompts: no", (3, 19), ["YAML reads no as false"]),
        ("timeout_handling", "min_timeout: 50", (2, 3), ["min_timeout ≤ default_timeout"]),
        ("pipeline", "stages: receive", (3, 13), ["must be a list", "[receive]"]),
        ("distributed", "kafka_servers: kafka", (3, 20), ["host:port"]),
        ("distributed", "etcd_url: localhost", (3, 15), ["http:// or https://"]),
    ],
)
def test_a_problem_names_place_value_rule_and_what_to_do(section, line, place, parts, tmp_path):
    """Each kind of mistake has its line and column, and words that help."""
    problem = only(f"request_lifecycle:\n  {section}:\n    {line}\n", tmp_path)
    assert (problem.spot.line, problem.spot.column) == place
    for part in parts:
        assert part in str(problem)
    assert f"request_lifecycle.yaml:{place[0]}:{place[1]}: " in str(problem)


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("request_lifecycle:\n\tmonitoring: {}\n", (2, 1), "a tab stands where YAML takes only spaces"),
        ("request_lifecycle:\n  monitoring: {\n", (3, 1), "not valid YAML"),
        ("request_lifecycle:\n  monitoring: {}\n  monitoring: {}\n", (3, 3), "a second time, first in line 2"),
        ("monitoring: {}\n", (1, 1), "must be 'request_lifecycle'"),
        ("- 1\n", (1, 1), "must be 'request_lifecycle'"),
        ("request_lifecycle: 3\n", (1, 20), "must be keys with values"),
        ("request_lifecycle: {}\n---\n{}\n", (2, 1), "another document"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_place(text, place, part, tmp_path):
    """What is no YAML, has duplicate keys or another top has its line and column too."""
    problem = only(text, tmp_path)
    assert (problem.spot.line, problem.spot.column) == place
    assert part in str(problem)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "[" * 5000,
        "\n".join(
            ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 15))]
        ),
        "x" * (2**20 + 1),
    ],
)
def test_a_hostile_file_is_refused_in_bounded_time(text, tmp_path):
    """A text that refers to itself, nests without end, multiplies or is enormous is a problem like any other."""
    assert problems(text, tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """Bytes that are not UTF-8 are named with their position."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_bytes(b"request_lifecycle: {}\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 21"):
        config.load(path, {})


def test_everything_wrong_is_told_in_one_go_from_top_to_bottom(tmp_path):
    """Duplicates, unknown keys, types, ranges, what keys ask of each other, and variables: all in one error, sorted."""
    found = problems(
        "request_lifecycle:\n  timeout_handling:\n    min_timeout: 50\n    defualt_timeout: 3\n"
        "  monitoring:\n    log_level: 3\n    enabled: true\n    enabled: false\n",
        tmp_path,
        {"LIFECYCLE__MONITORING__LOG_FORMT": "json", "LIFECYCLE__SHUTDOWN__DRAIN_TIMEOUT": "-1"},
    )
    assert [(problem.spot.line, problem.spot.variable) for problem in found] == [
        (2, ""),
        (4, ""),
        (6, ""),
        (8, ""),
        (None, "LIFECYCLE__MONITORING__LOG_FORMT"),
        (None, "LIFECYCLE__SHUTDOWN__DRAIN_TIMEOUT"),
    ]


def test_aliases_and_merged_keys_are_read(tmp_path):
    """YAML's own ways of not repeating oneself work; the key that is written out wins."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(
        "request_lifecycle:\n  event_driven: &e\n    event_queue_size: &n 7\n  admission:\n    max_live_requests: *n\n"
    )
    assert config.load(path, {}).admission.max_live_requests == 7
    path.write_text(
        "request_lifecycle:\n  monitoring:\n    <<: {log_level: debug, log_format: text}\n    log_level: error\n"
    )
    monitoring = config.load(path, {}).monitoring
    assert (monitoring.log_level, monitoring.log_format) == ("error", "text")


def test_a_section_without_keys_has_its_defaults(tmp_path):
    """A section whose keys are all commented out is no mistake."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text("request_lifecycle:\n  monitoring:\n    # log_level: debug\n  shutdown:\n")
    assert config.load(path, {}) == config.Config()


# ---- the environment


def test_variables_come_before_the_file_and_the_file_before_defaults(tmp_path):
    """Each value has the origin that counts."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text("request_lifecycle:\n  timeout_handling:\n    default_timeout: 20\n    max_timeout: 60\n")
    loaded = config.read(path, {"LIFECYCLE__TIMEOUT_HANDLING__DEFAULT_TIMEOUT": "10"})
    assert (loaded.config.timeout_handling.default_timeout, loaded.config.timeout_handling.max_timeout) == (10, 60)
    assert str(loaded.origins["timeout_handling.default_timeout"]) == "LIFECYCLE__TIMEOUT_HANDLING__DEFAULT_TIMEOUT"
    assert str(loaded.origins["timeout_handling.max_timeout"]) == f"{path}:4"
    assert str(loaded.origins["timeout_handling.min_timeout"]) == "default"
    assert loaded.summary() == f"{path}; from the environment: LIFECYCLE__TIMEOUT_HANDLING__DEFAULT_TIMEOUT"


def test_without_a_file_the_environment_changes_the_official_defaults(tmp_path):
    """The official contract stays, apart from what a variable sets; it is said that there is no file."""
    loaded = config.read(tmp_path / "none.yaml", {"LIFECYCLE__ADMISSION__MAX_LIVE_REQUESTS": "5"})
    assert loaded.config.admission.max_live_requests == 5
    assert not loaded.config.timeout_handling.enabled
    assert str(loaded.origins["timeout_handling.enabled"]) == "official default"
    assert loaded.summary().startswith("no request_lifecycle.yaml: the official backend's contract")


EXAMPLES = {
    "event_driven.handlers": ("[{use: 'a:b'}]", [{"use": "a:b", "events": None, "settings": {}}]),
    "event_driven.recorder": ("{path: x}", None),
    "event_driven.recorder.path": ("x", "x"),
    "context_management.layer_timeouts": ("{output: 5}", {"output": 5}),
    "distributed.node_name": ("here", "here"),
    "timeout_handling.state_path": ("seen.json", "seen.json"),
    "pipeline.stages": ("[receive, execute, respond]", ["receive", "execute", "respond"]),
    "timeout_handling.first_token_timeout": ("5", 5),
    "timeout_handling.stall_timeout": ("5", 5),
    "security.control_token": ("a secret of 16 characters", "***"),
    "monitoring.tracing_endpoint": ("http://c:4317", "http://c:4317"),
    "monitoring.tracing_protocol": ("http", "http"),
    "monitoring.tracing_sample_ratio": ("0.5", 0.5),
    "admission.max_live_requests": ("5", 5),
    "admission.max_waiting_requests": ("5", 5),
    "admission.max_prompt_tokens": ("5", 5),
}


@pytest.mark.parametrize("key", keys.KEYS, ids=lambda key: key.name)
def test_every_key_can_be_set_by_a_variable(key):
    """The variable of each key is LIFECYCLE__SECTION__KEY, in any case, and its value arrives."""
    text, expected = EXAMPLES.get(key.name) or (
        str(key.default) if key.is_text else show.scalar(key.default),
        key.default,
    )
    environ = {"LIFECYCLE__EVENT_DRIVEN__RECORDER__PATH": "x"} if key.optional else {}
    environ["LIFECYCLE__" + "__".join(key.path).upper()] = text
    loaded = config.read(None, environ)
    value = loaded.config.model_dump(mode="json")
    for step in key.path:
        value = value[step]
    if expected is not None and key.name != "event_driven.recorder":
        assert value == expected
    if key.name != "event_driven.recorder" or value is None:
        assert loaded.origins[key.name].kind == "environment"


@pytest.mark.parametrize(
    ("short", "key", "value"),
    [
        ("LIFECYCLE_REDIS_URL", "redis_url", "redis://:pw@r:1/2"),
        ("LIFECYCLE_ETCD_URL", "etcd_url", "https://e:2379"),
        ("LIFECYCLE_KAFKA_SERVERS", "kafka_servers", "a:1,b:2"),
    ],
)
def test_addresses_have_short_variables(short, key, value):
    """They set the same keys; set both ways to different values is a problem, to the same it is not; empty is unset."""
    assert getattr(config.read(None, {short: value}).config.distributed, key) == value
    long = f"LIFECYCLE__DISTRIBUTED__{key.upper()}"
    assert getattr(config.read(None, {short: value, long: value}).config.distributed, key) == value
    assert config.read(None, {short: "", long: ""}).config is config.OFFICIAL
    with pytest.raises(config.InvalidConfig, match="sets the same key to another value"):
        config.read(None, {short: value, long: value + "3"})


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        (
            {"LIFECYCLE__TIMEOUT_HANDLING__DEFALT_TIMEOUT": "1"},
            ["did you mean LIFECYCLE__TIMEOUT_HANDLING__DEFAULT_TIMEOUT?"],
        ),
        ({"LIFECYCLE__X": "1"}, ["the form is LIFECYCLE__SECTION__KEY"]),
        ({"LIFECYCLE__SHUTDOWN__DRAIN_TIMEOUT": "-1"}, ["shutdown.drain_timeout: must be at least 0", 'found "-1"']),
        ({"LIFECYCLE__SHUTDOWN__DRAIN_TIMEOUT": "1e1"}, ["write 10"]),
        ({"LIFECYCLE__MONITORING__ENABLED": "ture"}, ["monitoring.enabled: must be true or false"]),
        ({"LIFECYCLE__PIPELINE__STAGES": "[a"}, ["pipeline.stages: not valid YAML"]),
        ({"LIFECYCLE__PIPELINE__STAGES": "[1]"}, ["pipeline.stages.0: must be text"]),
    ],
)
def test_a_wrong_variable_is_named(environ, parts):
    """The message names the variable where it would name a line."""
    with pytest.raises(config.InvalidConfig) as caught:
        config.read(None, environ)
    assert f"environment variable {next(iter(environ))}" in caught.value.message
    for part in parts:
        assert part in caught.value.message


def test_other_variables_are_none_of_ours():
    """Only the prefix with two underscores and the short names are read."""
    assert config.read(None, {"LIFECYCLE_URL": "x", "PATH": "y", "LIFECYCLE_": "z"}).config is config.OFFICIAL


# ---- secrets

SECRET = "hunter2"
URL = f"redis://me:{SECRET}@host:1/0?password={SECRET}&db=3"


def test_a_password_is_shown_nowhere_and_reaches_the_library():
    """Text forms of every kind leave it out, the library that connects gets it."""
    loaded = config.read(None, {"LIFECYCLE_REDIS_URL": URL})
    url = loaded.config.distributed.redis_url
    shown = [str(url), repr(url), f"{url}", "%s" % url, repr(loaded.config), loaded.config.model_dump_json()]  # noqa: UP031
    shown += [show.as_yaml(show.entries(loaded)), str([entry.as_json() for entry in show.entries(loaded)])]
    shown += [loaded.summary(), repr(loaded)]
    for text in shown:
        assert SECRET not in text
    assert "redis://***@host:1/0?password=***&db=3" in shown[0]
    assert url.reveal() == URL


@pytest.mark.parametrize("wrong", [f"http://me:{SECRET}@host", SECRET, f"redis:/{SECRET}", f"me:{SECRET}@host"])
@pytest.mark.parametrize("by", ["file", "variable"])
def test_a_wrong_address_is_refused_without_its_password(wrong, by, tmp_path):
    """Also the message about a mistake in an address keeps the secret."""
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(f"request_lifecycle: {{distributed: {{redis_url: '{wrong}'}}}}" if by == "file" else "")
    with pytest.raises(config.InvalidConfig) as caught:
        config.load(path, {} if by == "file" else {"LIFECYCLE_REDIS_URL": wrong})
    assert "redis://, rediss:// or unix://" in caught.value.message
    assert SECRET not in caught.value.message
    assert SECRET not in repr([problem.as_json() for problem in caught.value.problems])
    with pytest.raises(ValueError, match="redis_url") as raised:
        config.Distributed(redis_url=wrong)
    assert SECRET not in str(raised.value)


def test_a_text_that_is_no_address_is_hidden_whole():
    """What cannot be taken apart is not shown at all."""
    assert masked("s3cret") == "***"


# ---- views


def test_what_show_writes_as_yaml_loads_to_the_same(tmp_path):
    """The effective values as a file give the same configuration."""
    loaded = config.read(SAMPLE, {"LIFECYCLE__EVENT_DRIVEN__RECORDER__PATH": "x.jsonl"})
    path = tmp_path / "request_lifecycle.yaml"
    path.write_text(show.as_yaml(show.entries(loaded)))
    assert config.load(path, {}) == loaded.config


def test_the_schema_accepts_the_promised_file_and_refuses_what_loading_refuses():
    """Editors judge as the server does, as far as JSON Schema can say it."""
    import jsonschema

    schema = show.json_schema()
    sample = yaml.safe_load(SAMPLE.read_text())
    jsonschema.validate(sample, schema)
    for wrong in ({"monitoring": {"log_levle": "info"}}, {"event_driven": {"event_queue_size": 0}}, {"x": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"request_lifecycle": wrong}, schema)
    text = yaml.safe_dump(schema)
    assert all(key.doc for key in keys.KEYS)
    assert "Seconds that running requests get" in text


def test_a_configuration_is_a_frozen_value():
    """Equal settings are equal values, and nobody can change one."""
    assert config.Config() == config.Config.model_validate({})
    with pytest.raises(ValueError, match="frozen"):
        config.Config().monitoring.log_level = "debug"


# ---- the documentation

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_documentation_has_every_key_as_it_is():
    """The table in docs/configuration.md is the one that the sections make."""
    text = DOCS.read_text()
    made = text.partition(reference.BEGIN)[2].partition(reference.END)[0]
    assert made.strip() == reference.reference().strip(), (
        "run python -m triton_lifecycle.config.reference docs/configuration.md"
    )
    for key in keys.KEYS:
        assert f"`{'.'.join(key.path[1:])}`" in made


@pytest.mark.parametrize("name", ["smollm2", "simulated"])
def test_the_files_that_are_shipped_are_without_mistakes(name):
    """Each model of the repository that has a configuration loads."""
    config.read(SAMPLE.parents[1] / name / "request_lifecycle.yaml", {})


def test_the_documented_messages_are_real(tmp_path):
    """The example in the documentation is what such a file gives."""
    found = problems(
        "request_lifecycle:\n\n  monitoring:\n    log_level: off\n\n\n\n  timeout_handling:\n    defualt_timeout: 3\n",
        tmp_path,
        {"LIFECYCLE__SHUTDOWN__DRAIN_TIMEOUT": "-1"},
    )
    text = DOCS.read_text()
    for problem in found:
        assert str(problem).replace(f"{tmp_path}/", "") in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, ["both.0: must be text or keys with values"]),
        ({"use": 3}, ["both.0.use: must be text"]),
        ({"use": "a", "evnts": []}, ["both.0.evnts: unknown key"]),
        ({}, ["both.0.use: must be given"]),
    ],
)
def test_a_value_of_several_kinds_makes_one_problem(value, said):
    """Where text or a section may stand, a mistake is told once and without the words of the library."""

    class Mixed(config.Section):
        both: list[str | config.Handler]

    with pytest.raises(ValidationError) as caught:
        Mixed.model_validate({"both": [value]})
    assert [f"{found.path}: {found.rule}" for found in problems_of(caught.value, {})] == said
