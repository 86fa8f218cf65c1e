"""Batches that hold nothing but lists or objects, and batches whose last entries are for the criterion."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeshard.batch.read import RowDims
from pipeshard.errors import BatchError
from tests.pool import Pool
from tests.unsplit import Split, gradient_error

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
            if not max(error, gradient_error(split, unsplit)) < 1e-6:
                found.append(f"{kind}: {error}, {gradient_error(split, unsplit)}")
            unsplit.zero_grad()
            split.optimizer.zero_grad()
    return found


def test_a_batch_of_lists_is_cut_along_its_samples(pool: Pool) -> None:
    """A detector's batch is a list of images and a list of dicts, without a tensor outside of them.
    The channels of the first image counted as the samples: "there are 3 samples"."""
    assert pool.run(trained_on_lists, 2) == [[], []]


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
    with pytest.raises(BatchError, match=r"lists of 3 entries, \[0\] and \[1\].*batch_dims={'\[0\]': 0, '\[1\]': 0}"):
        RowDims(Detector()).read((images, labels))
    assert RowDims(Detector(), {"[0]": 0, "[1]": 0}).read((images, labels)).rows == 3
    assert RowDims(Detector(), {"[0]": None, "[1]": None}).read((images, labels)).rows == CHANNELS
    of_three = [{"labels": torch.zeros(3)} for _ in boxes]
    with pytest.raises(BatchError, match="may be one for each sample, or not"):
        RowDims(Detector()).read((images, of_three))
    declared = RowDims(Detector(), {"images": 0}).read({"images": [torch.zeros(4, 2)] * 2})
    assert declared.rows == 2
