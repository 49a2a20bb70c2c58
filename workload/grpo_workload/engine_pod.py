"""The first process of an engine pod: `python -m grpo_workload.engine_pod`."""

import sys

from grpo_workload.pod.engine_main import main

if __name__ == "__main__":
    sys.exit(main())
