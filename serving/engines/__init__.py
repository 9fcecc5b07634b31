"""The engines that compute tokens. Each one implements `serving.engine.Engine`."""
