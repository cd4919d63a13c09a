"""The only reader of the process environment: typed, strict, evaluated on call."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def action_root() -> str | None:
    """Trusted root of recorded camera paths, when the deploy file names none."""
    return os.environ.get("VLLM_OMNI_LINGBOT_ACTION_ROOT") or None


def api_key() -> str | None:
    """Key that requests must carry, when the command line names none."""
    return os.environ.get("VLLM_API_KEY") or None


def max_image_pixels() -> int | None:
    """Pixel limit for pictures given by a client, in addition to the model's own."""
    return _positive_int("VLLM_MAX_IMAGE_PIXELS")


def media_url_allow_redirects() -> bool:
    """Whether a picture URL may redirect."""
    return os.environ.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1") not in {"0", "false", "False"}


def video_sync_timeout_s() -> int:
    """Seconds that ``POST /v1/videos/sync`` waits for its video."""
    return _positive_int("VLLM_OMNI_VIDEO_SYNC_TIMEOUT") or 600


def storage_path() -> str:
    """Directory of finished videos of the ``/v1/videos`` job family."""
    return os.environ.get("VLLM_OMNI_SERVER_STORAGE__PATH") or "/tmp/storage"


def golden_dir() -> str | None:
    """Directory of the full golden arrays, for tests."""
    return os.environ.get("LINGBOT_GOLDEN_DIR") or None


def master_port() -> int | None:
    """Rendezvous port of a worker group, when the operator fixes one."""
    return _positive_int("MASTER_PORT")


def visible_devices(platform: str) -> str | None:
    """Device list that the operator allows this process on a platform, ``None`` when not set."""
    name = _VISIBLE_DEVICES.get(platform)
    return None if name is None else os.environ.get(name)


def show_devices(platform: str, devices: str) -> None:
    """Let this process see only these devices of a platform; before its library looks."""
    if platform in _VISIBLE_DEVICES:
        os.environ[_VISIBLE_DEVICES[platform]] = devices


def prefer_loopback() -> None:
    """Let gloo connect the ranks of this machine by its loopback, unless told otherwise."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def name_vllm_world(name: str) -> None:
    """Name that vLLM gives the shared memory of this process's world."""
    os.environ["VLLM_DIST_IDENT"] = name


def export(variables: dict[str, str]) -> None:
    """Set variables for this process and those that it starts."""
    os.environ.update(variables)


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _positive_int(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} must be a positive integer, got {text!r}")
    return int(text)
