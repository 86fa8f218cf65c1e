"""Tests of batches of any structure: reading, splitting, comparing and merging them; the batch dimension."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from pipeshard import trace
from pipeshard.batch.batch import Batch, check_declared, refuse_unknown
from pipeshard.batch.read import RowDims, read_batch
from pipeshard.batch.tree import tensors_in
from pipeshard.data.first_samples import find_sample
from pipeshard.engine.loss_state import of_entries
from pipeshard.engine.reader import digest
from pipeshard.errors import BatchError, ConfigurationError

IDS = torch.arange(20).view(4, 5)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Inputs:
    ids: Tensor
    name: str = "a"
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.ids.sum(1))


@dataclass
class Sample:
    ids: Tensor
    inner: Inputs | None = None
    names: list[str] | None = None


class Graph:
    def __init__(self, ids: Tensor) -> None:
        self.ids, self.kind = ids, "graph"


class Stubborn(Mapping[str, Tensor]):
    """A mapping that nothing can make but itself."""

    def __init__(self, a: Tensor, b: int) -> None:
        self.a = a

    def __getitem__(self, key: str) -> Tensor:
        return self.a

    def __iter__(self) -> Any:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def nested() -> dict[str, Any]:
    return {
        "ids": IDS,
        "inner": Sample(IDS + 1, Inputs(IDS + 2), ["p", "q", "r", "s"]),
        "encoded": [BatchEncoding({"mask": IDS > 3, "text": ["w", "x", "y", "z"]}), None, "constant"],
        "output": BaseModelOutput(last_hidden_state=IDS.float(), hidden_states=(IDS.float(), IDS.float())),
        "pair": Pair(IDS, 3),
        "names": ("e", "f", "g", "h"),
        "size": (5, 5, 5, 5),
        "loose": SimpleNamespace(ids=IDS, flag=True),
        "graph": Graph(IDS),
        "lengths": [5, 4, 3, 2],
        "table": [0.5, 1.5],
    }


def test_a_nested_batch_is_cut_and_keeps_its_classes() -> None:
    second = Batch.of(nested()).split(num_microbatches=2)[1]
    cut, rows = second.data, slice(2, 4)
    assert second.rows == 2 and torch.equal(cut["ids"], IDS[rows])
    assert type(cut["inner"]) is Sample and type(cut["inner"].inner) is Inputs
    assert torch.equal(cut["inner"].inner.ids, IDS[rows] + 2) and cut["inner"].inner.name == "a"
    assert torch.equal(cut["inner"].inner.total, (IDS[rows] + 2).sum(1))
    assert cut["inner"].names == ["r", "s"]
    encoded, nothing, constant = cut["encoded"]
    assert type(encoded) is BatchEncoding and encoded.text == ["y", "z"] and torch.equal(encoded.mask, IDS[rows] > 3)
    assert (nothing, constant) == (None, "constant")
    assert type(cut["output"]) is BaseModelOutput and len(cut["output"].hidden_states[1]) == 2
    assert type(cut["pair"]) is Pair and torch.equal(cut["pair"].left, IDS[rows]) and cut["pair"].right == 3
    assert cut["names"] == ("g", "h") and cut["size"] == (5, 5, 5, 5)
    assert type(cut["loose"]) is SimpleNamespace and len(cut["loose"].ids) == 2 and cut["loose"].flag
    assert type(cut["graph"]) is Graph and len(cut["graph"].ids) == 2 and cut["graph"].kind == "graph"
    assert cut["lengths"] == [3, 2] and cut["table"] == [0.5, 1.5]


def test_samples_are_taken_and_moved() -> None:
    batch = Batch.of(nested())
    taken = batch.take(torch.tensor([3, 0])).data
    assert taken["inner"].names == ["s", "p"] and taken["lengths"] == [2, 5]
    assert torch.equal(taken["encoded"][0]["mask"], IDS[[3, 0]] > 3)
    moved = batch.to(torch.device("meta")).data
    assert tensors_in(moved) and all(tensor.is_meta for tensor in tensors_in(moved))
    assert moved["names"] == ("e", "f", "g", "h") and type(moved["inner"]) is Sample


def test_paths_are_readable() -> None:
    paths = Batch.of(nested()).paths
    for path in ("ids", "['inner'].inner.total", "['encoded'][0]['mask']", "['output']['hidden_states'][1]", "names"):
        assert path in paths
    assert Batch.of(Sample(IDS, Inputs(IDS))).paths[:3] == ("ids", ".inner.ids", ".inner.name")
    assert Batch.of((IDS, IDS)).paths == ("[0]", "[1]") and Batch.of(IDS).paths == ("[0]",)


def test_a_model_is_called_with_the_batch_as_its_kind_says() -> None:
    def call(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return Batch.of(data).call(lambda *args, **kwargs: (args, kwargs))

    assert [type(one) for one in call(Sample(IDS))[0]] == [Sample] and call(Sample(IDS))[1] == {}
    assert [type(one) for one in call(Graph(IDS))[0]] == [Graph]
    assert call(BatchEncoding({"ids": IDS}))[1].keys() == {"ids"}
    assert call(BaseModelOutput(IDS))[1].keys() == {"last_hidden_state"}
    assert call((IDS, None, "a"))[0][1:] == (None, "a")
    assert type(Batch.of(Sample(IDS)).for_criterion()) is Sample
    assert isinstance(Batch.of(IDS).for_criterion(), Tensor)
    for container in (tuple, list):
        assert type(Batch.of(container([IDS])).for_criterion()) is container
        assert type(Batch.of(container([{"ids": IDS}])).take(torch.tensor([0])).for_criterion()) is container


def test_what_is_no_tensor_is_compared_too() -> None:
    assert digest(Batch.of(nested())) == digest(Batch.of(nested()))  # objects have other addresses
    seen = {digest(Batch.of(nested()))}
    for change in ({"names": ("e", "f", "g", "i")}, {"size": (5, 5, 5, 6)}, {"encoded": []}, {"pair": Pair(IDS, 4)}):
        seen.add(digest(Batch.of({**nested(), **change})))
    assert len(seen) == 5
    assert digest(Batch.of({"ids": IDS, "fn": object()})) == digest(Batch.of({"ids": IDS, "fn": object()}))
    assert Batch.of({"ids": IDS, "names": list("abcd")}).others == Batch.of({"ids": IDS, "names": list("efgh")}).others


def test_a_mapping_that_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(BatchError, match="Stubborn that cannot be built from a dict"):
        Batch.of({"ids": IDS, "odd": Stubborn(IDS, 1)})
    with pytest.raises(BatchError, match="contains no tensor"):
        Batch.of(["a", "b"])


class Reader(nn.Module):
    """Takes ids (b, s) and whatever a test's `glue` makes an addition to the embeddings (b, s, h) of."""

    def __init__(self, glue: Any = None) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(32, 6), nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 32)
        self.glue = glue

    def forward(self, ids: Tensor, **others: Any) -> dict[str, Tensor]:
        x = self.embed(ids)
        if self.glue is not None:
            x = x + self.glue(others)
        return {"loss": self.head(self.layers[0](x)).pow(2).mean()}


def test_what_lists_of_entries_hold_is_part_of_what_a_trace_is_for() -> None:
    data = {"ids": IDS, "names": list("abcd")}
    flow = trace(Reader(lambda others: len(others["names"][0])), data)
    assert flow.watched == {"names"}
    names = [Batch.of({**data, "names": list(names)}) for names in ("abcd", "abcd", "abce")]
    first, same, other = (digest(batch, flow.watched) for batch in names)
    assert first == same != other


def test_arrays_are_cut_like_lists() -> None:
    """Every microbatch received the whole array. A digest was computed from an array's repr, which omits elements."""
    arrays = {
        "scales": np.arange(4.0),
        "names": np.array(["a", None, {}, "d"], dtype=object),
        "images": np.zeros((4, 999, 2)),
        "table": np.zeros((3, 4)),
        "total": np.array(4),
    }
    batch = Batch.of({"ids": IDS, **arrays})
    assert batch.entries.keys() == {"scales", "names", "images"}
    cut, taken = batch.split(2)[1].data, batch.take(torch.tensor([3, 0])).data
    assert cut["scales"].tolist() == [2.0, 3.0] and taken["names"].tolist() == ["d", "a"]
    assert cut["images"].shape == (2, 999, 2) and cut["table"] is arrays["table"] and cut["total"] is arrays["total"]
    first, same, other = (np.zeros((4, 999, 2)) for _ in range(3))
    other[2, 500, 1] = 1
    first, same, other = (digest(Batch.of({"ids": IDS, "images": images})) for images in (first, same, other))
    assert first == same != other
    assert of_entries(batch) == of_entries(Batch.of({"ids": IDS, **copy.deepcopy(arrays)}))


def test_no_class_is_registered_with_torch() -> None:
    before = set(SUPPORTED_NODES)
    Batch.of(nested()).split(2)
    assert set(SUPPORTED_NODES) == before


def test_tensors_inside_of_entries_are_moved_and_compared() -> None:
    def of(last: int) -> Batch:
        samples = [Sample(torch.arange(k + 1)) for k in range(3)] + [Sample(torch.tensor([last]))]
        return Batch.of({"ids": IDS, "samples": samples})

    batch = of(0)
    assert batch.entries.keys() == {"samples"} and digest(batch) == digest(of(0)) != digest(of(1))
    moved = batch.to(torch.device("meta")).data["samples"]
    assert all(type(sample) is Sample and sample.ids.is_meta for sample in moved)


def dims(data: Any, declared: Any = None) -> dict[str, int | None]:
    batch = RowDims(Reader(), declared).read(data)
    return dict(zip(batch.paths, batch.row_dims, strict=True))


TIME = torch.rand(5, 4)  # (s, b)


def test_another_dimension_has_to_be_declared() -> None:
    data = {"ids": IDS, "y": TIME}
    with pytest.raises(BatchError, match=r"dimension 1 of y \(5, 4\).*batch_dims=\{'y': 1\}\)[.] .*\{'y': None\}"):
        dims(data)
    assert dims(data, {"y": 1}) == {"ids": 0, "y": 1} and dims(data, {"y": None})["y"] is None
    assert RowDims(Reader()).read(data, is_cut=False).row_dims == (0, None)
    with pytest.raises(BatchError, match=r"dimension 1 of y .* and dimension 1 of z .* are batch dimensions"):
        dims({**data, "z": torch.rand(3, 4, 5)})


def test_what_every_microbatch_needs_whole_stays_whole() -> None:
    assert dims({"ids": IDS[:, :4], "mask": torch.rand(1, 1, 4, 4)})["mask"] is None
    assert dims({"ids": IDS, "size": torch.tensor(3), "mask": torch.rand(1, 1, 5, 5)})["mask"] is None


def test_a_dimension_that_once_had_another_size_is_never_in_doubt() -> None:
    """Positions (1, s) and a table of 6: a batch of s samples, or of 3, comes later."""
    known = RowDims(Reader())
    for rows, length in ((4, 7), (7, 7), (3, 5)):
        ids, table = torch.zeros(rows, length, dtype=torch.long), torch.rand(6, 2)
        batch = known.read({"ids": ids, "places": torch.arange(length)[None], "table": table})
        assert batch.row_dims == (0, None, None), (rows, length)


def test_positions_with_planes_are_cut_whatever_the_number_of_samples() -> None:
    """With as many samples as planes, the first dimension seemed to count them, and every microbatch got all."""
    for sizes in ((4, 3, 5), (3, 4)):
        known = RowDims(Reader())
        for rows in sizes:
            planes = torch.arange(5).expand(3, rows, 5)
            batch = known.read({"ids": torch.zeros(rows, 5, dtype=torch.long), "position_ids": planes})
            assert batch.row_dims == (0, 1)


def test_declared_dimensions() -> None:
    batch = Batch.of({"x": torch.rand(5, 4, 3), "y": torch.rand(5, 4)}, declared={"x": 1, "y": -1})
    assert batch.rows == 4 and batch.row_dims == (1, 1)
    assert [part.data["x"].shape for part in batch.split(3)] == [(5, 2, 3), (5, 1, 3), (5, 1, 3)]
    sizes = Batch.of({"x": IDS, "sizes": [4, 4, 4, 4], "hw": (7, 7, 7, 7)}, declared={"sizes": None, "hw": 0})
    assert sizes.row_dims == (0, None, 0)
    first = {"mask": torch.rand(5, 5), "x": torch.rand(5, 4)}
    assert Batch.of(first, declared={"mask": None, "x": 1}).rows == 4


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        (
            {"y": 1},
            "dimension 1 of y as the batch dimension, but this dimension has size 3, and the batch has 4 samples "
            r"\(dimension 0 of ids\)",
        ),
        ({"y": 2}, r"dimension 2 of y as the batch dimension, but y has shape \(4, 3\)"),
        ({"ids": None, "y": None}, "must have a batch dimension"),
        ({"name": 0}, "dimension 0 of name as the batch dimension, but name has type str"),
    ],
)
def test_a_declaration_that_does_not_fit(declared: dict[str, int | None], what: str) -> None:
    with pytest.raises(BatchError, match=what):
        Batch.of({"ids": IDS, "y": torch.rand(4, 3), "name": "a"}, declared=declared)


def test_declarations_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_dims names \['z'\].* paths of the batch are \['ids'\]"):
        refuse_unknown(("ids",), {"z": 1})
    for wrong in (["x"], {"x": "1"}, {1: 1}, {"x": True}):
        with pytest.raises(ConfigurationError, match="batch_dims must map the paths of leaves"):
            check_declared(copy.copy(wrong))


@pytest.mark.parametrize("is_function", [False, True])
def test_a_sample_on_the_meta_device_is_refused(is_function: bool) -> None:
    """A batch was made under torch.device("meta"): it has no values that a model can be traced or proven with.
    The error names the leaf, and not the operator that failed on it."""
    sample = {"x": torch.zeros(2, 3, device="meta")}
    given = (lambda size, device: sample) if is_function else sample
    with pytest.raises(BatchError, match=r"x: a tensor of shape \(2, 3\) is on the meta device"):
        find_sample(nn.Linear(3, 3), given, None, {}, 2, torch.device("cpu"))


def test_a_sparse_tensor_is_refused_by_its_path() -> None:
    """A sparse adjacency matrix ended in an error about its storage or strides, from within the trace or a digest."""
    for sparse in (Tensor.to_sparse_coo, Tensor.to_sparse_csr):
        data = {"x": torch.zeros(4, 2), "beside": {"table": sparse(torch.eye(6))}}
        with pytest.raises(
            BatchError, match=r"\['beside'\]\['table'\]: a tensor of shape \(6, 6\) is sparse.*to_dense"
        ):
            read_batch(nn.Linear(2, 2), data)
