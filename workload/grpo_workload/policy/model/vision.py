"""Vision-language models over packed sequences: what such a model needs beside what `MicroBatch.model_inputs` gives.

Hooks on the model provide it, so that all who call the model do so as they call one for text. Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import VISION_FAMILIES
from grpo_workload.policy.model.attention import BOUNDS


def has_vision(model_config: Any) -> bool:
    """Whether it is the configuration of a vision-language model whose images can be trained on."""
    return model_config.model_type in VISION_FAMILIES


def tower(model: Any) -> dict[str, nn.Module]:
    """Return what turns images into features, by name: the encoder first, and what merges or projects its patches."""
    names = ("visual", "vision_tower", "multi_modal_projector")  # Qwen's merger is in its encoder
    return {f"model.{name}": getattr(model.model, name) for name in names if hasattr(model.model, name)}


def left_out(model: Any) -> dict[str, nn.Module]:
    """Return what takes no part in training on text, by name, where a model that is more is trained on text alone."""
    base: Any = getattr(model, "model", None)
    if has_vision(model.config) or not hasattr(base, "language_model"):
        return {}
    return {f"model.{name}": part for name, part in base.named_children() if name != "language_model"}


def freeze(model: Any) -> None:
    """Exclude the vision tower from training. ConfigError if the model has none."""
    if not has_vision(model.config):
        raise ConfigError(
            f"model.freezeVisionTower: {model.config.model_type} has no vision tower that is known; models of the "
            f"types {', '.join(VISION_FAMILIES)} have one"
        )
    for part in tower(model).values():
        part.requires_grad_(False)


def check_adapters(model: Any) -> None:
    """Refuse adapters that engines cannot apply when they get nothing else (`lora.push: adapters`).

    ConfigError if the vision tower has any.
    """
    names = [one for one, parameter in model.named_parameters() if parameter.requires_grad]
    if has_vision(model.config) and any(one.startswith(f"{part}.") for one in names for part in tower(model)):
        raise ConfigError(
            "lora.push: adapters does not work for a vision tower, for which vLLM has none; "
            "model.freezeVisionTower: true, targetModules of the text alone, or push merged would work"
        )


def adapt(model: Any) -> None:
    """Add the hooks; without effect on calls that are not of packed sequences, such as those of `generate()`.

    - Positions of tokens in images are those of `get_rope_index`, sequence by sequence, where the family has it.
    - A token of an image that was sampled is text: no feature is put in its place, as in vLLM.
    - The tower runs once for the images that sequences of one prompt share.
    - Without images in the micro-batch, a blank one follows its last sequence, which attends to it no more than to any
      other. So the same parameters get gradients, and are gathered under ZeRO-3, on every rank.
    """
    token, base = model.config.image_token_id, model.model
    plain = base.get_image_features
    real: list[Tensor] = []  # ids that the embedding layer looks up in place of those that the model gets
    wanted: list[Tensor] = []  # [M]: which of the tower's features each of M tokens of images gets

    def prepare(_model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "cu_seq_lens_q" not in kwargs:
            return None
        kwargs = dict(kwargs) if "images_B" in kwargs else _with_blank(model, kwargs)
        images_B, is_image_1N = kwargs.pop("images_B"), kwargs.pop("is_image_1N")
        shown, ids_1N = [one for one in images_B if one], kwargs["input_ids"]
        if hasattr(base, "get_rope_index"):
            grids = torch.cat([one["image_grid_thw"] for one in shown])
            kwargs["position_ids"] = _positions(model, kwargs, is_image_1N, grids)
        different = list({id(one): one for one in shown}.values())
        kwargs |= {name: torch.cat([one[name] for one in different]) for name in different[0]}
        real[:] = [ids_1N]
        wanted[:] = [] if len(different) == len(shown) else [_places(images_B, is_image_1N, kwargs["cu_seq_lens_q"])]
        kwargs["input_ids"] = ids_1N.masked_fill((ids_1N == token) & ~is_image_1N, int(token == 0))
        return args, kwargs

    def features(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        if wanted:
            found.pooler_output = _repeated(found.pooler_output, wanted[0])
            if (more := getattr(found, "deepstack_features", None)) is not None:
                found.deepstack_features = [_repeated(one, wanted[0]) for one in more]
        return found

    def look_up(_layer: Any, args: Any) -> Any:
        return (real.pop(),) if real else args

    def end(*_: Any) -> None:
        real.clear()
        wanted.clear()

    def without_bounds(_tower: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {name: value for name, value in kwargs.items() if name not in BOUNDS}  # they are of the text

    # Functions, not methods: peft copies the embedding layer with its hooks, and would copy the model with a method.
    base.get_image_features = features
    model.register_forward_pre_hook(prepare, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)
    model.get_input_embeddings().register_forward_pre_hook(look_up)
    _encoder(model).register_forward_pre_hook(without_bounds, with_kwargs=True)


def _encoder(model: Any) -> nn.Module:
    return next(iter(tower(model).values()))


def _places(images_B: Any, is_image_1N: Tensor, bounds: Tensor) -> Tensor:
    """Return for each token of an image [M] its place among the tokens of all different images."""
    before = torch.nn.functional.pad(is_image_1N[0].cumsum(0), (1, 0))[bounds.long()]
    places, starts, end = [], {}, 0
    for images, count in zip(images_B, before.diff().tolist(), strict=True):
        if images and id(images) not in starts:
            starts[id(images)], end = end, end + count
        if images:
            places.append(torch.arange(count) + starts[id(images)])
    return torch.cat(places).to(is_image_1N.device)


def _repeated(features: Any, wanted_M: Tensor) -> Any:
    """Return the features that tokens want, of all images together: as a tensor, or in a tuple if they are in one."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)[wanted_M]
    return (torch.cat(tuple(features))[wanted_M],)


def _positions(model: Any, kwargs: dict[str, Any], is_image_1N: Tensor, grids: Tensor) -> Tensor:
    """Return positions [4, 1, N]: in the sequence, by which transformers tells these apart; time, height, width."""
    ids_1N, text_1N = kwargs["input_ids"], kwargs["position_ids"]
    lengths_S = kwargs["cu_seq_lens_q"].diff().cpu()
    is_token_SL = torch.arange(int(lengths_S.max())) < lengths_S.unsqueeze(1)
    ids_SL = torch.zeros(is_token_SL.shape, dtype=torch.long).masked_scatter(is_token_SL, ids_1N.cpu())
    is_image_SL = torch.zeros_like(is_token_SL).masked_scatter(is_token_SL, is_image_1N.cpu())
    found_3SL, _ = model.model.get_rope_index(
        ids_SL,
        mm_token_type_ids=is_image_SL.int(),
        image_grid_thw=grids.cpu(),
        attention_mask=is_token_SL.long(),
    )
    return torch.cat([text_1N, found_3SL[:, is_token_SL].to(text_1N.device)]).unsqueeze(1)


def _with_blank(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    ids_1N, positions_1N, bounds = (kwargs[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q"))
    images, count = _blank(model)
    blank_1N = ids_1N.new_full((1, count), model.config.image_token_id)
    longer = torch.cat([bounds, bounds[-1:] + count])
    longest = max(kwargs["max_length_q"], count)
    moved = {name: tensor.to(ids_1N.device) for name, tensor in images.items()}
    return kwargs | {
        **dict(zip(BOUNDS, (longer, longer, longest, longest), strict=True)),
        "input_ids": torch.cat([ids_1N, blank_1N], dim=1),
        "position_ids": torch.cat([positions_1N, torch.arange(count, device=ids_1N.device).unsqueeze(0)], dim=1),
        "images_B": (*({} for _ in bounds[1:]), moved),
        "is_image_1N": torch.cat([torch.zeros_like(ids_1N), torch.ones_like(blank_1N)], dim=1).bool(),
    }


def _blank(model: Any) -> tuple[dict[str, Tensor], int]:
    """Return the model's arguments for its smallest image, and the number of its tokens."""
    vision, part = model.config.vision_config, _encoder(model)
    if not hasattr(part, "patch_embed"):  # InternVL: one tile
        return {"pixel_values": torch.zeros(1, vision.num_channels, *vision.image_size)}, model.config.image_seq_length
    patch: Any = part.patch_embed
    side = vision.spatial_merge_size
    size = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    return {"pixel_values": torch.zeros(side * side, size), "image_grid_thw": torch.tensor([[1, side, side]])}, 1
