"""Pure: totals, causes of failures, and rows of charts for reports and the timeline."""
