"""Entries: every (task, architecture) of transformers that the parity sweep covers."""

from __future__ import annotations

from typing import NamedTuple

import transformers
from transformers.models.auto import modeling_auto

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}


class Entry(NamedTuple):
    """One architecture in one task; `class_name` is that of its model class in transformers."""

    task: str
    model_type: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.task}/{self.model_type}"


def all_entries() -> list[Entry]:
    """Every entry of the installed transformers, by task and then by name."""
    there = set(transformers.__all__)  # to ask the module itself would import the model
    entries = []
    for task, mapping in TASKS.items():
        for model_type, names in sorted(getattr(modeling_auto, mapping, {}).items()):
            name = names if isinstance(names, str) else names[0]
            if name in there:
                entries.append(Entry(task, model_type, name))
    return entries


def find(text: str) -> list[Entry]:
    """The entries of a task, of a model type, or of "task/model_type"."""
    return [entry for entry in all_entries() if text in (str(entry), entry.task, entry.model_type)]
