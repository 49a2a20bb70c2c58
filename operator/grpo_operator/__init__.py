"""The operator: it turns a GRPOJob into StatefulSets and reports the state of their pods in the job's status."""
