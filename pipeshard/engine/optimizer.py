"""Pipeline optimizer: the user's optimizer for this rank's parameters. With ZeRO, the replicas shard its state.

PipelineOptimizer wraps the user's optimizer object, since LR schedulers reference this object, and any subclass of
torch.optim.Optimizer must work. PipelineOptimizer replaces the parameters in the groups with this rank's master
weights. With ZeRO, each weight has one owner among the stage's replicas (engine/zero.py). The owner keeps the optimizer
state, and broadcasts the updated values to the other replicas. torch's ZeroRedundancyOptimizer is not used, since it
creates new optimizers, and only for a single process group.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipeshard.distributed.collectives import gather_objects, local_grad, together_in
from pipeshard.distributed.watch import NOTE
from pipeshard.distributed.watching import calling
from pipeshard.engine.clipping import ModelGradients, order_of
from pipeshard.engine.copies import WeightCopies
from pipeshard.engine.groups import UNCOMPARED, keep, move_overrides
from pipeshard.engine.hosted import stored_grad
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.engine.optimizer_hooks import give_hooks
from pipeshard.engine.optimizer_trial import SCALES, UNWATCHED, is_watched
from pipeshard.engine.outputs import BACKWARD
from pipeshard.engine.stage import NaNCheck
from pipeshard.engine.states import States, converted, filled
from pipeshard.engine.step_guard import STEP_GUARD
from pipeshard.engine.updates import options_of, warn_of_ranks
from pipeshard.engine.zero import assign_owners
from pipeshard.errors import ConfigurationError, PipeshardError, UsageError
from pipeshard.garbage import weak
from pipeshard.private import global_step_pre_hooks, never_compiled

MODES = "train", "eval"  # methods of schedule-free optimizers that write other values to the weights
OF_RANK = "parameters_of_rank"  # key in a state dict: for each group, the names of the parameters that a rank updates

# For each inner optimizer, the newest PipelineOptimizer that wraps it, since a notebook cell may boost it again.
_newest: weakref.WeakKeyDictionary[Optimizer, "weakref.ref[PipelineOptimizer]"] = weakref.WeakKeyDictionary()


class PipelineOptimizer(Optimizer):
    """Restricts the groups of `optim`, including groups that are added later, to the parameters that this rank trains.

    This class subclasses Optimizer, since LR schedulers require an Optimizer. Attributes that this class does not
    define (such as hooks) are delegated to `optim`.

    Before a step, the `gradients` of the whole model are clipped and unscaled. With a loss scale, all ranks skip the
    step if a gradient on any rank is not finite. With `zero`, each weight is updated by only one replica, which
    broadcasts the weight to the other replicas.

    Attributes:
        names: maps each tensor that `optim` updates on this rank to the name of its parameter in the model.
        weights: the MasterWeights of this rank's parameters in the groups, by name, including weights that other
            replicas update.
        given: for each group, the names of all parameters that the user passed on any rank.
        options: for each group, the names of its options when it was added.
        copies: makes the model's parameters and the updated tensors equal again after a loop has written to either.
    """

    _is_made = False  # whether __init__ has set all of this object's own attributes

    def __init__(
        self,
        optim: Optimizer,
        gradients: ModelGradients,
        zero: bool = False,
        finite: NaNCheck | None = None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.optim, self._backward = optim, backward
        self.gradients, self.finite = gradients, finite
        self.sync, self.grid = gradients.sync, gradients.grid
        self.zero = zero and self.grid.dp_size > 1
        self.names: dict[Tensor, str] = {}
        self.weights: dict[str, MasterWeight] = {}
        self.given: list[frozenset[str]] = []
        self.options: list[tuple[str, ...]] = []
        self.copies = WeightCopies(self.weights, self.grid)
        self._narrow()
        self.is_stepping = False  # whether the inner optimizer's step is running
        self._count = 0  # number of steps of the inner optimizer
        self._is_resumed = False  # whether the inner optimizer had states before its first step
        self._depth = 0  # number of nested step calls whose pre-hooks have run, but whose post-hooks have not
        self._is_updated = False  # whether the parameters have the values of the current step
        give_hooks(optim)
        self._last_hook = optim.register_step_pre_hook(weak(self._before_update))
        self._first_hook = optim.register_step_post_hook(weak(self._after_update))
        gradients.updates.boosted(self)
        for method in (self.add_param_group, self.zero_grad):
            own = MethodType(getattr(type(optim), method.__name__), weakref.proxy(optim))
            setattr(optim, method.__name__, weak(method, own))
        _newest[optim] = weakref.ref(self)
        self._is_made = True

    def __getattr__(self, name: str) -> Any:
        if name == "optim" or name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.optim, name)
        return self._sharing(value) if name in MODES and self.zero and callable(value) else value

    def _sharing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `method` and sends the written weights to the other replicas. Every rank must
        call this function."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.gradients.coupling.paused(), together_in(f"optimizer.{method.__name__}"):
                result = method(*args, **kwargs)
                self.gradients.share_written()
            return result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this object (schedulers replace its `step`), or of `optim` if this object has no such
        attribute."""
        if not self._is_made or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.optim, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.optim, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an optimizer of a boosted model cannot be copied or pickled, because it contains the state of only one "
            "rank: save it with booster.save_optimizer(optimizer, folder, shard=True)"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups
        self._narrow()

    @property
    def state(self) -> Any:
        return States(self.optim.state, self._key)

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state.states if isinstance(state, States) else state

    def _key(self, key: Any) -> Any:
        """Convert a key of `state` to a key of `optim.state`. A parameter of the model becomes the tensor that `optim`
        updates for it, or None if this rank does not update the parameter."""
        if not isinstance(key, Tensor) or key in self.names or key not in self.gradients.names:
            return key
        weight = self.weights.get(self.gradients.names[key])
        return weight.master if weight is not None and self._updates(weight) else None

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that this rank updates."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise UsageError. An enabled torch.amp.GradScaler reads this attribute before it accesses scaled
        gradients."""
        raise UsageError(
            "GradScaler.step(optimizer) got a boosted optimizer, whose gradients GradScaler has not scaled: remove "
            "GradScaler and call optimizer.step(). With precision='fp16', pipeshard scales the loss and skips steps "
            "whose gradients overflow"
        )

    def unwrap(self) -> Optimizer:
        return self.optim

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of `optim`, with the names of the tensors that this rank updates. It contains the state
        of only these tensors."""
        return {**self.optim.state_dict(), OF_RANK: self._names_of_groups()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Raises UsageError if the state dict is from a rank that updates other
        parameters, or if it does not contain names and this rank updates only some of the optimizer's parameters."""
        own = self._names_of_groups()
        updated, given = (sum(map(len, groups)) for groups in (own, self.given))
        if OF_RANK not in state_dict and updated < given:
            raise UsageError(
                f"this state dict does not contain parameter names, but this rank updates only {updated} of the "
                f"optimizer's {given} parameters, so the states may belong to other parameters. If the state dict is "
                "from an optimizer that is not boosted, load it before booster.boost, which keeps this rank's states. "
                "If this rank saved it from optimizer.unwrap(), or with pipeshard 0.2.0, call "
                "optimizer.unwrap().load_state_dict(state) on the same ranks. Otherwise, call "
                "booster.save_optimizer(optimizer, folder, shard=True) and booster.load_optimizer(optimizer, folder) "
                "on every rank"
            )
        if state_dict.get(OF_RANK, own) != own:
            raise UsageError(
                "this state dict is from a rank that updates other parameters: optimizer.state_dict() contains the "
                "state of only one rank. Call booster.save_optimizer(optimizer, folder, shard=True) and "
                "booster.load_optimizer(optimizer, folder) on every rank instead, or keep one file for each rank and "
                "resume on the same ranks"
            )
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != OF_RANK})

    def _names_of_groups(self) -> list[list[str]]:
        return [[self.names.get(parameter, "") for parameter in group["params"]] for group in self.param_groups]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks that hold a part of the optimizer's state."""
        return self.grid.world

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters. On every rank, pass the parameters with the same names, including
        parameters that the rank does not hold."""
        type(self.optim).add_param_group(self.optim, param_group)
        try:
            self._narrow()
        except PipeshardError:
            self.optim.param_groups.pop()
            raise

    def _narrow(self) -> None:
        """In the groups, keep only the parameters that this rank updates, each replaced with the `master` of its
        MasterWeight. Empty groups remain, since schedulers identify a group by its position."""
        fresh = self._fresh()
        if not fresh and len(self.optim.param_groups) <= len(self.given):
            return
        added = {name: self.gradients.weights[name] for name in fresh.values() if name in self.gradients.weights}
        in_groups = {self.names[parameter] for parameter in self.parameters if parameter not in fresh}
        if twice := sorted(added.keys() & in_groups):
            raise UsageError(f"{twice[0]} is already in a group of the optimizer: add each parameter only once")
        self.weights |= added  # may contain them already, if a loop has removed their group
        self.gradients.updated |= added
        self._remember_groups(fresh)
        self.gradients.trained |= set(fresh.values())
        if self.zero:
            assign_owners(added.values(), self.grid.dp_size)
        updated = {p: added[n] for p, n in fresh.items() if n in added and self._updates(added[n])}
        for weight in added.values():
            if not self._updates(weight):
                weight.leave()
            elif weight.lacks_values and weight.parameter.requires_grad:
                weight.complete()
            elif weight.is_double and not weight.is_blank:  # a loop may have written to it before it was in a group
                weight.follow(is_written=True, is_master_written=False, adopts=True)
        self._replace(updated, fresh.keys() - updated.keys())

    def _replace(self, became: Mapping[Tensor, MasterWeight], left: Collection[Tensor] = ()) -> None:
        """In the groups, replace each tensor in `became` with the `master` of its MasterWeight, and remove the tensors
        in `left`. Move the options and the state of each replaced tensor to `master`."""
        move_overrides(self.optim, {before: weight.master for before, weight in became.items()})
        for group in self.optim.param_groups:
            keep(group, [k for k, p in enumerate(group["params"]) if p not in left])
            group["params"][:] = [became[p].master if p in became else p for p in group["params"]]
        group_of = {parameter: group for group in self.optim.param_groups for parameter in group["params"]}
        for before in [p for p in self.optim.state if p in became or p in left]:
            state = self.optim.state.pop(before)
            if (weight := became.get(before)) is not None:
                values, group = filled(self.optim, state, before.device), group_of.get(weight.master, {})
                states = {key: converted(key, value, before, weight, group) for key, value in values.items()}
                self.optim.state[weight.master] = states
        for before, weight in became.items():
            self.names.pop(before, None)
            self.names[weight.master] = weight.name
        self.copies.watch()
        self.gradients.copies.watch()

    def _remember_groups(self, fresh: Mapping[Tensor, str]) -> None:
        for k, group in enumerate(self.optim.param_groups):
            names = frozenset(fresh[parameter] for parameter in group["params"] if parameter in fresh)
            if k < len(self.given):
                self.given[k] |= names
            else:
                self.given.append(names)
                self.options.append(tuple(sorted(group.keys() - UNCOMPARED)))

    def gather_groups(self) -> None:
        """Add to `given` the names that other ranks passed. If a loop selects parameters of a boosted model by
        `requires_grad`, each rank passes only its own parameters. Groups with the same index on different ranks count
        as one group if their options are the same. Call it on all ranks."""
        groups = zip(self.optim.param_groups, self.given, self.options)
        own = [(options_of(group, keys), sorted(names)) for group, names, keys in groups]
        of_ranks = gather_objects(own, self.grid.world)
        warn_of_ranks([[options for options, _ in told] for told in of_ranks], type(self.optim), self.grid)
        for told in of_ranks:
            for k, ((options, _), (others, names)) in enumerate(zip(own, told)):
                if options == others:
                    self.given[k] |= frozenset(names)

    def complete(self, weights: Iterable[MasterWeight]) -> None:
        """Create the missing values of the `weights` that this rank updates."""
        became: dict[Tensor, MasterWeight] = {w.master: w for w in weights if w.lacks_values and self._updates(w)}
        for weight in became.values():
            weight.complete()
        if became:
            self._replace(became)

    def _fresh(self) -> dict[Tensor, str]:
        """Return the parameters, with their names, that were added to the groups since the last `_narrow`. Raises
        ConfigurationError for a parameter that is not in the model, and UsageError for a parameter from an earlier
        boost."""
        names: dict[Tensor, str] = {}
        for k, group in enumerate(self.optim.param_groups):
            for parameter in group["params"]:
                if parameter in self.names:
                    continue
                if parameter not in self.gradients.names:
                    self._refuse_boosted()
                    raise ConfigurationError(
                        f"group {k} of the optimizer contains a parameter of shape {tuple(parameter.shape)} that is "
                        "not in the model, so no stage would train it. If weights were tied or replaced after the "
                        "optimizer was created, create the optimizer after them. If it is a parameter of another model "
                        "or of the criterion, give each model its own optimizer, and move the criterion's parameters "
                        "into the model"
                    )
                names[parameter] = self.gradients.names[parameter]
        return names

    def _refuse_boosted(self) -> None:
        """Raise UsageError if another PipelineOptimizer has put its master weights into the groups."""
        if self.optim in _newest and _newest[self.optim]() is not self:
            raise UsageError(
                f"this {type(self.optim).__name__} was already boosted: use the model and the optimizer that boost "
                "returned, or create a new model and a new optimizer"
            )

    def _updates(self, weight: MasterWeight) -> bool:
        return weight.owner in (None, self.grid.replica)

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient overflowed."""
        return self.gradients.overflow

    @property
    def _shares(self) -> bool:
        """Whether a step does more than the inner optimizer's step: clips or unscales gradients, or shares updates."""
        return self.gradients.max_norm > 0 or self.gradients.scaling is not None or self.zero

    @property
    def is_plain(self) -> bool:
        """Whether the updated tensors are the model's parameters themselves, and have no other copies."""
        return not self.zero and all(weight.plain for weight in self.weights.values())

    def refuse_alone(self, kind: str) -> None:
        """Raise UsageError if an optimizer of class `kind` (the inner optimizer, or one that it contains) steps outside
        the `step` of the newest PipelineOptimizer, although the update needs clipping, unscaling or synchronization."""
        newest = _newest[self.optim]() or self
        if not (self.is_stepping or newest.is_stepping) and (self._shares or not self.is_plain):
            raise UsageError(
                f"cannot step this {kind} directly: it was passed to boost (alone or inside another optimizer), and "
                "its own step does not clip or unscale gradients or synchronize updates. Call step() on the optimizer "
                "that booster.boost(...) returned"
            )

    @never_compiled
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Clip and unscale the gradients, and update the parameters. With a loss scale, all ranks skip the step if a
        gradient is not finite. Returns the result of the wrapped optimizer's step, or None for a skipped step. Raises
        UsageError for a closure with precision='fp16'. Call it on every rank."""
        meets = self._shares or self.gradients.updates.is_compared  # whether the ranks communicate
        together = together_in("optimizer.step") if meets else calling("optimizer.step")
        with self.gradients.coupling.paused(), together:
            self.copies.follow(adopts=True)
            self._narrow()
            self.complete(w for w in self.weights.values() if w.parameter.requires_grad)  # some may be newly unfrozen
            if closure is None:
                return self._step(*args, **kwargs) if self._ready() else None
            if self.gradients.scaling is not None:
                raise UsageError(
                    "optimizer.step(closure) does not support precision='fp16', which checks the gradients for "
                    "overflow before a step. Call execute_pipeline first, and then optimizer.step() without a closure"
                )

            self.gradients.updates.evaluated = False  # the closure may compute the gradients

            def closed() -> Any:
                self.gradients.coupling.end()  # the closure computes gradients
                self._drop_gradients()
                depth, self._depth = self._depth, 0  # an error in the closure is not an error of the update
                loss = closure()
                self._depth = depth
                self.copies.follow(adopts=True)
                self._ready()
                self._take_gradients()
                return loss

            return self._step(closed, *args, **kwargs)

    def _ready(self) -> bool:
        """Clip and unscale the gradients, and assign them to the updated tensors. Returns False if the step must be
        skipped."""
        self.gradients.complete()
        if self.finite is not None:
            self.finite.before_update()
        ready = self.gradients.ready(self)
        for weight in self.weights.values() if ready else ():
            weight.lend_gradient()
            weight.loaded_as = None
        return ready

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        hooks = self.optim._optimizer_step_pre_hooks
        has_hooks = len(hooks) > 1 or any(hook != STEP_GUARD.check for hook in global_step_pre_hooks.values())
        if has_hooks:
            hooks[self._last_hook.id] = hooks.pop(self._last_hook.id)
            self.gradients.coupling.begin()
        post_hooks: Any = self.optim._optimizer_step_post_hooks
        post_hooks.move_to_end(self._first_hook.id, last=False)
        self.gradients.updates.hooks_begin(self._graded, has_hooks)
        self.is_stepping, self._depth, self._is_updated = True, 0, False
        try:
            result = self.optim.step(*args, **kwargs)
        except Exception as error:
            if self._depth:
                self._note_empty(error)
            raise
        finally:
            self.is_stepping = False
            self.gradients.coupling.end()
            self._drop_gradients()
        if self._is_updated:
            self.copies.follow(adopts=True)  # the user's post-hooks may have written values
        else:
            self.copies.take_values()
        if self.finite is not None:
            self.finite.after_update()
        self.copies.share()
        return result

    def _note_empty(self, error: Exception) -> None:
        """Add a note to an error that an update raised, if groups have no gradients on this rank. In one process, these
        groups have gradients, so the optimizer's class might not support groups without gradients."""
        groups = enumerate(self.optim.param_groups)
        empty = [str(k) for k, group in groups if all(stored_grad(parameter) is None for parameter in group["params"])]
        if empty and not isinstance(error, PipeshardError):
            error.add_note(
                f"{NOTE}{self.grid.named(self.grid.mesh.rank)} has no gradients for group{'s' * (len(empty) > 1)} "
                f"{', '.join(empty)} of {type(self.optim).__name__}: the parameters there are frozen or on other "
                "ranks. If this caused the error, let `step` skip a group in which no parameter has a gradient"
            )

    def _before_update(self, *_: Any) -> None:
        """Run as the last pre-hook: call `refuse_alone`, and apply the writes of the other pre-hooks.

        torch wraps the `step` of each class whose instances it has seen, so the hooks run again if a step calls
        super().step(). Only the outermost step counts as an update.
        """
        self.refuse_alone(type(self.optim).__name__)
        self._depth += 1
        if not self.is_stepping:
            return
        if self._depth == 1:
            self.gradients.coupling.end()
            self.gradients.updates.hooks_end(self._graded)
            self._count += 1
        self.copies.follow(adopts=True)  # a pre-hook may have written values
        self._take_gradients()
        if self._depth == 1 and is_watched(self.optim):
            if self._count == 1:
                self._is_resumed = bool(self.optim.state)
            # The trial has shown that the first steps update parameters independently, even if operators combine them.
            is_tried = self._count <= len(SCALES) and not self._is_resumed
            excuse = partial(UNWATCHED.add, self.optim) if is_tried else None
            self.gradients.coupling.begin_step(type(self.optim).__name__, self._count, excuse)

    def _after_update(self, *_: Any) -> None:
        """Copy the updated values to the parameters, and watch the writes of the user's post-hooks. This is the first
        hook that runs after the inner optimizer's update."""
        self._depth -= 1
        if not self.is_stepping:
            return
        if self._depth == 0:
            self.gradients.coupling.end()
        self.copies.take_values()
        self._is_updated = True
        if self._depth == 0:
            self.gradients.updates.left()
            self.gradients.coupling.begin()

    @property
    def _graded(self) -> list[Tensor]:
        """The tensors whose gradients the next update uses."""
        return [self.weights[self.names[tensor]].graded for tensor in self.parameters]

    def _take_gradients(self) -> None:
        for weight in self.copies.hosted:
            weight.take_gradient()

    def _drop_gradients(self) -> None:
        for weight in self.copies.hosted:
            weight.drop_gradient()

    @never_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this optimizer's parameters, including gradients accumulated under `no_sync`."""
        self.sync.reset({weight.parameter for weight in self.weights.values()})
        self.gradients.updates.cleared(self)
        for hosted in self.copies.hosted:
            hosted.is_updating = True  # the inner optimizer may read its gradients, which are None
        arguments = () if set_to_none else (False,)  # the zero_grad of a user's class may take no argument
        type(self.optim).zero_grad(self.optim, *arguments)
        for weight in self.weights.values():
            weight.zero_grad(set_to_none)

    @together_in("optimizer.clip_grad_by_norm")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Clip the gradients by their norm over the whole model, and return the norm before clipping. With
        `error_if_nonfinite`, raises ConfigurationError if this norm is not finite. Call it on every rank."""
        with self.gradients.coupling.paused():
            self.gradients.complete()
            with self.gradients.changing():
                return self.gradients.clip(max_norm, norm_type, error_if_nonfinite)

    @together_in("optimizer.clip_grad_by_value")
    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clamp each element of this optimizer's gradients to [-clip_value, clip_value]. Call it on every rank."""
        with self.gradients.coupling.paused():
            self.gradients.complete()
            with self.gradients.changing():
                self.gradients.unscale()
                for weight in self.weights.values():
                    if (gradient := local_grad(weight.parameter)) is not None:
                        gradient.clamp_(-clip_value, clip_value)

    def get_grad_norm(self, norm_type: float | str = 2.0, **kwargs: Any) -> float:
        """Return the whole model's gradient norm before clipping, as the last `step` or `clip_grad_by_norm` computed
        it. If neither has computed this norm, compute the norm of the current gradients. In this case, every rank must
        call this method."""
        order = order_of(norm_type)
        if self.gradients.norm is not None and self.gradients.norm_type == order:
            return float(self.gradients.norm)
        with self.gradients.coupling.paused(), together_in("optimizer.get_grad_norm"):
            self.gradients.complete()
            return float(self.gradients.total(order))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss that `model(...)` returned. Raises UsageError if this process holds only a
        part of the model (a stage, or shards), or if the loss does not require a gradient."""
        if self._backward is None:
            raise UsageError(BACKWARD)
        if not loss.requires_grad:
            raise UsageError(
                "the loss does not require a gradient. If model(...) computed this loss, call model(...) with "
                "gradients enabled, and unfreeze the parameters to train. A loss from execute_pipeline needs no "
                f"backward call: {BACKWARD}"
            )
        self._backward(loss)
