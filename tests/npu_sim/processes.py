"""Processes with simulated devices: environments, and a function run on several ranks."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


def environment(devices: int, *, order: str, vae_path: str | None = None) -> dict[str, str]:
    """Variables of processes that see ``devices`` simulated NPUs.

    Args:
        order: ``eager`` or ``deferred``.
        vae_path: how the VAE convolves, if not as the device would choose.
    """
    variables = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent / 'site'}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "NPU_SIM_DEVICES": str(devices),
        "NPU_SIM_DEFERRED": str(int(order == "deferred")),
    }
    return variables | ({"NPU_SIM_VAE_PATH": vae_path} if vae_path else {})


def run_ranks(module: str, size: int) -> list[dict]:
    """Run ``python -m module RANK SIZE FOLDER`` on every rank; what each saved as its result."""
    variables = dict(os.environ) | environment(size, order="eager")
    with tempfile.TemporaryDirectory(prefix="npu-sim-ranks-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(size), folder],
                cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=TIMEOUT_S)[0].decode() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        codes = [rank.returncode for rank in ranks]
        assert codes == [0] * size, "\n".join(outputs)
        return [torch.load(result_file(folder, rank)) for rank in range(size)]


def result_file(folder: str, rank: int) -> Path:
    """Where a rank saves what it found."""
    return Path(folder) / f"rank{rank}.pt"
