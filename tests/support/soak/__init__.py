"""A soak of the operator: random work and random faults on a real control plane, and what must have come of them."""
