"""Tuning: the commands `pipeshard sft`, `dpo`, `reward` and `grpo`, which plan or train a model."""

import logging
import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeshard.dry_run import ADAMW, blank, is_one_row, microbatches, plain_name, planned, planned_optimizer, print_plan
from pipeshard.errors import CheckpointError, ConfigurationError, PartitionError, counted
from pipeshard.recipe import (
    config_source,
    folder_of,
    instance_of,
    model_of,
    of_trl,
    plugin_arguments,
    read,
    refuse_no_rewards,
    reward_functions,
    trl,
)
from pipeshard.recipe_data import COLUMNS, DATA_FORMATS, refuse_columns, refuse_no_template, rows
from pipeshard.script import TORCHRUN, fold, notes, record_error

logger = logging.getLogger("pipeshard")
SHOWN = {"loss": "loss", "eval_loss": "eval loss", "reward": "reward", "learning_rate": "lr", "grad_norm": "norm"}
BEGAN = "pipeshard-began"  # a file that ranks create in their agent's folder when they begin to train
OUTPUT = "trainer_output"  # the default of TrainingArguments.output_dir
NEW_TOKENS = 64  # maximum length of the answer


def main(kind: str, arguments: Sequence[str]) -> int:
    """Run a command: plan, start this machine's ranks, or train as one of these ranks. Returns the exit status."""
    settings = read(kind, arguments)
    if settings.dry_run:
        quiet()
        print_plan(kind, settings)
    elif "RANK" in os.environ:
        quiet()
        train(kind, settings)
        return 0
    else:
        refuse_no_rendezvous(settings)
        refuse_earlier_run(settings)
        check_sources(kind, settings)
    for text in remarks(kind, settings):
        click.echo(f"note: {text}", err=True)
    return 0 if settings.dry_run else start_ranks(kind, settings, arguments)


def refuse_no_rendezvous(settings: Namespace) -> None:
    """Raise ConfigurationError for several machines without a rendezvous address: each machine would use its own
    localhost."""
    variables = {"PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_MASTER_ADDR"}
    is_given = settings.rdzv_endpoint or variables & os.environ.keys()
    if settings.nnodes > 1 and not is_given:
        raise ConfigurationError(
            f"nnodes={settings.nnodes} requires rdzv_endpoint=HOST:PORT, where HOST is one of the machines: set the "
            "same value on every machine, such as host1:29400"
        )


def refuse_earlier_run(settings: Namespace) -> None:
    """Raise ConfigurationError if a restart would resume from the checkpoint of another run."""
    folder = settings.output_dir or OUTPUT
    if settings.max_restarts and not settings.resume and has_checkpoint(folder):
        raise earlier_run_error(folder)


def earlier_run_error(folder: str) -> ConfigurationError:
    return ConfigurationError(
        f"output_dir={folder} has a checkpoint of an earlier run, from which a restart (max_restarts) would resume: "
        "set resume=true to continue that run, or choose another output_dir"
    )


def check_sources(kind: str, settings: Namespace) -> None:
    """Check the model and the data. If this machine lacks either, download it once, for all ranks of the machine."""
    import datasets

    folder = folder_of(settings)
    if not settings.datasets:
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error contains the readers' log messages
        data, held_out = rows(settings)
        refuse_columns(kind, settings, data)
        if held_out is not None:
            refuse_columns(kind, settings, held_out)
        refuse_no_template(kind, settings, data, folder)
    if kind == "grpo":
        refuse_no_rewards(settings)
    if kind == "sft":
        refuse_small(Namespace(**vars(settings) | {"model_name_or_path": str(folder), "device_memory": None}))


def refuse_small(settings: Namespace) -> None:
    """Raise PartitionError, as a plan does, if the model has too few units for the stages."""
    from pipeshard.graph.units import find_units
    from pipeshard.schedule.schedules import num_chunks

    try:
        if len(find_units(blank(settings))) < settings.pp * num_chunks(settings.schedule, settings.chunks):
            planned(settings)
    except PartitionError:
        raise
    except Exception as error:  # training may support a model that a plan does not
        logger.debug("the number of stages was not checked before the ranks started: %s", error)


def remarks(kind: str, settings: Namespace) -> Iterator[str]:
    """Yield notes on settings that the user may have overlooked."""
    name = settings.dataset_name or ""
    if not settings.datasets and Path(name).suffix in DATA_FORMATS and not Path(name).is_file():
        yield f"dataset_name={name} is not an existing file; training requires it"
    if settings.dry_run and settings.model_config and config_source(settings) == settings.model_config.split():
        yield f"model_name_or_path={settings.model_name_or_path} is not on this machine: the plan is for model_config"
    if settings.dry_run and planned_optimizer(settings) == "adamw" and plain_name(settings.optim) not in ADAMW:
        yield (
            f"the plan assumes AdamW's states for optim={settings.optim}, two fp32 values per parameter: the states of "
            f"{settings.optim} take at most as much memory"
        )
    rows_each = 1 + any("chosen" in way for way in COLUMNS[kind])  # a pair of answers is two rows of the batch
    m = microbatches(settings, rows_each)[0]
    if m < settings.pp and settings.num_slices == "1":
        cuts_rows = settings.microbatches and not is_one_row(settings)
        low = "microbatches and per_device_train_batch_size" if cuts_rows else "gradient_accumulation_steps"
        remedy = f"raise {low} to at least {settings.pp}"
        yield f"a step has {counted(m, 'microbatch')} for {settings.pp} stages, so stages wait for each other: {remedy}"


# The ranks


def start_ranks(kind: str, settings: Namespace, arguments: Sequence[str]) -> int:
    """Run this command on this machine's ranks, as `pipeshard launch` does. Returns the exit status."""
    from pipeshard.launch import main as launch
    from pipeshard.launch import threads

    local = settings.pp * settings.dp * settings.tp // settings.nnodes
    os.environ.setdefault("OMP_NUM_THREADS", threads(local))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    flags = {"nproc-per-node": local, "nnodes": settings.nnodes, "max-restarts": settings.max_restarts}
    flags |= {"rdzv-endpoint": settings.rdzv_endpoint} if settings.rdzv_endpoint else {}
    command = [*(f"--{flag}={value}" for flag, value in flags.items()), "--module", __name__, kind, *arguments]
    folder = settings.output_dir or OUTPUT
    hint = partial(name_checkpoint, folder, {} if settings.resume else complete_checkpoints(folder))
    status = launch(command, at_signal=hint)
    if status:
        hint()
    return status


def name_checkpoint(folder: str, earlier: Mapping[int, int]) -> None:
    """Print how to continue a run that ended early, if the run has written a complete checkpoint to the folder.
    `earlier` are the complete checkpoints of earlier runs: if one of them has more steps than this run's newest
    checkpoint, --resume would continue from the earlier run, so the printed option names this run's checkpoint
    instead."""
    found = complete_checkpoints(folder)
    own = {step for step, when in found.items() if earlier.get(step) != when}
    if not own:
        return
    option = "--resume" if max(own) == max(found) else f"--resume_from_checkpoint={folder}/checkpoint-{max(own)}"
    click.echo(f"{folder} has a complete checkpoint: start the same command with {option} to continue", err=True)


def complete_checkpoints(folder: str) -> dict[int, int]:
    """Map the step of each complete checkpoint in the folder to the time at which the checkpoint was written."""
    from pipeshard.trainer import checkpoint  # takes a second to import

    return checkpoint.complete_in(Path(folder))


def has_checkpoint(folder: str) -> bool:
    """Whether the folder has a complete checkpoint."""
    return bool(complete_checkpoints(folder))


def quiet() -> None:
    """Disable progress bars and FutureWarnings. TRL's own calls to transformers cause these warnings."""
    import datasets
    from transformers.utils.logging import disable_progress_bar

    datasets.disable_progress_bars()
    disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)


def train(kind: str, settings: Namespace) -> None:
    """Train as this rank, save a folder that transformers can load, and (except for `reward`) answer a prompt."""
    import torch
    from transformers import PrinterCallback, ProgressCallback

    from pipeshard.distributed.mesh import backend_here
    from pipeshard.plugin import PipelinePlugin
    from pipeshard.trainer import pipelined

    settings.ddp_backend = settings.ddp_backend or backend_here()
    settings.use_cpu = settings.use_cpu or not torch.cuda.is_available()
    settings.gradient_checkpointing = settings.gradient_checkpointing and settings.recompute is None
    args = instance_of(of_trl(kind, "Config"), settings)
    with args.main_process_first():
        data, held_out = rows(settings)
    adapters = trl().get_peft_config(instance_of(trl().ModelConfig, settings))
    more: dict[str, Any] = {}
    if kind == "dpo" and adapters is None:
        more["ref_model"] = model_of(kind, settings)
    if kind == "grpo":
        more["reward_funcs"] = reward_functions(settings)
    args.model_init_kwargs = None  # model_of has used them
    restarts, from_newest = resumption(settings.resume, args.output_dir)
    shown = line(restarts and (from_newest or not args.resume_from_checkpoint))
    trainer = pipelined(of_trl(kind, "Trainer"))(
        model_of(kind, settings), args=args, train_dataset=data, eval_dataset=held_out, peft_config=adapters,
        pipeline=PipelinePlugin(**plugin_arguments(settings)), **more,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(shown)  # after the Trainer's own callbacks, which may end the run
    trainer.train(resume_from_checkpoint=from_newest or args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.save_state()
    if trainer.is_world_process_zero():
        click.echo(f"\nsaved {args.output_dir}")
    if kind != "reward":
        print_answer(trainer, settings.prompt, next(iter(data)))


def resumption(resume: bool, folder: str) -> tuple[bool, bool]:
    """Whether this run resumes or restarts, and whether it begins at the newest checkpoint of `folder`. Call it on all
    ranks. All ranks get the same results.

    TORCHELASTIC_RESTART_COUNT differs between machines: an agent does not count a restart that another agent has
    caused. Therefore, the ranks leave a file in the folder of their agent. Raises ConfigurationError, on all ranks, if
    a restart by torchrun would resume from the checkpoint of another run.
    """
    import torch.distributed as dist

    from pipeshard.distributed.collectives import gather_objects

    mark = Path(os.environ[TORCHRUN]).parents[2] / BEGAN if os.environ.get(TORCHRUN) else None
    mine = resume or (mark is not None and mark.exists()), has_checkpoint(folder)
    ranks = gather_objects(mine, dist.group.WORLD) if dist.group.WORLD is not None else [mine]
    restarts, is_found = any(restarts for restarts, _ in ranks), ranks[0][1]
    if is_found and not restarts and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise earlier_run_error(folder)
    if mark is not None:  # after all ranks of this attempt have looked for the file
        mark.touch()
    return restarts, restarts and is_found


def line(restarts: bool) -> Any:
    """A callback that prints a line for each log and for the last step. On a terminal, each line replaces the previous
    line. If the run `restarts`, the callback first prints the step from which the run resumes."""
    from transformers import TrainerCallback

    class Line(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begun, self.first = time.monotonic(), state.global_step
            folder, step = args.output_dir, state.global_step
            found = f"resuming from {folder}/checkpoint-{step} (step {step} of {state.max_steps})"
            if restarts and state.is_world_process_zero:
                click.echo(found if step else f"no complete checkpoint in {folder}: training begins at step 0")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_log |= control.should_training_stop  # even if logging_steps does not divide this step

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            shown = "".join(f"  {name} {float(logs[key]):.4g}" for key, name in SHOWN.items() if key in logs)
            if not shown or not state.is_world_process_zero:
                return
            each = (time.monotonic() - self.begun) / max(1, state.global_step - self.first)
            left = each * (state.max_steps - state.global_step) / 60
            start, end = ("\r\x1b[K", "") if sys.stdout.isatty() else ("", "\n")
            click.echo(f"{start}step {state.global_step}/{state.max_steps}{shown}  {left:.1f} min left{end}", nl=False)

    return Line()


def print_answer(trainer: Any, prompt: str | None, row: Mapping[str, Any]) -> None:
    """Print the model's answer to `prompt` or, if `prompt` is None, to the prompt of the sample `row`."""
    asked: Any = question(row, getattr(trainer.args, "dataset_text_field", "text"))
    if prompt is not None:
        asked = [{"role": "user", "content": prompt}] if isinstance(asked, list) else prompt
    if not asked:
        return
    reader, is_chat = trainer.processing_class, isinstance(asked, list)
    tokens = getattr(reader, "tokenizer", reader)
    if is_chat and tokens is not reader:  # the template of a processor reads lists of parts
        asked = [turn | {"content": _parts(turn["content"])} for turn in asked]
    text = reader.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) if is_chat else asked
    ids = tokens(text, return_tensors="pt", add_special_tokens=not is_chat).to(trainer.args.device)
    made = trainer.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokens.pad_token_id)
    if trainer.is_world_process_zero():
        said = tokens.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        click.echo(f"> {text.strip()}\n{said.strip()}")


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def question(row: Mapping[str, Any], text_field: str) -> Any:
    """The prompt of a sample: a chat up to its last user turn, or a string. For plain text, the first 8 words."""
    if "conversations" in row:
        row = trl().maybe_convert_to_chatml(deepcopy(dict(row)))
    asked = next((row[name] for name in ("prompt", "messages", "chosen", text_field) if name in row), "")
    if isinstance(asked, str):
        return asked if "prompt" in row else " ".join(asked.split()[:8])
    last = max((k for k, turn in enumerate(asked) if turn["role"] == "user"), default=len(asked) - 1)
    return asked[: last + 1]


def run(arguments: Sequence[str]) -> int:
    """Run a command as one rank. Returns the exit status. If the settings, the cuts or a checkpoint are invalid, only
    one rank prints the error, on one line."""
    fold()
    try:
        return main(arguments[0], arguments[1:])
    except (ConfigurationError, PartitionError, CheckpointError) as error:
        folder = notes()
        if folder is None or record_error(folder, type(error).__name__, str(error)):
            click.echo(f"error: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
