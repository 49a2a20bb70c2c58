"""Router replay (R3, arXiv:2510.11370): the trainer sends each token through the experts that the engine chose for it.

Engine and trainer round differently. Where experts nearly tie, they then choose others, by which the log-probability of
a token may change by whole nats. Only the choice is replayed: the weights of the chosen experts are those of the
trainer's own router, so its gradient stays.

Transformers' routers have one form, a class named ...TopKRouter: it takes the `top_k` largest of [N, E] scores by
`torch.topk`. While one is replayed, `torch.topk` returns the given experts and their scores instead.

Shapes: N tokens of a micro-batch, L layers, X experts of a token, E experts of a layer.
"""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import Completion, Prompt

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # vLLM numbers the rows of layers by the same index


class RouterReplay:
    """The routers of a model, which choose the experts that they are told."""

    def __init__(self, model: Any) -> None:
        """Wrap all routers of `model`. ConfigError as `find_routers`."""
        self._experts_NLX: Tensor | None = None
        routers = find_routers(model)
        self._shape = model.config.get_text_config().num_hidden_layers, next(iter(routers.values())).top_k
        for name, router in routers.items():
            self._wrap(router, int(_LAYER.findall(name)[0]))

    def use(self, experts_NLX: Tensor | None) -> None:
        """Replay these experts in the next forward pass, and when checkpointing repeats it in the backward pass.

        Where they are -1, and everywhere if they are None, routers choose by themselves.
        """
        self._experts_NLX = experts_NLX

    def own_choice(self, num_tokens: int) -> Tensor:
        """Return what lets routers choose by themselves for so many tokens, through the same code as a replay."""
        return torch.full((num_tokens, *self._shape), -1, dtype=torch.int16)

    def _wrap(self, router: Any, layer: int) -> None:
        plain = type(router).forward

        def forward(router: Any, *args: Any, **kwargs: Any) -> Any:
            if self._experts_NLX is None:
                return plain(router, *args, **kwargs)
            with _Chosen(self._experts_NLX[:, layer], router.num_experts) as chosen:
                result = plain(router, *args, **kwargs)
            if not chosen.is_used:
                raise _cannot(f"{type(router).__name__} does not choose its experts by torch.topk")
            return result

        router.forward = MethodType(forward, router)


class _Chosen(TorchFunctionMode):
    """Within it, the choice of experts by `torch.topk` is `experts_NX`, where these are not -1."""

    def __init__(self, experts_NX: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts_NX, self._num_experts, self.is_used = experts_NX.long(), num_experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; see the class."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        # Routers with groups of experts first take the best groups, of other shapes.
        if scores.shape[1:] != (self._num_experts,) or result.indices.shape != self._experts_NX.shape:
            return result
        self.is_used = True
        indices_NX = torch.where(self._experts_NX < 0, result.indices, self._experts_NX)
        return torch.return_types.topk((scores.gather(1, indices_NX), indices_NX))


def find_routers(model: nn.Module) -> dict[str, Any]:
    """Return the routers of a model, by name. ConfigError if it has none, or experts with a router of another form."""
    routers = {name: module for name, module in model.named_modules() if _is_router(module)}
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.Module) and not any(map(_is_router, module.children())):
            raise _cannot(f"{type(module).__name__} has no router of the form ...TopKRouter")
    if not routers:
        raise _cannot(f"{type(model).__name__} is no mixture of experts")
    return routers


def check_routed(prompt: Prompt, completion: Completion) -> None:
    """Check that vLLM returned the experts of every token of a completion.

    Raises:
        ConfigError: it has not. vLLM refuses kernels that it knows not to return them; others would return expert 0.
    """
    routed, needed = completion.routed_experts, sum(completion.num_read(prompt)) - 1
    if routed is None or len(routed) < needed:
        found = 0 if routed is None else len(routed)
        raise _cannot(f"vLLM returned the experts of {found} tokens of a sequence, not of {needed}")
    if routed.shape[2] > 1 and not routed[0].any():
        raise _cannot("vLLM's kernel for experts does not tell which ones it chose; another moe_backend may")


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def _cannot(why: str) -> ConfigError:
    return ConfigError(f"training.routerReplay: {why}; routerReplay false would work")
