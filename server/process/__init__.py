"""Processes: the launcher, its children and one API process."""
