"""Evaluation: overrides Trainer's methods for evaluation, prediction and generation, so that they run on stages."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import denumpify_detensorize

from pipeshard.distributed.collectives import share_value, together_in
from pipeshard.errors import UsageError
from pipeshard.plugin import PipelinePlugin
from pipeshard.replaced import replaced
from pipeshard.trainer.objective import evaluated_together
from pipeshard.trainer.stand_ins import REPLICAS, PipelineAccelerator, StagesStandIn


class Evaluation(Trainer):
    """A Trainer that evaluates on stages. Every replica evaluates all data."""

    pipeline: PipelinePlugin
    accelerator: PipelineAccelerator
    share_generators: Callable[[Any], None]
    _own_stages: Callable[[], StagesStandIn]
    _stages: StagesStandIn | None = None
    _loader: Any = None  # the source of the trace's sample: the latest training (else the first evaluation) dataloader
    _latest_loader: Any = None  # the latest dataloader that accelerator.prepare has returned

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        handler = self.callback_handler
        setattr(handler, "on_evaluate", partial(self._agreed, handler.on_evaluate))  # noqa: B010

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        with self.accelerator.alone():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        with self.accelerator.alone():
            return super().get_test_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all data on every replica, batch by batch, as a single process does."""
        if getattr(dataloader, REPLICAS, 1) != 1:
            raise UsageError(
                "this dataloader distributes its batches over replicas, but every replica must evaluate all batches: "
                "create it with Trainer's get_eval_dataloader(dataset), or pass a torch DataLoader to "
                "accelerator.prepare inside `with self.accelerator.alone():`. Do not use plugin.prepare_dataloader"
            )
        self.share_generators(dataloader)
        self._loader = dataloader if self._loader is None else self._loader
        start, is_first = time.time(), self._stages is None
        self._own_stages()
        if is_first:
            self.model_preparation_time = round(time.time() - start, 4)
        with self.accelerator.alone(), self._evaluated_together(), self._generated_together(), self._counted():
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def _generated_together(self) -> AbstractContextManager[None]:
        """Context manager in which the model's `generate`, which Seq2SeqTrainer calls, runs on all stages of the
        pipeline."""
        stages = self._own_stages()
        if not hasattr(stages.module, "generate"):
            return nullcontext()
        stages.boosted.generation.find_own()
        return replaced(stages.module, generate=stages.boosted.generation)

    def _evaluated_together(self) -> AbstractContextManager[None]:
        """Context manager in which every rank calls the user's compute_loss or compute_loss_func. If a rank lacks a
        parameter that this function reads, all ranks use the last stage's result."""
        is_own = self._overrides_loss or self.compute_loss_func is not None
        if self.pipeline.grid.world.size() == 1 or not is_own:
            return nullcontext()
        compute_loss: Callable[..., Any] = self.compute_loss

        @wraps(compute_loss)
        def together(*args: Any, **kwargs: Any) -> Any:
            return evaluated_together(self, self._own_stages().boosted.pipeline, partial(compute_loss, *args, **kwargs))

        return replaced(self, compute_loss=together)

    def _counted(self) -> AbstractContextManager[None]:
        """Context manager that calls `_count_last` before each prediction_step, even if the user's class overrides
        prediction_step."""
        predict: Callable[..., Any] = self.prediction_step

        def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._count_last(inputs)
            return predict(model, inputs, *args, **kwargs)

        return replaced(self, prediction_step=counted)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        if self.is_foreign(model):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        stages = self._own_stages()
        loss_only = prediction_loss_only and not self._makes_loss() and self._has_loss(inputs)
        with replaced(stages, loss_only=loss_only):
            return super().prediction_step(stages, inputs, prediction_loss_only, ignore_keys)

    def is_foreign(self, model: Any) -> bool:
        """Whether `model` is a model other than the Trainer's own, such as a teacher or a weight-averaged copy."""
        stages = self._own_stages()
        own = stages, stages.boosted, stages.module, self.model
        return isinstance(model, nn.Module | StagesStandIn) and all(model is not one for one in own)

    def _agreed(
        self, evaluated: Callable[..., Any], args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any
    ) -> Any:
        """Replace the numbers in every rank's metrics with rank 0's numbers, then call the on_evaluate callbacks.

        Each rank uses these numbers to decide when to stop and save, and which checkpoint is the best. The numbers may
        differ between ranks: the user's class may compute some numbers on the main process only, and times always
        differ.
        """
        if (world := self.pipeline.grid.world).size() > 1:
            found = denumpify_detensorize(metrics)
            numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
            with together_in("trainer.evaluate"):
                metrics.update(share_value(numbers, 0, world))
        return evaluated(args, state, control, metrics, **kwargs)

    def _has_loss(self, inputs: Any) -> bool:
        """Whether transformers' prediction_step computes a loss for these inputs: from labels or, if the model takes no
        labels (such as CLIP), with `return_loss`."""
        if self.label_names:
            return all(inputs.get(name) is not None for name in self.label_names)
        asked = inputs.get("return_loss")
        return bool(self.can_return_loss if asked is None else asked)

    def _makes_loss(self) -> bool:
        """Whether anything other than the model itself computes the loss."""
        return self._overrides_loss or self.label_smoother is not None or self.compute_loss_func is not None

    @property
    def _overrides_loss(self) -> bool:
        own = getattr(self.compute_loss, "__wrapped__", self.compute_loss)
        return getattr(own, "__func__", None) is not Trainer.compute_loss

    def _count_last(self, inputs: Any) -> None:
        """In the last batch of a stream, set accelerate's `remainder` to the batch's number of samples (0 if full).

        Trainer repeats each batch's loss eval_batch_size times. For the last batch, accelerate truncates the repetition
        to `remainder`. accelerate derives `remainder` from the dataset's length, but a stream has no length.
        """
        loader = self.accelerator.gradient_state.active_dataloader
        if loader is None or not getattr(loader, "end_of_dataloader", False) or loader.remainder != -1:
            return
        rows = find_batch_size(inputs) or 0
        loader.remainder = rows if rows < self.args.eval_batch_size else 0

    def generate(self, **inputs: Any) -> Tensor:
        """Generate tokens with all stages. Takes the arguments of the model's `generate`. Call it on every rank."""
        with self._generated_together():
            generate: Any = self._own_stages().eval().module.generate
            tokens: Tensor = generate(**inputs)
        return tokens

    def is_predicted(self, sample: Any) -> bool:
        """Whether transformers' prediction_step passes the sample directly to the model, without compute_loss, because
        labels are missing."""
        if self.is_in_train or not isinstance(sample, Mapping):
            return False
        steps = (kind for kind in type(self).__mro__ if kind is not Evaluation and "prediction_step" in vars(kind))
        is_known = next(steps).__module__.startswith("transformers.")
        return is_known and any(sample.get(name) is None for name in self.label_names)
