"""The HTTP server of the hub, the receiver and the completion server: uvicorn, with limits that
keep slow or hostile clients from using up its memory and connections."""
