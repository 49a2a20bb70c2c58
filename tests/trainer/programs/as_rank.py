"""as_rank.py PROGRAM ARGUMENT...: runs a program as a rank on a CPU.

Its variables are set before it imports anything. It leaves the process group before it ends: gloo's threads may crash
an interpreter that ends under them: "terminate called without an active exception", and exit code -6 from a rank whose
work was done.
"""

import os
import runpy
import sys

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

environment.prepare(Device.CPU, os.environ)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

from grpo_workload.ranks.collectives import leave  # noqa: E402  # imports torch, which reads variables

leave()
