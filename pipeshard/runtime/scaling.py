"""Loss scale: lifts fp16 gradients above what underflows, and gives way when one overflows."""

LEAST, MOST = 1.0, 2.0**32


class LossScale:
    """The factor that losses are multiplied with before backward, always a power of two.

    It is halved after a step in which a gradient overflowed, which is left out, and doubled after `interval` steps in
    a row without (Micikevicius et al. 2018, arXiv:1710.03740).
    """

    def __init__(self, initial: float = 2.0**16, interval: int = 1000) -> None:
        self.value, self.interval = initial, interval
        self.steps = 0  # in a row without an overflow

    def update(self, overflow: bool) -> None:
        if overflow:
            self.value, self.steps = max(LEAST, self.value / 2), 0
            return
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = min(MOST, self.value * 2), 0

    def state_dict(self) -> dict[str, float | int]:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.value, self.steps = float(state["value"]), int(state["steps"])
