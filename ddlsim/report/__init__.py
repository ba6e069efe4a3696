"""Printed reports, timelines and figures of results."""
