"""The launchers: each runs the processes of jobs in another place. `local` runs them on this
machine."""
