"""What rewards pay for."""
