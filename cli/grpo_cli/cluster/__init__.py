"""Requests to the API server and to the launchers of a job."""
