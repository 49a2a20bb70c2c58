"""The operator's own metrics and the server that exposes them."""
