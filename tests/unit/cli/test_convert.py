"""`grpo convert` writes valid jobs, reports every option, runs no script; its tables match the installed releases."""

import dataclasses
import functools
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin
from click.testing import CliRunner, Result
from trl.scripts.grpo import GRPOScriptArguments

from grpo_cli.convert import fields, settle, values
from grpo_cli.convert.apply import TABLES, find
from grpo_cli.convert.conversion import Conversion, convert
from grpo_cli.convert.pages import page
from grpo_cli.convert.read import Source, read
from grpo_cli.convert.rows import UNSET, Kind
from grpo_cli.convert.settle import Given
from grpo_cli.main import main
from grpo_operator.api.spec import GRPOJobSpec, parse_spec
from grpo_spec.training import TrainingConfig
from support.paths import CONVERT_INPUTS as INPUTS
from support.paths import DOCS

BOTH = ["trl.yaml", "accelerate-zero3.yaml"]
PAIRS = [BOTH, ["trl-older.yaml", "accelerate-fsdp.yaml"], *([file] for file in BOTH)]
SCRIPTS = [["swift-server.sh"], ["swift-colocate.sh"], ["verl.sh"], ["swift-all-maps.sh"], ["openrlhf.sh"]]


def _sources(*files: str) -> list[Any]:
    return [source for file in files for source in read(file, (INPUTS / file).read_text())]


def _convert(*files: str, **given: int) -> Conversion:
    return convert(_sources(*files), Given(**given))


def _text(file: str, text: str, **given: int) -> Conversion:
    return convert(read(file, text), Given(**given))


def _run(*arguments: str, text: str | None = None) -> Result:
    words = [str(INPUTS / one) if (INPUTS / one).is_file() else one for one in arguments]
    return CliRunner().invoke(main, ["convert", *words], input=text)


@pytest.mark.parametrize("files", PAIRS + SCRIPTS, ids="+".join)
def test_every_option_is_named_and_the_manifest_is_a_valid_job(files: list[str]) -> None:
    conversion = _convert(*files)
    given = {name for source in _sources(*files) for name in source.options | source.environment}
    assert given - {finding.name for finding in conversion.findings} == set()
    scripts = [(INPUTS / file).read_text() for file in files if file.endswith(".sh")]
    flags = {flag for script in scripts for flag in re.findall(r"--([\w.]+)", script)}
    named = {finding.name for finding in conversion.findings}
    assert flags - named - {name.removeprefix("rollout.") for name in named} == set()
    written = yaml.safe_load(conversion.manifest)
    assert written["kind"] == "GRPOJob"
    assert parse_spec(written["spec"]) == parse_spec(conversion.spec)
    assert all(finding.note for finding in conversion.left), "each note says why, and what to do"
    assert "not-a-real-key" not in conversion.manifest + str(conversion.findings)


def test_every_field_of_trl_has_a_row() -> None:
    known = TABLES["trl"].rows.keys()
    for config in (trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments, trl.DatasetMixtureConfig):
        assert {field.name for field in dataclasses.fields(config)} - known == set(), config.__name__


def test_every_field_of_accelerate_has_a_row() -> None:
    table = TABLES["accelerate"]
    sections = {"deepspeed_config", "fsdp_config"}
    assert {field.name for field in dataclasses.fields(ClusterConfig)} - table.rows.keys() == sections
    questions = {"deepspeed_config_file", "deepspeed_hostfile", "zero3_init_flag", "offload_param_device"}
    plugin = {"gradient_accumulation_steps", "gradient_clipping", "zero_stage"}
    assert plugin <= {field.name for field in dataclasses.fields(DeepSpeedPlugin)}
    assert all(find(table, f"deepspeed_config.{name}") for name in questions | plugin)


def test_options_not_set_mean_the_same_as_in_trl() -> None:
    ours = {path.split(".")[1]: value for path, value in _fields(TrainingConfig(), "training").items()}
    theirs = (*dataclasses.fields(trl.GRPOConfig), *dataclasses.fields(trl.ModelConfig))
    defaults = {field.name: field.default for field in theirs}
    wrong = []
    for row in TABLES["trl"].rows.values():
        section, _, name = row.field.partition(".")
        if row.kind is not Kind.SAME or section != "training" or defaults.get(row.name) is None:
            continue
        here = row.default if row.default is not UNSET else ours[name]
        if row.convert(defaults[row.name]) != here:
            wrong.append((row.name, defaults[row.name], here))
    assert wrong == []


def test_tables_are_of_the_installed_releases() -> None:
    """verl and ms-swift are not installed: their tables name the release that they were compared with."""
    for name in ("trl", "accelerate"):
        assert TABLES[name].release == version(name)


def _fields(section: Any, prefix: str) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in section.model_dump(by_alias=True).items()}


def test_every_row_leads_to_a_field_that_exists() -> None:
    for table in TABLES.values():
        for row in table.rows.values():
            assert _exists(row.field), f"{table.format}: {row.name} -> {row.field}"
            assert row.note or row.kind is Kind.SAME, f"{row.name} lacks a note"
    facts = {row.fact for table in TABLES.values() for row in table.rows.values() if row.fact}
    assert fields._OF_FACTS.keys() <= facts
    read_of_them = "".join(path.read_text() for path in Path(settle.__file__).parent.glob("*.py"))
    assert [fact for fact in sorted(facts) if f'"{fact}"' not in read_of_them] == []


@functools.cache
def _schema() -> dict[str, Any]:
    return GRPOJobSpec.model_json_schema(by_alias=True)


def _exists(path: str) -> bool:
    schema = node = _schema()
    for part in filter(None, path.split(".")):
        choices = [node, *node.get("anyOf", []), *node.get("allOf", [])]
        reference = next((choice["$ref"] for choice in choices if "$ref" in choice), None)
        node = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else node
        if "properties" not in node:
            return "additionalProperties" in node or any("additionalProperties" in choice for choice in choices)
        if part not in node["properties"]:
            return False
        node = node["properties"][part]
    return True


def test_defaults_of_the_other_tool_are_written_out() -> None:
    training = _convert("swift-all-maps.sh").spec["training"]
    assert training["temperature"] == 0.9
    assert not {"topP", "topK"} & training.keys(), "4.0.2 still had 0.9 and 50"
    assert (training["lossType"], training["importanceSamplingCorrection"]) == ("grpo", "none")
    assert "temperature: 0.9  # ms-swift's default" in _convert("swift-all-maps.sh").manifest


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ("", "sequence_mask  # trl's default"),
        ("vllm_importance_sampling_mode: token_mask", "token_mask"),
        ("vllm_importance_sampling_correction: false", "none  # vllm_importance_sampling_correction is false"),
    ],
)
def test_a_job_from_trl_keeps_trls_correction(options: str, written: str) -> None:
    """A job's own default is another: the loss of long completions does not vanish with it."""
    manifest = _text("trl.yaml", f"model_name_or_path: a/b\nuse_vllm: true\n{options}\n").manifest
    assert f"importanceSamplingCorrection: {written}\n" in manifest


def test_toml_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"rl.toml: TOML, as prime-rl writes it, is not read"):
        read("rl.toml", "max_steps = 5\n[model]\nname = 'a/b'\n")


def test_openrlhfs_divergence_is_in_rewards_and_its_critic_is_told_unless_it_is_asked_otherwise() -> None:
    text = (INPUTS / "openrlhf.sh").read_text()
    spec = _text("openrlhf.sh", text.replace("--algo.kl.use_loss", "--algo.kl.estimator k1")).spec
    assert (spec["training"]["klInReward"], spec["training"]["beta"]) == (True, 1e-3)
    left = _text("openrlhf.sh", text.replace("--algo.advantage.estimator group_norm", "--algo.advantage.gamma 1")).left
    assert "use group_norm, rloo or reinforce_baseline, not gae" in {one.note for one in left}


def test_engines_with_their_own_gpus_leave_optimizer_states_where_they_are() -> None:
    server = (INPUTS / "swift-server.sh").read_text().rstrip() + " --offload_optimizer true"
    conversion = _text("swift-server.sh", server)
    assert "offloadOptimizer" not in conversion.spec["parallelism"]
    (found,) = (finding for finding in conversion.findings if finding.note.startswith("engines have their own GPUs"))
    assert found.kind is Kind.NOT_NEEDED


def test_images_are_as_small_as_in_swift() -> None:
    text = "MAX_PIXELS=602112 " + (INPUTS / "swift-colocate.sh").read_text()
    assert _text("swift-colocate.sh", text).spec["dataset"]["maxPixels"] == 602112


def test_trackers_that_jobs_do_not_have_are_told_and_the_others_kept() -> None:
    text = (INPUTS / "swift-all-maps.sh").read_text().rstrip() + " --report_to tensorboard swanlab"
    conversion = _text("swift-all-maps.sh", text)
    assert conversion.spec["training"]["reportTo"] == ["tensorboard"]
    (told,) = (finding for finding in conversion.findings if finding.value == "swanlab")
    assert told.kind is Kind.DIFFERENT
    assert "metrics.jsonl has all metrics" in told.note


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("learning_rate: fast", "job.yaml: learning_rate: use a number, not 'fast'"),
        ("[1, 2]", "job.yaml: write options as `name: value`; found list"),
        ("a: [", "job.yaml: this is not YAML"),
        (
            "num_machines: 1\ndeepspeed_config: {gradient_accumulation_steps: 0.25}",
            "job.yaml: deepspeed_config.gradient_accumulation_steps: use a whole number, not 0.25",
        ),
        ("temperature: 20", "spec.training.temperature"),
    ],
)
def test_an_error_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(complaint)) as error:
        _text("job.yaml", text)
    assert "\n" not in str(error.value)


def test_comments_and_quotes_are_read_as_a_shell_does() -> None:
    comment = "# swift rollout \\\n#   --model x \\\n"
    (source,) = read("run.sh", f"{comment}A='1 # 2'\ntrl grpo --run_name \"$A\" --dataset_name a/b#c # --seed 3\n")
    assert source.options == {"run_name": "1 # 2", "dataset_name": "a/b#c"}
    (source,) = read("run.sh", 'S="first\n#### last"\ntrl grpo \\\n # --seed 1 \\\n --system_prompt "$S" \\\n')
    assert source.options == {"system_prompt": "first\n#### last"}


def test_arrays_of_a_script_are_expanded() -> None:
    rows = "DATA=(\n  data.train_files=/data/a.parquet  # rows\n  data.train_batch_size=$N\n)"
    text = f'N=4\n{rows}\npython3 -m verl.trainer.main_ppo "${{DATA[@]}}" "$@" 2>&1\n'
    (source,) = read("run.sh", text)
    assert source.options == {"data.train_files": "/data/a.parquet", "data.train_batch_size": "4"}


@pytest.mark.parametrize("value", ["", {}, "inf"], ids=repr)
def test_no_value_of_any_option_causes_a_traceback(value: Any) -> None:
    faults = []
    for table in TABLES.values():
        for name in table.rows:
            try:
                convert([Source("file", table.format, {name: value})], Given())
            except ValueError as error:
                faults.append(str(error))
    assert faults
    assert [fault for fault in faults if "\n" in fault] == []


def test_commands_of_a_script_are_not_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    command = "swift rlhf --rlhf_type grpo --model a/b --dataset c/d"
    conversion = _text("run.sh", f"{command} --num_generations $(touch {target}) --seed 7")
    assert not target.exists()
    (left,) = (finding for finding in conversion.left if finding.name == "num_generations")
    assert left.note.startswith("line 1: commands are not run")
    assert conversion.spec["training"]["seed"] == 7, "$(...) does not end the command"


PUT = ".*: put its value there, or give it with --set"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("echo hello", r"run\.sh: one command of"),
        ("swift sft --model x", r"run\.sh: one command of"),
        ("swift rlhf 'open", "line 1: .*without closing quote"),
        ("trl grpo --model_name_or_path $MODEL --seed 1", f"^run.sh: .*line 1: MODEL is not set in the script{PUT}"),
        ("D=$(pwd)/x\npython3 -m verl.trainer.main_ppo data.train_files=$D/a", f"line 1: commands are not run{PUT}"),
        (
            "case $1 in a) D=x/y;; esac\nif [ -e z ]; then D=z; fi\nswift rlhf --rlhf_type grpo --dataset $D",
            f"line 2.*{PUT}",
        ),
        ("trl grpo --seed 1\ntrl grpo --seed 2", "several commands train: lines 1, 2. A job is one of them"),
        ("for s in 1 2; do\n trl grpo --seed $s\ndone", "several commands train: line 2, several times"),
        ("if [ -e x ]; then trl grpo\nelse trl grpo --seed 2; fi", r"lines 1, 2 \(only a run decides line 1\)"),
        ('if [ -z "$M" ]; then\n exit 1\nfi\ntrl grpo --model $M', "line 2 ends the script; M is not set: --set M="),
    ],
)
def test_a_script_that_does_not_train_once_or_with_a_model_that_only_a_run_says_is_refused_by_line(
    text: str, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        _text("run.sh", text)


@pytest.mark.parametrize(
    ("launcher", "nodes", "gpus", "stage", "dtype"),
    [
        ("accelerate launch --num_processes 8 --num_machines=2 --mixed_precision bf16 x.py", 2, 4, None, "bfloat16"),
        ("accelerate launch --use_deepspeed --zero-stage 3 --num_processes 2 -m my.train", 1, 2, 3, None),
        ("accelerate launch --config_file zero3.yaml --num_processes=4 --multi_gpu train.py", 2, 2, 3, "bfloat16"),
        ("accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 2 train.py", 1, 2, 2, None),
        ("accelerate launch --num_processes 2 --multi_gpu $SCRIPT", 1, 2, 0, None),
        ("torchrun --nnodes 2 --nproc_per_node 4 train.py", 2, 4, None, None),
        ("python -m torch.distributed.run --nproc_per_node=4 train.py", 1, 4, None, None),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", 1, 4, 2, None),
        ("trl grpo --num_processes 4 --accelerate_config zero1", 1, 4, 1, None),
    ],
)
def test_options_of_a_launcher_are_not_those_of_the_script(
    launcher: str, nodes: int, gpus: int, stage: int | None, dtype: str | None
) -> None:
    """They say how many GPUs there are, the ZeRO stage and the type of the weights; so do files that they name."""
    files = {
        "zero3.yaml": (INPUTS / "accelerate-zero3.yaml").read_text(),
        "ds.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    }
    text = f"{launcher} --model_name_or_path a/b --dataset_name c/d --seed 7 --gradient_accumulation_steps 2\n"
    sources = read("run.sh", text, "trl")
    for file in (file for file in files if file in launcher):
        sources += read(file, files[file])
    conversion = convert(sources, Given())
    spec = conversion.spec
    assert yaml.safe_load(conversion.manifest)["metadata"]["name"] == "b", "the model's"
    assert spec["trainer"]["groups"] == [{"name": "trainer", "replicas": nodes, "gpus": gpus}]
    assert spec.get("parallelism", {}).get("zeroStage") == stage
    assert spec["model"].get("dtype") == dtype
    assert spec["training"]["seed"] == 7
    assert {finding.name for finding in conversion.left} == {"epochs", "rewards"}


def test_what_a_launcher_reads_elsewhere_is_named() -> None:
    launcher = "accelerate launch --config_file zero3.yaml --dynamo_backend inductor --fp8_format HYBRID train.py"
    conversion = convert(read("run.sh", f"{launcher} --model_name_or_path a/b --use_vllm true", "trl"), Given())
    left = {finding.name: finding.note for finding in conversion.left}
    assert left["config_file"] == "its options are not known: give grpo convert that file, too"
    assert left["fp8_format"].startswith("not a known option of accelerate")
    assert "dynamo_backend" in left
    assert "topology" in conversion.spec["generation"]


def test_options_of_a_file_that_the_command_names_count_unless_the_command_says_otherwise() -> None:
    command = "trl grpo --config trl.yaml --num_generations 4 --model_name_or_path a/b"
    for files in (("run.sh", "trl.yaml"), ("trl.yaml", "run.sh")):
        texts = {"run.sh": command, "trl.yaml": (INPUTS / "trl.yaml").read_text()}
        conversion = convert([source for file in files for source in read(file, texts[file])], Given())
        training = conversion.spec["training"]
        assert (training["numGenerations"], conversion.spec["model"]["name"]) == (4, "a/b")
        assert training["maxCompletionLength"] == 1024, "TRL's default does not replace what the file says"
        assert "config" not in {finding.name for finding in conversion.left}
    assert "config" in {finding.name for finding in _text("run.sh", command).left}


def test_variables_of_a_script_are_given_on_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --model_name_or_path $MODEL --dataset_name $DATA --seed ${SEED:-1}\n")
    arguments = (str(script), "--gpus", "1", "--set", "MODEL=a/b", "--set", "DATA=c/d")
    result = _run(*arguments, "--set", "SEED=4")
    spec = yaml.safe_load(result.stdout)["spec"]
    assert (spec["model"]["name"], spec["dataset"]["name"], spec["training"]["seed"]) == ("a/b", "c/d", 4)
    for setting, complaint in (("X=1", "--set X: no script uses it"), ("MODEL", "--set MODEL: write NAME=value")):
        result = _run(*arguments, "--set", setting)
        assert (result.exit_code, result.stdout) == (2, "")
        assert complaint in result.stderr


def test_exit_codes_show_whether_an_option_was_not_taken_over(tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    assert _run("swift-all-maps.sh", "--strict", "--output", str(output), "--name", "mine").exit_code == 0
    assert yaml.safe_load(output.read_text())["metadata"]["name"] == "mine"
    assert _run("trl.yaml", "accelerate-zero3.yaml").exit_code == 5
    strict = _run("trl.yaml", "accelerate-zero3.yaml", "--strict")
    assert (strict.exit_code, strict.stdout) == (1, "")
    assert "did you mean num_generations?" in " ".join(strict.stderr.split())
    missing = _run("trl.yaml", "swift-server.sh")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "are of ms-swift, trl" in missing.stderr


def test_the_written_manifest_renders(tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    _run("swift-server.sh", "--output", str(output))
    rendered = CliRunner().invoke(main, ["render", str(output), "--show", "ranks"])
    assert rendered.output.splitlines()[0] == "# 2 pods, 6 ranks, 1 vLLM server"


def test_text_from_a_file_stays_text() -> None:
    text = "model_name_or_path: a/b\ndataset_name: c/d\nsystem_prompt: '[bold]: {x} #'\n"
    result = _run("-", "--from", "trl", text=text)
    assert result.exit_code == 5
    assert yaml.safe_load(result.stdout)["spec"]["dataset"]["systemPrompt"] == "[bold]: {x} #"


def test_a_job_name_that_looks_like_a_number_stays_text() -> None:
    conversion = _text("job.yaml", "model_name_or_path: a/8\ndataset_name: c/d\n")
    assert yaml.safe_load(conversion.manifest)["metadata"]["name"] == "8"


@pytest.mark.parametrize(
    ("path", "given", "value"),
    [
        ("training.topP", "9e-1", 0.9),
        ("training.epsilonHigh", "0.28", 0.28),
        ("training.numGenerations", "8", 8),
        ("training.routerReplay", "True", True),
        ("training.stop", "['a', 'b']", ["a", "b"]),
        ("training.lossType", "DAPO", "dapo"),
        ("model.dtype", "bf16", "bfloat16"),
        ("model.attention", "flash_attention_2", "varlen"),
        ("dataset.chatTemplateKwargs", '{"a": 1}', {"a": 1}),
        ("model.revision", "main", "main"),
    ],
)
def test_values_are_read_by_the_type_of_their_field(path: str, given: str, value: Any) -> None:
    assert fields.converter(path)(given) == value


def test_a_value_that_a_field_cannot_have_is_named_with_those_that_it_can() -> None:
    for path, given, complaint in (
        ("training.numGenerations", "0", "use a number of at least 1, not '0'"),
        ("training.lossType", "real", "real is not supported: dapo is taken; use grpo, dapo, dr_grpo, "),
        ("training.importanceSamplingCorrection", "x", "x is not supported: token_truncate is taken; use none, "),
    ):
        with pytest.raises(ValueError, match=f"^{complaint}"):
            fields.converter(path)(given)


def test_values_are_read_from_their_notations() -> None:
    assert values.integer("8") == 8
    assert values.texts("['a', \"b\"]") == ["a", "b"]
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert values.deepspeed({"zero_optimization": zero}) == {"stage": 3, "offload": True}
    assert values.fsdp("shard_grad_op auto_wrap") == {"stage": 2, "offload": False}


def test_the_page_has_the_present_tables() -> None:
    text = (DOCS / "convert.md").read_text()
    assert text == page(text), "run `python -m grpo_cli.convert.pages docs/convert.md`"
    assert all(f"`{name}`" in text for table in TABLES.values() for name in table.rows)
