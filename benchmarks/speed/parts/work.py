"""The same work by every contender, as a ratio to the limit of 1F1B."""

import functools
import statistics
from collections.abc import Mapping
from typing import Any

from rich.progress import Progress

from benchmarks.speed.contender import Batches, Contender
from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures, loss_errors
from benchmarks.speed.limits import CHUNKS, limit
from benchmarks.speed.parts import Effort
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work
from pipeshard.schedule import SCHEDULES

TEXT = """\
Each contender trains the same model on the same batches with AdamW in fp32, p = 2, the layers cut in the middle.
Times are a step's, medians over the rounds with their quartiles. The limit is the schedule's makespan, simulated
with the stages' own F, B and W as measured in the same round, plus the optimizer's step; messages, ties and Python
cost nothing in it. The unit of the plot is the limit of 1F1B as it is in the literature, and as its peers run it.
pipeshard's own limit is shorter: after its last forward a rank sends each gradient before it computes the weight
gradients of that microbatch (`shorten_cooldown`). One process is the unsplit model with gradient accumulation, two
copies of it at once, one on each core: two ranks share memory bandwidth and clock, too."""


def ours(schedule: str, **options: Any) -> Contender:
    """pipeshard, its layers cut into equal parts."""
    chunks = CHUNKS.get(schedule, 1)
    if schedule == "interleaved":
        options["num_model_chunks"] = chunks
    name = f"pipeshard {schedule}" + (" isend" if options.get("p2p") == "isend" else "")
    name += " " + compiled(options["compile"]) if options.get("compile") else ""
    name += f", {options['num_slices']} slices" if options.get("num_slices") else ""
    return Contender(name, "pipeshard", {"schedule": schedule, "stages": 2 * chunks, **options})


def compiled(how: Any) -> str:
    """What the names of contenders say of options of torch.compile."""
    if not isinstance(how, dict):
        return "compiled"
    return "compiled, C++ calls"


CPP_CALLS = {"options": {"cpp_wrapper": True}}  # what calls the kernels is C++, too, and not Python
TORCH = Contender("torch 1F1B", "torch")
TORCHS_OWN = [
    Contender(f"torch {name}", "torch", {"schedule": name})
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
]
DEEPSPEED = Contender("DeepSpeed", "deepspeed", {}, ".venv-deepspeed")
COLOSSALAI = Contender("ColossalAI", "colossalai", {}, ".venv-colossalai")
UNSPLIT = Contender("one process", "unsplit")
LIMIT = Contender("limit", "limit")
WITHOUT_LIMIT = {UNSPLIT.name, *(contender.name for contender in TORCHS_OWN)}
PEERS = [TORCH, DEEPSPEED, COLOSSALAI]  # with 1F1B
LEADS = {8: 0.08, 4: 0.12}  # of the best schedule on the best of all peers', by the number of microbatches
CONTENDERS = [*map(ours, SCHEDULES), ours("1f1b", p2p="isend"), *PEERS, *TORCHS_OWN, UNSPLIT, LIMIT]


def run(effort: Effort, progress: Progress) -> Section:
    works = [Work(family, microbatches=m) for family in ("llama", "gpt2") for m in (8, 4)]
    if effort.quick:
        works = [work.having(hidden=112, length=32) for work in works[::3]]
    tables, failed, raw, found = [], [], {}, {}
    for work in works:
        steps = 8 // work.microbatches  # of each turn: as many tokens for every m
        lanes = [Lane(contender, functools.partial(batches, steps=steps)) for contender in CONTENDERS]
        outcomes = Rounds(work, lanes, effort.rounds, progress).run()
        ratios = against_limit(work, outcomes)
        tables.append(_table(work, lanes, outcomes, ratios))
        found[work] = outcomes
        failed += [f"{work}: {failure}" for failure in failures(lanes, outcomes)]
        raw[str(work)] = {"ratios": ratios, "outcomes": {name: vars(outcome) for name, outcome in outcomes.items()}}
    return Section("The same work", TEXT, tables, bars_of(found), failed, raw)


def batches(k: int, steps: int) -> Batches:
    """Those of round k: seeds that no other round has."""
    return [(k * steps + step + 1, None) for step in range(steps)]


def against_limit(work: Work, outcomes: dict[str, Outcome]) -> dict[str, list[float]]:
    """Each contender's time over that of the literature's 1F1B at best, round by round."""
    limits = _limits("1f1b", work, outcomes, plain=True)
    others = {name: outcome for name, outcome in outcomes.items() if name != LIMIT.name}
    return {name: [a / b for a, b in zip(outcome.seconds, limits)] for name, outcome in others.items()}


def bars_of(outcomes: Mapping[Work, dict[str, Outcome]]) -> list[Bar]:
    """1F1B beside its own limit, each peer and isend, as geometric means over the works, which a busy machine disturbs
    one by one; and for each work the best schedule beside the fastest peer. All of median times."""
    plain, isend = _name("1f1b"), ours("1f1b", p2p="isend").name
    times = {work: _medians(work, found) for work, found in outcomes.items()}
    bars = []
    for name, what, most in (
        ("", "off the limit", 0.05),
        *((peer.name, f"beside {peer.name}'s", 0.0) for peer in PEERS),
        (isend, "beside the same with isend", 0.03),
    ):
        ratios = [of[plain] / of[name] for of in times.values() if plain in of and name in of]
        if ratios:
            off = statistics.geometric_mean(ratios) - 1
            bars.append(Bar(f"1F1B's time is {off:+.1%} {what}, at most {most:+.0%}", off <= most))
    for work, of in times.items():
        peers = [peer.name for peer in (*PEERS, *TORCHS_OWN) if peer.name in of]
        mine = [name for name in map(_name, SCHEDULES) if name in of]
        if peers and mine:
            peer, best, lead = min(peers, key=lambda n: of[n]), min(mine, key=lambda n: of[n]), LEADS[work.microbatches]
            ahead = 1 - of[best] / of[peer]
            text = f"{work}: {best} is {ahead:.1%} faster than {peer}, the fastest peer, at least {lead:.0%}"
            bars.append(Bar(text, ahead >= lead))
    return bars


def _medians(work: Work, outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Of each contender's step, and of 1F1B's limit under no name."""
    limits = _limits("1f1b", work, outcomes)
    found = {name: outcome.seconds for name, outcome in outcomes.items() if name != LIMIT.name} | {"": limits}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _limits(schedule: str, work: Work, outcomes: dict[str, Outcome], plain: bool = False) -> list[float]:
    """Of each round."""
    return [limit(schedule, work.microbatches, report, plain) for report in outcomes[LIMIT.name].reports]


def _name(schedule: str) -> str:
    return ours(schedule).name


def spread(values: list[float]) -> tuple[float, float, float]:
    """Quartiles: low, median, high."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _table(work: Work, lanes: list[Lane], outcomes: dict[str, Outcome], ratios: dict[str, list[float]]) -> Table:
    wrong = loss_errors(lanes, outcomes)
    rows = []
    for name, outcome in outcomes.items():
        if name == LIMIT.name:
            continue
        if not outcome.seconds:
            rows.append([name, FAILED, *[""] * 5])
            continue
        low, middle, high = spread(outcome.seconds)
        row = [name, milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}"]
        if ratios[name]:
            mine = name.startswith("pipeshard")
            own = statistics.median(_limits(name.split()[1] if mine else "1f1b", work, outcomes, plain=not mine))
            over = "" if name in WITHOUT_LIMIT else milliseconds(own)
            low, middle, high = spread(ratios[name])
            row += [over, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([*row, *[""] * (6 - len(row)), f"{wrong[name]:.0e}"])
    columns = ["contender", "ms/step", "quartiles", "own limit (ms)", "over 1F1B's", "quartiles", "loss differs by"]
    title = f"{work}: {work.samples}×{work.length} tokens, {parameters(work):.0f} M parameters"
    return Table(title, columns, rows)


def parameters(work: Work) -> float:
    """In millions."""
    return sum(parameter.numel() for parameter in work.model().parameters()) / 1e6
