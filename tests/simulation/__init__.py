"""A simulated machine with real control on top: seeded stories, crashes between any two port calls, invariants."""
