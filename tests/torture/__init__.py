"""The torture run: random faults against a real daemon with real jobs, and checks of what came out
(docs/internals/tests.md)."""
