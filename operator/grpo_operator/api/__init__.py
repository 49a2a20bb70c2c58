"""The GRPOJob as users see it: the models of spec and status, the CRD and every public name."""
