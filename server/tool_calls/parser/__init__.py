"""Incremental parsers: an answer's text into content, reasoning and tool calls."""
