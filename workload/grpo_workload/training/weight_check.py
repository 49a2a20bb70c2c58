"""Compares engines with the trainer after a push: log-probabilities that both give the same fixed tokens.

Digests prove that weights arrive (`generation.writes`), not that they mean the same: adapters may be merged in another
way than training applies them, and vLLM may compute a model differently. Sampling goes on without an error then, from
another model than the one that is trained. How much of a difference is rounding depends on the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.micro_batch import MicroBatch, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.generation.base import Generator
from grpo_workload.policy.model.rounding import rounded_anew
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather
from grpo_workload.weights.differ import WeightsDifferError

logger = logging.getLogger(__name__)

TEXT = """A train leaves the station at 9:40 and travels 150 km at 60 km/h. When does it arrive? First, we divide the \
distance by the speed: 150 / 60 = 2.5 hours, which is 2 hours and 30 minutes. Then we add this to the time of departure:
9:40 + 2:30 = 12:10. So the train arrives at 12:10.

def arrival(hours: int, minutes: int, distance: float, speed: float) -> str:
    total = 60 * hours + minutes + round(60 * distance / speed)
    return f"{total // 60 % 24}:{total % 60:02}"
"""
MAX_TOKENS = 256

BOUNDS = {"float32": 0.01, "bfloat16": 0.3, "float16": 0.3}
"""Largest mean |difference| of log-probabilities in nats, by model.dtype, whatever the model's own noise."""
FLOORS = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.02}
"""Differences that no model need explain. Where all is well it is 1e-5 in float32 (with TF32: more), 0.01 to
0.03 in bfloat16, and up to 0.1 for experts, which rounding may choose differently."""
NOISE_FACTOR = 6.0
"""Engine and trainer may differ by this many times what rounding does to the trainer's log-probabilities."""
QUANTIZED_BOUND = 1.0
"""The bound where vLLM quantizes the weights (engineArgs.quantization)."""


class WeightCheck:
    """The fixed tokens, and what was measured at the last check."""

    def __init__(self, config: TrainerConfig, tokenizer: Any) -> None:
        limit = min(MAX_TOKENS, (config.generation.max_model_len or MAX_TOKENS + 1) - 1)
        self._token_ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:limit]
        dtype, generation = config.model.dtype, config.generation
        self._bound = QUANTIZED_BOUND if generation.is_quantized else BOUNDS[dtype]
        # With adapters pushed, an engine has the checkpoint's own weights, which may be quantized.
        self._floor = self._bound if generation.is_coarser or config.pushes_adapters else FLOORS[dtype]
        self._last: tuple[int, float] | None = None

    def run(self, policy: Policy, generator: Generator, version: int) -> None:
        """Compare every engine with the policy, whose weights of `version` were just pushed; collective.

        Raises:
            WeightsDifferError: on every rank; names the engine that differs most, by how much, and the bound.
        """
        if not (found := self.differences(policy, generator)):
            return
        name, difference = max(found.items(), key=lambda one: math.inf if math.isnan(one[1]) else one[1])
        bound = self._floor
        if not difference <= bound:  # NaN compares as neither
            bound = min(self._bound, max(bound, NOISE_FACTOR * self.noise(policy)))
        if not difference <= bound:
            raise WeightsDifferError(self._describe(name, difference, bound, version))
        logger.info("after the push of version %d, log-probabilities differ by %.2g at most", version, difference)
        self._last = version, difference

    def differences(self, policy: Policy, generator: Generator) -> dict[str, float]:
        """Return by how much each engine's log-probabilities differ from the policy's, in nats (mean); collective."""
        own = policy.logprobs(_batch(self._token_ids))[0].tolist()
        theirs = {name: _mean_difference(own, values) for name, values in generator.logprobs(self._token_ids).items()}
        return {name: difference for one in gather(theirs) for name, difference in one.items()}

    def noise(self, policy: Policy) -> float:
        """Return by how much rounding moves the policy's own log-probabilities, in nats (mean); collective."""
        batch = _batch(self._token_ids)
        own = policy.logprobs(batch)[0].tolist()
        with rounded_anew(policy.module):
            moved = policy.logprobs(batch)[0].tolist()
        return max(gather(_mean_difference(own, moved)))  # all ranks agree on it

    def _describe(self, name: str, difference: float, bound: float, version: int) -> str:
        if self._last is None:
            before = "This is the first push: vLLM and transformers may compute this model differently"
        else:
            version_before, difference_before = self._last
            before = (
                f"After the push of version {version_before} it was {difference_before:.2g}, so what was trained since "
                "does not arrive as it is"
            )
        return (
            f"after the push of version {version}, {name} gives {len(self._token_ids)} fixed tokens log-probabilities "
            f"that differ by {difference:.2g} nats on average from the trainer's; at most {bound:.2g} is rounding. "
            f"{before}. The weights themselves agree, so no layer can be named"
        )


def _batch(token_ids: Sequence[int]) -> MicroBatch:
    """Return one sequence whose completion is all tokens but the first."""
    rest = tuple(token_ids[1:])
    completion = Completion(
        token_ids=rest, logprobs=(0.0,) * len(rest), text="", finish_reason="length", weight_version=0
    )
    prompt = Prompt(index=-1, text="", token_ids=(token_ids[0],))
    return micro_batch([Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0)])


def _mean_difference(own: Sequence[float], theirs: Sequence[float]) -> float:
    differences = [abs(one - other) for one, other in zip(own, theirs, strict=True)]
    return sum(differences) / len(differences)
