"""One module per place a job can run."""
