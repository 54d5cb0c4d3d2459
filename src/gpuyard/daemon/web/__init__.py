"""The web page's listener: the daemon's routes over TCP for one user's browser, locked for everyone else.

`access_rules` decides who may do what, `page_server` applies it, `peer_user` finds the user of a connection, and
`open_page` binds the socket, and opens and closes the whole.
"""
