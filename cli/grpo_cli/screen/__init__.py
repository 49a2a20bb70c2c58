"""A job as a person sees it, as text. Pure."""
