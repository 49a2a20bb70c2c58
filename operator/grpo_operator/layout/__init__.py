"""Which pods a job has and what each child object contains. Pure."""
