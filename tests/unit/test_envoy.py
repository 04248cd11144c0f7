"""Envoy's configuration, judged by the real Envoy, and what the configuration of the models makes of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import yaml

from triton_lifecycle import config
from triton_lifecycle.launcher import LauncherError
from triton_lifecycle.launcher.balancer import Balancer, validate
from triton_lifecycle.launcher.envoy import STRATEGIES, Front, Policy, Replica, as_yaml, document
from triton_lifecycle.launcher.ports import Ports, PortTaken, free_ports
from triton_lifecycle.launcher.replicas import make_fleet, settings_of
from triton_lifecycle_client.server_cli import _fleet, _replicas

TWO = [Replica("127.0.0.1", 20000, 20001), Replica("127.0.0.1", 20002, 20003)]


def repository(folder, **distributed):
    model = folder / "some"
    model.mkdir()
    (model / config.FILE_NAME).write_text(yaml.safe_dump({"request_lifecycle": {"distributed": distributed}}))
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("host", ["127.0.0.1", "triton.example"])
def test_envoy_takes_each_strategy(strategy, host, tmp_path):
    """The real binary finds nothing wrong, by address and by name, and warns of nothing that is going to be removed."""
    file = tmp_path / "envoy.yaml"
    file.write_text(as_yaml([Replica(host)], policy=Policy(strategy=strategy, model="m")))
    validate(file)
    balancing = yaml.safe_load(file.read_text())["static_resources"]["clusters"][0]["load_balancing_policy"]
    assert balancing["policies"][0]["typed_extension_config"]["name"].endswith(f".{strategy}")


def test_envoy_refuses_what_is_wrong(tmp_path):
    """A configuration that Envoy does not take is refused in its words, and nothing is started."""
    file = tmp_path / "envoy.yaml"
    file.write_text(as_yaml(TWO).replace("round_robin", "round_robbin"))
    with pytest.raises(LauncherError, match="round_robbin"):
        validate(file)
    http, grpc, admin = free_ports("127.0.0.1", 3)
    balancer = Balancer(TWO, Front("127.0.0.1", http, grpc, admin), Policy(check_interval=-1.0), state=tmp_path)
    with pytest.raises(LauncherError, match="Expected positive duration"):
        balancer.start()
    assert not balancer.running
    assert list((tmp_path / "envoy").iterdir()) == []


@pytest.mark.parametrize("which", ["http", "grpc", "admin", "metrics"])
def test_a_taken_port_is_told_before_any_replica_starts(which, tmp_path):
    """Of Envoy or of a replica: the message names it and who holds it, and nothing was started."""
    http, grpc, admin, metrics = free_ports("127.0.0.1", 4)
    numbers = {"http": http, "grpc": grpc, "admin": admin, "metrics": metrics}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", numbers[which]))
        taken.listen()
        front = Front("127.0.0.1", http, grpc, admin)
        [other] = free_ports("127.0.0.1", 1, besides=numbers.values())
        fleet = make_fleet(repository(tmp_path), 2, front=front, metrics_ports=[other, metrics], state=tmp_path)
        with pytest.raises(PortTaken, match=rf"port {numbers[which]} \({which}\).*\(pid {os.getpid()}\)"):
            fleet.start()
    assert not any(server.processes() for server in fleet.servers)
    assert fleet.balancer.pid is None


def test_strategies_are_those_of_the_configuration():
    """The key of the configuration and the module know the same strategies."""
    field = config.Distributed.model_json_schema()["properties"]["load_balancing_strategy"]
    assert tuple(field["enum"]) == STRATEGIES


def test_nothing_to_balance_is_a_fault_of_the_caller():
    """Without replicas, or with an unknown strategy, there is no document."""
    with pytest.raises(ValueError, match="one replica"):
        document([], Front(), Policy())
    with pytest.raises(ValueError, match="round_robin"):
        document(TWO, Front(), Policy(strategy="fastest"))


def test_readiness_is_that_of_the_model():
    """Both clusters ask the model itself, over HTTP, at the replica's HTTP port."""
    clusters = document(TWO, Front(), Policy(model="m"))["static_resources"]["clusters"]
    assert {cluster["health_checks"][0]["http_health_check"]["path"] for cluster in clusters} == {"/v2/models/m/ready"}
    [grpc] = [cluster for cluster in clusters if cluster["name"] == "grpc"]
    asked = [
        at["endpoint"]["health_check_config"]["port_value"]
        for at in grpc["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert asked == [20000, 20002]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_strategy_is_the_configurations(strategy, tmp_path):
    """`serve` and `envoy` spread requests as the model's configuration says."""
    folder = repository(tmp_path, load_balancing_strategy=strategy)
    fleet = _fleet(folder, ["some"], 2, "127.0.0.1", Ports.free(), exit_timeout=1.0, restarts=0)
    assert fleet.balancer.policy == Policy(strategy=strategy, model="some")
    command = [sys.executable, "-m", "triton_lifecycle_client", "envoy", "--replica", "a:1:2", "--model", "some"]
    said = subprocess.run(
        [*command, "--model-repository", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ,
    )
    assert yaml.safe_load(said.stdout) == document(
        [Replica("a", 1, 2)], Front(), Policy(strategy=strategy, model="some")
    )


@pytest.mark.parametrize(("enabled", "count"), [(True, 3), (False, 1)])
def test_so_many_replicas_are_started_as_the_configuration_says(enabled, count, tmp_path):
    """`num_nodes` counts where `distributed` is switched on; each replica has its own ports and name."""
    folder = repository(tmp_path, enabled=enabled, num_nodes=3)
    assert _replicas(folder, ["some"]) == count
    assert settings_of(folder, None).num_nodes == 3
    fleet = _fleet(folder, ["some"], 3, "127.0.0.1", Ports.free(), exit_timeout=1.0, restarts=0)
    ports = [port for server in fleet.servers for port in (server.ports.http, server.ports.grpc, server.ports.metrics)]
    front = fleet.balancer.front
    assert len({*ports, front.http, front.grpc, front.admin}) == 12
    assert len({server.env["LIFECYCLE__DISTRIBUTED__NODE_NAME"] for server in fleet.servers}) == 3
    assert [(replica.http, replica.grpc) for replica in fleet.balancer.replicas] == [
        (server.ports.http, server.ports.grpc) for server in fleet.servers
    ]
