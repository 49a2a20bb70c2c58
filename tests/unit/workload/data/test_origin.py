"""A run keeps the rows that it began with: they are told apart by content alone, and a change of them is refused."""

import json
from dataclasses import replace

import pytest
from datasets import Dataset, Features, Image, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data import origin as module
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.origin import DataOrigin, fingerprint, origin_of, settle_data
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.storage.base_model import Origin
from grpo_workload.storage.checkpoint_content import SavedState
from support.trainer.tiny_model import make_tiny_tokenizer

ROWS = [{"prompt": f"{index} + 1?", "answer": [index, {"text": str(index + 1)}][:1]} for index in range(10)]


def rows_of(texts):
    return Dataset.from_dict({"prompt": texts}, features=Features({"prompt": Value("string")}))


TEXTS = st.lists(st.text("ab", max_size=2), min_size=1, max_size=4)


@settings(max_examples=20)
@given(one=TEXTS, other=TEXTS)
def test_a_fingerprint_tells_rows_and_their_order_apart_and_nothing_else(one, other):
    assert (fingerprint(rows_of(one)) == fingerprint(rows_of(other))) == (one == other)
    in_parts = concatenate_datasets([rows_of([text]) for text in one])
    assert fingerprint(in_parts) == fingerprint(rows_of(one)), "how rows are stored does not matter"


def test_neither_the_format_nor_the_place_of_files_matters(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    Dataset.from_list(ROWS).to_parquet(tmp_path / "folder" / "train.parquet")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def found(name):
        config = DatasetConfig(path=str(tmp_path / name))
        return origin_of(config, load_prompts(config, make_tiny_tokenizer(), seed=1))

    first = found("rows.jsonl")
    assert (first.rows, first.commit) == (10, None)
    Dataset.from_list(ROWS[:1]).to_parquet(tmp_path / "folder" / "test.parquet")  # another split
    assert {found(name).difference(first) for name in ("folder", "saved")} == {""}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:7]))
    assert found("rows.jsonl").difference(first).startswith("7 rows instead of 10, fingerprint ")


def test_large_datasets_are_read_in_part(monkeypatch):
    texts = [f"{index:>98}" for index in range(1000)]
    monkeypatch.setattr(module, "MAX_BYTES", rows_of(texts).data.nbytes // 10)
    whole = fingerprint(rows_of(texts))
    noticed = [fingerprint(rows_of([*texts[:at], "x" * 98, *texts[at + 1 :]])) != whole for at in range(0, 1000, 20)]
    assert 0 < sum(noticed) < 15, "a tenth of the rows is read"
    assert fingerprint(rows_of([text.replace(" ", "_") for text in texts])) != whole


def test_images_are_known_by_their_bytes_or_by_name_and_size(tmp_path):
    def named(folder, content):
        path = tmp_path / folder / "1.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return Dataset.from_dict({"images": [[{"path": str(path)}], []]}, Features({"images": [Image()]}))

    first = fingerprint(named("a", b"some"))
    assert fingerprint(named("moved", b"some")) == first
    assert fingerprint(named("a", b"other")) != first
    stored = [Dataset.from_dict({"image": [{"bytes": one}]}, Features({"image": Image()})) for one in (b"a", b"b")]
    assert fingerprint(stored[0]) != fingerprint(stored[1])


def test_problems_of_reasoning_gym_are_known_by_what_makes_them():
    def found(seed=1, **gym):
        config = DatasetConfig.model_validate({"reasoningGym": {"dataset": "chain_sum", "size": 50} | gym})
        return origin_of(config, load_prompts(config, make_tiny_tokenizer(), seed=seed))

    others = [found(seed=2), found(params={"max_terms": 9}), found(dataset="basic_arithmetic")]
    assert [bool(one.difference(found())) for one in [found(), *others]] == [False, True, True, True]
    assert found(size=60).difference(found()).startswith("60 rows instead of 50")


def plain(rows):
    return DataOrigin(source="/data/rows.jsonl", commit=None, rows=len(rows), fingerprint=",".join(rows))


def test_a_change_is_refused_and_says_what_changed_and_how_to_go_on():
    began, now = plain(["a", "b", "c"]), plain(["a", "x"])
    with pytest.raises(ConfigError) as refusal:
        settle_data("dataset.path", now, began, run="ns/job/uid", is_own=True, step=4)
    assert str(refusal.value) == (
        "dataset.path: /data/rows.jsonl has changed since the run began: 2 rows instead of 3, fingerprint a,x instead "
        "of a,b,c. A job keeps its rows to its end. To go on from its checkpoint with these, or with the old ones put "
        "back, create a job with storage.resumeFrom: ns/job/uid"
    )


PER_STEP = 3
ROW_LISTS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True)
ATTEMPTS = st.lists(
    st.tuples(ROW_LISTS | st.none(), st.booleans(), st.booleans(), st.integers(1, 4)), min_size=1, max_size=8
)


@given(begun=ROW_LISTS, attempts=ATTEMPTS)
def test_a_run_trains_on_the_rows_that_it_began_with_in_their_order_whatever_becomes_of_them(begun, attempts):
    rows, saved, step = begun, plain(begun), 2
    order, position = begun, 2 * PER_STEP  # rows to train on, and how many were
    for changed, is_own, forgets, steps in attempts:
        rows = rows if changed is None else changed
        known = None if forgets else saved  # a checkpoint of an older release
        differs = rows != order
        if known is not None and is_own and differs:
            with pytest.raises(ConfigError, match="has changed since the run began"):
                settle_data("dataset.path", plain(rows), known, run="r", is_own=True, step=step)
            rows = order
            continue
        saved = settle_data("dataset.path", plain(rows), known, run="r", is_own=is_own, step=step)
        if known is None:
            order, position = rows, step * PER_STEP
        elif differs:
            order, position = rows, 0
        source = PromptSource(
            [{"text": row} for row in rows],
            lambda index, row: Prompt(index=index, text=row["text"], token_ids=(index,)),
            seed=1,
            shuffle=False,
        )
        source.first_step = saved.first_step
        for _ in range(steps):
            found = [prompt.text for prompt in source.batch(step, PER_STEP)]
            assert found == [order[(position + at) % len(order)] for at in range(PER_STEP)]
            step, position = step + 1, position + PER_STEP


def test_checkpoints_say_which_rows_they_were_trained_on_and_older_ones_are_read(tmp_path):
    origin = Origin(source="org/model", revision=None, commit="1" * 40)
    state = SavedState(step=1, weight_version=1, num_tokens=9, world_size=1, zero_stage=2, origin=origin)
    known = replace(state, data={"dataset": replace(plain(["a"]), first_step=1)})
    known.write(tmp_path / "trainer.json")
    assert SavedState.read(tmp_path / "trainer.json") == known
    raw = json.loads((tmp_path / "trainer.json").read_text())
    del raw["data"]
    (tmp_path / "trainer.json").write_text(json.dumps(raw))
    assert SavedState.read(tmp_path / "trainer.json") == state
