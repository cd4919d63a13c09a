"""vLLM's parallel linears in the place of this package's, imported only when they are chosen.

vLLM owns the representation of the weights, their sharding and the sum over tensor-parallel ranks.
Names and shapes of checkpoint tensors stay those of this package. The code uses names that vLLM
0.23 to 0.33 have in common; ``docs/vllm_backend.md`` says which versions were run.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import vllm.model_executor.layers.linear as vllm_linear
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers import linear
from vllm_omni.diffusion.layers.vllm_world import join_vllm_world, leave_vllm_world
from vllm_omni.diffusion.layers.weights import WeightedModule, WeightTarget
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_COMPONENT = "transformer."
_WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeightTarget(WeightTarget):
    """The destination of a checkpoint tensor that vLLM's loader shards by itself.

    Attributes:
        layer: owner of the parameter.
        name: name of the parameter in its layer.
        shard_id: ``"q"``, ``"k"`` or ``"v"`` for a fused parameter.
    """

    layer: "VllmLinear"
    name: str
    shard_id: str | None = None

    @override
    def store(self, share: Tensor) -> None:
        self.layer.load(self.name, share, self.shard_id)


class VllmLinear(WeightedModule):
    """One of vLLM's linears with the interface of one of ours.

    Args:
        inner: the layer of vLLM.
        whole: numbers of output and input features of one checkpoint tensor, over all ranks.
        local: the same numbers on this rank.
    """

    def __init__(
        self, inner: vllm_linear.LinearBase, whole: tuple[int, int], local: tuple[int, int]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.whole = whole
        self.local = local
        self._waiting: list[tuple[str, Tensor, str | None]] = []
        self._has_weight = False

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Compute the output features, summed over ranks where the inputs are shared out."""
        return self.inner(x)

    def load(self, name: str, tensor: Tensor, shard_id: str | None) -> None:
        """Give a checkpoint tensor to the loader of the parameter ``name``.

        A method that quantises while loading counts what arrives from the first weight on, so all
        other tensors wait for the weight. It also replaces parameters, so each one is looked up
        when it is written.
        """
        if name == _WEIGHT:
            self._has_weight = True
            self._write(name, tensor, shard_id)
            self._write_waiting()
        elif self._has_weight:
            self._write(name, tensor, shard_id)
        else:
            self._waiting.append((name, tensor, shard_id))

    def process_weights_after_loading(self) -> None:
        """Let vLLM rewrite the weights. Some of its methods drop the loaded ones.

        One row goes through a quantised layer, so that a kernel that vLLM chose for this device and
        that cannot run is found while loading and not in a session.

        Raises:
            ConfigError: if the quantisation does not run on this device.
        """
        self._write_waiting()
        with self._refusal():
            self.inner.quant_method.process_weights_after_loading(self.inner)
            if self.inner.quant_config is not None:
                self._try_one_row()

    def _try_one_row(self) -> None:
        row = torch.zeros(
            1,
            self.local[1],
            dtype=self.inner.params_dtype,
            device=next(self.inner.parameters()).device,
        )
        self.inner.quant_method.apply(self.inner, row, self.inner.bias)

    @override
    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        for name, parameter in self.inner.named_parameters(recurse=False):
            yield f"{prefix}{name}", self._target(name, parameter, tuple(parameter.shape))

    def _write_waiting(self) -> None:
        while self._waiting:
            self._write(*self._waiting.pop(0))

    def _write(self, name: str, tensor: Tensor, shard_id: str | None) -> None:
        parameter = self.inner.get_parameter(name)
        arguments = (tensor,) if shard_id is None else (tensor, shard_id)
        with self._refusal():
            parameter.weight_loader(parameter, *arguments)

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        """Name layer and setting when a method that lacks an operator fails deep inside vLLM."""
        try:
            yield
        except (RuntimeError, AttributeError) as error:
            if self.inner.quant_config is None:
                raise
            raise ConfigError(
                f"quantization_config: vLLM's {self.inner.quant_config.get_name()} does not run "
                f"on this device: {self.inner.prefix}: {error}"
            ) from error

    def _target(
        self,
        name: str,
        parameter: nn.Parameter,
        shape: tuple[int, ...],
        shard_id: str | None = None,
    ) -> LayerWeightTarget:
        whole = self._whole(shape)
        return LayerWeightTarget(parameter, whole, layer=self, name=name, shard_id=shard_id)

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape over all ranks; axes of a parameter are outputs, then inputs."""
        axes = zip(shape, self.local, self.whole, strict=False)
        grown = tuple(whole if size == local else size for size, local, whole in axes)
        return grown + shape[len(grown) :]


class VllmQKVLinear(VllmLinear):
    """Query, key and value projections as one product, of which each rank makes some heads."""

    @property
    def local_dim(self) -> int:
        """Number of output features of each of the three projections on this rank."""
        return self.local[0]

    def forward_kv(
        self, x: Float[Tensor, "*batch n"]
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch q"]]:
        """Compute key and value; vLLM's weights cannot be cut, so what is left is the query."""
        made = self.inner(x)
        return made[..., self.local_dim :], made[..., : self.local_dim]

    def forward_q(self, rest: Float[Tensor, "*batch q"]) -> Float[Tensor, "*batch q"]:
        """Return the query, which :meth:`forward_kv` has left."""
        return rest

    @override
    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        beside = prefix.rstrip(".").rpartition(".")[0]
        shard_ids = linear.QKVParallelLinear.NAMES
        for name, parameter in self.inner.named_parameters(recurse=False):
            shape = (parameter.shape[0] // len(shard_ids), *parameter.shape[1:])
            for shard_id in shard_ids:
                stem = f"{beside}.{shard_id}" if beside else shard_id
                yield f"{stem}.{name}", self._target(name, parameter, shape, shard_id)


class VllmLinearBackend(linear.LinearBackend):
    """Puts vLLM's layers into a model; they use vLLM's groups of the ranks of this world.

    Raises:
        ConfigError: if vLLM does not know the quantisation.
    """

    def __init__(
        self,
        quantization: Mapping[str, object],
        *,
        checkpoint: Path,
        parallel: ParallelState,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        ignored = quantization.get("ignored_layers", ())
        if not isinstance(ignored, tuple):
            raise ConfigError(f"ignored_layers must be a list of names, got {ignored!r}")
        self.ignored = tuple(str(pattern) for pattern in ignored)
        self.device = device
        self.dtype = dtype
        self.tensor_size = parallel.tensor.size
        self._world = join_vllm_world(parallel, device=device, dtype=dtype)
        with set_current_vllm_config(self._world):
            self.quantization = quantization_config(quantization.get("method"), checkpoint)

    @override
    def install(self, module: nn.Module) -> None:
        """Replace the linears of ``module`` that store their weights plainly."""
        ours = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, linear.ShardedLinear)
            and isinstance(layer.method, linear.PlainLinearMethod)
        }
        self._check_ignored(list(ours))
        for name, layer in ours.items():
            module.set_submodule(name, self.replacement(name, layer))
        kept = sum(self._is_ignored(name) for name in ours)
        how = "unquantised" if self.quantization is None else self.quantization.get_name()
        logger.info("%d linears by vLLM, %s (%d kept as they are)", len(ours), how, kept)

    def replacement(self, name: str, layer: linear.ShardedLinear) -> VllmLinear:
        """Make vLLM's layer for one of ours, on the device, without weights.

        Raises:
            ConfigError: if the quantisation cannot take the layer.
        """
        quantization = None if self._is_ignored(name) else self.quantization
        options = {
            "params_dtype": self.dtype,
            "quant_config": quantization,
            "prefix": name,
            "return_bias": False,
        }
        with set_current_vllm_config(self._world), self.device, default_dtype(self.dtype):
            try:
                return self._replacement(layer, options)
            except (ValueError, NotImplementedError) as error:
                if quantization is None:
                    raise
                raise ConfigError(
                    f"quantization_config: vLLM's {quantization.get_name()} cannot take the linear "
                    f"{name}: {error}; add it to ignored_layers"
                ) from error

    @override
    def process(self, module: nn.Module) -> None:
        super().process(module)
        for layer in module.modules():
            if isinstance(layer, VllmLinear):
                layer.process_weights_after_loading()

    @override
    def release(self) -> None:
        """End vLLM's groups, and with them all process groups of this process."""
        leave_vllm_world()

    def _replacement(self, layer: linear.ShardedLinear, options: dict[str, object]) -> VllmLinear:
        size = self.tensor_size
        match layer:
            case linear.QKVParallelLinear(dim=dim):
                # Heads are cut between ranks only, so one wide head per rank is the same cut.
                inner = vllm_linear.QKVParallelLinear(dim, dim // size, size, **options)
                return VllmQKVLinear(inner, (dim, dim), (dim // size, dim))
            case linear.ColumnParallelLinear(shape=(wide, deep)):
                inner = vllm_linear.ColumnParallelLinear(deep, wide, **options)
                return VllmLinear(inner, (wide, deep), (wide // size, deep))
            case linear.RowParallelLinear(shape=(wide, deep)):
                inner = vllm_linear.RowParallelLinear(deep, wide, **options)
                return VllmLinear(inner, (wide, deep), (wide, deep // size))
            case linear.ReplicatedLinear(shape=(wide, deep)):
                inner = vllm_linear.ReplicatedLinear(deep, wide, **options)
                return VllmLinear(inner, (wide, deep), (wide, deep))
            case _:
                raise TypeError(f"vLLM has no linear for {type(layer).__name__}")

    def _is_ignored(self, name: str) -> bool:
        return any(_names(pattern, name) for pattern in self.ignored)

    def _check_ignored(self, names: list[str]) -> None:
        for pattern in self.ignored:
            if not any(_names(pattern, name) for name in names):
                raise ConfigError(
                    f"quantization_config.ignored_layers: {pattern!r} names no linear; names are "
                    f"like {', '.join(names[:2] + names[-1:])}, and * stands for anything"
                )


def _names(pattern: str, name: str) -> bool:
    """Tell whether a pattern matches a layer; it may begin with the component's name."""
    return fnmatchcase(name, pattern.removeprefix(_COMPONENT))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, from which some methods of vLLM take that of their results."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_FP8 = "fp8"
_FP8_PER_TENSOR = "fp8_per_tensor"


def quantization_config(method: object, checkpoint: Path) -> QuantizationConfig | None:
    """Find vLLM's configuration object of a quantisation; ``None`` for none.

    ``fp8`` and ``fp8_per_tensor`` quantise a plain checkpoint while it is loaded. Newer releases
    of vLLM keep ``fp8`` for checkpoints that hold 8-bit weights, so there both names mean
    ``fp8_per_tensor``. Any other name is looked up among vLLM's methods and those that a plug-in
    has registered; if the method has a description file, it must be in the checkpoint.

    Args:
        checkpoint: directory of the component.

    Raises:
        ConfigError: if this vLLM has no such method, or its description is missing.
    """
    if method is None:
        return None
    if method in {_FP8, _FP8_PER_TENSOR}:
        return _online_fp8()
    try:
        found = get_quantization_config(str(method))
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"quantization_config.method {method!r}: the installed vLLM does not know it ({error})"
        ) from error
    return found.from_config(_description(str(method), found.get_config_filenames(), checkpoint))


def _online_fp8() -> QuantizationConfig:
    try:
        return Fp8Config(is_checkpoint_fp8_serialized=False, activation_scheme="dynamic")
    except ValueError:
        # This release names it fp8_per_tensor, and has the two imports below.
        from vllm.config.quantization import resolve_quantization_config
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        return OnlineQuantizationConfig(args=resolve_quantization_config(_FP8_PER_TENSOR, None))


def _description(method: str, names: list[str], checkpoint: Path) -> dict[str, object]:
    if not names:
        return {}
    for name in names:
        file = checkpoint / name
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    raise ConfigError(
        f"quantization_config.method {method!r} needs its description in {checkpoint.name}/: "
        f"{' or '.join(names)}"
    )
