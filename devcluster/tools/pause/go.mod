module grpo.local/devcluster/pause

go 1.26.0
