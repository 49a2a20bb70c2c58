"""`python -m grpo_cli`."""

from grpo_cli.main import main

main()
