"""The daemon, one per user: the scheduler loop, the HTTP server and API, the web page, metrics, notifications."""
