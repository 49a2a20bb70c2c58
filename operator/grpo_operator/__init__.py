"""The Kubernetes half of grpo-operator: from a GRPOJob to StatefulSets, and from their pods back to a truthful status."""
