"""Tests of the documentation: code blocks run as they are written, links are valid, and the words are plain."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pipeshard
import setup
from pipeshard.config import PipelineConfig
from pipeshard.launch import parse
from tests import arguments, zoo
from tests.house import PACKAGE, ROOT
from tests.pool import Pool, WorkerError
from tests.snippets import PAGES, check, is_python, new_lines, snippets

DOCS = ROOT / "docs"
# Words that no other engine's documentation has. They may stand in the middle of a page, not where one looks first.
QUAINT = (
    r"\b(dearest|piles?|piled|beside|amid|ragged|strangers?|fullest|good-bye|re-typed|anew|come and go|told|in rows)\b"
)


@pytest.mark.turns
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.stem)
def test_code_blocks_run(pool: Pool, page: Path) -> None:
    """Fragments boosted a model twice and read files that nothing writes, and scripts never joined a process group."""
    losses = [found for found in check(page, pool) if found]
    assert all(found == losses[0] and found[-1] < found[0] for found in losses)
    assert losses or page.parent.name != "coming-from" or page.stem == "axolotl"  # which has no script


@pytest.mark.turns
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nls\n```", "x.md:1: a block of language '' can't be run"),
        ("<!-- not run: needs a GPU -->\n\nls\n", "x.md: a comment is not before a block"),
        ("```bash\ntrue\nfalse\n```", "x.md:1: status 1 of\ntrue"),
        ("```python\nimport colossalai.booster\n```", "colossalai"),
        ("```bash\npython -c 'import colossalai.booster'\n```", "colossalai is hidden"),
        ("```python\nno_such_name\n```", 'x.md", line 2, in <module>'),
        ("```bash\nmake no-such-target\n```", "No rule to make target"),
        ("text\n\n```console\n$ echo a\nb\n```", "x.md:3: this is printed now:\na"),
    ],
)
def test_a_wrong_block_is_named(pool: Pool, tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "x.md"
    page.write_text(text)
    with pytest.raises((ValueError, WorkerError)) as error:
        check(page, pool)
    assert message in str(error.value)


def test_a_plugin_is_created_after_the_arguments_of_a_trainer() -> None:
    """These arguments initialize the process group of a script. Blocks run in one, so a block with the plugin before
    GRPOConfig(...) ran here, and in no script."""
    arguments, found = {"TrainingArguments", "SFTConfig", "RewardConfig", "DPOConfig", "GRPOConfig"}, 0
    for one in (one for page in PAGES for one in snippets(page) if is_python(one) and not one.reason):
        calls = [node for node in ast.walk(ast.parse(new_lines(one))) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))  # the order in which arguments are evaluated
        names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
        if "PipelinePlugin" in names and not arguments.isdisjoint(names):
            found += 1
            assert arguments.isdisjoint(names[names.index("PipelinePlugin") :]), one
    assert found


def test_extras_are_those_of_the_package() -> None:
    """Code blocks are run without pip."""
    named = {extra for page in PAGES for extra in re.findall(r"(?:pipeshard|'\.)\[(\w+)\]", page.read_text())}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"trl", "colossalai"} <= named <= set(extras)


def test_there_is_a_page_for_each_system() -> None:
    """Some pages named only what is better here."""
    pages = [page for page in PAGES if page.parent.name == "coming-from"]
    assert [page.stem for page in pages] == [
        "accelerate",
        "axolotl",
        "colossalai",
        "deepspeed",
        "diffusion-pipe",
        "fsdp",
        "megatron",
        "slapo",
        "torchtitan",
        "varuna",
    ]
    heads = [page.read_text().splitlines()[2] for page in pages]
    assert [head for head in heads if not re.fullmatch(r"\|.+\| pipeshard \| better \| worse \|", head)] == []


def of_readme(code: str, model: str, folder: str) -> str:
    """What the README's script prints on this rank."""
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["train.py", model]))
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(printed))
        for name in ("init_process_group", "destroy_process_group"):  # this rank is in one
            stack.enter_context(mock.patch(f"torch.distributed.{name}"))
        exec(compile(code, "README", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.turns
def test_the_script_of_the_readme_is_whole(pool: Pool, tmp_path: Path) -> None:
    """It had a dataset that was nowhere defined, and printed nothing."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    words = {word: k for k, word in enumerate(["[UNK]", "[PAD]", "The", "quick", "be", "not", "to", "is", "that", "."])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        tmp_path / "model"
    )
    first, second = pool.run(of_readme, 2, code, str(tmp_path / "model"), str(tmp_path))
    losses = [float(line.rpartition(" ")[2]) for line in first.splitlines()]
    assert len(losses) == 3 * 4 and losses[-1] < losses[0] and not second
    trained = type(model).from_pretrained(tmp_path / "trained")  # type: ignore[attr-defined]
    assert trained.config.num_hidden_layers == model.config.num_hidden_layers


def prose(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)


def test_the_table_of_arguments_is_current() -> None:
    """A reader had to look up types and defaults in the source. Each argument that takes a number has a unit."""
    text = arguments.PAGE.read_text()
    assert arguments.with_table(text) == text, "write it with: python -m tests.arguments"
    numbers = {
        field.name for field in fields(PipelineConfig) if re.search(r"^(int|.*float)\b", arguments.typed(field.type))
    }
    assert numbers == set(arguments.UNITS)


def test_links_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        for target, heading in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", prose(page)):
            there = page.parent / target if target else page
            assert there.exists(), f"{page}: {target}"
            if heading and there.suffix == ".md":
                headings = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
                assert heading[1:] in slugs, f"{page}: {target}{heading}"


def test_names_in_the_prose_exist() -> None:
    """A user imported `consolidate` from `pipeshard.interop.build`, which a page listed among its functions, and passed
    `dp_size` to `AutoConfig.choose`: ImportError, TypeError."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        lists = re.findall(r"functions in\s`(pipeshard[\w.]+)`:([^.]*)", text)
        listed = [f"{module}.{name}" for module, names in lists for name in re.findall(r"`(\w+)`", names)]
        dotted = re.findall(r"\bpipeshard(?:\.\w+)+", " ".join(re.findall(r"`([^`]+)`", text)))
        for name in listed + dotted:
            assert pkgutil.resolve_name(name), page
    found = re.search(
        r"`pipeshard\.plan\(([^)]*)\)`; `AutoConfig\.choose` accepts these arguments except ([^.]*)\.",
        " ".join((DOCS / "planner.md").read_text().split()),
    )
    assert found
    given, excepted = set(re.findall(r"(\w+)=", found[1])), set(re.findall(r"`(\w+)`", found[2]))
    assert given <= set(inspect.signature(pipeshard.plan).parameters)
    assert given & set(inspect.signature(pipeshard.AutoConfig.choose).parameters) == given - excepted


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/.-]+\.md", site.partition("\nnav:")[2]))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("word", ["OOM", "resume", "LoRA", "Slurm"])
def test_the_search_of_the_site_finds(word: str) -> None:
    """It indexes whole words: "OOM" was on no page."""
    assert any(re.search(rf"\b{word}\b", page.read_text(), re.IGNORECASE) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"^::: pipeshard\.[\w.]*\.(\w+)", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert set(pipeshard.__all__) <= shown


def test_the_reference_has_a_row_for_each_argument() -> None:
    """`model, optimizer: ...` became an argument "model," of type "optimizer"."""
    shown = re.findall(r"^::: (pipeshard\.[\w.]+)\.(\w+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    for module, name in shown:
        kind = getattr(importlib.import_module(module), name)
        for one in (kind, *(vars(kind).values() if isinstance(kind, type) else ())):
            text = inspect.getdoc(one) if callable(one) else None
            for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text or "", re.MULTILINE):
                rows = re.findall(r"^    (\S.*)", section, re.MULTILINE)
                assert [row for row in rows if not re.match(r"\w+:", row)] == [], name


def test_what_one_reads_first_is_in_plain_words() -> None:
    """Headings, the first paragraph of every section, and what errors and warnings are made of."""
    quaint = []
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        read = re.findall(r"^#+ .*", prose(page), re.MULTILINE)
        for section in re.split(r"^#+ ", prose(page), flags=re.MULTILINE):
            paragraphs = [part for part in section.split("\n\n")[1:] if part.strip() and part.strip()[0] not in "|!<-"]
            read += paragraphs[:1]
        quaint += [f"{page.name}: {found[0]}" for part in read for found in re.finditer(QUAINT, part, re.IGNORECASE)]
    for path in PACKAGE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        described = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant) and id(node) not in described]
        quaint += [f"{path.name}: {text}" for text in texts if re.search(QUAINT, text, re.IGNORECASE)]
    assert quaint == []


def test_the_slurm_script_starts_an_agent_for_each_node(tmp_path: Path) -> None:
    """Run with a scheduler that is faked: `srun` shows what it is to start."""
    script = ROOT / "examples" / "train.slurm"
    for name, text in {"scontrol": "echo node1; echo node2", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | given
    ended = subprocess.run(["bash", script, "folder"], capture_output=True, text=True, env=environment, check=True)
    command = ended.stdout.split()
    assert command[:2] == ["pipeshard", "launch"]
    (tmp_path / "train.py").write_text("")
    with contextlib.chdir(tmp_path):
        args = parse(command[2:])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("2", "4", "node1:29400")
    assert (args.rdzv_id, args.training_script, args.training_script_args) == ("7", "train.py", ["folder"])
    options = re.findall(r"^#SBATCH --([\w-]+)", script.read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "signal", "requeue"} <= set(options)


@pytest.mark.parametrize(("status", "is_saved"), [(0, True), (1, True), (143, True), (143, False)])
def test_the_slurm_script_requeues_a_job_that_reaches_its_time_limit(
    tmp_path: Path, status: int, is_saved: bool
) -> None:
    """The job saved its state two minutes before the time limit, and ended: --requeue does not requeue it then. A
    script that saves no state, as the README's, began at step 0 again, without end."""
    for name, text in {"scontrol": f'echo "$@" >> {tmp_path}/asked; echo node1', "srun": f"exit {status}"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATE": "outputs/state"}
    environment |= {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    if is_saved:
        (tmp_path / "outputs" / "state" / "step-00000010").mkdir(parents=True)
    command = ["bash", ROOT / "examples" / "train.slurm"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert ended.returncode == status and asked[1:] == (["requeue 7"] if status == 143 and is_saved else [])
    assert ("not requeued: outputs/state has no saved state" in ended.stderr) == (status == 143 and not is_saved)


def test_links_of_the_package_s_description_are_absolute() -> None:
    shown = setup.absolute((ROOT / "README.md").read_text())
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    assert f"{setup.FILES}docs/parity.svg" in links and f"{setup.PAGES}docs/first-hour.md" in links
    paths = [link.removeprefix(setup.FILES).removeprefix(setup.PAGES).partition("#")[0] for link in links]
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_repository_has_one_address() -> None:
    named = ["pyproject.toml", "CITATION.cff", "mkdocs.yml", "setup.py", "docs/hooks.py", "README.md", "SECURITY.md"]
    texts = "".join((ROOT / name).read_text() for name in named)
    assert set(re.findall(r"https://(?:raw\.)?github\w*\.com/([\w.-]+/[\w.-]+)", texts)) == {"pipeshard/pipeshard"}
    assert f'FILES = "{setup.PAGES}"' in (DOCS / "hooks.py").read_text()


def test_features_are_counted_right() -> None:
    table = (DOCS / "trainer.md").read_text().partition("<!-- features -->")[2].partition("<!-- end of features -->")[0]
    count = len(re.findall(r"^\| ", table, re.MULTILINE)) - 1  # but for its head
    for page in ("README.md", "Makefile"):
        assert re.findall(r"(\d+) features", (ROOT / page).read_text()) == [str(count)]


def test_the_readme_s_figures_are_those_of_the_pages() -> None:
    """It said 1877 ms beside 2016, 2044 and 2104, of an older run, in which the others were slower."""
    readme = (ROOT / "README.md").read_text()
    ((exact, bits),) = re.findall(
        r"\*\*(\d+)\*\* exact \(.*\),\n  (\d+) of these bit for bit", (DOCS / "parity.md").read_text()
    )
    assert f"**{exact} have the same loss and gradients in stages" in readme and f"({bits} bit for bit)" in readme
    packages = (DOCS / "packages.md").read_text()
    (count,), (exact,) = (re.findall(rf"- \*\*(\d+)\*\* {what}", packages) for what in ("entries", "exact"))
    assert f"{exact} give the same results" in " ".join(readme.partition(f"Of {count} models")[2].split())
    table = (DOCS / "benchmarks.md").read_text().partition("**llama, m=8")[2].partition("\n**")[0]
    rows = dict(re.findall(r"^\| ([\w .-]+?) \| (\d+) \|", table, flags=re.MULTILINE))
    of_torch = ("torch 1F1B", "torch ZBVZeroBubble", "torch DualPipeV")
    contenders = ("pipeshard zbv", "pipeshard 1f1b", "ColossalAI", "DeepSpeed", *of_torch)
    assert re.findall(r"\b(\d{4}) ms", readme.partition("step of a small llama")[2].partition("medians")[0]) == [
        rows[name] for name in contenders
    ]


def test_releases_are_dated() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.MULTILINE)
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    import pipeshard

    assert pipeshard.__version__ == version


def test_a_wheel_has_every_package() -> None:
    """generate and slices were missing in the list for a week: only an installed wheel shows it."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "pipeshard").rglob("__init__.py")}
    assert listed == {".".join(folder.parts) for folder in folders} | {"pipeshard.policies"}
