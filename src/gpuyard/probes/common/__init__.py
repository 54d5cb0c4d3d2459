"""What the probes of several vendors share."""
