"""Pure: totals, hours and rows for reports and the timeline."""
