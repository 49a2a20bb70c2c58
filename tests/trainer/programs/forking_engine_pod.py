"""An engine pod on CPUs whose vLLM forks its workers: forking_engine_pod.py, without arguments.

Fresh workers would each load vLLM again, in 16 s of CPU. vLLM forks by default, but not on CPUs, where a variable makes
fresh processes load the OpenMP library that binds threads to cores. Tests bind none.

The pod and vLLM's server are processes as the product starts them; with arguments, this is the server.
"""

import os
import runpy
import sys
from typing import Any

from grpo_workload.pod import engine_main, vllm_command


def serve() -> None:
    """Run vLLM's server, with its arguments from the command line."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "vLLM no longer sets what this changes"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        serve()
    else:
        vllm_command.SERVER = (sys.executable, __file__)  # type: ignore[assignment]
        sys.exit(engine_main.main())
