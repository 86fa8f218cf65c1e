"""Sharder: turns a whole model into one stage of it, in named steps."""

import torch
from torch import nn

from pipeshard.model.ghost import Ghost, guard, inside_pipeshard
from pipeshard.model.materialize import InitWeights, allocate, initialize
from pipeshard.model.policy import Policy
from pipeshard.model.skeleton import blank_buffers, build, skeletons
from pipeshard.model.ties import names_of, put_parameter


class Sharder:
    """Keeps of `model` what `policy` says its stage holds. Each step may be overridden; `shard` calls them in order."""

    def __init__(
        self, model: nn.Module, policy: Policy, device: torch.device, init_weights: InitWeights = True, seed: int = 0
    ) -> None:
        self.model, self.policy, self.device = model, policy, device
        self.init_weights, self.seed = init_weights, seed

    @inside_pipeshard()
    def shard(self) -> list[dict[int, nn.Parameter]]:
        """Shard the model in place and return the shared parameters: one {stage: parameter} per tie across stages."""
        self._preprocess()
        self._release_unheld_layers()
        self._replace_module()
        self._materialize_model()
        return self._postprocess()

    def _preprocess(self) -> None:
        """Ties are recorded by name now: of released parameters nothing would tell that they were one."""
        self.names = names_of(self.model)
        self.held = self.policy.held[self.policy.stage]
        self.on_meta = {name for name, parameter in self.model.named_parameters() if parameter.is_meta}

    def _release_unheld_layers(self) -> None:
        """A released parameter stays visible under its names, as a Ghost."""
        parameters = dict(self.model.named_parameters())
        for first, names in self.names.items():
            if first not in self.held:
                ghost = Ghost.of(parameters[first], self.device, self._label(first))
                for name in names:
                    put_parameter(self.model, name, ghost)

    def _replace_module(self) -> None:
        self.policy.replace_forward()

    def _materialize_model(self) -> None:
        """Bring what is held to the device; what is on meta gets memory there, and the values of `init_weights`."""
        held = sorted(self.on_meta & self.held)
        self._build_skeletons()
        fresh = [name for name in held if self.model.get_parameter(name).is_meta]
        buffers = allocate(self.model, fresh, self.device)
        drawn = held if callable(self.init_weights) else fresh
        initialize(self.model, drawn, buffers, self.init_weights, self.seed)
        for parameter in self.model.parameters():
            if not is_released(parameter):
                parameter.data = parameter.data.to(self.device)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device)

    def _build_skeletons(self) -> None:
        """Those in held units become what their constructors make of them; the others stay, with buffers of zeros."""
        inside = {module for unit in self.policy.get_held_layers() for module in unit.modules()}
        for module in skeletons(self.model):
            if module in inside:
                build(module, self.seed)
            else:
                blank_buffers(module)

    def _postprocess(self) -> list[dict[int, nn.Parameter]]:
        """Names become tensors last, when nothing replaces them any more."""
        guard(self.model)
        return self.policy.get_shared_params()

    def _label(self, name: str) -> str:
        policy = self.policy
        here, there = f"which holds stage {policy.stage} of {policy.num_stages}", f"stage {policy.owner(name)} has them"
        return f"{name} has no values on this rank, {here}; {there}"


def storageless(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape that takes the memory of one number."""
    return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether this stage does not hold the parameter."""
    return isinstance(parameter, Ghost)
