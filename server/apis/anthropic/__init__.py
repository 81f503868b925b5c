"""Anthropic's Messages API, translated to a chat request."""
