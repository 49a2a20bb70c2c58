"""Rows' images get places in messages as in TRL, are read in every form, and what cannot be used names its row."""

import copy
import pickle
from io import BytesIO

import datasets
import pytest
import transformers
from PIL import Image
from trl.data_utils import prepare_multimodal_messages

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig, ModelConfig
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.images import ImageError, ImagePrompts, open_image, row_images, shrunk, with_placeholders
from grpo_workload.data.overlong import PromptLimit
from grpo_workload.data.prompt_maker import PreprocessError, PromptError, PromptMaker
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.training.evaluation import load_evaluation
from support.trainer.tiny_model import make_tiny_model
from support.trainer.tiny_vision import END, FAMILIES, IMAGE, START, make_tiny_vision

RED, BLUE = (Image.new("RGB", (56, 56), colour) for colour in ("red", "blue"))
ASKED = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
CONFIG = {"dataset": {"name": "d"}, "rewards": [{"name": "r", "accuracy": {}}]}


def png(image):
    image.save(file := BytesIO(), "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_tiny_vision(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def make_maker(folder, **fields):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return PromptMaker(
        DatasetConfig.model_validate({"name": "d"} | fields),
        tokenizer,
        images=ImagePrompts(ModelConfig(path=str(folder))),
    )


@pytest.mark.parametrize(
    ("messages", "images"),
    [
        (ASKED, [RED]),
        ([*ASKED, {"role": "assistant", "content": "Red"}, {"role": "user", "content": "And?"}], [RED, BLUE]),
        ([{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "image"}]}, ASKED[0]], [RED]),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "image", "image": BLUE}]}], [RED]),
    ],
)
def test_messages_get_the_places_that_trl_gives_them(messages, images):
    before = copy.deepcopy(messages)
    made, given = with_placeholders(messages, images)
    theirs = prepare_multimodal_messages(messages, images)
    assert given == [part["image"] for one in theirs for part in one["content"] if part["type"] == "image"]
    without = [{"type": "image"} if part["type"] == "image" else part for one in theirs for part in one["content"]]
    assert [part for one in made for part in one["content"]] == without
    assert messages == before


def test_more_or_fewer_images_than_places_are_refused():
    parts = [{"role": "user", "content": [{"type": "image", "text": None}]}]
    with pytest.raises(ImageError, match="places for more images than the 0"):
        with_placeholders(parts, [])
    with pytest.raises(ImageError, match="no places for 1 of its 2 images"):
        with_placeholders(parts, [RED, BLUE])
    with pytest.raises(ImageError, match="no places for 1 of its 1"):
        with_placeholders([{"role": "assistant", "content": "Red"}], [RED])


def test_every_form_of_an_image_is_read(tmp_path):
    RED.save(path := tmp_path / "red.png")
    grey = Image.new("L", (4, 4), 76)
    for value in (RED, png(RED), {"bytes": png(RED), "path": None}, {"bytes": None, "path": str(path)}, str(path)):
        assert open_image(value).tobytes() == RED.tobytes()
    assert open_image(grey).mode == "RGB"
    for value, message in ((b"", "cannot be decoded"), (7, "an image is a int"), ({}, "an image is a NoneType")):
        with pytest.raises(ImageError, match=message):
            open_image(value)
    with pytest.raises(FileNotFoundError):
        open_image(str(tmp_path / "none.png"))


def test_columns():
    for row in ({"prompt": "p"}, {"images": None, "image": None}, {"images": []}):
        assert row_images(row) == []
    assert row_images({"image": RED}) == row_images({"images": [RED, None]}) == [RED]
    with pytest.raises(ImageError, match="`images` must be a list"):
        row_images({"images": "red.png"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_tokens_of_the_processor(folders, family):
    maker = pickle.loads(pickle.dumps(make_maker(folders[family])))
    row = {"prompt": ASKED, "images": [RED, {"bytes": png(BLUE)}], "answer": "both"}
    prompt = maker(3, row)
    processor = transformers.AutoProcessor.from_pretrained(folders[family])
    text = processor.apply_chat_template(prepare_multimodal_messages(ASKED, [RED, BLUE]), add_generation_prompt=True)
    expected = processor(images=[RED, BLUE], text=[text], return_tensors="np")
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    assert (prompt.index, prompt.text, prompt.columns) == (3, ASKED, {"images": row["images"], "answer": "both"})
    shown = pickle.loads(pickle.dumps(prompt)).images
    assert shown.token_id == IMAGE
    assert prompt.token_ids.count(IMAGE) == 8
    assert shown.engine_ids.count(IMAGE) == 2
    assert [image.tobytes() for image in shown.images] == [RED.tobytes(), BLUE.tobytes()]
    assert (shown.inputs["pixel_values"] == expected["pixel_values"]).all()
    assert ("image_grid_thw" in shown.inputs) == (family != "internvl")
    without = maker(4, {"prompt": ASKED, "image": None})
    assert without.images is None
    assert not {IMAGE, START, END} & set(without.token_ids)


@pytest.mark.parametrize(("size", "smaller"), [((400, 100), (200, 50)), ((9, 9), (9, 9)), ((3, 90_000), (1, 10_000))])
def test_images_of_too_many_pixels_are_made_smaller_for_model_and_engines(folders, size, smaller):
    given = Image.new("RGB", size, "red")
    assert shrunk(given, 10_000).size == smaller
    assert shrunk(given, None) is given


def test_a_prompt_has_smaller_images_than_its_row(folders):
    given = RED.resize((112, 224))
    prompts = [
        make_maker(folders["qwen2_5_vl"], **limit)(0, {"prompt": ASKED, "image": given})
        for limit in ({}, {"maxPixels": 56 * 112})
    ]
    assert [prompt.token_ids.count(IMAGE) for prompt in prompts] == [32, 8]
    assert [prompt.images.images[0].size for prompt in prompts] == [(112, 224), (56, 112)]
    assert all(prompt.columns["image"] is given for prompt in prompts)


def test_parts_go_to_rewards_and_logs_without_their_images(folders):
    content = [{"type": "image", "image": RED}, {"type": "text", "text": "Which?", "image": None}]
    prompt = make_maker(folders["internvl"])(0, {"prompt": [{"role": "user", "content": content}]})
    assert prompt.text == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    assert prompt.images.images == (RED,)


def test_what_cannot_be_used_names_its_row(folders, tmp_path):
    maker = make_maker(folders["qwen2_5_vl"])
    for row, message in (
        ({"prompt": "Which?", "image": RED}, "dataset: row 5: a prompt with images must be messages"),
        ({"prompt": ASKED, "image": b"none"}, "dataset: row 5: an image cannot be decoded"),
        (
            {"prompt": [{"role": "user", "content": "<|image_pad|>"}], "image": RED},
            "dataset: row 5: its prompt has 1 images, and 2 times",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            maker(5, row)
    with pytest.raises(PreprocessError, match="dataset: reading an image of row 5 raised FileNotFoundError"):
        maker(5, {"prompt": ASKED, "image": str(tmp_path / "none.png")})


def test_models_and_jobs_without_images_refuse_rows_that_have_them(folders, tmp_path):
    llama = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model.path: .* is a llama, which cannot be trained on prompts with images"):
        make_maker(llama)(0, {"prompt": ASKED, "image": RED})
    assert make_maker(llama)(0, {"prompt": ASKED, "image": None}).images is None
    config = CONFIG | {"model": {"path": str(folders["internvl"])}}
    for fields, message in (
        ({"generation": {"engine": "Transformers"}}, "generation.engine: Transformers cannot"),
        ({"training": {"maxStaleness": 1}}, "training.maxStaleness: prompts with images need 0"),
    ):
        images = ImagePrompts.of(TrainerConfig.model_validate(config | fields))
        with pytest.raises(ConfigError, match=message):
            images("", [RED])


def test_a_prompt_with_images_is_not_truncated(folders):
    maker = make_maker(folders["qwen2_5_vl"])
    rows = [{"prompt": ASKED, "image": RED}]
    source = PromptSource(rows, maker, seed=0, limit=PromptLimit(8, "generation.maxModelLen", "truncate"))
    with pytest.raises(PromptError, match=r"set dataset\.overlongPrompts to skip \(it has images"):
        source.batch(0, 1)


def test_problems_of_an_evaluation_keep_no_arguments_of_the_model(folders, tmp_path):
    """They stay in memory as long as the job runs."""
    rows = {"prompt": [ASKED], "image": [RED]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "rows")
    evaluation = {"dataset": {"path": str(tmp_path / "rows")}, "everySteps": 1}
    model, rewards = {"path": str(folders["qwen2_5_vl"])}, [{"name": "ended", "stopped": {}}]
    config = TrainerConfig.model_validate(CONFIG | {"model": model, "rewards": rewards, "evaluation": evaluation})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["qwen2_5_vl"])
    made = load_evaluation(config, tokenizer, [], {}, rank=0, world_size=1)
    (prompt,) = made.prompts
    assert (len(prompt.images.images), dict(prompt.images.inputs)) == (1, {})


def test_pictures_of_arrow(folders, tmp_path):
    """As `datasets` stores them: messages with None for keys that others have, and decoded images."""
    rows = {"prompt": [ASKED], "image": [{"bytes": png(RED), "path": None}]}
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({"prompt": [message], "image": datasets.Image()})
    row = datasets.Dataset.from_dict(rows, features=features)[0]
    assert make_maker(folders["qwen3_vl"])(0, row).images.images[0].tobytes() == RED.tobytes()
