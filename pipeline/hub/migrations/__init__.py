"""How the hub's database came to its present schema, step by step."""
