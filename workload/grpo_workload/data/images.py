"""Prompts with images: where a row has them, their places in its messages, and what engines and the model get.

Columns and messages are those of TRL (`prepare_multimodal_messages`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import VISION_FAMILIES, ModelConfig
from grpo_spec.trainer import TrainerConfig
from grpo_spec.words import counted
from grpo_workload.algorithm.samples import Message, PromptImages


class ImageError(ConfigError):
    """A row's images cannot be used; the message says why, and its caller names the row."""


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the values of the column `images`, or else `image`, that are not None.

    ImageError if `images` is not a list.
    """
    many = row.get("images")
    if many is None:
        return [] if row.get("image") is None else [row["image"]]
    if not isinstance(many, list | tuple):
        raise ImageError(f"`images` must be a list of images, not {type(many).__name__}; a single one goes to `image`")
    return [one for one in many if one is not None]


def open_image(value: Any) -> Image.Image:
    """Return an image in RGB.

    Args:
        value: a PIL image, the bytes of a file, a path, or a dict of `bytes` or `path` as `datasets` stores images.

    Raises:
        ImageError: it is none of these, or no image.
        OSError: a file cannot be read.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    try:
        if isinstance(value, bytes):
            value = Image.open(BytesIO(value))
        elif isinstance(value, str | Path):
            value = Image.open(value)
        if isinstance(value, Image.Image):
            return value if value.mode == "RGB" else value.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise ImageError(f"an image cannot be decoded: {error}") from error
    raise ImageError(
        f"an image is a {type(value).__name__}; PIL images, paths, bytes of image files, and dicts of these bytes or a "
        "path would work"
    )


def shrunk(image: Image.Image, max_pixels: int | None) -> Image.Image:
    """Return the image with at most `max_pixels` pixels, in its proportions."""
    if max_pixels is None or image.width * image.height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (image.width * image.height))
    width, height = (min(max(1, int(side * scale)), max_pixels) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def with_placeholders(messages: Sequence[Message], images: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """Return the messages with a part `{"type": "image"}` for each image, and the images in the order of these parts.

    As in TRL, images come before the text of the first user message, unless its content is a list of parts: then each
    part of type image takes the next image, or has its own under the key `image`.

    Raises:
        ImageError: there are more or fewer images than parts for them.
    """
    given, rest, made = [], list(images), []
    is_first = True
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            shown = [{"type": "image"} for _ in rest] if is_first and message["role"] == "user" else []
            parts = [*shown, {"type": "text", "text": parts}]
        is_first = is_first and message["role"] != "user"
        content = []
        for part in parts:
            own = {key: value for key, value in part.items() if value is not None}
            if own["type"] == "image":
                if "image" not in own and not rest:
                    raise ImageError(f"its messages have places for more images than the {len(images)} that it has")
                given.append(own["image"] if "image" in own else rest.pop(0))
                own = {"type": "image"}
            content.append(own)
        made.append({**message, "content": content})
    if rest:
        raise ImageError(f"its messages have no places for {len(rest)} of its {counted(len(images), 'image')}")
    return made, given


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Makes prompts of messages with images, with the processor of the model. It pickles, for workers."""

    model: ModelConfig
    refusal: str | None = None  # why this job cannot have images

    @classmethod
    def of(cls, config: TrainerConfig) -> ImagePrompts:
        """Return those of a job."""
        refusal = None
        if config.generation.engine != "vLLM":
            refusal = (
                f"generation.engine: {config.generation.engine} cannot sample for prompts with images; vLLM would work"
            )
        elif config.training.max_staleness:
            refusal = (
                "training.maxStaleness: prompts with images need 0: an engine would keep what it has made of an image "
                "with older weights"
            )
        return cls(config.model, refusal)

    def template(self) -> str | None:
        """The chat template for prompts with images. Raises as calls do."""
        return self.model.chat_template or getattr(self._processor(), "chat_template", None)

    def __call__(
        self, text: str, images: Sequence[Any], max_pixels: int | None = None
    ) -> tuple[tuple[int, ...], PromptImages]:
        """Return the tokens of a prompt as the model reads them, and its images.

        Args:
            text: what the chat template gives, with a placeholder for each image.
            images: as `open_image` takes them.
            max_pixels: images of more are made smaller.

        Raises:
            ImageError: an image cannot be used.
            ConfigError: the model, or the job, cannot have images.
            OSError: an image cannot be read.
        """
        processor, opened = self._processor(), tuple(shrunk(open_image(image), max_pixels) for image in images)
        if (places := text.count(processor.image_token)) != len(opened):
            raise ImageError(
                f"its prompt has {len(opened)} images, and {places} times {processor.image_token}, which stands for "
                "one: the chat template, or the text itself, is the cause"
            )
        try:
            made = processor(images=list(opened), text=[text], add_special_tokens=False, return_tensors="np")
        except ValueError as error:
            raise ImageError(f"the model's processor refuses its images: {error}") from error
        token_ids = tuple(made["input_ids"][0].tolist())
        shown = PromptImages(
            images=opened,
            engine_ids=tuple(processor.tokenizer(text, add_special_tokens=False)["input_ids"]),
            token_id=int(processor.image_token_id),
            inputs={name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made},
        )
        return token_ids, shown

    def _processor(self) -> Any:
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        return load_processor(self.model)


@cache
def load_processor(model: ModelConfig) -> Any:
    """Return the processor of a vision-language model; each process loads it once.

    Raises:
        ConfigError: the model takes no images, or its processor cannot be loaded.
    """
    from transformers import AutoConfig, AutoProcessor  # seconds, and prompts of text alone do not need it

    from grpo_workload.data.model_errors import explained

    revision = model.revision or "main"
    processor = None
    with explained(model, "load the processor of"):
        kind = AutoConfig.from_pretrained(model.source, revision=revision).model_type
        if kind in VISION_FAMILIES:
            processor = AutoProcessor.from_pretrained(model.source, revision=revision)
    if processor is None:
        raise ConfigError(
            f"{model.field}: {model.source} is a {kind}, which cannot be trained on prompts with images; models of the "
            f"types {', '.join(VISION_FAMILIES)} can. To train it on the text alone, remove the columns image and "
            "images in dataset.preprocess"
        )
    return processor
