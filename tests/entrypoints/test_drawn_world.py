"""A second model goes everywhere: configuration, engine, worker process, server, client, page.

The drawn world of ``tests/helpers/drawn_world`` has no weights; nothing of the package knows it but
by its entry in the registry.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import drawn_world
from tests.helpers.server import ROOT, RealServer, real_server
from tests.helpers.socket_client import camera_event, picture_url, socket_client, start_message
from vllm_omni import AsyncOmni
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import CheckpointError, InvalidRequestError, UnsupportedParallelismError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

WALK = {"camera_action_script": [[["w"], ["w"], ["l"]], [[], [], []]]}
PROGRAM = "benchmarks/lingbot_world/benchmark_lingbot_world_realtime.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """What a user of the model has: its package, a checkpoint and a deploy file."""
    return drawn_world.write_home(tmp_path_factory.mktemp("drawn"))


@pytest.fixture
def installed(home, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(home / "package"))
    return home


@pytest.fixture(scope="module")
def server(home) -> RealServer:
    with real_server(
        model=home / "model", deploy=home / "deploy.yaml", python_path=home / "package"
    ) as running:
        yield running


def test_the_configuration_finds_it_by_its_class_name(installed):
    assert resolve(str(installed / "model")).model == drawn_world.ENTRY
    with pytest.raises(UnsupportedParallelismError, match="one rank draws the world, got 2"):
        resolve(str(installed / "model"), overrides={"ulysses_degree": 2})


def test_where_it_is_not_installed_the_checkpoint_is_refused(home):
    with pytest.raises(CheckpointError, match="got 'DrawnWorldPipeline'"):
        resolve(str(home / "model"))


@pytest.mark.parametrize("executor", ["inline", "mp"])
async def test_the_python_classes_draw_it_here_or_in_a_worker_process(installed, executor):
    omni = AsyncOmni(
        str(installed / "model"), deploy_config=str(installed / "deploy.yaml"),
        distributed_executor_backend=executor,
    )  # fmt: skip
    prompt = {"prompt": "a harbour", "multi_modal_data": {"image": picture_url()}}
    params = OmniDiffusionSamplingParams(num_frames=21, seed=3, extra_args=WALK)
    try:
        first, second = [o.images[0] async for o in omni.generate(prompt, params)]
        params.num_inference_steps = 4
        with pytest.raises(InvalidRequestError, match="num_inference_steps: must be 1, got 4"):
            await anext(omni.generate(prompt, params))
    finally:
        omni.shutdown()
    assert (first.shape, second.shape) == ((9, 64, 96, 3), (12, 64, 96, 3))
    # Frames 0, 1 and 5 begin the latent frames of the first chunk, of which each moves the camera.
    begins = [first[0], first[1], first[5], second[0]]
    moved = [not np.array_equal(a, b) for a, b in pairwise(begins)]
    assert moved == [True, True, False]
    assert all(np.array_equal(first[1], first[index]) for index in range(1, 5))
    assert np.array_equal(second[0], second[11])


async def test_a_client_of_the_server_walks_through_it(server):
    async with socket_client(f"ws://127.0.0.1:{server.port}/v1/realtime/video") as client:
        await client.say(start_message(num_frames=None, unbounded=True))
        started = await client.expect("video.start")
        assert started["capabilities"]["max_prompt_tokens"] == 64
        await client.chunk()
        await client.say(camera_event("walk"))
        while not (await client.chunk())[0]["started_event_ids"]:
            pass
        await client.say({"type": "session.stop"})
        assert (await client.rest())["stopped"]


def test_the_benchmark_measures_it(server, tmp_path):
    report = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, PROGRAM, "--port", str(server.port), "--num-chunks", "8",
         "--width", "96", "--height", "64", "--output-json", report],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(report.read_text())["metrics"]["chunks_received"] == 8


def test_its_page_and_its_video_are_served(server):
    assert server.get("/")[0] == 200
    assert json.loads(server.get("/v1/realtime/capabilities")[1])["modalities"] == [
        "prompt",
        "camera",
    ]
