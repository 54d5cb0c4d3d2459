"""Pure: which assets to load, move and drop, and in which order to render."""
