"""The queue on disk: one SQLite database, the only durable state. Nothing else here speaks SQL."""
