"""GPU check: compares real steps with the unsplit model. Run it first on a machine with GPUs.

`python -m benchmarks.gpu [--device cpu] [--json FILE]` prints a table of cases: five schedules with each transport, 16
bits, replicas, sharding, slices, recomputation, offloading, the proof at boost, generation, and faults. Each case
without a fault also runs a step in which every F, B and W synchronizes the whole device, as an autotuner does. If there
are fewer GPUs than ranks, several ranks share one GPU, and NCCL treats them as separate hosts. A case that hangs is
reported as such, and the next case gets new processes. With `--device cpu`, the same code runs on the CPU with gloo.
Without a GPU, the command prints a message and exits.
"""

import argparse
import contextlib
import copy
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy
from torch.nn.modules.module import register_module_forward_hook

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 3e-2}  # largest error of a gradient, relative to its norm
BACKENDS = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}
LIMIT = 120.0  # seconds per case, including the start of its processes
FAULTS = ("raises", "is killed", "stalls")
SHARED = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
SHARED |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # if ranks share a GPU


def of_probabilities(out: Any, batch: Any) -> torch.Tensor:
    """A loss whose kernel aborts the process's CUDA context if a value is not a probability."""
    return binary_cross_entropy(out.logits[:, -1, 0], (batch["input_ids"][:, 0] % 2).float())


def of_positions(out: Any, batch: Any) -> torch.Tensor:
    """A loss whose kernel adds in a nondeterministic order."""
    return cross_entropy(out.logits.transpose(1, 2), batch["input_ids"])


CRITERIA = {"BCELoss": of_probabilities, "atomic cross entropy": of_positions}


@dataclass(frozen=True)
class Case:
    """Some steps of a small llama (with ep > 1: of a Qwen3-MoE)."""

    schedule: str = "1f1b"
    p2p: str = "broadcast"
    backend: str = "nccl"
    precision: str = "fp32"
    autocast: bool = False
    pp: int = 2
    dp: int = 1
    tp: int = 1
    ep: int = 1  # expert-parallel ranks
    microbatches: int = 4
    options: tuple[tuple[str, Any], ...] = ()  # more options of PipelinePlugin
    generates: bool = False
    kernel: bool = False  # with an activation written in Triton
    quantized: bool = False  # adapters on a 4-bit base
    criterion: str = ""  # a name in CRITERIA; by default, the model computes its loss
    fault: str = ""  # what happens to rank 1 in the second step; other ranks must report it

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp * self.ep

    def __str__(self) -> str:
        also = "".join(f" {name}={value}" for name, value in self.options)
        also += (
            " autocast" * self.autocast
            + " generate" * self.generates
            + " Triton" * self.kernel
            + " nf4" * self.quantized
        )
        also += f" {self.criterion}" * bool(self.criterion)
        also += f", rank 1 {self.fault}" * bool(self.fault)
        sizes = f"pp={self.pp} dp={self.dp}" + f" tp={self.tp}" * (self.tp > 1) + f" ep={self.ep}" * (self.ep > 1)
        sizes += f" m={self.microbatches}"
        return f"{self.schedule} {sizes} {self.p2p}/{self.backend} {self.precision}{also}"


@dataclass
class Result:
    """`error` is the largest relative error of the loss and gradients. `problem` says why the steps failed."""

    error: float = 0.0
    milliseconds: float = 0.0
    megabytes: float = 0.0
    problem: str = ""


def cases(device: str) -> list[Case]:
    """Return all cases, sorted by number of ranks, because cases with equally many ranks share processes."""
    transports = [("broadcast", "gloo"), ("broadcast", "nccl"), ("isend", "nccl")]
    sliced, compiled, sharded = (("num_slices", 4),), (("compile", True),), (("fsdp", True),)
    of_one = [Case(pp=1), Case(pp=1, precision="bf16"), Case(pp=1, precision="bf16", autocast=True)]
    of_two = [Case(schedule, *transport) for transport, schedule in itertools.product(transports, SCHEDULES)]
    of_two += [Case(microbatches=1), Case(pp=1, dp=2), Case(pp=1, tp=2), Case(generates=True)]
    of_two += [Case(precision="bf16"), Case(precision="bf16", autocast=True), Case("zb-h1", precision="bf16")]
    of_two += [Case(precision="fp16", options=(("initial_scale", 1.0),))]
    of_two += [Case(microbatches=1, options=sliced), Case(options=sliced), Case(precision="bf16", options=sliced)]
    of_two += [Case(options=(option,)) for option in (("recompute", True), ("verify", True), ("check_finite", True))]
    of_two += [Case(schedule, options=(("offload", "activations"),)) for schedule in ("gpipe", "zb-h1", "zbv")]
    of_two += [Case(precision=name, options=(("offload", "both"),)) for name in ("fp32", "bf16")]
    of_two += [Case(kernel=True)] * (device == "cuda") + [Case(options=compiled)]
    of_two += [Case(quantized=True), Case("zbv", quantized=True)]
    of_two += [Case(criterion=name) for name in CRITERIA]
    of_two += [Case(pp=1, ep=2)]  # not in 16 bits: rounding would make the router select other experts
    of_two += [Case(fault=fault) for fault in FAULTS]
    of_four = [Case(dp=2), *(Case(schedule, pp=4) for schedule in ("1f1b", "interleaved", "zbv")), Case(tp=2)]
    of_four += [Case(dp=2, options=(("zero_stage", 1),)), Case(dp=2, options=sharded)]
    of_four += [Case(dp=2, precision="bf16", options=sharded), Case("zbv", dp=2, options=sharded)]
    of_four += [Case(ep=2), Case("zbv", ep=2)]
    return [*of_one, *of_two, *of_four]


@contextlib.contextmanager
def settling(device: torch.device) -> Iterator[None]:
    """Context manager in which every F, B and W synchronizes its device."""

    def settled(method: Any) -> Any:
        def call(stage: Any, *args: Any) -> Any:
            result = method(stage, *args)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return result

        return call

    from pipeshard.engine.stage import Stage

    methods = {name: getattr(Stage, name) for name in ("forward", "backward", "weight")}
    for name, method in methods.items():
        setattr(Stage, name, settled(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Stage, name, method)


def in_four_bits(model: Any, device: torch.device) -> tuple[Any, Any]:
    """Return the model with adapters on 4-bit weights twice: loaded in one process, and blank, for stages to load."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import BitsAndBytesConfig

    from pipeshard import PipelinePlugin
    from pipeshard.checkpoint.lora import enable_lora

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    options = {"quantization_config": config, "dtype": torch.float32}
    adapters = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    folder = tempfile.mkdtemp()  # the stages read it in boost
    model.config.save_pretrained(folder)  # the model's save_pretrained only writes on the first rank
    save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
    whole = type(model).from_pretrained(folder, device_map={"": device}, **options).train()
    blank = PipelinePlugin.from_pretrained(type(model), folder, **options).train()
    torch.manual_seed(0)
    one: Any = get_peft_model(whole, adapters)
    torch.manual_seed(0)
    return one.to(device), enable_lora(blank, None, adapters, None)


def small(experts: bool) -> Any:
    """Build a small llama, or a Qwen3-MoE."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4, "use_cache": False}
    if not experts:
        return LlamaForCausalLM(LlamaConfig(**sizes)).train()
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2)).train()


def steps(case: Case, device: torch.device) -> Result:
    """Run the steps of a case on this rank, and compare them with the unsplit model on the same device."""
    from colossalai.booster import Booster

    from pipeshard import PipelinePlugin
    from pipeshard.distributed.collectives import whole as complete

    model = small(experts=case.ep > 1)
    if case.kernel:
        from benchmarks.triton_silu import Silu

        for layer in model.model.layers:
            layer.mlp.act_fn = Silu()
    if case.criterion == "BCELoss":
        model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Sigmoid())
    rows = 2 * case.microbatches
    ids = torch.randint(0, 128, (case.dp * rows, 32), generator=torch.Generator().manual_seed(0))
    whole, model = in_four_bits(model, device) if case.quantized else (copy.deepcopy(model).to(device), model)
    whole = whole if case.autocast or case.quantized else whole.to(DTYPES[case.precision])
    criterion = CRITERIA.get(case.criterion)

    def batch_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": ids} | ({"labels": ids} if criterion is None else {})

    with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
        batch = batch_of(ids.to(device))
        out = whole(**batch)
        expected = out.loss if criterion is None else criterion(out, batch)
    expected.backward()

    plugin = PipelinePlugin(
        case.pp,
        num_microbatches=case.microbatches,
        schedule=case.schedule,
        p2p=case.p2p,
        precision=case.precision,
        autocast=case.autocast,
        tp_size=case.tp,
        ep_size=case.ep,
        timeout=LIMIT / 12 if case.fault else LIMIT / 3,
        max_norm=1e9,
        **dict(case.options),
    )
    booster = Booster(plugin=plugin)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    boosted, optimizer, called, *_ = booster.boost(model, sgd, criterion)
    replica = dist.get_rank() // (case.ranks // case.dp)
    own = ids[replica * rows : (replica + 1) * rows]

    def step() -> Any:
        optimizer.zero_grad()
        out = booster.execute_pipeline(iter([batch_of(own)]), boosted, called, optimizer)
        return out["loss"]

    def error(loss: Any) -> float:
        held = {name: p for name, p in boosted.unwrap().named_parameters() if p.grad is not None}
        exact = {name: p.grad.float() for name, p in whole.named_parameters() if p.grad is not None}
        floor = 1e-3 * max(float(g.norm()) for g in exact.values())
        errors = [
            float((complete(p.grad).float() - exact[name]).norm()) / max(float(exact[name].norm()), floor)
            for name, p in held.items()
        ]
        assert errors, "this rank has no gradient"
        return max(*errors, abs(float(loss - expected)) / abs(float(expected)))

    worst = error(step())
    optimizer.step()
    if case.fault:
        return told(case, boosted.unwrap(), step)
    with settling(device):
        worst = max(worst, error(step()))
    optimizer.step()
    began = time.perf_counter()
    worst = max(worst, error(step()))  # reading the loss waits for the device
    seconds = time.perf_counter() - began
    if case.generates:
        prompts = {"input_ids": own[:4, :8].to(device), "attention_mask": (own[:4, :8] > 20).cummax(-1)[0].to(device)}
        asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        tokens = boosted.generate(**prompts, **asked)
        worst = max(worst, float((tokens != whole.generate(**prompts, **asked)).float().mean()))
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Result(worst, 1e3 * seconds, memory / 1e6)


def told(case: Case, model: Any, step: Any) -> Result:
    """Measure the time until the other rank reports the fault of rank 1."""
    from pipeshard.errors import PipeshardError

    layer = model.model.layers[-1]

    def fail(module: nn.Module, *_: Any) -> None:
        if module is not layer:
            return
        if case.fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case.fault == "stalls":
            time.sleep(LIMIT)
        raise ArithmeticError("planted")

    hooks = contextlib.ExitStack()
    if dist.get_rank() == 1:
        hooks.callback(register_module_forward_hook(fail).remove)  # a hook of the layer would run in a new trace first
    began = time.perf_counter()
    try:
        with hooks:
            step()
    except (ArithmeticError, PipeshardError) as error:
        if dist.get_rank() != 1 and "rank 1" not in str(error):
            raise
        return Result(milliseconds=1e3 * (time.perf_counter() - began))
    return Result(problem="the step completed despite the fault")


def serve(rank: int, ranks: int, todo: Sequence[Case], device: str, folder: str, results: Connection) -> None:
    """Run one rank's process: the cases one after the other, each with its own process group, until one fails."""
    import warnings

    warnings.filterwarnings("ignore")
    os.environ["LOCAL_RANK"] = str(rank)
    if device == "cuda" and ranks > torch.cuda.device_count():
        os.environ |= SHARED | {"NCCL_HOSTID": f"rank{rank}"}
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    for number, case in enumerate(todo):
        try:
            backend = BACKENDS[case.backend] if device == "cuda" else "gloo"
            dist.init_process_group(backend, f"file://{folder}/{number}", rank=rank, world_size=ranks)
            index = rank % torch.cuda.device_count() if device == "cuda" else None
            results.send(steps(case, torch.device(device, index) if index is not None else torch.device(device)))
            dist.destroy_process_group()
        except BaseException as error:  # any error is the result of this case
            text = (str(error).strip() or "without a message").splitlines()[0]
            results.send(Result(problem=f"{type(error).__name__}: {text}"[:200]))
            results.close()
            os._exit(1)


def attempt(todo: Sequence[Case], device: str) -> Iterator[Result]:
    """Yield the results of cases with equally many ranks, as they arrive, up to the first failure."""
    context, ranks = multiprocessing.get_context("spawn"), todo[0].ranks
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=serve, args=(rank, ranks, todo, device, folder, pipes[rank][1]), daemon=True)
            for rank in range(ranks)
        ]
        for process, (_, theirs) in zip(processes, pipes):
            process.start()
            theirs.close()
        for case in todo:
            until = time.monotonic() + LIMIT
            whose = pipes[:1] if case.fault else pipes
            result = merged([answer(ours, until) for ours, _ in whose])
            yield result
            if result.problem or case.fault:
                break
        for process in processes:
            process.join(0 if result.problem or case.fault else 10)
            process.kill()
            process.join()


def answer(results: Connection, until: float) -> Result:
    try:
        if results.poll(max(0.0, until - time.monotonic())):
            return results.recv()
    except EOFError:
        return Result(problem="its process ended")
    return Result(problem=f"hung for {LIMIT:.0f} s")


def merged(of_ranks: Sequence[Result]) -> Result:
    """Return the worst values of all ranks. A problem with an error message takes precedence over one without."""
    problems = sorted(filter(None, (r.problem for r in of_ranks)), key=lambda text: "Error: " not in text)
    error, milliseconds = max(r.error for r in of_ranks), max(r.milliseconds for r in of_ranks)
    return Result(error, milliseconds, max(r.megabytes for r in of_ranks), problems[0] if problems else "")


def check(todo: Sequence[Case], device: str, console: Console) -> dict[Case, Result]:
    found: dict[Case, Result] = {}
    for _, group in itertools.groupby(todo, key=lambda case: case.ranks):
        left = list(group)
        while left:
            with console.status(f"{left[0].ranks} ranks, {len(left)} cases from {left[0]}"):
                for result in attempt(left[:], device):
                    case = left.pop(0)
                    found[case] = result
                    console.print(f"{case}: {verdict(case, result)}, {result.error:.1e}", highlight=False)
    return found


def passes(case: Case, result: Result) -> bool:
    return not result.problem and result.error <= TOLERANCE[case.precision]


def verdict(case: Case, result: Result) -> str:
    return "ok" if passes(case, result) else result.problem or f"error above {TOLERANCE[case.precision]:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="run cases whose names match this regular expression")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    console = Console()
    if args.device == "cuda" and not torch.cuda.is_available():
        console.print("gpu-check: there is no GPU here (make gpu-check DEVICE=cpu runs the same code on the CPU)")
        return 0
    found = check([case for case in cases(args.device) if re.search(args.only, str(case))], args.device, console)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, with gloo in every case"
    table = Table("case", "error", "ms/step", "MB", "", title=f"torch {torch.__version__}, {where}")
    for case, result in found.items():
        numbers = (f"{result.error:.1e}", f"{result.milliseconds:.0f}", f"{result.megabytes:.0f}")
        table.add_row(str(case), *numbers, verdict(case, result))
    console.print(table)
    if args.json:
        rows = [asdict(case) | asdict(result) | {"where": where} for case, result in found.items()]
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(itertools.starmap(passes, found.items())) else 1


if __name__ == "__main__":
    sys.exit(main())
