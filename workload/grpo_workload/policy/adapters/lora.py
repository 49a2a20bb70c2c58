"""LoRA adapters (arXiv:2106.09685) by peft: where they go, and what engines and checkpoints get.

The model stays a transformers model whose layers are wrapped in place, so generation, attention and gradient
checkpointing work as without adapters. Its own weights are never written to, neither to merge weights for vLLM nor
to run the initial model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo_spec.errors import ConfigError
from grpo_spec.lora import ALL_LINEAR, LoraConfig
from grpo_spec.trainer import TrainerConfig
from grpo_workload.policy.adapters.adapter_weights import ADAPTER, factors, merged
from grpo_workload.policy.model import vision
from grpo_workload.weights.export import Weight, plain

_KINDS = (nn.Linear, Conv1D)

_READ_PAST = {
    "falcon_h1": ["out_proj"],
    "falcon_mamba": ["dt_proj", "out_proj", "x_proj"],
    "gemma3n_text": ["correction_coefs"],
    "granitemoehybrid": ["out_proj"],
    "jamba": ["dt_proj"],
    "mamba": ["dt_proj", "out_proj", "x_proj"],
    "mamba2": ["out_proj"],
    "nemotron_h": ["out_proj"],
}
"""Linear layers whose weights transformers reads without calling them, in fused kernels, in training or always, by
`model_type`. peft knows only some of them."""


class Adapters:
    """The adapters of one model, and the trained copies of whole modules (modulesToSave)."""

    def __init__(
        self, model: Any, config: LoraConfig, *, revision: str | None = None, seed: int, excluded: Sequence[str] = ()
    ) -> None:
        """Put adapters into `model`, which is changed in place, and freeze everything else; collective under ZeRO-3.

        Args:
            model: as transformers loaded it.
            config: the job's section `lora`.
            revision: revision of the model, recorded for those who load the adapters later.
            seed: for the initial values of new adapters.
            excluded: names of modules in which there are none.

        Raises:
            ConfigError: a module does not exist or cannot have an adapter, or `path` has no adapters of this model; the
                message names the field.
        """
        self._model, self._config = model, config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft = (
                self._new(revision, excluded) if config.path is None else self._load(Path(config.path), excluded)
            )
        self._check_complete()

    def _new(self, revision: str | None, excluded: Sequence[str]) -> Any:
        model, config = self._model, self._config
        check_modules(model, config)
        names = list(config.target_modules)
        settings = peft.LoraConfig(
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
            modules_to_save=list(config.modules_to_save) or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            task_type=peft.TaskType.CAUSAL_LM,
            revision=revision,
        )
        left_out = [rf"{re.escape(name)}\..*" for name in excluded]
        if names == [ALL_LINEAR]:
            left_out += [rf".*\.{re.escape(name)}" for name in without_adapters(model)]
        settings.exclude_modules = "|".join(left_out) or None
        # In the model's own dtype: DeepSpeed keeps the float32 master copies, as for all other weights.
        try:
            return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lora: peft refuses these settings: {error}") from error

    def _load(self, folder: Path, excluded: Sequence[str]) -> Any:
        if not (file := folder / "adapter_model.safetensors").is_file():
            raise ConfigError(
                f"lora.path: {folder} has no adapter_model.safetensors; a folder that peft saved would work"
            )
        try:
            settings = peft.LoraConfig.from_pretrained(folder)
            settings.lora_dropout, settings.inference_mode = self._config.dropout, False
            if isinstance(settings.target_modules, set | list):
                asked = {"target_modules": tuple(sorted(settings.target_modules))}
                check_modules(self._model, self._config.model_copy(update=asked))
            loaded = peft.PeftModel.from_pretrained(
                self._model, folder, is_trainable=True, config=settings, autocast_adapter_dtype=False
            )
        except ConfigError as error:
            raise ConfigError(f"lora.path: {folder}: {error}") from error
        except (OSError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            what = shorten(str(error), 300)  # torch names every weight that does not fit
            raise ConfigError(f"lora.path: cannot load the adapters in {folder}: {what}") from error
        with safe_open(file, framework="pt") as opened:
            own = set(opened.keys())
        expected = {name.replace(f".{ADAPTER}.", ".") for name, one in loaded.named_parameters() if one.requires_grad}
        if own != expected:
            unlike = ", ".join(sorted(own ^ expected)[:4])
            raise ConfigError(f"lora.path: the adapters in {folder} are not of this model, for example {unlike}")
        if any(f".{part}." in name for part in excluded for name in expected):
            raise ConfigError(f"lora.path: {folder} has adapters in what model.freezeVisionTower freezes; set it false")
        return loaded

    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def adapted(self) -> list[str]:
        """The last parts of the names of modules that are trained, in the order of the alphabet."""
        paths = (path for path, one in self._model.named_modules() if isinstance(one, LoraLayer | ModulesToSaveWrapper))
        return sorted({_last(path.replace(".base_layer", "")) for path in paths})

    def pushed(self) -> list[Weight]:
        """The weights that engines get: merged, under the names of the model without adapters, or only the adapters."""
        return factors(self._model) if self._config.push == "adapters" else merged(self._model)

    def _check_complete(self) -> None:
        """Check that engines get all that is trained: peft has kinds of adapters that are not known here."""
        pushed = {id(parameter) for weight in self.pushed() for parameter in weight.parameters}
        left = [name for name, one in self._model.named_parameters() if one.requires_grad and id(one) not in pushed]
        if left:
            raise ConfigError(
                f"lora.targetModules: {', '.join(left[:4])} would be trained, but cannot be sent to engines: "
                "name modules without these"
            )

    def saved(self) -> list[Weight]:
        """The trained weights, under the names that `save` takes."""
        return [plain(name, parameter) for name, parameter in self._peft.named_parameters() if parameter.requires_grad]

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the adapters, and where their model came from, for `PeftModel.from_pretrained`."""
        # By default peft asks the hub whether the model's embeddings were resized.
        self._peft.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        (folder / "README.md").unlink()  # peft's empty template of a model card

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it, the model is the initial one, in evaluation mode.

        peft's own context manager also clears `requires_grad` of parameters, on which DeepSpeed's hooks rely.
        """
        layers = [module for module in self._model.modules() if isinstance(module, LoraLayer | ModulesToSaveWrapper)]
        was_training = self._model.training
        self._model.eval()
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False
            self._model.train(was_training)


def add_adapters(model: Any, config: TrainerConfig) -> Adapters | None:
    """Put the job's adapters into `model`, see `Adapters`; None without `lora`. ConfigError also if they cannot go."""
    if config.lora is None:
        return None
    excluded = list(vision.tower(model) if config.model.freeze_vision_tower else vision.left_out(model))
    adapters = Adapters(
        model, config.lora, revision=config.model.revision, seed=config.training.seed, excluded=excluded
    )
    if config.pushes_adapters:
        vision.check_adapters(model)
    return adapters


def check_modules(model: Any, config: LoraConfig) -> None:
    """Check that the modules that `config` names exist and can be trained. ConfigError names the field."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    ends = {model.get_input_embeddings(), head}
    is_tied = len({id(layer.weight) for layer in ends}) == 1
    idle = without_adapters(model)
    linear = {path: module for path, module in modules.items() if isinstance(module, _KINDS) and module is not head}
    owners = {
        path: module for path, module in modules.items() if next(module.parameters(recurse=False), None) is not None
    }
    for field, asked, having in (
        ("targetModules", config.target_modules, linear),
        ("modulesToSave", config.modules_to_save, owners),
    ):
        for name in asked:
            if name == ALL_LINEAR:
                continue
            # peft compares names in this way.
            found = [
                module
                for path, module in modules.items()
                if path.endswith(name if having is owners else f".{name}") or path == name
            ]
            names = ", ".join(
                sorted({_last(path) for path, module in having.items() if not (is_tied and module in ends)})
            )
            if not found:
                raise ConfigError(f"lora.{field}: the model has no module {name}; it has {names}")
            if is_tied and any(part in ends for module in found for part in module.modules()):
                raise ConfigError(
                    f"lora.{field}: {name} has the weight that the model's input and output layers share "
                    "(tie_word_embeddings). Engines load it once, but trained in one layer it would differ in the "
                    f"other. Others would work: {names}"
                )
            if having is linear and name in idle:
                raise ConfigError(
                    f"lora.targetModules: an adapter of {name} would take no part in a {model.config.model_type}, "
                    f"which uses that layer in a way of its own; leave {name} out, as {ALL_LINEAR} does"
                )
            if having is linear and head in found:
                raise ConfigError(
                    f"lora.targetModules: {name} computes logits and cannot have an adapter; "
                    f"modulesToSave: [{name}] would work"
                )
            if having is linear and not all(isinstance(module, _KINDS) for module in found):
                raise ConfigError(
                    f"lora.targetModules: {name} is not a linear layer; {names} would work, or {name} in modulesToSave"
                )


def without_adapters(model: Any) -> list[str]:
    """Names of linear layers in which an adapter would take no part, or that return more than peft's layer does."""
    linear = ((path, type(module)) for path, module in model.named_modules() if isinstance(module, _KINDS))
    own = {_last(path) for path, kind in linear if kind.__module__.startswith("transformers.models.")}
    return sorted(own.union(_READ_PAST.get(model.config.model_type, ())))


def output_layers(model: Any) -> list[nn.Module]:
    """The layers that compute logits: the model's own and, with modulesToSave, its trained copy."""
    head = model.get_output_embeddings()
    return [head.original_module, *head.modules_to_save.values()] if isinstance(head, ModulesToSaveWrapper) else [head]


def _last(path: str) -> str:
    return path.rpartition(".")[2]
