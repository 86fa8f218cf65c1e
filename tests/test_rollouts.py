"""Tests of rollouts: TRL's GRPOTrainer and RLOOTrainer in a pipeline generate, score and learn as in one process."""

from __future__ import annotations

import inspect
import io
import re
from contextlib import nullcontext
from typing import Any
from unittest import mock

import accelerate.utils
import pytest
import torch
import transformers
from rich.console import Console

import rollouts as example
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.trainer.rollouts import GATHERS
from tests.pool import Pool, WorkerError
from tests.trainers import launched

trl = pytest.importorskip("trl")
rollouts = pytest.importorskip("tests.rollouts")
run, make, shown, differences = rollouts.run, rollouts.make, rollouts.shown, rollouts.differences
REPEATED = ("whole", "lora", "drawn", "rloo")


@pytest.mark.turns
@pytest.mark.parametrize("kind", REPEATED)
def test_ten_steps_are_those_of_one_process(pool: Pool, tmp_path: Any, kind: str) -> None:
    rollouts.base(tmp_path)
    expected = run(kind, str(tmp_path), max_steps=10)
    for size in (1, 2):
        for found in pool.run(run, size, kind, str(tmp_path), {"pp_size": size}, timeout=200, max_steps=10):
            assert differences(found, expected) == []
    assert len({entry["loss"] for entry in expected[0][:-1]}) > 5


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [name for name in rollouts.KINDS if name not in REPEATED])
def test_every_way_to_train_is_that_of_one_process(pool: Pool, tmp_path: Any, kind: str) -> None:
    rollouts.base(tmp_path)
    expected = run(kind, str(tmp_path))
    for found in pool.run(run, 2, kind, str(tmp_path), {"pp_size": 2}, timeout=200):
        assert differences(found, expected) == []


@pytest.mark.turns
def test_replicas_are_the_processes_of_trl(pool: Pool, tmp_path: Any) -> None:
    """Stages as processes would gather each reward twice, and take a replica's advantages from another one's."""
    rollouts.base(tmp_path)
    options = {"timeout": 200, "num_generations": 8}
    found = pool.run(run, 4, "often", str(tmp_path), {"pp_size": 2}, **options)
    expected = pool.run(trl_alone, 2, "often", str(tmp_path), **options)
    for rank, one in enumerate(found):
        assert differences(one, expected[rank // 2]) == []


def trl_alone(kind: str, folder: str, **others: Any) -> Any:
    with launched():
        made = make(kind, folder, **others)
        made.train()
        return shown(made)


def rewarded_by_every_rank(folder: str, plugin: dict[str, Any]) -> Any:
    base, rank = trl.GRPOTrainer._calculate_rewards, torch.distributed.get_rank()
    with (
        mock.patch("pipeshard.trainer.rollouts.Rollouts._calculate_rewards", base),
        mock.patch.object(rollouts.Drawn, "__call__", lambda self, completions, **_: [rank + 0.5] * len(completions)),
    ):
        return run("drawn", folder, plugin)


@pytest.mark.turns
def test_rewards_of_every_rank_are_seen(pool: Pool, tmp_path: Any) -> None:
    """A mutation: each rank computes rewards of its own, so stages have different advantages."""
    rollouts.base(tmp_path)
    with pytest.raises(WorkerError, match="the stages of one pipeline must read the same batch"):
        pool.run(rewarded_by_every_rank, 2, str(tmp_path), {"pp_size": 2}, timeout=200)


def with_adapters_on(folder: str, plugin: dict[str, Any]) -> Any:
    with mock.patch("trl.trainer.grpo_trainer.use_adapter", lambda *_, **__: nullcontext()):
        return run("lora", folder, plugin)


@pytest.mark.turns
def test_a_reference_with_its_adapters_on_is_seen(pool: Pool, tmp_path: Any) -> None:
    """A mutation: the model that is trained is its own reference, from which it never moves away."""
    rollouts.base(tmp_path)
    expected = run("lora", str(tmp_path))
    found = pool.run(with_adapters_on, 2, str(tmp_path), {"pp_size": 2}, timeout=200)[0]
    assert any("kl" in line for line in differences(found, expected))
    assert all(abs(entry.get("kl", 0.0)) < 1e-6 for entry in found[0]) and expected[0][3]["kl"] > 1e-6


def resumed(folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> Any:
    """The second half of a run, from the checkpoint of the first."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, **others}
    with launched() if plugin else nullcontext():
        made = make("loss dapo", folder, plugin, **options)
        made.train()
        whole = shown(made)[0]
        again = make("loss dapo", folder, plugin, **options)
        again.train(resume_from_checkpoint=f"{folder}/out/checkpoint-3")
        return whole, shown(again)[0]


@pytest.mark.turns
def test_a_run_resumes(pool: Pool, tmp_path: Any) -> None:
    """TRL generates anew after a resume, and starts counting metrics there; each run is that of one process."""
    rollouts.base(tmp_path)
    expected = resumed(str(tmp_path))
    for found in pool.run(resumed, 2, str(tmp_path), {"pp_size": 2}, timeout=200):
        for log, other in zip(found, expected, strict=True):
            assert differences((log,), (other,)) == []


def refused(folder: str) -> None:
    plugin, grouped = {"pp_size": 2}, "num_generations=16"
    wrong: dict[str, dict[str, Any]] = {
        "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
        "sync_ref_model=True: it averages": {"sync_ref_model": True},
        "use_vllm=True: vLLM": {"use_vllm": True},
        f"8 = per_device_train_batch_size .8.* is not a multiple of {grouped}": {"num_generations": 16},
        "per_device_eval_batch_size=2 is not a multiple": {"eval_strategy": "steps", "per_device_eval_batch_size": 2},
    }
    for message, arguments in wrong.items():
        with launched(), pytest.raises(ConfigurationError, match=message):
            make("sequence", folder, plugin, **{"gradient_accumulation_steps": 1, **rollouts.EIGHT, **arguments})
    with (
        launched(),
        mock.patch.dict(rollouts.KINDS["often"].given, {"rollout_func": dict}),
        pytest.raises(ConfigurationError, match="does not support rollout_func: every rank would call it separately"),
    ):
        make("often", folder, plugin)


def grouped_by_tokens(folder: str) -> str:
    with launched(), pytest.raises(ConfigurationError) as caught:
        make("whole", folder, {"pp_size": 1, "microbatch_tokens": 64})
    return str(caught.value)


def test_completions_that_are_grouped_by_tokens_are_refused(pool: Pool, tmp_path: Any) -> None:
    """GRPOTrainer with microbatch_tokens: microbatches were trimmed, and compute_loss joins prompts and completions.

    The first step raised a TraceError on a changed size of attention_mask, which the user had not set."""
    rollouts.base(tmp_path)
    [message] = pool.run(grouped_by_tokens, 1, str(tmp_path))
    assert "does not support microbatch_tokens=64" in message and "pass num_microbatches or microbatch_size" in message


def shown_pictures(folder: str, rows: list[dict[str, Any]]) -> str:
    given = {"train_dataset": rollouts.datasets.Dataset.from_list(rows * 8)}
    with mock.patch.dict(rollouts.KINDS["often"].given, given), pytest.raises(ConfigurationError) as caught:
        run("often", folder, {"pp_size": 1})
    return str(caught.value)


PARTS = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "a"}], "images": [[1]]},
        {"prompt": [{"role": "user", "content": "a"}], "image": [1]},
        {"prompt": [{"role": "user", "content": PARTS}]},
    ],
    ids=["images", "image", "messages"],
)
def test_prompts_with_images_are_refused_by_name(pool: Pool, tmp_path: Any, row: dict[str, Any]) -> None:
    """GRPOTrainer with images: its compute_loss passes slices of pixel_values, so the first step raised a UsageError
    that named the data collator, which the user had not set."""
    rollouts.base(tmp_path)
    [message] = pool.run(shown_pictures, 1, str(tmp_path), [row])
    assert "PipelinedGRPOTrainer does not support images in prompts" in message and "use SFTTrainer" in message


@pytest.mark.turns
def test_what_ranks_cannot_do_together_is_refused_by_name(pool: Pool, tmp_path: Any) -> None:
    """GRPOConfig lets 16 completions of a prompt be, as two processes of 8 have so many, but here they are stages."""
    rollouts.base(tmp_path)
    pool.run(refused, 2, str(tmp_path), timeout=200)


def failing(folder: str) -> str:
    def broken(self: Any, completions: list[str], **_: Any) -> list[float]:
        raise ValueError("no judge answers")

    with mock.patch.object(rollouts.Drawn, "__call__", broken), pytest.raises((ValueError, UsageError)) as caught:
        run("drawn", folder, {"pp_size": 2})
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.turns
def test_a_reward_function_that_fails_ends_every_rank(pool: Pool, tmp_path: Any) -> None:
    """The other ranks would wait for rewards until the timeout."""
    rollouts.base(tmp_path)
    first, last = pool.run(failing, 2, str(tmp_path), timeout=200)
    assert first == "ValueError: no judge answers"
    assert last.startswith("UsageError: the first rank of the replica failed to compute rewards: ValueError: no judge")


def test_private_names_of_trl_mean_what_is_assumed() -> None:
    """Both trainers have these methods, and call them and accelerate's functions where it is assumed."""
    uses = (
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
        "self._pending_metrics[name].append(value)",
        "self._prepare_inputs(inputs)",
        "rewards_per_func = gather(rewards_per_func)",
        "set_seed(args.seed, device_specific=True)",
    )
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer):
        source, module = inspect.getsource(kind), inspect.getmodule(kind)
        assert all(use in source for use in uses)
        assert all(getattr(module, name) is getattr(accelerate.utils, name) for name in GATHERS)
        assert {"_prepare_inputs", "_calculate_rewards"} <= set(vars(kind))


def train_example(flags: list[str]) -> str:
    """What the example prints."""
    printed = io.StringIO()
    with launched():
        quiet = torch.distributed.get_rank() > 0
        example.run(example.parse(flags), Console(file=printed, quiet=quiet, width=200))
    return printed.getvalue()


@pytest.mark.turns
def test_the_example_learns_its_reward(pool: Pool, tmp_path: Any) -> None:
    printed, other = pool.run(train_example, 2, [f"--output={tmp_path}"], timeout=200)
    rewards = [float(reward) for reward in re.findall(r"step \d+/30  reward ([\d.]+)", printed)]
    assert len(rewards) == 30 and not other
    assert sum(rewards[-5:]) > 2.5 > 2.0 * sum(rewards[:5])
    folder = tmp_path / "rollouts" / "model"
    model, tokens = (
        kind.from_pretrained(folder) for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    prompts = tokens(list("abcd"), return_tensors="pt")
    made = tokens.batch_decode(model.generate(prompts.input_ids, max_new_tokens=4, do_sample=True)[:, 1:])
    assert sum(text.count(letter) for text, letter in zip(made, "abcd")) > 4
