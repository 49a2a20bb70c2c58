"""Log-probabilities and entropies of completion tokens, computed inside the model's output layer."""
