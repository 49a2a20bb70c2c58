"""Everything that talks to the world: the watch, the queue, the API server, the launchers."""
