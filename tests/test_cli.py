"""Tests of the command `pipeshard plan`: a model by folder, config or type, and the output of its plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from pipeshard import plan, trial
from pipeshard.cli import main
from pipeshard.planner import models as source
from pipeshard.planner.memory import parse_bytes
from pipeshard.verify.decide import Proven
from pipeshard.verify.proof import EXACT, Proof
from tests import zoo
from tests.house import ROOT

MODEL = [
    "llama",
    "hidden_size=32",
    "intermediate_size=64",
    "num_hidden_layers=4",
    "num_attention_heads=4",
    "vocab_size=64",
]
SIZES = ["--pp", "2", "--microbatches", "4", "--seq-len", "16"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_a_model_type_is_planned_and_shown() -> None:
    result = invoke(*MODEL, *SIZES)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("LlamaForCausalLM, ") and lines[0].endswith(" parameters, on 2 ranks")
    assert lines[1] == "4 microbatches of input_ids 1×16, attention_mask 1×16, labels 1×16"
    assert max(map(len, lines)) <= 80
    assert "recommended" in result.output
    assert all(name in result.output for name in ("gpipe", "1f1b", "interleaved, v=2", "zb-h1", "zbv"))


@pytest.mark.turns
def test_the_stages_of_a_schedule_are_shown_drawn_and_written(tmp_path: Path) -> None:
    files = ["--draw", str(tmp_path / "step.svg"), "--json", str(tmp_path / "plan.json")]
    result = invoke(*MODEL, *SIZES, "--schedule", "interleaved", "--microbatch-size", "3", "--dtype", "fp32", *files)
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["schedule"], plan["num_model_chunks"], len(plan["stages"])) == ("interleaved", 2, 4)
    assert plan["microbatch"]["input_ids"] == [3, 16]
    held = [stage["memory"]["parameters"] for stage in plan["stages"]]
    assert sum(held) == 4 * plan["parameters"]
    drawn = (tmp_path / "step.svg").read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 10_000


@pytest.mark.parametrize("partition", ["3,4", "model.layers.1"])
def test_json_takes_the_place_of_the_tables(partition: str) -> None:
    """The name of one unit to cut after was an unknown partition."""
    result = invoke(*MODEL, *SIZES, "--json", "-", "--partition", partition)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["counts"] == [3, 4]


@pytest.mark.turns
def test_a_folder_and_a_config_are_the_same_model(tmp_path: Path) -> None:
    zoo.build("gpt2").save_pretrained(tmp_path)
    of_folder, of_config = (invoke(str(path), *SIZES, "--json", "-") for path in (tmp_path, tmp_path / "config.json"))
    assert of_folder.exit_code == of_config.exit_code == 0, of_folder.output + of_config.output
    assert of_folder.output == of_config.output
    assert json.loads(of_folder.output)["model"] == "GPT2LMHeadModel"


def test_a_name_of_the_hub_is_looked_for_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeshard plan owner/name` said that it is no folder, and no more."""
    assert "huggingface_hub.hf_hub_download('owner/name', 'config.json')" in invoke("owner/name", *SIZES).output
    zoo.build("gpt2").save_pretrained(tmp_path)
    found = {("owner/name", "config.json"): str(tmp_path / "config.json")}
    monkeypatch.setattr(source, "hf_hub_download", lambda *name, local_files_only: found[name])
    assert json.loads(invoke("owner/name", *SIZES, "--json", "-").output)["model"] == "GPT2LMHeadModel"


def test_slices_divide_what_a_rank_holds() -> None:
    whole, sliced = (json.loads(invoke(*MODEL, *SIZES, "--tp", tp, "--json", "-").output) for tp in ("1", "2"))
    assert (whole["training"]["tp_size"], sliced["training"]["tp_size"]) == (1, 2)
    for one, half in zip(whole["stages"], sliced["stages"], strict=True):
        for kind in ("parameters", "gradients", "optimizer", "values"):
            assert one["memory"][kind] / 2 < half["memory"][kind] < one["memory"][kind] * 0.6
    result = invoke(*MODEL, *SIZES, "--tp", "3")
    assert result.exit_code == 1 and "tp_size=3 does not divide num_attention_heads=4" in result.output


@pytest.mark.turns
def test_experts_are_divided() -> None:
    experts = ["qwen3_moe", "num_hidden_layers=4", "vocab_size=64", "num_experts=8"]
    whole, half = (json.loads(invoke(*experts, *SIZES, "--ep", ep, "--json", "-").output) for ep in ("1", "2"))
    for one, part in zip(whole["stages"], half["stages"], strict=True):
        assert one["memory"]["parameters"] / 2 < part["memory"]["parameters"] < one["memory"]["parameters"] * 0.75
    assert "error: ep_size=2: LlamaForCausalLM does not have an ep_plan" in invoke(*MODEL, *SIZES, "--ep", "2").output


@pytest.mark.turns
def test_adapters_beside_divided_experts_are_planned() -> None:
    """peft's "all-linear" includes the experts of these models, so no plan had both options."""
    small = [
        "qwen3_moe",
        *MODEL[1:],
        "moe_intermediate_size=32",
        "num_key_value_heads=2",
        "head_dim=8",
        "num_experts=8",
    ]
    both = [*small, *SIZES, "--ep", "2", "--lora", "2"]
    refused = invoke(*both).output
    assert "has adapters that cannot be sliced. Use LoRA on other layers, such as target_modules=" in refused
    named = [[*both, "--lora-targets", names] for names in ("q_proj,v_proj", "q_proj")]
    whole, part = (json.loads(invoke(*arguments, "--json", "-").output) for arguments in named)
    for one, two in zip(whole["stages"], part["stages"], strict=True):
        assert one["memory"]["optimizer"] > two["memory"]["optimizer"] > 0


@pytest.mark.turns
def test_the_columns_of_the_memory_add_up() -> None:
    """At the peak of stage 1, recomputed activations wait for a W: the total had them, but no column did."""
    sizes = ["--pp", "4", "--microbatches", "8", "--seq-len", "64", "--schedule", "zb-h1", "--recompute"]
    table = invoke(*MODEL, "num_hidden_layers=24", *sizes).output.partition("stage rank")[2].splitlines()
    columns, rows = table[0].split(), [line.split()[2:] for line in table[1:5]]
    place = columns.index("activations")
    assert any("+" in row[place] for row in rows)
    for row in rows:
        count, _, kept = row[place].partition("×")
        parts = [*row[:place], *row[place + 1 : -1], *kept.split("+")[1:], int(count) * float(kept.split("+")[0])]
        assert sum(map(float, parts)) == pytest.approx(float(row[-1]), rel=0.02)


def test_numbers_of_slices_are_compared() -> None:
    output = invoke(*MODEL, *SIZES, "--slices").output
    assert "Slices of 1f1b" in output
    rows = [line.split() for line in output.splitlines()]
    idle = {row[0]: float(row[2].rstrip("%")) for row in rows if len(row) == 5 and row[0] in ("1", "16")}
    assert idle["16"] < idle["1"] / 3


def test_slices_are_compared_with_the_limit() -> None:
    """A limit that whole microbatches exceed was refused before any number of slices was shown, and "N slices take the
    least time" ignored a limit that they did not exceed."""
    asked = [*MODEL, *SIZES, "--seq-len", "256", "--slices", "--device-memory"]
    refused = invoke(*asked, "1kB").output
    assert refused.startswith("LlamaForCausalLM, ") and "Slices of 1f1b" in refused
    assert "\nerror: with 16 slices, rank " in refused and "but its device_memory is 1.00 kB. Possible" in refused
    model = source.build_on_meta("llama", MODEL[1:])
    made = plan(model, pp_size=2, num_microbatches=4, seq_len=256, schedule="1f1b", precision="bf16")
    peaks = {one.n: one.peak for one in made.in_slices()}
    shown = invoke(*asked, str(peaks[4]))
    rows = [line.split() for line in shown.output.partition("Slices of 1f1b")[2].splitlines()]
    fits = {int(row[0]): row[-1] for row in rows if len(row) == 6 and row[0].isdigit()}
    assert shown.exit_code == 0 and fits == {n: "yes" if peak <= peaks[4] else "no" for n, peak in peaks.items()}
    assert {*fits.values()} == {"yes", "no"} and "slices take the least time" in shown.output


def test_the_host_s_memory_is_shown_with_offload() -> None:
    sizes = ["--pp", "4", "--microbatches", "8", "--seq-len", "64", "--schedule", "1f1b"]
    plain, offloaded = invoke(*MODEL, *sizes).output, invoke(*MODEL, *sizes, "--offload", "activations").output
    assert "activations on the host" in offloaded and "4×" in plain and "4×" not in offloaded
    assert [("host" in line.split()) for line in plain.splitlines() if line.startswith("stage rank")] == [False]
    assert [line.split()[-1] for line in offloaded.splitlines() if line.startswith("stage rank")] == ["host"]
    assert "did you mean activations?" in invoke(*MODEL, *sizes, "--offload", "activation").output


@pytest.mark.turns
def test_adapters_train_little_and_have_no_weight_gradients_of_the_rest() -> None:
    whole, adapted = (json.loads(invoke(*MODEL, *SIZES, "--json", "-", *o).output) for o in ([], ["--lora", "2"]))
    assert whole["parameters"] < adapted["parameters"] < 1.2 * whole["parameters"]
    for one, two in zip(whole["stages"], adapted["stages"], strict=True):
        assert 0 < two["memory"]["optimizer"] < 0.2 * one["memory"]["optimizer"]
    shares = [sum(s["backward"] + s["weight"] for s in p["stages"]) / sum(s["forward"] for s in p["stages"])
              for p in (whole, adapted)]  # fmt: skip
    assert 1 < shares[1] < 0.7 * shares[0]


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_packed_weights_take_less_and_compute_the_same(kind: str) -> None:
    """bitsandbytes' products had no flops in a plan, so stages of packed layers took hardly any time."""
    pytest.importorskip("bitsandbytes")
    adapters = [*MODEL, *SIZES, "--dtype", "fp32", "--lora", "2"]
    plain, packed = (json.loads(invoke(*adapters, "--json", "-", *each).output) for each in ([], ["--quantize", kind]))
    assert packed["parameters"] == plain["parameters"] and packed["training"] == plain["training"]
    for one, two in zip(plain["stages"], packed["stages"], strict=True):
        assert two["memory"]["parameters"] < 0.6 * one["memory"]["parameters"]
        assert (two["parameters"], two["kept"]) == (one["parameters"], one["kept"])
        assert [two[name] for name in ("forward", "backward", "weight")] == pytest.approx(
            [one[name] for name in ("forward", "backward", "weight")], rel=0.1
        )
    assert (
        "error: the weights of this model are quantized, so fsdp=True, tp_size"
        in invoke(*adapters, "--quantize", kind, "--tp", "2").output
    )


def write_packed(folder: Path, **options: Any) -> str:
    """Write the config of a small model that was saved with quantized weights."""
    config = source.build_on_meta("llama", MODEL[1:]).config
    config.quantization_config = {"quant_method": "bitsandbytes"} | options
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.turns
def test_a_folder_in_4_bits_is_planned_as_it_is(tmp_path: Path) -> None:
    """It was planned with the weights in 16 bits, so `--device-memory` refused what fits."""
    pytest.importorskip("bitsandbytes")
    saved = write_packed(tmp_path, **source.QUANTIZATIONS["nf4"])
    asked = [*MODEL, *SIZES, "--lora", "2", "--quantize", "nf4", "--json", "-"]
    found, expected = invoke(saved, *SIZES, "--lora", "2", "--json", "-"), invoke(*asked)
    assert found.exit_code == 0, found.output
    assert json.loads(found.output) == json.loads(expected.output)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("bitsandbytes", [], "with bitsandbytes), so there is nothing to train: add adapters with --lora"),
        (
            "bitsandbytes",
            ["--lora", "2", "--quantize", "nf4"],
            "with bitsandbytes), so they cannot be quantized again: omit --quantize",
        ),
        ("gptq", ["--lora", "2"], "with gptq), and stages cannot load such weights. To plan for a copy of"),
    ],
)
def test_a_quantized_folder_that_cannot_be_trained_is_not_planned(
    tmp_path: Path, method: str, options: list[str], message: str
) -> None:
    saved = write_packed(tmp_path, quant_method=method, load_in_4bit=True)
    refused = invoke(saved, *SIZES, *options)
    assert refused.exit_code == 1 and f"error: the weights in {saved} are quantized ({message}" in refused.output
    assert invoke(saved, "quantization_config=null", *SIZES, *options).exit_code == 0


def test_large_adapters_do_not_change_the_precision() -> None:
    """With `--quantize nf4 --lora 128`, the fp32 adapters have more elements than the bf16 weights that are not
    quantized, and the plan was for precision fp32."""
    model = source.build_on_meta("llama", MODEL[1:], "bf16", lora=128)
    assert source.precision_of(model) == "bf16"
    packed = source.build_on_meta("llama", MODEL[1:], "bf16", lora=128, quantize="nf4")
    assert source.precision_of(packed) == "bf16"
    model = source.build_on_meta("llama", MODEL[1:], "bf16")
    model.model.norm.float().requires_grad_(False)  # like the biases of ERNIE's routers
    assert source.precision_of(model) == "bf16"


def test_optimizers_in_8_bits_take_a_quarter() -> None:
    sizes = ["hidden_size=128", "intermediate_size=256", "num_hidden_layers=4", "vocab_size=64", *SIZES, "--json", "-"]
    plans = [json.loads(invoke("llama", *sizes, "--optimizer", kind).output) for kind in ("adamw", "adamw_8bit")]
    full, packed = (sum(stage["memory"]["optimizer"] for stage in plan["stages"]) for plan in plans)
    assert full / 4 < packed < full / 3


@pytest.mark.turns
def test_a_device_s_speed_gives_seconds_and_tokens() -> None:
    """Times were relative unless units had been measured, which a laptop cannot do for somebody's GPUs."""
    plans = [json.loads(invoke(*MODEL, *SIZES, "--json", "-", "--tflops", each).output) for each in ("0.001", "0.002")]
    slow, fast = (plan["schedules"] for plan in plans)
    assert plans[0]["unit"] == "seconds"
    assert all(a["time"] == pytest.approx(2 * b["time"]) for a, b in zip(slow, fast, strict=True))
    late = json.loads(invoke(*MODEL, *SIZES, "--json", "-", "--tflops", "0.002", "--link", "1MB/s").output)
    assert late["devices"]["links"] == [{"bandwidth": 10**6, "latency": 0}]
    assert all(a["time"] > b["time"] for a, b in zip(late["schedules"], fast, strict=True))
    shown = invoke(*MODEL, *SIZES, "--tflops", "0.000001", "--dp", "2").output
    line = next(line for line in shown.splitlines() if line.startswith("1f1b"))
    assert float(line.split()[3].replace(",", "")) == pytest.approx(4 * 16 * 2 / float(line.split()[1]), abs=0.5)
    assert max(map(len, shown.splitlines())) <= 80 and "interleaved, v=2" in shown


def test_unequal_ranks_are_shown_with_what_to_pass() -> None:
    options = ["--device-memory", "1GB,500MB", "--device-speed", "1.0,0.6", "--tflops", "1"]
    shown = invoke(*MODEL, *SIZES, *options, "--link", "50GB/s,10us").output
    assert "rank 0: 1.00 GB, speed 1; rank 1: 500 MB, speed 0.6; messages: 50.0 GB/s, 10 us\n" in shown
    plan = json.loads(invoke(*MODEL, *SIZES, *options, "--json", "-").output)
    assert shown.endswith(f"Pass partition={plan['counts']} to PipelinePlugin.\n")


@pytest.mark.turns
def test_cuts_that_were_moved_are_shown_with_what_to_pass() -> None:
    """A plan "fits" with cuts that it had moved, and nothing said so: training with partition="auto" ran out of
    memory."""
    asked = [*MODEL, *SIZES, "num_hidden_layers=8", "--seq-len", "128", "--schedule", "1f1b"]
    whole = json.loads(invoke(*asked, "--json", "-").output)
    peak = max(memory["total"] for memory in next(e for e in whole["schedules"] if e["schedule"] == "1f1b")["memory"])
    roomy, tight = (invoke(*asked, "--device-memory", str(limit)).output for limit in (peak, peak - 1))
    plan = json.loads(invoke(*asked, "--device-memory", str(peak - 1), "--json", "-").output)
    assert plan["counts"] != whole["counts"]
    rows = [next(line for line in each.splitlines() if line.startswith("1f1b")) for each in (roomy, tight)]
    assert [row.split()[6] for row in rows] == ["yes", "yes*"]
    assert "Pass partition=" not in roomy and tight.endswith(f"Pass partition={plan['counts']} to PipelinePlugin.\n")
    assert "*: with different cuts, since the cuts of partition auto do not fit" in tight
    passed = ["--partition", ",".join(map(str, plan["counts"])), "--device-memory", str(peak - 1)]
    assert json.loads(invoke(*asked, *passed, "--json", "-").output)["stages"] == plan["stages"]


@pytest.mark.turns
def test_what_does_not_fit_is_refused_and_recompute_counted() -> None:
    result = invoke(*MODEL, *SIZES, "--device-memory", "100kB")
    assert result.exit_code == 1
    assert result.output.startswith("error: with schedule") and "needs" in result.output
    kept = {}
    for options in ((), ("--recompute",)):
        plan = json.loads(invoke(*MODEL, *SIZES, "--schedule", "1f1b", "--json", "-", *options).output)
        kept[options] = sum(stage["kept"] for stage in plan["stages"])
    assert kept["--recompute",] < kept[()] / 2


def test_a_field_that_only_the_code_reads_is_accepted() -> None:
    """Qwen3MoeConfig has no head_dim of its own, but every Qwen3-MoE on the Hub sets it."""
    model = source.build_on_meta("qwen3_moe", ["head_dim=128", "num_hidden_layers=1"])
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (128 * 32, 2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama", *SIZES], "error: lama is not a folder, a config.json or a transformers model type (did you mean"),
        (["owner/name", *SIZES], "error: owner/name is neither a local path nor a model in the Hugging Face cache"),
        (
            ["llama", "hidden=64", *SIZES],
            "error: LlamaConfig has no field hidden: did you mean hidden_act or hidden_size?",
        ),
        (["llama", "hidden_size", *SIZES], "error: 'hidden_size' is not a config field: write key=value"),
        ([*MODEL, *SIZES, "--schedule", "zbw"], "error: unknown schedule 'zbw': did you mean 'zbv'?"),
        ([*MODEL, *SIZES, "--dtype", "int8"], "error: dtype='int8' is unknown: use one of"),
        ([*MODEL, *SIZES, "--partition", "evenly"], "error: partition='evenly' is unknown: use one of"),
        ([*MODEL, "--pp", "9", "--microbatches", "4"], "error: "),
        ([*MODEL, *SIZES, "--device-memory", "much"], "error: device_memory='much' is not a positive size"),
        ([*MODEL, *SIZES, "--tflops", "-1"], "error: tflops must be a positive number, got -1.0"),
        ([*MODEL, *SIZES, "--tflops", "1", "--link", "1GB"], "error: link='1GB': 'GB' is not a unit of bandwidth: did"),
        ([*MODEL, *SIZES, "--link", "1GB/s"], "error: link requires times in seconds: also pass tflops or a profile"),
        ([*MODEL, *SIZES, "--device-speed", "1,2,3,4,5"], "error: device_speed='1,2,3,4,5' has 5 values for 2 ranks"),
        (
            [*MODEL, *SIZES, "--partition", "speed:1"],
            "error: partition='speed:1' has 1 speed for 2 ranks: pass one speed per rank",
        ),
        ([*MODEL, *SIZES, "--slices", "--schedule", "zbv"], "error: schedule 'zbv' does not support slices"),
        ([*MODEL, *SIZES, "--lora", "2", "--quantize", "nf5"], "error: quantize='nf5' is unknown: did you mean nf4"),
        (
            [*MODEL, *SIZES, "--quantize", "nf4"],
            "error: quantize='nf4' freezes the base weights, so there is nothing to train: add adapters with --lora",
        ),
        ([*MODEL, *SIZES, "--lora-targets", "q_proj"], "error: --lora-targets q_proj has no effect without adapters"),
        ([*MODEL, *SIZES, "--lora", "2", "--lora-targets", "query"], "error: peft cannot add adapters to LlamaFor"),
        ([*MODEL, *SIZES, "--optimizer", "adam_8bit"], "error: optimizer='adam_8bit' is unknown: did you mean adamw_8"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith(message)
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "path", "message"),
    [
        ("--draw", "nowhere/x.png", "nowhere/x.png cannot be written: No such file or directory"),
        ("--draw", "x.bmp", "x.bmp is not an image file: use one of the suffixes .png, .svg"),
        ("--json", "nowhere/x.json", "nowhere/x.json cannot be written: No such file or directory"),
        ("--json", ".", ". cannot be written: Is a directory"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_work(option: str, path: str, message: str) -> None:
    """It was a traceback of 30 lines, after everything was computed."""
    for command in (["plan", "lama"], ["trace-run", "lama"]):  # a model that is not looked at either
        result = CliRunner().invoke(main, [*command, *SIZES, option, path])
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_the_check_whether_a_file_can_be_written_leaves_no_file(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("kept")
    for path in (kept, new):
        assert CliRunner().invoke(main, ["plan", "lama", *SIZES, "--json", str(path)]).exit_code == 1
    assert kept.read_text() == "kept" and not new.exists()


def test_a_demo_with_other_losses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(_: object, arguments: tuple[int, int, str], size: int) -> None:
        steps = [(5.5, 5.5, 0.1), (5.4, 5.4 + 1e-5 * size, 0.1), (5.3, 5.4, 0.1)][: arguments[1]]
        Path(arguments[2], "steps.json").write_text(json.dumps(steps))

    monkeypatch.setattr(trial, "_spawn", spawn)
    same = CliRunner().invoke(main, ["demo", "--steps", "2"])
    assert same.exit_code == 0 and same.output.endswith("pipeshard works here\n")
    other = CliRunner().invoke(main, ["demo", "--steps", "3"])
    assert other.exit_code == 1 and "step 3: loss 5.300000, in one process 5.400000" in other.output


def test_units_of_slurm_and_nvidia_smi_are_known() -> None:
    assert parse_bytes("8G") == parse_bytes("8GB") == 8 * 10**9 and parse_bytes("512M") == 512 * 10**6
    assert parse_bytes("1T") == 10**12 and parse_bytes("2TiB") == 2**41


@pytest.mark.turns
def test_the_tables_of_a_large_model_fit_a_terminal() -> None:
    """With --recompute and 16 ranks of a 70B model three columns were cut to `0.1...`."""
    sizes = ["hidden_size=8192", "intermediate_size=28672", "num_hidden_layers=80", "num_attention_heads=64"]
    sizes += ["num_key_value_heads=8", "vocab_size=128256"]
    for precision in ("bf16", "fp32"):
        options = ["--microbatches", "32", "--recompute", "--precision", precision, "--schedule", "1f1b"]
        result = invoke("llama", *sizes, "--pp", "16", *options)
        assert result.exit_code == 0, result.output
        tables = result.output.partition("Memory of")[2]
        assert max(map(len, result.output.splitlines())) <= 80
        assert all("…" not in line.partition("B ")[2] for line in tables.splitlines())
        assert len([line for line in tables.splitlines() if line.split()[:2] == ["15", "15"]]) == 1


def test_the_command_is_installed() -> None:
    command = os.path.join(os.path.dirname(sys.executable), "pipeshard")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "plan " in shown and "trace-run " in shown


def verified(*arguments: str) -> tuple[Result, list[Any]]:
    """What `pipeshard verify` prints, and the path, the arguments and the stages of the script that it runs."""
    given: list[Any] = []

    def prove(path: Path, arguments: tuple[str, ...], pp_size: int | None) -> Proven:
        given[:] = [path.name, list(arguments), pp_size]
        return Proven(Proof(EXACT), path.name)

    with mock.patch("pipeshard.commands.prove_script", prove):
        return CliRunner().invoke(main, ["verify", *arguments]), given


def test_what_follows_a_script_is_its_own(tmp_path: Path) -> None:
    """`pipeshard verify finetune.py --schedule zbv` proved the script without --schedule: exact."""
    script = str(tmp_path / "train.py")
    Path(script).touch()
    own = ["--schedule", "zbv", "--pp", "3", "--seq-len=4", "-v", "--", "--help"]
    for before, stages in ([], None), (["--pp", "2"], 2):
        assert verified(*before, script, *own)[1] == ["train.py", own, stages]


@pytest.mark.parametrize("option", ["--schedule=zbv", "--microbatches=8", "--partition=uniform", "--chunks=2"])
def test_options_for_a_model_are_refused_with_a_script(tmp_path: Path, option: str) -> None:
    """They were ignored: the script was proven with its own schedule."""
    (tmp_path / "train.py").touch()
    result, given = verified(option, str(tmp_path / "train.py"))
    name = option.partition("=")[0]
    assert result.exit_code == 2 and given == [], result.output
    assert f"Error: {name} applies only to MODEL, but train.py is a script, which sets this value itself" in " ".join(
        result.output.split()
    )


def test_a_script_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    """It was a traceback of runpy."""
    missing = str(tmp_path / "trian.py")
    result, given = verified(missing)
    assert (result.exit_code, given) == (2, []) and result.output == f"error: {missing}: No such file or directory\n"


def test_a_script_that_fails_before_boost_is_not_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeshard verify` of a script whose data was missing exited with 1, the code of a model that differs."""
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'none.txt')!r})")
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(main, ["verify", str(script)])
    assert result.exit_code == 2, result.output
    assert f'File "{script}", line 1' in result.output
    assert "train.py: unproven: the script raised FileNotFoundError: [Errno 2] No such file" in result.output


@pytest.mark.turns
def test_an_elastic_script_is_verified(tmp_path: Path) -> None:
    """ElasticJob refused a process without a launcher, and no launcher verifies."""
    command = [sys.executable, "-c", "from pipeshard.cli import main; main()", "verify", "--pp", "4"]
    command += [str(ROOT / "examples" / "elastic.py"), "--output", str(tmp_path)]
    ours = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ours)
    assert ended.returncode == 0 and "LlamaForCausalLM in 4 stages, 1f1b: exact" in ended.stdout, ended


@pytest.mark.turns
def test_a_verdict_ends_the_command() -> None:
    """The store of its one rank was a file, which was deleted first: at the end, a thread waited 30 s for it."""
    program = (
        "import atexit, time\n"
        "verdict = []\n"
        "atexit.register(lambda: print('waited', time.monotonic() - verdict[0]))\n"
        "from pipeshard.cli import main\n"
        f"main(['verify', *{MODEL!r}, '--pp', '9'], standalone_mode=False)\n"
        "verdict.append(time.monotonic())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "Use pp_size <= 7" in ended.stdout and float(ended.stdout.split()[-1]) < 20, ended
