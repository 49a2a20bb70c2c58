"""The next step, as pure functions of the job, its status, the observed pods and the time."""
