"""`grpo convert` reads scripts that call TRL's GRPOTrainer: options, rows and code, by their syntax trees alone."""

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from grpo_cli.convert.conversion import Conversion, convert
from grpo_cli.convert.read import read
from grpo_cli.convert.settle import Given
from grpo_cli.main import main
from grpo_operator.api.spec import parse_spec
from support.paths import CONVERT_INPUTS as INPUTS
from support.paths import DOCS, ROOT
from support.trainer.agents import act, start

GUESS = (INPUTS / "train_guess.py.txt").read_text()
DECORATED = "@wraps\n@other(1)\ndef add(a): ..."
HEAD = "from datasets import Dataset, load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n"


def _convert(text: str, /, **variables: str) -> Conversion:
    return convert(read("train.py", text, None, variables), Given(nodes=1, gpus=2))


def _trainer(arguments: str, before: str = "") -> str:
    """Return a script with these arguments of the trainer, and no others of them."""
    rest = {"model": "'a/b'", "train_dataset": "load_dataset('c/d')", "reward_funcs": "'accuracy_reward'"}
    given = [f"{name}={value}" for name, value in rest.items() if f"{name}=" not in arguments]
    return f"{HEAD}{before}\nGRPOTrainer({', '.join([*given, arguments])})\n"


def _left(conversion: Conversion) -> dict[str, str]:
    return {finding.name: finding.note for finding in conversion.left}


def _files(conversion: Conversion) -> dict[str, str]:
    code, job = yaml.safe_load_all(conversion.manifest)
    assert job["spec"]["podTemplate"]["volumes"][0]["configMap"]["name"] == code["metadata"]["name"]
    parse_spec(job["spec"])
    files: dict[str, str] = code["data"]
    return files


def test_a_script_becomes_a_job_with_its_code_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    conversion = _convert(GUESS, server="games:80")
    spec = conversion.spec
    assert not list(tmp_path.iterdir()), "the script did not run"
    assert (spec["model"], spec["dataset"]) == ({"name": "Qwen/Qwen3-0.6B"}, {"path": "/etc/code/rows.jsonl"})
    assert spec["environments"] == [{"name": "guess", "factory": "train_code:Guess"}]
    assert spec["rewards"] == [
        {"name": "right", "function": "train_code:right"},
        {"name": "close", "function": "train_code:close"},
        {"name": "environment", "environment": {}},
    ]
    told = {"numGenerations": 4, "temperature": 0.8, "learningRate": 2e-6, "maxToolCallingIterations": 5}
    told["maxSteps"] = 450  # 3 epochs of 600 rows, 4 prompts a step
    assert spec["training"].items() >= told.items()
    assert "lora" not in spec
    rows = [json.loads(line) for line in _files(conversion)["rows.jsonl"].splitlines()]
    assert [row["x"] for row in rows] == [1, 1, 2], "600 rows, as often as each is there"
    assert rows[0]["prompt"][0]["content"].startswith("Guess a number.\n\n  Use")


def test_what_a_script_says_beyond_a_job_is_told_by_line() -> None:
    line = {text.strip(): f"line {number}" for number, text in enumerate(GUESS.splitlines(), 1)}
    name, beta, url = 'config.run_name = f"guess-{datetime.now():%H}"', "config.beta = 0.1", "url = number_game.start()"
    left = _left(_convert(GUESS))
    assert left.pop("run_name").startswith(f"{line[name]}: only a run shows")
    assert left.pop("beta").startswith(f"{line[beta]}: only a run shows")
    told = f"{line[url]}: only a run shows number_game.start(): it is None in train_code.py: give it with --set url="
    assert left.pop("url").startswith(told)
    assert "besides" in left.pop(line['number_game.log_in("me")'])
    assert "ran.txt" in left.pop(line['open("ran.txt", "w").write("a script that is converted does not run")'])
    assert not left


def test_the_moved_code_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes of a rank, with what it needs of the script and nothing else."""
    (tmp_path / "train_code.py").write_text(text := _files(_convert(GUESS, server="games:80"))["train_code.py"])
    monkeypatch.syspath_prepend(tmp_path)
    with closing(start(environments=[{"name": "guess", "factory": "train_code:Guess"}], wants_reward=True)) as sessions:
        sessions.ready()
        (wrong, right) = asyncio.run(act(sessions, ("guess", {"number": 1}), ("guess", {"number": 7})))
    assert (wrong.content, right.content) == ("wrong", "right\n  indented")
    said = ("url = 'http://games:80'", "args = SimpleNamespace(level='easy')", "Guess.rounds = 3", "import defaultdict")
    assert [one for one in said if one not in text] == []
    assert not any(word in text for word in ("unused", "random", "number_game", "GRPO", "PROMPT"))
    assert sys.modules.get("train_code") is None


@pytest.mark.parametrize(
    ("arguments", "before", "fields"),
    [
        ("train_dataset=load_dataset('c/d', 'e', split='f')", "", {"name": "c/d", "config": "e", "split": "f"}),
        ("train_dataset=load_dataset('c/d')['train'].shuffle(seed=1)", "", {"name": "c/d", "split": "train"}),
        (
            "train_dataset=rows.map(change, remove_columns=['q'])",
            "rows = load_dataset('c/d')\ndef change(row):\n    return {'prompt': row['q'] + '?'}",
            {"name": "c/d", "preprocess": "train_code:prepare_row"},
        ),
        ("train_dataset=Dataset.from_list([{'prompt': 'x'}] * 3)", "", {"path": "/etc/code/rows.jsonl"}),
    ],
)
def test_datasets(arguments: str, before: str, fields: dict[str, Any]) -> None:
    conversion = _convert(_trainer(arguments, before))
    assert conversion.spec["dataset"] == fields
    if "preprocess" in fields:
        module: dict[str, Any] = {}
        exec(_files(conversion)["train_code.py"], module)
        assert module["prepare_row"]({"q": "a", "answer": "b"}) == {"q": "a", "prompt": "a?", "answer": "b"}


@pytest.mark.parametrize(
    ("arguments", "before", "told"),
    [
        ("train_dataset=load_dataset('c/d').filter(len)", "", {"line 4": "filter of the dataset: a job has all rows"}),
        ("train_dataset=make()", "from rows import make", {"train_dataset": "line 4: only a run shows make(): write"}),
        ("args=settings()", "from my import settings", {"args": "line 4: only a run shows settings()"}),
        ("args=GRPOConfig(**x)", "import my\nx = my.x()", {"args": "line 5: only a run shows GRPOConfig(**x)"}),
        ("args=GRPOConfig(beta=b)", "b = 1\nfor b in (1, 2):\n    b = 2", {"beta": "line 5: only a run shows b = 2"}),
        ("args=GRPOConfig(stop=s)", "import my\ns = []\nif my.x:\n    s.append('a')", {"stop": "line 6: only a run"}),
        ("args=GRPOConfig(beta=f())", "def f():\n    if x:\n        return 1\n    return 2", {"beta": "line 5: only"}),
        ("callbacks=[Log()]", "from my import Log", {"callbacks": "code inside the loop"}),
        ("rollout_func=play", "from my import play", {"rollout_func": "write it as an environment (docs/agents.md)"}),
    ],
)
def test_nothing_is_silently_left_out(arguments: str, before: str, told: dict[str, str]) -> None:
    left = _left(_convert(_trainer(arguments, before)))
    for name, note in told.items():
        assert left[name].startswith(note) or note in left[name], left


@pytest.mark.parametrize(
    ("value", "before", "expected"),
    [
        ("-x or y and 0.5", "x, y = 0, True", 0.5),
        ("0.25 if not x else 1", "x = None", 0.25),
        ("float(len(name[1:3]))", "name: str = 'abcd'", 2.0),
        ("x['a'].get('b', 7)", "x = {'a': {**{'c': 1}}}", 7),
        ("sum([1])", "from other import sum", None),
        ("[0.1 * n for n in (1, 2)][0]", "", 0.1),
        ("x['b']", "x = dict(a=1)\nx['b'] = 3\nx.update(c=2)", 3),
        ("x['b']", "x = {'b': 1}\nif unknown:\n    x['b'] = 3", None),
        ("x", "x = 1\nx += 1", None),
        ("x", "x = 1\ntry:\n    x = 2\nexcept ValueError:\n    x = 3", 2),
        ("x", "with open('a') as file:\n    x = file.read()", None),
        ("x", "with torch.no_grad():\n    x = 3", 3),
        ("x", "x = 1\nwhile unknown:\n    x = 2", None),
        ("f(2, c=3)", "def f(a, b=5, *, c, d=1):\n    return a + b + c + d", 11),
        ("f(1)", "@cache\ndef f(a):\n    return a", None),
        ("x > 2 or x != 3", "x = 5", True),
        ("1 if 'a' in ['a'] and 1 is not None else 2", "", 1),
    ],
)
def test_values(value: str, before: str, expected: Any) -> None:
    conversion = _convert(_trainer(f"args=GRPOConfig(beta={value})", before))
    if expected is None:
        assert "only a run shows" in _left(conversion)["beta"]
    else:
        assert conversion.spec["training"]["beta"] == expected


def test_a_model_that_is_loaded_first_is_named_with_its_options() -> None:
    before = "from transformers import AutoModelForCausalLM as Auto\nimport os\nos.environ['WANDB_MODE'] = 'offline'"
    spec = _convert(_trainer("model=Auto.from_pretrained('a/b', dtype='float32')", before)).spec
    assert spec["model"] == {"name": "a/b", "dtype": "float32"}
    assert {"name": "WANDB_MODE", "value": "offline"} in spec["podTemplate"]["env"]


def test_an_option_that_has_to_be_given_is_told_and_given() -> None:
    parser = "parser = ArgumentParser()\nparser.add_argument('--beta', required=True, type=float)"
    before = f"from argparse import ArgumentParser\n{parser}\ngiven, rest = parser.parse_known_args()"
    text = _trainer("args=GRPOConfig(beta=given.beta)", before)
    assert "only a run shows parser.add_argument('--beta'" in _left(_convert(text))["beta"]
    assert _convert(text, beta="0.5").spec["training"]["beta"] == 0.5


def test_a_variable_that_only_a_run_shows_is_given() -> None:
    text = _trainer("tools=[ask]", "import games\nurl = games.find()\ndef ask(a): return url")
    assert "url = games.find()" in _files(_convert(text))["train_code.py"]
    assert "url = 'http://a'" in _files(_convert(text, url="http://a"))["train_code.py"]


def test_a_name_that_is_two_things_is_refused() -> None:
    before = "x = 1\ndef add(a): return x\n"
    before += "def main():\n    x = 2\n    def sub(a): return x\n    return sub\nsub = main()"
    with pytest.raises(ValueError, match="x is two things, of which a module can have one"):
        _convert(_trainer("tools=[add, sub]", before))


def test_more_than_a_configmap_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="a ConfigMap holds 1 MiB: use an image"):
        _convert(_trainer("train_dataset=Dataset.from_list([{'prompt': str(n)} for n in range(60000)])"))


@pytest.mark.parametrize(
    ("arguments", "before", "tools", "code"),
    [
        ("tools=[add]", "def add(a):\n    return a + ONE\nONE = 1", "add", "ONE = 1"),
        ("tools=[calc.add]", "import calc", "add", "add = calc.add"),
        ("tools=[box.put]", "from calc import Box\nbox = Box(2)", "put", "box = Box(2)"),
        ("tools=[lambda a: a]", "", "function_0", "function_0 = lambda a: a"),
        ("tools=[add]", f"{DECORATED}\nfrom functools import wraps\nfrom calc import other", "add", DECORATED[:-9]),
    ],
)
def test_tools_are_moved_with_what_they_need(arguments: str, before: str, tools: str, code: str) -> None:
    conversion = _convert(_trainer(arguments, before))
    assert conversion.spec["tools"] == [{"function": f"train_code:{tools}"}]
    assert code in _files(conversion)["train_code.py"]


def test_a_tool_of_another_module_is_named_there() -> None:
    before = "from calc import add\nfrom trl.rewards import accuracy_reward"
    conversion = _convert(_trainer("tools=[add], reward_funcs=[accuracy_reward]", before))
    assert conversion.spec["tools"] == [{"function": "calc:add"}]
    assert conversion.spec["rewards"] == [{"name": "accuracy", "accuracy": {}}]
    assert next(yaml.safe_load_all(conversion.manifest))["kind"] == "GRPOJob", "no code, no ConfigMap"


def test_peft_has_its_own_defaults() -> None:
    before = "from peft import LoraConfig"
    assert _convert(_trainer("peft_config=LoraConfig()", before)).spec["lora"]["alpha"] == 8
    spec = _convert(GUESS, use_lora="true").spec
    assert spec["lora"] == {"r": 4, "alpha": 8, "dropout": 0.0, "targetModules": ["all-linear"]}


def test_options_of_trls_command_line_come_from_its_command(tmp_path: Path) -> None:
    script, command = tmp_path / "train.py", tmp_path / "run.sh"
    script.write_text(
        HEAD + "from trl import ModelConfig, TrlParser\ndef add(a): ...\n"
        "config, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()\nconfig.beta = 0.1\n"
        "GRPOTrainer(model=model.model_name_or_path, args=config, tools=[add], reward_funcs='accuracy_reward',\n"
        "    train_dataset=load_dataset(model.dataset_name, split=model.dataset_train_split))\n"
    )
    command.write_text("accelerate launch train.py --model_name_or_path a/b --temperature 0.5 --dataset_name c/d\n")
    written = CliRunner().invoke(main, ["convert", "--from", "trl", "--gpus", "2", *map(str, (script, command))])
    assert written.exit_code in (0, 5), written.stderr
    spec = list(yaml.safe_load_all(written.stdout))[1]["spec"]
    assert (spec["model"]["name"], spec["training"]["temperature"], spec["training"]["beta"]) == ("a/b", 0.5, 0.1)
    assert (spec["dataset"], spec["tools"]) == ({"name": "c/d"}, [{"function": "train_code:add"}])
    given = _convert(script.read_text(), model_name_or_path="a/c", temperature="0.7", dataset_name="e/f").spec
    assert (given["model"]["name"], given["training"]["temperature"], given["dataset"]["name"]) == ("a/c", 0.7, "e/f")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def (:", "train.py: line 1: this is not Python: "),
        (HEAD, "one call of GRPOTrainer is needed, found none"),
        (_trainer("") * 2, "one call of GRPOTrainer is needed, found some in lines 4, 8"),
        ("x = 1\nif x == 1:\n    raise ValueError('no')", "line 3: the script ends here: raise ValueError('no')"),
        ("def f():\n    f()\n    return f()\nf()", "one call of GRPOTrainer is needed"),
        ("x = [1] * 10**12\ny = [0 for _ in range(10**15)]", "one call of GRPOTrainer is needed"),
    ],
)
def test_a_script_that_does_not_train_once_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^train\.py: ") as refused:
        _convert(text)
    assert complaint in str(refused.value)


def test_a_wrong_value_of_an_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--set num_generations: use a number, not 'four'"):
        _convert(GUESS, num_generations="four")


def test_the_pages_say_how_many_examples_of_trl_play() -> None:
    found = json.loads((ROOT / "benchmarks/results/convert_trl_examples.json").read_text())
    assert found["examples"] == found["valid jobs"] == len(found["each"])
    page = " ".join((DOCS / "convert.md").read_text().split())
    assert f"All {found['examples']} of TRL's examples" in page
    assert f"{found['played']} play, in the processes of a rank" in page
    agents = " ".join((DOCS / "agents.md").read_text().split())
    assert f"{found['played']} of TRL's {found['examples']} examples play so, unchanged" in agents


def test_keys_of_nested_options_are_options() -> None:
    kwargs = "model_init_kwargs={'attn_implementation': 'sdpa', 'revision': 'v1'}, generation_kwargs={'top_k': 5}"
    spec = _convert(_trainer(f"args=GRPOConfig({kwargs})")).spec
    assert (spec["model"]["attention"], spec["model"]["revision"], spec["training"]["topK"]) == ("sdpa", "v1", 5)


def test_what_the_command_line_or_a_job_decides_is_not_left() -> None:
    before = "args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()\n"
    before += "sys.path.insert(0, '.')\nlogging.getLogger('x').setLevel(logging.ERROR)"
    conversion = _convert(_trainer("args=args, quantization_config=get_quantization_config(model_args)", before))
    assert not _left(conversion).keys() - {"GPUs", "epochs"}


def test_a_list_with_a_condition_is_read() -> None:
    given = "report_to=[s.strip() for s in 'wandb, none'.split(',') if s.strip() != 'none']"
    assert _convert(_trainer(f"args=GRPOConfig({given})")).spec["training"]["reportTo"] == ["wandb"]
