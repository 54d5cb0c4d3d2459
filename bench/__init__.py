"""What things cost, always beside a floor measured in the same run. `make bench` prints it; nothing here is a test."""
