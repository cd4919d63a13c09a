"""What a fresh process costs: imports, the command line, and the first chunk."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_CHUNK_GOAL = {"wall_s": 6.0, "rss_mib": 450.0}
_REPORT = """
import json, sys, time
# Not ru_maxrss: it remembers the size of the process that started this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"cpu_s": time.process_time(), "loaded_torch": "torch" in sys.modules,
                  "rss_mib": int(peak.split()[1]) / 1024}))
"""
_IMPORTS = {
    "interpreter": "pass",
    "vllm_omni": "import vllm_omni",
    "command_line_help": (
        "import sys, io, contextlib\n"
        "from vllm_omni.entrypoints.cli.main import dispatch\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    dispatch(['--help'])"
    ),
    "torch": "import torch",
    "torch_and_umt5": "import torch\nfrom transformers import UMT5EncoderModel",
    "worker": (
        "import vllm_omni.diffusion.worker.worker\n"
        "import vllm_omni.diffusion.models.lingbot_world.load"
    ),
}
_FIRST_CHUNK = """
import json, time
began = time.perf_counter()
import numpy as np
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan, ScriptedKeys, SessionRequest, SourceImage
from vllm_omni.diffusion.worker.worker import Worker
import vllm_omni.diffusion.models.lingbot_world.load
from pathlib import Path
from vllm_omni.diffusion.models.lingbot_world.tokenizer import load_tokenizer
imported = time.perf_counter()
height, width = {height}, {width}
worker = Worker(OmniDiffusionConfig(model={model!r}, dtype="float32",
                                    geometry=VideoGeometry(height, width)))
loaded = time.perf_counter()
rgb = np.zeros((height, width, 3), np.uint8)
worker.open_session("first", SessionRequest(
    prompt=load_tokenizer(Path({model!r}))("a castle"),
    image=SourceImage(rgb=rgb), height=height, width=width, num_chunks=1, seed=0,
    camera=ScriptedKeys(((frozenset("w"),) * 3,))))
opened = time.perf_counter()
def deliver(result):
    now = time.perf_counter()
    marks = dict(import_s=imported - began, load_s=loaded - imported, open_s=opened - loaded,
                 chunk_s=now - opened)
    print("first chunk", flush=True)
    print(json.dumps(marks))
worker.run_chunk(ChunkPlan("first", 0), deliver)
"""


def import_costs(repeats: int) -> dict[str, dict[str, object]]:
    """CPU seconds (the least of ``repeats``) and peak resident size of imports, each in its own
    process."""
    costs = {}
    for name, code in _IMPORTS.items():
        runs = [_run(code + _REPORT) for _ in range(repeats)]
        costs[name] = min(runs, key=lambda run: run["cpu_s"])
    return costs


def first_chunk(model: Path, *, height: int, width: int, repeats: int) -> dict[str, object]:
    """From the start of a process to its first chunk on the host; the fastest of ``repeats``."""
    code = _FIRST_CHUNK.format(model=str(model), height=height, width=width) + _REPORT
    runs = [_time_to_line(code) for _ in range(repeats)]
    best = min(runs, key=lambda run: run["wall_s"])
    return {**best, "goal": FIRST_CHUNK_GOAL}


def _run(code: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _time_to_line(code: str) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None, "a pipe was asked for"
            line = process.stdout.readline()
            wall_s = time.perf_counter() - started
            rest = process.stdout.read()
        if process.returncode or "first chunk" not in line:
            errors.seek(0)
            raise RuntimeError(f"no first chunk came: {errors.read()}")
    marks, report = (json.loads(text) for text in rest.splitlines()[-2:])
    return {"wall_s": wall_s, "cpu_s": report["cpu_s"], "rss_mib": report["rss_mib"], **marks}
