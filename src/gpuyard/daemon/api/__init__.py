"""The handlers of the routes under `/v1`."""
