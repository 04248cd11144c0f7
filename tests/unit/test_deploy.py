"""What `deploy/` holds, judged by the programs and schemas that it is for."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from triton_lifecycle.config import environment
from triton_lifecycle.launcher.balancer import validate
from triton_lifecycle.launcher.envoy import Front, Policy, Replica, document

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS = [(file.name, found) for file in KUBERNETES for found in yaml.safe_load_all(file.read_text())]
NAMES = [f"{name}-{found['kind']}" for name, found in OBJECTS]
COMPOSE = DEPLOY / "compose" / "compose.yaml"
MADE = document([Replica("triton")], Front("0.0.0.0"), Policy(strategy="least_request", model="llama"))


def kind(wanted, name):
    [found] = [made for _, made in OBJECTS if (made["kind"], made["metadata"]["name"]) == (wanted, name)]
    return found


def container(name):
    [found] = kind("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return found


def composed():
    """Return the file as it is read when no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())


def test_envoys_file_is_the_printed_one():
    """The file is what its first line's command prints, and Envoy takes it; so is the copy for Kubernetes."""
    file = DEPLOY / "envoy" / "envoy.yaml"
    validate(file)
    assert yaml.safe_load(file.read_text()) == MADE
    assert kind("ConfigMap", "triton-envoy")["data"]["envoy.yaml"] == file.read_text()


@pytest.mark.parametrize("made", [made for _, made in OBJECTS], ids=NAMES)
def test_kubernetes_takes_each_object(made):
    """By Kubernetes' own schemas, in the strict form that knows no further fields."""
    kubernetes_validate.validate(made, "1.34", strict=True)


def test_the_schemas_see_a_mistake():
    """A field that there is not, or a value of another type, is refused: the check checks."""
    for wrong in ({"spec": {"replica": 2}}, {"spec": {"minReplicas": "two"}}):
        made = kind("HorizontalPodAutoscaler", "triton")
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(made | {"spec": made["spec"] | wrong["spec"]}, "1.34", strict=True)


def test_what_kubernetes_refers_to_is_there():
    """Selectors find their pods, the autoscaler its deployment and its figures."""
    pods = [
        made["spec"]["template"]["metadata"]["labels"].items() for _, made in OBJECTS if made["kind"] == "Deployment"
    ]
    for _, made in OBJECTS:
        selector = made.get("spec", {}).get("selector") or {}
        wanted = selector.get("matchLabels", selector).items()
        assert not wanted or any(wanted <= labels for labels in pods), made["metadata"]
    scaler = kind("HorizontalPodAutoscaler", "triton")["spec"]
    assert kind("Deployment", scaler["scaleTargetRef"]["name"])
    rules = yaml.safe_load(kind("ConfigMap", "lifecycle-adapter-rules")["data"]["config.yaml"])["rules"]
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} == {rule["name"]["as"] for rule in rules}
    assert kind("Secret", "lifecycle-redis")["stringData"]["url"]
    assert container("triton-envoy")["volumeMounts"][0]["mountPath"] == "/etc/envoy"


def test_a_pod_that_goes_lets_its_requests_finish():
    """Withdrawn first, then stopped, and the time that is allowed is enough for both."""
    spec = kind("Deployment", "triton")["spec"]["template"]["spec"]
    served = container("triton")
    exit_timeout = int(re.search(r"--exit-timeout-secs=(\d+)", (DEPLOY.parent / "Dockerfile.triton").read_text())[1])
    assert (
        spec["terminationGracePeriodSeconds"] >= served["lifecycle"]["preStop"]["sleep"]["seconds"] + exit_timeout + 15
    )
    assert {mount["mountPath"] for mount in served["volumeMounts"]} >= {"/dev/shm"}
    assert (
        served["readinessProbe"]["httpGet"]["path"]
        == MADE["static_resources"]["clusters"][0]["health_checks"][0]["http_health_check"]["path"]
    )
    assert kind("PodDisruptionBudget", "triton")["spec"]["maxUnavailable"] == 1


def test_compose_is_a_compose_file():
    """The specification's own parser takes it and sees each service; a mistake it refuses."""
    text = composed()
    assert set(PyCompose.from_yaml(text).service_names()) == {
        *("triton", "envoy", "redis", "prometheus", "grafana", "traces"),
    }
    with pytest.raises(ValueError, match="imagine"):
        PyCompose.from_yaml(text.replace("    image: redis:7.4-alpine", "    imagine: redis:7.4-alpine"))


def test_what_compose_mounts_and_names_is_there():
    """Files of this checkout, services by their names, ports on this machine only, a pinned version of each image."""
    services = yaml.safe_load(composed())["services"]
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.rpartition(":/")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service.get("depends_on", ())) <= services.keys()
        assert re.search(r":v?\d+\.\d+|^triton-lifecycle:", service["image"]), service["image"]
    prometheus = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["dns_sd_configs"][0]["names"] == ["triton"]
    assert int(services["triton"]["stop_grace_period"].removesuffix("s")) >= 45


def test_every_setting_is_one_that_there_is():
    """The variables of compose and Kubernetes are read as settings, without a complaint."""
    service = yaml.safe_load(composed())["services"]["triton"]["environment"]
    pod = {entry["name"]: entry.get("value", "x://127.0.0.1") for entry in container("triton")["env"]}
    for variables in (service, pod):
        found, problems = environment.settings(variables)
        assert problems == []
        assert len(found) == sum(name.startswith("LIFECYCLE") for name in variables)
