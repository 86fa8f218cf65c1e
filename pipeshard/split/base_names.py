"""Base names: the names of a model's tensors in its base architecture, without peft's adapters."""

from collections.abc import Iterator

from torch import nn

from pipeshard.hf import is_of_peft, without_adapters

COPIES_WRAPPER = "ModulesToSaveWrapper"  # peft's class for a module that adapters train in full, with its copies


def base_names(model: nn.Module, active: bool = False) -> dict[str, str]:
    """Map the full name of each tensor to its name in the base architecture. Trained copies (`modules_to_save`) have
    the names of their originals. Adapters are omitted. With `active`, modules that a forward does not use are also
    omitted: the copies of inactive adapters, and originals that the copies of active adapters replace. In a model
    without adapters, the two names of a tensor are equal."""
    prefix, base = without_adapters(model)
    return dict(_named(base, prefix, "", active))


def _named(module: nn.Module, full: str, plain: str, active: bool) -> Iterator[tuple[str, str]]:
    if is_of_peft(module, "BaseTunerLayer"):
        yield from _named(module.get_submodule("base_layer"), f"{full}base_layer.", plain, active)
        return
    if is_of_peft(module, "AuxiliaryTrainingWrapper"):
        copies = module.modules_to_save if is_of_peft(module, COPIES_WRAPPER) else {}
        used = [adapter for adapter in copies if adapter in module.active_adapters] if active else [*copies]
        if not (active and used):
            original = next(name for name, child in module.named_modules() if child is module.original_module)
            yield from _named(module.original_module, f"{full}{original}.", plain, active)
        for adapter in used:
            yield from _named(copies[adapter], f"{full}modules_to_save.{adapter}.", plain, active)
        return
    for name in (*module._parameters, *module._buffers):
        yield full + name, plain + name
    for name, child in module.named_children():
        yield from _named(child, f"{full}{name}.", f"{plain}{name}.", active)
