"""What the daemon's answers hold: their keys, and which of them may be unknown.

Keys are only ever added, so whoever reads an answer passes over those it does not know. `docs/reference/json.md` says
what they mean; `openapi` makes schemas of these.
"""
