"""Text: what every machine with Python has, the standard library's documentation and sources, cut into samples."""

import ast
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset, Subset, default_collate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = 600_000  # in all
CHARACTERS_PER_MODULE = 4_000  # so that no single module sets the tone


class Samples(Dataset[dict[str, torch.Tensor]]):
    """The documents as samples of `length` tokens: int64 `input_ids`, `attention_mask` and `labels` of shape (length,).

    Documents follow each other, each closed by the tokenizer's end-of-text token; the rest that fills no sample is
    left out.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", length: int) -> None:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens = [token for document in documents() for token in [*tokenizer(document)["input_ids"], *end]]
        count = len(tokens) // length
        self.rows = torch.tensor(tokens[: count * length]).view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}

    def divided(self, held_out: int) -> tuple[Subset[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Samples to train on, and one batch of about `held_out` others, spread over all of them."""
        step = max(1, len(self) // held_out)
        chosen = list(range(0, len(self), step))[:held_out]
        training = Subset(self, [k for k in range(len(self)) if k not in set(chosen)])
        return training, default_collate([self[k] for k in chosen])


def documents() -> Iterator[str]:
    """One text for each public module of the standard library, in the order of their names.

    It is the module's docstring, and then the source of its documented classes and functions, up to a fixed size.
    """
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        if total >= CHARACTERS:
            return
        document = "\n\n\n".join(_parts(path))[:CHARACTERS_PER_MODULE]
        total += len(document)
        if document:
            yield document


def _parts(path: Path) -> Iterator[str]:
    with tokenize.open(path) as file:  # honours the encoding that the file declares
        source = file.read()
    tree = ast.parse(source)
    lines = source.splitlines()
    if docstring := ast.get_docstring(tree):
        yield docstring
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            yield "\n".join(lines[node.lineno - 1 : node.end_lineno])
