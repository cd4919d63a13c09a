"""What the simulated runtime itself promises: late order shows every missing dependency.

Each hazard is shown twice: with the dependency the data are right, without it they are wrong.
"""

import pytest
import torch

from tests.npu_sim import kernels, library, simulation
from tests.npu_sim.device import deferred, order

__all__ = ["deferred", "order"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.npu]

HOST = torch.arange(8.0)


@pytest.fixture
def x():
    tensor = HOST.to("npu")
    torch.npu.synchronize()
    return tensor


@pytest.fixture
def side():
    return torch.npu.Stream()


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_values_come_back_as_they_went(dtype):
    host = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert torch.equal(host.to("npu").transpose(0, 2)[1:].cpu(), host.transpose(0, 2)[1:])


@pytest.mark.usefixtures("order")
def test_mixed_devices_are_refused(x):
    with pytest.raises(RuntimeError, match="on one device"):
        x + HOST


@pytest.mark.usefixtures("order")
def test_wrong_argument_names_of_an_operator_are_refused_by_the_vendors_schema(x):
    import torch_npu

    query = x.bfloat16().reshape(1, 4, 1, 2)
    with pytest.raises((RuntimeError, TypeError), match="scale_value"):
        torch_npu.npu_fusion_attention(query, query, query, 1, "BSND", scale_value=1.0)


@pytest.mark.usefixtures("order")
def test_draws_of_the_device_repeat_and_move_on():
    draws = torch.Generator("npu").manual_seed(5)
    first, second = (torch.randn(16, device="npu", generator=draws).cpu() for _ in range(2))
    draws.manual_seed(5)
    assert torch.equal(torch.randn(16, device="npu", generator=draws).cpu(), first)
    assert not torch.equal(first, second)


def test_fresh_memory_is_not_a_number():
    torch.npu.empty_cache()
    assert torch.empty(1 << 22, device="npu").isnan().all().item()


@pytest.mark.usefixtures("deferred")
def test_one_stream_runs_in_order(x):
    assert torch.equal(((x + 1) * 2).cpu(), (HOST + 1) * 2)


@pytest.mark.usefixtures("deferred")
def test_nothing_runs_before_somebody_waits(x):
    before = simulation.runtime().pending()
    y = x + 1
    assert simulation.runtime().pending() == before + 1
    assert torch.equal(y.cpu(), HOST + 1)
    assert simulation.runtime().pending() == 0


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_reads_right_data_only_if_it_waits(x, side, waits):
    main = torch.npu.current_stream()
    y = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    y.copy_(x * 3)
    if waits:
        side.wait_stream(main)
    with torch.npu.stream(side):
        z = y + 1
    side.synchronize()
    torch.npu.synchronize()
    assert torch.equal(z.cpu(), HOST * 3 + 1) is waits


@pytest.mark.usefixtures("deferred")
def test_an_event_completes_when_its_stream_has_come_to_it(x):
    event = torch.npu.Event()
    assert event.query()  # never recorded
    y = x * 5
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert torch.equal(y.cpu(), HOST * 5)


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("waits", [True, False])
def test_a_pinned_source_must_stay_until_its_copy_ran(waits):
    source = torch.ones(4).pin_memory()
    target = torch.zeros(4, device="npu")
    target.copy_(source, non_blocking=True)
    if waits:
        torch.npu.current_stream().synchronize()
    source.fill_(9.0)
    assert (target.cpu().tolist() == [1.0] * 4) is waits


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_pinned_memory_must_be_waited_for(x, waits):
    host = torch.zeros(8).pin_memory()
    host.copy_(x * 2, non_blocking=True)
    event = torch.npu.Event()
    event.record()
    if waits:
        event.synchronize()
    assert torch.equal(host, HOST * 2) is waits


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_reads_must_be_recorded(x, side, recorded):
    main = torch.npu.current_stream()
    y = x * 7
    side.wait_stream(main)
    with torch.npu.stream(side):
        z = y + 0
    if recorded:
        y.record_stream(side)
    del y
    others = [torch.full((8,), -1.0, device="npu") for _ in range(4)]
    simulation.runtime().run_stream(main.npu_stream)
    side.synchronize()
    assert torch.equal(z.cpu(), HOST * 7) is recorded
    assert len(others) == 4


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("fenced", [True, False])
def test_a_graphs_output_stays_until_its_reader_is_fenced(side, fenced):
    main, capture = torch.npu.current_stream(), torch.npu.Stream()
    slot = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    capture.wait_stream(main)
    with torch.inference_mode(), torch.npu.graph(graph, stream=capture):
        output = slot * 2
    slot.copy_(HOST.to("npu"))
    graph.replay()
    side.wait_stream(main)
    with torch.npu.stream(side), torch.inference_mode():
        read = output + 0
    if fenced:
        main.wait_stream(side)
    slot.fill_(-1.0)
    graph.replay()
    simulation.runtime().run_stream(main.npu_stream)
    torch.npu.synchronize()
    assert torch.equal(read.cpu(), HOST * 2) is fenced


@pytest.mark.usefixtures("order")
def test_a_graph_is_undefined_before_its_first_replay_and_follows_its_inputs(x):
    graph, slot = torch.npu.NPUGraph(), x.clone()
    torch.npu.synchronize()
    with torch.inference_mode(), torch.npu.graph(graph):
        output = slot * 2 + 1
    assert output.isnan().all().item()
    graph.replay()
    assert torch.equal(output.cpu(), HOST * 2 + 1)
    slot.zero_()
    assert torch.equal(output.cpu(), HOST * 2 + 1)
    graph.replay()
    assert torch.equal(output.cpu(), torch.ones(8))


@pytest.mark.usefixtures("order")
def test_a_capture_refuses_what_waits_for_the_device(x):
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError), torch.npu.graph(graph):
        x.sum().item()


@pytest.mark.usefixtures("order")
def test_transfers_and_read_backs_are_counted(x):
    kernels.transfers.clear()
    x.cpu()
    x.sum().item()
    HOST.pin_memory().to("npu", non_blocking=True)
    torch.ones(2).to("npu")
    assert kernels.transfers == {"to_host": 1, "read_back": 1, "to_device": 2, "blocking": 2}


def test_work_that_fails_is_reported_at_the_next_wait(x):
    runtime = simulation.runtime()
    runtime.set_deferred(on=True)
    stream = torch.npu.current_stream()

    def broken():
        raise ArithmeticError("a kernel's own fault")

    runtime.launch(stream.npu_stream, broken)
    with pytest.raises(RuntimeError, match="507015"):
        stream.synchronize()
    assert isinstance(library.failures.pop(), ArithmeticError)
    runtime.forgive()
    runtime.set_deferred(on=False)
    assert x.sum().item() == HOST.sum().item()
