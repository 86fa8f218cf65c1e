"""Load: each stage's tensors, read from a Hugging Face checkpoint and converted to the model's names and layout."""

import copy
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeshard.checkpoint.files import existing, together
from pipeshard.checkpoint.safetensors_files import StoredRows, StoredTensors
from pipeshard.checkpoint.state_dict import given_entries, own_entries
from pipeshard.distributed.collectives import gather_objects, laid_out
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.parameters import HeldParameters
from pipeshard.errors import CheckpointError, explained, listed, summary
from pipeshard.hf import ADAPTER_CONFIG, OLD_BUFFERS, has_adapters, without_adapters
from pipeshard.private import EXTRA_STATE
from pipeshard.split.adapters import begin_with_weights, trained_copies
from pipeshard.split.base_names import base_names
from pipeshard.split.materialize import trim
from pipeshard.split.packed import packed_layers
from pipeshard.split.ties import first_names

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # with transformers 4, models have the layout of their checkpoints
    conversion_mapping = core_model_loading = None

logger = logging.getLogger("pipeshard")
SHOWN = 8  # the maximum number of names in a warning
COMPARED_ELEMENTS = 2**22  # the number of elements that are compared at a time


@dataclass
class Piece:
    """Checkpoint tensors that are converted together into one or several model tensors, such as experts to stack or a
    fused matrix to split.

    `sources` lists the keys of the checkpoint tensors. Each key is paired with the transformation's pattern that
    matched the key or, if no pattern matched, with the key itself.
    """

    target: str
    transform: Any = None
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: nn.Module, read: Callable[[str], Any]) -> dict[str, Any]:
        """Convert the checkpoint tensors, and return the model tensors by name. `read(key)` returns a checkpoint
        tensor."""
        if self.transform is None:
            return {self.target: read(self.sources[0][0])}
        transform = copy.deepcopy(self.transform)
        for key, pattern in self.sources:
            transform.add_tensor(self.target, key, pattern, lambda key=key: read(key))
        made = transform.convert(self.target, model=model, config=getattr(model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Conversion:
    """Maps a checkpoint's keys to the names in `model`. `pieces` contains each Piece by the name of its target.
    `unexpected` lists the keys that match no name, except ignored keys.

    `transforms` lists the transformations in use. `revert` applies their inverses, as `save_pretrained` does.
    """

    def __init__(self, model: nn.Module, keys: Iterable[str], names: Iterable[str]) -> None:
        self.pieces: dict[str, Piece] = {}
        self.unexpected: list[str] = []
        transforms: list[Any] = []  # none with transformers 4
        if conversion_mapping is not None and isinstance(model, PreTrainedModel):
            transforms += conversion_mapping.get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known = dict.fromkeys(names, True)
        prefix = model.base_model_prefix or None if isinstance(model, PreTrainedModel) else None
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
        buffers = [name for name, _ in model.named_buffers()]
        ignored += [pattern for pattern in OLD_BUFFERS if any(re.search(pattern, name) for name in buffers)]
        older = _older(model)
        order = core_model_loading.dot_natural_key if transforms else None  # the order on which transformations depend
        for key in sorted(keys, key=order):
            target, pattern = _renamed(_replaced(key, older), renamings, converters, prefix, known)
            if target not in known and key in known:
                target, pattern = _renamed(key, [], [], prefix, known)
            if target not in known:
                if not any(re.search(expression, key) for expression in ignored):
                    self.unexpected.append(key)
                continue
            transform = by_pattern[pattern] if pattern is not None else None
            piece = self.pieces.setdefault(target, Piece(target, transform))
            piece.sources.append((key, pattern or key))
        self.transforms = [transform for transform in transforms if transform.was_used()]


def revert(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a stage's tensors to the names and layout that `save_pretrained` writes. Tensors that `save_pretrained`
    omits are also omitted."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    if not isinstance(model, PreTrainedModel):  # e.g. a PeftModel, whose base model's renamings do not apply
        return kept
    if core_model_loading is None:
        names = {
            re.sub(r"\(.*\)", "", new.lstrip("^")): re.sub(r"\(.*\)", "", old.lstrip("^")) for old, new in _older(model)
        }
        return {_replaced(name, names.items()): tensor for name, tensor in kept.items()}
    return dict(core_model_loading.revert_weight_conversion(model, kept))


def _older(model: nn.Module) -> Iterable[tuple[str, str]]:
    """The key renamings (pattern, replacement) that some classes in transformers 4 define. Empty with transformers
    5."""
    mapping: dict[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    return mapping.items() if core_model_loading is None else ()


def _replaced(key: str, renamings: Iterable[tuple[str, str]]) -> str:
    """Apply the first renaming whose pattern matches the key. Without a match, return the key unchanged."""
    for pattern, name in renamings:
        renamed, count = re.subn(pattern, name, key)
        if count:
            return renamed
    return key


def _renamed(
    key: str, renamings: list[Any], converters: list[Any], prefix: str | None, known: Mapping[str, bool]
) -> tuple[str, str | None]:
    if core_model_loading is not None:
        meta: Any = known
        return core_model_loading.rename_source_key(key, renamings, converters, prefix, meta)
    if key not in known and prefix:  # a model with a head loads its base model's checkpoint, or vice versa
        shorter = key.removeprefix(f"{prefix}.")
        return next((name for name in (shorter, f"{prefix}.{key}") if name in known), key), None
    return key, None


def load_weights(
    boosted: PipelineModel, path: Path, strict: bool, draw_missing: bool = False, complete: bool = False
) -> int:
    """Load this stage's tensors from a folder, an index or a file. Returns the number of bytes read.

    Every rank checks the names and shapes of the full model before it changes any tensor, so all ranks raise the same
    CheckpointError. A shape mismatch always raises this error. With `strict`, missing or unexpected names also raise
    it. Without `strict`, they cause a warning, unless the model has none of the checkpoint's names, which raises the
    error. With `draw_missing`, `strict` has no effect, a model with adapters loads a checkpoint of its base model, and
    missing weights are initialized as with the plugin's `init_weights`, with a warning. With `complete`, tensors that
    the model's state_dict omits may not be missing either.
    """
    pipeline, model = boosted.pipeline, boosted.unwrap()
    with together(pipeline.grid.world):
        if draw_missing and not has_adapters(model):
            refuse_ignored_adapters(model, path)
        source = StoredTensors(existing(path), without_adapters(model)[1] if draw_missing else model)
        updated = pipeline.gradients.updated
        plan = _Plan(model, source, pipeline.holdings, updated, of_base=draw_missing, blank=pipeline.blank)
        if plan.required and not complete:
            plan.allow_omitted()
        plan.refuse(lists=strict and not draw_missing)
        if not strict and not draw_missing:
            plan.check_partial(warns=pipeline.grid.first)
        plan.refuse_untied()
    with together(pipeline.grid.world):
        plan.fill(show=pipeline.grid.first)
    plan.finish(pipeline.grid.world)
    pipeline.blank -= {full for name in plan.given for full in plan.targets.get(name, ())}
    if draw_missing:
        _draw(boosted, plan)
        with together(pipeline.grid.world):
            begin_with_weights(model, lambda name, value: pipeline.holdings.weights[name].set(value))
    if plan.conversion.transforms:
        plan.model._weight_conversions = plan.conversion.transforms  # type: ignore[assignment]
    return source.bytes_read


def refuse_ignored_adapters(model: nn.Module, folder: Path) -> None:
    """Raise CheckpointError if the folder of `model`, which has no adapters, contains adapters."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} contains adapters ({ADAPTER_CONFIG}), which transformers' from_pretrained applies, but this "
            f"{type(model).__name__} has no adapters: call booster.enable_lora(model, pretrained_dir={str(folder)!r}) "
            "before boost, or remove the adapters from the folder"
        )


class _Plan:
    """The mapping from a checkpoint to the full model, computed from names and shapes alone. With `of_base`, the
    tensors of a model with adapters have the names of the base model. `blank` contains the full names of parameters
    without values.

    Attributes:
        first: for each name, the first of the names that are tied to it.
        targets: for each first name, the full names of the tensors to fill: the original tensor and, if adapters copy
            its module, the copies without values. (A copy with values was trained.)
        scales: for each weight that is quantized in the checkpoint, the keys of its scales, by the weight's full name.
        doubled: for each weight that the architecture ties, but that the checkpoint stores under two names, the
            weight's first name and the two pieces.
        updated: the weights that optimizers update, or all weights if there are no optimizers.
        is_initial: whether the checkpoint contains the weights with which training begins. The optimizer's
            checkpoint may replace these weights.
        kept: the weights whose fp32 master weights were kept, because the master weights round to the checkpoint's
            values.
        is_other: whether any fp32 master weight in `updated` was replaced, because it does not round to the
            checkpoint's values.
        missing: the first names of the tensors that the checkpoint lacks.
        optional: the names in `missing` that match a pattern in the class's `_keys_to_ignore_on_load_missing`.
        required: the names in `missing` that are not optional, or that have no values yet.
        extra: the tensors that modules return from `get_extra_state`, by full name.
    """

    def __init__(
        self,
        model: nn.Module,
        source: StoredTensors,
        holdings: HeldParameters,
        updated: Mapping[str, MasterWeight],
        of_base: bool,
        blank: set[str],
    ) -> None:
        self.whole, self.source, self.holdings, self.blank = model, source, holdings, blank
        self.is_initial = of_base
        self.model = without_adapters(model)[1] if of_base else model
        state = own_entries(model)  # as in `owned`; ghosts also have shapes
        names = dict(zip(state, state)) if self.model is model else base_names(model)
        self.packed = dict(packed_layers(model))
        self.extra = {
            full: value
            for full, value in state.items()
            if full.rpartition(".")[2] == EXTRA_STATE and isinstance(value, Tensor)
        }
        self.shapes = {
            name: self.packed[full].whole_shape if full in self.packed else tuple(state[full].shape)
            for full, name in names.items()
            if isinstance(state.get(full), Tensor)
        }
        self.first, self.targets = dict[str, str](), dict[str, dict[str, None]]()
        without_values = blank | _buffers_of_copies(model, blank)
        for full, first in ({full: full for full in names} | first_names(model)).items():
            if full in names:
                root = self.first.setdefault(names[full], names[first])  # a copy has the same root as its original
                targets = self.targets.setdefault(root, {})
                if not targets or first in without_values:
                    targets[first] = None
        self.conversion = Conversion(self.model, source.shapes, self.shapes)
        self.problems: list[str] = []
        self.updated = updated or holdings.weights
        self.kept: list[MasterWeight] = []
        self.is_other = False
        self.scales = dict[str, dict[str, str]]()
        layers = {names[full]: full for full in self.packed if full in names}
        self.makes: dict[str, Piece] = {}  # by first name, the piece that yields the tensor
        self.doubled: list[tuple[str, Piece, Piece]] = []
        is_tied = ties_name(self.model)
        ours = {name for name, _ in model.named_parameters()} if of_base and blank else set[str]()
        # Parameters that the script put into a model without values, such as a new head.
        kept = {root for root, targets in self.targets.items() if targets.keys() <= ours and not targets.keys() & blank}
        for piece in self.conversion.pieces.values():
            for name, shape in self._shapes_made(piece).items():
                if name not in self.shapes:
                    self.conversion.unexpected.append(name)
                    continue
                if self.first[name] in kept:
                    continue
                expected = shape if name in self.extra else self.shapes[name]
                if keys := source.scales.keys() & {key for key, _ in piece.sources}:
                    layer = layers.get(name)
                    if layer is None or piece.transform is not None:
                        why = (
                            "but the weight in the model is not" if layer is None else f"so {name} cannot be converted"
                        )
                        self.problems.append(f"{min(keys)} is quantized, {why}")
                        continue
                    self.scales[layer], expected = source.scales[min(keys)], self.packed[layer].saved_shape
                if shape != expected:
                    self.problems.append(f"{name} has shape {shape}, but {expected} in the model")
                first = self.first[name]
                other = self.makes.get(first)
                if other and (is_tied(name) or is_tied(other.target)):
                    self.doubled.append((first, other, piece))
                if first not in self.makes or name == first:  # of several tied names, the first is used
                    self.makes[first] = piece
        self.given = set(self.makes)
        self.missing = [
            name for name in dict.fromkeys(self.first[name] for name in self.shapes) if name not in self.given | kept
        ]
        patterns = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or []
        self.optional = {name for name in self.missing if any(re.search(pattern, name) for pattern in patterns)}
        packed = {name for name in self.missing if self.packed.keys() & self.targets[name].keys()}
        if not of_base and len(packed) == len(self.packed):  # saved states omit quantized weights; the model has them
            self.missing = [name for name in self.missing if name not in packed]
        elif packed:
            self.problems.append(f"{min(packed)} is missing, and a quantized weight cannot be initialized")
        self.required = [
            name for name in self.missing if name not in self.optional or blank & self.targets[name].keys()
        ]

    def allow_omitted(self) -> None:
        """Do not require the tensors that have values, and that the model's state_dict omits: the unsplit model saves
        no such tensors."""
        given = given_entries(self.whole)
        self.required = [
            name for name in self.required if {*self.targets[name]} & {*given, *self.blank} or not self.targets[name]
        ]

    def _shapes_made(self, piece: Piece) -> dict[str, tuple[int, ...]]:
        try:
            made = piece.convert(self.model, lambda key: torch.empty(self.source.shapes[key], device="meta"))
        except Exception as error:  # transformers may raise any error for unexpected shapes
            sources = ", ".join(key for key, _ in piece.sources[:3])
            self.problems.append(f"{piece.target} cannot be converted from {sources} ({summary(error)})")
            return {piece.target: self.shapes[piece.target]}
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def refuse(self, lists: bool) -> None:
        """Raise CheckpointError for tensors that do not match and, with `lists`, for missing or unexpected names."""
        problems = list(self.problems)
        if lists:
            problems += [f"{name} is missing" for name in self.required]
            problems += [f"{name} is unexpected" for name in self.conversion.unexpected]
        if problems:
            raise CheckpointError(
                f"{self.source.path} does not match {type(self.model).__name__}: {listed(problems)}. Pass this model's "
                f"checkpoint{' (load_model(..., strict=False) ignores missing and unexpected names)' if lists else ''}"
            )

    def check_partial(self, warns: bool) -> None:
        """Raise CheckpointError if the checkpoint contains no tensor of the model. With `warns`, warn of missing and
        unexpected names."""
        others = [f"{name} is missing" for name in self.required]
        others += [f"{name} is unexpected" for name in self.conversion.unexpected]
        if others and not self.makes:
            raise CheckpointError(
                f"{self.source.path} contains no tensor of {type(self.model).__name__}: {listed(others, 4)}. Pass this "
                "model's checkpoint, or rename the tensors in the file"
            )
        if others and warns:
            logger.warning("load_model(..., strict=False) ignores names of %s: %s", self.source.path, listed(others))

    def refuse_untied(self) -> None:
        """Raise CheckpointError if the checkpoint has two different values for a tensor of this stage that the
        architecture ties. (transformers would then leave the two names untied.)"""
        for first, *pieces in self.doubled:
            if self.targets[first].keys() & self.holdings.held.keys():
                one, other = (self._stored(piece, first) for piece in pieces)
                if not _is_equal(one, other):
                    names = " and ".join(piece.target for piece in pieces)
                    raise CheckpointError(
                        f"{self.source.path} has different values for {names}, which the config of "
                        f"{type(self.model).__name__} ties: create the model with tie_word_embeddings=False "
                        "(PipelinePlugin.from_pretrained(cls, folder, tie_word_embeddings=False)), or remove one of "
                        "the two from the checkpoint"
                    )

    def _stored(self, piece: Piece, first: str) -> "Tensor | StoredRows":
        """The value of a piece for the tensor with this first name. A value that needs no conversion is read in
        parts."""
        if piece.transform is None:
            value: Tensor | StoredRows = self.source.rows(piece.sources[0][0])
            return value
        made = piece.convert(self.model, self.source.read)
        return next(value for name, value in made.items() if self.first.get(name) == first)

    def fill(self, show: bool) -> None:
        """Read the tensors of this stage, one piece at a time. `show` enables the progress bar."""
        pieces = self._of_stage()
        total = sum(
            tensor.nbytes for _, of_names in pieces for tensors in of_names.values() for tensor in tensors.values()
        )
        disable = None if show else True
        trim()  # returns memory of the verification, the trace and other stages' tensors to the system
        with tqdm(total=total, desc="loading stage 0", unit="B", unit_scale=True, disable=disable) as bar:
            for piece, of_names in pieces:
                in_rows = self._is_packed_in_rows(piece, of_names)
                try:
                    made = piece.convert(self.model, self.source.rows if in_rows else self.source.read)
                except OSError as error:
                    key = piece.sources[0][0]
                    raise CheckpointError(
                        f"{key} cannot be read from {self.source.path} ({error}): check the disk, then try again"
                    ) from error
                for name in list(made):
                    bar.update(self._take(of_names.get(self.first.get(name, name), {}), made.pop(name)))
                if in_rows:
                    trim()  # returns the memory of the quantization's temporary tensors

    def _is_packed_in_rows(self, piece: Piece, of_names: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Whether a piece can be read a few rows at a time: it needs no conversion, and is quantized when it is
        loaded."""
        full = {full for tensors in of_names.values() for full in tensors}
        return piece.transform is None and full <= self.packed.keys() - self.scales.keys()

    def finish(self, group: dist.ProcessGroup) -> None:
        """Keep the fp32 master weights only if they round to the checkpoint's values on every rank. Otherwise, the
        checkpoint belongs to another model, so the master weights that were kept are rounded. Call it on all ranks."""
        if any(gather_objects(self.is_other, group)):
            for weight in self.kept:
                weight.round()

    def _take(self, tensors: Mapping[str, Tensor], value: Any) -> int:
        """Set each of `tensors` to `value`. Returns the total size of the tensors in bytes."""
        for k, (full, tensor) in enumerate(tensors.items()):
            self._assign(full, tensor, value.clone() if k and isinstance(value, Tensor) else value)
        return sum(tensor.nbytes for tensor in tensors.values())

    def _of_stage(self) -> list[tuple[Piece, dict[str, dict[str, Tensor]]]]:
        """The pieces that this stage needs, in the order of the files. Each piece is paired with the tensors of this
        stage that it fills, as {first name: {full name: tensor}}."""
        own: dict[str, Tensor] = {**self.holdings.held, **dict(self.whole.named_buffers()), **self.extra}
        needed: dict[str, tuple[Piece, dict[str, dict[str, Tensor]]]] = {}
        for name, piece in self.makes.items():
            if here := {full: own[full] for full in self.targets[name] if full in own}:
                needed.setdefault(piece.target, (piece, {}))[1][name] = here
        by_key = {piece.sources[0][0]: (piece, of_names) for piece, of_names in needed.values()}
        return [by_key[key] for key in self.source.ordered(by_key)]

    @torch.no_grad()
    def _assign(self, name: str, target: Tensor, value: Any) -> None:
        """Set a tensor to `value`. A plain parameter reuses the memory of `value`, unless other tensors share it."""
        weight = self.holdings.weights.get(name)
        if weight is not None and not self.is_initial:
            weight.loaded_as = value.dtype
        if name in self.scales:
            scales = {end: self.source.read(key).to(target.device) for end, key in self.scales[name].items()}
            refused = f"{self.source.path}: the quantized {name} cannot be read"
            with explained(lambda error: CheckpointError(f"{refused}: {summary(error)}. Save the checkpoint again")):
                self.packed[name].restore(value.to(target.device), scales)
        elif name in self.packed:
            self.packed[name].pack(value)
        elif name in self.extra:
            self.whole.get_submodule(name.rpartition(".")[0]).set_extra_state(value.to(target.device, copy=True))
        elif weight is None:  # a buffer
            target.copy_(value)
        elif not weight.plain:
            is_kept = weight.load(value.to(target.device))
            if is_kept:
                self.kept.append(weight)
            self.is_other |= is_kept is False and name in self.updated
        else:
            value = laid_out(value.to(target.device, target.dtype), target)
            alone = value.untyped_storage().nbytes() == value.nbytes
            target.data = value if alone else value.clone()


def _buffers_of_copies(model: nn.Module, blank: set[str]) -> set[str]:
    """The full names of the buffers in trained copies that have a parameter in `blank`. These buffers have no values
    either."""
    found: set[str] = set()
    for path, made, _ in trained_copies(model):
        if any(f"{path}.{name}" in blank for name, _ in made.named_parameters()):
            found |= {f"{path}.{name}" for name, _ in made.named_buffers(remove_duplicate=False)}
    return found


def _is_equal(one: Tensor | StoredRows, other: Tensor | StoredRows) -> bool:
    """Whether two tensors are equal. Compares a block of rows at a time."""
    count = max(1, COMPARED_ELEMENTS // max(1, math.prod(one.shape[1:])))
    return one.shape == other.shape and all(
        torch.equal(one[k : k + count], other[k : k + count]) for k in range(0, one.shape[0], count)
    )


def _draw(boosted: PipelineModel, plan: _Plan) -> None:
    """Initialize the weights that have no values yet and that the checkpoint lacks. Warn about missing and unused
    names."""
    pipeline, model = boosted.pipeline, boosted.unwrap()
    lost = [name for name in plan.missing if pipeline.blank.intersection(plan.targets[name])]
    pipeline.draw([full for name in lost for full in plan.targets[name]])
    weights = pipeline.holdings.weights
    for first, *copies in (plan.targets[name] for name in lost):
        for full in copies:  # copies start with the original's values
            if full in weights:
                weights[full].set(weights[first].parameter.detach())
    drawn, unused = [name for name in lost if name not in plan.optional], plan.conversion.unexpected
    for names, what in (
        (drawn, "Missing tensors, which were newly initialized (train them before use)"),
        (unused, "Unused tensors"),
    ):
        if names and pipeline.grid.first:
            some = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            logger.warning(
                "%s was loaded into %s. %s: %d (%s)", plan.source.path, type(model).__name__, what, len(names), some
            )


def ties_name(model: nn.Module) -> Callable[[str], bool]:
    """Return a function that takes a name, and returns whether the architecture ties this name to another name."""
    tied = getattr(model, "all_tied_weights_keys", None)
    tied = tied if tied is not None else getattr(model, "_tied_weights_keys", None) or ()
    patterns = [re.compile(key) for key in tied]
    return lambda name: any(pattern.search(name) for pattern in patterns)
