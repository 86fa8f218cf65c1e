"""Hub: the folder of a model in this machine's Hugging Face Hub cache."""

from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from pipeshard.checkpoint.safetensors_files import FILES, files_of
from pipeshard.errors import CheckpointError, ConfigurationError


def model_folder(path: Path, gguf_file: str | None, options: dict[str, Any]) -> Path:
    """Return `path` if it is a folder, otherwise the cached folder of the Hub model with this name. If `options`
    contains `subfolder`, return this subfolder instead. Options that select the folder are removed from `options`.

    Raises CheckpointError if `path` is neither a folder nor a Hub model with all weights in the cache, and
    ConfigurationError for `force_download` and `code_revision`, which only affect a download.
    """
    for name in ("force_download", "code_revision"):
        if options.pop(name, None):
            raise ConfigurationError(
                f"{name} has no effect, since from_pretrained reads only files that are already on this machine. Omit "
                f"{name}, download the model with huggingface_hub.snapshot_download, and pass the returned folder"
            )
    inner = options.pop("subfolder", None) or ""
    on_hub = {name: value for name in ("revision", "cache_dir") if (value := options.pop(name, None)) is not None}
    if path.is_dir():
        return path / inner
    try:
        folder = cached_folder(str(path), gguf_file, inner, **on_hub)
    except HFValidationError:  # not a valid name on the Hub
        raise CheckpointError(
            f"{path} is neither a folder nor the name of a model on the Hub: pass a folder that save_pretrained wrote"
        ) from None
    if folder is None:
        given = "".join(f", {option}={str(value)!r}" for option, value in on_hub.items())
        raise CheckpointError(
            f"{path} is not a folder, and this machine's Hugging Face Hub cache does not contain all weights of a "
            "model with this name. Pass a folder that save_pretrained wrote. To use a model from the Hub, call "
            f"huggingface_hub.snapshot_download({str(path)!r}{given}) once, before the ranks start"
        )
    return folder


def cached_folder(name: str, gguf_file: str | None = None, inner: str = "", **on_hub: Any) -> Path | None:
    """Return the cached folder of a Hub model, or its subfolder `inner`. Return None if the cache lacks any of the
    weights. `on_hub` may contain the `revision` and the `cache_dir`.

    The cache may contain only part of a model, for example if a program has downloaded only the tokenizer, or only
    files that match a pattern.
    """
    for file in FILES if gguf_file is None else [gguf_file]:
        found = try_to_load_from_cache(name, str(PurePosixPath(inner, file)), **on_hub)
        if isinstance(found, str):
            folder = Path(found.removesuffix(file))
            try:
                files_of(folder if gguf_file is None else Path(found))
            except CheckpointError:  # the index lists files that are not in the cache
                return None
            return folder
    return None


def hub_name(folder: str) -> str:
    """The Hub name of a model, given its folder in a Hub cache. Returns other paths unchanged."""
    kind, *name = (Path(folder).parts[-3:-2] or ("",))[0].split(constants.REPO_ID_SEPARATOR)
    is_cached = kind == "models" and name and Path(folder).parent.name == "snapshots"
    return "/".join(name) if is_cached else folder
