"""Scripts in Python that call a trainer: what their syntax tree says, and the code that a job takes of them."""
