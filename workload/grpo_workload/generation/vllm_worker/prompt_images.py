"""Lets vLLM's route for completions take images beside a prompt's token ids.

vLLM's own requests with images are chats, of which the server would make the tokens, by its template. Here the trainer
gives tokens with one placeholder for each image, and `vllm_api.check_read` compares what vLLM has made of them.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image

from grpo_workload.generation.vllm_api import IMAGES


def register() -> None:
    """Change vLLM's renderer of requests; vLLM calls this in each of its processes, in some more than once."""
    from vllm.renderers.online_renderer import OnlineRenderer

    plain: Any = OnlineRenderer.preprocess_cmpl
    if plain.__module__ == __name__:
        return

    async def preprocess_cmpl(self: Any, request: Any, prompts: Sequence[Any], **options: Any) -> Any:
        # Taken out: what remains goes to the engine's processes with the parameters of sampling.
        if encoded := (getattr(request, "vllm_xargs", None) or {}).pop(IMAGES, None):
            images = [Image.open(BytesIO(b64decode(one))) for one in encoded]
            prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"image": images}} for ids in prompts]
        return await plain(self, request, prompts, **options)

    OnlineRenderer.preprocess_cmpl = preprocess_cmpl
