"""What a person sees of a job, as text. Pure."""
