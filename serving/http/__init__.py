"""The HTTP server under hub, receiver and server: uvicorn, and limits for rude clients."""
