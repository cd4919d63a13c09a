"""The layers of :mod:`linear` on vLLM's parallel linears, imported only when they are chosen.

Written against the names that vLLM 0.23 to 0.33 share; ``docs/vllm_backend.md`` says which
versions were run. vLLM owns the representation of the weights, their sharding and the sum over
tensor-parallel ranks; names and shapes of the checkpoint's tensors stay this package's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import vllm.model_executor.layers.linear as vllm_linear
from jaxtyping import Float
from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.layers import linear
from vllm_omni.diffusion.layers.vllm_quantization import quantization_config
from vllm_omni.diffusion.layers.vllm_world import join_vllm_world, leave_vllm_world
from vllm_omni.diffusion.layers.weights import WeightedModule, WeightTarget
from vllm_omni.errors import ConfigError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

_COMPONENT = "transformer."
_WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeightTarget(WeightTarget):
    """A checkpoint tensor that goes whole to vLLM's loader, which keeps this rank's part.

    Attributes:
        layer: owner of the parameter.
        name: of the parameter.
        part: of a fused parameter: ``"q"``, ``"k"`` or ``"v"``.
    """

    layer: "VllmLinear"
    name: str
    part: str | None = None

    def store(self, part: Tensor) -> None:
        """Hand the tensor to the layer."""
        self.layer.load(self.name, part, self.part)


class VllmLinear(WeightedModule):
    """One of vLLM's linears in the place of one of ours.

    Args:
        inner: the layer of vLLM.
        whole: output and input features over all ranks, of one checkpoint tensor.
        local: the same on this rank.
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
        """Multiply, add the bias and, where inputs are shared out, sum over ranks."""
        return self.inner(x)

    def load(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Give a checkpoint tensor to the loader of the parameter ``name``.

        Methods that quantise while loading count what arrives from the first weight on, so other
        tensors wait for it. They also replace parameters: each is looked up when it is written.
        """
        if name == _WEIGHT:
            self._has_weight = True
            self._write(name, tensor, part)
            self._write_waiting()
        elif self._has_weight:
            self._write(name, tensor, part)
        else:
            self._waiting.append((name, tensor, part))

    def process_weights_after_loading(self) -> None:
        """Let vLLM rewrite the weights; some methods drop the loaded ones.

        Raises:
            ConfigError: if the quantisation does not run on this device.
        """
        self._write_waiting()
        with self._refusal():
            self.inner.quant_method.process_weights_after_loading(self.inner)

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Every parameter under the name of its checkpoint tensor, scales included."""
        for name, parameter in self.inner.named_parameters(recurse=False):
            yield f"{prefix}{name}", self._target(name, parameter, tuple(parameter.shape))

    def _write_waiting(self) -> None:
        while self._waiting:
            self._write(*self._waiting.pop(0))

    def _write(self, name: str, tensor: Tensor, part: str | None) -> None:
        parameter = self.inner.get_parameter(name)
        arguments = (tensor,) if part is None else (tensor, part)
        with self._refusal():
            parameter.weight_loader(parameter, *arguments)

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        """A method that lacks an operator fails deep inside; say which layer and which setting."""
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
        self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], part: str | None = None
    ) -> LayerWeightTarget:
        return LayerWeightTarget(parameter, self._whole(shape), layer=self, name=name, part=part)

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape over all ranks: the first axis of a parameter is outputs, the second inputs."""
        axes = zip(shape, self.local, self.whole, strict=False)
        grown = tuple(whole if size == local else size for size, local, whole in axes)
        return grown + shape[len(grown) :]


class VllmQKVLinear(VllmLinear):
    """Query, key and value projections as one product; each rank makes some of the heads."""

    @property
    def local_dim(self) -> int:
        """Output features of each of the three parts on this rank."""
        return self.local[0]

    def forward_kv(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """Key and value only. vLLM's weights cannot be cut, so the query is made and dropped."""
        return self.inner(x)[..., self.local_dim :]

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Three tensors called ``q``, ``k`` and ``v`` beside this layer, for each parameter."""
        beside = prefix.rstrip(".").rpartition(".")[0]
        parts = linear.QKVParallelLinear.PARTS
        for name, parameter in self.inner.named_parameters(recurse=False):
            shape = (parameter.shape[0] // len(parts), *parameter.shape[1:])
            for part in parts:
                stem = f"{beside}.{part}" if beside else part
                yield f"{stem}.{name}", self._target(name, parameter, shape, part)


class VllmLinearBackend:
    """Puts vLLM's layers into a model, over vLLM's groups of the ranks of this world.

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

    def install(self, module: nn.Module) -> None:
        """Replace the linears of ``module`` that store their weights plainly.

        Raises:
            ConfigError: if a pattern of ``ignored_layers`` names no linear, or the quantisation
                cannot take a layer.
        """
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
        """vLLM's layer for one of ours, on the device, without weights.

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

    def process(self, module: nn.Module) -> None:
        """Rewrite the weights of vLLM's layers and of those that were left as they are."""
        linear.process_weights(module)
        for layer in module.modules():
            if isinstance(layer, VllmLinear):
                layer.process_weights_after_loading()

    def release(self) -> None:
        """End vLLM's groups, and with them all groups of this process."""
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
    """Whether a pattern means a layer; the component's name may stand before it."""
    return fnmatchcase(name, pattern.removeprefix(_COMPONENT))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Some methods of vLLM take the type of their results from torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
