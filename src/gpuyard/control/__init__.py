"""What the daemon does: a step observes, decides, claims, starts and records; requests change what people ask for."""
