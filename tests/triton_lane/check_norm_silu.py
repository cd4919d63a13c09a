"""The fused norm of the VAE: interpreted beside separate calls, and compiled for an H200."""

import json
import subprocess
import sys

import pytest
import triton

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CHANNELS = (96, 192, 384)
"""Those of the released VAE."""

# The interpreter is chosen when Triton is imported, hence the process of its own.
_PROGRAM = """
import json
import torch
from vllm_omni.diffusion.models.lingbot_world.vae.vae import kernel_is_right
from vllm_omni.diffusion.models.lingbot_world.vae.norm_silu import norm_silu

def slab(x, scale, *columns):
    target = torch.zeros_like(x[:, :, slice(*columns)])
    norm_silu(x[:, :, slice(*columns)].contiguous(), scale, target)
    return target

x, scale = torch.randn(2, 3, 400, 96), torch.randn(96)
x[0, 0, 0] = 0
whole = slab(x, scale, None)
shares = [slab(x, scale, *columns) for columns in ((0, 104), (104, 208), (208, None))]
cpu = torch.device("cpu")
print(json.dumps({
    "right": [kernel_is_right(norm_silu, n, dtype, cpu) for n in (8, 96, 384)
              for dtype in (torch.float32, torch.float16, torch.bfloat16)],
    "shares": torch.equal(torch.cat(shares, 2), whole),
    "zero": bool(whole[0, 0, 0].any()),
    "nothing": kernel_is_right(lambda *_: None, 96, torch.float32, cpu),
}))
"""


@pytest.fixture(scope="module")
def interpreted():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False,
        env={"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_computes_what_separate_calls_do(interpreted):
    """Reordered: the tolerance of the check at start-up, which derives it."""
    assert all(interpreted["right"])
    assert not interpreted["zero"]


def test_shares_of_a_frame_have_the_bits_of_the_whole(interpreted):
    """Bitwise: no sum depends on where a pixel is."""
    assert interpreted["shares"]


def test_the_check_at_start_up_sees_a_kernel_that_does_nothing(interpreted):
    assert not interpreted["nothing"]


@pytest.mark.parametrize("channels", CHANNELS)
def test_it_compiles_for_an_h200_and_moves_16_bytes_at_a_time(channels):
    from tests.triton_lane.for_hopper import ALIGNED, machine_code
    from vllm_omni.diffusion.models.lingbot_world.vae.norm_silu import norm_silu_kernel

    types = {"x": "*bf16", "scale": "*fp32", "target": "*bf16", "pixels": "i32", "width": "i32",
             "target_width": "i32", "CHANNELS": "constexpr", "COLUMNS": "constexpr"}  # fmt: skip
    constants = {"CHANNELS": channels, "COLUMNS": triton.next_power_of_2(channels)}
    code = machine_code(norm_silu_kernel, types, constants, {(n,): ALIGNED for n in range(3)})
    assert code["cubin"]
    assert "st.global.v4.b32" in code["ptx"]
    assert "st.global.b16" not in code["ptx"]
