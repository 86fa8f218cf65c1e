"""Snippets: the code blocks of README.md and docs, run in the order of each page, on as many ranks as it describes.

The language of a block determines how it runs: `python`, `diff` without its removed lines, `bash`, or `console`, whose
output is compared. `text`, `json`, `toml` and `yaml` blocks do not run. A comment before a block contains the reason
why it does not run here, the name of the file in which a reader saves it, or the number of ranks for which the block
creates a plugin without using it: `<!-- not run: needs Slurm -->`, `<!-- file: train.py -->`, `<!-- ranks: 32 -->`.

ColossalAI is hidden, except from a page that installs it.

`python -m tests.snippets [PAGE ...]` runs the pages, and lists the blocks that do not run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers

from tests.house import ROOT
from tests.pool import Pool, WorkerError

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENT = r" *<!-- (?:not run|file|ranks): [^\n]+ -->\n"
BLOCK = re.compile(rf"^(?P<comment>{COMMENT}\n?)? *```(?P<language>[^\n]*)\n(?P<code>.*?)^ *```$", re.M | re.S)
RUN, SHOWN = ("python", "diff", "bash", "console"), ("text", "json", "toml", "yaml")
FOUR = ("docs/elastic.md", "docs/coming-from/megatron.md", "docs/coming-from/torchtitan.md")  # pages with 4 ranks
TIMEOUT = 600.0
# `pip install` does nothing, and `make` is a dry run, since its targets have their own tests.
SHELL = f"set -euo pipefail\npip() {{ test $1 = install; }}\nmake() {{ command make -C {ROOT} -n $@ >/dev/null; }}\n"
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by a launcher of this process


@dataclass(frozen=True)
class Snippet:
    """A code block."""

    page: str
    line: int
    language: str
    code: str
    reason: str = ""  # why it does not run
    file: str = ""  # the name of the file in which it is saved
    ranks: int = 0  # the number of ranks for a plugin that the block creates and does not use

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page that run, are saved, or do not run for a reason.

    Raises ValueError for a block in an unknown language without a reason, and for a comment without a block.
    """
    text, name, found = page.read_text(), os.path.relpath(page, ROOT), []
    for block in BLOCK.finditer(text):
        comment = dict(re.findall(r"<!-- ([\w ]+): (.+) -->", block["comment"] or ""))
        one = Snippet(
            name,
            text[: block.start("language")].count("\n") + 1,
            block["language"],
            textwrap.dedent(block["code"]),
            comment.get("not run", ""),
            comment.get("file", ""),
            int(comment.get("ranks", 0)),
        )
        if one.language not in (*RUN, *SHOWN) and not one.reason:
            raise ValueError(f"{one}: a block of language {one.language!r} can't be run: say why, or label it as text")
        if one.language in RUN or one.reason or one.file:
            found.append(one)
    if len(re.findall(COMMENT, text)) != sum(bool(one.reason or one.file or one.ranks) for one in found):
        raise ValueError(f"{name}: a comment is not before a block")
    return found


def check(page: Path, pool: Pool) -> list[list[float]]:
    """Run a page's blocks. Returns the value of their variable `losses` on each rank."""
    found = [one for one in snippets(page) if not one.reason]
    ranks = (4 if os.path.relpath(page, ROOT) in FOUR else 2) if any(map(is_python, found)) else 1
    with tempfile.TemporaryDirectory(prefix="snippets-") as folder:
        furnish(Path(folder))
        return pool.run(run, ranks, found, folder, timeout=TIMEOUT)


def run(found: list[Snippet], folder: str) -> list[float]:
    """Run the blocks of a page on this rank, in one namespace. Returns the value of their variable `losses`."""
    from tests.trainers import launched

    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(launched())
        if not any("colossalai" in one.code for one in found if one.language == "bash"):
            stack.enter_context(hidden("colossalai"))
        joined = stack.enter_context(mock.patch("torch.distributed.init_process_group"))  # the pool has called it
        whole = any("coming-from" in one.page for one in found)  # complete scripts, which assume no variables
        if dist.get_world_size() > 1 and not whole:
            names |= assumed(boosted="trainer" not in found[0].page)  # a Trainer boosts the model itself
        for one in found:
            if one.file:
                Path(one.file).write_text(one.code)
            elif is_python(one):
                size = one.ranks or dist.get_world_size()
                with mock.patch("torch.distributed.get_world_size", return_value=size):
                    exec(compile("\n" * one.line + new_lines(one), one.page, "exec"), names)
            elif dist.get_rank() == 0:
                shell(one)
            dist.barrier()
        if whole and any(map(is_python, found)) and not joined.called:
            raise AssertionError(f"{found[0].page}: the script does not join a process group")
    return list(names.get("losses", []))


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Context manager in which importing this package raises ImportError, as if it were not installed."""
    loaded = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] == package}
    sys.modules.update(dict.fromkeys([package, *loaded]))  # type: ignore[arg-type]  # an import of None raises
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(loaded)


def is_python(one: Snippet) -> bool:
    """Whether the ranks run the block."""
    return one.language in ("python", "diff") and not one.file


def new_lines(one: Snippet) -> str:
    if one.language == "python":
        return one.code
    return "".join(line[1:] for line in one.code.splitlines(keepends=True) if line[0] in "+ ")


def shell(one: Snippet) -> None:
    """Run a block's commands, like a user who has installed pipeshard."""
    command, output = one.code, ""
    if one.language == "console":
        command, output = re.fullmatch(r"\$ ((?:[^\n]*\\\n)*[^\n]*\n)(.*)", one.code, re.DOTALL).groups()  # type: ignore[union-attr]
    given = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    given |= {"PATH": f"{Path(sys.executable).parent}:{given['PATH']}", "PYTHONPATH": f"{os.getcwd()}/hidden:{ROOT}"}
    with socket.create_server(("localhost", 0)) as server:  # torchrun's own port may be in use
        given["PET_MASTER_PORT"] = str(server.getsockname()[1])
    ended = subprocess.run(["bash", "-c", SHELL + command], env=given, capture_output=True, text=True, timeout=TIMEOUT)
    if ended.returncode:
        raise AssertionError(f"{one}: status {ended.returncode} of\n{command}\n{ended.stdout}\n{ended.stderr}")
    if output and re.sub(r" +\n", "\n", ended.stdout).strip() != output.strip():
        raise AssertionError(f"{one}: this is printed now:\n{ended.stdout}")


def furnish(folder: Path) -> None:
    """Create the files that pages assume: a model with its tokenizer, chats, scripts, and pipeshard's folders."""
    from tests import trls, zoo

    (folder / "hidden").mkdir()
    (folder / "hidden" / "colossalai.py").write_text("raise ImportError('colossalai is hidden')\n")
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    tokenizer = trls.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<s> {{ message['content'] }} </s>{% endfor %}"
    for part in (tokenizer, zoo.build("llama", layers=8)):
        part.save_pretrained(folder / "path" / "to" / "model")
    (folder / "path" / "to" / "folder").symlink_to("model")
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 40)
    (script,) = (one.code for one in snippets(PAGES[0]) if one.file == "train.py")
    (folder / "train.py").write_text(script)
    (folder / "script.py").write_text(script.replace("sys.argv[1]", '"path/to/model"'))


def assumed(boosted: bool) -> dict[str, Any]:
    """The variables of the reader's script that a page uses. With `boosted`, the model has been trained for a step."""
    import datasets
    import trl
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

    import pipeshard
    from pipeshard import PipelinePlugin
    from tests import trls, zoo

    tokenizer, config = AutoTokenizer.from_pretrained("path/to/model"), AutoConfig.from_pretrained("path/to/model")
    prompts: Any = ["a b c", "d e"]
    batch = zoo.batch("llama")
    microbatch = {name: value[:2] for name, value in batch.items()}
    dataset = [{name: value[row] for name, value in batch.items()} for row in [*range(8)] * 3]
    plugin = PipelinePlugin(pp_size=2, num_microbatches=4)
    model = AutoModelForCausalLM.from_pretrained("path/to/model").train()
    optimizer = torch.optim.AdamW(model.parameters())
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=8)
    args = TrainingArguments(max_steps=3, use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    rows = [{name: value.tolist() for name, value in row.items()} for row in dataset]
    train = held_out = datasets.Dataset.from_list(rows)
    collator, metrics, lora, decay = None, None, trls.adapters(), 0.9
    wandb = SimpleNamespace(log=print)
    SFTTrainer, SFTConfig = trl.SFTTrainer, functools.partial(trl.SFTConfig, use_cpu=True)
    GRPOTrainer, GRPOConfig = trl.GRPOTrainer, functools.partial(trl.GRPOConfig, use_cpu=True)

    def my_reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    batches, step = itertools.chain.from_iterable(itertools.repeat(dataloader)), 1
    if boosted:
        engine = booster = pipeshard.initialize(model, optimizer, None, dataloader, lr_scheduler, plugin=plugin)
        model, optimizer, criterion, dataloader, lr_scheduler = engine
        engine.execute_pipeline(batches)
        optimizer.step()
    else:
        prompts = datasets.Dataset.from_dict({"prompt": prompts * 8})
    return {**globals(), **locals()}


def main() -> int:
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    transformers.utils.logging.disable_progress_bar()
    pool, counts, failed = Pool(), Counter[str](), []
    for page in pages:
        found = snippets(page)
        counts += Counter("not run" if one.reason else "run" for one in found)
        print(f"{page.relative_to(ROOT)}: {len(found)} blocks", flush=True)
        try:
            if found:
                with contextlib.redirect_stdout(io.StringIO()):
                    check(page, pool)
        except WorkerError as error:
            failed.append(page)
            print(error)
        for one in found:
            if one.reason:
                print(f"  line {one.line} is not run: {one.reason}")
    pool.shutdown()
    print(f"docs-check: {counts['run']} blocks run, {counts['not run']} not run, {len(failed)} pages failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
