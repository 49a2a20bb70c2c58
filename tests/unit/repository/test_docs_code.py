"""Every block of Python in the pages runs on something real: a journal, a row, a judge behind HTTP, a checkpoint.

Commands of the pages run in tests/api/test_docs_commands.py.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForCausalLM

from grpo_spec.lora import LoraConfig as AdapterConfig
from grpo_spec.rewards import RewardConfig
from grpo_spec.trainer import TrainerConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import Completion
from grpo_workload.data.prompt_maker import Preprocess
from grpo_workload.environments.base import ToolCall
from grpo_workload.environments.processes import Processes
from grpo_workload.environments.results import is_connection
from grpo_workload.environments.sessions import RankSessions
from grpo_workload.policy.adapters.four_bit import quantize
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.loss.own_loss import OwnLoss
from grpo_workload.rewards.process import RewardProcess
from grpo_workload.storage.group_record import Group
from grpo_workload.storage.journal import Journal, begin_branch
from grpo_workload.weights.export import Export
from support.answers import answering
from support.documents import PAGES, blocks
from support.paths import EXAMPLES, ROOT
from support.trainer import gateway
from support.trainer.tiny_model import make_tiny_model

CODE = {
    f"{page.name}:{block.line}": (page, block.text)
    for page in PAGES
    for block in blocks(page)
    if block.language == "python"
}


def _run(code: str, folder: Path) -> str:
    """Run a page's code as a program in `folder`, and return what it prints."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _import(code: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a page's code importable as the module that its YAML names."""
    assert code.startswith(f"# {name}.py\n")
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


def _journal(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints the best completion of each prompt, step by step."""
    run_dir = folder / "default/my-job/0b9c52d1"
    branch, _ = begin_branch(run_dir, attempt=0, step=0)
    journal = Journal(run_dir, branch, rank=0)
    for step in range(2):
        answers = [
            Completion(token_ids=(1,), logprobs=(-0.5,), text=text, finish_reason="stop", weight_version=step)
            for text in ("worse", f"best of step {step}", "unscored")
        ]
        place = {"step": step, "position": 0, "slot": 0, "num_prompts": 1, "prompt_index": 7, "prompt_ids": (1, 2)}
        group = Group(**place, completions=tuple(answers), rewards={"accuracy": [0.0, 1.0, None]})
        journal.write(step, [group])
    journal.close()
    assert _run(code, folder).splitlines() == ["0 7 best of step 0", "1 7 best of step 1"]


def _rows(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that the page's YAML names makes a prompt of a row."""
    _import(code, "my_rows", folder, monkeypatch)
    row = Preprocess("my_rows:prepare")(0, {"problem": "1 + 1?", "gold": "2"}, seed=1)
    assert row == {"prompt": "1 + 1?\nAnswer in one line.", "solution": "2"}


def _images(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that the page's YAML and the example name makes a prompt with its image."""
    _import(code, "my_images", folder, monkeypatch)
    example = yaml.safe_load((EXAMPLES / "colocate-vision.yaml").read_text())
    path = example["spec"]["dataset"]["preprocess"]
    image = Image.new("L", (40, 30))
    row = Preprocess(path)(0, {"problem": "Which?", "image": image, "solution": "2"}, seed=1)
    assert row == {"prompt": [{"role": "user", "content": "Which?"}], "image": image, "solution": "2"}


def _judge(asked: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
    is_known = headers["Authorization"] == "Bearer secret"
    return 200, {"score": float(is_known and asked["answer"] == asked["gold"])}


def _rewards(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward of the page's YAML asks the judge from its own process, with the variables that `env` names."""
    _import(code, "my_rewards", folder, monkeypatch)
    text = next(block.text for block in blocks(ROOT / "docs/rewards.md") if block.language == "yaml")
    spec = yaml.safe_load(text)["spec"]
    config = RewardConfig.model_validate(spec["rewards"][1])
    assert set(config.env) == {variable["name"] for variable in spec["podTemplate"]["env"]}
    answers = {"prompts": ["1 + 1?"] * 2, "completions": ["2", "3"], "completion_ids": [[1]] * 2, "solution": ["2"] * 2}
    with answering(_judge) as url:
        process = RewardProcess(config, os.environ | {"JUDGE_URL": f"{url}/score", "JUDGE_KEY": "secret"})
        process.ready()
        assert process.call(answers, 60) == [1.0, 0.0]
        process.close()


def _loss(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is accepted as a loss."""
    _import(code, "my_losses", folder, monkeypatch)
    assert not OwnLoss(TrainingConfig(loss="my_losses:far_from_one")).has_kl


def _custom_image(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the module of the example, which tests/unit/repository/test_examples.py runs."""
    assert code == (EXAMPLES / "custom-reward/gsm8k.py").read_text()


def _verl(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's row becomes a prompt with columns, and its function of one completion scores each of a batch."""
    names: dict[str, Any] = {"compute_score": lambda source, text, gold: float(source == "gsm8k" and text == gold)}
    exec(code, names)
    row = names["prepare"]({"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}, "data_source": "gsm8k"})
    columns = {name: [value] * 2 for name, value in row.items() if name != "prompt"}
    answers = [[{"role": "assistant", "content": text}] for text in ("2", "3")]
    assert names["score_answer"](prompts=["1 + 1?"] * 2, completions=answers, **columns) == [1.0, 0.0]


def _adapters(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that it writes is a whole model, with the logits of the model with its adapters.

    Or, for a model in 4 bits, what it loads is the model that was trained.
    """
    if "BitsAndBytesConfig" in code:
        _adapters_in_4_bits(code, folder, monkeypatch)
        return
    base = make_tiny_model(folder / "base")
    torch.manual_seed(0)  # how far apart sums in another order are depends on the adapters
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    adapted.save_pretrained(folder / "step-N/model")
    monkeypatch.chdir(folder)
    exec(code, {})
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted.eval()(ids).logits, atol=1e-4)


def _adapters_in_4_bits(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny_model(folder / "base")
    trained = AutoModelForCausalLM.from_pretrained(base)
    unrounded = trained(ids := torch.arange(8)[None]).logits
    config = AdapterConfig(r=2, load_in_4bit=True)
    quantize(trained, config, torch.device("cpu"))
    adapters = Adapters(trained, config, seed=1)
    adapters.save(folder / "step-N/model", dict(Export(adapters.saved(), is_partitioned=False)))
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    # In training mode: in evaluation, bitsandbytes would compute in bfloat16 on some CPUs.
    torch.testing.assert_close(names["model"].train()(ids).logits, trained.train()(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(trained(ids).logits, unrounded, atol=1e-4)


def _agents(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tool and environment answer calls as the page's YAML names them, and the exception is no fault of the policy."""
    if "is_infrastructure" in code:
        names: dict[str, Any] = {}
        exec(code, names)
        assert is_connection(names["SearchIsDown"]())
        return
    name = code.partition(".py\n")[0].removeprefix("# ")
    _import(code, name, folder, monkeypatch)
    spec = next(
        yaml.safe_load(block.text)["spec"]
        for block in blocks(ROOT / "docs/agents.md")
        if block.language == "yaml" and f"{name}:" in block.text
    )
    minimal = {"model": {"name": "m"}, "dataset": {"name": "d"}, "rewards": [{"name": "r", "accuracy": {}}]}
    config = TrainerConfig.model_validate(minimal | spec)
    if name == "agent":
        with closing(gateway.start(config)) as sessions:
            completion, _ = gateway.play(sessions, config, gateway.Engine("50", " 70"), "", number=70)
            assert completion.episode.reward == 1 / 2
        return
    calls = {
        "calculator": [("multiply", {"a": 6, "b": 7}, "42")],
        "guess": [("guess", {"number": 50}, "larger"), ("guess", {"number": 70}, "right")],
    }[name]

    async def play() -> float | None:
        session = sessions.open({"number": 70, "prompt": []}, 1)
        assert ("100" in await session.reset()) == bool(config.environments)
        for function, arguments, answer in calls:
            (result,) = await session.call([ToolCall(name=function, arguments=arguments)], 60)
            assert result.content == answer
        reward, _ = await session.end()
        await session.close()
        return reward

    processes = Processes(config.tools, config.environments, os.environ)
    with closing(RankSessions(processes, config, wants_reward=bool(config.environments))) as sessions:
        sessions.ready()
        assert asyncio.run(play()) == (1.0 if config.environments else None)


def _python(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's job runs here, with a tiny model; that of its cluster is read and then needs the cluster."""
    if "submit" in code:
        monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
        (folder / "examples").symlink_to(EXAMPLES)
        with pytest.raises(AssertionError, match="no usable kubeconfig"):
            _run(code, folder)
        return
    model = make_tiny_model(folder / "tiny")
    printed = _run(code.replace('"name": "HuggingFaceTB/SmolLM2-135M-Instruct"', f'"path": "{model}"'), folder)
    rows = [line.split()[:2] for line in printed.splitlines() if re.match(r"[01] +[01] ", line)]
    assert rows == [["0", "0"], ["1", "1"]]
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.hidden_size == 64


def _tutorial(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written that the page's reward can score, and the exported model answers.

    tests/e2e/test_copy.py follows the whole page.
    """
    if code.startswith("# ask.py\n"):
        make_tiny_model(folder / "model")
        assert _run(code, folder)
        return
    _run(code, folder)
    (manifest,) = [block.text for block in blocks(ROOT / "docs/tutorial.md") if block.text.startswith("# job.yaml\n")]
    names: dict[str, Any] = {}
    exec(next(yaml.safe_load_all(manifest))["data"]["sums.py"], names)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    right = [row["solution"] for row in rows[:3]]
    texts = [f" {right[0]}\n", f"It is {right[1]} .", "1"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert names["is_sum"](completions=completions, solution=right, prompts=[]) == [1.0, 0.5, 0.0]
    assert len({json.dumps(row) for row in rows}) == len(rows) == 512


CHECKS: Mapping[str, Callable[[str, Path, pytest.MonkeyPatch], None]] = {
    "agents.md": _agents,
    "journal.md": _journal,
    "datasets.md": _rows,
    "rewards.md": _rewards,
    "custom-image.md": _custom_image,
    "convert.md": _verl,
    "lora.md": _adapters,
    "python.md": _python,
    "training.md": _loss,
    "tutorial.md": _tutorial,
    "vision.md": _images,
}


@pytest.mark.parametrize("name", CODE)
def test_code_of_a_page_does_what_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, code = CODE[name]
    CHECKS[page.name](code, tmp_path, monkeypatch)
