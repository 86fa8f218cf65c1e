"""Sharder: turns a whole model into one stage of it, in named steps."""

import torch
from torch import nn

from pipeshard.errors import ConfigurationError
from pipeshard.model.policy import Policy
from pipeshard.model.ties import names_of


class Sharder:
    """Keeps of `model` what `policy` says its stage holds. Each step may be overridden; `shard` calls them in order."""

    def __init__(self, model: nn.Module, policy: Policy, device: torch.device) -> None:
        self.model, self.policy, self.device = model, policy, device

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

    def _release_unheld_layers(self) -> None:
        """A released parameter stays visible under its names, with shape and dtype, but frozen and without storage."""
        parameters = dict(self.model.named_parameters())
        for first, names in self.names.items():
            if first not in self.held:
                ghost = _ghost(parameters[first], self.device)
                for name in names:
                    owner, _, attribute = name.rpartition(".")
                    self.model.get_submodule(owner)._parameters[attribute] = ghost

    def _replace_module(self) -> None:
        self.policy.replace_forward()

    def _materialize_model(self) -> None:
        """Bring what is held to the device."""
        on_meta = [name for name, p in self.model.named_parameters() if p.is_meta]
        if on_meta:
            raise ConfigurationError(
                f"{len(on_meta)} parameters are on meta, {on_meta[0]} the first: build or load the model with its "
                "weights (outside torch.device('meta') and init_empty_weights) before booster.boost"
            )
        for parameter in self.model.parameters():
            if not is_released(parameter):
                parameter.data = parameter.data.to(self.device)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device)

    def _postprocess(self) -> list[dict[int, nn.Parameter]]:
        """Names become tensors last, when nothing replaces them any more."""
        return self.policy.get_shared_params()


def _ghost(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    storage = torch.zeros((), dtype=parameter.dtype, device=device)
    ghost = nn.Parameter(storage.expand(parameter.shape), requires_grad=False)
    ghost.pipeshard_trainable = parameter.requires_grad  # type: ignore[attr-defined]
    return ghost


def is_released(parameter: torch.Tensor) -> bool:
    """Whether this stage does not hold the parameter."""
    return hasattr(parameter, "pipeshard_trainable")
