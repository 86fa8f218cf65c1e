"""Tests of batches that contain only lists or objects, and of batches whose last entries are for the criterion."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import pipeshard
from pipeshard import trace
from pipeshard.batch.read import RowDims
from pipeshard.errors import BatchError
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, gradient_error, largest_error, relative_errors

pytestmark = pytest.mark.local

H, CLASSES, SIZE = 8, 5, 6
CHANNELS = 3


class Detector(nn.Module):
    """Takes a list of images, and a list of dicts with a class for each object."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(CHANNELS, H, 3, padding=1), nn.Linear(H, CLASSES)
        self.layers = nn.ModuleList(nn.Conv2d(H, H, 3, padding=1) for _ in range(3))

    def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
        x = self.stem(torch.stack(list(images)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        pairs = zip(self.head(x.mean((2, 3))), targets, strict=True)
        losses = [cross_entropy(row.expand(len(own["labels"]), -1), own["labels"]) for row, own in pairs]
        return {"loss": torch.stack(losses).mean()}


def detections(rows: int, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(CHANNELS, SIZE, SIZE, generator=generator) for _ in range(rows)]
    counts = [1 + (row + seed) % 2 for row in range(rows)]
    labels = [torch.randint(CLASSES, (count,), generator=generator) for count in counts]
    return images, [{"boxes": torch.rand(len(own), 4), "labels": own, "keypoints": torch.rand(1, 3)} for own in labels]


def form(kind: str, rows: int, seed: int = 0) -> Any:
    images, targets = detections(rows, seed)
    if kind == "tuples":  # what collate_fn=lambda samples: tuple(zip(*samples)) makes
        return tuple(images), tuple(targets)
    return {"images": images, "targets": targets} if kind == "mapping" else (images, targets)


def trained_on_lists() -> list[str]:
    found = []
    for kind, count in (("lists", 2), ("tuples", 3), ("mapping", 1)):
        torch.manual_seed(0)
        model = Detector()
        unsplit = copy.deepcopy(model)
        batches = [form(kind, rows, rows) for rows in (4, 3, 5)]
        split = Split(model, dist.get_world_size(), batches[0], num_microbatches=count)
        for batch in batches:
            output = unsplit(**batch) if isinstance(batch, dict) else unsplit(*batch)
            output["loss"].backward()
            error = abs(float(split.backward(batch)["loss"] / output["loss"].detach()) - 1)
            if not largest_error([error, gradient_error(split, unsplit)]) < 1e-6:
                found.append(f"{kind}: {error}, {gradient_error(split, unsplit)}")
            unsplit.zero_grad()
            split.optimizer.zero_grad()
    return found


@pytest.mark.turns
def test_a_batch_of_lists_is_cut_along_its_samples(pool: Pool) -> None:
    """A detector's batch is a list of images and a list of dicts, without a tensor outside of them.
    The channels of the first image counted as the samples: "there are 3 samples"."""
    assert pool.run(trained_on_lists, 2) == [[], []]


class Centering(Detector):
    """Writes to the images and to the boxes before its layers, as many detectors do."""

    def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
        for image, own in zip(images, targets, strict=True):
            image.sub_(0.5)
            own["boxes"][:, 2:] += own["boxes"][:, :2]
        extent = torch.stack([own["boxes"].sum() for own in targets])
        return {"loss": super().forward(images, targets)["loss"] + extent.mean() * self.head.bias.sum()}


class Scoring(Detector):
    """Returns scores, for a criterion that writes to the boxes."""

    def forward(self, images: Any, targets: Any) -> Any:
        return self.head(self.stem(torch.stack(list(images))).mean((2, 3)))


def of_corners(scores: Tensor, batch: Any) -> Tensor:
    _, targets = batch
    for own in targets:
        own["boxes"][:, 2:] += own["boxes"][:, :2]
    return torch.stack([score.mean() * own["boxes"].sum() for score, own in zip(scores, targets, strict=True)]).mean()


@pytest.mark.parametrize(("kind", "criterion"), [(Centering, None), (Scoring, of_corners)], ids=["model", "criterion"])
def test_a_trace_leaves_what_is_written_to_in_lists(kind: type[Detector], criterion: Any) -> None:
    """The tensors of a list were those of the user, and each run of the trace wrote to them."""
    batch = detections(3)
    before = copy.deepcopy(batch)
    flow = trace(kind(), batch, criterion)
    torch.testing.assert_close(batch, before, rtol=0, atol=0)
    assert any("targets" in path or "[1]" in path for path in flow.rewritten)


def losses_of_corners() -> tuple[Tensor, Tensor]:
    model, batch = Scoring(), detections(4)
    own, inputs = copy.deepcopy((batch, model))
    engine = pipeshard.initialize(
        model, torch.optim.SGD(model.parameters()), of_corners, dry_run_input=batch, pp_size=1, num_microbatches=2
    )
    return engine.execute_pipeline(iter([batch]))["loss"], of_corners(inputs(*own), own).detach()


@pytest.mark.turns
def test_a_criterion_that_writes_to_lists_is_exact(pool: Pool) -> None:
    """Its loss seemed to depend on the number of calls, since each trial wrote to the same boxes."""
    ((loss, expected),) = pool.run(losses_of_corners, 1)
    torch.testing.assert_close(loss, expected)


def written_in_lists(schedule: str) -> list[str]:
    torch.manual_seed(0)
    model = Centering()
    unsplit = copy.deepcopy(model)
    split, found = None, []
    for rows in (4, 3):
        batch = detections(rows, rows)
        before = copy.deepcopy(batch)
        loss = unsplit(*copy.deepcopy(batch))["loss"]
        loss.backward()
        split = split or Split(model, dist.get_world_size(), batch, num_microbatches=2, schedule=schedule)
        error = abs(float(split.backward(batch)["loss"] / loss.detach()) - 1)
        if not largest_error([error, gradient_error(split, unsplit)]) < 1e-5:
            found.append(f"{rows} samples: {error}, {gradient_error(split, unsplit)}")
        torch.testing.assert_close(batch, before, rtol=0, atol=0)
        unsplit.zero_grad()
        split.optimizer.zero_grad()
    return found


@pytest.mark.turns
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_is_written_to_in_lists_is_exact(pool: Pool, schedule: str) -> None:
    """Both stages of a rank, and each trace, wrote to the same tensors, so that images were centered several times."""
    assert pool.run(written_in_lists, 2, schedule) == [[], []]


@pytest.mark.parametrize("kind", ["lists", "tuples", "mapping"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_entries_of_lists_are_the_samples(kind: str, rows: int) -> None:
    batch = RowDims(Detector()).read(form(kind, rows))
    assert batch.rows == rows and batch.row_dims == (0, 0)
    parts = [part.data for part in batch.split(2)]
    first = [part["images"] if isinstance(part, dict) else part[0] for part in parts]
    assert [len(images) for images in first] == ([rows - rows // 2, rows // 2] if rows > 1 else [1])
    assert all(image.shape == (CHANNELS, SIZE, SIZE) for images in first for image in images)


def test_lists_of_tensors_with_the_same_samples_are_not_opened_as_samples() -> None:
    """Two inputs of the same four samples are no two samples; boxes of a different number each are."""
    both = RowDims(Detector()).read({"images": [torch.zeros(4, 2), torch.zeros(4, 3)]})
    assert both.rows == 4
    views = [{"ids": torch.zeros(4, 2)}, {"ids": torch.zeros(4, 3)}]
    assert RowDims(Detector()).read({"images": views}).rows == 4
    boxes = [torch.zeros(count, 4) for count in (2, 1, 3)]
    images = [torch.zeros(CHANNELS, SIZE, SIZE) for _ in boxes]
    assert RowDims(Detector()).read((images, boxes)).rows == 3
    labels = [torch.zeros(1, dtype=torch.long) for _ in boxes]
    with pytest.raises(
        BatchError, match=r"lists of 3 entries \(\[0\] and \[1\]\).*batch_dims={'\[0\]': 0, '\[1\]': 0}"
    ):
        RowDims(Detector()).read((images, labels))
    assert RowDims(Detector(), {"[0]": 0, "[1]": 0}).read((images, labels)).rows == 3
    assert RowDims(Detector(), {"[0]": None, "[1]": None}).read((images, labels)).rows == CHANNELS
    of_three = [{"labels": torch.zeros(3)} for _ in boxes]
    with pytest.raises(BatchError, match="ambiguous whether these lists have one entry per sample"):
        RowDims(Detector()).read((images, of_three))
    declared = RowDims(Detector(), {"images": 0}).read({"images": [torch.zeros(4, 2)] * 2})
    assert declared.rows == 2


class Graph:
    """Has its tensors by key, as torch_geometric's Data; it can be called, and `keys` has another order each time."""

    def __init__(self, **entries: Any) -> None:
        self.store = SimpleNamespace(entries=entries)

    def __copy__(self) -> Graph:
        return type(self)(**self.store.entries)

    def __call__(self, *keys: str) -> Any:
        yield from self.store.entries.items()

    def __getitem__(self, key: str) -> Any:
        return self.store.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store.entries[key] = value

    def __cat_dim__(self, key: str) -> int:
        return -1 if key == "edges" else 0

    def keys(self) -> set[str]:
        return set(self.store.entries)


class OfGraph(nn.Module):
    """Adds to each node what its neighbours are, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(4))

    def forward(self, graph: Graph) -> Tensor:
        x = graph["x"]
        for layer in self.layers:
            source, target = graph["edges"]
            x = x + torch.tanh(layer(x.index_add(0, target, x[source])))
        return x.mean(1)


def graph(nodes: int, seed: int) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(nodes, H, generator=generator), torch.randn(nodes, generator=generator)
    return Graph(x=x, edges=torch.randint(nodes, (2, 9), generator=generator), y=y)


def of_graph(output: Any, batch: Any) -> Tensor:
    return mse_loss(output, batch["y"])


class Classifier(nn.Module):
    """Takes images, and maybe a mask, as timm's vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(H, H) for _ in range(4)), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            x = x if attn_mask is None else x * attn_mask
        return self.head(x)


class WithFlag(Classifier):
    def forward(self, x: Tensor, doubles: bool = False) -> Tensor:  # type: ignore[override]
        return super().forward(x * 2 if doubles else x)


class OfImages(Classifier):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def of_classes(output: Any, batch: Any) -> Tensor:
    return cross_entropy(output, batch[-1])


def labelled(seed: int, with_mask: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(4, H, generator=generator), torch.randint(CLASSES, (4,), generator=generator)
    return (x, torch.rand(4, H, generator=generator).round(), labels) if with_mask else (x, labels)


def boosted(model: nn.Module, sample: Any, criterion: Any, count: int) -> Any:
    plugin = pipeshard.PipelinePlugin(pp_size=dist.get_world_size(), dry_run_input=sample, num_microbatches=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pipeshard.initialize(model, optimizer, criterion, plugin=plugin)


def off(model: nn.Module, make: Any, criterion: Any, count: int) -> float:
    """The largest error of a loss or a gradient in three steps."""
    unsplit = copy.deepcopy(model)
    optimizer = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    batches = [make(seed) for seed in range(3)]
    engine, steps, errors = boosted(model, batches[0], criterion, count), iter(batches), []
    for batch in batches:
        loss = criterion(unsplit(*batch[:-1]) if isinstance(batch, tuple) else unsplit(batch), batch)
        loss.backward()
        errors.append(abs(float(engine.execute_pipeline(steps)["loss"] / loss.detach()) - 1))
        errors += relative_errors(engine.model.unwrap(), unsplit)
        for each in (optimizer, engine.optimizer):
            each.step()
            each.zero_grad()
    return largest_error(errors)


def trained_on_tuples() -> dict[str, float]:
    torch.manual_seed(0)
    errors = {
        "graph": off(OfGraph(), lambda seed: graph(5 + seed, seed), of_graph, 1),
        "one argument": off(OfImages(), labelled, of_classes, 2),
        "optional mask": off(Classifier(), labelled, of_classes, 2),
        "flag": off(WithFlag(), labelled, of_classes, 2),
        "mask": off(Classifier(), lambda seed: labelled(seed, True), of_classes, 2),
    }
    with pytest.raises(BatchError, match=r"contains an instance of Graph.*num_microbatches=1"):
        boosted(OfGraph(), graph(6, 0), of_graph, 2)
    return {name: error for name, error in errors.items() if not error < 2e-6}


@pytest.mark.turns
def test_graphs_and_labels_for_the_criterion(pool: Pool) -> None:
    """torch_geometric's Data was taken for a function that makes batches, since it can be called.
    The labels of `(images, labels)` became the mask of a forward that has an optional one, or one argument too many."""
    assert pool.run(trained_on_tuples, 2) == [{}, {}]


def of_means(output: Any, batch: Any) -> Tensor:
    """The target is a mean per sample of the batch's first entry; of a bare tensor, it is the first sample's mean."""
    return (output - batch[0].mean(-1, keepdim=True)).square().mean()


def trained_on_one_entry() -> list[float]:
    torch.manual_seed(0)
    model, x = OfImages(), labelled(0)[0]
    expected, errors = of_means(model(x), (x,)), []
    for sample, batch in ((x, (x,)), ((x,), (x,)), ((x,), [x])):
        engine = boosted(copy.deepcopy(model), sample, of_means, 1)
        errors.append(float((engine.execute_pipeline(iter([batch]))["loss"] - expected).abs()))
    return errors


@pytest.mark.turns
def test_a_criterion_receives_a_tuple_of_one_entry(pool: Pool) -> None:
    """The criterion of `(x,)` received x, so its `batch[0]` was silently the first sample.
    The batch at boost may still have been the bare x."""
    for errors in pool.run(trained_on_one_entry, 2):
        assert largest_error(errors) < 1e-6


def of_tokens(output: Any, batch: Any) -> Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[-1][:, 1:].flatten())


def of_sentences(output: Any, batch: Any) -> Tensor:
    return cross_entropy(output.logits[:, 0], batch[-1])


def of_attended(output: Any, batch: Any) -> Tensor:
    ids, mask = batch
    return of_tokens(output, [ids.masked_fill(mask == 0, -100)])


def test_labels_in_a_tuple_are_not_passed_to_the_model() -> None:
    """The labels of `(ids, mask, labels)` were llama's positions and BERT's token types: it trained, and to another
    model, without a message."""
    llama, bert = zoo.build("llama"), zoo.build("bert")
    ids, mask, classes = torch.randint(3, 60, (4, 8)), torch.ones(4, 8).long(), torch.tensor([0, 1, 1, 0])
    for model, batch, name in (
        (llama, (ids, mask, ids), "position_ids"),
        (bert, (ids, mask, ids % 2), "token_type_ids"),
        (llama, (ids, ids), "attention_mask"),
    ):
        with pytest.raises(
            BatchError, match=rf"\[{len(batch) - 1}\], .* as {name}, but the criterion also reads it: pass a dict"
        ):
            trace(model, batch, of_tokens)
    for model, batch, criterion in (
        (llama, (ids, mask), of_attended),
        (llama, (ids, mask, mask.cumsum(1) - 1), lambda output, _: output.logits.square().mean()),
        (llama, (ids, mask, classes), of_sentences),
        (bert, (ids, mask, classes), of_sentences),
    ):
        assert trace(model, batch, criterion).loss is not None
