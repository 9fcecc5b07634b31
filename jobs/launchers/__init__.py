"""The launchers: where a job's process can run. `local` runs it on this machine."""
