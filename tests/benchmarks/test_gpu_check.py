"""The GPU script rehearsed on the CPU: every part gives a line, in time, and needs little."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.benchmark, pytest.mark.cpu]

_PROGRAM = """
import sys

ABSENT = {
    "pydantic", "pydantic_core", "fastapi", "starlette", "uvicorn", "websockets", "av", "PIL",
    "prometheus_client", "python_multipart", "transformers",
}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not on the device's machine")

sys.meta_path.insert(0, Absent())
from benchmarks.lingbot_world.gpu_check import main
main(["--device", "cpu", "--scale", "tiny", "--compiler", "aot_eager", *sys.argv[1:]])
"""
PARTS = [
    "environment", "attention kernels", "same: float32", "same: bfloat16", "same: leased",
    "same: compiled", "products", "layer, eager", "chunks, eager", "decode, uint8, copy to host",
    "condition encode", "layer, compiled", "chunks, compiled", "loading weights",
    "memory against the plan", "clocks and power",
]  # fmt: skip


def run(out, *words):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--out", str(out), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return run(tmp_path_factory.mktemp("gpu_check") / "lines.jsonl")


def test_every_part_has_a_result(lines):
    """With torch, safetensors, numpy, tqdm and jaxtyping alone."""
    assert lines[0]["result"]["pydantic"] is False
    assert [line["part"] for line in lines] == PARTS
    assert [line for line in lines if "error" in line or "skipped" in line] == []


def test_the_cpu_is_the_same_as_itself(lines):
    """Bitwise, also over leases; the backend that rehearses compiling fuses nothing."""
    results = [line["result"] for line in lines if line["part"].startswith("same")]
    assert [(result["compiled"], result["leased"]) for result in results] == [
        (False, False), (False, False), (False, True), (True, False),
    ]  # fmt: skip
    for result in results:
        for kind in ("latents", "pixels"):
            assert result[kind] == {"largest": 0.0, "relative": 0.0, "finite": True}


def test_a_kernel_that_cannot_run_is_a_line_of_its_own(lines):
    kernels = lines[1]["result"]
    assert "No viable backend" in kernels[0]["error"]
    assert kernels[1]["largest_error"] < 0.02


def test_nothing_begins_when_the_time_is_over(tmp_path):
    lines = run(tmp_path / "lines.jsonl", "--minutes", "-1")
    assert [line["part"] for line in lines] == PARTS
    assert all("0 needed" in line["skipped"] for line in lines)
