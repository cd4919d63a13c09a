"""A Ray cluster on this machine; each raylet is a machine as Ray sees it."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni import envs


@contextmanager
def raylets_of(*num_cpus: int) -> Iterator[object]:
    """Start raylets with so many CPUs each, and join this process to their cluster."""
    envs.prepare_ray()
    import ray
    from ray.cluster_utils import Cluster

    from vllm_omni.diffusion.executor import ray_actors

    first, *others = ({"num_cpus": count, "object_store_memory": 100 << 20} for count in num_cpus)
    cluster = Cluster(initialize_head=True, head_node_args={**first, "include_dashboard": False})
    try:
        for room in others:
            cluster.add_node(**room)
        ray_actors.connect(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
