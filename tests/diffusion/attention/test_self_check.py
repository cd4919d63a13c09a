"""The check at start: right backends pass, and every mistake that backends have made is seen."""

import pytest
import torch

from vllm_omni.diffusion.attention.backend import create_attention_backend, gather_pages
from vllm_omni.diffusion.attention.reference import check_attention
from vllm_omni.diffusion.attention.sdpa import SdpaAttention
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_right_backends_pass(name, dtype, head_dim):
    check_attention(create_attention_backend(name), head_dim=head_dim, dtype=dtype, device=CPU)


class OperatorsOwnScale(SdpaAttention):
    def attend(self, query, key, value, *, scale):
        return super().attend(query, key, value, scale=scale**0)


class UniformAverage(SdpaAttention):
    def attend(self, query, key, value, *, scale):
        return super().attend(torch.zeros_like(query), key, value, scale=scale)


class HeadsForTokens(SdpaAttention):
    """A tensor read in the layout of another, as (heads, tokens) for (tokens, heads)."""

    def attend(self, query, key, value, *, scale):
        swapped = query.reshape(query.shape[1], query.shape[0], -1).transpose(0, 1)
        return super().attend(swapped.contiguous(), key, value, scale=scale)


class LastKeyUnseen(SdpaAttention):
    def attend(self, query, key, value, *, scale):
        return super().attend(query, key[:-1], value[:-1], scale=scale)


class WholeLastPage(SdpaAttention):
    def attend_pages(self, query, keys, values, *, block_table, visible_tokens, scale):
        whole = -(-visible_tokens // keys.shape[1]) * keys.shape[1]
        key, value = (gather_pages(pages, block_table, whole) for pages in (keys, values))
        return self.attend(query, key, value, scale=scale)


class PagesInPoolOrder(SdpaAttention):
    def attend_pages(self, query, keys, values, *, block_table, visible_tokens, scale):
        sorted_table = block_table.sort().values
        key, value = (gather_pages(p, sorted_table, visible_tokens) for p in (keys, values))
        return self.attend(query, key, value, scale=scale)


class NotANumber(SdpaAttention):
    def attend(self, query, key, value, *, scale):
        return super().attend(query, key, value, scale=scale) * torch.nan


class FirstTileOnly(SdpaAttention):
    """Right up to one tile of 128 keys, the rest unseen."""

    def attend(self, query, key, value, *, scale):
        return super().attend(query, key[:128], value[:128], scale=scale)


class ZeroTail(SdpaAttention):
    """The rows of the last, cut tile of queries are never written."""

    def attend(self, query, key, value, *, scale):
        attended = super().attend(query, key, value, scale=scale)
        attended[len(query) - len(query) % 128 :] = 0
        return attended if len(query) > 128 else super().attend(query, key, value, scale=scale)


class NoPlan(SdpaAttention):
    def attend(self, *_operands, **_scale):
        raise RuntimeError("cuDNN Frontend error: No valid execution plans built.\nTraceback")


WRONG = {
    FirstTileOnly: "extent",
    ZeroTail: "extent",
    OperatorsOwnScale: "extent",
    UniformAverage: "extent",
    HeadsForTokens: "extent",
    LastKeyUnseen: "extent",
    NotANumber: "extent",
    WholeLastPage: "pages",
    PagesInPoolOrder: "pages",
}


@pytest.mark.parametrize("backend", WRONG, ids=lambda backend: backend.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_backends_are_refused_by_the_entry_that_is_wrong(backend, dtype):
    with pytest.raises(ConfigError, match=f"its {WRONG[backend]} entry is off .* allows"):
        check_attention(backend(), head_dim=16, dtype=dtype, device=CPU)


def test_a_kernel_that_cannot_run_is_refused_with_the_hint():
    message = r"cannot run on cpu .*: cuDNN .* No valid execution plans built\.; choose another"
    with pytest.raises(ConfigError, match=message):
        check_attention(NoPlan(), head_dim=16, dtype=torch.bfloat16, device=CPU)


def test_the_check_tells_the_kernel():
    backend = create_attention_backend("flash")
    found = check_attention(backend, head_dim=16, dtype=torch.bfloat16, device=CPU)
    assert found == "flash_attention"
