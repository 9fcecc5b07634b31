"""A model that follows its data. This package joins jobs, serving and receiver to one product."""
