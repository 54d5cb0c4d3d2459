"""Pure: who is notified about what, and in which words."""
