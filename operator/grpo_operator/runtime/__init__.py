"""The ground of passes: the client of the API server, the mirror and its watches, the queue, the Lease, health."""
