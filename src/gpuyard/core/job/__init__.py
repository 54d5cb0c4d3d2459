"""Pure: what a job is, its states, how it is submitted, retried and selected."""
