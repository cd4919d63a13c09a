"""The servers of four and of eight NPUs, as their recipe starts them, measured by the benchmark.

Nothing of the product is replaced: the interpreters of this test find simulated devices where
torch_npu looks for real ones.
"""

import io
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import av
import pytest

from tests.helpers.tiny import tiny_checkpoint_dir
from tests.npu_sim.processes import TIMEOUT_S
from tests.npu_sim.serving import Deployment
from vllm_omni.diffusion.models.lingbot_world.vae.convolution import ConvPath

pytestmark = [
    pytest.mark.core_model, pytest.mark.omni, pytest.mark.parallel, pytest.mark.npu,
    pytest.mark.timeout(TIMEOUT_S), pytest.mark.timing,
]  # fmt: skip

CHUNKS = 2


def size(width: int) -> dict[str, object]:
    return {"model_config": {"ar_diffusion_height": 64, "ar_diffusion_width": width}}


def on_npu(model: Path, file: str, devices: int, width: int) -> Deployment:
    """The recipe's server; the device is named because this machine has no nodes of it."""
    return Deployment(model, file, devices, {"device": "npu", **size(width)})


def comparable(deployment: Deployment) -> Deployment:
    """With noise of the host, and a VAE that adds in the CPU's order."""
    noise = json.dumps({"0": {"generator_device": "cpu"}})
    flags = ["--default-sampling-params", noise]
    return replace(deployment, flags=flags, vae_path=ConvPath.STACKED)


def on_cpu(deployment: Deployment) -> Deployment:
    """The same file and ranks on the host."""
    return replace(deployment, overrides=deployment.overrides | {"device": "cpu", "devices": None})


@pytest.fixture(scope="module")
def four():
    return on_npu(tiny_checkpoint_dir(), "npu_usp4_eager.yaml", 4, 96)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Heads and columns for eight ranks: the tiny checkpoint with heads of half the size."""
    model = tmp_path_factory.mktemp("checkpoint") / "eight_heads"
    shutil.copytree(tiny_checkpoint_dir(), model)
    file = model / "transformer" / "config.json"
    config = json.loads(file.read_text())
    assert (config["num_attention_heads"], config["attention_head_dim"]) == (4, 16)
    file.write_text(json.dumps(config | {"num_attention_heads": 8, "attention_head_dim": 8}))
    return on_npu(model, "npu_usp8_eager.yaml", 8, 128)


@pytest.fixture(scope="module")
def videos(four, tmp_path_factory):
    """Two runs of the benchmark on a server of each order of work."""
    folder = tmp_path_factory.mktemp("videos")
    run = partial(Deployment.videos, runs=2, chunks=CHUNKS, width=96)
    return {
        order: run(replace(four, order=order), folder / order) for order in ("eager", "deferred")
    }


def frames_of(video: bytes) -> list:
    with av.open(io.BytesIO(video)) as container:
        return list(container.decode(video=0))


@pytest.mark.parametrize("order", ["eager", "deferred"])
def test_two_runs_of_the_benchmark_give_the_same_file(videos, order):
    """Bitwise: the same world twice, from the noise to the bytes of the MP4."""
    first, second = videos[order]
    assert first == second
    frames = frames_of(first)
    assert len(frames) == 9 + 12 * (CHUNKS - 1)
    assert {(frame.width, frame.height) for frame in frames} == {(96, 64)}


def test_late_order_changes_no_byte(videos):
    """Bitwise: no wait, event or hold on memory is missing on any of the four devices."""
    assert videos["deferred"][0] == videos["eager"][0]


def test_four_devices_serve_the_file_of_four_processes_on_the_cpu(four, videos, tmp_path):
    """Bitwise: the CPU's attention stands behind the operator, the noise is the host's."""
    run = partial(Deployment.videos, runs=1, chunks=CHUNKS, width=96)
    deployment = comparable(four)
    (there,) = run(on_cpu(deployment), tmp_path / "cpu")
    (here,) = run(replace(deployment, order="deferred"), tmp_path / "npu")
    assert here == there
    assert here != videos["eager"][0]  # whose noise was the device's


@pytest.mark.soak
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_eight_dies_serve_the_file_of_eight_processes_on_the_cpu(eight, tmp_path):
    """Bitwise; every rank has one head, four tokens of a latent frame and two of its columns."""
    deployment = comparable(eight)
    run = partial(Deployment.videos, runs=1, chunks=CHUNKS, width=128)
    (there,) = run(on_cpu(deployment), tmp_path / "cpu")
    (here,) = run(replace(deployment, order="deferred"), tmp_path / "npu")
    assert here == there
    assert {(frame.width, frame.height) for frame in frames_of(here)} == {(128, 64)}
