"""Programs: random models, whose forwards combine layers and glue as users combine them."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.hunt.cases import Case

V, LONGEST = 11, 16

# Expressions of glue. `{a}`, `{b}` and `{c}` are earlier tensors of the forward, of the shape (samples, positions, H).
EXPRESSIONS = (
    "{a} + {b}",
    "{a} * 1.5",
    "{a} - {b}.detach() * 0.3",
    "torch.cat([{a}, {b}], 1)[:, -x.shape[1]:]",
    "torch.cat([*{a}.chunk(2, -1)][::-1], -1)",
    "torch.stack({a}.unbind(1), 1)",
    "torch.stack([{a}, {b}], -1).amax(-1)",
    "torch.where(ids[..., None] > 3, {a}, {b})",
    "torch.where({a} > 0, {b}, {c})",
    "torch.maximum({a}, {b})",
    "{a}.transpose(1, 2).contiguous().transpose(1, 2)",
    "{a}.view(*ids.shape, 2, H // 2).flip(2).reshape(*ids.shape, H)",
    "{a}.gather(1, ids.argsort(1)[..., None].expand(-1, -1, H))",
    "{a}.masked_fill((ids == 2)[..., None], 0.0)",
    "{a} * (ids > 1).double()[..., None]",
    "{a} * ids.shape[1] / 4",
    "{a} / ids.ne(0).sum(1).clamp(min=1)[:, None, None]",
    "{a} / {a}.norm(dim=-1, keepdim=True).clamp(min=1e-3)",
    "{a}.mean(1, keepdim=True) + {b}",
    "{a}.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]",
    "{a}.sort(-1).values",
    "{a}.roll(1, 1)",
    "F.pad({a}, (0, 0, 1, 0))[:, :-1]",
    "F.pad({a}, (0, 0, 0, -ids.shape[1] % 4))[:, :ids.shape[1]]",
    "F.avg_pool1d({a}.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
    "F.linear({a}, self.embed.weight[:H]) * 0.1 + x",
    "({a} @ {b}.mT).tril().softmax(-1) @ {c}",
    "torch.einsum('btd,bsd->bts', {a}, {b}).softmax(-1) @ {a}",
    "torch.complex({a}, {b}).abs()",
    "functools.reduce(torch.add, [{a}, {b}, {c}]) / 3",
    "sum(k * t for k, t in enumerate([{a}, {b}, {c}])) / 3",
    "(lambda t, k=0.5: t * k)({a})",
    "checkpoint(lambda a, b: a * b.sigmoid(), {a}, {b}, use_reentrant=False)",
    "layers.Reverse.apply({a})",
    "{a} + self.positions(torch.arange(ids.shape[1]))",
)
# Statements of glue that compute the tensor `{v}`; `{w}` is another new name.
STATEMENTS = (
    "{v} = {a}.clone(); {v}.add_({b}, alpha=0.3)",
    "{v} = {a}.clone(); {v}[:, 1:] += 0.1 * {b}[:, :-1]",
    "{v} = torch.zeros_like({a}); {v}[ids > 2] = {b}[ids > 2].tanh()",
    "{v} = {a}.new_zeros(len(ids), x.shape[1] + 1, H); {v}[:, 1:] = {b}; {v} = {v}[:, :-1]",
    "{w} = [{a}, {b}]; {w}.append({c}); {v} = torch.stack({w}).mean(0)",
    "{w} = dict(a={a}, b={b}); {v} = {w}.pop('b') * 0.5 + {w}['a']",
    "{w} = deque([{a}, {b}], maxlen=2); {w}.append({c}); {v} = {w}[0] + 0.1 * {w}[-1]",
    "{w} = layers.Output({a}, [{b}]); {v} = {w}.hidden + {w}.extra[0]",
    "{w} = SimpleNamespace(q={a}, k={b}); {v} = {w}.q * {w}.k.sigmoid()",
    "self.{w} = {a}; {v} = self.{w}.relu()",
    "{v} = {a}\n{v} = {v} * 1.2 if self.training else {v}",
    "{v} = {a}\nif ids.shape[1] > 5: {v} = {v} * 1.1",
    "{v} = {a}\nif (ids == 1).any(): {v} = {v} * 1.0",
    "{v} = {a}\nfor {w} in range(2): {v} = {v} + 0.1 * torch.sin({v})",
    "{v} = getattr(self, 'absent', None)\nif {v} is None: {v} = {a}",
    "with torch.no_grad(): {w} = {a}.mean(-1, keepdim=True)\n{v} = {b} - {w}",
    "def {w}(t, u={a}): return t + 0.1 * u\n{v} = {w}({b})",
)
# Statements that read an attribute `{w}` of the model, each with this attribute's value.
WITH_ATTRIBUTE = (
    ("nn.Parameter(torch.randn(H) * 0.1)", "{v} = {a} * (1 + self.{w})"),
    ("nn.Parameter(torch.zeros(2))", "{v} = sum(p * t for p, t in zip(self.{w}.softmax(0), [{a}, {b}]))"),
    ("nn.Linear(H, H)", "{v} = {a} + self.{w}({b})"),
    ("nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU())", "{v} = {a} + self.{w}({b})"),
    ("{{}}", "self.{w}['k'] = {a}; {v} = {b} - 0.1 * self.{w}['k']"),
    ("torch.full((H,), 0.5)", "{v} = {a} * self.{w}"),
)
# The calls of each class of layers, `{layer}`. The new tensor is `{v}` or, if the call has two entries, the second one.
CALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Plain": (
        ("{v} = {layer}({a})",),
        ("{v} = checkpoint({layer}, {a}, use_reentrant=False)",),
        ("{v} = checkpoint(lambda t: {layer}(t) * 1.1, {a}, use_reentrant=False)",),
    ),
    "Gated": (("{v} = {layer}({a}, other={b})",), ("{v} = {layer}({a}, None, scale=ids.shape[1] / 10)",)),
    "Attention": (("{v} = {layer}({a}, ids > 0)",), ("{v} = {layer}({a}, bias=torch.arange(ids.shape[1]) * 0.01)",)),
    "Pair": (("{v}, {w} = {layer}({a})",), ("{v}, {w} = {layer}({a})", "{v} * {w}[..., 1:]")),
    "Listing": (("{v}, *{w} = {layer}({a})", "{w}[0] * {w}[2]"), ("{v} = {layer}({a})[0]",)),
    "Nested": (("{v}, {w} = {layer}({a})", "{w}['z']"), ("{v}, {w} = {layer}({a})", "{w}['pairs'][0][1] + {v}")),
    "Returning": (("{v} = {layer}({a}).hidden",), ("{v} = {layer}({a})", "{v}.hidden + {v}.extra")),
    "Appending": (("{v} = {layer}({a}, store)",), ("{v} = {layer}({a}, store)", "{v} + store[0]")),
    "Caching": (("{v} = {layer}({a}, cache)",), ("{v} = {layer}({a}, cache)", "{v} + cache[0]")),
    "Carrying": (("carried = {layer}(carried)", "carried.h * (1 + 0.1 * carried.count)"),),
    "Keeping": (("{v} = {layer}({a})",), ("{v} = {layer}({a})", "{v} + 0.5 * {layer}.last")),
    "Sharing": (("{v} = {layer}({a}, begins={begins})",),),
    "Writing": (("{v} = {layer}({a})",),),
    "Recurrent": (("{v}, {w} = {layer}({a})", "{v} + {w}.transpose(0, 1)"), ("{v}, {w} = {layer}({a})",)),
    "Twin": (("{v}, {w} = {layer}({a}, {b})", "{v} - {w}"),),
    "Experts": (("{v} = {layer}({a})",),),
    "Stacked": (("{v}, {w} = {layer}({a})", "{v} + {w}[0]"),),
}
HEADS = "self.head(z)", "self.head(self.norm(z))", "F.linear(z, self.embed.weight)"
LOSSES = (
    "F.cross_entropy(logits.transpose(1, 2), labels)",
    "F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))",
    "F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=1)",
    "F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)",
    "F.mse_loss(logits.mean(-1), labels.double())",
    "-logits.log_softmax(-1).gather(-1, labels[..., None]).mean()",
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": "zbv"},
    {"schedule": "interleaved", "num_model_chunks": 2},
    {"recompute": True},
)
MODEL = """\
import functools
from collections import deque
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hunt import program_layers as layers

H, V = layers.H, {V}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        shared = SimpleNamespace(last=None)
        self.embed, self.positions = nn.Embedding(V, H), nn.Embedding({LONGEST}, H)
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, V)
        self.layers = nn.ModuleList([{made}])
{attributes}
        self.double()

    def forward(self, ids, labels):
        x = self.embed(ids) + self.positions.weight[:ids.shape[1]]
        store, cache, carried = [], {{}}, SimpleNamespace(h=x, count=0)
{body}
        logits = {head}
        return {{"loss": {loss}, "logits": logits}}
"""


class _Forward:
    """The lines of a forward, and the tensors that its later lines may read."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.attributes: list[str] = []
        self.tensors = ["x"]
        self.count = 0

    def add(self, template: str, result: str = "{v}", **names: str) -> None:
        """Add the lines of a template, and the tensor that they compute."""
        self.count += 1
        tensors = {key: self.tensor() for key in "abc"}
        every = {"v": f"v{self.count}", "w": f"w{self.count}", **tensors, **names}
        self.lines += template.format(**every).split("\n")
        self.tensors.append(f"({result.format(**every)})")

    def tensor(self) -> str:
        """Most often the newest tensor."""
        return self.tensors[-1] if self.random.random() < 0.6 else self.random.choice(self.tensors)

    def add_glue(self) -> None:
        kind = self.random.random()
        if kind < 0.6:
            self.add("{v} = " + self.random.choice(EXPRESSIONS))
        elif kind < 0.85:
            self.add(self.random.choice(STATEMENTS))
        else:
            value, template = self.random.choice(WITH_ATTRIBUTE)
            self.attributes.append(f"self.w{self.count + 1} = {value.format()}")
            self.add(template)


def source(seed: int) -> str:
    """The source of the model with this number."""
    forward = _Forward(seed)
    choice = forward.random.choice
    kinds = [choice([*CALLS]) for _ in range(forward.random.randint(4, 6))]
    for k, kind in enumerate(kinds):
        for _ in range(choice([0, 1, 1, 2])):
            forward.add_glue()
        layer = k if forward.random.random() < 0.9 else kinds.index(kind)  # some layers are called twice
        forward.add(*choice(CALLS[kind]), layer=f"self.layers[{layer}]", begins=str(kind not in kinds[:k]))
    forward.lines.append(f"z = {forward.tensor()} + {forward.tensors[-1]}")
    return MODEL.format(
        V=V,
        LONGEST=LONGEST,
        made=", ".join(f"layers.{kind}({'shared' if kind == 'Sharing' else ''})" for kind in kinds),
        attributes="\n".join(f"        {line}" for line in forward.attributes),
        body="\n".join(f"        {line}" for line in forward.lines),
        head=choice(HEADS),
        loss=choice(LOSSES),
    )


def _batches(seed: int) -> Sequence[dict[str, Tensor]]:
    generator, sizes = torch.Generator().manual_seed(seed), random.Random(seed)
    shapes = [(4, 6), (sizes.choice([3, 4, 5, 7]), sizes.choice([4, 6, 9])), (4, 6)]
    return [{name: torch.randint(V, shape, generator=generator) for name in ("ids", "labels")} for shape in shapes]


def _sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)  # a larger rate makes some of these models diverge


def case(seed: int, file: Path) -> Case:
    """The case with this number, whose model's source is in the file."""
    choice = random.Random(seed).choice
    options = {"num_microbatches": choice([1, 2, 4]), "verify": choice([False, True]), **choice(OPTIONS)}
    return Case(_load(file).Model, f"random program {seed}", _batches(seed), options, optimizer=_sgd)


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
