"""Answers requests in OpenAI's format with the live release."""
