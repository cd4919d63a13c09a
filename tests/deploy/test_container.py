"""The container image: what can be known of it without building it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.deploy.files import (
    COMPOSE,
    DEFAULTS,
    DOCKERFILE,
    ROOT,
    compose,
    image_environment,
    in_repository,
    of_kind,
    parse_serve,
    pod,
    server_commands,
    server_container,
    stages,
)
from tests.deploy.served import plain_server
from tests.helpers.server import PLAIN, START_S, free_port
from vllm_omni import envs

__all__ = ["plain_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

FINAL = stages()[-1]
by_command = pytest.mark.parametrize("place", server_commands())


def run_script(wanted: str) -> str:
    """The one RUN of the final stage that holds a word."""
    (script,) = (run.text for run in of_kind(FINAL, "RUN") if wanted in run.text)
    return script


def test_every_file_that_is_copied_exists_and_reaches_the_builder():
    ignore = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line]
    patterns = [line for line in ignore if not line.startswith("#")]
    assert patterns[0] == "*"
    let_in = {line[1:] for line in patterns if line.startswith("!")}
    copies = [copy for stage in stages() for copy in of_kind(stage, "COPY")]
    sources = {word for c in copies if "--from" not in c.text for word in c.words[:-1]}
    assert sources == let_in
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_what_the_wheel_is_made_of_is_copied():
    (wheel,) = (stage for stage in stages() if "pip wheel" in str(stage))
    copied = {word for copy in of_kind(wheel, "COPY") for word in copy.words[:-1]}
    text = (ROOT / "pyproject.toml").read_text()
    (readme,) = re.findall(r'^readme = "(.+)"', text, re.MULTILINE)
    (licence,) = re.findall(r'^license-files = \["(.+)"\]', text, re.MULTILINE)
    assert copied == {"pyproject.toml", readme, licence, "vllm_omni"}


def test_it_runs_as_a_user_without_rights_who_owns_what_is_written():
    (user,) = (instruction.text for instruction in of_kind(FINAL, "USER"))
    number, group = user.split(":")
    assert number == group
    assert int(number) >= 10000
    users = run_script("useradd")
    assert f"--uid {number} --user-group" in users
    (owned,) = re.findall(rf"install -d -o {number} -g {number} ([^&]+)", users)
    mounts = {m["mountPath"] for m in server_container()["volumeMounts"]}
    volumes = {v.split(":")[1] for v in compose(COMPOSE)["services"]["server"]["volumes"]}
    assert volumes == set(owned.split())
    assert mounts - {"/dev/shm", "/tmp"} == volumes
    # Nothing is installed once the rights are gone.
    names = [instruction.name for instruction in FINAL]
    assert "RUN" not in names[names.index("USER") :]
    assert pod()["securityContext"]["runAsUser"] == int(number)
    assert pod()["securityContext"]["fsGroup"] == int(number)


def test_caches_and_videos_lie_where_it_may_write(monkeypatch):
    environment = image_environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert envs.storage_path() == "/var/lib/vllm-omni/videos"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert environment[name].startswith("/var/cache/vllm-omni/")


def test_compiled_mode_finds_its_compiler_and_signals_arrive():
    # In the stage that runs, not only in the one that builds.
    packages = run_script("apt-get install")
    assert {"g++", "tini"} <= set(packages.split())
    assert "purge" not in packages
    (entrypoint,) = of_kind(FINAL, "ENTRYPOINT")
    # A list: with a shell in between, SIGTERM would end the shell.
    assert entrypoint.words == ["tini", "--", "vllm-omni"]


@pytest.mark.parametrize("device", ["npu", "", "cpu cuda"])
def test_an_unknown_device_is_refused_before_anything_is_installed(device):
    # An argument of the build is a variable of the script.
    script = run_script("case")
    assert script.index("esac") < script.index("python -m venv")
    done = subprocess.run(
        ["sh", "-c", script], env={"DEVICE": device}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == f"DEVICE must be cpu or cuda, got '{device}'\n"


def test_torch_is_the_version_that_is_tested():
    (tested,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"TORCH={tested}" in [arg.text for arg in of_kind(FINAL, "ARG")]


@by_command
def test_a_command_is_one_that_the_server_takes(place):
    line = parse_serve(server_commands()[place])
    assert line.deploy_config.is_file()
    assert line.port == DEFAULTS.port


def test_the_port_is_the_same_everywhere():
    (port,) = (instruction.text for instruction in of_kind(FINAL, "EXPOSE"))
    assert int(port) == DEFAULTS.port
    assert compose(COMPOSE)["services"]["server"]["ports"] == [f"127.0.0.1:8000:{port}"]
    assert server_container()["ports"] == [{"name": "http", "containerPort": int(port)}]


def health_check(port: int) -> int:
    """Status of the image's health check, run by this interpreter against a port."""
    (check,) = of_kind(FINAL, "HEALTHCHECK")
    python, *words, code = json.loads(check.text.partition("CMD ")[2])
    assert python == "python"
    at_port = code.replace(f":{DEFAULTS.port}/", f":{port}/")
    assert at_port != code
    command = [sys.executable, *words, at_port]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_the_health_check_tells_a_server_from_none(plain_server):
    assert health_check(plain_server.port) == 0
    assert health_check(free_port()) != 0


def test_hadolint_has_nothing_to_say():
    beside = os.path.dirname(sys.executable)
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=beside)
    if hadolint is None:
        pytest.skip("hadolint is not installed (tests/deploy/requirements.txt)")
    run = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


def program(*words: str) -> list[str]:
    """A command line of ``vllm-omni`` for this interpreter."""
    return [sys.executable, *PLAIN[:-1], *words]


@pytest.mark.advanced_model
def test_the_commands_of_compose_serve_and_end_by_sigterm(tmp_path):
    """They run as in their containers, with the folders of these mapped to this machine's."""
    services = compose(COMPOSE)["services"]
    models = str(tmp_path / "models")
    write = [word.replace("/models", models) for word in services["checkpoint"]["command"]]
    for _ in range(2):  # the volume may hold one from an earlier start
        subprocess.run(program(*write), check=True, capture_output=True)
    line = services["server"]["command"]
    serve = [word.replace("/models", models) for word in line]
    serve = [str(in_repository(word)) for word in serve]
    port = free_port()
    server = subprocess.Popen(
        program(*serve, "--host", "127.0.0.1", "--port", str(port)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while health_check(port) != 0:
            assert server.poll() is None
            assert time.monotonic() < deadline
        server.send_signal(signal.SIGTERM)
        grace_s = float(services["server"]["stop_grace_period"].removesuffix("s"))
        assert server.wait(grace_s) == 0
    finally:
        server.kill()
        server.wait()
