"""Planted faults: mistakes that a change could introduce, each with the tests that should catch it first.

`scripts/plant-faults` plants them one at a time in a copy of the working tree and reports which test catches each. The
areas (`core.py`, `leases.py` and so on) are plain data; `table.py` has all of them.
"""
