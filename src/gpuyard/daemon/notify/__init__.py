"""Pure: who is notified of which events, and the text of messages."""
