"""Activations and optimizer states moved to host memory, and the error of a device that ran out of its own."""
