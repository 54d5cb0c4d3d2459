"""The queue on disk: one SQLite database. No other room speaks SQL."""
