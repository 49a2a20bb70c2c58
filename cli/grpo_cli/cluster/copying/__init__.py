"""Files between this machine and a claim: a folder's operations, the pod that serves them, the copy itself."""
