"""Recipe data: the training and evaluation data that a recipe's settings name, checked before the ranks start."""

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from pipeshard.errors import ConfigurationError, explained, summary
from pipeshard.recipe import instance_of, not_at_hand, required_name, trl

# The columns that TRL requires: one of these sets.
COLUMNS = {
    "sft": [["messages"], ["prompt", "completion"], ["text"], ["input_ids"]],
    "dpo": [["chosen", "rejected"]],
    "reward": [["chosen", "rejected"], ["chosen_ids", "rejected_ids"], ["chosen_input_ids", "rejected_input_ids"]],
    "grpo": [["prompt"], ["environment"]],
}
# The value that a row must have in each of these columns. In other columns: token ids, or a string or a list of turns.
NEEDS = {
    "messages": "a list of turns, each with role and content",
    "conversations": "a list of turns, each with from and value",
    "environment": "the name of an environment",
}
DATA_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def rows(settings: Namespace) -> tuple[Any, Any]:
    """The training data, and the evaluation data (None if evaluation is off)."""
    made = loaded(settings)
    splits = made if isinstance(made, Mapping) else {settings.dataset_train_split: made}
    train, test = split_of(splits, "dataset_train_split", settings), None
    if settings.test_split_size and not settings.datasets:  # TRL splits a mixture itself
        if not hasattr(train, "train_test_split"):
            raise ConfigurationError(
                f"test_split_size={settings.test_split_size} requires data of a known length, but dataset_streaming is "
                "set: remove one of the two. Without test_split_size, set dataset_test_split to the evaluation split"
            )
        try:
            train, test = train.train_test_split(settings.test_split_size, seed=settings.seed).values()
        except ValueError as error:
            raise ConfigurationError(
                f"test_split_size={settings.test_split_size} cannot hold out a part of {len(train)} samples: set a "
                "fraction between 0 and 1 that leaves samples for both parts"
            ) from error
    elif settings.eval_strategy != "no":
        test = split_of(splits, "dataset_test_split", settings)
    return train, test if settings.eval_strategy != "no" else None


def split_of(splits: Mapping[str, Any], which: str, settings: Namespace) -> Any:
    if (name := getattr(settings, which)) not in splits:
        held_out = ", or set test_split_size=0.1 to hold out a tenth of the training data"
        raise ConfigurationError(
            f"{which}={name} is not a split of the data: set {which} to {' or '.join(splits)}"
            f"{held_out if which == 'dataset_test_split' else ''}"
        )
    return splits[name]


def loaded(settings: Namespace) -> Any:
    """Load the data that the settings name: a mixture, a file, a folder that `datasets` saved, or a Hub dataset."""
    from datasets import load_dataset, load_from_disk

    if settings.datasets:
        return trl().get_dataset(instance_of(trl().DatasetMixtureConfig, settings))
    name = required_name(settings, "dataset_name")
    path, streaming = Path(name), settings.dataset_streaming
    if path.suffix in DATA_FORMATS:
        if not path.is_file():
            raise ConfigurationError(f"dataset_name={name} is not an existing file: correct the path")
        if not path.stat().st_size:
            raise ConfigurationError(f"dataset_name={name} is empty: pass a file with samples")
    elif path.is_file():
        *others, last = DATA_FORMATS
        raise ConfigurationError(
            f"dataset_name={name} must end in {', '.join(others)} or {last}: convert the file, or pass a folder "
            "written by the save_to_disk method of a dataset, or the name of a dataset on the Hub"
        )
    with explained(partial(unreadable_data, path) if path.exists() else partial(not_at_hand, "dataset_name", name)):
        if path.suffix in DATA_FORMATS:
            return load_dataset(DATA_FORMATS[path.suffix], data_files=escape(name), streaming=streaming)
        if any((path / mark).is_file() for mark in ("dataset_info.json", "dataset_dict.json")):
            return load_from_disk(name)
        return load_dataset(name, settings.dataset_config, streaming=streaming)


def unreadable_data(path: Path | str, error: BaseException) -> ConfigurationError:
    cause = error.__cause__ or error  # `datasets` wraps the reader's error
    return ConfigurationError(f"dataset_name={path} cannot be read: {summary(cause)}. Correct or replace the data")


def refuse_columns(kind: str, settings: Namespace, data: Any) -> None:
    """Raise ConfigurationError if the data lacks the columns that TRL requires, or if one of the checked rows (see
    `suspects`) has an invalid value in these columns."""
    if settings.dataset_streaming or (getattr(settings, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        return
    has, name = data.column_names, settings.dataset_name
    if data.info.builder_name == "json":  # the JSON reader does not check the encoding
        with explained(partial(unreadable_data, name)):
            data.data.validate(full=True)
    text = getattr(settings, "dataset_text_field", "text")
    ways = [[text if column == "text" else column for column in way] for way in COLUMNS[kind]]
    if kind == "sft" and trl().is_conversational_from_value(first_row(data)):
        ways = [["conversations"]]  # TRL converts the turns
    way = next((way for way in ways if set(way) <= set(has)), None)
    if way is None:
        *first, last = [" and ".join(way) for way in ways]
        needs = ", or ".join(([", ".join(first)] if first else []) + [last])
        columns = f"column{'s' * (len(has) != 1)} {', '.join(has)}"
        raise ConfigurationError(f"{name} has the {columns}, but {kind} needs {needs}: rename or add columns")
    place = name if data.split in (None, settings.dataset_train_split) else f"the split {data.split} of {name}"
    for column in way:
        is_ids = column.endswith("ids")
        needs = NEEDS.get(column, "a list of token ids" if is_ids else "a string or a list of turns")
        for number, value in suspects(data, column):
            is_missing = value is None or isinstance(value, int | float) or (value == [] and not is_ids)
            if is_missing or (column == "messages" and not is_chat(value)):
                raise ConfigurationError(f"{column} in row {number} of {place} must be {needs}, got {str(value)[:60]}")


def suspects(data: Any, column: str) -> list[tuple[int, Any]]:
    """The numbers and the values in `column` of the rows to check: the first hundred rows, and the first row whose
    value is null or empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = data.data.column(column)
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    empty = pc.equal(pc.fill_null(pc.list_value_length(values), 0), 0) if is_list else values.is_null()
    numbers = [*range(min(len(values), 100)), pc.index(empty, True).as_py()]
    rows = type(data)(data.data, data.info, fingerprint="")  # in the order of the file instead of the split's order
    return [(number + 1, rows[number][column]) for number in numbers if number >= 0]


def is_chat(turns: Any) -> bool:
    return isinstance(turns, list) and bool(turns) and all(isinstance(t, dict) and t.get("role") for t in turns)


def first_row(data: Any) -> dict[str, Any]:
    """The first row, without its empty lists, since TRL's functions expect each list to have at least one entry."""
    return {name: value for name, value in next(iter(data), {}).items() if value != []}


def refuse_no_template(kind: str, settings: Namespace, data: Any, folder: Path) -> None:
    """Raise ConfigurationError if the data contains chats and the tokenizer has no chat template, as with many base
    models."""
    from transformers import AutoProcessor

    is_setting = hasattr(settings, "chat_template_path")
    is_raw = (getattr(settings, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if settings.dataset_streaming or is_raw or (is_setting and settings.chat_template_path):
        return
    row = first_row(data)
    if not trl().is_conversational(row) and not (kind == "sft" and trl().is_conversational_from_value(row)):
        return
    try:
        reader = AutoProcessor.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    except Exception:  # the Trainer raises this error if it loads the tokenizer in the same way
        return
    if getattr(reader, "chat_template", "") is None:
        file = "set chat_template_path to a file with a Jinja template (.jinja)"
        remedy = file if is_setting else "save a Jinja template as chat_template.jinja in the model's folder"
        raise ConfigurationError(
            f"the tokenizer of {settings.model_name_or_path} has no chat template, but {settings.dataset_name} "
            f"contains chats: {remedy}, or use the chat version of this model (often named -Instruct)"
        )
