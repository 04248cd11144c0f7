"""The configuration of Envoy in front of replicas: typed data to one document. Knows no process.

One listener for HTTP and one for gRPC, each with a cluster of the same replicas. A replica gets requests while its
model says that it is ready, and is left out for a while when it refuses or breaks connections. A request is sent to
another one only where the first has certainly done nothing: there was no connection, or it said 503 before any answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec
import yaml

Strategy = Literal["round_robin", "least_request", "random", "ring_hash"]
STRATEGIES: Final[tuple[str, ...]] = get_args(Strategy)
AFFINITY_HEADER: Final = "x-lifecycle-affinity"
"""Under ``ring_hash``: requests with the same value go to the same replica, which has their prefix in its cache."""
CLUSTERS: Final = ("http", "grpc")

_TYPES: Final = "type.googleapis.com/envoy.extensions"
_LB_POLICIES: Final = {"round_robin": "RoundRobin", "least_request": "LeastRequest", "random": "Random"}
_REFUSALS: Final = ("queue_full", "token_budget", "draining", "engine_restarting")
"""Slugs with which a replica says that it has done nothing and another one may be asked."""


class Replica(msgspec.Struct, frozen=True):
    """Where one tritonserver listens. A host name may stand for several; each address of it is a replica then."""

    host: str
    http: int = 8000
    grpc: int = 8001


class Front(msgspec.Struct, frozen=True):
    """Where Envoy listens; its admin interface only on the loopback."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    admin: int = 9901


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are spread, and when a replica is left out. Times in seconds.

    Attributes:
        strategy: as ``distributed.load_balancing_strategy``.
        model: the one whose readiness counts; ``None`` asks for the server's, which is that of all its models.
        longest: the longest that a stream may be silent, such as one that waits in the queue.
        check_interval: between two questions whether a replica is ready.
        check_timeout: for the answer to one.
        unready_after: questions in a row without a yes until a replica gets nothing more.
        eject_after: refusals or broken connections in a row until a replica is left out.
        eject_for: how long it is left out the first time; longer each time again, ten times as long at most. Less when
            it says before that it is ready: by Envoy's rule a check that passes ends it.
        most_ejected: percent of the replicas that may be left out for refusals, so that an overload of all leaves some.
        retries: further replicas that a request is offered to.
        max_requests: requests that may be under way or wait for a connection, for each of the two protocols.
        max_body_bytes: of a request; what is larger is refused with 413.

    """

    strategy: Strategy = "round_robin"
    model: str | None = None
    longest: float = 3600.0
    check_interval: float = 1.0
    check_timeout: float = 2.0
    unready_after: int = 2
    eject_after: int = 5
    eject_for: float = 2.0
    most_ejected: int = 50
    retries: int = 2
    max_requests: int = 20_000
    max_body_bytes: int = 64 * 2**20


def as_yaml(replicas: Sequence[Replica], front: Front | None = None, policy: Policy | None = None) -> str:
    """Return the configuration as Envoy reads it."""
    made: str = yaml.safe_dump(document(replicas, front or Front(), policy or Policy()), sort_keys=False, width=120)
    return made


def document(replicas: Sequence[Replica], front: Front, policy: Policy) -> dict[str, Any]:
    """Return Envoy's bootstrap document.

    Raises:
        ValueError: there is no replica, or the strategy is unknown.

    """
    if not replicas:
        raise ValueError("a load balancer needs one replica at least")
    if policy.strategy not in STRATEGIES:
        raise ValueError(f"the strategy must be one of {', '.join(STRATEGIES)}, got {policy.strategy!r}")
    return {
        "admin": {"address": _address("127.0.0.1", front.admin)},
        "static_resources": {
            "listeners": [_listener(kind, front, policy) for kind in CLUSTERS],
            "clusters": [_cluster(kind, replicas, policy) for kind in CLUSTERS],
        },
        # Both directions hold at most so much of each stream: a slow reader slows its replica down, and nothing grows.
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": _typed(
                        "resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                        max_active_downstream_connections=policy.max_requests,
                    ),
                }
            ]
        },
    }


def _listener(kind: str, front: Front, policy: Policy) -> dict[str, Any]:
    manager = _typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=kind,
        codec_type="HTTP2" if kind == "grpc" else "AUTO",
        # What Triton says about itself stays: clients look at it.
        server_header_transformation="PASS_THROUGH",
        use_remote_address=True,
        stream_idle_timeout=_seconds(policy.longest),
        common_http_protocol_options={"idle_timeout": "3600s", "headers_with_underscores_action": "ALLOW"},
        # At the end: what runs is finished, and callers are told to connect anew.
        drain_timeout="1s",
        route_config={"name": kind, "virtual_hosts": [_virtual_host(kind, policy)]},
        http_filters=[
            {"name": "envoy.filters.http.router", "typed_config": _typed("filters.http.router.v3.Router")},
        ],
        local_reply_config=_own_replies(),
    )
    return {
        "name": kind,
        "address": _address(front.host, front.grpc if kind == "grpc" else front.http),
        # With it the kernel would let two load balancers listen on one port, and deal connections out between them.
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": 2**20,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _virtual_host(kind: str, policy: Policy) -> dict[str, Any]:
    route: dict[str, Any] = {"cluster": kind, "timeout": "0s", "retry_policy": _retries(kind, policy)}
    if policy.strategy == "ring_hash":
        route["hash_policy"] = [
            {"header": {"header_name": AFFINITY_HEADER}, "terminal": True},
            {"connection_properties": {"source_ip": True}},
        ]
    return {
        "name": kind,
        "domains": ["*"],
        # So much of a request is kept until its answer begins, for another replica.
        "request_body_buffer_limit": policy.max_body_bytes,
        "routes": [{"match": {"prefix": "/"}, "route": route}],
    }


def _retries(kind: str, policy: Policy) -> dict[str, Any]:
    # `refused-stream`: HTTP/2's own word for "not begun". `unavailable`: looked at before any answer only, and Triton
    # says it while it stops.
    conditions = ["connect-failure", "refused-stream"]
    conditions += ["unavailable"] if kind == "grpc" else ["retriable-status-codes"]
    return {
        "retry_on": ",".join(conditions),
        "retriable_status_codes": [503],
        "num_retries": policy.retries,
        "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": _typed("retry.host.previous_hosts.v3.PreviousHostsPredicate"),
            }
        ],
        "host_selection_retry_max_attempts": 5,
    }


def _cluster(kind: str, replicas: Sequence[Replica], policy: Policy) -> dict[str, Any]:
    return {
        "name": kind,
        **_discovery(replicas),
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": 2**20,
        "load_balancing_policy": {"policies": [{"typed_extension_config": _balancing(policy.strategy)}]},
        "common_lb_config": {
            # With most replicas gone, those that are ready still get everything, and the dead nothing.
            "healthy_panic_threshold": {"value": 0.0},
            # Envoy's threads hear at once of a replica that is ready or not, and not up to a second later.
            "update_merge_window": "0s",
        },
        "health_checks": [_health_check(policy)],
        "outlier_detection": _ejection(policy),
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": policy.max_requests,
                    "max_pending_requests": policy.max_requests,
                    "max_requests": policy.max_requests,
                    "retry_budget": {"budget_percent": {"value": 25.0}, "min_retry_concurrency": 50},
                }
            ]
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _protocol(kind)},
        "load_assignment": {
            "cluster_name": kind,
            "endpoints": [{"lb_endpoints": [_endpoint(kind, replica) for replica in replicas]}],
        },
    }


def _discovery(replicas: Sequence[Replica]) -> dict[str, Any]:
    if all(_is_address(replica.host) for replica in replicas):
        return {"type": "STATIC"}
    # By name, asked for anew each second: replicas that come and go behind one name are found and let go.
    dns = _typed("clusters.dns.v3.DnsCluster", dns_refresh_rate="1s", respect_dns_ttl=False)
    return {
        "cluster_type": {"name": "envoy.cluster.dns", "typed_config": dns},
        # One whose address is withdrawn is about to go, though it still answers: it gets nothing new at once.
        "ignore_health_on_host_removal": True,
    }


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _balancing(strategy: str) -> dict[str, Any]:
    if strategy == "ring_hash":
        return {
            "name": "envoy.load_balancing_policies.ring_hash",
            "typed_config": _typed("load_balancing_policies.ring_hash.v3.RingHash", minimum_ring_size=1024),
        }
    more: dict[str, Any] = {}
    if strategy == "least_request":
        more["choice_count"] = 3
    return {
        "name": f"envoy.load_balancing_policies.{strategy}",
        "typed_config": _typed(f"load_balancing_policies.{strategy}.v3.{_LB_POLICIES[strategy]}", **more),
    }


def readiness(model: str | None) -> str:
    """Return the path at which a tritonserver says whether a model, or each of its models, is ready."""
    return "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"


def _health_check(policy: Policy) -> dict[str, Any]:
    return {
        "timeout": _seconds(policy.check_timeout),
        "interval": _seconds(policy.check_interval),
        "unhealthy_interval": _seconds(policy.check_interval / 2),
        # Envoy's own default asks a cluster without traffic once a minute.
        "no_traffic_interval": _seconds(policy.check_interval),
        "unhealthy_threshold": policy.unready_after,
        "healthy_threshold": 1,
        # An open connection would keep a tritonserver that stops from ending in order.
        "reuse_connection": False,
        "http_health_check": {"path": readiness(policy.model), "codec_client_type": "HTTP1"},
    }


def _ejection(policy: Policy) -> dict[str, Any]:
    return {
        "split_external_local_origin_errors": True,
        "consecutive_gateway_failure": policy.eject_after,
        "enforcing_consecutive_gateway_failure": 100,
        # A 500 is the fault of one request more often than that of its replica.
        "enforcing_consecutive_5xx": 0,
        "consecutive_local_origin_failure": policy.eject_after,
        "enforcing_consecutive_local_origin_failure": 100,
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
        "interval": "0.5s",
        "base_ejection_time": _seconds(policy.eject_for),
        "max_ejection_time": _seconds(policy.eject_for * 10),
        "max_ejection_percent": policy.most_ejected,
    }


def _protocol(kind: str) -> dict[str, Any]:
    # A connection without work is closed soon: Triton ends in order only when none is left, and one that the other side
    # is just closing would cost a request.
    common = {"idle_timeout": "1s"}
    if kind == "grpc":
        return _typed(
            "upstreams.http.v3.HttpProtocolOptions",
            common_http_protocol_options=common,
            explicit_http_config={"http2_protocol_options": {"max_concurrent_streams": 1000}},
        )
    return _typed(
        "upstreams.http.v3.HttpProtocolOptions",
        common_http_protocol_options=common,
        explicit_http_config={"http_protocol_options": {}},
        http_filters=[
            {
                "name": "envoy.filters.http.lua",
                "typed_config": _typed(
                    "filters.http.lua.v3.Lua", default_source_code={"inline_string": _REFUSAL_STATUS}
                ),
            },
            {
                "name": "envoy.filters.http.upstream_codec",
                "typed_config": _typed("filters.http.upstream_codec.v3.UpstreamCodec"),
            },
        ],
    )


# Triton's generate routes say 400 to every error of a backend (up to 24.10 and perhaps later): a refusal looks like the
# caller's fault there. How its text begins says what it is (further on stand a caller's own words); with its right
# status another replica is tried, and the one that goes on refusing is left out.
_REFUSAL_STATUS: Final = (
    """\
local refusals = {"""
    + ", ".join(f"{slug} = true" for slug in _REFUSALS)
    + """}
function envoy_on_response(handle)
  local headers = handle:headers()
  local length = tonumber(headers:get("content-length"))
  if headers:get(":status") ~= "400" or length == nil or length > 4096 then
    return
  end
  local body = handle:body()
  local text = body and body:length() > 0 and body:getBytes(0, body:length()) or ""
  if refusals[string.match(text, '^%s*{%s*"error"%s*:%s*"([a-z_]+): ')] then
    handle:headers():replace(":status", "503")
  end
end
"""
)


def _own_replies() -> dict[str, Any]:
    """Let Envoy's own errors look like a replica's: slug, message, and a hint when to come back."""

    def mapper(flags: list[str], said: str) -> dict[str, Any]:
        return {
            "filter": {"response_flag_filter": {"flags": flags}},
            "body": {"inline_string": said},
            "body_format_override": {"json_format": {"error": "%LOCAL_REPLY_BODY%"}},
        }

    return {
        "mappers": [
            mapper(["UH"], "draining: no replica takes requests at this moment; retry after 1.0 s"),
            mapper(["UO"], "queue_full: the load balancer has as many requests as it may; retry after 1.0 s"),
        ]
    }


def _endpoint(kind: str, replica: Replica) -> dict[str, Any]:
    endpoint: dict[str, Any] = {"address": _address(replica.host, replica.grpc if kind == "grpc" else replica.http)}
    if kind == "grpc":
        # Readiness is asked over HTTP for both: Triton's gRPC health speaks of the server, not of a model.
        endpoint["health_check_config"] = {"port_value": replica.http}
    return {"endpoint": endpoint}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _seconds(value: float) -> str:
    return f"{value:g}s"


def _typed(kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - a document's values
    made: Mapping[str, Any] = {"@type": f"{_TYPES}.{kind}", **fields}
    return dict(made)
