"""The policy under DeepSpeed and its optimizer step, with the reference model, weight decay and a check of numbers."""
