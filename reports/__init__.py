"""The report of the runs that are committed here: `python -m reports`. Its builder is `lmsys.reports`."""
