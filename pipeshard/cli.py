"""CLI: the commands of `pipeshard`, in one click group."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipeshard.errors import PipeshardError
from pipeshard.recipe import TRAINERS, cuts_of
from pipeshard.schedule.schedules import SCHEDULES

# Arguments and options that several commands share.
MODEL = click.argument("model")
FIELDS = click.argument("fields", nargs=-1, metavar="[KEY=VALUE]...")
# The second name of an option, if any, is the name of the library's argument.
MICROBATCHES = click.option(
    "--microbatches", "num_microbatches", required=True, type=click.IntRange(min=1), help="Microbatches per step."
)
MICROBATCH_SIZE = click.option(
    "--microbatch-size", default=1, show_default=True, type=click.IntRange(min=1), help="Samples per microbatch."
)
CHUNKS = click.option(
    "--chunks",
    "num_model_chunks",
    default=1,
    type=click.IntRange(min=1),
    help="Model chunks per rank; interleaved uses at least 2.",
)
WAYS_TO_CUT = (
    "auto | uniform | parameters | profile | profile:PATH | type:REGEX | speed:1.0,0.6 (one per rank) | "
    "3,4,4,3 (unit calls per stage)"
)
PARTITION = click.option("--partition", default="auto", show_default=True, help=WAYS_TO_CUT)
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")


def _writable(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Check an output path before the work starts, and return it. Raises BadParameter if the file cannot be written or,
    for --draw, if its suffix is not in PICTURES."""
    if path is None or path == "-":
        return path
    if parameter.name == "draw" and not path.lower().endswith(PICTURES):
        raise click.BadParameter(f"{path} is not an image file: use one of the suffixes {', '.join(PICTURES)}")
    is_new = not os.path.lexists(path)
    try:
        open(path, "ab").close()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    if is_new:
        os.remove(path)
    return path


class _Group(click.Group):
    """A click group that prints a PipeshardError on one line and exits with status 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PipeshardError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(1)


@click.group(cls=_Group)
@click.version_option(package_name="pipeshard")
def main() -> None:
    """Pipeline parallelism for Hugging Face models."""


@main.command()
@MODEL
@FIELDS
@click.option("--pp", "pp_size", required=True, type=click.IntRange(min=1), help="Number of ranks in a pipeline.")
@MICROBATCHES
@MICROBATCH_SIZE
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens per sample. [default: the model's, at most 2048]")
@click.option(
    "--schedule", help="Show the stages of this schedule; auto searches for one. [default: the recommended schedule]"
)
@CHUNKS
@PARTITION
@click.option("--device-memory", help="Memory per device, such as 80GB or 80G, or one value per rank: 24GB,12GB.")
@click.option("--device-speed", help="Relative speed of each rank, such as 1.0,0.6. [default: all equal]")
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help="adamw | adamw_fused | sgd | none | [trainer_]adamw_8bit | [trainer_]lion_8bit",
)
@click.option("--dtype", help="bf16 | fp16 | fp32  [default: the config's, or bf16]")
@click.option("--precision", help="bf16 | fp16 | fp32, as in PipelinePlugin.  [default: the weights' dtype]")
@click.option("--dp", "dp_size", default=1, show_default=True, type=click.IntRange(min=1), help="Number of replicas.")
@click.option("--zero", is_flag=True, help="Use zero_stage=1 across the replicas.")
@click.option("--fsdp", is_flag=True, help="Use fsdp=True across the replicas.")
@click.option(
    "--tp", "tp_size", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks that shard each stage."
)
@click.option(
    "--ep", "ep_size", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks that shard the experts."
)
@click.option("--recompute", is_flag=True, help="Recompute activations in the backward pass.")
@click.option("--offload", help="Keep on the host: activations (of all but 2 microbatches) | optimizer | both.")
@click.option("--lora", metavar="RANK", type=click.IntRange(min=1), help="Train only LoRA adapters of this rank.")
@click.option("--lora-targets", metavar="NAMES", help="Layers with adapters: q_proj,v_proj  [default: all linear]")
@click.option("--quantize", help="Quantize the base weights (requires --lora): nf4 | fp4 | int8.")
@click.option("--slices", is_flag=True, help="Compare values of num_slices. The default schedule is then 1F1B.")
@click.option("--tflops", type=float, help="Sustained TFLOP/s of a device, to show times in seconds.")
@click.option(
    "--link",
    multiple=True,
    help="Bandwidth and latency between two ranks, such as 50GB/s,10us. If links differ, repeat the option for "
    "each pair of consecutive ranks. [default: messages take no time]",
)
@click.option("--draw", metavar="PATH", callback=_writable, help="Draw the simulated step (png, svg, pdf).")
@click.option(
    "--json", "json_path", metavar="PATH", callback=_writable, help="Write the plan as JSON; - prints JSON only."
)
def plan(
    model: str,
    fields: tuple[str, ...],
    schedule: str | None,
    partition: str,
    device_memory: str | None,
    dtype: str | None,
    precision: str | None,
    zero: bool,
    recompute: bool,
    lora: int | None,
    lora_targets: str | None,
    quantize: str | None,
    slices: bool,
    link: tuple[str, ...],
    draw: str | None,
    json_path: str | None,
    **others: Any,
) -> None:
    """Plan MODEL as a pipeline: the stage and the memory of each rank, and the fastest schedule.

    MODEL is a Hugging Face folder, a config.json, or a model type. KEY=VALUE sets a field of the model's config. The
    command reads no weights, computes only shapes (unless --partition profile measures times), and needs no GPU.

    \b
      pipeshard plan path/to/folder --pp 8 --microbatches 32 --device-memory 80GB
      pipeshard plan llama hidden_size=8192 num_hidden_layers=80 --pp 16 --microbatches 64
    """
    gc.disable()  # imports create many objects and no garbage
    atexit.register(gc.freeze)  # without freeze, the collection at exit takes a second
    with progress("building the model"):
        from pipeshard.planner.models import build_on_meta, precision_of
        from pipeshard.planner.plan import refuse_large
        from pipeshard.planner.planner import plan as make_plan
        from pipeshard.schedule.slices import refuse_unsliced

        if slices:
            refuse_unsliced(schedule or "1f1b")
        built = build_on_meta(model, fields, dtype, recompute, lora or 0, quantize, lora_targets, as_saved=True)
    with progress("planning"):
        made = make_plan(
            built,
            schedule=schedule or ("1f1b" if slices else None),
            partition=cuts_of(partition),
            device_memory=None if slices else device_memory,  # whole microbatches need not fit
            precision=precision or precision_of(built),
            zero_stage=int(zero),
            link=link or None,
            **others,
        )
        found = made.in_slices(device_memory=device_memory) if slices else []
    if json_path == "-":
        click.echo(made.to_json())
    else:
        from pipeshard.commands import show

        show(made, slices=found)
    if json_path and json_path != "-":
        Path(json_path).write_text(made.to_json() + "\n")
    if draw is not None:
        with progress("drawing"):
            made.draw(draw)
    if slices:
        refuse_large(found)


@main.command()
@click.option("--pp", default=2, show_default=True, type=click.IntRange(1, 8), help="Number of processes (stages).")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Optimizer steps.")
def demo(pp: int, steps: int) -> None:
    """Train a tiny llama with random weights on --pp processes on this machine, and unsplit in one process.

    Checks the installation: both runs must give the same losses.
    """
    click.echo(f"llama, 8 layers, {pp} pipeline stages, 4 microbatches")
    with progress("training"):
        from pipeshard.trial import train_demo as train

        trained = train(pp, steps)
    click.echo("\n".join([*trained, "the same losses: pipeshard works here"]))


@main.command("trace-run")
@MODEL
@FIELDS
@click.option("--pp", required=True, type=click.IntRange(min=1), help="Number of ranks (processes on this machine).")
@MICROBATCHES
@MICROBATCH_SIZE
@click.option("--seq-len", default=64, show_default=True, type=click.IntRange(min=1), help="Tokens per sample.")
@click.option("--schedule", default="1f1b", show_default=True, help=" | ".join(SCHEDULES))
@CHUNKS
@PARTITION
@click.option("--p2p", default="broadcast", show_default=True, help="broadcast | isend")
@click.option("--dtype", default="fp32", show_default=True, help="bf16 | fp16 | fp32")
@click.option(
    "--draw", metavar="PATH", callback=_writable, help="Draw the measured and the simulated step (png, svg, pdf)."
)
@click.option("--json", "json_path", metavar="PATH", callback=_writable, help="Write the recording as JSON.")
def trace_run(
    model: str,
    fields: tuple[str, ...],
    pp: int,
    num_microbatches: int,
    microbatch_size: int,
    seq_len: int,
    schedule: str,
    num_model_chunks: int,
    partition: str,
    p2p: str,
    dtype: str,
    draw: str | None,
    json_path: str | None,
) -> None:
    """Run three steps of MODEL with random weights on --pp processes, and show the timeline of the last step.

    MODEL and KEY=VALUE are as in `pipeshard plan`. Each process creates only the weights of its own stages.

    \b
      pipeshard trace-run llama hidden_size=512 num_hidden_layers=8 --pp 2 --microbatches 8 --draw step.png
    """
    with progress("running three steps"):
        from pipeshard.config import PipelineConfig
        from pipeshard.trial import Trial

        how: dict[str, Any] = {
            "num_microbatches": num_microbatches,
            "schedule": schedule,
            "num_model_chunks": num_model_chunks,
        }
        how |= {"partition": cuts_of(partition), "p2p": p2p}
        PipelineConfig(pp_size=pp, **how)  # checked before processes start
        booster = partial(make_booster, pp, **how)
        recording = Trial(model, fields, pp, num_microbatches * microbatch_size, seq_len, dtype, booster).run()
    click.echo(recording.summary())
    if json_path is not None:
        recording.save(json_path)
    if draw is not None:
        recording.draw(draw, title=f"{model}, {schedule}, {num_microbatches} microbatches")


class _OfScript(click.Command):
    """A command that may run a script. All arguments after the script's path are passed to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = next((k for k, one in enumerate(args) if one.endswith(".py")), len(args))
        return super().parse_args(ctx, args if "--" in args[:at] else [*args[:at], "--", *args[at:]])


@main.command(cls=_OfScript)
@click.argument("what", metavar="SCRIPT_OR_MODEL")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--pp", type=click.IntRange(min=2), help="Ranks in a pipeline.  [default: the script's; 2 for a model]")
@click.option(
    "--microbatches",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="For a model: microbatches per step.",
)
@click.option(
    "--seq-len", default=16, show_default=True, type=click.IntRange(min=1), help="For a model: tokens per sample."
)
@click.option("--schedule", default="1f1b", show_default=True, help="For a model: " + " | ".join(SCHEDULES))
@CHUNKS
@PARTITION
@click.option("--dtype", default="fp32", show_default=True, help="For a model: bf16 | fp16 | fp32")
@click.pass_context
def verify(
    ctx: click.Context,
    what: str,
    arguments: tuple[str, ...],
    pp: int | None,
    microbatches: int,
    seq_len: int,
    schedule: str,
    num_model_chunks: int,
    partition: str,
    dtype: str,
) -> None:
    """Verify that a model split into stages trains exactly like the unsplit model. Runs in one process.

    Runs SCRIPT (a .py file for torchrun) with its ARGUMENTS until it calls booster.boost, and verifies the script's
    model with the script's samples, criterion, optimizer and plugin. Write pipeshard's options before SCRIPT. MODEL is
    as in `pipeshard plan`, with KEY=VALUE as ARGUMENTS. The weights of MODEL are random. Exit codes: 0 exact, 1
    different, 2 inconclusive.

    \b
      pipeshard verify --pp 4 train.py --epochs 3
      pipeshard verify llama hidden_size=64 num_hidden_layers=8 --pp 4 --schedule zbv
    """
    if what.endswith(".py"):
        _refuse_options(ctx, Path(what).name)
    with progress("proving"):
        from pipeshard.commands import CODES, prove_model, prove_script
        from pipeshard.launch import unable

        if what.endswith(".py"):
            if why := unable(what):
                click.echo(f"error: {why}")
                ctx.exit(2)
            proven = prove_script(Path(what), arguments, pp)
        else:
            how = {"num_microbatches": microbatches, "schedule": schedule, "num_model_chunks": num_model_chunks}
            booster = partial(make_booster, pp or 2, partition=cuts_of(partition), **how)
            try:
                proven = prove_model(what, arguments, seq_len, dtype, booster)
            except PipeshardError as error:
                click.echo(f"error: {' '.join(str(error).split())}", err=True)
                ctx.exit(2)
    proof = proven.proof
    for kind, count in proof.counts.items():
        click.echo(f"  {count:6} equal {kind}")
    for but in proof.but:
        click.echo(f"  not compared: {but}")
    for moving in proof.moving:
        click.echo(f"  as in gradient accumulation: {moving}")
    click.echo(f"{proven.what}: {proof.kind}{f': {proof.reason}' if proof.reason else ''} ({proof.seconds:.1f} s)")
    ctx.exit(CODES[proof.kind])


def _refuse_options(ctx: click.Context, script: str) -> None:
    """Raise click.UsageError if an option other than --pp is given, since a script sets all other options itself."""
    for option in ctx.command.params:
        is_given = ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and option.name != "pp" and is_given:
            raise click.UsageError(
                f"{option.opts[0]} applies only to MODEL, but {script} is a script, which sets this value itself: omit "
                f"{option.opts[0]}. If it is an option of the script, write it after {script}"
            )


@main.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]... SCRIPT [ARGUMENTS]...")
def launch(arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as several processes, and restart them when processes are lost or join."""
    from pipeshard.launch import main as run

    sys.exit(run(arguments))


def _trains(kind: str, what: str) -> click.Command:
    """The command that trains with TRL's Trainer of this `kind`. TRL's parser reads the arguments."""

    def run(arguments: tuple[str, ...]) -> None:
        from pipeshard.tuning import main as train

        sys.exit(train(kind, arguments))

    arguments = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="--config FILE [OPTIONS]")
    settings = {"ignore_unknown_options": True}
    return click.Command(kind, settings, run, [arguments], help=what, add_help_option=False)


for _kind, (_, _what) in TRAINERS.items():
    main.add_command(_trains(_kind, _what))


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
def crash(folder: str) -> None:
    """Explain a failure from the reports (rank-0.json, ...) that the ranks wrote to FOLDER, usually `crash`."""
    from pipeshard.distributed.crash import page

    click.echo("\n".join(page(Path(folder))))


def make_booster(pp_size: int, sample: Any, **arguments: Any) -> Any:
    """An Engine that traces its model with this sample."""
    from pipeshard.entry import Engine
    from pipeshard.plugin import PipelinePlugin

    return Engine(PipelinePlugin(pp_size, dry_run_input=sample, **arguments))


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Context manager that shows a spinner if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield
