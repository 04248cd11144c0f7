"""Makes the dashboards beside this file: ``python deploy/grafana/make.py``. Import the JSON files into Grafana.

Each asks for a Prometheus data source when it is imported, and has a variable ``model``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 8, 8
PER_ROW = 24 // WIDTH
WHO = 'model=~"$model",instance=~"$instance"'

Query = tuple[str, str]
"""An expression, in which ``WHO`` stands for the chosen models, and its legend."""
Panel = tuple[str, str, list[Query]]
"""Title, unit, queries."""


def rate(name: str, by: str = "model", extra: str = "") -> str:
    """Return the rate of a counter, summed."""
    return f"sum by ({by}) (rate({name}{{WHO{extra}}}[$__rate_interval]))"


def quantile(q: float, name: str, by: str = "model") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({name}_bucket{{WHO}}[$__rate_interval])))"


def quantiles(name: str) -> list[Query]:
    """Return p50, p90 and p99."""
    return [(quantile(q, name), f"{{{{model}}}} p{q * 100:g}") for q in (0.5, 0.9, 0.99)]


def mean(name: str) -> str:
    """Return the mean of a histogram's observations."""
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


LEGEND = "{{model}}"
FAILED = rate("lifecycle_requests_ended_total", extra=',outcome=~"failed|timed_out"')
NO_ROOM = rate("lifecycle_refusals_total", extra=',limit=~"queue_full|token_budget|deadline_unreachable"')
BAD_SHARE = f"({FAILED} + {NO_ROOM}) / {rate('lifecycle_requests_received_total')}"
DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "overview": (
        "Lifecycle: overview",
        [
            ("Up", "bool", [('up{job="triton",instance=~"$instance"}', "{{instance}}")]),
            ("Requests by outcome", "reqps", [(rate("lifecycle_requests_ended_total", "outcome"), "{{outcome}}")]),
            ("Not answered", "percentunit", [(BAD_SHARE, LEGEND)]),
            ("Live", "short", [("sum by (model) (lifecycle_live_requests{WHO})", LEGEND)]),
            ("Tokens", "short", [(rate("lifecycle_engine_output_tokens_total"), LEGEND)]),
            ("Time to the first token", "s", quantiles("lifecycle_first_token_seconds")),
            ("Refusals by limit", "reqps", [(rate("lifecycle_refusals_total", "limit"), "{{limit}}")]),
            (
                "Admission used",
                "percentunit",
                [
                    (
                        "max by (model, limit) (lifecycle_admission_used{WHO} / lifecycle_admission_limit{WHO})",
                        "{{model}} {{limit}}",
                    )
                ],
            ),
            ("Alerts", "short", [('ALERTS{alertname=~"Lifecycle.+"}', "{{alertname}} {{model}} {{alertstate}}")]),
        ],
    ),
    "request": (
        "Lifecycle: where a request's time goes",
        [
            ("Duration", "s", quantiles("gen_ai_server_request_duration_seconds")),
            ("Time in stages", "s", [(rate("lifecycle_stage_time_seconds_total", "stage"), "{{stage}}")]),
            ("Stages, p99", "s", [(quantile(0.99, "lifecycle_stage_duration_seconds", "stage"), "{{stage}}")]),
            ("Queue", "s", quantiles("lifecycle_queue_seconds")),
            ("Time to the first token", "s", quantiles("gen_ai_server_time_to_first_token_seconds")),
            ("Between tokens", "s", quantiles("lifecycle_inter_token_seconds")),
            ("Timeouts by limit", "reqps", [(rate("lifecycle_timeouts_total", "limit"), "{{limit}}")]),
            ("Cancels", "reqps", [(rate("lifecycle_cancels_total", "cause"), "{{cause}}")]),
            ("Cancel to abort", "s", [(mean("lifecycle_cancel_to_abort_seconds"), LEGEND)]),
            ("Wasted tokens", "short", [(rate("lifecycle_wasted_tokens_total", "outcome"), "{{outcome}}")]),
            ("Deadline moves", "short", [(rate("lifecycle_deadline_moves_total", "cause"), "{{cause}}")]),
            ("Failures by reason", "reqps", [(rate("lifecycle_failures_total", "reason"), "{{reason}}")]),
        ],
    ),
    "engine": (
        "Lifecycle: engine",
        [
            ("Ready", "bool", [("min by (model, model_instance) (lifecycle_engine_up{WHO})", "{{model_instance}}")]),
            (
                "Sequences",
                "short",
                [
                    ("sum by (model) (vllm:num_requests_running{WHO})", "{{model}} running"),
                    ("sum by (model) (vllm:num_requests_waiting{WHO})", "{{model}} waiting"),
                ],
            ),
            ("KV cache", "percentunit", [("max by (model) (vllm:kv_cache_usage_perc{WHO})", LEGEND)]),
            ("Tokens", "short", [(rate("lifecycle_engine_output_tokens_total"), LEGEND)]),
            ("Preemptions", "short", [(rate("vllm:num_preemptions_total"), LEGEND)]),
            (
                "Prefix cache hits",
                "percentunit",
                [(f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", LEGEND)],
            ),
            ("Silence", "s", [("max by (model) (lifecycle_engine_silence_seconds{WHO})", LEGEND)]),
            ("Restarts", "short", [("sum by (model) (lifecycle_engine_restarts_total{WHO})", LEGEND)]),
            (
                "Attempts that failed, requests that recovered",
                "reqps",
                [
                    (rate("lifecycle_retries_total", "reason"), "{{reason}}"),
                    (rate("lifecycle_recovered_requests_total"), "{{model}} recovered"),
                ],
            ),
        ],
    ),
    "prediction": (
        "Lifecycle: prediction",
        [
            (
                "Error",
                "percentunit",
                [("max by (model, target) (lifecycle_prediction_error_ratio{WHO})", "{{model}} {{target}}")],
            ),
            (
                "Within the 90 % interval",
                "percentunit",
                [("min by (model, target) (lifecycle_prediction_coverage_ratio{WHO})", "{{model}} {{target}}")],
            ),
            ("Learned from", "reqps", [(rate("lifecycle_prediction_observations_total"), LEGEND)]),
            (
                "Predicted and actual: whole request",
                "s",
                [
                    ('max by (model) (lifecycle_prediction_predicted_seconds{WHO,target="total"})', "predicted"),
                    ('max by (model) (lifecycle_prediction_actual_seconds{WHO,target="total"})', "actual"),
                ],
            ),
            ("Slower than predicted for 19 of 20", "reqps", [(rate("lifecycle_slow_requests_total"), LEGEND)]),
            (
                "Refused: deadline out of reach",
                "reqps",
                [(rate("lifecycle_refusals_total", extra=',limit="deadline_unreachable"'), LEGEND)],
            ),
        ],
    ),
    "leaks": (
        "Lifecycle: leaks and events",
        [
            ("Leaked", "short", [("lifecycle_leaked{WHO} > 0 or sum(lifecycle_leaked{WHO})", "{{model}} {{account}}")]),
            ("Held for requests", "short", [('lifecycle_held{WHO,account!~"shm_bytes|descriptors"}', "{{account}}")]),
            ("Descriptors", "short", [('lifecycle_held{WHO,account="descriptors"}', "{{model_instance}}")]),
            ("Shared memory", "bytes", [('lifecycle_held{WHO,account="shm_bytes"}', "{{model_instance}}")]),
            ("Events", "short", [(rate("lifecycle_bus_published_total", "event"), "{{event}}")]),
            (
                "Handlers",
                "short",
                [(rate("lifecycle_bus_handler_events_total", "handler, outcome"), "{{handler}} {{outcome}}")],
            ),
            (
                "Events that wait",
                "short",
                [
                    ("sum by (model) (lifecycle_bus_backlog{WHO})", "{{model}} bus"),
                    ("sum by (model, sink) (lifecycle_sink_backlog{WHO})", "{{model}} {{sink}}"),
                ],
            ),
            ("Sinks", "short", [(rate("lifecycle_sink_events_total", "sink, outcome"), "{{sink}} {{outcome}}")]),
            (
                "Metrics: time spent, observations left out",
                "short",
                [
                    (rate("lifecycle_metrics_write_seconds_total"), "{{model}} s/s"),
                    (rate("lifecycle_metrics_sampled_out_total"), "{{model}} left out"),
                ],
            ),
        ],
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return one in Grafana's form."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    return {
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "uid": f"lifecycle-{name}",
        "title": title,
        "tags": ["triton-lifecycle"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable("model", source), _variable("instance", source)]},
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels)],
    }


def _variable(label: str, source: dict[str, str]) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": source,
        "query": f"label_values(lifecycle_requests_received_total, {label})",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    title, unit, queries = panel
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": number % PER_ROW * WIDTH, "y": number // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + place), "datasource": source, "expr": expr.replace("WHO", WHO), "legendFormat": legend}
            for place, (expr, legend) in enumerate(queries)
        ],
    }


def text(name: str) -> str:
    """Return a dashboard's file."""
    return json.dumps(dashboard(name), indent=2) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text(each), encoding="utf-8")
