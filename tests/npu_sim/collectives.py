"""One rank of the collectives' check: every exchange that the project uses, in both orders."""

import os
import sys

import torch
import torch.distributed as dist

from tests.npu_sim import kernels, library, simulation
from tests.npu_sim.processes import result_file

ORDERS = ("eager", "deferred")
LATENT_FRAMES, LOCAL_TOKENS, HEADS, HEAD_DIM = 3, 2, 16, 4


def counted(rank: int, *shape: int) -> torch.Tensor:
    """Values that tell their rank and their place."""
    size = torch.Size(shape).numel()
    return (torch.arange(size).reshape(shape) % 97 + 100 * rank).float()


def plain_collectives(rank: int, size: int) -> dict[str, torch.Tensor]:
    mine = counted(rank, size, 3).to("npu")
    found = {}
    found["sum"] = mine.clone()
    dist.all_reduce(found["sum"])
    found["sum_bf16"] = mine.bfloat16()
    dist.all_reduce(found["sum_bf16"])
    found["largest"] = mine.clone()
    dist.all_reduce(found["largest"], dist.ReduceOp.MAX)
    found["gathered"] = torch.empty(size, size, 3, dtype=torch.uint8, device="npu")
    dist.all_gather_into_tensor(found["gathered"].flatten(0, 1), mine.to(torch.uint8))
    found["exchanged"] = torch.empty_like(mine)
    dist.all_to_all_single(found["exchanged"], mine)
    found["uneven"] = torch.empty(size * (size + 1) // 2, device="npu")
    dist.all_to_all_single(
        found["uneven"], counted(rank, size, rank + 1).flatten().to("npu"),
        [peer + 1 for peer in range(size)], [rank + 1] * size,
    )  # fmt: skip
    found["told"] = mine.clone()
    dist.broadcast(found["told"], src=size - 1)
    dist.barrier()
    return found


def root_pixels(rank: int, size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Every rank's columns to the root by one batch of sends; also the number of works."""
    columns = counted(rank, 2, 3, 4).to(torch.uint8).to("npu")
    if rank:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, columns, 0)])
        parts = [columns]
    else:
        parts = [columns, *(torch.empty_like(columns) for _ in range(size - 1))]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, parts[peer], peer) for peer in range(1, size)]
        )
    for work in works:
        work.wait()
    return {"pixels": torch.cat(parts, 2)}, len(works)


def ring(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Border columns of both neighbours, sends and receives in one batch."""
    mine = counted(rank, 5).to("npu")
    left, right = (rank - 1) % size, (rank + 1) % size
    from_left, from_right = torch.empty_like(mine), torch.empty_like(mine)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine, left), dist.P2POp(dist.irecv, from_right, right),
        dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, from_left, left),
    ])  # fmt: skip
    for work in works:
        work.wait()
    return {"left": from_left, "right": from_right}


def ulysses(state) -> dict[str, torch.Tensor]:
    """The project's own exchange, there and back, twice so that its buffers are used again."""
    from vllm_omni.diffusion.distributed.comm import UlyssesExchange

    exchange, found = UlyssesExchange(state.sequence), {}
    kernels.transfers.clear()
    for turn in range(2):
        part = counted(
            state.sequence.rank + 7 * turn, LATENT_FRAMES * LOCAL_TOKENS, HEADS, HEAD_DIM
        )
        part = part.bfloat16().to("npu")
        arrived = exchange.tokens_to_heads(part, -part, latent_frames=LATENT_FRAMES)
        parts = [heads.flatten(0, -3) for heads in arrived.wait()]
        back = exchange.heads_to_tokens(parts[1], latent_frames=LATENT_FRAMES)
        found |= {f"heads{turn}": parts[0].clone(), f"back{turn}": back, f"part{turn}": part}
    assert kernels.transfers == {"to_device": 2, "blocking": 2}, "the exchange itself moves nothing"
    return found


def unwaited(rank: int, size: int, hosts: dist.ProcessGroup, *, waits: bool) -> torch.Tensor:
    """What a reader sees of a gather that it has, or has not, waited for.

    The hosts meet before any of them waits, since a device takes part once others wait for it.
    """
    received = torch.zeros(size, 4, device="npu")
    mine = torch.full((4,), rank + 1.0, device="npu")
    torch.npu.synchronize()
    work = dist.all_gather_into_tensor(received.flatten(), mine, async_op=True)
    if waits:
        work.wait()
    seen = (received + 0).cpu()
    dist.barrier(hosts)
    work.wait()
    torch.npu.synchronize()
    return seen


def main(rank: int, size: int, folder: str) -> None:
    from vllm_omni.diffusion.distributed.parallel_state import WorldPlace, join_world
    from vllm_omni.platforms import create_platform

    platform = create_platform("npu")
    device = platform.device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    state = join_world(
        WorldPlace(
            rank=rank, tensor_parallel_size=1, sequence_parallel_size=size, rendezvous=folder,
            backend=platform.collective_backend, device=device, timeout_s=120.0,
        )
    )  # fmt: skip
    hosts = dist.new_group(backend="gloo")
    results = {"soc": torch.npu.get_device_name(rank)}
    for order in ORDERS:
        simulation.runtime().set_deferred(on=order == "deferred")
        found = plain_collectives(rank, size) | ring(rank, size) | ulysses(state)
        pixels, works = root_pixels(rank, size)
        found |= pixels
        results[order] = {name: tensor.cpu() for name, tensor in found.items()}
        results[order]["works"] = works
        for waits in (True, False):
            results[order][f"waits {waits}"] = unwaited(rank, size, hosts, waits=waits)
    torch.save(results, result_file(folder, rank))
    assert not library.failures
    sys.stdout.flush()
    # The watchdog threads of the group have nothing more to tell.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
