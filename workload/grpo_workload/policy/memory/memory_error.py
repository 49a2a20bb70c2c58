"""Messages of a rank when a micro-batch does not fit into its device's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_workload.algorithm.micro_batch import MicroBatch

_REMEDIES = (
    "parallelism.gradientCheckpointing, offloadActivations, zeroStage 3, or a smaller share of the GPU for vLLM "
    "(generation.gpuMemoryUtilization) leave training more memory"
)


@contextmanager
def explained_memory(batch: MicroBatch) -> Iterator[None]:
    """Within it, running out of the device's memory raises `memory_error` of the batch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise memory_error(batch, error) from error


class MicroBatchMemoryError(RuntimeError):
    """A micro-batch of several sequences does not fit: smaller ones may."""


class SequenceMemoryError(RuntimeError):
    """A single sequence does not fit."""


def memory_error(batch: MicroBatch, error: BaseException) -> RuntimeError:
    """Describe an out-of-memory error in the passes over `batch`; a MicroBatchMemoryError if a smaller one may fit."""
    if batch.num_sequences == 1:
        return SequenceMemoryError(
            f"training ran out of memory on a single sequence of {batch.num_tokens} tokens, so smaller micro-batches "
            f"would not help; lower training.maxCompletionLength or generation.maxModelLen; {_REMEDIES}: {error}"
        )
    return MicroBatchMemoryError(
        f"training ran out of memory on a micro-batch of {batch.num_tokens} tokens in {batch.num_sequences} sequences; "
        f"lower training.maxTokensPerMicroBatch; {_REMEDIES}: {error}"
    )
