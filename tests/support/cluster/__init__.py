"""Jobs on the devcluster."""
