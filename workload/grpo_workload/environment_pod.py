"""The process of an environment pod: `python -m grpo_workload.environment_pod`."""

import sys

from grpo_workload.environments.pods.program import main

if __name__ == "__main__":
    sys.exit(main())
