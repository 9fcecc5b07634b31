"""Makes jobs from the settings and submits them, runs the job runner, and does the work that
follows the end of a job."""
