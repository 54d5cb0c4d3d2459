"""Notifications: who gets which events, the text of the messages, and their delivery."""
