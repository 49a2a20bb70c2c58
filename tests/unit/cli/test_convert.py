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

PAIRS = [
    ["trl.yaml", "accelerate-zero3.yaml"],
    ["trl-older.yaml", "accelerate-fsdp.yaml"],
    ["accelerate-zero3.yaml"],
    ["trl.yaml"],
]
_VERL_STEPS = (
    "actor_rollout_ref.actor.ppo_epochs=2 trainer.total_training_steps=100 "
    "actor_rollout_ref.actor.optim.lr_warmup_steps=5"
)
SCRIPTS = [["swift-server.sh"], ["swift-colocate.sh"], ["verl.sh"], ["swift-all-maps.sh"], ["openrlhf.sh"]]


def _sources(*files: str) -> list[Any]:
    return [source for file in files for source in read(file, (INPUTS / file).read_text())]


def _convert(*files: str, **given: int) -> Conversion:
    return convert(_sources(*files), Given(**given))


def _text(file: str, text: str, **given: int) -> Conversion:
    return convert(read(file, text), Given(**given))


def _run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(
        main, ["convert", *(str(INPUTS / one) if (INPUTS / one).is_file() else one for one in arguments)], input=text
    )


@pytest.mark.parametrize("files", PAIRS + SCRIPTS, ids="+".join)
def test_every_option_is_named_and_the_manifest_is_a_valid_job(files: list[str]) -> None:
    conversion = _convert(*files)
    given = {name for source in _sources(*files) for name in source.options | source.environment}
    assert given - {finding.name for finding in conversion.findings} == set()
    flags = {
        flag
        for file in files
        if file.endswith(".sh")
        for flag in re.findall(r"--([\w.]+)", (INPUTS / file).read_text())
    }
    named = {finding.name for finding in conversion.findings}
    assert flags - named - {name.removeprefix("rollout.") for name in named} == set()
    written = yaml.safe_load(conversion.manifest)
    assert written["kind"] == "GRPOJob"
    assert parse_spec(written["spec"]) == parse_spec(conversion.spec)
    assert all(finding.note for finding in conversion.left), "each note says why, and what to do"


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
    defaults = {
        field.name: field.default
        for config in (trl.GRPOConfig, trl.ModelConfig)
        for field in dataclasses.fields(config)
    }
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
    assert {name: TABLES[name].release for name in ("trl", "accelerate")} == {
        name: version(name) for name in ("trl", "accelerate")
    }


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


def test_the_batch_is_prompts_times_generations_over_all_ranks() -> None:
    spec = _convert("trl.yaml", "accelerate-zero3.yaml").spec
    assert spec["trainer"]["groups"] == [{"name": "trainer", "replicas": 2, "gpus": 8}]
    assert spec["training"]["promptsPerStep"] * 16 == 16 * 16 * 4
    assert spec["training"]["warmupSteps"] == 40
    assert spec["training"]["lrSchedulerKwargs"] == {"min_lr_rate": 0.1}
    assert spec["storage"] == {"keep": 3, "checkpointEverySteps": 100}
    assert spec["parallelism"] == {"gradientCheckpointing": True, "zeroStage": 3, "offloadOptimizer": "cpu"}
    assert spec["generation"]["colocate"] == {"sleepLevel": 2}
    assert spec["rewards"][1:] == [
        {"name": "format", "format": {"pattern": "<think>(?!.*<think>).*?</think>.*"}, "weight": 0.5},
        {"name": "short-answer", "function": "my_lib.rewards:short_answer", "weight": 0.2},
    ]


def test_an_option_without_a_place_is_reported_with_the_nearest_one() -> None:
    left = {finding.name: finding for finding in _convert("trl.yaml", "accelerate-zero3.yaml").left}
    assert left["num_generation"].note.endswith("did you mean num_generations?")
    assert {"push_to_hub", "save_strategy"}.isdisjoint(left), "they ask for what a job does anyway"


def test_a_limit_of_tool_calls_is_told_as_the_tools_are_in_no_file() -> None:
    text = (INPUTS / "trl.yaml").read_text()
    (told,) = (one for one in _text("trl.yaml", f"{text}\nmax_tool_calling_iterations: 4").left if "tool" in one.name)
    assert "name them in tools or environments, and set training.maxToolCallingIterations" in told.note


@pytest.mark.parametrize(
    ("options", "together", "complaint"),
    [
        ("", 1, ""),
        ("steps_per_generation: 4", 1, ""),  # gradient_accumulation_steps: TRL's default
        ("steps_per_generation: 16", 4, ""),
        ("steps_per_generation: 2", 1, ""),  # two generations a step, with the same weights
        ("steps_per_generation: 6", 1, "6 is no multiple of 4, which are one optimizer step: a generation serves 1"),
        ("generation_batch_size: 2048", 2, ""),
    ],
)
def test_steps_of_a_generation_are_optimizer_steps(options: str, together: int, complaint: str) -> None:
    """A step is 16 ranks times 16 completions, accumulated 4 times. TRL and ms-swift count micro-batches."""
    texts = {name: (INPUTS / name).read_text() for name in ("trl.yaml", "accelerate-zero3.yaml")}
    sources = [*read("trl.yaml", f"{texts.pop('trl.yaml')}\n{options}\n"), *read(*texts.popitem())]
    conversion = convert(sources, Given())
    training = conversion.spec["training"]
    assert (training.get("stepsPerGeneration", 1), training["promptsPerStep"]) == (together, 64)
    assert [one.note for one in conversion.left if one.to == "training.stepsPerGeneration"] == [complaint][
        : bool(complaint)
    ]


def test_iterations_repeat_epochs_and_cannot_be_sampled_meanwhile() -> None:
    batch = "--per_device_train_batch_size 8 --num_generations 8 --num_iterations 3"
    text = f"swift rlhf --rlhf_type grpo --model a/b --dataset c/d --reward_funcs accuracy {batch} "
    conversion = _text("run.sh", text + "--num_train_epochs 2 --async_generate true", gpus=4, nodes=1, rows=1000)
    training = conversion.spec["training"]
    assert (training["numIterations"], training["maxSteps"]) == (3, 2 * 1000 * 3 // 4)
    assert "maxStaleness" not in training
    assert "async_generate" in {finding.name for finding in conversion.left}


@pytest.mark.parametrize(("strategy", "every"), [("no", 60), ("epoch", 30), ("steps", 7)])
def test_checkpoints_are_written_as_often(strategy: str, every: int) -> None:
    text = "trl grpo --model_name_or_path a/b --dataset_name c/d --num_train_epochs 2 --save_steps 7 "
    batch = f"--per_device_train_batch_size 8 --num_generations 8 --save_strategy {strategy}"
    conversion = _text("run.sh", text + batch, nodes=1, gpus=1, rows=30)
    assert conversion.spec["storage"]["checkpointEverySteps"] == every


def test_a_number_that_ranks_cannot_share_is_lowered_and_said() -> None:
    section = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    conversion = _text("verl.sh", f"python3 -m verl.trainer.main_ppo {section}=8", nodes=1, gpus=12)
    assert conversion.spec["parallelism"]["sequence"] == 4
    assert "parallelism.sequence" in {finding.to for finding in conversion.left}


def test_rewards_that_other_tools_have_built_in_are_built_in_here_too() -> None:
    text = "swift rlhf --rlhf_type grpo --model a/b --dataset c/d --max_completion_length 2048 --reward_funcs "
    conversion = _text("run.sh", text + "accuracy format soft_overlong cosine --soft_cache_length 512")
    assert conversion.spec["rewards"] == [
        {"name": "accuracy", "accuracy": {}},
        {"name": "format", "format": {"pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"}},
        {"name": "soft-overlong", "softOverlong": {"maxLength": 2048, "cacheLength": 512}},
        {"name": "cosine", "function": "my_rewards:cosine"},
    ]
    assert [one.note for one in conversion.left if one.name == "reward"] == [
        "not built in: write my_rewards:cosine, or use factory: trl.rewards:get_cosine_scaled_reward (docs/rewards.md)"
    ]


def test_vllm_with_its_own_gpu_is_node_local() -> None:
    conversion = _convert("trl-older.yaml", "accelerate-fsdp.yaml", rows=72_000)
    assert conversion.spec["generation"]["topology"] == "NodeLocal"
    assert conversion.spec["trainer"]["groups"] == [{"name": "trainer", "replicas": 1, "gpus": 9}], (
        "8 ranks and one GPU for vLLM"
    )
    assert conversion.spec["training"]["maxSteps"] == 72_000 // conversion.spec["training"]["promptsPerStep"]
    assert conversion.spec["generation"]["maxModelLen"] == 512 + 1024
    batch = next(finding for finding in conversion.left if finding.name == "batch")
    assert batch.note == "2048 completions cannot be divided into groups of 7: 293 prompts"


def test_a_rollout_server_becomes_its_own_group() -> None:
    conversion = _convert("swift-server.sh")
    spec = conversion.spec
    assert spec["generation"]["server"]["groups"] == [{"name": "vllm", "replicas": 1, "gpus": 2}]
    assert spec["trainer"]["groups"] == [{"name": "trainer", "replicas": 1, "gpus": 6}]
    assert spec["dataset"] == {"name": "AI-MO/NuminaMath-TIR", "split": "train[:1000]", "dataloaderNumWorkers": 4}
    assert spec["training"]["maxSteps"] == 3 * 1000 // 6
    assert spec["podTemplate"]["env"] == [{"name": "NCCL_DEBUG", "value": "WARN"}]
    assert "lora" not in spec
    assert "not-a-real-key" not in conversion.manifest + str(conversion.findings)


def test_defaults_of_the_other_tool_are_written_out() -> None:
    training = _convert("swift-all-maps.sh").spec["training"]
    assert (training["temperature"], training.get("topP"), training.get("topK")) == (0.9, None, None), (
        "4.0.2 still had 0.9 and 50"
    )
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


def test_what_openrlhf_counts_in_completions_and_generations_is_counted_in_prompts_and_steps() -> None:
    spec = _convert("openrlhf.sh").spec
    training = spec["training"]
    assert (training["promptsPerStep"], training["numGenerations"], training["stepsPerGeneration"]) == (32, 8, 4)
    assert (spec["storage"]["checkpointEverySteps"], spec["evaluation"]["everySteps"]) == (80, 20)
    assert (spec["evaluation"]["numGenerations"], spec["evaluation"]["temperature"]) == (4, 0.6)
    assert (training["maxCompletionLength"], spec["generation"]["maxModelLen"]) == (2048, 4096)
    assert (training["epsilon"], training["epsilonHigh"], training["beta"]) == (0.2, 0.27, 1e-3)
    assert "klInReward" not in training
    corrected = ("importanceSamplingCorrection", "importanceSamplingClipMin", "importanceSamplingClipMax")
    assert [training[name] for name in corrected] == ["token_mask", 0.5, 5.0]
    assert spec["dataset"]["split"] == "train[:20000]"
    assert spec["trainer"]["groups"] == [{"name": "trainer", "replicas": 2, "gpus": 8}]
    assert (spec["generation"]["topology"], spec["parallelism"]["zeroStage"]) == ("Colocate", 3)


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


@pytest.mark.parametrize(
    ("rank", "modules", "frozen", "left"),
    [(8, ".*visual.*", True, []), (0, ".*visual.*", None, []), (8, "lm_head", None, ["name the modules in"])],
)
def test_adapters_that_exclude_the_vision_tower_freeze_it(
    rank: int, modules: str, frozen: bool | None, left: list[str]
) -> None:
    options = f"actor_rollout_ref.model.exclude_modules='{modules}' actor_rollout_ref.model.lora_rank={rank}"
    text = (INPUTS / "verl.sh").read_text().rstrip().removesuffix("$@") + options
    conversion = _text("verl.sh", text)
    assert conversion.spec["model"].get("freezeVisionTower") == frozen
    assert [one.note[:19] for one in conversion.left if one.name.endswith("exclude_modules")] == left


def test_training_begins_with_one_saved_adapter() -> None:
    text = (INPUTS / "swift-all-maps.sh").read_text().rstrip()
    conversion = _text("swift-all-maps.sh", f"{text} --train_type lora --adapters /data/sft /data/other")
    (left,) = (one for one in conversion.left if one.name == "adapters")
    assert left.note.startswith("only one may be named")


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


def test_a_script_of_verl_is_read_with_its_variables_and_arithmetic() -> None:
    conversion = _convert("verl.sh")
    spec = conversion.spec
    assert spec["generation"]["maxModelLen"] == spec["training"]["maxTokensPerMicroBatch"] == 7 * 1024
    assert spec["trainer"]["groups"] == [{"name": "trainer", "replicas": 2, "gpus": 8}]
    training = spec["training"]
    assert (training["promptsPerStep"], training["numGenerations"], training["topK"]) == (256, 5, 0)
    assert (training["beta"], spec["lora"]["r"]) == (0.001, 64)
    assert (training["stepsPerGeneration"], spec["storage"]["checkpointEverySteps"]) == (4, 4 * 20)
    longer = (INPUTS / "verl.sh").read_text().replace("trainer.save_freq=20", _VERL_STEPS)
    training = _text("verl.sh", longer).spec["training"]
    assert (training["numIterations"], training["maxSteps"], training["warmupSteps"]) == (2, 8 * 100, 8 * 5)
    assert spec["rewards"] == [{"name": "score", "function": "gsm8k_reward:score_answer"}]
    assert {"dataset", "columns", "custom_reward_function", "epochs"} <= {finding.name for finding in conversion.left}
    assert spec["podTemplate"]["env"] == [{"name": "VLLM_USE_V1", "value": "1"}]


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
    with pytest.raises(ValueError, match="^" + complaint.replace("[", r"\[").replace("(", r"\(")) as error:
        _text("job.yaml", text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["echo hello", "swift sft --model x", "swift rlhf 'open"])
def test_a_script_without_a_training_command_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"run\.sh: one command of|line 1: .*without closing quote"):
        _text("run.sh", text)


def test_comments_and_quotes_are_read_as_a_shell_does() -> None:
    text = (
        "# swift rollout \\\n#   --model x \\\nA='1 # 2'\ntrl grpo --run_name \"$A\" --dataset_name a/b#c # --seed 3\n"
    )
    (source,) = read("run.sh", text)
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
    conversion = _text(
        "run.sh", f"swift rlhf --rlhf_type grpo --model a/b --dataset c/d --num_generations $(touch {target}) --seed 7"
    )
    assert not target.exists()
    (left,) = (finding for finding in conversion.left if finding.name == "num_generations")
    assert left.note.startswith("line 1: commands are not run")
    assert conversion.spec["training"]["seed"] == 7, "$(...) does not end the command"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("trl grpo --model_name_or_path $MODEL --seed 1", "line 1: MODEL is not set in the script"),
        ("D=$(pwd)/x\npython3 -m verl.trainer.main_ppo data.train_files=$D/a", "line 1: commands are not run"),
        ("case $1 in a) D=x/y;; esac\nif [ -e z ]; then D=z; fi\nswift rlhf --rlhf_type grpo --dataset $D", "line 2"),
    ],
)
def test_a_model_or_dataset_that_only_a_run_says_is_refused_by_line(text: str, complaint: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^run\.sh: \S+: .*{complaint}.*: put its value there, or give it with --set"
    ):
        _text("run.sh", text)


def test_options_that_only_a_run_says_are_named_and_the_others_taken() -> None:
    conversion = _text(
        "run.sh",
        "source env.sh\nARGS+=(--seed 3)\n[ -e x ] && ARGS+=(--bf16 true)\n"
        "trl grpo --model_name_or_path a/b --dataset_name c/d --temperature $T "
        '--beta 0.1 $MORE "${ARGS[@]}" 2>&1 | tee x',
    )
    left = {finding.name: finding.note for finding in conversion.left}
    assert left["temperature"].startswith("line 4: T may be set: line 1 reads env.sh: put its value there")
    assert left["$MORE"].startswith("it may be options: line 4: MORE may be set")
    assert left["$ARGS"].startswith("it may be options: line 3: it depends on line 3")
    assert left["source env.sh"].startswith("line 1: its variables are not known")
    training = conversion.spec["training"]
    assert (training["beta"], training["seed"], training.get("temperature")) == (0.1, 3, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("trl grpo --seed 1\ntrl grpo --seed 2", "several commands train: lines 1, 2. A job is one of them"),
        ("for s in 1 2; do\n trl grpo --seed $s\ndone", "several commands train: line 2, several times"),
        (
            "if [ -e x ]; then trl grpo --seed 1\nelse trl grpo --seed 2; fi",
            r"lines 1, 2 \(only a run decides line 1\)",
        ),
        ('if [ -z "$M" ]; then\n exit 1\nfi\ntrl grpo --model $M', "line 2 ends the script; M is not set: --set M="),
    ],
)
def test_a_script_that_trains_more_or_less_than_once_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _text("run.sh", text)


def test_a_server_of_trl_has_its_gpus() -> None:
    text = "trl vllm-serve --model a/b --tensor_parallel_size 2 --data_parallel_size 2 &\ntrl grpo --use_vllm true "
    conversion = _text("run.sh", text + "--vllm_mode server --model_name_or_path a/b --dataset_name c/d")
    assert conversion.spec["generation"]["server"]["groups"][0]["gpus"] == 4
    assert not [finding.name for finding in conversion.left if finding.name.startswith("rollout")]


@pytest.mark.parametrize(
    ("launcher", "nodes", "gpus", "stage", "dtype"),
    [
        (
            "accelerate launch --num_processes 8 --num_machines=2 --mixed_precision bf16 train.py",
            2,
            4,
            None,
            "bfloat16",
        ),
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
    result = _run(
        "-", "--from", "trl", text="model_name_or_path: a/b\ndataset_name: c/d\nsystem_prompt: '[bold]: {x} #'\n"
    )
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
    assert values.deepspeed({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}) == {
        "stage": 3,
        "offload": True,
    }
    assert values.fsdp("shard_grad_op auto_wrap") == {"stage": 2, "offload": False}


def test_the_page_has_the_present_tables() -> None:
    text = (DOCS / "convert.md").read_text()
    assert text == page(text), "run `python -m grpo_cli.convert.pages docs/convert.md`"
    assert all(f"`{name}`" in text for table in TABLES.values() for name in table.rows)
