"""Whole steps, their layers and their sampling."""
