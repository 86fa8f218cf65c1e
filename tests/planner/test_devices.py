"""Tests of unequal ranks and of the links between them, in a plan and in AutoConfig, compared with sums by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from pipeshard import AutoConfig, plan
from pipeshard.errors import ConfigurationError, PartitionError
from pipeshard.planner.devices import Devices, Link
from pipeshard.planner.models import build_on_meta
from tests import zoo

LLAMA_8B = (
    "hidden_size=4096 intermediate_size=14336 num_hidden_layers=32 num_attention_heads=32 num_key_value_heads=8 "
    "vocab_size=128256"
)
SLOW, FAST = "10Gbit/s,100us", "450GB/s,5us"


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build_on_meta("llama", LLAMA_8B.split())


def planned(model: nn.Module, p: int = 2, **options: Any) -> Any:
    return plan(model, None, p, num_microbatches=8, precision="bf16", **{"schedule": "1f1b", **options})


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [("50GB/s,10us", 50e9, 10e-6), (" 400 Gbit/s , 0.1ms ", 50e9, 1e-4), ("2.5kB/s", 2500, 0), ("8bit/s,2s", 1, 2)],
)
def test_a_link_is_read(text: str, bandwidth: float, latency: float) -> None:
    assert Link.parse(text) == Link(bandwidth, pytest.approx(latency))
    assert Devices.parse(2, links=Link.parse(text)).links == (Link(bandwidth, pytest.approx(latency)),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"links": "50Gb/s"}, "'Gb/s' is not a unit of bandwidth: did you mean Gbit/s or GB/s"),
        ({"links": "50GB,10us"}, "'GB' is not a unit of bandwidth: did you mean GB/s?"),
        ({"links": "50GB/s,10m"}, "'m' is not a unit of latency: did you mean ms?"),
        ({"links": "50GB/s,10"}, "'' is not a unit of latency: the known names are ns, us, ms, s"),
        ({"links": "-1GB/s"}, "link='-1GB/s': the bandwidth must be positive, and the latency non-negative"),
        ({"links": "1GB/s,-1us"}, "the latency non-negative"),
        ({"links": "fast"}, "link='fast': 'fast' is not a bandwidth. Write a link as 50GB/s or 50GB/s,10us"),
        ({"links": 50e9}, "link=50000000000.0: '' is not a unit of bandwidth"),  # was 'float' is not iterable
        ({"links": ["1GB/s", "1GB/s", "1GB/s"]}, "3 links for 3 ranks: pass one link for all ranks, or 2"),
        (
            {"memory": "1GB,2GB"},
            "device_memory='1GB,2GB' has 2 values for 3 ranks: pass one value for all ranks, or one",
        ),
        ({"memory": ["1GB", "much", 3]}, "device_memory='much' is not a positive size"),
        ({"speeds": "1,0.5"}, "device_speed='1,0.5' has 2 values for 3 ranks"),
        ({"speeds": "1,0,1"}, "device_speed: '0' is not a positive number. Pass one number per rank, as in 1.0,0.6"),
        (
            {"speeds": [1, None, 1]},
            "device_speed: None is not a positive number. Pass one number per rank, as in 1.0,0.6",
        ),
    ],
)
def test_what_is_not_a_device_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Devices.parse(3, **arguments)
    assert message in str(caught.value)


def test_a_message_passes_all_links_between_its_ends() -> None:
    """Three ranks with a chunk each and one with two: the last message goes back over both links."""
    devices = Devices.parse(3, links=["1kB/s,1s", "10kB/s,2s"])
    sizes = [(0, 0), (1000, 500), (1000, 0), (1000, 1000)]
    assert devices.transfers([0, 1, 2, 0], sizes) == {"latency": [0, 2, 2.1, 4], "returned": [0, 1.5, 0, 4]}
    one = Devices.parse(3, links="1kB/s,1s")
    assert one.transfers([0, 1, 2, 0], sizes) == {"latency": [0, 2, 2, 2], "returned": [0, 1.5, 0, 2]}


def test_a_stage_of_several_ranks_is_its_worst() -> None:
    """Ranks are replicas, then stages, then slices: those of stage 0 are 0, 1, 4 and 5."""
    links = [f"{k}kB/s,{k}s" for k in (9, 7, 9, 9, 9, 5, 9)]
    job = Devices.parse(8, "8GB,8GB,4GB,8GB,7GB,8GB,8GB,3GB", [1, 1, 1, 0.5, 0.7, 1, 1, 1], links)
    assert job.of_stages(2, 2, 2) == Devices((7 * 10**9, 3 * 10**9), (0.7, 0.5), (Link(5000, 16),))
    assert job.of_stages(8, 1, 1) == job


@pytest.mark.turns
def test_messages_take_their_own_time(llama: nn.Module) -> None:
    free = planned(llama, 4, tflops=400)
    zero = planned(llama, 4, tflops=400, link="1e30GB/s,0us")
    late = planned(llama, 4, tflops=400, link=SLOW)
    assert [e.time for e in zero.schedules] == [e.time for e in free.schedules]
    hidden = 2 * 2048 * 4096  # bytes of one sample in bf16
    each = pytest.approx([0, *[1e-4 + hidden / 1.25e9] * 3])
    assert late.transfers() == {"latency": each, "returned": each}
    assert late.transfers(4)["returned"][1] == pytest.approx(1e-4 + hidden / 4 / 1.25e9)  # of one slice of four
    assert all(a.time > b.time and a.bubble > b.bubble for a, b in zip(late.schedules, free.schedules, strict=True))
    assert late.estimate.time == late.simulate().makespan
    machines = planned(llama, 4, tflops=400, link=[FAST, SLOW, FAST])
    assert free.estimate.time < machines.estimate.time < late.estimate.time
    # A schedule in a V crosses the slow link twice as often, which changes the recommendation.
    names = {m.recommended for m in (free, machines)}
    assert names == {"zbv", "zb-h1"}


@pytest.mark.turns
def test_an_8b_llama_on_unequal_ranks(llama: nn.Module) -> None:
    equal, slow = planned(llama), planned(llama, device_speed="1.0,0.6")
    assert equal.counts == [18, 17] and slow.counts == [23, 12] and slow.partition == "speed:1.0,0.6"
    uniform = planned(llama, device_speed=[1.0, 0.6], partition="uniform")
    assert uniform.counts == [18, 17] and slow.estimate.time < 0.8 * uniform.estimate.time
    assert 8 <= slow.estimate.time < 9.5  # in steps without idle time of 8 microbatches
    first, second = (s.forward + s.backward + s.weight for s in slow.stages)
    assert first == pytest.approx(second, rel=0.1)
    assert planned(llama, partition="speed:1.0,0.6") == slow
    tight = planned(llama, device_speed="1.0,0.6", device_memory="160GB,48GB")
    assert tight.counts == [26, 9] and tight.estimate.memory[1].total <= 48e9 < slow.estimate.memory[1].total
    with pytest.raises(PartitionError, match=r"rank 1 of 2 needs 5\d\.\d GB .* its device_memory is 20\.0 GB\. Poss"):
        planned(llama, device_speed="1.0,0.6", device_memory="120GB,20GB")
    assert json.loads(tight.to_json())["devices"] == {
        "memory": [160 * 10**9, 48 * 10**9],
        "speeds": [1.0, 0.6],
        "links": [],
    }


@pytest.mark.turns
def test_a_job_of_unequal_ranks_is_configured() -> None:
    model, batch = zoo.build("llama", layers=8), zoo.batch("llama")
    options: dict[str, Any] = {"tflops": 1e-6, "schedules": ["1f1b"], "pp_size": 2}

    def choose(**more: Any) -> AutoConfig:
        return AutoConfig.choose(model, batch, 2, 8, **options, **more)

    alone = {c.layout.pp_size: c.estimate for c in choose().considered}
    slow = {c.layout.pp_size: c.estimate for c in choose(device_speed="1.0,0.5").considered}
    assert slow[1].time == pytest.approx(2 * alone[1].time)  # replicas wait for the slow one
    assert slow[2].counts[1] < alone[2].counts[1] and slow[2].time < slow[1].time
    late = {c.layout.pp_size: c.estimate for c in choose(link="100B/s").considered}
    assert late[1].time == alone[1].time and late[2].time > 2 * alone[2].time
    small = alone[1].peak - 1
    assert choose(device_memory=[small, 2 * small]).pp_size == 2
    with pytest.raises(PartitionError, match=r"fits in device_memory=1.00 kB, 1.00 GB: .* on rank 0 of a pipeline"):
        choose(device_memory="1kB,1GB")
