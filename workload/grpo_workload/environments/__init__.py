"""Tools and environments: the processes that they run in, and how calls and results become tokens."""
