"""Answers OpenAI requests from the current release."""
