"""From a webhook to an answer."""
