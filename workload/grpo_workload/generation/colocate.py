"""vLLM inside every rank of the trainer, on the trainer's own device.

Each rank has an engine, or a slice of one. With generation.tensorParallel n, n neighbouring ranks of a pod hold one
copy of the model. They sample the prompts of all n ranks together and draw the same tokens, since each prompt has its
seed. Weights go from the module to the engine within the process. The engine joins the trainer's process group (vLLM's
`external_launcher`), so building it is collective.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_tp_group

from grpo_spec.contract import Device
from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.ahead import AheadSampler
from grpo_workload.generation.asleep import AsleepWatch
from grpo_workload.generation.base import SILENCE, Listener, Weights
from grpo_workload.generation.cache_rest import Rest
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.own_answers import Completions, bare
from grpo_workload.generation.own_engine import build_engine, load_weights
from grpo_workload.generation.own_episodes import OwnEpisodes
from grpo_workload.generation.sleep_cycle import SleepCycle
from grpo_workload.generation.vllm_api import EVALUATION, check_read, engine_prompt, sampling_parameters
from grpo_workload.pod.model_split import takes_text_alone
from grpo_workload.pod.vllm_command import by_device, check_engine_args
from grpo_workload.ranks.loop_thread import LoopThread
from grpo_workload.weights.differ import WeightsAlteredError, WeightsDifferError

# Arguments of vLLM that the trainer relies on: users cannot set them.
_OURS = frozenset(
    {
        "model",
        "revision",
        "dtype",
        "seed",
        "tensor_parallel_size",
        "distributed_executor_backend",
        "logprobs_mode",
        "enable_sleep_mode",
        "enable_return_routed_experts",
    }
    | {
        "data_parallel_size",
        "pipeline_parallel_size",
        "max_model_len",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    }
)


class ColocateGenerator:
    """The vLLM engine of one rank, or the rank's slice of one."""

    def __init__(
        self, config: TrainerConfig, device: Device, episodes: Episodes | None = None, *, rest: Rest | None = None
    ) -> None:
        """Load the engine; collective.

        `episodes` plays those of a job with tools or environments. `rest` is what the engine may take, where no setting
        says it.

        Raises:
            ConfigError: `generation.engineArgs` has an argument that cannot be set, or vLLM refuses the settings.
        """
        generation, training = config.generation, config.training
        check_engine_args(generation.engine_args, _OURS)
        self._rank, self._tensor_parallel = int(os.environ["RANK"]), generation.tensor_parallel
        level = generation.sleep_level
        self._cycle, self._watch = SleepCycle(level), AsleepWatch()
        self._device, self._field = device, config.model.field
        self._version, self._begins_as_loaded = 0, config.begins_as_loaded
        self._sampling = sampling_parameters(training)
        self._can_sleep = device == Device.CUDA and level > 0
        arguments: dict[str, Any] = {
            "model": config.model.source,
            "revision": config.model.revision,
            "dtype": config.model.dtype,
            "seed": training.seed,
            "tensor_parallel_size": self._tensor_parallel,
            "distributed_executor_backend": "external_launcher",
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self._can_sleep,
            "enable_return_routed_experts": training.router_replay,
            "gpu_memory_utilization": generation.gpu_share,
            "kv_cache_memory_bytes": generation.kv_cache_bytes,
            "max_model_len": generation.max_model_len,
            "language_model_only": takes_text_alone(config.model),
        }
        if rest is not None:
            arguments |= rest.arguments()
        self._llm = build_engine(self._field, arguments | by_device(device) | dict(generation.engine_args))
        self._tokenizer = self._llm.get_tokenizer()
        self._ahead: AheadSampler | OwnEpisodes | None = None
        self._episodes, self._evaluations = episodes, dict[float, OwnEpisodes]()  # by temperature
        self._thread = None if episodes is None else LoopThread("episodes")
        if episodes is not None:
            self._ahead = self._play(episodes, self._sampling)
        elif training.max_staleness:
            self._ahead = AheadSampler(self._llm, self._sampling, self._gather, self._rank % self._tensor_parallel)

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """See `Generator.generate`."""
        self._cycle.check_generate()
        if self._ahead is not None:
            return self._ahead.generate(prompts, num_generations, listener, self._version)
        return self._generate(prompts, num_generations, self._sampling, listener)

    def evaluate(
        self, prompts: Sequence[Prompt], num_generations: int, temperature: float, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """See `Generator.evaluate`. The engine has no other requests: what had begun was cut when the ranks trained."""
        self._cycle.check_generate()
        own = self._sampling | {"temperature": temperature}
        if self._episodes is not None:
            if temperature not in self._evaluations:
                self._evaluations[temperature] = self._play(self._episodes, own, cache_salt=EVALUATION)
            return self._evaluations[temperature].generate(prompts, num_generations, listener, self._version)
        return self._generate(prompts, num_generations, own, listener, cache_salt=EVALUATION)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Mapping[str, Any],
        listener: Listener,
        **cache: str,
    ) -> list[list[Completion]]:
        shares = self._gather(
            [(prompt.token_ids, prompt.seed, prompt.images and prompt.images.for_engines()) for prompt in prompts]
        )
        if not (together := [request for share in shares for request in share]):
            return []
        # vLLM numbers its outputs itself, so they are known by their tokens, where these belong to one request alone.
        asked = Counter(token_ids for token_ids, _, _ in together)
        known = {prompt.token_ids: place for place, prompt in enumerate(prompts) if asked[prompt.token_ids] == 1}
        completions = Completions(self._tokenizer, self._version)
        with self._heard(known, listener, completions):
            outputs = self._llm.generate(
                [engine_prompt(token_ids, images) | cache for token_ids, _, images in together],
                [SamplingParams(n=num_generations, seed=seed, **sampling, **bare(sampling)) for _, seed, _ in together],
                use_tqdm=False,
            )
        for (token_ids, _, _), output in zip(together, outputs, strict=True):
            check_read(token_ids, output.prompt_token_ids)
        first = sum(len(share) for share in shares[: self._rank % self._tensor_parallel])
        return [completions.of(output) for output in outputs[first : first + len(prompts)]]

    def begin(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener = SILENCE) -> None:
        """See `Generator.begin`: the next `generate` samples them too, until its own prompts are complete."""
        assert self._ahead is not None, "training.maxStaleness is 0, and there are no episodes"
        self._ahead.begin(prompts, num_generations, listener)

    def sleep(self) -> None:
        """See `Generator.sleep`. On CPUs vLLM cannot sleep, but the rules of the cycle are still checked."""
        level = self._cycle.sleep()
        if level and self._can_sleep:
            self._llm.sleep(level=level)
            self._watch.look()

    def expect_weights(self) -> None:
        """Do nothing: `sync_weights` has nobody to wait for."""

    def sync_weights(self, weights: Weights, version: int) -> None:
        """See `Generator.sync_weights`."""
        # Only weights that the engine still holds can be compared with those that it gets.
        is_initial = version == 0 and self._begins_as_loaded and self._cycle.has_weights
        self._wake(self._cycle.begin_push())
        try:
            load_weights(self._llm, self._field, weights, device=self._device, is_initial=is_initial)
        except (WeightsDifferError, WeightsAlteredError) as error:
            raise type(error)(f"the engine of rank {self._rank} refused its weights: {error}") from error
        self._wake(self._cycle.end_push())
        self._version = version
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache could not be reset: requests still hold blocks of the old weights")
        self._llm.llm_engine.reset_encoder_cache()  # features that the old weights made of images

    def logprobs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """See `Generator.logprobs`. Ranks that share a copy of the model ask together."""
        self._cycle.check_generate()
        (output,) = self._llm.generate(
            [engine_prompt(token_ids)],
            [SamplingParams(max_tokens=1, prompt_logprobs=0)],
            use_tqdm=False,
        )
        rows = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return {f"the engine of rank {self._rank}": [row[token].logprob for token, row in rows]}

    def idle_seconds(self) -> None:
        """See `Generator.idle_seconds`."""

    def engines(self) -> tuple[()]:
        """See `Generator.engines`."""
        return ()

    def left_out(self) -> tuple[()]:
        """See `Generator.left_out`."""
        return ()

    def blame(self, error: Exception) -> Exception:
        """See `Generator.blame`: the engine is part of the rank."""
        return error

    def close(self) -> None:
        """See `Generator.close`. The engine's shutdown destroys the default process group."""
        if self._thread is not None:
            self._thread.close()
        dist.barrier()
        self._llm.llm_engine.engine_core.shutdown()

    def _play(self, episodes: Episodes, sampling: Mapping[str, Any], **cache: str) -> OwnEpisodes:
        assert self._thread is not None
        place = self._rank % self._tensor_parallel
        return OwnEpisodes(self._thread, self._llm, sampling, self._gather, place, episodes, **cache)

    def _gather(self, share: list[Any]) -> list[list[Any]]:
        """Return the lists of every rank that shares this rank's copy of the model, in rank order."""
        if self._tensor_parallel == 1:
            return [share]
        shares: list[list[Any]] = [[] for _ in range(self._tensor_parallel)]
        dist.all_gather_object(shares, share, group=get_tp_group().cpu_group)
        return shares

    @contextmanager
    def _heard(
        self, known: Mapping[tuple[int, ...], int], listener: Listener, completions: Completions
    ) -> Iterator[None]:
        """Tell `listener` what each step of the engine gives, which `LLM.generate` keeps until the last one.

        `known` has the positions of this rank's prompts, by their tokens.
        """
        engine = self._llm.llm_engine
        step = engine.step

        def heard() -> Any:
            outputs = step()
            listener.moved()
            for output in outputs:
                if output.finished and (position := known.get(tuple(output.prompt_token_ids))) is not None:
                    listener.finished(position, completions.of(output))
            return outputs

        engine.step = heard
        try:
            yield
        finally:
            del engine.step

    def _wake(self, tags: list[str]) -> None:
        if tags and self._can_sleep:
            torch.cuda.empty_cache()
            try:
                self._llm.wake_up(tags=tags)
            except RuntimeError as error:
                free = torch.cuda.mem_get_info()[0] / 2**30
                raise RuntimeError(
                    f"vLLM could not take its memory back for {tags[0]}, with {free:.1f} GiB of the GPU free; a "
                    f"smaller generation.kvCacheMemory leaves more: {error}"
                ) from error
