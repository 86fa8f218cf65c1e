"""Refused: the tests of transformers that a pipelined Trainer does not pass, each with the reason and an alternative.

A test that fails and is not listed is a fault of pipeshard.
"""

from typing import NamedTuple


class Reason(NamedTuple):
    """Why tests do not pass, from which number of stages on, and what a user does instead."""

    stages: int
    why: str
    instead: str


BUFFER = Reason(
    1,
    "the model's buffer has a different shape in the checkpoint than in a new model",
    "create the buffer with its final size",
)
CHANGED = Reason(
    1,
    "the test shards a checkpoint's weights again, so the files no longer match the checkpoint's manifest",
    "resume from the checkpoint as it was saved, or load the changed weights with from_pretrained and train from there",
)
SEARCH = Reason(1, "hyperparameter_search trains several models in one process", "start one run per trial")
OBJECTS = Reason(
    1,
    "the optimizer's states contain objects, which Trainer saves but refuses to load",
    "set save_only_model=True, or use optim='adamw_8bit'",
)
LAYERWISE = Reason(
    1,
    "the optimizer updates parameters during the backward, before all microbatches have added their gradients",
    "use the optim without _layerwise",
)
COUPLED = Reason(
    2,
    "GrokAdamW decays the momentum of a parameter by the parameter's index in its list, which differs between ranks",
    "use optim='adamw_torch'",
)
DISPATCH = Reason(
    2,
    "with `dispatch_batches=True`, one rank reads the batches for all, but every stage must read the same batches",
    "omit dispatch_batches",
)
BATCH_SIZE = Reason(
    2,
    "`auto_find_batch_size` reacts to the memory of one rank, while the other stages wait for its messages",
    "choose the batch size with `pipeshard plan`",
)
PARTS = Reason(
    2,
    "the test compares the parameters of the whole model on one rank, or calls the split model directly",
    "save the model with trainer.save_model and load it with from_pretrained",
)
UNITS = Reason(
    2, "the test's own model has fewer unit calls than stages", "use pp_size=1, or a model with several layers"
)
LOGS = Reason(2, "the test expects the main process's log lines on every rank", "read the log of rank 0")
STATE = Reason(
    2,
    "the test compares TrainerState on every rank, but Trainer updates its callbacks' states on the main process only",
    "read the state of rank 0, which is saved",
)
FOLDERS = Reason(
    2,
    "the test itself creates and removes checkpoint folders on both ranks at once, in a shared folder",
    "nothing: Trainer's own rotation runs on one rank only",
)
FILES = Reason(
    2,
    "the test reads the whole model from the file model.safetensors, but each stage writes its own part to a file",
    "load the folder with from_pretrained, or read the files that model.safetensors.index.json names",
)

REFUSED = {
    "test_resume_batch_order": BUFFER,
    "test_hyperparameter_search": SEARCH,
    "test_grokadamw": COUPLED,
    "test_apollo_0_apollo_adamw": OBJECTS,
    "test_apollo_extra_args": OBJECTS,
    "test_galore_0_galore_adamw": OBJECTS,
    "test_apollo_1_apollo_adamw_layerwise": LAYERWISE,
    "test_apollo_layerwise_with_scheduler": LAYERWISE,
    "test_resume_training_with_checkpoint": CHANGED,
    "test_resume_training_with_shard_checkpoint": CHANGED,
    "test_accelerate_config_from_dataclass_grad_accum": DISPATCH,
    "test_accelerator_config_from_dataclass": DISPATCH,
    "test_accelerator_config_from_dict": DISPATCH,
    "test_accelerator_config_from_yaml": DISPATCH,
    "test_gradient_checkpointing": PARTS,
    "test_load_best_model_with_save": PARTS,
    "test_load_best_model_with_save_best": PARTS,
    "test_neftune": PARTS,
    "test_resume_from_interrupted_training": UNITS,
    "test_log_level": LOGS,
    "test_can_resume_training": STATE,
    "test_multiple_peft_adapters": STATE,
    "test_resume_training_with_frozen_params": STATE,
    "test_resume_training_with_gradient_accumulation": STATE,
    "test_checkpoint_rotation": FOLDERS,
    "test_auto_batch_size_with_resume_from_checkpoint": BATCH_SIZE,
    "test_load_best_model_at_end": FILES,
    "test_load_best_model_from_safetensors": FILES,
}


def reason_of(test: str, stages: int) -> Reason | None:
    """Why a test (by its full name) is not expected to pass at this number of stages, if it is not. transformers moves
    its tests from class to class, so their own names count."""
    reason = REFUSED.get(test.rpartition(".")[2])
    return reason if reason is not None and stages >= reason.stages else None
