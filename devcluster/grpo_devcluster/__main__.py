"""Entry point of `python -m grpo_devcluster`."""

from grpo_devcluster.cli import main

main()
