"""Tests of recipes: a command with a config file trains as TRL does with the same settings in one process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.elastic.multiprocessing import SignalException

from pipeshard import dry_run, recipe, recipe_data, script, tuning
from pipeshard.batch.batch import split_sizes
from pipeshard.cli import main
from pipeshard.errors import ConfigurationError
from pipeshard.split.packed import packed_layers
from tests import zoo
from tests.house import ROOT
from tests.pool import Pool
from tests.trainers import launched

trls = pytest.importorskip("tests.trls")

CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<s> {{ message['content'] }} {% else %}"
    "{{ message['content'] }} </s>{% endif %}{% endfor %}"
)
TOY = {"max_steps": 4, "learning_rate": 2e-2, "save_strategy": "no", "bf16": False, "report_to": "none"}
TOY |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}


def echoed(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(one.split()))) for one in completions]


def toy(folder: Path, kind: str = "sft", model: Any = None, **settings: Any) -> str:
    """A file of settings, with a small model (by default, a Llama) and data that it names."""
    tokenizer = trls.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "model")
    (model or (trls.scorer() if kind == "reward" else zoo.build("llama"))).save_pretrained(folder / "model")
    if kind == "sft":
        talks = [[("user", f"{a} {b}"), ("assistant", f"{b} {a}")] for a in "abc" for b in "def"]
        rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks] * 4
    else:
        rows = trls.data("completion" if kind == "grpo" else kind).to_list()
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    named = {"model_name_or_path": "model", "dataset_name": "data.jsonl", "output_dir": "out"}
    given = TOY | {name: str(folder / path) for name, path in named.items()} | settings
    (folder / "recipe.yaml").write_text(yaml.safe_dump(given))
    return str(folder / "recipe.yaml")


def of_ranks(kind: str, arguments: Sequence[str]) -> None:
    """This command, of which these are the ranks."""
    with launched():
        tuning.train(kind, recipe.read(kind, arguments))


def logs(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def of_trl(kind: str, arguments: Sequence[str]) -> list[dict[str, float]]:
    """The logs of TRL's own Trainer with the same settings, in this process."""
    settings = recipe.read(kind, [*arguments, "--use_cpu"])
    given = recipe.trl()
    args = recipe.instance_of(recipe.of_trl(kind, "Config"), settings)
    args.model_init_kwargs = {"dtype": "float32"}
    more = {"reward_funcs": [echoed]} if kind == "grpo" else {}
    adapters = given.get_peft_config(recipe.instance_of(given.ModelConfig, settings))
    trainer = recipe.of_trl(kind, "Trainer")(
        settings.model_name_or_path,
        args=args,
        train_dataset=recipe_data.rows(settings)[0],
        peft_config=adapters,
        **more,
    )
    trainer.train()
    return trainer.state.log_history


def losses(history: list[dict[str, float]]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]


KINDS = {
    "sft": {},
    "sft, adapters": {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]},
    "sft, slices": {"num_slices": 2, "recompute": 1},
    "sft, zbv": {"schedule": "zbv", "gradient_accumulation_steps": 1, "microbatches": 2},
    "dpo": {"learning_rate": 1e-3},
    "dpo, adapters": {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "learning_rate": 1e-3},
    "reward": {"learning_rate": 1e-3},
    "grpo": {"reward_funcs": ["tests.test_recipes.echoed"], "num_generations": 2, "max_completion_length": 4},
}


@pytest.mark.turns
@pytest.mark.parametrize("case", KINDS)
def test_losses_are_those_of_trl(pool: Pool, tmp_path: Path, case: str) -> None:
    kind = case.partition(",")[0]
    arguments = ["--config", toy(tmp_path, kind, **KINDS[case])]
    expected = losses(of_trl(kind, arguments))
    pool.run(of_ranks, 2, kind, arguments, timeout=120)
    assert losses(logs(tmp_path / "out")) == pytest.approx(expected, rel=1e-5) and len(expected) == 4


def with_images() -> Any:
    """A model that reads images and text, with a tower that a batch of text leaves unused."""
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = transformers.CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    read = transformers.LlamaConfig(**zoo.TINY)
    both = transformers.LlavaConfig(vision_config=seen, text_config=read, image_token_index=29)
    return transformers.LlavaForConditionalGeneration(both)


@pytest.mark.turns
def test_text_trains_a_model_that_also_reads_images(pool: Pool, tmp_path: Path) -> None:
    """`pipeshard sft` of a vision-language model planned it, and then failed on every rank with a list of all classes
    that are causal language models. TRL takes the class that the folder's config names. The answer at the end used the
    template of the tokenizer, which has none, or expects lists of parts."""
    arguments = ["--config", toy(tmp_path, model=with_images())]
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    chat = CHAT.replace("message['content']", "message['content'][0]['text']")  # for a processor, a list of parts
    both = transformers.LlavaProcessor(images, trls.tokenizer(), patch_size=8, chat_template=chat, image_token="z")
    both.save_pretrained(tmp_path / "model")
    expected = losses(of_trl("sft", arguments))
    pool.run(of_ranks, 2, "sft", arguments, timeout=120)
    assert losses(logs(tmp_path / "out")) == pytest.approx(expected, rel=1e-5) and len(expected) == 4


@pytest.mark.local
@pytest.mark.turns
def test_a_model_has_the_class_that_its_config_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A class that does not generate text is replaced by one that does, and a folder without such a class is refused
    in one line, which was a traceback on every rank."""
    settings = recipe.read("sft", [])
    models = {"images": with_images(), "scores": trls.scorer(), "vit": zoo.build("vit")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    cases = [("sft", "images", "LlavaForConditionalGeneration"), ("grpo", "images", "LlavaForConditionalGeneration")]
    cases += [("dpo", "scores", "LlamaForCausalLM"), ("reward", "scores", "LlamaForSequenceClassification")]
    for kind, name, expected in cases:
        settings.model_name_or_path = str(tmp_path / name)
        assert type(recipe.model_of(kind, settings)).__name__ == expected
    settings.model_name_or_path = str(tmp_path / "vit")
    with mock.patch.object(tuning, "main", side_effect=lambda *_: recipe.model_of("sft", settings)):
        assert tuning.run(["sft"]) == 1
    assert f"\nerror: no model can be built from the config of {tmp_path}/vit: " in capsys.readouterr().err


@pytest.mark.turns
def test_a_run_resumes(pool: Pool, tmp_path: Path) -> None:
    """Also a run that was killed in its first save, which `--resume` was refused: it starts from the beginning."""
    arguments = ["--config", toy(tmp_path, save_strategy="steps", save_steps=2), "--resume"]
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    pool.run(of_ranks, 2, "sft", arguments, timeout=120)
    expected = losses(logs(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    checkpoint = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(checkpoint.read_text())
    state["log_history"][0]["resumed"] = 1.0  # a run that begins anew has equal losses, but not this
    checkpoint.write_text(json.dumps(state))
    pool.run(of_ranks, 2, "sft", arguments, timeout=120)
    found = logs(tmp_path / "out")
    assert losses(found) == pytest.approx(expected, rel=1e-5) and state["log_history"] == found[:2]


OURS = os.environ | {"PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-W", "ignore", "-c", "import sys; from pipeshard.cli import main; sys.exit(main())", "sft"]


@pytest.mark.turns
def test_the_command_trains_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    """As a user starts it: two processes, of which one prints; the model answers alike in one process."""
    toy(tmp_path)
    arguments = ["--config", str(ROOT / "recipes" / "smollm2.yaml"), "--model_name_or_path", "model", "--max_steps=3"]
    arguments += ["--dataset_name=data.jsonl", "--output_dir=out", "--learning_rate=0.02", "--prompt=a d"]
    with contextlib.chdir(tmp_path):
        expected = losses(of_trl("sft", arguments))
        ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, env=OURS)
    assert ended.returncode == 0, ended.stderr
    assert losses(logs(tmp_path / "out")) == pytest.approx(expected, rel=1e-5)
    steps = re.findall(r"^step (\d)/3  loss ([\d.]+)  lr [\de.-]+  norm [\d.]+  [\d.]+ min left$", ended.stdout, re.M)
    assert [(int(step), float(loss)) for step, loss in steps] == [
        (k, pytest.approx(loss, rel=1e-3)) for k, loss in enumerate(expected, 1)
    ]
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = tokens.apply_chat_template([{"role": "user", "content": "a d"}], return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=tuning.NEW_TOKENS, do_sample=False)
    said = tokens.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert ended.stdout.endswith(f"saved out\n> <s> a d\n{said.strip()}\n")


@pytest.mark.slow
def test_a_killed_rank_resumes(tmp_path: Path) -> None:
    """kill -9 of one rank, once there is a checkpoint; the losses are those of an undisturbed run."""
    arguments = ["--config", toy(tmp_path, max_steps=40, max_restarts=1, save_steps=2, learning_rate=1e-3)]
    expected = losses(of_trl("sft", arguments))
    arguments.append("--save_strategy=steps")
    command = subprocess.Popen([*COMMAND, *arguments], env=OURS)
    while not list(tmp_path.glob("out/checkpoint-*/trainer_state.json")):
        assert command.poll() is None
        time.sleep(0.02)
    psutil.Process(command.pid).children()[-1].kill()
    assert command.wait(240) == 0
    assert losses(logs(tmp_path / "out")) == pytest.approx(expected, rel=1e-5) and len(expected) == 40


@pytest.mark.turns
def test_a_run_resumes_from_a_named_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """TRL's setting resume_from_checkpoint was read and ignored: training began at step 0."""
    arguments = ["--config", toy(tmp_path, save_strategy="steps", save_steps=2)]
    pool.run(of_ranks, 2, "sft", arguments, timeout=120)
    expected = losses(logs(tmp_path / "out"))
    named = (tmp_path / "out").rename(tmp_path / "before") / "checkpoint-2"
    state = json.loads((named / "trainer_state.json").read_text())
    state["log_history"][0]["named"] = 1.0
    (named / "trainer_state.json").write_text(json.dumps(state))
    pool.run(of_ranks, 2, "sft", [*arguments, f"--resume_from_checkpoint={named}"], timeout=120)
    found = logs(tmp_path / "out")
    assert found[0]["named"] == 1.0 and losses(found) == pytest.approx(expected, rel=1e-5)


def decided(folder: Path) -> list[tuple[bool, bool]]:
    """What the ranks of two agents decide, of which only the second one has started ranks before."""
    rank, found = dist.get_rank(), []
    for begun in (False, True):
        agent = folder / f"{begun}{rank}"
        (agent / "attempt_0" / str(rank)).mkdir(parents=True)
        if begun and rank == 1:
            (agent / tuning.BEGAN).touch()
        error_file = str(agent / "attempt_0" / str(rank) / "error.json")
        environment = {script.TORCHRUN: error_file, "TORCHELASTIC_RESTART_COUNT": str(rank)}
        there = mock.patch.object(tuning, "has_checkpoint", return_value=begun)
        with mock.patch.dict(os.environ, environment), there:
            found.append(tuning.resumption(False, "out"))
        assert (agent / tuning.BEGAN).exists()
    return found


def test_the_ranks_of_all_agents_resume_if_one_does(pool: Pool, tmp_path: Path) -> None:
    """A rank on the second of two machines was lost. torchrun counts this restart on that machine alone, so its ranks
    resumed, those of the first machine began at step 0, and their messages were mixed up."""
    assert pool.run(decided, 2, tmp_path) == [[(False, False), (True, True)]] * 2


def test_restarts_over_an_earlier_run_are_refused(tmp_path: Path) -> None:
    """A run that lost a rank before its first save went on from the last step of the run before it."""
    arguments = ["--config", toy(tmp_path, max_restarts=1)]
    save_checkpoint(tmp_path / "out", 2)
    with (
        mock.patch("pipeshard.trainer.checkpoint.flaw_of", return_value=""),
        mock.patch.object(tuning, "start_ranks", return_value=0) as start,
    ):
        refused = said("sft", *arguments)
        assert refused.exit_code == 1 and "has a checkpoint of an earlier run" in refused.output and not start.called
        for option in ("--resume", "--max_restarts=0"):
            assert said("sft", *arguments, option).exit_code == 0


def test_a_renamed_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    """After `mv checkpoint-100 checkpoint-best`, `resume: true` failed with "No valid checkpoint found in output
    directory", instead of starting from the beginning."""
    save_checkpoint(tmp_path / "out", 100)
    with mock.patch("pipeshard.trainer.checkpoint.flaw_of", return_value=""):
        assert tuning.resumption(True, str(tmp_path / "out")) == (True, True)
        (tmp_path / "out" / "checkpoint-100").rename(tmp_path / "out" / "checkpoint-best")
        assert tuning.resumption(True, str(tmp_path / "out")) == (True, False)


@pytest.mark.local
def test_restarts_by_torchrun_over_an_earlier_run_are_refused(tmp_path: Path) -> None:
    """A run of `torchrun --max-restarts 3 -m pipeshard.tuning` began at step 0, and went on from the last step of
    the run before it once a rank was lost. A restart after the refusal is refused too."""
    error_file = tmp_path / "attempt_0" / "0" / "error.json"
    environment = {script.TORCHRUN: str(error_file), "TORCHELASTIC_MAX_RESTARTS": "3"}
    with mock.patch.dict(os.environ, environment), mock.patch.object(tuning, "has_checkpoint", return_value=True):
        for attempt in "01":
            os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
            with pytest.raises(ConfigurationError, match="out has a checkpoint of an earlier run"):
                tuning.resumption(False, "out")
        assert tuning.resumption(True, "out") == (True, True)
        assert tuning.resumption(False, "out") == (True, True)


def test_rewards_are_in_the_order_of_trl() -> None:
    """The weights in reward_weights went to other functions than in TRL's script, and a function that makes the reward
    function was called in its place."""
    names = ["--reward_funcs", "tests.test_recipes.echoed", "get_soft_overlong_punishment"]
    settings = recipe.read("grpo", ["--reward_model_name_or_path=scorer", *names])
    model, echo, punishment = recipe.reward_functions(settings)
    assert (model, echo) == ("scorer", echoed)
    assert punishment(completion_ids=[[1] * 1024, [1] * 1281]) == [0.0, -1.0]


def test_a_list_of_one_needs_no_brackets(tmp_path: Path) -> None:
    """`reward_funcs: my_rewards.length` was read letter by letter: "m cannot be imported", on each rank, after the
    download. `reward_weights: 1.0` ended there, too: "object of type 'float' has no len()"."""
    file = toy(tmp_path, "grpo", reward_funcs="tests.test_recipes.echoed", reward_weights=1.0, report_to="none")
    settings = recipe.read("grpo", ["--config", file])
    assert recipe.reward_functions(settings) == [echoed] and settings.report_to == "none"
    assert settings.reward_weights == [1.0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my_reward.length", "No module named 'my_reward'"),
        ("nowhere.rewards.length", "No module named 'nowhere'"),
        ("acuracy_reward", "module "),
        ("my_rewards.length", None),
        ("my_package.rewards.length", None),
        ("accuracy_reward", None),
    ],
)
def test_reward_functions_are_sought_before_ranks_start(tmp_path: Path, name: str, why: str | None) -> None:
    """A wrong name ended the ranks, after the download. A module or package in the current folder is found, but not
    imported: a package that loads a model would keep it in the launcher."""
    file = toy(tmp_path, "grpo", reward_funcs=name)
    (tmp_path / "my_package").mkdir()
    for code in ("my_rewards.py", "my_package/__init__.py"):
        (tmp_path / code).write_text("raise AssertionError")
    with contextlib.chdir(tmp_path), mock.patch.object(tuning, "start_ranks", return_value=0) as start:
        ended = said("grpo", "--config", file)
    assert start.called == (why is None), ended.output
    assert why is None or f"error: reward_funcs: {name} cannot be imported: {why}" in ended.output


def test_a_frozen_new_head_is_refused() -> None:
    """A reward model with adapters of TRL's default task type trained below a random head, which was not saved."""
    assert "Set lora_task_type=SEQ_CLS" in said("reward", "--use_peft").output
    for trained in ("--lora_task_type=SEQ_CLS", "--lora_modules_to_save=score"):
        assert recipe.read("reward", ["--use_peft", trained]).use_peft


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optim": "adamw_torch_fused"}, "adamw_fused"),
        ({"optim": "adamw_torch"}, "adamw"),
        ({"optim": "paged_adamw_8bit"}, "trainer_adamw_8bit"),
        ({"optim": "adamw_bnb_8bit"}, "trainer_adamw_8bit"),
        ({"optim": "lion_8bit"}, "trainer_lion_8bit"),
        ({"optim": "sgd"}, "sgd"),
        ({"optim": "lion_32bit"}, "adamw"),
        ({"optim": "rmsprop"}, "adamw"),
        ({"optim": "ademamix"}, None),
    ],
)
def test_a_plan_counts_the_states_of_every_optimizer(settings: dict[str, str], expected: str | None) -> None:
    """Optimizers that the planner does not know were planned without states, and those in 8 bits with states in
    fp32."""
    read = recipe.read("sft", [f"--{name}={value}" for name, value in settings.items()])
    if expected is None:
        with pytest.raises(ConfigurationError, match="optim=ademamix, which keeps three states per parameter"):
            dry_run.planned_optimizer(read)
        return
    assert dry_run.planned_optimizer(read) == expected
    read.dry_run = True
    noted = any(f"assumes AdamW's states for optim={read.optim}" in text for text in tuning.remarks("sft", read))
    assert noted == (read.optim in ("lion_32bit", "rmsprop"))


@pytest.mark.parametrize(
    ("samples", "window", "asked", "expected"),
    [(2, 2, None, (2, 2)), (3, 2, 4, (4, 2)), (2, 1, 8, (2, 1)), (5, 1, 3, (3, 2))],
)
def test_a_plan_has_the_largest_microbatch_of_a_run(
    samples: int, window: int, asked: int | None, expected: tuple[int, int]
) -> None:
    """A batch of 3 samples in 2 microbatches was planned with 1 sample in each."""
    settings = recipe.read("sft", [f"--per_device_train_batch_size={samples}"])
    settings.gradient_accumulation_steps, settings.microbatches = window, asked
    assert dry_run.microbatches(settings) == expected
    if asked is not None:
        assert max(split_sizes(samples, asked // window, None)) == expected[1]


def said(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--leraning_rate=1"], "pipeshard sft has no setting --leraning_rate=1 (did you mean learning_rate"),
        (["--pp_size", "2"], "pipeshard sft has no setting --pp_size (did you mean pp?)"),
        (["--xyzzy"], "pipeshard sft has no setting --xyzzy. pipeshard sft --help lists the settings"),
        (["--max_steps", "x"], "argument --max_steps/--max-steps: invalid int value: 'x'"),
        (["--schedule", "2f2b"], "argument --schedule: invalid choice: '2f2b'"),
        (["--microbatches", "3"], "microbatches=3 is not a multiple of gradient_accumulation_steps=2"),
        (["--pp", "0"], "error: pp, the number of ranks in a pipeline, must be a positive integer, got 0"),
        (["--nnodes", "4"], "nnodes=4 must be a positive divisor of the number of ranks, pp * dp * tp = 2"),
        (["--gradient_accumulation_steps", "0"], "gradient_accumulation_steps must be an integer of at least 1, got 0"),
        (["--max_restarts", "-1"], "max_restarts must be an integer of at least 0, got -1"),
        (["--num_slices", "2"], "num_slices=2 is not supported with gradient_checkpointing"),
        (
            ["--model_name_or_path", "some/model"],
            "model_name_or_path=some/model is not a local folder, and cannot be loaded",
        ),
        (["--dataset_name", "none.jsonl"], "dataset_name=none.jsonl is not an existing file"),
        (["--dry_run", "--pp", "40"], "fewer than pp=40. Use pp <="),
        (["--pp", "40"], "fewer than pp=40. Use pp <="),
        (
            ["--dry_run", "--device_memory", "1MB", "--gradient_checkpointing=false", "--max_length=64"],
            "but its device_memory is 1.00 MB. Possible remedies: a smaller max_length or per_device_train_batch_size, "
            "activation recompute (gradient_checkpointing, or recompute=1), adapters (use_peft), more stages (pp) on "
            "more ranks, or more memory",
        ),
        (
            ["--dry_run", "--device_memory=1MB", "--num_slices=2", "--recompute=1"],
            "error: with 2 slices, rank 1 of 2 needs",
        ),
        (["--dataset_kwargs", "{a: 1}"], "error: dataset_kwargs={a: 1} is not valid JSON: Expecting property name"),
        (["--dry_run", "--device_memory=1TB,1MB", "--num_slices=2", "--recompute=1"], "rank 1 takes"),
    ],
)
def test_wrong_settings_are_refused_before_ranks_start(tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = said("sft", "--config", toy(tmp_path), *arguments)
    assert ended.exit_code == 1 and message in ended.output and ended.output.count("error: ") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp: 2\nlora: 8", "recipe.yaml (did you mean lora_"),
        ("schedule: auto", "error: argument --schedule: invalid choice: 'auto'"),
        ("dtype: bf16", "error: argument --dtype: invalid choice: 'bf16'"),
        ("dtype: false", "error: argument --dtype: invalid choice: 'no'"),
        ("schedule: null", "error: argument --schedule: invalid choice: 'None'"),
        ("schedule: [1f1b]", "error: argument --schedule: invalid choice: \"['1f1b']\""),
        ("precision: no", "error: argument --precision: invalid choice: 'no' (choose from 'bf16', 'fp16')"),
        ("num_slices: null", "error: num_slices must be 'auto' or a positive integer, got 'None'"),
        ("num_slices: true", "error: num_slices must be 'auto' or a positive integer, got 'True'"),
        ("num_slices: [1]", "error: num_slices must be 'auto' or a positive integer, got '[1]'"),
        ("pp: 2.5", "error: argument --pp: invalid int value: '2.5'. pipeshard sft --help lists the settings"),
        ("pp: null", "error: argument --pp: invalid int value: 'None'"),
        ("nnodes: null", "error: argument --nnodes: invalid int value: 'None'"),
        ("gradient_accumulation_steps: null", "gradient_accumulation_steps must be an integer of at least 1, got None"),
        ("- pp", "must contain a YAML mapping"),
        ("pp: [", "the --config file cannot be read: ParserError"),
        (None, "the --config file cannot be read: FileNotFoundError"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    """`num_slices: null` and `pp: null` ended in a traceback, `schedule: null` ran 1f1b, and `precision: no` was to be
    fp32, which is refused."""
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    ended = said("sft", f"--config={tmp_path}/recipe.yaml")
    assert ended.exit_code == 1 and message in ended.output


def test_the_two_names_of_checkpointing_are_one_setting(tmp_path: Path) -> None:
    """transformers' new name turned recomputation off, but a plan still counted its memory, and slices were refused."""
    if not hasattr(transformers.TrainingArguments, "activation_checkpointing"):
        pytest.skip("transformers has only the old name")
    with mock.patch("pipeshard.launch.main", return_value=0), mock.patch.dict(os.environ):
        ended = said("sft", "--config", toy(tmp_path), "--activation_checkpointing=false", "--num_slices=2")
    assert ended.exit_code == 0, ended.output
    given = {"use_reentrant": False}
    options = ["--activation_checkpointing=true", "--activation_checkpointing_kwargs", json.dumps(given)]
    settings = recipe.read("sft", ["--gradient_checkpointing=false", *options, "--use_cpu", "--bf16=false"])
    assert settings.gradient_checkpointing and settings.gradient_checkpointing_kwargs == given
    settings.gradient_checkpointing = False  # as with recompute
    assert not recipe.instance_of(recipe.of_trl("sft", "Config"), settings).activation_checkpointing


def test_a_mapping_may_be_an_option(tmp_path: Path) -> None:
    """An option with a mapping, JSON as for TRL, ended in a traceback: on the ranks, or before they started."""
    mappings = {"dataset_kwargs": {"skip_prepare_dataset": False}, "model_init_kwargs": {"use_cache": False}}
    options = [part for name, value in mappings.items() for part in (f"--{name}", json.dumps(value))]
    arguments = ["--config", toy(tmp_path), *options, "--lr_scheduler_kwargs", '{"num_cycles": 2}']
    with mock.patch("pipeshard.launch.main", return_value=0), mock.patch.dict(os.environ):
        ended = said("sft", *arguments)
    assert ended.exit_code == 0, ended.output
    settings = recipe.read("sft", arguments)
    assert (settings.dataset_kwargs, settings.model_init_kwargs) == tuple(mappings.values())
    assert settings.lr_scheduler_kwargs == {"num_cycles": 2}
    assert recipe.model_of("sft", settings).config.use_cache is False


def test_no_in_a_file_is_no(tmp_path: Path) -> None:
    """`eval_strategy: no`, which YAML reads as False, was told to hold out data for the evaluation, and then ended in a
    traceback of TRL."""
    file = Path(toy(tmp_path))
    file.write_text(f"{file.read_text()}\neval_strategy: no\nsave_strategy: no\nlogging_strategy: no\n")
    settings = recipe.read("sft", ["--config", str(file), "--use_cpu"])
    assert recipe_data.rows(settings)[1] is None
    args = recipe.instance_of(recipe.of_trl("sft", "Config"), settings)
    assert {args.eval_strategy, args.save_strategy, args.logging_strategy} == {"no"}


def test_every_unknown_setting_is_named_with_its_own_name(tmp_path: Path) -> None:
    """A newcomer typed `sft --model tiny --data chats.jsonl`, and read that --model is not a setting, with no hint."""
    (tmp_path / "recipe.yaml").write_text("stages: 2")
    output = said("sft", f"--config={tmp_path}/recipe.yaml", "--model", "tiny", "--data=chats.jsonl").output
    assert output == (
        f"error: pipeshard sft has no setting stages in {tmp_path}/recipe.yaml (did you mean pp?), --model (did you "
        "mean model_name_or_path?), --data=chats.jsonl (did you mean dataset_name?). pipeshard sft --help lists the "
        "settings\n"
    )


def test_options_of_accelerate_are_translated(tmp_path: Path) -> None:
    """A file for `trl sft --config`, with options that TRL passes on, asked whether dataset_num_proc was meant. Asked
    whether accelerator_config was, a user renamed accelerate_config: TrainingArguments read `zero2` as a JSON file."""
    meant = {
        "num_processes: 4": "pp or dp",
        "accelerate_config: zero2": "pp or dp",
        "use_fsdp: true": "pp or dp",
        "num_machines: 2": "nnodes",
        "rdzv_backend: c10d": "rdzv_endpoint",
    }
    (tmp_path / "recipe.yaml").write_text("\n".join(meant))
    output = said("sft", f"--config={tmp_path}/recipe.yaml").output
    for text, names in meant.items():
        assert f"{text.partition(':')[0]} in {tmp_path}/recipe.yaml (did you mean {names}?)" in output


CHAT_TURNS = '{"role": "user", "content": "a"}'


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "sft",
            f'{{"conversation": [{CHAT_TURNS}]}}',
            "chats.jsonl has the column conversation, but sft needs messages, prompt and completion, story, or "
            "input_ids: rename or add columns",
        ),
        ("sft", '{"conversation": [{"from": "user", "value": "a"}]}', "has the column conversation, but sft needs"),
        ("sft", f'{{"conversations": [{CHAT_TURNS}]}}', "has the column conversations, but sft needs messages"),
        ("sft", f'{{"messages": [{CHAT_TURNS}]}}\n{{"messages": "b"}}', "messages in row 2 of "),
        ("sft", '{"messages": [{"from": "user", "value": "a"}]}', "each with role and content, got [{'from'"),
        ("sft", f'{{"messages": [{CHAT_TURNS}]}}\n' * 150 + '{"messages": []}', "messages in row 151 of "),
        ("sft", '{"story": "a"}\n{"story": null}', "story in row 2 of "),
        ("sft", '{"story": "a"}\n{"story": 3}', "story in row 2 of "),
        (
            "sft",
            '{"conversations": [{"from": "a", "value": "b"}]}\n{"conversations": null}',
            "conversations in row 2 of ",
        ),
        ("reward", '{"chosen_ids": [1], "rejected_ids": null}', "rejected_ids in row 1 of "),
        ("sft", '{"story": "caf\udce9"}', "chats.jsonl cannot be read: ArrowInvalid: "),
        ("sft", '{"text": "a"}\n\n{"text": oops}\n', "chats.jsonl cannot be read: "),
        ("sft", "", "chats.jsonl is empty"),
        ("dpo", '{"prompt": "a", "chosen": "b"}', "columns prompt, chosen, but dpo needs chosen and rejected"),
        ("reward", '{"text": "b"}', "reward needs chosen and rejected, chosen_ids and rejected_ids, or"),
        ("grpo", '{"question": "b"}', "the column question, but grpo needs prompt"),
        ("sft", f'{{"messages": [{CHAT_TURNS}]}}', None),
        ("sft", '{"story": "a"}', None),
        ("sft", '{"conversations": [{"from": "user", "value": "a"}]}', None),
        ("dpo", '{"chosen": "a", "rejected": "b"}', None),
        ("grpo", '{"prompt": "a", "answer": "b"}', None),
    ],
)
def test_data_that_trl_cannot_train_on_is_refused(tmp_path: Path, kind: str, text: str, message: str | None) -> None:
    """Every rank raised an error of TRL's, or of the reader, in a traceback that did not name the file. A name with
    brackets was read as a pattern, and not found."""
    (tmp_path / "[1]chats.jsonl").write_text(text, errors="surrogateescape")
    field = ["--dataset_text_field=story"] if kind == "sft" else []
    settings = recipe.read(kind, [f"--dataset_name={tmp_path}/[1]chats.jsonl", *field])
    with pytest.raises(ConfigurationError, match=re.escape(message)) if message else contextlib.nullcontext():
        recipe_data.refuse_columns(kind, settings, recipe_data.rows(settings)[0])


@pytest.mark.parametrize("name", ["books.txt", "chats.jsonl.gz", "CHATS.JSONL"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    """The Hub was asked for a file that exists, and the error said that there was no such dataset on the Hub."""
    (tmp_path / name).write_text("a b")
    settings = recipe.read("sft", [f"--dataset_name={tmp_path}/{name}"])
    message = f"dataset_name={tmp_path}/{name} must end in .jsonl, .json, .parquet or .csv: convert the file"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        recipe_data.rows(settings)


def test_data_is_checked_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "chats.csv").write_text("a,b\n1,2")
    with mock.patch.object(tuning, "start_ranks") as start:
        ended = said("sft", "--config", toy(tmp_path), f"--dataset_name={tmp_path}/chats.csv")
        (tmp_path / "both").mkdir()
        (tmp_path / "both/train.jsonl").write_text('{"text": "a"}')
        (tmp_path / "both/test.jsonl").write_text('{"text": "a"}\n{"text": null}')
        held_out = said("sft", "--config", toy(tmp_path), f"--dataset_name={tmp_path}/both", "--eval_strategy=epoch")
    assert ended.exit_code == 1 and "chats.csv has the columns a, b, but sft needs" in ended.output
    assert held_out.exit_code == 1 and f"text in row 2 of the split test of {tmp_path}/both must" in held_out.output
    assert not start.called


TURN = {"role": "user", "content": "a"}
PAIR = {
    "chosen": [TURN, {"role": "assistant", "content": "b"}],
    "rejected": [TURN, {"role": "assistant", "content": ""}],
}
REMEDIES = {
    "sft": "set chat_template_path to a file with a Jinja template (.jinja)",
    "reward": "set chat_template_path to a file with a Jinja template (.jinja)",
    "dpo": "save a Jinja template as chat_template.jinja in the model's folder",
    "grpo": "save a Jinja template as chat_template.jinja in the model's folder",
}


@pytest.mark.parametrize(
    ("kind", "row", "is_chat"),
    [
        ("sft", {"messages": PAIR["chosen"]}, True),
        ("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, True),
        ("sft", {"text": "a", "history": [TURN]}, False),
        ("dpo", PAIR, True),
        ("reward", PAIR, True),
        ("grpo", {"prompt": [TURN]}, True),
        ("grpo", {"prompt": "a"}, False),
    ],
)
def test_chats_need_a_template_before_ranks_start(
    tmp_path: Path, kind: str, row: dict[str, Any], is_chat: bool
) -> None:
    """With a base model, which has none, the first rank ended in datasets.map, while the others waited for it."""
    file = toy(tmp_path, kind)
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n")
    template = tmp_path / "model" / "chat_template.jinja"
    elsewhere = template.rename(tmp_path / "chat.jinja")

    def started(*arguments: str) -> str | None:
        """The error, or None if ranks were started."""
        with mock.patch.object(tuning, "start_ranks", return_value=0) as start:
            ended = said(kind, "--config", file, *arguments)
        assert start.called == (ended.exit_code == 0)
        return ended.output if ended.exit_code else None

    if not is_chat:
        assert started() is None
        return
    assert f"model has no chat template, but {tmp_path}/data.jsonl contains chats: {REMEDIES[kind]}" in (
        started() or ""
    )
    if "chat_template_path" in REMEDIES[kind]:
        assert started(f"--chat_template_path={elsewhere}") is None
    elsewhere.rename(template)
    assert started() is None


def test_what_a_user_may_overlook_is_noted(tmp_path: Path) -> None:
    """TRL's default of one microbatch left half of the ranks idle, and a plan was made for a file that is not there."""
    (tmp_path / "recipe").mkdir()
    arguments = ["--config", toy(tmp_path / "recipe"), "--gradient_accumulation_steps=1"]
    with mock.patch.object(tuning, "start_ranks", return_value=0):
        trained = said("sft", *arguments)
    waits = (
        "note: a step has 1 microbatch for 2 stages, so stages wait for each other: "
        "raise gradient_accumulation_steps to at least 2"
    )
    assert waits in trained.output and "dataset_name" not in trained.output
    planned = said("sft", *arguments, "--dry_run", "--max_length=8", "--dataset_name=none.jsonl")
    assert planned.exit_code == 0 and "1 microbatch of input_ids" in planned.output
    assert waits in planned.output and "note: dataset_name=none.jsonl is not an existing file" in planned.output


@pytest.mark.parametrize(
    ("kind", "samples", "window", "asked", "message"),
    [
        ("sft", 1, 1, 8, ".* 1 microbatch .*: raise microbatches and per_device_train_batch_size to at least 2"),
        ("sft", 2, 1, 1, ".* 1 microbatch .*: raise microbatches and per_device_train_batch_size to at least 2"),
        ("sft", 1, 2, 2, None),
        ("sft", 2, 1, 8, None),
        ("dpo", 1, 1, 8, None),
    ],
)
def test_too_few_samples_for_the_microbatches_are_noted(
    kind: str, samples: int, window: int, asked: int, message: str | None
) -> None:
    """`microbatches: 8` with one sample runs one microbatch on two stages, and no note said so."""
    settings = recipe.read(kind, [f"--per_device_train_batch_size={samples}"])
    settings.gradient_accumulation_steps, settings.microbatches = window, asked
    found = "".join(tuning.remarks(kind, settings))
    assert re.fullmatch(message or "", found)


def test_a_packed_batch_is_noted_as_one_microbatch() -> None:
    """`--packing --microbatches 8` ran one microbatch on two stages, since a packed batch is one row, and no note said
    so."""
    for packing, message in (("bfd", ".*: raise gradient_accumulation_steps to at least 2"), ("wrapped", "")):
        arguments = ["--packing", f"--packing_strategy={packing}", "--per_device_train_batch_size=8"]
        settings = recipe.read("sft", arguments)
        settings.gradient_accumulation_steps, settings.microbatches = 1, 8
        assert re.fullmatch(message, "".join(tuning.remarks("sft", settings)))
        assert dry_run.microbatches(settings) == ((1, 8) if message else (8, 1))


def save_checkpoint(folder: Path, step: int) -> None:
    """Write what stands for a complete checkpoint, where `flaw_of` is mocked."""
    (folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
    (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")


def test_a_failed_run_names_its_checkpoint(tmp_path: Path) -> None:
    """Nothing said that a run that had failed after hours could go on."""
    arguments = ["--config", toy(tmp_path)]

    def fail(*_: Any, **__: Any) -> int:
        save_checkpoint(tmp_path / "out", 2)
        return 1

    with mock.patch("pipeshard.launch.main", fail), mock.patch.dict(os.environ):
        assert "--resume" not in said("sft", *arguments).output
        with mock.patch("pipeshard.trainer.checkpoint.flaw_of", return_value=""):
            ended = said("sft", *arguments)
    assert f"{tmp_path}/out has a complete checkpoint: start the same command with --resume to" in ended.output
    assert ended.exit_code == 1


@pytest.mark.parametrize(
    ("saved", "options", "advice"),
    [
        ([], [], None),
        ([], ["--resume"], "--resume"),
        ([1], [], "--resume_from_checkpoint={}/checkpoint-1"),
        ([1, 4], [], "--resume"),
        ([3], [], "--resume"),
    ],
    ids=["none", "resumed", "fewer steps", "more steps", "replaced"],
)
def test_a_failed_run_does_not_name_checkpoints_of_an_earlier_run(
    tmp_path: Path, saved: list[int], options: list[str], advice: str | None
) -> None:
    """A second run that failed before its first save, with other data or another learning rate, advised --resume, which
    continued the first run and saved its weights."""
    out = tmp_path / "out"
    arguments = ["--config", toy(tmp_path), *options]
    save_checkpoint(out, 3)

    def fail(*_: Any, **__: Any) -> int:
        for step in saved:
            save_checkpoint(out, step)
        return 1

    unflawed = mock.patch("pipeshard.trainer.checkpoint.flaw_of", return_value="")
    with mock.patch("pipeshard.launch.main", fail), mock.patch.dict(os.environ), unflawed:
        output = said("sft", *arguments).output
    assert re.findall(r"start the same command with (\S+) to", output) == ([advice.format(out)] if advice else [])


def test_a_stopped_run_names_its_checkpoint(tmp_path: Path) -> None:
    """A run that Ctrl-C or the time limit of Slurm had stopped did not say that it could go on: its launcher exits
    by itself."""
    arguments = ["--config", toy(tmp_path)]

    def run(*_: Any) -> None:
        save_checkpoint(tmp_path / "out", 2)
        raise SignalException("", signal.SIGTERM)

    threads = {name: mock.Mock(return_value=[]) for name in ("_forward", "_watch_workers")}
    stopped = {"run": run, "_clean_up": mock.Mock(), "_leave_process": mock.Mock(side_effect=SystemExit)}
    with (
        mock.patch.multiple("pipeshard.launch", **threads, **stopped),
        mock.patch("pipeshard.trainer.checkpoint.flaw_of", return_value=""),
        mock.patch.dict(os.environ),
    ):
        ended = said("sft", *arguments)
    assert f"{tmp_path}/out has a complete checkpoint: start the same command with --resume" in ended.output


def test_the_line_shows_the_first_and_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Four steps with TRL's logging_steps=10 showed no loss, and a resumed run did not say where it began."""
    line = tuning.line(restarts=True)
    args, state = mock.Mock(output_dir="out"), mock.Mock(global_step=10, max_steps=12, is_world_process_zero=True)
    line.on_train_begin(args, state, None)
    for state.global_step in (11, 12):
        control = transformers.TrainerControl(should_training_stop=state.global_step == 12)
        line.on_step_end(args, state, control)
        assert control.should_log == (state.global_step == 12)
    line.on_log(args, state, None, {"loss": 1.25})
    line.on_log(args, state, None, {"train_loss": 9.0})
    shown = capsys.readouterr().out
    assert shown == "resuming from out/checkpoint-10 (step 10 of 12)\nstep 12/12  loss 1.25  0.0 min left\n"
    state.global_step = 0
    line.on_train_begin(args, state, None)
    assert capsys.readouterr().out == "no complete checkpoint in out: training begins at step 0\n"


def test_the_last_step_is_logged_if_a_callback_of_the_trainer_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `enable_jit_checkpoint`, PipelineTrainer adds a callback that ends the run at SIGTERM. The line's callback
    came before it, so the last step was not logged."""

    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    class OneWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * input_ids).mean()}

    class StoppingTrainer(transformers.Trainer):
        def __init__(self, model: nn.Module, peft_config: None, pipeline: None, **kwargs: Any) -> None:
            super().__init__(model, **kwargs)
            self.add_callback(Stopping())

    arguments = ["--use_cpu", "--gradient_checkpointing=false", "--max_steps=5", "--logging_steps=10"]
    settings = recipe.read("reward", [*arguments, f"--output_dir={tmp_path}"])
    with (
        mock.patch.object(tuning, "rows", return_value=([{"input_ids": [1]}], None)),
        mock.patch.object(tuning, "model_of", return_value=OneWeight()),
        mock.patch("pipeshard.distributed.mesh.backend_here", return_value=None),  # this process has no launcher
        mock.patch("pipeshard.plugin.PipelinePlugin"),
        mock.patch("pipeshard.trainer.pipelined", return_value=StoppingTrainer),
    ):
        tuning.train("reward", settings)
    assert "step 2/5  loss 0.9999" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_a_run_without_a_prompt_names_its_folder_too(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Data with only input_ids has no prompt, and a reward model answers none: nothing said where the model was."""
    settings, data = recipe.read(kind, ["--use_cpu", "--output_dir=out"]), [{"input_ids": [1]}]
    with (
        mock.patch.object(tuning, "rows", return_value=(data, None)),
        mock.patch.object(tuning, "model_of"),
        mock.patch("pipeshard.distributed.mesh.backend_here", return_value=None),  # this process has no launcher
        mock.patch("pipeshard.plugin.PipelinePlugin"),
        mock.patch("pipeshard.trainer.pipelined"),
    ):
        tuning.train(kind, settings)
    assert capsys.readouterr().out == "\nsaved out\n"


def test_missing_packages_are_named() -> None:
    with mock.patch.object(recipe, "find_spec", lambda name: None):
        ended = said("dpo")
    assert "error: pipeshard dpo requires trl and datasets: pip install 'pipeshard[trl]'" in ended.output


def test_a_plan_is_of_sft() -> None:
    assert (
        "--dry_run supports only pipeshard sft: the planner does not simulate a step of pipeshard dpo"
        in said("dpo", "--dry_run").output
    )


def test_data_is_a_file_a_folder_or_a_split(tmp_path: Path) -> None:
    settings = recipe.read("sft", ["--config", toy(tmp_path), "--eval_strategy", "epoch"])
    with pytest.raises(
        ConfigurationError, match="dataset_test_split=test is not a split of the data: set dataset_test_split to train"
    ):
        recipe_data.rows(settings)
    settings.test_split_size = 37
    with pytest.raises(ConfigurationError, match="=37 cannot hold out a part of 36 samples: set a fraction"):
        recipe_data.rows(settings)
    settings.test_split_size = 0.25
    train, test = recipe_data.rows(settings)
    assert (len(train), len(test)) == (27, 9)
    train.save_to_disk(tmp_path / "folder")
    train.to_parquet(tmp_path / "data.parquet")
    settings.test_split_size, settings.eval_strategy = None, "no"
    for name in ("folder", "data.parquet"):
        settings.dataset_name = str(tmp_path / name)
        again, none = recipe_data.rows(settings)
        assert again.to_list() == train.to_list() and none is None


def test_a_stream_holds_out_no_samples(tmp_path: Path) -> None:
    """`--dataset_streaming true --test_split_size 0.25` ended in a traceback: a stream has no train_test_split."""
    ended = said("sft", "--config", toy(tmp_path), "--dataset_streaming", "true", "--test_split_size", "0.25")
    assert "error: test_split_size=0.25 requires data of a known length, but dataset_streaming is set" in ended.output


def test_an_option_overrides_the_file(tmp_path: Path) -> None:
    settings = recipe.read("sft", ["--config", toy(tmp_path, pp=3, chunks=2), "--pp", "4", "--schedule=interleaved"])
    found = recipe.plugin_arguments(settings)
    assert (found["pp_size"], found["num_model_chunks"], found["num_slices"]) == (4, 2, 1)


@pytest.mark.parametrize("written", ["3,1", [3, 1]])
def test_a_partition_may_be_a_list(tmp_path: Path, written: Any) -> None:
    """`--partition 3,1` was an unknown partition, while the same list in the file divided the model."""
    settings = recipe.read("sft", ["--config", toy(tmp_path, partition=written)])
    assert recipe.plugin_arguments(settings)["partition"] == [3, 1] == settings.partition
    option = recipe.read("sft", ["--partition", "3,1"])
    assert option.partition == [3, 1]


def test_ranks_are_shared_by_machines(tmp_path: Path) -> None:
    arguments = ["--pp=2", "--dp=2", "--nnodes=2", "--rdzv_endpoint=host:29400", "--config", toy(tmp_path)]
    with mock.patch("pipeshard.launch.main", return_value=0) as launch, mock.patch.dict(os.environ):
        assert said("sft", *arguments).exit_code == 0
    (flags,) = launch.call_args.args
    assert flags[:4] == ["--nproc-per-node=2", "--nnodes=2", "--max-restarts=0", "--rdzv-endpoint=host:29400"]
    assert flags[4:] == ["--module", "pipeshard.tuning", "sft", *arguments]


def test_several_machines_need_an_address(tmp_path: Path) -> None:
    """Each machine hosted a rendezvous of its own, on which it waited for the others for ten minutes."""
    arguments = ["sft", "--nnodes=2", "--config", toy(tmp_path)]
    with mock.patch("pipeshard.launch.main", return_value=0) as launch, mock.patch.dict(os.environ):
        refused = said(*arguments)
        assert refused.exit_code == 1 and not launch.called
        assert "error: nnodes=2 requires rdzv_endpoint=HOST:PORT" in refused.output
        assert said(*arguments, "--dry_run").exit_code == 0
        os.environ["PET_RDZV_ENDPOINT"] = "host:29400"
        assert said(*arguments).exit_code == 0 and launch.called


@pytest.mark.turns
def test_cuts_that_a_plan_has_moved_are_to_be_set(tmp_path: Path) -> None:
    """`--dry_run` with device_memory exited with 0 for cuts that training does not use, and did not name them."""
    asked = ["sft", "--config", toy(tmp_path, model=zoo.build("llama", layers=8)), "--dry_run", "--max_length=16"]
    read = recipe.read("sft", asked[1:])
    peak = dry_run.planned(read).estimate.peak
    read.device_memory = str(peak - 1)
    cuts = ",".join(map(str, dry_run.planned(read).cuts))
    advice = f"Set partition={cuts}: training does not move the cuts to fit.\n"
    assert said(*asked, f"--device_memory={peak - 1}").output.endswith(advice)
    assert "Set partition" not in said(*asked, f"--device_memory={peak}").output
    settled = said(*asked, f"--device_memory={peak - 1}", f"--partition={cuts}")
    assert settled.exit_code == 0 and "Set partition" not in settled.output


@pytest.mark.turns
def test_a_plan_fits_with_the_slices_of_the_run(tmp_path: Path) -> None:
    """`num_slices: 2` was accepted because 16 slices fit, "auto" too, which chooses by time only, and 32 slices were
    not planned."""
    asked = ["sft", "--config", toy(tmp_path), "--dry_run", "--recompute=1", "--max_length=256"]
    peaks = {one.n: one.peak for one in dry_run.planned(recipe.read("sft", asked[1:])).in_slices()}
    limit = f"--device_memory={peaks[16]}"
    assert peaks[16] < peaks[8] < peaks[2]
    for number, slices in (("2", "2 slices"), ("auto", "1 slice")):
        refused = said(*asked, limit, f"--num_slices={number}")
        assert refused.exit_code == 1 and f"error: with {slices}, rank " in refused.output
        assert "Possible remedies: num_slices=16 (fits), a smaller max_length or per_device" in refused.output
        assert "recompute=1), adapters (use_peft), more stages (pp) on more ranks, or more memory" in refused.output
    for number in ("16", "32"):
        found = said(*asked, limit, f"--num_slices={number}")
        rows = [line.split() for line in found.output.partition("Slices of 1f1b")[2].splitlines()]
        fits = {row[0]: row[-1] for row in rows if len(row) == 6}
        assert found.exit_code == 0 and (fits["8"], fits[number]) == ("no", "yes")


@pytest.mark.turns
@pytest.mark.parametrize(
    "options",
    [
        ["--attn_implementation=eager"],
        ["--model_init_kwargs", '{"attn_implementation": "eager", "dtype": "float16", "vocab_size": 128}'],
        ["--dtype=auto"],
    ],
)
def test_the_model_of_a_plan_is_that_of_the_run(tmp_path: Path, options: list[str]) -> None:
    """Eager attention, the options in model_init_kwargs, and the dtype of weights whose config names none, were not
    planned: a run took more memory than its plan."""
    file = toy(tmp_path)
    config = tmp_path / "model" / "config.json"
    described = json.loads(config.read_text())
    described.pop("dtype")
    config.write_text(json.dumps(described))
    read = recipe.read("sft", ["--config", file, *options])
    forms = []
    for made in (dry_run.blank(read), recipe.model_of("sft", read)):
        assert made.config._attn_implementation == ("sdpa" if "auto" in options[0] else "eager")
        forms.append([(name, p.dtype, p.shape) for name, p in made.named_parameters()])
    assert forms[0] == forms[1]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("described", "option", "planned"),
    [("bfloat16", "auto", torch.bfloat16), (None, "bfloat16", torch.bfloat16), (None, "auto", torch.float32)],
)
def test_a_plan_needs_no_weights(tmp_path: Path, described: str | None, option: str, planned: torch.dtype) -> None:
    """After `hf download --include "*.json"`, the dry run looked for the weights that the index lists: "the checkpoint
    is incomplete", although the config and the settings were enough for a plan."""
    file, folder = toy(tmp_path), tmp_path / "model"
    config = json.loads((folder / "config.json").read_text()) | {"dtype": described}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = dry_run.blank(recipe.read("sft", ["--config", file, f"--dtype={option}"]))
    assert {parameter.dtype for parameter in model.parameters()} == {planned}


@pytest.mark.turns
def test_the_model_that_is_named_is_planned(tmp_path: Path) -> None:
    """`--model_name_or_path Qwen/Qwen2.5-7B` with a recipe for a llama of 135M parameters planned the llama, and so
    did a mistyped folder."""
    zoo.build("gpt2").save_pretrained(tmp_path / "hub")
    described = f"llama {' '.join(f'{key}={value}' for key, value in zoo.TINY.items())}"
    file = toy(tmp_path, model_config=described, model_name_or_path="owner/name")
    asked = ["sft", "--config", file, "--dry_run", "--max_length=16"]
    with mock.patch("huggingface_hub.hf_hub_download", return_value=str(tmp_path / "hub" / "config.json")):
        found = said(*asked)
    assert "GPT2LMHeadModel, " in found.output and "note: " not in found.output
    missing = said(*asked)
    assert missing.exit_code == 0 and "LlamaForCausalLM, " in missing.output
    note = "note: model_name_or_path=owner/{} is not on this machine: the plan is for model_config"
    assert note.format("name") in missing.output
    for name in ("owner/other", f"{tmp_path}/modle"):
        refused = said(*asked, f"--model_name_or_path={name}")
        assert refused.exit_code == 1 and f"error: model_name_or_path={name} is not a local folder" in refused.output
    both = said(*asked, "--model_name_or_path=owner/other", "--model_config", described)
    assert both.exit_code == 0 and note.format("other") in both.output


@pytest.mark.turns
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_a_recipe_has_a_plan(name: str) -> None:
    """The largest with fewer layers, each of which takes seconds to plan."""
    smaller = {"llama-70b-qlora": "llama hidden_size=8192", "qwen3-30b-a3b": "qwen3_moe head_dim=128"}
    shows_a_plan(name, *([f"--model_config={smaller[name]} num_hidden_layers=8"] if name in smaller else []))


@pytest.mark.parametrize("is_packed", [False, True])
def test_adapters_are_planned_in_the_dtype_that_is_trained(is_packed: bool) -> None:
    """TRL casts the adapters of a base in 4 bits to bf16: the plan was that of fp32."""
    pytest.importorskip("bitsandbytes")
    small = f"--model_config=llama {' '.join(f'{key}={value}' for key, value in zoo.TINY.items())}"
    read = recipe.read("sft", ["--model_name_or_path=owner/name", small, "--dtype=bfloat16", "--use_peft"])
    read.load_in_4bit = is_packed
    trained = {parameter.dtype for parameter in dry_run.blank(read).parameters() if parameter.requires_grad}
    assert trained == {torch.bfloat16 if is_packed else torch.float32}


def test_a_folder_in_4_bits_is_planned_as_it_is(tmp_path: Path) -> None:
    """It was planned with the weights in 16 bits, so `device_memory` refused what fits; `load_in_4bit` corrected the
    plan, but training refuses this setting."""
    pytest.importorskip("bitsandbytes")
    model = zoo.build("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model.config.save_pretrained(tmp_path)
    read = recipe.read("sft", [f"--model_name_or_path={tmp_path}", "--dtype=bfloat16"])
    with pytest.raises(ConfigurationError, match="quantized, so there is nothing to train: set use_peft=true"):
        dry_run.planned(read)
    read.use_peft = True
    blank = dry_run.blank(read)
    assert any(packed_layers(blank))
    assert {parameter.dtype for parameter in blank.parameters() if parameter.requires_grad} == {torch.bfloat16}
    read.load_in_4bit = True
    with pytest.raises(ConfigurationError, match="already quantized: set load_in_4bit=false"):
        dry_run.planned(read)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "mine"

class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_a_model_with_code_of_its_own_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `trust_remote_code: true`, a plan was refused with advice to set it, and a run asked on the terminal whether
    it may run the code."""
    classes = {"AutoConfig": "code_to_plan.Config", "AutoModelForCausalLM": "code_to_plan.Model"}
    described = zoo.build("llama").config.to_dict() | {"architectures": ["Model"], "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(described | {"model_type": "mine"}))
    (tmp_path / "code_to_plan.py").write_text(OWN_CODE)
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    arguments = ["sft", f"--model_name_or_path={tmp_path}", "--dry_run", "--pp=2"]
    refused = said(*arguments)
    assert refused.exit_code == 1
    assert f"error: {tmp_path} requires custom code, which this command does not run: set trust" in refused.output
    assert not (tmp_path / "modules").exists()
    planned = said(*arguments, "--trust_remote_code=true")
    assert planned.exit_code == 0 and "Model" in planned.output, planned.output
    by_plan = CliRunner().invoke(main, ["plan", str(tmp_path), "--pp=2", "--microbatches=4", "--seq-len=16"])
    assert (
        by_plan.exit_code == 1 and "does not run: in Python, pass a model built with from_pretrained(" in by_plan.output
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-70b-qlora", "qwen3-30b-a3b"])
def test_a_large_recipe_has_a_plan(name: str) -> None:
    shows_a_plan(name)


def shows_a_plan(name: str, *options: str) -> None:
    ended = said("sft", "--config", str(ROOT / "recipes" / f"{name}.yaml"), "--dry_run", *options)
    assert ended.exit_code == 0, ended.output
    assert "Memory of the stages of" in ended.output and "idle" in ended.output


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a b", "completion": "c"}, "a b"),
        ({"text": "a b c d e f g h i j"}, "a b c d e f g h"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, [{"role": "user"}]),
        ({"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}, [USER]),
        ({"story": "a b"}, "a b"),
        ({"input_ids": [1]}, ""),
    ],
)
def test_a_prompt_is_what_comes_before_an_answer(row: dict[str, Any], expected: Any) -> None:
    assert tuning.question(row, "story" if "story" in row else "text") == expected
