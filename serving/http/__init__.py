"""The HTTP server of the hub, the receiver and the completion server. It is uvicorn with limits, so
that slow or hostile clients cannot use up its memory and connections."""
