"""The page's listener: the daemon's routes over TCP, for one user's browser, and locked for everybody else.

`gate` says who may do what, `front` goes by it, `listener` binds, `peers` knows whose a connection is, `opening` opens
and closes the whole.
"""
