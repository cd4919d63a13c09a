"""A second model, for tests: a world that is drawn by arithmetic from the camera, without weights.

It shows what a model has to provide, and serves tests of the server that need no real one. It is
installed as any model of another package is: by an entry point, here in a folder on PYTHONPATH.
"""

import json
from pathlib import Path

from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.registry import ENTRY_POINT_GROUP, ModelEntry
from vllm_omni.errors import UnsupportedParallelismError
from vllm_omni.inputs.request import RequestLimits

ENTRY = ModelEntry(
    class_name="DrawnWorldPipeline",
    pipeline="drawn_world",
    limits=RequestLimits(inference_steps=1, max_sequence_length=64, native_fps=16.0, area=64 * 96),
    modalities=("prompt", "camera"),
    checkpoint_check="tests.helpers.drawn_world:check_checkpoint",
    picture="vllm_omni.inputs.picture:load_image",
    loader="tests.helpers.drawn_world.pipeline:load_pipeline",
    preload=("tests.helpers.drawn_world.pipeline",),
)


DEPLOY = """
distributed_executor_backend: mp
dtype: float32
stages:
  - stage_id: 0
    device: cpu
    step_execution: true
    streaming_output: true
    engine_backend: vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine
    model_config: {ar_diffusion_height: 64, ar_diffusion_width: 96}
    default_sampling_params: {output_type: pil}
"""


def check_checkpoint(_directory: Path, parallel: DiffusionParallelConfig) -> None:
    """Refuse several ranks: there is nothing to share."""
    if parallel.world_size > 1:
        raise UnsupportedParallelismError(f"one rank draws the world, got {parallel.world_size}")


def write_checkpoint(directory: Path) -> Path:
    """Write all the files of the model: its name."""
    directory.mkdir()
    (directory / "model_index.json").write_text(json.dumps({"_class_name": ENTRY.class_name}))
    return directory


def write_package(directory: Path) -> Path:
    """Write what pip leaves of an installed model, for PYTHONPATH or ``sys.path``."""
    folder = directory / "drawn_world-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: drawn-world\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{ENTRY.class_name} = tests.helpers.drawn_world:ENTRY\n"
    )
    return directory


def write_home(directory: Path) -> Path:
    """Write ``package``, ``model`` and ``deploy.yaml``: all that a server is started with."""
    write_package(directory / "package")
    write_checkpoint(directory / "model")
    (directory / "deploy.yaml").write_text(DEPLOY)
    return directory
