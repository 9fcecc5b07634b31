"""The embedded hub: git repositories and webhooks, with the API of the Hugging Face Hub."""
