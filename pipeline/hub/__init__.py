"""The embedded hub: git repositories and webhooks behind the Hugging Face API."""
