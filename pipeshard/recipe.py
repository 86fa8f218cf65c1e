"""Recipe: the settings from a config file and from options, and the model that they name.

The settings are TRL's settings for the model, the data and the Trainer, and the fields of PipelineArguments.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from pipeshard.errors import ConfigurationError, PartitionError, PipeshardError, explained, summary
from pipeshard.garbage import collector_paused
from pipeshard.replaced import replaced
from pipeshard.schedule.schedules import SCHEDULES

TRAINERS = {
    "sft": ("SFT", "Fine-tune a model on chats, prompts with completions, or text."),
    "dpo": ("DPO", "Fine-tune a model on pairs of a preferred and a rejected answer."),
    "reward": ("Reward", "Train a reward model on pairs of a preferred and a rejected answer."),
    "grpo": ("GRPO", "Train a model by reinforcement learning: reward functions score the model's answers."),
}
# Functions of trl.rewards that make a reward function, with the arguments of TRL's own script.
MAKERS = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
MINIMUMS = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "max_restarts": 0}
UNREAD = ["original/*", "onnx/*", "*.gguf", "*.pth", "*.onnx"]  # not downloaded: weights in other formats


def setting(default: Any, text: str, choices: Collection[str] | None = None) -> Any:
    return field(default=default, metadata={"help": text} | ({"choices": list(choices)} if choices else {}))


@dataclass
class PipelineArguments:
    """The settings of the pipeline and of the command itself."""

    _argument_group_name = "pipeline"

    pp: int = setting(2, "Number of pipeline stages.")
    dp: int = setting(1, "Number of data-parallel replicas.")
    tp: int = setting(1, "Number of tensor-parallel ranks per stage.")
    schedule: str = setting("1f1b", "Order of the forward and backward passes.", SCHEDULES)
    chunks: int = setting(1, "Model chunks per rank. The interleaved schedule uses 2 unless you set more.")
    microbatches: int | None = setting(None, "Microbatches per step. By default, one per gradient accumulation step.")
    num_slices: str = setting("1", "Slices of each sequence: a number, or auto.")
    partition: str = setting(
        "auto",
        "auto, uniform, parameters, profile, profile:PATH, type:REGEX, speed:1.0,0.6, unit calls per stage (3,4), or "
        "units to cut after.",
    )
    precision: str | None = setting(None, "Precision of the weights, instead of autocast.", ("bf16", "fp16"))
    recompute: float | None = setting(None, "Share of each stage to recompute, instead of gradient_checkpointing.")
    zero_stage: int = setting(0, "1 shards the optimizer state across replicas.")
    resume: bool = setting(False, "Resume from the newest checkpoint in output_dir, if there is one.")
    prompt: str | None = setting(
        None, "Prompt that the trained model answers. By default, the first prompt in the data."
    )
    nnodes: int = setting(1, "Number of machines. Start the same command on each.")
    rdzv_endpoint: str = setting("", "HOST:PORT of the rendezvous. HOST is one of the machines.")
    max_restarts: int = setting(0, "Maximum number of restarts from the newest checkpoint after a failure.")
    dry_run: bool = setting(False, "Print the plan and exit: stages, memory of each rank, idle time.")
    device_memory: str | None = setting(
        None, "Memory per device for --dry_run, such as 80GB, or one value per rank: 24GB,12GB."
    )
    model_config: str | None = setting(
        None, "Model to plan if the config of model_name_or_path is not on this machine: 'llama hidden_size=4096 ...'."
    )


# The settings that are arguments of PipelinePlugin.
PLUGIN = {"pp": "pp_size", "dp": "dp_size", "tp": "tp_size", "chunks": "num_model_chunks"}
PLUGIN |= {"microbatches": "num_microbatches", "schedule": "schedule", "num_slices": "num_slices"}
PLUGIN |= {name: name for name in ("partition", "precision", "recompute", "zero_stage")}
# Names of settings in other tools, each with the corresponding names here.
ALIASES = {argument: name for name, argument in PLUGIN.items()}
ALIASES |= dict.fromkeys(("model", "base_model", "model_name"), "model_name_or_path")
ALIASES |= dict.fromkeys(("data", "dataset", "dataset_path"), "dataset_name")
ALIASES |= dict.fromkeys(("batch_size", "micro_batch_size"), "per_device_train_batch_size")
ALIASES |= dict.fromkeys(("stages", "pipeline_stages"), "pp") | dict.fromkeys(("output", "out"), "output_dir")
ALIASES |= dict.fromkeys(("seq_len", "sequence_len", "max_seq_length"), "max_length")
ALIASES |= {"epochs": "num_train_epochs", "lr": "learning_rate"}
ALIASES |= dict.fromkeys(("num_processes", "accelerate_config", "use_fsdp"), "pp or dp")
ALIASES |= {"num_machines": "nnodes", "rdzv_backend": "rdzv_endpoint", "mixed_precision": "bf16"}
# The advice in the planner's errors, and the same advice for these settings.
ADVICE_AS_SETTINGS = {
    "shorter or fewer samples in a microbatch": "a smaller max_length or per_device_train_batch_size",
    "--recompute, or model.gradient_checkpointing_enable()": "gradient_checkpointing, or recompute=1",
    "omit --recompute": "set gradient_checkpointing=false",
    "adapters (--lora), more stages": "adapters (use_peft), more stages (pp)",
    "quantization_config=BitsAndBytesConfig(load_in_4bit=True)": "load_in_4bit=true",
    "in Python, pass a model built with from_pretrained(..., trust_remote_code=True)": "set trust_remote_code=true",
    "omit quantization_config": "set load_in_4bit=false and load_in_8bit=false",
}


# The settings


@collector_paused()
def read(kind: str, arguments: Sequence[str]) -> Namespace:
    """Read the settings from the --config file and from command-line options. Options override the file.

    Raises ConfigurationError for an unknown setting, an invalid value, or a missing file or package.
    """
    missing = [package for package in ("trl", "datasets") if find_spec(package) is None]
    if missing:
        raise ConfigurationError(f"pipeshard {kind} requires {' and '.join(missing)}: pip install 'pipeshard[trl]'")
    groups = groups_of(kind)
    arguments = [part for one in arguments for part in (one.split("=", 1) if one.startswith("--config=") else [one])]
    with explained(
        lambda error: ConfigurationError(f"the --config file cannot be read: {summary(error)}"), but=(PipeshardError,)
    ):
        settings, of_file, rest = parser_of(kind, groups).parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    unknown = [f"{one[2:]} in {arguments[arguments.index('--config') + 1]}" for one in of_file[::2]]
    if unknown := unknown + [one for one in rest if one.startswith("--")] or rest:
        raise ConfigurationError(
            unknown_settings(kind, unknown, {one.name for group in groups for one in fields(group)})
        )
    read_mappings(settings, groups)
    options = {one.partition("=")[0].replace("-", "_") for one in arguments}
    if "__model_name_or_path" in options and "__model_config" not in options:
        settings.model_config = None  # the file's model_config describes the model that the file names
    settings.num_slices = str(settings.num_slices)  # YAML may contain anything
    for name in ("checkpointing", "checkpointing_kwargs"):  # transformers 5 prefers the name activation_...
        if (value := getattr(settings, f"activation_{name}", None)) is not None:
            setattr(settings, f"gradient_{name}", value)
            setattr(settings, f"activation_{name}", None)
    if isinstance(settings.partition, str):  # YAML may contain a list
        settings.partition = cuts_of(settings.partition)
    checked_config(settings)
    if kind == "reward":
        refuse_frozen_head(settings)
    return settings


def groups_of(kind: str) -> list[type]:
    """The dataclasses that define the settings of a command."""
    script = import_module("trl.scripts.grpo").GRPOScriptArguments if kind == "grpo" else trl().ScriptArguments
    return [PipelineArguments, script, trl().ModelConfig, trl().DatasetMixtureConfig, of_trl(kind, "Config")]


def trl() -> Any:
    """The trl module. It is imported on first use, since the import takes seconds."""
    return import_module("trl")


def of_trl(kind: str, what: str) -> Any:
    """TRL's Config or Trainer class for a command."""
    return getattr(trl(), TRAINERS[kind][0] + what)


def parser_of(kind: str, groups: Sequence[type]) -> Any:
    class Parser(trl().TrlParser):  # type: ignore[misc]
        """TRL's parser. The settings remain a Namespace, since TrainingArguments would initialize a device."""

        def set_defaults_with_config(self, **config: Any) -> Any:
            """Set the defaults from the file, and return unknown settings. argparse does not check defaults, so this
            method first parses strings and numbers like options. It parses values of other types only for settings with
            choices and for integers in PipelineArguments."""
            closed = {action.dest: action.default for action in self._actions if action.choices and not action.nargs}
            numbers = {name for name, hint in get_type_hints(PipelineArguments).items() if hint is int}
            options = {
                name: f"--{name}={'no' if value is False else value}"  # YAML reads no as False
                for name, value in config.items()
                if type(value) in (str, int, float) or value != closed.get(name, value) or name in numbers
            }
            parsed, _ = self.parse_known_args([*options.values()])
            config |= {name: getattr(parsed, name) for name in options if hasattr(parsed, name)}
            return super().set_defaults_with_config(**config)

        def parse_args_into_dataclasses(self, args: Any = None, **_: Any) -> Any:
            return self.parse_known_args(args)

        def error(self, message: str) -> NoReturn:
            raise ConfigurationError(f"{message}. pipeshard {kind} --help lists the settings")

    what = f"{TRAINERS[kind][1]} --config FILE reads settings from a YAML file; options override it."
    usage = f"pipeshard {kind} --config FILE [OPTIONS]"
    return Parser(groups, prog=f"pipeshard {kind}", usage=usage, description=what, allow_abbrev=False)


def read_mappings(settings: Namespace, groups: Sequence[type]) -> None:
    """Parse settings whose values are JSON objects, as TrainingArguments does. Raises ConfigurationError for invalid
    JSON."""
    # Read from the annotations, since HfArgumentParser overwrites the declared types in the fields.
    for name in [name for group in groups for name, hint in get_type_hints(group).items() if "dict" in str(hint)]:
        if isinstance(value := getattr(settings, name, None), str) and value.startswith("{"):
            try:
                setattr(settings, name, json.loads(value))
            except ValueError as error:
                raise ConfigurationError(f"{name}={value} is not valid JSON: {error}") from error


def cuts_of(text: str) -> str | list[int] | list[str]:
    """Parse a comma-separated list of numbers of unit calls, or of units to cut after (such as `model.layers.3`).
    Return any other value unchanged."""
    entries = [entry.strip() for entry in text.split(",")]
    if all(entry.isdigit() for entry in entries):
        return [int(entry) for entry in entries]
    return entries if re.search(r"[,.]", text) and not text.startswith(("type:", "profile:", "speed:")) else text


def unknown_settings(kind: str, unknown: Sequence[str], known: Collection[str]) -> str:
    """The error message for settings that the command does not have. The message suggests the closest known names for
    each of them."""
    shown = []
    for name in unknown:
        plain = re.split("[= ]", name.lstrip("-"))[0].replace("-", "_")
        names = ALIASES.get(plain, "").split(" or ")
        close = names if all(one in known for one in names) else get_close_matches(plain, known, n=3)
        shown.append(name + (f" (did you mean {' or '.join(close)}?)" if close else ""))
    return f"pipeshard {kind} has no setting {', '.join(shown)}. pipeshard {kind} --help lists the settings"


def checked_config(settings: Namespace) -> None:
    """Raise ConfigurationError for invalid settings of the pipeline."""
    from pipeshard.config import PipelineConfig
    from pipeshard.trainer.refusals import cut_arguments

    for name, least in MINIMUMS.items():
        if not isinstance(number := getattr(settings, name), int) or number < least:
            raise ConfigurationError(f"{name} must be an integer of at least {least}, got {number}")
    with in_settings():
        cut_arguments(PipelineConfig(**plugin_arguments(settings)), settings.gradient_accumulation_steps)
    ranks = settings.pp * settings.dp * settings.tp
    if settings.nnodes < 1 or ranks % settings.nnodes:
        raise ConfigurationError(
            f"nnodes={settings.nnodes} must be a positive divisor of the number of ranks, pp * dp * tp = {ranks}"
        )
    if settings.num_slices != "1" and settings.gradient_checkpointing and settings.recompute is None:
        raise ConfigurationError(
            f"num_slices={settings.num_slices} is not supported with gradient_checkpointing, which TRL enables by "
            "default: set recompute=1, or gradient_checkpointing=false"
        )


def refuse_frozen_head(settings: Namespace) -> None:
    """Raise ConfigurationError if the new head of a reward model with adapters would be neither trained nor saved."""
    if settings.use_peft and settings.lora_task_type != "SEQ_CLS" and not settings.lora_modules_to_save:
        raise ConfigurationError(
            f"with lora_task_type={settings.lora_task_type}, the head of the reward model would keep its initial "
            "random values, and would not be saved with the adapters. Set lora_task_type=SEQ_CLS, which trains and "
            "saves the head, or list the head in lora_modules_to_save"
        )


@contextmanager
def in_settings() -> Iterator[None]:
    """Context manager that replaces, in errors, the names of the plugin's and the planner's arguments with the names of
    the corresponding settings of the recipe."""
    try:
        yield
    except (ConfigurationError, PartitionError) as error:
        text = str(error)
        for there, here in ADVICE_AS_SETTINGS.items():
            text = text.replace(there, here)
        for here, there in PLUGIN.items():
            text = re.sub(rf"\b{there}\b", here, text)
        raise type(error)(text) from error


def plugin_arguments(settings: Namespace) -> dict[str, Any]:
    given = {argument: getattr(settings, name) for name, argument in PLUGIN.items()}
    given["num_slices"] = int(settings.num_slices) if settings.num_slices.isdecimal() else settings.num_slices
    return {argument: value for argument, value in given.items() if value is not None}


def instance_of(kind: type, settings: Namespace) -> Any:
    """An instance of the dataclass `kind` with these settings."""
    return kind(**{one.name: getattr(settings, one.name) for one in fields(kind) if one.init})


# The model


def folder_of(settings: Namespace) -> Path:
    """The model's folder on this machine, downloaded from the Hub if necessary."""
    from huggingface_hub import snapshot_download

    from pipeshard.checkpoint.hub import cached_folder
    from pipeshard.checkpoint.safetensors_files import FILES

    name = required_name(settings, "model_name_or_path")
    if Path(name).is_dir():
        return Path(name)
    failure: Exception = FileNotFoundError(f"the cached folder lacks {' or '.join(FILES)}, or a file of its index")
    with explained(partial(not_at_hand, "model_name_or_path", name)):
        try:
            snapshot_download(name, revision=settings.model_revision, ignore_patterns=UNREAD)
        except Exception as error:  # without a connection, the cache may contain all files that are read
            failure = error
        folder = cached_folder(name, revision=settings.model_revision)
        if folder is None:
            raise failure
        return folder


def required_name(settings: Namespace, which: str) -> str:
    if not (name := getattr(settings, which)):
        raise ConfigurationError(f"{which} is not set: set it to a path on this machine, or to an ID on the Hub")
    return str(name)


def not_at_hand(setting: str, name: str, error: Exception) -> ConfigurationError:
    why = str(error).partition("\n")[0]
    return ConfigurationError(
        f"{setting}={name} is not a local folder, and cannot be loaded from the Hub: {why}. Check the ID and the "
        "connection, and set HF_TOKEN if the repository is private or gated"
    )


def config_source(settings: Namespace) -> list[str]:
    """The folder of the model's config, as a list with one entry. If the config is not on this machine, returns the
    model type and the fields in `model_config`. Without `model_config`, downloads the config from the Hub and returns
    its folder."""
    from huggingface_hub import hf_hub_download

    name = required_name(settings, "model_name_or_path")
    if Path(name).is_dir():
        return [name]
    described = str(settings.model_config or "").split()
    find = partial(hf_hub_download, name, "config.json", revision=settings.model_revision)
    with explained(partial(not_at_hand, "model_name_or_path", name)):
        try:
            return [str(Path(find(local_files_only=bool(described))).parent)]
        except (OSError, ValueError):
            if not described:
                raise
            return described


def model_of(kind: str, settings: Namespace) -> Any:
    """The model without weights. Each stage loads its own weights later, so no rank holds the whole model."""
    from pipeshard.plugin import PipelinePlugin

    folder, options = folder_of(settings), model_options(kind, settings)
    return PipelinePlugin.from_pretrained(class_of(kind, folder, settings.trust_remote_code), folder, **options)


def model_options(kind: str, settings: Namespace) -> dict[str, Any]:
    """The settings that are options of from_pretrained."""
    given = {
        "dtype": settings.dtype,
        "attn_implementation": settings.attn_implementation,
        "quantization_config": trl().get_quantization_config(instance_of(trl().ModelConfig, settings)),
        "trust_remote_code": settings.trust_remote_code,
        "num_labels": 1 if kind == "reward" else None,
    }
    return {name: value for name, value in given.items() if value is not None} | (settings.model_init_kwargs or {})


def class_of(kind: str, folder: Path, trust_remote_code: bool) -> Any:
    """The class of the model, as in TRL: a classifier for `reward`, and otherwise the class that the folder's config
    names (which may be a vision-language model). If the named class cannot generate text, or if transformers does not
    have it, returns AutoModelForCausalLM."""
    import transformers

    from pipeshard.checkpoint.untrusted import folder_config

    if kind == "reward":
        return transformers.AutoModelForSequenceClassification
    config, _ = folder_config(folder, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    generates = named is not None and named.can_generate()
    return named if generates else transformers.AutoModelForCausalLM


def reward_functions(settings: Namespace) -> list[Any]:
    """The name of the reward model (if one is set), followed by the functions that `reward_funcs` lists. A function is
    listed by its name in TRL or by its import path.

    The order is the same as in TRL's own script, since the weights in `reward_weights` have this order.
    """
    model = settings.reward_model_name_or_path
    return [*([model] if model else []), *map(imported, settings.reward_funcs or ())]


def imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with explained(partial(not_imported, path)):
        found = getattr(import_module(module or "trl.rewards"), name)
    return found(**MAKERS[name]) if not module and name in MAKERS else found


def not_imported(path: str, error: BaseException) -> ConfigurationError:
    return ConfigurationError(
        f"reward_funcs: {path} cannot be imported: {error}. Name a function as <module>.<function>, with a module that "
        "Python finds from this folder, or a function of trl.rewards"
    )


def refuse_no_rewards(settings: Namespace) -> None:
    """Raise ConfigurationError if `reward_funcs` names a function that TRL lacks, or a module or package that does
    not exist.

    The user's code is not imported before the ranks start, since it may load a model. Therefore, the check does not
    search for modules inside a package, since find_spec would import the package.
    """
    for path in settings.reward_funcs or ():
        module = path.rpartition(".")[0]
        if not module:
            imported(path)
            continue
        with explained(partial(not_imported, path)), replaced(sys, path=["", *sys.path]):  # as on ranks, which use -m
            if find_spec(first := module.partition(".")[0]) is None:
                raise ModuleNotFoundError(f"No module named {first!r}")
