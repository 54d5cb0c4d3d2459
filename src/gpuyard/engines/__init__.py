"""Where programs run: each engine starts them, watches over them, and says how they ended."""
