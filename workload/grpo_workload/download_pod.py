"""The process of a download pod: `python -m grpo_workload.download_pod '{"model": "Qwen/Qwen3-8B"}'`."""

import sys

from grpo_workload.data.download import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
