"""One module per engine that can hold a release."""
