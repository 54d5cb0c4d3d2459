"""`gpuyard top`: devices, the queue and a job's log, live in a terminal.

Pure functions turn the daemon's answers into lines (`device_view`, `queue_view`, `job_actions`).
`streams` stores answers in `screen_state`, and `app` draws it and handles keys."""
