"""Notifications: `publish` picks what to report, `delivery_thread` queues it, a child process sends each message."""
