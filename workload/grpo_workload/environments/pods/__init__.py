"""Sessions on environment pods: the server of a pod, and the rank's side."""
