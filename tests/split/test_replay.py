"""Tests of replay: the placeholders for values that a stage does not receive."""

from __future__ import annotations

import torch
from torch import nn

from pipeshard.split.replay import Replay
from pipeshard.split.route import Blank


def test_blanks_are_kept_from_step_to_step_and_no_longer() -> None:
    """Up to 16 of full size stayed for ever: on a GPU, gigabytes where lengths change."""
    replay = Replay(nn.Linear(1, 1), {}, frozenset(), 0, torch.device("cpu"))
    kind = Blank(torch.float32, float("nan"))
    first = replay._blank((2, 3), kind)
    replay.free_blanks()
    replay.free_blanks()  # of another stage on this rank
    assert replay._blank((2, 3), kind).data_ptr() == first.data_ptr()
    replay.free_blanks()
    for length in range(4, 40):
        replay._blank((2, length), kind)
        replay.free_blanks()
        assert len(replay._blanks) == 1
