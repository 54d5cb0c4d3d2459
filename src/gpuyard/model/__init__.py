"""The pure heart: no clock, no IO, no threads, no logging, no randomness."""
