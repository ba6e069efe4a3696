"""Text tables, timelines and plots of results."""
