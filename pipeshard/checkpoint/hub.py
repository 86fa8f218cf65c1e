"""Hub: the folder of a model in this machine's cache of the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from pipeshard.checkpoint.safetensors_files import FILES, files_of
from pipeshard.errors import CheckpointError


def model_folder(path: Path, gguf_file: str | None) -> Path:
    """`path` if it is a folder, otherwise the cached folder of the model with this name on the Hub.

    Raises CheckpointError if the model's weights are not in the cache.
    """
    if path.is_dir():
        return path
    message = f"{path} does not exist: pass a folder that save_pretrained wrote"
    try:
        folder = cached_folder(str(path), gguf_file)
    except HFValidationError:  # not a valid name on the Hub
        raise CheckpointError(message) from None
    if folder is None:
        raise CheckpointError(
            f"{message}, or download a Hugging Face Hub model once, before the ranks start, with "
            f"huggingface_hub.snapshot_download({str(path)!r})"
        )
    return folder


def cached_folder(name: str, gguf_file: str | None = None, revision: str | None = None) -> Path | None:
    """The cached folder of a Hub model, or None if it lacks weights.

    Programs may have loaded only parts of a model into the cache: a tokenizer, or only the files that match a pattern.
    """
    for file in FILES if gguf_file is None else [gguf_file]:
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            folder = Path(found.removesuffix(file))
            try:
                files_of(folder if gguf_file is None else Path(found))
            except CheckpointError:  # the index lists files that are not in the cache
                return None
            return folder
    return None
