"""torch_geometric: networks on the nodes of one graph, and on batches of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as geometric
from torch_geometric.data import Batch, Data

from tests.packages.model import Model, Remedy

ONE = {"num_microbatches": 1}
NODES, EDGES, FEATURES, CLASSES = 12, 30, 8, 4


def graph() -> dict[str, Tensor]:
    return {
        "x": torch.randn(NODES, FEATURES),
        "edge_index": torch.randint(NODES, (2, EDGES)),
        "criterion.labels": torch.randint(CLASSES, (NODES,)),
    }


def of_nodes(name: str, **given: Any) -> Model:
    def build() -> nn.Module:
        model: nn.Module = getattr(geometric, name)(FEATURES, 16, 4, CLASSES, **given)
        return model

    return Model("torch_geometric", f"{name}, nodes", build, graph, options=ONE)


class OfGraphs(nn.Module):
    """A prediction for each graph, of its nodes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(16, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        found = geometric.global_mean_pool(self.body(x, edge_index), batch, size=4)
        return self.head(found).squeeze(-1)


def molecules() -> Any:
    graphs = [
        Data(x=torch.randn(3 + k, FEATURES), edge_index=torch.randint(3 + k, (2, 6)), y=torch.randn(1))
        for k in range(4)
    ]
    return Batch.from_data_list(graphs)


def of_molecules() -> dict[str, Tensor]:
    data = molecules()
    return {"x": data.x, "edge_index": data.edge_index, "batch": data.batch, "criterion.y": data.y}


class OfData(nn.Module):
    """One that takes PyG's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = OfGraphs(geometric.GIN(FEATURES, 16, 4))

    def forward(self, data: Any) -> Tensor:
        found: Tensor = self.model(data.x, data.edge_index, data.batch)
        return found


def squared(output: Any, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch["criterion.y"])


def squared_of_data(output: Any, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch.y)


def of_graphs(name: str, build: Callable[[], nn.Module]) -> Model:
    return Model("torch_geometric", f"{name}, graphs", lambda: OfGraphs(build()), of_molecules, squared, options=ONE)


def atoms() -> dict[str, Tensor]:
    return {
        "z": torch.randint(1, 10, (NODES,)),
        "pos": torch.randn(NODES, 3),
        "batch": torch.arange(4).repeat_interleave(3),
        "criterion.y": torch.randn(4),
    }


def of_energies(output: Any, batch: Any) -> Tensor:
    return functional.mse_loss(output.squeeze(-1), batch["criterion.y"])


class Dense(nn.Module):
    """Blocks of DeepGCN, whose layers are of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.layers = nn.ModuleList(
            geometric.DeepGCNLayer(geometric.GENConv(16, 16), nn.LayerNorm(16), nn.ReLU(), block="res+", dropout=0.0)
            for _ in range(4)
        )
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.last(x)


MODELS = [
    *(of_nodes(name) for name in ("GCN", "GAT", "GraphSAGE", "GIN")),
    of_nodes("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 3, 5, 4])),
    of_nodes("EdgeCNN"),
    Model("torch_geometric", "GCN, nodes in two microbatches", lambda: geometric.GCN(8, 16, 4, 4), graph),
    Model("torch_geometric", "DeepGCN, nodes", Dense, graph, options=ONE),
    Model(
        "torch_geometric",
        "GraphUNet, nodes",
        lambda: geometric.GraphUNet(8, 16, 4, 2),
        graph,
        options=ONE,
        remedies=[Remedy("pp_size=1", "pp_size=1", stages=1)],
    ),
    of_graphs("GCN", lambda: geometric.GCN(FEATURES, 16, 4)),
    of_graphs("GIN", lambda: geometric.GIN(FEATURES, 16, 4)),
    Model("torch_geometric", "GIN, a batch of Data", OfData, molecules, squared_of_data, options=ONE),
    Model(
        "torch_geometric",
        "GCN, graphs in two microbatches",
        lambda: OfGraphs(geometric.GCN(FEATURES, 16, 4)),
        of_molecules,
        squared,
    ),
    Model(
        "torch_geometric",
        "SchNet, energies",
        lambda: geometric.SchNet(16, 16, 4, 8, cutoff=9.0, interaction_graph=complete),
        atoms,
        of_energies,
        options=ONE,
    ),
]


def complete(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of atoms of a molecule, with their distances: without the package that searches neighbours."""
    same = batch[:, None] == batch[None, :]
    same.fill_diagonal_(False)
    edges = same.nonzero().t()
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)
