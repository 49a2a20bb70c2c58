"""The first process of a trainer pod: `python -m grpo_workload.trainer_pod`."""

from grpo_workload.launcher.launch import exit_now, main

if __name__ == "__main__":
    exit_now(main())
