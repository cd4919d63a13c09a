"""Compose, Kubernetes and systemd: their own schemas, and that they agree with the server."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.deploy.files import (
    COMPOSE,
    COMPOSE_CUDA,
    KUBERNETES,
    ROOT,
    UNIT,
    compose,
    manifest,
    parse_serve,
    pod,
    server_container,
    unit,
    unit_command,
)
from tests.deploy.served import plain_server
from vllm_omni import envs

__all__ = ["plain_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

MANIFESTS = ("deployment", "service", "model-volume")


def needs(module: str) -> None:
    """Skip where a package of tests/deploy/requirements.txt is not installed."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (tests/deploy/requirements.txt)")


def run(*command: object) -> None:
    """A command that must succeed; its text is shown if not."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", [COMPOSE, COMPOSE_CUDA], ids=lambda file: file.name)
def test_compose_files_obey_their_schema(file):
    needs("check_jsonschema")
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_obey_their_schema(name):
    needs("kubernetes_validate")
    file = KUBERNETES / f"{name}.yaml"
    run(sys.executable, "-m", "kubernetes_validate", "--strict", "--no-warn", file)


def test_systemd_understands_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The program and the user are those of an installed machine.
    (program,) = unit()["ExecStart"]
    text = UNIT.read_text().replace(program.split()[0], sys.executable)
    text = text.replace("User=vllm-omni", "User=daemon").replace("Group=vllm-omni", "Group=daemon")
    file = tmp_path / UNIT.name
    file.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", file], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_mounts_what_there_is():
    services = compose(COMPOSE)
    named = set(services["volumes"])
    for name, service in services["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            exists = source in named or (source.startswith("./") and (ROOT / source).exists())
            assert exists, f"{name}: {source}"


def test_compose_listens_on_this_machine_only():
    services = compose(COMPOSE)["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_compose_builds_the_device_that_it_is_told():
    for device in ("cpu", "cuda"):
        services = compose(COMPOSE, DEVICE=device)["services"]
        for name in ("checkpoint", "server"):
            assert services[name]["image"] == f"vllm-omni-lingbot:{device}"
            assert services[name]["build"]["args"] == {"DEVICE": device}
            assert (ROOT / services[name]["build"]["dockerfile"]).is_file()


def test_gpus_come_on_top_of_the_same_services():
    cpu = compose(COMPOSE)
    both = compose(COMPOSE, COMPOSE_CUDA, MODEL_DIR="/srv/lingbot", GPUS="4")
    assert set(both["services"]) == set(cpu["services"])
    server = both["services"]["server"]
    (devices,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": 4, "capabilities": ["gpu"]}
    assert f"/srv/lingbot:{parse_serve(server['command']).model}:ro" in server["volumes"]
    with pytest.raises(AssertionError, match="MODEL_DIR"):
        compose(COMPOSE, COMPOSE_CUDA)


def test_an_empty_key_of_compose_is_no_key(monkeypatch):
    key = compose(COMPOSE)["services"]["server"]["environment"]["VLLM_API_KEY"]
    monkeypatch.setenv("VLLM_API_KEY", key or "")
    assert envs.api_key() is None


def test_every_supervisor_waits_longer_than_the_server_takes_to_end():
    service = compose(COMPOSE)["services"]["server"]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > parse_serve(service["command"]).shutdown_timeout_s
    wait_s = float(server_container()["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace_s = pod()["terminationGracePeriodSeconds"]
    assert grace_s > wait_s + parse_serve(server_container()["args"]).shutdown_timeout_s
    (stop_s,) = unit()["TimeoutStopSec"]
    assert float(stop_s) > parse_serve(unit_command()[1:]).shutdown_timeout_s


def test_kubernetes_asks_the_routes_that_say_so(plain_server):
    container = server_container()
    asked = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    }
    assert asked == {"startup": "/ping", "liveness": "/ping", "readiness": "/health"}
    assert [plain_server.get(path)[0] for path in asked.values()] == [200, 200, 200]
    ports = {port["name"] for port in container["ports"]}
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in asked} <= ports
    (served,) = manifest("service")["spec"]["ports"]
    assert served["targetPort"] in ports


def test_the_parts_of_the_deployment_fit_together():
    deployment, service = manifest("deployment"), manifest("service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert {mount["name"] for mount in server_container()["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("model-volume")["metadata"]["name"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert {f"{name}.yaml" for name in MANIFESTS} == set(listed["resources"])
    assert [image["name"] for image in listed["images"]] == [server_container()["image"]]


def test_only_the_folders_of_volumes_can_be_written():
    security = server_container()["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert pod()["securityContext"]["runAsNonRoot"]
    mounts = server_container()["volumeMounts"]
    models = [mount["readOnly"] for mount in mounts if mount["mountPath"] == "/models"]
    assert models == [True]


def test_the_example_of_the_environment_names_variables_of_the_unit():
    example = UNIT.with_name("environment.example").read_text()
    lines = [line for line in example.split("\n") if line and not line.startswith("#")]
    given = dict(line.split("=", 1) for line in lines)
    line = parse_serve(unit_command(**given)[1:])
    assert line.model == given["MODEL"]
    assert line.port == int(given["PORT"])
    assert line.typed["host"] == given["HOST"]
    assert set(given) - {"MODEL", "DEPLOY_CONFIG", "HOST", "PORT"} == {"VLLM_API_KEY"}
