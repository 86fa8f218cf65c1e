"""Arguments: the table in docs/arguments.md with the type, default and unit of each field of PipelineConfig.

`python -m tests.arguments` writes the table.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

from pipeshard.config import PipelineConfig
from tests.house import ROOT

PAGE = ROOT / "docs" / "arguments.md"
START, END = "<!-- arguments -->\n", "<!-- end of arguments -->"
HEAD = "| argument | type | default | unit |\n|---|---|---|---|\n"
UNITS = {
    "pp_size": "stages",
    "num_microbatches": "microbatches per batch",
    "microbatch_size": "samples",
    "microbatch_tokens": "tokens, with padding",
    "num_model_chunks": "chunks per rank",
    "max_norm": "L2 norm of all gradients; 0 or None: no clipping",
    "dp_size": "replicas",
    "tp_size": "ranks per stage",
    "ep_size": "ranks per stage",
    "zero_stage": "ZeRO stage, 0 or 1",
    "initial_scale": "factor of the loss",
    "recompute": "share of a stage's unit calls",
    "activation_checkpoint_interval": "unit calls; 0: no recomputation",
    "timeout": "seconds",
    "num_slices": "slices per microbatch",
}


def table() -> str:
    return HEAD + "".join(
        f"| `{field.name}` | `{typed(field.type)}` | {default(field.default)} | {UNITS.get(field.name, '')} |\n"
        for field in fields(PipelineConfig)
    )


def typed(annotation: object) -> str:
    """A type without module names, and with "or" for bars, which would end a cell of the table."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b[a-z_]+\.", "", text).replace(" | ", " or ")


def default(value: object) -> str:
    return "required" if value is MISSING else f"`{value!r}`"


def with_table(text: str) -> str:
    """The text of the page with the current table."""
    before, _, rest = text.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
