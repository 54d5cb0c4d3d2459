"""Pure: which jobs start, where, and why the others wait."""
