"""Processes: the launcher, its children, one API process, the start-up report and logs."""
