"""Pure: jobs for engines that place work themselves."""
