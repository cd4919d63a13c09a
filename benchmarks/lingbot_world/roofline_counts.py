"""FLOPs and bytes of one chunk, counted from the transformer's and the VAE's geometry.

Conventions: one multiply-add is 2 FLOP, biases and elementwise work count no FLOP, bytes are
those of activations and weights in ``element_bytes``. Only the standard library is used.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

SPATIAL_FACTOR = 8
PATCH_AREA = 4
CAMERA_CHANNELS = 6 * SPATIAL_FACTOR**2
LATENT_FRAMES = 3
TEXT_TOKENS = 512
PROBES = 4
HISTORY_FRAMES = 2
"""Input frames that a causal convolution of three taps remembers."""

_CONFIG_KEYS = {
    "num_layers": "layers",
    "num_attention_heads": "heads",
    "attention_head_dim": "head_dim",
    "ffn_dim": "ffn_dim",
    "text_dim": "text_dim",
    "freq_dim": "freq_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "sliding_window_num_frames": "window_latent_frames",
    "sink_size": "sink_latent_frames",
}


@dataclass(frozen=True, slots=True)
class Model:
    """Transformer sizes and the video size; the defaults are the 14B model at 832x480."""

    height: int = 480
    width: int = 832
    layers: int = 40
    heads: int = 40
    head_dim: int = 128
    ffn_dim: int = 13824
    text_dim: int = 4096
    freq_dim: int = 256
    in_channels: int = 36
    out_channels: int = 16
    window_latent_frames: int = 18
    sink_latent_frames: int = 9
    element_bytes: int = 2

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def latent_pixels(self) -> int:
        """Latent rows times columns."""
        return (self.height // SPATIAL_FACTOR) * (self.width // SPATIAL_FACTOR)

    @property
    def frame_tokens(self) -> int:
        """Tokens of one latent frame."""
        return self.latent_pixels // PATCH_AREA

    @property
    def chunk_tokens(self) -> int:
        """Query tokens of one forward."""
        return LATENT_FRAMES * self.frame_tokens

    @property
    def window_tokens(self) -> int:
        """Key tokens of one forward once the window is full."""
        return self.window_latent_frames * self.frame_tokens

    def visible_tokens(self, chunk_index: int) -> int:
        """Key tokens of the forwards of chunk ``chunk_index`` (from 0)."""
        latent_frames = min(self.window_latent_frames, (chunk_index + 1) * LATENT_FRAMES)
        return latent_frames * self.frame_tokens


def read_model(config: Path | None, *, height: int, width: int) -> Model:
    """Geometry of ``transformer/config.json``, or the 14B defaults without one.

    Raises:
        KeyError: a size is missing from the file.
    """
    model = Model(height=height, width=width)
    if config is None:
        return model
    values = json.loads(config.read_text())
    return replace(model, **{field: values[key] for key, field in _CONFIG_KEYS.items()})


def parameter_count(model: Model) -> int:
    """Elements of the transformer."""
    dim = model.dim
    linears = [
        (dim, model.in_channels * PATCH_AREA),
        (dim, CAMERA_CHANNELS * PATCH_AREA), (dim, dim), (dim, dim),
        (dim, model.text_dim), (dim, dim),
        (dim, model.freq_dim), (dim, dim), (6 * dim, dim),
        (model.out_channels * PATCH_AREA, dim),
    ]  # fmt: skip
    # Eight of attention and four of the camera are square.
    layer = [(dim, dim)] * 12 + [(model.ffn_dim, dim), (dim, model.ffn_dim)]
    # A layer's modulation has 6 rows, its affine norm 2, its RMS norms 4; the head's modulation 2.
    vectors = dim * (12 * model.layers + 2)
    return vectors + sum(rows * (columns + 1) for rows, columns in linears + model.layers * layer)


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """One transformer layer in one forward."""

    qkv: int
    out: int
    self_attention: int
    cross_q: int
    cross_out: int
    cross_kv: int
    cross_attention: int
    ffn: int
    camera: int

    @property
    def gemm(self) -> int:
        """Linears that every forward runs."""
        return self.qkv + self.out + self.cross_q + self.cross_out + self.ffn


def layer_flops(model: Model, visible_tokens: int) -> LayerFlops:
    """Count one layer whose queries see ``visible_tokens`` keys."""
    tokens, dim = model.chunk_tokens, model.dim
    square = 2 * tokens * dim * dim
    return LayerFlops(
        qkv=3 * square,
        out=square,
        self_attention=4 * tokens * visible_tokens * dim,
        cross_q=square,
        cross_out=square,
        cross_kv=4 * TEXT_TOKENS * dim * dim,
        cross_attention=4 * tokens * TEXT_TOKENS * dim,
        ffn=4 * tokens * dim * model.ffn_dim,
        camera=4 * square,
    )


@dataclass(frozen=True, slots=True)
class OuterFlops:
    """Work outside the layers in one forward; the timestep is embedded as a single row."""

    patch: int
    camera: int
    time: int
    text: int
    head: int


def outer_flops(model: Model) -> OuterFlops:
    """Count the embeddings and the head."""
    tokens, dim = model.chunk_tokens, model.dim
    return OuterFlops(
        patch=2 * tokens * dim * model.in_channels * PATCH_AREA,
        camera=2 * tokens * dim * (CAMERA_CHANNELS * PATCH_AREA + 2 * dim),
        time=2 * dim * (model.freq_dim + dim + 6 * dim),
        text=2 * TEXT_TOKENS * dim * (model.text_dim + dim),
        head=2 * tokens * dim * model.out_channels * PATCH_AREA,
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """What one chunk computes.

    Attributes:
        camera_cached: camera modulation once per chunk, not once per forward.
        cross_cached: text keys and values once per prompt.
        tail_skip: the commit stops after the last layer's keys and values; no head.
        commit: whether the commit forward runs at all (without it the history changes).
    """

    key: str
    label: str
    camera_cached: bool = True
    cross_cached: bool = True
    tail_skip: bool = False
    commit: bool = True

    @property
    def forwards(self) -> int:
        """Forwards per chunk."""
        return PROBES + self.commit


VARIANTS = (
    Variant("A", "nothing cached", camera_cached=False, cross_cached=False),
    Variant("B", "+ text K/V once per prompt", camera_cached=False),
    Variant("C", "+ camera modulation once per chunk"),
    Variant("D", "+ commit tail skip", tail_skip=True),
    Variant("E", "C without the commit (lossy)", commit=False),
)


@dataclass(frozen=True, slots=True)
class ChunkFlops:
    """The transformer's work in one chunk."""

    self_attention: int
    cross_attention: int
    gemm: int
    cross_kv: int
    camera: int
    outer: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.linear + self.attention

    @property
    def linear(self) -> int:
        """Everything that runs as a matrix product with weights."""
        return self.gemm + self.cross_kv + self.camera + self.outer

    @property
    def attention(self) -> int:
        """Self and cross attention."""
        return self.self_attention + self.cross_attention


def chunk_flops(model: Model, variant: Variant, visible_tokens: int | None = None) -> ChunkFlops:
    """Count the transformer of one chunk; the window is full unless told otherwise."""
    visible = model.window_tokens if visible_tokens is None else visible_tokens
    layer, outer = layer_flops(model, visible), outer_flops(model)
    runs = variant.forwards
    text_runs = 0 if variant.cross_cached else runs
    camera_runs = 1 if variant.camera_cached else runs
    # The last layer of a trimmed commit attends to nothing and keeps two thirds of q|k|v.
    skipped = int(variant.tail_skip and variant.commit)
    layer_runs = runs * model.layers
    return ChunkFlops(
        self_attention=(layer_runs - skipped) * layer.self_attention,
        cross_attention=(layer_runs - skipped) * layer.cross_attention,
        gemm=layer_runs * layer.gemm - skipped * (layer.gemm - layer.qkv * 2 // 3),
        cross_kv=text_runs * model.layers * layer.cross_kv,
        camera=camera_runs * (model.layers * layer.camera + outer.camera),
        outer=runs * (outer.patch + outer.time)
        + (runs - skipped) * outer.head
        + text_runs * outer.text,
    )


def text_kv_flops(model: Model) -> int:
    """Text keys and values of all layers, once per prompt."""
    return model.layers * layer_flops(model, 0).cross_kv


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes through device memory in one chunk; the parts of one kernel are counted once."""

    weights_bytes: int
    gemm_bytes: int
    attention_bytes: int
    elementwise_fused_bytes: int
    elementwise_eager_bytes: int


def chunk_traffic(model: Model, forwards: int) -> Traffic:
    """Count what must cross device memory: ``stream`` is one ``[tokens, dim]`` tensor.

    Fused elementwise work passes 23 such tensors per layer (norm and modulation 2, q and k norm
    with rotation and cache write 6, gate with camera and norm 6, cross query norm 2, residual
    with norm and modulation 4, last gate 3). Op by op, where a float32 intermediate is two, it
    passes 143 (two norms with modulation 20, three RMS norms 60, two rotations 18, cache write 4,
    two gates 22, camera 6, affine norm 10, residual 3) and the activation of the feed-forward
    part twice; ``count_work.py`` counts the same from the modules.
    """
    dim, size = model.dim, model.element_bytes
    stream = model.chunk_tokens * dim * size
    hidden = model.chunk_tokens * model.ffn_dim * size
    weights = (6 * dim * dim + 2 * dim * model.ffn_dim) * size
    runs = forwards * model.layers
    return Traffic(
        weights_bytes=runs * weights,
        gemm_bytes=runs * (weights + 12 * stream + 2 * hidden),
        attention_bytes=runs * (2 * model.window_tokens * dim * size + 2 * stream),
        elementwise_fused_bytes=runs * 23 * stream,
        elementwise_eager_bytes=runs * (143 * stream + 2 * hidden),
    )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one Ulysses rank sends in one chunk; it receives as much.

    Attributes:
        calls: messages, those of k|v and q apart, so that the first hides behind the product of q.
        least_calls: messages if q|k|v were one and nothing were hidden, as the bound has it.
    """

    qkv_bytes: int = 0
    out_bytes: int = 0
    head_bytes: int = 0
    calls: int = 0
    least_calls: int = 0

    @property
    def total_bytes(self) -> int:
        """All three kinds."""
        return self.qkv_bytes + self.out_bytes + self.head_bytes


def chunk_exchange(model: Model, ranks: int, variant: Variant) -> Exchange:
    """Count the all-to-alls (k|v in one, q in another, then the output) and the head's gathers.

    A probe exchanges ``3 layers + 1`` times. A trimmed commit exchanges ``3 layers - 2`` times;
    its last exchange carries k|v, and its head is never gathered.
    """
    if ranks == 1:
        return Exchange()
    skipped = int(variant.tail_skip and variant.commit)
    layer_runs = variant.forwards * model.layers
    sent = model.chunk_tokens * model.dim * model.element_bytes * (ranks - 1) // ranks**2
    head = model.chunk_tokens * model.out_channels * PATCH_AREA * model.element_bytes
    gathers = variant.forwards - skipped
    return Exchange(
        qkv_bytes=(3 * layer_runs - skipped) * sent,
        out_bytes=(layer_runs - skipped) * sent,
        head_bytes=gathers * head * (ranks - 1) // ranks,
        calls=3 * layer_runs - 2 * skipped + gathers,
        least_calls=2 * layer_runs - skipped + gathers,
    )
