"""The pods of a job, and the content of each child object. Pure."""
