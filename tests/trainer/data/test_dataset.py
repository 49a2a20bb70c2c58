"""load_prompts makes the same prompts from every kind of dataset, and refuses what does not fit by the field's name."""

import copy
import json
import pickle
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from tokenizers.processors import TemplateProcessing

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig, ModelConfig
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.tokenizer import load_tokenizer
from support.trainer.object_storage import BUCKET
from support.trainer.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS

TEXTS = [f"What is {index} + 1?" for index in range(6)]
ROWS = [{"prompt": text, "answer": index + 1, "level": "easy"} for index, text in enumerate(TEXTS)]
CHAT_ROWS = [{"prompt": [{"role": "user", "content": text}], "answer": index + 1} for index, text in enumerate(TEXTS)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(tokenizer, **fields):
    return load_prompts(DatasetConfig.model_validate(fields), tokenizer, seed=1)


def write(path, kind, rows=ROWS):
    dataset, path = Dataset.from_list(rows), path / ("rows" if " " in kind else f"rows.{kind}")
    match kind:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "json":
            path.write_text(json.dumps(rows))
        case "parquet":
            dataset.to_parquet(path)
        case "csv":
            dataset.to_csv(path)
        case "saved":
            dataset.save_to_disk(path)
        case "saved with splits":
            DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(path)
        case "folder":
            path.mkdir()
            dataset.to_parquet(path / "train.parquet")
    return str(path)


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.fixture
def bucket(storage):
    """The folder of a bucket's objects."""
    return storage.bucket


@pytest.mark.parametrize("kind", ["jsonl", "saved with splits", "folder"])
def test_a_dataset_in_a_bucket_is_read_anew_only_when_it_has_changed(tiny_tokenizer, tmp_path, bucket, kind):
    (folder := bucket / kind.replace(" ", "-")).mkdir()
    path = write(folder, kind)
    url = f"s3://{BUCKET}/{Path(path).relative_to(bucket)}"
    expected = [prompt.text for prompt in load(tiny_tokenizer, path=write(tmp_path, kind)).batch(0, 6)]
    assert [prompt.text for prompt in load(tiny_tokenizer, path=url).batch(0, 6)] == expected
    copies = {file: file.stat().st_ino for file in tmp_path.glob("cache/buckets/*/*")}
    assert [prompt.text for prompt in load(tiny_tokenizer, path=url).batch(0, 6)] == expected
    assert {file: file.stat().st_ino for file in tmp_path.glob("cache/buckets/*/*")} == copies
    if kind == "jsonl":
        Path(path).write_text(json.dumps({"prompt": "another"}) + "\n")
        assert [prompt.text for prompt in load(tiny_tokenizer, path=url).batch(0, 1)] == ["another"]


@pytest.mark.parametrize(
    ("url", "secret", "said"),
    [
        (f"s3://{BUCKET}/absent.jsonl", "secret", "cannot load .*: there is no such bucket, or it has nothing of this"),
        ("s3://absent/rows.jsonl", "secret", "cannot load .*: there is no such bucket"),
        (f"s3://{BUCKET}/rows.jsonl", "wrong", "cannot load .*podTemplate.envFrom a Secret"),
        ("ftp://host/rows.jsonl", "secret", "cannot load ftp://host/rows.jsonl: .*ftp"),
    ],
)
def test_a_dataset_that_no_bucket_gives_is_refused(tiny_tokenizer, bucket, monkeypatch, url, secret, said):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(ConfigError, match=rf"^dataset\.path: {said}"):
        load(tiny_tokenizer, path=url)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "saved", "saved with splits", "folder"])
def test_every_format_gives_the_same_prompts(tiny_tokenizer, tmp_path, kind):
    source = load(tiny_tokenizer, path=write(tmp_path, kind))
    prompts = sorted(source.batch(0, 6), key=lambda prompt: prompt.index)
    assert [prompt.text for prompt in prompts] == TEXTS
    assert prompts[2].columns == {"answer": 3, "level": "easy"}
    assert tiny_tokenizer.decode(prompts[2].token_ids) == TEXTS[2]
    assert source.scorer is None


def test_rows_may_keep_their_order(tiny_tokenizer, tmp_path):
    source = load(tiny_tokenizer, path=write(tmp_path, "jsonl"), shuffle=False)
    assert [prompt.index for step in range(2) for prompt in source.batch(step, 4)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_only_the_chosen_split_is_read(tiny_tokenizer, tmp_path):
    assert len(load(tiny_tokenizer, path=write(tmp_path, "saved with splits"), split="test")) == 1


def test_messages_go_through_the_chat_template(tiny_tokenizer, tmp_path):
    source = load(tiny_tokenizer, path=write(tmp_path, "jsonl", CHAT_ROWS), systemPrompt="Be brief.")
    (prompt,) = (prompt for prompt in source.batch(0, 6) if prompt.index == 0)
    assert prompt.text == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXTS[0]}]
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert tiny_tokenizer.decode(prompt.token_ids) == f"{begin}{TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.columns == {"answer": 1}


def test_a_prompt_may_begin_the_answer(tiny_tokenizer, tmp_path):
    begun = [{"prompt": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is"}]}]
    (prompt,) = load(tiny_tokenizer, path=write(tmp_path, "jsonl", begun)).batch(0, 1)
    ends = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\nIt is"
    assert tiny_tokenizer.decode(prompt.token_ids) == ends


THINKS = CHAT_TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"


def test_variables_of_the_chat_template_are_the_jobs_or_the_rows(tiny_tokenizer, tmp_path):
    tokenizer = with_template(tiny_tokenizer, THINKS)
    rows = [CHAT_ROWS[0], {**CHAT_ROWS[1], "chat_template_kwargs": {"enable_thinking": False}}]
    path = write(tmp_path, "jsonl", rows)
    prompts = load(tokenizer, path=path, chatTemplateKwargs={"enable_thinking": True}).batch(0, 2)
    assert all(tokenizer.decode(prompt.token_ids).endswith(prompt.ending) for prompt in prompts)
    ends = {prompt.index: prompt.ending.endswith("<think>") for prompt in prompts}
    assert ends == {0: True, 1: False}


@pytest.mark.parametrize(
    ("template", "fields", "complaint"),
    [
        (CHAT_TEMPLATE, {"enable_thinking": True}, "the model's chat template has no variable 'enable_thinking'"),
        (CHAT_TEMPLATE, {"add_generation_prompt": False}, "dataset.chatTemplateKwargs: .* 'add_generation_prompt'"),
        ("{{ raise_exception('roles must alternate') }}", {}, "the chat template refuses row .: roles must alternate"),
        ("{% for %}", {}, "the chat template refuses row"),
        (None, {}, "tokenizer has no chat template"),
    ],
)
def test_what_a_chat_template_ignores_or_refuses_is_named(tiny_tokenizer, tmp_path, template, fields, complaint):
    tokenizer = with_template(tiny_tokenizer, template)
    with pytest.raises(ConfigError, match=complaint):
        load(tokenizer, path=write(tmp_path, "jsonl", CHAT_ROWS), chatTemplateKwargs=fields)


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(tiny_model, tmp_path):
    model = ModelConfig(path=str(tiny_model), chat_template="{{ messages[0]['content'] }} =")
    load_tokenizer(model).save_pretrained(tmp_path / "checkpoint")
    saved = load_tokenizer(ModelConfig(path=str(tmp_path / "checkpoint")))
    prompts = load(saved, path=write(tmp_path, "jsonl", CHAT_ROWS)).batch(0, 6)
    assert {saved.decode(prompt.token_ids) for prompt in prompts} == {f"{text} =" for text in TEXTS}


def test_prompt_template_goes_around_text(tiny_tokenizer, tmp_path):
    source = load(tiny_tokenizer, path=write(tmp_path, "jsonl"), promptTemplate="Q: {prompt} {Answer}:")
    assert {prompt.text for prompt in source.batch(0, 6)} == {f"Q: {text} {{Answer}}:" for text in TEXTS}


def test_a_text_that_a_chat_template_has_made_keeps_one_token_for_its_beginning(tiny_tokenizer, tmp_path):
    begin = SPECIAL_TOKENS[0]
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = begin
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        f"{begin} $A", None, [(begin, tokenizer.bos_token_id)]
    )
    path = write(tmp_path, "jsonl", [{"prompt": "2 + 2"}, {"prompt": f"{begin}2 + 2"}])
    one, other = load(tokenizer, path=path).batch(0, 2)
    assert one.token_ids == other.token_ids
    assert tokenizer.decode(one.token_ids) == one.ending == f"{begin}2 + 2"


def test_reasoning_gym_gives_chat_prompts_and_scores_their_answers(tiny_tokenizer):
    gym = {
        "dataset": "basic_arithmetic",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "size": 50,
    }
    source = load(
        tiny_tokenizer, reasoningGym=gym, promptTemplate="{prompt} Only the number.", systemPrompt="Be brief."
    )
    assert len(source) == 50
    prompts = source.batch(3, 8)
    for prompt in prompts:
        system, user = prompt.text
        assert system["content"] == "Be brief."
        assert user["content"] == f"{prompt.columns['question']} Only the number."
        assert tiny_tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\n")
        assert source.scorer(prompt.columns["answer"], prompt) == 1.0
        assert source.scorer("no idea", prompt) == 0.0
    again = load(tiny_tokenizer, reasoningGym=gym, promptTemplate="{prompt} Only the number.", systemPrompt="Be brief.")
    assert again.batch(3, 8) == prompts


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Put a module my_rows for dataset.preprocess on the path."""
    (tmp_path / "my_rows.py").write_text(
        "def short(row):\n    return {'prompt': row['problem'] + '!', 'answer': row['gold']}\n"
        "def shout(row):\n    return row | {'prompt': [row['prompt'][0] | {'content': row['question'].upper()}]}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_preprocess_makes_the_prompt_and_the_columns_for_rewards(user_module, tiny_tokenizer, tmp_path):
    rows = [{"problem": row["prompt"], "gold": row["answer"], "level": "easy"} for row in ROWS]
    source = load(
        tiny_tokenizer, path=write(tmp_path, "jsonl", rows), preprocess="my_rows:short", promptTemplate="Q: {prompt}"
    )
    for prompt in source.batch(0, 6):
        assert prompt.text == f"Q: {TEXTS[prompt.index]}!"
        assert prompt.columns == {"answer": prompt.index + 1}


def test_preprocess_gets_the_prompt_of_reasoning_gym_as_it_would_be_used(user_module, tiny_tokenizer):
    source = load(tiny_tokenizer, reasoningGym={"dataset": "chain_sum", "size": 3}, preprocess="my_rows:shout")
    (prompt,) = source.batch(0, 1)
    assert prompt.text == [{"role": "user", "content": prompt.columns["question"].upper()}]
    assert source.scorer(prompt.columns["answer"], prompt) == 1.0


@pytest.mark.parametrize("kind", ["jsonl", "saved", "reasoning-gym"])
def test_a_pickled_source_makes_the_same_prompts(tiny_tokenizer, tmp_path, kind):
    gym = {"reasoningGym": {"dataset": "chain_sum", "size": 6}}
    source = load(tiny_tokenizer, **(gym if kind == "reasoning-gym" else {"path": write(tmp_path, kind)}))
    assert pickle.loads(pickle.dumps(source)).batch(1, 4) == source.batch(1, 4)


def test_reasoning_gym_without_a_chat_template_gives_text(tiny_tokenizer):
    prompt = load(with_template(tiny_tokenizer, None), reasoningGym={"dataset": "chain_sum", "size": 3}).batch(0, 1)[0]
    assert prompt.text == prompt.columns["question"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"reasoningGym": {"dataset": "chain_sum"}, "preprocess": "no_such_module:f"},
            r"dataset\.preprocess: no_such_module:f: .* on PYTHONPATH",
        ),
        ({"path": "/no/such.jsonl"}, r"dataset\.path: cannot load /no/such\.jsonl: there is no such file .* mounted"),
        (
            {"reasoningGym": {"dataset": "basic_aritmetic"}},
            r"reasoning-gym has no 'basic_aritmetic'; did you mean one of basic_arithmetic",
        ),
        (
            {"reasoningGym": {"dataset": "chain_sum", "params": {"terms": 2}}},
            r"params: chain_sum has no terms; it has .*max_terms",
        ),
        ({"reasoningGym": {"dataset": "chain_sum", "params": {"size": 2}}}, r"dataset\.reasoningGym\.size"),
        (
            {"reasoningGym": {"dataset": "chain_sum", "params": {"min_terms": 9, "max_terms": 2}}},
            r"chain_sum refuses them",
        ),
    ],
)
def test_a_dataset_or_function_that_cannot_be_found_is_refused(tiny_tokenizer, fields, message):
    with pytest.raises(ValueError, match=message):
        load(tiny_tokenizer, **fields)


@pytest.mark.parametrize(
    ("kind", "rows", "fields", "message"),
    [
        (
            "jsonl",
            [{"question": "a", "answer": "b"}],
            {},
            r"has no column `prompt` .* its columns are question, answer",
        ),
        ("jsonl", [{"prompt": 3}], {}, r"`prompt` of row 0 must be text or a list of messages"),
        ("jsonl", [{"prompt": [{"role": "user"}]}], {}, r"`prompt` of row 0 must be text or a list of messages"),
        ("jsonl", [{"prompt": ""}], {}, r"`prompt` of row 0 is empty"),
        ("jsonl", ROWS, {"systemPrompt": "x"}, r"dataset\.systemPrompt: prompts are plain text"),
        ("jsonl", CHAT_ROWS, {"promptTemplate": "{prompt}!"}, r"dataset\.promptTemplate: prompts are messages"),
        (
            "saved with splits",
            ROWS,
            {"split": "dev"},
            r"dataset\.path: cannot load .*no split 'dev' .* there are train, test",
        ),
        ("folder", ROWS, {"split": "dev"}, r"dataset\.path: cannot load .*dev"),
        ("saved", [], {}, r"dataset\.path: .* has no rows in split 'train'"),
        ("jsonl", [], {}, r"dataset\.path: .* has no rows in split 'train'"),
    ],
)
def test_rows_that_do_not_fit_the_settings_are_refused(tiny_tokenizer, tmp_path, kind, rows, fields, message):
    with pytest.raises(ValueError, match=message):
        load(tiny_tokenizer, path=write(tmp_path, kind, rows), **fields)


def test_an_unknown_file_format_is_refused(tiny_tokenizer, tmp_path):
    (path := tmp_path / "rows.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a file must end in one of .json, .jsonl, .parquet, .csv"):
        load(tiny_tokenizer, path=str(path))
