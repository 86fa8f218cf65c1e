"""Table: a data set as columns, one tensor each, whose first dimension counts the samples."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Table(Dataset[dict[str, Tensor]]):
    """Its rows are samples; `columns` is the batch of them all."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def divided(self, held_out: int) -> tuple["Table", dict[str, Tensor]]:
        """The samples to train on, and one batch of `held_out` others, chosen by chance, but always the same."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        rest, chosen = order[held_out:], order[:held_out]
        training = Table(**{name: column[rest] for name, column in self.columns.items()})
        return training, {name: column[chosen] for name, column in self.columns.items()}
