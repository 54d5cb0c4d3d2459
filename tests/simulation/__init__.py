"""A simulated machine under the real controller: seeded scenarios, crashes between any two port calls, invariants."""
