"""Pure: the progress and figures that programs print, or write into their progress file."""
