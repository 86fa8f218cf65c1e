"""Cases: models that once trained wrong, each with the expected result: exact, or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from tests.hunt import labels, nets, switches, values
from tests.hunt.nets import Net, data

Batch = Mapping[str, Any]


def ordinary(count: int = 2) -> list[Batch]:
    return [data(seed) for seed in range(count)]


def unpadded(*but: int) -> Batch:
    """A batch whose ids are padded with 0 only in the rows `but`."""
    batch = data()
    batch["ids"].clamp_(min=1)[list(but), 0] = 0
    return batch


@dataclass(frozen=True)
class Case:
    """A model trained by the plugin with `options`, beside itself unsplit. `prepare` is called with each of the two
    before, `between` with each before every step; each has a `criterion` of its own; `refused` is what the error says
    where it is not exact."""

    make: Callable[[], nn.Module]
    story: str
    batches: Sequence[Batch] = field(default_factory=ordinary)
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], object] | None = None
    between: Callable[[int, nn.Module], object] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    criterion: Callable[[], Any] | None = None
    refused: str = ""


@torch.no_grad()
def evaluated(model: nn.Module) -> None:
    model(**data(7))


def warm(step: int, model: Any) -> None:
    model.frozen = step < 1


def switched(step: int, model: Any) -> None:
    model.use = step > 0


def switch(step: int, model: Any) -> None:
    switches.switch(step > 0)


def off(model: Any) -> None:
    switches.switch(False)


def adds(step: int, model: Any) -> None:
    nets.Criterion.adds = step == 1


def sums(step: int, model: Any) -> None:
    nets.Criterion.reduction = "sum" if step == 1 else "mean"


class Weighs(nets.Criterion):
    """Its weights are other ones from the second step on."""

    latest: ClassVar[list[nets.Criterion]] = []

    def __init__(self) -> None:
        super().__init__()
        self.latest.append(self)


def weighs(step: int, model: Any) -> None:
    for criterion in Weighs.latest if step else ():
        criterion.weight[::2] = 0.1


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.5)


CASES = {
    "stashed on the layer": Case(
        nets.Stashed,
        "Each layer leaves its auxiliary loss on itself, as in Megatron's mixtures of experts: the loss missed the "
        "terms of other stages, since a visit undid the attribute before glue could read it.",
    ),
    "by torch.func": Case(
        nets.Energies, "Layers take gradients by torch.func.grad: refused by an error of torch's about storages."
    ),
    "in a list": Case(nets.InList, "Layers append their losses to a list that glue hands them: lost with the copy."),
    "in a dict": Case(nets.InDict, "The same with a dict: only mappings that were no plain dict were known."),
    "in a namespace": Case(nets.InNamespace, "The same with an object's attribute, which nobody looked at."),
    "in a global": Case(nets.InGlobal, "Layers append to a list of their module and count in a global."),
    "in a registry": Case(nets.InRegistry, "Layers share an object whose dict they fill; it is no argument at all."),
    "a running buffer": Case(
        nets.RunningBuffer, "The loss reads a buffer that layer 0 moves: the last stage had a stale one of its own."
    ),
    "a context": Case(
        nets.ContextThrough,
        "An object goes through the layers, which add to it: later stages got the trace's, with the dry run's values.",
    ),
    "a new context": Case(nets.NewContext, "Each layer returns a new dataclass: its tensors could not be followed."),
    "own number": Case(
        nets.OwnNumber, "Each layer returns a float of its own: all got the first one's, as floats counted as equal."
    ),
    "a value asked for": Case(
        nets.ValueAsked,
        "Layers decide on a mask: ColossalAI makes any number on meta 0, so the other way was seen, whose gradient of "
        "the embedding is not sent back.",
    ),
    "a device": Case(
        nets.DeviceKept,
        "A cache remembers the device of what is in it, which is meta in a visit: XLM was refused for it.",
    ),
    "number read": Case(
        nets.NumberRead,
        "Layers return a number read off their activations: other stages took the trace's, which ran on zeros.",
        refused="must not depend on the values of tensors",
    ),
    "rows": Case(
        nets.CountsRows,
        "Layers count their rows (speechbrain's LiGRU): compared with the trace's number, which follows from the size.",
    ),
    "pyramids": Case(
        nets.Pyramids,
        "Glue keeps tensors for later glue (torchvision's RAFT): the last stage put the old ones back after its "
        "forward, though it had the new ones, and the proof refused the model.",
    ),
    "by place": Case(
        nets.ByPlace, "Odd layers return a loss: all were taken for one kind, as numbers of layers did not count."
    ),
    "detaches by config": Case(
        nets.DetachesByConfig, "A layer's own config tells it to detach: the layers before it got gradients, or none."
    ),
    "twin": Case(
        nets.Twin,
        "A target projection under no_grad, then an online one of its class: both were taken for one kind, and the "
        "whole backbone got no gradient.",
    ),
    "hook": Case(nets.Hooked, "A hook inside layer 1 keeps a tensor; only those in the first of a kind were found."),
    "hook, evaluated": Case(
        nets.Hooked, "The same for a model that was run before: the trace took the old tensor.", prepare=evaluated
    ),
    "warming up": Case(
        nets.Warming,
        "A flag detaches the backbone, and is taken off after a step: the old Dataflow was used on, and the first "
        "stage never got a gradient.",
        ordinary(3),
        {"partition": [5, 1]},
        between=warm,
    ),
    "two tasks": Case(
        nets.TwoTasks,
        "The second head counts where a batch has labels for it: the Dataflow of a batch without was used for one "
        "with, and a gradient was lost.",
        [nets.two_tasks(k, k != 2, k != 1) for k in range(4)],
    ),
    "a second task later": Case(
        nets.TwoTasks,
        "The same where no head for the second task was seen at boost, so that no stage has it.",
        [nets.two_tasks(0, True, False), nets.two_tasks(1, True, True)],
    ),
    "routed": Case(nets.Routed, "Integers that nobody needed at first were zeros when somebody did.", between=switched),
    "probe": Case(
        nets.Probe,
        "The head detaches its input inside: zeros came back where nothing should, and AdamW decayed the backbone.",
        ordinary(3),
        optimizer=adamw,
    ),
    "aliases": Case(
        nets.Aliases,
        "A unit returns a tensor and a view of it, and glue writes into the view: received, they are two tensors.",
    ),
    "aliases cut": Case(
        nets.Aliases,
        "The same with a cut between layers, where the change would be missed.",
        options={"partition": [3, 3]},
        refused="untracked",
    ),
    "listening": Case(
        nets.ListeningGlue,
        "Glue scales a gradient by a hook, and two stages run that glue: it was scaled twice.",
        options={"partition": [4, 4]},
        refused="no single stage that registers the hook has the tensor's full gradient",
    ),
    "listening late": Case(
        nets.ListeningLate,
        "A layer of stage 0 uses a tensor of glue, and then glue hooks it: stage 0 had no hook, and was not seen.",
        options={"partition": [3, 3]},
        refused="no single stage that registers the hook has the tensor's full gradient",
    ),
    "keeping twice": Case(
        nets.KeepsTwice,
        "Two stages call one layer, which keeps its last result: the proof compared that of the first stage.",
        options={"partition": [3, 4], "verify": True},
    ),
    "hidden views": Case(
        nets.HiddenViews,
        "A layer views a tensor that it finds in an object: the tensor then counted as escaped from this layer.",
        options={"partition": [3, 3]},
    ),
    "steps by labels": Case(
        nets.StepsByLabels, "An odd or even sum of labels decides on a skip connection.", ordinary(4)
    ),
    "measures": Case(nets.Measures, "Layers keep a number of their activations: refused, though nothing reads it."),
    "measures and reads": Case(
        nets.MeasuresAndReads,
        "The model reads that number of all layers: of those on other stages it is what the trace found for zeros.",
        refused="changes largest",
    ),
    "flags": Case(
        nets.Flags,
        "A layer's flag differs in the second microbatch of the second step: other stages read the trace's flag.",
        [unpadded(), unpadded(3)],
        {"num_microbatches": 2},
        refused="leaves False in is_set, but the trace recorded True",
    ),
    "flags later": Case(
        nets.FlagsPadded,
        "The same if the layer sets its flag for the first time.",
        [unpadded(), unpadded(3)],
        {"num_microbatches": 2},
        refused="leaves True in is_set, but the trace recorded False",
    ),
    "flags of a global": Case(
        nets.FlagsOfAGlobal,
        "The flag is in a global object: it was compared in the first microbatch only, and other stages kept that one.",
        [unpadded(), unpadded(3)],
        {"num_microbatches": 2},
        refused="leaves False in .*is_set, but the trace recorded True",
    ),
    "counts of a global": Case(
        nets.CountsInAGlobal,
        "Each layer counts its calls in one global: the counts of two stages would differ.",
        refused="layers.3 change __class__.stats.calls",
    ),
    "counts": Case(
        nets.Counts,
        "A counter that only its own layer reads, though other code has its name.",
        options={"verify": False},
    ),
    "counts near": Case(
        nets.CountsNear, "The next layer reads the counter, on the same stage.", options={"verify": False}
    ),
    "counts far": Case(
        nets.CountsFar,
        "A layer on another stage reads it: it read the trace's count in each step.",
        options={"verify": False},
        refused="leaves 2 in calls, but the trace recorded 1",
    ),
    "an array of samples": Case(
        nets.ScaledByArray,
        "A numpy array with one number per sample: every microbatch got all of it.",
        [nets.with_array(seed) for seed in range(2)],
        {"num_microbatches": 2},
    ),
    "switches gradients": Case(
        nets.SwitchesGradients,
        "The first stage left the forward before gradients were turned back on.",
        options={"partition": [3, 3], "num_microbatches": 2},
    ),
    "switches gradients, zbv": Case(
        nets.SwitchesGradients,
        "The same with two stages on each rank.",
        options={"schedule": "zbv", "num_microbatches": 4, "verify": False},
    ),
    "popping": Case(nets.Popping, "Layers push onto and pop from one list: its copy was changed, not the list."),
    "sized": Case(
        nets.Sized,
        "A layer returns the number of positions: with another length the trace's was used.",
        [data(0), data(1, length=9), data(2, length=4)],
    ),
    "another module's": Case(
        nets.ByModule,
        "A model goes by a global of another module (mylib.IS_ON), which nobody looked at: what layer 0 made was "
        "not sent, and the loss was not a number.",
        ordinary(3),
        prepare=off,
        between=switch,
    ),
    "a thread's": Case(nets.ByThread, "The same by a threading.local.", ordinary(3), prepare=off, between=switch),
    "a context's": Case(nets.ByContext, "The same by a ContextVar.", ordinary(3), prepare=off, between=switch),
    "a function's": Case(nets.ByFunction, "By an attribute of a function.", ordinary(3), prepare=off, between=switch),
    "a cache's": Case(
        nets.ByCache,
        "The same by what a function has cached: that cannot be looked at, and the loss was not a number.",
        ordinary(3),
        prepare=off,
        between=switch,
        refused="uses different unit outputs",
    ),
    "a count's": Case(
        nets.ByCount,
        "The same by a count of its own forwards, which changes in each.",
        options={"verify": False},
        refused="uses different unit outputs",
    ),
    "an iterator": Case(nets.Counting, "The trace took what was meant for steps.", refused="cannot be rewound"),
    "iterators": Case(nets.CountingLayers, "The same in layers.", refused="cannot be rewound"),
    "generators": Case(nets.Yielding, "A generator ran outside of its layer, on meta.", refused="returns a generator"),
    "an array counts": Case(nets.CountingArray, "What the trace counted in a numpy array stayed there."),
    "an array measures": Case(
        nets.MeasuringArray,
        "Numbers that layers leave in an array were the trace's elsewhere.",
        options={"verify": False},
        refused="changes",
    ),
    "put back": Case(
        nets.Nested,
        "A stage leaves the forward before its end, where glue puts back a depth: it grew with every step.",
        ordinary(3),
    ),
    "taken": Case(nets.Taking, "The same for a sum in a closure: backward went through the graph of the step before."),
    "collected": Case(
        nets.Collecting,
        "The criterion empties a list of losses: on stages without it the list grew, with a graph of every forward.",
        criterion=nets.Collects,
    ),
    "collected, interleaved": Case(
        nets.Collecting,
        "The same with two chunks per rank: what the first had appended was counted twice.",
        options={"schedule": "interleaved", "num_model_chunks": 2, "num_microbatches": 2, "verify": False},
        criterion=nets.Collects,
    ),
    "detaches once": Case(
        nets.DetachesOnce,
        "A layer detaches by its own count: the layers before it got zeros, by which AdamW decays, where one process "
        "has no gradient.",
        ordinary(3),
        optimizer=adamw,
        refused="receives no gradient in this step",
    ),
    "shares memory": Case(
        nets.SharesMemory,
        "Two parameters, one memory: on other stages each, one did not see what the other's step had written.",
        ordinary(3),
        refused="share memory",
    ),
    "one memory": Case(
        nets.OneMemory, "Parts of one memory were all taken for the last of them, and not sent where glue reads them."
    ),
    "an attribute": Case(nets.Labelled, "An attribute of a tensor is lost where it crosses a cut.", refused="has gain"),
    "conjugated": Case(nets.Conjugates, "Complex numbers whose conjugation is put off could not be sent."),
    "distributions": Case(nets.Distributions, "A torch.distributions.Normal was an object that nobody looks into."),
    "functions": Case(nets.ReturnsFunction, "All layers were taken for one kind, and gave the first one's function."),
    "seeds": Case(nets.Seeds, "Stages seed what layers draw: the model's own seed was lost.", refused="seeds torch"),
    "criterion's flag": Case(
        nets.Logits,
        "A flag of the criterion is switched on: what it then reads was not sent.",
        ordinary(3),
        between=adds,
        criterion=nets.Criterion,
    ),
    "criterion's sum": Case(
        nets.Logits,
        "The criterion's reduction is set to a sum: it was averaged over microbatches as before.",
        ordinary(3),
        {"num_microbatches": 2},
        between=sums,
        criterion=nets.Criterion,
    ),
    "criterion's weights": Case(
        nets.Logits,
        "The criterion's weights were all 1 when its rule was proven, and are other ones now.",
        ordinary(3),
        {"num_microbatches": 2},
        between=weighs,
        criterion=Weighs,
        refused="weight classes",
    ),
    "criterion counts": Case(
        nets.Logits,
        "The criterion grows with each call, and each microbatch is one.",
        options={"num_microbatches": 2},
        criterion=nets.Ramps,
        refused="when it was called again",
    ),
    "criterion logs": Case(
        nets.Logits, "The same where it only keeps them.", options={"num_microbatches": 2}, criterion=nets.Logs
    ),
    "criterion of a length": Case(
        nets.Logits,
        "The trace tries other lengths, which a criterion may not take: that ended in its own error.",
        options={"num_microbatches": 2},
        criterion=nets.Rigid,
    ),
    "a ceiling": Case(
        nets.Logits,
        "A loss of at most 10 was taken for a mean, as random results are not as far off.",
        options={"num_microbatches": 2},
        criterion=nets.Ceiling,
        refused="to be a mean or sum",
    ),
    "functions in a list": Case(
        nets.ByFunctions,
        "The proof's copies called the layers of the model itself, whose first gradients had those of the proof.",
    ),
    "a list beside": Case(
        Net,
        "An optimizer keeps a list beside its parameters, of which a stage has some: it took those of others.",
        optimizer=nets.Anchored,
        refused="couples parameters: the update of a parameter depends on other parameters",
    ),
    "norms late": Case(
        Net,
        "An optimizer couples parameters from its fifth step on: its trial had three.",
        optimizer=nets.NormsLate,
        refused="couples parameters: the update of a parameter depends on other parameters",
    ),
    "clamped weights": Case(
        nets.Clamped,
        "A layer clamps its own weight first: that was an error of torch's from amid the trace.",
        refused="modifies a.weight, which is trained",
    ),
    "a shared batch norm": Case(
        nets.SharedNorm,
        "Layers on two stages share a batch norm: each stage moved running statistics of its own, and those of one "
        "were saved.",
        options={"verify": False, "partition": [3, 3]},
        refused="Each stage has its own copy, so the copies would diverge",
    ),
    "states in tuples": Case(
        nets.Recurrent,
        "A list of tuples goes on from batch to batch: tensors in tuples were not looked for, and where a rank has two "
        "stages the first of them got what the last had left, not numbers.",
        ordinary(3),
        {"verify": False, "schedule": "zbv"},
        refused="which the previous forward computed from",
    ),
    "lent weights": Case(
        nets.Lent,
        "Glue calls layers with weights made of other layers', by functional_call: the trace saw none of these, so "
        "that stages made them of ghosts, and the loss was not a number.",
        options={"verify": False},
    ),
    "swapped weights, recomputed": Case(
        nets.Swapped,
        "The same with activation recompute: the second run was with the layer's own weights, and gradients were off.",
        options={"verify": False, "recompute": True},
    ),
    "no norm": Case(
        nets.WithOptional, "A ModuleList may hold None, whose parameters were looked for: an AttributeError."
    ),
    "a property in a slot's place": Case(
        nets.WithSlots, "What a subclass computes in the place of a base's slot has no setter: an AttributeError."
    ),
    "control": Case(Net, "Nothing special."),
    "pruned by parameters": Case(
        values.Pruned,
        "Layers drop tokens, as many as frozen parameters say: of a new length the rank without these traced another "
        "size, and gloo aborted, or left the rest of a message as it was.",
        values.LENGTHS,
        {"verify": False},
    ),
    "pruned by parameters, zbv": Case(
        values.Pruned,
        "The same with two stages on each rank, three microbatches of uneven sizes.",
        values.LENGTHS,
        {"verify": False, "schedule": "zbv", "num_microbatches": 3},
    ),
    "a number of a parameter": Case(
        values.ByNumber,
        "A layer returns a number that it reads off a frozen one: traced anew it was 0 on the other stages.",
        options={"verify": False, "partition": [2, 4]},
        between=switched,
    ),
    "selected by activations": Case(
        values.Selected,
        "How many rows a layer returns depends on activations: the next stage waits for as many as in the trace.",
        options={"verify": False, "partition": [3, 3]},
        refused="layers.1 .* but the trace recorded .* return a tensor of a fixed size",
    ),
    "by language": Case(
        values.ByLanguage,
        "Strings of the batch choose adapters, and the first samples, which boost traces, lack those of a language: "
        "the batch passed as dry_run_input was refused in its own step.",
        [{**batch, "languages": ["en", "de", "en", "fr"]} for batch in ordinary()],
        {"verify": False},
    ),
    "backwards": Case(
        values.Backwards,
        "An attribute decides the order of layers: the error blamed the batch, and named no layer.",
        options={"verify": False, "partition": [3, 3]},
        between=switched,
        refused=r"calls layers\.1 \(on stage 0\) after layers\.2 \(on stage 1\).*call the same layers in the same",
    ),
    "none inside a layer": Case(
        values.NoneInside,
        "A backward of the model's own returns None inside a layer: deferred linear layers got zeros, which AdamW "
        "decays.",
        ordinary(3),
        {"verify": False, "schedule": "zbv", "num_microbatches": 2},
        optimizer=adamw,
    ),
    "none inside a layer, recomputed": Case(
        values.NoneInside,
        "The same with 1F1B, two microbatches and activation recompute.",
        ordinary(3),
        {"recompute": True, "num_microbatches": 2},
        optimizer=adamw,
    ),
    "none over a cut": Case(
        values.NoneOver,
        "The same for a tensor that another stage has sent: it got zeros for none.",
        options={"verify": False, "partition": [3, 3]},
        optimizer=adamw,
        refused="returns None",
    ),
    "handed on, written to": Case(
        values.HandedOn,
        "A layer writes to a tensor that layers before it have handed on: torch refused the write to a leaf.",
        options={"verify": False, "partition": [3, 3]},
    ),
    "writes by values": Case(
        values.WritesByValues,
        "Layers write to what they are given if it is not zero, as it is in a trace: torch refused to write to a leaf.",
        options={"verify": False, "partition": [3, 3]},
        refused="changes an argument in place, but the trace recorded no such write",
    ),
    "by codes": Case(values.ByCodes, "Glue looks up integers that a layer returns.", options={"verify": False}),
    "by a mask": Case(values.ByMask, "Glue multiplies by booleans that a layer returns.", options={"verify": False}),
    "labels of -1": Case(
        labels.Ignoring,
        "The model's own loss leaves out -1, which comes in the second batch: -100 alone was tried, so it was refused.",
        labels.marked(-1, first=1),
        {"num_microbatches": 2},
    ),
    "padding 0": Case(
        labels.Padded, "A model's own loss leaves out the label 0, without a config that says so: it was refused."
    ),
    "any class": Case(
        labels.Unpadded, "A loss leaves out a class that is neither 0 nor fills the ends of rows: it was refused."
    ),
    "labels of 255": Case(
        labels.Unlabelled,
        "The same for 255, as in data for segmentation: a segformer was refused.",
        labels.marked(255),
        {"num_microbatches": 2},
    ),
}
