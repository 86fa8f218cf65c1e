"""Tests of schedules on real processes: gradients, memory and messages with chunks and split backwards."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.config import PipelineConfig
from pipeshard.engine.interpreter import MAX_PENDING_SENDS, Interpreter
from pipeshard.engine.stage import Stage
from pipeshard.engine.weight_grad import Deferral, Product
from pipeshard.errors import ConfigurationError
from pipeshard.schedule import Action, Kind, Program, make_program, simulate, zb_h1
from pipeshard.schedule.schedules import IN_A_V
from tests import zoo
from tests.covering import covering
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences, refusal

pytestmark = pytest.mark.local

M = 4


def split_of(name: str, schedule: str, m: int = M, layers: int = 4, **options: Any) -> Split:
    chunks = 2 if schedule == "interleaved" else 1
    p = dist.get_world_size()
    return Split(
        zoo.build(name, layers=layers),
        p,
        zoo.batch(name),
        num_microbatches=m,
        schedule=schedule,
        num_model_chunks=chunks,
        **options,
    )


def gradients(name: str, schedule: str, defers: bool) -> tuple[dict[str, Tensor | None], list[str]]:
    """Of what this rank holds, and what it did."""
    with contextlib.nullcontext() if defers else mock.patch.object(PipelineConfig, "defers", False):
        split = split_of(name, schedule)
        split.backward(zoo.batch(name))
        did = [str(span.action) for span in split.plugin.recording().spans[dist.get_rank()]]
    return {key: p.grad for key, p in split.held.items()}, did


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "schedule"), covering(["llama", "gpt2", "vit"], ["gpipe", "1f1b", "zb-h1"], strength=1)
)
def test_putting_weight_gradients_off_changes_no_bit(pool: Pool, name: str, schedule: str) -> None:
    whole, split = pool.run(gradients, 2, name, "1f1b", False), pool.run(gradients, 2, name, schedule, True)
    for (plain, _), (deferred, _) in zip(whole, split):
        assert plain.keys() == deferred.keys()
        for key, gradient in plain.items():
            assert torch.equal(gradient, deferred[key]), key
    assert not any(action.startswith("W") for _, did in whole for action in did)


def test_a_gradient_that_others_wait_for_is_sent_before_the_weights_are_done(pool: Pool) -> None:
    (_, first), (_, last) = pool.run(gradients, 2, "llama", "1f1b", True)
    assert first == ["F0@0", "F1@0", "B0@0", "F2@0", "B1@0", "F3@0", "B2@0", "B3@0"]
    assert last == ["F0@1", "B0@1", "F1@1", "B1@1", "F2@1", "B2@1", "F3@1", "B3@1", "W3@1"]


CSV = {  # torch's own form: 1F1B; interleaved; a V of B, I and W
    "1f1b": "0F0,0F1,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n",
    "loop": "0F0,0F1,2F0,2F1,,,2B0,2B1,0B0,0B1,0F2,2F2,,,2B2,0B2\n,1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1,,,1F2,3F2,3B2,1B2\n",
    "v": "0F0,0F1,3F0,3I0,3W0,0F2,3F1,0I0,3B1,0W0,0B1,3F2,3B2,0B2\n"
    "1F0,2F0,1F1,2F1,2B0,1B0,2B1,1I1,1F2,1W1,2F2,2B2,1B2\n",
}


def ordered_by(schedule: Any) -> tuple[list[str], list[str]]:
    """What differs from the unsplit model, and what this rank did."""
    model, data = zoo.build("llama"), zoo.batch("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=3, schedule=schedule)
    found = differences(split, unsplit, data, num_microbatches=3)
    did = [str(span.action) for span in split.plugin.recording().spans[dist.get_rank()]]
    split.evaluate(data)
    return found, did


@pytest.mark.turns
@pytest.mark.parametrize("name", CSV)
def test_programs_of_one_s_own(pool: Pool, name: str, tmp_path: Path) -> None:
    """A schedule was one of five names; now it is whatever ends, and what ran is what was written, each once."""
    (tmp_path / "order.csv").write_text(CSV[name])
    program = Program.from_csv(tmp_path / "order.csv")
    for rank, (found, did) in enumerate(pool.run(ordered_by, 2, program)):
        assert found == [] and did == [str(action) for action in program.ranks[rank]]


def alternating(p: int, m: int, v: int) -> Program:
    """One microbatch at a time."""
    ranks = (tuple(Action(kind, i, rank) for i in range(m) for kind in (Kind.F, Kind.B)) for rank in range(p))
    return Program("alternating", m, tuple(range(p)), tuple(ranks))


@pytest.mark.turns
def test_functions_of_one_s_own(pool: Pool) -> None:
    results = pool.run(ordered_by, 2, alternating)
    assert results[1] == ([], ["F0@1", "B0@1", "F1@1", "B1@1", "F2@1", "B2@1"]) and results[0][0] == []
    assert "but the step has 2" in refusal(schedule=make_program("gpipe", 1, 1))
    assert "compile=True is not supported with schedule='zb-h1'" in refusal(schedule=zb_h1, compile=True)


def ties(schedule: str) -> list[str]:
    return [name for name, _ in split_of("gpt2", schedule).model.pipeline.sync.shared]


@pytest.mark.turns
def test_in_a_v_a_tied_embedding_is_one_parameter_of_one_rank(pool: Pool) -> None:
    assert pool.run(ties, 2, "zbv") == [[], []]
    assert pool.run(ties, 2, "1f1b") == [["transformer.wte.weight"]] * 2


def peak(schedule: str) -> int:
    """The most microbatches, counted once a stage, of which this rank keeps what a layer's weight gradient needs."""
    split = split_of("llama", schedule, m=8, layers=2 * dist.get_world_size())
    alive, most = [0], [0]

    def enter(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and args:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(args[0].untyped_storage(), lambda: alive.__setitem__(0, alive[0] - 1))

    policy = split.model.pipeline.policy
    for stage in policy.chunks:  # one layer of each: the input of its last linear layer lives from F to W
        layers = [c.unit for c, s in zip(policy.flow.calls, policy.stages) if s == stage and ".layers." in c.unit]
        policy.units[layers[0]].mlp.down_proj.register_forward_hook(enter)
    split.backward(zoo.batch("llama"))
    assert alive[0] == 0
    return most[0]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("schedule", "p"), [*itertools.product(["1f1b", "interleaved", "zb-h1", "zbv"], [2]), ("v-half", 4), ("v-min", 4)]
)
def test_no_more_activations_live_than_simulated(pool: Pool, schedule: str, p: int) -> None:
    program = make_program(schedule, p, 8, 2 if schedule == "interleaved" else 1)
    assert tuple(pool.run(peak, p, schedule)) == simulate(program).peak_activations


def added_up_in_place(name: str, schedule: str) -> list[str]:
    """With every weight taken for a large one: what differs from the unsplit model, twice without zero_grad."""
    model, data = zoo.build(name), zoo.batch(name)
    unsplit, chunks = Unsplit(copy.deepcopy(model)), 2 if schedule == "interleaved" else 1
    with mock.patch("pipeshard.engine.weight_grad.LARGE", 0):
        split = Split(
            model, dist.get_world_size(), data, num_microbatches=M, schedule=schedule, num_model_chunks=chunks
        )
        return [
            difference
            for seed in range(2)
            for difference in differences(split, unsplit, zoo.batch(name, seed=seed), num_microbatches=M)
        ]


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "schedule"), covering(sorted(zoo.MODELS), ["1f1b", "interleaved", "zb-h1", *IN_A_V], strength=1)
)
def test_gradients_that_are_added_up_in_place(pool: Pool, name: str, schedule: str) -> None:
    assert pool.run(added_up_in_place, 2, name, schedule) == [[], []]


def lookup_left_out() -> Any:
    return mock.patch("pipeshard.engine.weight_grad.Lookup.add_to", lambda self, total: None)


def product_twice() -> Any:
    add_to = Product.add_to

    def twice(self: Product, total: Tensor) -> None:
        add_to(self, total)
        add_to(self, total)

    return mock.patch.object(Product, "add_to", twice)


def mutated_in_place(schedule: str, mutation: Callable[[], Any]) -> list[str]:
    with mutation():
        return added_up_in_place("llama", schedule)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "mutation"), [("1f1b", lookup_left_out), ("zbv", lookup_left_out), ("zbv", product_twice)]
)
def test_a_mutation_of_what_is_added_up_in_place_is_seen(
    pool: Pool, schedule: str, mutation: Callable[[], Any]
) -> None:
    found = [difference for rank in pool.run(mutated_in_place, 2, schedule, mutation) for difference in rank]
    assert any("gradients differ" in difference for difference in found), found


def weight_left_out() -> Any:
    return mock.patch.object(Deferral, "finish", lambda self, pending: pending.clear())


def weight_twice() -> Any:
    def twice(self: Stage, i: int) -> None:
        pending = self.pending.pop(i)
        Deferral.finish(list(pending))
        Deferral.finish(pending)

    return mock.patch.object(Stage, "weight", twice)


def weight_of_another() -> Any:
    """B leaves its list under the number of the microbatch before."""
    backward = Stage.backward

    def wrong(self: Stage, i: int, returning: Any) -> Any:
        before = self.pending.pop(i - 1, None)
        made = backward(self, i, returning)
        if before is not None:
            self.pending[i - 1] = self.pending[i]
        return made

    return mock.patch.object(Stage, "backward", wrong)


def chunks_swapped() -> Any:
    """The second chunk of each rank takes the first one's microbatches in another order."""
    begin = Stage.begin

    def swapped(self: Stage, microbatches: Any, *rest: Any) -> None:
        begin(self, microbatches[::-1] if self.is_last else microbatches, *rest)

    return mock.patch.object(Stage, "begin", swapped)


def mutated(schedule: str, mutation: Callable[[], Any]) -> list[str]:
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    with mutation():
        split = split_of("llama", schedule)
        return differences(split, unsplit, zoo.batch("llama"), num_microbatches=M)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "mutation"),
    [
        ("1f1b", weight_left_out),
        ("zb-h1", weight_left_out),
        ("zb-h1", weight_twice),
        ("zbv", weight_of_another),
        ("zbv", chunks_swapped),
        ("interleaved", chunks_swapped),
    ],
)
def test_a_mutation_is_seen(pool: Pool, schedule: str, mutation: Callable[[], Any]) -> None:
    found = [difference for rank in pool.run(mutated, 2, schedule, mutation) for difference in rank]
    assert any("gradients differ" in difference for difference in found), found


def most_kept(schedule: str) -> int:
    """Messages that were sent, and not let go of."""
    kept: list[int] = []
    send = Interpreter._send

    def counting(self: Interpreter, action: Action) -> None:
        send(self, action)
        kept.append(len(self._sends))

    data, p = zoo.batch("llama", rows=12), dist.get_world_size()
    split = Split(zoo.build("llama"), p, data, num_microbatches=12, schedule=schedule, p2p="isend")
    with mock.patch.object(Interpreter, "_send", counting):
        split.backward(data)
    return max(kept)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize(("schedule", "p"), covering(["1f1b", "gpipe", "zb-h1"], [2, 4], strength=1))
def test_what_was_sent_is_let_go_of_though_isend_does_not_say_when(pool: Pool, schedule: str, p: int) -> None:
    assert max(pool.run(most_kept, p, schedule)) <= MAX_PENDING_SENDS + 1


def compiled() -> list[str]:
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = split_of("llama", "interleaved", m=2, compile={"backend": "aot_eager"})
    found = differences(split, unsplit, zoo.batch("llama"), 1e-5)
    found += differences(split, unsplit, zoo.batch("llama", length=9, seed=1), 1e-5)
    units = split.model.pipeline.policy.held_units.values()
    compiled = {type(unit).__name__ for unit in units if unit.forward.compiled is not None}
    others = {type(unit).__name__ for unit in units if unit.forward.compiled is None}
    assert compiled >= {"LlamaDecoderLayer"} and compiled <= {"LlamaDecoderLayer", "LlamaRMSNorm"}
    assert others <= {"Embedding", "Linear"} and others
    return found


@pytest.mark.turns
@pytest.mark.processes
def test_compiled_units_have_the_same_gradients(pool: Pool) -> None:
    assert pool.run(compiled, 2, timeout=120) == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b", "num_model_chunks": 2}, "requires num_model_chunks=1, got 2"),
        ({"schedule": "zbv", "num_model_chunks": 3}, "requires num_model_chunks=2, got 3"),
        ({"num_model_chunks": 0}, "num_model_chunks must be a positive integer, got 0"),
        ({"schedule": "zb-h1", "compile": True}, "is not supported with schedule='zb-h1'"),
        ({"compile": "inductor"}, "compile must be True, False or a dict"),
        ({"compile": {"units": 4}}, "To fuse several layers, put these layers into one module"),
        (
            {"pp_size": 2, "compile": {"mode": "reduce-overhead"}},
            "CUDA graphs overwrite the results of the previous microbatch",
        ),
        ({"pp_size": 2, "compile": {"options": {"triton.cudagraphs": True}}}, "CUDA graphs overwrite the results"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    assert message in refusal(**options)


def with_a_hook_that_wants_arguments() -> list[str]:
    """A hook of one's own inside a unit does not change how the loss is made, though no argument is there to try it."""
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=M)
    for layer in split.model.unwrap().model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: args[0] is None or None)
    return differences(split, unsplit, zoo.batch("llama"), num_microbatches=M)


@pytest.mark.turns
def test_a_hook_that_wants_arguments_leaves_the_loss_as_it_is(pool: Pool) -> None:
    assert pool.run(with_a_hook_that_wants_arguments, 2) == [[], []]


def recorded(schedule: str, path: str) -> tuple[str, Any]:
    split = split_of("llama", schedule)
    split.backward(zoo.batch("llama"))
    recording = split.plugin.recording()
    if dist.get_rank() == 0:
        recording.save(path)
    return recording.summary(), recording


@pytest.mark.turns
def test_a_step_is_recorded_alike_on_every_rank(pool: Pool, tmp_path: Any) -> None:
    from pipeshard.engine.recording import Recording

    path = tmp_path / "step.json"
    (line, first), (_, second) = pool.run(recorded, 2, "zbv", str(path))
    assert first == second == Recording.load(path)
    assert [[span.action for span in row] for row in first.spans] == [
        [action for action in actions if action.kind.is_compute] for actions in first.program.ranks
    ]
    ends = {span.action: span.end for row in first.spans for span in row}
    starts = {span.action: span.start for row in first.spans for span in row}
    for actions in first.program.ranks:  # one clock: nothing starts before what it needs is done elsewhere
        for action in filter(lambda a: a.kind.is_compute, actions):
            for kind, stage in first.program.needs(action.kind, action.stage):
                needed = Action(kind, action.microbatch, stage)
                made = needed if kind.is_compute else action._replace(stage=needed.partner.stage)
                assert starts[action] >= ends[made]
    assert line.startswith("step 0: ") and "bubble" in line and "slowest is rank" in line
    assert 0 <= first.bubble < 1 and first.simulation().makespan <= first.makespan
    first.draw(tmp_path / "step.png", "zbv")
    assert (tmp_path / "step.png").stat().st_size > 10_000
    path.write_text('{"schedule": "x"}')
    with pytest.raises(ConfigurationError, match="cannot be read as a step recording"):
        Recording.load(path)
