"""Worker: one rank that runs tests of a transformers checkout, with a pipelined Trainer in place of Trainer.

It is started as a file, from the checkout's root, because the checkout has its own package `tests`. A rank reads names
of tests, one per line, and writes one JSON object per test.

    worker.py CHECKOUT STAGES FOLDER        STAGES = 0 runs the tests unchanged

A line with a port on stdin forks ranks, which read FOLDER/in-PORT-RANK and write FOLDER/out-PORT-RANK.
"""

import ast
import contextlib
import importlib
import io
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tests.trainer."
MADE = 0  # Trainers that the current test has constructed


def main() -> None:
    checkout, stages, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    here = (Path(__file__).parent, ROOT)
    sys.path[:] = [str(checkout), *(path for path in sys.path if Path(path or ".").resolve() not in here)]
    sys.path.append(str(ROOT))  # pipeshard, after the checkout's `tests`
    supply_absent_names(checkout)
    replace_trainers(stages)
    modules, broken = load(checkout)
    for module in modules:
        if stages:
            expect_own_files(module)
        if stages > 1:
            give_units(module)
    (folder / "ready").touch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    hello = {"tests": names_of(modules), "broken": broken}
    for port in sys.stdin:
        for rank in range(max(stages, 1)):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(folder, stages, rank, port.strip(), hello)
                os._exit(0)


def serve(folder: Path, stages: int, rank: int, port: str, hello: dict[str, Any]) -> None:
    """Be a rank: run the tests that come in, until there are no more."""
    with open(folder / f"in-{port}-{rank}") as names, open(folder / f"out-{port}-{rank}", "w") as results:
        if stages > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {"WORLD_SIZE": str(stages), "LOCAL_WORLD_SIZE": str(stages)}
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            AcceleratorState._reset_state(reset_partial_state=True)  # from the import, of one process
        print(json.dumps({**hello, "pid": os.getpid()}), file=results, flush=True)
        for number, name in enumerate(names):
            if stages > 1:  # TestCasePlus removes it after each test
                os.environ["ACCELERATE_USE_CPU"] = "true"
            base = folder / f"{port}-{number}"
            with shared_folders(base):
                result = run(name.strip())
            print(json.dumps({**result, "rank": rank}), file=results, flush=True)


# what replaces what


def supply_absent_names(checkout: Path) -> None:
    """Give the installed transformers an empty class for each name that the tests import and that it no longer has.

    The checkout may be of another version. A test that uses such a name fails plainly, and so does not count.
    """
    for path in sorted((checkout / "tests" / "trainer").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("transformers"):
                continue
            for alias in node.names:
                with contextlib.suppress(ImportError):
                    supply(importlib.import_module(str(node.module)), alias.name)


def supply(module: Any, name: str) -> None:
    try:
        getattr(module, name)
    except (AttributeError, ImportError):
        setattr(module, name, type(name, (), {}))


def replace_trainers(stages: int) -> None:
    """Let `transformers.Trainer` and `Seq2SeqTrainer` be pipelined ones that make their own plugin."""
    import transformers

    for name in ("Trainer", "Seq2SeqTrainer"):
        plain = getattr(transformers, name)
        setattr(transformers, name, counted(plain, stages))


def counted(plain: Any, stages: int) -> Any:
    base = plain
    if stages:
        from pipeshard.trainer import pipelined

        base = pipelined(plain)

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        global MADE
        MADE += 1
        if stages:
            from pipeshard import PipelinePlugin

            kwargs.setdefault("pipeline", PipelinePlugin(pp_size=stages, watchdog=stages == 1))
        base.__init__(self, *args, **kwargs)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.train(self, *args, **kwargs)
        if stages > 1:
            dist.barrier()  # rank 0 writes and rotates the checkpoints that the test looks at on every rank
        return result

    # The signature is the plain one: tests read it.
    construct.__signature__ = __import__("inspect").signature(plain.__init__)  # type: ignore[attr-defined]
    return type(plain.__name__, (base,), {"__init__": construct, "train": train, "__module__": plain.__module__})


def load(checkout: Path) -> tuple[list[Any], dict[str, str]]:
    """The test modules, and why the others cannot be imported."""
    modules, broken = [], {}
    for path in sorted((checkout / "tests" / "trainer").glob("test_*.py")):
        try:
            modules.append(importlib.import_module(f"{PACKAGE}{path.stem}"))
        except Exception as error:
            broken[path.stem] = f"{type(error).__name__}: {error}"
    return modules, broken


def names_of(modules: list[Any]) -> list[str]:
    names = []
    for module in modules:
        for case in vars(module).values():
            if isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == module.__name__:
                found = unittest.defaultTestLoader.getTestCaseNames(case)
                names += [f"{module.__name__}.{case.__name__}.{name}" for name in found]
    return names


def expect_own_files(module: Any) -> None:
    """Let the tests look for `pipeline/` in a checkpoint, in place of optimizer.pt and scheduler.pt."""

    def check_saved_checkpoints(
        case: Any, output_dir: str, freq: int, total: int, is_pretrained: bool = True, use_scaler: bool = False
    ) -> None:
        names = ["model*.safetensors", "training_args.bin", "trainer_state.json", "pipeline", "manifest.json"]
        names += ["config.json"] if is_pretrained else []
        for step in range(freq, total, freq):
            for name in names:
                case.assertTrue(any((Path(output_dir) / f"checkpoint-{step}").glob(name)), f"{name} of {step}")

    for kind in vars(module).values():
        if isinstance(kind, type) and "check_saved_checkpoints" in vars(kind):
            kind.check_saved_checkpoints = check_saved_checkpoints  # type: ignore[attr-defined]


# models with units


def give_units(module: Any) -> None:
    """Let each toy model with root parameters `a` and `b` hold them in two units, so that it can be cut; a module of
    tests may have its models from another one.

    Its forward stays: `x * self.a + self.b` calls the units. Outside of forward `model.a` is the number, which every
    rank gets from the stage that holds it.
    """
    for kind in list(vars(module).values()):
        is_model = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith(PACKAGE)
        if is_model and {"a", "b"} <= set(kind.__init__.__code__.co_names) and "units" not in vars(kind):
            _wrap(kind)


def _wrap(kind: Any) -> None:
    class Unit(nn.Module):
        def __init__(self, value: nn.Parameter) -> None:
            super().__init__()
            self.value = value

    class Scale(Unit):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.value

        __rmul__ = nn.Module.__call__

    class Shift(Unit):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.value

        __radd__ = nn.Module.__call__

    plain = kind.__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for name, unit in (("a", Scale), ("b", Shift)):
            if name in self._parameters:
                self.add_module(f"unit_{name}", unit(self._parameters.pop(name)))

    def entry(name: str) -> property:
        def get(self: Any) -> Any:
            unit = self._modules.get(f"unit_{name}")
            if unit is None:
                raise AttributeError(name)
            return unit if sys._getframe(1).f_code.co_name == "forward" else number(unit.value)

        return property(get)

    kind.__init__, kind.a, kind.b, kind.units = construct, entry("a"), entry("b"), True


def number(parameter: Any) -> Any:
    """The value of a parameter without dimensions, from the rank that holds it."""
    from pipeshard.errors import UsageError

    own: tuple[float, bool] | None = None
    with contextlib.suppress(UsageError, NotImplementedError, RuntimeError):  # on another stage, or on meta
        own = parameter.detach().item(), parameter.requires_grad
    values: list[tuple[float, bool] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    held = next((value for value in values if value is not None), None)
    if held is None or None not in values:  # not split yet: a test may freeze the parameter itself
        return parameter
    return nn.Parameter(torch.tensor(held[0]), requires_grad=held[1])


# tests


@contextlib.contextmanager
def shared_folders(base: Path) -> Iterator[None]:
    """Inside, temporary folders have the same names on all ranks, as the ranks of a run share their output_dir.

    They stay until the driver removes them: another rank may still read what one is through with.
    """
    counter = itertools.count()

    def mkdtemp(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:
        folder = Path(dir or base) / f"{prefix or 'tmp'}{next(counter)}{suffix or ''}"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        is_shared = base in Path(path).parents
        if not is_shared or dist.get_rank() == 0:
            remove(path, **({"ignore_errors": True} if is_shared else kwargs))

    remove, holder = shutil.rmtree, tempfile.TemporaryDirectory
    before = tempfile.mkdtemp, holder._rmtree
    if dist.is_initialized():
        shutil.rmtree = rmtree  # a folder is removed once, by the rank that writes it
    tempfile.mkdtemp, holder._rmtree = mkdtemp, classmethod(lambda *_, **__: None)  # type: ignore[assignment]
    try:
        yield
    finally:
        tempfile.mkdtemp, holder._rmtree = before
        shutil.rmtree = remove


def run(name: str) -> dict[str, Any]:
    """The result of one test on this rank: its kind and, unless it passes, what it raised."""
    global MADE
    MADE = 0
    outcome = unittest.TestResult()
    text = ""

    def keep(kind: str) -> Any:
        def add(test: Any, error: Any) -> None:
            nonlocal text
            found.append((kind, error[1]))
            text = "".join(traceback.format_exception(error[1]))

        return add

    found: list[tuple[str, BaseException]] = []
    outcome.addError, outcome.addFailure = keep("error"), keep("failure")  # type: ignore[method-assign]
    outcome.addSubTest = lambda t, s, e: keep("error")(t, e) if e else None  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        unittest.defaultTestLoader.loadTestsFromName(name).run(outcome)
    if found:
        kind, why = kind_of(found[0][1])
        return {"kind": kind, "why": why, "text": text[-6000:], "trainers": MADE}
    kind = "skipped" if outcome.skipped else "passed"
    return {"kind": kind, "why": outcome.skipped[0][1] if outcome.skipped else "", "text": "", "trainers": MADE}


def kind_of(error: BaseException) -> tuple[str, str]:
    """How a test has failed: refused by pipeshard, an assertion that does not hold, or any other error."""
    link: BaseException | None = error
    while link is not None:
        if any(base.__name__ == "PipeshardError" for base in type(link).__mro__):
            return "refused", f"{type(link).__name__}: {link}"
        link = link.__cause__ or link.__context__
    kind = "different" if isinstance(error, AssertionError) else "raw"
    return kind, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
