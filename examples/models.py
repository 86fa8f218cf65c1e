"""Models: the packaged ones, each made once into a plain Hugging Face folder of weights, config and tokenizer."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from packages import MINILM, SMOLLM2

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Made = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]


def load(name: str, output: Path) -> Made:
    """A causal language model, whole and in float32, and its tokenizer. Rank 0 makes the folder they are read from."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        make_folder(name, output)
    dist.barrier()
    folder = make_folder(name, output)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


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


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2: a BERT of 6 layers for English, as a Hugging Face folder that needs no making."""
    (weights,) = MINILM.folder().rglob("model.safetensors")
    return weights.parent


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
    """Folder and name of the package's one weight file."""
    (file,) = SMOLLM2.folder().glob("*.gguf")
    return file.parent, file.name


MAKERS: dict[str, Callable[[], Made]] = {"smollm2": _smollm2, "gpt2-small": _gpt2_small}
