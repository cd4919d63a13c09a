"""A Ray cluster on this machine; each raylet is a machine as Ray sees it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.helpers.server import ROOT
from vllm_omni import envs

SETTINGS = ROOT / "examples/online_serving/ray/ray.env"


GIVEN_BACK_S = 30.0


def shipped_settings() -> dict[str, str]:
    """Variables of every machine of a cluster, as we ship them."""
    lines = SETTINGS.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@contextmanager
def raylets_of(*num_cpus: int) -> Iterator[object]:
    """Start raylets with so many CPUs each, and join this process to their cluster.

    Until the block ends, it and the processes that it starts have the settings that we ship.
    """
    envs.prepare_ray()
    import ray
    from ray.cluster_utils import Cluster

    from vllm_omni.diffusion.executor import ray_actors

    first, *others = ({"num_cpus": count, "object_store_memory": 100 << 20} for count in num_cpus)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shipped_settings().items():
            patch.setenv(name, value)
        cluster = Cluster(
            initialize_head=True, head_node_args={**first, "include_dashboard": False}
        )
        try:
            for room in others:
                cluster.add_node(**room)
            ray_actors.connect(cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def wait_until_free() -> None:
    """Wait until no actor and no placement group holds a place of the cluster."""
    import ray

    deadline_s = time.monotonic() + GIVEN_BACK_S
    while (free := ray.available_resources().get("CPU")) != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline_s, f"{free} CPUs are free"
        time.sleep(0.1)
