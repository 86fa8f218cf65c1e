"""Later: losses whose rule holds in the first step, but not after a new value occurs or is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hunt.cases import Batch, Case
from tests.hunt.marks import TWO, UNPROVEN, WEIGHTS, Body, labelled
from tests.hunt.nets import H

CLASSES, PADDING = 100, 70


class Settable:
    """A criterion whose attributes `between` sets in every one of its instances."""

    latest: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.weight, self.keep, self.level = torch.ones(3), 1.0, 1e-4
        self.latest.append(self)

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch["labels"], weight=self.weight)


class Hardest(Settable):
    """The mean over the samples with the smallest losses."""

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output, batch["labels"], reduction="none")
        return losses.topk(max(1, int(self.keep * len(losses))), largest=False).values.mean()


class Flooded(Settable):
    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return (super().__call__(output, batch) - self.level).abs() + self.level


class Curriculum(Settable):
    """Has a term over the whole batch once half of the training is over."""

    def __init__(self) -> None:
        super().__init__()
        self.progress, self.start = 0.3, 0.5

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return super().__call__(output, batch) + (output.std() if self.progress > 0.5 else 0.0)


class CurriculumByStart(Curriculum):
    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return Settable.__call__(self, output, batch) + (output.std() if self.progress > self.start else 0.0)


def set_later(kind: type[Settable], name: str, value: Any) -> Callable[[int, nn.Module], None]:
    def between(step: int, model: nn.Module) -> None:
        for criterion in kind.latest if step else ():
            setattr(criterion, name, value)

    return between


def weigh_by_data(step: int, model: nn.Module) -> None:
    for criterion in Settable.latest if step else ():
        criterion.weight.data.copy_(WEIGHTS)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor, **beside: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def padded(first: int, padding: int) -> list[Batch]:
    """Batches of eight positions; from the `first` on, rows end with padding."""
    batches = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(1, PADDING, (6, 8), generator=generator)
        labels[0, 0] = CLASSES - 1
        for row in range(6 if seed >= first else 0):
            labels[row, 2 + row :] = padding
        batches.append({"x": torch.randn(6, 8, H, generator=generator), "labels": labels})
    return batches


def without(padding: int) -> Callable[[], Any]:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=padding)

    return lambda: loss


class Head(nn.Module):
    """Computes the loss in the last unit, with class weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H, 3)
        self.register_buffer("weight", torch.ones(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.project(x), labels, weight=self.weight)


class WithHead(Body):
    def __init__(self) -> None:
        super().__init__()
        self.head: Any = Head()

    def forward(self, x: Tensor, **beside: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x, beside["labels"])}


class OfModule(nn.Module):
    """The same with torch's module of the loss, which has the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.loss = nn.Linear(H, 3), nn.CrossEntropyLoss(weight=torch.ones(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.project(x), labels)
        return loss


class WithModule(WithHead):
    def __init__(self) -> None:
        super().__init__()
        self.head = OfModule()


def weigh_module(step: int, model: Any) -> None:
    if step == 1:
        model.head.loss.weight.copy_(WEIGHTS)


def weigh_head(step: int, model: Any) -> None:
    if step == 1:
        model.head.weight.copy_(WEIGHTS)


def weigh_head_by_data(step: int, model: Any) -> None:
    if step == 1:
        model.head.weight.data[:] = WEIGHTS


def replace_data_of_head(step: int, model: Any) -> None:
    if step == 1:
        model.head.weight.data = WEIGHTS.clone()


def of_head(story: str, between: Any, kind: type[WithHead] = WithHead) -> Case:
    return Case(kind, story, batches=labelled(), options=TWO, between=between, refused=UNPROVEN)


def of_criterion(story: str, kind: type[Settable], name: str, value: Any) -> Case:
    """A criterion for which no rule holds once the loop has set its attribute `name`."""
    between = set_later(kind, name, value)
    return Case(Body, story, batches=labelled(), options=TWO, criterion=kind, between=between, refused=UNPROVEN)


class Flooding(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flood", torch.tensor(0.0))

    def forward(self, x: Tensor, **beside: Tensor) -> Any:
        loss = F.cross_entropy(super().forward(x), beside["labels"])
        return {"loss": (loss - self.flood).abs() + self.flood}


def flood(step: int, model: Any) -> None:
    if step == 1:
        model.flood.fill_(0.1)


def of_lengths(lengths: list[list[int]]) -> list[Batch]:
    batches = []
    for seed, each in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(each), 6, H, generator=generator)
        labels = torch.randint(0, CLASSES, (len(each), 6), generator=generator)
        batches.append({"x": x, "labels": labels, "criterion.lengths": each})
    return batches


def packed(output: Tensor, batch: Any) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        return pack_padded_sequence(tensor, batch["criterion.lengths"], batch_first=True, enforce_sorted=False).data

    return F.cross_entropy(pack(output), pack(batch["labels"]))


def chunked(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """A mean of means over chunks, as memory-saving losses compute it by mistake."""
    chunks = zip(logits[:, :-1].split(16, 1), labels[:, 1:].split(16, 1), strict=True)
    return torch.stack([F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in chunks]).mean()


def llama() -> nn.Module:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=23, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    model.loss_function = chunked
    return model


def ragged() -> list[Batch]:
    batches = []
    for seed in range(2):
        ids = torch.randint(1, 23, (6, 41), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        for row in range(6):
            labels[row, 12 + 5 * row :] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


CASES = {
    "a term that begins at a number in the code": of_criterion(
        "A share of the training went from 0.3 past 0.5, as numbers of one kind, so a new term was never verified.",
        Curriculum,
        "progress",
        0.6,
    ),
    "a term that begins at a number in an attribute": of_criterion(
        "The same with a threshold that the criterion holds.", CurriculumByStart, "progress", 0.6
    ),
    "class weights that are replaced": of_criterion(
        "A criterion's weights are replaced by another tensor of the same shape, which counted as no change.",
        Settable,
        "weight",
        WEIGHTS,
    ),
    "a share that is lowered": of_criterion(
        "Small-loss selection keeps all samples first, and fewer later: a float of a criterion was watched for its "
        "sign alone.",
        Hardest,
        "keep",
        0.7,
    ),
    "a criterion's level that is raised": of_criterion(
        "The same of flooding, whose level was of no effect first.", Flooded, "level", 5.0
    ),
    "flooding that begins": Case(
        Flooding,
        "A level of the model that was 0 is not: the rule known before was tried on large losses alone.",
        batches=labelled(),
        options=TWO,
        between=flood,
        refused=UNPROVEN,
    ),
    "class weights of a head": of_head(
        "The class weights are in the unit that computes the loss, whose tensors nobody looked at.", weigh_head
    ),
    "class weights of a head, by data": of_head(
        "The same through `weight.data`, which does not change the version of a tensor.", weigh_head_by_data
    ),
    "class weights of a head, other data": of_head("The same by `weight.data = weights`.", replace_data_of_head),
    "class weights of a loss in a head": of_head(
        "The same for weights of torch's CrossEntropyLoss inside the unit, as torch's modules in units were skipped.",
        weigh_module,
        WithModule,
    ),
    "class weights of a criterion, by data": Case(
        Body,
        "The same of a criterion's weights.",
        batches=labelled(),
        options=TWO,
        criterion=Settable,
        between=weigh_by_data,
        refused=UNPROVEN,
    ),
    "padding that comes later": Case(
        Tagger,
        "Labels of a hundred classes are drawn from those seen; padding of the second batch was none of them, and the "
        "loss went on as a mean over samples.",
        batches=padded(1, PADDING),
        options=TWO,
        criterion=without(PADDING),
    ),
    "padding that is the largest token": Case(
        Tagger,
        "The same where padding is the last token of a vocabulary.",
        batches=padded(1, CLASSES - 1),
        options=TWO,
        criterion=without(CLASSES - 1),
    ),
    "lengths in a list": Case(
        Tagger,
        "The loss reads lengths of a list, all alike in the first batch: lists were not looked into.",
        batches=of_lengths([[6, 6, 6, 6], [6, 2, 3, 6]]),
        options=TWO,
        criterion=lambda: packed,
        refused=UNPROVEN,
    ),
    "a loss function that was set": Case(
        llama,
        "transformers' models have a setter for their loss: it counted as transformers' own, which does not go by the "
        "length.",
        batches=ragged(),
        options=TWO,
        refused="could not be verified|is not the same mean or sum|VerificationError",
    ),
}
