"""The only reader of the process environment, which includes the nodes of devices.

Each variable is declared once, with its default and what it does, and is called for its value.
:func:`check` reads all of them at start-up.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from vllm_omni.errors import ConfigError

Value = TypeVar("Value")

_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
DEV = Path("/dev")
DEVICE_NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
_EXPORTING = threading.RLock()
"""Held while variables are set for a time: the environment is one for all threads."""
_TRUTH = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def _true_or_false(text: str) -> bool:
    if text.lower() not in _TRUTH:
        *others, last = _TRUTH
        raise ValueError(f"must be {', '.join(others)} or {last} in any case")
    return _TRUTH[text.lower()]


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ValueError("must be an integer of at least 1")
    return int(text)


@dataclass(frozen=True, slots=True)
class Variable(Generic[Value]):
    """A variable of the environment; a call reads it, and an empty one counts as not set.

    Attributes:
        parse: its text to its value, or a ``ValueError`` that says what is allowed.
    """

    name: str
    parse: Callable[[str], Value]
    default: Value
    help: str

    def __call__(self) -> Value:
        """Read the variable, or return its default.

        Raises:
            ConfigError: naming the variable, what is allowed and what it is.
        """
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}, got {text!r}") from None


action_root: Variable[str | None] = Variable(
    "VLLM_OMNI_LINGBOT_ACTION_ROOT", str, None,
    "trusted root of recorded camera paths, where model_config.lingbot_action_root is not set",
)  # fmt: skip
api_key: Variable[str | None] = Variable(
    "VLLM_API_KEY", str, None, "key that requests must carry, where --api-key is not typed"
)
log_config_file: Variable[str | None] = Variable(
    "VLLM_LOGGING_CONFIG_PATH", str, None, "file of --log-config-file, where that is not typed"
)
max_image_pixels: Variable[int | None] = Variable(
    "VLLM_MAX_IMAGE_PIXELS", _at_least_one, None,
    "pixels of a picture that a client gives, where that is below the model's own limit",
)  # fmt: skip
media_url_allow_redirects = Variable(
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS", _true_or_false, default=True,
    help="whether the URL of a picture may redirect",
)  # fmt: skip
video_sync_timeout_s = Variable(
    "VLLM_OMNI_VIDEO_SYNC_TIMEOUT", _at_least_one, 600,
    "seconds that `POST /v1/videos/sync` waits for its video",
)  # fmt: skip
storage_path: Variable[str | None] = Variable(
    "VLLM_OMNI_SERVER_STORAGE__PATH", str, None,
    "folder in which each server makes a private one for the finished videos of jobs; that for "
    "temporary files (TMPDIR) where it is not set",
)  # fmt: skip

VARIABLES = (
    action_root, api_key, log_config_file, max_image_pixels, media_url_allow_redirects,
    video_sync_timeout_s, storage_path,
)  # fmt: skip
"""All variables that set something."""


def check() -> None:
    """Read every variable once, before anything starts.

    Raises:
        ConfigError: one line that names every variable that is wrong.
    """
    wrong = []
    for variable in VARIABLES:
        try:
            variable()
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(f"environment: {'; '.join(wrong)}")


def detect_platform() -> str:
    """The platform whose device nodes this machine has, ``"cpu"`` without any."""
    found = (name for name, pattern in DEVICE_NODES.items() if any(DEV.glob(pattern)))
    return next(found, "cpu")


def visible_devices(platform: str, workers: Mapping[str, str]) -> tuple[str, str | None]:
    """Name of a platform's variable of visible devices, and its value.

    Args:
        platform: ``cuda`` or ``npu``.
        workers: variables of the workers, which stand over those of this process.

    Returns:
        The name and the list, ``None`` where it is not set.
    """
    name = _VISIBLE_DEVICES[platform]
    return name, workers.get(name, os.environ.get(name))


def show_devices(platform: str, devices: str) -> None:
    """Let this process see only these devices of a platform; before its library looks."""
    if platform in _VISIBLE_DEVICES:
        os.environ[_VISIBLE_DEVICES[platform]] = devices


def c_compiler() -> str | None:
    """The C compiler that the operator chose, ``None`` where it is looked for."""
    return os.environ.get("CC") or None


def prefer_interface(interface: str) -> None:
    """Let the libraries connect the ranks by a network interface, unless told otherwise."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != "lo":  # Ranks of one machine exchange tensors past its network.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("HCCL_SOCKET_IFNAME", interface)


def prepare_ray() -> None:
    """Let this process outlive a lost head of its Ray cluster for ten minutes, unless told not to.

    To be called before Ray is imported; by itself it ends the process after one minute.
    """
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def name_vllm_world(name: str) -> None:
    """Name that vLLM gives the shared memory of this process's world."""
    os.environ["VLLM_DIST_IDENT"] = name


def export(variables: dict[str, str]) -> None:
    """Set variables for this process and those that it starts."""
    os.environ.update(variables)


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile; other threads wait to do so."""
    with _EXPORTING:
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)
            os.environ.update(before)
