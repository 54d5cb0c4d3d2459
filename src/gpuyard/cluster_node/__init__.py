"""Programs that run on the nodes of a cluster, beside a job."""
