"""Faces: the command line now, a terminal view and a web page later."""
