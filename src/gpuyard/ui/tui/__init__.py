"""`gpuyard top`: devices, the queue and a job's log, live in a terminal.

Pure functions turn the daemon's answers into lines (`device_view`, `queue_view`, `header_view`, `job_pages`).
`daemon_stream` sends requests, `subscriptions` stores answers in `screen_state`, and `app` draws it and handles keys.
"""
