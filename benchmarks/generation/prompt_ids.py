"""Plays episodes on a vLLM inside this process, and compares at each turn the tokens it was asked for with ours.

    python -m benchmarks.generation.prompt_ids --family qwen2_5 --turns 20000 --output prompt_ids_cpu.jsonl

Turns are any text, calls, parallel and malformed ones (`benchmarks.generation.odd_turns`); a real environment in
processes answers with any text. Tokens that begin a turn are the engine's own samples, which no tokenizer would write;
the others replace what it samples, as random models rarely call. After each round of episodes, what the engine says
of its requests (`prompt_token_ids` of its outputs, and the tokens that it has sampled) is compared with what is trained
on: the tokens before each turn, and those of each turn, as the loss has them. Appends a JSON line to OUTPUT.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import ROOT
from benchmarks.common.runs import about, append, set_alone
from benchmarks.common.scripted import replace
from benchmarks.generation.odd_turns import STOP, OddModel
from grpo_spec.contract import Device
from grpo_workload.ranks import environment

FAMILIES = {  # template of TRL's, tokens that end a turn, further special tokens
    "hermes": (None, ["<|im_end|>"], []),
    "qwen2_5": ("qwen2_5", ["<|im_end|>"], []),
    "qwen3": ("qwen3", ["<|im_end|>"], []),
    "qwen3_5": ("qwen3_5_think", ["<|im_end|>"], []),
    "llama3_1": ("llama3_1", ["<|eot_id|>"], ["<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "glm4moe": ("glm4moe", ["<|endoftext|>", "<|observation|>"], ["<|user|>", "<|assistant|>"]),
}
VOCABULARY, LENGTH, CONTEXT = 1500, 500, 800
PROMPTS, GENERATIONS = 8, 64  # of a round

Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens before it, and its own."""


@click.command(help=__doc__)
@click.option("--family", type=click.Choice([*FAMILIES]), required=True)
@click.option("--turns", default=20000, show_default=True)
@click.option("--seconds", default=600.0, show_default=True, help="Begin no round after these.")
@click.option("--seed", default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(family: str, turns: int, seconds: float, seed: int, output: Path) -> None:
    set_alone()
    environment.prepare(Device.CPU, os.environ)
    line: dict[str, Any] = about("benchmarks.generation.prompt_ids", family=family, turns=turns, seed=seed)
    line |= {"family": family, "wanted": turns}
    begun = time.monotonic()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        rounds = play(Path(folder), family, seed)
        while found["turns"] < turns and time.monotonic() < begun + seconds:
            found.update(next(rounds))
            print(round(time.monotonic() - begun), dict(found), flush=True)
        rounds.close()
    line |= dict(found) | {"mismatches": found["mismatches"], "seconds": round(time.monotonic() - begun)}
    append(output, line)
    click.echo(json.dumps(line))


def play(folder: Path, family: str, seed: int) -> Generator[Counter[str]]:
    """Play rounds of episodes; yield what was counted in each."""
    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.algorithm.samples import Prompt
    from grpo_workload.environments.processes import Processes
    from grpo_workload.environments.sessions import RankSessions
    from grpo_workload.generation.colocate import ColocateGenerator
    from grpo_workload.training.start_episodes import make_episodes

    tokenizer, ends = make_model(folder, family)
    config = TrainerConfig.model_validate(spec(folder, seed))
    sessions = RankSessions(Processes(config.tools, config.environments, os.environ), config, wants_reward=False)
    sessions.ready()
    generator = ColocateGenerator(config, Device.CPU, make_episodes(config, tokenizer, sessions, []))
    asked = watch(generator, tokenizer, ends, seed)
    question = [{"role": "user", "content": "Say something, or nothing: 日本語."}]
    rendering = {"add_generation_prompt": True}
    ids = tuple(tokenizer.apply_chat_template(question, return_dict=False, **rendering))
    try:
        for number in range(10**9):
            prompts = [
                Prompt(index=place, text=question, token_ids=ids, seed=number * PROMPTS + place, rendering=rendering)
                for place in range(PROMPTS)
            ]
            groups = generator.generate(prompts, GENERATIONS)
            played = [(one, completion) for one, group in zip(prompts, groups, strict=True) for completion in group]
            yield compare(played, asked, tokenizer)
            asked.clear()
    finally:
        generator.close()


def compare(played: Sequence[Any], asked: dict[str, list[list[int]]], tokenizer: Any) -> Counter[str]:
    """Compare what is trained on with what the engine has been asked, and has sampled; return what was counted."""
    from grpo_workload.algorithm.micro_batch import micro_batch
    from grpo_workload.algorithm.samples import Sample

    trained: Counter[Turn] = Counter()
    found: Counter[str] = Counter()
    for prompt, completion in played:
        batch = micro_batch([Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0)])
        row = batch.input_ids_1N[0].tolist()
        begin = len(row) - len(completion.token_ids)
        in_loss = {
            place + 1 for place, own in zip(batch.places_K.tolist(), batch.mask_BC[0].tolist(), strict=True) if own
        }
        is_own = [place in in_loss for place in range(begin, len(row))]
        spans = [*completion.episode.context, (len(is_own), len(is_own))]
        start = 0
        for stop, following in spans:
            is_whole = all(is_own[start:stop]) and not any(is_own[stop:following])
            found["mismatches"] += not is_whole
            turn = row[begin + start : begin + stop]
            trained[tuple(row[: begin + start]), tuple(turn)] += 1
            again = tokenizer(tokenizer.decode(turn), add_special_tokens=False)["input_ids"]
            found["turns"] += 1
            found["turns that a tokenizer would write otherwise"] += again != turn
            start = following
        episode = completion.episode
        found["episodes"] += 1
        found["tokens trained"] += sum(is_own)
        found["tokens read between turns"] += len(is_own) - sum(is_own)
        found["calls"] += episode.num_calls
        found["failed calls"] += episode.num_failed_calls
        found["parallel calls"] += sum(len(one.get("tool_calls", ())) > 1 for one in episode.messages)
        found["lost"] += episode.lost is not None
    sampled = Counter((tuple(before), tuple(own)) for before, own in asked.values())
    found["tokens sampled"] = sum(len(own) for _, own in asked.values())
    found["mismatches"] += (sampled - trained).total() + (trained - sampled).total()
    return found


def watch(generator: Any, tokenizer: Any, ends: list[int], seed: int) -> dict[str, list[list[int]]]:
    """Let a model say odd turns; return what will hold, by request, its prompt and tokens as the engine says them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from grpo_workload.environments.chat_template import ChatTemplate

    model = OddModel(ChatTemplate(tokenizer), ends, seed)
    lines: dict[str, list[int | None]] = {}
    asked: dict[str, list[list[int]]] = {}
    add_request, update, step = Scheduler.add_request, Scheduler.update_from_output, generator._llm.llm_engine.step

    def add(scheduler: Any, request: Any) -> None:
        lines[request.request_id] = model.turn()
        add_request(scheduler, request)

    def update_from_output(scheduler: Any, scheduled: Any, output: Any) -> Any:
        replace({name: lines[name] for name in scheduled.num_scheduled_tokens}, scheduler.requests, output)
        return update(scheduler, scheduled, output)

    def watched() -> Any:
        outputs = step()
        for one in outputs:
            before, own = asked.setdefault(one.request_id, [list(one.prompt_token_ids), []])
            assert before == one.prompt_token_ids
            own += one.outputs[0].token_ids
        return outputs

    Scheduler.add_request, Scheduler.update_from_output = add, update_from_output
    generator._llm.llm_engine.step = watched
    return asked


def make_model(folder: Path, family: str) -> tuple[Any, list[int]]:
    """Write a random model with a family's template; return its tokenizer, and the tokens that end a turn."""
    from transformers import LlamaForCausalLM

    from grpo_workload.environments.chat_template import ChatTemplate
    from support.trainer.tiny_model import make_tiny_model

    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    first = OddModel(ChatTemplate(make_tokenizer(family, texts)), [], 0)
    tokenizer = make_tokenizer(family, [*texts, *(first.calling() for _ in range(2000))])  # so turns are short
    ends = tokenizer.convert_tokens_to_ids(FAMILIES[family][1])
    model = LlamaForCausalLM.from_pretrained(make_tiny_model(folder))
    model.resize_token_embeddings(len(tokenizer))
    model.config.max_position_embeddings = CONTEXT
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer, ends


def make_tokenizer(family: str, texts: Sequence[str]) -> Any:
    """Return a tokenizer whose tokens are those that are frequent in texts, with a family's template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl import chat_template_utils

    from support.trainer.tiny_model import SPECIAL_TOKENS
    from support.trainer.tool_template import TOOL_TEMPLATE

    name, ends, further = FAMILIES[family]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(dict.fromkeys([*SPECIAL_TOKENS, *ends, *further])),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=ends[0], pad_token=ends[0])
    templates = Path(chat_template_utils.__file__).parent / "chat_templates"
    tokenizer.chat_template = TOOL_TEMPLATE if name is None else (templates / f"{name}.jinja").read_text()
    if name == "llama3_1":
        tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    return tokenizer


def spec(folder: Path, seed: int) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "model": {"path": str(folder), "dtype": "float32"},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "environments": [{"name": "odd", "factory": "benchmarks.generation.odd_turns:Odd", "memoryLimit": "2Gi"}],
        "episodes": {"maxToolResponseTokens": 60},
        "training": {"maxCompletionLength": LENGTH, "seed": seed, "stop": [STOP]},
        "generation": {
            "maxModelLen": CONTEXT,
            "kvCacheMemory": "512Mi",
            "engineArgs": {"enforce_eager": True, "async_scheduling": False, "max_num_seqs": PROMPTS * GENERATIONS},
        },
    }


if __name__ == "__main__":
    main()
