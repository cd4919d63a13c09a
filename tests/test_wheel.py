"""The built wheel, installed in an empty folder: what README.md says about serving works there."""

import json
import os
import re
import shlex
import signal
import site
import subprocess
import sys
import time
import tomllib
import zipfile
from http.client import HTTPConnection
from pathlib import Path

import av
import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.helpers.server import START_S, free_port
from tests.helpers.tiny import tiny_checkpoint_dir

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


class Wheel:
    """The wheel in a virtual environment of its own, and a folder with nothing in it.

    Its dependencies are those of the running environment, so nothing is downloaded.
    """

    def __init__(self, folder: Path) -> None:
        self.file = self._build(folder)
        self.folder = folder / "empty"
        self.folder.mkdir()
        self.bin = folder / "venv" / "bin"
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        # Lines of such a file are folders; those of an editable installation are not followed.
        shared = [*site.getsitepackages(), *(p for p in sys.path if p.endswith("site-packages"))]
        (packages / "shared.pth").write_text("\n".join(dict.fromkeys(shared)))
        run(sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet",
            "--no-deps", "--no-index", "--ignore-installed", self.file)  # fmt: skip

    @staticmethod
    def _build(folder: Path) -> Path:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
            "--no-build-isolation", "--wheel-dir", folder, copy_of_sources(folder))  # fmt: skip
        (file,) = folder.glob("*.whl")
        return file

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def command(self, *words: str) -> str:
        """What a command writes; it must succeed."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def files(self) -> set[str]:
        return set(zipfile.ZipFile(self.file).namelist())


def copy_of_sources(folder: Path) -> Path:
    """What the container's wheel is made of, too: a build leaves folders beside its sources."""
    copied = folder / "sources"
    copied.mkdir()
    tracked = run(
        "git", "-C", ROOT, "ls-files", "vllm_omni", "pyproject.toml", "README.md", "LICENSE"
    )
    for name in tracked.split("\n")[:-1]:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes((ROOT / name).read_bytes())
    return copied


def run(*words: object) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return Wheel(tmp_path_factory.mktemp("wheel"))


def test_the_version_satisfies_who_asks_for_the_surface_of_its_release():
    surface, _, own = VERSION.partition("+")
    assert own.startswith("lingbot.")
    assert f"`vllm-omni` {surface}" in README
    assert VERSION in README
    assert f"programs of {surface}" in (ROOT / "docs/coming_from_vllm_omni.md").read_text()
    for asked in (">=0.28", f"=={surface}", f">={surface}", "~=0.30.0"):
        assert Version(VERSION) in SpecifierSet(asked)
    assert Version(VERSION) > Version(surface)


def test_no_text_installs_by_the_name_from_an_index():
    texts = [ROOT / "README.md", ROOT / "Makefile", ROOT / "docker/Dockerfile"]
    for folder, kind in (("docs", "*.md"), ("vllm_omni", "*.py"), ("tests", "*.py"),
                         ("examples", "*.py")):  # fmt: skip
        texts += (ROOT / folder).rglob(kind)
    by_name = re.compile(r"pip install(?: -{1,2}\w[\w-]*)* '?vllm[-_]omni")
    assert by_name.search("pip install -U '" + "vllm-omni[web-test]'")
    assert [path for path in texts if by_name.search(path.read_text())] == []


def test_the_wheel_has_what_serving_and_measuring_need(wheel):
    deploy = {f"vllm_omni/deploy/{path.name}" for path in (ROOT / "vllm_omni/deploy").iterdir()}
    assert {"vllm_omni/deploy/cpu_tiny.yaml", "vllm_omni/deploy/usp4_compiled.yaml"} < deploy
    needed = deploy | {
        "vllm_omni/py.typed", "vllm_omni/__main__.py", "vllm_omni/benchmarks/realtime.py",
        "vllm_omni/data/toy_world/model_index.json",
    }  # fmt: skip
    assert needed - wheel.files() == set()
    assert wheel.command("python", "-m", "vllm_omni", "--version").strip() == VERSION
    where = wheel.command("python", "-c", "import vllm_omni; print(vllm_omni.__file__)")
    assert where.startswith(str(wheel.bin.parent))


# As the public package's offline example ends: its writer is diffusers', which needs imageio.
OFFLINE = f"""
import numpy as np
from diffusers.utils import export_to_video
from PIL import Image
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
omni = Omni(model={str(tiny_checkpoint_dir())!r})
prompt = {{"prompt": "p", "multi_modal_data": {{"image": Image.new("RGB", (96, 64))}}}}
keys = {{"camera_action_script": [[["w"]] * 3]}}
params = OmniDiffusionSamplingParams(height=64, width=96, num_frames=9, seed=1, extra_args=keys)
(output,) = omni.generate(prompt, params)
omni.close()
export_to_video(list(np.asarray(output.images[0])), "offline.mp4", fps=16)
"""


def test_the_extra_of_the_public_examples_is_all_that_their_writer_needs(wheel):
    """Only this test asks the package index, for what the environment of the tests has not."""
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", wheel.bin / "python", "install", "--quiet",
         "--retries", "0", "--timeout", "5", f"{wheel.file}[examples]"],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"the package index gave no imageio: {installed.stderr[-200:]}")
    wheel.command("python", "-c", OFFLINE)
    with av.open(str(wheel.folder / "offline.mp4")) as video:
        shapes = [frame.to_ndarray(format="rgb24").shape for frame in video.decode(video=0)]
    assert shapes == [(64, 96, 3)] * 9


def serve_line() -> list[str]:
    """The command of README's "Serve it"."""
    section = README.partition("\n## Serve it")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^vllm-omni serve .*$", section, re.MULTILINE)
    return shlex.split(line)


def test_serve_it_works_in_an_empty_folder(wheel):
    serve = serve_line()
    port = str(free_port())
    line = [port if word == "8000" else word for word in serve]
    assert port in line
    log = (wheel.folder / "log").open("w+")
    server = subprocess.Popen(
        [*line, "--host", "127.0.0.1"],
        cwd=wheel.folder, env=wheel.environment, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        wait_ready(server, int(port), Path(log.name))
        report = wheel.folder / "report.json"
        (bench,) = re.findall(r"`(vllm-omni bench [^`]+)` measures", README)
        words = ["4" if word == "16" else word for word in shlex.split(bench)]
        wheel.command(*words, "--port", port, "--output-json", str(report))
        assert json.loads(report.read_text())["workload"]["num_frames"] == 45
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        log.close()


def wait_ready(server, port, log):
    deadline = time.monotonic() + START_S
    while not healthy(port):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def healthy(port):
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
