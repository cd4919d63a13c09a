"""Who joins a cluster: not who lacks its token, and nobody where there is none; told at once."""

import os
import subprocess
import sys

import pytest

from tests.helpers.server import ROOT, free_port

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu, pytest.mark.timing]

HEAD = """
import sys
from tests.helpers.raylets import raylets_of
with raylets_of(1) as cluster:
    print("address", cluster.address, flush=True)
    sys.stdin.readline()
"""
JOIN = """
import sys
from vllm_omni.diffusion.executor.ray_actors import connect
connect(sys.argv[1])
"""


def environment(mode: str, token_path: object) -> dict[str, str]:
    return {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(token_path)}


# Ray reads its mode once in a process: each side has one of its own.
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("token")
    (made / "right").write_text("ab12" * 16)
    (made / "wrong").write_text("cd34" * 16)
    return made


@pytest.fixture(scope="module")
def address(folder):
    with subprocess.Popen(
        [sys.executable, "-c", HEAD],
        cwd=ROOT,
        env=environment("token", folder / "right"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as head:
        assert head.stdout is not None
        yield next(line.split()[1] for line in head.stdout if line.startswith("address "))
        head.communicate("\n", timeout=60)


@pytest.mark.parametrize(
    ("mode", "token", "joins"),
    [
        ("token", "right", True),
        ("token", "wrong", False),
        ("token", "missing", False),
        ("disabled", "right", False),
    ],
)
def test_on_ray_who_has_no_token_of_the_cluster_is_refused(folder, address, mode, token, joins):
    joining = join(address, environment(mode, folder / token))
    assert (joining.returncode == 0) == joins
    assert joins or refusal(joining).endswith("RAY_AUTH_TOKEN_PATH)")


def test_on_ray_an_address_where_nobody_answers_is_refused_at_once():
    joining = join(f"127.0.0.1:{free_port()}", dict(os.environ))
    assert "Connection refused" in refusal(joining)


def join(address: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", JOIN, address],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refusal(joining: subprocess.CompletedProcess[str]) -> str:
    last = joining.stderr.strip().splitlines()[-1]
    assert "ConfigError: no Ray cluster" in last
    return last
