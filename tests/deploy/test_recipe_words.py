"""What the recipe tells of containers and GPUs stands in the files that it leads to."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "docs/recipes/lingbot_world_v2.md").read_text()
NEEDS = RECIPE.partition("## What a CUDA machine needs")[2].partition("\n## ")[0]
SHARED_GB = re.search(r"(\d+) GB of `/dev/shm`", NEEDS)[1]


def test_shared_memory_for_nccl_is_what_the_containers_get():
    flags = (ROOT / "docs/deploy/container.md").read_text()
    (started,) = re.findall(r"^docker run .*--gpus all.*$", flags, re.MULTILINE)
    assert f"--shm-size {SHARED_GB}g " in started
    assert "`--ipc=host`" in flags
    composed = yaml.safe_load((ROOT / "docker/compose.cuda.yaml").read_text())
    assert {service["shm_size"] for service in composed["services"].values()} == {f"{SHARED_GB}gb"}


def test_the_deploy_file_of_four_gpus_is_in_the_package():
    assert "`vllm_omni/deploy/usp4_compiled.yaml` | four GPUs, compiled" in RECIPE
    stages = yaml.safe_load((files("vllm_omni") / "deploy/usp4_compiled.yaml").read_text())
    (stage,) = stages["stages"]
    assert stage["devices"] == "0,1,2,3"


@pytest.mark.parametrize("word", ["gcc", "driver of series 580", "torch 2.11", "Python's headers"])
def test_what_a_machine_needs_is_named(word):
    assert word in NEEDS
