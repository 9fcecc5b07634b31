"""A store on SQLite and on Postgres, one cluster for all of these tests."""

from tests.jobs_fixtures import clock, postgres_server, store, store_url

__all__ = ["clock", "postgres_server", "store", "store_url"]
