"""Decide: decides whether boost proves a model, and logs the result of the proof."""

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.config import PipelineConfig
from pipeshard.distributed.collectives import gather, gather_objects
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.progress import NOW
from pipeshard.engine.division import traced
from pipeshard.engine.ragged import Ragged
from pipeshard.errors import BatchError, ConfigurationError, PipeshardError, VerificationError
from pipeshard.graph.places import code_of
from pipeshard.graph.preserve import preserving
from pipeshard.graph.units import find_units
from pipeshard.hf import (
    KNOWN_PACKAGES,
    has_flash_attention,
    has_known_loss,
    is_of_packages,
    is_of_peft,
    padding_token,
    registered_functions,
    without_adapters,
)
from pipeshard.planner.memory import format_bytes
from pipeshard.private import disable_current_modes, has_global_backward_hooks
from pipeshard.schedule.given import name_of
from pipeshard.slices.cut import shortened, with_padding
from pipeshard.slices.refusals import is_padded
from pipeshard.split.packed import Packed
from pipeshard.verify.passed import passed
from pipeshard.verify.proof import DIFFERENT, EXACT, PARTLY, UNPROVEN, Large, Proof, prove
from pipeshard.verify.samples import with_drawn_ids, with_mask
from pipeshard.verify.smaller import HOOK_TABLES
from pipeshard.verify.whole import is_batch_norm

logger = logging.getLogger("pipeshard")
MOST_POSITIONS = 128  # maximum length of samples that are proven in slices, to limit the time
SECONDS = 5.0  # time limit of verify="auto"
SECONDS_OF_LARGE = 60.0  # time limit if a smaller copy is proven instead of a large model
LARGEST_PROOF = 4 * 2**30  # bytes that a proof of a smaller copy may allocate
SHARE = 0.1  # share of the free memory that verify="auto" may allocate
COPIES = 6, 4  # copies of the parameters (with gradients and Adam's state): per replica, plus a constant
FEW_COPIES = 5  # copies of the parameters: two models with gradients, and about one copy for the activations
# The classes of adapters, and the beginnings of the names of LoRA variants, in which no sample depends on others.
KNOWN_ADAPTERS = "LoraLayer", "IA3Layer", "TrainableTokensLayer"
KNOWN_VARIANTS = "Dora", "ALora", "BdLora", "MiCA"
ACROSS = (
    "Every value that crosses a cut must be an argument or a result of a unit: change the forward at that point, or "
    "cut elsewhere (partition=[...]). "
)
TELL_PERIOD = 1.0  # seconds between two signs of progress to the waiting ranks


class Proven(BaseException):
    """Raised by booster.boost to return the proof to the CLI. `what` describes the model, the stages and the
    schedule."""

    def __init__(self, proof: Proof, what: str) -> None:
        super().__init__(f"{what}: {proof.kind}")
        self.proof, self.what = proof, what


@dataclass
class Alone:
    """The state inside `alone()`. `pp_size`, if not None, overrides the plugin's number of stages."""

    pp_size: int | None = None


_now: Alone | None = None


def standing_alone() -> Alone | None:
    """The Alone state if this process acts for all ranks (inside `alone()`), otherwise None."""
    return _now


@contextlib.contextmanager
def alone(pp_size: int | None = None) -> Iterator[None]:
    """Context manager in which a plugin in a world of one process builds all stages, and boost raises Proven."""
    global _now
    before, _now = _now, Alone(pp_size)
    try:
        yield
    finally:
        _now = before


def prove_at_boost(
    config: PipelineConfig,
    grid: Grid,
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    sample: Batch,
) -> tuple[str, str]:
    """Prove a model on the first rank if `config.verify` requests a proof, or inside `alone()`. Call this function on
    every rank before sharding.

    Returns two texts: the first is for padded samples with an attention_mask, the second for padded samples without
    one. Each text says how slices of the samples differ from whole samples, or how the slices fail. The text is "" if
    the slices neither differ nor fail.

    Raises, on all ranks:

    - VerificationError if the split model differs, or if samples depend on each other.
    - BatchError if a microbatch does not run by itself.
    - ConfigurationError if slices could not be compared, or if the model has batch norms that normalize slices.
    - Proven inside `alone()`.
    """
    norms = _batch_norms(model, trains=optimizer is not None)
    if config.has_slices and (of_slices := _reached(norms, config, grid, model, optimizer, criterion, sample)):
        raise ConfigurationError(
            f"num_slices: {type(model).__name__} has {_named(of_slices)}. Batch norm would normalize each slice of a "
            "sequence with the slice's own mean and variance. Use num_slices=1, or another norm, such as layer norm"
        )
    if norms and grid.first and config.num_microbatches != 1 and config.has_exact_loss:
        _warn_of_batch_norms(model, norms)
    alone, stages = standing_alone() is not None, config.num_stages
    auto = config.verify == "auto" and not alone
    is_sliced, is_ragged = config.has_slices, config.is_ragged
    is_cut = is_sliced or is_ragged  # within samples
    is_split = stages > 1 or is_cut or _has_microbatches(config, sample)
    if not alone and not config.verify:
        return "", ""
    skips = not is_split or (auto and not is_cut and is_known(model, criterion, optimizer))
    # The first rank decides: a hook may exist on only one rank.
    if not alone and int(gather(torch.tensor(int(skips)), grid.world)[0]):
        return "", ""

    of_world = replace(config, dp_size=grid.dp_size)
    drawn = with_drawn_ids(model, sample)
    # Called on all ranks, so that every rank raises the same error.
    if is_sliced:
        tried = [shortened(drawn, MOST_POSITIONS, has_flash_attention(model))]
    elif is_ragged:
        tried = Ragged(model).padded(drawn)
    else:
        tried = [drawn] if drawn is sample else [drawn, sample]  # a model may accept only some tokens

    def of_first_that_runs(seconds: float | None, note: Callable[[], None], large: Large | None) -> Proof:
        """Prove on the first batch of `tried` on which the model runs. If the model runs on none of them, return the
        Proof of the first batch."""
        first, remaining = Proof(UNPROVEN), seconds
        for batch in tried:
            made = prove(of_world, grid.device, model, optimizer, criterion, batch, remaining, note, large)
            if made.kind != UNPROVEN:
                return made
            first = made if batch is tried[0] else first
            remaining = None if remaining is None else remaining - made.seconds
            if made.dependent or (remaining is not None and remaining <= 0):
                break
        return first

    def work(note: Callable[[], None]) -> Proof:
        if not is_split:
            return Proof(UNPROVEN, "with one stage and one microbatch there is nothing to compare: pass --pp 2 or more")
        copies = _copies(config.pp_size, min(2, grid.dp_size))
        free = (SHARE if auto else 1.0) * _free(grid.device)
        on_meta = auto and any(parameter.is_meta for parameter in model.parameters())
        why = "its weights are on the meta device" if on_meta else _too_large(model, free, copies)
        fits = not on_meta and not _too_large(model, free, FEW_COPIES)
        large = Large(why, min(free, LARGEST_PROOF) / copies, fits) if why else None
        seconds = (SECONDS_OF_LARGE if large or is_cut else SECONDS) if auto else None

        made = of_first_that_runs(seconds, note, large)
        if made.kind not in (EXACT, PARTLY) or not is_sliced:
            return made
        token = padding_token(model)

        def of_padding(batch: Batch) -> str:
            padded = with_padding(batch, token)
            proof = prove(of_world, grid.device, model, optimizer, criterion, padded, seconds, note, large)
            return _of_padding(proof, is_padded(model, tried[0]))

        masked = with_mask(model, tried[0], config.batch_dims or {})
        why = of_padding(masked)
        if masked is tried[0]:
            return replace(made, padding=(why, why))
        return replace(made, padding=(why, "" if token is None else of_padding(tried[0])))

    proof = _on_first(grid, work)
    name = type(model).__name__ + (f" (a copy with {proof.smaller})" if proof.smaller else "")
    split = "split into stages" if stages > 1 else "in slices" if is_sliced else "split into microbatches"
    if alone:
        raise Proven(proof, f"{name} in {stages} stages, {name_of(config.schedule)}")
    if proof.dependent:
        raise BatchError(proof.reason) from proof.cause
    if proof.coupled:
        raise VerificationError(
            f"the results of {name} in microbatches do not match those of the whole batch, so training is "
            f"aborted: {proof.reason}. Either samples depend on each other (a statistic of the batch, a comparison of "
            "its samples, a memory bank), or the dimension that is split is not the batch dimension. "
            f"Pass {_remedies(sample)}"
        )
    if is_sliced and proof.kind in (DIFFERENT, UNPROVEN):
        _refuse_slices(config, name, proof)
    if is_ragged and proof.kind == DIFFERENT:
        raise VerificationError(
            f"microbatch_tokens={config.microbatch_tokens}: {name} in microbatches with less padding does not match "
            f"the unsplit model: {proof.reason}. Probably, the loss counts padding (set the labels of padding to -100) "
            "or the model reads padding despite attention_mask. Use num_microbatches instead. "
            "PipelinePlugin(verify=False) skips this check"
        )
    if proof.kind == DIFFERENT:
        raise VerificationError(
            f"{name} {split} does not match the unsplit model, so training is aborted: {proof.reason}. "
            + (ACROSS if stages > 1 and not proof.in_update else "")
            + "PipelinePlugin(verify=False) skips this check"
        )
    if grid.first:
        _say(proof, name, split, is_asked=config.verify is True)
    return proof.padding


def _has_microbatches(config: PipelineConfig, batch: Batch) -> bool:
    """Whether the loss of this batch combines several microbatches."""
    size = config.microbatch_size
    count = config.num_microbatches if size is None else -(-batch.rows // size)
    return count != 1 and config.has_exact_loss


def _refuse_slices(config: PipelineConfig, name: str, proof: Proof) -> None:
    """Raise a VerificationError or ConfigurationError that names slices, not stages, as the likely cause."""
    if proof.kind == UNPROVEN:
        raise ConfigurationError(
            f"num_slices={config.num_slices!r}: could not verify that {name} computes the same on slices as on "
            f"whole sequences: {proof.reason}. Use num_slices=1. PipelinePlugin(verify=False) skips this check"
        )
    raise VerificationError(
        f"num_slices={config.num_slices!r}: {name} in slices does not match the model on whole sequences, so training "
        f"is aborted: {proof.reason}. Probably, a position depends on later positions, or the model's forward does not "
        "continue exactly where its cache ends. Use num_slices=1. PipelinePlugin(verify=False) skips this check"
    )


def _of_padding(proof: Proof, other_runs: bool) -> str:
    """The end of the sentence "slices with padding ...", or "" if the proof of padded samples does not show that slices
    cause a difference or an error. `other_runs` is whether slices run with the sample's own padding."""
    if proof.kind == DIFFERENT:
        return f"do not train the same as whole sequences: {proof.reason}"
    if proof.one_sided and not other_runs:
        return f"could not be compared with whole sequences (verify=False skips this check): {proof.reason}"
    return ""


def _batch_norms(model: nn.Module, trains: bool) -> list[str]:
    """The names of the batch norms that normalize with the batch's statistics. With `trains`, checks the model in
    training mode, even if the model is in evaluation mode now."""
    norms = [name for name, module in model.named_modules() if is_batch_norm(module)]
    with _training(model) if norms and trains else contextlib.nullcontext():
        return [name for name in norms if model.get_submodule(name).training]


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model is in training mode. On exit, restores a model that was in evaluation mode."""
    with contextlib.nullcontext() if model.training else preserving(model):
        if not model.training:
            model.train()
        yield


def _reached(
    norms: Sequence[str],
    config: PipelineConfig,
    grid: Grid,
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    sample: Batch,
) -> Sequence[str]:
    """Return `norms` without the norms in units that the sample does not run, such as an image tower (slices do not
    support images). Return all norms if the model cannot be traced here."""
    if not norms:
        return norms
    try:
        *_, criterion = config.settled(model, criterion)
        with _training(model) if optimizer is not None else contextlib.nullcontext():
            _, flow = traced(config, model, sample, criterion, (), grid.device)
    except PipeshardError:
        return norms
    idle = {*find_units(model)} - {call.unit for call in flow.calls}
    return [name for name in norms if not any(f"{name}.".startswith(f"{unit}.") for unit in idle)]


def _named(norms: Sequence[str]) -> str:
    return f"a batch norm ({norms[0]})" if len(norms) == 1 else f"{len(norms)} batch norms ({norms[0]}, ...)"


def _warn_of_batch_norms(model: nn.Module, norms: Sequence[str]) -> None:
    logger.warning(
        "%s has %s, which %s each microbatch with the microbatch's own mean and variance, as in gradient "
        "accumulation: loss and gradients do not exactly match those of the whole batch. If they must match, pass "
        "num_microbatches=1",
        type(model).__name__,
        _named(norms),
        "normalizes" if len(norms) == 1 else "normalize",
    )


def is_known(model: nn.Module, criterion: Criterion | None, optimizer: Optimizer | None = None) -> bool:
    """Whether docs/parity.md lists the class of the model as exact, and model, loss and optimizer are unmodified.

    The loss is unmodified if `criterion` is None and the model computes one of transformers' own losses. The
    optimizer is unmodified if it is from KNOWN_PACKAGES. All modules of the model must be from KNOWN_PACKAGES or
    quantized layers, without replaced methods or hooks. The functions in the modules' files, and the registered
    functions that the modules call, must also be from KNOWN_PACKAGES. Adapters must be of KNOWN_ADAPTERS, and
    LoRA variants of KNOWN_VARIANTS (Lily and VeLoRA mix samples).
    """
    if criterion is not None or not has_known_loss(model) or has_global_backward_hooks():
        return False
    if type(without_adapters(model)[1]).__name__ not in passed():
        return False
    if not all(map(_is_known_adapter, model.modules())):
        return False
    if optimizer is not None and type(optimizer).__module__.split(".")[0] not in KNOWN_PACKAGES:
        return False
    classes = {kind for module in model.modules() if not isinstance(module, Packed) for kind in type(module).__mro__}
    methods = [value for kind in classes for value in vars(kind).values() if inspect.isfunction(value)]
    configs = [getattr(module, "config", None) for module in model.modules()]
    registered = [function for config in configs for function in registered_functions(config).values()]
    of_files = [function for kind in classes for _, function in code_of(kind)]
    if not all(map(is_of_packages, [*methods, *of_files, *registered])):
        return False
    return all(
        (isinstance(module, Packed) or type(module).__module__.split(".")[0] in KNOWN_PACKAGES)
        and "forward" not in vars(module)
        and not any(getattr(module, hooks) for hooks in HOOK_TABLES)
        for module in model.modules()
    )


def _is_known_adapter(module: Any) -> bool:
    """Whether this module does not adapt a layer, or is one of KNOWN_ADAPTERS with KNOWN_VARIANTS only."""
    if not any(is_of_peft(module, kind) for kind in KNOWN_ADAPTERS):
        return not is_of_peft(module, "BaseTunerLayer")
    variants = getattr(module, "lora_variant", {}).values()  # older versions of peft have no variants
    return all(type(variant).__name__.startswith(KNOWN_VARIANTS) for variant in variants)


def _remedies(sample: Batch) -> str:
    """Advice for samples that depend on each other."""
    dims = _other_dims(sample)
    other = f", or batch_dims={dims} if dimension 1 is the batch dimension (time-first data)" if dims else ""
    return (
        "num_microbatches=1 to train on whole batches (in a Trainer, omit num_microbatches), or (not in a Trainer) "
        f"loss_reduction='microbatch' to train on each microbatch separately, as gradient accumulation does{other}"
    )


def _other_dims(sample: Batch) -> dict[str, int]:
    """Return a `batch_dims` with dimension 1 for all leaves that are split along dimension 0. The result is empty
    unless dimension 1 has the same size, above 1, in all these leaves."""
    leaves = zip(sample.paths, sample.leaves, sample.row_dims, strict=True)
    cut = {path: leaf for path, leaf, dim in leaves if dim == 0 and isinstance(leaf, Tensor)}
    sizes = {leaf.shape[1] if leaf.ndim > 1 else 0 for leaf in cut.values()}
    return dict.fromkeys(cut, 1) if len(sizes) == 1 and min(sizes) > 1 else {}


def _say(proof: Proof, name: str, split: str, is_asked: bool) -> None:
    """Log the result of a proof. `split` says how the model is split, such as "split into stages". `is_asked` is
    whether verify=True."""
    for moving in proof.moving:
        logger.warning("%s in microbatches does not exactly match the model on the whole batch: %s", name, moving)
    if proof.kind == EXACT:
        logger.info("%s %s was proven exact in %.1f s", name, split, proof.seconds)
        return
    if proof.kind == PARTLY:
        logger.warning(
            "%s %s was verified in %.1f s, but not in full. Not compared: %s",
            name,
            split,
            proof.seconds,
            "; ".join(proof.but),
        )
        return
    how = "" if is_asked else "To check it, run `pipeshard verify SCRIPT` or pass PipelinePlugin(verify=True)"
    logger.log(
        logging.INFO if proof.refused and not is_asked else logging.WARNING,
        "could not verify that %s %s matches the unsplit model: %s. %sverify=False silences this message",
        name,
        split,
        proof.reason,
        f"{proof.remedy or how}. " if proof.remedy or how else "",
    )


def _copies(pp_size: int, replicas: int) -> int:
    """The largest number of copies of the parameters during a proof. A proof reaches this number either at the start of
    a step of the split model (each rank then has a full model, and the unsplit model has run a step), or after this
    step."""
    of_replica, beside = COPIES
    return max(of_replica * replicas + beside, pp_size * replicas + 3)


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _too_large(model: nn.Module, most: float, copies: int) -> str:
    """The reason why a model is too large for a proof, or "" if the model fits. A model fits if `copies` times the size
    of its parameters is at most `most` bytes."""
    needed = copies * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    return f"the check needs {format_bytes(needed)}, but may use {format_bytes(most)}" if needed > most else ""


def _on_first(grid: Grid, work: Callable[[Callable[[], None]], Proof]) -> Proof:
    """Run `work(note)` on the first rank and return its Proof on all ranks. The waiting ranks regularly receive a sign
    of progress."""
    if grid.size == 1:
        return work(lambda: None)
    if not grid.first:
        while not int(gather(torch.tensor(0), grid.world)[0]):
            pass
        nothing: tuple[Any, ...] = ()
        return Proof(*gather_objects(nothing, grid.world)[0])
    told = time.monotonic()

    def note() -> None:
        nonlocal told
        if time.monotonic() - told > TELL_PERIOD:
            NOW.start("the proof")
            with disable_current_modes():  # without the proof's modes
                gather(torch.tensor(0), grid.world)
            told = time.monotonic()

    proof = work(note)
    gather(torch.tensor(1), grid.world)
    gather_objects(astuple(replace(proof, cause=None)), grid.world)  # the cause may not be picklable
    return proof
