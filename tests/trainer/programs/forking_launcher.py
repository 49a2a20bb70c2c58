"""A launcher that forks its ranks: forking_launcher.py SCRIPT TIMING, the ranks' program and a Timing as JSON.

It is itself forked from a process that has loaded what ranks load (`support.trainer.rank_server`).
"""

import json
import sys

from forks import ForkedPython

from grpo_workload.launcher import rank_processes
from grpo_workload.launcher.launch import exit_now, main
from grpo_workload.launcher.peers import Timing

_, script, timing = sys.argv
rank_processes.Popen = ForkedPython  # type: ignore[attr-defined, assignment]  # the launcher's own alone
exit_now(main([sys.executable, script], Timing(**json.loads(timing))))
