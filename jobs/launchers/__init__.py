"""The implementations of `jobs.launcher.Launcher`. There is only one: `local` runs jobs on this
machine."""
