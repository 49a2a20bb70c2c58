"""Trials before training: of the model as it was loaded, and of the memory that a micro-batch takes."""
