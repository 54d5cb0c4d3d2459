"""Carry out the plan: assets in RAM and VRAM, lent to workers."""
