"""The controller: its steps decide, claim, start and record; user requests change jobs and the queue."""
