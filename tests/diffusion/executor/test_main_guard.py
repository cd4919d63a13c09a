"""A script without the main guard is told so, by one error of one process."""

import subprocess
import sys

import pytest

from tests.helpers.tiny import tiny_checkpoint_dir

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu, pytest.mark.timing]


def test_a_script_without_the_guard_is_told_to_have_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from vllm_omni import Omni\n"
        f"Omni({str(tiny_checkpoint_dir())!r}, distributed_executor_backend='mp', device='cpu')\n"
    )
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1
    assert 'below `if __name__ == "__main__":`' in run.stderr.strip().split("\n")[-1]
