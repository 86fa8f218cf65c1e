"""Pipeline optimizer: the user's optimizer over what a stage holds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeshard.distributed.collectives import slice_like
from pipeshard.distributed.consistency import together_in
from pipeshard.distributed.watching import calling
from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.mixed_precision import Weight, assign, share_updates
from pipeshard.engine.nan_check import Finite
from pipeshard.engine.outputs import BACKWARD
from pipeshard.errors import ConfigurationError, PipeshardError, UsageError


class PipelineOptimizer(OptimizerWrapper, Optimizer):
    """Keeps the optimizer object itself, which LR schedulers hold, and narrows its groups to what this rank trains.

    It is an Optimizer by its class, as schedulers ask; what it has not itself (`state`, hooks) is the kept one's.

    Groups that are added later, here or to the object itself, are narrowed too. Before a step the `gradients` of the
    whole model are clipped and brought back to the loss; a step in which one of them is not finite, on any rank, is
    left out on all. With `zero` each replica keeps the state of some parameters only, and tells the others what it has
    made of them.

    Attributes:
        names: what the optimizer trains, and the names of the model's parameters that it stands for.
        weights: by name, all that the optimizers of the replicas update together.
    """

    def __init__(
        self,
        optim: Optimizer,
        gradients: ModelGradients,
        zero: bool = False,
        finite: Finite | None = None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> None:
        OptimizerWrapper.__init__(self, optim)
        self._backward = backward
        self.gradients, self.finite = gradients, finite
        self.sync, self.grid = gradients.sync, gradients.grid
        self.zero = zero and self.grid.dp_size > 1
        self.names: dict[Tensor, str] = {}
        self.weights: dict[str, Weight] = {}
        self._narrow()
        self._steps = False
        optim.register_step_pre_hook(self._refuse_alone)
        optim.add_param_group, optim.zero_grad = self.add_param_group, self.zero_grad  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        if name == "optim" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an optimizer of a boosted model is neither copied nor pickled, as it is a part of the whole: save it by "
            "booster.save_optimizer(optimizer, folder, shard=True)"
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks that have a part of the optimizer's state."""
        return self.grid.world

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model from now on; every rank names the same, though it may hold none."""
        type(self.optim).add_param_group(self.optim, param_group)
        try:
            self._narrow()
        except PipeshardError:
            self.optim.param_groups.pop()
            raise

    def _narrow(self) -> None:
        """Leave what this rank holds in the groups, in the form that it has here. A group may become empty, since
        schedulers count on its place."""
        known, weights = self.gradients.names, self.gradients.weights
        fresh = [
            (k, p) for k, group in enumerate(self.optim.param_groups) for p in group["params"] if p not in self.names
        ]
        if not fresh:
            return
        self._refuse_foreign([(k, p) for k, p in fresh if p not in known])
        added = {weights[p].name: weights[p] for _, p in fresh if p in weights}
        if twice := sorted(added.keys() & self.weights.keys()):
            raise UsageError(f"the optimizer has {twice[0]} in a group already: give it each parameter once")
        self.weights |= added
        self.gradients.trained |= {known[p] for _, p in fresh}
        if self.zero:
            assign(added.values(), self.grid.dp_size)
        elsewhere = {name for name, weight in added.items() if weight.owner not in (None, self.grid.replica)}
        for name in elsewhere:
            added[name].leave()
        own = {p: weights[p] for _, p in fresh if p in weights and weights[p].name not in elsewhere}
        for group in self.optim.param_groups:
            kept = [p for p in group["params"] if p in self.names or p in own]
            group["params"] = [own[p].trained() if p in own else p for p in kept]
        for parameter, _ in [item for item in self.optim.state.items() if isinstance(item[0], nn.Parameter)]:
            if parameter in self.names:
                continue
            state = self.optim.state.pop(parameter)
            if parameter in own:
                sliced = {k: _sliced(v, parameter, own[parameter].parameter) for k, v in state.items()}
                self.optim.state[own[parameter].trained()] = sliced
        self.names |= {weight.trained(): weight.name for weight in own.values()}

    def _refuse_foreign(self, foreign: list[tuple[int, Tensor]]) -> None:
        if foreign:
            k, parameter = foreign[0]
            raise ConfigurationError(
                f"group {k} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the "
                "model's (another model's, or the criterion's?), so no stage would train it: give every model an "
                "optimizer of its own, and make what the loss has parameters for a part of the model"
            )

    @property
    def _meets(self) -> bool:
        """Whether the ranks do something together in a step."""
        return self.gradients.max_norm > 0 or self.gradients.scaling is not None or self.zero

    def _refuse_alone(self, *_: Any) -> None:
        if not self._steps and (self._meets or any(weight.master is not None for weight in self.weights.values())):
            raise UsageError(
                f"this {type(self.optim).__name__} was boosted, and does not clip, unscale or share what it updates by "
                "itself: call the step of the optimizer that booster.boost(...) returned"
            )

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        with together_in("optimizer.step") if self._meets else calling("optimizer.step"):
            self._narrow()
            if closure is None:
                return self._step(*args, **kwargs) if self._ready() else None
            if self.gradients.scaling is not None:
                raise UsageError(
                    "precision='fp16' has to know gradients before a step, to leave it out if they overflow: call "
                    "execute_pipeline first, and optimizer.step() without a closure"
                )

            def closed() -> Any:
                loss = closure()
                self._ready()
                return loss

            return self._step(closed, *args, **kwargs)

    def _ready(self) -> bool:
        """Before the optimizer looks at gradients: whether it is to."""
        if self.finite is not None:
            self.finite.before_update()
        ready = self.gradients.ready(self)
        for weight in self.weights.values() if ready else ():
            weight.give_gradient()
        return ready

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._steps = True
        try:
            result = self.optim.step(*args, **kwargs)
        finally:
            self._steps = False
        for weight in self.weights.values():
            weight.take_value()
        if self.finite is not None:
            self.finite.after_update()
        if self.zero:
            share_updates(self.weights.values(), self.grid.replicas)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.sync.reset({weight.parameter for weight in self.weights.values()})
        type(self.optim).zero_grad(self.optim, set_to_none)
        for weight in self.weights.values():
            weight.zero_grad(set_to_none)

    @together_in("optimizer.clip_grad_by_norm")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Clip to the norm over the whole model, which it returns. Every rank has to call it."""
        return self.gradients.clip(max_norm, norm_type, error_if_nonfinite)

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float:
        """The norm over the whole model that the last `step` clipped by (as it was before), else that of the gradients
        now. In the latter case every rank has to call it."""
        if self.gradients.norm is not None:
            return float(self.gradients.norm)
        with together_in("optimizer.get_grad_norm"):
            return float(self.gradients.total(norm_type))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Of a loss that one process with the whole model (pp_size=1) has computed by `model(...)`."""
        if self._backward is None or not loss.requires_grad:
            raise UsageError(BACKWARD)
        self._backward(loss)


def replace_parameters(optim: Optimizer, became: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Where parameters became others, let the optimizer train those, each in the first group that has it."""
    seen: set[nn.Parameter] = set()
    for group in optim.param_groups if became else ():
        now = dict.fromkeys(became.get(parameter, parameter) for parameter in group["params"])
        group["params"] = [parameter for parameter in now if parameter not in seen]
        seen |= now.keys()
    for parameter in became:
        optim.state.pop(parameter, None)


def _sliced(value: Any, whole: Tensor, parameter: Tensor) -> Any:
    """A state of a whole parameter, from before it was boosted, as it belongs to the rank's part of it."""
    return slice_like(value, parameter) if isinstance(value, Tensor) and value.shape == whole.shape else value
