"""Sessions of tools and environments on real processes."""

import os

from grpo_spec.trainer import TrainerConfig
from grpo_workload.environments.sessions import ProcessSessions

USER = "support.trainer.user_tools"
COUNTER = {"name": "counter", "factory": f"{USER}:Counter", "params": {"start": 3}}


def start(*tools, environments=(), wants_reward=False, wants_state=False, environ=None):
    """Start the processes of tools, by name in `user_tools` or as the job has them, and of environments."""
    config = {
        "model": {"name": "unused"},
        "dataset": {"name": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {"maxSteps": 1},
        "generation": {"engine": "vLLM"},
        "tools": [{"function": f"{USER}:{tool}"} if isinstance(tool, str) else tool for tool in tools],
        "environments": list(environments),
    }
    return ProcessSessions(
        TrainerConfig.model_validate(config), environ or os.environ, wants_reward=wants_reward, wants_state=wants_state
    )
