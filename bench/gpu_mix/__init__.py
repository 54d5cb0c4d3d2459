"""Real programs of five frameworks on one NVIDIA card, with nothing declared: one at a time, and through the queue."""
