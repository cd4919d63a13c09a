"""What the NPU operators compute, on CPU tensors, with the vendor's rules for their arguments.

The attention body is the CPU's own fused attention, so a device that runs these bodies gives the
bytes of the CPU. Whether those are right is compared with float32 attention elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

_HALF = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """One call of an operator, its arguments by the names of the schema."""

    name: str
    arguments: dict[str, Any]


def npu_fusion_attention(
    query, key, value, head_num, input_layout, *, scale, actual_seq_qlen=None,
    actual_seq_kvlen=None, **unused,
):  # fmt: skip
    """Dense attention without a mask; layouts BSND and TND."""
    given = {name: x for name, x in unused.items() if isinstance(x, torch.Tensor)}
    if given or unused.get("keep_prob", 1.0) != 1.0 or unused.get("sparse_mode", 0) != 0:
        raise NotImplementedError(f"dense inference only, got {sorted(given) or unused}")
    if len({query.dtype, key.dtype, value.dtype}) != 1 or query.dtype not in {*_HALF, torch.float}:
        raise RuntimeError("query, key and value share one of float16, bfloat16, float32")
    if not all(x.is_contiguous() for x in (query, key, value)):
        raise RuntimeError("query, key and value must be contiguous")
    if query.shape[-2] != head_num:
        raise RuntimeError(f"head_num is {head_num}, the query has {query.shape[-2]} heads")
    if input_layout == "BSND":
        output = _batched(query, key, value, scale)
    elif input_layout == "TND":
        output = _packed(query, key, value, scale, actual_seq_qlen, actual_seq_kvlen)
    else:
        raise NotImplementedError(f"layout {input_layout}")
    statistics = torch.zeros(*output.shape[:-1], 8)
    return output, statistics, statistics.clone(), torch.empty(0), 0, 0, 0


def _batched(query, key, value, scale):
    by_head = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*by_head, scale=scale).transpose(1, 2).contiguous()


def _packed(query, key, value, scale, query_ends, key_ends):
    for what, ends, tokens in (("query", query_ends, query), ("key", key_ends, key)):
        if not ends or ends[-1] != len(tokens) or ends != sorted(ends):
            raise RuntimeError(f"{what}: ends {ends} must rise to the {len(tokens)} tokens given")
    output, start, key_start = torch.empty_like(query), 0, 0
    for end, key_end in zip(query_ends, key_ends, strict=True):
        one = (x.unsqueeze(0) for x in (query[start:end], key[key_start:key_end],
                                        value[key_start:key_end]))  # fmt: skip
        output[start:end] = _batched(*one, scale)[0]
        start, key_start = end, key_end
    return output


def npu_rotary_mul(input, r1, r2, *, rotary_mode="half", rotate=None):
    """``input * r1 + turned * r2``; pairs are neighbours, or the same place in both halves."""
    batch, tokens, heads, channels = input.shape
    if {input.dtype, r1.dtype, r2.dtype} - {*_HALF, torch.float} or input.dtype != r1.dtype:
        raise RuntimeError(f"input and tables share one dtype, got {input.dtype} and {r1.dtype}")
    if channels >= 896 or channels % 2 or batch * heads >= 1000:
        raise RuntimeError(f"{batch} x {heads} heads of {channels} channels are out of range")
    if not r1.shape == r2.shape == (1, tokens, 1, channels) or rotate is not None:
        raise RuntimeError(f"tables must be (1, {tokens}, 1, {channels}), got {tuple(r1.shape)}")
    turned = torch.empty_like(input)
    pairs = {"half": (slice(channels // 2), slice(channels // 2, None)),
             "interleave": (slice(0, None, 2), slice(1, None, 2))}  # fmt: skip
    first, second = pairs[rotary_mode]
    turned[..., first], turned[..., second] = -input[..., second], input[..., first]
    return torch.add(input.mul(r1), turned.mul(r2))


def npu_dynamic_quant(input, *, quant_mode="pertoken", **unused):
    """One symmetric scale for each row."""
    if input.dtype not in _HALF or input.dim() < 2 or quant_mode != "pertoken":
        raise RuntimeError(f"a half-precision matrix, by token; got {input.dtype}, {unused}")
    largest = input.float().abs().amax(dim=-1)
    scale = largest / 127.0
    return torch.round(input.float() / scale.clamp_min(1e-30)[..., None]).to(torch.int8), scale


def npu_quant_matmul(x1, x2, scale, *, pertoken_scale=None, bias=None, output_dtype=None, **_):
    """Exact integer product, scaled in float32; without ``output_dtype`` it would be int8."""
    if x1.dtype != torch.int8 or x2.dtype != torch.int8 or x1.dim() < 2:
        raise RuntimeError(f"two int8 matrices, got {x1.dtype} and {x2.dtype}")
    if max(x1.shape[-1], x2.shape[-1]) > 65535:
        raise RuntimeError("the last dimensions may be 65535 wide")
    if scale.dim() != 1 or scale.shape[0] not in {1, x2.shape[-1]}:
        raise RuntimeError(f"one scale for each of {x2.shape[-1]} columns, got {scale.shape}")
    if pertoken_scale.shape != x1.shape[:1] or pertoken_scale.dtype != torch.float32:
        raise RuntimeError("one float32 scale for each row")
    if bias is not None and bias.shape != x2.shape[-1:]:
        raise RuntimeError(f"one bias for each of {x2.shape[-1]} columns, got {bias.shape}")
    dtype = {5: torch.float16, 15: torch.bfloat16}[output_dtype]
    exact = (x1.double() @ x2.double()).float() * scale.float() * pertoken_scale[:, None]
    return (exact if bias is None else exact + bias.float()).to(dtype)


def npu_format_cast(input, *_, **__):
    """Layouts are a tag of the device; the values stay where they are."""
    if input.dim() < 2:
        raise RuntimeError("tiled layouts need a matrix")
    return input.clone()


BODIES: dict[str, Callable] = {
    body.__name__: body
    for body in (
        npu_fusion_attention,
        npu_rotary_mul,
        npu_dynamic_quant,
        npu_quant_matmul,
        npu_format_cast,
    )
}
