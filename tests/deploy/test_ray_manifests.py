"""KubeRay, LeaderWorkerSet, a server in a Ray cluster: the files fit the server and each other."""

import re
import shlex

import pytest
import yaml

from tests.deploy.files import KUBERNETES, ROOT, ServeLine, parse_serve
from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.raylets import SETTINGS, shipped_settings
from vllm_omni.config.resolve import resolve

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

SHIPPED = shipped_settings()
FOLDER = ROOT / "examples/online_serving/kubernetes"
README = (FOLDER / "README.md").read_text()


def load(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


SERVER = load("server")["spec"]["template"]
CLUSTER = load("ray_cluster")["spec"]
GANG = load("leader_worker_set")["spec"]["leaderWorkerTemplate"]
(MACHINES,) = CLUSTER["workerGroupSpecs"]
SERVICES = list(yaml.safe_load_all((FOLDER / "service.yaml").read_text()))
PODS = {
    "server": SERVER,
    "head": CLUSTER["headGroupSpec"]["template"],
    "machine": MACHINES["template"],
    "leader": GANG["leaderTemplate"],
    "worker": GANG["workerTemplate"],
}
SERVERS = ("server", "leader")
every_pod = pytest.mark.parametrize("name", PODS)
every_server = pytest.mark.parametrize("name", SERVERS)


def container(name: str) -> dict:
    (only,) = PODS[name]["spec"]["containers"]
    return only


def commands(name: str) -> list[list[str]]:
    """What the shell of a pod runs, one after another."""
    assert container(name)["command"] == ["sh", "-c"]
    (line,) = container(name)["args"]
    return [shlex.split(part) for part in line.split("&&")]


def serve_line(name: str) -> ServeLine:
    """The server's command line; its deploy file is the one that the ConfigMap puts there."""
    program, *line = commands(name)[-1][1:]
    assert (commands(name)[-1][0], program) == ("exec", "vllm-omni")  # SIGTERM reaches it.
    return parse_serve([word.replace("/etc/vllm-omni", str(FOLDER)) for word in line])


@every_pod
def test_pods_obey_the_schema_of_kubernetes(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    template = {"metadata": {"name": name}} | PODS[name]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    kubernetes_validate.validate(pod, "1.37", strict=True)


@pytest.mark.parametrize("manifest", [load("server"), *SERVICES])
def test_other_manifests_obey_it_too(manifest):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, "1.37", strict=True)


@every_server
def test_a_server_listens_where_it_is_asked(name):
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    assert ports["http"] == serve_line(name).port
    asked = {
        probe: container(name)[f"{probe}Probe"]["httpGet"] for probe in ("liveness", "readiness")
    }
    assert {probe: get["path"] for probe, get in asked.items()} == {
        "liveness": "/ping",
        "readiness": "/health",
    }
    assert {get["port"] for get in asked.values()} == {"http"}
    selected = [s for s in SERVICES if s["spec"]["selector"].items() <= labels(name).items()]
    assert [port["targetPort"] for one in selected for port in one["spec"]["ports"]] == ["http"]


def labels(name: str) -> dict:
    return PODS[name]["metadata"]["labels"]


@every_server
def test_a_pod_may_live_longer_than_its_server_takes_to_end(name):
    line = serve_line(name)
    takes_s = line.shutdown_timeout_s + float(str(line.typed["drain_timeout_s"]))
    assert PODS[name]["spec"]["terminationGracePeriodSeconds"] > takes_s


@pytest.mark.parametrize(("name", "nodes"), [("server", 1), ("leader", GANG["size"])])
def test_a_group_asks_for_the_gpus_of_its_machines(name, nodes):
    deployed = yaml.safe_load(serve_line(name).deploy_config.read_text())
    assert deployed["distributed_executor_backend"] == "ray"
    (stage,) = deployed["stages"]
    gpus = int(container(name)["resources"]["limits"]["nvidia.com/gpu"])
    assert stage["parallel_config"]["ulysses_degree"] == nodes * gpus
    assert f"--num-gpus={gpus}" in commands(name)[0]


@every_server
def test_the_rest_of_a_deploy_file_is_one_of_the_server(name, tmp_path):
    """Whatever runs the ranks: as worker processes, since Ray may not be installed here."""
    deployed = yaml.safe_load(serve_line(name).deploy_config.read_text())
    (stage,) = deployed["stages"]
    others = {key: value for key, value in stage.items() if not key.startswith("ray")}
    file = tmp_path / "deploy.yaml"
    content = deployed | {"distributed_executor_backend": "mp", "stages": [others]}
    file.write_text(yaml.safe_dump(content))
    model = write_fake_checkpoint(tmp_path / "model", heads=40)
    config = resolve(str(model), deploy_config=file, platform="cuda", visible_devices=12).config
    assert config.parallel.world_size == stage["parallel_config"]["ulysses_degree"]
    assert config.replicas.most == stage.get("max_replicas", 1)


def test_groups_have_machines_to_grow_on():
    (stage,) = load("groups")["stages"]
    assert stage["max_replicas"] == 1 + MACHINES["maxReplicas"]
    gpus = container("machine")["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == MACHINES["rayStartParams"]["num-gpus"]


def test_all_machines_meet_at_the_head():
    head = f"{load('ray_cluster')['metadata']['name']}-head-svc:6379"
    assert load("groups")["stages"][0]["ray_address"] == head
    assert f"--address={head}" in commands("server")[0]
    assert {"--head", "--port=6379"} <= set(commands("leader")[0])
    assert "$LWS_LEADER_ADDRESS:6379" in container("worker")["args"][0]
    for name in ("head", "leader"):
        assert {"name": "gcs", "containerPort": 6379} in container(name)["ports"]


@every_pod
def test_every_machine_has_the_token_and_room_for_pixels(name):
    env = {one["name"]: one for one in container(name)["env"]}
    assert env["RAY_AUTH_MODE"]["value"] == "token"
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "ray-token"
    mounts = {mount["mountPath"]: mount["name"] for mount in container(name)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in PODS[name]["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = yaml.safe_load((KUBERNETES / "model-volume.yaml").read_text())["metadata"]["name"]
    assert volumes[mounts["/models"]]["persistentVolumeClaim"]["claimName"] == claim
    assert set(mounts.values()) == set(volumes)


def test_the_page_makes_what_the_pods_read_and_names_every_file():
    secret = {
        ref["valueFrom"]["secretKeyRef"]["key"]
        for name in PODS
        for ref in container(name)["env"]
        if "valueFrom" in ref
    }
    assert set(re.findall(r"--from-literal=([\w-]+)=", README)) == secret
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert set(re.findall(r"`(\w+\.yaml)`", README)) == files
    mapped = set(re.findall(r"--from-file=\S+/(\w+\.yaml)", README))
    assert mapped == {serve_line(name).deploy_config.name for name in SERVERS}


@every_pod
def test_every_machine_has_the_settings_that_we_ship(name):
    (settings,) = container(name)["envFrom"]
    made = re.findall(r"configmap (\S+) --from-env-file=(\S+)", README)
    assert made == [(settings["configMapRef"]["name"], str(SETTINGS.relative_to(ROOT)))]
    assert not SHIPPED.keys() & {one["name"] for one in container(name)["env"]}


def test_a_frozen_machine_is_found_within_twenty_seconds():
    looks = ("period_ms", "timeout_ms")
    look_s = sum(int(SHIPPED[f"RAY_health_check_{word}"]) for word in looks) / 1000
    assert look_s * int(SHIPPED["RAY_health_check_failure_threshold"]) <= 20
