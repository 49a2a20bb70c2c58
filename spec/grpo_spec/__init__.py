"""The spec of a job and the contract with the pods: pydantic models. No torch, no I/O, no other room."""
