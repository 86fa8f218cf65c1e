"""Auto: the idle time of searched schedules, compared with the best known schedule, for twelve uneven models.

`python -m benchmarks.auto [--ranks 4 8 16] [--models NAME ...]` builds each model on meta, counts its costs, and
simulates a step of 2p microbatches with one sample each (2,048 tokens, some of them from an image; 512 for T5). The
memory limit of each rank is the highest peak of a rank with 1F1B, AdamW and bf16. `least` is a lower bound on the idle
time for any cut: the most expensive unit call (or child of a layer) cannot be divided, and its rank runs it in each
microbatch. `less` is the reduction of idle time relative to the best known schedule that fits. `of it` is the relative
reduction of the idle time above `least`.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from pipeshard.planner.candidate import Subject
from pipeshard.planner.devices import Devices
from pipeshard.planner.inside import places_inside
from pipeshard.planner.memory import Training
from pipeshard.planner.models import build_on_meta
from pipeshard.planner.planner import automatic, first_microbatch, study

BAR, SECONDS = 0.4, 30.0
LLAMA = "hidden_size={} intermediate_size={} num_hidden_layers={} num_attention_heads={} num_key_value_heads=8"
MODELS = {  # model type, fields of its config, tokens per sample
    "Gemma 3 27B, 262k words": (
        "gemma3_text",
        "vocab_size=262208 hidden_size=5376 intermediate_size=21504 num_hidden_layers=62 num_attention_heads=32 "
        "num_key_value_heads=16 head_dim=128",
        2048,
    ),
    "Gemma 2 9B, 256k words": (
        "gemma2",
        "vocab_size=256000 hidden_size=3584 intermediate_size=14336 num_hidden_layers=42 num_attention_heads=16 "
        "num_key_value_heads=8 head_dim=256",
        2048,
    ),
    "Llama 3 8B, 128k words": ("llama", LLAMA.format(4096, 14336, 32, 32) + " vocab_size=128256", 2048),
    "Llama 3 70B, 128k words": ("llama", LLAMA.format(8192, 28672, 80, 64) + " vocab_size=128256", 2048),
    "GPT-2 XL": ("gpt2", "n_embd=1600 n_layer=48 n_head=25 n_positions=2048", 2048),
    "Nemotron-H 8B": (
        "nemotron_h",
        "vocab_size=131072 hidden_size=4096 intermediate_size=21504 num_attention_heads=32 num_key_value_heads=8 "
        "mamba_num_heads=128 n_groups=8 hybrid_override_pattern="
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        2048,
    ),
    "Bamba 9B": ("bamba", "", 2048),
    "DeepSeek-V3": ("deepseek_v3", "", 2048),
    "Mixtral 8x7B": ("mixtral", "", 2048),
    "T5 11B": ("t5", "d_model=1024 d_ff=65536 num_layers=24 num_decoder_layers=24 num_heads=128 d_kv=128", 512),
    "Gemma 3 12B, images": (
        "gemma3",
        'vision_config={"image_size":896,"patch_size":14,"hidden_size":1152,"intermediate_size":4304,'
        '"num_hidden_layers":27,"num_attention_heads":16} '
        'text_config={"vocab_size":262208,"hidden_size":3840,"intermediate_size":15360,"num_hidden_layers":48,'
        '"num_attention_heads":16,"num_key_value_heads":8,"head_dim":256}',
        2048,
    ),
    "LLaVA 1.5 7B, images": ("llava", "", 2048),
}


class Row(NamedTuple):
    name: str
    ranks: int
    known: str
    idle: float
    chunks: int
    found: float
    least: float
    seconds: float

    @property
    def less(self) -> float:
        return 1 - self.found / self.idle

    @property
    def of_it(self) -> float:
        return (self.idle - self.found) / (self.idle - self.least) if self.idle > self.least else 0.0


def studied(name: str) -> Subject:
    source, fields, length = MODELS[name]
    model = build_on_meta(source, fields.split(), "bf16")
    made = with_image(model, length) if "images" in name else None
    microbatch, _ = first_microbatch(model, made, 1, None if made else 1, None if made else length)
    return study(model, microbatch, None, None, "auto", Training(precision="bf16"), None)


def with_image(model: nn.Module, length: int) -> dict[str, torch.Tensor]:
    """Return a sample of `length` tokens; the first ones are placeholders of an image."""
    config: Any = model.config
    size, token = config.vision_config.image_size, config.image_token_id
    count = getattr(config, "mm_tokens_per_image", (size // config.vision_config.patch_size) ** 2)
    ids = torch.ones(1, length, dtype=torch.long)
    ids[:, :count] = token
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.zeros(1, 3, size, size)}
    if hasattr(config, "mm_tokens_per_image"):
        batch["token_type_ids"] = (ids == token).long()
    return batch


def compared(name: str, subject: Subject, p: int) -> Row:
    places = places_inside(subject)
    m, total = 2 * p, sum(map(sum, subject.costs))
    most = max(map(sum, (places.subject if places else subject).costs))

    def idle(time: float) -> float:
        return 1 - m * total / p / time

    start = time.process_time()
    candidate, _, known = automatic(subject.on(Devices.parse(p)), p, m)
    seconds = time.process_time() - start
    assert known is not None
    best, found = known.estimate(1.0), candidate.estimate(1.0)
    least = max(0.0, idle(m * most))
    return Row(name, p, best.name, idle(best.time), found.num_model_chunks, idle(found.time), least, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    rows = []
    for name in arguments.models:
        subject = studied(name)
        for p in arguments.ranks:
            rows.append(row := compared(name, subject, p))
            console.print(name, p, f"{row.known} {row.idle:.1%}, searched {row.found:.1%}", f"{row.seconds:.1f} s")
    table = Table("model", "p", "best known", "idle", "chunks", "searched", "least", "less", "of it", "s")
    for row in rows:
        shares = (f"{share:.0%}" for share in (row.less, row.of_it))
        known, found, least = (f"{share:.1%}" for share in (row.idle, row.found, row.least))
        table.add_row(
            row.name, str(row.ranks), row.known, known, str(row.chunks), found, least, *shares, f"{row.seconds:.0f}"
        )
    console.print(table)
    less, of_it = (statistics.mean(shares) for shares in zip(*((row.less, row.of_it) for row in rows)))
    longest = max(row.seconds for row in rows)
    console.print(f"mean {less:.1%} less idle time (target: at least {BAR:.0%}); {of_it:.1%} less above `least`")
    console.print(f"the longest search took {longest:.0f} s on one core (target: at most {SECONDS:.0f} s)")
    raise SystemExit(less < BAR or longest > SECONDS)


if __name__ == "__main__":
    main()
