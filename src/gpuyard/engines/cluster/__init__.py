"""Engines that place work themselves: what is sent there, how it is asked about, and what runs on their nodes."""
