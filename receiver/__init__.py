"""Receives webhooks: checks the proof of each delivery, calls the handler, and answers. This
package can be used alone, as a library."""
