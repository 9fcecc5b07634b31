"""The HTTP server that the hub, the receiver and the completion server use: uvicorn, with limits
for clients that misbehave."""
