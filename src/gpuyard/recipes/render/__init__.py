"""Render a manifest in one process, with assets that stay in VRAM and RAM within budgets."""
