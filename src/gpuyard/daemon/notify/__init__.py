"""Notifications: `publish` picks what to report, `delivery` queues it, a child process sends each message."""
