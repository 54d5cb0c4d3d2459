"""`gpuyard top`: devices, the queue and a job's log, live in a terminal.

What is seen is made by pure functions from the daemon's answers (`device_view`, `queue_view`, `head_view`, `pages`).
What is asked goes through `link`; `feeds` puts what is heard onto the `board`, and `app` shows it and takes the keys.
"""
