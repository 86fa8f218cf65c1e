"""Table: refused scripts, the remedy in the error, and the script with this remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeshard.split.materialize import is_released
from tests.hunt import marks, values
from tests.hunt import nets as hunted
from tests.hunt.cases import CASES
from tests.hunt.nets import Logits, Net, V, data
from tests.remedies import nets
from tests.remedies.follower import momentum_encoder
from tests.remedies.training import RATE, Training, ordinary

Script = Training | Callable[[], list[str]]


@dataclass(frozen=True)
class Remedy:
    """`wrong` is refused with an error that `says` this. Each of `right` does what the error tells: it trains, and
    equals the unsplit model. `rows` are beginnings of rows of the pages that promise it."""

    rows: tuple[str, ...]
    says: str
    wrong: Script
    right: tuple[Script, ...]


ONE = {"num_microbatches": 1}
TWICE = {"loss_reduction": "microbatch"}  # with two microbatches
UNVERIFIED = {"verify": False}
AT_RANDOM = r"uses different unit outputs or parameters than in its trace, .*at random.*with torch\.where"


def hunted_case(name: str, **options: Any) -> Training:
    """A model of the hunt that is refused there."""
    case = CASES[name]
    of_case = {"num_microbatches": 1, **case.options, **options}
    return Training(case.make, of_case, batches=lambda: case.batches, prepare=case.prepare, between=case.between)


def several() -> list[Any]:
    """As many batches as it takes until the branch goes both ways."""
    return [data(seed) for seed in range(6)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def anchored(model: nn.Module) -> torch.optim.Optimizer:
    return hunted.Anchored(model.parameters(), lr=RATE)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=RATE)


def with_more(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=RATE)


def short_and_long() -> list[Any]:
    return [data(step, length=length) for step, length in enumerate((70, 120))]  # between the same powers of two


def skips(step: int, model: Any) -> None:
    model.skips = step > 0


def momentum(step: int, model: Any) -> None:
    """What MomentumAfter leaves to the loop."""
    if step and not is_released(model.slow.weight):
        with torch.no_grad():
            model.slow.weight.mul_(0.9).add_(0.1 * model.embed.weight)


def embedded(requires_grad: bool) -> list[Any]:
    embed = nn.Embedding.from_pretrained(torch.linspace(-1, 1, V * hunted.H).view(V, hunted.H))
    batches = [data(seed) for seed in range(2)]
    return [{"x": embed(each["ids"]).requires_grad_(requires_grad), "labels": each["labels"]} for each in batches]


def weighted(model: nn.Module) -> Any:
    """Class weights, whose mean divides by the weights of the labels."""
    weight = torch.linspace(0.1, 2.0, V)
    return lambda out, batch: F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten(), weight)


def weighted_sum(model: nn.Module) -> Any:
    """The same as a sum, and what it is to be divided by."""
    weight = torch.linspace(0.1, 2.0, V)

    def criterion(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].flatten()
        total = F.cross_entropy(out["logits"].flatten(0, 1), labels, weight, reduction="sum")
        return total, weight[labels].sum()

    return criterion


def chunk_mean(model: nn.Module) -> Any:
    """The mean of the means of 4 positions each, of labels of which some are missing."""

    def criterion(out: Any, batch: Any) -> Tensor:
        pairs = zip(out["logits"].split(4, 1), batch["labels"].split(4, 1), strict=True)
        means = [F.cross_entropy(logits.flatten(0, 1), labels.flatten()) for logits, labels in pairs]
        return torch.stack(means).mean()

    return criterion


def chunk_sum(model: nn.Module) -> Any:
    """The mean over all labels, summed in chunks."""

    def criterion(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        pairs = zip(out["logits"].split(4, 1), batch["labels"].split(4, 1), strict=True)
        sums = [F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") for logits, labels in pairs]
        return torch.stack(sums).sum(), batch["labels"].ne(-100).sum()

    return criterion


def ramped(model: nn.Module) -> Any:
    return hunted.Ramps()


def by_step(model: Any) -> Any:
    """Grows with the steps, by an attribute of the model that the loop sets."""

    def criterion(out: Any, batch: Any) -> Tensor:
        loss = F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten())
        return loss * model.scale

    return criterion


def scaled(step: int, model: Any) -> None:
    model.scale = 1.0 + step


class Scaled(Logits):
    scale = 1.0


def margins(model: nn.Module) -> Any:
    return nets.Margins()


def frozen_margins(model: nn.Module) -> Any:
    return nets.Margins().requires_grad_(False)


def above_half(model: nn.Module) -> Any:
    """A mean over the positions at which a mask is over a half."""

    def criterion(out: Any, batch: Any) -> Tensor:
        mask = batch["mask"] > 0.5
        return F.cross_entropy(out["logits"][mask], batch["labels"][mask])

    return criterion


def above_half_sum(model: nn.Module) -> Any:
    def criterion(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        mask = batch["mask"] > 0.5
        return F.cross_entropy(out["logits"][mask], batch["labels"][mask], reduction="sum"), mask.sum()

    return criterion


def taught() -> list[dict[str, Tensor]]:
    """Batches with the logits of a teacher."""
    generator = torch.Generator().manual_seed(0)
    return [{**batch, "criterion.taught": torch.randn(4, 6, V, generator=generator)} for batch in ordinary()]


def distilled(logits: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def by_batch(model: nn.Module) -> Any:
    return lambda out, batch: distilled(out["logits"], batch["criterion.taught"])


def by_closure(model: nn.Module) -> Any:
    teacher = taught()[0]["criterion.taught"]
    return lambda out, batch: distilled(out["logits"], teacher)


class ByAttribute:
    """Reads what the loop is to set before each step."""

    teacher: Any = None

    def __call__(self, out: Any, batch: Any) -> Tensor:
        return distilled(out["logits"], self.teacher)


def sure(model: nn.Module) -> Any:
    return marks.confident


def sure_sum(model: nn.Module) -> Any:
    def criterion(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        is_sure = (batch["confidence"] > 0.5).float()
        return (F.cross_entropy(output, batch["labels"], reduction="none") * is_sure).sum(), is_sure.sum()

    return criterion


def confidences() -> Any:
    return marks.labelled(confidence=lambda seed: torch.rand(7, generator=torch.Generator().manual_seed(seed)))


class LogitsOfMasked(Logits):
    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(ids, labels)


def ragged() -> list[dict[str, Tensor]]:
    batches = ordinary()
    for batch in batches:
        batch["labels"][0, 2:] = batch["labels"][2, 3:] = -100
    return batches  # type: ignore[return-value]


def wider() -> list[dict[str, Tensor]]:
    """Longer than the samples of 8 positions on which a rule is found."""
    batches = [data(seed, rows=4, length=14) for seed in range(2)]
    for batch in batches:
        batch["labels"][0, 5:] = batch["labels"][2, 9:] = -100
    return batches


def nested_batches() -> list[dict[str, Tensor]]:
    return [{**batch, "ids": torch.nested.as_nested_tensor(list(batch["ids"]))} for batch in ordinary()]


def padded_batches() -> list[dict[str, Tensor]]:
    return [{**batch, "ids": batch["ids"].to_padded_tensor(0)} for batch in nested_batches()]


REMEDIES = {
    "a generator": Remedy(
        ("layers return generators",), "returns a generator", hunted_case("generators"), (Training(nets.Lists, ONE),)
    ),
    "an attribute of a tensor": Remedy(
        ("layers return generators",), "has gain", hunted_case("an attribute"), (Training(nets.Gains, ONE),)
    ),
    "a number": Remedy(
        ("layers return or store numbers",),
        "return a tensor",
        hunted_case("number read"),
        (Training(nets.NumbersAsTensors, ONE), Training(hunted.NumberRead, {**ONE, "partition": [1, 5]})),
    ),
    "a count of forwards": Remedy(
        ("a forward that takes a different path", "`TraceError`: a forward that leaves"),
        "Keep other state in attributes of the model",
        hunted_case("a count's"),
        (Training(nets.ByAttribute, ONE, between=skips),),
    ),
    "a branch on the length": Remedy(
        ("a model that branches on the lengths of the batch",),
        "on the batch's sizes .*For a branch on sizes, set such an attribute before each step",
        Training(nets.ByLength, ONE, batches=short_and_long),
        (Training(nets.ByAttribute, ONE, batches=short_and_long, between=skips),),
    ),
    "a decision on an activation": Remedy(
        ("other code of the model branches in Python", "`TraceError`: glue (the model's code between units) that"),
        r"tensor operations \(torch.where\), move the branch into the forward of a separate module",
        Training(nets.Decides, ONE),
        (Training(nets.Selects, ONE), Training(nets.DecidesInside, ONE)),
    ),
    "a gradient hook": Remedy(
        ("gradient hooks of the model on tensors",),
        "Register the hook on a tensor inside a layer, or cut elsewhere",
        hunted_case("listening"),
        (
            Training(nets.ListensInside, {**ONE, "partition": [4, 4]}),
            Training(hunted.ListeningGlue, {**ONE, "partition": [2, 6]}),
        ),
    ),
    "views of one memory": Remedy(
        ("views that share memory", "`PartitionError`: a cut through units"),
        "untracked",
        hunted_case("aliases cut"),
        (Training(hunted.Aliases, {**ONE, "partition": "auto"}),),
    ),
    "an iterator": Remedy(
        ("iterators that a forward",), "cannot be rewound", hunted_case("an iterator"), (Training(nets.Counted, ONE),)
    ),
    "memory of two parameters": Remedy(
        ("two parameters that share memory",), "share memory", hunted_case("shares memory"), (Training(nets.Tied),)
    ),
    "parameters that the forward changes": Remedy(
        ("parameters that the forward itself changes",),
        r"change the parameter after optimizer.step\(\)",
        Training(nets.Momentum, UNVERIFIED),
        (Training(nets.MomentumAfter, UNVERIFIED, between=momentum), momentum_encoder),
    ),
    "a trained tensor in a list": Remedy(
        ("trained tensors that the forward reads",),
        "is not one of the model's parameters",
        Training(nets.Outside),
        (Training(nets.Registered), Training(nets.OutsideFrozen)),
    ),
    "an input with a gradient": Remedy(
        ("inputs that require a gradient",),
        r"x of the batch requires a gradient, .* pass x.detach\(\)",
        Training(nets.Embedded, batches=lambda: embedded(requires_grad=True)),
        (Training(nets.Embedded, batches=lambda: embedded(requires_grad=False)),),
    ),
    "a nested tensor between layers": Remedy(
        ("nested tensors",),
        "create nested tensors inside the forward of each",
        Training(nets.NestedBetween),
        (Training(nets.NestedInside),),
    ),
    "a nested tensor in a batch": Remedy(
        ("nested tensors",),
        r"ids: nested tensors are not supported.*tensor.to_padded_tensor",
        Training(batches=nested_batches),
        (Training(batches=padded_batches),),
    ),
    "layers that are skipped by chance": Remedy(
        ("layers that are skipped by chance",),
        r"the forward called .*, but the trace recorded layers\.\d.*at random \(LayerDrop\).*Turn LayerDrop off",
        Training(nets.Skips),
        (Training(nets.SkipsNone),),
    ),
    "a branch at random": Remedy(
        ("a branch at random between layers",),
        AT_RANDOM,
        Training(nets.Drops, UNVERIFIED, batches=several),
        (Training(nets.Selected),),
    ),
    "a parameter at random": Remedy(
        ("a branch at random between layers",),
        AT_RANDOM,
        Training(nets.DropsParameter, UNVERIFIED, batches=several),
        (Training(nets.Selected),),
    ),
    "a shared batch norm": Remedy(
        ("a generator, a counter or a buffer",),
        "give each layer its own",
        hunted_case("a shared batch norm"),
        (Training(nets.Norms, {**ONE, "partition": [3, 3]}),),
    ),
    "class weights": Remedy(
        ("class weights, contrastive",),
        r"loss_reduction='microbatch'\), .*, return \(sum, count\) from the criterion .* or use one microbatch",
        Training(Logits, criterion=weighted),
        (
            Training(Logits, criterion=weighted_sum),
            Training(Logits, TWICE, criterion=weighted, parts=2),
            Training(Logits, ONE, criterion=weighted),
        ),
    ),
    "a mask above a half": Remedy(
        ("class weights, contrastive",),
        r"return \(sum, count\) from the criterion",
        Training(LogitsOfMasked, criterion=above_half, batches=nets.masked),
        (Training(LogitsOfMasked, criterion=above_half_sum, batches=nets.masked),),
    ),
    "layers that mix samples": Remedy(
        ("layers that mix samples", "`VerificationError`: the proof at boost"),
        r"Pass num_microbatches=1 to train on whole batches \(in a Trainer, omit num_microbatches\), or \(not in a "
        r"Trainer\) loss_reduction='microbatch'",
        Training(nets.Centred),
        (Training(nets.Centred, ONE), Training(nets.Centred, TWICE, parts=2)),
    ),
    "sure pseudo-labels": Remedy(
        ("a mean over values above a threshold",),
        r"return \(sum, count\) from the criterion",
        Training(marks.Body, criterion=sure, batches=confidences),
        (
            Training(marks.Body, criterion=sure_sum, batches=confidences),
            Training(marks.Body, ONE, criterion=sure, batches=confidences),
        ),
    ),
    "time-first data": Remedy(
        ("layers that mix samples",),
        r"or batch_dims=\{'ids': 1, 'labels': 1\} if dimension 1 is the batch dimension",
        Training(nets.TimeFirst, batches=nets.time_first),
        (Training(nets.TimeFirst, {"batch_dims": {"ids": 1, "labels": 1}}, batches=nets.time_first),),
    ),
    "a mean of chunks' means": Remedy(
        ("losses that depend on the number of samples",),
        r"return \(sum, count\) from the criterion",
        Training(Logits, UNVERIFIED, criterion=chunk_mean, batches=wider),
        (
            Training(Logits, criterion=chunk_sum, batches=wider),
            Training(Logits, ONE, criterion=chunk_mean, batches=wider),
        ),
    ),
    "a loss that a layer makes": Remedy(
        ("class weights, contrastive",),
        r"average the microbatch losses.*or use one microbatch",
        Training(nets.Auxiliary),
        (Training(nets.Auxiliary, TWICE, parts=2), Training(nets.Auxiliary, ONE)),
    ),
    "a criterion that counts": Remedy(
        ("a criterion that counts its calls",),
        "Change the criterion's state only between steps",
        Training(Logits, criterion=ramped),
        (Training(Scaled, criterion=by_step, between=scaled), Training(Logits, ONE, criterion=ramped)),
    ),
    "a criterion with weights": Remedy(
        ("a criterion with trained parameters",),
        "make the criterion a submodule of a model that computes the loss in its forward, "
        "or freeze the criterion's parameters",
        Training(Logits, criterion=margins),
        (Training(nets.WithMargins), Training(Logits, criterion=frozen_margins)),
    ),
    "an optimizer of more": Remedy(
        ("an optimizer with parameters that are not in the model",),
        "not.*model",
        Training(Net, optimizer=with_more),
        (Training(),),
    ),
    "an optimizer that couples": Remedy(
        ("LBFGS, SAM",),
        "use another optimizer",
        Training(optimizer=anchored),
        (Training(optimizer=adamw), Training(options={"pp_size": 1, "dp_size": 2, **ONE}, optimizer=anchored)),
    ),
    "LBFGS": Remedy(("LBFGS, SAM",), "use another optimizer", Training(optimizer=lbfgs), (Training(optimizer=adamw),)),
    "a None over a cut": Remedy(
        ("a None gradient that your own backward returns",),
        "In a custom backward, return zeros instead of None. Alternatively, cut elsewhere",
        hunted_case("none over a cut"),
        (
            Training(nets.ZerosOver, {**UNVERIFIED, **ONE, "partition": [3, 3]}),
            Training(values.NoneOver, {**UNVERIFIED, **ONE, "partition": [4, 2]}),
        ),
    ),
    "sizes by activations": Remedy(
        ("sizes, or numbers that a layer returns, computed from values",),
        "return a tensor of a fixed size and a mask",
        hunted_case("selected by activations"),
        (
            Training(nets.Masked, {**UNVERIFIED, **ONE, "partition": [3, 3]}),
            Training(values.Selected, {**UNVERIFIED, **ONE, "partition": [2, 4]}),
        ),
    ),
    "a write by values": Remedy(
        ("layers that write in place",),
        r"modify a copy in the unit \(x = x.clone\(\)\), or modify the argument in every forward",
        hunted_case("writes by values"),
        (
            Training(nets.WritesToACopy, {**UNVERIFIED, **ONE, "partition": [3, 3]}),
            Training(nets.WritesAlways, {**UNVERIFIED, **ONE, "partition": [3, 3]}),
        ),
    ),
    "a table that is cut": Remedy(
        ("`BatchError`: a microbatch that does not run",),
        r"fails for rows 0 to 1 of the batch \(microbatch 0 of 2\), but not for .* pass num_microbatches=1 to Pipeline",
        Training(nets.Table, UNVERIFIED, batches=nets.tables),
        (
            Training(nets.Table, {"batch_dims": {"table": None}}, batches=nets.tables),
            Training(nets.Table, ONE, batches=nets.tables),
        ),
    ),
    "a criterion that reads a whole batch": Remedy(
        ("`BatchError`: a criterion that reads a tensor of the whole batch",),
        r"the criterion fails for rows 0 to 1 of the batch \(microbatch 0 of 2\), but not for the full batch of 4 rows"
        r".*a closure or an attribute, pass this tensor in the batch, under a key with the prefix 'criterion\.'",
        Training(Logits, criterion=by_closure),
        (Training(Logits, criterion=by_batch, batches=taught), Training(Logits, ONE, criterion=by_closure)),
    ),
    "a criterion whose tensor is set later": Remedy(
        (),
        r"tracing the criterion failed: .*a key with the prefix 'criterion\.'",
        Training(Logits, criterion=lambda model: ByAttribute()),
        (Training(Logits, criterion=by_batch, batches=taught),),
    ),
    "bags that are cut": Remedy(
        ("`BatchError`: a microbatch that does not run",),
        r"fails for rows 3 to 5 of the batch \(microbatch 1 of 2\), but not for .*offsets\[0\] has to be 0",
        Training(nets.Bags, batches=nets.bags),
        (Training(nets.Bags, ONE, batches=nets.bags),),
    ),
    "edges of three microbatches": Remedy(
        ("`BatchError`: a microbatch that does not run",),
        r"rows 0 to 2 of the batch \(microbatch 0 of 3\), .* IndexError: index 7 is out of bounds",
        Training(nets.Graph, {"num_microbatches": 3}, batches=nets.nodes),
        (Training(nets.Graph, ONE, batches=nets.nodes),),
    ),
}

EXACT = {  # refused once, though nothing is wrong
    "a float mask as a boolean": Training(nets.ByMask, batches=nets.masked),
    "the same, three microbatches": Training(nets.ByMask, {"num_microbatches": 3}, batches=nets.masked),
}
