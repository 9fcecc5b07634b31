"""The stack: starts the services as child processes, watches them, and records them for other
commands; the gateway in front of several servers; the webhooks that report pushes to the
receiver."""
