"""TRL runs: tiny runs of TRL's trainers, in one process and through a pipeline, on the same data."""

from __future__ import annotations

import random
import tempfile
from contextlib import nullcontext
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from pipeshard import PipelinePlugin
from pipeshard.trainer import pipelined
from tests import zoo
from tests.trainers import differences, launched

TIMES = ("runtime", "per_second", "flos")


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), words))
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def words(count: int, source: random.Random) -> str:
    return " ".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def data(kind: str) -> Any:
    source = random.Random(0)
    rows: list[dict[str, str]] = []
    for k in range(40):
        prompt, first, second = words(3 + k % 4, source), words(4 + k % 3, source), words(3 + k % 2, source)
        if kind in ("reward", "dpo"):
            rows.append({"prompt": prompt, "chosen": " " + first, "rejected": " " + second})
        elif kind == "completion":
            rows.append({"prompt": prompt, "completion": " " + first})
        else:
            rows.append({"text": f"{prompt} {first}"})
    return datasets.Dataset.from_list(rows)


def scorer() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**zoo.TINY, num_labels=1))


def adapters(**fields: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, **fields)


def of_a_folder() -> dict[str, Any]:
    """A model whose stages load their weights. Some of its adapters are initialized from the loaded weights."""
    model = zoo.build("llama")
    if torch.distributed.is_initialized():
        folder = tempfile.mkdtemp()
        model.config.save_pretrained(folder)  # each rank has its own folder
        save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
        model = PipelinePlugin.from_pretrained(type(model), folder)
    torch.manual_seed(5)
    return {"model": model, "peft_config": adapters(use_dora=True, modules_to_save=["lm_head"])}


def with_experts() -> Any:
    """A model whose routers have an auxiliary loss, which TRL adds by default."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    config = transformers.Qwen3MoeConfig(vocab_size=zoo.VOCABULARY, **sizes, **heads, **experts)
    return transformers.Qwen3MoeForCausalLM(config)


def with_saved_adapters() -> dict[str, Any]:
    """A model whose stages load their weights, with adapters and a copy of the head that were trained before."""
    folder, model = tempfile.mkdtemp(), zoo.build("llama")
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
    trained = peft.get_peft_model(model, adapters(init_lora_weights=False, modules_to_save=["lm_head"]))
    with torch.no_grad():
        trained.get_submodule("base_model.model.lm_head.modules_to_save.default").weight.mul_(-2)
    trained.save_pretrained(f"{folder}/adapters")
    if torch.distributed.is_initialized():
        model = PipelinePlugin.from_pretrained(transformers.LlamaForCausalLM, folder)
        return {"model": PipelinePlugin(2).enable_lora(model, pretrained_dir=f"{folder}/adapters")}
    return {"model": peft.PeftModel.from_pretrained(zoo.build("llama"), f"{folder}/adapters", is_trainable=True)}


def in_four_bits() -> dict[str, Any]:
    """A 4-bit model, loaded by transformers or (on ranks) by the stages, and the config of its adapters."""
    folder = tempfile.mkdtemp()
    model: Any = zoo.build("llama")
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
    loads = PipelinePlugin if torch.distributed.is_initialized() else type(model)
    of = (type(model),) if loads is PipelinePlugin else ()
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = loads.from_pretrained(*of, folder, quantization_config=config, dtype=torch.float32)
    for module in model.modules():  # some CPUs evaluate with 16-bit scales, which fails for layers of this size
        module.support_avx512bf16_for_cpu = False
    torch.manual_seed(5)
    return {"model": model, "peft_config": adapters()}


# For each kind: the Trainer, additional arguments of its config, and a function that returns its own arguments.
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "packing": ("SFT", {"packing": True, "max_length": 16}, dict),
    "completion": ("SFT", {}, dict),
    "lora": ("SFT", {}, lambda: {"peft_config": adapters()}),
    "lora of a folder": ("SFT", {}, of_a_folder),
    "lora in four bits": ("SFT", {}, in_four_bits),
    "experts": ("SFT", {}, lambda: {"model": with_experts()}),
    "reward": ("Reward", {}, lambda: {"model": scorer()}),
    "dpo": ("DPO", {}, lambda: {"ref_model": zoo.build("llama", seed=1)}),
    "dpo-lora": ("DPO", {}, lambda: {"peft_config": adapters()}),
    "dpo-of saved adapters": ("DPO", {"max_steps": 2, "eval_steps": 2}, with_saved_adapters),
    "dpo-precomputed": ("DPO", {"precompute_ref_log_probs": True}, lambda: {"peft_config": adapters()}),
}


def run(kind: str, folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> list[dict[str, float]]:
    name, arguments, given = KINDS[kind]
    trainer = getattr(trl, f"{name}Trainer")
    usual = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 1e-3}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    plain = {"gradient_checkpointing": False}
    with launched() if plugin else nullcontext():
        args = getattr(trl, f"{name}Config")(
            output_dir=folder, **{**usual, **sizes, **quiet, **plain, **arguments, **others}
        )
        rows = data(kind.partition("-")[0])
        torch.manual_seed(0)
        more = {"model": zoo.build("llama"), "train_dataset": rows, "eval_dataset": rows.select(range(7)), **given()}
        if plugin is None:
            made = trainer(args=args, processing_class=tokenizer(), **more)
        else:
            kinds = pipelined(trainer)
            made = kinds(args=args, processing_class=tokenizer(), pipeline=PipelinePlugin(**plugin), **more)
        made.train()
        history = made.state.log_history
    return [{key: value for key, value in entry.items() if not any(t in key for t in TIMES)} for entry in history]


CLOSE = {"lora in four bits": 1e-3}  # TRL trains adapters of a quantized base in bf16, and sums their norm in bf16


def near(found: list[dict[str, float]], expected: list[dict[str, float]], close: float = 2e-6) -> list[str]:
    """The differences between two logs. 1 is added to all values, so small values are compared by absolute error."""
    lifted = [[{key: value + 1.0 for key, value in entry.items()} for entry in log] for log in (found, expected)]
    return differences(*lifted, close=close)
